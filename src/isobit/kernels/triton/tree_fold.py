"""The sum of 1, 2, 4 or 8 partial sums as a balanced tree, a bias, and one rounding."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.triton.interpreter import narrow

BLOCK = 1024


@triton.jit
def _subtree(parts, at, inside, stride, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The sum of COUNT parts from FIRST on."""
    if COUNT == 1:
        return tl.load(parts + tl.full([], FIRST, tl.int64) * stride + at, mask=inside, other=0.0)
    else:
        left = _subtree(parts, at, inside, stride, FIRST, COUNT // 2)
        return left + _subtree(parts, at, inside, stride, FIRST + COUNT // 2, COUNT // 2)


@triton.jit(do_not_specialize=["count", "stride", "first"])
def fold_slice(
    parts, bias, out, count, stride, first, columns, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out[i] = the sum of parts[:, i], plus the bias of column (first + i) % columns."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = _subtree(parts, at, inside, stride, 0, PARTS)
    if bias is not None:
        total += tl.load(bias + (first + at) % columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, narrow(total, out), mask=inside)


def fold(
    parts: Tensor, bias: Tensor | None, first: int, columns: int, out_dtype: torch.dtype, launch: Launch = run
) -> Tensor:
    """[count] of parts [ranks, count]."""
    count = parts.shape[1]
    out = torch.empty(count, dtype=out_dtype, device=parts.device)
    launch(
        fold_slice, (triton.cdiv(count, BLOCK),), parts, bias, out, count, parts.stride(0), first, columns,
        PARTS=len(parts), BLOCK=BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    return out
