"""Drift in the logs of TRL and verl, on a CPU, in the environment that `make parity` makes; and the writers
of rollouts in the page. `drift_in_trainers.py` runs it; one run serves all tests here."""

import json
import math
import re
import struct
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import isobit
from parity_env import in_parity

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "drift.md"
DIFFERENCE, RATIO = "sampling/sampling_logp_difference", "sampling/importance_sampling_ratio"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return json.loads(in_parity(ROOT / "tests" / "drift_in_trainers.py", PAGE).splitlines()[-1])


def drift_of(step: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in step.items() if name.startswith("drift/")}


def test_the_callback_logs_every_second_step(found: dict[str, Any]) -> None:
    run = found["zero drift"]
    first, between, last = map(drift_of, run["steps"])
    assert len(first) == 29 and between == {} and set(last) == set(first)
    for step in (first, last):
        assert step["drift/tokens"] > 8 and step["drift/sequences"] == 4
        zeros = ("differ", "kl", "k3_kl", "probs_diff_max", "chi2_token", "chi2_seq", "tokens_over/2.0")
        assert all(step[f"drift/{name}"] == 0 for name in zeros)
        assert step["drift/ratio_percentiles/0"] == step["drift/ratio_percentiles/100"] == 1
    assert run["restored"] and run["released"]


def test_its_numbers_are_those_of_trl(found: dict[str, Any]) -> None:
    for case in ("some", "vllm"):
        (step,) = found[case]["steps"]
        for ours, theirs in (
            ("logp_diff_mean", f"{DIFFERENCE}/mean"),
            ("logp_diff_max", f"{DIFFERENCE}/max"),
        ):
            assert math.isclose(step[f"drift/{ours}"], step[theirs], rel_tol=1e-5) and step[theirs] > 0, case
    (step,) = found["some"]["steps"]
    for percentile, end in (("0", "min"), ("100", "max")):
        ratio = step[f"drift/ratio_percentiles/{percentile}"]
        assert math.isclose(ratio, step[f"{RATIO}/{end}"], rel_tol=1e-5) and ratio != 1
    assert step["drift/differ"] > 0
    (step,) = found["vllm"]["steps"]
    assert step["drift/tokens"] == 4 * 3 - 1  # one is NaN
    assert found["vllm"]["restored"]


def test_it_costs_little(found: dict[str, Any]) -> None:
    """Less than 1 % even of these small steps, in each of which it is logged."""
    run = found["some"]
    assert 0 < run["seconds"] < 0.01 * run["all_seconds"]


def test_trainers_that_compare_nothing_are_refused(found: dict[str, Any]) -> None:
    told = found["refused"]
    assert "it does not compare its rollouts: let vLLM generate" in told["plain"]
    assert "drift(trainer: object): not a GRPOTrainer" in told["another"]
    assert told["every"] == "drift(every: 0): an integer from 1 on"


def test_metrics_of_a_batch_are_verls(found: dict[str, Any]) -> None:
    theirs, ours = found["verl"]["theirs"], found["verl"]["ours"]
    same = "kl k3_kl training_ppl rollout_ppl log_ppl_diff ppl_ratio chi2_token chi2_seq"
    names = {name: name for name in same.split()}
    names |= {f"probs_diff_{what}": f"training/rollout_probs_diff_{what}" for what in ("max", "mean", "std")}
    names["pearson"] = "training/rollout_actor_probs_pearson_corr"
    for name, their_name in names.items():
        assert math.isclose(ours[f"drift/{name}"], theirs[their_name], rel_tol=2e-4, abs_tol=1e-6), name
    for level, name in (("token", "tokens_over/2.0"), ("sequence", "sequences_over/2.0")):
        assert math.isclose(ours[f"drift/{name}"], found["verl"]["over 2"][level], rel_tol=1e-6), name
        assert ours[f"drift/{name}"] > 0
    assert ours["drift/tokens"] == 27 and found["verl"]["between"] == {}
    missing, bypassed = found["verl"]["told"]
    assert "no rollout_log_probs" in missing and "calculate_log_probs=True" in missing
    assert "bypass_mode" in bypassed


def test_the_page_s_writer_for_trl_runs(found: dict[str, Any]) -> None:
    run = found["written"]
    assert run["settings"] == ["trl 1.16.0", "with temperature 0.8"] and len(run["causes"]) == 1
    assert run["tokens"] >= 8 and run["prompt"] in ([0, 1], [2, 3, 4, 5, 6])
    # What is left: TRL's log-probabilities are of logits in fp32, those of the model's forward are rounded.
    assert run["largest"][0] > 0.1 > 0.02 > run["largest"][1], run["largest"]


def test_the_page_s_writer_for_vllm_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an object that returns what `LLM.generate` does."""
    (text,) = re.findall(r"```text\n(import json, struct, vllm\n.*?)```", PAGE.read_text(), re.DOTALL)
    logps = [struct.unpack(">f", struct.pack(">f", x))[0] for x in (-0.1, -2.5)]
    scored = [{7: SimpleNamespace(logprob=logps[0])}, {3: SimpleNamespace(logprob=logps[1])}]
    output = SimpleNamespace(token_ids=(7, 3), logprobs=scored)
    asked: dict[str, Any] = {}

    class LLM:
        def __init__(self, model: str, **options: Any) -> None:
            asked.update(options, model=model)

        def generate(self, prompts: Any, params: Any) -> list[Any]:
            asked.update(prompts=prompts, params=params)
            return [SimpleNamespace(prompt_token_ids=[1, 5], outputs=[output])]

    fake = ModuleType("vllm")
    vars(fake).update(LLM=LLM, SamplingParams=lambda **options: options, __version__="0.26.0")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.chdir(tmp_path)
    exec(compile(text, str(PAGE), "exec"), {"prompts": ["Why?"]})
    (line,) = isobit.drift.read_rollouts(tmp_path / "rollout.jsonl")
    assert (line.prompt_ids, line.output_ids) == ([1, 5], [7, 3]) and line.logprobs.tolist() == logps
    assert (line.engine, line.version) == ("vllm", "0.26.0") and asked["params"]["logprobs"] == 0
    assert (
        line.options.processed is True and line.options.sampling.temperature == asked["params"]["temperature"]
    )
    assert asked["logprobs_mode"] == "processed_logprobs" and asked["prompts"] == ["Why?"]
