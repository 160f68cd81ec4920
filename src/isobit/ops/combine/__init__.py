from isobit.ops.combine.op import combine, spread

__all__ = ["combine", "spread"]
