"""Grouped products on the CPU, in the exact bits of a Hopper GPU: expert by expert, by the model of
`det_gemm`."""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from isobit.kernels.host.token_stream import SEGMENT
from isobit.numerics import cut, segments
from isobit.ops.det_gemm import model
from isobit.ops.det_gemm.model import with_one_nan


def rows_of(offsets: Tensor, R: int) -> Iterator[tuple[int, int]]:
    """(first row, end) of every expert. As kernels read offsets: from 0 on, clamped, and never descending."""
    later = offsets[1:].cpu().long().clamp(0, R)
    bounds = [0, *(later.cummax(0).values.tolist() if len(later) else [])]
    yield from pairwise(bounds)


def why_not_product(x: Tensor, weight: Tensor) -> str | None:
    return None


def product(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """x [R, K] times weight[e]^T, [N, K] each, plus bias[e], for the rows of each expert."""
    out = torch.zeros(x.shape[0], weight.shape[1], dtype=x.dtype, device=x.device)
    for e, (first, end) in enumerate(rows_of(offsets, len(x))):
        if first < end:
            added = None if bias is None else bias[e]
            out[first:end] = model.product(x[first:end], weight[e].mT, added, x.dtype)
    return out


def why_not_token_product(x: Tensor, dy: Tensor) -> str | None:
    return None


def token_product(
    x: Tensor, dy: Tensor, offsets: Tensor, cu_seqlens: Tensor | None, init: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """dy^T x for the rows of each expert, from init on, in seg16/512, rounded once at the end."""
    out = []
    for e, (first, end) in enumerate(rows_of(offsets, len(x))):
        lengths = [end - first]
        if cu_seqlens is not None:
            inner = cu_seqlens[e].cpu().long().clamp(first, end).cummax(0).values.tolist()
            ends = [*inner[1:-1], end] if len(inner) > 1 else []  # without a sequence no row is of one
            lengths = [b - a for a, b in pairwise([first, *ends])]
        total = segments(
            dy[first:end].cpu().t(), x[first:end].cpu(), cut(lengths, SEGMENT),
            None if init is None else init[e].cpu(),
        )  # fmt: skip
        out.append(with_one_nan(total.to(out_dtype)))
    return torch.stack(out).to(x.device)


def ones(dy: Tensor) -> Tensor:
    return dy.new_ones(len(dy), 1)
