"""Triton's CPU interpreter without work that it repeats: the same results in a third of the time.

Three things take most of the time of a small kernel there, and none of them is the kernel:

the language    patched anew for every launch and for every call of a device function, by going through all
                members of its modules. Here: found once, put in place for a launch, and taken back after it.
dtypes          a table of NumPy's is built for every value. Here: once.
overflow        every sum and product of integers is computed again in int64 and compared with the range, for
                an assertion that is made in debug mode alone. Here: in debug mode alone.

All of it is private to Triton. Where a release has no function of that name, its own way stays; a test tells.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from isobit.blocks.devices import triton_is_interpreted

#: What is replaced here: who has it, under which name.
REPLACED: tuple[tuple[Any, str], ...] = (
    (interpreter, "_patch_lang"),
    (interpreter, "_get_np_dtype"),
    (TritonSemantic, "binary_op_sanitize_overflow_impl"),
)


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Kernels that are interpreted inside are interpreted sooner. Where they are compiled it does nothing."""
    if not triton_is_interpreted():
        yield
        return
    ways = (_language_patched_once, _dtypes_looked_up, _overflow_when_it_is_said)
    with ExitStack() as taken_back:
        for (owner, name), way in zip(REPLACED, ways, strict=True):
            own = getattr(owner, name, None)
            if own is not None:
                setattr(owner, name, way(own))
                taken_back.callback(setattr, owner, name, own)
        yield


# The language


class _Nothing:
    """A scope inside another: all is in place, and the outer one takes it back."""

    def restore(self) -> None:
        pass


class _Language:
    """The attributes of the language that the interpreter replaces, as (owner, name, plain, interpreted)."""

    def __init__(self, own: Callable[[Any], Any]) -> None:
        # Device functions see the language as `tl`, those of Triton itself as `core`: one that sees both.
        scope = own(FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
        # Where something is replaced twice, what was there before both is the plain one.
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

    def found(ty: Any) -> Any:
        scalar = ty.element_ty if isinstance(ty, tl.block_type) else ty
        name = "pointer" if isinstance(scalar, tl.pointer_type) else scalar.name
        if name not in known:
            known[name] = own(ty)
        return known[name]

    return found


# Overflow


def _overflow_when_it_is_said(own: Callable[..., None]) -> Callable[..., None]:
    def judged(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            own(self, lhs, rhs, binary_op)

    return judged
