"""Proofs of the three products, one file each. They share their inputs (`inputs.py`), the truth and the error
bounds of their classes (`truth.py`)."""

from isobit.ops.det_gemm.proof.dw import DW
from isobit.ops.det_gemm.proof.gemm import GEMM
from isobit.ops.det_gemm.proof.linear import LINEAR

PROOFS = [GEMM, LINEAR, DW]
