"""Does a model decode with the log-probabilities that it trains with?

    python examples/zero_drift.py
    python examples/zero_drift.py --model Qwen/Qwen3-0.6B --device cuda

Prompts of different lengths, padded on the left, are decoded by `generate`: alone and in batches, with
dynamic and static caches, with prefill in chunks. Then every sequence goes through the model alone, in one
forward as in training. Mathematically both give each token the same log-probability. The table says how many
tokens have other bits, and the largest difference: first with the model as it is, then with the same model
inside `isobit.integrations.hf.zero_drift`.

Without `--model` it is a tiny Llama with random weights, on a CPU, where isobit takes its time. What torch
does depends on the machine, the versions and the sizes. What isobit does is a promise, so the program ends
with 1 if it is broken.
"""

import argparse
import sys
import warnings
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import isobit

#: (sequences, cache, tokens of a chunk of prefill)
DECODINGS = (
    (1, "dynamic", None), (3, "dynamic", None), (8, "dynamic", 7), (8, "static", None), (3, "static", 7)
)  # fmt: skip
LENGTHS = (19, 4, 11, 1, 16, 7, 2, 13)


def build(name: str | None, device: torch.device) -> Any:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).to(device).eval()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # not `to`, which would round the frequencies of RoPE too
        parameter.data = parameter.data.to(torch.bfloat16)
    return model.to(device).eval()


@torch.no_grad()
def drift(model: Any, rows: int, cache: str, chunk: int | None, new: int) -> tuple[int, float]:
    """(tokens with other bits of log-probability, the largest difference)."""
    lengths, device = LENGTHS[:rows], model.device
    T = max(lengths)
    ids = torch.randint(3, model.config.vocab_size, (rows, T), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(T) >= T - torch.tensor(lengths)[:, None]
    generated = model.generate(
        ids.to(device), attention_mask=mask.long().to(device), max_new_tokens=new, min_new_tokens=new,
        do_sample=False, cache_implementation=None if cache == "dynamic" else cache,
        prefill_chunk_size=chunk, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    differ, largest = 0, 0.0
    for row, length in enumerate(lengths):
        tokens = generated.sequences[row, T - length :]
        decoded = isobit.logp(torch.stack([logits[row] for logits in generated.logits]), tokens[length:])
        logits = model(tokens[None], use_cache=False).logits[0, length - 1 : -1].float()
        trained = isobit.logp(logits, tokens[length:])
        differ += int((decoded.view(torch.int32) != trained.view(torch.int32)).sum())
        largest = max(largest, float((decoded - trained).abs().max()))
    return differ, largest


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a causal LM of Hugging Face; without it a tiny one is made")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=6, help="tokens that are decoded for each prompt")
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message="isobit: det_gemm")  # that it is slow on a CPU is known
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # torch, on CPUs without bf16
    model = build(given.model, torch.device(given.device))
    before = [drift(model, *decoding, given.tokens) for decoding in DECODINGS]
    # With lengths, kernels are compiled in parallel before the first call. On a CPU there are none.
    with isobit.integrations.hf.zero_drift(model, batch=(1, 3, 8), lengths=max(LENGTHS)) as on:
        after = [drift(model, *decoding, given.tokens) for decoding in DECODINGS]

    print(f"{on}\n")
    print("tokens with other bits of log-probability than in one forward, and the largest difference\n")
    print(f"{'rows':>4s} {'cache':>8s} {'chunks':>7s} {'tokens':>7s}{'as it is':>19s}{'zero_drift':>19s}")
    for (rows, cache, chunk), *drifts in zip(DECODINGS, before, after, strict=True):
        cells = "".join(f"{differ:8d}  {largest:9.1e}" for differ, largest in drifts)
        print(f"{rows:4d} {cache:>8s} {chunk or '-':>7} {rows * given.tokens:7d}{cells}")
    return int(any(differ for differ, _ in after))


if __name__ == "__main__":
    sys.exit(main())
