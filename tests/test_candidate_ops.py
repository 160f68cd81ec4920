"""Guards candidates for every op: a plain function that takes few options is judged, and one without a
gradient is known as one."""

import functools
import inspect
from typing import Any

import pytest
import torch

import plain_ops
from isobit import testing
from isobit.check.candidate import candidate_of
from isobit.frame.contract import MISSING
from isobit.frame.op import CONTROLS, known_op, public_ops
from isobit.spec.proofs import proof_of

CPU = torch.device("cpu")


def forward_only(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return function(*args, **kwargs)

    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return call


@pytest.mark.parametrize("name", sorted(public_ops()))
def test_a_plain_function_is_judged_by_its_numbers(name: str) -> None:
    op = known_op(name)
    laws = ("accuracy", "gradient") if op.differentiable else ("accuracy",)
    report = testing.check(getattr(plain_ops, name), name, laws=laws, device="cpu")
    for law in laws:
        cells = [c for c in report["candidates"][0]["cases"] if c["law"] == law and c["status"] == "ok"]
        judged = [c for c in cells if any(0 not in o["shape"] for o in c["outputs"] if o["dtype"])]
        assert judged, law  # not only of empty tensors
    declared = {case.name for case in proof_of(op).cases}
    others = {c["case"] for c in report["candidates"][0]["cases"]} - declared
    controls = {p.name for p in CONTROLS}
    optional = [p for p in op.contract.params if p.default is not MISSING and p.name not in controls]
    # The options of `spread` are the numbers of rows, which every function takes. Where no argument is
    # optional, options of cases are dtypes of those that every function takes.
    if any(case.options for case in proof_of(op).cases) and optional and name != "spread":
        assert others  # some cases vary what a plain function does not take: these are tested without it


@pytest.mark.parametrize("name", sorted(n for n, op in public_ops().items() if op.differentiable))
def test_a_forward_only_function_is_known_as_one(name: str) -> None:
    op, plain = known_op(name), getattr(plain_ops, name)
    whole, half = (
        candidate_of(op, proof_of(op), function, CPU, name=name) for function in (plain, forward_only(plain))
    )
    assert whole.differentiable == op.differentiable and "gradient" not in whole.lacks
    assert half.differentiable == () and half.lacks["gradient"].startswith("forward only")
    assert half.in_words.endswith("; forward only") and not whole.in_words.endswith("forward only")


def test_an_op_without_gradients_is_not_forward_only() -> None:
    op = known_op("group_advantages")
    found = candidate_of(op, proof_of(op), plain_ops.group_advantages, CPU, name="mine")
    assert "forward only" not in found.in_words


# Cases that it takes


def test_bits_are_judged_although_all_cases_vary_something() -> None:
    """Those of products have an option for the output; a plain product takes none."""

    def cells(function: Any) -> dict[str, str]:
        report = testing.check(function, "det_gemm", laws=("repeatable", "invariant"), device="cpu")
        return {c["case"]: c["status"] for c in report["candidates"][0]["cases"] if c["law"] == "invariant"}

    def one_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.ndim > 2:
            raise NotImplementedError("two dimensions alone")
        by_rows = [(row[:, None].float() * b.float()).contiguous().sum(0) for row in a]
        return torch.stack(by_rows).to(a.dtype) if by_rows else a @ b

    assert cells(forward_only(one_by_one)) == {
        "M=130 K=200 N=104 fp16 out=fp32": "UNSUPPORTED", "B=2 M=66 K=150 N=70 bf16 out=fp32": "UNSUPPORTED",
        "M=130 K=200 N=104 fp16": "ok", "B=2 M=66 K=150 N=70 bf16": "UNSUPPORTED",
    }  # fmt: skip

    def by_batch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Splits k into as many parts as there are rows."""
        first = a.float()[..., :, : len(a)] @ b.float()[..., : len(a), :]
        return (first + a.float()[..., :, len(a) :] @ b.float()[..., len(a) :, :]).to(a.dtype)

    with pytest.raises(AssertionError, match=r"of 130 rows alone: \d+ of \d+ differ"):
        testing.check(forward_only(by_batch), "det_gemm", laws=("invariant",), device="cpu")


def test_cases_are_not_simplified_to_calls_that_promise_no_bits() -> None:
    """A mean over the batch affects every gradient: no bits of it are promised without `reduction`."""
    op = known_op("grpo_loss")
    found = candidate_of(op, proof_of(op), plain_ops.grpo_loss, CPU, name="mine")
    assert found.supported_cases(proof_of(op).bit_cases, of_bits=True) == list(proof_of(op).bit_cases)
    assert any("ref" in case.options for case in found.supported_cases(proof_of(op).cases))


def test_a_call_that_it_refuses_itself_is_unsupported_with_its_words() -> None:
    report = testing.check(plain_ops.det_gemm, "det_gemm", laws=("accuracy",), device="cpu")
    said = {c["reason"] for c in report["candidates"][0]["cases"] if c["case"].startswith("B=2 M=3")}
    assert said == {"it says: two dimensions alone"}


def test_equal_bits_that_prove_nothing_are_unsupported() -> None:
    """With integers every order of a sum gives the same bits."""

    def in_fp64(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.double() @ b.double()).to(a.dtype)

    report = testing.check(
        forward_only(in_fp64), "det_gemm", laws=("accuracy", "invariant"), device="cpu",
        dims={"M": 5, "K": 20, "N": 7}, dtypes=(torch.bfloat16,),
    )  # fmt: skip
    (invariant,) = [c for c in report["candidates"][0]["cases"] if c["law"] == "invariant"]
    assert invariant["reason"].startswith("equal bits prove nothing here")
