from isobit.ops.det_gemm.op import det_gemm, det_gemm_dw, det_linear, gemm, gemm_bwd

# Here and not in `op`, whose code counts as that of the kernels: it changes host time and no number.
gemm.grows = gemm_bwd.grows = "isobit.frame.family:matrices"

__all__ = ["det_gemm", "det_gemm_dw", "det_linear"]
