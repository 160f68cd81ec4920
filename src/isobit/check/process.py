"""A second Python process: it receives objects, one at a time, and answers each with lines of text."""

import atexit
import base64
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

#: The line after the last one of an answer.
DONE = "done"


class ProcessEnded(Exception):
    """A process ended before its answer was complete."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the process ended with code {code}")
        self.code = code


def started(
    module: str, env: Mapping[str, str] | None = None, apart: bool = False
) -> "subprocess.Popen[str]":
    """`python -m module`, which calls `serve`. With `apart`, Ctrl-C does not reach it: who asks, ends it."""
    command = [sys.executable, "-m", module]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=apart
    )


def ask(process: "subprocess.Popen[str]", request: object) -> Iterator[str]:
    """The lines of its answer, as they come."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(base64.b64encode(pickle.dumps(request)).decode() + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        raise ProcessEnded(process.wait()) from None
    for line in process.stdout:
        if line == f"{DONE}\n":
            return
        yield line
    raise ProcessEnded(process.wait())


def serve(answer: Callable[[Any, Callable[[str], None]], None]) -> None:
    """In the second process: `answer(request, say)` says the lines of its answer, until standard input is
    closed, and then ends the process. If that happens in the middle of an answer, the process that asked is
    gone, and this one ends at once. What somebody's code prints is no answer, and is not read."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    lines: SimpleQueue[str | None] = SimpleQueue()

    def say(line: str) -> None:
        print(line, file=answers, flush=True)

    busy = Event()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        if busy.is_set():
            os._exit(1)
        lines.put(None)

    Thread(target=read, daemon=True).start()
    try:
        while (line := lines.get()) is not None:
            busy.set()
            answer(pickle.loads(base64.b64decode(line)), say)
            busy.clear()
            say(DONE)
    except BaseException:  # the other thread still reads, and Python would wait for it
        traceback.print_exc()
        os._exit(1)
    # Python is not taken apart: nobody needs its memory back, and Triton 3.9, whose objects outlive that,
    # reports each of them as a leak. Handlers are called, since they end children and remove files.
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(0)
