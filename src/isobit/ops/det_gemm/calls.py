"""Maps the arguments of the ops to the two functions that every backend has. A backend is a module with

    why_not_product(a, b)                          None, or the reason it cannot serve
    product(a, b, bias, out_dtype)                 a [Z, M, K], b [Z, K, N], bias [N] or None -> [Z, M, N]
    why_not_token_product(x, dy)
    token_product(x, dy, stream, init, out_dtype)  x [Z, T, K], dy [Z, T, N] -> [Z, N, K]
    ones(dy)                                       [T, 1] of 1, to sum the T rows of dy with

Operands are views with any strides, [rows, columns] if there is only one product (no Z). A stream is given
for one product only; without a stream all rows are live, as one sequence. No size is ever 0: an empty sum
needs no kernel. `launch` is passed on to backends that launch kernels. Modules are given by name, and
imported at their first use.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from isobit.frame.backend import resolve
from isobit.kernels.host import token_stream


def matrices(t: Tensor) -> Tensor:
    """[*, rows, columns] as [Z, rows, columns]: a view, unless `*` cannot be flattened without a copy."""
    return t if t.ndim in (2, 3) else t.reshape(t.shape[:-2].numel(), *t.shape[-2:])


def rows(t: Tensor) -> Tensor:
    """[*, columns] as one matrix."""
    return t if t.ndim == 2 else t.reshape(t.shape[:-1].numel(), t.shape[-1])


def _product(
    kernels: str, a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, **rest: Any
) -> Tensor:
    """`rest` is `launch`, and `leaves` for a subtree of class tree8."""
    if 0 in a.shape or 0 in b.shape:
        out = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float32, device=a.device)
        return (out if bias is None else out + bias).to(out_dtype)
    return resolve(f"{kernels}:product")(a, b, bias, out_dtype, **rest)


def _token_product(
    kernels: str, x: Tensor, dy: Tensor, stream: Any, init: Tensor | None, out_dtype: torch.dtype,
    **launch: Any,
) -> Tensor:  # fmt: skip
    if 0 in x.shape or 0 in dy.shape:
        shape = (*x.shape[:-2], dy.shape[-1], x.shape[-1])
        return torch.zeros(shape, dtype=out_dtype, device=x.device) if init is None else init.clone()
    return resolve(f"{kernels}:token_product")(x, dy, stream, init, out_dtype=out_dtype, **launch)


# The products that an op needs: (which function, its two operands), to ask a backend whether it can serve
# them

Question = tuple[Literal["product", "token_product"], Tensor, Tensor]


def of_gemm(a: Tensor, b: Tensor, **rest: Any) -> Iterator[Question]:
    yield "product", matrices(a), matrices(b)


def of_gemm_bwd(dc: Tensor, a: Tensor | None, b: Tensor | None, **wanted: Any) -> Iterator[Question]:
    if b is not None:
        yield "product", matrices(_as_rounded(dc, b.dtype)), matrices(b).mT
    if a is not None:
        yield "token_product", matrices(_as_rounded(dc, a.dtype)), matrices(a)


def of_linear(
    x: Tensor, weight: Tensor, operand_dtype: torch.dtype | None, **rest: Any
) -> Iterator[Question]:
    """Operands as kernels will read them: an operand that is rounded first is a new tensor, with its own
    strides."""
    yield "product", rows(_as_rounded(x, operand_dtype)), _as_rounded(weight, operand_dtype).t()


def of_linear_bwd(
    dy: Tensor, x: Tensor | None, weight: Tensor, operand_dtype: torch.dtype | None, want_x: bool,
    want_weight: bool, want_bias: bool, **rest: Any,
) -> Iterator[Question]:  # fmt: skip
    narrow = operand_dtype or weight.dtype
    dy = rows(_as_rounded(dy, narrow))
    if want_x:
        yield "product", dy, _as_rounded(weight, narrow)
    if want_weight and x is not None:
        yield "token_product", rows(_as_rounded(x, narrow)), dy
    if want_bias:
        yield "token_product", dy, dy  # the other operand is `ones`, which always fits


def of_dw(x: Tensor, dy: Tensor, **rest: Any) -> Iterator[Question]:
    yield "token_product", rows(x), rows(dy)


def _as_rounded(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    return t if dtype in (None, t.dtype) else torch.empty_like(t, dtype=dtype, device="meta")


# How an op runs


def run_gemm(kernels: str, a: Tensor, b: Tensor, out_dtype: torch.dtype | None, **launch: Any) -> Tensor:
    out = _product(kernels, matrices(a), matrices(b), None, out_dtype or a.dtype, **launch)
    return out if a.ndim in (2, 3) else out.view(*a.shape[:-1], b.shape[-1])


def why_not_subtree(kernels: str, args: dict[str, Any]) -> str | None:
    a, b = args["a"], args["b"]
    return None if 0 in (*a.shape, *b.shape) else resolve(f"{kernels}:why_not_product")(a, b, args["leaves"])


def run_subtree(kernels: str, a: Tensor, b: Tensor, leaves: int, **launch: Any) -> Tensor:
    return _product(kernels, a, b, None, torch.float32, leaves=leaves, **launch)


def run_gemm_bwd(
    kernels: str, dc: Tensor, a: Tensor | None, b: Tensor | None, want_a: bool, want_b: bool, **launch: Any
) -> tuple[Tensor | None, Tensor | None]:
    da = db = None
    if want_a:
        assert b is not None
        left = matrices(dc.to(b.dtype))
        da = _product(kernels, left, matrices(b).mT, None, b.dtype, **launch)
        da = da.view(*dc.shape[:-1], b.shape[-2])
    if want_b:
        assert a is not None
        right = matrices(dc.to(a.dtype))
        db = _token_product(kernels, right, matrices(a), None, None, a.dtype, **launch)
        db = db.view(*a.shape[:-2], a.shape[-1], dc.shape[-1])
    return da, db


def run_linear(
    kernels: str, x: Tensor, weight: Tensor, bias: Tensor | None, operand_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None, **launch: Any,
) -> Tensor:  # fmt: skip
    if operand_dtype is not None:
        x, weight = x.to(operand_dtype), weight.to(operand_dtype)
        bias = None if bias is None else bias.to(operand_dtype)
    out = _product(kernels, rows(x), weight.t(), bias, out_dtype or x.dtype, **launch)
    return out if x.ndim == 2 else out.view(*x.shape[:-1], weight.shape[0])


def run_linear_bwd(
    kernels: str, dy: Tensor, x: Tensor | None, weight: Tensor, operand_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None, want_x: bool, want_weight: bool, want_bias: bool, **launch: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    narrow, K, lead = operand_dtype or weight.dtype, weight.shape[1], dy.shape[:-1]
    dx = dweight = dbias = None
    dy = rows(dy.to(narrow))
    if want_x:
        dx = _product(kernels, dy, weight.to(narrow), None, narrow, **launch).view(*lead, K)

    def sum_over_tokens(x: Tensor, dtype: torch.dtype) -> Tensor:
        return _token_product(kernels, x, dy, None, None, operand_dtype or dtype, **launch).to(dtype)

    if want_weight:
        assert x is not None
        dweight = sum_over_tokens(rows(x.to(narrow)), weight.dtype)
    if want_bias:
        ones = dy.new_empty(dy.shape[0], 1) if 0 in dy.shape else resolve(f"{kernels}:ones")(dy, **launch)
        dbias = sum_over_tokens(ones, bias_dtype or weight.dtype)[:, 0]
    return dx, dweight, dbias


def run_dw(
    kernels: str,
    x: Tensor,
    dy: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    init: Tensor | None,
    **launch: Any,
) -> Tensor:
    x, dy, stream = rows(x), rows(dy), None
    T = x.shape[0]
    if T and (mask is not None or cu_seqlens is not None):
        stream = token_stream.build(T, None if mask is None else mask.reshape(T), cu_seqlens, x.device)
    start = None if init is None else init.contiguous()
    return _token_product(kernels, x, dy, stream, start, torch.float32, **launch)
