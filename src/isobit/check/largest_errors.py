"""Errors with their bounds, the largest share of a bound first: for the console and for pages."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: Laws that compare errors with a bound.
LAWS = ("accuracy", "gradient")


@dataclass(frozen=True)
class Error:
    """The worst element of one output of one case: our distance from the truth, torch's, and the bound."""

    op: str
    backend: str
    case: str
    output: str
    ours: float
    torch: float
    bound: float
    passed: bool

    @property
    def share(self) -> float:
        """The fraction of the bound that is used: above 1 it fails. NaN is beyond any bound."""
        if self.ours == 0:
            return 0.0
        return self.ours / self.bound if self.bound > 0 and math.isfinite(self.ours) else math.inf


def worst_first(cases: Iterable[Mapping[str, Any]]) -> list[Error]:
    """Errors of all outputs of these cells, from their JSON form. Failures come before all others."""
    errors = [
        _error(case, output)
        for case in cases if case["law"] in LAWS
        for output in case["outputs"]
        if output["dtype"] and "worst_abs" in output  # old files have none
        and math.prod(output["shape"])  # an empty tensor has no error
    ]  # fmt: skip
    return sorted(errors, key=lambda e: (e.passed, -e.share))


def _error(case: Mapping[str, Any], output: Mapping[str, Any]) -> Error:
    ours, torchs, slack = (float(output[name]) for name in ("worst_abs", "torch_abs", "atol"))
    # Where plain torch itself has no number, its error is not added to the bound.
    bound = slack + (torchs if math.isfinite(torchs) else 0.0)
    where = (case["op"], case["backend"], case["case"], output["output"])
    return Error(*where, ours, torchs, bound, output["passed"])
