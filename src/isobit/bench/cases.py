"""Which sizes are timed: those a series declares, those asked for, and small ones for a CPU."""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

import torch

from isobit.bench.series import Series
from isobit.check.proof import DTYPES, Case
from isobit.contract import ContractError
from isobit.op import Op

#: Bytes and operations of a case that a CPU times within a second.
CPU_BYTES, CPU_FLOPS = 4 << 20, 16 << 20


def case_name(case: Case) -> str:
    """The case by sizes, dtype and options; what kind of data fills it does not matter here."""
    return replace(case, data="edge").name


def series_of(op: Op) -> list[Series]:
    """What is timed of an op and of those that share its folder: `SERIES` of the folder's `rivals`."""
    return list(import_module(f"{op.package}.rivals").SERIES)


def declared_dims(series: Sequence[Series]) -> dict[frozenset[str], Case]:
    """The first declared case of every set of dimensions, like N,V and B,T,V."""
    found: dict[frozenset[str], Case] = {}
    for one in series:
        for case in one.cases:
            found.setdefault(frozenset(case.dims), case)
    return found


def parse_case(text: str, op: Op) -> Case:
    """`N=4096,V=50257,dtype=bf16` as a case of this op; its dimensions are those of a declared case."""

    def error(rule: str) -> ContractError:
        return ContractError(f"{op.name}(case: {text!r}): {rule}")

    declared = declared_dims(series_of(op))
    known = " or ".join(",".join(case.dims) for case in declared.values())
    sizes: dict[str, int] = {}
    dtype: torch.dtype | None = None
    for part in text.split(","):
        name, _, value = (x.strip() for x in part.partition("="))
        if name == "dtype":
            if value not in DTYPES:
                raise error(f"unknown dtype {value!r}; known: {', '.join(DTYPES)}")
            dtype = DTYPES[value]
        elif not any(name in dims for dims in declared):
            raise error(f"unknown dimension {name!r}; known: {known}, and dtype")
        elif name in sizes:
            raise error(f"{name} is given twice")
        elif not (value.isascii() and value.isdecimal()) or int(value) < 1:
            raise error(f"{name} must be a positive whole number, not {value!r}")
        else:
            sizes[name] = int(value)
    like = declared.get(frozenset(sizes))
    if like is None:
        raise error(f"needs the dimensions {known}, has {','.join(sizes) or 'none'}")
    dims = {name: sizes[name] for name in like.dims}
    return Case(dims, dtype or like.dtype, data="random")


def small_cases(series: Series) -> list[Case]:
    """One declared case of each set of dimensions, halved until a CPU can time it; the last dimension is
    spared longest."""

    def too_large(dims: dict[str, int], case: Case) -> bool:
        cost = series.cost(dims, case.dtype)
        return cost.fwd_bytes > CPU_BYTES or cost.fwd_flops > CPU_FLOPS

    found = []
    for case in declared_dims([series]).values():
        dims = dict(case.dims)
        *lead, last = dims
        while too_large(dims, case):
            largest = max(lead, key=dims.__getitem__, default=last)
            dims[largest if dims[largest] > 1 else last] //= 2
        found.append(replace(case, dims=dims))
    return found
