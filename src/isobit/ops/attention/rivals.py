"""What people use instead of `attention`, and the sizes at which both are timed.

Series: training and prefill (`attention`, and backward `_bwd`), heads of 256 numbers (`_wide`), packed
sequences (`_packed`), a window (`_window`), a softcap (`_softcap`), few KV heads (`_few_heads_bwd`), decoding
from a cache (`_decode`), from pages of 16 keys (`_paged`), and from few pages of a table with room for many
(`_room`). Rivals are PyTorch's SDPA on cuDNN and on its flash kernel, and FlexAttention with a block mask
that is built once. They get [B, H, T, D] tensors, their fastest layout. Where vLLM is installed, so is the
FlashAttention-3 that it ships: forward, with the number of splits that it chooses itself (`fa3`), and with
one (`fa3:one split`), which makes its bits independent of the batch.

`isobit:one segment` is the same kernel with all keys in one segment. It has other bits, and shows what
segments cost. `isobit:no softcap` is the call without its softcap, `isobit:attn/1` the call in that class.
`isobit:exact sizes` is the call whose table has no more pages than there are keys.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from isobit.ops.attention.op import ATTN_1, ATTN_1_CPU, attention, forward
from isobit.ops.attention.proof.inputs import BY_TOKEN
from isobit.ops.attention.proof.inputs import paged as in_pages
from isobit.ops.attention.proof.truth import formula
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival, cannot_import
from isobit.spec.series import Series, by_rows
from isobit.spec.truth import cotangent_like

BF16 = torch.bfloat16

Change = Callable[[Args], Args]


# Rivals


def _heads_first(args: Args) -> Args:
    """[B, H, T, D], and a mask where `is_causal` does not describe it."""
    (T, S), device = (args[n].shape[1] for n in ("q", "k")), args["q"].device
    mask = None
    if args["causal"] and 1 < T < S:
        mask = torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)
    heads_first = {n: args[n].transpose(1, 2).contiguous() for n in BY_TOKEN}
    return args | heads_first | {"mask": mask, "is_causal": args["causal"] and T == S}


def _lower_right(args: Args) -> Args:
    """The same with PyTorch's `causal_lower_right`, so that its flash kernel does not read a mask from
    memory."""
    changed = _heads_first(args)
    if changed["mask"] is not None:
        changed["mask"] = causal_lower_right(*changed["mask"].shape)
    return changed


def sdpa(backend: SDPBackend, args: Args) -> Tensor:
    with sdpa_kernel(backend):
        out: Tensor = scaled_dot_product_attention(
            args["q"], args["k"], args["v"], attn_mask=args["mask"], is_causal=args["is_causal"],
            enable_gqa=True,
        )  # fmt: skip
    return out.transpose(1, 2)


def _bounds(args: Args) -> Args:
    """Adds the length of the longest packed sequence: kernels take it as a number."""
    cuts = args["cu_seqlens_q"]
    lengths = [args["q"].shape[1]] if cuts is None else cuts.diff().tolist()
    return args | {"longest": max(lengths), "shortest": min(lengths)}


def _nested(args: Args) -> Tensor:
    """SDPA on cuDNN over a jagged tensor."""
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(
            args[n][0], args["cu_seqlens_q"], min_seqlen=args["shortest"], max_seqlen=args["longest"]
        ).transpose(1, 2)
        for n in BY_TOKEN
    )
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out: Tensor = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).values()[None]


def _flash(args: Args) -> Tensor:
    """The kernel behind SDPA's flash backend. SDPA itself passes it neither packed sequences nor a window."""
    cuts, window, longest = args["cu_seqlens_q"], args["window"], args["longest"]
    q, k, v = (args[n] if cuts is None else args[n][0] for n in BY_TOKEN)
    left = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, cuts, cuts, longest, longest, 0.0, True, False, **left
    )[0]
    return out if cuts is None else out[None]


def _with_block_mask(args: Args) -> Args:
    from torch.nn.attention.flex_attention import create_block_mask

    return _heads_first(args) | {"block_mask": create_block_mask(*sees(args), device=args["q"].device)}


def sees(args: Args) -> tuple[Callable[..., Any], None, None, int, int]:
    """Arguments of FlexAttention's `create_block_mask`: the mask function, B and H (None: any), T and S."""
    (T, S), window = (args[n].shape[1] for n in ("q", "k")), args["window"]
    cuts = args["cu_seqlens_q"]
    if cuts is not None:
        document = torch.repeat_interleave(torch.arange(len(cuts) - 1, device=cuts.device), cuts.diff())

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        position = q + (S - T)
        seen_keys = k <= position
        if window is not None:
            seen_keys = seen_keys & (k > position - window)
        if cuts is not None:
            seen_keys = seen_keys & (document[q] == document[k])
        return seen_keys

    return mask, None, None, T, S


def _flex(args: Args) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    out = flex_attention(
        args["q"], args["k"], args["v"], block_mask=args["block_mask"], enable_gqa=True,
        scale=args["scale"],
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out.transpose(1, 2)


def _on_gpus(case: Case, device: torch.device) -> str | None:
    return "its kernels need a GPU" if device.type == "cpu" else None


def _with_cuts(args: Args) -> Args:
    """Packed tensors, with the numbers that FlashAttention-3 takes."""
    (B, T), S, cuts = args["q"].shape[:2], args["k"].shape[1], args["cu_seqlens_q"]
    table = args["block_table"]

    def each(length: int) -> Tensor:
        return torch.arange(B + 1, dtype=torch.int32, device=args["q"].device) * length

    dense = {"of_q": each(T), "of_k": each(S), "longest": T, "most_keys": S}
    if table is not None:
        dense |= {"of_k": None, "most_keys": S * table.shape[1]}
    if cuts is not None:
        longest = int(cuts.diff().max())
        dense |= {"of_q": cuts, "of_k": cuts, "longest": longest, "most_keys": longest}
    return args | dense


def fa3(splits: int, args: Args) -> Tensor:
    """FlashAttention-3 as vLLM calls it; 0 splits is its own choice."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    q, window = args["q"], args["window"]
    k, v = (args[n] if args["block_table"] is not None else args[n].flatten(0, 1) for n in ("k", "v"))
    out: Tensor = flash_attn_varlen_func(
        q.flatten(0, 1), k, v, args["longest"], args["of_q"], args["most_keys"], cu_seqlens_k=args["of_k"],
        seqused_k=args["key_end"], block_table=args["block_table"], softmax_scale=args["scale"],
        causal=args["causal"], window_size=None if window is None else [window - 1, 0],
        softcap=args["softcap"] or 0.0, num_splits=splits, fa_version=3,
    )  # fmt: skip
    return out.view(q.shape)


def fa3_cannot_run(case: Case, device: torch.device) -> str | None:
    if device.type == "cpu":  # before vLLM is imported, which takes many seconds
        return "its kernels need a GPU"
    if (reason := cannot_import("vllm.vllm_flash_attn")) is not None:
        return reason
    from vllm.vllm_flash_attn import fa_version_unsupported_reason, is_fa_version_supported

    return None if is_fa_version_supported(3) else str(fa_version_unsupported_reason(3))


_FA3: dict[str, Any] = {
    "directions": ("fwd",), "prepare": _with_cuts, "available": fa3_cannot_run, "jit": False
}  # fmt: skip
FA3 = Rival("fa3", partial(fa3, 0), **_FA3)
FA3_ONE = Rival("fa3:one split", partial(fa3, 1), **_FA3)

_FOR_GPUS: dict[str, Any] = {"directions": ("fwd", "bwd"), "available": _on_gpus}
CUDNN = Rival(
    "cudnn", partial(sdpa, SDPBackend.CUDNN_ATTENTION), prepare=_heads_first, jit=False, **_FOR_GPUS
)
FLASH = Rival(
    "flash", partial(sdpa, SDPBackend.FLASH_ATTENTION), prepare=_lower_right, jit=False, **_FOR_GPUS
)
# Jagged tensors read sizes from the device, which a CUDA graph cannot capture.
NESTED = Rival("cudnn", _nested, prepare=_bounds, graph=False, jit=False, **_FOR_GPUS)
FLASH_OTHER = Rival("flash", _flash, prepare=_bounds, jit=False, **_FOR_GPUS)
# A compiled backward frees its buffers, so it cannot run twice after one forward.
FLEX = Rival(
    "flex", _flex, directions=("fwd",), prepare=_with_block_mask, available=_on_gpus, compiled=True
)  # fmt: skip


def one_segment(args: Args) -> Tensor:
    """The kernel that serves the call, with all keys in one segment."""
    from isobit.ops.attention import kernels_hopper, kernels_triton, model

    modules = {"hopper": kernels_hopper, "triton": kernels_triton, "model": model}
    served = forward.explain(**args).backend
    assert served is not None
    out: Tensor = modules[served].attention(segment=1 << 30, return_lse=False, **args)[0]
    return out


def no_softcap(args: Args) -> Any:
    q, k, v = (args[n] for n in BY_TOKEN)
    return attention(q, k, v, **_options(args) | {"softcap": None})


def first_class(args: Args) -> Any:
    """With the tanh of attn/1."""
    q, k, v = (args[n] for n in BY_TOKEN)
    return attention(q, k, v, **_options(args), numerics=ATTN_1 if q.is_cuda else ATTN_1_CPU)


def _options(args: Args) -> Args:
    return {name: value for name, value in args.items() if name not in BY_TOKEN}


def exact_sizes(args: Args) -> Any:
    """Of a call with `with_room`: without it."""
    q, k, v = (args[n] for n in BY_TOKEN)
    table = args["block_table"]
    return attention(q, k, v, **_options(args) | {"block_table": table[:, : table.shape[1] // ROOM]})


# The truth


@dataclass(frozen=True)
class OneHead:
    """Truth in fp64 for out and dq of the last head of the last batch element; heads are independent. Limited
    to as many queries as have scores that fit in memory."""

    args: Args

    @property
    def some(self) -> int:
        return min(1024, self.args["q"].shape[1])

    def known(self, cotangent: Tensor | None) -> Tensor:
        one = self.args | {n: self.args[n][-1:, :, -1:].double() for n in BY_TOKEN}
        one["q"] = one["q"][:, -self.some :]
        if cotangent is None:
            return formula(one)[0]
        with torch.enable_grad():
            leaf = one["q"].requires_grad_()
            return torch.autograd.grad(formula(one | {"q": leaf})[0], leaf, cotangent)[0]

    def error(self, direction: str, result: tuple[Tensor, ...]) -> float | None:
        first, given = result[0].detach(), self.args["q"]
        if direction == "fwd_bwd":
            return None
        if first.shape != given.shape:  # a rival's gradient has heads first
            first = first.transpose(1, 2)
        cotangent = None
        if direction == "bwd":
            cotangent = self.part(cotangent_like(torch.empty_like(given)))
        return float((self.part(first) - self.known(cotangent)).abs().max())

    def part(self, t: Tensor) -> Tensor:
        return t[-1:, -self.some :, -1:].double()


def _judge(args: Args) -> OneHead | None:
    """No truth for packed sequences and pages here; the check covers them."""
    given = (args["cu_seqlens_q"], args["block_table"])
    return OneHead(args) if given == (None, None) else None


# Sizes


def lengths(total: int) -> list[int]:
    """Lengths of 40 packed sequences that sum to `total`, from short to long."""
    steps = [total * (2 * i + 1) // 40**2 for i in range(40)]
    return [*steps[:-1], total - sum(steps[:-1])]


def packed(args: Args) -> Args:
    cuts = [0, *accumulate(lengths(args["q"].shape[1]))]
    return args | {"cu_seqlens_q": torch.tensor(cuts, dtype=torch.int32, device=args["q"].device)}


def windowed(args: Args) -> Args:
    """A window of a quarter of the keys."""
    return args | {"window": args["k"].shape[1] // 4}


def capped(args: Args) -> Args:
    """The softcap of Gemma 2."""
    return args | {"softcap": 50.0}


def paged(args: Args) -> Args:
    """Keys in pages of 16, in random order, as vLLM has them."""
    return args | in_pages(args, 16, torch.Generator().manual_seed(0))


#: How many times as many keys a table has room for as there are: 32k for 1k.
ROOM = 32


def with_room(args: Args) -> Args:
    """As in a CUDA graph of an engine, which is captured for the longest sequence that may come: lengths are
    on the device, and the table of pages is that wide."""
    args = paged(args)
    table = args["block_table"]
    wide = table.new_zeros(len(table), ROOM * table.shape[1])
    wide[:, : table.shape[1]] = table
    return args | {"block_table": wide}


def seen(T: int, S: int, change: Change | None = None) -> int:
    """Pairs (query, visible key) of one batch element and head."""
    if change is packed:
        return sum(n * (n + 1) // 2 for n in lengths(T))
    hidden = 0
    if change is windowed:  # of query t, which sees S - T + t + 1 keys, subtract those before its window
        last = S - S // 4
        first = max(last - T, 0)
        hidden = (last * (last + 1) - first * (first + 1)) // 2
    return T * S - T * (T - 1) // 2 - hidden


def cost(change: Change | None, dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Forward reads q, k and v once and writes out once. Backward reads those and dout, and writes three
    gradients. FLOPs count visible keys only: two products forward, five backward."""
    B, T, S, H, KV, D = (dims[name] for name in ("B", "T", "S", "H", "KV", "D"))
    rows, keys = B * T * H * D * dtype.itemsize, B * S * KV * D * dtype.itemsize
    flops = 2 * B * H * seen(T, S, change) * D
    return Cost(
        fwd_bytes=2 * rows + 2 * keys,
        bwd_bytes=4 * rows + 4 * keys,
        fwd_flops=2 * flops,
        bwd_flops=5 * flops,
    )


def _case(B: int, T: int, S: int, H: int, KV: int, D: int) -> Case:
    return Case({"B": B, "T": T, "S": S, "H": H, "KV": KV, "D": D}, BF16, data="random")


TRAINING = [
    _case(8, 1024, 1024, 32, 8, 128),
    _case(4, 2048, 2048, 32, 8, 128),
    _case(2, 8192, 8192, 32, 8, 128),
    _case(1, 16384, 16384, 32, 8, 128),
    _case(4, 4096, 4096, 16, 8, 64),
]
CAPPED = [
    _case(4, 2048, 2048, 32, 8, 128),
    _case(2, 8192, 8192, 32, 8, 128),
    _case(4, 4096, 4096, 16, 8, 96),
    _case(4, 4096, 4096, 16, 8, 64),
]
WIDE = [
    _case(8, 1024, 1024, 8, 4, 256),
    _case(4, 2048, 2048, 16, 8, 256),
    _case(2, 8192, 8192, 16, 8, 256),
    _case(1, 16384, 16384, 16, 4, 256),
]
FEW_HEADS = [_case(5, 777, 777, 16, 2, 64), _case(1, 32768, 32768, 8, 1, 128)]
PACKED = [_case(1, 32768, 32768, 32, 8, 128)]
WINDOWED = [_case(1, 16384, 16384, 32, 8, 128)]
DECODING = [
    _case(B, T, S, 8 * group, 8, 128)
    for S in (4096, 32768)
    for B in (1, 16, 64)
    for group in (1, 4, 8)
    for T in (1, 4)
]

PAGED = [_case(B, 1, S, 32, 8, 128) for S in (4096, 32768) for B in (1, 16, 64)][:-1]

ROOMY = [_case(B, 1, 1024, 32, 8, 128) for B in (1, 16, 64, 256)]

#: For a CPU.
_SMALL = _case(1, 40, 40, 2, 1, 64)
_SMALL_DECODING = _case(2, 4, 40, 4, 2, 64)


# Series


def _series(
    name: str, cases: list[Case], rivals: tuple[Rival, ...], change: Change | None = None, **rest: Any
) -> Series:
    """Calls with arguments modified by `change`. This is not an option of a case, because then every size
    here would have to pass the check first; the op's check has such calls at its own sizes."""
    series = by_rows(
        "attention", cases, partial(cost, change), {rival.name: rival for rival in rivals}, name=name,
        judge=_judge, **{"small": [_SMALL]} | rest,
    )  # fmt: skip
    if change is None:
        return series
    return replace(series, make=lambda case, pool: [change(args) for args in series.make(case, pool)])


def _both(name: str, cases: list[Case], rivals: tuple[Rival, ...], about: str, **rest: Any) -> list[Series]:
    """Forward without autograd, and backward."""
    variants = rest.pop("variants", {"one segment": one_segment})
    back = {k: v for k, v in rest.items() if k not in ("also",)}
    if variants.keys() != {"one segment"}:  # of the backward too
        back["variants"] = variants
    return [
        _series(name, cases, rivals, inputs=(), directions=("fwd",), variants=variants, about=about, **rest),
        _series(f"{name}_bwd", cases, rivals, directions=("bwd",), about=f"{about}: backward", **back),
    ]


SERIES = [
    *_both(
        "attention", TRAINING, (CUDNN, FLASH, FLEX, FA3, FA3_ONE), "training and prefill", core=TRAINING[1:3],
        also={"triton": TRAINING[1:3]},
    ),
    *_both(
        "attention_wide", WIDE, (CUDNN, FLASH, FLEX, FA3, FA3_ONE), "heads of 256 numbers", core=WIDE[1:2],
    ),
    *_both(
        "attention_packed", PACKED, (NESTED, FLASH_OTHER, FLEX, FA3, FA3_ONE), "packed sequences",
        change=packed, core=PACKED,
    ),
    *_both(
        "attention_window", WINDOWED, (FLASH_OTHER, FLEX, FA3, FA3_ONE), "a sliding window", change=windowed,
        core=WINDOWED,
    ),
    *_both(
        "attention_softcap", CAPPED, (FA3, FA3_ONE), "a softcap", change=capped, core=CAPPED[::3],
        variants={"no softcap": no_softcap, "attn/1": first_class},
    ),
    _series(
        "attention_few_heads_bwd", FEW_HEADS, (CUDNN, FLASH, FLEX), directions=("bwd",), core=FEW_HEADS[:1],
        about="few KV heads: backward",
    ),
    _series(
        "attention_decode", DECODING, (CUDNN, FLASH, FLEX), inputs=(), directions=("fwd",),
        core=DECODING[2:15:12], small=[_SMALL_DECODING], about="T queries per sequence and a cache of S keys",
    ),
    _series(
        "attention_paged", PAGED, (FA3, FA3_ONE), change=paged, inputs=(), directions=("fwd",),
        core=PAGED[1:2], small=[_SMALL_DECODING], about="T queries per sequence, S keys in pages of 16",
    ),
    _series(
        "attention_room", ROOMY, (FA3, FA3_ONE), change=with_room, inputs=(), directions=("fwd",),
        core=ROOMY[1:3], small=[_SMALL_DECODING], variants={"exact sizes": exact_sizes},
        about=f"the same, of a table of pages with room for {ROOM} S",
    ),
]  # fmt: skip
