"""Kernels of `rope` and `swiglu` that are known to be bad must fail, each on the law that is there for it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from isobit.check.laws.system import _second_derivative
from isobit.check.runner import FAIL, OK, Cell, Request, run
from isobit.frame.backend import Backend
from isobit.frame.op import OPS
from isobit.ops.rope import reference
from isobit.spec.proof import Args, NoSum
from isobit.spec.proofs import proofs
from isobit.spec.trial import Trial

CPU = torch.device("cpu")
PLAIN = "N=6 H=4 G=2 D=16 R=16 fp32"
BITS = "N=3 H=2 G=1 D=4 R=2 fp16 random"
AGREE = "N=8 H=3 G=2 D=40 R=24 bf16"
FUSED = "B=2 T=3 H=4 G=2 D=64 R=64 fp16 heads rounding=vllm"

Run = Callable[..., Any]


def never(args: dict[str, Any]) -> None:
    """No reason not to serve."""


@contextmanager
def candidate(forward: Run = reference.rope, backward: Run = reference.rope_bwd) -> Iterator[None]:
    """`rope` with a backend "candidate" of another class."""
    with ExitStack() as stack:
        for name, function in (("rope", forward), ("rope_bwd", backward)):
            backend = Backend("candidate", function, "test/heads", never, False, never)
            OPS[name].backends.append(backend)
            stack.callback(OPS[name].backends.remove, backend)
        yield


def only(law: str, case: str | None) -> Cell:
    (cell,) = run(Request(ops=("rope",), backends=("candidate",), laws=(law,), device=CPU, case=case))
    return cell


def test_a_correct_kernel_passes() -> None:
    laws = [("accuracy", PLAIN), ("gradient", PLAIN), ("invariant", BITS), ("agree", AGREE), ("agree", FUSED)]
    with candidate():
        found = [only(law, case) for law, case in laws]
    assert [(c.law, c.reason) for c in found if c.status != OK] == []


def rounded_once(**args: Any) -> Any:
    return reference.rope(**args | {"rounding": "vllm"})


def other_half(**args: Any) -> Any:
    return reference.rope(**args | {"sin": args["sin"].roll(args["sin"].shape[-1] // 2, -1)})


def signed_zeros(**args: Any) -> Any:
    with mock.patch.object(Tensor, "add_", lambda self, zero: self):
        return reference.rope_bwd(**args)


def rounded_twice(**args: Any) -> Any:
    return reference.rope_bwd(**args | {"rounding": "hf"})


@pytest.mark.parametrize(
    ("law", "case", "kernels", "reason"),
    [
        ("agree", AGREE, {"forward": rounded_once}, "q_out: "),
        ("agree", AGREE, {"backward": signed_zeros}, "gradient:q: "),
        ("agree", FUSED, {"backward": rounded_twice}, "gradient:q: "),
        ("accuracy", PLAIN, {"forward": other_half}, "0:q_out: "),
    ],
)
def test_bad_kernels_fail(law: str, case: str, kernels: dict[str, Run], reason: str) -> None:
    with candidate(**kernels):
        cell = only(law, case)
    assert cell.status == FAIL and cell.reason.startswith(reason), cell.reason


# Sums of more than two


def neighbour(**args: Any) -> Any:
    q, k = reference.rope(**args)
    return q + 1e-3 * args["q"].roll(1, -1), k


def of_gradients(**args: Any) -> Any:
    dq, dk = reference.rope_bwd(**args)
    return dq, dk + 1e-2 * args["dk_out"].roll(1, -1)


@pytest.mark.parametrize(
    ("kernels", "reason"),
    [
        ({"forward": neighbour}, "depends on two elements of q or more"),
        ({"backward": of_gradients}, "depends on two elements of the gradient of k_out or more"),
    ],
)
def test_a_third_term_is_found(kernels: dict[str, Run], reason: str) -> None:
    with candidate(**kernels):
        cell = only("invariant", BITS)
    assert cell.status == FAIL and cell.reason.startswith("declared as NoSum, but "), cell.reason
    assert reason in cell.reason


def by_heads(args: Args, name: str, value: Tensor) -> Tensor:
    return torch.zeros_like(value, dtype=torch.int64)


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        (NoSum("as I believe"), "q_out at [0, 0, 0] depends on two elements of q"),
        (NoSum("all of one head", by_heads), "a pair of q has more than two elements"),
    ],
)
def test_the_claim_must_be_true(monkeypatch: pytest.MonkeyPatch, claim: NoSum, reason: str) -> None:
    monkeypatch.setitem(proofs(), "rope", replace(proofs()["rope"], controls=claim))
    with candidate():
        cell = only("invariant", BITS)
    assert cell.status == FAIL and f"declared as NoSum, but {reason}" in cell.reason, cell.reason


# A gradient without a graph


class Squared(torch.autograd.Function):
    """Its gradient depends on q, and has no graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (2 * x * g).detach()


def test_a_missing_second_derivative_is_found() -> None:
    proof = proofs()["rope"]
    (case,) = (c for c in proof.cases if c.name == PLAIN)
    trial = Trial(proof.op, "reference", CPU, case, "cpu")
    assert all(check.passed for check in _second_derivative(trial))
    with mock.patch.object(
        Trial, "call", lambda self, args: (Squared.apply(args["q"]) + 0 * args["k"].sum(),)
    ):
        assert not any(check.passed for check in _second_derivative(trial))
