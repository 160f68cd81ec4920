"""Someone else's function under the checker: a right one passes, a wrong one fails with a report that names
its fault, and what it does not take is UNSUPPORTED with that reason."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import isobit as isobit_package
import third_party
from candidate_faults import check, fault
from commands import Isobit
from isobit import ContractError, testing
from isobit.check.runner import UNSUPPORTED
from isobit.frame.op import OPS
from isobit.spec.proof import InputOptions
from isobit.spec.proofs import proof_of

HERE, PACKAGE = Path(__file__).parent, Path(testing.__file__).parent


def cases(report: dict[str, Any], law: str) -> list[dict[str, Any]]:
    return [c for one in report["candidates"] for c in one["cases"] if c["law"] == law]


NUMBERS = ("accuracy", "gradient", "repeatable", "written", "invariant")


def test_a_correct_candidate_passes_and_missing_options_are_unsupported() -> None:
    report = check(third_party.right, *NUMBERS)
    assert report["ok"] > 10 and all(any(c["status"] == "ok" for c in cases(report, law)) for law in NUMBERS)
    reasons = {c["reason"] for law in NUMBERS for c in cases(report, law) if c["status"] == UNSUPPORTED}
    assert "it does not take temperature" in reasons
    assert "it does not take ignore_index, and some rows here are ignored" in reasons


def test_forward_only_is_not_credited_with_a_backward_of_isobit() -> None:
    report = check(third_party.forward_only, "accuracy", "gradient", "memory")
    (gradient,) = cases(report, "gradient")
    assert gradient["status"] == UNSUPPORTED and gradient["reason"].startswith("forward only")
    assert [o["output"] for c in cases(report, "memory") for o in c["outputs"]] == ["fwd"]
    masked = [c for c in cases(report, "accuracy") if "mask" in c["options"]]
    assert masked and {c["status"] for c in masked} == {UNSUPPORTED}  # **kwargs takes nothing


def test_laws_that_are_promises_of_isobit_alone_are_unsupported() -> None:
    report = check(third_party.right, "accuracy", "contract", "compile", "agree")
    for law in ("contract", "compile", "agree"):
        assert [c["status"] for c in cases(report, law)] == [UNSUPPORTED]


def test_outputs_are_those_that_it_has_flags_for() -> None:
    report = check(third_party.entropy_too, "accuracy", case="B=2 S=2 T=5 V=33 fp32")
    (accuracy,) = cases(report, "accuracy")
    assert [o["output"] for o in accuracy["outputs"]] == ["0:logp", "1:entropy"]


def test_another_output_dtype_must_be_declared() -> None:
    assert check(third_party.in_bf16, "accuracy", output_dtype=torch.bfloat16)["ok"] > 0
    assert "output logp is [20] bf16, should be [20] fp32" in fault(third_party.in_bf16, "accuracy")


# Faults


def test_a_dropped_tail_is_named() -> None:
    text = fault(third_party.drops_a_tail, "accuracy")
    assert "0:logp: " in text and "beyond the bound; worst at [" in text and "truth" in text
    assert "isobit check --op logp --candidate third_party:drops_a_tail --law accuracy --device cpu" in text


def test_an_order_that_depends_on_the_number_of_rows_is_named() -> None:
    check(third_party.order_depends_on_rows, "accuracy", case="B=2 S=2 T=5 V=33 fp32")
    text = fault(third_party.order_depends_on_rows, "invariant")
    assert re.search(r"(0:logp|gradient:logits): [0-9]+ of 17 rows alone: [0-9]+ of [0-9]+ differ", text)


def test_a_wrong_gradient_of_one_input_is_named() -> None:
    more = {"op": "linear_logp", "dims": {"N": 5, "D": 16, "V": 33}, "dtypes": (torch.float32,)}
    check(third_party.wrong_gradient_of_weight, "accuracy", **more)
    text = fault(third_party.wrong_gradient_of_weight, "gradient", **more)
    assert "gradient:weight: " in text and "gradient:hidden" not in text


def test_nan_out_of_a_masked_row_is_named() -> None:
    text = fault(third_party.leaks_masked_nan, "accuracy", case="N=20 V=130 fp32 mask=0.25")
    assert "0:logp: " in text and "ours nan" in text and "truth 0" in text


OF_TOKENS = [name for name, op in OPS.items() if op.function and "ignore_index" in op.contract.names]


@pytest.mark.parametrize("name", OF_TOKENS)
def test_rows_that_only_their_id_excludes_are_judged(name: str) -> None:
    """A function that takes ignore_index may take no mask."""
    proof = proof_of(OPS[name])
    (case,) = (c for c in proof.cases if c.options.get("mask") == "ids")
    args = proof.make(case, torch.device("cpu"), InputOptions())
    ignored = args["token_ids"] == args["ignore_index"]
    states = args.get("policy_logits", args.get("logits", args.get("hidden")))
    assert args["mask"] is None and 0 < ignored.sum() < ignored.numel() and not case.heavy
    assert states[ignored].isnan().all() and not states[~ignored].isnan().any()
    function = getattr(isobit_package, name)
    text = fault(third_party.counting_ignored(function), "accuracy", op=name, case=case.name)
    assert f"0:{proof.outputs[0]}: " in text


@pytest.mark.parametrize(
    ("function", "law", "case", "named"),
    [
        (third_party.answers_for_ignored, "accuracy", "N=7 V=130 fp32 mask=ids", "ours 123, torch 0"),
        (third_party.answers_for_ignored, "invariant", "N=12 V=999 fp32 random", "123 against 0"),
        (third_party.gradient_for_ignored, "gradient", "N=7 V=130 fp32 mask=ids", "ours 1, torch 0"),
        (third_party.gradient_for_ignored, "invariant", "N=12 V=999 fp32 random", "1 against 0"),
    ],
)
def test_what_ignored_rows_return_is_named(function: Any, law: str, case: str, named: str) -> None:
    assert named in fault(function, law, case=case)


def test_writing_into_an_input_is_named() -> None:
    assert "wrote into its input logits" in fault(third_party.writes_into_its_input, "accuracy")


@pytest.mark.parametrize(
    ("function", "fault_named"),
    [
        (third_party.returns_one_buffer, "logp of two calls is the same memory"),
        (third_party.keeps_results, "returned for other contents of its inputs what it had returned"),
    ],
)
def test_results_of_another_call_are_named(function: Any, fault_named: str) -> None:
    """Right numbers, and the same every time: nothing else shows it."""
    case = "B=2 S=2 T=5 V=33 fp32"
    check(function, "accuracy", case=case)
    assert fault_named in fault(function, "repeatable", case=case)


def test_leaving_the_process_is_named() -> None:
    def leaves(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        raise SystemExit(3)

    assert "SystemExit: 3 (test_candidate.py:" in fault(leaves, "accuracy", dims={"N": 3})


def test_another_device_is_named() -> None:
    def elsewhere(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return third_party.right(logits, token_ids).to("meta")

    assert "output logp is on meta, should be on cpu" in fault(elsewhere, "accuracy", dims={"N": 3})


class _Layer(torch.nn.Module):
    def forward(self, logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return third_party.right(logits, token_ids)


@torch.library.custom_op("third_party::logp", mutates_args=())
def _custom(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    return third_party.right(logits, token_ids)


@pytest.mark.parametrize("thing", [_Layer(), torch.compile(_Layer(), backend="eager"), _custom])
def test_what_takes_anything_and_passes_it_on_is_read_where_it_passes_it(thing: Any) -> None:
    report = check(thing, "accuracy", dims={"N": 3})
    assert (report["ok"], report["fail"]) == (1, 0)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"laws": "accuracy"}, "laws and dtypes are sequences"),
        ({"dtypes": torch.float32}, "laws and dtypes are sequences"),
        ({"case": "N=0 V=7 fp32", "dims": {"N": 3}}, "case selects a declared case and dims make one"),
        ({"device": "meta"}, "device 'meta' holds no values"),
        ({"device": "gpu"}, "device 'gpu' is not usable here"),
    ],
)
def test_wrong_arguments_of_a_check_are_one_sentence(given: dict[str, Any], rule: str) -> None:
    with pytest.raises(ContractError, match=rule):
        testing.check(third_party.right, op="logp", **{"laws": ("accuracy",), "device": "cpu"} | given)


# Names


def test_a_function_that_no_command_can_name_is_repeated_from_python() -> None:
    text = fault(lambda logits, token_ids: logits.float().sum(-1), "accuracy")
    assert "isobit.testing.check(<the function>, op='logp', laws=('accuracy',), device='cpu', case=" in text


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        (lambda logits, index: logits, "does not take token_ids by name and requires index"),
        (lambda **kwargs: None, "does not take logits, token_ids by name"),
        (torch.nn.Identity, "is a class"),
        (3, "is not callable and has no forward"),
    ],
)
def test_a_function_that_cannot_be_called_is_an_error_before_anything_runs(function: Any, rule: str) -> None:
    with pytest.raises(ContractError, match=rule):
        check(function, "accuracy")


def test_an_installed_kernel_passes_through_an_adapter_on_the_command_line(
    isobit: Isobit, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    candidate = ("--candidate", "torch.nn.functional:cross_entropy", "--adapter", "third_party:adapt")
    laws = ("--law", "accuracy", "--law", "gradient", "--device", "cpu")
    done = isobit("check", "--op", "logp", *candidate, *laws, "--json", str(path))
    assert done.code == 0, done
    report = json.loads(path.read_text())
    assert " ".join(candidate) in report["command"]
    assert report["candidates"][0]["serves"]["takes"] == ["logits", "token_ids", "ignore_index"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "logp", "--candidate", "third_party"), "write it as MODULE:NAME"),
        (("--op", "logp", "--candidate", "third_party:no"), "third_party has no no"),
        (("--op", "logp", "--candidate", "no_such:fn"), "ModuleNotFoundError"),
        (("--candidate", "third_party:right"), "--candidate is for one --op"),
        (("--op", "logp", "--candidate", "leaves:fn"), "leaves:fn: SystemExit: 4"),
        (("--op", "logp", "--adapter", "third_party:adapt"), "are for a --candidate"),
        (
            ("--op", "logp", "--candidate", "third_party:right", "--adapter", "third_party:cannot_adapt"),
            "the adapter of third_party:right raised KeyError: 'entropy'",
        ),
    ],
)
def test_unknown_names_are_errors(
    isobit: Isobit, arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves.py").write_text("import sys; sys.exit(4)")
    monkeypatch.syspath_prepend(tmp_path)
    done = isobit("check", "--device", "cpu", *arguments)
    assert done.code == 1 and message in done.err and len(done.err.splitlines()) == 1


def test_the_commands_of_the_page_pass(isobit: Isobit, tmp_path: Path, monkeypatch: Any) -> None:
    page = (HERE.parent / "docs" / "check_my_kernel.md").read_text()
    files = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL)
    lines = re.findall(r"^isobit check (.*)$", page, re.MULTILINE)
    assert len(files) == 2 and len(lines) == 3
    for name, text in files:
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the command adds the current folder
    monkeypatch.chdir(tmp_path)
    for line in lines:
        done = isobit("check", *shlex.split(line))
        assert done.code == 0, f"{line}: {done}"
    del sys.modules["my_kernels"]
    # From a command line of its own, which also finds modules in this folder.
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-m", "pytest", "-q", "test_mine.py"]
    tests = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    assert tests.returncode == 0 and "1 passed" in tests.stdout, tests.stdout
