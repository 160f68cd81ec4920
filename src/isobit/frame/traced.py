"""Sizes that vary between calls, as formulas: what a launcher computes from them, and what it decides.

A launcher is run once on tensors without memory (`Traced`), some of whose sizes are variables (`Size`). Every
sum, product or quotient of these becomes a line of a function. Every comparison is answered for the sizes of
this call, and the answer becomes a condition of the function. What the launcher passes to its kernels is then
a function of the sizes, exact for all sizes that meet the conditions: the lines are the launcher's own
arithmetic, in the same integers.

This is safe because a `Size` is not an integer. It has no hash, so it is no key of a table, and where C code
takes its value the trace is void, except in `torch.empty`. Whatever is neither arithmetic on integers nor an
allocation or a view is an error, and then the launcher has no such function.
"""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from isobit.frame.cache_key import CacheKey, remember

Decision = TypeVar("Decision", bound=Callable[..., Any])

#: (name of an argument that is a tensor, all arguments, the sizes that vary) -> its shape and its strides.
ShapeOf = Callable[[str, dict[str, Any], Sequence[Any]], tuple[Sequence[Any], Sequence[Any]]]


class UntraceableError(Exception):
    """A launcher does something that is no arithmetic on sizes."""


class Trace:
    """The lines of a function of `count` sizes, `n0`, `n1` and so on."""

    def __init__(self, values: Sequence[int]) -> None:
        self.sizes = [Size(self, f"n{i}", value) for i, value in enumerate(values)]
        self._lines: list[str] = []
        self._names: dict[str, Size] = {}  # by formula: the same one is computed once
        self._conditions: set[str] = set()
        self._objects: dict[str, Any] = {}  # what the lines name, other than sizes
        #: Where C code has taken the value of a size: (frame, instruction).
        self.taken: list[tuple[int, int]] = []

    def formula(self, text: str, value: int) -> "Size":
        known = self._names.get(text)
        if known is None:
            known = self._names[text] = Size(self, f"t{len(self._names)}", value)
            self._lines.append(f"{known.name} = {text}")
        return known

    def condition(self, text: str, holds: bool) -> bool:
        """The answer to a question about sizes; the function is only for those with the same answer."""
        if text not in self._conditions:
            self._conditions.add(text)
            self._lines.append(f"if {'not ' if holds else ''}({text}): return None")
        return holds

    def pinned(self, size: "Size") -> int:
        """The value of a size, which all sizes that the function is for must then have."""
        self.condition(_pin(size), True)
        return size.value

    def named(self, value: Any) -> str:
        """The name of any other object in the lines."""
        name = f"k{len(self._objects)}"
        self._objects[name] = value
        return name

    def function(self, result: Any) -> Callable[..., Any]:
        """From sizes to the result, with the values that they have there, or to None if they do not meet the
        conditions. Sizes may occur anywhere in the tuples and lists of the result."""
        if self.taken:
            raise UntraceableError("a size became an integer")
        if all(_pin(size) in self._conditions for size in self.sizes):
            raise UntraceableError("a function of no other sizes: use shape[0] instead of len()")
        names = ", ".join(size.name for size in self.sizes)
        text = self._text(result)
        body = "\n ".join([*self._lines, f"return {text}"])
        namespace, self._objects = self._objects, {}  # a cache may keep a size, and with it the trace
        exec(f"def resized({names}):\n {body}", namespace)
        made: Callable[..., Any] = namespace["resized"]
        return made

    def _text(self, value: Any) -> str:
        if isinstance(value, Size):
            return value.name
        if type(value) is int or value is None:
            return repr(value)
        if not _varies(value):
            return self.named(value)
        if type(value) is Made:
            return f"{self.named(value.function)}({', '.join(map(self._text, value.args))})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, tuple):  # a named tuple becomes a plain one, which is sooner made
            return f"({''.join(f'{self._text(each)}, ' for each in value)})"
        raise UntraceableError(f"a result of type {type(value)}")


class Made:
    """Stands in the result of a function for what another one returns, called with these arguments."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args


def _varies(value: Any) -> bool:
    """Whether there is a size in it."""
    inside = value if isinstance(value, tuple | list) else ()
    return isinstance(value, Size | Made) or any(map(_varies, inside))


def _arithmetic(sign: str, of: Callable[[int, int], int], neutral: int | None = None) -> tuple[Any, Any]:
    """`neutral`: the operand on the right that changes nothing, and on the left of a sum or a product."""

    def forward(self: "Size", other: Any) -> Any:
        if not _is_size(other):
            return NotImplemented
        if type(other) is int and other == neutral:
            return self
        return self.trace.formula(f"{self.name} {sign} {_name(other)}", of(self.value, value_of(other)))

    def reflected(self: "Size", other: Any) -> Any:
        if not _is_size(other):
            return NotImplemented
        if sign in "+*" and other == neutral:
            return self
        return self.trace.formula(f"{_name(other)} {sign} {self.name}", of(value_of(other), self.value))

    return forward, reflected


def _comparison(sign: str, of: Callable[[int, int], bool]) -> Any:
    def compared(self: "Size", other: Any) -> Any:
        if not _is_size(other):
            raise UntraceableError(f"a size is compared with {other!r}")
        if other is self:
            return of(0, 0)
        return self.trace.condition(f"{self.name} {sign} {_name(other)}", of(self.value, value_of(other)))

    return compared


class Size:
    """An integer that depends on the sizes of a call; `value` is what it is in this one."""

    __slots__ = ("name", "trace", "value")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, trace: Trace, name: str, value: int) -> None:
        self.trace, self.name, self.value = trace, name, value

    __add__, __radd__ = _arithmetic("+", lambda a, b: a + b, 0)
    __sub__, __rsub__ = _arithmetic("-", lambda a, b: a - b, 0)
    __mul__, __rmul__ = _arithmetic("*", lambda a, b: a * b, 1)
    __floordiv__, __rfloordiv__ = _arithmetic("//", lambda a, b: a // b, 1)
    __mod__, __rmod__ = _arithmetic("%", lambda a, b: a % b)
    __lt__ = _comparison("<", lambda a, b: a < b)
    __le__ = _comparison("<=", lambda a, b: a <= b)
    __gt__ = _comparison(">", lambda a, b: a > b)
    __ge__ = _comparison(">=", lambda a, b: a >= b)
    __eq__ = _comparison("==", lambda a, b: a == b)
    __ne__ = _comparison("!=", lambda a, b: a != b)

    def __neg__(self) -> "Size":
        return self.trace.formula(f"-{self.name}", -self.value)

    def bit_length(self) -> int:
        """A plain number: launchers round up to powers of two by it, for tiles, which are constants of
        kernels. The function is for sizes with as many bits."""
        bits = self.value.bit_length()
        self.trace.condition(f"{self.name}.bit_length() == {bits}", True)
        return bits

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __index__(self) -> int:
        """C code asks for the integer. PyTorch does before it hands `torch.empty` over to `Allocations`,
        which then forgets that it was asked by that instruction."""
        self.trace.taken.append(_instruction(2))
        return self.value

    def __repr__(self) -> str:
        return f"Size({self.name} = {self.value})"


def _instruction(depth: int) -> tuple[int, int]:
    """Which instruction of which frame called C code."""
    frame = sys._getframe(depth)
    return id(frame), frame.f_lasti


def _is_size(value: Any) -> bool:
    return type(value) is int or type(value) is Size


def _pin(size: Size) -> str:
    return f"{size.name} == {_name(size.value)}"


def _name(value: Any) -> str:
    return value.name if type(value) is Size else f"({value})"


def value_of(value: Any) -> Any:
    """The integer that a size is in this call."""
    return value.value if type(value) is Size else value


def decides(rule: Decision) -> Decision:
    """For a rule that chooses something from sizes, by a table or by a model. In a trace it is asked for the
    sizes of this call, and the function is for all sizes for which it chooses the same. What it returns must
    be comparable."""

    @wraps(rule)
    def asked(*args: Any) -> Any:
        sizes = [a for a in args if type(a) is Size]
        if not sizes:
            return rule(*args)
        chosen, trace = rule(*map(value_of, args)), sizes[0].trace
        given = ", ".join(_name(a) if _is_size(a) else trace.named(a) for a in args)
        same = trace.named(chosen)
        trace.condition(f"(d := {trace.named(rule)}({given})) is {same} or d == {same}", True)
        return chosen

    return asked  # type: ignore[return-value]


def recalled(answers: dict[CacheKey, Any], key: CacheKey, make: Callable[..., Any], *args: Any) -> Any:
    """The cached answer, or a new one. Sizes that vary are no key."""
    if any(type(each) is Size for each in key):
        return make(*args)
    known = answers.get(key)
    if known is None:
        known = make(*args)
        remember(answers, key, known)
    return known


# Tensors


class Shape(tuple[Any, ...]):
    """As `torch.Size`, of sizes that may vary. As a key it is equal to itself only: no cached answer for
    a shape is one for it."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def numel(self) -> Any:
        product: Any = 1
        for size in self:
            product = product * size
        return product

    def __getitem__(self, at: Any) -> Any:
        some = super().__getitem__(at)
        return Shape(some) if isinstance(at, slice) else some


class Memory:
    """What a tensor lies in: an input, which begins at its own address, or an allocation."""

    __slots__ = ("alignment", "nbytes")

    def __init__(self, nbytes: Any, alignment: int = 0) -> None:
        self.nbytes, self.alignment = nbytes, alignment


class Address:
    """Only whether it is a multiple of something is known of it."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, memory: Memory, offset: Any) -> None:
        self._memory, self._offset = memory, offset

    def __mod__(self, divisor: int) -> Any:
        if 16 % divisor:
            raise UntraceableError(f"an address modulo {divisor}")
        return (self._offset + self._memory.alignment) % divisor

    def __eq__(self, other: object) -> bool:
        raise UntraceableError("an address is compared")


class Traced:
    """A tensor without memory: allocations and views, and nothing else. `made` collects allocations."""

    is_cuda = True

    def __init__(
        self, shape: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: torch.device,
        memory: Memory, made: list[Memory], offset: Any = 0,
    ) -> None:  # fmt: skip
        self.shape, self._stride, self.dtype, self.device = Shape(shape), Shape(stride), dtype, device
        self.memory, self.made, self.offset = memory, made, offset  # the offset is in bytes

    # Properties

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, i: int | None = None) -> Any:
        return self.shape if i is None else self.shape[i]

    def stride(self, i: int | None = None) -> Any:
        return self._stride if i is None else self._stride[i]

    def numel(self) -> Any:
        return self.shape.numel()

    def element_size(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> Any:
        return self.numel() * self.element_size()

    def data_ptr(self) -> Address:
        return Address(self.memory, self.offset)

    def is_contiguous(self) -> bool:
        return all(a == b for a, b in zip(self._stride, dense(self.shape), strict=True))

    def __len__(self) -> int:
        """A plain number: of a size that varies, the function is for this value only."""
        size = self.shape[0]
        return size.trace.pinned(size) if type(size) is Size else int(size)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UntraceableError(f"{func} of a tensor without memory")

    def new_empty(self, *shape: Any, dtype: torch.dtype | None = None) -> "Traced":
        return allocated(shape, dtype or self.dtype, self.device, self.made)

    # Views

    def _view(
        self, shape: Sequence[Any], stride: Sequence[Any], offset: Any = 0, dtype: torch.dtype | None = None
    ) -> "Traced":
        at = self.offset + offset * self.element_size()
        return Traced(shape, stride, dtype or self.dtype, self.device, self.memory, self.made, at)

    def view(self, *shape: Any) -> "Traced":
        if len(shape) == 1 and isinstance(shape[0], torch.dtype):
            if shape[0].itemsize != self.element_size():
                raise UntraceableError("a view of another size of elements")
            return self._view(self.shape, self._stride, dtype=shape[0])
        sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else list(shape)
        if not self.is_contiguous():
            raise UntraceableError("a view of a tensor that is not contiguous")
        hole = [i for i, size in enumerate(sizes) if type(size) is int and size == -1]
        for i in hole:
            rest = Shape(sizes[:i] + sizes[i + 1 :]).numel()
            sizes[i] = self.numel() // rest
        if Shape(sizes).numel() != self.numel():
            raise UntraceableError("a view of another number of elements")
        return self._view(sizes, dense(sizes))

    reshape = view

    def contiguous(self) -> "Traced":
        if not self.is_contiguous():
            raise UntraceableError("a copy")
        return self

    def to(self, dtype: torch.dtype) -> "Traced":
        if dtype != self.dtype:
            raise UntraceableError("a conversion")
        return self

    def transpose(self, a: int, b: int) -> "Traced":
        order = list(range(self.ndim))
        order[a], order[b] = order[b], order[a]
        return self._view([self.shape[i] for i in order], [self._stride[i] for i in order])

    def t(self) -> "Traced":
        return self.transpose(0, 1)

    @property
    def mT(self) -> "Traced":
        return self.transpose(-1, -2)

    def expand(self, *sizes: Any) -> "Traced":
        shape, stride = [], []
        for i, size in enumerate(reversed(sizes)):  # new dimensions come first
            own, step = (self.shape[-1 - i], self._stride[-1 - i]) if i < self.ndim else (1, 0)
            keeps = (type(size) is int and size == -1) or own == size
            if not keeps and own != 1:
                raise UntraceableError("a dimension of another size is expanded")
            shape.append(own if keeps else size)
            stride.append(step if keeps else 0)
        return self._view(shape[::-1], stride[::-1])

    def split(self, sizes: Any) -> tuple["Traced", ...]:
        """Along the first dimension, by sizes, or into parts of one size."""
        if isinstance(sizes, int):
            whole, rest = divmod(len(self), sizes)
            sizes = [sizes] * whole + [rest] * (rest > 0)
        found, first = [], 0
        for size in sizes:
            found.append(self._view((size, *self.shape[1:]), self._stride, first * self._stride[0]))
            first = first + size
        return tuple(found)

    def __getitem__(self, at: Any) -> "Traced":
        """By integers, by slices without a step, and by None, a new dimension."""
        places = at if isinstance(at, tuple) else (at,)
        shape: list[Any] = []
        stride: list[Any] = []
        offset: Any = 0
        i = 0  # the dimension
        for place in places:
            if place is None:
                shape.append(1)
                stride.append(self.shape[i] * self._stride[i] if i < self.ndim else 1)
                continue
            size, step = self.shape[i], self._stride[i]
            i += 1
            if isinstance(place, slice):
                if place.step is not None:
                    raise UntraceableError("a slice with a step")
                begin = 0 if place.start is None else _within(place.start, size)
                end = size if place.stop is None else _within(place.stop, size)
                shape.append(end - begin if begin < end else 0)
                stride.append(step)
                offset = offset + begin * step
            elif _is_size(place):
                place = size + place if place < 0 else place
                if place < 0 or place >= size:
                    raise UntraceableError("an index outside")
                offset = offset + place * step
            else:
                raise UntraceableError(f"an index {place!r}")
        return self._view((*shape, *self.shape[i:]), (*stride, *self._stride[i:]), offset)


def _within(place: Any, size: Any) -> Any:
    """Where a slice begins or ends: counted from the end if it is negative, and not outside."""
    place = size + place if place < 0 else place
    if place < 0:
        return 0
    return size if size < place else place


def allocated(shape: Sequence[Any], dtype: torch.dtype, device: torch.device, made: list[Memory]) -> Traced:
    """A new contiguous tensor; the shape may be a single sequence in it, as PyTorch takes it."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    memory = Memory(Shape(sizes).numel() * dtype.itemsize)
    made.append(memory)
    return Traced(sizes, dense(sizes), dtype, device, memory, made)


class Allocations(TorchFunctionMode):
    """Inside, PyTorch allocates nothing: tensors have no memory, and `made` collects what they would have."""

    def __init__(self, made: list[Memory], trace: Trace | None = None) -> None:
        super().__init__()
        self._made, self._trace = made, trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        if func is torch.empty:
            if self._trace is not None:
                here = _instruction(2)
                self._trace.taken = [place for place in self._trace.taken if place != here]
            dtype = options.get("dtype") or torch.get_default_dtype()
            return allocated(args, dtype, torch.device(options.get("device", "cpu")), self._made)
        if func is torch.empty_like and isinstance(args[0], Traced):
            like = args[0].contiguous()  # otherwise the strides would be its own
            return allocated((like.shape,), options.get("dtype") or like.dtype, like.device, self._made)
        raise UntraceableError(f"{func} runs between launches")


def dense(shape: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a contiguous tensor."""
    strides: list[Any] = []
    size: Any = 1
    for n in reversed(shape):
        strides.append(size)
        size = size * n
    return tuple(reversed(strides))
