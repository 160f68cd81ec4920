"""A user's function in a benchmark: a rival named `candidate`, checked before it is timed."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from isobit.bench.cases import Subject
from isobit.bench.check_gate import CheckFailed
from isobit.check.candidate import Candidate
from isobit.check.report import brief
from isobit.check.request import Request
from isobit.check.runner import run
from isobit.frame.backend import UnsupportedError
from isobit.spec.proof import Args
from isobit.spec.rival import Rival

NAME = "candidate"

#: Laws that it must pass to be timed. Bits that do not depend on the batch are only isobit's promise.
LAWS = ("accuracy", "gradient")

#: Failures that are listed if it is not timed.
SHOWN = 4


def with_candidate(subject: Subject, candidate: Candidate) -> Subject:
    """The subject with the candidate as a rival, in every series of its op."""
    rival = Rival(
        NAME, partial(_call, candidate), directions=None if candidate.differentiable else ("fwd",),
        prepare=partial(_supported, candidate), anew=True, takes=None,
    )  # fmt: skip
    series = [replace(s, rivals={NAME: rival, **s.rivals}) for s in subject.series if s.op is candidate.whole]
    return replace(subject, series=series, candidate=candidate.flags)


def check_candidate(candidate: Candidate, device: torch.device, say: Callable[[str], None]) -> None:
    """Raise CheckFailed unless it passes on small cases."""
    say(f"checking {candidate.backends[0].name}, {device}, first")
    cells = run(Request(laws=LAWS, device=device, heavy=False, candidate=candidate))
    wrong = [f"{c.law} {c.case}: {brief(c.reason)}" for c in cells if c.status == "FAIL"]
    if wrong:
        if len(wrong) > SHOWN:
            laws = " ".join(f"--law {law}" for law in LAWS)
            command = f"isobit check --op {candidate.name} {candidate.flags} {laws} --device {device}"
            wrong[SHOWN:] = [f"and {len(wrong) - SHOWN} more: {command}"]
        lines = "\n  ".join(wrong)
        raise CheckFailed(f"{candidate.backends[0].name} fails its check, so it is not timed:\n  {lines}")


def _supported(candidate: Candidate, args: Args) -> Args:
    """The arguments of a call, if the candidate supports it. Checked before anything is timed."""
    reason = candidate.refusal(args)
    if reason is not None:
        raise UnsupportedError(reason)
    return args


def _call(candidate: Candidate, args: Args) -> tuple[Any, ...]:
    assert candidate.function is not None
    return tuple(output for output in candidate.function(**args) if output is not None)
