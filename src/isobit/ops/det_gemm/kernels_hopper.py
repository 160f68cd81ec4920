"""Hopper kernels of the matrix products: class chain16 (product) and seg16/512 (token_product).

Every tile below gives the same bits, because no sum depends on the tile: output element (i, j) is one chain
of `wgmma` steps over ascending k, whatever the tile, the orientation, the number of stages or the program.
So `choose_tile` is free to choose, from the shape alone, by the time model in `isobit.kernels.hopper.tiles`.

Few tokens: the weight takes the 64 rows of a `wgmma` and the tokens its columns, so that 16 tokens do not
cost as much as 64. This is *swapped*: the kernel computes the transpose and stores it transposed.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run, unused
from isobit.frame.traced import decides
from isobit.kernels.hopper.descriptors import Matrix, aligned_for_tma, descriptor, matrix, operand_descriptor
from isobit.kernels.hopper.pipeline import (
    PRODUCER_REGISTERS,
    Pipe,
    TensorDescriptor,
    accumulator_layout,
    gdc_wait,
    gl,
    gluon,
    kernel,
    load_tiles,
    tma,
)
from isobit.kernels.hopper.product import outputs, pack, sum_into
from isobit.kernels.hopper.tiles import Tile, fitted, microseconds, tiles_of
from isobit.kernels.host.token_stream import Stream
from isobit.kernels.triton.tiles import ones_kernel

# Tiles

#: Columns of tiles by consumer warpgroups. 117 were timed in 380 cells on an H200. Among these 34 the model's
#: choices take 1.2 % longer than the fastest, among 52 of them 1.4 %, among all 2.1 %.
_DIRECT = {1: (96, 128, 160, 192), 2: (128, 160), 3: (128,)}
_SWAPPED = {
    1: (8, 16, 32, 64, 72, 80, 96, 128, 136, 144, 160, 192),
    2: (96, 128, 136, 144, 160),
    3: (128, 136),
}
#: Their output leaves in two halves through one buffer, which leaves room for a stage more.
_HALVED = {1: (256,), 2: (256,)}
#: Fewer columns than this, where k is not contiguous in b, are less than a line of 128 bytes: 64 x 160, whose
#: second accumulator has 32, took 1.2 times as long there.
NARROW = 64
#: Two programs on an SM at the same time, for few tokens. The next product finds room to start while this one
#: still runs, and the SM has work while one of them waits: up to a fifth faster where K is short.
_TWO_ON_AN_SM = {1: (8, 16, 32, 48, 72), 2: (8,)}


@cache
def product_tiles(itemsize: int, by_k: bool = True) -> tuple[Tile, ...]:
    """Every tile for outputs with this many bytes per element. Tiles of fp32 outputs with three stages were
    not measured, and are left out.

    by_k: k is contiguous in b. If it is not, tiles with accumulators narrower than NARROW are left out."""
    kinds: tuple[tuple[dict[int, tuple[int, ...]], dict[str, Any]], ...] = (
        (_DIRECT, {"swapped": False}),
        (_HALVED, {"swapped": False, "halved": True}),
        (_SWAPPED, {"swapped": True}),
        (_TWO_ON_AN_SM, {"swapped": True, "per_sm": 2}),
    )
    tiles = [
        fitted(consumers, columns, itemsize=itemsize, **how)
        for sizes, how in kinds
        for consumers in sizes
        for columns in sizes[consumers]
    ]
    return tuple(
        tile
        for tile in tiles
        if tile.stages >= (4 if itemsize == 4 else 3) and (by_k or tile.swapped or min(tile.parts) >= NARROW)
    )


#: Up to this many rows the tiles of a layer are chosen together: a batch that changes with every step meets
#: a choice that was made before.
TABLE_ROWS = 4096


def choose_tile(
    M: int, N: int, K: int, sms: int, itemsize: int = 2, by_k: bool = True
) -> tuple[Tile, float]:  # fmt: skip
    """The tile for an M x N output over K, and the expected time in microseconds. If two times are equal to
    10 ns, the tile that needs fewer programs to cover the output. All tiles have multiples of 8 rows and
    columns, so M is rounded up to one first. by_k: k is contiguous in b."""
    eights = max(-(-M // 8), 1)
    if eights <= TABLE_ROWS // 8:
        return _table(N, K, sms, itemsize, by_k)[eights - 1]
    return _chosen((8 * eights,), N, K, sms, itemsize, by_k)[0]


@decides
def _tile(M: int, N: int, K: int, sms: int, itemsize: int, by_k: bool) -> Tile:
    return choose_tile(M, N, K, sms, itemsize, by_k)[0]


@lru_cache(maxsize=256)  # each has 512 entries, some 40 KB
def _table(N: int, K: int, sms: int, itemsize: int, by_k: bool) -> list[tuple[Tile, float]]:
    return _chosen(range(8, TABLE_ROWS + 1, 8), N, K, sms, itemsize, by_k)


def _chosen(
    M: Sequence[int], N: int, K: int, sms: int, itemsize: int, by_k: bool
) -> list[tuple[Tile, float]]:
    """The tile and the time for each M."""
    tiles = product_tiles(itemsize, by_k)
    times = np.round(microseconds(tiles, M, N, K, sms, itemsize), 2)
    tiles_m, tiles_n = tiles_of(tiles, M, N)
    best = np.lexsort((tiles_m * tiles_n, times))[:, 0]
    return [(tiles[i], float(row[i])) for i, row in zip(best, times, strict=True)]


@cache
def _wider(tile: Tile, itemsize: int) -> Tile:
    """Instead of a tile with an accumulator of 8 columns where k is not contiguous in the tokens: one with 8
    columns more. A row of its stage would have 16 bytes, too few to be swizzled. ptxas 12.8 computes the
    `wgmma` descriptors of such an operand from registers that it has never set: the kernel then reads any
    shared memory, or none that exists."""
    return fitted(tile.consumers, tile.columns + 8, tile.swapped, itemsize, per_sm=tile.per_sm)


# Kernels


@gluon.jit
def finish(output, acc, pipe, m, n, WHICH: gl.constexpr):
    """Add the bias in fp32 and store."""
    if output.HAS_EXTRA:
        i, j = output.place(pipe, m, n, WHICH)
        if output.SWAPPED:
            acc += gl.load(output.extra + i, mask=i < output.M, other=0).to(gl.float32)[:, None]
        else:
            acc += gl.load(output.extra + j, mask=j < output.N, other=0).to(gl.float32)[None, :]
    output.store(pipe, acc, m, n, WHICH)


@gluon.jit
def _chains(WHICH: gl.constexpr, pipe, output, output_rest):
    """A consumer warpgroup of `product`: one chain over all of k for each tile. `rest`: see `Pipe`."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    acc = output.zeros()  # once: the first step of a tile overwrites what the one before has left
    rest = output_rest.zeros()
    for t in range(gl.program_id(0), pipe.items(), gl.num_programs(0)):
        m, n, _, _ = pipe.item(t)
        acc, rest, stage, phase = pipe.multiply_both(acc, rest, pipe.steps, stage, phase, WHICH)
        finish(output, acc, pipe, m, n, WHICH)
        if pipe.REST:
            finish(output_rest, rest, pipe, m, n, WHICH)
    if output.STAGED:
        tma.store_wait(0)


@kernel
def product_kernel(
    out, ld, M, N, steps, bias, a_desc, b_desc, out_desc, b_rest_desc, out_rest_desc,
    A_BY_K: gl.constexpr, B_BY_K: gl.constexpr, CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, REST: gl.constexpr,
    LAYOUT: gl.constexpr, LAYOUT_REST: gl.constexpr,
    SWAPPED: gl.constexpr, HAS_BIAS: gl.constexpr, STAGED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """out [M, N] = a b + bias. If SWAPPED, M is the N of the weight."""
    pipe = Pipe.create(
        a_desc, b_desc, M, N, steps, SPANS=0, A_BY_K=A_BY_K, B_BY_K=B_BY_K, CONSUMERS=CONSUMERS,
        COLUMNS=COLUMNS, STEP=STEP, STAGES=STAGES, GROUP=GROUP, rest_desc=b_rest_desc, REST=REST,
        BY_COLUMNS=SWAPPED, OVERLAP=True,
    )  # fmt: skip
    output, output_rest = outputs(
        pipe, out, ld, M, N, bias, out_desc, out_rest_desc, LAYOUT, LAYOUT_REST, SWAPPED, HAS_BIAS, STAGED
    )
    # With launch_pdl a kernel may start when all programs of the one before it have loaded what they need. So
    # nothing is read or written before that one is complete: not an input that it writes, and not the output,
    # whose memory it may still be reading. Every program waits, so a kernel that is complete was preceded by
    # complete ones only; and the kernel after this one cannot start before this wait has ended.
    gdc_wait()
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_chains, (0, pipe, output, output_rest)), (load_tiles, (pipe,))], [1], [PRODUCER_REGISTERS]
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(_chains, (0, pipe, output, output_rest)), (_chains, (1, pipe, output, output_rest)),
             (load_tiles, (pipe,))],
            [4, 1], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_chains, (0, pipe, output, output_rest)), (_chains, (1, pipe, output, output_rest)),
             (_chains, (2, pipe, output, output_rest)), (load_tiles, (pipe,))],
            [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


# Launchers


def why_not_tma(**operands: Tensor) -> str | None:
    for name, t in operands.items():
        unaligned_batch = t.ndim == 3 and len(t) > 1 and t.stride(0) * t.element_size() % 16
        if not aligned_for_tma(matrix(t)) or unaligned_batch:
            return (
                f"TMA cannot read {name} in place: it must begin at a multiple of 16 bytes, and its rows or "
                f"columns be contiguous and a multiple of 16 bytes apart (shape {tuple(t.shape)}, "
                f"strides {t.stride()})"
            )
    return None


def why_not_product(a: Tensor, b: Tensor) -> str | None:
    return why_not_tma(a=a, b=b)


def why_not_token_product(x: Tensor, dy: Tensor) -> str | None:
    return why_not_tma(x=x, dy=dy)


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, launch: Launch = run
) -> Tensor:
    """a [Z, M, K] times b [Z, K, N], plus bias [N]; or without a Z."""
    (*lead, M, _), N = a.shape, b.shape[-1]
    out = a.new_empty((*lead, M, N), dtype=out_dtype)
    tile = _tile(M, N, a.shape[-1], sm_count(a.device), out_dtype.itemsize, b.stride(-2) == 1)
    if 8 in tile.parts and not matrix(a).is_row_major():
        tile = _wider(tile, out_dtype.itemsize)
    for z in range(len(a) if lead else 1):
        left, right = matrix(a[z] if z else a), matrix(b[z] if z else b)
        if tile.swapped:
            left, right = right.transposed(), left.transposed()
        _multiply(out[z] if z else out, left, right, bias, tile, launch)
    return out


def operands(
    out: Tensor, a: Matrix, b: Matrix, bias: Tensor | None, tile: Tile, staged: bool,
    described: Callable[[Matrix, int, int], tuple[TensorDescriptor, bool]],
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """What kernels of products take from the bias on, and by name: descriptors, the tile and its layouts.
    `described(operand, side, step)` is the descriptor of an operand, and whether k is contiguous in it."""
    a_desc, a_by_k = described(a, 64, tile.step)

    def output_descriptor(columns: int) -> TensorDescriptor:
        if not staged:
            return unused(a_desc)
        return descriptor(matrix(out), *((columns, 64) if tile.swapped else (64, columns)))

    wide = tile.columns - tile.rest
    b_desc, b_by_k = described(b.transposed(), wide, tile.step)
    out_desc, b_rest_desc, out_rest_desc = output_descriptor(wide), None, None
    if tile.rest:
        b_rest_desc, _ = described(b.transposed(), tile.rest, tile.step)
        out_rest_desc = output_descriptor(tile.rest)
    at_launch, registers = tile.registers
    given = (unused(out) if bias is None else bias, a_desc, b_desc, out_desc, b_rest_desc, out_rest_desc)
    constants = {
        "A_BY_K": a_by_k,
        "B_BY_K": b_by_k,
        "CONSUMERS": tile.consumers,
        "COLUMNS": tile.columns,
        "STEP": tile.step,
        "STAGES": tile.stages,
        "GROUP": tile.group,
        "REST": tile.rest,
        "LAYOUT": accumulator_layout(wide),
        "LAYOUT_REST": accumulator_layout(tile.rest or wide),
        "SWAPPED": tile.swapped,
        "HAS_BIAS": bias is not None,
        "STAGED": staged,
        "REGISTERS": registers,
        "num_warps": 4,
        "maxnreg": at_launch,
        "enable_fp_fusion": False,
        "launch_pdl": True,
    }
    return given, constants


def _multiply(
    out: Tensor, a: Matrix, b: Matrix, bias: Tensor | None, tile: Tile, launch: Launch
) -> None:  # fmt: skip
    """out = a b + bias, or its transpose when the tile is swapped."""
    M, N, K = a.rows, b.columns, a.columns
    staged = out.shape[-1] * out.element_size() % 16 == 0
    given, constants = operands(out, a, b, bias, tile, staged, operand_descriptor)
    tiles = -(-M // tile.rows) * -(-N // tile.columns)
    launch(
        product_kernel, (min(tiles, tile.per_sm * sm_count(out.device)),),
        out, out.shape[-1], M, N, -(-K // tile.step), *given, **constants,
    )  # fmt: skip


def token_product(
    x: Tensor, dy: Tensor, stream: Stream | None, init: Tensor | None, launch: Launch = run,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """dy^T x over the tokens: x [Z, T, K], dy [Z, T, N] -> [Z, N, K], starting from init, rounded once at the
    end; or without a Z."""
    (*lead, _, K), N = x.shape, dy.shape[-1]
    out = x.new_empty((*lead, N, K), dtype=out_dtype)
    if not lead:
        _sum(out, x, dy, stream, init, launch)
        return out
    for z in range(len(x)):
        _sum(out[z], x[z], dy[z], stream, None if init is None else init[z], launch)
    return out


def _sum(
    out: Tensor, x: Tensor, dy: Tensor, stream: Stream | None, init: Tensor | None, launch: Launch
) -> None:  # fmt: skip
    if stream is not None:
        x, dy = pack(x, stream.rows, launch), pack(dy, stream.rows, launch)
    sum_into(out, x, dy, stream=stream, init=init, launch=launch)


def ones(dy: Tensor, launch: Launch = run) -> Tensor:
    """A column of ones in memory, 16 bytes apart: TMA cannot read with a stride of 0."""
    rows, word = dy.shape[0], 16 // dy.element_size()
    out = dy.new_empty(rows, word)
    launch(ones_kernel, (-(-rows // 1024),), out, rows, STEP=word, BLOCK=1024, enable_fp_fusion=False)
    return out[:, :1]
