"""Tiny models of transformers with random weights, for tests of what isobit does inside them; and how many
of the tokens that one decodes have other bits in one forward of their row."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

import isobit
from isobit.integrations.hf.trial import differing

V = 200
SIZES: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip

#: Options of each family. Windows are so short that caches drop keys. Scores and logits of Gemma stay where a
#: softcap bends them, and does not cut them off.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": 6},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma2": {"sliding_window": 6, "initializer_range": 0.08},
    "Gemma3": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
}


def made(family: str, **options: Any) -> Any:
    """In evaluation, in bf16, with frequencies of RoPE in fp32 as a checkpoint would have them."""
    torch.manual_seed(0)
    name = f"{family}Text" if family in ("Gemma3", "Qwen3_5", "Qwen3_5Moe") else family
    config = getattr(transformers, f"{name}Config")(**SIZES | FAMILIES.get(family, {}) | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 or name.endswith("_bias"):  # weights of norms, biases: not all ones or zeros
            parameter.data += 0.2 * torch.randn(parameter.shape)
        parameter.data = parameter.data.bfloat16()
    model.generation_config.eos_token_id = None  # all rows decode to the end
    return model.eval()


def prompts(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """(ids, mask), padded on the left."""
    T = max(lengths)
    ids = torch.randint(3, V, (len(lengths), T), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(T) >= T - torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


def forward_logits(model: Any, tokens: Tensor) -> Tensor:
    """[T, V] of one row, as in training."""
    with torch.no_grad():
        return model(tokens[None], use_cache=False).logits[0].float()


# Drift


LENGTHS = (10, 3, 7, 1, 9, 5, 2, 8)
NEW = 5


class Run(NamedTuple):
    """One way to decode."""

    rows: int
    sample: bool
    cache: str
    chunk: int | None
    lengths: tuple[int, ...] = LENGTHS

    def __str__(self) -> str:
        return f"{self.rows}-{'sampled' if self.sample else 'greedy'}-{self.cache}-{self.chunk}"


def decoded(model: Any, run: Run) -> Iterator[tuple[Tensor, int, Tensor]]:
    """(tokens without padding, how many are the prompt, logits [NEW, V] that chose the rest) of each row."""
    lengths = run.lengths[: run.rows]
    ids, mask = prompts(list(lengths))
    torch.manual_seed(7)
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=run.sample,
        cache_implementation=None if run.cache == "dynamic" else run.cache, prefill_chunk_size=run.chunk,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    logits = torch.stack(found.logits, 1)
    for row, length in enumerate(lengths):
        yield found.sequences[row, -NEW - length :], length, logits[row]


class Drift:
    """How many tokens, and logits, of a model's decoding have other bits than in training."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.known: dict[tuple[int, ...], Tensor] = {}

    def of(self, run: Run) -> tuple[int, int]:
        tokens_differ = logits_differ = 0
        for tokens, length, logits in decoded(self.model, run):
            key = tuple(tokens.tolist())
            if key not in self.known:
                self.known[key] = forward_logits(self.model, tokens)
            trained = self.known[key][length - 1 : -1]
            logp, old_logp = (isobit.logp(x, tokens[length:]) for x in (trained, logits))
            tokens_differ += differing(logp, old_logp)
            logits_differ += differing(trained, logits)
        return tokens_differ, logits_differ
