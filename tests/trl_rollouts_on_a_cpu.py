"""A GRPO trainer of TRL that generates by continuous batching, on a CPU: a program for the environment
`.parity`.

    PYTHONPATH=src .parity/bin/python tests/trl_rollouts_on_a_cpu.py

It prints JSON: what is logged about rollouts with `isobit.integrations.trl.zero_drift`, and without a part of
it; and what is refused.
"""

import json
import logging
import os
import runpy
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

# Before the imports, which read them: no network, no telemetry.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", CI="1")

import peft
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import isobit
from isobit.integrations.hf import batching
from isobit.integrations.trl import rollouts

ROOT = Path(__file__).parent.parent
LETTERS = "abcdefghijklmnop"
PAGES = {"block_size": 16, "num_blocks": 32, "max_batch_tokens": 64}


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({c: i for i, c in enumerate([*LETTERS, "<pad>", "<eos>"])}, unk_token="a"))
    words.pre_tokenizer = Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def model(folder: str) -> str:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=18, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, tie_word_embeddings=False, pad_token_id=16, eos_token_id=17, bos_token_id=17,
        initializer_range=0.2,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def trainer(folder: str, lora: bool = False, **options: Any) -> Any:
    given: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 3,
        "per_device_train_batch_size": 4, "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True,
        "learning_rate": 1e-3, "seed": 0, "num_generations": 2, "max_completion_length": 6,
        "temperature": 0.8, "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": PAGES, "model_init_kwargs": {"dtype": "bfloat16"},
    }  # fmt: skip
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return trl.GRPOTrainer(
        model=model(folder), args=trl.GRPOConfig(**given | options), processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": ["ab", "cdefg"]}),
        peft_config=adapter if lora else None,
        reward_funcs=lambda completions, **_: [float(sum(map(ord, text)) % 17) for text in completions],
    )  # fmt: skip


def logged(**options: Any) -> dict[str, Any]:
    """By metric of rollouts: its value at each step; and whether the trainer is restored afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        trained = trainer(folder, **{"max_steps": 1} | options)
        with isobit.integrations.trl.zero_drift(trained, lengths=8) as on:
            trained.train()
            shown = str(on).splitlines()[0]
    steps = [entry for entry in trained.state.log_history if "loss" in entry]
    names = sorted({name for entry in steps for name in entry if name.startswith("sampling/")})
    return {
        "values": {name: [entry[name] for entry in steps] for name in names},
        "lengths": [entry["completions/mean_length"] for entry in steps],
        "kl": [entry["kl"] for entry in steps if "kl" in entry],
        "served": on.logps.served, "passed": on.logps.passed, "shown": shown,
        "restored": is_restored(trained),
    }  # fmt: skip


def is_restored(trained: Any) -> bool:
    return (
        not {rollouts.GENERATES, rollouts.SCORES} & set(vars(trained))
        and not trained.continuous_batching_config.return_logprobs
        and isobit.integrations.trl.SWITCH.patch is None
        and type(trained.model.lm_head) is torch.nn.Linear
        and not trained.model._forward_pre_hooks
    )


def refused() -> dict[str, str]:
    told = {}

    def refuse(name: str, given: Any) -> None:
        try:
            isobit.integrations.trl.zero_drift(given)
        except (isobit.integrations.trl.TRLError, isobit.integrations.hf.HFError) as error:
            told[name] = str(error)

    with tempfile.TemporaryDirectory() as folder:
        made = trainer(folder)
        refuse("another", object())
        for name, owner, attribute in (
            ("generate", made, "use_transformers_continuous_batching"),
            ("fp32 head", made.args, "cast_lm_head_to_fp32"),
        ):
            with mock.patch.object(owner, attribute, not getattr(owner, attribute)):
                refuse(name, made)
        with isobit.integrations.trl.zero_drift(made):
            refuse("twice", made)
        made.model.float()
        refuse("fp32", made)
        told["restored"] = str(is_restored(made))
    return told


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("ContinuousBatchingLogger").disabled = True
    found: dict[str, Any] = {
        "zero drift": logged(max_steps=2),
        "reference, autocast": logged(beta=0.1, bf16=True),
        "lora": logged(lora=True),
        "refused": refused(),
        "example": runpy.run_path(str(ROOT / "examples" / "trl_rollouts.py"))["main"](steps=1),
    }
    with mock.patch.object(rollouts, "with_positions", lambda module, args, kwargs: (args, kwargs)):
        found["positions of padding"] = logged()
    with mock.patch.object(batching, "check_head", lambda model: None):
        found["their log-probabilities"] = logged()
    print(json.dumps({"version": trl.__version__, **found}))


if __name__ == "__main__":
    main()
