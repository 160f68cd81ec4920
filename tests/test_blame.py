"""A failure points at the line of the library, or of the candidate, that is worth looking at."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from isobit.check.request import Request
from isobit.check.runner import FAIL, run
from isobit.frame.op import known_op
from isobit.ops.logp import reference

LOGP = known_op("logp")


@contextmanager
def candidate(run_it: Any) -> Iterator[None]:
    LOGP.backend("candidate", run=run_it, numerics="none")
    try:
        yield
    finally:
        LOGP.backends.pop()


def reason(law: str = "accuracy") -> str:
    request = Request(ops=("logp",), backends=("candidate",), laws=(law,), dims={"N": 3, "V": 7})
    (cell,) = run(request)
    assert cell.status == FAIL
    return cell.reason


def fails_inside_torch(**args: Any) -> Any:
    return torch.nn.functional.cross_entropy(args["logits"], args["token_ids"][:1])


def test_what_fails_inside_torch_points_at_the_candidates_line() -> None:
    line = fails_inside_torch.__code__.co_firstlineno + 1
    with candidate(fails_inside_torch):
        assert reason().endswith(f"(test_blame.py:{line})")
    with candidate(partial(partial(fails_inside_torch))):
        assert reason().endswith(f"(test_blame.py:{line})")


def test_what_fails_inside_the_library_is_named_by_its_place_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **named: Any) -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(torch, "where", broken)  # as if torch itself failed, in a file that is not ours
    with candidate(reference.logp):
        found = reason()
    assert found.startswith("RuntimeError: boom (") and "test_blame" not in found
    name, _, line = found.rpartition("(")[2].rstrip(")").partition(":")
    assert name.startswith(("ops/logp/", "frame/", "kernels/", "check/")) and line.isdecimal()


def test_a_failure_outside_of_both_points_at_what_raised_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from isobit.check.laws import LAWS

    def law(trial: object) -> list[Any]:
        raise RuntimeError("boom")

    monkeypatch.setitem(LAWS, "accuracy", dataclasses.replace(LAWS["accuracy"], run=law))
    with candidate(partial(print)):
        assert reason().startswith("RuntimeError: boom (test_blame.py:")
