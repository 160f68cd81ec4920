"""`det_gemm` on the CPU, in the exact bits of a Hopper GPU: the arithmetic model of `isobit.numerics`.

This is the backend for CPU tensors, and the kernels are compared with it. It is exact and slow. It takes GPU
tensors only if it is requested by name; they are copied to the CPU and the result is copied back.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from isobit.frame.caller import warn
from isobit.kernels.host.token_stream import BLOCK, SEGMENT, Stream
from isobit.numerics import canonical, chain, cut, segments


def why_not_product(a: Tensor, b: Tensor) -> str | None:
    return None


def product(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """a [Z, M, K] times b [Z, K, N], plus bias [N], in chain16; or without a Z."""
    return product_by(chain, a, b, bias, out_dtype)


def product_by(
    of_two: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The same by a function that multiplies two matrices."""
    _warn_that_it_is_slow()
    out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=out_dtype, device="cpu")
    for own, left, right in zip(*map(_several, (out, a.cpu(), b.cpu())), strict=True):
        total = of_two(left, right)
        if bias is not None:
            total = canonical(total + bias.cpu().float())
        own.copy_(total)  # rounds to nearest even
    return with_one_nan(out).to(a.device)


def why_not_token_product(x: Tensor, dy: Tensor) -> str | None:
    return None


def token_product(
    x: Tensor, dy: Tensor, stream: Stream | None, init: Tensor | None, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """dy^T x for x [Z, T, K] and dy [Z, T, N], from init [Z, N, K] on, in seg16/512, rounded once at the
    end; or without a Z."""
    _warn_that_it_is_slow()
    out = torch.empty(*x.shape[:-2], dy.shape[-1], x.shape[-1], dtype=out_dtype, device="cpu")
    bounds = cut([x.shape[-2]], SEGMENT)
    if stream is not None:
        first, blocks = (table[: int(stream.count)].tolist() for table in (stream.first, stream.blocks))
        bounds = [(f, f + n * BLOCK) for f, n in zip(first, blocks, strict=True)]
    start = torch.zeros_like(out, dtype=torch.float32) if init is None else init.cpu()
    for own, x_z, dy_z, first_z in zip(*map(_several, (out, x.cpu(), dy.cpu(), start)), strict=True):
        if stream is not None:
            x_z, dy_z = _in_slots(x_z, stream.rows.cpu()), _in_slots(dy_z, stream.rows.cpu())
        own.copy_(segments(dy_z.t(), x_z, bounds, None if init is None else first_z))
    return with_one_nan(out).to(x.device)


def _several(t: Tensor) -> Tensor:
    """[Z, rows, columns], where there may be no Z."""
    return t.unsqueeze(0) if t.ndim == 2 else t


def with_one_nan(out: Tensor) -> Tensor:
    """Sets every NaN of a 16-bit output to the bit pattern to which the GPU rounds NaN."""
    if out.dtype != torch.float32:
        out.view(torch.int16).masked_fill_(out.isnan(), 0x7FFF)
    return out


def _in_slots(x: Tensor, rows: Tensor) -> Tensor:
    """The rows of x in the slots of the stream, with zeros in its gaps."""
    slots = x.new_zeros(len(rows), x.shape[1])
    live = rows >= 0
    slots[live] = x[rows[live].long()]
    return slots


@cache
def _warn_that_it_is_slow() -> None:
    """Warns once per process."""
    warn(
        "isobit: det_gemm, det_linear and det_gemm_dw compute the exact bits of a Hopper GPU on the CPU "
        "here, some 10^8 multiplications a second. That is for checking and for small models; with tensors "
        "on a GPU the kernels serve."
    )


def ones(dy: Tensor) -> Tensor:
    return dy.new_ones(len(dy), 1)
