"""u and w of every chunk on Hopper: step 4 of class gdr/1, for K = V = 128.

    u = T (beta v)        w = T (beta 2^G k)

A program takes one item after another: a chunk of a value head. A warp loads tiles by TMA and the numbers of
their rows, into a ring of stages. Two warpgroups compute, the first one u and the second one w:

    the rows of a tile, times their factors, rounded: in place
    T times the tile
    the result, rounded: in place again, and from there to memory by TMA

So a stage is also where results wait. It is released when those of the item after it are under way.

Row i of T has zeros after column i, but 0 times an infinity or NaN would be NaN. So if a result is not
finite its rows are computed again one by one, with later rows of the tile as zeros. They go to memory
directly, as do those of a chunk with fewer than 64 rows.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run, unused
from isobit.kernels.hopper.descriptors import descriptor, matrix
from isobit.kernels.hopper.pipeline import (
    PRODUCER_REGISTERS,
    after,
    fence_async_shared,
    gl,
    gluon,
    kernel,
    mbarrier,
    record,
    tma,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from isobit.ops.delta_rule.kernels_hopper import BY_ROWS, ONE_OF_FOUR, rows_of
from isobit.ops.delta_rule.kernels_hopper_io import ONE, put_number
from isobit.ops.gated_delta_rule.kernels_hopper_gradients import (
    ALONG,
    HALVES,
    OF_TILE,
    ONE_BY_ONE,
    WIDTH,
    C,
    down,
    send,
)
from isobit.ops.gated_delta_rule.kernels_hopper_solve import chunk_of
from isobit.ops.gated_delta_rule.kernels_triton import tiles_of
from isobit.ops.gated_delta_rule.model import CHUNK

#: T, two tiles of v and two of k take 40 KB.
STAGES = gl.constexpr(5)

#: Registers per thread at launch, of 12 warps, and those of the second warpgroup.
AT_LAUNCH, CONSUMER_REGISTERS = 168, gl.constexpr(240)


@record
class Items:
    """All items of a call: a chunk of a value head each."""

    cu_seqlens: gl.tensor
    T: gl.tensor
    S: gl.tensor
    HV: gl.tensor
    group: gl.tensor  # value heads that share k
    tiles: gl.tensor
    PACKED: gl.constexpr

    @gluon.jit
    def count(self):
        return self.tiles * self.HV


@record
class Ring:
    """Stages of shared memory, an item in each."""

    inverse: gl.shared_memory_descriptor  # T
    rows: gl.shared_memory_descriptor  # two tiles of v and two of k, then of u and of w
    factors: gl.shared_memory_descriptor  # [64] for v, and [64] for k
    item: gl.shared_memory_descriptor  # [1]: its value head
    row: gl.shared_memory_descriptor  # [1]: the first of the chunk
    left: gl.shared_memory_descriptor  # [1]: rows of the chunk; 0 after the last item
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def create(desc):
        inverse = gl.allocate_shared_memory(desc.dtype, [STAGES, C, C], desc.layout)
        rows = gl.allocate_shared_memory(desc.dtype, [STAGES * 2 * HALVES, C, C], desc.layout)
        factors = gl.allocate_shared_memory(gl.float32, [STAGES * 2, C], ONE_BY_ONE)
        item = gl.allocate_shared_memory(gl.int32, [STAGES, 1], ONE)
        row = gl.allocate_shared_memory(gl.int32, [STAGES, 1], ONE)
        left = gl.allocate_shared_memory(gl.int32, [STAGES, 1], ONE)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(ready.index(i), count=2)  # numbers of rows; tiles
            mbarrier.init(empty.index(i), count=2)
        fence_async_shared()  # TMA signals these barriers, and must see them initialised
        return Ring(inverse, rows, factors, item, row, left, ready, empty)

    @gluon.jit
    def take(self, stage, phase):
        """(value head, first row, rows) of the item at a stage."""
        mbarrier.wait(self.ready.index(stage), phase)
        hv = gl.max(self.item.index(stage).load(ONE_OF_FOUR), 0)
        row = gl.max(self.row.index(stage).load(ONE_OF_FOUR), 0)
        left = gl.max(self.left.index(stage).load(ONE_OF_FOUR), 0)
        return hv, row, left


@gluon.jit
def _load(items, ring, beta, g2, k_desc, v_desc, inverse_desc, HAS_G: gl.constexpr):
    """The producer."""
    TILE: gl.constexpr = k_desc.block_type.nbytes
    i = gl.arange(0, C, ALONG)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # of `empty`: a fresh barrier counts as one whose phase 1 is complete
    for t in range(gl.program_id(0), items.count(), gl.num_programs(0)):
        row, left = chunk_of(t // items.HV, items.cu_seqlens, items.T, items.S, items.PACKED)
        row, left = row.to(gl.int32), left.to(gl.int32)
        if left > 0:
            hv = t % items.HV
            at = (row + i).to(gl.int64) * items.HV + hv
            of_v = gl.load(beta + at, mask=i < left, other=0.0).to(gl.float32)
            of_k = of_v
            if HAS_G:
                of_k = of_v * gl.exp2(gl.load(g2 + at, mask=i < left, other=0.0))
            mbarrier.wait(ring.empty.index(stage), phase)
            mbarrier.expect(ring.ready.index(stage), (1 + 2 * HALVES) * TILE)
            tma_load(inverse_desc, [row, hv * C], ring.ready.index(stage), ring.inverse.index(stage))
            for half in gl.static_range(HALVES):
                column = (hv * HALVES + half) * C
                to = ring.rows.index(2 * HALVES * stage + half)
                tma_load(v_desc, [row, column], ring.ready.index(stage), to)
            for half in gl.static_range(HALVES):
                column = (hv // items.group * HALVES + half) * C
                to = ring.rows.index(2 * HALVES * stage + HALVES + half)
                tma_load(k_desc, [row, column], ring.ready.index(stage), to)
            ring.factors.index(2 * stage).store(of_v)
            ring.factors.index(2 * stage + 1).store(of_k)
            put_number(ring.item.index(stage), hv, gl.int32)
            put_number(ring.row.index(stage), row, gl.int32)
            put_number(ring.left.index(stage), left, gl.int32)
            mbarrier.arrive(ring.ready.index(stage))
            stage, phase = after(stage, phase, STAGES)
    mbarrier.wait(ring.empty.index(stage), phase)
    put_number(ring.left.index(stage), 0, gl.int32)
    mbarrier.expect(ring.ready.index(stage), 0)
    mbarrier.arrive(ring.ready.index(stage))


@gluon.jit
def _multiply(inverse, tile):
    """T times a tile; in flight."""
    zeros = gl.zeros((C, C), gl.float32, OF_TILE)
    return warpgroup_mma(inverse, tile, zeros, use_acc=False, is_async=True)


@gluon.jit
def _not_finite(x, y, left):
    """1 if an element of the first rows is an infinity or NaN, else 0."""
    live = down(gl.arange(0, C, gl.SliceLayout(1, OF_TILE)) < left)
    finite = (gl.abs(x) < float("inf")) & (gl.abs(y) < float("inf"))
    return gl.max(gl.max(gl.where(live & (finite == 0), 1, 0), 1), 0)


@gluon.jit
def _one_by_one(inverse, tile, place, row, left, column, width):
    """Store the rows of T times a tile from the last one to the first: so the tile loses a row at a time."""
    i = down(gl.arange(0, C, gl.SliceLayout(1, BY_ROWS)))
    of_row = down(gl.arange(0, C, gl.SliceLayout(1, OF_TILE)))
    of_column = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, OF_TILE)), 0)
    at = (row + of_row).to(gl.int64) * width + column + of_column
    for n in range(left):
        last = left - 1 - n
        tile.store(gl.where(i <= last, tile.load(BY_ROWS), 0.0))
        fence_async_shared()
        own = warpgroup_mma_wait(0, deps=(_multiply(inverse, tile),))
        gl.store(place + at, own.to(tile.dtype), mask=of_row == last)


@gluon.jit
def _consume(items, ring, place, desc, WHICH: gl.constexpr):
    """The warpgroup of v and u, or that of k and w."""
    i = gl.arange(0, C, gl.SliceLayout(1, BY_ROWS))
    width = items.HV * (HALVES * C)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    before, begun = gl.to_tensor(0), gl.to_tensor(0)  # the stage before; whether there is one
    hv, row, left = ring.take(stage, phase)
    while left > 0:
        inverse = ring.inverse.index(stage)
        one = ring.rows.index(2 * HALVES * stage + HALVES * WHICH)
        other = ring.rows.index(2 * HALVES * stage + HALVES * WHICH + 1)
        factor = down(ring.factors.index(2 * stage + WHICH).load(gl.SliceLayout(1, BY_ROWS)))
        live = down(i < left)  # other rows are of another sequence
        one.store(gl.where(live, factor * one.load(BY_ROWS).to(gl.float32), 0.0).to(one.dtype))
        other.store(gl.where(live, factor * other.load(BY_ROWS).to(gl.float32), 0.0).to(one.dtype))
        fence_async_shared()
        x, y = _multiply(inverse, one), _multiply(inverse, other)
        x, y = warpgroup_mma_wait(0, deps=(x, y))
        column = hv * (HALVES * C)
        wrong = _not_finite(x, y, left)
        if wrong > 0:
            _one_by_one(inverse, one, place, row, left, column, width)
            _one_by_one(inverse, other, place, row, left, column + C, width)
        else:
            one.store(x.to(one.dtype))
            other.store(y.to(one.dtype))
            fence_async_shared()
            send(desc, one, place, row, left, column, width)
            send(desc, other, place, row, left, column + C, width)
        if (left >= C) & (wrong == 0):
            tma.store_wait(2)  # the stores of the item before: this one has two
        else:
            tma.store_wait(0)
        mbarrier.arrive(ring.empty.index(before), pred=begun > 0)
        before, begun = stage, gl.to_tensor(1)
        stage, phase = after(stage, phase, STAGES)
        hv, row, left = ring.take(stage, phase)
    tma.store_wait(0)


@kernel
def folding_kernel(
    u, w, beta, g2, cu_seqlens, T, S, HV, group, tile_count,
    k_desc, v_desc, inverse_desc, u_desc, w_desc,
    PACKED: gl.constexpr, HAS_G: gl.constexpr,
):  # fmt: skip
    items = Items(cu_seqlens, T, S, HV, group, tile_count, PACKED)
    ring = Ring.create(k_desc)
    gl.warp_specialize(
        [(_consume, (items, ring, u, u_desc, 0)), (_consume, (items, ring, w, w_desc, 1)),
         (_load, (items, ring, beta, g2, k_desc, v_desc, inverse_desc, HAS_G))],
        [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


# Launcher


def serves(k: Tensor, v: Tensor) -> bool:
    """Whether this kernel serves these sizes."""
    return k.dtype in (torch.bfloat16, torch.float16) and (k.shape[-1], v.shape[-1]) == (WIDTH, WIDTH)


def folded(
    k: Tensor, v: Tensor, beta: Tensor, g2: Tensor | None, cu_seqlens: Tensor | None, inverses: Tensor,
    launch: Launch = run, sms: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(u, w) from T, rounded, where `serves`. `sms`: the SMs to make a schedule for; 0: those of the
    device."""
    B, T, HV, _ = v.shape
    H = k.shape[2]
    S = B if cu_seqlens is None else len(cu_seqlens) - 1
    u, w = (torch.empty(v.shape, dtype=v.dtype, device=v.device) for _ in range(2))
    if B * T == 0:
        return u, w
    tiles = tiles_of(T, S, cu_seqlens)
    options: dict[str, Any] = {"num_warps": 4, "maxnreg": AT_LAUNCH, "enable_fp_fusion": False}
    launch(
        folding_kernel, (min(tiles * HV, sms or sm_count(v.device)),),
        u, w, beta, *(unused(beta) if t is None else t for t in (g2, cu_seqlens)), T, S, HV, HV // H, tiles,
        *(descriptor(matrix(rows_of(t)), CHUNK, CHUNK) for t in (k, v, inverses, u, w)),
        PACKED=cu_seqlens is not None, HAS_G=g2 is not None, **options,
    )  # fmt: skip
    return u, w
