"""Gradients of attention on Hopper for D > 128: class attn/1, with the chains of `kernels_triton_bwd`.

The sums of 64 rows and 256 columns take 128 registers of a thread, so a consumer warpgroup has one of dq, dk
and dv. Three launches of one kernel compute them, eight products where five are necessary; in return no
element is added to by two programs, as in `kernels_hopper_bwd`, whose items and masks these are. Two consumer
warpgroups have 64 rows each, a producer warp loads by TMA, and items come from a counter. Each launch begins
when SMs have nothing left to do in the one before it (`launch_pdl`).

An item's own rows stay in shared memory. Rows of the other kind come in blocks, first those of A, then those
of B, through one ring of tiles:

            own rows     A    B       for every block
    dq      q, dout      k    v       Z = q k^T,  dP = dout v^T,  dq += dS k
    dk      k, v         q    dout    Z = k q^T,  dP = v dout^T,  dk += dS^T q
    dv      k            q    dout    Z = k q^T,                  dv += P^T dout

P and dS are computed in the registers from which they are multiplied. B is empty after its first product, A
after the last, so with three tiles there is always one that is being loaded.

- Z and dP are chains over D from zero.
- dq is one chain over blocks of keys in ascending order. dk and dv are chains over the heads of the group and
  in each over blocks of queries, which begin at multiples of 16 positions. A block whose rows see none of a
  consumer's is skipped, and would change nothing.
- Rows of a block outside the sequence may be anything, and 0 NaN is NaN: they are set to zero in shared
  memory unless TMA has done so. Own rows outside it only affect their own results, which are not stored.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run
from isobit.kernels.hopper.heads import descriptor, load_box, tile_layout
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
from isobit.kernels.hopper.softmax import packed, unpacked
from isobit.kernels.host.temperature import LOG2E
from isobit.ops.attention.calls import call_of, factors_of, which_tanh
from isobit.ops.attention.kernels_hopper import (
    BY_ROWS,
    CONSUMER_REGISTERS,
    OPTIONS,
    PRODUCER_REGISTERS,
    bounds_of,
    clear,
    columns,
    flags_of,
    load_when_empty,
    offsets,
)
from isobit.ops.attention.kernels_hopper_bwd import (
    STAGED_TILE,
    gradient_of_scores,
    next_item,
    probabilities,
    readable,
)
from isobit.ops.attention.kernels_hopper_items import (
    CONSUMERS,
    PLAIN,
    PRODUCER_LAYOUT,
    Item,
    Problem,
    blocks_of_keys,
    blocks_of_queries,
    key_item,
    like,
    read_item,
    read_key_item,
    seen_from,
)
from isobit.ops.attention.kernels_triton import count_tiles
from isobit.ops.attention.kernels_triton_bwd import COUNTERS, count_blocks, delta_of

#: Rows of a tile of the ring, half as many for the tanh of attn/1, which takes registers.
BLOCK_ROWS = 64

#: Tiles of the ring, next to own rows of two kinds, and of one: what fits in 227 KB.
TILES, TILES_OF_DV = 3, 5

_LOG2E = gl.constexpr(LOG2E)


# The ring


@record
class WideRing:
    """Shared memory: an item's own rows, and a ring of tiles. `ready`: the bytes have arrived; `empty`: all
    who need them are done. Two numbers of each query are with its row: own, or those of a tile."""

    own_a_desc: tma.tensor_descriptor
    own_b_desc: tma.tensor_descriptor
    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    own_a: gl.shared_memory_descriptor
    own_b: gl.shared_memory_descriptor  # not touched for dv
    tiles: gl.shared_memory_descriptor
    base: gl.shared_memory_descriptor  # -lse log2(e)
    delta: gl.shared_memory_descriptor
    items: gl.shared_memory_descriptor
    own_ready: gl.shared_memory_descriptor
    own_empty: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    D: gl.constexpr  # padded
    BLOCK: gl.constexpr
    STAGES: gl.constexpr
    OF_QUERIES: gl.constexpr  # own rows are queries
    VALUES: gl.constexpr  # the sum is dv

    @gluon.jit
    def create(
        own_a_desc, own_b_desc, a_desc, b_desc, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
        OF_QUERIES: gl.constexpr, VALUES: gl.constexpr, TILE_LAYOUT: gl.constexpr,
    ):  # fmt: skip
        own_a = gl.allocate_shared_memory(own_a_desc.dtype, [CONSUMERS, ROWS, D], TILE_LAYOUT)
        own_b = own_a
        if not VALUES:
            own_b = gl.allocate_shared_memory(own_b_desc.dtype, [CONSUMERS, ROWS, D], TILE_LAYOUT)
        tiles = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK, D], TILE_LAYOUT)
        NUMBERS: gl.constexpr = [CONSUMERS, ROWS] if OF_QUERIES else [STAGES, BLOCK]
        base = gl.allocate_shared_memory(gl.float32, NUMBERS, PLAIN)
        delta = gl.allocate_shared_memory(gl.float32, NUMBERS, PLAIN)
        items = gl.allocate_shared_memory(gl.int32, [8, 1], PLAIN)
        bars: gl.constexpr = mbarrier.MBarrierLayout()
        own_ready = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], bars)
        own_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], bars)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        # What comes with numbers has a second arrival: the producer warp has written them.
        for i in gl.static_range(CONSUMERS):
            mbarrier.init(own_ready.index(i), count=2 if OF_QUERIES else 1)
            mbarrier.init(own_empty.index(i), count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(ready.index(i), count=1 if OF_QUERIES else 2)
            mbarrier.init(empty.index(i), count=CONSUMERS)
        fence_async_shared()  # TMA signals these barriers, and must see them initialised
        return WideRing(
            own_a_desc, own_b_desc, a_desc, b_desc, own_a, own_b, tiles, base, delta, items, own_ready,
            own_empty, ready, empty, D, BLOCK, STAGES, OF_QUERIES, VALUES,
        )  # fmt: skip

    @gluon.jit
    def load(self, desc, batch, head, row, stage, phase):
        """Load a tile as soon as its stage is empty. Returns the next stage."""
        ready = self.ready.index(stage)
        load_when_empty(
            desc, batch, head, row, self.tiles.index(stage), ready, self.empty.index(stage), phase
        )
        return after(stage, phase, self.STAGES)

    @gluon.jit
    def load_own(self, batch, head, row, WHICH: gl.constexpr):
        """Load the own rows of a consumer."""
        ready = self.own_ready.index(WHICH)
        if self.VALUES:
            mbarrier.expect(ready, self.own_a_desc.block_type.nbytes)
        else:
            mbarrier.expect(ready, self.own_a_desc.block_type.nbytes + self.own_b_desc.block_type.nbytes)
            load_box(self.own_b_desc, batch, head, row, self.own_b.index(WHICH), ready)
        load_box(self.own_a_desc, batch, head, row, self.own_a.index(WHICH), ready)

    @gluon.jit
    def write_item(self, item, phase):
        """Write an item's metadata as soon as both consumers are done with the item before."""
        for w in gl.static_range(CONSUMERS):
            mbarrier.wait(self.own_empty.index(w), phase)
        item.write(self.items, 0)

    @gluon.jit
    def end(self, phase):
        """Tell the consumers that there is no more work."""
        none = gl.to_tensor(-1)
        self.write_item(Item(none, none, none, none, none, none, none, none), phase)
        for w in gl.static_range(CONSUMERS):
            mbarrier.arrive(self.own_ready.index(w))
            if self.OF_QUERIES:
                mbarrier.arrive(self.own_ready.index(w))

    @gluon.jit
    def skip(self, begin, end, stage, phase):
        """Release the tiles of blocks that are fully masked for this consumer."""
        for _ in range(begin, end, self.BLOCK):
            for _ in gl.static_range(2):
                mbarrier.wait(self.ready.index(stage), phase)
                mbarrier.arrive(self.empty.index(stage))
                stage, phase = after(stage, phase, self.STAGES)
        return stage, phase


# The producers


@gluon.jit
def load_for_queries(problem, ring, counter, lse, delta):
    """The producer of dq. It loads the first keys of an item before it waits for the place of its queries."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # of `empty`: a fresh barrier counts as one whose phase 1 is complete
    own_phase = gl.to_tensor(1)
    i = gl.arange(0, ROWS, PRODUCER_LAYOUT)
    t = gl.program_id(0)
    while t < problem.items():
        item, first = problem.query_item(t)
        if item.live > 0:
            kv = item.head // problem.G
            at = first + item.begin
            if item.blocks > 0:
                stage, phase = ring.load(ring.a_desc, item.batch, kv, at, stage, phase)
                stage, phase = ring.load(ring.b_desc, item.batch, kv, at, stage, phase)
            row_of_lse = (item.batch * problem.heads + item.head).to(gl.int64) * problem.T + item.row
            ring.write_item(item, own_phase)
            own_phase = own_phase ^ 1
            for w in gl.static_range(CONSUMERS):
                there = w * ROWS + i < item.live
                own_base = -(gl.load(lse + row_of_lse + w * ROWS + i, mask=there, other=0.0) * _LOG2E)
                own_delta = gl.load(delta + row_of_lse + w * ROWS + i, mask=there, other=0.0)
                ring.load_own(item.batch, item.head, item.row + w * ROWS, w)
                ring.base.index(w).store(own_base)
                ring.delta.index(w).store(own_delta)
                mbarrier.arrive(ring.own_ready.index(w))
            for block in range(1, item.blocks):
                at += ring.BLOCK
                stage, phase = ring.load(ring.a_desc, item.batch, kv, at, stage, phase)
                stage, phase = ring.load(ring.b_desc, item.batch, kv, at, stage, phase)
        t = next_item(counter)
    ring.end(own_phase)
    gdc_wait()  # who comes after this kernel relies on the end of the one before it, too


@gluon.jit
def load_for_keys(problem, ring, counter, lse, delta):
    """The producer of dk or dv. It loads lse and delta of a block before it waits for the block's stage, and
    stores them once that is empty."""
    gdc_launch_dependents()  # the next of the three: it reads nothing that this kernel writes
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # of `empty`: a fresh barrier counts as one whose phase 1 is complete
    own_phase = gl.to_tensor(1)
    j = gl.arange(0, ring.BLOCK, PRODUCER_LAYOUT)
    t = gl.program_id(0)
    while t < problem.items():
        item, row = key_item(problem, t)
        ring.write_item(item, own_phase)
        own_phase = own_phase ^ 1
        for w in gl.static_range(CONSUMERS):
            if item.blocks > 0:
                ring.load_own(item.batch, item.kv, item.first + item.start + w * ROWS, w)
            else:
                mbarrier.arrive(ring.own_ready.index(w))
        for g in range(problem.G):
            head = item.kv * problem.G + g
            at = row + item.low - item.before
            row_of_lse = (item.batch * problem.heads * problem.G + head).to(gl.int64) * problem.T + at
            last = row + item.keys - item.before
            for block in range(item.blocks):
                live = (at + j >= row) & (at + j < last)
                block_base = -(gl.load(lse + row_of_lse + j, mask=live, other=0.0) * _LOG2E)
                block_delta = block_base
                if not ring.VALUES:
                    block_delta = gl.load(delta + row_of_lse + j, mask=live, other=0.0)
                a_stage = stage
                stage, phase = ring.load(ring.a_desc, item.batch, head, at, stage, phase)
                ring.base.index(a_stage).store(block_base)
                if not ring.VALUES:
                    ring.delta.index(a_stage).store(block_delta)
                mbarrier.arrive(ring.ready.index(a_stage))
                b_stage = stage
                stage, phase = ring.load(ring.b_desc, item.batch, head, at, stage, phase)
                mbarrier.arrive(ring.ready.index(b_stage))
                at += ring.BLOCK
                row_of_lse += ring.BLOCK
        t = next_item(counter)
    ring.end(own_phase)
    gdc_wait()  # who comes after this kernel relies on the end of the one before it, too


# The consumers


@record
class OwnRows:
    """64 own rows. Each takes part with the rows of the other kind from `first` to before `last`, counted as
    their blocks are."""

    first: gl.tensor
    last: gl.tensor
    begin: gl.tensor  # where the sequence's rows of the other kind begin, and end
    end: gl.tensor
    base: gl.tensor  # of queries; otherwise not used
    delta: gl.tensor


@record
class WideConsumer:
    """What a consumer warpgroup works with."""

    problem: Problem
    ring: WideRing
    out: gl.tensor
    c: gl.tensor
    cap: gl.tensor
    slope: gl.tensor
    scale: gl.tensor
    D: gl.constexpr
    Z_LAYOUT: gl.constexpr
    ACC_LAYOUT: gl.constexpr
    WHICH: gl.constexpr  # of the two consumers
    CAPPED: gl.constexpr
    CLEAR: gl.constexpr  # blocks may hold rows of others

    @gluon.jit
    def rows(self):
        """This consumer's rows. Loops of blocks read them each for itself: in between they would take
        registers."""
        problem, ring = self.problem, self.ring
        if ring.OF_QUERIES:
            item = read_item(ring.items, 0)
            i = gl.arange(0, ROWS, gl.SliceLayout(1, self.Z_LAYOUT))
            position = item.position + self.WHICH * ROWS + i
            last = like(i, item.keys)
            if problem.CAUSAL:
                last = gl.minimum(position + 1, last)
            base = ring.base.index(self.WHICH).load(gl.SliceLayout(1, self.Z_LAYOUT))
            delta = ring.delta.index(self.WHICH).load(gl.SliceLayout(1, self.Z_LAYOUT))
            none = like(item.keys, 0)
            rows = OwnRows(position - problem.window + 1, last, none, item.keys, base, delta)
        else:
            key = read_key_item(ring.items, 0, self.WHICH)
            first, last = seen_from(problem, key.start, key.keys, key.before, self.Z_LAYOUT)
            rows = OwnRows(first, last, key.before, key.keys, first, last)
        return rows

    @gluon.jit
    def sees(self, first, last):
        """Which rows of a block take part with an own row: those from its first to before its last."""
        j = gl.expand_dims(gl.arange(0, self.ring.BLOCK, gl.SliceLayout(0, self.Z_LAYOUT)), 0)
        inside = j < gl.expand_dims(last, 1)
        if self.problem.WINDOWED or not self.ring.OF_QUERIES:
            inside = inside & (j >= gl.expand_dims(first, 1))
        return inside

    @gluon.jit
    def base(self, rows, stage):
        """-lse log2(e) of queries, which are rows or columns, to broadcast."""
        if self.ring.OF_QUERIES:
            base = gl.expand_dims(rows.base, 1)
        else:
            base = gl.expand_dims(self.ring.base.index(stage).load(gl.SliceLayout(0, self.Z_LAYOUT)), 0)
        return base

    @gluon.jit
    def delta(self, rows, stage):
        """The same of delta."""
        if self.ring.OF_QUERIES:
            delta = gl.expand_dims(rows.delta, 1)
        else:
            delta = gl.expand_dims(self.ring.delta.index(stage).load(gl.SliceLayout(0, self.Z_LAYOUT)), 0)
        return delta

    @gluon.jit
    def left_operand(self, x):
        """P or dS, rounded, in the registers in which it was computed."""
        DTYPE: gl.constexpr = self.ring.a_desc.dtype
        return unpacked(packed(x, DTYPE), DTYPE, gl.DotOperandLayout(0, self.ACC_LAYOUT, 2))

    @gluon.jit
    def clear(self, rows, stage, at):
        """Zeros for the rows of a tile that are not of the sequence."""
        if self.CLEAR:
            if (at < rows.begin) | (at + self.ring.BLOCK > rows.end):
                clear(self.ring.tiles, stage, rows.begin - at, rows.end - at, self.ring.BLOCK)

    @gluon.jit
    def blocks(self, total, stage, phase, begin, end, MASKED: gl.constexpr):
        """(total, stage, phase) after the blocks from `begin` to `end`. Without MASKED all own rows take part
        with all rows of the blocks."""
        ring, rows = self.ring, self.rows()
        first, last = rows.first, rows.last
        own_a, own_b = ring.own_a.index(self.WHICH), ring.own_b.index(self.WHICH)
        for at in range(begin, end, ring.BLOCK):
            b_stage, b_phase = after(stage, phase, ring.STAGES)
            a, b = ring.tiles.index(stage), ring.tiles.index(b_stage)
            mbarrier.wait(ring.ready.index(stage), phase)
            if MASKED:
                self.clear(rows, stage, at)
            zeros = gl.zeros((ROWS, ring.BLOCK), gl.float32, self.Z_LAYOUT)
            z = warpgroup_mma(own_a, a.permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(ring.ready.index(b_stage), b_phase)
            if ring.VALUES:
                if MASKED:
                    self.clear(rows, b_stage, at)
                z = warpgroup_mma_wait(0, deps=(z,))
                base = self.base(rows, stage)
                mbarrier.arrive(ring.empty.index(stage))
                p, _ = probabilities(z, base, self.c, self.cap, self.slope, self.CAPPED)
                if MASKED:
                    p = gl.where(self.sees(first - at, last - at), p, 0.0)
                total = warpgroup_mma(self.left_operand(p), b, total, is_async=True)
                total = warpgroup_mma_wait(0, deps=(total,))
                mbarrier.arrive(ring.empty.index(b_stage))
            else:
                dp = warpgroup_mma(own_b, b.permute((1, 0)), zeros, use_acc=False, is_async=True)
                z = warpgroup_mma_wait(1, deps=(z,))
                p, bend = probabilities(z, self.base(rows, stage), self.c, self.cap, self.slope, self.CAPPED)
                if self.CAPPED == 2:
                    p = bend  # in the registers of p: all that dS needs
                if MASKED:
                    p = gl.where(self.sees(first - at, last - at), p, 0.0)
                # The data has already arrived. But the compiler moves no arithmetic across a barrier, so this
                # wait makes the exponentials overlap with the product in flight.
                mbarrier.wait(ring.ready.index(b_stage), b_phase)
                if MASKED:
                    dp, p, first, last = warpgroup_mma_wait(0, deps=(dp, p, first, last))
                else:
                    dp, p = warpgroup_mma_wait(0, deps=(dp, p))
                mbarrier.arrive(ring.empty.index(b_stage))
                ds = gradient_of_scores(p, bend, dp, self.delta(rows, stage), self.CAPPED)
                if MASKED:
                    ds = gl.where(self.sees(first - at, last - at), ds, 0.0)
                total = warpgroup_mma(self.left_operand(ds), a, total, is_async=True)
                total = warpgroup_mma_wait(0, deps=(total,))
                mbarrier.arrive(ring.empty.index(stage))
            stage, phase = after(b_stage, b_phase, ring.STAGES)
        return total, stage, phase

    @gluon.jit
    def over_keys(self, blocks, stage, phase):
        """dq of this consumer's queries of an item."""
        problem, ring = self.problem, self.ring
        item = read_item(ring.items, 0)
        here = item.position + self.WHICH * ROWS  # the position of this consumer's first query
        end = item.begin + blocks * ring.BLOCK
        lo, inner, outer, hi = blocks_of_keys(problem, item, here, end)
        total = gl.zeros((ROWS, ring.D), gl.float32, self.ACC_LAYOUT)
        stage, phase = ring.skip(item.begin, lo, stage, phase)
        if problem.WINDOWED:
            total, stage, phase = self.blocks(total, stage, phase, lo, inner, True)
        total, stage, phase = self.blocks(total, stage, phase, inner, outer, False)
        total, stage, phase = self.blocks(total, stage, phase, outer, hi, True)
        stage, phase = ring.skip(hi, end, stage, phase)
        tile = self.staged(total * self.scale)
        item = read_item(ring.items, 0)
        query = self.WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, BY_ROWS))
        row = item.batch.to(gl.int64) * problem.T + item.row + query
        self.store(row, item.head, query < item.live, tile)
        return stage, phase

    @gluon.jit
    def over_queries(self, blocks, stage, phase):
        """dk or dv of this consumer's keys of an item."""
        problem, ring = self.problem, self.ring
        item = read_key_item(ring.items, 0, self.WHICH)
        low, high = item.low, item.low + blocks * ring.BLOCK
        lo, inner, outer, hi = blocks_of_queries(problem, item, high)
        total = gl.zeros((ROWS, ring.D), gl.float32, self.ACC_LAYOUT)
        for _ in range(problem.G):
            stage, phase = ring.skip(low, lo, stage, phase)
            total, stage, phase = self.blocks(total, stage, phase, lo, inner, True)
            total, stage, phase = self.blocks(total, stage, phase, inner, outer, False)
            total, stage, phase = self.blocks(total, stage, phase, outer, hi, True)
            stage, phase = ring.skip(hi, high, stage, phase)
        if not ring.VALUES:
            total = total * self.scale
        tile = self.staged(total)
        item = read_key_item(ring.items, 0, self.WHICH)
        row = item.batch.to(gl.int64) * problem.S
        key = item.start + gl.arange(0, ROWS, gl.SliceLayout(1, BY_ROWS))
        self.store(row + item.first + key, item.kv, key < item.keys, tile)
        if problem.STARTS or problem.ENDS:  # zeros for keys outside key_start and key_end
            outside = (key < problem.S) & ((key < item.first) | (key >= item.first + item.keys))
            zeros = gl.zeros((ROWS, ring.D), ring.a_desc.dtype, BY_ROWS)
            self.store(row + key, item.kv, outside, zeros)
        return stage, phase

    @gluon.jit
    def staged(self, total):
        """A tile of results, rounded, for coalesced stores: through the buffer of this consumer's rows."""
        ring = self.ring
        buffer = reinterpreted(
            ring.own_a.index(self.WHICH), ring.own_a_desc.dtype, [ROWS, ring.D], STAGED_TILE
        )
        buffer.store(total.to(ring.own_a_desc.dtype))
        return buffer.load(BY_ROWS)

    @gluon.jit
    def store(self, row, head, there, tile):
        """Store some rows of a tile."""
        column = columns(self.ring.D)
        to = offsets(row, self.problem.heads, head, column, self.D)
        to = gl.multiple_of(self.out + to, [16, 16])
        gl.store(to, tile, mask=gl.expand_dims(there, 1) & (column < self.D))


@gluon.jit
def sum_items(consumer):
    """A consumer warpgroup: its rows of all of the program's items."""
    ring = consumer.ring
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    own_phase = gl.to_tensor(0)
    mbarrier.wait(ring.own_ready.index(consumer.WHICH), own_phase)
    blocks = read_item(ring.items, 0).blocks
    while blocks >= 0:
        if ring.OF_QUERIES:
            stage, phase = consumer.over_keys(blocks, stage, phase)
        else:
            stage, phase = consumer.over_queries(blocks, stage, phase)
        fence_async_shared()
        mbarrier.arrive(ring.own_empty.index(consumer.WHICH))
        own_phase = own_phase ^ 1
        mbarrier.wait(ring.own_ready.index(consumer.WHICH), own_phase)
        blocks = read_item(ring.items, 0).blocks


@kernel
def wide_kernel(
    out, counters, lse, delta, key_start, key_end, cu_q, cu_k, T, S, sequences, window, tiles, heads, G, c,
    cap, slope, scale, own_a_desc, own_b_desc, a_desc, b_desc,
    D: gl.constexpr, DP: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, OF_QUERIES: gl.constexpr,
    VALUES: gl.constexpr, TILE_LAYOUT: gl.constexpr, Z_LAYOUT: gl.constexpr, ACC_LAYOUT: gl.constexpr,
    PACKED: gl.constexpr, STARTS: gl.constexpr, ENDS: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    problem = Problem(
        key_start, key_end, cu_q, cu_k, T, S, sequences, window, tiles, heads, G, BLOCK, PACKED, STARTS, ENDS,
        CAUSAL, WINDOWED,
    )  # fmt: skip
    ring = WideRing.create(
        own_a_desc, own_b_desc, a_desc, b_desc, DP, BLOCK, STAGES, OF_QUERIES, VALUES, TILE_LAYOUT
    )
    counter = counters + (0 if OF_QUERIES else (2 if VALUES else 1))
    CLEAR: gl.constexpr = PACKED or (OF_QUERIES and ENDS)
    first = WideConsumer(problem, ring, out, c, cap, slope, scale, D, Z_LAYOUT, ACC_LAYOUT, 0, CAPPED, CLEAR)
    second = WideConsumer(problem, ring, out, c, cap, slope, scale, D, Z_LAYOUT, ACC_LAYOUT, 1, CAPPED, CLEAR)
    if OF_QUERIES:
        gl.warp_specialize(
            [
                (sum_items, (first,)),
                (sum_items, (second,)),
                (load_for_queries, (problem, ring, counter, lse, delta)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (sum_items, (first,)),
                (sum_items, (second,)),
                (load_for_keys, (problem, ring, counter, lse, delta)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


# Launcher


def attention_bwd(launch: Launch = run, tangent: int = 1, **args: Any) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv), those that are wanted. `tangent` is the class whose tanh caps scores."""
    call, factors = call_of(args), factors_of(args, tangent)
    q, k, v = (args[name] for name in ("q", "k", "v"))
    lse, dout = args["lse"].contiguous(), readable(args["dout"])
    counters = torch.empty(COUNTERS, dtype=torch.int32, device=q.device)
    delta = delta_of(launch, args, dout, counters)
    DP, programs = call.padded, sm_count(q.device)
    halves = 2 if which_tanh(args, tangent) == 1 else 1
    block = BLOCK_ROWS // halves

    def summed(
        name: str, of: Tensor, own: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor], stages: int
    ) -> Tensor | None:
        """The gradient of `of`: own rows, and the rows that come in blocks."""
        if not args[f"want_{name}"]:
            return None
        after_another = name != "k" and any(args[f"want_{n}"] for n in ("k" if name == "v" else "kv"))
        out = torch.empty(of.shape, dtype=of.dtype, device=of.device)
        tiles = count_tiles(call, 128) if name == "q" else count_blocks(call, 128)
        heads = of.shape[2]
        launch(
            wide_kernel,
            (min(tiles * heads, programs),),
            *(out, counters, lse, delta, *bounds_of(args, lse)),
            *(call.T, call.S, call.sequences, args["window"] or 0, tiles, heads, call.group, *factors),
            *(descriptor(t, 64, DP) for t in own),
            *(descriptor(t, block, DP) for t in others),
            D=call.D,
            DP=DP,
            BLOCK=block,
            STAGES=stages * halves,
            OF_QUERIES=name == "q",
            VALUES=name == "v",
            TILE_LAYOUT=tile_layout(DP, q.dtype),
            Z_LAYOUT=accumulator_layout(block),
            ACC_LAYOUT=accumulator_layout(DP),
            **flags_of(args, tangent),
            **OPTIONS,
            launch_pdl=after_another,
        )
        return out

    dk = summed("k", k, (k, v), (q, dout), TILES)
    dv = summed("v", v, (k, v), (q, dout), TILES_OF_DV)
    return summed("q", q, (q, dout), (k, v), TILES), dk, dv
