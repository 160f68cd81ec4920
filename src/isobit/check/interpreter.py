"""Triton's CPU interpreter without its repeated work: the same results in a fraction of the time.

Most of the time of a small kernel there is not spent in the kernel:

the language    is patched again for every launch and for every call of a device function, by going through
                all members of its modules. Here: found once, patched for a launch, and restored after it.
                dtypes          a table of NumPy's is built for every value, and the promotion of two dtypes
                is computed for every operation. Here: once. shapes          are unwrapped, checked, wrapped
                again and formatted for every value. Here: once for every shape; and values of one shape are
                not broadcast to it. bfloat16        is split into sign, exponent and significand, and put
                together again. Here: shifted by 16 bits, which is the same unless there is a subnormal.
                overflow        every sum and product of integers is computed again in int64 and compared with
                the range, for an assertion that exists only in debug mode. Here: only in debug mode.

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
)


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Makes interpreted kernels faster inside this context. Does nothing where kernels are compiled."""
    if not triton_is_interpreted():
        yield
        return
    ways = (
        _language_patched_once, _dtypes_looked_up, _promotions_known, _block_types_known, _tensors_known,
        _plain_values_as_they_are, _one_shape_as_it_is, _bfloat16_shifted, _overflow_when_it_is_said,
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
        self.attributes = [(o, n, plain, getattr(o, n)) for o, n, plain in first.values()]
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
            vars(self).update(known[key])
            self.element_ty = element_ty

    return made


def _tensors_known(own: Callable[..., None]) -> Callable[..., None]:
    known: dict[str, dict[str, Any]] = {}

    def made(self: Any, handle: Any, type: Any) -> None:
        attributes = known.get(type.name)
        if attributes is None:
            own(self, handle, type)
            known[type.name] = dict(vars(self))
        else:
            vars(self).update(attributes)
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


def _one_shape_as_it_is(own: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and [*left.shape] == [*right.shape]:
            return lhs, rhs
        return own(self, lhs, rhs)

    return broadcast


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
