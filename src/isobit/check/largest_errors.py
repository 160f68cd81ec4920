"""Errors with their bounds, those that use most of their slack first: for the console and for pages."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from isobit.spec.compare import part_used

#: Laws that compare errors with a bound.
LAWS = ("accuracy", "gradient")


@dataclass(frozen=True)
class Error:
    """The worst element of one output of one case: our distance from the truth, torch's, and the slack that
    ours may have beyond that."""

    op: str
    backend: str
    case: str
    output: str
    ours: float
    torch: float
    slack: float
    passed: bool

    @property
    def bound(self) -> float:
        """Where plain torch itself has no number, its error is not added."""
        return self.slack + (self.torch if math.isfinite(self.torch) else 0.0)

    @property
    def used(self) -> float:
        """The part of the slack that is used: above 1 it fails."""
        return part_used(self.ours, self.torch, self.slack)

    @property
    def in_words(self) -> str:
        if self.used == 0:
            return "no farther than torch"
        return f"{self.used:.0%} of the slack" if self.used < 10 else f"{self.used:.2g} times the slack"


def worst_first(cases: Iterable[Mapping[str, Any]]) -> list[Error]:
    """Errors of all outputs of these cells, from their JSON form. Failures come before all others."""
    errors = [
        _error(case, output)
        for case in cases if case["law"] in LAWS
        for output in case["outputs"]
        if output["dtype"] and "worst_abs" in output  # old files have none
        and (output["rtol"] or output["worst_abs"])  # or it compares bits
        and math.prod(output["shape"])  # an empty tensor has no error
    ]  # fmt: skip
    return sorted(errors, key=lambda e: (e.passed, -round(min(e.used, 1e9), 2), -e.ours))


def _error(case: Mapping[str, Any], output: Mapping[str, Any]) -> Error:
    ours, torchs, slack = (float(output[name]) for name in ("worst_abs", "torch_abs", "atol"))
    where = (case["op"], case["backend"], case["case"], output["output"])
    return Error(*where, ours, torchs, slack, output["passed"])
