"""Candidates that change PyTorch's global state, and what else made a check say the wrong thing."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import third_party
from candidate_faults import check, fault, unwrapped
from commands import Isobit
from isobit import ContractError, testing
from isobit.check.candidate import candidate_of
from isobit.check.report import LONGEST, brief
from isobit.check.torch_state import preserved
from isobit.frame.op import known_op
from isobit.spec.proofs import proof_of

CPU = torch.device("cpu")
CASE = "B=2 S=2 T=5 V=33 fp32"


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """Whatever a test does, the next one begins with the same state; and a check leaves none behind."""
    with preserved() as changed:
        yield
    assert changed == []


CHANGES: dict[str, Callable[[], Any]] = {
    "default dtype from fp32 to fp64": lambda: torch.set_default_dtype(torch.float64),
    "default device from none to meta": lambda: torch.set_default_device("meta"),
    "deterministic mode from off to a warning": lambda: torch.use_deterministic_algorithms(
        True, warn_only=True
    ),
    "grad mode from True to False": lambda: torch.set_grad_enabled(False),
    "autocast on cpu from False to True": lambda: torch.set_autocast_enabled("cpu", True),
    "number of threads from": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "float32 precision from highest to medium": lambda: torch.set_float32_matmul_precision("medium"),
    "float32 precision from highest to tf32": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "cuDNN's benchmark mode from False to True": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "use of flash attention from True to False": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "random generator": lambda: torch.manual_seed(0),
}


@pytest.mark.parametrize("words", CHANGES)
def test_a_change_of_the_state_is_named_and_set_back(words: str) -> None:
    with preserved() as changed:
        CHANGES[words]()
    assert len(changed) == 1 and changed[0].startswith(words)
    with preserved() as changed:
        pass
    assert changed == []


def test_the_precision_is_named_also_after_use_of_the_older_interface() -> None:
    """Then that still answers, and says that nothing has changed."""
    with preserved():
        torch.set_float32_matmul_precision("highest")
        test_a_change_of_the_state_is_named_and_set_back("float32 precision from highest to tf32")


def changing(change: Callable[[], Any], only_first: bool = False) -> Callable[..., Tensor]:
    done: list[int] = []

    def logp(logits: Tensor, token_ids: Tensor) -> Tensor:
        if not (only_first and done):
            change()
        done.append(1)
        return third_party.right(logits, token_ids)

    return logp


def test_a_candidate_that_changes_the_state_fails_and_nothing_leaks() -> None:
    words = "default dtype from fp32 to fp64"
    assert f"changed PyTorch's {words}" in fault(changing(CHANGES[words]), "accuracy", case=CASE)
    assert check(third_party.right, "accuracy", case=CASE)["fail"] == 0


def test_one_that_breaks_the_check_itself_is_told_why() -> None:
    text = fault(changing(CHANGES["default device from none to meta"]), "accuracy", case=CASE)
    assert "changed PyTorch's default device from none to meta; then: RuntimeError" in text


def test_a_change_by_the_first_call_alone_is_seen_once() -> None:
    """That call only shows what the function returns, and is made before any law."""
    text = fault(changing(CHANGES["random generator"], only_first=True), "accuracy")
    assert text.count("changed PyTorch's random generator") == 1


def test_a_change_by_the_backward_is_seen() -> None:
    class Seeds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Tensor) -> Tensor:
            return logits.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            torch.manual_seed(0)
            return grads[0]

    def logp(logits: Tensor, token_ids: Tensor) -> Tensor:
        return third_party.right(Seeds.apply(logits), token_ids)

    text = fault(logp, "gradient")
    assert text.count("changed PyTorch's random generator") == 1  # one reason
    assert text.count("FAIL logp ") > 5  # and not of the first alone


MODULE = """
import torch
from third_party import right
torch.set_default_dtype(torch.float64)
def prints(logits, token_ids):
    print("{debug")
    return right(logits, token_ids)
"""


def test_a_change_at_import_is_reported_and_set_back(
    isobit: Isobit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a candidate prints is no part of the JSON."""
    (tmp_path / "state_at_import.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    command = ["check", "--op", "logp", "--candidate", "state_at_import:prints", "--law", "accuracy"]
    found = isobit(*command, "--device", "cpu", "--case", CASE, "--json", "-", "--html", str(tmp_path / "p"))
    report = json.loads(found.out)
    serves = report["candidates"][0]["serves"]
    assert report["passed"] and serves["import_changed"] == ["default dtype from fp32 to fp64"]
    assert "Importing it changed PyTorch" in (tmp_path / "p").read_text()
    assert torch.get_default_dtype() == torch.float32
    sys.modules.pop("state_at_import", None)


# Compiled functions


def test_a_compiled_candidate_is_compiled_for_every_case() -> None:
    """After eight sizes PyTorch would call the function as it was written."""

    def wrong(logits: Tensor, token_ids: Tensor) -> Tensor:
        return third_party.right(logits, token_ids) + 1

    def wrong_if_compiled(logits: Tensor, token_ids: Tensor) -> Tensor:
        found = third_party.right(logits, token_ids)
        return found + 1 if torch.compiler.is_compiling() else found

    compiled = torch.compile(wrong_if_compiled, backend="eager", dynamic=False)
    failures = [fault(each, "accuracy").count("FAIL logp ") for each in (wrong, compiled)]
    assert failures[0] == failures[1] > 8


# Cases


def test_cases_are_tested_without_the_options_that_a_candidate_does_not_take() -> None:
    """Else only those were tested that have no such option: here with ratios near 1 alone, where another
    estimate of the KL is the same."""

    def another(
        policy_logits: Tensor, ref_logits: Tensor, token_ids: Tensor, old_logp: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        mine, theirs = (third_party.right(z, token_ids) for z in (policy_logits, ref_logits))
        old = mine.detach() if old_logp is None else old_logp
        return (mine - old).exp(), 0.5 * (theirs - mine) ** 2

    assert "1:kl: " in fault(another, "accuracy", op="ratio_kl")
    op = known_op("ratio_kl")
    found = candidate_of(op, proof_of(op), another, CPU, name="mine")
    simpler = found.supported_cases(proof_of(op).cases)[len(proof_of(op).cases) :]
    assert len(simpler) > 3 and not any({"temperature", "mask"} & case.options.keys() for case in simpler)
    assert torch.float64 not in {case.dtype for case in simpler}


def test_an_argument_that_may_be_none_is_named() -> None:
    def logits_alone(
        policy_logits: Tensor, ref_logits: Tensor, token_ids: Tensor, old_logp: Tensor | None = None,
        return_kl: bool = True,
    ) -> Tensor:  # fmt: skip
        ref_logits.float()
        mine = third_party.right(policy_logits, token_ids)
        return (mine - (mine.detach() if old_logp is None else old_logp)).exp()

    text = fault(logits_alone, "accuracy", op="ratio_kl")
    assert "It was called with ref_logits=None, which ratio_kl allows: raise NotImplementedError" in text


@torch.library.custom_op("isobit_tests::logp_without_backward", mutates_args=())
def without_backward(logits: Tensor, token_ids: Tensor) -> Tensor:
    return third_party.right(logits, token_ids)


class Unwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor) -> Tensor:
        return third_party.right(logits, token_ids)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError


def unwritten_backward(logits: Tensor, token_ids: Tensor) -> Tensor:
    found: Tensor = Unwritten.apply(logits, token_ids)
    return found


@pytest.mark.parametrize("function", [without_backward, unwritten_backward])
def test_an_op_that_says_it_has_no_backward_is_forward_only(function: Any) -> None:
    """Its outputs require a gradient all the same."""
    report = check(function, "accuracy", "gradient", case=CASE)
    found = {case["law"]: case for case in report["candidates"][0]["cases"]}
    assert found["accuracy"]["status"] == "ok"
    assert found["gradient"]["reason"] == "forward only: it has no backward"


# What a report says


def test_a_long_error_is_printed_in_one_line() -> None:
    def fails(logits: Tensor, token_ids: Tensor) -> Tensor:
        raise RuntimeError("first\n" + "x" * 9000)

    (reason,) = [line for line in fault(fails, "accuracy", case=CASE).splitlines() if "first" in line]
    assert reason.startswith("     RuntimeError: first xxx") and len(reason) < LONGEST + 10
    assert "test_candidate_state.py" in reason  # where is at the end
    assert brief("short") == "short"


def test_outputs_with_other_names_are_named() -> None:
    def named(logits: Tensor, token_ids: Tensor) -> dict[str, Tensor]:
        return {"log_probs": third_party.right(logits, token_ids)}

    text = fault(named, "accuracy", case=CASE)
    assert "     returned a dictionary of log_probs: outputs are logp\n" in text


def test_the_form_of_outputs_is_checked_before_they_are_compiled() -> None:
    def text(logits: Tensor, token_ids: Tensor) -> str:
        return "logp"

    assert "output logp is str, not a tensor" in fault(text, "traceable")


class Layer(torch.nn.Module):
    def forward(self, logits: Tensor, token_ids: Tensor) -> Tensor:
        return third_party.right(logits, token_ids)


def test_a_class_of_modules_needs_an_object() -> None:
    with pytest.raises(ContractError, match="is a class: name an object of it, or the class with an --adap"):
        check(Layer, "accuracy", case=CASE)
    assert check(Layer, "accuracy", case=CASE, adapter=lambda made: made())["ok"] == 1


def test_a_kernel_of_triton_without_its_interpreter_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def launches(logits: Tensor, token_ids: Tensor) -> Tensor:
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setattr("isobit.check.runner.triton_is_interpreted", lambda: False)
    assert "Triton's kernels need TRITON_INTERPRET=1" in fault(launches, "accuracy", case=CASE)
    monkeypatch.setattr("isobit.check.request.triton_is_interpreted", lambda: True)
    with pytest.raises(AssertionError, match="TRITON_INTERPRET=1 isobit check --op logp --candidate third"):
        check(third_party.drops_a_tail, "accuracy")


@pytest.mark.parametrize(
    "given",
    [{"case": CASE}, {"dims": {"V": 64}, "dtypes": (torch.bfloat16,)}, {"options": {"temperature": 0.5}}],
)
def test_the_call_that_repeats_a_failure_of_a_local_function_repeats_it(given: dict[str, Any]) -> None:
    def wrong(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
        return third_party.right(logits / temperature, token_ids) + 1

    def failures(text: str) -> list[list[str]]:
        """Reason and command of each; the reasons of these differ."""
        lines = unwrapped(text).splitlines()
        return [lines[i : i + 3] for i, line in enumerate(lines) if line.startswith("FAIL")]

    first = failures(fault(wrong, "accuracy", **given))[0]
    call = first[2].strip().replace("<the function>", "wrong").removeprefix("isobit.")
    with pytest.raises(AssertionError) as again:
        eval(call, {"testing": testing, "torch": torch, "wrong": wrong})
    assert failures(str(again.value)) == [first]
