"""`det_gemm` in portable Triton: NVIDIA, AMD, and the CPU interpreter.

One program computes one tile of the output. It loops over k (or the token stream) in ascending order with one
`tl.dot` accumulator, so an output is one chain of the hardware's matrix steps: on Hopper the class chain16,
elsewhere a class of that hardware. Every edge is masked and loads beyond it give zero. This fills up the last
group of k and affects no other sum. Operands are read through their strides, whatever these are.

In class tree8 every eighth of k is such a chain, and the same program adds the eight sums as a tree.

The tile is chosen from sizes. It decides which program computes an output and how many k are loaded at once,
but not which k share a step nor the order of steps. So all tiles give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.host import token_stream
from isobit.kernels.host.token_stream import Stream
from isobit.kernels.triton.interpreter import narrow
from isobit.kernels.triton.tiles import SEGMENT, Tile, compile_options, ones_kernel, place, steps
from isobit.numerics import classes

#: Rows of the stream that are loaded at once: a block of its tables.
BLOCK_T = tl.constexpr(token_stream.BLOCK)

#: Decode, a few rows or columns, and everything else. The last is the largest that fits an A100's shared
#: memory three times. Untuned: on Hopper another backend is the fast one.
TILES = {
    "narrow": Tile(16, 32, 128, warps=4, stages=4),
    "slim": Tile(64, 16, 64, warps=4, stages=4),
    "small": Tile(64, 64, 64, warps=4, stages=4),
    "large": Tile(128, 128, 64, warps=8, stages=3),
}


def tile_for(rows: int, cols: int, sums: int = 1) -> Tile:
    """Depends on the size of the output only, at run time. `sums`: accumulators of a tile; several leave no
    registers for the largest."""
    if rows <= 16:
        return TILES["narrow"]
    if cols <= 16:
        return TILES["slim"]
    return TILES["small" if rows <= 64 or cols <= 64 or sums > 1 else "large"]


@triton.jit
def corner(rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """(z, first row, first column) of this program's tile."""
    tiles_m, tiles_n = tl.cdiv(rows, ROWS), tl.cdiv(cols, COLS)
    per_matrix = tiles_m.to(tl.int64) * tiles_n
    program = tl.program_id(0).to(tl.int64)
    z = program // per_matrix
    tile_m, tile_n = place(tiles_m, tiles_n, (program - z * per_matrix).to(tl.int32))
    return z, tile_m * ROWS, tile_n * COLS


# `blocks` is not specialised: if Triton knew that the loop runs once, from an accumulator of zeros, it would
# turn the addition after the loop into the initial accumulator of the dot, which rounds differently. M, the
# batch, is not specialised either, so that a new batch size does not recompile.
@triton.jit(do_not_specialize=["blocks", "M"])
def product_tile(
    a, b, bias, out, M, N, K, blocks, a_sz, a_sm, a_sk, b_sz, b_sk, b_sn,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile of out [Z, M, N] = a [Z, M, K] b [Z, K, N] + bias [N]."""
    z, row0, col0 = corner(M, N, ROWS, COLS)
    row = row0 + tl.arange(0, ROWS).to(tl.int64)
    col = col0 + tl.arange(0, COLS).to(tl.int64)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_at = a + z * a_sz + row[:, None] * a_sm + k[None, :] * a_sk
    b_at = b + z * b_sz + k[:, None] * b_sk + col[None, :] * b_sn
    block = tl.full([], BLOCK_K, tl.int64)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for i in range(blocks):
        inside = k < K - i * BLOCK_K
        left = tl.load(a_at, mask=(row < M)[:, None] & inside[None, :], other=0.0)
        right = tl.load(b_at, mask=inside[:, None] & (col < N)[None, :], other=0.0)
        acc = steps(left, right, acc)
        a_at += block * a_sk
        b_at += block * b_sk
    if bias is not None:
        acc += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    at = out + (z * M + row)[:, None] * N + col[None, :]
    tl.store(at, narrow(acc, out), mask=(row < M)[:, None] & (col < N)[None, :])


@triton.jit(do_not_specialize=["blocks", "M"])
def tree_tile(
    a, b, bias, out, M, N, leaf, blocks, a_sz, a_sm, a_sk, b_sz, b_sk, b_sn,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_K: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """The same in class tree8: K is LEAVES times `leaf`, which has `blocks` blocks of k. LEAVES is 8, or
    fewer if this is the subtree of a rank."""
    z, row0, col0 = corner(M, N, ROWS, COLS)
    row = row0 + tl.arange(0, ROWS).to(tl.int64)
    col = col0 + tl.arange(0, COLS).to(tl.int64)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_at = a + z * a_sz + row[:, None] * a_sm + k[None, :] * a_sk
    b_at = b + z * b_sz + k[:, None] * b_sk + col[None, :] * b_sn
    # Sums that wait: of one leaf, of a pair, of four leaves.
    one = tl.zeros([ROWS, COLS], tl.float32)
    two, four = one, one
    total = one
    for i in range(LEAVES):
        start = tl.full([], i, tl.int64) * leaf
        acc = tl.zeros([ROWS, COLS], tl.float32)
        for j in range(blocks):
            inside = k < leaf - j * BLOCK_K
            at = start + j * BLOCK_K
            left = tl.load(a_at + at * a_sk, mask=(row < M)[:, None] & inside[None, :], other=0.0)
            right = tl.load(b_at + at * b_sk, mask=inside[:, None] & (col < N)[None, :], other=0.0)
            acc = steps(left, right, acc)
        if i % 2 == 0:
            one = acc
        elif i % 4 == 1:
            two = one + acc
        elif i == 3:
            four = two + (one + acc)
        else:
            total = four + (two + (one + acc))
    if LEAVES == 1:
        total = one
    elif LEAVES == 2:
        total = two
    elif LEAVES == 4:
        total = four
    if bias is not None:
        total += tl.load(bias + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    at = out + (z * M + row)[:, None] * N + col[None, :]
    tl.store(at, narrow(total, out), mask=(row < M)[:, None] & (col < N)[None, :])


@triton.jit(do_not_specialize=["T"])  # as above: T = 1 would make every loop run once
def token_product_tile(
    x, dy, init, out, rows, first, blocks, count, T, N, K, x_sz, x_st, x_sk, dy_sz, dy_st, dy_sn,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A tile of out [Z, N, K] = init + dy^T x over the stream of x [Z, T, K] and dy [Z, T, N].

    A chain for every segment, folded in ascending order. Without tables all T rows are live, as one sequence.
    """
    z, row0, col0 = corner(N, K, ROWS, COLS)
    n = row0 + tl.arange(0, ROWS).to(tl.int64)
    k = col0 + tl.arange(0, COLS).to(tl.int64)
    dy_at = dy + z * dy_sz + n[:, None] * dy_sn
    x_at = x + z * x_sz + k[None, :] * x_sk
    at = (z * N + n)[:, None] * K + k[None, :]
    inside = (n < N)[:, None] & (k < K)[None, :]
    total = tl.zeros([ROWS, COLS], tl.float32)
    if init is not None:
        total = tl.load(init + at, mask=inside, other=0.0)
    segments = tl.cdiv(T, SEGMENT)
    if rows is not None:
        segments = tl.load(count)
    for segment in range(segments):
        slot = segment * SEGMENT
        n_blocks = tl.cdiv(tl.minimum(T - slot, SEGMENT), BLOCK_T)
        if rows is not None:
            slot = tl.load(first + segment)
            n_blocks = tl.load(blocks + segment)
        acc = tl.zeros([ROWS, COLS], tl.float32)
        for i in range(n_blocks):
            t = slot + i * BLOCK_T + tl.arange(0, BLOCK_T)
            live = t < T
            if rows is not None:
                t = tl.load(rows + t)
                live = t >= 0  # a gap of the stream is zero
            t = t.to(tl.int64)
            left = tl.load(dy_at + t[None, :] * dy_st, mask=(n < N)[:, None] & live[None, :], other=0.0)
            right = tl.load(x_at + t[:, None] * x_st, mask=live[:, None] & (k < K)[None, :], other=0.0)
            acc = steps(left, right, acc)
        total += acc
    tl.store(out + at, narrow(total, out), mask=inside)


def why_not_product(a: Tensor, b: Tensor) -> str | None:
    return None


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, launch: Launch = run
) -> Tensor:
    """a [Z, M, K] times b [Z, K, N], plus bias [N]; or without a Z."""
    (*lead, M, K), N = a.shape, b.shape[-1]
    Z = lead[0] if lead else 1
    out = torch.empty(*lead, M, N, dtype=out_dtype, device=a.device)
    tile = tile_for(M, N)
    launch(
        product_tile, _grid(Z, M, N, tile), a, b, bias, out, M, N, K, triton.cdiv(K, tile.k),
        *_strides(a), *_strides(b), ROWS=tile.rows, COLS=tile.cols, BLOCK_K=tile.k, **compile_options(tile),
    )  # fmt: skip
    return out


def tree_product(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, leaves: int = classes.LEAVES,
    launch: Launch = run,
) -> Tensor:  # fmt: skip
    """The same in class tree8; K is that of some `leaves` of the tree."""
    (*lead, M, K), N = a.shape, b.shape[-1]
    Z = lead[0] if lead else 1
    out = torch.empty(*lead, M, N, dtype=out_dtype, device=a.device)
    tile = tile_for(M, N, sums=4)
    leaf = K // leaves
    launch(
        tree_tile, _grid(Z, M, N, tile), a, b, bias, out, M, N, leaf, triton.cdiv(leaf, tile.k),
        *_strides(a), *_strides(b), ROWS=tile.rows, COLS=tile.cols, BLOCK_K=tile.k, LEAVES=leaves,
        **compile_options(tile),
    )  # fmt: skip
    return out


def why_not_token_product(x: Tensor, dy: Tensor) -> str | None:
    return None


def token_product(
    x: Tensor, dy: Tensor, stream: Stream | None, init: Tensor | None, launch: Launch = run,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """dy^T x for x [Z, T, K] and dy [Z, T, N], from init [Z, N, K] on, rounded once at the end; or without a
    Z."""
    (*lead, T, K), N = x.shape, dy.shape[-1]
    Z = lead[0] if lead else 1
    out = torch.empty(*lead, N, K, dtype=out_dtype, device=x.device)
    tile = tile_for(N, K)
    tables: tuple[Tensor | None, ...] = (None,) * 4
    if stream is not None:
        tables = (stream.rows, stream.first, stream.blocks, stream.count)
    launch(
        token_product_tile, _grid(Z, N, K, tile), x, dy, init, out, *tables, T, N, K,
        *_strides(x), *_strides(dy), ROWS=tile.rows, COLS=tile.cols, **compile_options(tile),
    )  # fmt: skip
    return out


def _strides(t: Tensor) -> tuple[int, ...]:
    """The stride between matrices is 0 if there is only one: it depends on the batch, and its divisibility
    would recompile the kernel."""
    *z, row_stride, column_stride = t.stride()
    return (z[0] if z and t.shape[0] > 1 else 0, row_stride, column_stride)


def _grid(Z: int, rows: int, cols: int, tile: Tile) -> tuple[int]:
    """One axis, because the other two are limited to 65535."""
    return (Z * triton.cdiv(rows, tile.rows) * triton.cdiv(cols, tile.cols),)


def ones(dy: Tensor, launch: Launch = run) -> Tensor:
    """A single number, read with a stride of 0."""
    out = dy.new_empty(1)
    launch(ones_kernel, (1,), out, 1, STEP=1, BLOCK=16, enable_fp_fusion=False)
    return out.expand(dy.shape[0], 1)
