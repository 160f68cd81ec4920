from isobit.ops.attention.op import attention, forward

# Here and not in `op`, whose code counts as that of the kernels: it changes host time and no number.
forward.grows = "isobit.ops.attention.growth:keys"

__all__ = ["attention"]
