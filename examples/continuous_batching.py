"""Do rollouts of continuous batching have the log-probabilities of training, and how fast are they?

    python examples/continuous_batching.py
    python examples/continuous_batching.py --device cuda --layers 8
    python examples/continuous_batching.py --device cuda --model Qwen/Qwen3-0.6B --requests 256

Requests of different lengths are answered by `model.generate_batch`, which returns the log-probabilities of
what it samples. Then every sequence goes through the model alone, in one forward as in training. The table
says how many tokens have other bits, the largest difference, and how many tokens are generated in a second:
with the model as it is, and inside `isobit.integrations.hf.zero_drift`.

Without `--model` weights are random: a tiny model on a CPU, where isobit takes its time, and the widths of
Qwen3 0.6B on a GPU. A manager is kept for a second round of requests, which is timed: compiled kernels and
captured graphs are there then. As it is, the model has SDPA, for which transformers captures no graphs;
isobit's attention is captured. What isobit does about bits is a promise, so the program ends with 1 if it is
broken.
"""

import argparse
import logging
import sys
import time
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.generation import ContinuousBatchingConfig

import isobit

TEMPERATURE = 0.8

#: Sizes of models with random weights, and the longest prompt.
TINY: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "initializer_range": 0.1,
}  # fmt: skip
WIDE: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
LONGEST = {"cpu": 40, "cuda": 600}


def build(name: str | None, device: torch.device, layers: int) -> Any:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).to(device).eval()
    torch.manual_seed(0)
    sizes = WIDE if device.type == "cuda" else TINY
    with device:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_hidden_layers=layers, tie_word_embeddings=True))
    for parameter in model.parameters():  # not `to`, which would round the frequencies of RoPE too
        parameter.data = parameter.data.to(torch.bfloat16)
    return model.to(device).eval()


def requests(model: Any, count: int, seed: int) -> list[list[int]]:
    gen = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LONGEST[model.device.type] + 1, (count,), generator=gen).tolist()
    return [torch.randint(3, model.config.vocab_size, (n,), generator=gen).tolist() for n in lengths]


def own_logps(model: Any, ids: Tensor) -> Tensor:
    """By the formula by which transformers computes log-probabilities of what it samples."""
    probabilities = (model(ids, use_cache=False).logits[0, :-1].float() / TEMPERATURE).softmax(-1)
    return probabilities.gather(-1, ids[0, 1:, None])[:, 0].log()


def isobit_logps(model: Any, ids: Tensor) -> Tensor:
    return isobit.integrations.hf.token_logps(model, ids, temperature=TEMPERATURE)[0]


@torch.no_grad()
def run(model: Any, logps: Any, count: int, new: int) -> tuple[int, float, float]:
    """(tokens with other bits, the largest difference, tokens per second)."""
    on_a_cpu = model.device.type == "cpu"
    options: dict[str, Any] = {
        "generation_config": GenerationConfig(
            max_new_tokens=new, do_sample=True, temperature=TEMPERATURE, top_k=0, eos_token_id=-1
        ),
        "continuous_batching_config": ContinuousBatchingConfig(
            return_logprobs=True,
            max_memory_percent=0.3,
            num_blocks=512 if on_a_cpu else None,
        ),
        "persistent_manager": True,
    }
    model.generate_batch(requests(model, count, seed=1), **options)
    start = time.perf_counter()
    outputs = model.generate_batch(requests(model, count, seed=2), **options).values()
    seconds = time.perf_counter() - start
    model.destroy_cached_continuous_batching_manager()
    differ, largest = 0, 0.0
    for each in outputs:
        ids = torch.tensor([each.prompt_ids + each.generated_tokens], device=model.device)
        rollout, trained = torch.tensor(each.logprobs), logps(model, ids)[-new:].cpu()
        differ += int((rollout.view(torch.int32) != trained.view(torch.int32)).sum())
        largest = max(largest, float((rollout - trained).abs().max()))
    return differ, largest, count * new / seconds


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a causal LM of Hugging Face; without it one is made")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--layers", type=int, default=2, help="of a model that is made")
    parser.add_argument("--requests", type=int, help="8 on a CPU, 64 on a GPU")
    parser.add_argument("--tokens", type=int, help="tokens of an answer: 6 on a CPU, 64 on a GPU")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message="isobit: det_gemm")  # that it is slow on a CPU is known
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # torch, on CPUs without bf16
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    on_a_cpu = given.device == "cpu"
    count, new = given.requests or (8 if on_a_cpu else 64), given.tokens or (6 if on_a_cpu else 64)
    model = build(given.model, torch.device(given.device), given.layers)

    print(f"{count} requests, {new} tokens each, sampled at temperature {TEMPERATURE}\n")
    print(f"{'':12s}{'other bits':>12s}{'of tokens':>12s}{'largest':>12s}{'tokens/s':>12s}")

    def show(name: str, differ: int, largest: float, speed: float) -> None:
        print(f"{name:12s}{differ:12d}{count * new:12d}{largest:12.1e}{speed:12.0f}", flush=True)

    show("as it is", *run(model, own_logps, count, new))
    with isobit.integrations.hf.zero_drift(model):
        differ, *rest = run(model, isobit_logps, count, new)
    show("zero_drift", differ, *rest)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
