"""Class tree8 in portable Triton: the functions of a backend, of which sums over tokens are those of
`kernels_triton`."""

from torch import Tensor

from isobit.numerics import LEAVES
from isobit.ops.det_gemm.kernels_triton import ones, token_product, why_not_token_product
from isobit.ops.det_gemm.kernels_triton import tree_product as product
from isobit.ops.det_gemm.leaves import why_not_leaves

__all__ = ["ones", "product", "token_product", "why_not_product", "why_not_token_product"]


def why_not_product(a: Tensor, b: Tensor, leaves: int = LEAVES) -> str | None:
    return why_not_leaves(a, leaves)
