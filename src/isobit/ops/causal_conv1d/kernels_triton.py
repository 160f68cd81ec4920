"""`causal_conv1d` in portable Triton: NVIDIA, AMD, and the CPU interpreter. Class conv/1, see
docs/causal_conv1d.md.

A program takes some tokens and some channels, and loads each of the W inputs of a token separately: from x,
from the initial state, or nothing. Neighbours in a tile load the same inputs, from the L1 cache. An element
is computed alone, so tiles and warps are free.

Whatever cu_seqlens, first and slots hold, no access is out of bounds: the begin of a sequence only decides
which of the inputs from t - W + 1 to t are read, and never adds others.
"""

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.triton.interpreter import INTERPRETED, narrow
from isobit.kernels.triton.silu import silu

#: Tokens and channels of a program of four warps.
ROWS, COLUMNS = 16, 128

#: Arguments that change with the batch. They are not specialised, to avoid recompiles.
BATCH = ("N", "T", "S", "steps", "x_sb", "x_st", "first_s", "cu_s")


# Kernels


@triton.jit
def begins_of(row, T, S, first, cu_seqlens, first_s, cu_s, steps):
    """(sequence, first row of it) of rows of the flattened [B * T]. With cu_seqlens it is the last sequence
    that begins at the row or before it, found by bisection."""
    if cu_seqlens is not None:
        low = tl.zeros(row.shape, tl.int64)
        for i in range(steps):
            middle = low + (tl.full(row.shape, 1, tl.int64) << (steps - 1 - i))
            inside = middle < S
            at = tl.load(cu_seqlens + middle * cu_s, mask=inside, other=0).to(tl.int64)
            low = tl.where(inside & (at <= row), middle, low)
        sequence = low
        begin = tl.load(cu_seqlens + low * cu_s).to(tl.int64)
    else:
        sequence = row // T
        begin = sequence * T
        if first is not None:
            inside = sequence < S
            begin += tl.load(first + sequence * first_s, mask=inside, other=0).to(tl.int64)
    return sequence, begin


@triton.jit
def input_of(x, state, row, sequence, begin, col, N, T, S, x_sb, x_st, D, U: tl.constexpr):
    """[rows, columns] fp32: the inputs at these rows, which may be before their sequence begins, or 0."""
    b = row // T
    inside = (row >= begin) & (row >= 0) & (row < N)
    at = b * x_sb + (row - b * T) * x_st
    mask = inside[:, None] & (col < D)[None, :]
    value = tl.load(x + at[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
    if state is not None:
        back = row - begin + U
        before = (row < begin) & (back >= 0) & (sequence < S) & (sequence >= 0)
        at = (sequence * U + back) * D
        mask = before[:, None] & (col < D)[None, :]
        held = tl.load(state + at[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.where(before[:, None], held, value)  # not a sum, which would lose the sign of -0
    return value


@triton.jit
def tap(weight, col, k, D, W: tl.constexpr):
    """[1, columns]: one tap of the weight in fp32."""
    return tl.load(weight + col * W + k, mask=col < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def sums_of(
    x, weight, bias, state, row, sequence, begin, col, N, T, S, x_sb, x_st, D, W: tl.constexpr,
):  # fmt: skip
    """z of these rows."""
    z = tl.zeros([row.shape[0], col.shape[0]], tl.float32)
    if bias is not None:
        z = z + tl.load(bias + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(W):
        at = row - (W - 1) + k
        z = z + input_of(
            x, state, at, sequence, begin, col, N, T, S, x_sb, x_st, D, W - 1
        ) * tap(weight, col, k, D, W)  # fmt: skip
    return z


@triton.jit(do_not_specialize=BATCH)
def convolve_rows(
    x, weight, bias, state, first, cu_seqlens, out, N, T, S, steps, x_sb, x_st, first_s, cu_s, D,
    W: tl.constexpr, SILU: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Strides of x are in words of WORD elements."""
    x_sb, x_st = x_sb * WORD, x_st * WORD
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sequence, begin = begins_of(row, T, S, first, cu_seqlens, first_s, cu_s, steps)
    z = sums_of(x, weight, bias, state, row, sequence, begin, col, N, T, S, x_sb, x_st, D, W)
    if SILU:
        z = silu(z)
    z = tl.where((row >= begin)[:, None], z, 0.0)
    mask = (row < N)[:, None] & (col < D)[None, :]
    tl.store(out + row[:, None] * D + col[None, :], narrow(z, out), mask=mask)


@triton.jit(do_not_specialize=BATCH)
def last_inputs(
    x, state, first, cu_seqlens, final, N, T, S, x_sb, x_st, first_s, cu_s, D,
    U: tl.constexpr, WORD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The final state of one sequence, some channels. Strides of x are in words of WORD elements."""
    x_sb, x_st = x_sb * WORD, x_st * WORD
    sequence = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin = sequence * T
    end = begin + T
    if cu_seqlens is not None:
        begin = tl.load(cu_seqlens + sequence * cu_s).to(tl.int64)
        end = tl.load(cu_seqlens + (sequence + 1) * cu_s).to(tl.int64)
        begin = tl.minimum(tl.maximum(begin, 0), N)
        end = tl.minimum(tl.maximum(end, begin), N)
    elif first is not None:
        own = tl.load(first + sequence * first_s).to(tl.int64)
        begin += tl.minimum(tl.maximum(own, 0), T)
    same = sequence + tl.zeros([1], tl.int64)
    for u in tl.static_range(U):
        row = end - U + u + tl.zeros([1], tl.int64)
        given = input_of(x, state, row, same, begin, col, N, T, S, x_sb, x_st, D, U)
        at = (same * U + u) * D
        tl.store(final + at[:, None] + col[None, :], narrow(given, final), mask=(col < D)[None, :])


@triton.jit(do_not_specialize=["P", "T", "x_sb", "x_st", "slots_s"])
def convolve_next(
    x, weight, bias, state, slots, out, P, T, x_sb, x_st, slots_s, D,
    W: tl.constexpr, SILU: tl.constexpr, WORD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The T new tokens of one sequence, some channels, one token after another. Its last inputs stay in
    registers, and are written back at the end. Strides of x are in words of WORD elements."""
    x_sb, x_st = x_sb * WORD, x_st * WORD
    U: tl.constexpr = W - 1
    b = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = b
    if slots is not None:
        slot = tl.load(slots + b * slots_s).to(tl.int64)
    exists = (slot >= 0) & (slot < P)
    mask = (col < D) & exists
    own = state + slot * U * D + col
    held = ()
    for u in tl.static_range(U):
        held = held + (tl.load(own + u * D, mask=mask, other=0.0).to(tl.float32),)
    for t in range(T):
        held = held + (tl.load(x + b * x_sb + t * x_st + col, mask=col < D, other=0.0).to(tl.float32),)
        z = tl.zeros([COLUMNS], tl.float32)
        if bias is not None:
            z = z + tl.load(bias + col, mask=col < D, other=0.0).to(tl.float32)
        later = ()
        for k in tl.static_range(W):
            z = z + held[k] * tl.load(weight + col * W + k, mask=col < D, other=0.0).to(tl.float32)
            if k > 0:
                later = later + (held[k],)
        held = later
        if SILU:
            z = silu(z)
        z = tl.where(exists, z, float("nan"))
        tl.store(out + (b * T + t) * D + col, narrow(z, out), mask=col < D)
    for u in tl.static_range(U):
        tl.store(own + u * D, narrow(held[u], state), mask=mask)


# Launchers


def tile_of(D: int, most: int = COLUMNS) -> dict[str, int]:
    """Tokens and channels of a program. The interpreter has a cost per program, so it takes more."""
    columns = min(4096 if INTERPRETED.value else most, triton.next_power_of_2(max(D, 1)))
    return {"ROWS": ROWS, "COLUMNS": columns}


def walk(args: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """(tensors that say where sequences are, N T S steps and the strides) for kernels."""
    x, first, packed = args["x"], args["first"], args["cu_seqlens"]
    B, T, _ = x.shape
    S = B if packed is None else len(packed) - 1
    sizes = [B * T, max(T, 1), S, max(S - 1, 0).bit_length()]
    strides = [0 if t is None else t.stride(0) for t in (first, packed)]
    return [first, packed], [*sizes, *strides]


def in_words(*tensors: Tensor) -> tuple[list[int], int]:
    """(strides of batch and token of each, in words; elements of a word). A word is 16 bytes, or the part of
    it to which all rows are aligned: the compiler knows the alignment, so loads are as wide as possible."""
    strides = [s if n > 1 else 0 for t in tensors for n, s in zip(t.shape[:2], t.stride()[:2], strict=True)]
    word = gcd(16 // tensors[0].element_size(), *strides)
    return [s // word for s in strides], word


def dense(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def causal_conv1d(launch: Launch = run, **args: Any) -> tuple[Tensor, Tensor | None]:
    """(out, final_state)."""
    x, weight = args["x"], args["weight"].contiguous()
    (_, T, D), W = x.shape, weight.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    state = dense(args["initial_state"])
    where, (N, length, S, steps, *of_where) = walk(args)
    of_x, word = in_words(x)
    strides, tile = (*of_x, *of_where), tile_of(D)
    if out.numel() and S:
        launch(
            convolve_rows, (triton.cdiv(N, ROWS), triton.cdiv(D, tile["COLUMNS"])),
            x, weight, args["bias"], state, *where, out, N, length, S, steps, *strides, D,
            W=W, SILU=args["activation"] == "silu", WORD=word, **tile, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    if not args["return_final_state"]:
        return out, None
    final = torch.empty((S, W - 1, D), dtype=x.dtype, device=x.device)
    if T == 0:
        return out, final.zero_() if state is None else final.copy_(state)
    if final.numel():
        launch(
            last_inputs, (S, triton.cdiv(D, tile["COLUMNS"])),
            x, state, *where, final, N, T, S, *strides, D,
            U=W - 1, WORD=word, COLUMNS=tile["COLUMNS"], num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out, final


def causal_conv1d_update(launch: Launch = run, **args: Any) -> Tensor:
    """out; the states of the slots are written."""
    x, state, weight, slots = args["x"], args["state"], args["weight"].contiguous(), args["slots"]
    B, T, D = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns, (strides, word) = tile_of(D, 2 * COLUMNS)["COLUMNS"], in_words(x)
    if out.numel():
        launch(
            convolve_next, (B, triton.cdiv(D, columns)),
            x, weight, args["bias"], state, slots, out, len(state), T, *strides,
            0 if slots is None else slots.stride(0), D,
            W=weight.shape[-1], SILU=args["activation"] == "silu", WORD=word, COLUMNS=columns,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
