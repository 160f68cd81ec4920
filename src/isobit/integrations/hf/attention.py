"""`attn_implementation="isobit"` for transformers: `isobit.attention` under a model's own masks and caches.

    isobit.integrations.hf.register_attention()
    model = AutoModelForCausalLM.from_pretrained(name, dtype="bfloat16", attn_implementation="isobit")

Two functions are registered by this name. transformers calls the first once per forward to make a mask, and
the second in every layer. The mask is not [B, 1, T, S] here but two numbers per row: which keys of the cache
belong to the row. Causal order and windows need no numbers.

**A window whose cache has dropped keys.** `isobit.attention` counts segments from a sequence's own first key.
A sliding-window cache keeps only the last keys, so the first is gone, but the segment boundaries must not
move. Zeros are put in front of the remaining keys until these have their original positions modulo a segment.
The window masks the zeros, and masked keys change no bit.

**Heads of a size that `isobit.attention` does not have**, such as 16 or 32 in a tiny model, get zeros behind
their elements up to the next size that it has. Scores become sums with more zeros, and the elements of the
result that come from zeros are dropped. That is a copy of the keys in every call.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isobit.integrations.hf.errors import HFError, needed
from isobit.ops.attention.model import SEGMENT
from isobit.ops.attention.op import HEAD_SIZES, attention
from isobit.ops.attention_sink import attention_sink

NAME = "isobit"

#: The name while a manager of continuous batching has the model: see `paged`. With "flash" in it transformers
#: makes no [tokens, keys] mask and captures CUDA graphs; with "paged|" older versions leave the name alone.
PAGED = "isobit_paged|flash"


class MaskInfo(NamedTuple):
    """Properties of a mask, apart from the numbers of its rows."""

    keys: int  # that the cache will return
    window: int | None = None
    dropped: bool = False  # the cache has dropped keys
    front: int = 0  # how many zeros replace them
    starts: bool = False  # rows begin at keys other than the first
    ends: bool = False  # the cache is longer than the keys
    packed: bool = False  # the numbers are the starts of packed sequences


class KeyBounds(Tensor):
    """A mask as transformers passes it around: a tensor of four dimensions, with `info`. It is [2, 1, 1, B]
    with the first key of each row and the one after its last, [1, 1, 1, sequences + 1], or [0, 1, 1, B]."""

    info: MaskInfo
    numbers: tuple[Tensor, ...] | None = None  # of the rows, computed once
    positions_checked = False  # in this forward

    @classmethod
    def of(cls, numbers: Tensor, info: MaskInfo) -> "KeyBounds":
        made = numbers[:, None, None].as_subclass(cls)
        made.info = info
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(made, cls) and "info" not in vars(made) and isinstance(args[0], cls):
            made.info = args[0].info  # for example, on another device
        return made

    def rows(self) -> tuple[Tensor, ...]:
        """Its numbers, computed once for all layers of a forward."""
        if self.numbers is None:
            self.numbers = self.as_subclass(Tensor)[:, 0, 0].unbind()
        return self.numbers


# The mask, once per forward


def mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **more: Any,
) -> KeyBounds:
    """Called by transformers, with its arguments: queries and keys of this forward, how many came before, and
    how many of those the cache has dropped (`kv_offset`)."""
    window, packed = _read(mask_function, use_vmap)
    if packed is not None:
        return KeyBounds.of(_boundaries(packed)[None], MaskInfo(kv_length, window, packed=True))
    # A sum, and so a new tensor: that of a static cache is incremented while this forward runs. Older
    # versions have it in one dimension.
    end = (q_offset.reshape(()) if isinstance(q_offset, Tensor) else q_offset) + q_length
    first, padded = None, False
    if attention_mask is not None:
        new = q_length if has_recurrence(more.get("config")) else None
        first, padded = _padding(attention_mask, end, new)
    ends = isinstance(end, Tensor) or end - kv_offset != kv_length
    front = (SEGMENT - 1 if padded else kv_offset % SEGMENT) if kv_offset else 0
    info = MaskInfo(kv_length, window, kv_offset > 0, front, starts=padded, ends=ends)
    if not (padded or ends):
        return KeyBounds.of(torch.empty((0, batch_size), dtype=torch.int64, device=device), info)
    key_end = end - kv_offset + front
    own_end = (
        key_end.expand(batch_size) if isinstance(key_end, Tensor)
        else torch.full((batch_size,), key_end, device=device)
    )  # fmt: skip
    if first is None:
        return KeyBounds.of(torch.stack((torch.zeros_like(own_end), own_end)), info)
    # The row's first key, or the start of one of its segments of which the cache still has a key.
    dropped = (kv_offset - first).clamp(min=0) // SEGMENT * SEGMENT
    start = first + dropped - kv_offset + front
    return KeyBounds.of(torch.stack((torch.minimum(start, own_end), own_end)), info)


def _read(function: Any, custom: bool) -> tuple[int | None, Tensor | None]:
    """(window, packed sequence of each token) of one of transformers' mask functions. They are composed of
    others, with their parameters in closures."""
    module = import_module("transformers.masking_utils")
    if custom:
        raise refusal("the model adds a mask function of its own")
    window, packed, pending, causal = None, None, [function], False
    while pending:
        one = pending.pop()
        held = _closure(one)
        made_by = getattr(one, "__qualname__", repr(one)).partition(".")[0]
        if one is module.causal_mask_function:
            causal = True
        elif made_by == "and_masks" and "mask_functions" in held:
            pending += held["mask_functions"]
        elif made_by == "sliding_window_overlay" and isinstance(held.get("sliding_window"), int):
            window = held["sliding_window"]
        elif made_by == "packed_sequence_mask_function" and "packed_sequence_mask" in held:
            packed = held["packed_sequence_mask"]
        else:
            raise refusal(f"{made_by} of transformers is not made of causal order, windows and packing")
    if not causal:
        raise refusal("the mask is not causal")
    return window, packed


def _closure(function: Any) -> dict[str, Any]:
    """The variables in a function's closure."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _boundaries(packed: Tensor) -> Tensor:
    """Where sequences begin when all rows are concatenated, and the end. Reads their number."""
    B, T = packed.shape
    begins = torch.ones((B, T), dtype=torch.bool, device=packed.device)
    begins[:, 1:] = packed[:, 1:] != packed[:, :-1]
    end = torch.full((1,), B * T, device=packed.device)
    return torch.cat((begins.flatten().nonzero()[:, 0], end))


def has_recurrence(config: Any) -> bool:
    """Whether a model has layers of linear attention, which carry a state from token to token."""
    return "linear_attention" in (getattr(config, "layer_types", None) or ())


def _padding(given: Tensor, end: int | Tensor, new: int | None) -> tuple[Tensor, bool]:
    """([B] first tokens, whether any is not 0). The tokens of a row must be contiguous: this is checked on
    the host, like transformers' own masks. A graph that is captured or compiled cannot check. `new`: how many
    tokens this forward has, if the model has a recurrence. That gets the last columns of the mask, and no
    mask for one token."""
    if given.ndim != 2:
        raise refusal(f"attention_mask has {given.ndim} dimensions and not 2")
    tokens = given != 0
    first = (tokens.cumsum(-1) == 0).sum(-1)
    capturing = given.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or torch.compiler.is_compiling():
        return first, True
    runs = (tokens[:, 1:] & ~tokens[:, :-1]).sum(-1) + tokens[:, 0]
    looks = [first.amax(), runs.amax(), (~tokens[:, -1:]).sum()]
    looks += [end] if isinstance(end, Tensor) else []
    most, most_runs, ended, *counted = torch.stack(looks).tolist()
    ends_at = counted[0] if counted else end
    if most_runs > 1:
        rule = "put it in front of them all, as tokenizers do with padding_side='left'"
        raise refusal(f"attention_mask has padding between tokens of a row: {rule}")
    if given.shape[1] < ends_at or (new is not None and given.shape[1] != ends_at):
        raise refusal(f"attention_mask has {given.shape[1]} columns for {ends_at} tokens")
    if new == 1 and ended:
        raise refusal("one token at a time, and in a row it is padding: pass more tokens at once")
    return first, most > 0


# Attention, in every layer

#: Of packed sequences.
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")

#: Arguments that layers pass in addition to those of `attend`, and that change no result, or are served:
#: `s_aux` are sinks. Others may.
_HARMLESS = frozenset((
    "position_ids", "cache_position", "use_cache", "output_hidden_states", "output_router_logits",
    "num_items_in_batch", "max_length_q", "max_length_k", "is_causal", "s_aux", *_PACKING,
))  # fmt: skip


class LayerCall(NamedTuple):
    """What a layer passes: query [B, H, T, D], key and value [B, KV, S, D]."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    attention_mask: Tensor | None
    scaling: float | None
    dropout: float
    sliding_window: int | None
    softcap: float | None
    more: dict[str, Any]  # the arguments of a forward, and of some models


def for_layers(function: Callable[[LayerCall], Tensor]) -> Callable[..., tuple[Tensor, None]]:
    """A function of transformers' attention interface, by one that returns [B, T, H, D]."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        given = module, query, key, value, attention_mask, scaling, dropout, sliding_window, softcap
        return function(LayerCall(*given, more)), None

    return attend


@for_layers
def attend(call: LayerCall) -> Tensor:
    module, attention_mask, more = call.module, call.attention_mask, call.more
    scaling, sliding_window = call.scaling, call.sliding_window
    _check_packing(more, attention_mask)
    check_layer(call, _HARMLESS)
    q, k, v = (t.transpose(1, 2) for t in in_one_dtype(call.query, call.key, call.value))
    D = q.shape[-1]
    if D not in HEAD_SIZES:
        scaling = D**-0.5 if scaling is None else scaling
        q, k, v = (nn.functional.pad(t, (0, wider(module, D) - D)) for t in (q, k, v))
    if attention_mask is None:
        if not more.get("is_causal") and not getattr(module, "is_causal", False):
            raise refusal(f"{layer_name(module)} is not causal")
        info, numbers = MaskInfo(k.shape[1], sliding_window), None
    elif isinstance(attention_mask, KeyBounds):
        info, numbers = attention_mask.info, attention_mask.rows()
        _check_positions(attention_mask, more.get("position_ids"), q.shape[1], k.shape[1])
    else:
        shape = list(attention_mask.shape)
        raise refusal(f"attention_mask {shape} is a custom mask; pass one of shape [B, tokens]")
    if sliding_window is not None and sliding_window != info.window:
        raise refusal(f"{layer_name(module)} has a window of {sliding_window}, and its mask {info.window}")
    if k.shape[1] != info.keys:
        raise refusal(f"{layer_name(module)} has {k.shape[1]} keys, and its mask is for {info.keys}")
    if info.dropped and info.window is None:  # not earlier: a model may make a mask that no layer uses
        raise refusal(f"the cache has dropped keys that {layer_name(module)} sees")
    options: dict[str, Any] = {"scale": scaling, "window": info.window, "softcap": call.softcap}
    sinks = more.get("s_aux")
    if info.packed:
        if has_recurrence(getattr(module, "config", None)):
            raise refusal("sequences are packed, and its layers of linear_attention do not separate them")
        assert numbers is not None
        B, T = q.shape[:2]
        q, k, v = (t.reshape(1, B * t.shape[1], *t.shape[2:]) for t in (q, k, v))
        return _attended(q, k, v, sinks, cu_seqlens_q=numbers[0], **options).unflatten(1, (B, T))[0, ..., :D]
    if info.front:
        k, v = (nn.functional.pad(t, (0, 0, 0, 0, info.front, 0)) for t in (k, v))
    options["key_start"] = numbers[0] if numbers and info.starts else None
    options["key_end"] = numbers[1] if numbers and info.ends else None
    return _attended(q, k, v, sinks, **options)[..., :D]


def _attended(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, **options: Any) -> Tensor:
    """Attention, with one more logit per head if there are sinks."""
    if sinks is None:
        return attention(q, k, v, **options)
    out, lse = attention(q, k, v, return_lse=True, **options)
    return attention_sink(out, lse.transpose(-1, -2), sinks)


def wider(module: nn.Module, D: int) -> int:
    """The smallest size of heads that `isobit.attention` takes and that has room for D elements."""
    size = next((size for size in HEAD_SIZES if size >= D), None)
    if size is None:
        most = f"isobit.attention takes up to {HEAD_SIZES[-1]}"
        raise refusal(f"{layer_name(module)} has heads of {D} elements; {most}")
    return size


def _check_packing(more: dict[str, Any], mask: Tensor | None) -> None:
    for name in _PACKING:
        if more.get(name) is not None and not (isinstance(mask, KeyBounds) and mask.info.packed):
            raise refusal(f"{name} needs position_ids that restart at 0 for every sequence")


def check_layer(call: LayerCall, harmless: frozenset[str]) -> None:
    """An error if a layer needs what `isobit.attention` does not have."""
    module, query, value = call.module, call.query, call.value
    if call.dropout:
        dropout = f"dropout={call.dropout} of {layer_name(module)}"
        raise refusal(f"{dropout}: set attention_dropout to 0 in its config")
    for name, given in call.more.items():
        if given is None or given is False or name in harmless:
            continue
        if name == "output_attentions":
            raise refusal("output_attentions=True: probabilities are never stored")
        raise refusal(f"{layer_name(module)} passes {name}, which isobit.attention does not have")
    if call.more.get("is_causal") is False:
        raise refusal(f"is_causal=False for {layer_name(module)}")
    if query.shape[-1] != value.shape[-1]:
        sizes = f"{query.shape[-1]} elements for queries and {value.shape[-1]} for values"
        raise refusal(f"{layer_name(module)} has heads of {sizes}; isobit.attention takes equal ones")


def _check_positions(bounds: KeyBounds, positions: Tensor | None, T: int, S: int) -> None:
    """Sequences that are packed by positions, and that the mask does not separate: transformers looks at
    positions only if there is no attention_mask and no cache. A sequence begins where the position falls and
    then rises by one; positions of padding after a row may fall, but do not rise.

    This check runs once per forward, and only if this forward has all the keys, so never in decoding. It
    waits for the device."""
    if bounds.positions_checked or bounds.info.packed or T != S or T < 3:
        return
    if positions is None or positions.ndim != 2:
        return
    capturing = positions.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or torch.compiler.is_compiling():
        return
    bounds.positions_checked = True
    begins = (positions[:, 1:-1] < positions[:, :-2]) & (positions[:, 2:] == positions[:, 1:-1] + 1)
    if bounds.info.starts:  # what is in front of a row's first token is padding, with any position
        begins = begins & (torch.arange(1, T - 1, device=positions.device) > bounds.rows()[0][:, None])
    if bool(begins.any()):
        raise refusal(
            "position_ids start again inside a row, but its mask does not separate the sequences: pack "
            "with use_cache=False and without attention_mask"
        )


def in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as autocast casts for PyTorch's own attention."""
    kind = tensors[0].device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        tensors = tuple(t.to(torch.get_autocast_dtype(kind)) for t in tensors)
    dtype = tensors[0].dtype
    if dtype not in (torch.bfloat16, torch.float16):
        raise refusal(f"queries are {dtype}: bits are kept in bf16 and fp16")
    return tensors


def layer_name(module: nn.Module) -> str:
    index = getattr(module, "layer_idx", None)
    return type(module).__name__ + ("" if index is None else f" of layer {index}")


def refusal(reason: str) -> HFError:
    return HFError(f'isobit.integrations.hf: attn_implementation="{NAME}": {reason}')


def register_attention() -> None:
    """Register `attn_implementation="isobit"` with transformers. This changes no model: select it with
    `from_pretrained(..., attn_implementation="isobit")` or `model.set_attn_implementation("isobit")`.

    It supports causal attention in bf16 and fp16 with padding, sliding windows, softcaps, sinks, grouped
    heads, dynamic and static caches, prefill in chunks, and sequences packed by `position_ids`. What
    `isobit.attention` does not support is refused with an `HFError`: dropout, masks with gaps or of other
    patterns.

    Example:
        >>> import torch, transformers, isobit
        >>> isobit.integrations.hf.register_attention()
        >>> sizes = dict(vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
        >>> config = transformers.LlamaConfig(**sizes, num_attention_heads=1)
        >>> model = transformers.LlamaForCausalLM(config).bfloat16()
        >>> model.set_attn_implementation("isobit")
        >>> model(torch.tensor([[7, 3, 11, 2]])).logits.shape
        torch.Size([1, 4, 50])
    """
    masks = needed("transformers.masking_utils", "register_attention")
    if "q_offset" not in inspect.signature(masks.sdpa_mask).parameters:
        version = import_module("transformers").__version__
        raise refusal(f"transformers {version} creates masks in another way; 5.10 and 5.22 are tested")
    import_module("transformers.modeling_utils").AttentionInterface.register(NAME, attend)
    masks.AttentionMaskInterface.register(NAME, mask)
