"""`det_gemm` on the CPU, in the exact bits of a Hopper GPU: the arithmetic model of `isobit.numerics`.

This is what serves CPU tensors, and what the kernels are compared with. It is exact and slow. Tensors on a
GPU are served only where it is asked for by name; they are copied to the CPU and the result is copied back.
"""

from functools import cache

import torch
from torch import Tensor

from isobit.blocks.stream import BLOCK, SEGMENT, Stream
from isobit.caller import warn
from isobit.numerics import canonical, chain, cut, segments


def why_not_product(a: Tensor, b: Tensor) -> str | None:
    return None


def product(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """a [Z, M, K] times b [Z, K, N], plus bias [N], in chain16; or without a Z."""
    _say_that_it_is_slow()
    if a.ndim == 2:
        return product(a[None], b[None], bias, out_dtype)[0]
    out = torch.empty(*a.shape[:2], b.shape[2], dtype=out_dtype, device="cpu")
    for z, (a_z, b_z) in enumerate(zip(a.cpu(), b.cpu(), strict=True)):
        total = chain(a_z, b_z)
        if bias is not None:
            total = canonical(total + bias.cpu().float())
        out[z] = total  # rounds to nearest even
    return _with_one_nan(out).to(a.device)


def why_not_token_product(x: Tensor, dy: Tensor) -> str | None:
    return None


def token_product(
    x: Tensor, dy: Tensor, stream: Stream | None, init: Tensor | None, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """dy^T x for x [Z, T, K] and dy [Z, T, N], from init [Z, N, K] on, in seg16/512, rounded once at the
    end; or without a Z."""
    _say_that_it_is_slow()
    if x.ndim == 2:
        return token_product(x[None], dy[None], stream, None if init is None else init[None], out_dtype)[0]
    out = torch.empty(x.shape[0], dy.shape[2], x.shape[2], dtype=out_dtype, device="cpu")
    bounds = cut([x.shape[1]], SEGMENT)
    if stream is not None:
        first, blocks = (table[: int(stream.count)].tolist() for table in (stream.first, stream.blocks))
        bounds = [(f, f + n * BLOCK) for f, n in zip(first, blocks, strict=True)]
    for z, (x_z, dy_z) in enumerate(zip(x.cpu(), dy.cpu(), strict=True)):
        if stream is not None:
            x_z, dy_z = _in_slots(x_z, stream.rows.cpu()), _in_slots(dy_z, stream.rows.cpu())
        out[z] = segments(dy_z.t(), x_z, bounds, None if init is None else init[z].cpu())
    return _with_one_nan(out).to(x.device)


def _with_one_nan(out: Tensor) -> Tensor:
    """What was rounded to 16 bits, with the one NaN that the GPU rounds to."""
    if out.dtype != torch.float32:
        out.view(torch.int16).masked_fill_(out.isnan(), 0x7FFF)
    return out


def _in_slots(x: Tensor, rows: Tensor) -> Tensor:
    """The rows of x where the stream has them, zeros in its holes."""
    slots = x.new_zeros(len(rows), x.shape[1])
    live = rows >= 0
    slots[live] = x[rows[live].long()]
    return slots


@cache
def _say_that_it_is_slow() -> None:
    """Once in a process."""
    warn(
        "isobit: det_gemm, det_linear and det_gemm_dw compute the exact bits of a Hopper GPU on the CPU "
        "here, some 10^8 multiplications a second. That is for checking and for small models; with tensors "
        "on a GPU the kernels serve."
    )


def ones(dy: Tensor) -> Tensor:
    return dy.new_ones(len(dy), 1)
