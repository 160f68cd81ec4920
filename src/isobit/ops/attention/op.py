"""Attention whose bits do not depend on the batch, on prefill chunking, or on how keys are stored.

For a query q at position i of its sequence, and the keys k_j and values v_j that it attends to:

    z_j = scale q k_j                or softcap tanh(scale q k_j / softcap)
    out = sum_j softmax(z)_j v_j
    lse = log sum_j exp(z_j)

The T queries of a sequence are aligned with its last T keys: query t has position keys - T + t. With `causal`
it sees the keys up to its own position, with `window` only the last `window` of these, otherwise all keys. A
query that sees no key gets out = 0 and lse = -inf, and contributes no gradient.

Sequences are given in one of three forms: as batch elements, where `key_start` and `key_end` bound the keys
of each; packed one after another (`cu_seqlens_q`, `cu_seqlens_k`); or with keys in pages (`block_table`).

Backward, with P the probabilities, dz = P (dout V^T - out dout + dlse), times 1 - tanh^2 with a softcap:

    dq = scale dz K,    dk = scale dz^T q,    dv = P^T dout        dk, dv summed over the heads of a group
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from isobit.frame.backend import NONE, resolve
from isobit.frame.contract import F32, Contract, Float, Int, dtype_name
from isobit.frame.device import arch_key, hopper_cannot_run, triton_cannot_run
from isobit.frame.op import op
from isobit.frame.public_op import public_op
from isobit.kernels.host import bounds
from isobit.numerics import Numerics
from isobit.ops.attention.calls import call_of, decodes

ATTN_1 = Numerics(
    "attn/1",
    "Segments of 1024 keys from the sequence's own first, blocks of 128 (64 for D > 128) in ascending order"
    " with one rescaling each: scores are chains of 16 over D, sums of probabilities four lanes by trees,"
    " probabilities rounded to 16 bits continue a chain of 16 over the segment's keys; segments are folded in"
    " ascending order, then one division and one rounding. Gradients are chains of 16 over keys (dq) and over"
    " heads and positions (dk, dv). `exp2` and `log2` as Triton emits them.",
    "NVIDIA Hopper (sm_90), each Triton version for itself",
)

ATTN_1_CPU = Numerics(
    "attn/1/cpu",
    "The order of attn/1 on a CPU: a step of a chain adds 16 products in ascending order in fp32 and then the"
    " sum to the accumulator; `exp2` and `log2` are numpy's.",
    "any CPU, each numpy version for itself",
)

ATTN_2 = Numerics(
    "attn/2",
    "attn/1 with another tanh: ten operations, no division, an error of at most 2^-20. Bits differ from those"
    " of attn/1 where scores are capped, and only there.",
    ATTN_1.hardware,
)
ATTN_2_CPU = Numerics("attn/2/cpu", "The order of attn/2 on a CPU, as in attn/1/cpu.", ATTN_1_CPU.hardware)

HEAD_SIZES = (64, 80, 96, 128, 256)


def _flops(args: dict[str, Any]) -> int:
    """Two products (q k and p v), counted as if every query saw all keys for which there is room."""
    call = call_of(args)
    return 4 * math.prod(args["q"].shape) * (call.S // max(call.sequences, 1) if call.packed_k else call.S)


@public_op("attention", flops=_flops)
def forward() -> tuple[Float[Tensor, "B T H D in q"], F32[Tensor, "B H T if return_lse"]]:
    """(out, lse). Packed queries have B = 1, and so have packed keys."""


def _unpacked(t: Any, packed: bool) -> Any:
    """[N, heads, D] as one batch element."""
    return t.unsqueeze(0) if packed and isinstance(t, Tensor) and t.ndim == 3 else t


def _adapt(given: dict[str, Any]) -> dict[str, Any]:
    """Adds the batch dimension to packed tensors: q with cu_seqlens_q, and k and v unless they are paged."""
    packed = given.get("cu_seqlens_q") is not None
    packed_k = packed and given.get("block_table") is None
    of = {"q": packed, "k": packed_k, "v": packed_k}
    return given | {name: _unpacked(given[name], p) for name, p in of.items() if name in given}


forward.adapt = _adapt


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Any
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Any
) -> Tensor | tuple[Tensor, Tensor]: ...
@overload
def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor: ...
@forward.public  # type: ignore[misc]
def attention(  # overloads take any options
    q: Float[Tensor, "B T H D"],
    k: Float[Tensor, "P S KV D"],
    v: Float[Tensor, "P S KV D"],
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    key_start: Int[Tensor, "N"] | None = None,
    key_end: Int[Tensor, "N"] | None = None,
    cu_seqlens_q: Int[Tensor, "N+1"] | None = None,
    cu_seqlens_k: Int[Tensor, "N+1"] | None = None,
    block_table: Int[Tensor, "N M"] | None = None,
    return_lse: bool = False,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with the same bits in training, chunked prefill, and decoding from a cache.

    Args:
        q: [B, T, H, D] in bf16 or fp16 (fp32 and fp64 on the reference), D 64, 80, 96, 128 or 256. The
            queries are aligned with the last T keys of their sequence. Packed: [N, H, D].
        k, v: [B, S, KV, D], of the same dtype; H is a multiple of KV, and each group of H / KV query heads
            shares one KV head. Packed: [N, KV, D]. Paged: [pages, page, KV, D], where page is a multiple of
            16 keys. q, k and v may have any strides as long as the last is 1, for example
            `x.transpose(1, 2)` of a [B, H, T, D] tensor. They are not copied.
        causal: a query sees no key after its own position.
        scale: factor on the products of q and k; None is D ** -0.5.
        window: a query sees only the last `window` keys, its own included. Needs `causal`.
        softcap: scores become softcap * tanh(scores / softcap). Up to 1024 the default class is attn/2,
            whose tanh is fast and has an error of at most 2^-20; from there on it is attn/1.
        key_start, key_end: [B] int32 or int64: the keys of a sequence are [key_start, key_end); None is 0 and
            S. For left padding, and for caches that are not full. Keys outside affect no result, and their
            gradient is 0.
        cu_seqlens_q: [sequences + 1] int32 or int64, from 0 to N: where packed sequences begin in q.
        cu_seqlens_k: the same for k and v; None is cu_seqlens_q.
        block_table: [B, M] int32 or int64: the pages of each sequence, in order. Without gradients.
        return_lse: return lse too.
        validate: check the integers on a GPU too (a host sync). None checks on CPU tensors, and everywhere
            with ISOBIT_VALIDATE=1. Without the check, wrong integers give wrong results, but no access is out
            of bounds.
        numerics: the numerics class that the result must have, on a Hopper GPU "attn/1" or "attn/2". Without
            a softcap both have the same bits. None takes that of the backend that serves: attn/2 with a
            softcap of at most 1024, else attn/1. It is an error if no backend can keep it.
        backend: force "hopper", "triton", "model" (CPU), which are of class attn/1, one of class attn/2:
            "hopper-attn2", "triton-attn2", "model-attn2"; or "reference". None takes the first that can
            serve.

    Returns:
        out, like q; or (out, lse) with lse [B, H, T] in fp32 (fp64 for fp64 inputs), packed [H, N]. A query
        that sees no key gets 0 and -inf. The bits of a query's result depend on its own values and on its
        keys and values, and on nothing else.

    Example:
        >>> import torch, isobit
        >>> q, k, v = (torch.randn(1, 5, 2, 64).bfloat16() for _ in range(3))
        >>> whole = isobit.attention(q, k, v)
        >>> last = isobit.attention(q[:, 4:], k, v)  # one more token, from a cache
        >>> torch.equal(last, whole[:, 4:])
        True
    """
    given: dict[str, Any] = {
        "q": q, "k": k, "v": v, "causal": causal, "scale": scale, "window": window, "softcap": softcap,
        "key_start": key_start, "key_end": key_end, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k, "block_table": block_table, "return_lse": return_lse,
        "validate": validate, "numerics": numerics, "backend": backend,
    }  # fmt: skip
    given = _adapt(given)
    out, lse = forward(**given)
    if given["q"] is not q:
        out, lse = out.squeeze(0), lse.squeeze(0) if return_lse else lse
    return (out, lse) if return_lse else out


_SHARED = forward.params(
    "q", "k", "v", ..., "causal", "scale", "window", "softcap", "key_start", "key_end", "cu_seqlens_q",
    "cu_seqlens_k", "block_table",
)  # fmt: skip


@op("attention_bwd", like=_SHARED, flops=lambda args: 5 * _flops(args) // 2)
def backward(
    out: Float[Tensor, "B T H D"],
    lse: F32[Tensor, "B H T"],
    dout: Float[Tensor, "B T H D; any strides"],
    dlse: F32[Tensor, "B H T; any strides"] | None,
    *,
    want_q: bool,
    want_k: bool,
    want_v: bool,
) -> tuple[
    Float[Tensor, "B T H D in q if want_q"],
    Float[Tensor, "P S KV D in k if want_k"],
    Float[Tensor, "P S KV D in v if want_v"],
]:
    """(dq, dk, dv); the ones not wanted are None."""


# Rules that annotations cannot express


def _one_dtype(contract: Contract, args: dict[str, Any]) -> None:
    for name in ("k", "v"):
        if args[name].dtype != args["q"].dtype:
            wanted = dtype_name(args["q"].dtype)
            raise contract.error(name, args[name], f"dtype must be that of q, {wanted}")


def _heads(contract: Contract, args: dict[str, Any]) -> None:
    H, D = args["q"].shape[2:]
    KV = args["k"].shape[2]
    if D not in HEAD_SIZES:
        raise contract.error("q", args["q"], f"D must be {', '.join(map(str, HEAD_SIZES))}, is {D}")
    if H == 0:
        raise contract.error("q", args["q"], "H must be at least 1")
    if KV == 0 or H % KV:
        raise contract.error("k", args["k"], f"H={H} from q must be a multiple of KV={KV}")


def _scalars(contract: Contract, args: dict[str, Any]) -> None:
    def require(name: str, holds: Callable[[Any], bool], rule: str) -> None:
        if args[name] is not None and not holds(args[name]):
            raise contract.error(name, args[name], rule)

    # Kernels hold both, their quotient and their products with log2(e) in fp32: these must be normal numbers.
    require("scale", lambda x: 1e-18 <= x <= 1e18, "must be a positive number, 1e-18 to 1e18")
    require("softcap", lambda x: 1e-18 <= x <= 1e18, "must be a positive number, 1e-18 to 1e18")
    require("window", lambda w: 1 <= w <= 2**30, "must be from 1 (a query's own key) to 2^30")
    if args["window"] is not None and not args["causal"]:
        raise contract.error("window", args["window"], "needs causal=True: it counts back from a query")


def _sequences(contract: Contract, args: dict[str, Any]) -> None:
    """Checks how sequences are given (batch, packed or paged), and that all tensors have the same number of
    them."""
    table, packed = args["block_table"], args["cu_seqlens_q"]
    if args["cu_seqlens_k"] is not None:
        if packed is None:
            raise contract.error("cu_seqlens_k", args["cu_seqlens_k"], "needs cu_seqlens_q")
        if table is not None:
            rule = "is for packed keys; with block_table use key_start and key_end"
            raise contract.error("cu_seqlens_k", args["cu_seqlens_k"], rule)
    if packed is not None:
        if len(packed) == 0:
            raise contract.error("cu_seqlens_q", packed, "needs at least one element, the 0 it begins with")
        if args["q"].shape[0] != 1:
            B = args["q"].shape[0]
            raise contract.error("q", args["q"], f"packed queries are [N, H, D], or B = 1, but B={B}")
    count = args["q"].shape[0] if packed is None else len(packed) - 1
    packed_k = packed is not None and table is None
    for name in ("key_start", "key_end", "block_table"):
        given = args[name]
        if given is None:
            continue
        if packed_k:
            raise contract.error(name, given, "packed keys are bounded by cu_seqlens_k, or cu_seqlens_q")
        if len(given) != count:
            raise contract.error(name, given, f"must have one row a sequence, {count}, not {len(given)}")
    if table is None:
        P, wanted = args["k"].shape[0], 1 if packed is not None else args["q"].shape[0]
        if wanted != P:
            where = "packed keys are [N, KV, D], or B = 1" if packed is not None else f"B={wanted} from q"
            raise contract.error("k", args["k"], f"{where}, but B={P}")


def _pages(contract: Contract, args: dict[str, Any]) -> None:
    table, k = args["block_table"], args["k"]
    if table is None:
        return
    page = k.shape[1]
    if page == 0 or page % 16:
        raise contract.error("k", k, f"a page must hold a multiple of 16 keys, not {page}")
    if k.shape[0] == 0 and table.numel():  # kernels take any number for that of some page
        raise contract.error("k", k, "needs at least one page, since block_table names some")
    if torch.is_grad_enabled() and any(args[n].requires_grad for n in ("q", "k", "v")):
        rule = "keys in pages have no gradient: sequences may share them; use packed or dense keys"
        raise contract.error("block_table", table, rule)


def _bounds_hold(contract: Contract, args: dict[str, Any]) -> None:
    """Checks the values of the integer tensors: bounds and page numbers."""
    call, table = call_of(args), args["block_table"]
    for name, end in (("cu_seqlens_q", call.T), ("cu_seqlens_k", call.S)):
        if args[name] is not None:
            of = "queries" if name == "cu_seqlens_q" else "keys"
            bounds.check(contract, name, args[name], args[name].tolist(), end, of=of)
    if call.packed_k and args["cu_seqlens_k"] is None and call.S != call.T:
        rule = f"must end with the number of keys, {call.S}, where cu_seqlens_k is not given"
        raise contract.error("cu_seqlens_q", args["cu_seqlens_q"], rule)
    first = [0] * call.sequences if args["key_start"] is None else args["key_start"].tolist()
    end_ = [call.S] * call.sequences if args["key_end"] is None else args["key_end"].tolist()
    if not call.packed_k:
        for n, (a, b) in enumerate(zip(first, end_, strict=True)):
            name = "key_start" if args["key_end"] is None else "key_end"
            if not 0 <= a <= b <= call.S:
                rule = f"0 <= key_start <= key_end <= {call.S} must hold; sequence {n} has {a} and {b}"
                raise contract.error(name, args[name], rule)
    if table is not None:
        for n, (row, a, b) in enumerate(zip(table.tolist(), first, end_, strict=True)):
            for i in range(a // call.page, -(-b // call.page)):
                if not 0 <= row[i] < call.pages:
                    rule = f"[{n}, {i}]={row[i]} is no page: there are {call.pages}"
                    raise contract.error("block_table", table, rule)


_SHARED_RULES = (_one_dtype, _heads, _scalars, _sequences)
forward.rule(*_SHARED_RULES, _pages)
forward.value_rule(_bounds_hold)
backward.rule(*_SHARED_RULES)


# Backends, fastest first. Those of class attn/2 are the same kernels with another tanh.


def _hopper_would_waste(args: dict[str, Any]) -> str | None:
    """Its tiles hold many queries of one head, so few queries would waste them. Decoding has kernels of its
    own."""
    from isobit.ops.attention.kernels_hopper import slower_because

    return None if decodes(call_of(args)) else slower_because(args)


def by_hopper(**args: Any) -> Any:
    kernels = "kernels_hopper_decode" if decodes(call_of(args)) else "kernels_hopper"
    return resolve(f"{__package__}.{kernels}:attention")(**args)


def gradients_by_hopper(**args: Any) -> Any:
    kernels = "kernels_hopper_wide" if args["q"].shape[-1] > 128 else "kernels_hopper_bwd"
    return resolve(f"{__package__}.{kernels}:attention_bwd")(**args)


def _of_this_hardware(own: Numerics, on_a_cpu: Numerics, device: torch.device) -> str:
    """The class of a `tl.dot` chain. On other GPUs than Hopper a step is whatever the hardware does, so the
    class carries its name. The interpreter uses the steps of the model."""
    if device.type in ("cpu", "meta"):
        return str(on_a_cpu)
    arch = arch_key(device)
    return str(own) if arch == "sm_90" else f"{own}/{arch}"


def _not_on_the_cpu(args: dict[str, Any]) -> str | None:
    if args["q"].device.type == "cpu":
        return None
    return "it computes on the CPU, thousands of times slower: select it by name to compare"


def _add(name: str, numerics: Any, ahead: dict[str, Any], back: dict[str, Any], **rest: Any) -> None:
    """A backend of both directions."""
    default = "softcap:is_not_capped" if name.endswith("attn2") else "softcap:is_capped"
    rest |= {"numerics": numerics, "other_class_by_default": default}
    forward.backend(name, **ahead, **rest)
    backward.backend(name, **back, **rest)


_HOPPER: dict[str, Any] = {"cannot_run": hopper_cannot_run, "launches": True}
_TRITON: dict[str, Any] = {"cannot_run": triton_cannot_run, "interpreted": True, "launches": True}
_WASTE: dict[str, Any] = {"not_by_default": _hopper_would_waste}
_SLOW: dict[str, Any] = {"not_by_default": "kernels_hopper:slower_because"}
_add(
    "hopper", str(ATTN_1), {"run": by_hopper, "when": "kernels_hopper:why_not", **_WASTE},
    {"run": gradients_by_hopper, "when": "kernels_hopper_bwd:why_not", **_SLOW}, **_HOPPER,
)  # fmt: skip
_add(
    "hopper-attn2", str(ATTN_2),
    {"run": "kernels_hopper_softcap:attention", "when": "kernels_hopper_softcap:why_not", **_WASTE},
    {"run": "kernels_hopper_softcap:attention_bwd", "when": "kernels_hopper_softcap:why_not_bwd", **_SLOW},
    **_HOPPER,
)  # fmt: skip
_add(
    "triton", partial(_of_this_hardware, ATTN_1, ATTN_1_CPU), {"run": "kernels_triton:attention"},
    {"run": "kernels_triton_bwd:attention_bwd"}, when="kernels_triton:why_not", **_TRITON,
)  # fmt: skip
_add(
    "triton-attn2", partial(_of_this_hardware, ATTN_2, ATTN_2_CPU),
    {"run": "kernels_triton_softcap:attention"}, {"run": "kernels_triton_softcap:attention_bwd"},
    when="kernels_triton_softcap:why_not", **_TRITON,
)  # fmt: skip
_add(
    "model", str(ATTN_1_CPU), {"run": "model:attention"}, {"run": "model:attention_bwd"},
    when="model:why_not", not_by_default=_not_on_the_cpu,
)  # fmt: skip
_add(
    "model-attn2", str(ATTN_2_CPU), {"run": "model:attention_2"}, {"run": "model:attention_2_bwd"},
    when="model:why_not_2", not_by_default=_not_on_the_cpu,
)  # fmt: skip
forward.backend("reference", run="reference:attention", numerics=NONE)
backward.backend("reference", run="reference:attention_bwd", numerics=NONE)


# Autograd, once for all backends

forward.derivative("q", "k", "v", by=backward, outputs=("out", "lse"), flags=("return_lse",))
backward.not_differentiable(
    "isobit.attention has no second derivative: its backward is made of kernels without a gradient of their "
    "own. Differentiate a softmax of scores instead where you need one."
)
