"""The check of all ops. If `make check` has run for exactly these sources, its report is taken. If not, the
check runs in a process of its own. It takes minutes, so it starts with the tests (see `conftest.py`), and
they are given its cells when they ask. Tests may run in several processes: the first that wants the check
starts it, and all find what it leaves through the environment.

The law `compile` is left to `make check`, and to `make compat`, which compiles every call. Where Triton's
cache is empty, it takes as long as all other laws."""

import atexit
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from isobit.check.laws import LAWS
from isobit.check.runner import Cell, Request, run
from isobit.check.stamp import stamp
from isobit.frame.device import default_device

#: The laws of this check.
HERE = tuple(law for law in LAWS if law != "compile")

#: What `make check` writes, and the parts of its stamp that must be those of this run.
REPORT = Path(__file__).parents[1] / "check.json"
OF_ONE_RUN = ("source_sha", "torch", "triton", "python", "gpu", "driver")

#: The folder that the check of this run of the tests leaves its cells in, or why it broke off.
FOLDER = "ISOBIT_TESTS_CHECK"


def cells_of(path: Path) -> list[Cell] | None:
    """The cells of a report, if it is of a whole check that passed here, with this package and these versions
    of what it rests on. None otherwise."""
    try:
        report = json.loads(path.read_text())
        device = default_device()
        now = stamp(device)
        same = all(report["stamp"][name] == now[name] for name in OF_ONE_RUN)
        if not (same and report["passed"] and report["command"] == Request(device=device).command()):
            return None
        cases = [case for candidate in report["candidates"] for case in candidate["cases"]]
        return [_cell(case) for case in cases if case["law"] in HERE]
    except (OSError, ValueError, KeyError):
        return None


def _cell(case: dict[str, Any]) -> Cell:
    own = {field.name for field in fields(Cell)} - {"inputs"}
    inputs = {name: value for name, value in case.items() if name not in own}
    return Cell(**{name: case[name] for name in own}, inputs=inputs)


def started() -> Path:
    """The folder; the check is under way, or done."""
    if FOLDER not in os.environ and (made := cells_of(REPORT)) is not None:
        folder = os.environ[FOLDER] = tempfile.mkdtemp(prefix="isobit-check-")
        (Path(folder) / "cells").write_bytes(pickle.dumps(made))
        (Path(folder) / "ended").touch()
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
    result: list[Cell] = pickle.loads((folder / "cells").read_bytes())
    return result


if __name__ == "__main__":
    (Path(sys.argv[1]) / "cells").write_bytes(
        pickle.dumps(run(Request(laws=HERE, device=default_device(), brief=True)))
    )
