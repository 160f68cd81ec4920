from isobit.ops.ratio_kl.op import ratio_kl

__all__ = ["ratio_kl"]
