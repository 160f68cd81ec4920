"""GRPO in TRL whose rollouts come from vLLM, with the log-probabilities of its training.

    python examples/trl_vllm.py

Needs a Hopper GPU, TRL 1.16 and vLLM 0.26. A Qwen 3 of the width of 0.6B, with random weights and few layers,
is trained for some steps; vLLM generates in the same process (`vllm_mode="colocate"`). isobit is in both, so
that the ratio of probabilities that TRL logs is exactly 1. The program ends with 1 if it is not. It has not
run on a GPU yet; the tests run the same trainer with a stand-in for vLLM, on a CPU.
"""

import sys
import tempfile
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import isobit

WORDS, LAYERS, STEPS = 1000, 4, 3


def checkpoint(folder: str) -> str:
    """A model in bf16 and its tokenizer: vLLM takes both from a folder."""
    names = [*(f"w{i}" for i in range(WORDS - 2)), "<pad>", "<eos>"]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    config = Qwen3Config(
        vocab_size=WORDS, hidden_size=1024, intermediate_size=3072, num_hidden_layers=LAYERS,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=1024,
        initializer_range=0.04, pad_token_id=WORDS - 2, eos_token_id=WORDS - 1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def prompts() -> list[str]:
    return [" ".join(f"w{(37 * i + 11 * j) % 900}" for j in range(8 + 9 * i)) for i in range(8)]


def main() -> list[dict[str, float]]:
    """What is logged about rollouts at each step."""
    isobit.integrations.vllm.enable()  # before the trainer makes its engine
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = trl.GRPOTrainer(
            model=checkpoint(folder),
            args=trl.GRPOConfig(
                output_dir=folder,
                report_to="none",
                disable_tqdm=True,
                save_strategy="no",
                logging_steps=1,
                max_steps=STEPS,
                learning_rate=1e-4,
                per_device_train_batch_size=16,
                num_generations=4,
                max_completion_length=64,
                temperature=0.8,
                model_init_kwargs={"dtype": "bfloat16"},
                use_vllm=True,
                vllm_mode="colocate",
                vllm_gpu_memory_utilization=0.2,
                vllm_max_model_length=512,
            ),
            train_dataset=Dataset.from_dict({"prompt": prompts()}),
            reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
        )
        isobit.integrations.trl.zero_drift(trainer)
        trainer.train()
        print(isobit.integrations.vllm.report())
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{name: x for name, x in entry.items() if name.startswith("sampling/")} for entry in logged]


if __name__ == "__main__":
    steps = main()
    for step in steps:
        print(*(f"{name} {value}" for name, value in step.items()), sep="\n")
    ratios = [value for step in steps for name, value in step.items() if "importance_sampling_ratio" in name]
    sys.exit(0 if ratios and all(value == 1.0 for value in ratios) else 1)
