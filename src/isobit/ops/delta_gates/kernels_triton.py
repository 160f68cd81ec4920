"""`delta_gates` in portable Triton: NVIDIA, AMD, and the CPU interpreter. Class gates/1, see
docs/delta_gates.md.

A program has all heads of some rows. Every gate is computed alone, so tiles and warps are free. In the
backward it takes 16 groups of 16 rows, one row of each group at a time, and adds the terms of dA_log and
ddt_bias in the order of `isobit.kernels.triton.row_stream`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.host.rows import row_strides
from isobit.kernels.triton.interpreter import narrow
from isobit.kernels.triton.row_stream import GROUP, LOG_GROUPS, over_groups, programs_of, sum_of
from isobit.kernels.triton.rows import row_offset
from isobit.kernels.triton.silu import exp, sigmoid
from isobit.kernels.triton.softplus import softplus

#: Rows of a program of the forward.
ROWS = 32

#: Arguments that change with the batch. They are not specialised, to avoid recompiles.
BATCH = ("N", "inner", "a_so", "a_si", "b_so", "b_si", "dg_so", "dg_si", "dbeta_so", "dbeta_si")


# Kernels


@triton.jit
def load_rows(ptr, row, inner, so, si, col, mask):
    return tl.load(ptr + row_offset(row, inner, so, si)[:, None] + col[None, :], mask=mask, other=0.0)


@triton.jit
def load_heads(ptr, col, H):
    return tl.load(ptr + col, mask=col < H, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=BATCH)
def gate_rows(
    a, b, A_log, dt_bias, g, beta, N, inner, a_so, a_si, b_so, b_si, H,
    ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, HEADS)
    mask = (row < N)[:, None] & (col < H)[None, :]
    t = load_rows(a, row, inner, a_so, a_si, col, mask).to(tl.float32) + load_heads(dt_bias, col, H)
    rate = -exp(load_heads(A_log, col, H))
    at = row[:, None] * H + col[None, :]
    tl.store(g + at, rate * softplus(t), mask=mask)
    s = sigmoid(load_rows(b, row, inner, b_so, b_si, col, mask).to(tl.float32))
    tl.store(beta + at, narrow(s, beta), mask=mask)


@triton.jit(do_not_specialize=BATCH)
def gate_rows_bwd(
    a, b, A_log, dt_bias, dg, dbeta, da, db, decays, biases, N, inner, a_so, a_si, b_so, b_si, dg_so, dg_si,
    dbeta_so, dbeta_si, H,
    GROUP: tl.constexpr, LOG_GROUPS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Gradients that are not wanted are None. `decays` and `biases` are the partial sums of dA_log and
    ddt_bias."""
    part = tl.program_id(0).to(tl.int64)
    base = ((part << LOG_GROUPS) + tl.arange(0, 1 << LOG_GROUPS)) * GROUP
    col = tl.arange(0, HEADS)
    rate = -exp(load_heads(A_log, col, H))
    bias = load_heads(dt_bias, col, H)
    of_decays = tl.zeros([1 << LOG_GROUPS, HEADS], tl.float32)
    of_biases = tl.zeros([1 << LOG_GROUPS, HEADS], tl.float32)
    for i in range(GROUP):
        row = base + i
        mask = (row < N)[:, None] & (col < H)[None, :]
        at = row[:, None] * H + col[None, :]
        if dg is not None:
            t = load_rows(a, row, inner, a_so, a_si, col, mask).to(tl.float32) + bias
            given = load_rows(dg, row, inner, dg_so, dg_si, col, mask).to(tl.float32)
            own = rate * tl.where(t > 20.0, 1.0, sigmoid(t)) * given
            of_biases = of_biases + tl.where(mask, own, 0.0)
            if decays is not None:
                of_decays = of_decays + tl.where(mask, rate * softplus(t) * given, 0.0)
            if da is not None:
                tl.store(da + at, narrow(own, da), mask=mask)
        elif da is not None:
            tl.store(da + at, narrow(tl.zeros([1 << LOG_GROUPS, HEADS], tl.float32), da), mask=mask)
        if db is not None:
            own = tl.zeros([1 << LOG_GROUPS, HEADS], tl.float32)
            if dbeta is not None:
                s = sigmoid(load_rows(b, row, inner, b_so, b_si, col, mask).to(tl.float32))
                given = load_rows(dbeta, row, inner, dbeta_so, dbeta_si, col, mask).to(tl.float32)
                own = s * (1.0 - s) * given
            tl.store(db + at, narrow(own, db), mask=mask)
    at = (part + tl.zeros([1], tl.int64))[:, None] * H + col[None, :]
    inside = (col < H)[None, :]
    if decays is not None:
        tl.store(decays + at, over_groups(of_decays, LOG_GROUPS, HEADS), mask=inside)
    if biases is not None:
        tl.store(biases + at, over_groups(of_biases, LOG_GROUPS, HEADS), mask=inside)


# Launchers


def delta_gates(launch: Launch = run, **args: Any) -> tuple[Tensor, Tensor]:
    """(g, beta)."""
    a, b = args["a"], args["b"]
    lead, H = a.shape[:-1], a.shape[-1]
    g = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    beta = torch.empty(a.shape, dtype=b.dtype, device=a.device)
    inner, tensors, strides = row_strides(lead, (a, b))
    N = lead.numel()
    if N:
        launch(
            gate_rows, (triton.cdiv(N, ROWS),),
            *tensors, args["A_log"], args["dt_bias"], g, beta, N, inner, *strides, H,
            ROWS=ROWS, HEADS=triton.next_power_of_2(H), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return g, beta


def delta_gates_bwd(launch: Launch = run, **args: Any) -> tuple[Tensor | None, ...]:
    """(da, db, dA_log, ddt_bias); None for what is not wanted."""
    a, b, dg = args["a"], args["b"], args["dg"]
    lead, H = a.shape[:-1], a.shape[-1]
    N, P = lead.numel(), programs_of(lead.numel())

    def wanted(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.empty(shape, dtype=dtype, device=a.device) if args[f"want_{name}"] else None

    da, db = wanted("a", *a.shape, dtype=a.dtype), wanted("b", *b.shape, dtype=b.dtype)
    decays, biases = wanted("A_log", P, H), wanted("dt_bias", P, H)
    inner, tensors, strides = row_strides(lead, (a, b, dg, args["dbeta"]))
    launch(
        gate_rows_bwd, (P,),
        tensors[0], tensors[1], args["A_log"], args["dt_bias"], *tensors[2:], da, db, decays, biases,
        N, inner, *strides, H,
        GROUP=GROUP, LOG_GROUPS=LOG_GROUPS, HEADS=triton.next_power_of_2(H),
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    dA_log = None if decays is None else sum_of(decays, args["A_log"].dtype, launch)
    return da, db, dA_log, None if biases is None else sum_of(biases, args["dt_bias"].dtype, launch)
