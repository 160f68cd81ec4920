"""Class tree8 on the CPU, in the exact bits of a Hopper GPU. Sums over tokens are those of `model`."""

import torch
from torch import Tensor

from isobit.numerics.trees import tree
from isobit.ops.det_gemm.leaves import why_not_leaves
from isobit.ops.det_gemm.model import ones, product_by, token_product, why_not_token_product

__all__ = ["ones", "product", "token_product", "why_not_product", "why_not_token_product"]


def why_not_product(a: Tensor, b: Tensor) -> str | None:
    return why_not_leaves(a)


def product(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """a [Z, M, K] times b [Z, K, N], plus bias [N], in tree8; or without a Z."""
    return product_by(tree, a, b, bias, out_dtype)
