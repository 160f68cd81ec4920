"""Operators of tensors in Triton's CPU interpreter, without the way to NumPy: a sum of two tensors passes
a dozen functions before it is called. For operands of one plain dtype, and for plain numbers, it is called at
once here. The result is that of Triton, to the order of its elements in memory. `interpreter` puts these
operators in place."""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

#: Numbers and types that are kept of a kind. Loops have others in every step.
KEPT = 2000

#: Those that are a function of NumPy if both operands are of one of these dtypes. Others are not what NumPy
#: holds, as bf16, or have rules of their own.
ARITHMETIC = {"__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply}
COMPARISONS = {"__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater, "__ge__": np.greater_equal}
LOGIC = {"__and__": np.bitwise_and, "__or__": np.bitwise_or}
NUMBERS, TRUTHS = frozenset({"int32", "int64", "fp32"}), frozenset({"int1"})
OFFSETS = frozenset({"int32", "int64"})

Operator = Callable[..., Any]


def quick_operator(owner: Any, name: str, own: Operator) -> Operator:
    """An operator of tensors that calls NumPy where nothing else is to be done, and `own` elsewhere."""
    function = (ARITHMETIC | COMPARISONS | LOGIC).get(name)
    if owner is not tl.tensor or function is None:
        return own
    dtypes, compares = TRUTHS if name in LOGIC else NUMBERS, name in COMPARISONS
    builder, constants = interpreter.interpreter_builder, dict[tuple[Any, ...], Any]()
    common = _common_types()

    def called(self: Any, other: Any, **kwargs: Any) -> Any:
        dtype, kind, ty, left, right = self.dtype, type(other), self.type, self.handle.data, None
        if dtype.name in dtypes and not builder.options.debug:  # which looks for overflows
            if kind is tl.tensor:
                if other.dtype.name == dtype.name:
                    right = other.handle.data
                    if ty.name != other.type.name:
                        ty = common(ty, left, other.type, right)
            elif kind is int or kind is float:
                key = (kind, other, dtype.name)
                if key not in constants:
                    if len(constants) >= KEPT:
                        constants.clear()
                    constants[key] = _constant(other, dtype)
                right = constants[key]
                if not left.flags.c_contiguous:  # as below
                    ty = None
            if right is not None and ty is not None and left.dtype == right.dtype:
                handle = interpreter.TensorHandle(function(left, right), dtype)
                return tl.tensor(handle, ty.with_element_ty(tl.int1) if compares else ty)
        return own(self, other, **kwargs)

    return _with_offsets(called) if name == "__add__" else called


def _common_types() -> Callable[[Any, Any, Any, Any], Any]:
    """The type of an operation on values of one dtype. None if Triton would not broadcast as NumPy does, or
    would change the order of elements in memory, and so that of a sum over them."""
    known: dict[tuple[str, str], Any] = {}

    def common(one: Any, left: Any, other: Any, right: Any) -> Any:
        if not other.is_block():
            return one if left.flags.c_contiguous else None
        if not one.is_block():
            return other if right.flags.c_contiguous else None
        key = (one.name, other.name)
        if key not in known:
            ours, theirs = [*one.shape], [*other.shape]
            pairs = [*zip(ours, theirs, strict=False)]
            fit = len(ours) == len(theirs) and all(n == m or 1 in (n, m) for n, m in pairs)
            known[key] = tl.block_type(one.element_ty, [max(pair) for pair in pairs]) if fit else None
        return known[key]

    return common


def _constant(number: Any, dtype: Any) -> Any:
    """What Triton makes of a number next to a tensor of a dtype, if that is plain. Of zero there are two."""
    if type(number) is int and abs(number) < 2**24:
        made = np.array([number], interpreter._get_np_dtype(dtype))
    elif type(number) is float and dtype.name == "fp32" and 1e-30 < abs(number) < 1e30:
        made = np.array([number], np.float32)
    else:
        return None
    made.setflags(write=False)
    return made


def _with_offsets(own: Operator) -> Operator:
    """Addition, also of integers to pointers."""
    builder = interpreter.interpreter_builder

    def added(self: Any, other: Any, **kwargs: Any) -> Any:
        pointer = self.dtype
        if type(pointer) is tl.pointer_type and type(other) is tl.tensor and other.dtype.name in OFFSETS:
            ty, offsets = self.type, other.type
            if not ty.is_block():
                ty = offsets.with_element_ty(pointer)
            elif offsets.is_block() and [*ty.shape] != [*offsets.shape]:
                return own(self, other, **kwargs)
            return tl.tensor(builder.create_addptr(self.handle, other.handle), ty)
        return own(self, other, **kwargs)

    return added
