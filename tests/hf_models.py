"""Tiny models of transformers with random weights, for tests of what isobit does inside them."""

from typing import Any

import torch
import transformers
from torch import Tensor

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
    name = {"Gemma3": "Gemma3Text"}.get(family, family)
    config = getattr(transformers, f"{name}Config")(**SIZES | FAMILIES.get(family, {}) | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # weights of norms, and biases: neither all ones nor all zeros
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
