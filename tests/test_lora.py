"""LoRA adapters of PEFT in models without drift, in the environment that `make parity` makes.
`lora_on_a_cpu.py` runs them, and the examples of docs/lora.md; one run serves all tests here."""

import json
from pathlib import Path
from typing import Any

import pytest

from parity_env import in_parity

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return json.loads(in_parity(ROOT / "tests" / "lora_on_a_cpu.py").splitlines()[-1])


def noticed(message: str, count: int) -> bool:
    """Whether an error names the layers of adapters that torch would compute."""
    names, _, rest = message.partition(": a Linear that torch computes. Call zero_drift again")
    return "lora_A" in names and f" and {count - 3} more" in names and bool(rest)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adapters_and_then_zero_drift(found: dict[str, Any], dtype: str) -> None:
    run = found[dtype]
    assert run["dtypes"] == [{"fp32": "torch.float32", "bf16": "torch.bfloat16"}[dtype]]
    assert run["linears"] == 15 + 28 and run["drift"] == [0, 0]
    assert run["distance"] < 0.03 < 0.5 < run["effect"]  # adapters change a lot, zero_drift a rounding
    assert run["autocast"] and run["restored"]
    assert ("28 linear layers are fp32 adapters" in run["text"]) == (dtype == "fp32")


def test_a_map_of_classes_is_that_of_the_model_with_and_without_adapters(found: dict[str, Any]) -> None:
    run = found["classes"]
    assert run["drift"] == [0, 0] and list(run["plain"].values()).count("tree8") == 4
    assert run["plain"] == run["adapted"] == run["merged"] == run["numerics"]
    assert "zero_drift(numerics: '*.lora_A.*'): no linear layer has this name" in run["unknown"]


def test_adapters_get_gradients(found: dict[str, Any]) -> None:
    run = found["gradients"]
    assert run["count"] == 28 and run["all"] and run["dtype"] == "torch.float32"
    assert run["distance"] < 0.15  # both round states to bf16 everywhere


def test_adapters_that_are_added_afterwards_are_noticed(found: dict[str, Any]) -> None:
    run = found["afterwards"]
    assert len(run["noticed"]) == 2 and all(noticed(message, 28) for message in run["noticed"])
    assert "Linear                  28  computed by torch, not tested" in run["stale"]
    assert run["drift"] == [0, 0] and "isobit.det_linear       43" in run["text"]
    assert noticed(run["by transformers"], 4) and run["linears"] == 15 + 4


def test_a_trainer_that_adds_adapters_is_noticed(found: dict[str, Any]) -> None:
    assert noticed(found["trl"]["noticed"], 4) and found["trl"]["steps"] == 1


def test_switching_adapters_keeps_bits_or_is_noticed(found: dict[str, Any]) -> None:
    run = found["switching"]
    linears = {"disabled": 43, "switched": 51, "both": 51, "merged": 51, "deleted": 43, "from a file": 71}
    for what, count in {**linears, "unloaded": 15}.items():
        assert run[what] == [0, 0, count, {}], what
    assert noticed(run["added"], 8) and noticed(run["loaded"], 28)
    assert run["unchanged"] and run["another"] and run["left"] == []


REFUSED = {
    "dora": "1.self_attn.q_proj: its adapter 'default' is DoraLinearVariant; only plain LoRA is served",
    "dropout": "lora_dropout.default and 1 more: Dropout(p=0.1) is random in training",
    "embedding": "embed_tokens: it is a peft.tuners.lora.layer.Embedding; of PEFT only LoRA around linear",
    "ia3": "k_proj: it is a peft.tuners.ia3.layer.Linear; of PEFT only LoRA",
    "vera": "q_proj: it is a peft.tuners.vera.layer.Linear; of PEFT only LoRA",
    "prompt": "(model: PeftModelForCausalLM): its adapter puts tokens or keys in front of a prompt",
    "compiled": "it is compiled; pass the model that was given to torch.compile",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_adapters_are_refused(found: dict[str, Any], kind: str) -> None:
    assert REFUSED[kind] in found["refusals"][kind]


def test_log_probabilities_of_a_model_of_peft(found: dict[str, Any]) -> None:
    run = found["logps"]
    assert run["distance"] < 2e-5 < 1 < run["largest"] and run["gradients"] and run["row"]
    assert "its adapter puts tokens or keys in front of a prompt, which would be lost" in run["prompt"]
    assert "its head is a peft.tuners.lora.layer.Linear, not a torch.nn.Linear" in run["head"]


def test_the_page_shows_what_its_examples_print(found: dict[str, Any]) -> None:
    assert found["version"] == "0.21.2" and f"peft=={found['version']}" in (ROOT / "docs/lora.md").read_text()
    assert len(found["page"]) == 2 and all(printed == shown for printed, shown in found["page"])
