"""Chains that are added as a tree: the definition of `tree8`, on the CPU, in the bits of a Hopper GPU."""

from torch import Tensor

from isobit.frame.contract import ContractError, describe
from isobit.numerics.classes import LEAVES
from isobit.numerics.mma import HOPPER, Step, canonical, chain


def tree(a: Tensor, b: Tensor, *, leaves: int = LEAVES, like: Step = HOPPER) -> Tensor:
    """The fp32 product a @ b as eight chains, one for each eighth of k, added as a balanced tree.

    Args:
        a: [M, K], bf16 or fp16, on the CPU, any strides. K is a multiple of 8.
        b: [K, N], of the same dtype.
        leaves: how many there are, if k is that of a rank which has 1, 2 or 4 of the eight.
        like: the constants of a step.

    Returns:
        [M, N] fp32: ((l0 + l1) + (l2 + l3)) + ((l4 + l5) + (l6 + l7)), each addition rounded to nearest even.

    Example:
        >>> import torch
        >>> x = torch.ones(1, 24).bfloat16()
        >>> tree(x, x.t()).item()
        24.0
    """
    K = a.shape[-1]
    if K % leaves:
        rule = f"K must be a multiple of {leaves}, to be cut into as many leaves"
        raise ContractError(f"tree(a: {describe(a)}): {rule}")
    bounds = [(i * K // leaves, (i + 1) * K // leaves) for i in range(leaves)]
    sums = [chain(a[:, first:end], b[first:end], like=like) for first, end in bounds]
    while len(sums) > 1:
        sums = [canonical(one + other) for one, other in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]
