from isobit.ops.linear_logp.op import linear_logp

__all__ = ["linear_logp"]
