"""Processes in Triton's interpreter: they are sent requests, and answer with cells as they are done.

They are apart because Triton decides when it decorates a kernel whether it is compiled or interpreted.
Starting one takes as long as many a law, so a few of them share all requests. One that dies has broken one
request; another is started for the next.
"""

import base64
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, Queue, SimpleQueue
from threading import Thread

from isobit.check.cell import FAIL, Cell
from isobit.check.request import Request

#: Processes at a time, beside the one that asks.
WORKERS = 2

#: A request was answered.
DONE = "done"


def start(requests: list[Request]) -> "Queue[Cell | None]":
    """Begin with the requests, each of one op, backend and law. None comes after the last cell."""
    cells: Queue[Cell | None] = Queue()
    left: SimpleQueue[Request] = SimpleQueue()
    for request in requests:
        left.put(request)

    def work() -> None:
        worker = _Worker()
        try:
            while True:
                for cell in worker.answer(left.get_nowait()):
                    cells.put(cell)
        except Empty:
            pass
        finally:
            worker.end()

    def work_all() -> None:
        try:
            with ThreadPoolExecutor(WORKERS) as pool:
                threads = [pool.submit(work) for _ in requests[:WORKERS]]
            for thread in threads:
                if error := thread.exception():  # whoever waits for the cells must hear of it
                    cells.put(_broken(requests[0], f"{type(error).__name__}: {error}"))
        finally:
            cells.put(None)  # or whoever waits would wait for ever

    Thread(target=work_all, daemon=True).start()
    return cells


def _broken(request: Request, reason: str) -> Cell:
    (op,), (backend,), (law,) = request.ops, request.backends, request.laws
    return Cell(op, backend, law, "", FAIL, reason, command=f"TRITON_INTERPRET=1 {request.command()}")


class _Worker:
    """A process, once it is needed."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def answer(self, request: Request) -> Iterator[Cell]:
        process = self.process = self.process or _started()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(base64.b64encode(pickle.dumps(request)).decode() + "\n")
        process.stdin.flush()
        got = 0
        for line in process.stdout:
            if line == f"{DONE}\n":
                return
            if line.startswith("{"):
                got += 1
                yield Cell(**json.loads(line))
        self.end()
        yield _broken(
            request, f"the interpreter's process ended after {got} cells with code {process.returncode}"
        )

    def end(self) -> None:
        if self.process is not None:
            self.process.communicate()
            self.process = None


def _started() -> "subprocess.Popen[str]":
    # The interpreter is numpy, which warns about every NaN and infinity that kernels are given on purpose.
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore::RuntimeWarning"}
    command = [sys.executable, "-m", "isobit.check.workers"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True)


def _serve() -> None:
    """In the worker."""
    from isobit.check.runner import run  # which imports this file

    for line in sys.stdin:
        run(
            pickle.loads(base64.b64decode(line)), lambda cell: print(json.dumps(vars(cell)), flush=True), True
        )
        print(DONE, flush=True)


if __name__ == "__main__":
    _serve()
