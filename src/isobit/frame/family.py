"""Families: calls that differ in some sizes only, and what they share.

What varies is the number of rows, or, where an op says so, one dimension that grows, the keys of a cache, or
the first dimensions of its arguments, tokens and the rows of their experts, or the rows of matrices, or any
dimensions that the contract names. The contract, its rules and the choice of a backend are the same for all
calls of a family. And so are its plans, as far as they are functions of these sizes (`isobit.frame.traced`):
the first call runs the launcher, the second one is recorded and traced, and a call with new sizes then has a
plan at once.
"""

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from isobit.frame.backend import Args, Backend, resolve
from isobit.frame.cache_key import CacheKey, Sizes, form_of, remember, split_key
from isobit.frame.compile_ahead import compile_ahead
from isobit.frame.contract import Contract
from isobit.frame.replay import Plan
from isobit.frame.traced import ShapeOf, Trace, UntraceableError, dense

#: Functions from sizes to plans that a family has at most: a launcher may decide anew for every size.
MOST_FUNCTIONS = 64


class Family:
    """The plans of its calls, as functions of sizes. Where there can be none: how often sizes recur, from
    samples of them."""

    __slots__ = ("_called", "_functions", "_new", "_recurred", "_samples", "_shape", "traceable")

    def __init__(self, shape: ShapeOf) -> None:
        self._shape = shape
        self._functions: list[Callable[..., Plan | None]] = []
        self._called, self.traceable = False, True
        self._new = self._samples = self._recurred = 0

    def plan(self, sizes: Sizes) -> Plan | None:
        """The plan of a call with these sizes, if there is one already. The function that had the last one
        is asked first."""
        functions = self._functions
        for i, function in enumerate(functions):
            found = function(*sizes)
            if found is not None:
                if i:
                    self._functions = [function, *functions[:i], *functions[i + 1 :]]
                return found
        return None

    def traces(self) -> ShapeOf | None:
        """With what to trace a call that is recorded, if that is to be tried."""
        return self._shape if self.traceable else None

    def learn(self, plan: Plan | None) -> None:
        """Of a call that was recorded and traced."""
        if plan is None or plan.resized is None:
            self.traceable = False
            return
        self._functions = [plan.resized, *self._functions]
        self.traceable = len(self._functions) < MOST_FUNCTIONS

    def expected(self) -> bool:
        """Whether to record a call with sizes that have no plan: all but the first if they can be traced, or
        else if its sizes are likely to recur. False for at least every eighth, which is a sample: its second
        call, if there is one, counts as a recurrence."""
        if self.traceable:
            first, self._called = not self._called, True
            return not first
        self._new += 1
        if 2 * self._recurred > self._samples and self._new % 8:
            return True
        self._samples += 1
        return False

    def count(self) -> None:
        """A sample has recurred."""
        self._recurred += 1


class Varying(NamedTuple):
    """What varies in the calls of a family.

    `split(key)`: the key of the family and the sizes, or None for a call that belongs to none.
    `shape(name, args, sizes)`: the shape and the strides of one of these arguments with other sizes.
    `ahead(args)`: larger sizes, for which the first call of a family compiles the kernels too."""

    split: Callable[[CacheKey], tuple[CacheKey, Sizes] | None]
    shape: ShapeOf
    ahead: Callable[[Args], Sequence[int]] | None = None

    def family(self) -> Family:
        return Family(self.shape)

    def compile_ahead(self, serves: Callable[[Args], Backend], args: Args) -> None:
        """For calls with these arguments. `serves(args)` is the backend of such a call."""
        if self.ahead is not None:
            compile_ahead(serves, args, [(size,) for size in self.ahead(args)], self.shape)


def varying(contract: Contract, grows: str | None) -> Varying:
    """What varies in the calls of an op: as the function at this path says, or the number of rows."""
    made: Varying = (rows if grows is None else resolve(grows))(contract)
    return made


def rows(contract: Contract) -> Varying:
    """The rows of a call, which the contract writes as `*`."""

    def split(key: CacheKey) -> tuple[CacheKey, Sizes] | None:
        return split_key(key, contract.rows_at)

    def shape(name: str, args: Args, sizes: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        t = args[name]
        around = contract.rows_at[contract.names.index(name)]
        if around is None:
            return t.shape, t.stride()
        before, after = around
        whole = (*t.shape[:before], *sizes, *t.shape[t.ndim - after :])
        return whole, dense(whole)

    return Varying(split, shape)


def leading(contract: Contract, *names: str) -> Varying:
    """Dimensions with these names. Calls of a family have one backend, whatever their sizes."""
    return dimensions(contract, lambda given: dict(zip(names, names, strict=True)), lambda shapes: None)


def matrices(contract: Contract) -> Varying:
    """M, the rows of the matrices that the contract writes as `* M K`, if there is one of each; if there are
    several, how many there are."""
    one, several = leading(contract, "M"), rows(contract)

    def split(key: CacheKey) -> tuple[CacheKey, Sizes] | None:
        return one.split(key) or several.split(key)

    def shape(name: str, args: Args, sizes: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return (one if args[name].ndim == 2 else several).shape(name, args, sizes)

    return Varying(split, shape)


def dimensions(
    contract: Contract,
    vary: Callable[[Container[str]], Mapping[str, str]],
    kind: Callable[[Mapping[str, Sequence[Any]]], Hashable],
    ahead: Callable[[Args], Sequence[int]] | None = None,
) -> Varying:
    """Dimensions, wherever the contract names them, in calls without more of them (`*`). `vary(given)`:
    which of them, in calls that are given these arguments, and the size that each has: dimensions with one
    size are equal. `kind(shapes)`: calls whose shapes, by argument, differ in it are chosen for differently.
    It calculates with sizes and compares them, and does nothing else, as a launcher that can be traced.

    A size of one belongs to the family: rules and launchers ask for it, and its stride may be anything."""
    of = _Dimensions(contract, vary, kind)
    return Varying(of.split, of.shape, ahead)


class _Place(NamedTuple):
    """An argument that is a tensor: how many dimensions it has, and those that vary, with names of sizes."""

    name: str
    ndim: int
    varying: list[tuple[int, str]]


class _Known(NamedTuple):
    """A family that keys are compared with."""

    family: CacheKey
    at: list[tuple[int, int]]  # where its sizes are: (tensor, dimension)
    #: From sizes to what a key has of tensors, or to None if they are not sizes of the family.
    tensors: Callable[..., Any]


#: Families of calls with the same scalars that a key is compared with before its own is worked out.
MOST_KNOWN = 4


class _Dimensions:
    """What varies, if dimensions do."""

    def __init__(
        self,
        contract: Contract,
        vary: Callable[[Container[str]], Mapping[str, str]],
        kind: Callable[[Mapping[str, Sequence[Any]]], Hashable],
    ) -> None:
        self._names, self._vary, self._kind = contract.names, vary, kind
        self._dims = {
            p.name: [dim for dim in p.spec.dims if dim != "*"] for p in contract.params if p.spec is not None
        }
        self._by_types: dict[tuple[type, ...], list[_Place]] = {}
        self._known: dict[CacheKey, list[_Known]] = {}  # by what keys have besides tensors
        self._met: dict[CacheKey, bool] = {}  # families that occurred

    def _places(self, types: tuple[type, ...]) -> list[_Place]:
        places = self._by_types.get(types)
        if places is None:
            given = [self._names[i] for i in form_of(types).tensors]
            size_of = self._vary(given)
            places = [
                _Place(name, len(dims), [(d, size_of[dim]) for d, dim in enumerate(dims) if dim in size_of])
                for name, dims in ((name, self._dims[name]) for name in given)
            ]
            remember(self._by_types, types, places)
        return places

    def split(self, key: CacheKey) -> tuple[CacheKey, Sizes] | None:
        grad, types, scalars, *tensors = key
        rest = grad, types, scalars
        try:
            for family, at, expected in self._known.get(rest, ()):
                sizes = tuple([tensors[i][0][d] for i, d in at])
                if expected(*sizes) == tensors:
                    return family, sizes
        except IndexError:  # there are too few dimensions: the contract will say so
            return None
        return self._split(rest, tensors)

    def _split(self, rest: tuple[Any, ...], tensors: list[Any]) -> tuple[CacheKey, Sizes] | None:
        """The same for a family that is not known yet."""
        places, at = self._places(rest[1]), dict[str, tuple[int, int]]()
        for i, place in enumerate(places):
            shape = tensors[i][0]
            if len(shape) != place.ndim:
                return None
            for d, size in place.varying:
                j, other = at.setdefault(size, (i, d))
                if tensors[j][0][other] != shape[d]:
                    return None
        sizes = {size: n for size, (i, d) in at.items() if (n := tensors[i][0][d]) != 1}
        if not sizes:
            return None
        kind = self._kind({place.name: item[0] for place, item in zip(places, tensors, strict=True)})
        forms = [
            _form_of(shape, strides, place.varying)
            for place, (shape, strides, *_) in zip(places, tensors, strict=True)
        ]
        family = (*rest, kind, *forms, *[item[2:] for item in tensors])
        if family in self._met:  # not for one that occurs once: it takes longer than to work it out
            expected = self._expected(places, forms, tensors, sizes, kind)
            known = _Known(family, [at[size] for size in sizes], expected)
            remember(self._known, rest, [known, *self._known.get(rest, ())[: MOST_KNOWN - 1]])
        remember(self._met, family, True)
        return family, tuple(sizes.values())

    def _expected(
        self,
        places: list[_Place],
        forms: list["_Form"],
        tensors: list[Any],
        sizes: dict[str, int],
        kind: Hashable,
    ) -> Callable[..., Any]:
        """From sizes to what a key of the family has of tensors, or to None if their kind is another."""
        trace = Trace(tuple(sizes.values()))
        new = dict(zip(sizes, trace.sizes, strict=True))
        whole = [form.with_sizes(new) for form in forms]
        asked = self._kind({place.name: shape for place, (shape, _) in zip(places, whole, strict=True)})
        if asked != kind:  # where it is a number, this makes a condition of it
            raise UntraceableError("the kind of calls does not follow from their sizes")
        for n in trace.sizes:
            trace.condition(f"{n.name} != 1", True)
        return trace.function([(*form, *item[2:]) for form, item in zip(whole, tensors, strict=True)])

    def shape(self, name: str, args: Args, sizes: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        places = self._places(tuple(type(args.get(name)) for name in self._names))
        own = {size: args[place.name].shape[d] for place in places for d, size in place.varying}
        new = dict(zip([size for size, n in own.items() if n != 1], sizes, strict=True))
        (varying,) = (place.varying for place in places if place.name == name)
        t = args[name]
        return _form_of(t.shape, t.stride(), varying).with_sizes(new)


class _Form(NamedTuple):
    """Shape and strides of a tensor apart from the sizes that vary, whose names are in their places.

    In an order from the inside to the outside, a stride is the extent of all that lies inside it, or a
    number if there is a gap, as in a part of a larger cache; one that is copied at every step has none."""

    shape: tuple[int | str, ...]
    gaps: tuple[tuple[int, int], ...]  # (dimension, stride)
    order: Sequence[int]  # a range if later dimensions lie inside earlier ones, as usual

    def with_sizes(self, sizes: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The shape and the strides."""
        shape = [sizes[n] if isinstance(n, str) else n for n in self.shape]
        strides, gaps, inside = shape.copy(), dict(self.gaps), 1
        for d in self.order:
            strides[d] = gaps.get(d, inside)
            if self.shape[d] != 1:
                inside = shape[d] * strides[d]
        return tuple(shape), tuple(strides)


def _form_of(shape: Sequence[int], strides: Sequence[int], varying: list[tuple[int, str]]) -> _Form:
    named: list[int | str] = list(shape)
    for d, size in varying:
        if shape[d] != 1:
            named[d] = size
    order: Sequence[int] = range(len(shape) - 1, -1, -1)
    if list(strides) != sorted(strides, reverse=True):
        order = tuple(sorted(order, key=strides.__getitem__))
    gaps, inside = [], 1
    for d in order:
        if strides[d] != inside:
            gaps.append((d, strides[d]))
        if shape[d] != 1:
            inside = shape[d] * strides[d]
    return _Form(tuple(named), tuple(gaps), order)


def growth(
    contract: Contract,
    dimension: str,
    unless: Sequence[str],
    kind: Callable[[int], Hashable],
    ahead: Callable[[Args], Sequence[int]],
) -> Varying:
    """One dimension of some arguments. A call to which one of the arguments `unless` is given belongs to no
    family. `kind`: calls whose sizes differ in it are chosen for differently."""
    name, at = next(
        (p.name, p.spec.dims.index(dimension))
        for p in contract.params
        if p.spec is not None and dimension in p.spec.dims
    )

    def vary(given: Container[str]) -> Mapping[str, str]:
        return {} if any(other in given for other in unless) else {dimension: dimension}

    return dimensions(contract, vary, lambda shapes: kind(shapes[name][at]), ahead)
