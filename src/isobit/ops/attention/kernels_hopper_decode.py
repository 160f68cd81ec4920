"""Attention of few queries over many keys on Hopper: class attn/1, keys split by segments.

A program takes one KV head of one sequence and a run of segments. Its rows are the queries times the heads of
the group, up to 64. It writes a state for each segment, and `kernels_triton.fold_kernel` folds those of a row
in ascending order.

The number of programs follows from the room for keys, as a CUDA graph needs it: a graph that was captured for
a cache of 32k keys is replayed with 1k. Lengths are read on the device. The segments that a sequence has are
split over its programs; a program without any ends at once, and the fold reads no states that were not
written.

Speed depends on having as many bytes in flight as an SM can hold. Keys and values go by TMA through a ring of
slots, each of one block, K0 V0 K1 V1 ..., and two programs share an SM. A program has one warpgroup, which
issues the loads too. The products are transposed, so that rows, of which there are few, are the N dimension
of `wgmma`, and keys or features the M dimension:

    Z^T [keys, rows]  = K Q^T
    acc^T [D, rows]  += V^T P^T

Each row has the operations of `kernels_triton` in the same order. Each element of Z and of acc is one chain
over D or over keys, whichever operand comes first. A thread holds some keys of some rows, so

- a row's maximum is the maximum of the four warps' maxima, which they exchange;
- sums by lanes are a tree over keys: 64 apart in one thread, 32, 16 and 8 apart in another after an exchange,
  then the two of a pair. Every step adds two numbers.
"""

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run, unused
from isobit.kernels.hopper.heads import DTYPES, descriptor, tile_layout
from isobit.kernels.hopper.pipeline import (
    fence_async_shared,
    gl,
    gluon,
    kernel,
    mbarrier,
    record,
    reinterpreted,
    tma,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from isobit.kernels.hopper.softmax import finite
from isobit.ops.attention.calls import FEW_ROWS, SEGMENT, Call, block_keys, call_of, factors_of, which_tanh
from isobit.ops.attention.kernels_hopper import BY_ROWS
from isobit.ops.attention.kernels_hopper_items import clamped, like
from isobit.ops.attention.kernels_hopper_softcap import capped
from isobit.ops.attention.kernels_triton import MANY_PROGRAMS, launch_fold, tile_rows

#: Warps of a program, which split the keys of one product and the features of the other. Eight took longer
#: where programs are few: 16.3 instead of 13.5 us for one sequence of 4096 keys (H200).
WARPS = gl.constexpr(4)

#: Shared memory of an SM, and what each program costs in addition to its own.
SHARED_BYTES_PER_SM, RESERVED_BYTES_PER_PROGRAM = 228 * 1024, 1024

#: What warps exchange: maxima, and partial sums, where the eight keys of one store are in different banks.
MAXIMA_IN_SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
SUMS_IN_SHARED = gl.constexpr(gl.SwizzledSharedLayout(2, 1, 8, [1, 0]))

# Triton 3.9 has another name for it than 3.6.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@record
class BlockRing:
    """The blocks of one program's keys and values, and the ring of slots that they pass through. Load 2 i is
    the keys of block i, load 2 i + 1 its values."""

    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    slots: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    table: gl.tensor  # of this sequence's pages
    pages: gl.tensor
    sequence: gl.tensor
    kv: gl.tensor
    first: gl.tensor  # where block 0 begins
    keys: gl.tensor  # of the sequence
    blocks: gl.tensor
    BLOCK: gl.constexpr
    DP: gl.constexpr
    STAGES: gl.constexpr
    PAGE: gl.constexpr  # keys of a page, or 0 without pages
    BOX: gl.constexpr  # keys that are loaded at once
    BOX_LAYOUT: gl.constexpr

    @gluon.jit
    def load(self, desc, row, slot):
        """Start the load of a block of keys or values, from row `row` on. A slot holds it as panels of 128
        bytes of each row; boxes of fewer keys than a block are loaded panel by panel."""
        bar = self.ready.index(slot)
        buffer = self.slots.index(slot)
        if self.BOX == self.BLOCK:
            batch = self.sequence
            if self.PAGE:
                batch = self.page(row)
                row = row % self.PAGE
            box = reinterpreted(buffer, desc.dtype, desc.block_type.shape, desc.layout)
            tma_load(desc, [batch, self.kv, row, 0], bar, box)
        else:
            WIDE: gl.constexpr = desc.block_type.shape[3]
            BOXES: gl.constexpr = self.BLOCK // self.BOX
            PANELS: gl.constexpr = self.DP // WIDE
            whole = reinterpreted(buffer, desc.dtype, [PANELS * BOXES, self.BOX, WIDE], self.BOX_LAYOUT)
            for i in gl.static_range(BOXES):
                page = self.page(row + i * self.BOX)
                at = (row + i * self.BOX) % self.PAGE
                for h in gl.static_range(PANELS):
                    box = whole.index(h * BOXES + i)
                    box = reinterpreted(box, desc.dtype, desc.block_type.shape, desc.layout)
                    tma_load(desc, [page, self.kv, at, h * WIDE], bar, box)

    @gluon.jit
    def page(self, key):
        """The page of a key; for keys after the last, the last one's. A wrong table must not cause a read out
        of bounds."""
        return clamped(self.table + gl.minimum(key, self.keys - 1) // self.PAGE, 0, self.pages - 1)

    @gluon.jit
    def issue_load(self, i):
        """Start load i, if there is one. The caller guarantees that its slot is free."""
        if i < 2 * self.blocks:
            slot = i % self.STAGES
            row = self.first + i // 2 * self.BLOCK
            mbarrier.expect(self.ready.index(slot), self.BLOCK * self.DP * 2)
            if i % 2 == 0:
                self.load(self.k_desc, row, slot)
            else:
                self.load(self.v_desc, row, slot)

    @gluon.jit
    def wait_for(self, i):
        """Wait for load i and return its slot."""
        slot = i % self.STAGES
        mbarrier.wait(self.ready.index(slot), i // self.STAGES & 1)
        return self.slots.index(slot)


@gluon.jit
def warp_maxima(z):
    """Maxima over the keys of each warp, [warps, rows]."""
    x = gl.reshape(z, (z.shape[0] // 64, WARPS, 16, z.shape[1]))
    return gl.max(gl.max(x, 2), 0)


@gluon.jit
def halves(p):
    """Sums of keys 64 apart, which are in one thread: [64, rows]."""
    x = p
    if p.shape[0] > 64:
        x = gl.sum(gl.reshape(p, (2, 64, p.shape[1])), 0)
    return x


@gluon.jit
def sums_by_lane(x):
    """Sums by lanes, [4, rows], of the result of `halves`: keys 32, 16 and 8 apart, then pairs."""
    for _ in gl.static_range(3):
        x = gl.sum(gl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), 0)
    return gl.sum(gl.reshape(x, (4, 2, x.shape[1])), 1)


@gluon.jit
def joined_lanes(lanes):
    """(0 + 1) + (2 + 3)."""
    return gl.sum(gl.sum(gl.reshape(lanes, (2, 2, lanes.shape[1])), 1), 0)


@gluon.jit
def clear_after(values, left, BLOCK: gl.constexpr):
    """Zeros for the values after the first `left` of a block: they may be NaN, and 0 NaN is NaN."""
    AT_ONCE: gl.constexpr = 32
    row = gl.expand_dims(gl.arange(0, AT_ONCE, gl.SliceLayout(1, BY_ROWS)), 1)
    for i in gl.static_range(BLOCK // AT_ONCE):
        if left < (i + 1) * AT_ONCE:
            rows = values.slice(i * AT_ONCE, AT_ONCE)
            rows.store(gl.where(row + i * AT_ONCE < left, rows.load(BY_ROWS), 0.0))


@gluon.jit
def wait_for_previous_kernel():
    """Programmatic dependent launch: programs start while the previous kernel is ending, and the next kernel
    may too. Each waits here, or by `gdc_wait`, before it reads or writes memory."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1
    )


@gluon.jit
def state_of(r, sequence, kv, T, KV, segments, G: gl.constexpr):
    """The number of row r's first state. Row r is query r // G in head r % G of the group."""
    return ((sequence.to(gl.int64) * T + r // G) * KV * G + kv * G + r % G) * segments


@kernel
def decode_kernel(
    q, sums, states, key_start, key_end, table, T, S, pages, window, c, cap, slope, table_s, q_sb, q_st, q_sh,
    segments, programs, KV, k_desc, v_desc,
    G: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, N: gl.constexpr, BLOCK: gl.constexpr,
    STAGES: gl.constexpr, SEGMENT: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr,
    TILE_LAYOUT: gl.constexpr, BOX_LAYOUT: gl.constexpr, P_LAYOUT: gl.constexpr, ACC_LAYOUT: gl.constexpr,
    MAXIMA_OF_ACC: gl.constexpr, MAXIMA_OF_SUMS: gl.constexpr, PARTIAL_SUMS: gl.constexpr,
    LANES: gl.constexpr, STARTS: gl.constexpr, ENDS: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOWED: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    """The states of some segments: m and s in `sums` [rows, heads, segments, 2], acc in `states` [rows,
    heads, segments, D]. `programs` share the segments of a sequence that have a key that some row sees.
    Other segments have no state."""
    slots = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK, DP], TILE_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()  # TMA signals these barriers, and must see them initialised
    barrier()
    wait_for_previous_kernel()
    sequence = gl.program_id(0) // KV
    kv = gl.program_id(0) % KV
    first = gl.to_tensor(0)
    last = S
    if STARTS:
        first = clamped(key_start + sequence, 0, S)
    if ENDS:
        last = clamped(key_end + sequence, first, S)
    keys = gl.maximum(last - first, 0)
    opening = gl.to_tensor(0)  # where the block with the oldest visible key begins
    if WINDOWED:
        opening = gl.maximum(keys - T - window + 1, 0) // BLOCK * BLOCK
    each = gl.cdiv(gl.cdiv(keys, SEGMENT) - opening // SEGMENT, programs)
    from_segment = opening // SEGMENT + gl.program_id(1) * each
    begin = gl.maximum(from_segment * SEGMENT, opening)
    blocks = gl.cdiv(gl.maximum(gl.minimum((from_segment + each) * SEGMENT, keys) - begin, 0), BLOCK)
    if blocks == 0:
        return
    table += sequence.to(gl.int64) * table_s
    ring = BlockRing(
        k_desc, v_desc, slots, ready, table, pages, sequence, kv, first + begin, keys, blocks, BLOCK, DP,
        STAGES, PAGE, BOX, BOX_LAYOUT,
    )  # fmt: skip
    for i in gl.static_range(STAGES):
        ring.issue_load(gl.to_tensor(i))

    own = gl.allocate_shared_memory(k_desc.dtype, [N, DP], TILE_LAYOUT)
    probs = gl.allocate_shared_memory(k_desc.dtype, [BLOCK, N], P_LAYOUT)
    tops = gl.allocate_shared_memory(gl.float32, [WARPS, N], MAXIMA_IN_SHARED)
    partial = gl.allocate_shared_memory(gl.float32, [64, N], SUMS_IN_SHARED)
    r = gl.arange(0, N, gl.SliceLayout(1, BY_ROWS))
    d = gl.expand_dims(gl.arange(0, DP, gl.SliceLayout(0, BY_ROWS)), 0)
    from_q = sequence.to(gl.int64) * q_sb + (r // G).to(gl.int64) * q_st
    from_q = gl.expand_dims(from_q + (kv * G + r % G).to(gl.int64) * q_sh, 1)
    inside = gl.expand_dims(r < T * G, 1) & (d < D)
    own.store(gl.load(q + from_q + d, mask=inside, other=0.0))
    fence_async_shared()
    barrier()

    ROW: gl.constexpr = gl.SliceLayout(0, MAXIMA_OF_SUMS)
    r = gl.arange(0, N, ROW)
    there = r < T * G
    sums += state_of(r, sequence, kv, T, KV, segments, G) * 2
    unseen = gl.full((N,), float("-inf"), gl.float32, ROW)

    COLUMN: gl.constexpr = gl.SliceLayout(0, ACC_LAYOUT)
    r = gl.arange(0, N, COLUMN)
    newest = like(r, keys) - 1
    whole = keys  # all rows see all keys before it
    if CAUSAL:
        newest = gl.minimum(keys - T + r // G, newest)
        whole = gl.maximum(keys - T + 1, 0)
    newest = gl.where(r < T * G, newest, -1)
    oldest = keys - T + r // G - window + 1
    d = gl.expand_dims(gl.arange(0, DP, gl.SliceLayout(1, ACC_LAYOUT)), 1)
    states += gl.expand_dims(state_of(r, sequence, kv, T, KV, segments, G), 0) * D + d
    inside = gl.expand_dims(r < T * G, 0) & (d < D)

    zeros = gl.zeros((BLOCK, N), gl.float32, ACC_LAYOUT)
    k = ring.wait_for(gl.to_tensor(0))
    z = warpgroup_mma(k, own.permute((1, 0)), zeros, use_acc=False, is_async=True)
    z = warpgroup_mma_wait(0, deps=(z,))
    # The maximum twice, in the layouts of acc and of the sums.
    m = gl.full((N,), float("-inf"), gl.float32, COLUMN)
    m_s = unseen
    lanes = gl.zeros((4, N), gl.float32, LANES)
    acc = gl.zeros((DP, N), gl.float32, ACC_LAYOUT)
    for i in range(blocks):
        at = begin + i * BLOCK
        if CAPPED:
            z = capped(z, cap, slope, CAPPED)
        if (at + BLOCK > whole) | WINDOWED:
            key = gl.expand_dims(at + gl.arange(0, BLOCK, gl.SliceLayout(1, ACC_LAYOUT)), 1)
            sees = key <= gl.expand_dims(newest, 0)
            if WINDOWED:
                sees = sees & (key >= gl.expand_dims(oldest, 0))
            z = gl.where(sees, z, float("-inf"))
        tops.store(warp_maxima(z))
        barrier()  # all warps have finished their products, so two slots are free
        if i > 0:
            ring.issue_load(2 * i - 1 + STAGES)
        ring.issue_load(2 * i + STAGES)
        top = gl.max(tops.load(MAXIMA_OF_ACC), 0)
        top = gl.maximum(m, gl.convert_layout(top, COLUMN, assert_trivial=True))
        base = finite(top)
        a = gl.exp2((m - base) * c)
        p = gl.exp2(gl.fma(z, gl.full_like(z, c), gl.expand_dims(-(base * c), 0)))
        m = top
        partial.store(halves(p))
        probs.store(p.to(k_desc.dtype))
        v = ring.wait_for(2 * i + 1)
        if ENDS or PAGE:
            if at + BLOCK > keys:
                clear_after(v, keys - at, BLOCK)
        fence_async_shared()
        barrier()
        acc = warpgroup_mma(v.permute((1, 0)), probs, acc * gl.expand_dims(a, 0), is_async=True)
        # Z of the next block. After the last block it is computed once more and not used.
        k = ring.wait_for(2 * gl.minimum(i + 1, blocks - 1))
        z = warpgroup_mma(k, own.permute((1, 0)), zeros, use_acc=False, is_async=True)
        # Meanwhile, the sums by lanes.
        top = gl.maximum(m_s, gl.max(tops.load(MAXIMA_OF_SUMS), 0))
        a = gl.exp2((m_s - finite(top)) * c)
        a = gl.expand_dims(gl.convert_layout(a, gl.SliceLayout(0, LANES), assert_trivial=True), 0)
        block_sums = gl.convert_layout(sums_by_lane(partial.load(PARTIAL_SUMS)), LANES, assert_trivial=True)
        lanes = gl.fma(lanes, a, block_sums)
        m_s = top
        acc, z = warpgroup_mma_wait(0, deps=(acc, z))
        if ((at + BLOCK) % SEGMENT == 0) | (i + 1 == blocks):
            j = at // SEGMENT
            gl.store(sums + j * 2, m_s, mask=there)
            gl.store(sums + j * 2 + 1, gl.convert_layout(joined_lanes(lanes), ROW), mask=there)
            gl.store(states + j.to(gl.int64) * D, acc, mask=inside)
            m = gl.full((N,), float("-inf"), gl.float32, COLUMN)
            m_s = unseen
            lanes = gl.zeros_like(lanes)
            acc = gl.zeros_like(acc)


# Launcher


@lru_cache(maxsize=64)
def _layouts(N: int) -> dict[str, Any]:
    """Layouts of tiles with N rows, which are columns here, by constant of the kernel. As `wgmma` leaves
    them, a thread has the columns 8 g + 2 i and 8 g + 2 i + 1 for its own i of 4; for sums it has one of
    16."""
    near, far = [[0, 1], [0, 2], [0, 4], [0, 8]], [[0, 1 << b] for b in range(4, (N - 1).bit_length())]
    none, down = [0, 0], [[1, 0], [2, 0]]

    def linear(rows: int, registers: list[Any], lanes: list[Any], warps: list[Any]) -> Any:
        return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, N])

    of_acc = ([near[0], near[3], *far, *down], [near[1], near[2], none, none, none], [none, none])
    return {
        "ACC_LAYOUT": gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]),
        "MAXIMA_OF_ACC": linear(4, *of_acc),
        "MAXIMA_OF_SUMS": linear(4, [*down, *far], [*near, none], [none, none]),
        "PARTIAL_SUMS": linear(64, [[8, 0], [16, 0], [32, 0], *far], [*near, [1, 0]], [[2, 0], [4, 0]]),
        "LANES": linear(4, far, [*near, none], down),
    }


@lru_cache(maxsize=64)
def _probs_layout(block: int, N: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([block, N], DTYPES[dtype])


def _box(call: Call, block: int) -> int:
    """Keys per TMA load: a block, or the part of it that is in one page."""
    return math.gcd(call.page, block) if call.page else block


def _stages(call: Call, N: int, block: int, programs: int, sms: int) -> int:
    """Slots of the ring: as many as leave space for a second program on the SM. If there is no second
    program, or that would be fewer than three, as many as fit."""
    slot = block * call.padded * 2
    rest = N * (2 * call.padded + 2 * block + 4 * 64 + 4 * 4 + 16) + 64  # tiles, a reduction, barriers

    def fits(share: int) -> int:
        return (SHARED_BYTES_PER_SM // share - RESERVED_BYTES_PER_PROGRAM - rest) // slot

    return min(fits(2) if programs > sms and fits(2) >= 3 else fits(1), 8)


def attention(
    launch: Launch = run, segment: int = SEGMENT, block: int | None = None, out: Tensor | None = None,
    tangent: int = 1, **args: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(out, lse); `out` is the memory to write it to, if the caller has some. `segment` and `block` are fixed
    by the class; tests override them to reach boundaries with few keys. `tangent` is the class whose tanh
    caps scores."""
    call, factors = call_of(args), factors_of(args, tangent)
    q, k, v, table = args["q"], args["k"], args["v"], args["block_table"]
    key_start, key_end = args["key_start"], args["key_end"]
    shape = (call.B, call.H, call.T)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(shape, dtype=torch.float32, device=q.device) if args["return_lse"] else None
    if out.numel() == 0:
        return out, lse
    block = block or block_keys(call.D)
    N, segments, rows = tile_rows(call, FEW_ROWS), -(-call.S // segment), call.B * call.T * call.H
    each = max(1, call.B * call.KV * segments // MANY_PROGRAMS)  # of a sequence that fills its room
    grid = (call.B * call.KV, -(-segments // each))
    box = _box(call, block)
    wide = call.padded if box == block else 64
    sums = torch.empty(rows, segments, 2, dtype=torch.float32, device=q.device)
    states = torch.empty(rows, segments, call.D, dtype=torch.float32, device=q.device)
    launch(
        decode_kernel,
        grid,
        *(q, sums, states),
        unused(sums) if key_start is None else key_start,
        unused(sums) if key_end is None else key_end,
        unused(sums) if table is None else table,
        *(call.T, call.S, call.pages, args["window"] or 0),
        *(factors.c, factors.cap, factors.slope),
        0 if table is None else table.stride(0),
        *q.stride()[:3],
        *(segments, grid[1], call.KV),
        *(descriptor(k, box, wide), descriptor(v, box, wide)),
        G=call.group,
        D=call.D,
        DP=call.padded,
        N=N,
        BLOCK=block,
        STAGES=_stages(call, N, block, grid[0] * grid[1], sm_count(q.device)),
        SEGMENT=segment,
        PAGE=call.page,
        BOX=box,
        TILE_LAYOUT=tile_layout(call.padded, q.dtype),
        BOX_LAYOUT=tile_layout(wide, q.dtype),
        P_LAYOUT=_probs_layout(block, N, q.dtype),
        **_layouts(N),
        STARTS=key_start is not None,
        ENDS=key_end is not None,
        CAUSAL=args["causal"],
        WINDOWED=args["window"] is not None,
        CAPPED=which_tanh(args, tangent),
        num_warps=4,
        enable_fp_fusion=False,
        launch_pdl=True,
    )
    launch_fold(launch, sums, states, out, lse, args, segment, early=True, tangent=tangent)
    return out, lse
