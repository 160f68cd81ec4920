"""Error bounds of sums of products in the classes chain16, tree8 and seg16/512.

One step of chain16 takes 16 products and the running sum P. Each of the 17 terms is truncated to 25 bits
below the largest exponent among them, which loses less than 2^-25 of the largest term, and the sum is
truncated to fp32, which loses less than 2^-23 of it. With S the sum of the absolute values of the 16
products, the error of a step is below

    2^-23 * (17/4 * max(|P|, S) + |P after the step|)

and that of a chain is the sum over its steps: `chain_error`, in units of 2^-23. It is a bound of the class,
not a tolerance: it follows the partial sums of each output, it grows with K because truncation does, and
nothing in it was fitted. A sum of several chains adds their errors and half a unit of every sum of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from isobit.kernels.host.token_stream import SEGMENT
from isobit.numerics import LEAVES, cut

__all__ = [
    "SEGMENT",
    "UNIT",
    "chain_error",
    "cut",
    "narrow_dtype",
    "rounded",
    "rounded_factor",
    "segment_error",
    "tree_error",
]

GROUP = 16
UNIT = 2.0**-23

#: The bound is computed along the exact partial sums; those of the chain differ from them by the bound
#: itself.
SECOND_ORDER = 1.01

#: Products are aligned no lower than 2^-133: the minimum loss of a step, in units.
LEAST = 17 / 4 * 2.0**-133


def chain_error(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(bound on the error of a b in chain16 in units of 2^-23, a b) for fp64 a [*, M, K] and b [*, K, N]."""
    total = a.new_zeros(*a.shape[:-1], b.shape[-1])
    error = torch.zeros_like(total)
    for a_k, b_k in zip(a.split(GROUP, -1), b.split(GROUP, -2), strict=True):
        sizes = a_k.abs() @ b_k.abs()
        error += 17 / 4 * torch.maximum(total.abs(), sizes) + LEAST
        total += a_k @ b_k
        error += total.abs()
    return SECOND_ORDER * error, total


def tree_error(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The same for a b in tree8."""
    leaf = a.shape[-1] // LEAVES
    if leaf == 0:
        return chain_error(a, b)
    nodes = [chain_error(*leaves) for leaves in zip(a.split(leaf, -1), b.split(leaf, -2), strict=True)]
    while len(nodes) > 1:
        pairs = zip(nodes[::2], nodes[1::2], strict=True)
        nodes = [
            (one + other + SECOND_ORDER / 2 * (left + right).abs(), left + right)
            for (one, left), (other, right) in pairs
        ]
    return nodes[0]


def segment_error(a: Tensor, b: Tensor, bounds: Sequence[tuple[int, int]], init: Tensor | None) -> Tensor:
    """The same for init + a b in seg16/512, with these segments of k."""
    total = a.new_zeros(*a.shape[:-1], b.shape[-1]) if init is None else init.clone()
    error = torch.zeros_like(total)
    for first, end in bounds:
        one, part = chain_error(a[..., first:end], b[..., first:end, :])
        total += part
        error += one + SECOND_ORDER / 2 * total.abs()
    return error


def rounded(error: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The bound after rounding to a 16-bit dtype. If a sum with an error of d rounds to another neighbour
    than the truth, it is at most 2d farther from the truth than that neighbour."""
    return error if dtype == torch.float32 else 2 * error


def rounded_factor(dy: Tensor, other: Tensor, dtype: torch.dtype | None) -> Tensor:
    """What rounding a cotangent to the operands' dtype may add to the error of a product with it, in
    units."""
    assert dtype is not None
    return torch.finfo(dtype).eps / 2 / UNIT * (dy.abs() @ other.abs())


def narrow_dtype(*factors: Tensor) -> torch.dtype | None:
    """The 16-bit dtype that these fp64 factors came from, or None if a wider one is needed."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(bool(((t.to(dtype).double() == t) | t.isnan()).all()) for t in factors):
            return dtype
    return None
