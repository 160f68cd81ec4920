"""The state of gated delta-rule attention, backwards (GDN, KDA: Qwen3-Next, Kimi Linear).

A head carries a state S [K, V] through a sequence that is divided into chunks of C tokens. Forward, chunk by
chunk, with gates g (one per token) and gk (one per token and feature) in log2, cumulative within each chunk,
and with `last` its last token:

    v_new = u - W S
    S     = 2^(g[last] + gk[last]) S + K^T (2^(g[last] - g) v_new)        2^gk scales rows of S
    o     = scale (2^g Q) S + a part inside the chunk

Backward, from the last chunk to the first, D is the gradient of the state at the end of a chunk. With do the
gradient of o, and dv the gradient of v_new from inside the chunk:

    dh[c] = D
    dv2   = 2^(g[last] - g) (K D) + dv
    D     = 2^(g[last] + gk[last]) D + scale (2^g Q)^T do - W^T dv2

dh0 is the final D. D is carried in fp32. It is rounded to the dtype of q where it is stored and where it is
multiplied by K. dv2 is rounded once, and W is multiplied by the rounded value.

Names, shapes and layouts are those of flash-linear-attention (FLA) 0.6.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from isobit.frame.backend import NONE
from isobit.frame.call_plan import validates
from isobit.frame.contract import F32, Contract, Float, Int, dtype_name
from isobit.frame.device import hopper_cannot_run, triton_cannot_run
from isobit.frame.public_op import public_op
from isobit.kernels.host import bounds
from isobit.numerics import Numerics

DHU_1 = Numerics(
    "dhu/1",
    "The gradient of a delta-rule state, carried in fp32 from a sequence's last chunk of 64 tokens to its"
    " first. Products are chains of 16, the decay is one fp32 product. With a gate, or with K = 256, the"
    " gradient of the output is multiplied by gate and scale and split into two 16-bit numbers, and their"
    " products with q are added to the state in its chain; else that product is a chain of its own, joined"
    " by one fused multiply-add. W's product with dv2 is added to the state in its chain.",
    "NVIDIA Hopper (sm_90), each Triton version for itself",
)

DHU_TRITON_1 = Numerics(
    "dhu/triton-1",
    "The same recurrence in chunks of 16, 32 or 64 tokens: each product one chain of the hardware's matrix"
    " steps from zero, joined to the state by fp32 additions, gate and scale folded as in dhu/1.",
    "GPUs through Triton, each architecture and Triton version for itself",
)


def _sizes(args: dict[str, Any]) -> dict[str, int]:
    """Sizes of outputs that do not occur in an input."""
    B, T, _, K = args["q"].shape
    V, packed, indices = args["dv"].shape[-1], args["cu_seqlens"], args["chunk_indices"]
    NT = len(indices) if packed is not None else -(-T // args["chunk_size"])
    X, Y = (V, K) if args["state_v_first"] else (K, V)
    return {"NT": NT, "S": B if packed is None else len(packed) - 1, "X": X, "Y": Y}


def _flops(args: dict[str, Any]) -> int:
    return 6 * args["w"].numel() * args["dv"].shape[-1]


@public_op("chunk_gated_delta_rule_bwd_dhu", sizes=_sizes, flops=_flops)
def backward() -> tuple[
    Float[Tensor, "B NT HV X Y in q"], F32[Tensor, "S HV X Y if h0"], Float[Tensor, "B T HV V in dv"]
]:  # fmt: skip
    """(dh, dh0, dv2). Packed sequences need chunk_indices, whose length is the number of chunks."""


@backward.public
def chunk_gated_delta_rule_bwd_dhu(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    w: Float[Tensor, "B T HV K"],
    do: Float[Tensor, "B T HV V"],
    dv: Float[Tensor, "B T HV V"],
    g: F32[Tensor, "B T HV; any strides"] | None = None,
    gk: F32[Tensor, "B T HV K"] | None = None,
    h0: Float[Tensor, "S HV X Y; any strides"] | None = None,
    dht: Float[Tensor, "S HV X Y"] | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Int[Tensor, "S+1; any strides"] | None = None,
    chunk_size: int = 64,
    chunk_indices: Int[Tensor, "NT 2; any strides"] | None = None,
    chunk_offsets: Int[Tensor, "C; any strides"] | None = None,
    use_graph: bool = False,
    *,
    use_exp2: bool = True,
    transpose_state_layout: bool | None = None,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of the states of gated delta-rule attention: what FLA's function of this name computes.

    Args:
        q, k: [B, T, H, K] in bf16, fp16 or fp32 (fp64 on the reference).
        w: [B, T, HV, K], of the same dtype. HV is a multiple of H: groups of value heads share q and k.
        do, dv: [B, T, HV, V], of the same dtype.
        g: [B, T, HV] fp32, the log2 of the gate, cumulative from the start of each chunk.
        gk: [B, T, HV, K] fp32, the same for each feature; only the last row of each chunk is read.
        h0: [S, HV, K, V] or None: whether dh0 is wanted. Its values are not read.
        dht: [S, HV, K, V], the gradient of the last state; None is 0.
        scale: factor on q; None is K ** -0.5. A run-time value.
        state_v_first: states and dh are [..., V, K]. `transpose_state_layout` is its older name.
        cu_seqlens: [S + 1], int32 or int64: the first token of each packed sequence, from 0 to T, with B = 1.
            Sequences may be empty. None: every batch element is a sequence.
        chunk_size: 16, 32 or 64.
        chunk_indices: [NT, 2] for packed sequences: the sequence of each chunk and its number there. If it is
            not given it is computed, which waits for the device once. On a GPU it is then kept for later
            calls with this tensor cu_seqlens, as long as PyTorch does not change it. Where other code writes
            into it (a replayed graph, a kernel, `.data`), pass chunk_indices.
        chunk_offsets: [S] or [S + 1], the first chunk of each sequence; computed if it is not given.
        use_graph: accepted and without effect: every call can be captured, and outputs are always new
            tensors.
        use_exp2: False takes the gates as natural logarithms.
        validate: check cu_seqlens, chunk_indices and chunk_offsets on a GPU too (a host sync). None checks on
            CPU tensors, and everywhere with ISOBIT_VALIDATE=1. Without the check, wrong bounds give wrong
            results, but no access is out of bounds.
        numerics: the numerics class that the result must have, "dhu/1" or "dhu/triton-1"; None takes that of
            the backend that serves. It is an error if no backend can keep it.
        backend: force "hopper", "triton" or "reference"; None takes the first that can serve.

    Returns:
        (dh, dh0, dv2): dh [B, NT, HV, K, V] in the dtype of q, dh0 like h0 in fp32 or None, dv2 like dv.
        The bits of a sequence do not depend on what it is batched or packed with, nor on its place there.

    Example:
        >>> import torch, isobit
        >>> q, k, w, do, dv = (torch.randn(1, 100, 2, 16) for _ in range(5))
        >>> dh, dh0, dv2 = isobit.chunk_gated_delta_rule_bwd_dhu(q, k, w * 0.1, do, dv, scale=1.0)
        >>> dh.shape, dh0, dv2.shape
        (torch.Size([1, 2, 2, 16, 16]), None, torch.Size([1, 100, 2, 16]))
        >>> torch.equal(dv2[:, 64:], dv[:, 64:])  # no gradient has reached the last state yet
        True
    """
    given: dict[str, Any] = {
        "q": q, "k": k, "w": w, "do": do, "dv": dv, "g": g, "gk": gk, "h0": h0, "dht": dht, "scale": scale,
        "state_v_first": state_v_first, "cu_seqlens": cu_seqlens, "chunk_size": chunk_size,
        "chunk_indices": chunk_indices, "chunk_offsets": chunk_offsets, "use_graph": use_graph,
        "use_exp2": use_exp2, "transpose_state_layout": transpose_state_layout, "validate": validate,
        "numerics": numerics, "backend": backend,
    }  # fmt: skip
    dh, dh0, dv2 = backward(**_adapt(given))
    return dh, None if h0 is None else dh0, dv2


# Arguments that callers may leave out, or give by an older name. This runs before the contract is checked, so
# what violates it is left as it is.


def _adapt(given: dict[str, Any]) -> dict[str, Any]:
    adapted, old = given.copy(), given.get("transpose_state_layout")
    if old is not None:
        if old is False and given.get("state_v_first") is True:
            rule = "contradicts state_v_first=True, of which it is the older name"
            raise backward.contract.error("transpose_state_layout", old, rule)
        adapted |= {"state_v_first": old, "transpose_state_layout": None}
    if given.get("scale") is None:
        adapted["scale"] = _default_scale(given.get("q"))
    if given.get("cu_seqlens") is not None and given.get("chunk_indices") is None:
        adapted["chunk_indices"] = _chunk_indices(given)
    return adapted


def _default_scale(q: Any) -> float | None:
    return q.shape[-1] ** -0.5 if isinstance(q, Tensor) and q.ndim and q.shape[-1] else None


def _chunk_indices(given: dict[str, Any]) -> Tensor | None:
    """[NT, 2]."""
    from isobit.ops.delta_rule.chunk_indices import chunk_indices  # a call without sequences needs none

    cu_seqlens, chunk_size = given["cu_seqlens"], given.get("chunk_size", 64)
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point():
        return None
    if not isinstance(chunk_size, int) or chunk_size < 1:
        return None
    return chunk_indices(cu_seqlens, chunk_size, anew=validates(given.get("validate")))


backward.adapt = _adapt


# Rules that annotations cannot express


def _options(contract: Contract, args: dict[str, Any]) -> None:
    if args["chunk_size"] not in (16, 32, 64):
        raise contract.error("chunk_size", args["chunk_size"], "must be 16, 32 or 64")
    if args["scale"] is not None and not -1e38 <= args["scale"] <= 1e38:  # kernels take it in fp32
        raise contract.error("scale", args["scale"], "must be a finite number, -1e38 to 1e38")


def _one_dtype(contract: Contract, args: dict[str, Any]) -> None:
    wanted = args["q"].dtype
    for name in ("k", "w", "do", "dv"):
        if args[name].dtype != wanted:
            raise contract.error(name, args[name], f"dtype must be that of q, {dtype_name(wanted)}")


def _gates_are_fp32(contract: Contract, args: dict[str, Any]) -> None:
    for name in ("g", "gk"):
        given = args[name]
        if given is not None and given.dtype not in (torch.float32, args["q"].dtype):
            raise contract.error(name, given, "dtype must be fp32, or fp64 if q is fp64")


def _heads(contract: Contract, args: dict[str, Any]) -> None:
    H, HV = args["q"].shape[2], args["w"].shape[2]
    if HV == 0:
        raise contract.error("w", args["w"], "HV must be at least 1")
    if H == 0 or HV % H:
        raise contract.error("w", args["w"], f"HV={HV} must be a multiple of H={H} from q")
    for name in ("K", "V"):
        t = args["q" if name == "K" else "dv"]
        if t.shape[-1] == 0:
            raise contract.error("q" if name == "K" else "dv", t, f"{name} must be at least 1")


def _packing(contract: Contract, args: dict[str, Any]) -> None:
    given, B = args["cu_seqlens"], args["q"].shape[0]
    if given is None:
        for name in ("chunk_indices", "chunk_offsets"):
            if args[name] is not None:
                raise contract.error(name, args[name], "is of packed sequences: it needs cu_seqlens")
        return
    if B != 1:
        raise contract.error("cu_seqlens", given, f"needs packed sequences, B = 1, but B={B} from q")
    if len(given) == 0:
        raise contract.error("cu_seqlens", given, "needs at least one element, the 0 it begins with")
    offsets, S = args["chunk_offsets"], len(given) - 1
    if offsets is not None and len(offsets) not in (S, S + 1):
        raise contract.error("chunk_offsets", offsets, f"must have one element a sequence, {S}, or one more")
    if args["chunk_indices"] is None:
        raise contract.error("chunk_indices", None, "is required with cu_seqlens")


def _states(contract: Contract, args: dict[str, Any]) -> None:
    sizes = _sizes(args)
    for name in ("h0", "dht"):
        state = args[name]
        if state is None:
            continue
        S, _, X, Y = state.shape
        if sizes["S"] != S:
            raise contract.error(name, state, f"must have one state a sequence, {sizes['S']}, not {S}")
        if (sizes["X"], sizes["Y"]) != (X, Y):
            order = "V, K" if args["state_v_first"] else "K, V"
            raise contract.error(name, state, f"states must be [{order}] = [{sizes['X']}, {sizes['Y']}]")


def _sequences(contract: Contract, args: dict[str, Any]) -> None:
    """0 <= ... <= T, and chunk indices and offsets that match."""
    given, C = args["cu_seqlens"], args["chunk_size"]
    if given is None:
        return
    starts_at = given.tolist()
    bounds.check(contract, "cu_seqlens", given, starts_at, args["q"].shape[1], of="tokens")
    each = [-(-(after - here) // C) for here, after in pairwise(starts_at)]
    if args["chunk_indices"].tolist() != [[s, c] for s, n in enumerate(each) for c in range(n)]:
        rule = f"must be (sequence, chunk of it) of each of the {sum(each)} chunks that cu_seqlens makes"
        raise contract.error("chunk_indices", args["chunk_indices"], rule)
    if args["chunk_offsets"] is not None:
        starts = [sum(each[:s]) for s in range(len(starts_at))]
        if args["chunk_offsets"].tolist() != starts[: len(args["chunk_offsets"])]:
            rule = "must be the first chunk of every sequence, as cu_seqlens says"
            raise contract.error("chunk_offsets", args["chunk_offsets"], rule)


backward.rule(_options, _one_dtype, _gates_are_fp32, _heads, _packing, _states)
backward.value_rule(_sequences)


# Backends, fastest first

backward.backend(
    "hopper",
    run="kernels_hopper:dhu",
    numerics=str(DHU_1),
    cannot_run=hopper_cannot_run,
    when="kernels_hopper:why_not",
    launches=True,
)


backward.backend(
    "triton",
    run="kernels_triton:dhu",
    numerics=str(DHU_TRITON_1),
    cannot_run=triton_cannot_run,
    when="kernels_triton:why_not",
    interpreted=True,
    launches=True,
)


backward.backend("reference", run="reference:dhu", numerics=NONE)


backward.not_differentiable(
    "isobit.chunk_gated_delta_rule_bwd_dhu is a gradient and has none of its own: call it under "
    "torch.no_grad(), or on detached tensors."
)
