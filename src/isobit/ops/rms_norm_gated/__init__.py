from isobit.ops.rms_norm_gated.op import rms_norm_gated

__all__ = ["rms_norm_gated"]
