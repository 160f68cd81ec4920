"""Hopper kernels of grouped products: class chain16 for every row, whatever the groups are.

A persistent kernel as in `det_gemm`, with its main loop and its tiles. The differences:

- Tiles of the output are found in the list of strips, which another kernel has made on the device.
- Weights are a three-dimensional tensor for TMA, so it fills with zeros where an expert's weight ends, and
  not with the next expert's. Rows are read beyond the end of an expert: they only make rows that are not
  stored.
- Tiles of whole strips are stored by TMA, all others through shared memory and masked stores.
- A tile is rounded to 16 bits, and stored while the first step of the next one is in flight. Experts often
  have few steps of k, and the tensor cores would be idle meanwhile.

Rows of no expert are products of zeros: expert E of the weights and matrix 1 of x are outside, and TMA fills
them. So they need no code of their own.
"""

import torch
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run, unused
from isobit.kernels.hopper.descriptors import Stack, descriptor, matrix, stack, stack_descriptor
from isobit.kernels.hopper.pipeline import (
    PRODUCER_REGISTERS,
    ROWS,
    Pipe,
    TensorDescriptor,
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
    record,
    tile_at,
    tma,
    tma_store,
)
from isobit.kernels.hopper.product import outputs
from isobit.kernels.hopper.tiles import Tile
from isobit.ops.det_gemm.kernels_hopper import ones
from isobit.ops.det_grouped_linear.kernels_hopper_bwd import token_product, why_not_token_product
from isobit.ops.det_grouped_linear.strips import capacity, strips
from isobit.ops.det_grouped_linear.tiles_hopper import store_layout, tile_of

__all__ = ["multiply", "ones", "product", "token_product", "why_not_product", "why_not_token_product"]

# Kernels


@record
class Groups:
    """The items of the kernel: tiles of the output, expert by expert. `tiles`: how many tiles the N columns
    of the output have. TOKENS: rows of the output in a tile, the height of a strip."""

    table: gl.tensor
    E: gl.tensor
    tiles: gl.tensor
    steps: gl.tensor
    TOKENS: gl.constexpr
    SWAPPED: gl.constexpr

    @gluon.jit
    def items(self):
        return gl.load(self.table) * self.tiles

    @gluon.jit
    def item(self, t, GROUP: gl.constexpr):
        """(expert, first row, end of the expert's rows, tile of columns, steps of k) of item t. An expert's
        items are as many as its strips have tiles, so the strip that t would be in without bands is one of
        the same expert."""
        at = self.table + 4 + t // self.tiles * 4
        expert = gl.load(at)
        begun = gl.load(at + 1)
        first = gl.load(at + 2)
        end = gl.load(at + 3)
        i, j = tile_at(t - begun * self.tiles, gl.cdiv(end - first, self.TOKENS), self.tiles, GROUP)
        return expert, first + i * self.TOKENS, end, j, gl.where(expert < self.E, self.steps, 1)

    @gluon.jit
    def load(self, pipe, expert, row, j, step, stage, phase):
        """Load one step of k as soon as a stage is empty; returns (stage, phase) of the next."""
        k = step * pipe.STEP
        bar = pipe.ready.index(stage)
        mbarrier.wait(pipe.empty.index(stage), phase)
        bytes_per_stage: gl.constexpr = (
            pipe.CONSUMERS * pipe.a_desc.block_type.nbytes
            + pipe.b_desc.block_type.nbytes
            + pipe.rest_desc.block_type.nbytes * (pipe.REST > 0)
        )
        mbarrier.expect(bar, bytes_per_stage)
        outside = gl.where(expert < self.E, 0, 1)
        WIDE: gl.constexpr = pipe.COLUMNS - pipe.REST
        b = pipe.b_ring.index(stage)
        rest = pipe.rest_ring.index(stage)
        for w in gl.static_range(pipe.CONSUMERS):
            a = pipe.a_ring.index(stage * pipe.CONSUMERS + w)
            if self.SWAPPED:
                at = pipe.row(j * pipe.CONSUMERS + w)
                load_operand(pipe.a_desc, expert, at, k, bar, a, pipe.A_BY_K, True)
            else:
                load_operand(pipe.a_desc, outside, row + w * ROWS, k, bar, a, pipe.A_BY_K, True)
        if self.SWAPPED:
            load_operand(pipe.b_desc, outside, row, k, bar, b, pipe.B_BY_K, True)
            if pipe.REST:
                load_operand(pipe.rest_desc, outside, row + WIDE, k, bar, rest, pipe.B_BY_K, True)
        else:
            column = pipe.column(j)
            load_operand(pipe.b_desc, expert, column, k, bar, b, pipe.B_BY_K, True)
            if pipe.REST:
                load_operand(pipe.rest_desc, expert, column + WIDE, k, bar, rest, pipe.B_BY_K, True)
        return after(stage, phase, pipe.STAGES)


@gluon.jit
def _first_column(output, pipe, j, WHICH: gl.constexpr):
    """The first column of the output that a consumer has in tile j: those of the weight's rows."""
    if output.SWAPPED:
        column = pipe.row(j * pipe.CONSUMERS + WHICH)
    else:
        column = pipe.column(j) + output.OFFSET
    return column


@gluon.jit
def _rounded(output, pipe, groups, bias_stride, acc, expert, j, WHICH: gl.constexpr):
    """Add the bias in fp32, and round once."""
    if output.HAS_EXTRA:
        column = _first_column(output, pipe, j, WHICH)
        at = output.extra + expert.to(gl.int64) * bias_stride
        # A bias of no expert is not read.
        size = gl.where(expert < groups.E, output.N, 0)
        if output.SWAPPED:
            i = column + gl.arange(0, ROWS, gl.SliceLayout(1, output.LAYOUT))
            acc += gl.load(at + i, mask=i < size, other=0).to(gl.float32)[:, None]
        else:
            i = column + gl.arange(0, output.COLUMNS, gl.SliceLayout(0, output.LAYOUT))
            acc += gl.load(at + i, mask=i < size, other=0).to(gl.float32)[None, :]
    return acc.to(output.out.dtype.element_ty)


@gluon.jit
def _put(output, pipe, values, row, end, j, WHICH: gl.constexpr, STORE: gl.constexpr):
    """Store a consumer's part of a tile: rows up to the end of the expert."""
    column = _first_column(output, pipe, j, WHICH)
    HEIGHT: gl.constexpr = output.COLUMNS if output.SWAPPED else ROWS
    WIDTH: gl.constexpr = ROWS if output.SWAPPED else output.COLUMNS
    if output.SWAPPED:
        first = row + output.OFFSET
    else:
        first = row + WHICH * ROWS
    if output.STAGED:
        buffer = output.staging.index(WHICH)
        OTHERS: gl.constexpr = 1 if pipe.REST else 0
        tma.store_wait(OTHERS)  # the previous tile has left the buffer
        if output.SWAPPED:
            buffer.permute((1, 0)).store(values)
        else:
            buffer.store(values)
        if first + HEIGHT <= end:
            fence_async_shared()
            tma_store(output.desc, [first, column], buffer)
        else:
            i = first + gl.arange(0, HEIGHT, gl.SliceLayout(1, STORE))
            eight = column + gl.arange(0, WIDTH, gl.SliceLayout(0, STORE))
            at = output.out + i.to(gl.int64)[:, None] * output.ld + eight[None, :]
            inside = (i < end)[:, None] & (eight < output.N)[None, :]
            gl.store(gl.multiple_of(at, (1, 8)), buffer.load(STORE), mask=inside)
    elif output.SWAPPED:
        n = column + gl.arange(0, ROWS, gl.SliceLayout(1, output.LAYOUT))
        i = first + gl.arange(0, output.COLUMNS, gl.SliceLayout(0, output.LAYOUT))
        at = output.out + i.to(gl.int64)[None, :] * output.ld + n[:, None]
        gl.store(at, values, mask=(n < output.N)[:, None] & (i < end)[None, :])
    else:
        i = first + gl.arange(0, ROWS, gl.SliceLayout(1, output.LAYOUT))
        n = column + gl.arange(0, output.COLUMNS, gl.SliceLayout(0, output.LAYOUT))
        at = output.out + i.to(gl.int64)[:, None] * output.ld + n[None, :]
        gl.store(at, values, mask=(i < end)[:, None] & (n < output.N)[None, :])


@gluon.jit
def _put_both(
    output, output_rest, pipe, values, values_rest, row, end, j,
    WHICH: gl.constexpr, STORE: gl.constexpr, STORE_REST: gl.constexpr,
):  # fmt: skip
    _put(output, pipe, values, row, end, j, WHICH, STORE)
    if pipe.REST:
        _put(output_rest, pipe, values_rest, row, end, j, WHICH, STORE_REST)


@gluon.jit
def _consume(
    WHICH: gl.constexpr, pipe, groups, output, output_rest, bias_stride,
    STORE: gl.constexpr, STORE_REST: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: one chain over all of k for each tile."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    acc = output.zeros()
    rest = output_rest.zeros()
    values = acc.to(output.out.dtype.element_ty)
    values_rest = rest.to(output.out.dtype.element_ty)
    row = gl.to_tensor(0)
    end = gl.to_tensor(0)
    j = gl.to_tensor(0)
    begin = gl.program_id(0)
    items = groups.items()
    for t in range(begin, items, gl.num_programs(0)):
        acc, rest, stage, phase = pipe.begin_both(acc, rest, stage, phase, WHICH)
        if t > begin:
            _put_both(output, output_rest, pipe, values, values_rest, row, end, j, WHICH, STORE, STORE_REST)
        expert, row, end, j, steps = groups.item(t, pipe.GROUP)
        acc, rest, stage, phase = pipe.finish_both(acc, rest, steps - 1, stage, phase, WHICH)
        values = _rounded(output, pipe, groups, bias_stride, acc, expert, j, WHICH)
        if pipe.REST:
            values_rest = _rounded(output_rest, pipe, groups, bias_stride, rest, expert, j, WHICH)
    if begin < items:
        _put_both(output, output_rest, pipe, values, values_rest, row, end, j, WHICH, STORE, STORE_REST)
    if output.STAGED:
        tma.store_wait(0)


@gluon.jit
def _produce(pipe, groups):
    """The producer: every step of k of each of the program's tiles, as soon as a stage is empty."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for t in range(gl.program_id(0), groups.items(), gl.num_programs(0)):
        expert, row, _, j, steps = groups.item(t, pipe.GROUP)
        for step in range(steps):
            stage, phase = groups.load(pipe, expert, row, j, step, stage, phase)
    gdc_launch_dependents()


@kernel
def grouped_kernel(
    out, table, E, N, steps, bias, bias_stride, a_desc, b_desc, out_desc, b_rest_desc, out_rest_desc,
    A_BY_K: gl.constexpr, B_BY_K: gl.constexpr, CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, REST: gl.constexpr,
    LAYOUT: gl.constexpr, LAYOUT_REST: gl.constexpr, STORE: gl.constexpr, STORE_REST: gl.constexpr,
    SWAPPED: gl.constexpr, HAS_BIAS: gl.constexpr, STAGED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """out [R, N] = x weight[e]^T + bias[e]. The weight is b, or a if SWAPPED."""
    pipe = Pipe.create(
        a_desc, b_desc, N, N, steps, SPANS=0, A_BY_K=A_BY_K, B_BY_K=B_BY_K, CONSUMERS=CONSUMERS,
        COLUMNS=COLUMNS, STEP=STEP, STAGES=STAGES, GROUP=GROUP, rest_desc=b_rest_desc, REST=REST,
        OVERLAP=True, BY_LEAF=True,
    )  # fmt: skip
    output, output_rest = outputs(
        pipe, out, N, N, N, bias, out_desc, out_rest_desc, LAYOUT, LAYOUT_REST, SWAPPED, HAS_BIAS, STAGED
    )
    TOKENS: gl.constexpr = COLUMNS if SWAPPED else CONSUMERS * ROWS
    OTHER: gl.constexpr = CONSUMERS * ROWS if SWAPPED else COLUMNS
    groups = Groups(table, E, gl.cdiv(N, OTHER), steps, TOKENS, SWAPPED)
    gdc_wait()  # before anything is read or written: see `product_kernel` of `det_gemm`
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_consume, (0, pipe, groups, output, output_rest, bias_stride, STORE, STORE_REST)),
             (_produce, (pipe, groups))],
            [1], [PRODUCER_REGISTERS],
        )  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(_consume, (0, pipe, groups, output, output_rest, bias_stride, STORE, STORE_REST)),
             (_consume, (1, pipe, groups, output, output_rest, bias_stride, STORE, STORE_REST)),
             (_produce, (pipe, groups))],
            [4, 1], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consume, (0, pipe, groups, output, output_rest, bias_stride, STORE, STORE_REST)),
             (_consume, (1, pipe, groups, output, output_rest, bias_stride, STORE, STORE_REST)),
             (_consume, (2, pipe, groups, output, output_rest, bias_stride, STORE, STORE_REST)),
             (_produce, (pipe, groups))],
            [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


# Launchers


def why_not_product(x: Tensor, weight: Tensor) -> str | None:
    rows, weights = Stack(matrix(x), 1, 0), stack(weight)
    if rows.aligned_for_tma() and rows.first.is_row_major() and weights.aligned_for_tma():
        return None
    return (
        "TMA cannot read x and weight in place: both must begin at a multiple of 16 bytes, and the rows of "
        "x, and the rows or columns of each weight, be contiguous and a multiple of 16 bytes apart (shape "
        f"{tuple(x.shape)}, strides {x.stride()}; weight: {tuple(weight.shape)}, {weight.stride()})"
    )


def product(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, launch: Launch = run) -> Tensor:
    """x [R, K] times weight[e]^T, [N, K] each, plus bias[e], for the rows of each expert."""
    (R, K), (E, N, _) = x.shape, weight.shape
    tile = tile_of(R, E, N, K, sm_count(x.device))
    out = torch.empty(R, N, dtype=x.dtype, device=x.device)
    multiply(out, x, weight, offsets, bias, tile, launch)
    return out


def multiply(
    out: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, tile: Tile, launch: Launch
) -> None:
    """The same with this tile."""
    (R, K), (E, N, _) = x.shape, weight.shape
    tokens, other = (tile.columns, tile.rows) if tile.swapped else (tile.rows, tile.columns)
    table = strips(x, offsets, tokens, launch)
    staged = N * out.element_size() % 16 == 0
    wide = tile.columns - tile.rest

    a, b = Stack(matrix(x), 1, 0), stack(weight)
    if tile.swapped:
        a, b = b, a
    a_desc, a_by_k = stack_descriptor(a, 64, tile.step)
    b_desc, b_by_k = stack_descriptor(b, wide, tile.step)

    def stored(columns: int) -> TensorDescriptor:
        if not staged:
            return unused(a_desc)
        return descriptor(matrix(out), *((columns, 64) if tile.swapped else (64, columns)))

    at_launch, registers = tile.registers
    launch(
        grouped_kernel, (min(capacity(R, E, tokens) * -(-N // other), sm_count(out.device)),),
        out, table, E, N, -(-K // tile.step),
        unused(out) if bias is None else bias, 0 if bias is None else bias.stride(0),
        a_desc, b_desc, stored(wide),
        stack_descriptor(b, tile.rest, tile.step)[0] if tile.rest else None,
        stored(tile.rest) if tile.rest else None,
        A_BY_K=a_by_k,
        B_BY_K=b_by_k,
        CONSUMERS=tile.consumers,
        COLUMNS=tile.columns,
        STEP=tile.step,
        STAGES=tile.stages,
        GROUP=tile.group,
        REST=tile.rest,
        LAYOUT=accumulator_layout(wide),
        LAYOUT_REST=accumulator_layout(tile.rest or wide),
        STORE=store_layout(64 if tile.swapped else wide),
        STORE_REST=store_layout(64 if tile.swapped else tile.rest or wide),
        SWAPPED=tile.swapped,
        HAS_BIAS=bias is not None,
        STAGED=staged,
        REGISTERS=registers,
        num_warps=4,
        maxnreg=at_launch,
        enable_fp_fusion=False,
        launch_pdl=True,
    )  # fmt: skip
