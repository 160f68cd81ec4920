"""A tiny Llama without drift on any CPU: products, activations and attention are computed row by row, in
shapes that do not depend on the batch. Tests plant faults in it, and look for them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

NAME, V = "row_by_row", 60


class RowLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        rows = [nn.functional.linear(row[None], self.weight, self.bias) for row in x.flatten(0, -2)]
        return torch.cat(rows).reshape(*x.shape[:-1], -1)


class RowSiLUActivation(SiLUActivation):
    """On a CPU with AVX-512 PyTorch computes the last elements of a tensor in another way than the others."""

    def forward(self, x: Tensor) -> Tensor:
        return row_by_row(super().forward, x)


class RowGELU(GELUTanh):
    def forward(self, x: Tensor) -> Tensor:
        return row_by_row(super().forward, x)


def row_by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.stack([function(row) for row in x.flatten(0, -2)]).reshape(x.shape)


#: What takes the place of a model's own modules.
BY_ROWS = {nn.Linear: RowLinear, SiLUActivation: RowSiLUActivation, GELUTanh: RowGELU}


def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
    """Each query with exactly the keys that it sees. It returns something of the shape of weights, too, as
    eager attention does."""
    B, H, T, D = q.shape
    groups = H // k.shape[1]
    out = torch.empty(B, T, H, v.shape[-1], dtype=q.dtype)
    mask = mask.expand(B, -1, -1, -1)
    for b in range(B):
        for t in range(T):
            seen = mask[b, 0, t].nonzero()[:, 0]
            for h in range(H):
                keys, values = (x[b, h // groups, seen].contiguous() for x in (k, v))
                scores = (keys * q[b, h, t]).sum(-1) * D**-0.5
                out[b, t, h] = (scores.softmax(-1)[:, None] * values).sum(0)
    return out, torch.ones(B, H, T, k.shape[2])


def mask_of_all(*args: Any, **options: Any) -> Tensor | None:
    """A mask in every call: without one, attention cannot tell a static cache from a longer sequence."""
    return sdpa_mask(*args, **options | {"allow_is_causal_skip": False})


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask_of_all)


def made(layers: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers,
             "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}  # fmt: skip
    config = transformers.LlamaConfig(**sizes | options)
    model = transformers.LlamaForCausalLM(config).eval()
    by_rows(model)
    return model


def by_rows(model: Any) -> None:
    model.set_attn_implementation(NAME)
    for module in model.modules():
        module.__class__ = BY_ROWS.get(type(module), type(module))


def sequences(lengths: tuple[int, ...] = (20, 12, 20)) -> list[Tensor]:
    ids = torch.randint(V, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    return list(ids.split(lengths))


def nudged(x: Tensor) -> Tensor:
    """Other bits, by one unit in the last place."""
    return torch.nextafter(x, torch.full_like(x, torch.inf))


@contextmanager
def planted(module: nn.Module, when: Callable[[Tensor], bool]) -> Iterator[None]:
    """A fault in a module: other bits when its input is such."""
    theirs = module.forward
    module.forward = lambda x: nudged(theirs(x)) if when(x) else theirs(x)
    try:
        yield
    finally:
        del module.forward


@contextmanager
def planted_attention(when: Callable[[Tensor, Tensor, Tensor], bool]) -> Iterator[None]:
    """The same in attention, by (query, key, mask)."""

    def wrong(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
        out, _ = attend(module, q, k, v, mask, **options)
        return (nudged(out) if when(q, k, mask) else out), None

    AttentionInterface.register(NAME, wrong)
    try:
        yield
    finally:
        AttentionInterface.register(NAME, attend)
