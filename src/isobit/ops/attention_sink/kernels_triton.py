"""`attention_sink` in portable Triton: NVIDIA, AMD, and the CPU interpreter. Class sink/1.

A row is one head of one token. Forward and backward are one launch each, dsinks one more: a program adds the
gradients of all tokens of a head. Which rows share a program changes no bit.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from isobit.frame.launch import Launch, run
from isobit.kernels.triton.interpreter import INTERPRETED, narrow
from isobit.ops.attention_sink.order import LANES

#: Elements of a program of four warps.
TILE = 2048

#: Upper bound on halvings of a sum, for unrolled loops; the ones that are not needed generate no code.
MOST_HALVINGS = tl.constexpr(16)

#: Arguments that change with the batch. They are not specialised, to avoid recompiles.
BATCH = ("rows", "T", "lse_b", "lse_t", "lse_h")


# Kernels


@triton.jit
def share(exponent, seen):
    """1 / (1 + exp(exponent)), 0 for queries that see no key."""
    if INTERPRETED:
        e = tl.exp(exponent)  # there it is numpy's, and there is no library
    else:
        e = libdevice.exp(exponent)
    return tl.where(seen, tl.div_rn(tl.full(e.shape, 1.0, tl.float32), 1.0 + e), 0.0)


@triton.jit
def halves(x):
    """Sums of rows, [rows, 2^n]: repeatedly adds the second half to the first."""
    for _ in tl.static_range(MOST_HALVINGS):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), 1)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def row_of(lse, sinks, rows, T, lse_b, lse_t, lse_h, H: tl.constexpr, M: tl.constexpr):
    """(row, whether it exists, lse, sink) of the rows of a program. lse is [B, T, H] with these strides."""
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    live = row < rows
    token, head = row // H, row % H
    at = token // T * lse_b + token % T * lse_t + head * lse_h
    own = tl.load(lse + at, mask=live, other=float("-inf"))
    return row, live, own, tl.load(sinks + head, mask=live, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=BATCH)
def sink_rows(
    x, lse, sinks, out, rows, T, lse_b, lse_t, lse_h,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    row, live, own, sink = row_of(lse, sinks, rows, T, lse_b, lse_t, lse_h, H, M)
    f = share(sink - own, own != float("-inf"))
    d = tl.arange(0, DP)
    at, inside = row[:, None] * D + d[None, :], live[:, None] & (d < D)[None, :]
    tl.store(out + at, narrow(tl.load(x + at, mask=inside).to(tl.float32) * f[:, None], out), mask=inside)


@triton.jit(do_not_specialize=BATCH)
def sink_rows_bwd(
    x, lse, sinks, dout, dx, dlse, rows, T, lse_b, lse_t, lse_h,
    H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Gradients that are not wanted are None, and cost nothing. x and dout of a query that sees no key may be
    NaN, so they are not read."""
    row, live, own, sink = row_of(lse, sinks, rows, T, lse_b, lse_t, lse_h, H, M)
    seen = own != float("-inf")
    f = share(sink - own, seen)
    d = tl.arange(0, DP)
    at, inside = row[:, None] * D + d[None, :], live[:, None] & (d < D)[None, :]
    g = tl.load(dout + at, mask=inside & seen[:, None], other=0.0).to(tl.float32)
    if dx is not None:
        tl.store(dx + at, narrow(g * f[:, None], dx), mask=inside)
    if dlse is not None:
        h = share(own - sink, seen)
        dot = halves(g * tl.load(x + at, mask=inside & seen[:, None], other=0.0).to(tl.float32))
        tl.store(dlse + row, dot * (f * h), mask=live)


@triton.jit(do_not_specialize=["tokens"])
def sum_tokens(dlse, dsinks, tokens, H: tl.constexpr, LANES: tl.constexpr):
    """One head: minus the sum of dlse [tokens, H] over tokens."""
    head, lane = tl.program_id(0), tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.float32)
    for first in range(0, tokens, LANES):
        token = (first + lane).to(tl.int64)
        here = tl.load(dlse + token * H + head, mask=token < tokens, other=0.0)
        total += tl.where(token < tokens, -here, 0.0)
    one = tl.arange(0, 1)
    tl.store(dsinks + head + one, narrow(halves(tl.reshape(total, [1, LANES])), dsinks))


# Launchers


class Rows(NamedTuple):
    """What both launches share: the grid, the arguments that describe rows, and constants."""

    grid: tuple[int]
    sizes: tuple[int, ...]
    constants: dict[str, Any]


def _rows(x: Tensor, lse: Tensor) -> Rows:
    H, D = x.shape[-2:]
    B, T, _ = ((1,) * (3 - lse.ndim) + tuple(lse.shape))[-3:]
    strides = ((0,) * (3 - lse.ndim) + lse.stride())[-3:]
    DP = triton.next_power_of_2(max(D, 1))
    M = max(1, TILE // DP)
    rows = B * T * H
    constants = {"H": H, "D": D, "M": M, "DP": DP, "num_warps": 4, "enable_fp_fusion": False}
    return Rows((triton.cdiv(rows, M),), (rows, T, *strides), constants)


def _flat(lse: Tensor) -> Tensor:
    """Any number of leading dimensions as one or two; more than two are copied."""
    return lse if lse.ndim <= 3 else lse.reshape(-1, lse.shape[-1])


def attention_sink(launch: Launch = run, **args: Any) -> Tensor:
    x, lse = args["x"].contiguous(), _flat(args["lse"])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows = _rows(x, lse)
    launch(sink_rows, rows.grid, x, lse, args["sinks"].contiguous(), out, *rows.sizes, **rows.constants)
    return out


def attention_sink_bwd(
    launch: Launch = run, **args: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dlse, dsinks), those that are wanted."""
    x, dout, lse, sinks = (args[n] for n in ("x", "dout", "lse", "sinks"))
    x, dout, sinks = x.contiguous(), dout.contiguous(), sinks.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if args["want_x"] else None
    dlse = dsinks = None
    if args["want_lse"] or args["want_sinks"]:
        dlse = torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
    rows = _rows(x, _flat(lse))
    if x.numel():
        launch(
            sink_rows_bwd, rows.grid, x, _flat(lse), sinks, dout, dx, dlse, *rows.sizes, **rows.constants
        )  # fmt: skip
    elif dlse is not None:
        dlse.zero_()  # heads without elements
    if args["want_sinks"]:
        assert dlse is not None
        dsinks, H = torch.empty(sinks.shape, dtype=sinks.dtype, device=sinks.device), x.shape[-2]
        tokens = dlse.numel() // max(H, 1)
        launch(sum_tokens, (H,), dlse, dsinks, tokens, H=H, LANES=LANES, num_warps=4, enable_fp_fusion=False)
    return dx, dlse if args["want_lse"] else None, dsinks
