from isobit.ops.det_gemm.op import det_gemm, det_gemm_dw, det_linear

__all__ = ["det_gemm", "det_gemm_dw", "det_linear"]
