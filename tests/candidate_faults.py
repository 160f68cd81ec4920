"""Checks of somebody's function on a CPU, and the report of one that fails."""

import re
from typing import Any

import pytest

from isobit import testing


def check(function: Any, *laws: str, op: str = "logp", **more: Any) -> dict[str, Any]:
    return testing.check(function, op=op, laws=laws, device="cpu", **more)


def fault(function: Any, law: str, op: str = "logp", **more: Any) -> str:
    with pytest.raises(AssertionError) as found:
        check(function, law, op=op, **more)
    # pytest's summary shows the first line only.
    assert re.match(rf"{op}: \d+ cells? FAILS?\n", str(found.value))
    return str(found.value)
