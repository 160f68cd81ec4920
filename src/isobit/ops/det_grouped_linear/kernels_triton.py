"""Grouped products in portable Triton: NVIDIA, AMD, and the CPU interpreter.

As in `det_gemm`: one program computes one tile of the output with one `tl.dot` accumulator over ascending k,
so an output is one chain of the hardware's matrix steps. A tile has rows of one expert only, a strip; rows
beyond the end of the expert are not loaded. There are as many programs as there may be strips, and those
without one do nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.triton.interpreter import narrow
from isobit.kernels.triton.tiles import SEGMENT, Tile, compile_options, place, steps
from isobit.ops.det_gemm.kernels_triton import BLOCK_T, corner, ones
from isobit.ops.det_gemm.kernels_triton import tile_for as sum_tile_for
from isobit.ops.det_grouped_linear.strips import capacity, rows_of_expert, strips

__all__ = ["ones", "product", "token_product", "why_not_product", "why_not_token_product"]

#: Few rows of an expert, some, and many. Untuned: on Hopper another backend is the fast one.
TILES = (
    Tile(16, 64, 128, warps=4, stages=3),
    Tile(64, 64, 64, warps=4, stages=4),
    Tile(128, 128, 64, warps=8, stages=3),
)


def tile_for(R: int, E: int) -> Tile:
    """By the rows that an expert has on average."""
    return TILES[0] if R <= 16 * E else TILES[1] if R <= 128 * E else TILES[2]


# `blocks` is not specialised: see `det_gemm`.
@triton.jit(do_not_specialize=["blocks", "E"])
def product_tile(
    x, weight, bias, out, table, E, N, K, blocks, x_sm, x_sk, w_se, w_sn, w_sk, bias_se,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of out [R, N] = x [R, K] weight[e]^T + bias[e]."""
    tiles_n = tl.cdiv(N, COLS)
    program = tl.program_id(0)
    strip = program // tiles_n
    if strip < tl.load(table):
        at = table + 4 + strip * 4
        expert = tl.load(at).to(tl.int64)
        begun, first, end = tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        tile_m, tile_n = place(tl.cdiv(end - first, ROWS), tiles_n, program - begun * tiles_n)
        row = (first + tile_m * ROWS).to(tl.int64) + tl.arange(0, ROWS)
        col = (tile_n * COLS).to(tl.int64) + tl.arange(0, COLS)
        k = tl.arange(0, BLOCK_K).to(tl.int64)
        blocks = tl.where(expert < E, blocks, 0)  # rows of no expert: zeros
        x_at = x + row[:, None] * x_sm + k[None, :] * x_sk
        w_at = weight + expert * w_se + k[:, None] * w_sk + col[None, :] * w_sn
        block = tl.full([], BLOCK_K, tl.int64)
        acc = tl.zeros([ROWS, COLS], tl.float32)
        for i in range(blocks):
            inside = k < K - i * BLOCK_K
            left = tl.load(x_at, mask=(row < end)[:, None] & inside[None, :], other=0.0)
            right = tl.load(w_at, mask=inside[:, None] & (col < N)[None, :], other=0.0)
            acc = steps(left, right, acc)
            x_at += block * x_sk
            w_at += block * w_sk
        if bias is not None:
            own = (col < N) & (expert < E)
            acc += tl.load(bias + expert * bias_se + col, mask=own, other=0.0).to(tl.float32)[None, :]
        to = out + row[:, None] * N + col[None, :]
        tl.store(to, narrow(acc, out), mask=(row < end)[:, None] & (col < N)[None, :])


def why_not_product(x: Tensor, weight: Tensor) -> str | None:
    return None


def product(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, launch: Launch = run) -> Tensor:
    """x [R, K] times weight[e]^T, [N, K] each, plus bias[e], for the rows of each expert."""
    (R, K), (E, N, _) = x.shape, weight.shape
    out = torch.empty(R, N, dtype=x.dtype, device=x.device)
    tile = tile_for(R, E)
    table = strips(x, offsets, tile.rows, launch)
    launch(
        product_tile, (capacity(R, E, tile.rows) * triton.cdiv(N, tile.cols),),
        x, weight, bias, out, table, E, N, K, triton.cdiv(K, tile.k), *x.stride(), *weight.stride(),
        0 if bias is None else bias.stride(0),
        ROWS=tile.rows, COLS=tile.cols, BLOCK_K=tile.k, **compile_options(tile),
    )  # fmt: skip
    return out


# `sequences` is not specialised, so that no loop is known to run once: see `product_tile` of `det_gemm`.
@triton.jit(do_not_specialize=["R", "E", "sequences"])
def token_product_tile(
    x, dy, init, out, offsets, cu_seqlens, R, E, N, K, sequences, x_st, x_sk, dy_st, dy_sn,
    ROWS: tl.constexpr, COLS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """A tile of out [E, N, K] = init + dy^T x over the rows of each expert of x [R, K] and dy [R, N].

    A chain for every segment, folded in ascending order. Without cu_seqlens the rows are one sequence."""
    expert, row0, col0 = corner(N, K, ROWS, COLS)
    first, end = rows_of_expert(offsets, expert, R, E, EXPERTS)
    n = row0 + tl.arange(0, ROWS).to(tl.int64)
    k = col0 + tl.arange(0, COLS).to(tl.int64)
    inside = (n < N)[:, None] & (k < K)[None, :]
    at = expert * N * K + n[:, None] * K + k[None, :]
    dy_at = dy + n[:, None] * dy_sn
    x_at = x + k[None, :] * x_sk
    total = tl.zeros([ROWS, COLS], tl.float32)
    if init is not None:
        total = tl.load(init + at, mask=inside, other=0.0)
    for s in range(sequences):
        last = end
        if cu_seqlens is not None and s < sequences - 1:
            last = tl.load(cu_seqlens + expert * (sequences + 1) + s + 1).to(tl.int64)
            last = tl.minimum(tl.maximum(last, first), end)
        for segment in range(first, last, SEGMENT):
            acc = tl.zeros([ROWS, COLS], tl.float32)
            for block in range(segment, tl.minimum(segment + SEGMENT, last), BLOCK_T):
                t = block + tl.arange(0, BLOCK_T).to(tl.int64)
                live = t < last
                left = tl.load(dy_at + t[None, :] * dy_st, mask=live[None, :] & (n < N)[:, None], other=0.0)
                right = tl.load(x_at + t[:, None] * x_st, mask=live[:, None] & (k < K)[None, :], other=0.0)
                acc = steps(left, right, acc)
            total += acc
        first = last
    tl.store(out + at, narrow(total, out), mask=inside)


def why_not_token_product(x: Tensor, dy: Tensor) -> str | None:
    return None


def token_product(
    x: Tensor, dy: Tensor, offsets: Tensor, cu_seqlens: Tensor | None, init: Tensor | None,
    out_dtype: torch.dtype, launch: Launch = run,
) -> Tensor:  # fmt: skip
    """dy^T x for the rows of each expert: x [R, K], dy [R, N] -> [E, N, K], from init on, rounded once."""
    (R, K), N, E = x.shape, dy.shape[1], offsets.shape[0] - 1
    out = torch.empty(E, N, K, dtype=out_dtype, device=x.device)
    tile = sum_tile_for(N, K)
    launch(
        token_product_tile, (E * triton.cdiv(N, tile.rows) * triton.cdiv(K, tile.cols),),
        x, dy, init, out, offsets, cu_seqlens, R, E, N, K,
        1 if cu_seqlens is None else cu_seqlens.shape[1] - 1, *x.stride(), *dy.stride(),
        ROWS=tile.rows, COLS=tile.cols, EXPERTS=triton.next_power_of_2(E + 1), **compile_options(tile),
    )  # fmt: skip
    return out
