"""`combine` and `spread` in portable Triton: NVIDIA, AMD, and the CPU interpreter. Class combine/1, see
docs/combine.md.

Forward a program takes BLOCK columns of a token, and the rows of its experts one after another. Backward one
takes a row of an expert: it writes the row's gradient while it adds up that of the weight. Programs write
different rows, so there are no atomics. A place outside the rows is never used as an address.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.host.words import rows_in_words
from isobit.kernels.triton.interpreter import narrow, rounded
from isobit.kernels.triton.rows import tree_sum

#: Columns of a program of four warps: 16 bytes of a 16-bit tensor per thread.
BLOCK = 1024

#: Lanes of a dot product: part of the class.
LOG_LANES = 9


# Kernels


@triton.jit
def row_at(place, entry, R):
    """(the row of this entry, whether it exists). A row that does not is 0, which no mask lets through."""
    row = tl.load(place + entry).to(tl.int64)
    here = (row >= 0) & (row < R)
    return tl.where(here, row, 0), here


@triton.jit(do_not_specialize=["R", "y_row"])
def combine_rows(
    y, weights, place, out, R, y_row,
    D: tl.constexpr, K: tl.constexpr, WORD: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    HF: tl.constexpr,
):  # fmt: skip
    """Without weights the rows are added as they are. Strides are in words of WORD elements."""
    DTYPE: tl.constexpr = y.dtype.element_ty
    token = (tl.program_id(0) // CHUNKS).to(tl.int64)
    col = tl.program_id(0) % CHUNKS * BLOCK + tl.arange(0, BLOCK)
    inside = col < D
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        row, here = row_at(place, token * K + j, R)
        at = y + row * (y_row * WORD) + col
        if D % BLOCK == 0:
            term = tl.load(at, mask=here, other=0.0).to(tl.float32)
        else:
            term = tl.load(at, mask=inside & here, other=0.0).to(tl.float32)
        if weights is not None:
            term = term * tl.load(weights + token * K + j).to(tl.float32)
            if HF:
                term = rounded(term, DTYPE).to(tl.float32)
            term = tl.where(here, term, 0.0)  # a weight may be NaN
        if j == 0:
            total = term
        else:
            total += term
    tl.store(out + token * D + col, narrow(total, out), mask=inside)


@triton.jit(do_not_specialize=["R", "y_row", "dout_row"])
def combine_rows_bwd(
    dout, y, weights, place, dy, dweights, R, y_row, dout_row,
    D: tl.constexpr, K: tl.constexpr, WORD: tl.constexpr, LOG_LANES: tl.constexpr,
):  # fmt: skip
    """One program per expert of a token. Gradients that are not wanted are None, and cost nothing."""
    LANES: tl.constexpr = 1 << LOG_LANES
    entry = tl.program_id(0).to(tl.int64)
    row, here = row_at(place, entry, R)
    given = dout + entry // K * (dout_row * WORD)
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float32)
    w = tl.load(weights + entry).to(tl.float32)
    for first in range(0, D, LANES):
        col = first + lane
        g = tl.load(given + col, mask=col < D, other=0.0).to(tl.float32)
        if dy is not None:
            tl.store(dy + row * D + col, narrow(g * w, dy), mask=(col < D) & here)
        if dweights is not None:
            at = y + row * (y_row * WORD) + col
            total += g * tl.load(at, mask=(col < D) & here, other=0.0).to(tl.float32)
    if dweights is not None:
        total_of_row = tl.where(here, tree_sum(total, LOG_LANES), 0.0)
        tl.store(dweights + entry, narrow(total_of_row, dweights))


@triton.jit(do_not_specialize=["R", "x_row"])
def spread_rows(
    x, place, y, R, x_row,
    D: tl.constexpr, K: tl.constexpr, WORD: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // CHUNKS).to(tl.int64)
    col = tl.program_id(0) % CHUNKS * BLOCK + tl.arange(0, BLOCK)
    inside = col < D
    values = tl.load(x + token * (x_row * WORD) + col, mask=inside, other=0.0)
    for j in tl.static_range(K):
        row, here = row_at(place, token * K + j, R)
        tl.store(y + row * D + col, values, mask=inside & here)


# Launchers


def combine(launch: Launch = run, **args: Any) -> Tensor:
    return _added(launch, args["y"], args["weights"].contiguous(), args["place"], args["rounding"] == "hf")


def spread_bwd(launch: Launch = run, **args: Any) -> Tensor:
    return _added(launch, args["dy"], None, args["place"], False)


def _added(launch: Launch, y: Tensor, weights: Tensor | None, place: Tensor, hf: bool) -> Tensor:
    """The rows of every token, in the order of its experts."""
    (N, K), (R, D) = place.shape, y.shape
    out = (torch.empty if K else torch.zeros)(N, D, dtype=y.dtype, device=y.device)
    rows = rows_in_words((R,), (y,), D)
    grid, tiles = _tiles(N if K else 0, D)
    launch(
        combine_rows, grid, y, weights, place.contiguous(), out, R, rows.strides[1],
        **tiles, K=K, WORD=rows.word, HF=hf, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def combine_bwd(launch: Launch = run, **args: Any) -> tuple[Tensor | None, Tensor | None]:
    y, weights, place, dout = args["y"], args["weights"].contiguous(), args["place"], args["dout"]
    (N, K), (R, D) = place.shape, y.shape
    dy = _room(R, D, place, y) if args["want_y"] else None
    dweights = (
        torch.empty(place.shape, dtype=weights.dtype, device=y.device) if args["want_weights"] else None
    )
    rows = rows_in_words((N,), (dout,), D, y.stride(0))
    launch(
        combine_rows_bwd, (place.numel(),), dout, y, weights, place.contiguous(), dy, dweights, R,
        y.stride(0) // rows.word, rows.strides[1], D, K, rows.word, LOG_LANES, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return dy, dweights


def spread(launch: Launch = run, **args: Any) -> Tensor:
    x, place = args["x"], args["place"]
    (N, K), D = place.shape, x.shape[1]
    R = place.numel() if args["rows"] is None else args["rows"]
    y = _room(R, D, place, x)
    rows = rows_in_words((N,), (x,), D)
    grid, tiles = _tiles(N, D)
    launch(
        spread_rows, grid, x, place.contiguous(), y, R, rows.strides[1],
        **tiles, K=K, WORD=rows.word, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return y


def _room(R: int, D: int, place: Tensor, like: Tensor) -> Tensor:
    """For rows that places name. They name all of them if there are as many as rows, and
    none twice: what unchecked places leave out is anything, as `spread` says."""
    make = torch.empty if place.numel() == R else torch.zeros
    return make(R, D, dtype=like.dtype, device=like.device)


def _tiles(N: int, D: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and how many columns a program takes."""
    block = min(BLOCK, triton.next_power_of_2(max(D, 1)))
    chunks = triton.cdiv(D, block)
    return (N * chunks,), {"D": D, "CHUNKS": chunks, "BLOCK": block}
