"""Laws in dtypes that cases are not declared with, as `isobit check --dtype fp64` asks for them: what is
judged, refused and allowed must not take the declared dtype for granted."""

from dataclasses import replace

import pytest
import torch

from isobit.check.laws import LAWS
from isobit.check.runner import OK, UNSUPPORTED, Request, run
from isobit.frame.launch import Recorder
from isobit.spec.compare import OutputCheck
from isobit.spec.proof import Case
from isobit.spec.proofs import proofs
from isobit.spec.trial import Trial, Unsupported

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
OPS = [name for name, proof in proofs().items() if any(b.name == "reference" for b in proof.op.backends)]


def checks(op: str, law: str, dtype: torch.dtype = F64, backend: str = "reference") -> list[OutputCheck]:
    """Of all cases that are quick; a case may have nothing to show of a law."""
    proof, found = proofs()[op], []
    recast: list[Case] = [replace(c, dtype=dtype) for c in LAWS[law].cases(proof) if not c.heavy]
    for case in {c.name: c for c in recast}.values():
        trial = Trial(proof.op, backend, torch.device("cpu"), case, "cpu")
        try:
            found += LAWS[law].run(trial)
        except Unsupported as reason:
            assert "no argument has a gradient" in str(reason)
    return found


def wrong(found: list[OutputCheck]) -> dict[str, str]:
    return {check.output: check.message for check in found if not check.passed}


@pytest.mark.parametrize("op", OPS)
def test_references_compute_fp64_in_fp64(op: str) -> None:
    forward, backward = checks(op, "accuracy"), checks(op, "gradient")
    assert forward and (backward or not proofs()[op].op.differentiable)
    assert wrong(forward + backward) == {}
    assert "fp64" in {check.dtype for check in forward}


@pytest.mark.parametrize("law", ["contract", "memory"])
@pytest.mark.parametrize("op", OPS)
def test_laws_of_behaviour_hold_in_fp64(op: str, law: str) -> None:
    assert wrong(checks(op, law)) == {}


def test_there_are_references() -> None:
    assert {"attention", "logp", "rms_norm"} < set(OPS)


@pytest.mark.parametrize("law", ["accuracy", "contract", "agree"])
def test_a_linear_layer_takes_fp32_with_the_dtype_that_it_is_multiplied_in(law: str) -> None:
    found = checks("det_linear", law, F32, "model")
    assert found and wrong(found) == {}


def test_the_kernels_of_a_linear_layer_never_see_fp32() -> None:
    kernels = proofs()["det_linear"].kernels["triton"]
    recorded = {dtype: Recorder() for dtype in (BF16, F32)}
    for dtype, recorder in recorded.items():
        kernels.record(recorder, dtype)
    keys = [[source.hash() for _, source, _ in recorder.sources()] for recorder in recorded.values()]
    assert keys[0] and keys[0] == keys[1]


def test_a_dtype_that_a_backend_refuses_is_no_failure_of_it() -> None:
    request = Request(ops=("logp",), laws=("traceable",), dtypes=(F64,), device=torch.device("cpu"))
    found = {(cell.backend, cell.status) for cell in run(request)}
    assert ("reference", OK) in found and ("triton", UNSUPPORTED) in found
    assert all(status == UNSUPPORTED for backend, status in found if backend != "reference")
