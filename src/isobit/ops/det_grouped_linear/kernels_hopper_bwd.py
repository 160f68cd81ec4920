"""Hopper kernels of sums over the rows of experts: class seg16/512 for every expert.

A persistent kernel as `sum_kernel` of `isobit.kernels.hopper.product`, over the tiles of all experts. A chain
takes 64 rows at a time. The last ones of an expert may be fewer, and TMA reads on into the next expert: the
consumers replace those rows by zeros in shared memory before they multiply. An expert without rows has one
step of zeros, which is not added.

Sums with sequences inside an expert are those of `kernels_triton`.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run, unused
from isobit.frame.traced import decides
from isobit.kernels.hopper.descriptors import aligned_for_tma, descriptor, matrix
from isobit.kernels.hopper.pieces import barrier
from isobit.kernels.hopper.pipeline import (
    PRODUCER_REGISTERS,
    ROWS,
    Pipe,
    accumulator_layout,
    after,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    kernel,
    load_operand,
    mbarrier,
    put_tile,
    record,
    tile_at,
    tma,
    warpgroup_mma_wait,
)
from isobit.kernels.hopper.product import SEGMENT_ROWS, Output, sum_tile
from isobit.kernels.hopper.tiles import Tile, fitted
from isobit.ops.det_grouped_linear import kernels_triton
from isobit.ops.det_grouped_linear.strips import bounds

#: Rows of a step.
STEP = 64

#: 64 columns of a step: 16 bytes a thread.
_BY_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


# Sums


@record
class Sums:
    """The items of the kernel: `tiles` tiles of dW for each expert."""

    bounds: gl.tensor
    tiles: gl.tensor
    E: gl.tensor

    @gluon.jit
    def items(self):
        return self.E * self.tiles

    @gluon.jit
    def rows(self, t):
        """(first row, rows) of the expert of item t; none after the last item."""
        at = self.bounds + t // self.tiles * 2
        there = t < self.items()
        first = gl.load(at, mask=there, other=0)
        return first, gl.load(at + 1, mask=there, other=0) - first

    @gluon.jit
    def item(self, pipe, t):
        """(expert, row of tiles, tile of columns) of item t."""
        m, n = tile_at(t % self.tiles, pipe.tiles_m, pipe.tiles_n, pipe.GROUP)
        return t // self.tiles, m, n

    @gluon.jit
    def steps(self, pipe, rows):
        return gl.maximum(gl.cdiv(rows, pipe.STEP), 1)

    @gluon.jit
    def load(self, pipe, m, n, row, stage, phase):
        """Load the step from this row on as soon as a stage is empty; returns (stage, phase) of the next."""
        bar = pipe.ready.index(stage)
        mbarrier.wait(pipe.empty.index(stage), phase)
        bytes_per_stage: gl.constexpr = (
            pipe.CONSUMERS * pipe.a_desc.block_type.nbytes + pipe.b_desc.block_type.nbytes
        )
        mbarrier.expect(bar, bytes_per_stage)
        for w in gl.static_range(pipe.CONSUMERS):
            a = pipe.a_ring.index(stage * pipe.CONSUMERS + w)
            load_operand(pipe.a_desc, 0, pipe.row(m * pipe.CONSUMERS + w), row, bar, a, False, False)
        load_operand(pipe.b_desc, 0, pipe.column(n), row, bar, pipe.b_ring.index(stage), False, False)
        return after(stage, phase, pipe.STAGES)


@gluon.jit
def _keep_rows(tile, rows, COLUMNS: gl.constexpr, STEP: gl.constexpr):
    """Replace the rows of a tile in shared memory from `rows` on by zeros."""
    i = gl.arange(0, STEP, gl.SliceLayout(1, _BY_ROWS))
    for c in gl.static_range(COLUMNS // 64):
        part = tile.slice(c * 64, 64, dim=1)
        own = part.load(_BY_ROWS)
        part.store(gl.where((i < rows)[:, None], own, gl.zeros_like(own)))


@gluon.jit
def _clear_others(pipe, rows, stage, phase, WHICH: gl.constexpr):
    """Wait for a step that has fewer rows than others, and clear those of the next expert behind them. Each
    consumer does so in the columns that all of them read: they write the same values."""
    mbarrier.wait(pipe.ready.index(stage), phase)
    _keep_rows(pipe.a_ring.index(stage * pipe.CONSUMERS + WHICH), rows, ROWS, pipe.STEP)
    _keep_rows(pipe.b_ring.index(stage), rows, pipe.COLUMNS, pipe.STEP)
    fence_async_shared()
    barrier()  # products read what all threads have written


@gluon.jit
def _last_step(pipe, acc, continues, rows, stage, phase, WHICH: gl.constexpr):
    """The last step of an expert, of `rows` rows; it `continues` a chain or begins one."""
    _clear_others(pipe, rows, stage, phase, WHICH)
    acc = pipe.issue(acc, continues, stage, phase, WHICH)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(pipe.empty.index(stage))
    stage, phase = after(stage, phase, pipe.STAGES)
    return acc, stage, phase


@gluon.jit
def _initial(pipe, output, expert, m, n, WHICH: gl.constexpr):
    total = output.zeros()
    if output.HAS_EXTRA:
        i, j = output.place(pipe, m, n, WHICH)
        at = output.extra + expert.to(gl.int64) * output.M * output.N
        total = gl.load(at + output.offsets(i, j), mask=output.inside(i, j), other=0.0)
    return total


@gluon.jit
def _store(pipe, output, total, expert, m, n, WHICH: gl.constexpr):
    """STAGED: the matrices of all experts are one, and a consumer's rows are those of one expert."""
    if output.STAGED:
        row = pipe.row(m * pipe.CONSUMERS + WHICH)
        if row < output.M:
            put_tile(
                total, output.desc, output.staging, expert * output.M + row, pipe.column(n), WHICH, False, 0
            )
    else:
        i, j = output.place(pipe, m, n, WHICH)
        at = output.out + expert.to(gl.int64) * output.M * output.N
        values = total.to(output.out.dtype.element_ty)
        gl.store(at + output.offsets(i, j), values, mask=output.inside(i, j))


@gluon.jit
def _consume(WHICH: gl.constexpr, pipe, sums, output):
    """A fresh chain for each segment, folded in ascending order. A tile is stored while the first step of the
    next one is in flight."""
    FULL: gl.constexpr = SEGMENT_ROWS // pipe.STEP
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    expert = gl.to_tensor(0)
    m = gl.to_tensor(0)
    n = gl.to_tensor(0)
    acc = output.zeros()
    total = output.zeros()
    begin = gl.program_id(0)
    items = sums.items()
    _, rows_next = sums.rows(begin)
    for t in range(begin, items, gl.num_programs(0)):
        rows = rows_next
        if rows < pipe.STEP:
            _clear_others(pipe, rows, stage, phase, WHICH)
        acc, stage, phase = pipe.begin_chain(acc, stage, phase, WHICH)
        if t > begin:
            _store(pipe, output, total, expert, m, n, WHICH)
        expert, m, n = sums.item(pipe, t)
        _, rows_next = sums.rows(t + gl.num_programs(0))  # while products are computed
        whole = rows // pipe.STEP
        segments = gl.cdiv(sums.steps(pipe, rows), FULL)
        left = gl.where(rows > pipe.STEP, rows % pipe.STEP, 0)  # of a step behind whole ones
        total = _initial(pipe, output, expert, m, n, WHICH)
        more = gl.maximum(gl.minimum(whole, FULL), 1) - 1
        acc, stage, phase = pipe.finish_chain(acc, more, stage, phase, WHICH)
        if (left > 0) & (segments == 1):
            acc, stage, phase = _last_step(pipe, acc, True, left, stage, phase, WHICH)
        if rows > 0:
            total += acc
        for s in range(1, segments):
            steps = gl.minimum(whole - s * FULL, FULL)
            if steps > 0:
                acc, stage, phase = pipe.multiply(acc, steps, stage, phase, WHICH)
            if (left > 0) & (s == segments - 1):
                acc, stage, phase = _last_step(pipe, acc, steps > 0, left, stage, phase, WHICH)
            total += acc
    if begin < items:
        _store(pipe, output, total, expert, m, n, WHICH)
    if output.STAGED:
        tma.store_wait(0)


@gluon.jit
def _produce(pipe, sums):
    """Rows behind the last one of an expert are those of the next, or zeros behind all: see
    `_clear_others`."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for t in range(gl.program_id(0), sums.items(), gl.num_programs(0)):
        _, m, n = sums.item(pipe, t)
        first, rows = sums.rows(t)
        for step in range(sums.steps(pipe, rows)):
            stage, phase = sums.load(pipe, m, n, first + step * pipe.STEP, stage, phase)
    gdc_launch_dependents()


@kernel
def grouped_sum_kernel(
    out, bounds, E, M, N, init, a_desc, b_desc, out_desc,
    CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, LAYOUT: gl.constexpr, HAS_INIT: gl.constexpr, STAGED: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """out [E, M, N] = init + a^T b over the rows of each expert."""
    pipe = Pipe.create(
        a_desc, b_desc, M, N, gl.to_tensor(1), SPANS=0, A_BY_K=False, B_BY_K=False, CONSUMERS=CONSUMERS,
        COLUMNS=COLUMNS, STEP=STEP, STAGES=STAGES, GROUP=GROUP,
    )  # fmt: skip
    output = Output.create(
        pipe, out, N, M, N, init, out_desc, OFFSET=0, COLUMNS=COLUMNS, LAYOUT=LAYOUT, SWAPPED=False,
        HAS_EXTRA=HAS_INIT, STAGED=STAGED,
    )  # fmt: skip
    sums = Sums(bounds, pipe.tiles_m * pipe.tiles_n, E)
    gdc_wait()  # before anything is read or written: see `product_kernel` of `det_gemm`
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_consume, (0, pipe, sums, output)), (_produce, (pipe, sums))], [1], [PRODUCER_REGISTERS]
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(_consume, (0, pipe, sums, output)), (_consume, (1, pipe, sums, output)),
             (_produce, (pipe, sums))],
            [4, 1], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consume, (0, pipe, sums, output)), (_consume, (1, pipe, sums, output)),
             (_consume, (2, pipe, sums, output)), (_produce, (pipe, sums))],
            [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


# Launchers


#: With three consumers a product needs less from L2, 320 lines for 192 x 128 instead of 256 for 128 x 128.
#: Sums that are stored in 16 bits leave room for four stages. On an H200 they took 0.80 to 0.98 of the time
#: with two consumers where tiles fit, and 1.04 where they cover an eighth more than there is. Those in fp32,
#: with three stages, took 1.08.
_THREE = fitted(3, 128, swapped=False, itemsize=2, step=64, group=8, accumulators=2)
_MOST_MORE = 1.08


@decides
def _tile(E: int, M: int, N: int, sms: int, itemsize: int) -> Tile:
    """As if the matrices of all experts were one, and each had as many rows as the others."""
    tile = sum_tile(E * M, N, sms, itemsize)
    covered = -(-M // _THREE.rows) * _THREE.rows / (-(-M // tile.rows) * tile.rows)
    three = tile.consumers == 2 and itemsize == 2 and covered <= _MOST_MORE
    return _THREE if three else tile


def why_not_token_product(x: Tensor, dy: Tensor) -> str | None:
    for name, t in (("x", x), ("dy", dy)):
        if not (aligned_for_tma(matrix(t)) and matrix(t).is_row_major()):
            return (
                f"TMA cannot read {name} in place: it must begin at a multiple of 16 bytes, and its rows be "
                f"contiguous and a multiple of 16 bytes apart (shape {tuple(t.shape)}, strides {t.stride()})"
            )
    return None


def token_product(
    x: Tensor, dy: Tensor, offsets: Tensor, cu_seqlens: Tensor | None, init: Tensor | None,
    out_dtype: torch.dtype, launch: Launch = run,
) -> Tensor:  # fmt: skip
    """dy^T x for the rows of each expert: x [R, K], dy [R, N] -> [E, N, K], from init on, rounded once."""
    if cu_seqlens is not None:
        return kernels_triton.token_product(x, dy, offsets, cu_seqlens, init, out_dtype, launch)
    E = offsets.shape[0] - 1
    tile = _tile(E, dy.shape[1], x.shape[1], sm_count(x.device), out_dtype.itemsize)
    out = x.new_empty((E, dy.shape[1], x.shape[1]), dtype=out_dtype)
    sum_rows(out, x, dy, offsets, init, tile, launch)
    return out


def sum_rows(
    out: Tensor, x: Tensor, dy: Tensor, offsets: Tensor, init: Tensor | None, tile: Tile, launch: Launch
) -> None:
    """The same with this tile."""
    E, N, K = out.shape
    rows = bounds(x, offsets, launch)
    staged = N % 64 == 0 and K * out.element_size() % 16 == 0
    a_desc = descriptor(matrix(dy), STEP, 64)
    at_launch, registers = tile.registers
    tiles = -(-N // tile.rows) * -(-K // tile.columns)
    constants: dict[str, Any] = {
        "CONSUMERS": tile.consumers,
        "COLUMNS": tile.columns,
        "STEP": STEP,
        "STAGES": tile.stages,
        "GROUP": tile.group,
        "LAYOUT": accumulator_layout(tile.columns),
        "HAS_INIT": init is not None,
        "STAGED": staged,
        "REGISTERS": registers,
    }
    launch(
        grouped_sum_kernel, (min(E * tiles, sm_count(out.device)),),
        out, rows, E, N, K, unused(out) if init is None else init,
        a_desc, descriptor(matrix(x), STEP, tile.columns),
        descriptor(matrix(out.view(E * N, K)), 64, tile.columns) if staged else unused(a_desc),
        **constants, num_warps=4, maxnreg=at_launch, enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip
