"""Attention forward on Hopper for many queries at once: class attn/1.

An *item* is 128 queries of one head. A program has two consumer warpgroups with 64 of an item's queries each,
and a producer warp that loads queries, keys and values by TMA. A consumer loops over blocks of keys. It
computes exponentials while the tensor cores multiply the probabilities of one block with its values, and the
next keys with the queries:

    Z = Q K'^T            for the next block, in flight
    acc += P V            for this block, in flight behind it
    when Z is ready:      maximum, P' = 2^(Z c - ...), sums by lanes
    when acc is ready:    acc = acc a

Each row has the operations of `kernels_triton` in the same order, for every block from the first to the last:

- Z is one chain over D, from zero, whatever the instruction's width. D is padded with zeros, and steps of
  zeros change nothing.
- Of 64 x 128 scores a thread holds two rows, and of a row the keys 8 g + 2 i and 8 g + 2 i + 1 for one i of
  4: a *lane*. It adds halves of g, then the two of a pair, without an exchange between threads, in the order
  of the class.
- acc is multiplied by a after the previous block was added, and before this one is. Computing the
  exponentials earlier affects nothing.
- Where a segment ends, its state is folded into the totals; acc, the maximum and the sums start again. Z of
  the next block is computed by then, but it depends on no state. Meanwhile the totals of acc are in shared
  memory (for D = 256, where they do not fit, most of them in global memory, thread by thread). For the first
  segment they are not read: it is folded into zeros, fma(acc, new, 0).
- A block that only one of the two consumers sees changes nothing in the other: probabilities are 0, and a is
  1, or 0 where there has been no key yet. Skipping it gained nothing.
- Values after a sequence's last key may be anything, NaN too, and 0 NaN is NaN. They are set to zero in
  shared memory unless TMA has done so.

What follows decides no bit. Speeds are shares of cuDNN's on an H200, timed with one change at a time.

- Which program takes which item. Items are dealt to programs round-robin, those with most keys first and
  every other round in reverse, so that programs get about the same number of blocks. Heads that share keys
  are neighbours, and so read them from L2 at about the same time.
- Items come in sections whose keys and values take 16 MB together (`SECTION`), so that they stay in L2: with
  D = 256 0.76 instead of 0.67 for 4 x 2048 queries, and 0.90 instead of 0.83 for 2 x 8192; with D = 128 0.90
  instead of 0.87 for 4 x 2048, and 0.98 with and without for 1 x 16384.
- Calls whose keys fit in one segment have a kernel without the code that folds (`FOLDS`). For 8 x 1024
  queries that is 0.90 instead of 0.69 with D = 256, and 0.82 instead of 0.77 with D = 128.
- The two consumers issue products in turns (`TURNS`), but not for D = 256, where one would wait while the
  other folds: 0.83 instead of 0.81 for 2 x 8192.

The backward (`kernels_hopper_bwd`) and decoding (`kernels_hopper_decode`) use the pieces of this file.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run, unused
from isobit.kernels.hopper.division import divided, divides
from isobit.kernels.hopper.heads import descriptor, load_box, tile_layout, why_not_tma
from isobit.kernels.hopper.pipeline import (
    ROWS,
    accumulator_layout,
    after,
    fence_async_shared,
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
from isobit.kernels.hopper.softmax import (
    LANES,
    finite,
    halved,
    joined,
    lane_sums,
    packed,
    per_column,
    per_lane,
    per_row,
    row_maxima,
    unpacked,
)
from isobit.ops.attention.calls import (
    SEGMENT,
    block_keys,
    call_of,
    decodes,
    factors_of,
    key_bounds,
    which_tanh,
)
from isobit.ops.attention.kernels_hopper_items import CONSUMERS, PLAIN, Item, Problem, like, read_item
from isobit.ops.attention.kernels_hopper_softcap import capped
from isobit.ops.attention.kernels_triton import count_tiles

#: Stages of keys and of values by padded D: what fits in 227 KB next to queries and totals.
STAGES = {64: 2, 128: 2, 256: 2}

#: By padded D: pieces of the totals that fit in shared memory next to them; others are in global memory.
SHARED_PIECES = {64: 2, 128: 4, 256: 2}

#: By padded D: whether the two consumers issue products in turns.
TURNS = {64: True, 128: True, 256: False}

#: Bytes of the keys and values of a section: they stay in L2 while its items are computed.
SECTION = 16 << 20

#: A tile holds queries of one head. From this many queries per sequence on, tiles are full enough.
MANY_QUERIES = 64

#: Registers per thread: of all warps at launch, then of a consumer and of the producer.
LAUNCH_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS = 168, gl.constexpr(240), gl.constexpr(24)

#: Totals in shared memory: the eight rows of one store are in different banks.
TOTALS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
#: Columns of acc that are folded at once: more would need too many registers.
PIECE = gl.constexpr(32)
PIECE_LAYOUT = gl.constexpr(accumulator_layout(32))
#: A piece in global memory: each thread's 16 numbers as four vectors of four, [vector, thread, number]. So
#: a warp loads 512 bytes that lie together. Row by row it would be 32-bit loads from eight rows.
VECTORS = gl.constexpr(gl.BlockedLayout([4, 1, 4], [1, 32, 1], [1, 4, 1], [2, 1, 0]))
#: Pieces that are loaded from global memory before the totals in front of them are stored.
AHEAD = gl.constexpr(2)
#: A piece of the results in shared memory, on its way to coalesced stores.
STAGED = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
#: For coalesced stores: a thread has eight neighbouring columns.
BY_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))


# The ring, and the producer


@gluon.jit
def load_when_empty(desc, batch, head, row, buffer, ready, empty, phase):
    """Start the load of one box as soon as its buffer is empty."""
    mbarrier.wait(empty, phase)
    mbarrier.expect(ready, desc.block_type.nbytes)
    load_box(desc, batch, head, row, buffer, ready)


@record
class Ring:
    """Shared memory: an item's queries, and stages of blocks of keys and values. `ready`: the bytes have
    arrived; `empty`: all who multiply with them are done.

    Item metadata is double-buffered: it must survive until the results are stored, when the next item's
    queries may already be loaded."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    items: gl.shared_memory_descriptor
    q_ready: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_ready: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_ready: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    D: gl.constexpr  # padded
    BLOCK: gl.constexpr
    STAGES: gl.constexpr
    ARRIVALS: gl.constexpr  # that make queries ready: that of TMA, and those of others who write

    @gluon.jit
    def create(
        q_desc, k_desc, v_desc, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
        TILE_LAYOUT: gl.constexpr, ARRIVALS: gl.constexpr = 1,
    ):  # fmt: skip
        q = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, ROWS, D], TILE_LAYOUT)
        k = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK, D], TILE_LAYOUT)
        v = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BLOCK, D], TILE_LAYOUT)
        items = gl.allocate_shared_memory(gl.int32, [16, 1], PLAIN)
        bars: gl.constexpr = mbarrier.MBarrierLayout()
        q_ready = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], bars)
        q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], bars)
        k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        for i in gl.static_range(CONSUMERS):
            mbarrier.init(q_ready.index(i), count=ARRIVALS)
            mbarrier.init(q_empty.index(i), count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_ready.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=CONSUMERS)
            mbarrier.init(v_ready.index(i), count=1)
            mbarrier.init(v_empty.index(i), count=CONSUMERS)
        fence_async_shared()  # TMA signals these barriers, and must see them initialised
        return Ring(
            q_desc, k_desc, v_desc, q, k, v, items, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
            D, BLOCK, STAGES, ARRIVALS,
        )  # fmt: skip

    @gluon.jit
    def load_k(self, item, kv, at, stage, phase):
        """Load the keys of a block as soon as their stage is empty."""
        load_when_empty(
            self.k_desc, item.batch, kv, at, self.k.index(stage), self.k_ready.index(stage),
            self.k_empty.index(stage), phase,
        )  # fmt: skip

    @gluon.jit
    def load_v(self, item, kv, at, stage, phase):
        """Load the values of a block as soon as their stage is empty."""
        load_when_empty(
            self.v_desc, item.batch, kv, at, self.v.index(stage), self.v_ready.index(stage),
            self.v_empty.index(stage), phase,
        )  # fmt: skip

    @gluon.jit
    def release(self, stage, phase):
        """Release a stage unread, once it is ready."""
        mbarrier.wait(self.k_ready.index(stage), phase)
        mbarrier.arrive(self.k_empty.index(stage))
        mbarrier.wait(self.v_ready.index(stage), phase)
        mbarrier.arrive(self.v_empty.index(stage))

    @gluon.jit
    def write_item(self, item, slot):
        """Write an item's metadata as soon as both consumers are done with the queries before its own."""
        for w in gl.static_range(CONSUMERS):
            mbarrier.wait(self.q_empty.index(w), slot ^ 1)
        item.write(self.items, slot)

    @gluon.jit
    def end(self, slot):
        """Tell the consumers that there is no more work."""
        none = gl.to_tensor(-1)
        self.write_item(Item(none, none, none, none, none, none, none, none), slot)
        for w in gl.static_range(CONSUMERS):
            for _ in gl.static_range(self.ARRIVALS):
                mbarrier.arrive(self.q_ready.index(w))


@gluon.jit
def item_of_round(i):
    """The number of the item that this program takes in round i; it may be past the last. Items are sorted by
    their work, and every other round is dealt in reverse, so that all programs get about the same."""
    place = gl.program_id(0)
    if i % 2 == 1:
        place = gl.num_programs(0) - 1 - place
    return i * gl.num_programs(0) + place


@gluon.jit
def item_in_sections(problem, t, pairs):
    """The number of the item that comes t-th if all heads of `pairs` pairs of a sequence and a KV head come
    before those of the next: their keys and values fit in L2 together. Within such a section items are
    sorted by their work, and every other section in reverse, so that neighbours have about the same."""
    if not problem.PACKED:
        kv_heads = problem.heads // problem.G
        levels = problem.tiles // problem.sequences
        section = t // (pairs * problem.G * levels)
        first = section * pairs
        count = problem.sequences * kv_heads
        at = t - first * problem.G * levels
        width = gl.minimum(pairs, count - first) * problem.G
        level = at // width
        if (gl.cdiv(count, pairs) - section) % 2 == 0:
            level = levels - 1 - level
        pair = first + at % width // problem.G
        head = pair % kv_heads * problem.G + at % problem.G
        t = (level * problem.sequences + pair // kv_heads) * problem.heads + head
    return t


@gluon.jit
def load_items(problem, ring, pairs):
    """The producer. It loads the keys of a block before the values of the previous one: in that order they
    are multiplied, and their stages become empty."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # of `empty`: a fresh barrier counts as one whose phase 1 is complete
    slot = gl.to_tensor(0)
    for i in range(gl.cdiv(problem.items(), gl.num_programs(0))):
        t = item_of_round(i)
        if t < problem.items():
            item, first = problem.query_item(item_in_sections(problem, t, pairs))
            if item.live > 0:
                kv = item.head // problem.G
                at = first + item.begin
                if item.blocks > 0:
                    ring.load_k(item, kv, at, stage, phase)
                ring.write_item(item, slot)
                for w in gl.static_range(CONSUMERS):
                    if item.blocks > 0:
                        load_when_empty(
                            ring.q_desc, item.batch, item.head, item.row + w * ROWS, ring.q.index(w),
                            ring.q_ready.index(w), ring.q_empty.index(w), slot ^ 1,
                        )  # fmt: skip
                    else:
                        mbarrier.arrive(ring.q_ready.index(w))
                slot = slot ^ 1
                for block in range(item.blocks):
                    k_stage, k_phase = after(stage, phase, ring.STAGES)
                    if block + 1 < item.blocks:
                        ring.load_k(item, kv, at + ring.BLOCK, k_stage, k_phase)
                    ring.load_v(item, kv, at, stage, phase)
                    at += ring.BLOCK
                    stage, phase = after(stage, phase, ring.STAGES)
    ring.end(slot)


# The consumers


@gluon.jit
def columns(COUNT: gl.constexpr):
    """The columns of a tile, for coalesced stores."""
    return gl.expand_dims(gl.arange(0, COUNT, gl.SliceLayout(0, BY_ROWS)), 0)


@gluon.jit
def offsets(row, heads, head, column, D: gl.constexpr):
    """Of these rows and columns of a head, in a tensor [rows, heads, D]."""
    return gl.expand_dims((row * heads + head) * D, 1) + column


@gluon.jit
def clear(buffers, stage, begin, end, SIZE: gl.constexpr):
    """Zeros for the rows of a stage's block of SIZE before `begin` and from `end` on."""
    AT_ONCE: gl.constexpr = 32
    row = gl.expand_dims(gl.arange(0, AT_ONCE, gl.SliceLayout(1, BY_ROWS)), 1)
    for i in gl.static_range(SIZE // AT_ONCE):
        if (begin > i * AT_ONCE) | (end < (i + 1) * AT_ONCE):
            rows = buffers.index(stage).slice(i * AT_ONCE, AT_ONCE)
            live = (row + i * AT_ONCE >= begin) & (row + i * AT_ONCE < end)
            rows.store(gl.where(live, rows.load(BY_ROWS), 0.0))
    fence_async_shared()


@gluon.jit
def as_vectors(piece):
    """A piece as each thread's four vectors: rows 16 i + 8 j + k, columns 16 m + 8 n + 2 o + p become vector
    (j, m) of thread (i, k, o), and its number (n, p)."""
    x = gl.permute(gl.reshape(piece, (4, 2, 8, 2, 2, 4, 2)), (1, 3, 0, 2, 5, 4, 6))
    return gl.convert_layout(gl.reshape(x, (4, 128, 4)), VECTORS)


@gluon.jit
def from_vectors(x):
    """The reverse of `as_vectors`."""
    x = gl.permute(gl.reshape(x, (2, 2, 4, 8, 4, 2, 2)), (2, 0, 3, 1, 5, 4, 6))
    return gl.convert_layout(gl.reshape(x, (64, 32)), PIECE_LAYOUT)


@record
class State:
    """What a consumer carries from block to block."""

    m: gl.tensor  # maximum of the segment
    lanes: gl.tensor  # its sums by lanes
    acc: gl.tensor  # its P V, without the last block's
    p: gl.tensor  # packed probabilities of the last block
    total_m: gl.tensor  # of the segments before
    total_s: gl.tensor
    folded: gl.tensor  # 1 if there are segments before; their acc is in the totals
    stage: gl.tensor  # of the last block's values
    phase: gl.tensor
    turn: gl.tensor  # phase of this consumer's barrier in `turns`


@record
class Consumer:
    """What a consumer warpgroup works with."""

    problem: Problem
    ring: Ring
    turns: gl.shared_memory_descriptor
    totals: gl.shared_memory_descriptor
    scratch: gl.tensor
    out: gl.tensor
    lse: gl.tensor
    c: gl.tensor
    cap: gl.tensor
    slope: gl.tensor
    D: gl.constexpr
    Z_LAYOUT: gl.constexpr
    ACC_LAYOUT: gl.constexpr
    WHICH: gl.constexpr  # of the two consumers
    CAPPED: gl.constexpr
    CLEAR: gl.constexpr
    TURNS: gl.constexpr
    SHARED: gl.constexpr  # pieces of the totals that are in shared memory
    HAS_LSE: gl.constexpr
    SEGMENT: gl.constexpr
    FOLDS: gl.constexpr  # a sequence may have more than one segment

    @gluon.jit
    def scores(self, stage, phase):
        """Start Z of the block in this stage."""
        ring = self.ring
        mbarrier.wait(ring.k_ready.index(stage), phase)
        zeros = gl.zeros((ROWS, ring.BLOCK), gl.float32, self.Z_LAYOUT)
        q, k = ring.q.index(self.WHICH), ring.k.index(stage)
        return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)

    @gluon.jit
    def exponentials(self, z, m, lanes, at, newest, oldest, MASKED: gl.constexpr):
        """(m, lanes, a, p) after the block of keys from `at`. A row sees the keys from `oldest` to `newest`;
        without MASKED all rows see the whole block."""
        if self.CAPPED:
            z = capped(z, self.cap, self.slope, self.CAPPED)
        if MASKED:
            key = gl.expand_dims(gl.arange(0, self.ring.BLOCK, gl.SliceLayout(0, self.Z_LAYOUT)), 0)
            sees = key <= gl.expand_dims(newest - at, 1)
            if self.problem.WINDOWED:
                sees = sees & (key >= gl.expand_dims(oldest - at, 1))
            z = gl.where(sees, z, float("-inf"))
        top = gl.maximum(m, per_row(row_maxima(z), self.Z_LAYOUT))
        base = finite(top)
        a = gl.exp2((m - base) * self.c)
        p = gl.exp2(gl.fma(z, gl.full_like(z, self.c), gl.expand_dims(-(base * self.c), 1)))
        lanes = gl.fma(lanes, per_lane(a), lane_sums(p))
        return top, lanes, a, p

    @gluon.jit
    def add_values(self, p, acc, stage):
        """Start acc + P V of the block in this stage."""
        v = self.ring.v.index(stage)
        p = unpacked(p, v.dtype, gl.DotOperandLayout(0, self.ACC_LAYOUT, 2))
        return warpgroup_mma(p, v, acc, is_async=True)

    @gluon.jit
    def pieces(self, acc):
        """acc in pieces of PIECE columns, as they lie in registers."""
        parts = (acc,)
        for _ in gl.static_range(3):
            if parts[0].shape[1] > PIECE:
                parts = halved(parts)
        pieces = ()
        for i in gl.static_range(len(parts)):
            pieces = pieces + (gl.convert_layout(parts[i], PIECE_LAYOUT, assert_trivial=True),)
        return pieces

    @gluon.jit
    def total_at(self, WHERE: gl.constexpr):
        """The addresses of a piece of the totals in global memory."""
        vector = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, VECTORS)))
        thread = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(2, VECTORS)))
        number = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, VECTORS)))
        own = gl.expand_dims(gl.expand_dims(vector * 512, 1) + gl.expand_dims(thread * 4, 0), 2)
        own = own + gl.expand_dims(gl.expand_dims(number, 0), 0)
        rows = ((gl.program_id(0) * CONSUMERS + self.WHICH) * (self.ring.D // PIECE) + WHERE) * ROWS
        return gl.multiple_of(self.scratch + rows.to(gl.int64) * PIECE + own, (1, 1, 16))

    @gluon.jit
    def load_total(self, folded, WHERE: gl.constexpr):
        """A piece of the totals, which are zeros unless `folded`."""
        if WHERE < self.SHARED:
            total = gl.zeros((ROWS, PIECE), gl.float32, PIECE_LAYOUT)
            if folded > 0:
                total = self.totals.index(self.WHICH * self.SHARED + WHERE).load(PIECE_LAYOUT)
        else:
            there = gl.full((4, 128, 4), 0, gl.int32, VECTORS) + folded > 0
            total = from_vectors(gl.load(self.total_at(WHERE), mask=there, other=0.0))
        return total

    @gluon.jit
    def store_total(self, total, WHERE: gl.constexpr):
        if WHERE < self.SHARED:
            self.totals.index(self.WHICH * self.SHARED + WHERE).store(total)
        else:
            gl.store(self.total_at(WHERE), as_vectors(total))

    @gluon.jit
    def fold_sums(self, total_m, total_s, m, lanes):
        """(m, s, weights of totals and of the segment, whether a row has seen a key of it) after a segment.
        Rows without a key in this segment are left unchanged. This tests s == 0, not m == -inf: m is also
        -inf if all scores are NaN."""
        s = per_row(joined(lanes), self.Z_LAYOUT)
        top = gl.maximum(total_m, m)
        base = finite(top)
        old = gl.exp2((total_m - base) * self.c)
        new = gl.exp2((m - base) * self.c)
        seen = s != 0.0
        total_s = gl.where(seen, gl.fma(s, new, total_s * old), total_s)
        return gl.where(seen, top, total_m), total_s, old, new, seen

    @gluon.jit
    def fold_piece(self, total, piece, old, new, seen):
        """A piece of the totals after folding in that of a segment's acc."""
        more = gl.fma(piece, per_column(new, PIECE_LAYOUT), total * per_column(old, PIECE_LAYOUT))
        return gl.where(per_column(seen, PIECE_LAYOUT), more, total)

    @gluon.jit
    def fold(self, total_m, total_s, folded, m, lanes, acc):
        """(m, s) of the segments before and this one; acc goes to the totals. Some pieces are loaded before
        others are stored: the compiler moves no load from global memory in front of a store."""
        total_m, total_s, old, new, seen = self.fold_sums(total_m, total_s, m, lanes)
        pieces = self.pieces(acc)
        COUNT: gl.constexpr = len(pieces)
        totals = ()
        for i in gl.static_range(self.SHARED, min(self.SHARED + AHEAD, COUNT)):
            totals = totals + (self.load_total(folded, i),)
        for i in gl.static_range(self.SHARED):
            self.store_total(self.fold_piece(self.load_total(folded, i), pieces[i], old, new, seen), i)
        for i in gl.static_range(self.SHARED, COUNT):
            if i + AHEAD < COUNT:
                totals = totals + (self.load_total(folded, i + AHEAD),)
            self.store_total(self.fold_piece(totals[i - self.SHARED], pieces[i], old, new, seen), i)
        return total_m, total_s

    @gluon.jit
    def blocks(self, state, begin, end, newest, oldest, MASKED: gl.constexpr):
        """Process the blocks from `begin` to `end`. On entry and exit, `p` holds the previous block's
        probabilities; its P V product is still pending, and its values are in `stage`."""
        m, lanes, acc, p = state.m, state.lanes, state.acc, state.p
        total_m, total_s, folded = state.total_m, state.total_s, state.folded
        stage, phase, turn = state.stage, state.phase, state.turn
        ring = self.ring
        for at in range(begin, end, ring.BLOCK):
            k_stage, k_phase = after(stage, phase, ring.STAGES)
            if self.TURNS:
                mbarrier.wait(self.turns.index(self.WHICH), turn)
            z = self.scores(k_stage, k_phase)
            acc = self.add_values(p, acc, stage)
            if self.TURNS:
                mbarrier.arrive(self.turns.index(1 - self.WHICH))
                turn = turn ^ 1
            z = warpgroup_mma_wait(1, deps=(z,))
            mbarrier.arrive(ring.k_empty.index(k_stage))
            before, before_lanes = m, lanes
            if self.FOLDS:
                fresh = at % self.SEGMENT == 0  # the first of a segment
                before = gl.where(fresh, float("-inf"), m)
                before_lanes = gl.where(fresh, 0.0, lanes)
            top, sums, a, e = self.exponentials(z, before, before_lanes, at, newest, oldest, MASKED)
            # The values are not needed yet. But the compiler moves no arithmetic across a barrier, so this
            # wait keeps the exponentials before the next one: they overlap with the products in flight.
            mbarrier.wait(ring.v_ready.index(k_stage), k_phase)
            acc, e, sums, a = warpgroup_mma_wait(0, deps=(acc, e, sums, a))
            mbarrier.arrive(ring.v_empty.index(stage))
            p = packed(e, ring.v_desc.dtype)  # in the registers of the product that has just ended
            if self.FOLDS:
                if fresh:
                    total_m, total_s = self.fold(total_m, total_s, folded, m, lanes, acc)
                    folded = like(folded, 1)
                    acc = gl.zeros_like(acc)
            acc = acc * per_column(a, self.ACC_LAYOUT)
            m = top
            lanes = sums
            stage, phase = after(stage, phase, ring.STAGES)
        return State(m, lanes, acc, p, total_m, total_s, folded, stage, phase, turn)

    @gluon.jit
    def staging(self, WHERE: gl.constexpr):
        """The buffer of a piece of the results: where its totals were, or else the queries."""
        ring = self.ring
        PIECES: gl.constexpr = ring.D // PIECE
        if self.SHARED == PIECES:
            buffer = self.totals.index(self.WHICH * PIECES + WHERE)
        else:
            whole = reinterpreted(ring.q.index(self.WHICH), ring.q_desc.dtype, [PIECES, ROWS, PIECE], STAGED)
            buffer = whole.index(WHERE)
        return reinterpreted(buffer, ring.q_desc.dtype, [ROWS, PIECE], STAGED)

    @gluon.jit
    def store(self, slot, state, acc):
        """The last fold, and the results of this consumer's queries."""
        problem, ring = self.problem, self.ring
        m, s, old, new, seen = self.fold_sums(state.total_m, state.total_s, state.m, state.lanes)
        any_key = s != 0.0
        s = gl.where(any_key, s, 1.0)
        pieces = self.pieces(acc)
        totals = ()
        for i in gl.static_range(len(pieces)):
            total = gl.zeros((ROWS, PIECE), gl.float32, PIECE_LAYOUT)
            if self.FOLDS:
                total = self.load_total(state.folded, i)
            totals = totals + (self.fold_piece(total, pieces[i], old, new, seen),)
        divisor = per_row(s, PIECE_LAYOUT)
        if divides(totals, divisor):
            results = divided(totals, divisor, True)
        else:
            results = divided(totals, divisor, False)
        item = read_item(ring.items, slot)
        batch = item.batch.to(gl.int64)
        query = self.WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, BY_ROWS))
        column = columns(PIECE)
        to = offsets(batch * problem.T + item.row + query, problem.heads, item.head, column, self.D)
        to = gl.multiple_of(self.out + to, (1, 16))  # the alignment of `out` is lost on the way here
        there = gl.expand_dims(query < item.live, 1)
        for i in gl.static_range(len(results)):
            buffer = self.staging(i)
            buffer.store(gl.where(per_column(any_key, PIECE_LAYOUT), results[i], 0.0).to(ring.q_desc.dtype))
            inside = there
            if self.D < ring.D:
                inside = there & (column + i * PIECE < self.D)
            gl.store(to + i * PIECE, buffer.load(BY_ROWS), mask=inside)
        if self.HAS_LSE:
            LN2: gl.constexpr = 0.6931471805599453
            lse = gl.where(any_key, (m * self.c + gl.log2(s)) * LN2, float("-inf"))
            query = self.WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, self.Z_LAYOUT))
            at = (batch * problem.heads + item.head) * problem.T + item.row + query
            gl.store(self.lse + at, lse, mask=query < item.live)

    @gluon.jit
    def attend(self, slot, blocks, stage, phase, turn):
        """This consumer's queries of an item that has at least one block."""
        problem, ring = self.problem, self.ring
        item = read_item(ring.items, slot)
        here = item.position + self.WHICH * ROWS  # the position of this consumer's first query
        last = item.begin + blocks * ring.BLOCK
        i = gl.arange(0, ROWS, gl.SliceLayout(1, self.Z_LAYOUT))
        newest = like(i, item.keys) - 1
        whole = item.keys  # all queries see all keys before it
        if problem.CAUSAL:
            newest = gl.minimum(here + i, newest)
            whole = gl.maximum(here + 1, 0)
        oldest = here + i - problem.window + 1
        lo = item.begin + ring.BLOCK
        inner = lo
        if problem.WINDOWED:
            youngest = gl.maximum(here + ROWS - problem.window, 0)  # the oldest key of the last query
            inner = gl.minimum(gl.maximum(lo, gl.cdiv(youngest, ring.BLOCK) * ring.BLOCK), last)
        outer = gl.maximum(inner, gl.minimum(last, whole // ring.BLOCK * ring.BLOCK))

        total_m = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, self.Z_LAYOUT))
        total_s = gl.zeros_like(total_m)
        lanes = gl.zeros((ROWS, 4), gl.float32, LANES)
        z = warpgroup_mma_wait(0, deps=(self.scores(stage, phase),))
        mbarrier.arrive(ring.k_empty.index(stage))
        m, lanes, _, e = self.exponentials(z, total_m, lanes, item.begin, newest, oldest, True)
        p = packed(e, ring.v_desc.dtype)
        mbarrier.wait(ring.v_ready.index(stage), phase)
        acc = gl.zeros((ROWS, ring.D), gl.float32, self.ACC_LAYOUT)
        state = State(m, lanes, acc, p, total_m, total_s, like(blocks, 0), stage, phase, turn)
        if problem.WINDOWED:
            state = self.blocks(state, lo, inner, newest, oldest, True)
        state = self.blocks(state, inner, outer, newest, oldest, False)
        state = self.blocks(state, outer, last, newest, oldest, True)
        if self.CLEAR:
            if item.keys < last:
                clear(ring.v, state.stage, 0, item.keys - last + ring.BLOCK, ring.BLOCK)
        acc = self.add_values(state.p, state.acc, state.stage)
        if self.SHARED == ring.D // PIECE:  # results are stored through the totals, otherwise the queries
            mbarrier.arrive(ring.q_empty.index(self.WHICH))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(ring.v_empty.index(state.stage))
        self.store(slot, state, acc)
        if self.SHARED < ring.D // PIECE:
            fence_async_shared()
            mbarrier.arrive(ring.q_empty.index(self.WHICH))
        stage, phase = after(state.stage, state.phase, ring.STAGES)
        return stage, phase, state.turn

    @gluon.jit
    def store_without_keys(self, slot):
        """The results of queries that see no key: 0 and -inf."""
        problem, ring = self.problem, self.ring
        item = read_item(ring.items, slot)
        batch = item.batch.to(gl.int64)
        query = self.WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, BY_ROWS))
        column = columns(ring.D)
        to = offsets(batch * problem.T + item.row + query, problem.heads, item.head, column, self.D)
        there = gl.expand_dims(query < item.live, 1) & (column < self.D)
        zeros = gl.zeros((ROWS, ring.D), ring.q_desc.dtype, BY_ROWS)
        gl.store(gl.multiple_of(self.out + to, (1, 16)), zeros, mask=there)
        if self.HAS_LSE:
            at = (batch * problem.heads + item.head) * problem.T + item.row + query
            lse = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, BY_ROWS))
            gl.store(self.lse + at, lse, mask=query < item.live)
        mbarrier.arrive(ring.q_empty.index(self.WHICH))


@gluon.jit
def attend_items(consumer):
    """A consumer warpgroup: its queries of all of the program's items."""
    ring = consumer.ring
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)  # of the item, and the phase of its queries
    turn = gl.to_tensor(1 - consumer.WHICH)  # the first consumer begins
    mbarrier.wait(ring.q_ready.index(consumer.WHICH), slot)
    blocks = read_item(ring.items, slot).blocks
    while blocks >= 0:
        if blocks > 0:
            stage, phase, turn = consumer.attend(slot, blocks, stage, phase, turn)
        else:
            consumer.store_without_keys(slot)
        slot = slot ^ 1
        mbarrier.wait(ring.q_ready.index(consumer.WHICH), slot)
        blocks = read_item(ring.items, slot).blocks


@kernel
def attention_kernel(
    out, lse, scratch, key_start, key_end, cu_q, cu_k, T, S, sequences, window, tiles, H, G, pairs, c, cap,
    slope, q_desc, k_desc, v_desc,
    D: gl.constexpr, DP: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, SEGMENT: gl.constexpr,
    TILE_LAYOUT: gl.constexpr, Z_LAYOUT: gl.constexpr, ACC_LAYOUT: gl.constexpr, PACKED: gl.constexpr,
    STARTS: gl.constexpr, ENDS: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr,
    CAPPED: gl.constexpr, TURNS: gl.constexpr, SHARED: gl.constexpr, HAS_LSE: gl.constexpr,
    FOLDS: gl.constexpr,
):  # fmt: skip
    problem = Problem(
        key_start, key_end, cu_q, cu_k, T, S, sequences, window, tiles, H, G, BLOCK, PACKED, STARTS, ENDS,
        CAUSAL, WINDOWED,
    )  # fmt: skip
    ring = Ring.create(q_desc, k_desc, v_desc, DP, BLOCK, STAGES, TILE_LAYOUT)
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(i), count=1)
    totals = gl.allocate_shared_memory(gl.float32, [CONSUMERS * SHARED, ROWS, PIECE], TOTALS)
    CLEAR: gl.constexpr = PACKED or ENDS
    first = Consumer(
        problem, ring, turns, totals, scratch, out, lse, c, cap, slope, D, Z_LAYOUT, ACC_LAYOUT, 0, CAPPED,
        CLEAR, TURNS, SHARED, HAS_LSE, SEGMENT, FOLDS,
    )  # fmt: skip
    second = Consumer(
        problem, ring, turns, totals, scratch, out, lse, c, cap, slope, D, Z_LAYOUT, ACC_LAYOUT, 1, CAPPED,
        CLEAR, TURNS, SHARED, HAS_LSE, SEGMENT, FOLDS,
    )  # fmt: skip
    gl.warp_specialize(
        [(attend_items, (first,)), (attend_items, (second,)), (load_items, (problem, ring, pairs))],
        [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


# Launcher


def why_not_paged(args: dict[str, Any]) -> str | None:
    """Why keys in pages are not served, or None. Only decoding reads them, in boxes of keys that lie
    together. Small boxes are slow: with pages of 16 it took 1.7 times as long as triton (H200)."""
    call = call_of(args)
    if not call.page:
        return None
    if call.packed_q or args["key_start"] is not None:
        return "keys in pages with packed queries or key_start are not supported"
    if not decodes(call):
        return "keys in pages with many queries or few keys are not supported"
    if call.page % 64:
        return f"keys in pages of {call.page}: pages must be multiples of 64 keys"
    return None


def why_not(args: dict[str, Any]) -> str | None:
    """Why this kernel cannot serve a call, or None."""
    if args["q"].dtype not in (torch.bfloat16, torch.float16):
        return "tensor cores take bf16 and fp16"
    if 0 in args["k"].shape:
        return "there are no keys, and TMA cannot read an empty tensor"
    reasons = (why_not_paged(args), *(why_not_tma(name, args[name]) for name in ("q", "k", "v")))
    return next((reason for reason in reasons if reason is not None), None)


def slower_because(args: dict[str, Any]) -> str | None:
    """Why another backend is faster for this call, or None."""
    call = call_of(args)
    queries = call.T // max(call.sequences, 1) if call.packed_q else call.T
    if queries < MANY_QUERIES:
        return f"a tile is {2 * MANY_QUERIES} queries of one head, and there are {queries} a sequence"
    return None


def bounds_of(args: dict[str, Any], placeholder: Tensor) -> tuple[Tensor, ...]:
    """key_start, key_end and the borders of packed queries and keys, for kernels that read those given."""
    given = (args["key_start"], args["key_end"], args["cu_seqlens_q"], key_bounds(args))
    return tuple(unused(placeholder) if t is None else t for t in given)


def flags_of(args: dict[str, Any], tangent: int = 1) -> dict[str, Any]:
    """Which cases a kernel is compiled for."""
    return {
        "PACKED": args["cu_seqlens_q"] is not None,
        "STARTS": args["key_start"] is not None,
        "ENDS": args["key_end"] is not None,
        "CAUSAL": args["causal"],
        "WINDOWED": args["window"] is not None,
        "CAPPED": which_tanh(args, tangent),
    }


#: Compile options: registers before each role takes its own number; fused multiply-adds only where stated.
OPTIONS: dict[str, Any] = {"num_warps": 4, "maxnreg": LAUNCH_REGISTERS, "enable_fp_fusion": False}


def attention(
    launch: Launch = run,
    segment: int = SEGMENT,
    out: Tensor | None = None,
    tangent: int = 1,
    **args: Any,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse); `out` is the memory to write it to, if the caller has some. The class fixes `segment`, and
    `tangent` is the class whose tanh caps scores."""
    call, factors = call_of(args), factors_of(args, tangent)
    q, k, v = args["q"], args["k"], args["v"]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = None
    if args["return_lse"]:
        lse = torch.empty((call.B, call.H, call.T), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    DP, block = call.padded, block_keys(call.D)
    tiles = count_tiles(call, 128)
    programs = min(tiles * call.H, sm_count(q.device))
    shared = SHARED_PIECES[DP]
    pairs = max(1, min(SECTION // (4 * call.S * DP), call.sequences * call.KV))
    folds = min(segment, SEGMENT) < call.S  # a longer segment, to compare with, has the same kernel
    scratch = unused(out)
    if folds and shared < DP // PIECE.value:
        scratch = torch.empty((programs, 128, DP), dtype=torch.float32, device=q.device)
    launch(
        attention_kernel,
        (programs,),
        out,
        unused(out) if lse is None else lse,
        scratch,
        *bounds_of(args, out),
        *(call.T, call.S, call.sequences, args["window"] or 0, tiles, call.H, call.group, pairs),
        *(factors.c, factors.cap, factors.slope),
        *(descriptor(q, 64, DP), descriptor(k, block, DP), descriptor(v, block, DP)),
        D=call.D,
        DP=DP,
        BLOCK=block,
        STAGES=STAGES[DP],
        SEGMENT=segment,
        TILE_LAYOUT=tile_layout(DP, q.dtype),
        Z_LAYOUT=accumulator_layout(block),
        ACC_LAYOUT=accumulator_layout(DP),
        TURNS=TURNS[DP],
        SHARED=shared,
        HAS_LSE=lse is not None,
        FOLDS=folds,
        **flags_of(args, tangent),
        **OPTIONS,
    )
    return out, lse
