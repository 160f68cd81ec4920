"""What must be shown of the three products, one file each. They share their inputs (`proof_inputs.py`), the
truth and the errors of their classes (`proof_truth.py`)."""

from isobit.ops.det_gemm.proof_dw import DW
from isobit.ops.det_gemm.proof_gemm import GEMM
from isobit.ops.det_gemm.proof_linear import LINEAR

PROOFS = [GEMM, LINEAR, DW]
