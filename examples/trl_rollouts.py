"""GRPO in TRL whose rollouts have the log-probabilities of its training.

    python examples/trl_rollouts.py

A tiny Qwen 2 with random weights is trained on a CPU. Answers come from transformers' continuous batching.
One line makes the model the same in rollouts and in training, and logs how far they are apart under the names
that TRL has for rollouts of vLLM: the ratio of probabilities is exactly 1. TRL alone logs nothing of this
here. Needs TRL 1.16.
"""

import logging
import tempfile
import warnings
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import isobit

LETTERS = "abcdefghijklmnop"


def tokenizer() -> PreTrainedTokenizerFast:
    words = {letter: i for i, letter in enumerate([*LETTERS, "<pad>", "<eos>"])}
    made = Tokenizer(models.WordLevel(words, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def model() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(LETTERS) + 2, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, initializer_range=0.2, pad_token_id=16, eos_token_id=17,
    )  # fmt: skip
    made = Qwen2ForCausalLM(config)
    for parameter in made.parameters():  # not `to`, which would round the frequencies of RoPE too
        parameter.data = parameter.data.bfloat16()
    return made


def main(steps: int = 3) -> list[dict[str, float]]:
    """What is logged about rollouts at each step."""
    warnings.filterwarnings("ignore", message="isobit: det_gemm")  # that it is slow on a CPU is known
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=model(),
            args=trl.GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
                save_strategy="no",
                logging_steps=1,
                max_steps=steps,
                per_device_train_batch_size=4,
                num_generations=2,
                max_completion_length=6,
                use_transformers_continuous_batching=True,
                transformers_continuous_batching_config={"num_blocks": 16, "max_batch_tokens": 64},
            ),
            processing_class=tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": ["ab", "cdefg"]}),
            reward_funcs=lambda completions, **_: [float(text.count("a")) for text in completions],
        )
        isobit.integrations.trl.zero_drift(trainer)
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{name: x for name, x in entry.items() if name.startswith("sampling/")} for entry in logged]


if __name__ == "__main__":
    for step in main():
        print(*(f"{name} {value}" for name, value in step.items()), sep="\n")
