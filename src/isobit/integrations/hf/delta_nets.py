"""Gated delta-net layers of transformers (Qwen3-Next, Qwen3.5) through isobit's ops.

    convolution   isobit.causal_conv1d
    gates         isobit.delta_gates
    recurrence    isobit.gated_delta_rule; with a cache isobit.gated_delta_rule_step
    norm          isobit.rms_norm_gated

Modules are known by their classes: no attribute says how they compute. Projections are linear layers, swapped
like all others. Tokens that the mask excludes are taken out before the layer and get zeros after it, so
chunks and the convolution begin at a row's first token, wherever the padding is. How many tokens count is
read on the host, once per forward. Without a mask, as for every decoded token, nothing waits for the device.

What a layer keeps between calls is in transformers' own cache, see `delta_cache`.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from isobit.integrations.hf.errors import HFError
from isobit.ops.causal_conv1d import causal_conv1d
from isobit.ops.delta_gates import delta_gates
from isobit.ops.gated_delta_rule import gated_delta_rule
from isobit.ops.gated_delta_rule_step import gated_delta_rule_step
from isobit.ops.gated_delta_rule_step.state import DeltaState
from isobit.ops.rms_norm_gated import rms_norm_gated

#: Classes of transformers that are served.
LAYERS = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
NORMS = ("Qwen3NextRMSNormGated", "Qwen3_5RMSNormGated", "Qwen3_5MoeRMSNormGated")

#: The kind of layer in a config.
KIND = "linear_attention"


def refusal(module: nn.Module, reason: str) -> HFError:
    where = f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"
    return HFError(f"isobit.integrations.hf.zero_drift: {where}: {reason}")


# Which tokens there are


@dataclass(frozen=True)
class Live:
    """N tokens of a batch that count, one after another. On the device, but for the longest row."""

    at: Tensor  # [N]: where they are in the flattened batch
    bounds: Tensor  # [B + 1]: where rows begin among them
    lengths: Tensor  # [B]
    longest: int
    place: Tensor  # [N]: where they are in rows of the longest's length that begin with their first token

    @classmethod
    def of(cls, counted: Tensor, total: int, longest: int) -> "Live":
        """Of `total` tokens, as [B, T] bool: their number is given, so nothing here waits for it."""
        (B, T), device = counted.shape, counted.device
        lengths = counted.sum(1)
        bounds = torch.zeros(B + 1, dtype=torch.int32, device=device)
        torch.cumsum(lengths, 0, dtype=torch.int32, out=bounds[1:])
        each = counted.flatten()
        # One place more than there are, for whatever does not count.
        to = torch.where(each, each.cumsum(0) - 1, total)
        every = torch.arange(B * T, device=device)
        at = torch.empty(total + 1, dtype=torch.int64, device=device).index_copy_(0, to, every)[:-1]
        row = at // T
        place = row * longest + torch.arange(total, device=device) - bounds[row]
        return cls(at, bounds, lengths, longest, place)


@dataclass(frozen=True)
class Tokens:
    """The tokens of a batch [B, T] that count: all of them, or one run in every row."""

    B: int
    T: int
    live: Live | None = None  # None if all count

    @classmethod
    def of(cls, module: nn.Module, hidden: Tensor, mask: Tensor | None) -> "Tokens":
        """Reads the mask on the host once per forward: all layers get the same one."""
        B, T = hidden.shape[:2]
        if mask is None or B * T == 0:
            return cls(B, T)
        known = getattr(mask, "isobit_tokens", None)
        if known is None:
            if tuple(mask.shape) != (B, T):
                raise refusal(module, f"attention_mask is {list(mask.shape)} for tokens of [{B}, {T}]")
            counted = (mask != 0).to(hidden.device)
            runs, lengths = (counted[:, 1:] & ~counted[:, :-1]).sum(1) + counted[:, 0], counted.sum(1)
            looks = torch.stack((runs.amax(), lengths.sum(), lengths.amax()))
            most_runs, total, longest = map(int, looks.tolist())
            if most_runs > 1:
                rule = "put it in front of them all, as tokenizers do with padding_side='left'"
                raise refusal(module, f"attention_mask has padding between tokens of a row: {rule}")
            known = cls(B, T, Live.of(counted, total, longest))
            mask.isobit_tokens = known  # type: ignore[attr-defined]
        return known

    @property
    def bounds(self) -> Tensor | None:
        """[B + 1]: where packed rows begin; None if they are not packed."""
        return None if self.live is None else self.live.bounds

    def taken(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [1, N, ...], or x itself if all tokens count."""
        return x if self.live is None else x.flatten(0, 1).index_select(0, self.live.at)[None]

    def spread(self, x: Tensor) -> Tensor:
        """[1, N, ...] -> [B, longest, ...]: every row begins with its first token, and ends with zeros; or x
        itself if all tokens count."""
        if self.live is None:
            return x
        empty = x.new_zeros(self.B * self.live.longest, *x.shape[2:])
        return empty.index_copy(0, self.live.place, x[0]).unflatten(0, (self.B, self.live.longest))

    def counted(self, device: torch.device) -> Tensor:
        """[B, T] bool: which ones."""
        if self.live is None:
            return torch.ones(self.B, self.T, dtype=torch.bool, device=device)
        none = torch.zeros(self.B * self.T, dtype=torch.bool, device=device)
        return none.index_fill(0, self.live.at, True).unflatten(0, (self.B, self.T))

    def put_back(self, x: Tensor) -> Tensor:
        """The way back: zeros where no token counts."""
        if self.live is None:
            return x
        rows = x.new_zeros(self.B * self.T, *x.shape[2:]).index_copy(0, self.live.at, x[0])
        return rows.unflatten(0, (self.B, self.T))


# What is kept between calls


class Past:
    """What the cache has of one layer."""

    def __init__(self, module: Any, cache: Any, tokens: Tokens, dtype: torch.dtype) -> None:
        layer = cache.layers[module.layer_idx]
        begun = any(getattr(layer, "has_previous_state", {}).values())
        # It imports transformers.
        kept = import_module("isobit.integrations.hf.delta_cache").layer_of(layer, begun)
        if kept is None:
            what = f"its cache is a {type(layer).__name__}"
            why = "begun without zero_drift: begin a new cache" if begun else "which is not supported"
            raise refusal(module, f"{what}, {why}")
        self.layer, self.module, self.tokens, self.fresh = kept, module, tokens, not begun
        self.width = module.conv1d.weight.shape[-1] - 1
        if self.fresh:
            self._begin(dtype)
        if kept.record_past and not kept.records:
            kept.record()

    def _begin(self, dtype: torch.dtype) -> None:
        """Of sequences without a token yet."""
        module, B, weight = self.module, self.tokens.B, self.module.conv1d.weight
        state = DeltaState(
            B, module.num_k_heads, module.num_v_heads, K=module.head_k_dim, V=module.head_v_dim,
            dtype=dtype, device=weight.device, drafts=self.layer.record_past,
        )  # fmt: skip
        self.layer.begin(state, weight.new_zeros(B, self.width, weight.shape[0], dtype=dtype))

    @property
    def inputs(self) -> Tensor:
        """[B, W - 1, D] of the convolution."""
        known: Tensor = self.layer.conv_states[0]
        return known[:, -self.width :].contiguous()

    def ends(self, given: Tensor, last: Tensor) -> None:
        """After a call: all inputs of the convolution, and the last ones of each sequence."""
        layer, tokens = self.layer, self.tokens
        if layer.records:
            lengths = None if tokens.live is None else tokens.live.lengths
            layer.add(tokens.spread(given.detach()), lengths, tokens.counted(given.device))
        else:
            layer.conv_states[0].copy_(last.detach())
        layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)


# The layer


class DetGatedDeltaNet(nn.Module):
    """A swapped layer: the same object with the same parameters, and another class."""

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """As transformers calls it. [B, T, C]."""
        layer: Any = self
        tokens = Tokens.of(self, hidden_states, attention_mask)
        mixed, z, b, a = _projected(layer, tokens.taken(hidden_states))
        past = None if cache_params is None else Past(self, cache_params, tokens, mixed.dtype)
        weight = layer.conv1d.weight.squeeze(1)
        convolved: Any = causal_conv1d(
            mixed, weight, bias=layer.conv1d.bias, activation="silu", cu_seqlens=tokens.bounds,
            initial_state=None if past is None or past.fresh else past.inputs,
            return_final_state=past is not None,
        )  # fmt: skip
        if past is not None:
            convolved, last = convolved
        q, k, v = convolved.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
        q, k = (t.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)).contiguous() for t in (q, k))
        v = v.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)).contiguous()
        g, beta = delta_gates(a, b, layer.A_log, layer.dt_bias)
        given = (q, k, v, g, beta)
        out = _recurrence(given, tokens, past)
        if past is not None:
            past.ends(mixed, last)
        out = layer.norm(out, z)
        made: Tensor = tokens.put_back(layer.out_proj(out.flatten(-2)))
        return made


def _projected(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, k and v as the convolution takes them, z, b, a). In Qwen3-Next the outputs of two projections are
    ordered by key heads: q and k of a head, then v and z of its value heads; and b and a of these."""
    heads = (layer.num_v_heads, layer.head_v_dim)
    if not hasattr(layer, "in_proj_qkvz"):
        z = layer.in_proj_z(x).unflatten(-1, heads)
        return layer.in_proj_qkv(x), z, layer.in_proj_b(x), layer.in_proj_a(x)
    each, K = layer.num_v_heads // layer.num_k_heads, layer.head_k_dim
    V = each * layer.head_v_dim
    four = layer.in_proj_qkvz(x).unflatten(-1, (layer.num_k_heads, -1)).split([K, K, V, V], -1)
    b, a = layer.in_proj_ba(x).unflatten(-1, (layer.num_k_heads, -1)).split([each, each], -1)
    q, k, v, z = (t.flatten(-2) for t in four)
    return torch.cat([q, k, v], -1), z.unflatten(-1, heads), b.flatten(-2), a.flatten(-2)


Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _forward(given: Given, bounds: Tensor | None) -> Tensor:
    return gated_delta_rule(*given, use_qk_l2norm_in_kernel=True, cu_seqlens=bounds)[0]


def _recurrence(given: Given, tokens: Tokens, past: Past | None) -> Tensor:
    """[B or 1, tokens, HV, V]."""
    if past is None:
        return _forward(given, tokens.bounds)
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in given)):
        return _kept(given, tokens, past)
    if not past.fresh:
        raise refusal(past.module, "no gradient goes through a cache; train with use_cache=False")
    with torch.no_grad():
        _kept(tuple(t.detach() for t in given), tokens, past)  # type: ignore[arg-type]
    return _forward(given, tokens.bounds)


def _kept(given: Given, tokens: Tokens, past: Past) -> Tensor:
    """With the state."""
    live, state = tokens.live, past.layer.state
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True, "from_empty": past.fresh}
    if live is None:
        return gated_delta_rule_step(state, *given, **options)
    made = gated_delta_rule_step(state, *map(tokens.spread, given), lengths=live.lengths, **options)
    return made.flatten(0, 1).index_select(0, live.place)[None]


class DetRMSNormGated(nn.Module):
    """A swapped norm: the same object with the same weight, and another class."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        return rms_norm_gated(hidden_states, self.weight, gate, eps=self.variance_epsilon)


# Which modules


def is_layer(module: nn.Module) -> bool:
    return type(module).__name__ in LAYERS or isinstance(module, DetGatedDeltaNet)


def swapped_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that serves a module, if it is one of a gated delta net."""
    name = type(module).__name__
    return DetGatedDeltaNet if name in LAYERS else DetRMSNormGated if name in NORMS else None


def convolutions(model: nn.Module) -> set[nn.Module]:
    """The convolutions whose weights these layers use: they are never called themselves."""
    convs = (getattr(m, "conv1d", None) for m in model.modules() if is_layer(m))
    return {module for module in convs if isinstance(module, nn.Module)}


def why_not(model: Any) -> str | None:
    """Why the gated delta-net layers of a model cannot be served, or why it has other layers of that kind."""
    layers = [m for m in model.modules() if is_layer(m)]
    wanted = list(getattr(model.config, "layer_types", None) or ()).count(KIND)
    if wanted != len(layers):
        return f"it has layers of {KIND}; of these {', '.join(LAYERS)} are served"
    if not layers:
        return None
    cache = import_module("transformers.cache_utils").LinearAttentionLayer
    if not hasattr(cache(), "number_of_states"):
        version = import_module("transformers").__version__
        return f"its layers of {KIND} need the cache of a later transformers than {version}; 5.22 is tested"
    first: Any = layers[0]
    if first.head_k_dim not in (64, 128, 256) or first.head_v_dim % 64:
        sizes = f"{first.head_k_dim} and {first.head_v_dim}"
        served = "keys of 64, 128 or 256 and values of a multiple of 64 are served"
        return f"its {KIND} has heads of {sizes}; {served}"
    if first.conv1d.kernel_size[0] not in (2, 3, 4):
        return f"its {KIND} has a convolution of {first.conv1d.kernel_size[0]} taps; 2, 3 and 4 are served"
    if first.activation not in ("silu", "swish"):
        return f"its {KIND} has the activation {first.activation!r}; silu is served"
    return None
