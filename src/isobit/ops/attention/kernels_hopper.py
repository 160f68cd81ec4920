"""Attention forward on Hopper: class attn/1, for many queries at once.

A program has two warpgroups with 64 queries each, and a loader warp for queries, keys and values
(`kernels_hopper_io`). A warpgroup loops over the blocks of its keys. It computes exponentials while the
tensor cores multiply the probabilities of one block with its values, and the next keys with the queries:

    Z = Q K'^T            of the next block, under way
    acc += P V            of this one, under way behind it
    Z is there:           maximum, P' = 2^(Z c - ...), sums by lanes
    acc is there:         acc = acc a

Each row has the operations of `kernels_triton` in the same order, for every block from the first to the last:

- Z is one chain over D, from zero, whatever the instruction's width. D is padded with zeros, and steps of
  zeros change nothing.
- Of a row, a thread holds the keys 8 g + 2 i and 8 g + 2 i + 1 of a block for one i of 4: a lane. It adds
  halves of g, then the two of a pair, without an exchange between threads, in the order of the class.
- acc is multiplied by a after the previous block was added, and before this one is. That the exponentials are
  computed earlier affects nothing.
- Where a segment ends, its state is folded into the totals: acc, the maximum and the sums start again for the
  next block. Its Z has been computed by then, which depends on no state. The totals of acc are kept in
  shared memory meanwhile (for D = 256, where it does not fit, in global memory). They are not read for the
  first segment, which is folded into zeros: fma(acc, new, 0).
- A block that only one of the two warpgroups sees changes nothing in the other: probabilities are 0, and a is
  1, or 0 where there has been no key yet.
- Values after a sequence's last key may be anything, NaN too, and 0 NaN is NaN. They are set to zero in
  shared memory unless TMA has done so.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from isobit.ops.attention.calls import SEGMENT, call_of, factors_of, key_bounds
from isobit.ops.attention.kernels_hopper_io import (
    AT_LAUNCH,
    OF_LOADER,
    PARTS,
    REGISTERS,
    Ring,
    Work,
    clear,
    descriptor,
    flat_layout,
    load_items,
    reinterpreted,
    told,
    why_not_paged,
    why_not_tma,
)
from isobit.ops.attention.kernels_hopper_parts import (
    BY_ROWS,
    LANES,
    OF_PIECE,
    PIECE,
    STAGED,
    TOTALS,
    divided,
    divides,
    finite,
    halved,
    joined,
    lane_sums,
    packed,
    per_column,
    per_lane,
    row_maxima,
    tanh,
    unpacked,
)
from isobit.ops.attention.kernels_triton import block_keys, count_tiles

#: Stages of keys and of values: what fits beside queries and totals, 227 KB together.
STAGES = {64: 2, 128: 2, 256: 2}

#: A tile holds queries of one head. From this many queries of a sequence on it is full enough.
MANY_QUERIES = 64


@record
class Part:
    """What a warpgroup works with."""

    work: Work
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
    OF_Z: gl.constexpr
    OF_ACC: gl.constexpr
    WHICH: gl.constexpr
    CAPPED: gl.constexpr
    CLEAR: gl.constexpr
    TURNS: gl.constexpr
    IN_SHARED: gl.constexpr
    HAS_LSE: gl.constexpr
    SEGMENT: gl.constexpr

    @gluon.jit
    def scores(self, stage, phase):
        """Z of the block in this stage, on its way."""
        ring = self.ring
        mbarrier.wait(ring.k_ready.index(stage), phase)
        nothing = gl.zeros((ROWS, ring.BLOCK), gl.float32, self.OF_Z)
        q, k = ring.q.index(self.WHICH), ring.k.index(stage)
        return warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)

    @gluon.jit
    def exponentials(self, z, m, lanes, at, newest, oldest, MASKED: gl.constexpr):
        """(m, lanes, a, p) after the block of keys from `at`. A row sees the keys from `oldest` to `newest`;
        without MASKED all rows see all of the block."""
        if self.CAPPED:
            z = self.cap * tanh(z * self.slope)
        if MASKED:
            key = gl.expand_dims(gl.arange(0, self.ring.BLOCK, gl.SliceLayout(0, self.OF_Z)), 0)
            sees = key <= gl.expand_dims(newest - at, 1)
            if self.work.WINDOWED:
                sees = sees & (key >= gl.expand_dims(oldest - at, 1))
            z = gl.where(sees, z, float("-inf"))
        top = gl.maximum(
            m, gl.convert_layout(row_maxima(z), gl.SliceLayout(1, self.OF_Z), assert_trivial=True)
        )
        base = finite(top)
        a = gl.exp2((m - base) * self.c)
        p = gl.exp2(gl.fma(z, gl.full_like(z, self.c), gl.expand_dims(-(base * self.c), 1)))
        lanes = gl.fma(lanes, per_lane(a), lane_sums(p))
        return top, lanes, a, p

    @gluon.jit
    def values(self, p, acc, stage):
        """acc and P V of the block in this stage, on its way."""
        v = self.ring.v.index(stage)
        p = unpacked(p, v.dtype, gl.DotOperandLayout(0, self.OF_ACC, 2))
        return warpgroup_mma(p, v, acc, is_async=True)

    @gluon.jit
    def pieces(self, acc):
        """acc in pieces of some columns, as they lie in registers."""
        parts = (acc,)
        for _ in gl.static_range(3):
            if parts[0].shape[1] > PIECE:
                parts = halved(parts)
        found = ()
        for i in gl.static_range(len(parts)):
            found = found + (gl.convert_layout(parts[i], OF_PIECE, assert_trivial=True),)
        return found

    @gluon.jit
    def total_at(self, WHERE: gl.constexpr):
        """Where a piece of the totals lies in memory."""
        i = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, OF_PIECE)), 1)
        j = gl.expand_dims(gl.arange(0, PIECE, gl.SliceLayout(0, OF_PIECE)), 0)
        rows = ((gl.program_id(0) * PARTS + self.WHICH) * (self.ring.D // PIECE) + WHERE) * ROWS
        return self.scratch + rows.to(gl.int64) * PIECE + (i * PIECE + j)

    @gluon.jit
    def fold_sums(self, total_m, total_s, m, lanes):
        """(m, s, weights of totals and of the segment, whether a row has seen a key of it) after a segment.
        A row that has not stays as it is. Its sum tells, not its maximum: of scores that are all NaN that may
        be -inf."""
        s = gl.convert_layout(joined(lanes), gl.SliceLayout(1, self.OF_Z), assert_trivial=True)
        top = gl.maximum(total_m, m)
        base = finite(top)
        old = gl.exp2((total_m - base) * self.c)
        new = gl.exp2((m - base) * self.c)
        seen = s != 0.0
        total_s = gl.where(seen, gl.fma(s, new, total_s * old), total_s)
        return gl.where(seen, top, total_m), total_s, old, new, seen

    @gluon.jit
    def fold_piece(self, piece, old, new, seen, folded, WHERE: gl.constexpr):
        """A piece of the totals, which are nothing unless `folded`, with that of a segment's acc."""
        total = gl.zeros((ROWS, PIECE), gl.float32, OF_PIECE)
        if folded > 0:
            if self.IN_SHARED:
                total = self.totals.index(self.WHICH * (self.ring.D // PIECE) + WHERE).load(OF_PIECE)
            else:
                total = gl.load(self.total_at(WHERE))
        more = gl.fma(piece, per_column(new, OF_PIECE), total * per_column(old, OF_PIECE))
        return gl.where(per_column(seen, OF_PIECE), more, total)

    @gluon.jit
    def fold(self, total_m, total_s, folded, m, lanes, acc):
        """(m, s) of the segments that were folded before and one more; acc is left in the totals."""
        total_m, total_s, old, new, seen = self.fold_sums(total_m, total_s, m, lanes)
        pieces = self.pieces(acc)
        for i in gl.static_range(len(pieces)):
            total = self.fold_piece(pieces[i], old, new, seen, folded, i)
            if self.IN_SHARED:
                self.totals.index(self.WHICH * (self.ring.D // PIECE) + i).store(total)
            else:
                gl.store(self.total_at(i), total)
        return total_m, total_s

    @gluon.jit
    def blocks(self, state, begin, end, newest, oldest, MASKED: gl.constexpr):
        """Take in the blocks from `begin` to `end`. On the way in and out p is of the block before, and has
        not been multiplied with the values, which are those of the stage."""
        m, lanes, acc, p, total_m, total_s, folded, stage, phase, turn = state
        ring = self.ring
        for at in range(begin, end, ring.BLOCK):
            k_stage, k_phase = after(stage, phase, ring.STAGES)
            if self.TURNS:
                mbarrier.wait(self.turns.index(self.WHICH), turn)
            z = self.scores(k_stage, k_phase)
            acc = self.values(p, acc, stage)
            if self.TURNS:
                mbarrier.arrive(self.turns.index(1 - self.WHICH))
                turn = turn ^ 1
            z = warpgroup_mma_wait(1, deps=(z,))
            mbarrier.arrive(ring.k_empty.index(k_stage))
            fresh = at % self.SEGMENT == 0  # the first of a segment
            top, sums, a, e = self.exponentials(
                z, gl.where(fresh, float("-inf"), m), gl.where(fresh, 0.0, lanes), at, newest, oldest, MASKED
            )
            # The values are not needed yet. But the compiler moves no arithmetic across a barrier, so this
            # wait keeps the exponentials before the next one: they overlap with the products in flight.
            mbarrier.wait(ring.v_ready.index(k_stage), k_phase)
            acc, e, sums, a = warpgroup_mma_wait(0, deps=(acc, e, sums, a))
            mbarrier.arrive(ring.v_empty.index(stage))
            p = packed(e, ring.v_desc.dtype)  # in the registers that were multiplied with until now
            if fresh:
                total_m, total_s = self.fold(total_m, total_s, folded, m, lanes, acc)
                folded = folded * 0 + 1
                acc = gl.zeros_like(acc)
            acc = acc * per_column(a, self.OF_ACC)
            m = top
            lanes = sums
            stage, phase = after(stage, phase, ring.STAGES)
        return m, lanes, acc, p, total_m, total_s, folded, stage, phase, turn

    @gluon.jit
    def room(self, WHERE: gl.constexpr):
        """Where a piece of the results waits to be stored: where its totals were, or else the queries."""
        ring = self.ring
        PIECES: gl.constexpr = ring.D // PIECE
        if self.IN_SHARED:
            found = self.totals.index(self.WHICH * PIECES + WHERE)
        else:
            whole = reinterpreted(ring.q.index(self.WHICH), ring.q_desc.dtype, [PIECES, ROWS, PIECE], STAGED)
            found = whole.index(WHERE)
        return reinterpreted(found, ring.q_desc.dtype, [ROWS, PIECE], STAGED)

    @gluon.jit
    def put(self, slot, folded, total_m, total_s, m, lanes, acc):
        """The last fold, and the results of an item's part."""
        work, ring = self.work, self.ring
        m, s, old, new, seen = self.fold_sums(total_m, total_s, m, lanes)
        any_key = s != 0.0
        s = gl.where(any_key, s, 1.0)
        pieces = self.pieces(acc)
        totals = ()
        for i in gl.static_range(len(pieces)):
            totals = totals + (self.fold_piece(pieces[i], old, new, seen, folded, i),)
        if divides(totals, s):
            found = divided(totals, s, True)
        else:
            found = divided(totals, s, False)
        # Fields of the item that were not needed so far.
        live, row = told(ring.items, slot, 4), told(ring.items, slot, 5)
        batch, head = told(ring.items, slot, 6).to(gl.int64), told(ring.items, slot, 7)
        query = self.WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, BY_ROWS))
        j = gl.expand_dims(gl.arange(0, PIECE, gl.SliceLayout(0, BY_ROWS)), 0)
        to = gl.expand_dims(((batch * work.T + row + query) * work.H + head) * self.D, 1) + j
        to = gl.multiple_of(self.out + to, (1, 16))  # the alignment of `out` is lost on the way here
        there = gl.expand_dims(query < live, 1)
        for i in gl.static_range(len(found)):
            room = self.room(i)
            room.store(gl.where(per_column(any_key, OF_PIECE), found[i], 0.0).to(ring.q_desc.dtype))
            inside = there
            if self.D < ring.D:
                inside = there & (j + i * PIECE < self.D)
            gl.store(to + i * PIECE, room.load(BY_ROWS), mask=inside)
        if self.HAS_LSE:
            LN2: gl.constexpr = 0.6931471805599453
            own = gl.where(any_key, (m * self.c + gl.log2(s)) * LN2, float("-inf"))
            query = self.WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, self.OF_Z))
            at = (batch * work.H + head) * work.T + row + query
            gl.store(self.lse + at, own, mask=query < live)

    @gluon.jit
    def attend(self, slot, blocks, stage, phase, turn):
        """One item's part, which has at least one block."""
        work, ring = self.work, self.ring
        begin, keys = told(ring.items, slot, 1), told(ring.items, slot, 2)
        here = told(ring.items, slot, 3) + self.WHICH * ROWS  # the position of the part's first query
        last = begin + blocks * ring.BLOCK
        i = gl.arange(0, ROWS, gl.SliceLayout(1, self.OF_Z))
        newest = i * 0 + keys - 1
        whole = keys  # before it all queries see all keys
        if work.CAUSAL:
            newest = gl.minimum(here + i, newest)
            whole = gl.maximum(here + 1, 0)
        oldest = here + i - work.window + 1
        lo = begin + ring.BLOCK
        inner = lo
        if work.WINDOWED:
            youngest = gl.maximum(here + ROWS - work.window, 0)  # the oldest key of the last query
            inner = gl.minimum(gl.maximum(lo, gl.cdiv(youngest, ring.BLOCK) * ring.BLOCK), last)
        outer = gl.maximum(inner, gl.minimum(last, whole // ring.BLOCK * ring.BLOCK))

        total_m = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, self.OF_Z))
        total_s = gl.zeros_like(total_m)
        lanes = gl.zeros((ROWS, 4), gl.float32, LANES)
        z = warpgroup_mma_wait(0, deps=(self.scores(stage, phase),))
        mbarrier.arrive(ring.k_empty.index(stage))
        m, lanes, _, e = self.exponentials(z, total_m, lanes, begin, newest, oldest, True)
        p = packed(e, ring.v_desc.dtype)
        mbarrier.wait(ring.v_ready.index(stage), phase)
        acc = gl.zeros((ROWS, ring.D), gl.float32, self.OF_ACC)
        state = (m, lanes, acc, p, total_m, total_s, blocks * 0, stage, phase, turn)
        if work.WINDOWED:
            state = self.blocks(state, lo, inner, newest, oldest, True)
        state = self.blocks(state, inner, outer, newest, oldest, False)
        state = self.blocks(state, outer, last, newest, oldest, True)
        m, lanes, acc, p, total_m, total_s, folded, stage, phase, turn = state
        if self.CLEAR:
            if keys < last:
                clear(ring.v, stage, 0, keys - last + ring.BLOCK, ring.BLOCK)
        acc = self.values(p, acc, stage)
        if self.IN_SHARED:
            mbarrier.arrive(ring.q_empty.index(self.WHICH))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(ring.v_empty.index(stage))
        self.put(slot, folded, total_m, total_s, m, lanes, acc)
        if not self.IN_SHARED:
            fence_async_shared()
            mbarrier.arrive(ring.q_empty.index(self.WHICH))
        stage, phase = after(stage, phase, ring.STAGES)
        return stage, phase, turn

    @gluon.jit
    def put_nothing(self, slot):
        """The results of queries without a key."""
        work, ring = self.work, self.ring
        live, row = told(ring.items, slot, 4), told(ring.items, slot, 5)
        batch, head = told(ring.items, slot, 6).to(gl.int64), told(ring.items, slot, 7)
        query = self.WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, BY_ROWS))
        j = gl.expand_dims(gl.arange(0, ring.D, gl.SliceLayout(0, BY_ROWS)), 0)
        to = gl.expand_dims(((batch * work.T + row + query) * work.H + head) * self.D, 1) + j
        there = gl.expand_dims(query < live, 1) & (j < self.D)
        gl.store(
            gl.multiple_of(self.out + to, (1, 16)),
            gl.zeros((ROWS, ring.D), ring.q_desc.dtype, BY_ROWS),
            mask=there,
        )
        if self.HAS_LSE:
            at = (batch * work.H + head) * work.T + row + query
            nothing = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, BY_ROWS))
            gl.store(self.lse + at, nothing, mask=query < live)
        mbarrier.arrive(ring.q_empty.index(self.WHICH))


@gluon.jit
def _attend(part):
    """A warpgroup: its part of all of the program's items."""
    ring = part.ring
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)  # of the item, and the phase of its queries
    turn = gl.to_tensor(1 - part.WHICH)  # the first part's first turn has come
    mbarrier.wait(ring.q_ready.index(part.WHICH), slot)
    blocks = told(ring.items, slot, 0)
    while blocks >= 0:
        if blocks > 0:
            stage, phase, turn = part.attend(slot, blocks, stage, phase, turn)
        else:
            part.put_nothing(slot)
        slot = slot ^ 1
        mbarrier.wait(ring.q_ready.index(part.WHICH), slot)
        blocks = told(ring.items, slot, 0)


@kernel
def attention_kernel(
    out, lse, scratch, key_start, key_end, cu_q, cu_k, T, S, sequences, window, tiles, H, G, c, cap, slope,
    q_desc, k_desc, v_desc,
    D: gl.constexpr, DP: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, FLAT: gl.constexpr,
    OF_Z: gl.constexpr, OF_ACC: gl.constexpr, PACKED: gl.constexpr, STARTS: gl.constexpr, ENDS: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, CAPPED: gl.constexpr, TURNS: gl.constexpr,
    IN_SHARED: gl.constexpr, HAS_LSE: gl.constexpr, SEGMENT: gl.constexpr,
):  # fmt: skip
    work = Work(
        key_start, key_end, cu_q, cu_k, T, S, sequences, window, tiles, H, G, BLOCK, PACKED, STARTS, ENDS,
        CAUSAL, WINDOWED,
    )  # fmt: skip
    ring = Ring.create(q_desc, k_desc, v_desc, DP, BLOCK, STAGES, FLAT)
    turns = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PARTS):
        mbarrier.init(turns.index(i), count=1)
    totals = ring.q  # not touched unless IN_SHARED
    if IN_SHARED:
        totals = gl.allocate_shared_memory(gl.float32, [PARTS * (DP // PIECE), ROWS, PIECE], TOTALS)
    CLEAR: gl.constexpr = PACKED or ENDS
    first = Part(
        work, ring, turns, totals, scratch, out, lse, c, cap, slope, D, OF_Z, OF_ACC, 0, CAPPED, CLEAR, TURNS,
        IN_SHARED, HAS_LSE, SEGMENT,
    )  # fmt: skip
    second = Part(
        work, ring, turns, totals, scratch, out, lse, c, cap, slope, D, OF_Z, OF_ACC, 1, CAPPED, CLEAR, TURNS,
        IN_SHARED, HAS_LSE, SEGMENT,
    )  # fmt: skip
    gl.warp_specialize(
        [(_attend, (first,)), (_attend, (second,)), (load_items, (work, ring))],
        [4, 1], [REGISTERS, OF_LOADER],
    )  # fmt: skip


# Launcher


def why_not(args: dict[str, Any]) -> str | None:
    """Why this kernel cannot serve a call, or None."""
    if args["q"].dtype not in (torch.bfloat16, torch.float16):
        return "tensor cores take bf16 and fp16"
    if 0 in args["k"].shape:
        return "there are no keys, and TMA cannot read an empty tensor"
    reasons = (why_not_paged(args), *(why_not_tma(name, args[name]) for name in ("q", "k", "v")))
    return next((reason for reason in reasons if reason is not None), None)


def why_rather_not(args: dict[str, Any]) -> str | None:
    """Why another backend is faster for this call, or None."""
    call = call_of(args)
    queries = call.T // max(call.sequences, 1) if call.packed_q else call.T
    if queries < MANY_QUERIES:
        return f"a tile is {2 * MANY_QUERIES} queries of one head, and there are {queries} a sequence"
    return None


def attention(
    launch: Launch = run, turns: bool = True, segment: int = SEGMENT, **args: Any
) -> tuple[Tensor, Tensor | None]:
    """(out, lse). `turns`: whether the two warpgroups multiply by turns; it decides no bit. The class fixes
    `segment`."""
    call, factors = call_of(args), factors_of(args)
    q, k, v = args["q"], args["k"], args["v"]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = None
    if args["return_lse"]:
        lse = torch.empty((call.B, call.H, call.T), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    DP, block = call.padded, block_keys(call.D)
    tiles = count_tiles(call, 128)
    programs = min(tiles * call.H, sm_count(q.device))
    in_shared = DP <= 128
    scratch = out
    if not in_shared:
        scratch = torch.empty((programs, 128, DP), dtype=torch.float32, device=q.device)

    def or_other(t: Tensor | None) -> Tensor:
        return out if t is None else t

    launch(
        attention_kernel, (programs,), out, or_other(lse), scratch, or_other(args["key_start"]),
        or_other(args["key_end"]), or_other(args["cu_seqlens_q"]), or_other(key_bounds(args)),
        call.T, call.S, call.sequences, args["window"] or 0, tiles, call.H, call.group, *factors[:3],
        descriptor(q, 64, DP), descriptor(k, block, DP), descriptor(v, block, DP),
        call.D, DP, block, STAGES[DP], flat_layout(DP, q.dtype), accumulator_layout(block),
        accumulator_layout(DP), call.packed_q, args["key_start"] is not None, args["key_end"] is not None,
        args["causal"], args["window"] is not None, args["softcap"] is not None, turns, in_shared,
        lse is not None, segment, num_warps=4, maxnreg=AT_LAUNCH, enable_fp_fusion=False,
    )  # fmt: skip
    return out, lse
