"""An op must pass its check before it is timed: on the same backend and with the same options as in the
benchmark."""

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from isobit.check.request import small_args
from isobit.check.source_hash import kernel_sha
from isobit.check.stamp import gpu_name
from isobit.frame.contract import ContractError
from isobit.frame.op import known_op
from isobit.spec.options import text_of


class CheckFailed(RuntimeError):
    """The op fails its check, so it is not timed."""


#: Laws of numbers and of bits that must have passed in a report.
_NEEDED = {"accuracy", "invariant"}


@dataclass
class CheckGate:
    """What has been checked in this run: each op, backend and set of options once. A report of `isobit check`
    in `reports` replaces a new check of what it proves; with `skip` nothing is checked."""

    device: torch.device
    reports: Sequence[Path]
    skip: bool
    say: Callable[[str], None]
    done: set[tuple[str, str, str]] = field(default_factory=set)
    #: Ops of which a plain call is needed sooner or later. They are checked together when the first one is:
    #: the processes of a check take longer to start than most checks.
    needed: Set[str] = frozenset()
    #: Failures of plain calls that were checked together, by op and backend.
    failures: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def check(self, op: str, backend: str, options: Mapping[str, Any]) -> None:
        """Raise CheckFailed unless this backend of an op passes its check with these options."""
        words = "".join(f" {name}={text_of(value)}" for name, value in options.items())
        if self.skip or (op, backend, words) in self.done:
            return
        name = f"{op} on {backend}{' with' if words else ''}{words}"
        proof = self._proof(op, backend, options)
        if proof is not None:
            self.say(f"{name} passed its check in {proof}")
        else:
            failures = None if words else self.failures.get((op, backend))
            if failures is None:
                self.say(f"checking {name}, {self.device}, first")
                from isobit.check.runner import quick_check

                failures = quick_check(op, self.device, backend, options)
            if failures:
                raise CheckFailed(f"{name} fails its check, so it is not timed:\n  " + "\n  ".join(failures))
        self.done.add((op, backend, words))

    def _proof(self, op: str, backend: str, options: Mapping[str, Any]) -> Path | None:
        return next((p for p in self.reports if proven(op, backend, self.device, p, set(options))), None)

    def check_default(self, op: str) -> None:
        """The same for the backend that serves a plain call."""
        if not self.skip:
            if op in self.needed:
                self._check_together(sorted(self.needed))
            self.check(op, self._served(op), {})

    def _check_together(self, ops: Sequence[str]) -> None:
        """A failure is raised where what needs the op would be timed."""
        from isobit.check.runner import quick_checks

        self.needed = frozenset()
        pairs = [(op, self._served(op)) for op in ops]
        pairs = [pair for pair in pairs if (*pair, "") not in self.done and self._proof(*pair, {}) is None]
        if len(pairs) > 1:
            named = ", ".join(f"{op} on {backend}" for op, backend in pairs)
            self.say(f"checking {named}, {self.device}, first")
            self.failures |= quick_checks(pairs, self.device)

    def _served(self, op: str) -> str:
        served = known_op(op).explain(**small_args(known_op(op), self.device)).backend
        assert served is not None
        return served


def require_relevant_report(path: Path, ops: Sequence[str]) -> None:
    """Raise ContractError unless a report of `isobit check` is about one of these ops."""
    checked = {one["op"] for one in read_check(path)["candidates"]}
    if not checked & set(ops):
        raise ContractError(
            f"--check-report {path} has no effect: it is about {', '.join(sorted(checked)) or 'nothing'}, "
            f"and {', '.join(ops)} would be timed"
        )


def read_check(path: Path) -> dict[str, Any]:
    """A report of `isobit check`."""
    try:
        report = json.loads(path.read_text())
        known = isinstance(report, dict) and "stamp" in report and "candidates" in report
    except (OSError, ValueError) as error:
        raise ContractError(f"{path}: not a report of isobit check ({type(error).__name__})") from None
    if not known:
        raise ContractError(f"{path}: not a report of isobit check")
    return dict(report)


def proven(op: str, backend: str, device: torch.device, path: Path, options: Set[str]) -> bool:
    """Whether a report of `isobit check` covers these kernels on this device, for numbers and bits of this
    backend, and for calls with each of these options, whatever its value: the error of what is timed is in
    its own row. For a backend that promises no bits only numbers are needed."""
    report = read_check(path)
    try:
        stamp = report["stamp"]
        mine = [c for c in report["candidates"] if (c["op"], c["candidate"]) == (op, backend)]
        passed = [case for c in mine for case in c["cases"] if case["status"] == "ok"]
        held = {case["law"] for case in passed}
        tried = {name for case in passed for name in case.get("options", ())}
        promised = _NEEDED if any(c["numerics"] != "none" for c in mine) else {"accuracy"}
        written_by = (stamp.get("kernels", {}).get(known_op(op).folder), stamp["gpu"])
    except (KeyError, TypeError) as error:
        raise ContractError(f"{path}: not a report of isobit check ({type(error).__name__})") from None
    if not mine:
        return False
    if written_by != (kernel_sha(known_op(op).folder), gpu_name(device)):
        raise ContractError(f"{path}: was written by other kernels or on another device: check again")
    if report.get("interrupted"):
        raise ContractError(f"{path}: is of a check that was {report['interrupted']}: check again")
    if report.get("tolerances", {}).get("looser"):
        raise ContractError(f"{path}: was judged by looser tolerances than isobit's: check without them")
    if any(c["fail"] for c in mine):
        raise CheckFailed(f"{op} on {backend} fails its check in {path}, so it is not timed")
    return promised <= held and options <= tried
