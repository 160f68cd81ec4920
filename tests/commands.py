"""The `isobit` command in the process of the tests: importing PyTorch again for each would cost seconds."""

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from isobit.cli import main as cli


class Done(NamedTuple):
    code: int
    out: str
    err: str


Isobit = Callable[..., Done]


def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str) -> Done:
    monkeypatch.setattr(sys, "argv", ["isobit", *arguments])
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capfd.readouterr()
    if isinstance(stop.value.code, str):  # Python prints such a code to standard error and exits with 1
        return Done(1, out, err + stop.value.code)
    return Done(int(stop.value.code or 0), out, err)


def report(done: Done) -> dict[str, Any]:
    """What `--json -` printed."""
    found: dict[str, Any] = json.loads(done.out)
    return found
