"""`isobit.attention` on the pages of transformers' continuous batching.

A forward of continuous batching has tokens of several requests in one row: prompts, chunks of prompts, and
single tokens that are decoded. transformers says in one of two ways where the keys of each request are:

- every request decodes one token, and a block table names its pages: the new keys are written into them, and
  `isobit.attention` reads the pages in place;
- otherwise there are indices of all keys, and the cache returns the keys gathered, request after request.

Nothing here waits for a GPU, so that CUDA graphs can be captured. A graph has room for more requests and more
tokens than there are. What is left over is a request without keys, and its results are 0.

**Windows.** The cache of such a layer has dropped the keys in front of the window. `isobit.attention` counts
segments from a sequence's own first key. So other keys are put in front of the remaining ones, until these
have their original positions modulo a segment, as in `attention.py`. The window masks them.

What is the same in all layers is computed once in a forward: see `Plan`.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isobit.integrations.hf.attention import (
    PAGED,
    LayerCall,
    check_layer,
    for_layers,
    in_one_dtype,
    layer_name,
    refusal,
    wider,
)
from isobit.ops.attention.model import SEGMENT
from isobit.ops.attention.op import HEAD_SIZES, attention

FULL, SLIDING = "full_attention", "sliding_attention"

#: What a forward of continuous batching passes to layers: what is read here, and what is not needed.
_HARMLESS = frozenset((
    "isobit_plan", "cache", "block_table", "read_index", "write_index", "cu_seq_lens_k", "cu_seq_lens_q",
    "position_ids", "use_cache", "is_causal", "logits_indices", "logits_processor_args", "max_length_q",
    "max_length_k", "max_seqlen_q", "max_seqlen_k", "output_hidden_states",
))  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One layer of the cache, in transformers 5.22 and newer."""

    cache: Any  # an allocator: the cache of all layers of one type
    layer: int

    @property
    def group(self) -> int:
        """The row of layers of this type in what there is once for each type."""
        return self.cache.index

    @property
    def page(self) -> int:
        return self.cache.tokens_per_page

    @property
    def trash(self) -> int:
        """Where keys can be written that are never read."""
        return self.cache.write_trash_index

    def pages(self) -> tuple[Tensor, ...]:
        """(keys, values) [pages, page, KV, D]."""
        return self.cache.get_cache_for_block_table(self.layer)

    def update(self, key: Tensor, value: Tensor, read: list[Tensor], write: list[Tensor]) -> Any:
        """Write new keys and values [tokens, KV, D]. Returns those of all requests, gathered."""
        return self.cache.update(key, value, self.layer, read[self.group], write[self.group])


class OlderLayer(Layer):
    """The same in older versions, for a cache with one type of layers."""

    @property
    def group(self) -> int:
        return 0

    @property
    def page(self) -> int:
        return self.cache.block_size

    @property
    def trash(self) -> int:
        named = hasattr(self.cache, "write_trash_index")
        return self.cache.write_trash_index if named else self.cache.trash_index

    def pages(self) -> tuple[Tensor, ...]:
        _, index = self.cache.layer_index_to_group_indices[self.layer]
        both = self.cache.key_cache[index], self.cache.value_cache[index]
        return tuple(t.view(-1, self.page, *t.shape[1:]) for t in both)

    def update(self, key: Tensor, value: Tensor, read: list[Tensor], write: list[Tensor]) -> Any:
        key, value = (t.transpose(0, 1)[None] for t in (key, value))
        return self.cache.update(key, value, self.layer, read, write)


def _layer_of(cache: Any, index: Any) -> Layer:
    allocators = getattr(cache, "layer_to_allocator", None)
    return OlderLayer(cache, index) if allocators is None else Layer(allocators[index], index)


class Keys(NamedTuple):
    """Where the keys of the requests are, in layers of one type."""

    ends: Tensor  # [requests + 1]: where they end in the gathered keys
    lengths: Tensor  # [requests]: how many a request has in the cache, with its new ones
    slots: Tensor | None = None  # [requests]: where the new key is written, if there is a block table
    source: Tensor | None = None  # the gathered keys, with others in front of them: see Windows


class Plan(NamedTuple):
    """What is the same in all layers of a forward."""

    starts: Tensor  # [requests + 1]: where the queries of the requests begin
    keys: dict[str, Keys]  # by type of layer


def plan_of(given: dict[str, Any], cache: Any, padded: bool) -> Plan:
    """For a forward with these arguments; `padded` if it has room for more tokens than there are."""
    starts, ends = given["cu_seq_lens_q"], given["cu_seq_lens_k"]
    if not isinstance(ends, dict):  # older versions, if all layers are of one type
        ends = {FULL: ends}
    tokens = given["input_ids"].shape[1]
    keys = {kind: _keys(kind, each, given, cache, padded) for kind, each in ends.items()}
    if padded:  # tokens behind the last request: one more request, without keys
        starts = torch.cat((starts, starts.new_full((1,), tokens)))
    return Plan(starts, keys)


def _keys(kind: str, ends: Tensor, given: dict[str, Any], cache: Any, padded: bool) -> Keys:
    lengths = ends.diff()
    if given["block_table"] is not None:
        layer = _layer_of(cache, 0)
        last = (lengths - 1).clamp(min=0).long()
        pages = given["block_table"][layer.group].gather(1, (last // layer.page)[:, None])[:, 0]
        slots = torch.where(lengths > 0, pages * layer.page + last % layer.page, layer.trash)
        return Keys(ends, lengths, slots=slots)
    source = None
    if kind == SLIDING:
        read = given["read_index"][cache.cache_allocators[kind].index].numel()
        ends, source = _in_place(ends, lengths, given, read or given["input_ids"].shape[1])
    if padded:
        ends = torch.cat((ends, ends[-1:]))
    return Keys(ends, lengths, source=source)


def _in_place(ends: Tensor, lengths: Tensor, given: dict[str, Any], read: int) -> tuple[Tensor, Tensor]:
    """(ends, source) that put keys in front of those of each request, `read` in all, so that these have their
    original positions modulo a segment. Which keys does not matter if they are finite, since the window masks
    them: it is the request's first one again."""
    starts, requests = given["cu_seq_lens_q"], len(lengths)
    past = given["position_ids"][0, starts[:-1].clamp(max=given["input_ids"].shape[1] - 1)]
    dropped = torch.where(lengths > 0, past + starts.diff() - lengths, 0)
    front = dropped % SEGMENT
    moved = ends + torch.cat((front.new_zeros(1), front.cumsum(0))).to(ends.dtype)
    # A GPU is not asked how many there are: there is room for the most.
    room = read + requests * (SEGMENT - 1) if ends.is_cuda else int(moved[-1])
    slot = torch.arange(room, device=ends.device)
    request = torch.searchsorted(moved[1:], slot, right=True).clamp(max=requests - 1)
    offset = (slot - moved[request] - front[request]).clamp(min=0)
    return moved, (ends[request] + offset).clamp(max=read - 1)


@for_layers
def attend(call: LayerCall) -> Tensor:
    """All tokens of a forward are in one row."""
    module, sliding_window = call.module, call.sliding_window
    plan, cache, block_table = (call.more.get(name) for name in ("isobit_plan", "cache", "block_table"))
    if plan is None or cache is None:
        raise refusal(
            "the model is in a manager of continuous batching, and this forward is not one of the manager's: "
            "stop the manager first"
        )
    check_layer(call, _HARMLESS)
    query, key, value = in_one_dtype(call.query, call.key, call.value)
    kind = FULL if sliding_window is None else SLIDING
    if kind not in plan.keys:
        raise refusal(f"{layer_name(module)} has a window of {sliding_window}, and its cache does not")
    keys, layer = plan.keys[kind], _layer_of(cache, module.layer_idx)
    options: dict[str, Any] = {"scale": call.scaling, "window": sliding_window, "softcap": call.softcap}
    if block_table is not None:
        assert keys.slots is not None
        k, v = layer.pages()
        for pages, new in ((k, key), (v, value)):
            pages.view(-1, *pages.shape[2:]).index_copy_(0, keys.slots, new[0].transpose(0, 1))
        options |= {"block_table": block_table[layer.group], "key_end": keys.lengths}
        return attention(query.permute(2, 0, 1, 3), k, v, **options).transpose(0, 1)
    k, v = (t[0].transpose(0, 1) for t in (key, value))
    k, v = layer.update(k, v, call.more["read_index"], call.more["write_index"])
    if keys.source is not None:
        k, v = (t.index_select(0, keys.source) for t in (k, v))
    q, D = query[0].transpose(0, 1), query.shape[-1]
    if D not in HEAD_SIZES:
        options["scale"] = D**-0.5 if call.scaling is None else call.scaling
        q, k, v = (nn.functional.pad(t, (0, wider(module, D) - D)) for t in (q, k, v))
    out = attention(q, k, v, cu_seqlens_q=plan.starts, cu_seqlens_k=keys.ends, **options)
    return out[None, ..., :D]


def register() -> None:
    """Make the name known to transformers. There is no mask of this name, so that models make none."""
    import_module("transformers.modeling_utils").AttentionInterface.register(PAGED, attend)
