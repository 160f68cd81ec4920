"""The whole check, as `isobit check` runs it, in a process of its own. It takes minutes, so it starts with
the tests (see `conftest.py`), and they are given its cells when they ask."""

import atexit
import pickle
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from isobit.arch import default_device
from isobit.check.runner import Cell, Request, run


@cache
def started() -> tuple["subprocess.Popen[bytes]", Path]:
    """(the process, where it will leave the cells)."""
    out = Path(tempfile.mkdtemp(prefix="isobit-check-")) / "cells"
    process = subprocess.Popen([sys.executable, __file__, str(out)], stdout=subprocess.DEVNULL)
    atexit.register(process.terminate)  # if nobody waited for it
    return process, out


@cache
def cells() -> list[Cell]:
    process, out = started()
    assert process.wait() == 0, "the check broke off; run `isobit check` to see why"
    found: list[Cell] = pickle.loads(out.read_bytes())
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(pickle.dumps(run(Request(device=default_device()))))
