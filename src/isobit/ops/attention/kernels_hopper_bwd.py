"""Gradients of attention on Hopper: class attn/1, with the formulas and chains of `kernels_triton_bwd`.

Two kernels compute dS, each for its own sum: `dq_kernel` sums over keys, `dkv_kernel` over heads and queries.
So no element is added to by two programs, and no order depends on the batch. In both, a program has two
consumer warpgroups with 64 rows each and a producer warp that loads by TMA; when a program is done with an
item of 128 rows, it takes the next one from a counter. Which program that is decides no bit. dk and dv come
first, because with few KV heads they have fewer items than there are SMs: dq starts on the others
(`launch_pdl`).

dq: rows are queries. Items and their blocks of keys are those of the forward (`kernels_hopper_items`). For
every block of keys:

    S = Q K^T,  dP = dO V^T      in flight
    when S is ready:     P = 2^(S c - lse log2e), while dP is in flight
    when dP is ready:    dS = P (dP - delta), dq += dS K

S and dP are chains over D from zero. dq is one chain over all blocks of keys in ascending order, which begin
at multiples of 16 keys. A block that no query of a consumer sees is skipped, and would change nothing. Keys
after a sequence's last may be anything, and 0 NaN is NaN: they are set to zero in shared memory unless TMA
has done so.

dk and dv: rows are keys, of all tiles: P^T and dS^T are computed in the registers from which they are
multiplied. For every block of queries:

    S^T = K Q^T,  dP^T = V dO^T       in flight
    when S^T is ready:     P = 2^(S c - lse log2e), while dP^T is in flight
    when dP^T is ready:    dv += P^T dO, and meanwhile dS = P (dP - delta)
    dk += dS^T Q           complete before the next block: a sum that is in flight from one block to the next
                           makes ptxas wait after every instruction

- S^T and dP^T are chains over D from zero; D is padded with zeros, and steps of zeros change nothing.
- dk and dv are one chain each over the heads of the group, and in each over blocks of queries in ascending
  order, which begin at multiples of 16 positions. A block whose queries see no key of a consumer is skipped,
  and would change nothing.
- Rows of a block that are not queries of the sequence are zeros: TMA fills with zeros outside the tensor, in
  front of its first row too, and rows of packed neighbours, which may be anything, are set to zero in shared
  memory.
- Keys after a sequence's last only affect their own rows, which are not stored.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run
from isobit.kernels.hopper.heads import descriptor, load_box, tile_layout, why_not_tma
from isobit.kernels.hopper.pipeline import (
    ROWS,
    accumulator_layout,
    after,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    kernel,
    mbarrier,
    record,
    reinterpreted,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from isobit.kernels.hopper.softmax import packed, tanh, unpacked
from isobit.kernels.host.temperature import LOG2E
from isobit.ops.attention import kernels_hopper
from isobit.ops.attention.calls import call_of, factors_of, which_tanh
from isobit.ops.attention.kernels_hopper import (
    BY_ROWS,
    CONSUMER_REGISTERS,
    OPTIONS,
    PRODUCER_REGISTERS,
    Ring,
    bounds_of,
    clear,
    columns,
    flags_of,
    offsets,
)
from isobit.ops.attention.kernels_hopper_items import (
    CONSUMERS,
    PLAIN,
    PRODUCER_LAYOUT,
    KeyItem,
    Problem,
    blocks_of_keys,
    blocks_of_queries,
    key_item,
    like,
    read_item,
    read_key_item,
    seen_from,
)
from isobit.ops.attention.kernels_hopper_softcap import bent
from isobit.ops.attention.kernels_triton import count_tiles
from isobit.ops.attention.kernels_triton_bwd import COUNTERS, count_blocks, delta_of

#: dq, by padded D: keys of a block, half as many for the tanh of attn/1, which takes registers. 64, with
#: four stages, are faster at 4 x 2048 (0.360 ms, with delta, instead of 0.373), slower at 2 x 8192 (2.362,
#: 2.322; H200).
DQ_KEYS = {64: 128, 128: 128}

#: dq, by padded D: stages of keys and of values, what fits in 227 KB next to queries and results.
DQ_STAGES = {64: 3, 128: 2}

#: dk and dv, by padded D: queries of a block, as many as registers hold; half as many for the tanh of
#: attn/1.
DKV_QUERIES = {64: 128, 128: 64}

#: The same with the tanh of attn/2. 128 would need 400 registers more than there are.
CAPPED_QUERIES = {64: 64, 128: 64}

#: dk and dv, by padded D: stages of queries; and slots of keys: what fits in 227 KB. Two stages, or four and
#: one slot, take within 1.5 % of the same time at 4 x 2048 and 2 x 8192 (D = 128, H200).
DKV_STAGES, DKV_SLOTS = {64: 4, 128: 3}, 2

#: A tile of results in shared memory: the eight rows of one store are in different banks.
STAGED_TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))

_LOG2E = gl.constexpr(LOG2E)


# Both kernels


@gluon.jit
def probabilities(z, base, c, cap, slope, CAPPED: gl.constexpr):
    """(P, bend) of scores. Where scores are capped, bend is 1 - tanh^2 in class attn/1, and P (tanh^2 - 1) in
    attn/2, which takes one instruction less. `base` is -lse log2(e), shaped to broadcast: queries are rows or
    columns."""
    bend = z
    if CAPPED == 1:
        y = tanh(z * slope)
        z = cap * y
        bend = 1.0 - y * y
    if CAPPED == 2:
        z = bent(z, slope)
    p = gl.exp2(gl.fma(z, gl.full_like(z, c), base))
    if CAPPED == 2:
        bend = p * gl.fma(z, z, gl.full_like(z, -1.0))
    return p, bend


@gluon.jit
def gradient_of_scores(p, bend, dp, delta, CAPPED: gl.constexpr):
    """dS, where a query sees a key; `delta` is shaped to broadcast. In class attn/2 p is P (tanh^2 - 1)."""
    if CAPPED == 2:
        ds = p * (delta - dp)
    else:
        ds = p * (dp - delta)
    if CAPPED == 1:
        ds = ds * bend
    return ds


@gluon.jit
def next_item(counter):
    """The number of the next item that no program has taken; it may be past the last. A program's first item
    is the one with its own number."""
    return gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")


@gluon.jit
def skip(ring, begin, end, stage, phase):
    """Release the stages of blocks that are fully masked for this consumer."""
    for _ in range(begin, end, ring.BLOCK):
        ring.release(stage, phase)
        stage, phase = after(stage, phase, ring.STAGES)
    return stage, phase


# dq: the producer


@record
class QueryGradients:
    """Shared memory for what is loaded with an item's queries: the gradients of their results, and two
    numbers of each query."""

    do_desc: tma.tensor_descriptor
    do: gl.shared_memory_descriptor
    base: gl.shared_memory_descriptor  # -lse log2(e)
    delta: gl.shared_memory_descriptor

    @gluon.jit
    def create(do_desc, D: gl.constexpr, TILE_LAYOUT: gl.constexpr):
        do = gl.allocate_shared_memory(do_desc.dtype, [CONSUMERS, ROWS, D], TILE_LAYOUT)
        base = gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS], PLAIN)
        delta = gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS], PLAIN)
        return QueryGradients(do_desc, do, base, delta)


@gluon.jit
def load_queries(problem, ring, gradients, counter, lse, delta):
    """The producer of dq."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # of `empty`: a fresh barrier counts as one whose phase 1 is complete
    slot = gl.to_tensor(0)
    i = gl.arange(0, ROWS, PRODUCER_LAYOUT)
    t = gl.program_id(0)
    while t < problem.items():
        item, first = problem.query_item(t)
        if item.live > 0:
            kv = item.head // problem.G
            at = first + item.begin
            if item.blocks > 0:
                ring.load_k(item, kv, at, stage, phase)
            row_of_lse = (item.batch * problem.heads + item.head).to(gl.int64) * problem.T + item.row
            ring.write_item(item, slot)
            for w in gl.static_range(CONSUMERS):
                ready = ring.q_ready.index(w)
                if item.blocks > 0:
                    there = w * ROWS + i < item.live
                    own_base = -(gl.load(lse + row_of_lse + w * ROWS + i, mask=there, other=0.0) * _LOG2E)
                    own_delta = gl.load(delta + row_of_lse + w * ROWS + i, mask=there, other=0.0)
                    row = item.row + w * ROWS
                    mbarrier.expect(
                        ready, ring.q_desc.block_type.nbytes + gradients.do_desc.block_type.nbytes
                    )
                    load_box(ring.q_desc, item.batch, item.head, row, ring.q.index(w), ready)
                    load_box(gradients.do_desc, item.batch, item.head, row, gradients.do.index(w), ready)
                    gradients.base.index(w).store(own_base)
                    gradients.delta.index(w).store(own_delta)
                else:
                    mbarrier.arrive(ready)
                mbarrier.arrive(ready)  # the second arrival: this warp has written its numbers
            slot = slot ^ 1
            for block in range(item.blocks):
                if block > 0:
                    ring.load_k(item, kv, at, stage, phase)
                ring.load_v(item, kv, at, stage, phase)
                at += ring.BLOCK
                stage, phase = after(stage, phase, ring.STAGES)
        t = next_item(counter)
    ring.end(slot)
    gdc_wait()  # who comes after this kernel relies on the end of the one before it, too


# dq: the consumers


@record
class QueryRows:
    """64 queries: two numbers of each, and the keys that it sees, from `oldest` to `newest`."""

    base: gl.tensor
    delta: gl.tensor
    newest: gl.tensor
    oldest: gl.tensor
    keys: gl.tensor  # of the sequence


@record
class QuerySum:
    """What a consumer of dq carries from block to block."""

    dq: gl.tensor
    stage: gl.tensor  # of the next block
    phase: gl.tensor


@record
class QueryConsumer:
    """What a consumer warpgroup of dq works with."""

    problem: Problem
    ring: Ring
    gradients: QueryGradients
    staging: gl.shared_memory_descriptor
    dq: gl.tensor
    c: gl.tensor
    cap: gl.tensor
    slope: gl.tensor
    scale: gl.tensor
    D: gl.constexpr
    Z_LAYOUT: gl.constexpr
    ACC_LAYOUT: gl.constexpr
    WHICH: gl.constexpr  # of the two consumers
    CAPPED: gl.constexpr
    CLEAR: gl.constexpr

    @gluon.jit
    def sees(self, newest, oldest):
        """Which keys of a block a query sees: those from its oldest to its newest."""
        key = gl.expand_dims(gl.arange(0, self.ring.BLOCK, gl.SliceLayout(0, self.Z_LAYOUT)), 0)
        seen = key <= gl.expand_dims(newest, 1)
        if self.problem.WINDOWED:
            seen = seen & (key >= gl.expand_dims(oldest, 1))
        return seen

    @gluon.jit
    def blocks(self, state, rows, begin, end, MASKED: gl.constexpr):
        """The state after the blocks from `begin` to `end`. Without MASKED all rows see all keys."""
        ring = self.ring
        newest, oldest = rows.newest, rows.oldest
        dq, stage, phase = state.dq, state.stage, state.phase
        q, do = ring.q.index(self.WHICH), self.gradients.do.index(self.WHICH)
        for at in range(begin, end, ring.BLOCK):
            k, v = ring.k.index(stage), ring.v.index(stage)
            mbarrier.wait(ring.k_ready.index(stage), phase)
            if MASKED and self.CLEAR:
                if rows.keys < at + ring.BLOCK:
                    clear(ring.k, stage, 0, rows.keys - at, ring.BLOCK)
            zeros = gl.zeros((ROWS, ring.BLOCK), gl.float32, self.Z_LAYOUT)
            z = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(ring.v_ready.index(stage), phase)
            dp = warpgroup_mma(do, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
            z = warpgroup_mma_wait(1, deps=(z,))
            base = gl.expand_dims(rows.base, 1)
            p, bend = probabilities(z, base, self.c, self.cap, self.slope, self.CAPPED)
            if self.CAPPED == 2:
                p = bend  # in the registers of p: all that dS needs
            if MASKED:
                p = gl.where(self.sees(newest - at, oldest - at), p, 0.0)
            # The data has already arrived. But the compiler moves no arithmetic across a barrier, so this
            # wait makes the exponentials overlap with the product in flight.
            mbarrier.wait(ring.v_ready.index(stage), phase)
            if MASKED:
                dp, p, newest, oldest = warpgroup_mma_wait(0, deps=(dp, p, newest, oldest))
            else:
                dp, p = warpgroup_mma_wait(0, deps=(dp, p))
            mbarrier.arrive(ring.v_empty.index(stage))
            ds = gradient_of_scores(p, bend, dp, gl.expand_dims(rows.delta, 1), self.CAPPED)
            if MASKED:
                ds = gl.where(self.sees(newest - at, oldest - at), ds, 0.0)
            words = packed(ds, ring.k_desc.dtype)
            ds = unpacked(words, ring.k_desc.dtype, gl.DotOperandLayout(0, self.ACC_LAYOUT, 2))
            dq = warpgroup_mma(ds, k, dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=(dq,))
            mbarrier.arrive(ring.k_empty.index(stage))
            stage, phase = after(stage, phase, ring.STAGES)
        return QuerySum(dq, stage, phase)

    @gluon.jit
    def sum_over_keys(self, slot, blocks, stage, phase):
        """dq of this consumer's queries of an item that has at least one block."""
        problem, ring = self.problem, self.ring
        item = read_item(ring.items, slot)
        here = item.position + self.WHICH * ROWS  # the position of this consumer's first query
        end = item.begin + blocks * ring.BLOCK
        i = gl.arange(0, ROWS, gl.SliceLayout(1, self.Z_LAYOUT))
        newest = like(i, item.keys) - 1
        oldest = here + i - problem.window + 1
        if problem.CAUSAL:
            newest = gl.minimum(here + i, newest)
        lo, inner, outer, hi = blocks_of_keys(problem, item, here, end)
        base = self.gradients.base.index(self.WHICH).load(gl.SliceLayout(1, self.Z_LAYOUT))
        delta = self.gradients.delta.index(self.WHICH).load(gl.SliceLayout(1, self.Z_LAYOUT))
        rows = QueryRows(base, delta, newest, oldest, item.keys)
        stage, phase = skip(ring, item.begin, lo, stage, phase)
        state = QuerySum(gl.zeros((ROWS, ring.D), gl.float32, self.ACC_LAYOUT), stage, phase)
        if problem.WINDOWED:
            state = self.blocks(state, rows, lo, inner, True)
        state = self.blocks(state, rows, inner, outer, False)
        state = self.blocks(state, rows, outer, hi, True)
        mbarrier.arrive(ring.q_empty.index(self.WHICH))
        stage, phase = skip(ring, hi, end, state.stage, state.phase)
        buffer = self.staging.index(self.WHICH)
        buffer.store((state.dq * self.scale).to(ring.q_desc.dtype))
        self.store(slot, buffer.load(BY_ROWS))
        return stage, phase

    @gluon.jit
    def store(self, slot, tile):
        """Store the rows of an item that are queries."""
        problem = self.problem
        item = read_item(self.ring.items, slot)
        query = self.WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, BY_ROWS))
        column = columns(self.ring.D)
        row = item.batch.to(gl.int64) * problem.T + item.row + query
        to = offsets(row, problem.heads, item.head, column, self.D)
        to = gl.multiple_of(self.dq + to, [16, 16])
        gl.store(to, tile, mask=gl.expand_dims(query < item.live, 1) & (column < self.D))


@gluon.jit
def sum_items_over_keys(consumer):
    """A consumer warpgroup of dq: its queries of all of the program's items."""
    ring = consumer.ring
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)  # of the item, and the phase of its queries
    mbarrier.wait(ring.q_ready.index(consumer.WHICH), slot)
    blocks = read_item(ring.items, slot).blocks
    while blocks >= 0:
        if blocks > 0:
            stage, phase = consumer.sum_over_keys(slot, blocks, stage, phase)
        else:
            consumer.store(slot, gl.zeros((ROWS, ring.D), ring.q_desc.dtype, BY_ROWS))
            mbarrier.arrive(ring.q_empty.index(consumer.WHICH))
        slot = slot ^ 1
        mbarrier.wait(ring.q_ready.index(consumer.WHICH), slot)
        blocks = read_item(ring.items, slot).blocks


@kernel
def dq_kernel(
    dq, counters, lse, delta, key_start, key_end, cu_q, cu_k, T, S, sequences, window, tiles, H, G, c, cap,
    slope, scale, q_desc, do_desc, k_desc, v_desc,
    D: gl.constexpr, DP: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, TILE_LAYOUT: gl.constexpr,
    Z_LAYOUT: gl.constexpr, ACC_LAYOUT: gl.constexpr, PACKED: gl.constexpr, STARTS: gl.constexpr,
    ENDS: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    problem = Problem(
        key_start, key_end, cu_q, cu_k, T, S, sequences, window, tiles, H, G, BLOCK, PACKED, STARTS, ENDS,
        CAUSAL, WINDOWED,
    )  # fmt: skip
    ring = Ring.create(q_desc, k_desc, v_desc, DP, BLOCK, STAGES, TILE_LAYOUT, ARRIVALS=2)
    gradients = QueryGradients.create(do_desc, DP, TILE_LAYOUT)
    staging = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS, DP], STAGED_TILE)
    CLEAR: gl.constexpr = PACKED or ENDS
    first = QueryConsumer(
        problem, ring, gradients, staging, dq, c, cap, slope, scale, D, Z_LAYOUT, ACC_LAYOUT, 0, CAPPED, CLEAR
    )
    second = QueryConsumer(
        problem, ring, gradients, staging, dq, c, cap, slope, scale, D, Z_LAYOUT, ACC_LAYOUT, 1, CAPPED, CLEAR
    )
    gl.warp_specialize(
        [
            (sum_items_over_keys, (first,)),
            (sum_items_over_keys, (second,)),
            (load_queries, (problem, ring, gradients, counters, lse, delta)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


# dk and dv: the ring, and the producer


@record
class KeyRing:
    """Shared memory: slots of 128 keys and values with their item's metadata, and stages of blocks of
    queries, their gradients, and two numbers of each query. `ready`: the bytes have arrived; `empty`: all who
    need them are done."""

    q_desc: tma.tensor_descriptor
    do_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    base: gl.shared_memory_descriptor  # -lse log2(e)
    delta: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    items: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    numbers_ready: gl.shared_memory_descriptor  # base and delta
    empty: gl.shared_memory_descriptor
    kv_ready: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    D: gl.constexpr  # padded
    BLOCK: gl.constexpr
    STAGES: gl.constexpr
    SLOTS: gl.constexpr

    @gluon.jit
    def create(
        q_desc, do_desc, k_desc, v_desc, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
        SLOTS: gl.constexpr, TILE_LAYOUT: gl.constexpr,
    ):  # fmt: skip
        q = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK, D], TILE_LAYOUT)
        do = gl.allocate_shared_memory(do_desc.dtype, [STAGES, BLOCK, D], TILE_LAYOUT)
        base = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], PLAIN)
        delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], PLAIN)
        k = gl.allocate_shared_memory(k_desc.dtype, [SLOTS * CONSUMERS, ROWS, D], TILE_LAYOUT)
        v = gl.allocate_shared_memory(v_desc.dtype, [SLOTS * CONSUMERS, ROWS, D], TILE_LAYOUT)
        items = gl.allocate_shared_memory(gl.int32, [8 * SLOTS, 1], PLAIN)
        bars: gl.constexpr = mbarrier.MBarrierLayout()
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        numbers_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        kv_ready = gl.allocate_shared_memory(gl.int64, [SLOTS * CONSUMERS, 1], bars)
        kv_empty = gl.allocate_shared_memory(gl.int64, [SLOTS * CONSUMERS, 1], bars)
        for i in gl.static_range(STAGES):
            mbarrier.init(ready.index(i), count=1)
            mbarrier.init(numbers_ready.index(i), count=1)
            mbarrier.init(empty.index(i), count=CONSUMERS)
        for i in gl.static_range(SLOTS * CONSUMERS):
            mbarrier.init(kv_ready.index(i), count=1)
            mbarrier.init(kv_empty.index(i), count=1)
        fence_async_shared()  # TMA signals these barriers, and must see them initialised
        return KeyRing(
            q_desc, do_desc, k_desc, v_desc, q, do, base, delta, k, v, items, ready, numbers_ready, empty,
            kv_ready, kv_empty, D, BLOCK, STAGES, SLOTS,
        )  # fmt: skip

    @gluon.jit
    def release(self, stage, phase):
        """Release a stage unread, once it is ready."""
        mbarrier.wait(self.ready.index(stage), phase)
        mbarrier.arrive(self.empty.index(stage))

    @gluon.jit
    def write_item(self, item, slot, kv_phase):
        """Write an item's metadata as soon as both consumers are done with the keys in its slot."""
        for w in gl.static_range(CONSUMERS):
            mbarrier.wait(self.kv_empty.index(slot * CONSUMERS + w), kv_phase)
        item.write(self.items, slot)


@gluon.jit
def load_keys(problem, ring, counter, lse, delta):
    """The producer of dk and dv. It loads lse and delta of a block before waiting for its stage, and stores
    them once the stage is empty."""
    gdc_launch_dependents()  # dq: it reads nothing that this kernel writes
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # of `empty`: a fresh barrier counts as one whose phase 1 is complete
    slot = gl.to_tensor(0)
    kv_phase = gl.to_tensor(1)
    j = gl.arange(0, ring.BLOCK, PRODUCER_LAYOUT)
    t = gl.program_id(0)
    while t < problem.items():
        item, row = key_item(problem, t)
        ring.write_item(item, slot, kv_phase)
        for w in gl.static_range(CONSUMERS):
            ready = ring.kv_ready.index(slot * CONSUMERS + w)
            if item.blocks > 0:
                at = item.first + item.start + w * ROWS
                mbarrier.expect(ready, ring.k_desc.block_type.nbytes + ring.v_desc.block_type.nbytes)
                load_box(ring.k_desc, item.batch, item.kv, at, ring.k.index(slot * CONSUMERS + w), ready)
                load_box(ring.v_desc, item.batch, item.kv, at, ring.v.index(slot * CONSUMERS + w), ready)
            else:
                mbarrier.arrive(ready)
        slot, kv_phase = after(slot, kv_phase, ring.SLOTS)
        for g in range(problem.G):
            head = item.kv * problem.G + g
            at = row + item.low - item.before
            row_of_lse = (item.batch * problem.heads * problem.G + head).to(gl.int64) * problem.T + at
            last = row + item.keys - item.before
            for block in range(item.blocks):
                live = (at + j >= row) & (at + j < last)
                block_base = -(gl.load(lse + row_of_lse + j, mask=live, other=0.0) * _LOG2E)
                block_delta = gl.load(delta + row_of_lse + j, mask=live, other=0.0)
                ready = ring.ready.index(stage)
                mbarrier.wait(ring.empty.index(stage), phase)
                mbarrier.expect(ready, ring.q_desc.block_type.nbytes + ring.do_desc.block_type.nbytes)
                load_box(ring.q_desc, item.batch, head, at, ring.q.index(stage), ready)
                load_box(ring.do_desc, item.batch, head, at, ring.do.index(stage), ready)
                ring.base.index(stage).store(block_base)
                ring.delta.index(stage).store(block_delta)
                mbarrier.arrive(ring.numbers_ready.index(stage))
                at += ring.BLOCK
                row_of_lse += ring.BLOCK
                stage, phase = after(stage, phase, ring.STAGES)
        t = next_item(counter)
    none = gl.to_tensor(-1)
    ring.write_item(KeyItem(none, none, none, none, none, none, none, none), slot, kv_phase)
    for w in gl.static_range(CONSUMERS):
        mbarrier.arrive(ring.kv_ready.index(slot * CONSUMERS + w))


# dk and dv: the consumers


@record
class KeyRows:
    """64 keys, and where they are in shared memory."""

    own: gl.tensor  # the first of them, counted from the sequence's first
    keys: gl.tensor  # of the sequence
    before: gl.tensor  # the position of query 0
    slot: gl.tensor


@record
class KeyConsumer:
    """What a consumer warpgroup of dk and dv works with."""

    problem: Problem
    ring: KeyRing
    dk: gl.tensor
    dv: gl.tensor
    c: gl.tensor
    cap: gl.tensor
    slope: gl.tensor
    scale: gl.tensor
    D: gl.constexpr
    Z_LAYOUT: gl.constexpr
    ACC_LAYOUT: gl.constexpr
    WHICH: gl.constexpr  # of the two consumers
    CAPPED: gl.constexpr

    @gluon.jit
    def sees(self, first, last):
        """Which of a block's queries see which keys: those from a key's first to before its last."""
        j = gl.expand_dims(gl.arange(0, self.ring.BLOCK, gl.SliceLayout(0, self.Z_LAYOUT)), 0)
        return (j >= gl.expand_dims(first, 1)) & (j < gl.expand_dims(last, 1))

    @gluon.jit
    def blocks(self, dk, dv, stage, phase, rows, begin, end, MASKED: gl.constexpr):
        """(dk, dv, stage, phase) after the blocks from `begin` to `end`. Without MASKED all queries see all
        keys."""
        problem, ring = self.problem, self.ring
        keys, before = rows.keys, rows.before
        first, last = seen_from(problem, rows.own, keys, before, self.Z_LAYOUT)
        own = rows.slot * CONSUMERS + self.WHICH
        k, v = ring.k.index(own), ring.v.index(own)
        for at in range(begin, end, ring.BLOCK):
            q, do = ring.q.index(stage), ring.do.index(stage)
            mbarrier.wait(ring.ready.index(stage), phase)
            if MASKED and problem.PACKED:
                if (at < before) | (at + ring.BLOCK > keys):
                    clear(ring.q, stage, before - at, keys - at, ring.BLOCK)
                    clear(ring.do, stage, before - at, keys - at, ring.BLOCK)
            zeros = gl.zeros((ROWS, ring.BLOCK), gl.float32, self.Z_LAYOUT)
            z = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(ring.numbers_ready.index(stage), phase)
            z = warpgroup_mma_wait(1, deps=(z,))
            base = gl.expand_dims(ring.base.index(stage).load(gl.SliceLayout(0, self.Z_LAYOUT)), 0)
            p, bend = probabilities(z, base, self.c, self.cap, self.slope, self.CAPPED)
            if MASKED:
                p = gl.where(self.sees(first - at, last - at), p, 0.0)
            words = packed(p, ring.do_desc.dtype)
            if self.CAPPED == 2:
                p = bend  # in the registers of p: all that dS needs
            # The data arrived long ago. But the compiler moves no arithmetic across a barrier, so this wait
            # makes the exponentials overlap with the product in flight.
            mbarrier.wait(ring.ready.index(stage), phase)
            dp, p, words = warpgroup_mma_wait(0, deps=(dp, p, words))
            rounded = unpacked(words, ring.do_desc.dtype, gl.DotOperandLayout(0, self.ACC_LAYOUT, 2))
            dv = warpgroup_mma(rounded, do, dv, is_async=True)
            # Nothing to wait for. But the compiler moves no arithmetic across this wait, so dS overlaps
            # with the product.
            if MASKED:
                dp, p, first, last = warpgroup_mma_wait(1, deps=(dp, p, first, last))
            else:
                dp, p = warpgroup_mma_wait(1, deps=(dp, p))
            delta = gl.expand_dims(ring.delta.index(stage).load(gl.SliceLayout(0, self.Z_LAYOUT)), 0)
            ds = gradient_of_scores(p, bend, dp, delta, self.CAPPED)
            if MASKED:
                ds = gl.where(self.sees(first - at, last - at), ds, 0.0)
            words = packed(ds, ring.q_desc.dtype)
            rounded = unpacked(words, ring.q_desc.dtype, gl.DotOperandLayout(0, self.ACC_LAYOUT, 2))
            dk = warpgroup_mma(rounded, q, dk, is_async=True)
            dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
            mbarrier.arrive(ring.empty.index(stage))
            stage, phase = after(stage, phase, ring.STAGES)
        return dk, dv, stage, phase

    @gluon.jit
    def sum_over_queries(self, slot, blocks, stage, phase):
        """dk and dv of this consumer's keys of an item."""
        problem, ring = self.problem, self.ring
        item = read_key_item(ring.items, slot, self.WHICH)
        low, keys, own = item.low, item.keys, item.start
        high = low + blocks * ring.BLOCK
        lo, inner, outer, hi = blocks_of_queries(problem, item, high)
        rows = KeyRows(own, keys, item.before, slot)
        dk = gl.zeros((ROWS, ring.D), gl.float32, self.ACC_LAYOUT)
        dv = gl.zeros((ROWS, ring.D), gl.float32, self.ACC_LAYOUT)
        for _ in range(problem.G):
            stage, phase = skip(ring, low, lo, stage, phase)
            dk, dv, stage, phase = self.blocks(dk, dv, stage, phase, rows, lo, inner, True)
            dk, dv, stage, phase = self.blocks(dk, dv, stage, phase, rows, inner, outer, False)
            dk, dv, stage, phase = self.blocks(dk, dv, stage, phase, rows, outer, hi, True)
            stage, phase = skip(ring, hi, high, stage, phase)
        self.store(slot, self.dk, ring.k.index(slot * CONSUMERS + self.WHICH), dk * self.scale)
        self.store(slot, self.dv, ring.v.index(slot * CONSUMERS + self.WHICH), dv)
        fence_async_shared()
        mbarrier.arrive(ring.kv_empty.index(slot * CONSUMERS + self.WHICH))
        return stage, phase

    @gluon.jit
    def store(self, slot, to, buffer, tile):
        """Store a tile through the buffer of its keys; zeros for keys outside key_start and key_end."""
        problem, ring = self.problem, self.ring
        buffer = reinterpreted(buffer, ring.k_desc.dtype, [ROWS, ring.D], STAGED_TILE)
        buffer.store(tile.to(ring.k_desc.dtype))
        item = read_key_item(ring.items, slot, self.WHICH)
        row = item.batch.to(gl.int64) * problem.S
        key = item.start + gl.arange(0, ROWS, gl.SliceLayout(1, BY_ROWS))
        column = columns(ring.D)
        at = offsets(row + item.first + key, problem.heads, item.kv, column, self.D)
        inside = gl.expand_dims(key < item.keys, 1) & (column < self.D)
        gl.store(gl.multiple_of(to + at, [16, 16]), buffer.load(BY_ROWS), mask=inside)
        if problem.STARTS or problem.ENDS:
            outside = (key < problem.S) & ((key < item.first) | (key >= item.first + item.keys))
            at = offsets(row + key, problem.heads, item.kv, column, self.D)
            zeros = gl.zeros((ROWS, ring.D), ring.k_desc.dtype, BY_ROWS)
            to = gl.multiple_of(to + at, [16, 16])
            gl.store(to, zeros, mask=gl.expand_dims(outside, 1) & (column < self.D))


@gluon.jit
def sum_items_over_queries(consumer):
    """A consumer warpgroup of dk and dv: its keys of all of the program's items."""
    ring = consumer.ring
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    kv_phase = gl.to_tensor(0)
    mbarrier.wait(ring.kv_ready.index(slot * CONSUMERS + consumer.WHICH), kv_phase)
    blocks = read_key_item(ring.items, slot, consumer.WHICH).blocks
    while blocks >= 0:
        stage, phase = consumer.sum_over_queries(slot, blocks, stage, phase)
        slot, kv_phase = after(slot, kv_phase, ring.SLOTS)
        mbarrier.wait(ring.kv_ready.index(slot * CONSUMERS + consumer.WHICH), kv_phase)
        blocks = read_key_item(ring.items, slot, consumer.WHICH).blocks


@kernel
def dkv_kernel(
    dk, dv, counters, lse, delta, key_start, key_end, cu_q, cu_k, T, S, sequences, window, tiles, KV, G, c,
    cap, slope, scale, q_desc, do_desc, k_desc, v_desc,
    D: gl.constexpr, DP: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    TILE_LAYOUT: gl.constexpr, Z_LAYOUT: gl.constexpr, ACC_LAYOUT: gl.constexpr, PACKED: gl.constexpr,
    STARTS: gl.constexpr, ENDS: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
    CAPPED: gl.constexpr,
):  # fmt: skip
    problem = Problem(
        key_start, key_end, cu_q, cu_k, T, S, sequences, window, tiles, KV, G, BLOCK, PACKED, STARTS, ENDS,
        CAUSAL, WINDOWED,
    )  # fmt: skip
    ring = KeyRing.create(q_desc, do_desc, k_desc, v_desc, DP, BLOCK, STAGES, SLOTS, TILE_LAYOUT)
    first = KeyConsumer(problem, ring, dk, dv, c, cap, slope, scale, D, Z_LAYOUT, ACC_LAYOUT, 0, CAPPED)
    second = KeyConsumer(problem, ring, dk, dv, c, cap, slope, scale, D, Z_LAYOUT, ACC_LAYOUT, 1, CAPPED)
    gl.warp_specialize(
        [
            (sum_items_over_queries, (first,)),
            (sum_items_over_queries, (second,)),
            (load_keys, (problem, ring, counters + 1, lse, delta)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


# Launcher


def why_not(args: dict[str, Any]) -> str | None:
    """Why these kernels, or those of `kernels_hopper_wide`, cannot serve a call, or None."""
    if args["block_table"] is not None:
        return "keys in pages have no gradient"
    if 0 in args["q"].shape:
        return "there are no queries, and TMA cannot read an empty tensor"
    return kernels_hopper.why_not(args)


def readable(t: Tensor) -> Tensor:
    """An incoming gradient may have any strides."""
    if t.stride(-1) == 1 and why_not_tma("dout", t) is None:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def attention_bwd(launch: Launch = run, tangent: int = 1, **args: Any) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv), those that are wanted. `tangent` is the class whose tanh caps scores."""
    call, factors = call_of(args), factors_of(args, tangent)
    q, k, v = (args[name] for name in ("q", "k", "v"))
    lse, dout = args["lse"].contiguous(), readable(args["dout"])
    want_kv = args["want_k"] or args["want_v"]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if args["want_q"] else None
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device) if want_kv else None
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device) if want_kv else None
    counters = torch.empty(COUNTERS, dtype=torch.int32, device=q.device)
    delta = delta_of(launch, args, dout, counters)
    DP, programs = call.padded, sm_count(q.device)
    halves = 2 if which_tanh(args, tangent) == 1 else 1
    queries = CAPPED_QUERIES if which_tanh(args, tangent) == 2 else DKV_QUERIES
    pointers = (lse, delta, *bounds_of(args, lse))
    sizes = (call.T, call.S, call.sequences, args["window"] or 0)

    def boxes(queries: int, keys: int) -> tuple[Any, ...]:
        """Descriptors of q, dout, k and v, with this many rows in a box."""
        rows = ((q, queries), (dout, queries), (k, keys), (v, keys))
        return tuple(descriptor(t, n, DP) for t, n in rows)

    constants: dict[str, Any] = {
        "D": call.D,
        "DP": DP,
        "TILE_LAYOUT": tile_layout(DP, q.dtype),
        "ACC_LAYOUT": accumulator_layout(DP),
        **flags_of(args, tangent),
        **OPTIONS,
    }
    if dk is not None:
        tiles, block = count_blocks(call, 128), queries[DP] // halves
        launch(
            dkv_kernel,
            (min(tiles * call.KV, programs),),
            *(dk, dv, counters, *pointers),
            *(*sizes, tiles, call.KV, call.group, *factors),
            *boxes(queries=block, keys=64),
            BLOCK=block,
            STAGES=DKV_STAGES[DP],
            SLOTS=DKV_SLOTS,
            Z_LAYOUT=accumulator_layout(block),
            **constants,
        )
    if dq is not None:
        tiles, block = count_tiles(call, 128), DQ_KEYS[DP] // halves
        launch(
            dq_kernel,
            (min(tiles * call.H, programs),),
            *(dq, counters, *pointers),
            *(*sizes, tiles, call.H, call.group, *factors),
            *boxes(queries=64, keys=block),
            BLOCK=block,
            STAGES=DQ_STAGES[DP],
            Z_LAYOUT=accumulator_layout(block),
            **constants,
            launch_pdl=dk is not None,
        )
    return dq, dk if args["want_k"] else None, dv if args["want_v"] else None
