from isobit.ops.logp.op import logp

__all__ = ["logp"]
