"""Class tree8 on the CPU, in the exact bits of a Hopper GPU. Sums over tokens are those of `model`."""

from functools import partial

import torch
from torch import Tensor

from isobit.numerics import LEAVES
from isobit.numerics.trees import tree
from isobit.ops.det_gemm.leaves import why_not_leaves
from isobit.ops.det_gemm.model import ones, product_by, token_product, why_not_token_product

__all__ = ["ones", "product", "token_product", "why_not_product", "why_not_token_product"]


def why_not_product(a: Tensor, b: Tensor, leaves: int = LEAVES) -> str | None:
    return why_not_leaves(a, leaves)


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, leaves: int = LEAVES
) -> Tensor:
    """a [Z, M, K] times b [Z, K, N], plus bias [N], in tree8; or without a Z. K is that of some `leaves` of
    the tree."""
    return product_by(partial(tree, leaves=leaves), a, b, bias, out_dtype)
