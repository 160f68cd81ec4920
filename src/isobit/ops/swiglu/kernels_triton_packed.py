"""`swiglu_packed` in portable Triton: gate and up of one tensor, and the clamped activation of GPT-OSS. Class
swiglu-packed/1, see docs/swiglu.md.

A program takes BLOCK columns of a row of the result. Of interleaved columns it reads twice as many in whole
words, and separates them in registers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.host.words import rows_in_words
from isobit.kernels.triton.interpreter import rounded
from isobit.kernels.triton.rows import row_offset
from isobit.ops.swiglu.kernels_triton import exp, launch_tiles, load, product, store


@triton.jit
def load_parts(
    gate_up, start, first, D: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """(gate, up) of columns from `first` on, in fp32."""
    if INTERLEAVED:
        both = load(gate_up, start, 2 * first + tl.arange(0, 2 * BLOCK), 2 * D, 2 * BLOCK)
        gate, up = tl.split(tl.reshape(both, [BLOCK, 2]))
    else:
        col = first + tl.arange(0, BLOCK)
        gate = load(gate_up, start, col, D, BLOCK)
        up = load(gate_up, start + D, col, D, BLOCK)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def step(x, DTYPE: tl.constexpr):
    """A result of one step, as eager code stores it."""
    return rounded(x, DTYPE).to(tl.float32)


@triton.jit
def clamped(gate, up, limit):
    """NaN stays NaN."""
    x = tl.where(gate > limit, limit, gate)
    v = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return x, v


@triton.jit
def sigmoid(x):
    one = tl.full(x.shape, 1.0, tl.float32)
    return tl.div_rn(one, one + exp(-x))


@triton.jit(do_not_specialize=("inner", "so", "si", "limit", "alpha"))
def packed_rows(
    gate_up, out, limit, alpha, inner, so, si,
    D: tl.constexpr, WORD: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    """Strides are in words of WORD elements."""
    DTYPE: tl.constexpr = gate_up.dtype.element_ty
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    first = tl.program_id(0) % CHUNKS * BLOCK
    gate, up = load_parts(gate_up, row_offset(row, inner, so, si) * WORD, first, D, BLOCK, INTERLEAVED)
    if CLAMPED:
        limit = step(tl.zeros([BLOCK], tl.float32) + limit, DTYPE)  # as PyTorch's clamp has it
        x, v = clamped(gate, up, limit)
        glu = product(x, step(sigmoid(step(x * alpha, DTYPE)), DTYPE), DTYPE)
        y = step(v + 1.0, DTYPE) * glu
    else:
        y = step(tl.div_rn(gate, 1.0 + exp(-gate)), DTYPE) * up
    store(out, row * D, first + tl.arange(0, BLOCK), y, D, BLOCK)


@triton.jit(do_not_specialize=("inner", "so", "si", "dout_so", "dout_si", "limit", "alpha"))
def packed_rows_bwd(
    gate_up, dout, dgate_up, limit, alpha, inner, so, si, dout_so, dout_si,
    D: tl.constexpr, WORD: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = gate_up.dtype.element_ty
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    first = tl.program_id(0) % CHUNKS * BLOCK
    col = first + tl.arange(0, BLOCK)
    gate, up = load_parts(gate_up, row_offset(row, inner, so, si) * WORD, first, D, BLOCK, INTERLEAVED)
    g = load(dout, row_offset(row, inner, dout_so, dout_si) * WORD, col, D, BLOCK).to(tl.float32)
    one = tl.full([BLOCK], 1.0, tl.float32)
    if CLAMPED:
        limit = step(tl.zeros([BLOCK], tl.float32) + limit, DTYPE)  # as PyTorch's clamp has it
        x, v = clamped(gate, up, limit)
        s = step(sigmoid(step(x * alpha, DTYPE)), DTYPE)
        dglu = product(g, step(v + 1.0, DTYPE), DTYPE)
        da = product(product(product(dglu, x, DTYPE), step(one - s, DTYPE), DTYPE), s, DTYPE)
        dgate = product(dglu, s, DTYPE) + product(da, alpha, DTYPE)
        dgate = tl.where(gate <= limit, dgate, 0.0)
        dup = tl.where((up >= -limit) & (up <= limit), g * product(x, s, DTYPE), 0.0)
    else:
        below = one + exp(-gate)
        s = tl.div_rn(one, below)
        slope = tl.fma(gate, one - s, one)
        dgate = product(g, up, DTYPE) * s * slope
        dup = g * step(tl.div_rn(gate, below), DTYPE)
    if INTERLEAVED:
        both = tl.interleave(dgate, dup)
        store(dgate_up, row * (2 * D), 2 * first + tl.arange(0, 2 * BLOCK), both, 2 * D, 2 * BLOCK)
    else:
        store(dgate_up, row * (2 * D), col, dgate, D, BLOCK)
        store(dgate_up, row * (2 * D) + D, col, dup, D, BLOCK)


# Launchers


def swiglu_packed(launch: Launch = run, **args: Any) -> Tensor:
    gate_up = args["gate_up"]
    lead, D = gate_up.shape[:-1], gate_up.shape[-1] // 2
    out = torch.empty(*lead, D, dtype=gate_up.dtype, device=gate_up.device)
    rows = rows_in_words(lead, (gate_up,), D)
    grid, tiles = launch_tiles(lead, D)
    launch(
        packed_rows, grid, *rows.tensors, out, *_numbers(args), rows.inner, *rows.strides, **tiles,
        **_kind(args), WORD=rows.word, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def swiglu_packed_bwd(launch: Launch = run, **args: Any) -> Tensor:
    gate_up, dout = args["gate_up"], args["dout"]
    lead, D = gate_up.shape[:-1], gate_up.shape[-1] // 2
    dgate_up = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    rows = rows_in_words(lead, (gate_up, dout), D)
    grid, tiles = launch_tiles(lead, D)
    launch(
        packed_rows_bwd, grid, *rows.tensors, dgate_up, *_numbers(args), rows.inner, *rows.strides, **tiles,
        **_kind(args), WORD=rows.word, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return dgate_up


def _numbers(args: dict[str, Any]) -> tuple[float, float]:
    return (0.0, 0.0) if args["limit"] is None else (args["limit"], args["alpha"])


def _kind(args: dict[str, Any]) -> dict[str, bool]:
    return {"INTERLEAVED": args["interleaved"], "CLAMPED": args["limit"] is not None}
