"""A GRPO trainer of TRL whose rollouts have the bits of its training, on a CPU, in the environment that `make
parity` makes. `trl_rollouts_on_a_cpu.py` runs it; one run serves all tests here."""

import json
from pathlib import Path
from typing import Any

import pytest

from parity_env import in_parity

ROOT = Path(__file__).parent.parent
RATIO, DIFFERENCE = "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference"
NAMES = [f"{RATIO}/max", f"{RATIO}/mean", f"{RATIO}/min", f"{DIFFERENCE}/max", f"{DIFFERENCE}/mean"]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return json.loads(in_parity(ROOT / "tests" / "trl_rollouts_on_a_cpu.py").splitlines()[-1])


@pytest.mark.parametrize(("case", "calls"), [("zero drift", 4), ("reference, autocast", 3), ("lora", 2)])
def test_the_ratio_is_exactly_1(found: dict[str, Any], case: str, calls: int) -> None:
    run = found[case]
    steps = 2 if case == "zero drift" else 1
    assert run["values"] == {name: [1.0 if RATIO in name else 0.0] * steps for name in NAMES}
    assert run["served"] == calls and run["passed"] == {}
    assert all(2 < length <= 6 for length in run["lengths"])
    assert run["shown"] == "Qwen2ForCausalLM" and run["restored"]


def test_the_example_runs(found: dict[str, Any]) -> None:
    assert found["example"] == [{name: 1.0 if RATIO in name else 0.0 for name in NAMES}]


def test_the_policy_is_its_reference_at_first(found: dict[str, Any]) -> None:
    assert found["reference, autocast"]["kl"] == [0.0]


@pytest.mark.parametrize("control", ["positions of padding", "their log-probabilities"])
def test_without_a_part_of_it_the_ratio_is_not_1(found: dict[str, Any], control: str) -> None:
    values = found[control]["values"]
    assert values[f"{RATIO}/min"][0] < 0.999 and values[f"{RATIO}/max"][0] > 1.001
    assert 0 < values[f"{DIFFERENCE}/mean"][0] < values[f"{DIFFERENCE}/max"][0] < 0.2


def test_refusals(found: dict[str, Any]) -> None:
    told = found["refused"]
    start = "isobit.integrations.trl.zero_drift(GRPOTrainer): "
    assert told["generate"] == start + "set use_transformers_continuous_batching=True in its GRPOConfig"
    assert told["fp32 head"].startswith(f"{start}cast_lm_head_to_fp32=True")
    assert "zero_drift(object): it is not a trl.GRPOTrainer" in told["another"]
    assert "its weight is torch.float32; cast the model to bf16" in told["fp32"]
    assert told["twice"] == f"{start}it is on already; call disable() first"
    assert told["restored"] == "True" and found["version"] == "1.16.0"
