from isobit.ops.delta_gates.op import delta_gates

__all__ = ["delta_gates"]
