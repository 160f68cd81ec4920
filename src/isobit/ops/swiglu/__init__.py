from isobit.ops.swiglu.op import swiglu, swiglu_packed

__all__ = ["swiglu", "swiglu_packed"]
