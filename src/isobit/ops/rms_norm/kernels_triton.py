"""`rms_norm` in portable Triton: NVIDIA, AMD, and the CPU interpreter. Class rms/1, see docs/numerics.md.

Forward: a program holds some short rows or one long one in registers, sums the squares and writes the result:
one read and one write. Rows that do not fit in registers are read twice.

Backward, `kernels_triton_bwd`: the same for dx, and dweight from the same read.

Order of a row's sum: lane j adds columns j, j + 1024, ..., one after another from +0; then lanes are added by
a tree of neighbours. Each addition of the tree has two operands, so the register layout cannot change the
order. Division and square root are rounded to nearest, and no product is contracted with a sum. So the bits
are those of IEEE arithmetic, and tiles, warps, and the number of rows per program are free.
"""

from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run
from isobit.kernels.host.rows import row_strides
from isobit.kernels.triton.interpreter import narrow, rounded
from isobit.kernels.triton.rows import row_offset
from isobit.ops.rms_norm.order import log_lanes

#: Elements of a tile of several short rows: 16 for each thread of four warps.
TILE = 2048

#: The longest row that a program of the forward holds in registers: 64 elements per thread of eight warps.
HELD = 16384

#: Chunks of a longer row that are loaded at once.
UNROLL = 4


# Kernels

#: Arguments that change with the batch. They are not specialised, to avoid recompiles.
BATCH = ("N", "inner", "x_so", "x_si", "residual_so", "residual_si")


@triton.jit
def tree_sums(x, ROWS: tl.constexpr, LOG: tl.constexpr):
    """Sums of rows of 2**LOG numbers: neighbours are added repeatedly."""
    for i in tl.static_range(LOG):
        if LOG > 9 and LOG - i == 4:
            # The rest is spread over warps, and each addition between warps would take three barriers. A
            # gather lets the compiler lay the numbers out, and it puts a row into one warp: one barrier.
            x = tl.gather(tl.reshape(x, [ROWS * 16]), tl.arange(0, ROWS * 16), axis=0)
        # An axis of two: one commutative addition, whichever threads hold the two.
        x = tl.sum(tl.reshape(x, [ROWS, 1 << (LOG - 1 - i), 2]), axis=2)
    return tl.reshape(x, [ROWS])


@triton.jit
def mask_of(row, col, N, D: tl.constexpr, FIRST: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """Which elements of the chunk from column FIRST on exist; None if all do."""
    mask = None
    if ROWS > 1 and FIRST + LANES > D:
        mask = (row < N)[:, None] & (col < D)[None, :]
    elif ROWS > 1:
        mask = (row < N)[:, None] & (col >= 0)[None, :]
    elif FIRST + LANES > D:
        mask = (row >= 0)[:, None] & (col < D)[None, :]
    return mask


@triton.jit
def load_tile(ptr, start, col, mask):
    """Columns of rows that start at these offsets; 0 where masked."""
    at = ptr + start[:, None] + col[None, :]
    if mask is None:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=mask, other=0.0)
    return tile


@triton.jit
def load_weight(weight, offset, col, D: tl.constexpr):
    """Columns of the weight in fp32, plus the offset if there is one."""
    w = tl.load(weight + col, mask=col < D, other=0.0).to(tl.float32)
    if offset is not None:
        w = w + offset
    return w[None, :]


@triton.jit
def weights_of(weight, offset, D: tl.constexpr, LOG_LANES: tl.constexpr, CHUNKS: tl.constexpr):
    """The chunks of the weight."""
    ws = ()
    for i in tl.static_range(CHUNKS):
        ws = ws + (load_weight(weight, offset, (i << LOG_LANES) + tl.arange(0, 1 << LOG_LANES), D),)
    return ws


@triton.jit
def weight_of(ws, weight, offset, i: tl.constexpr, D: tl.constexpr, LANES: tl.constexpr):
    """Chunk i of the weight, from registers if `ws` holds it."""
    if ws is None:
        w = load_weight(weight, offset, i * LANES + tl.arange(0, LANES), D)
    else:
        w = ws[i]
    return w


@triton.jit
def store_tile(ptr, start, col, value, mask):
    at = ptr + start[:, None] + col[None, :]
    if mask is None:
        tl.store(at, value)
    else:
        tl.store(at, value, mask=mask)


@triton.jit
def read_sum(x, residual, x_start, residual_start, col, mask):
    """Columns of x, or of x + residual rounded to the dtype of both."""
    h = load_tile(x, x_start, col, mask)
    if residual is not None:
        r = load_tile(residual, residual_start, col, mask)
        h = rounded(h.to(tl.float32) + r.to(tl.float32), x.dtype.element_ty)
    return h


@triton.jit
def inverse_root(squares, eps, D: tl.constexpr):
    """1 / sqrt(squares / D + eps), every step rounded to nearest."""
    mean = tl.div_rn(squares, tl.full(squares.shape, D, tl.float32))
    return tl.div_rn(tl.full(squares.shape, 1.0, tl.float32), tl.sqrt_rn(mean + eps))


@triton.jit
def normalised(h, scale, w, BEFORE: tl.constexpr):
    """h scale w in fp32; BEFORE: h scale is rounded to the dtype of h first."""
    y = h.to(tl.float32) * scale[:, None]
    if BEFORE:
        y = rounded(y, h.dtype).to(tl.float32)
    return y * w


@triton.jit(do_not_specialize=BATCH)
def norm_rows(
    x, residual, weight, out, summed, rstd, eps, offset, N, inner, x_so, x_si, residual_so, residual_si,
    D: tl.constexpr, WORD: tl.constexpr, BEFORE: tl.constexpr, ROWS: tl.constexpr, LOG_LANES: tl.constexpr,
    CHUNKS: tl.constexpr, WEIGHT_FIRST: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """One program takes ROWS rows and holds them in registers. Strides are in words of WORD elements."""
    LANES: tl.constexpr = 1 << LOG_LANES
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    x_start = row_offset(row, inner, x_so, x_si) * WORD
    residual_start = row_offset(row, inner, residual_so, residual_si) * WORD
    own = row * D
    ws = None
    if WEIGHT_FIRST:  # loaded before the sum, not after it
        ws = weights_of(weight, offset, D, LOG_LANES, CHUNKS)
        if FEW:
            tl.debug_barrier()  # or the compiler lets these loads wait for the row, a second trip to memory
    tiles = ()
    for i in tl.static_range(CHUNKS):
        col = i * LANES + lane
        mask = mask_of(row, col, N, D, i * LANES, LANES, ROWS)
        h = read_sum(x, residual, x_start, residual_start, col, mask)
        tiles = tiles + (h,)
    total = tl.zeros([ROWS, LANES], tl.float32)
    for i in tl.static_range(CHUNKS):
        h = tiles[i].to(tl.float32)
        total = total + h * h
    scale = inverse_root(tree_sums(total, ROWS, LOG_LANES), eps, D)
    for i in tl.static_range(CHUNKS):
        col = i * LANES + lane
        mask = mask_of(row, col, N, D, i * LANES, LANES, ROWS)
        w = weight_of(ws, weight, offset, i, D, LANES)
        store_tile(out, own, col, narrow(normalised(tiles[i], scale, w, BEFORE), out), mask)
        if summed is not None:
            store_tile(summed, own, col, tiles[i], mask)
    if rstd is not None:
        tl.store(rstd + row, scale, mask=row < N)


@triton.jit(do_not_specialize=BATCH)
def norm_long_rows(
    x, residual, weight, out, summed, rstd, eps, offset, N, inner, x_so, x_si, residual_so, residual_si,
    D: tl.constexpr, WORD: tl.constexpr, BEFORE: tl.constexpr, LOG_LANES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One program per row, which it reads twice."""
    LANES: tl.constexpr = 1 << LOG_LANES
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    lane = tl.arange(0, LANES)
    x_start = row_offset(row, inner, x_so, x_si) * WORD
    residual_start = row_offset(row, inner, residual_so, residual_si) * WORD
    own = row * D
    total = tl.zeros([1, LANES], tl.float32)
    for first in range(0, D, UNROLL * LANES):
        for i in tl.static_range(UNROLL):
            col = first + i * LANES + lane
            mask = (row < N)[:, None] & (col < D)[None, :]
            h = read_sum(x, residual, x_start, residual_start, col, mask).to(tl.float32)
            total = total + h * h
    scale = inverse_root(tree_sums(total, 1, LOG_LANES), eps, D)
    for first in range(0, D, UNROLL * LANES):
        for i in tl.static_range(UNROLL):
            col = first + i * LANES + lane
            mask = (row < N)[:, None] & (col < D)[None, :]
            h = read_sum(x, residual, x_start, residual_start, col, mask)
            w = load_weight(weight, offset, col, D)
            store_tile(out, own, col, narrow(normalised(h, scale, w, BEFORE), out), mask)
            if summed is not None:
                store_tile(summed, own, col, h, mask)
    if rstd is not None:
        tl.store(rstd + row, scale, mask=row < N)


# Launchers


class Walk(NamedTuple):
    """How a kernel indexes tensors of one leading shape row by row."""

    inner: int | None  # rows of the inner dimension; None if all rows have the same stride
    tensors: list[Any]
    strides: list[int]  # (outer, inner) of each, in words
    word: int  # elements: the alignment of every row of every tensor


def walk(lead: torch.Size, D: int, *tensors: Tensor | None) -> Walk:
    inner, views, strides = row_strides(lead, tensors)
    pairs = list(zip(strides[::2], strides[1::2], strict=True))
    even = lead.numel() <= inner or all(outer == inner * step for outer, step in pairs)
    # A word is 16 bytes, or the part of it to which all rows are aligned. Kernels multiply strides by it, so
    # the compiler knows the alignment: loads are as wide as possible, and another stride does not recompile.
    itemsize = next(t.element_size() for t in tensors if t is not None)
    word = gcd(16 // itemsize, D, *strides)
    return Walk(None if even else inner, views, [s // word for s in strides], word)


def tile_of(D: int, elements: int) -> dict[str, int]:
    """Rows per program, lanes and chunks, for rows of D columns."""
    log = log_lanes(D)
    rows = max(1, min(elements >> log, 32)) if 1 << log >= D else 1
    return {"ROWS": rows, "LOG_LANES": log, "CHUNKS": triton.cdiv(D, 1 << log)}


def or_none(offset: float) -> float | None:
    """An offset of 0 is not added: -0 would become +0."""
    return offset or None


def rms_norm(launch: Launch = run, **args: Any) -> tuple[Tensor | None, ...]:
    """(out, summed, rstd); None for outputs that were not requested."""
    x, residual, weight = args["x"], args["residual"], args["weight"]
    lead, D = x.shape[:-1], x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = None if residual is None else torch.empty_like(out)
    rstd = torch.empty(lead, dtype=torch.float32, device=x.device) if args["return_rstd"] else None
    N = lead.numel()
    inner, given, strides, word = walk(lead, D, x, residual)
    tensors = (*given, weight, out, summed, rstd, args["eps"], or_none(args["offset"]))
    common = {"D": D, "WORD": word, "BEFORE": args["cast"] == "before"}
    if D > HELD:
        launch(
            norm_long_rows, (N,),
            *tensors, N, inner, *strides,
            **common, LOG_LANES=log_lanes(D), UNROLL=UNROLL, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    else:
        tile = tile_of(D, TILE)
        programs = triton.cdiv(N, tile["ROWS"])
        # Few programs have an SM almost to themselves, and more warps compute a long row sooner.
        few = programs <= 4 * sm_count(x.device)
        launch(
            norm_rows, (programs,),
            *tensors, N, inner, *strides,
            **common, **tile, WEIGHT_FIRST=D <= HELD // 2, FEW=few,
            num_warps=8 if D > HELD // 2 or (few and D > TILE) else 4, enable_fp_fusion=False,
        )  # fmt: skip
    return out, summed, rstd
