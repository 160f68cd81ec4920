"""Partial sums of ranks, added in the order of the tree: a kernel on a GPU, the definition on a CPU."""

import torch
from torch import Tensor

from isobit.frame.device import triton_cannot_run
from isobit.numerics import canonical


def fold(parts: Tensor, bias: Tensor | None, first: int, columns: int, out_dtype: torch.dtype) -> Tensor:
    """[count] of fp32 parts [1, 2, 4 or 8, count]: ((p0 + p1) + (p2 + p3)) + ..., each addition rounded to
    nearest even, plus the bias, rounded once more to the dtype of the output.

    The parts are a slice of a flattened matrix with `columns` columns, which begins at element `first`; that
    says which element of the bias, [columns], belongs to which sum.
    """
    assert parts.dtype == torch.float32 and parts.stride(1) == 1
    if triton_cannot_run(parts.device) is None:
        from isobit.kernels.triton.tree_fold import fold as by_kernel

        return by_kernel(parts, None if bias is None else bias.contiguous(), first, columns, out_dtype)
    if parts.device.type != "cpu":
        raise RuntimeError(f"isobit: no sum over ranks on {parts.device}: {triton_cannot_run(parts.device)}")
    sums = list(parts.unbind(0))
    while len(sums) > 1:
        sums = [canonical(one + other) for one, other in zip(sums[::2], sums[1::2], strict=True)]
    total = sums[0]
    if bias is not None:
        at = (first + torch.arange(parts.shape[1])) % columns
        total = canonical(total + bias.float()[at])
    out = total.to(out_dtype, copy=True)
    if out_dtype != torch.float32:  # the bit pattern to which a GPU rounds NaN
        out.view(torch.int16).masked_fill_(out.isnan(), 0x7FFF)
    return out
