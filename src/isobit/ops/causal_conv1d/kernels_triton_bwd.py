"""The backward of `causal_conv1d` in portable Triton. With dz = dout silu'(z), for every token

    dx[t]      = dz[t] w[W-1] + dz[t+1] w[W-2] + ...
    dweight[k] = sum over rows of dz[t] x[t-W+1+k],    dbias = sum over rows of dz[t]

z is computed again. One kernel writes dx: it needs dz of W tokens, so of 2 W - 1 inputs, which come from the
cache. Another adds the terms of dweight and dbias of 256 rows, and `sum_of` the sums of these.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.triton.interpreter import narrow
from isobit.kernels.triton.row_stream import GROUP, LOG_GROUPS, over_groups, programs_of, sum_of
from isobit.kernels.triton.silu import silu_slope
from isobit.ops.causal_conv1d.kernels_triton import (
    BATCH,
    begins_of,
    dense,
    in_words,
    input_of,
    sums_of,
    tap,
    tile_of,
    walk,
)

#: Tokens of a program that writes dx. It has W times as much to do for each as one of the forward: with more
#: tokens it would not have registers enough.
ROWS = 8

# Kernels


@triton.jit
def load_dout(dout, row, begin, col, N, T, dout_sb, dout_st, D):
    """dout of rows; 0 for those that do not exist or are padding."""
    b = row // T
    live = (row >= begin) & (row >= 0) & (row < N)
    at = b * dout_sb + (row - b * T) * dout_st
    mask = live[:, None] & (col < D)[None, :]
    return tl.load(dout + at[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def slopes_of(
    x, weight, bias, state, dout, row, sequence, begin, col, N, T, S, x_sb, x_st, dout_sb, dout_st, D,
    W: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """dz of rows."""
    dz = load_dout(dout, row, begin, col, N, T, dout_sb, dout_st, D)
    if SILU:
        z = sums_of(x, weight, bias, state, row, sequence, begin, col, N, T, S, x_sb, x_st, D, W)
        live = ((row >= begin) & (row < N))[:, None]
        dz = tl.where(live, dz * silu_slope(z), 0.0)
    return dz


@triton.jit(do_not_specialize=(*BATCH, "dout_sb", "dout_st"))
def gradient_rows(
    x, weight, bias, state, first, cu_seqlens, dout, dx, N, T, S, steps, x_sb, x_st, first_s, cu_s,
    dout_sb, dout_st, D,
    W: tl.constexpr, SILU: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A later token belongs to the sum of a row if its sequence has the same begin. Strides of x and dout are
    in words of WORD elements."""
    x_sb, x_st, dout_sb, dout_st = x_sb * WORD, x_st * WORD, dout_sb * WORD, dout_st * WORD
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    own, begin = begins_of(row, T, S, first, cu_seqlens, first_s, cu_s, steps)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for j in tl.static_range(W):
        later = row + j
        sequence, start = begins_of(later, T, S, first, cu_seqlens, first_s, cu_s, steps)
        dz = slopes_of(
            x, weight, bias, state, dout, later, sequence, start, col, N, T, S, x_sb, x_st,
            dout_sb, dout_st, D, W, SILU,
        )  # fmt: skip
        same = (sequence == own) & (row >= begin) & (later < N)
        total = total + tl.where(same[:, None], dz * tap(weight, col, W - 1 - j, D, W), 0.0)
    mask = (row < N)[:, None] & (col < D)[None, :]
    tl.store(dx + row[:, None] * D + col[None, :], narrow(total, dx), mask=mask)


@triton.jit(do_not_specialize=(*BATCH, "dout_sb", "dout_st"))
def gradient_taps(
    x, weight, bias, state, first, cu_seqlens, dout, taps, alone, N, T, S, steps, x_sb, x_st, first_s, cu_s,
    dout_sb, dout_st, D,
    W: tl.constexpr, SILU: tl.constexpr, WORD: tl.constexpr,
    GROUP: tl.constexpr, LOG_GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Terms of dweight and dbias of 2**LOG_GROUPS groups of rows, one group per row of a tile. Sums that are
    not wanted are None, and cost nothing. Strides of x and dout are in words of WORD elements."""
    x_sb, x_st, dout_sb, dout_st = x_sb * WORD, x_st * WORD, dout_sb * WORD, dout_st * WORD
    part = tl.program_id(0).to(tl.int64)
    base = ((part << LOG_GROUPS) + tl.arange(0, 1 << LOG_GROUPS)) * GROUP
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = ()
    for _ in tl.static_range(W + 1):
        sums = sums + (tl.zeros([1 << LOG_GROUPS, COLUMNS], tl.float32),)
    for i in range(GROUP):
        row = base + i
        sequence, begin = begins_of(row, T, S, first, cu_seqlens, first_s, cu_s, steps)
        dz = slopes_of(
            x, weight, bias, state, dout, row, sequence, begin, col, N, T, S, x_sb, x_st,
            dout_sb, dout_st, D, W, SILU,
        )  # fmt: skip
        live = ((row >= begin) & (row < N))[:, None]
        more = ()
        for k in tl.static_range(W):
            given = input_of(x, state, row - (W - 1) + k, sequence, begin, col, N, T, S, x_sb, x_st, D, W - 1)
            more = more + (sums[k] + tl.where(live, dz * given, 0.0),)
        sums = more + (sums[W] + dz,)
    inside = (col < D)[None, :]
    own = part + tl.zeros([1], tl.int64)
    if taps is not None:
        for k in tl.static_range(W):
            at = (own * D)[:, None] + col[None, :]
            tl.store(taps + at * W + k, over_groups(sums[k], LOG_GROUPS, COLUMNS), mask=inside)
    if alone is not None:
        at = (own * D)[:, None] + col[None, :]
        tl.store(alone + at, over_groups(sums[W], LOG_GROUPS, COLUMNS), mask=inside)


# Launchers


def causal_conv1d_bwd(
    launch: Launch = run, **args: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias); None for what is not wanted."""
    x, weight, dout = args["x"], args["weight"].contiguous(), args["dout"]
    (B, T, D), W = x.shape, weight.shape[-1]
    state = dense(args["initial_state"])
    where, (N, length, S, steps, *of_where) = walk(args)
    (x_sb, x_st, *of_dout), word = in_words(x, dout)
    strides = (x_sb, x_st, *of_where, *of_dout)
    tile, silu = tile_of(D) | {"ROWS": ROWS}, args["activation"] == "silu"
    empty = x.numel() == 0 or S == 0

    def wanted(name: str, *shape: int, dtype: torch.dtype) -> Tensor | None:
        make = torch.zeros if empty else torch.empty
        return make(shape, dtype=dtype, device=x.device) if args[f"want_{name}"] else None

    dx = wanted("x", B, T, D, dtype=x.dtype)
    if empty:
        dtype = weight.dtype
        return dx, wanted("weight", D, W, dtype=dtype), wanted("bias", D, dtype=dtype)
    options: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
    grid = triton.cdiv(D, tile["COLUMNS"])
    common = (x, weight, args["bias"], state, *where, dout)
    sizes = (N, length, S, steps, *strides, D)
    if dx is not None:
        launch(
            gradient_rows, (triton.cdiv(N, ROWS), grid),
            *common, dx, *sizes, W=W, SILU=silu, WORD=word, **tile, **options,
        )  # fmt: skip
    P = programs_of(N)
    taps = wanted("weight", P, D * W, dtype=torch.float32)
    alone = wanted("bias", P, D, dtype=torch.float32)
    if taps is not None or alone is not None:
        columns = min(tile["COLUMNS"], 64) if tile["COLUMNS"] <= 128 else tile["COLUMNS"]
        launch(
            gradient_taps, (P, triton.cdiv(D, columns)),
            *common, taps, alone, *sizes,
            W=W, SILU=silu, WORD=word, GROUP=GROUP, LOG_GROUPS=LOG_GROUPS, COLUMNS=columns, **options,
        )  # fmt: skip
    dweight = None if taps is None else sum_of(taps, weight.dtype, launch).view(D, W)
    return dx, dweight, None if alone is None else sum_of(alone, weight.dtype, launch)
