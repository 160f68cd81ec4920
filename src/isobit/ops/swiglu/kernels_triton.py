"""`swiglu` in portable Triton: NVIDIA, AMD, and the CPU interpreter. Class swiglu/1, see docs/swiglu.md.

A program takes BLOCK columns of a row. Every element is computed alone, so tiles and warps are free.

exp is that of the device's math library, which PyTorch's eager kernels call too, and not Triton's own, which
is faster and has other bits. Quotients are rounded to nearest. Kernels are compiled without contraction. Only
PyTorch's gradient of silu has one, which its compiler makes: there it is written out.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from isobit.frame.launch import Launch, run
from isobit.kernels.host.words import rows_in_words
from isobit.kernels.triton.interpreter import INTERPRETED, narrow, rounded
from isobit.kernels.triton.rows import row_offset

#: Columns of a program of four warps: 16 bytes of a 16-bit tensor per thread.
BLOCK = 1024

#: Arguments that change with the batch. They are not specialised, to avoid recompiles.
BATCH = ("inner", "gate_so", "gate_si", "up_so", "up_si")


# Kernels


@triton.jit
def exp(x):
    if INTERPRETED:
        y = tl.exp(x)  # there it is numpy's, and there is no library
    else:
        y = libdevice.exp(x)
    return y


@triton.jit
def load(ptr, start, col, D: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of the row that starts at this offset."""
    if D % BLOCK == 0:
        x = tl.load(ptr + start + col)
    else:
        x = tl.load(ptr + start + col, mask=col < D, other=0.0)
    return x


@triton.jit
def store(ptr, start, col, x, D: tl.constexpr, BLOCK: tl.constexpr):
    if D % BLOCK == 0:
        tl.store(ptr + start + col, narrow(x, ptr))
    else:
        tl.store(ptr + start + col, narrow(x, ptr), mask=col < D)


@triton.jit
def product(x, y, DTYPE: tl.constexpr):
    """x y, rounded to DTYPE, in fp32."""
    return rounded(x * y, DTYPE).to(tl.float32)


@triton.jit(do_not_specialize=BATCH)
def gate_rows(
    gate, up, out, inner, gate_so, gate_si, up_so, up_si,
    D: tl.constexpr, WORD: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Strides are in words of WORD elements."""
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    col = tl.program_id(0) % CHUNKS * BLOCK + tl.arange(0, BLOCK)
    x = load(gate, row_offset(row, inner, gate_so, gate_si) * WORD, col, D, BLOCK).to(tl.float32)
    u = load(up, row_offset(row, inner, up_so, up_si) * WORD, col, D, BLOCK).to(tl.float32)
    act = rounded(tl.div_rn(x, 1.0 + exp(-x)), gate.dtype.element_ty).to(tl.float32)
    store(out, row * D, col, act * u, D, BLOCK)


@triton.jit(do_not_specialize=(*BATCH, "dout_so", "dout_si"))
def gate_rows_bwd(
    gate, up, dout, dgate, dup, inner, gate_so, gate_si, up_so, up_si, dout_so, dout_si,
    D: tl.constexpr, WORD: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients that are not wanted are None, and cost nothing."""
    DTYPE: tl.constexpr = gate.dtype.element_ty
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    col = tl.program_id(0) % CHUNKS * BLOCK + tl.arange(0, BLOCK)
    x = load(gate, row_offset(row, inner, gate_so, gate_si) * WORD, col, D, BLOCK).to(tl.float32)
    g = load(dout, row_offset(row, inner, dout_so, dout_si) * WORD, col, D, BLOCK).to(tl.float32)
    below = 1.0 + exp(-x)
    if dgate is not None:
        u = load(up, row_offset(row, inner, up_so, up_si) * WORD, col, D, BLOCK).to(tl.float32)
        s = tl.div_rn(tl.full([BLOCK], 1.0, tl.float32), below)
        slope = tl.fma(x, 1.0 - s, tl.full([BLOCK], 1.0, tl.float32))
        store(dgate, row * D, col, product(g, u, DTYPE) * s * slope, D, BLOCK)
    if dup is not None:
        act = rounded(tl.div_rn(x, below), DTYPE).to(tl.float32)
        store(dup, row * D, col, g * act, D, BLOCK)


# Launchers


def swiglu(launch: Launch = run, **args: Any) -> Tensor:
    gate, up = args["gate"], args["up"]
    lead, D = gate.shape[:-1], gate.shape[-1]
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows = rows_in_words(lead, (gate, up), D)
    grid, tiles = launch_tiles(lead, D)
    launch(
        gate_rows, grid,
        *rows.tensors, out, rows.inner, *rows.strides,
        **tiles, WORD=rows.word, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def swiglu_bwd(launch: Launch = run, **args: Any) -> tuple[Tensor | None, Tensor | None]:
    gate, up, dout = args["gate"], args["up"], args["dout"]
    lead, D = gate.shape[:-1], gate.shape[-1]
    dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if args["want_gate"] else None
    dup = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) if args["want_up"] else None
    rows = rows_in_words(lead, (gate, up, dout), D)
    grid, tiles = launch_tiles(lead, D)
    launch(
        gate_rows_bwd, grid,
        *rows.tensors, dgate, dup, rows.inner, *rows.strides,
        **tiles, WORD=rows.word, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return dgate, dup


def launch_tiles(lead: torch.Size, D: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and how many columns a program takes."""
    block = min(BLOCK, triton.next_power_of_2(max(D, 1)))
    chunks = triton.cdiv(D, block)
    return (lead.numel() * chunks,), {"D": D, "CHUNKS": chunks, "BLOCK": block}
