"""Checks of somebody's function on a CPU, and the report of one that fails."""

import re
from typing import Any

import pytest

from isobit import testing

COMMAND = r" +(TRITON_INTERPRET=1 )?isobit(\.testing\.check\(| check )"


def check(function: Any, *laws: str, op: str = "logp", **more: Any) -> dict[str, Any]:
    return testing.check(function, op=op, laws=laws, device="cpu", **more)


def fault(function: Any, law: str, op: str = "logp", **more: Any) -> str:
    with pytest.raises(AssertionError) as found:
        check(function, law, op=op, **more)
    # pytest's summary shows the first line only.
    assert re.match(rf"{op}: \d+ cells? FAILS?\n", str(found.value))
    return unwrapped(str(found.value))


def unwrapped(text: str) -> str:
    """Every reason on one line. Lines of cells begin with FAIL, and those of commands name isobit."""
    lines: list[str] = []
    for line in text.splitlines():
        more = line.startswith("     ") and lines and lines[-1].startswith("     ")
        if more and not re.match(COMMAND, line) and not re.match(COMMAND, lines[-1]):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return "\n".join(lines)
