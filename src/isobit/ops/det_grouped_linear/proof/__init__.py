"""Proofs of the products of experts, one file each. They share inputs (`inputs.py`) and what moves rows and
experts about (`plans.py`); truth and error bounds are those of `det_gemm`."""

from isobit.ops.det_grouped_linear.proof.dw import DW
from isobit.ops.det_grouped_linear.proof.linear import LINEAR

PROOFS = [LINEAR, DW]
