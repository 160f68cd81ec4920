"""The losses of TRL and verl, computed by their own code: a program for the environment `.parity`.

    .parity/bin/python tests/trl_and_verl.py CASES RESULTS

CASES is a file of `torch.save`: a list of dicts with "framework", its "options" and its "inputs" (tensors).
For each, RESULTS has the loss, the gradients of log-probabilities and entropies, and what the framework
reports in addition; the last entry has the versions.

From TRL a real `GRPOTrainer` is made of a real `GRPOConfig` for every case, and its `_compute_loss` is
called; only the log-probabilities and entropies are given instead of being computed by a model. From verl it
is `ppo_loss`, the actor's whole loss, and `compute_rollout_correction_weights`.
"""

import os
import sys
import tempfile
from typing import Any

# Before the imports, which read them: no network, no telemetry, no plugins of verl.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", CI="1", VERL_USE_EXTERNAL_PLUGINS="none")

import torch
import transformers
import trl
import verl
from datasets import Dataset
from tensordict import NonTensorData, TensorDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig, PolicyLossConfig
from verl.workers.utils.losses import ppo_loss


class GivenLogp(trl.GRPOTrainer):
    """A trainer whose model is a table of log-probabilities and entropies."""

    given: tuple[Tensor, Tensor]

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None]:
        return *self.given, None


def trainer(folder: str, *, accumulation: int = 1, use_vllm: bool = False, **options: Any) -> GivenLogp:
    small = Qwen2Config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1,
    )  # fmt: skip
    model = Qwen2ForCausalLM(small)
    if "beta" in options:  # then a reference is loaded from where the model was
        model.save_pretrained(folder)
    words = Tokenizer(WordLevel({"a": 0, "<pad>": 1}, unk_token="a"))
    config = trl.GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        per_device_train_batch_size=4, num_generations=4, disable_tqdm=True, **options,
    )  # fmt: skip
    made = GivenLogp(
        model=folder if "beta" in options else model,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 4}),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<pad>"
        ),
    )
    made.model.train()  # evaluation does not divide by the steps of accumulation
    made.current_gradient_accumulation_steps = accumulation
    made.use_vllm = use_vllm  # afterwards: requested in the config, it would look for an engine
    return made


def trl_loss(options: dict[str, Any], given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    ids = torch.zeros(given["logp"].shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids,
        "completion_mask": given["mask"], "advantages": given["advantages"],
        "old_per_token_logps": given.get("old_logp"), "ref_per_token_logps": given.get("ref_logp"),
        "importance_sampling_ratio": given.get("rollout_weights"),
        "num_items_in_batch": given.get("num_items"),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        made = trainer(folder, **options)
        made.given = given["logp"], given["entropy"]
        loss = made._compute_loss(made.model, inputs)
    return loss, {name: values[-1] for name, values in made._metrics["train"].items()}


def verl_loss(options: dict[str, Any], given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
    given = dict(given)
    mode, batch = options.pop("loss_mode"), options.pop("batch")
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1,
        policy_loss=PolicyLossConfig(loss_mode=mode), **options,
    )  # fmt: skip
    B, T = given["logp"].shape
    # A prompt of one token and T of the answer. verl uses the position before a token for it.
    output = {
        name: torch.cat([given.pop(ours), torch.zeros(B, 1)], 1).flatten()
        for name, ours in (("log_probs", "logp"), ("entropy", "entropy"))
    }
    theirs = {"mask": "response_mask", "old_logp": "old_log_probs", "ref_logp": "ref_log_prob",
              "rollout_weights": "rollout_is_weights", "advantages": "advantages"}  # fmt: skip
    data = TensorDict(
        {theirs[name]: tensor for name, tensor in given.items()}
        | {name: NonTensorData(value) for name, value in batch.items()}
        | {"prompts": torch.zeros(B, 1, dtype=torch.int64), "responses": torch.zeros(B, T, dtype=torch.int64),
           "attention_mask": torch.ones(B, 1 + T, dtype=torch.int64)},
        batch_size=[B],
    )  # fmt: skip
    loss, metrics = ppo_loss(config, output, data)
    return loss, {name: value.aggregate() for name, value in metrics.items() if hasattr(value, "aggregate")}


def outcome(case: dict[str, Any]) -> dict[str, Any]:
    given, options = case["inputs"], dict(case["options"])
    if case["framework"] == "verl weights":
        log_ratio = given["old_logp"] - given["rollout_logp"]
        return {"weights": compute_rollout_correction_weights(log_ratio, given["mask"], **options)[0]}
    given["logp"].requires_grad_()
    given["entropy"].requires_grad_()
    loss, reported = {"trl": trl_loss, "verl": verl_loss}[case["framework"]](options, given)
    loss.backward()
    gradients = {f"d{name}": given[name].grad for name in ("logp", "entropy")}
    # An entropy without a weight may get no gradient at all.
    gradients = {name: None if g is None else g.clone() for name, g in gradients.items()}
    numbers = {name: float(value) for name, value in reported.items()}
    return {"loss": loss.detach().clone(), **gradients, "reported": numbers}


def main(cases: str, results: str) -> None:
    versions = {m.__name__: m.__version__ for m in (torch, transformers, trl, verl)}
    found = [outcome(case) for case in torch.load(cases)]
    torch.save([*found, {name: str(version) for name, version in versions.items()}], results)


if __name__ == "__main__":
    main(*sys.argv[1:])
