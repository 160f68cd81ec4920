"""FLA in each of its versions, from the folders that `make parity` makes."""

import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent
VERSIONS = ("0.6.0", "0.5.2")


def folder(version: str) -> str:
    found = ROOT / ".parity" / "fla" / version
    assert found.is_dir(), "run `make parity` first"
    return str(found)


def forget_fla() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("fla", "einops")]:
        del sys.modules[name]


@contextmanager
def imported_from(version: str, name: str) -> Iterator[types.ModuleType]:
    """A module of this version of FLA."""
    sys.path.insert(0, folder(version))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Triton is not supported")
            module = import_module(name)
        assert import_module("fla").__version__ == version
        yield module
    finally:
        sys.path.remove(folder(version))
        forget_fla()
