"""Suites and goals: Python files outside the package that `isobit bench` loads.

A suite is a file that declares `SERIES`, and may declare `GOALS`. `--suite FILE` is any such file, and
`--suite NAME` one of `benchmarks/suites` in a checkout of isobit. The goals of a folder of ops are `GOALS` in
`benchmarks/goals/<folder>.py`. Both are found by their names: there is no list of them. An installed package
has neither folder, and then `isobit bench` times ops without goals.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from isobit.bench.goals import Goal
from isobit.check.source_hash import PACKAGE
from isobit.frame.contract import ContractError
from isobit.spec.series import Series

#: The folder of a checkout that holds suites and goals.
BENCHMARKS = PACKAGE.parent.parent / "benchmarks"


def suite_names() -> list[str]:
    """The suites of the checkout: files, and folders with an `__init__.py`."""
    folder = BENCHMARKS / "suites"
    return sorted(
        [path.stem for path in folder.glob("*.py")] + [p.parent.name for p in folder.glob("*/__init__.py")]
    )


def load_suite(name: str) -> tuple[Sequence[Series], Sequence[Goal]]:
    """Series and goals of a suite: the file of this path, or one of the checkout by name."""
    if name.endswith(".py"):
        module = _load_file(Path(name))
    elif name in suite_names():
        module = _import_benchmark(f"suites.{name}")
    else:
        known = ", ".join(suite_names()) or "none, they are in a checkout of isobit"
        raise ContractError(f"unknown suite {name!r}; known: {known}; or a Python file")
    if not hasattr(module, "SERIES"):
        raise ContractError(f"--suite {name}: declares no SERIES")
    return module.SERIES, getattr(module, "GOALS", ())


def goals_of(folder: str) -> Sequence[Goal]:
    """The goals of a folder of ops; none without a checkout."""
    if not (BENCHMARKS / "goals" / f"{folder}.py").is_file():
        return ()
    goals: Sequence[Goal] = _import_benchmark(f"goals.{folder}").GOALS
    return goals


def _import_benchmark(name: str) -> ModuleType:
    """A module of the checkout's `benchmarks`. The checkout comes last on the path: it shadows nothing."""
    root = str(BENCHMARKS.parent)
    if root not in sys.path:
        sys.path.append(root)
    return import_module(f"{BENCHMARKS.name}.{name}")


def _load_file(path: Path) -> ModuleType:
    """A user's file. Its folder comes last on the path, so that it can import its neighbours."""
    spec = spec_from_file_location(f"isobit_suite_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ContractError(f"--suite {path}: no such file")
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.append(folder)
    module = sys.modules[spec.name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a file may raise anything while it is loaded
        raise ContractError(f"--suite {path}: {type(error).__name__}: {error}") from error
    return module
