"""Maps the arguments of the ops to the functions that every backend has. A backend is a module with

    why_not_product(x, weight)              None, or the reason it cannot serve
    product(x, weight, offsets, bias)       x [R, K], weight [E, N, K], bias [E, N] or None -> [R, N]
    why_not_token_product(x, dy)
    token_product(x, dy, offsets, cu_seqlens, init, out_dtype)    x [R, K], dy [R, N] -> [E, N, K]
    ones(dy)                                [R, 1] of 1, to sum the R rows of dy with

No size is ever 0: an empty sum needs no kernel. `launch` is passed on to backends that launch kernels.
Modules are given by name, and imported at their first use.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from isobit.frame.backend import resolve
from isobit.ops.det_gemm.calls import rows

# The products that an op needs: (which function, its two operands), to ask a backend whether it can serve
# them

Question = tuple[Literal["product", "token_product"], Tensor, Tensor]


def _asked(*question: Any) -> Iterator[Question]:
    what, one, other = question
    if 0 not in (*one.shape, *other.shape):
        yield what, one, other


def of_linear(x: Tensor, weight: Tensor, **rest: Any) -> Iterator[Question]:
    yield from _asked("product", rows(x), weight)


def of_linear_bwd(
    dy: Tensor, x: Tensor | None, weight: Tensor, want_x: bool, want_weight: bool, want_bias: bool,
    **rest: Any,
) -> Iterator[Question]:  # fmt: skip
    if want_x:
        yield from _asked("product", rows(dy), weight.mT)
    if want_weight and x is not None:
        yield from _asked("token_product", rows(x), rows(dy))
    if want_bias:
        yield from _asked("token_product", rows(dy), rows(dy))  # the other operand is `ones`


def of_dw(x: Tensor, dy: Tensor, **rest: Any) -> Iterator[Question]:
    yield from _asked("token_product", rows(x), rows(dy))


# How an op runs


def _product(
    kernels: str, x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, **launch: Any
) -> Tensor:
    R, (E, N, K) = x.shape[0], weight.shape
    if 0 in (R, E, N):
        return torch.zeros(R, N, dtype=x.dtype, device=x.device)
    if K == 0 and bias is None:
        return torch.zeros(R, N, dtype=x.dtype, device=x.device)
    if K == 0:  # a sum of zeros
        x, weight = x.new_zeros(R, 8), weight.new_zeros(E, N, 8)
    return resolve(f"{kernels}:product")(x, weight, offsets, bias, **launch)


def _token_product(
    kernels: str, x: Tensor, dy: Tensor, offsets: Tensor, cu_seqlens: Tensor | None, init: Tensor | None,
    out_dtype: torch.dtype, **launch: Any,
) -> Tensor:  # fmt: skip
    shape = (offsets.shape[0] - 1, dy.shape[1], x.shape[1])
    if 0 in x.shape or 0 in shape:
        return torch.zeros(shape, dtype=out_dtype, device=x.device) if init is None else init.clone()
    return resolve(f"{kernels}:token_product")(x, dy, offsets, cu_seqlens, init, out_dtype, **launch)


def run_linear(
    kernels: str, x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, **launch: Any
) -> Tensor:
    out = _product(kernels, rows(x), weight, offsets, bias, **launch)
    return out if x.ndim == 2 else out.view(*x.shape[:-1], weight.shape[1])


def run_linear_bwd(
    kernels: str, dy: Tensor, x: Tensor | None, weight: Tensor, offsets: Tensor,
    bias_dtype: torch.dtype | None, want_x: bool, want_weight: bool, want_bias: bool, **launch: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    dx = dweight = dbias = None
    lead, dy = dy.shape[:-1], rows(dy)
    if want_x:
        dx = _product(kernels, dy, weight.mT, offsets, None, **launch).view(*lead, weight.shape[2])
    if want_weight:
        assert x is not None
        dweight = _token_product(kernels, rows(x), dy, offsets, None, None, weight.dtype, **launch)
    if want_bias:
        ones = dy.new_empty(dy.shape[0], 1) if 0 in dy.shape else resolve(f"{kernels}:ones")(dy, **launch)
        dtype = bias_dtype or weight.dtype
        dbias = _token_product(kernels, ones, dy, offsets, None, None, dtype, **launch)[:, :, 0]
    return dx, dweight, dbias


def run_dw(
    kernels: str, x: Tensor, dy: Tensor, offsets: Tensor, cu_seqlens: Tensor | None, init: Tensor | None,
    **launch: Any,
) -> Tensor:  # fmt: skip
    cuts, start = (None if t is None else t.contiguous() for t in (cu_seqlens, init))  # read without strides
    return _token_product(kernels, rows(x), rows(dy), offsets, cuts, start, torch.float32, **launch)
