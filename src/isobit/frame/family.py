"""Families: calls that differ in some sizes only, and what they share.

What varies is the number of rows, or, where an op says so, one dimension that grows, the keys of a cache, or
the first dimensions of its arguments, tokens and the rows of their experts, or the rows of matrices. The
contract, its rules and the choice of a backend are the same for all calls of a family. And so are its plans,
as far as they are functions of these sizes (`isobit.frame.traced`): the first call runs the launcher, the
second one is recorded and traced, and a call with new sizes then has a plan at once.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from isobit.frame.backend import Args, Backend, resolve
from isobit.frame.cache_key import CacheKey, Sizes, form_of, split_key
from isobit.frame.compile_ahead import compile_ahead
from isobit.frame.contract import Contract
from isobit.frame.replay import Plan
from isobit.frame.traced import ShapeOf, dense

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
    `shape(name, tensor, sizes)`: the shape and the strides of an argument with other sizes.
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

    def shape(name: str, t: Tensor, sizes: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        around = contract.rows_at[contract.names.index(name)]
        if around is None:
            return t.shape, t.stride()
        before, after = around
        whole = (*t.shape[:before], *sizes, *t.shape[t.ndim - after :])
        return whole, dense(whole)

    return Varying(split, shape)


def leading(contract: Contract, *dimensions: str) -> Varying:
    """The first dimensions of arguments, where the contract gives them one of these names. Strides do not
    depend on their sizes. Calls with fewer than two of one belong to no family."""
    at = {
        i: p.spec.dims[0]
        for i, p in enumerate(contract.params)
        if p.spec is not None and p.spec.dims and p.spec.dims[0] in dimensions
    }
    named = [name for name in dimensions if name in at.values()]

    def split(key: CacheKey) -> tuple[CacheKey, Sizes] | None:
        grad, types, scalars, *tensors = key
        family: list[Any] = [grad, types, scalars]
        sizes: dict[str, int] = {}
        for i, item in zip(form_of(types).tensors, tensors, strict=True):
            name = at.get(i)
            if name is None:
                family.append(item)
                continue
            shape = tuple(item[0])
            if not shape or shape[0] < 2 or sizes.setdefault(name, shape[0]) != shape[0]:
                return None  # the contract may have something to say
            family += (shape[1:], item[1:])
        return (tuple(family), tuple(sizes[name] for name in named)) if len(sizes) == len(named) else None

    def shape(name: str, t: Tensor, sizes: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        first = at.get(contract.names.index(name))
        if first is None:
            return t.shape, t.stride()
        return (sizes[named.index(first)], *t.shape[1:]), t.stride()

    return Varying(split, shape)


def matrices(contract: Contract) -> Varying:
    """M, the rows of the matrices that the contract writes as `* M K`, if there is one of each; if there are
    several, how many there are."""
    several = rows(contract)
    dims = {i: p.spec.dims for i, p in enumerate(contract.params) if p.spec is not None}

    def split(key: CacheKey) -> tuple[CacheKey, Sizes] | None:
        grad, types, scalars, *tensors = key
        given = dict(zip(form_of(types).tensors, tensors, strict=True))
        if any(len(given[i][0]) != 2 for i in dims if i in given):
            return several.split(key)
        counts = {given[i][0][0] for i in dims if i in given and dims[i][-2] == "M"}
        if len(counts) != 1 or min(counts) < 2:  # an error, or a row, whose stride may be anything
            return None
        family = ((shape[1:] if dims[i][-2] == "M" else shape, *rest) for i, (shape, *rest) in given.items())
        return (grad, types, scalars, *family), tuple(counts)

    def shape(name: str, t: Tensor, sizes: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        if t.ndim != 2:
            return several.shape(name, t, sizes)
        of_rows = dims[contract.names.index(name)][-2] == "M"
        return (sizes[0], t.shape[1]) if of_rows else t.shape, t.stride()

    return Varying(split, shape)


def growth(
    contract: Contract,
    dimension: str,
    unless: Sequence[str],
    kind: Callable[[int], Hashable],
    ahead: Callable[[Args], Sequence[int]],
) -> Varying:
    """One dimension of some arguments. A call to which one of the arguments `unless` is given belongs to no
    family. `kind`: calls whose sizes differ in it are chosen for differently."""
    at = {
        i: p.spec.dims.index(dimension)
        for i, p in enumerate(contract.params)
        if p.spec is not None and dimension in p.spec.dims
    }
    dims = {i: len(p.spec.dims) for i, p in enumerate(contract.params) if p.spec is not None}
    never = [contract.names.index(name) for name in unless]

    def split(key: CacheKey) -> tuple[CacheKey, Sizes] | None:
        grad, types, scalars, *tensors = key
        form = form_of(types)
        if any(i in form.tensors for i in never):
            return None
        family: list[Any] = [grad, types, scalars]
        size = None
        for i, item in zip(form.tensors, tensors, strict=True):
            d = at.get(i)
            if d is None:
                family.append(item)
                continue
            shape, strides = item[0], item[1]
            if len(shape) != dims[i]:  # the contract will say so
                return None
            if size is None:
                size = shape[d]
            if size != shape[d] or size < 2:
                return None
            family += (shape[:d], shape[d + 1 :], _multiples(shape, strides, d), item[2:])
        return None if size is None else ((*family, kind(size)), (size,))

    def shape(name: str, t: Tensor, sizes: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        d = at.get(contract.names.index(name))
        if d is None:
            return t.shape, t.stride()
        (size,) = sizes
        strides = [size * -s if s < 0 else s for s in _multiples(t.shape, t.stride(), d)]
        return (*t.shape[:d], size, *t.shape[d + 1 :]), strides

    return Varying(split, shape, ahead)


def _multiples(shape: Sequence[int], strides: Sequence[int], d: int) -> tuple[int, ...]:
    """Strides; instead of one that is a multiple of the size d because all of it lies inside, the multiple,
    negated. A part of a larger cache has no such strides, one that is copied at every step has."""
    own, size = strides[d], shape[d]
    found = []
    for i, stride in enumerate(strides):
        if stride > own and i != d:
            inside = size * own
            for j, other in enumerate(strides):
                if own < other < stride:
                    inside *= shape[j]
            if inside == stride:
                found.append(-(stride // size))
                continue
        found.append(stride)
    return tuple(found)
