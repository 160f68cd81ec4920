from isobit.ops.logp import proof as proof
from isobit.ops.logp.op import logp

__all__ = ["logp"]
