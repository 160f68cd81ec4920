"""`isobit.attention` on vLLM's pages of keys and values.

`Served` is the part that backends for CPUs and GPUs share. vLLM's cache of a layer is [pages, KV, page, 2 D]:
keys are the first half of the last dimension, values the second. Both are read in place, and results are
written to vLLM's own memory.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from isobit.integrations.vllm.groups import Group
from isobit.integrations.vllm.versions import GPT_OSS, refusal
from isobit.ops.attention.into import attention_into
from isobit.ops.attention.op import HEAD_SIZES, attention
from isobit.ops.attention_sink import attention_sink


def split(kv_cache: Tensor, head_size: int) -> tuple[Tensor, ...]:
    """(keys, values), views [pages, page, KV, D] of a layer's cache."""
    return kv_cache.transpose(1, 2).split(head_size, dim=-1)


def why_not(layer: Any) -> str | None:
    """Why the attention of a layer cannot be served, or None."""
    impl = layer.impl
    if not isinstance(impl, Served):
        return f"its backend is {type(impl).__name__}; leave attention_backend at its default"
    kind = getattr(impl.attn_type, "value", impl.attn_type)  # a string, or an enum of strings
    if type(layer).__name__ != "Attention" or kind != "decoder":
        return f"{type(layer).__name__} of type {kind!r} is not that of a decoder"
    if impl.head_size not in HEAD_SIZES:
        return f"heads of {impl.head_size} elements; isobit.attention takes {HEAD_SIZES}"
    if impl.alibi_slopes is not None:
        return "it has ALiBi slopes"
    if impl.sinks is not None and impl.holder is None:
        return "it has attention sinks, which are served in GPT-OSS"
    if impl.kv_cache_dtype not in ("auto", "bfloat16", "float16"):
        return f"its cache is quantised: kv_cache_dtype={impl.kv_cache_dtype!r}"
    if impl.kv_sharing_target_layer_name is not None:
        return "it shares the cache of another layer"
    return None


def has_sinks(module: Any) -> bool:
    """Whether this is the module of GPT-OSS that has sinks as a parameter, and an `Attention` that reads
    them. By name: the modules of models are imported only by those who have such a model."""
    own = type(module)
    return (own.__module__, own.__qualname__) == (GPT_OSS, "OAIAttention")


def show_sinks(owner: Any) -> None:
    """Attention is to read the parameter of its owner, which may be replaced, not what it was made with."""
    if isinstance(owner.attn.impl, Served):
        owner.attn.impl.holder = owner


class Served:
    """The forward of an attention backend, in front of vLLM's own class in the order of base classes."""

    count: Callable[[str], None] | None = None  # None until the model is admitted
    head_size: int
    scale: float
    sliding_window: Any
    logits_soft_cap: Any
    attn_type: Any
    alibi_slopes: Any
    kv_cache_dtype: str
    kv_sharing_target_layer_name: str | None
    sinks: Tensor | None = None  # [H]
    holder: Any = None  # the module whose parameter `sinks` is: it may get another one

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Called by vLLM, with its arguments: query [tokens, H, D], and the cache of this layer."""
        if attn_metadata is None:  # a run that only measures memory
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise refusal("the output of attention would be quantised")
        self._check(attn_metadata)
        out = output.view(-1, *query.shape[1:])
        for group in attn_metadata.groups:
            self._attend(group, query, key, value, kv_cache, attn_metadata, out)
            if self.count is not None:
                self.count("isobit.attention")
        return output

    def _attend(
        self, group: Group, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: Any,
        out: Tensor,
    ) -> None:  # fmt: skip
        """The queries of a group, written to their rows of `out` [tokens, H, D]."""
        requests, tokens = group.requests, group.tokens
        options: dict[str, Any] = {
            "scale": self.scale,
            "window": self._window(),
            "softcap": self.logits_soft_cap or None,
        }
        if group.prompts:
            own = query[tokens], key[tokens], value[tokens]
            self._write(out[tokens], *own, cu_seqlens_q=group.starts, **options)
            return
        keys, values = split(kv_cache, self.head_size)
        table = metadata.block_table[requests]
        if group.keys is not None:
            table = table[:, : -(-group.keys // keys.shape[1])]
        options |= {"key_end": metadata.seq_lens[requests], "block_table": table}
        if group.starts is None:
            self._write(out[tokens, None], query[tokens, None], keys, values, **options)
        else:
            self._write(out[tokens], query[tokens], keys, values, cu_seqlens_q=group.starts, **options)

    def _write(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
        """Attention, with one more logit per head if there are sinks."""
        sinks = self.sinks if self.holder is None else self.holder.sinks
        if sinks is None:
            attention_into(out, q, k, v, **options)
            return
        x, lse = attention(q, k, v, return_lse=True, **options)
        out.copy_(attention_sink(x, lse.transpose(-1, -2), sinks.data))

    def _check(self, metadata: Any) -> None:
        if getattr(metadata, "use_cascade", False):
            raise refusal("cascade attention is on: pass disable_cascade_attn=True")
        if metadata.causal is not True:
            raise refusal("a call of attention is not causal")
        for name in _UNUSED:
            if getattr(metadata, name, None) is not None:
                raise refusal(f"a call of attention has {name}, which isobit.attention does not have")
        window = getattr(metadata, "sliding_window", None)  # vLLM 0.26 has that of the layers here too
        if window is not None and _keys_seen(window) != self._window():
            raise refusal(
                f"a call of attention has sliding_window={window}, not that of its "
                "layer: leave disable_hybrid_kv_cache_manager at its default"
            )

    def _window(self) -> int | None:
        return _keys_seen(self.sliding_window)


def _keys_seen(window: Any) -> int | None:
    """vLLM has -1 or (-1, -1) for no window. A pair is how many keys are seen before and after one's own."""
    if isinstance(window, tuple | list):
        return None if window[0] < 0 else window[0] + 1
    return None if window is None or window < 0 else window


#: Properties of a call that have a value only if another kind of attention is asked for.
_UNUSED = ("mm_prefix_range_tensor", "rswa_prefix_lens", "dynamic_causal")
