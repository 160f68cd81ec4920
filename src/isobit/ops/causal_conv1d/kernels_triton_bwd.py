"""The backward of `causal_conv1d` in portable Triton. With dz = dout silu'(z), for every token

    dx[t]      = dz[t] w[W-1] + dz[t+1] w[W-2] + ...
    dweight[k] = sum over rows of dz[t] x[t-W+1+k],    dbias = sum over rows of dz[t]

z is computed again. One kernel reads x and dout once: it goes through the rows of a group, and holds the last
inputs, the sums of dx that later tokens add to, and those of dweight and dbias. Behind its group it computes
dz of W - 1 more rows. `sum_of` adds the sums of programs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.triton import row_stream
from isobit.kernels.triton.interpreter import INTERPRETED, narrow
from isobit.kernels.triton.row_stream import GROUP, over_groups, programs_of, sum_of
from isobit.kernels.triton.silu import silu_slope
from isobit.ops.causal_conv1d.kernels_triton import (
    BATCH,
    columns_of,
    dense,
    in_fp32,
    in_one_sequence,
    in_words,
    inputs_of,
    load_chunk,
    places_of,
    sum_of_inputs,
    taps_of,
    walk,
    without_first,
)

#: Channels of a program, its warps, and the tokens of a group that it loads at a time.
COLUMNS, WARPS, CHUNK = 32, 4, 2

#: Groups (log2) of a program. In the interpreter one, so that small cases have programs without EDGES.
LOG_GROUPS = 0 if INTERPRETED.value else row_stream.LOG_GROUPS

# Kernels


@triton.jit
def slope_of(
    given, taps, bias, dout, since, col, D, W: tl.constexpr, SILU: tl.constexpr, EDGES: tl.constexpr
):
    """dz of rows; 0 for padding and for rows that do not exist."""
    dz = dout.to(tl.float32)
    if SILU:
        dz = dz * silu_slope(sum_of_inputs(given, taps, bias, col, D, W))
    if EDGES:
        dz = tl.where((since >= 0)[:, None], dz, 0.0)
    return dz


@triton.jit
def add_to_rows(open_sums, dz, taps, since, W: tl.constexpr, EDGES: tl.constexpr):
    """Sums of dx of W - 1 rows and a new one, to each of which dz of the last row is added where it is of the
    same sequence."""
    sums = ()
    for k in tl.static_range(W):
        term = dz * taps[k]
        if EDGES:
            term = tl.where((since >= W - 1 - k)[:, None], term, 0.0)
        if k < W - 1:
            sums = sums + (open_sums[k] + term,)
        else:
            sums = sums + (0.0 + term,)
    return sums


@triton.jit
def add_to_taps(sums, dz, given, since, W: tl.constexpr, EDGES: tl.constexpr):
    """Sums of dweight, and of dbias behind them."""
    more = ()
    for k in tl.static_range(W):
        term = dz * given[k]
        if EDGES:
            term = tl.where((since >= 0)[:, None], term, 0.0)
        more = more + (sums[k] + term,)
    return more + (sums[W] + dz,)


@triton.jit
def gradient_run(
    x, weight, bias, state, first, cu_seqlens, dout, dx, taps_out, alone, part, start, base, col,
    N, T, S, steps, x_sb, x_st, first_s, cu_s, dout_sb, dout_st, D,
    W: tl.constexpr, SILU: tl.constexpr, GROUP: tl.constexpr, LOG_GROUPS: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    U: tl.constexpr = W - 1
    SUMS: tl.constexpr = (taps_out is not None) or (alone is not None)
    taps = taps_of(weight, col, D, W)
    before = load_chunk(x, base - U, start, col, N, T, S, x_sb, x_st, first, cu_seqlens, first_s, cu_s, steps,
                        D, U, U, EDGES)  # fmt: skip
    held = in_fp32(before, U)
    zero = tl.zeros([1 << LOG_GROUPS, COLUMNS], tl.float32)
    open_sums, sums = (), (zero,)
    for _ in tl.static_range(U):
        open_sums = open_sums + (zero,)
    for _ in tl.static_range(W):
        sums = sums + (zero,)
    for done in range(0, GROUP, CHUNK):
        loaded_x = load_chunk(x, base + done, start, col, N, T, S, x_sb, x_st, first, cu_seqlens, first_s,
                              cu_s, steps, D, CHUNK, U, EDGES)  # fmt: skip
        loaded_dout = load_chunk(dout, base + done, start, col, N, T, S, dout_sb, dout_st, first, cu_seqlens,
                                 first_s, cu_s, steps, D, CHUNK, U, EDGES)  # fmt: skip
        for i in tl.static_range(CHUNK):
            row = base + done + i
            sequence, _b, since = places_of(row, start, N, T, S, first, cu_seqlens, first_s, cu_s, steps, U,
                                           EDGES)  # fmt: skip
            held = held + (loaded_x[i].to(tl.float32),)
            given = inputs_of(held, state, sequence, since, col, S, D, W, EDGES)
            held = without_first(held, W)
            dz = slope_of(given, taps, bias, loaded_dout[i], since, col, D, W, SILU, EDGES)
            if SUMS:
                sums = add_to_taps(sums, dz, given, since, W, EDGES)
            if dx is not None:
                own = add_to_rows(open_sums, dz, taps, since, W, EDGES)
                open_sums = without_first(own, W)
                mask = (col < D)[None, :] & (done + i >= U)
                if EDGES:
                    mask = mask & (row - U < N)[:, None]
                tl.store(dx + (row - U)[:, None] * D + col[None, :], narrow(own[0], dx), mask=mask)
    if dx is not None:
        behind_x = load_chunk(x, base + GROUP, start, col, N, T, S, x_sb, x_st, first, cu_seqlens, first_s,
                              cu_s, steps, D, U, U, EDGES)  # fmt: skip
        behind_dout = load_chunk(dout, base + GROUP, start, col, N, T, S, dout_sb, dout_st, first, cu_seqlens,
                                 first_s, cu_s, steps, D, U, U, EDGES)  # fmt: skip
        for i in tl.static_range(U):
            row = base + GROUP + i
            sequence, _b, since = places_of(row, start, N, T, S, first, cu_seqlens, first_s, cu_s, steps, U,
                                           EDGES)  # fmt: skip
            held = held + (behind_x[i].to(tl.float32),)
            given = inputs_of(held, state, sequence, since, col, S, D, W, EDGES)
            held = without_first(held, W)
            dz = slope_of(given, taps, bias, behind_dout[i], since, col, D, W, SILU, EDGES)
            own = add_to_rows(open_sums, dz, taps, since, W, EDGES)
            open_sums = without_first(own, W)
            mask = (col < D)[None, :]
            if EDGES:
                mask = mask & (row - U < N)[:, None]
            tl.store(dx + (row - U)[:, None] * D + col[None, :], narrow(own[0], dx), mask=mask)
    at = (part + tl.zeros([1], tl.int64))[:, None] * D + col[None, :]
    inside = (col < D)[None, :]
    if taps_out is not None:
        for k in tl.static_range(W):
            tl.store(taps_out + at * W + k, over_groups(sums[k], LOG_GROUPS, COLUMNS), mask=inside)
    if alone is not None:
        tl.store(alone + at, over_groups(sums[W], LOG_GROUPS, COLUMNS), mask=inside)


@triton.jit(do_not_specialize=(*BATCH, "dout_sb", "dout_st"))
def gradients(
    x, weight, bias, state, first, cu_seqlens, dout, dx, taps, alone, N, T, S, steps, x_sb, x_st, first_s,
    cu_s, dout_sb, dout_st, D,
    W: tl.constexpr, SILU: tl.constexpr, WORD: tl.constexpr,
    GROUP: tl.constexpr, LOG_GROUPS: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """2**LOG_GROUPS groups of rows, one group per row of a tile. Results that are not wanted are None, and
    cost nothing. Strides of x and dout are in words of WORD elements."""
    x_sb, x_st = x_sb.to(tl.int64) * WORD, x_st.to(tl.int64) * WORD
    dout_sb, dout_st = dout_sb.to(tl.int64) * WORD, dout_st.to(tl.int64) * WORD
    part = tl.program_id(0).to(tl.int64)
    start = part * (GROUP << LOG_GROUPS)
    base = start + tl.arange(0, 1 << LOG_GROUPS) * GROUP
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    end = start + ((GROUP << LOG_GROUPS) + W - 2)
    if in_one_sequence(start, end, N, T, S, first, cu_seqlens, first_s, cu_s, steps, W - 1):
        gradient_run(x, weight, bias, state, first, cu_seqlens, dout, dx, taps, alone, part, start, base, col,
                     N, T, S, steps, x_sb, x_st, first_s, cu_s, dout_sb, dout_st, D,
                     W, SILU, GROUP, LOG_GROUPS, CHUNK, COLUMNS, False)  # fmt: skip
    else:
        gradient_run(x, weight, bias, state, first, cu_seqlens, dout, dx, taps, alone, part, start, base, col,
                     N, T, S, steps, x_sb, x_st, first_s, cu_s, dout_sb, dout_st, D,
                     W, SILU, GROUP, LOG_GROUPS, 1, COLUMNS, True)  # fmt: skip


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
    empty = x.numel() == 0 or S == 0

    def wanted(name: str, *shape: int, dtype: torch.dtype) -> Tensor | None:
        make = torch.zeros if empty else torch.empty
        return make(shape, dtype=dtype, device=x.device) if args[f"want_{name}"] else None

    dx = wanted("x", B, T, D, dtype=x.dtype)
    if empty:
        dtype = weight.dtype
        return dx, wanted("weight", D, W, dtype=dtype), wanted("bias", D, dtype=dtype)
    P, columns = programs_of(N, LOG_GROUPS), columns_of(D, COLUMNS)
    taps = wanted("weight", P, D * W, dtype=torch.float32)
    alone = wanted("bias", P, D, dtype=torch.float32)
    launch(
        gradients, (P, triton.cdiv(D, columns)),
        x, weight, args["bias"], state, *where, dout, dx, taps, alone,
        N, length, S, steps, x_sb, x_st, *of_where, *of_dout, D,
        W=W, SILU=args["activation"] == "silu", WORD=word, GROUP=GROUP, LOG_GROUPS=LOG_GROUPS, CHUNK=CHUNK,
        COLUMNS=columns, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    dweight = None if taps is None else sum_of(taps, weight.dtype, launch).view(D, W)
    return dx, dweight, None if alone is None else sum_of(alone, weight.dtype, launch)
