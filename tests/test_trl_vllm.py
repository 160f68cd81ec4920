"""A GRPO trainer of TRL that generates by vLLM in its own process: TRL's own code with a stand-in for an
engine, on a CPU, in the environment that `make parity` makes. `trl_vllm_on_a_cpu.py` runs it; one run serves
all tests here. `examples/trl_vllm.py` is the same with vLLM, on a GPU."""

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
    program, path = ROOT / "tests" / "trl_vllm_on_a_cpu.py", (ROOT / "src", ROOT / "tests")
    return json.loads(in_parity(program, path=path).splitlines()[-1])


@pytest.mark.parametrize(("case", "steps"), [("zero drift", 2), ("not corrected", 1)])
def test_the_ratio_is_exactly_1(found: dict[str, Any], case: str, steps: int) -> None:
    run = found[case]
    assert run["values"] == {name: [1.0 if RATIO in name else 0.0] * steps for name in NAMES}
    assert run["restored"] and all(norm > 0 for norm in run["norms"])
    assert run["resets"] == steps and run["loaded"] == steps * run["parameters"]  # with new weights each time


def test_without_zero_drift_it_is_not_1(found: dict[str, Any]) -> None:
    values = found["control"]["values"]
    assert values[f"{RATIO}/min"][0] < values[f"{RATIO}/max"][0] and values[f"{DIFFERENCE}/max"][0] > 1e-3


def test_the_engine_that_trl_makes_is_one_that_isobit_serves(found: dict[str, Any]) -> None:
    """In the process of the trainer, on one rank, with nothing that isobit refuses."""
    given = found["zero drift"]["options"]
    assert given["distributed_executor_backend"] == "external_launcher" and given["tensor_parallel_size"] == 1
    assert given["logprobs_mode"] == "processed_logprobs" and given["quantization"] is None
    assert not {"attention_backend", "dtype", "enable_lora", "disable_cascade_attn"} & set(given)


def test_refusals(found: dict[str, Any]) -> None:
    told = found["refused"].pop("classes")
    assert "0.mlp.down_proj is of class chain16, and of class tree8 in the engine: give" in told
    told = found["refused"].pop("rounding")
    assert "the model has rounding='hf', and the engine rounding='vllm': give zero_drift(trainer, rou" in told
    for name, start in {
        "server": "vllm_mode='server': the engine of another process was not tried",
        "adapter": "with an adapter TRL gives vLLM merged weights",
        "without isobit": "its engine is without isobit: call isobit.integrations.vllm.enable() before it is",
        "log_softmax": "its engine has other log-probabilities",
        "dtype": "its engine has torch.float16, as the checkpoint, and the model torch.bfloat16",
        "twice": "it is on already; call disable() first",
    }.items():
        told = found["refused"][name]
        assert told.startswith(f"isobit.integrations.trl.zero_drift(GRPOTrainer): {start}")
