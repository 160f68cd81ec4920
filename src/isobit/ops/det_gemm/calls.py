"""From the arguments of the ops to the two functions that a backend has. A backend is a module with

    why_not_product(a, b)                  None, or the reason it cannot serve
    product(a, b, bias, out_dtype)         a [Z, M, K], b [Z, K, N], bias [N] or None -> [Z, M, N]
    why_not_token_product(x, dy)
    token_product(x, dy, stream, init)     x [Z, T, K], dy [Z, T, N] -> fp32 [Z, N, K]

Operands are views with any strides. A stream comes with Z = 1; without one all rows count, as one sequence.
No size is ever 0: an empty sum needs no kernel. An op has its operands, which a backend is asked about, and
its run.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.backend import Args
from isobit.blocks import stream as token_stream


def matrices(t: Tensor) -> Tensor:
    """[*, rows, columns] as [Z, rows, columns]: a view, unless `*` cannot be walked as one dimension."""
    return t if t.ndim == 3 else t.reshape(t.shape[:-2].numel(), *t.shape[-2:])


def rows(t: Tensor) -> Tensor:
    """[*, columns] as one matrix, [1, rows, columns]."""
    return t.unsqueeze(0) if t.ndim == 2 else t.reshape(1, t.shape[:-1].numel(), t.shape[-1])


def _product(kernels: Any, a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    (Z, M, K), N = a.shape, b.shape[2]
    if 0 in (Z, M, K, N):
        out = torch.zeros(Z, M, N, dtype=torch.float32, device=a.device)
        return (out if bias is None else out + bias).to(out_dtype)
    return kernels.product(a, b, bias, out_dtype)


def _token_product(kernels: Any, x: Tensor, dy: Tensor, stream: Any, init: Tensor | None) -> Tensor:
    (Z, T, K), N = x.shape, dy.shape[2]
    if 0 in (Z, T, K, N):
        zeros = torch.zeros(Z, N, K, dtype=torch.float32, device=x.device)
        return zeros if init is None else init.clone()
    return kernels.token_product(x, dy, stream, init)


def gemm_operands(args: Args) -> tuple[Tensor, Tensor]:
    return matrices(args["a"]), matrices(args["b"])


def run_gemm(kernels: Any, a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> Tensor:
    out = _product(kernels, matrices(a), matrices(b), None, out_dtype or a.dtype)
    return out.view(*a.shape[:-1], b.shape[-1])


def run_linear(
    kernels: Any, x: Tensor, weight: Tensor, bias: Tensor | None, operand_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
) -> Tensor:  # fmt: skip
    if operand_dtype is not None:
        x, weight = x.to(operand_dtype), weight.to(operand_dtype)
        bias = None if bias is None else bias.to(operand_dtype)
    out = _product(kernels, rows(x), weight.t().unsqueeze(0), bias, out_dtype or x.dtype)
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_operands(args: Args) -> tuple[Tensor, Tensor]:
    """As kernels will read them: what is rounded first is a new tensor, with strides of its own."""
    x, weight = (_as_rounded(args[name], args["operand_dtype"]) for name in ("x", "weight"))
    return rows(x), weight.t().unsqueeze(0)


def _as_rounded(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    return t if dtype in (None, t.dtype) else torch.empty_like(t, dtype=dtype, device="meta")


def db_operands(args: Args) -> tuple[Tensor, Tensor]:
    return matrices(args["dc"]), matrices(args["a"])


def run_db(kernels: Any, a: Tensor, dc: Tensor) -> Tensor:
    out = _token_product(kernels, matrices(dc), matrices(a), None, None)
    return out.view(*a.shape[:-2], a.shape[-1], dc.shape[-1])


def linear_dw_operands(args: Args) -> tuple[Tensor, Tensor]:
    return rows(_as_rounded(args["x"], args["dy"].dtype)), rows(args["dy"])


def run_linear_dw(
    kernels: Any, x: Tensor, dy: Tensor, round_to: torch.dtype | None, out_dtype: torch.dtype
) -> Tensor:
    total = _token_product(kernels, rows(x.to(dy.dtype)), rows(dy), None, None)[0]
    return (total if round_to is None else total.to(round_to)).to(out_dtype)


def dw_operands(args: Args) -> tuple[Tensor, Tensor]:
    return rows(args["x"]), rows(args["dy"])


def run_dw(
    kernels: Any,
    x: Tensor,
    dy: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    init: Tensor | None,
) -> Tensor:
    x, dy, stream = rows(x), rows(dy), None
    T = x.shape[1]
    if T and (mask is not None or cu_seqlens is not None):
        stream = token_stream.build(T, None if mask is None else mask.reshape(T), cu_seqlens, x.device)
    start = None if init is None else init[None].contiguous()
    return _token_product(kernels, x, dy, stream, start)[0]
