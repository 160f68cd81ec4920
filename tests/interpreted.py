"""Programs in Triton's CPU interpreter: in processes of their own, since Triton decides when it decorates a
kernel whether it is compiled or interpreted; and in the quick one, as the checker runs kernels."""

import os
import runpy
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path


def in_interpreter(program: str | Path, *arguments: str | Path, quick: bool = True) -> str:
    """What a program prints: a file, or its text. It may import what the tests may."""
    here = Path(__file__)
    paths = os.pathsep.join((str(here.parent), os.environ.get("PYTHONPATH", "")))
    # The interpreter is numpy, which warns about every NaN and infinity that kernels are given on purpose.
    own = {"TRITON_INTERPRET": "1", "PYTHONPATH": paths, "PYTHONWARNINGS": "ignore"}
    env = {"OMP_NUM_THREADS": "1", **os.environ, **own}  # small matrices: threads would only wait
    kind = "file" if isinstance(program, Path) else "text"
    command = [
        sys.executable,
        str(here),
        "quick" if quick else "own",
        kind,
        str(program),
        *map(str, arguments),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def main(way: str, kind: str, program: str, *arguments: str) -> None:
    from isobit.check.interpreter import quick_interpreter

    sys.argv = [program if kind == "file" else "-c", *arguments]
    with quick_interpreter() if way == "quick" else nullcontext():
        if kind == "file":
            runpy.run_path(program, run_name="__main__")
        else:
            exec(compile(program, "<text>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main(*sys.argv[1:])
