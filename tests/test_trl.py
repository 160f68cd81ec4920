"""isobit inside TRL: its trainers on a CPU, with and without it, in the environment that `make parity`
makes. `trl_on_a_cpu.py` runs them; one run serves all tests here."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from isobit.integrations import trl
from parity_env import PYTHON, in_parity

ROOT = Path(__file__).parent.parent
LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return json.loads(in_parity(ROOT / "tests" / "trl_on_a_cpu.py").splitlines()[-1])


def equal(case: dict[str, Any]) -> bool:
    plain, ours = ([x for step in case[name] for x in step] for name in ("plain", "isobit"))
    return all(abs(a - b) <= 1e-5 * max(1.0, abs(a)) for a, b in zip(plain, ours, strict=True))


@pytest.mark.parametrize("case", [*LOSSES, "kl and entropy"])
def test_training_with_grpo_is_unchanged(found: dict[str, Any], case: str) -> None:
    run = found[case]
    assert equal(run)
    assert len(run["plain"]) == 3 and all(norm > 0.01 for _, norm, _ in run["plain"])
    assert all(
        0.1 < entropy < 2.8 for _, _, entropy in run["plain"]
    )  # far from uniform, which is ln 18 = 2.89
    assert run["served"] == (7 if case == "kl and entropy" else 3) and run["passed"] == {}


def test_calls_that_need_more_are_passed_on_to_trl(found: dict[str, Any]) -> None:
    sft, dpo = found["sft"], found["dpo"]
    assert equal(sft) and equal(dpo) and len(sft["plain"]) == len(dpo["plain"]) == 2
    assert sft["served"] == 0 and sft["passed"] == {"it wants is_top1 too": 2}
    assert dpo["served"] == 2 and dpo["passed"] == {"it wants is_top1, mean_logits too": 2}  # the reference


def test_the_reference_of_a_policy_with_an_adapter_is_served(found: dict[str, Any]) -> None:
    """It is the same model without its adapter. Each step, and each evaluation, has a call of the policy,
    whose metrics need more, and one of the reference; KTO has two of each."""
    dpo, kto = found["dpo with lora"], found["kto with lora"]
    assert equal(dpo) and equal(kto) and len(dpo["plain"]) == 4 and len(kto["plain"]) == 2
    assert dpo["served"] == 4 and dpo["passed"] == {"it wants is_top1, mean_logits too": 4}
    assert kto["served"] == 4 and kto["passed"] == {"it wants mean_logits too": 4}
    for *_, accuracy in dpo["isobit"][2:]:  # of the policy without gradients: it is not taken for a reference
        assert 0 < accuracy < 1


def test_trl_has_its_own_adapters_before_and_after(found: dict[str, Any]) -> None:
    before, *inside, utils, early, late = found["adapters"]
    assert before and inside == [False] * 3 and (utils, early, late) == (True, True, True)


def test_a_warning_says_what_is_normal(found: dict[str, Any]) -> None:
    (said,) = found["warned"]
    assert said.startswith(
        "isobit.integrations.trl: TRL's own function serves log-probabilities here: it wants"
    )
    assert said.endswith("That is normal for the policies of SFT, DPO and KTO: nothing is wrong")


def test_calls_give_the_results_and_gradients_of_trl(found: dict[str, Any]) -> None:
    calls = found["calls"]
    for name in ("plain", "logp alone", "softcap", "no rows"):
        assert calls[name] <= 2e-6, name
    assert 0 < calls["autocast"] < 0.03  # TRL rounds logits to bf16, isobit does not


def test_a_backward_gathers_the_weight_again(found: dict[str, Any]) -> None:
    assert found["gathers"] == [[[50, 16], [50]]]


def test_gradients_of_fp32_parameters_are_not_rounded_under_autocast(found: dict[str, Any]) -> None:
    assert found["unrounded"]


def test_one_module_of_trl_calls_the_function(found: dict[str, Any]) -> None:
    assert found["version"] == "1.16.0" and found["importers"] == ["kernels/__init__.py", "trainer/utils.py"]


def test_on_off_and_refusals(found: dict[str, Any]) -> None:
    told = found["switching"]
    assert told["inner"] and told["after_block"] and told["shared"] and told["restored"]
    assert told["told"].endswith(
        "enable(backend='triton'): it is already enabled with backend=None; call disable() first"
    )
    served, passed = told["named"]
    assert served == 0 and list(passed.values()) == [1] and "Hopper GPU" in next(iter(passed))
    wanted = (
        r"TRL 1\.16\.0 has _C\w+\(hidden, weight, targets\), but isobit needs _C\w+\(hidden, weight, bias"
    )
    assert re.search(wanted, told["refusal"]) and told["untouched"]


def test_importing_isobit_imports_neither_trl_nor_transformers() -> None:
    code = "import sys, isobit.integrations.trl; assert not {'trl', 'transformers'} & set(sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run([str(PYTHON), "-c", code], env=env, check=True)


def test_without_trl_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ModuleNotFoundError):
        trl.enable()
    monkeypatch.delitem(sys.modules, "trl")
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModuleNotFoundError, match=r"TRL is not installed: pip install trl==1\.16\.0"):
        trl.enable()


def test_python_3_10_is_told_that_it_gets_no_such_trl() -> None:
    assert trl.install_hint((3, 11)) == "pip install trl==1.16.0"
    assert trl.install_hint((3, 10)).endswith("which needs Python 3.11 or newer, and this is 3.10")


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "trl.md").read_text()
    ((code, output),) = re.findall(r"```python\n(.*?)```\n```\n(.*?)```", page, re.S)
    assert in_parity(code, cwd=tmp_path).endswith(output)
