"""`rms_norm_gated` in portable Triton: NVIDIA, AMD, and the CPU interpreter. Class rms-gated/1, see
docs/rms_norm_gated.md.

A program holds some rows in registers: one read of x and gate and one write. The columns of a row are added
by a tree of neighbours, each addition of which has two operands, so the register layout cannot change the
order, and the number of rows per program is free. In the backward a program takes 16 groups of 16 rows, one
row of each group at a time, and adds the terms of dweight in the order of `isobit.kernels.triton.row_stream`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.host.words import rows_in_words
from isobit.kernels.triton.interpreter import narrow, rounded
from isobit.kernels.triton.row_stream import GROUP, LOG_GROUPS, over_groups, programs_of, sum_of
from isobit.kernels.triton.rows import row_offset
from isobit.kernels.triton.silu import silu, silu_slope

#: Elements of a tile.
TILE = 2048

#: Arguments that change with the batch. They are not specialised, to avoid recompiles.
BATCH = ("N", "inner", "x_so", "x_si", "gate_so", "gate_si", "dout_so", "dout_si")


# Kernels


@triton.jit
def means(terms, D: tl.constexpr, ROWS: tl.constexpr, LOG: tl.constexpr):
    """[ROWS, 2**LOG] -> [ROWS, 1]: neighbours are added repeatedly, and the sum is divided by D."""
    for i in tl.static_range(LOG):
        # An axis of two: one commutative addition, whichever threads hold the two.
        terms = tl.sum(tl.reshape(terms, [ROWS, 1 << (LOG - 1 - i), 2]), axis=2)
    terms = tl.reshape(terms, [ROWS, 1])
    return tl.div_rn(terms, tl.full([ROWS, 1], D, tl.float32))


@triton.jit
def load_tile(ptr, row, inner, so, si, col, mask, WORD: tl.constexpr):
    at = row_offset(row, inner, so, si) * WORD
    return tl.load(ptr + at[:, None] + col[None, :], mask=mask, other=0.0)


@triton.jit
def times_weight(y, w, DTYPE: tl.constexpr, WIDE: tl.constexpr):
    """m: y rounded, times the weight; rounded again unless the weight is fp32."""
    m = rounded(y, DTYPE).to(tl.float32) * w
    if not WIDE:
        m = rounded(m, DTYPE).to(tl.float32)
    return m


@triton.jit(do_not_specialize=BATCH)
def norm_rows(
    x, gate, weight, out, rstd, eps, N, inner, x_so, x_si, gate_so, gate_si,
    D: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Strides are in words of WORD elements."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, 1 << LOG)
    mask = (row < N)[:, None] & (col < D)[None, :]
    h = load_tile(x, row, inner, x_so, x_si, col, mask, WORD).to(tl.float32)
    w = tl.load(weight + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
    root = tl.sqrt_rn(means(h * h, D, ROWS, LOG) + eps)
    scale = tl.div_rn(tl.full([ROWS, 1], 1.0, tl.float32), root)
    m = times_weight(h * scale, w, DTYPE, weight.dtype.element_ty != DTYPE)
    z = load_tile(gate, row, inner, gate_so, gate_si, col, mask, WORD).to(tl.float32)
    tl.store(out + row[:, None] * D + col[None, :], narrow(m * silu(z), out), mask=mask)
    if rstd is not None:
        tl.store(rstd + row, tl.reshape(scale, [ROWS]), mask=row < N)


@triton.jit
def load_terms(
    x, gate, dout, rstd, row, wanted, N, inner, x_so, x_si, gate_so, gate_si, dout_so, dout_si, col,
    D: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """(x, gate, dout, rstd) of rows in their dtypes; zeros if they are not wanted."""
    live = (row < N) & wanted
    mask = live[:, None] & (col < D)[None, :]
    h = load_tile(x, row, inner, x_so, x_si, col, mask, WORD)
    z = load_tile(gate, row, inner, gate_so, gate_si, col, mask, WORD)
    given = load_tile(dout, row, inner, dout_so, dout_si, col, mask, WORD)
    return h, z, given, tl.load(rstd + row, mask=live, other=0.0)


@triton.jit(do_not_specialize=BATCH)
def gradient_rows(
    x, gate, dout, weight, rstd, dx, dgate, partials, N, inner, x_so, x_si, gate_so, gate_si,
    dout_so, dout_si,
    D: tl.constexpr, WORD: tl.constexpr, LOG: tl.constexpr, GROUP: tl.constexpr, LOG_GROUPS: tl.constexpr,
):  # fmt: skip
    """Gradients that are not wanted are None, and cost nothing. The rows after these are loaded while these
    are computed: stores are in between, so the compiler cannot move the loads ahead."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    ROWS: tl.constexpr = 1 << LOG_GROUPS
    part = tl.program_id(0).to(tl.int64)
    base = ((part << LOG_GROUPS) + tl.arange(0, ROWS)) * GROUP
    col = tl.arange(0, 1 << LOG)
    w = tl.load(weight + col, mask=col < D, other=0.0).to(tl.float32)[None, :]
    sums = tl.zeros([ROWS, 1 << LOG], tl.float32)
    later = load_terms(x, gate, dout, rstd, base, True, N, inner, x_so, x_si, gate_so, gate_si, dout_so,
                       dout_si, col, D, WORD)  # fmt: skip
    for i in range(GROUP):
        row = base + i
        mask = (row < N)[:, None] & (col < D)[None, :]
        h, z, given, scale = later
        later = load_terms(x, gate, dout, rstd, row + 1, i + 1 < GROUP, N, inner, x_so, x_si, gate_so,
                           gate_si, dout_so, dout_si, col, D, WORD)  # fmt: skip
        scale = scale[:, None]
        y, z, given = h.to(tl.float32) * scale, z.to(tl.float32), given.to(tl.float32)
        dm = given * silu(z)
        at = row[:, None] * D + col[None, :]
        if partials is not None:
            sums = sums + dm * y
        if dx is not None:
            g = dm * w
            own = scale * (g - y * means(g * y, D, ROWS, LOG))
            tl.store(dx + at, narrow(own, dx), mask=mask)
        if dgate is not None:
            m = times_weight(y, w, DTYPE, weight.dtype.element_ty != DTYPE)
            tl.store(dgate + at, narrow(given * m * silu_slope(z), dgate), mask=mask)
    if partials is not None:
        at = (part * D + tl.zeros([1], tl.int64))[:, None] + col[None, :]
        tl.store(partials + at, over_groups(sums, LOG_GROUPS, 1 << LOG), mask=(col < D)[None, :])


# Launchers


def rms_norm_gated(launch: Launch = run, **args: Any) -> tuple[Tensor, Tensor | None]:
    """(out, rstd)."""
    x, gate, weight = args["x"], args["gate"], args["weight"]
    lead, D = x.shape[:-1], x.shape[-1]
    N, log = lead.numel(), (D - 1).bit_length()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(lead, dtype=torch.float32, device=x.device) if args["return_rstd"] else None
    if N:
        rows = rows_in_words(lead, (x, gate))
        each = max(TILE >> log, 1)
        launch(
            norm_rows, (triton.cdiv(N, each),),
            *rows.tensors, weight, out, rstd, args["eps"], N, rows.inner, *rows.strides,
            D=D, WORD=rows.word, ROWS=each, LOG=log, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out, rstd


def rms_norm_gated_bwd(launch: Launch = run, **args: Any) -> tuple[Tensor | None, ...]:
    """(dx, dweight, dgate); None for what is not wanted."""
    x, gate, weight = args["x"], args["gate"], args["weight"]
    lead, D = x.shape[:-1], x.shape[-1]
    N, P = lead.numel(), programs_of(lead.numel())

    def wanted(name: str, *shape: int, dtype: torch.dtype) -> Tensor | None:
        return torch.empty(shape, dtype=dtype, device=x.device) if args[f"want_{name}"] else None

    dx, dgate = (wanted(name, *x.shape, dtype=x.dtype) for name in ("x", "gate"))
    partials = wanted("weight", P, D, dtype=torch.float32)
    rows = rows_in_words(lead, (x, gate, args["dout"]))
    launch(
        gradient_rows, (P,),
        *rows.tensors, weight, args["rstd"].contiguous(), dx, dgate, partials, N, rows.inner, *rows.strides,
        D=D, WORD=rows.word, LOG=(D - 1).bit_length(), GROUP=GROUP, LOG_GROUPS=LOG_GROUPS,
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return dx, None if partials is None else sum_of(partials, weight.dtype, launch), dgate
