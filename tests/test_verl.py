"""isobit inside verl: its fused kernels on a CPU, with and without it, in the environment that
`make parity` makes. `verl_on_a_cpu.py` runs them, for all tests here but one."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from isobit.integrations import verl
from parity_env import in_parity

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """With the entry points that pyproject.toml says, whatever isobit is installed."""
    place = tmp_path_factory.mktemp("installed")
    pyproject = (ROOT / "pyproject.toml").read_text()
    ((name, value),) = re.findall(
        r'^\[project\.entry-points\."verl\.plugins"\]\n(\w+) = "(.*)"$', pyproject, re.M
    )
    info = place / "isobit-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: isobit\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[verl.plugins]\n{name} = {value}\n")
    program, page = ROOT / "tests" / "verl_on_a_cpu.py", ROOT / "docs" / "verl.md"
    return json.loads(in_parity(program, page, path=(place, ROOT / "src")).splitlines()[-1])


def test_calls_give_the_results_and_gradients_of_verl(found: dict[str, Any]) -> None:
    assert found["version"] == "0.9.1" and len(found["calls"]) == 18
    for name, distance in found["calls"].items():
        if name.endswith("autocast"):
            assert 1e-5 < distance < 0.03  # verl rounds logits and entropies to bf16, isobit does not
        else:
            assert distance <= 1e-5, name


def test_a_model_that_verl_has_patched_gives_the_same_before_and_after(found: dict[str, Any]) -> None:
    models = found["models"]
    assert models.pop("after it") == 0
    assert set(models) == {"torch", "triton", "liger", "shifted labels"} and max(models.values()) <= 1e-5


def test_on_and_off_reach_every_name_of_the_functions(found: dict[str, Any]) -> None:
    told = found["switching"]
    for when in ("before", "off", "off again"):
        assert all(told[when]), when
    for when in ("on", "after the inner block", "on again"):
        assert not any(told[when]) and len(told[when]) == 4, when
    assert told["shared"] == [1, 1] and told["megatron"] <= 1e-5
    assert told["another backend"].endswith("it is already enabled with backend=None; call disable() first")


def test_trainers_have_the_same_bits_with_isobit_and_others_without() -> None:
    """`token_logps`, TRL and verl, of one model under `zero_drift`."""
    path = (ROOT / "src", ROOT / "tests")
    found = json.loads(in_parity(ROOT / "tests" / "three_trainers_on_a_cpu.py", path=path).splitlines()[-1])
    assert found == {
        "TRL": [0, 14], "verl, torch": [0, 14], "verl, triton": [0, 14],
        "control: TRL's own": [14, 14], "control: verl's own": [14, 14],
    }  # fmt: skip


def test_these_modules_of_verl_import_the_functions() -> None:
    """At module level; others import it at each call, and find the replacement."""
    (root,) = (ROOT / ".parity" / "lib").glob("python*/site-packages/verl")
    name = re.compile(r"^from \S+ import .*\b(linear_cross_entropy|FusedLinearForPPO)\b", re.M)
    importers = [path.relative_to(root) for path in root.rglob("*.py") if name.search(path.read_text())]
    wanted = ["model_forward_1f1b_overlap.py", "model_forward_fused.py"]
    assert sorted(map(str, importers)) == [f"models/mcore/{name}" for name in wanted]


def test_unserved_calls_are_passed_on_to_verl(found: dict[str, Any]) -> None:
    told = found["passing"]
    assert told["sevens"] == [True, True] and told["alone"] and told["tensor"]
    served, passed = told["counts"]
    assert served == 1 and passed == {
        "it wants reduction='mean'": 1,
        "the vocabulary is split over 2 ranks": 1,
        "its temperature is a tensor": 1,
    }
    served, passed = told["named"]
    assert served == 0 and list(passed.values()) == [1] and "Hopper GPU" in next(iter(passed))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "class",
            r"has FusedLinearForPPO\(hidden, weight, labels\), but isobit needs F\w+\(hidden_states, v",
        ),
        ("function", r"has LinearCrossEntropy\(hidden, weight, labels\), but isobit needs L\w+\(hidden, w"),
        ("replaced", r"linear_cross_entropy in verl\S+ of verl 0\.9\.1 is not LinearCrossEntropy\.apply"),
        ("gone", r"verl 0\.9\.1 has no FusedLinearForPPO in verl\.utils\.experimental"),
    ],
)
def test_another_verl_is_refused(found: dict[str, Any], change: str, message: str) -> None:
    assert re.search(
        rf"^VerlError: .*{message}.* \(isobit supports verl 0\.9\.1: pip install", found["refusals"][change]
    )


def test_a_worker_turns_it_on_by_an_import(found: dict[str, Any]) -> None:
    assert found["external"] == [[True, True], [False, False], [True, True]]


def test_being_installed_registers_a_name_and_changes_nothing(found: dict[str, Any]) -> None:
    assert found["registered"] == {
        "ours": "isobit.integrations.verl_plugin",
        "others": ["verl.trainer.ppo.core_algos"],
        "vanilla": True,
        "patch": True,
        "replaced": [True, True],
    }


def test_the_loss_of_that_name_is_vanilla(found: dict[str, Any]) -> None:
    losses = dict(found["losses"])
    assert losses.pop("refusal").startswith("ContractError: isobit_clip(loss_agg_mode: 'mean'): must be one")
    assert losses.pop("NaN at masked tokens") == [0.0]
    assert len(losses) == 10
    for name, (loss, gradient, metrics) in losses.items():
        assert max(loss, gradient) <= 1e-9 and metrics <= 1e-6, name  # verl has metrics in fp32


def test_the_page_runs_and_names_settings_that_verl_has(found: dict[str, Any]) -> None:
    printed, expected = found["page"]
    assert printed == expected
    model, actor = "actor_rollout_ref.model", "actor_rollout_ref.actor"
    names = [f"{model}.external_lib", f"{model}.use_fused_kernels", f"{actor}.policy_loss.loss_mode"]
    assert found["settings"] == dict.fromkeys(names, True)


def test_importing_isobit_does_not_import_verl() -> None:
    assert "isobit.integrations.verl" in sys.modules and "verl" not in sys.modules


def test_without_verl_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModuleNotFoundError, match=r"verl is not installed: pip install verl==0\.9\.1"):
        verl.enable()
