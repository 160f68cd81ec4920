"""Benchmarks that are not of one op: each is a module or package here with a list `SERIES`. Its name is that
of its results file and of `--suite`.

There is no other list of them.
"""

import pkgutil
from collections.abc import Sequence
from importlib import import_module

from isobit.spec.series import Series


def suite_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def series_of_suite(name: str) -> Sequence[Series]:
    found: Sequence[Series] = import_module(f"{__name__}.{name}").SERIES
    return found
