from isobit.ops.det_grouped_linear.op import det_grouped_dw, det_grouped_linear

__all__ = ["det_grouped_dw", "det_grouped_linear"]
