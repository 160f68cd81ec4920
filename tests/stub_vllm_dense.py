"""A dense model as vLLM has it: merged projections, and norms that add the residual. It has the weights of a
model of transformers, and computes prompts. `stub_vllm` has its modules, which compute when isobit serves
them."""

from typing import Any

import torch
from torch import Tensor, nn

import isobit
import stub_vllm as stub


def norm_of(theirs: Any) -> stub.RMSNorm:
    made = stub.RMSNorm(len(theirs.weight))
    made.weight.data.copy_(theirs.weight.data)
    return made


class Layer(nn.Module):
    def __init__(self, theirs: Any, rotary: nn.Module) -> None:
        super().__init__()
        attn, mlp, linear = theirs.self_attn, theirs.mlp, stub.LinearBase.of
        self.qkv_proj = linear(attn.q_proj, attn.k_proj, attn.v_proj)
        self.o_proj, self.down_proj = linear(attn.o_proj), linear(mlp.down_proj)
        self.gate_up_proj, self.act_fn = linear(mlp.gate_proj, mlp.up_proj), stub.SiluAndMul()
        self.input_layernorm = norm_of(theirs.input_layernorm)
        self.post_attention_layernorm = norm_of(theirs.post_attention_layernorm)
        self.of_heads = hasattr(attn, "q_norm")
        if self.of_heads:
            self.q_norm, self.k_norm = norm_of(attn.q_norm), norm_of(attn.k_norm)
        self.rotary_emb, self.scale, self.size = rotary, attn.scaling, attn.head_dim
        self.sizes = [attn.q_proj.out_features, attn.k_proj.out_features, attn.v_proj.out_features]
        # Mistral has a window in all layers, others only where they say so.
        mistral = "Mistral" in type(attn).__name__
        self.window = attn.config.sliding_window if mistral else getattr(attn, "sliding_window", None)

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """As vLLM's models do it: what is returned was not added yet."""
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.o_proj(self.attended(positions, hidden))
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.down_proj(self.act_fn(self.gate_up_proj(hidden))), residual

    def attended(self, positions: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(hidden).split(self.sizes, -1)
        if self.of_heads:
            q = self.q_norm(q.unflatten(-1, (-1, self.size))).flatten(1)
            k = self.k_norm(k.unflatten(-1, (-1, self.size))).flatten(1)
        q, k = self.rotary_emb(positions, q, k)
        heads = [t.unflatten(-1, (-1, self.size))[None] for t in (q, k, v)]
        return isobit.attention(*heads, scale=self.scale, window=self.window)[0].flatten(1)


class Dense(stub.Qwen3ForCausalLM):
    """Prompts of it are computed as one: no cache, no other requests."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        rotary = stub.RotaryEmbedding()
        rotary.base = theirs.config.rope_parameters["rope_theta"]
        layers = nn.ModuleList(Layer(layer, rotary) for layer in theirs.model.layers)
        self.layers, self.last = layers, norm_of(theirs.model.norm)
        self.lm_head = stub.VocabParallelEmbedding.of(theirs.lm_head)
        self.embedding = theirs.model.embed_tokens.weight.data

    @torch.no_grad()
    def token_logps(self, ids: Tensor) -> Tensor:
        """Of the tokens of a row after the first."""
        positions = torch.arange(len(ids))
        hidden, residual = nn.functional.embedding(ids, self.embedding), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.last(hidden, residual)
        return isobit.linear_logp(hidden[:-1], self.lm_head.weight, ids[1:])


def of(theirs: Any) -> Any:
    """The model of vLLM with the weights of one of transformers, and the name of its class."""
    return type(type(theirs).__name__, (Dense,), {})(theirs)
