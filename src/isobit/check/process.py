"""A second Python process: it receives objects, one at a time, and answers each with lines of text."""

import base64
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

#: The line after the last one of an answer.
DONE = "done"


class ProcessEnded(Exception):
    """A process ended before its answer was complete."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the process ended with code {code}")
        self.code = code


def started(module: str, env: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
    """`python -m module`, which calls `serve`."""
    command = [sys.executable, "-m", module]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)


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


def serve(answer: Callable[[Any], None]) -> None:
    """In the second process: `answer` prints an answer to each request, until standard input is closed."""
    for line in sys.stdin:
        answer(pickle.loads(base64.b64decode(line)))
        print(DONE, flush=True)
