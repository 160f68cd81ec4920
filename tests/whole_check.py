"""The check of all ops, in a process of its own. It takes minutes, so it starts with the tests (see
`conftest.py`), and they are given its cells when they ask. Tests may run in several processes: the first that
wants the check starts it, and all find what it leaves through the environment.

The law `compile` is left to `make check`, and to `make compat`, which compiles every call. Where Triton's
cache is empty, it takes as long as all other laws."""

import atexit
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from isobit.check.laws import LAWS
from isobit.check.runner import Cell, Request, run
from isobit.frame.device import default_device

#: The laws of this check.
HERE = tuple(law for law in LAWS if law != "compile")

#: The folder that the check of this run of the tests leaves its cells in, or why it broke off.
FOLDER = "ISOBIT_TESTS_CHECK"


def started() -> Path:
    """The folder; the check is under way, or done."""
    if FOLDER not in os.environ:
        folder = os.environ[FOLDER] = tempfile.mkdtemp(prefix="isobit-check-")
        # The shell says when it has ended, in whatever way.
        command = ["sh", "-c", '"$0" "$1" "$2"; touch "$2/ended"', sys.executable, __file__, folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        atexit.register(_stop, process)  # if nobody waited for it
    return Path(os.environ[FOLDER])


def _stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)


@cache
def cells() -> list[Cell]:
    folder = started()
    while not (folder / "ended").exists():
        time.sleep(0.2)
    assert (folder / "cells").exists(), "the check broke off; run `isobit check` to see why"
    found: list[Cell] = pickle.loads((folder / "cells").read_bytes())
    return found


if __name__ == "__main__":
    (Path(sys.argv[1]) / "cells").write_bytes(pickle.dumps(run(Request(laws=HERE, device=default_device()))))
