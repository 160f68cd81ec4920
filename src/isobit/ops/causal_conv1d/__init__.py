from isobit.ops.causal_conv1d.op import causal_conv1d
from isobit.ops.causal_conv1d.update_op import causal_conv1d_update

__all__ = ["causal_conv1d", "causal_conv1d_update"]
