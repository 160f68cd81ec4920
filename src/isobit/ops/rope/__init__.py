from isobit.ops.rope.op import rope

__all__ = ["rope"]
