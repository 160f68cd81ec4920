"""One result of a check."""

from dataclasses import dataclass, field
from typing import Any

from isobit.frame.backend import NONE

OK, FAIL, UNSUPPORTED = "ok", "FAIL", "UNSUPPORTED"


@dataclass
class Cell:
    """One law on one case of one backend of one op. Without a case if the backend cannot serve any."""

    op: str
    backend: str
    law: str
    case: str
    status: str
    reason: str = ""
    numerics: str = NONE
    outputs: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    command: str = ""
    inputs: dict[str, Any] = field(default_factory=dict)  # to make the case again
