"""GPT-OSS in a stub of vLLM: the modules of its model as vLLM 0.26 has them, with the weights of a model of
transformers, and batches of requests whose keys and values are in pages."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import stub_vllm as stub
import stub_vllm_moe as moe
from isobit.integrations.vllm import versions as v
from isobit.integrations.vllm.attention import split
from isobit.integrations.vllm.groups import groups_of

PAGE = 16


class OAIAttention(nn.Module):
    __module__ = v.GPT_OSS

    def __init__(self, theirs: Any, rotary: nn.Module) -> None:
        super().__init__()
        self.sinks = nn.Parameter(theirs.sinks.data.clone())  # vLLM leaves requires_grad on
        self.qkv_proj = stub.LinearBase.of(theirs.q_proj, theirs.k_proj, theirs.v_proj)
        self.o_proj, self.rotary_emb = stub.LinearBase.of(theirs.o_proj), rotary
        impl = import_module("isobit.integrations.vllm.flash_attention").Impl()
        impl.sinks, window = self.sinks, theirs.sliding_window
        impl.sliding_window = (-1, -1) if window is None else (window - 1, 0)
        self.attn = stub.Attention(impl)
        self.sizes = [theirs.q_proj.out_features, theirs.k_proj.out_features, theirs.v_proj.out_features]

    def forward(self, x: Tensor, batch: Any, cache: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x).split(self.sizes, -1)
        q, k = self.rotary_emb(batch.positions, q, k)
        q, k, v = (t.reshape(len(x), -1, 64) for t in (q, k, v))
        for stored, new in zip(split(cache, 64), (k, v), strict=True):
            stored[batch.slots // PAGE, batch.slots % PAGE] = new
        metadata = SimpleNamespace(**vars(batch), sliding_window=self.attn.impl.sliding_window)
        out = torch.full(q.shape, torch.nan, dtype=x.dtype)
        return self.o_proj(self.attn.impl.forward(None, q, k, v, cache, metadata, out).flatten(1))


class TransformerBlock(nn.Module):
    def __init__(self, theirs: Any, rotary: nn.Module) -> None:
        super().__init__()
        self.attn = OAIAttention(theirs.self_attn, rotary)
        router, own = theirs.mlp.router, theirs.mlp.experts
        weights = (own.gate_up_proj.mT, own.down_proj.mT, own.gate_up_proj_bias, own.down_proj_bias)
        weights = tuple(w.data.contiguous() for w in weights)
        self.mlp = moe.MLPBlock(stub.LinearBase.of(router), weights, router.top_k, True)
        self.input_layernorm = norm_of(theirs.input_layernorm)
        self.post_attention_layernorm = norm_of(theirs.post_attention_layernorm)

    def forward(self, x: Tensor, residual: Tensor | None, batch: Any, cache: Tensor) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.attn(x, batch, cache), residual)
        return self.mlp(x), residual


def norm_of(theirs: Any) -> stub.RMSNorm:
    made = stub.RMSNorm(len(theirs.weight))
    made.weight.data.copy_(theirs.weight)
    made.variance_epsilon = theirs.variance_epsilon
    return made


class GptOssForCausalLM(nn.Module):
    """Only its layers: what is compared are hidden states."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        rotary = stub.YaRNScalingRotaryEmbedding()  # vLLM has one for all layers
        self.embedding = theirs.model.embed_tokens.weight.data
        self.layers = nn.ModuleList(TransformerBlock(each, rotary) for each in theirs.model.layers)
        self.norm = norm_of(theirs.model.norm)
        self.lm_head, self.logits = stub.VocabParallelEmbedding.of(theirs.lm_head), stub.LogitsProcessor()

    def forward(self, ids: Tensor, batch: Any, caches: list[Tensor]) -> Tensor:
        x, residual = self.embedding[ids], None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual = layer(x, residual, batch, cache)
        out: Tensor = self.norm(x, residual)[0]
        return out


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def hidden_states(model: Any, rows: list[Tensor], steps: list[list[int]]) -> list[Tensor]:
    """Of the tokens of each row, computed in these steps: how many tokens of each row a forward has."""
    width = -(-max(map(len, rows)) // PAGE)
    table = torch.arange(len(rows) * width, dtype=torch.int32).flip(0).view(-1, width)
    caches = [torch.full((len(rows) * width, 1, PAGE, 128), torch.nan).bfloat16() for _ in model.layers]
    seen, found = [0] * len(rows), [[] for _ in rows]  # type: tuple[list[int], list[list[Tensor]]]
    for step in steps:
        used = [i for i, n in enumerate(step) if n]
        spans = [(i, seen[i], seen[i] + step[i]) for i in used]
        positions = torch.cat([torch.arange(a, b) for _, a, b in spans])
        pages = torch.cat([table[i, torch.arange(a, b) // PAGE] for i, a, b in spans]).long()
        ends, queries = ints([b for *_, b in spans]), [b - a for _, a, b in spans]
        starts = ints([sum(queries[:i]) for i in range(len(queries) + 1)])
        batch = SimpleNamespace(
            num_reqs=len(used), num_actual_tokens=len(positions), max_query_len=max(queries),
            max_seq_len=int(ends.max()), query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=ends,
            seq_lens_cpu_upper_bound=ends, block_table=table[used], causal=True, positions=positions,
            slots=pages * PAGE + positions % PAGE,
        )  # fmt: skip
        batch.groups = groups_of(batch)
        ids = torch.cat([rows[i][a:b] for i, a, b in spans])
        for (i, _, b), part in zip(spans, model(ids, batch, caches).split(queries), strict=True):
            found[i].append(part)
            seen[i] = b
    return [torch.cat(parts) for parts in found]
