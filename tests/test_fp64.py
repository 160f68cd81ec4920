"""Every op in fp64, as `isobit check --dtype fp64` asks for it: the references compute as precisely as their
inputs are, and what is judged and refused does not take a narrower dtype for granted. The whole check runs
cases in the dtypes that they are declared with, which hardly any are in fp64."""

from dataclasses import replace

import pytest
import torch

from isobit.check.compare import OutputCheck
from isobit.check.law import LAWS
from isobit.check.proof import Case
from isobit.check.proofs import proofs
from isobit.check.trial import Trial, Unsupported

OPS = [name for name, proof in proofs().items() if any(b.name == "reference" for b in proof.op.backends)]


def checks(op: str, law: str) -> list[OutputCheck]:
    """Of all cases that are quick; a case may have nothing to show of a law."""
    proof, found = proofs()[op], []
    wide: list[Case] = [replace(c, dtype=torch.float64) for c in LAWS[law].cases(proof) if not c.heavy]
    for case in {c.name: c for c in wide}.values():
        trial = Trial(proof.op, "reference", torch.device("cpu"), case, "cpu")
        try:
            found += LAWS[law].run(trial)
        except Unsupported as reason:
            assert "no argument has a gradient" in str(reason)
    return found


@pytest.mark.parametrize("op", OPS)
def test_numbers_are_those_of_fp64(op: str) -> None:
    forward, backward = checks(op, "accuracy"), checks(op, "gradient")
    assert forward and (backward or not proofs()[op].op.differentiable)
    assert {check.output: check.message for check in forward + backward if not check.passed} == {}
    assert "fp64" in {check.dtype for check in forward}


@pytest.mark.parametrize("op", OPS)
def test_bad_calls_are_refused(op: str) -> None:
    assert {check.output: check.message for check in checks(op, "contract") if not check.passed} == {}


def test_most_ops_have_a_reference() -> None:
    assert len(OPS) >= 9
