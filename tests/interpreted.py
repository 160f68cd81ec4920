"""Programs in Triton's CPU interpreter. They need separate processes, since Triton decides when it decorates
a kernel whether it is compiled or interpreted. They use the faster interpreter of the checker."""

import os
import runpy
import sys
import tempfile
from contextlib import nullcontext
from functools import cache
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any
from unittest import mock

import isobit

#: Modules that programs may import beside installed ones.
PATHS = (Path(__file__).parent, Path(isobit.__file__).parent.parent)


def in_interpreter(program: str | Path, *arguments: str | Path, quick: bool = True) -> str:
    """What a program prints: a file, or its text. It may import what the tests may."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        given = (quick, program, [str(each) for each in arguments], str(out), str(err))
        process = _processes().Process(target=_run, args=given)
        process.start()
        process.join()
        assert process.exitcode == 0, f"exit code {process.exitcode}\n{err.read_text()}"
        return out.read_text()


@cache
def _processes() -> Any:
    """They are forked from one that has imported PyTorch and Triton: that takes seconds."""
    paths = os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")])
    # The interpreter is numpy, which warns about every NaN and infinity that kernels are given on purpose.
    own = {"TRITON_INTERPRET": "1", "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}
    # Its matrices are small: threads would only wait for each other.
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1", **os.environ, **own}):
        context = get_context("forkserver")
        context.set_forkserver_preload(["isobit.check.interpreter"])
        forkserver.ensure_running()
    return context


def _run(quick: bool, program: str | Path, arguments: list[str], out: str, err: str) -> None:
    """In the process of the program."""
    for number, path in enumerate((out, err), 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    from isobit.check.interpreter import quick_interpreter

    sys.argv = [str(program) if isinstance(program, Path) else "-c", *arguments]
    with quick_interpreter() if quick else nullcontext():
        if isinstance(program, Path):
            runpy.run_path(str(program), run_name="__main__")
        else:
            exec(compile(program, "<text>", "exec"), {"__name__": "__main__"})
