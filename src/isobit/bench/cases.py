"""What can be timed, and at which sizes: declared ones, requested ones, small ones for a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import torch

from isobit.bench.goals import Goal
from isobit.bench.suites import goals_of, load_suite
from isobit.frame.contract import ContractError
from isobit.frame.op import Op, known_op, public_ops
from isobit.spec.proof import DTYPES, Case
from isobit.spec.series import Series

#: Options that are sizes of a case, as its dimensions are: a check has cases of its own for them, and other
#: cases cannot take them.
OF_SIZES = ("lengths", "key_lengths")

#: Bytes and operations of a case that a CPU can time within a second.
CPU_BYTES, CPU_FLOPS = 4 << 20, 16 << 20


def case_name(case: Case) -> str:
    """The case by sizes, dtype and options; its kind of data does not matter here."""
    return replace(case, data="edge").name


@dataclass(frozen=True)
class Subject:
    """The subject of a benchmark: the ops of one folder, or a suite. `file` is the name of its results."""

    name: str
    flag: str  # "--op" or "--suite": the flag of the command line
    file: str
    series: Sequence[Series]
    backends: tuple[str, ...]
    goals: Sequence[Goal] = ()
    candidate: str | None = None  # flags that name a user's function, timed next to the rivals

    @property
    def ops(self) -> list[str]:
        """The ops whose kernels determine its numbers."""
        own = [one.op.name for one in self.series if one.op is not None]
        return list(dict.fromkeys([*own, *(name for one in self.series for name in one.needs)]))

    @property
    def folders(self) -> set[str]:
        """The folders of these ops."""
        return {known_op(name).folder for name in self.ops}


def subject_of(op: Op) -> Subject:
    names = tuple(b.name for b in op.backends)
    return Subject(op.name, "--op", op.folder, series_of(op), names, goals_of(op.folder))


def suite_of(name: str) -> Subject:
    """The suite of this name or file. Its results file has the name of the suite."""
    series, goals = load_suite(name)
    file = Path(name).stem
    if file in {op.folder for op in public_ops().values()}:
        raise ContractError(f"--suite {name}: {file} is the results file of an op: rename the suite")
    backends = dict.fromkeys(b.name for one in series if one.op is not None for b in one.op.backends)
    return Subject(name, "--suite", file, series, tuple(backends), goals)


def series_of(op: Op) -> list[Series]:
    """What is timed for an op and those that share its folder: `SERIES` of the folder's `rivals`."""
    return list(import_module(f"{op.package}.rivals").SERIES)


def declared_dims(series: Sequence[Series]) -> dict[frozenset[str], Case]:
    """The first declared case of every set of dimensions, like N,V and B,T,V."""
    first: dict[frozenset[str], Case] = {}
    for one in series:
        for case in one.cases:
            first.setdefault(frozenset(case.dims), case)
    return first


def parse_case(text: str, of: Op | Subject) -> Case:
    """Parses `N=4096,V=50257,dtype=bf16` as a case of an op or a suite. Sizes that are missing are those of
    the declared case with the fewest dimensions that has these, as in a check."""

    def error(rule: str) -> ContractError:
        return ContractError(f"{of.name}(case: {text!r}): {rule}")

    declared = declared_dims(of.series if isinstance(of, Subject) else series_of(of))
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
    having = [case for dims, case in declared.items() if sizes.keys() <= dims]
    if not having or not sizes:
        raise error(f"needs the dimensions {known}, has {','.join(sizes) or 'none'}")
    like = min(having, key=lambda case: len(case.dims))
    dims = {name: sizes.get(name, size) for name, size in like.dims.items()}
    return Case(dims, dtype or like.dtype, data="random")


def small_cases(series: Series) -> list[Case]:
    """The cases that a series declares for a CPU; else one declared case of each set of dimensions, halved
    until a CPU can time it, the last dimension last."""

    def too_large(dims: dict[str, int], case: Case) -> bool:
        cost = series.cost(dims, case.dtype)
        return cost.fwd_bytes > CPU_BYTES or cost.fwd_flops > CPU_FLOPS

    if series.small is not None:
        return list(series.small)
    cases = []
    for case in declared_dims([series]).values():
        dims = dict(case.dims)
        *lead, last = dims
        while too_large(dims, case):
            largest = max(lead, key=dims.__getitem__, default=last)
            dims[largest if dims[largest] > 1 else last] //= 2
        cases.append(replace(case, dims=dims))
    return cases
