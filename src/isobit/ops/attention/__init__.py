from isobit.ops.attention.op import attention

__all__ = ["attention"]
