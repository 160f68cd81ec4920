"""`causal_conv1d` in portable Triton: NVIDIA, AMD, and the CPU interpreter. Class conv/1, see
docs/causal_conv1d.md.

A program takes runs of tokens and some channels, and goes through each run token by token: the last inputs
stay in registers, so each is loaded once. Where a run begins it loads W - 1 more. An element is computed
alone, so tiles and warps are free.

Most programs are inside one sequence. That is found out once, by the sequences of its first and its last row;
only where a sequence begins or x ends is it asked for every row (EDGES), and inputs replaced by the state or
by zeros.

Whatever cu_seqlens, first and slots hold, no access is out of bounds: the begin of a sequence only decides
which of the inputs from t - W + 1 to t are used, and never adds others.
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

#: A program of four warps takes RUNS runs of RUN tokens, and COLUMNS channels. It loads CHUNK tokens of each
#: run at a time. In the interpreter runs are fewer and shorter: small cases then have programs without EDGES.
RUNS, RUN = (2, 8) if INTERPRETED.value else (4, 16)
CHUNK, COLUMNS = 4, 128

#: Arguments that change with the batch. They are not specialised, to avoid recompiles.
BATCH = ("N", "T", "S", "steps", "x_sb", "x_st", "first_s", "cu_s")


# Kernels


@triton.jit
def begins_of(row, T, S, first, cu_seqlens, first_s, cu_s, steps):
    """(sequence, first row of it) of a row of the flattened [B * T], or of several. With cu_seqlens it is the
    last sequence that begins at the row or before it, found by bisection."""
    if cu_seqlens is not None:
        low = row * 0
        for i in range(steps):
            middle = low + ((row * 0 + 1) << (steps - 1 - i))
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
def in_one_sequence(start, end, N, T, S, first, cu_seqlens, first_s, cu_s, steps, U: tl.constexpr):
    """Whether rows from start - U to end exist, and are of one sequence and no padding. A wrong bound may be
    negative, so they are also compared with the begin of x, or of their batch element."""
    sequence, begin = begins_of(start, T, S, first, cu_seqlens, first_s, cu_s, steps)
    other, _ = begins_of(end, T, S, first, cu_seqlens, first_s, cu_s, steps)
    least = sequence * T
    if cu_seqlens is not None:
        least = sequence * 0
    return (sequence == other) & (start - U >= tl.maximum(begin, least)) & (end < N)


@triton.jit
def places_of(
    row, start, N, T, S, first, cu_seqlens, first_s, cu_s, steps, U: tl.constexpr, EDGES: tl.constexpr
):
    """(sequence, batch element, tokens of the sequence before this one) of rows. The last is at most U, and
    -1 for padding and for rows that do not exist. Without EDGES all are in the sequence of row `start`, and
    not among its first U."""
    if EDGES:
        sequence, begin = begins_of(tl.maximum(row, 0), T, S, first, cu_seqlens, first_s, cu_s, steps)
        since = tl.where((row >= 0) & (row < N), tl.minimum(tl.maximum(row - begin, -1), U), -1)
        b = sequence
        if cu_seqlens is not None:
            b = sequence * 0
    else:
        since = tl.full(row.shape, U, tl.int64)
        b = start // T + tl.zeros(row.shape, tl.int64)
        sequence = b
    return sequence, b, since


@triton.jit
def load_rows(ptr, row, b, col, N, T, sb, st, D, EDGES: tl.constexpr):
    """Rows [rows, columns] in their dtype; zeros for rows that do not exist."""
    mask = (col < D)[None, :]
    if EDGES:
        mask = mask & ((row >= 0) & (row < N))[:, None]
    at = b * sb + (row - b * T) * st
    return tl.load(ptr + at[:, None] + col[None, :], mask=mask, other=0.0)


@triton.jit
def inputs_of(held, state, sequence, since, col, S, D, W: tl.constexpr, EDGES: tl.constexpr):
    """The W inputs of rows, of which `held` are the last W rows of x: what is before a sequence is replaced
    by its state, or by zeros."""
    given = held
    if EDGES:
        given = ()
        for k in tl.static_range(W):
            before = tl.zeros(held[k].shape, tl.float32)
            if state is not None:
                known = (since >= 0) & (since < W - 1 - k) & (sequence >= 0) & (sequence < S)
                at = (sequence * (W - 1) + since + k) * D
                mask = known[:, None] & (col < D)[None, :]
                before = tl.load(state + at[:, None] + col[None, :], mask=mask, other=0.0).to(tl.float32)
            given = given + (tl.where((since >= W - 1 - k)[:, None], held[k], before),)
    return given


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
def taps_of(weight, col, D, W: tl.constexpr):
    """The taps in fp32, each [1, columns]."""
    taps = ()
    for k in tl.static_range(W):
        taps = taps + (tl.load(weight + col * W + k, mask=col < D, other=0.0).to(tl.float32)[None, :],)
    return taps


@triton.jit
def sum_of_inputs(given, taps, bias, col, D, W: tl.constexpr):
    """z."""
    z = tl.zeros(given[0].shape, tl.float32)
    if bias is not None:
        z = z + tl.load(bias + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(W):
        z = z + given[k] * taps[k]
    return z


@triton.jit
def in_fp32(values, COUNT: tl.constexpr):
    wide = ()
    for i in tl.static_range(COUNT):
        wide = wide + (values[i].to(tl.float32),)
    return wide


@triton.jit
def without_first(values, COUNT: tl.constexpr):
    """A tuple of COUNT without its first."""
    rest = ()
    for i in tl.static_range(1, COUNT):
        rest = rest + (values[i],)
    return rest


@triton.jit
def load_chunk(
    ptr, base, start, col, N, T, S, sb, st, first, cu_seqlens, first_s, cu_s, steps, D,
    COUNT: tl.constexpr, U: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """COUNT rows from base on, each one later than the one before."""
    rows = ()
    for i in tl.static_range(COUNT):
        row = base + i
        _, b, _ = places_of(row, start, N, T, S, first, cu_seqlens, first_s, cu_s, steps, U, EDGES)
        rows = rows + (load_rows(ptr, row, b, col, N, T, sb, st, D, EDGES),)
    return rows


@triton.jit
def convolve_run(
    x, weight, bias, state, first, cu_seqlens, out, start, base, col, N, T, S, steps, x_sb, x_st, first_s,
    cu_s, D, W: tl.constexpr, SILU: tl.constexpr, RUN: tl.constexpr, CHUNK: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """RUN rows from each of `base` on."""
    U: tl.constexpr = W - 1
    taps = taps_of(weight, col, D, W)
    before = load_chunk(x, base - U, start, col, N, T, S, x_sb, x_st, first, cu_seqlens, first_s, cu_s, steps,
                        D, U, U, EDGES)  # fmt: skip
    held = in_fp32(before, U)
    for done in range(0, RUN, CHUNK):
        loaded = load_chunk(x, base + done, start, col, N, T, S, x_sb, x_st, first, cu_seqlens, first_s, cu_s,
                            steps, D, CHUNK, U, EDGES)  # fmt: skip
        for i in tl.static_range(CHUNK):
            row = base + done + i
            sequence, _, since = places_of(row, start, N, T, S, first, cu_seqlens, first_s, cu_s, steps, U,
                                           EDGES)  # fmt: skip
            held = held + (loaded[i].to(tl.float32),)
            given = inputs_of(held, state, sequence, since, col, S, D, W, EDGES)
            held = without_first(held, W)
            z = sum_of_inputs(given, taps, bias, col, D, W)
            if SILU:
                z = silu(z)
            mask = (col < D)[None, :]
            if EDGES:
                z = tl.where((since >= 0)[:, None], z, 0.0)
                mask = mask & (row < N)[:, None]
            tl.store(out + row[:, None] * D + col[None, :], narrow(z, out), mask=mask)


@triton.jit(do_not_specialize=BATCH)
def convolve_rows(
    x, weight, bias, state, first, cu_seqlens, out, N, T, S, steps, x_sb, x_st, first_s, cu_s, D,
    W: tl.constexpr, SILU: tl.constexpr, WORD: tl.constexpr,
    RUNS: tl.constexpr, RUN: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """RUNS runs of rows. Strides of x are in words of WORD elements."""
    x_sb, x_st = x_sb.to(tl.int64) * WORD, x_st.to(tl.int64) * WORD
    start = tl.program_id(0).to(tl.int64) * (RUNS * RUN)
    base = start + tl.arange(0, RUNS) * RUN
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    end = start + (RUNS * RUN - 1)
    if in_one_sequence(start, end, N, T, S, first, cu_seqlens, first_s, cu_s, steps, W - 1):
        convolve_run(x, weight, bias, state, first, cu_seqlens, out, start, base, col, N, T, S, steps, x_sb,
                     x_st, first_s, cu_s, D, W, SILU, RUN, CHUNK, False)  # fmt: skip
    else:
        convolve_run(x, weight, bias, state, first, cu_seqlens, out, start, base, col, N, T, S, steps, x_sb,
                     x_st, first_s, cu_s, D, W, SILU, RUN, 1, True)  # fmt: skip


@triton.jit(do_not_specialize=BATCH)
def last_inputs(
    x, state, first, cu_seqlens, final, N, T, S, x_sb, x_st, first_s, cu_s, D,
    U: tl.constexpr, WORD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The final state of one sequence, some channels. Strides of x are in words of WORD elements."""
    x_sb, x_st = x_sb.to(tl.int64) * WORD, x_st.to(tl.int64) * WORD
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
    x_sb, x_st = x_sb.to(tl.int64) * WORD, x_st.to(tl.int64) * WORD
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


def columns_of(D: int, most: int) -> int:
    """Channels of a program. The interpreter has a cost per program, so it takes more."""
    return min(4096 if INTERPRETED.value else most, triton.next_power_of_2(max(D, 1)))


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
    strides, columns = (*of_x, *of_where), columns_of(D, COLUMNS)
    if out.numel() and S:
        launch(
            convolve_rows, (triton.cdiv(N, RUNS * RUN), triton.cdiv(D, columns)),
            x, weight, args["bias"], state, *where, out, N, length, S, steps, *strides, D,
            W=W, SILU=args["activation"] == "silu", WORD=word, RUNS=RUNS, RUN=RUN, CHUNK=CHUNK,
            COLUMNS=columns, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    if not args["return_final_state"]:
        return out, None
    final = torch.empty((S, W - 1, D), dtype=x.dtype, device=x.device)
    if T == 0:
        return out, final.zero_() if state is None else final.copy_(state)
    if final.numel():
        launch(
            last_inputs, (S, triton.cdiv(D, columns)),
            x, state, *where, final, N, T, S, *strides, D,
            U=W - 1, WORD=word, COLUMNS=columns, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out, final


def causal_conv1d_update(launch: Launch = run, **args: Any) -> Tensor:
    """out; the states of the slots are written."""
    x, state, weight, slots = args["x"], args["state"], args["weight"].contiguous(), args["slots"]
    B, T, D = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns, (strides, word) = columns_of(D, 2 * COLUMNS), in_words(x)
    if out.numel():
        launch(
            convolve_next, (B, triton.cdiv(D, columns)),
            x, weight, args["bias"], state, slots, out, len(state), T, *strides,
            0 if slots is None else slots.stride(0), D,
            W=weight.shape[-1], SILU=args["activation"] == "silu", WORD=word, COLUMNS=columns,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
