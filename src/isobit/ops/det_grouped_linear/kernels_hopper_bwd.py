"""Hopper kernels of sums over the rows of experts: class seg16/512 for every expert.

A persistent kernel as `sum_kernel` of `isobit.kernels.hopper.product`, over the tiles of all experts. A chain
takes 64 rows at a time. The last ones of an expert may be fewer, and TMA would read on into the next expert,
so they are read from a copy that ends with zeros: 64 rows for each expert, which another kernel has made. An
expert without rows has one step of zeros, which is not added.

Sums with sequences inside an expert are those of `kernels_triton`.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run, unused
from isobit.frame.traced import decides
from isobit.kernels.hopper.descriptors import aligned_for_tma, descriptor, matrix
from isobit.kernels.hopper.pipeline import (
    PRODUCER_REGISTERS,
    Pipe,
    accumulator_layout,
    after,
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
)
from isobit.kernels.hopper.product import SEGMENT_ROWS, Output, choose_sum_tile
from isobit.kernels.hopper.tiles import Tile
from isobit.ops.det_grouped_linear import kernels_triton
from isobit.ops.det_grouped_linear.strips import tails

#: Rows of a step.
STEP = 64


# Sums


@record
class Sums:
    """The items of the kernel: `tiles` tiles of dW for each expert, and what is read of its rows."""

    bounds: gl.tensor
    tiles: gl.tensor
    E: gl.tensor
    a_tails: tma.tensor_descriptor
    b_tails: tma.tensor_descriptor

    @gluon.jit
    def items(self):
        return self.E * self.tiles

    @gluon.jit
    def item(self, pipe, t):
        """(expert, row of tiles, tile of columns, first row, rows) of item t."""
        expert = t // self.tiles
        m, n = tile_at(t % self.tiles, pipe.tiles_m, pipe.tiles_n, pipe.GROUP)
        first = gl.load(self.bounds + expert * 2)
        end = gl.load(self.bounds + expert * 2 + 1)
        return expert, m, n, first, end - first

    @gluon.jit
    def steps(self, pipe, rows):
        return gl.maximum(gl.cdiv(rows, pipe.STEP), 1)

    @gluon.jit
    def load(self, pipe, expert, m, n, first, rows, step, stage, phase):
        """Load one step as soon as a stage is empty; returns (stage, phase) of the next."""
        bar = pipe.ready.index(stage)
        mbarrier.wait(pipe.empty.index(stage), phase)
        bytes_per_stage: gl.constexpr = (
            pipe.CONSUMERS * pipe.a_desc.block_type.nbytes + pipe.b_desc.block_type.nbytes
        )
        mbarrier.expect(bar, bytes_per_stage)
        whole = (step + 1) * pipe.STEP <= rows
        column = pipe.column(n)
        b = pipe.b_ring.index(stage)
        for w in gl.static_range(pipe.CONSUMERS):
            a = pipe.a_ring.index(stage * pipe.CONSUMERS + w)
            row = pipe.row(m * pipe.CONSUMERS + w)
            if whole:
                load_operand(pipe.a_desc, 0, row, first + step * pipe.STEP, bar, a, False, False)
            else:
                load_operand(self.a_tails, 0, row, expert * pipe.STEP, bar, a, False, False)
        if whole:
            load_operand(pipe.b_desc, 0, column, first + step * pipe.STEP, bar, b, False, False)
        else:
            load_operand(self.b_tails, 0, column, expert * pipe.STEP, bar, b, False, False)
        return after(stage, phase, pipe.STAGES)


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
    for t in range(begin, items, gl.num_programs(0)):
        acc, stage, phase = pipe.begin_chain(acc, stage, phase, WHICH)
        if t > begin:
            _store(pipe, output, total, expert, m, n, WHICH)
        expert, m, n, _, rows = sums.item(pipe, t)
        steps = sums.steps(pipe, rows)
        total = _initial(pipe, output, expert, m, n, WHICH)
        acc, stage, phase = pipe.finish_chain(acc, gl.minimum(steps, FULL) - 1, stage, phase, WHICH)
        if rows > 0:
            total += acc
        for s in range(1, gl.cdiv(steps, FULL)):
            acc, stage, phase = pipe.multiply(acc, gl.minimum(steps - s * FULL, FULL), stage, phase, WHICH)
            total += acc
    if begin < items:
        _store(pipe, output, total, expert, m, n, WHICH)
    if output.STAGED:
        tma.store_wait(0)


@gluon.jit
def _produce(pipe, sums):
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for t in range(gl.program_id(0), sums.items(), gl.num_programs(0)):
        expert, m, n, first, rows = sums.item(pipe, t)
        for step in range(sums.steps(pipe, rows)):
            stage, phase = sums.load(pipe, expert, m, n, first, rows, step, stage, phase)
    gdc_launch_dependents()


@kernel
def grouped_sum_kernel(
    out, bounds, E, M, N, init, a_desc, b_desc, a_tails, b_tails, out_desc,
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
    sums = Sums(bounds, pipe.tiles_m * pipe.tiles_n, E, a_tails, b_tails)
    gdc_wait()  # before anything is read or written: see `product_kernel` of `det_gemm`
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_consume, (0, pipe, sums, output)), (_produce, (pipe, sums))], [1], [PRODUCER_REGISTERS]
        )
    else:
        gl.warp_specialize(
            [(_consume, (0, pipe, sums, output)), (_consume, (1, pipe, sums, output)),
             (_produce, (pipe, sums))],
            [4, 1], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


# Launchers


@decides
def _tile(rows: int, M: int, N: int, sms: int, itemsize: int) -> Tile:
    """As if the matrices of all experts were one, and each had the average number of rows."""
    return choose_sum_tile(M, N, max(rows, 1), sms, itemsize)[0]


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
    R, E = x.shape[0], offsets.shape[0] - 1
    tile = _tile(R // E, E * dy.shape[1], x.shape[1], sm_count(x.device), out_dtype.itemsize)
    out = x.new_empty((E, dy.shape[1], x.shape[1]), dtype=out_dtype)
    sum_rows(out, x, dy, offsets, init, tile, launch)
    return out


def sum_rows(
    out: Tensor, x: Tensor, dy: Tensor, offsets: Tensor, init: Tensor | None, tile: Tile, launch: Launch
) -> None:
    """The same with this tile."""
    E, N, K = out.shape
    bounds, x_tails, dy_tails = tails(x, dy, offsets, STEP, launch)
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
        out, bounds, E, N, K, unused(out) if init is None else init,
        a_desc, descriptor(matrix(x), STEP, tile.columns),
        descriptor(matrix(dy_tails), STEP, 64), descriptor(matrix(x_tails), STEP, tile.columns),
        descriptor(matrix(out.view(E * N, K)), 64, tile.columns) if staged else unused(a_desc),
        **constants, num_warps=4, maxnreg=at_launch, enable_fp_fusion=False, launch_pdl=True,
    )  # fmt: skip
