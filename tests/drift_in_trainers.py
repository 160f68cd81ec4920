"""Drift in the logs of trainers, on a CPU: a program for the environment `.parity`.

    PYTHONPATH=src .parity/bin/python tests/drift_in_trainers.py docs/drift.md

It trains a tiny model with TRL's GRPOTrainer and the callback of `isobit.drift`: without drift, with some,
and with log-probabilities as vLLM would return them. It runs TRL's writer of rollouts from the page, and
compares the metrics of a batch with verl's own. It prints JSON.
"""

import json
import logging
import os
import re
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import trl
from verl import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics, compute_rollout_correction_weights
from verl.utils.debug.metrics import calculate_debug_metrics

import isobit
from isobit.frame.contract import ContractError
from isobit.integrations.hf import batching
from isobit.integrations.trl import rollouts
from trl_rollouts_on_a_cpu import trainer

VLLM = {"use_transformers_continuous_batching": False, "transformers_continuous_batching_config": None}


def logged(trained: Any, every: int) -> dict[str, Any]:
    """What is logged at each step, and what it costs."""
    callback = isobit.drift.trl_callback(trained, every=every)
    trained.add_callback(callback)
    before = getattr(trained, rollouts.SCORES)
    start = time.perf_counter()
    trained.train()
    return {
        "steps": [entry for entry in trained.state.log_history if "loss" in entry],
        "seconds": callback.seconds, "all_seconds": time.perf_counter() - start,
        "restored": getattr(trained, rollouts.SCORES) == before,
    }  # fmt: skip


def under_zero_drift(every: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        trained = trainer(folder, max_steps=steps)
        with isobit.integrations.trl.zero_drift(trained) as on:
            return logged(trained, every) | {"released": on.heard is None}


def with_vllm() -> dict[str, Any]:
    """vLLM is not here. A function returns its tokens and log-probabilities, one of them NaN: TRL does the
    rest as it does with vLLM."""

    def generate(prompt_ids: Any, *args: Any, **options: Any) -> Any:
        tokens = [[1 + i % 3, 2, 17] for i in range(len(prompt_ids))]
        return tokens, [[-1.0, float("nan") if i == 0 else -2.0, -3.0] for i in range(len(prompt_ids))]

    with tempfile.TemporaryDirectory() as folder:
        trained = trainer(folder, max_steps=1, **VLLM)
        trained.use_vllm, trained.vllm_generation = True, mock.MagicMock()
        trained._generate_single_turn = generate
        trained._last_loaded_step = 0
        return logged(trained, 1)


def refused() -> dict[str, str]:
    told = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, given, every in (
            ("plain", trainer(folder, **VLLM), 1), ("another", object(), 1), ("every", object(), 0)
        ):  # fmt: skip
            try:
                isobit.drift.trl_callback(given, every=every)
            except ContractError as error:
                told[name] = str(error)
    return told


def written(page: Path) -> dict[str, Any]:
    """The writer of the page, and what is read from its file."""
    (text,) = re.findall(r"```text\n(import json, trl\n.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(text, str(page), "exec"), names)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(trl, "GRPOTrainer", names["Writing"]):
        os.chdir(folder)
        trained = trainer(folder, max_steps=1, learning_rate=0.0)
        with isobit.integrations.trl.zero_drift(trained):
            trained.train()
            report = isobit.drift.measure_rollout(trained.model, "rollout.jsonl")
        (first, *_) = isobit.drift.read_rollouts(Path("rollout.jsonl"))
        os.chdir("/")
    return {
        "settings": [row.setting for row in report.rows], "causes": report.causes, "tokens": report.tokens,
        "largest": [row.metrics["logp_diff_max"] for row in report.rows], "prompt": first.prompt_ids,
    }  # fmt: skip


def of_verl() -> dict[str, Any]:
    """Their metrics and ours, by verl's names."""
    torch.manual_seed(0)
    mask = torch.arange(12) < torch.tensor([12, 5, 1, 9])[:, None]
    old = -5 * torch.rand(4, 12)
    tensors = {"old_log_probs": old, "rollout_log_probs": old + 0.5 * torch.randn(4, 12),
               "response_mask": mask.long(), "responses": torch.zeros(4, 12, dtype=torch.long)}  # fmt: skip
    batch = DataProto.from_dict(tensors=tensors)
    theirs = compute_offpolicy_metrics(old, tensors["rollout_log_probs"], mask.long())
    debug = calculate_debug_metrics(batch)
    told = []
    for wrong in (
        {"old_log_probs": old, "response_mask": mask},
        {"old_log_probs": old, "rollout_log_probs": old, "response_mask": mask},
    ):
        try:
            isobit.drift.verl_metrics(wrong)
        except ContractError as error:
            told.append(str(error))
    return {
        "theirs": {name: float(value) for name, value in (theirs | debug).items()},
        "over 2": {level: _over_2(tensors, level) for level in ("token", "sequence")},
        "ours": isobit.drift.verl_metrics(batch, step=20, every=10),
        "between": isobit.drift.verl_metrics(batch, step=21, every=10), "told": told,
    }  # fmt: skip


def _over_2(tensors: dict[str, torch.Tensor], level: str) -> float:
    """verl's `rollout_is_ratio_fraction_high`."""
    log_ratio = tensors["old_log_probs"] - tensors["rollout_log_probs"]
    _, found = compute_rollout_correction_weights(log_ratio, tensors["response_mask"], level, 2.0)
    return float(found["rollout_is_ratio_fraction_high"])


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("ContinuousBatchingLogger").disabled = True
    page = Path(sys.argv[1]).resolve()
    found = {"verl": of_verl(), "zero drift": under_zero_drift(2, 3), "vllm": with_vllm()}
    with mock.patch.object(batching, "check_head", lambda model: None):
        found["some"] = under_zero_drift(1, 1)
    found |= {"refused": refused(), "written": written(page)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
