"""Triton's CPU interpreter without its repeated work: the same results in a fraction of the time.

Most of the time of a small kernel there is not spent in the kernel.

- The language is patched again for every launch and for every call of a device function, by going through all
  members of its modules. Here: found once, patched for a launch, and restored after it. A call of one of its
  functions goes through two wrappers, which look for an argument of the compiler. Here: through one.
- Dtypes: a table of NumPy's is built for every value, the promotion of two dtypes is computed for every
  operation, and the size of every result is compared with its dtype's. Here: once for each dtype.
- Shapes are unwrapped, checked, wrapped again and formatted for every value. Here: once for every shape; and
  values of one shape are not broadcast to it, and others are by strides.
- Operands: those of one dtype are checked and cast for nothing, and those of one type broadcast. Here: they
  are not. A number is made a tensor, then one of the other operand's dtype, then of its shape. Here: once
  for every number and type.
- Operators: a sum of two tensors goes through a dozen functions before NumPy is called. Here: through one, if
  both are of the same plain dtype, or one is a plain number.
- Objects: the constructor of every value checks it, and a new dimension of one goes through NumPy's checks of
  axes. Here: checked once for every dtype.
- bfloat16 is split into sign, exponent and significand, and put together again. Here: shifted by 16 bits,
  which is the same unless there is a subnormal.
- Overflow: every sum and product of integers is computed again in int64 and compared with the range, for an
  assertion that exists only in debug mode. Here: only in debug mode.

All of this is private to Triton. If a release has no function of that name, its own code is used; a test
notices.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from isobit.check.interpreted_operators import KEPT, quick_operator
from isobit.frame.device import triton_is_interpreted

#: What is replaced here: owner and name.
REPLACED: tuple[tuple[Any, str], ...] = (
    (interpreter, "_patch_lang"),
    (interpreter, "_get_np_dtype"),
    (TritonSemantic, "computation_type_impl"),
    (tl.block_type, "__init__"),
    (tl.tensor, "__init__"),
    (tl.core, "_unwrap_if_constexpr"),
    (TritonSemantic, "broadcast_impl_value"),
    (interpreter, "_convert_float"),
    (TritonSemantic, "binary_op_sanitize_overflow_impl"),
    (TritonSemantic, "binary_op_type_checking_impl"),
    (TritonSemantic, "cast"),
    (interpreter, "_validate_np_data_size"),
    (interpreter.TensorHandle, "__init__"),
    (tl.block_type, "with_element_ty"),
    (TritonSemantic, "scalar_constant"),
    (interpreter.InterpreterBuilder, "create_expand_dims"),
)


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Makes interpreted kernels faster inside this context. Does nothing where kernels are compiled."""
    if not triton_is_interpreted():
        yield
        return
    ways: tuple[Callable[[Any], Any], ...] = (
        _language_patched_once, _dtypes_looked_up, _promotions_known, _block_types_known, _tensors_known,
        _plain_values_as_they_are, _shapes_fitted, _bfloat16_shifted, _overflow_when_it_is_said,
        _operands_of_one_type_as_they_are, _one_dtype_as_it_is, _sizes_known, _handles_known,
        _element_types_known, _constants_known, _dimensions_added,
    )  # fmt: skip
    with ExitStack() as taken_back:
        for (owner, name), way in zip(REPLACED, ways, strict=True):
            own = getattr(owner, name, None)
            if own is not None:
                setattr(owner, name, way(own))
                taken_back.callback(setattr, owner, name, own)
        yield


# The language


class _Nothing:
    """A nested scope: everything is patched already, and the outer scope restores it."""

    def restore(self) -> None:
        pass


class _Language:
    """The attributes of the language that the interpreter replaces, as (owner, name, plain, interpreted)."""

    def __init__(self, own: Callable[[Any], Any]) -> None:
        # Device functions see the language as `tl`, those of Triton itself as `core`; this function sees
        # both.
        scope = own(FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
        # If something is patched twice, the original is what was there before both.
        first: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for owner, name, plain in scope._changes:
            first.setdefault((id(owner), name), (owner, name, plain))
        self.attributes = [
            (o, n, plain, quick_operator(o, n, _with_semantic(plain, getattr(o, n))))
            for o, n, plain in first.values()
        ]
        scope.restore()
        self.there = False

    def put(self) -> "_Language | _Nothing":
        if self.there:
            return _Nothing()
        for owner, name, _, interpreted in self.attributes:
            setattr(owner, name, interpreted)
        self.there = True
        return self

    def restore(self) -> None:
        for owner, name, plain, _ in self.attributes:
            if plain is interpreter._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, plain)
        self.there = False


def _with_semantic(plain: Any, interpreted: Any) -> Any:
    """A function of the language that is given the interpreter's semantics, without the wrapper that looks
    whether it was given some. What the interpreter replaces by code of its own stays as it is."""
    inner = getattr(plain, "__wrapped__", None)
    own = getattr(interpreted, "__kwdefaults__", None) or {}
    if not tl.core.is_builtin(plain) or inner is None or own.get("member") is not plain:
        return interpreted
    semantic = interpreter.interpreter_semantic

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    return called


def _language_patched_once(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    language = _Language(own)
    return lambda function: language.put()


# Dtypes


def _dtypes_looked_up(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def known_type(ty: Any) -> Any:
        scalar = ty.element_ty if isinstance(ty, tl.block_type) else ty
        name = "pointer" if isinstance(scalar, tl.pointer_type) else scalar.name
        if name not in known:
            known[name] = own(ty)
        return known[name]

    return known_type


def _promotions_known(own: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[Any, ...], Any] = {}

    def promoted(
        self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool
    ) -> Any:
        key = (a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod)
        if key not in known:
            known[key] = own(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return known[key]

    return promoted


#: Conversions that are NumPy's.
CONVERSIONS = frozenset(
    (source, target) for source, targets in {
        "int1": ("int32", "int64", "fp32"), "int32": ("int64", "fp32"), "int64": ("int32", "fp32"),
    }.items() for target in targets
)  # fmt: skip


def _one_dtype_as_it_is(own: Callable[..., Any]) -> Callable[..., Any]:
    def cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:
        source, target = input.type, dst_ty.scalar
        if source.scalar is target:
            return input
        names = (source.scalar.name, target.name)
        if fp_downcast_rounding is None and (names in CONVERSIONS or names == ("bf16", "fp32")):
            values, dtype = input.handle.data, interpreter._get_np_dtype(target)
            if names[0] == "bf16":
                values = interpreter._convert_float(values, source.scalar, target, None).view(dtype)
            else:
                values = values.astype(dtype)
            made = interpreter.TensorHandle(values, target)
            return tl.tensor(made, source.with_element_ty(target) if source.is_block() else target)
        return own(self, input, dst_ty, fp_downcast_rounding)

    return cast


def _sizes_known(own: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    known: dict[tuple[str, int], bool] = {}

    def fits(np_array: Any, tl_dtype: Any) -> bool:
        key = (tl_dtype.name, np_array.itemsize)
        if key not in known:
            known[key] = own(np_array, tl_dtype)
        return known[key]

    return fits


def _handles_known(own: Callable[..., None]) -> Callable[..., None]:
    known: set[tuple[str, int]] = set()

    def made(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        key = (dtype.name, data.itemsize)
        if attr is None and key in known:
            self.data, self.dtype, self.attr = data, dtype, {}
        else:
            own(self, data, dtype, *(() if attr is None else (attr,)))
            known.add(key)

    return made


# Shapes. What Triton's own function returns for a shape is cached, whatever it is.


def _block_types_known(own: Callable[..., None]) -> Callable[..., None]:
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def made(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [s.value if type(s) is tl.constexpr else s for s in shape]
        if {*map(type, sizes)} != {int}:  # an error, or a type of another release
            own(self, element_ty, shape)
            return
        key = (element_ty.name, *sizes)
        if key not in known:
            own(self, element_ty, shape)
            known[key] = dict(vars(self))
        else:
            self.__dict__ = known[key].copy()
            self.element_ty = element_ty

    return made


def _element_types_known(own: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    known: dict[tuple[Any, ...], Any] = {}

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        key = (self.name, id(scalar_ty))  # which a type that is kept has forever
        if key not in known:
            if len(known) >= KEPT:
                known.clear()
            known[key] = own(self, scalar_ty)
        return known[key]

    return with_element_ty


def _tensors_known(own: Callable[..., None]) -> Callable[..., None]:
    known: dict[str, dict[str, Any]] = {}

    def made(self: Any, handle: Any, type: Any) -> None:
        attributes = known.get(type.name)
        if attributes is None:
            own(self, handle, type)
            known[type.name] = dict(vars(self))
        else:
            self.__dict__ = attributes.copy()
            self.handle, self.type, self.dtype = handle, type, type.scalar

    return made


def _plain_values_as_they_are(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    plain = frozenset({int, float, bool, str, type(None), tl.tensor, tl.dtype})

    def unwrapped(o: Any) -> Any:
        kind = type(o)
        if kind in plain:
            return o
        return o.value if kind is tl.constexpr else own(o)

    return unwrapped


def _shapes_fitted(own: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if not left.is_block():
            return (_splat(lhs, right), rhs) if right.is_block() else (lhs, rhs)
        if not right.is_block():
            return lhs, _splat(rhs, left)
        ours, theirs = left.shape, right.shape
        if [*ours] == [*theirs]:
            return lhs, rhs
        if len(ours) == len(theirs):
            if all(n == m or m == 1 for n, m in zip(ours, theirs, strict=True)):
                return lhs, _stretched(rhs, left)
            if all(n == m or n == 1 for n, m in zip(ours, theirs, strict=True)):
                return _stretched(lhs, right), rhs
        return own(self, lhs, rhs)

    return broadcast


def _dimensions_added(own: Callable[..., Any]) -> Callable[..., Any]:
    def expanded(self: Any, arg: Any, axis: Any) -> Any:
        if type(axis) is not int or not 0 <= axis <= arg.data.ndim:
            return own(self, arg, axis)
        return interpreter.TensorHandle(arg.data[(slice(None),) * axis + (None,)], arg.dtype.scalar)

    return expanded


def _splat(scalar: Any, like: Any) -> Any:
    """A scalar in the shape of a type."""
    data, dtype = scalar.handle.data, scalar.handle.dtype
    values = np.empty(like.shape, data.dtype)
    values[...] = data
    return tl.tensor(interpreter.TensorHandle(values, dtype), like.with_element_ty(scalar.type))


def _stretched(value: Any, like: Any) -> Any:
    """A value in the shape of a type, by strides of zero."""
    data = value.handle.data
    strides = [0 if n == 1 else stride for n, stride in zip(data.shape, data.strides, strict=True)]
    if data.flags.c_contiguous and data.size:
        wide = np.ndarray((*like.shape,), data.dtype, data, 0, strides)
    else:
        wide = np.broadcast_to(data, (*like.shape,))
    return tl.tensor(interpreter.TensorHandle(wide, value.handle.dtype), like.with_element_ty(value.dtype))


# Operands


def _operands_of_one_type_as_they_are(own: Callable[..., Any]) -> Callable[..., Any]:
    numbers: dict[tuple[Any, ...], tuple[Any, Any]] = {}  # the values of a number as a tensor, and its type

    def operands(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        flags = (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        left, right = type(lhs), type(rhs)
        if left is right is tl.tensor:
            # Division changes dtypes, and pointers may not be allowed.
            if lhs.dtype.name == rhs.dtype.name and not div_or_mod and not lhs.dtype.is_ptr():
                return (lhs, rhs) if lhs.type.name == rhs.type.name else self.broadcast_impl_value(lhs, rhs)
            return own(self, lhs, rhs, *flags)
        if left is tl.tensor and right in (int, float):
            block, number = lhs, rhs
        elif right is tl.tensor and left in (int, float):
            block, number = rhs, lhs
        else:
            return own(self, lhs, rhs, *flags)
        key = (type(number), number, block is lhs, block.type.name, flags)
        if key in numbers:
            data, ty = numbers[key]
            made = tl.tensor(interpreter.TensorHandle(data, ty.scalar), ty)
            return (lhs, made) if block is lhs else (made, rhs)
        both = own(self, lhs, rhs, *flags)
        same, made = both if block is lhs else reversed(both)
        # Of numbers that are equal only 0.0 and -0.0 differ.
        if same is block and (number != 0 or type(number) is int):
            if len(numbers) >= KEPT:
                numbers.clear()
            made.handle.data.setflags(write=False)  # it is shared from now on
            numbers[key] = made.handle.data, made.type
        return both

    return operands


def _constants_known(own: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[Any, ...], Any] = {}

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        kind = type(value)
        if (kind is not int and kind is not float) or value == 0:  # 0.0 and -0.0 are equal
            return own(self, value, dtype)
        key = (kind, value, dtype.name)
        data = known.get(key)
        if data is None:
            made = own(self, value, dtype)
            if len(known) >= KEPT:
                known.clear()
            made.handle.data.setflags(write=False)  # it is shared from now on
            known[key] = made.handle.data
            return made
        return tl.tensor(interpreter.TensorHandle(data, dtype), dtype)

    return constant


# Conversions


def _bfloat16_shifted(own: Callable[..., Any]) -> Callable[..., Any]:
    def converted(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        narrow, wide = np.dtype(np.uint16), np.dtype(np.uint32)
        names = (input_dtype.name, output_dtype.name)
        if rounding_mode is None and names == ("bf16", "fp32"):
            bits = np.ascontiguousarray(input).view(narrow)
            # 0 wraps around: values below 0x7F are subnormal.
            if not (((bits & narrow.type(0x7FFF)) - narrow.type(1)) < 0x7F).any():
                return (bits.astype(wide) << wide.type(16)).reshape(input.shape)
        if rounding_mode is None and names == ("fp32", "bf16"):
            bits = np.ascontiguousarray(input).view(wide)
            if not (((bits & wide.type(0x7FFFFFFF)) - wide.type(1)) < 0x7FFFFF).any():
                return (bits >> wide.type(16)).astype(narrow).reshape(input.shape)
        return own(input, input_dtype, output_dtype, rounding_mode)

    return converted


# Overflow


def _overflow_when_it_is_said(own: Callable[..., None]) -> Callable[..., None]:
    def judged(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            own(self, lhs, rhs, binary_op)

    return judged
