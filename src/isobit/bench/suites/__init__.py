"""What is timed and is no op: a module here with a list `SERIES`, named as its results file and `--suite`.

Nothing else knows which there are.
"""

import pkgutil
from collections.abc import Sequence
from importlib import import_module

from isobit.bench.series import Series


def suite_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def series_of_suite(name: str) -> Sequence[Series]:
    found: Sequence[Series] = import_module(f"{__name__}.{name}").SERIES
    return found
