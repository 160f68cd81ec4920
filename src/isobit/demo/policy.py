"""A tiny transformer that decodes from a KV cache, and the functions it can run on.

`TORCH` is plain PyTorch. `ISOBIT` sums in an order that does not depend on the batch, so that a token has the
same log-probability in decoding and in training, bit for bit. The weights are fp32 for the optimizer, and the
policy computes in bf16 with fp32 sums.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import isobit

WIDTH = 64  # of the hidden states, and of the one attention head

KV = tuple[Tensor, Tensor]  # keys and values in the cache of a layer, [B, S, 1, WIDTH]


class Ops(NamedTuple):
    name: str
    #: (x [*, K], weight [N, K]) -> [*, N]
    linear: Callable[[Tensor, Tensor], Tensor]
    #: (q [B, T, H, D], k and v [B, S, H, D]) -> [B, T, H, D]; the queries belong to the last T keys
    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    #: (hidden [B, T, D], weight of the head [V, D]) -> fp32 logits [B, T, V]
    logits: Callable[[Tensor, Tensor], Tensor]
    #: (hidden, weight of the head, token ids [B, T]) -> their log-probabilities [B, T]
    logp: Callable[[Tensor, Tensor, Tensor], Tensor]


def _torch_linear(x: Tensor, weight: Tensor) -> Tensor:
    if x.is_cuda:
        return F.linear(x, weight)
    return F.linear(x.float(), weight.float()).to(x.dtype)  # few CPUs are fast in bf16


def _torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    T, S = q.shape[1], k.shape[1]
    sees = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    qt, kt, vt = (x.transpose(1, 2) if x.is_cuda else x.transpose(1, 2).float() for x in (q, k, v))
    return F.scaled_dot_product_attention(qt, kt, vt, attn_mask=sees).transpose(1, 2).to(q.dtype)


def _torch_logits(hidden: Tensor, head: Tensor) -> Tensor:
    return F.linear(hidden.float(), head.float())


def _torch_logp(hidden: Tensor, head: Tensor, token_ids: Tensor) -> Tensor:
    return _torch_logits(hidden, head).log_softmax(-1).gather(-1, token_ids[..., None])[..., 0]


def _isobit_logits(hidden: Tensor, head: Tensor) -> Tensor:
    return isobit.det_linear(hidden, head, out_dtype=torch.float32)


def _isobit_logp(hidden: Tensor, head: Tensor, token_ids: Tensor) -> Tensor:
    if hidden.is_cuda:
        return isobit.linear_logp(hidden, head, token_ids)
    return isobit.logp(_isobit_logits(hidden, head), token_ids)  # linear_logp has no fixed order on a CPU


TORCH = Ops("torch", _torch_linear, _torch_attention, _torch_logits, _torch_logp)
ISOBIT = Ops("isobit", isobit.det_linear, isobit.attention, _isobit_logits, _isobit_logp)


def _weight(rows: int, columns: int, scale: float, gen: torch.Generator) -> nn.Parameter:
    return nn.Parameter(scale * torch.randn(rows, columns, generator=gen))


class Layer(nn.Module):
    """Attention and an MLP, without biases."""

    def __init__(self, gen: torch.Generator) -> None:
        super().__init__()
        self.qkv = _weight(3 * WIDTH, WIDTH, WIDTH**-0.5, gen)
        self.out = _weight(WIDTH, WIDTH, WIDTH**-0.5, gen)
        self.up = _weight(2 * WIDTH, WIDTH, WIDTH**-0.5, gen)
        self.down = _weight(WIDTH, 2 * WIDTH, (2 * WIDTH) ** -0.5, gen)

    def forward(self, x: Tensor, ops: Ops, past: KV | None) -> tuple[Tensor, KV]:
        q, k, v = ops.linear(F.layer_norm(x, (WIDTH,)), self.qkv.bfloat16()).unsqueeze(2).split(WIDTH, -1)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        x = x + ops.linear(ops.attention(q, k, v).squeeze(2), self.out.bfloat16())
        wide = ops.linear(F.layer_norm(x, (WIDTH,)), self.up.bfloat16()).relu()
        return x + ops.linear(wide, self.down.bfloat16()), (k, v)


class Policy(nn.Module):
    """Embeddings of tokens and positions, layers, and the weight of the head."""

    def __init__(self, vocab: int, positions: int, layers: int, gen: torch.Generator) -> None:
        super().__init__()
        self.tokens = _weight(vocab, WIDTH, 1.0, gen)
        self.positions = _weight(positions, WIDTH, 1.0, gen)
        self.layers = nn.ModuleList(Layer(gen) for _ in range(layers))
        self.head = _weight(vocab, WIDTH, 0.02, gen)

    def forward(self, token_ids: Tensor, ops: Ops, cache: list[KV] | None = None) -> Tensor:
        """Hidden states [B, T, WIDTH] of tokens [B, T], which follow those in the cache and are added to
        it."""
        past = cache[0][0].shape[1] if cache else 0
        x = F.embedding(token_ids, self.tokens) + self.positions[past : past + token_ids.shape[1]]
        x, new_cache = x.bfloat16(), []
        for i, layer in enumerate(self.layers):
            x, kv = layer(x, ops, cache[i] if cache else None)
            new_cache.append(kv)
        if cache is not None:
            cache[:] = new_cache
        return F.layer_norm(x, (WIDTH,))
