"""Where an exception comes from: the line in this library that is worth looking at, not one inside torch."""

import functools
import inspect
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from isobit.check.candidate import Candidate
from isobit.frame.op import OPS, Op

_PACKAGE = Path(__file__).parents[1]
#: Everything passes there too.
_JUDGE = str(Path(__file__).with_name("judge.py"))


def raised_at(error: BaseException, op: Op, backend: str, caller: str) -> str:
    """`ops/logp/kernels_triton.py:120`: the last line of the library, or of the backend's own file, that an
    exception passed through. Lines of `caller` itself are ignored, since everything passes there. If there is
    no other, the line that raised it."""
    return raised_in(error, _functions_of(op, backend), caller)


def raised_in(error: BaseException, functions: Iterable[Any], caller: str) -> str:
    """The same for the files of these functions; `caller` may be a folder."""
    frames = traceback.extract_tb(error.__traceback__)
    own = set(_files_of(functions))
    ours = [f for f in frames if _in_package(f.filename) or f.filename in own]
    ours = [f for f in ours if not f.filename.startswith((caller, _JUDGE))]
    where = (ours or frames)[-1]
    path = Path(where.filename)
    name = path.relative_to(_PACKAGE).as_posix() if _in_package(where.filename) else path.name
    return f"{name}:{where.lineno}"


def _in_package(file: str) -> bool:
    return Path(file).is_relative_to(_PACKAGE)


def _functions_of(op: Op, backend: str) -> list[Any]:
    """A backend's functions, including those of its gradients."""
    ops = (o for o in OPS.values() if o.package == op.package)
    functions: list[Any] = [each.run for one in ops for each in one.backends if each.name == backend]
    return [*functions, *(op.written if isinstance(op, Candidate) else ())]


def _files_of(functions: Iterable[Any]) -> Iterator[str]:
    for function in functions:
        while isinstance(function, functools.partial):
            function = function.func
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is not None:
            yield code.co_filename
