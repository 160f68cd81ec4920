"""The states of gated delta-rule attention between chunks: the sequential part of `gated_delta_rule`, with
the name, shapes and layouts of flash-linear-attention (FLA) 0.6.

For each chunk of 64 tokens, with gates g (one per token) and gk (one per token and feature) in log2,
cumulative within the chunk, S the state at its start and `last` its last token:

    h     = S
    v_new = u - w S
    S     = 2^(g[last] + gk[last]) S + k^T (2^(g[last] - g) v_new)
"""

from itertools import pairwise
from typing import Any

from torch import Tensor

from isobit.frame.backend import NONE
from isobit.frame.call_plan import validates
from isobit.frame.contract import F32, Contract, Float, Int, dtype_name
from isobit.frame.device import hopper_cannot_run, triton_cannot_run
from isobit.frame.public_op import public_op
from isobit.kernels.host import bounds
from isobit.numerics import Numerics
from isobit.ops.gated_delta_rule.op import CHUNK, CLASS, GDR_1, GDR_1_CPU, not_on_the_cpu, states_fit


def _sizes(args: dict[str, Any]) -> dict[str, int]:
    """Sizes of outputs that do not occur in an input."""
    B, T, _, K = args["k"].shape
    V, packed, indices = args["u"].shape[-1], args["cu_seqlens"], args["chunk_indices"]
    NT = len(indices) if packed is not None else -(-T // CHUNK)
    X, Y = (V, K) if args["state_v_first"] else (K, V)
    return {"NT": NT, "S": B if packed is None else len(packed) - 1, "X": X, "Y": Y}


def _flops(args: dict[str, Any]) -> int:
    return 4 * args["w"].numel() * args["u"].shape[-1]


@public_op("chunk_gated_delta_rule_fwd_h", sizes=_sizes, flops=_flops)
def states() -> tuple[
    Float[Tensor, "B NT HV X Y in k"],
    Float[Tensor, "B T HV V in k if save_new_value"],
    F32[Tensor, "S HV X Y if output_final_state"],
]:
    """(h, v_new, final_state). Packed sequences need chunk_indices, whose length is the number of chunks."""


@states.public
def chunk_gated_delta_rule_fwd_h(
    k: Float[Tensor, "B T H K"],
    w: Float[Tensor, "B T HV K"],
    u: Float[Tensor, "B T HV V"],
    g: F32[Tensor, "B T HV; any strides"] | None = None,
    gk: F32[Tensor, "B T HV K"] | None = None,
    initial_state: Float[Tensor, "S HV X Y"] | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    save_new_value: bool = True,
    state_v_first: bool = False,
    cu_seqlens: Int[Tensor, "S+1; any strides"] | None = None,
    cu_seqlens_cpu: Int[Tensor, "S+1; any strides"] | None = None,
    chunk_indices: Int[Tensor, "NT 2; any strides"] | None = None,
    chunk_offsets: Int[Tensor, "C; any strides"] | None = None,
    *,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The states at the starts of chunks: what FLA's function of this name computes.

    Args:
        k: [B, T, H, K] in bf16 or fp16 (fp32 and fp64 on the reference), K a multiple of 16 up to 256.
        w: [B, T, HV, K], of the same dtype. HV is a multiple of H: groups of value heads share k.
        u: [B, T, HV, V], of the same dtype, V a multiple of 16.
        g: [B, T, HV] fp32, the log2 of the gate, cumulative from the start of each chunk.
        gk: [B, T, HV, K] fp32, the same for each feature; only the last row of each chunk is read.
        initial_state: [S, HV, K, V], one state for each sequence; None is 0.
        output_final_state: return the last states too.
        chunk_size: 64, which is part of the class.
        save_new_value: return v_new too.
        state_v_first: states are [..., V, K].
        cu_seqlens: [S + 1], int32 or int64: the first token of each packed sequence, from 0 to T, with B = 1.
            Sequences may be empty. None: every batch element is a sequence.
        cu_seqlens_cpu: accepted and without effect.
        chunk_indices: [NT, 2] for packed sequences: the sequence of each chunk and its number there. If it is
            not given it is computed, which waits for the device once for every tensor cu_seqlens, as in
            `chunk_gated_delta_rule_bwd_dhu`.
        chunk_offsets: [S] or [S + 1], the first chunk of each sequence; computed if it is not given.
        validate: check cu_seqlens on a GPU too (a host sync). None checks on CPU tensors, and everywhere with
            ISOBIT_VALIDATE=1. Without the check, wrong bounds give wrong results, but no access is out of
            bounds.
        numerics: the numerics class that the result must have, "gdr/1" on a Hopper GPU; None takes that of
            the backend that serves. It is an error if no backend can keep it.
        backend: force "hopper", "triton", "model" (CPU) or "reference"; None takes the first that can serve.

    Returns:
        (h, v_new, final_state): h [B, NT, HV, K, V] and v_new like u in the dtype of k, final_state
        [S, HV, K, V] in fp32, or None where it is not requested.

    Example:
        >>> import torch, isobit
        >>> k, w, u = (0.1 * torch.randn(1, 100, 2, 16).bfloat16() for _ in range(3))
        >>> h, v_new, last = isobit.chunk_gated_delta_rule_fwd_h(k, w, u, output_final_state=True)
        >>> h.shape, v_new.shape, last.shape
        (torch.Size([1, 2, 2, 16, 16]), torch.Size([1, 100, 2, 16]), torch.Size([1, 2, 16, 16]))
        >>> torch.equal(v_new[:, :64], u[:, :64])  # the first state is 0
        True
    """
    given: dict[str, Any] = {
        "k": k, "w": w, "u": u, "g": g, "gk": gk, "initial_state": initial_state,
        "output_final_state": output_final_state, "chunk_size": chunk_size, "save_new_value": save_new_value,
        "state_v_first": state_v_first, "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu,
        "chunk_indices": chunk_indices, "chunk_offsets": chunk_offsets, "validate": validate,
        "numerics": numerics, "backend": backend,
    }  # fmt: skip
    h, v_new, final_state = states(**_adapt(given))
    return h, v_new if save_new_value else None, final_state if output_final_state else None


# Arguments that callers may leave out. This runs before the contract is checked, so what violates it is left
# as it is.


def _adapt(given: dict[str, Any]) -> dict[str, Any]:
    from isobit.ops.delta_rule.chunk_indices import chunk_indices  # a call without sequences needs none

    cu_seqlens = given.get("cu_seqlens")
    if cu_seqlens is None or given.get("chunk_indices") is not None:
        return given
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point():
        return given
    anew = validates(given.get("validate"))
    return {**given, "chunk_indices": chunk_indices(cu_seqlens, CHUNK, anew=anew)}


states.adapt = _adapt


# Rules that annotations cannot express


def _options(contract: Contract, args: dict[str, Any]) -> None:
    if args["chunk_size"] != CHUNK:
        raise contract.error("chunk_size", args["chunk_size"], "must be 64: chunks are part of the class")


def _one_dtype(contract: Contract, args: dict[str, Any]) -> None:
    wanted = args["k"].dtype
    for name in ("w", "u"):
        if args[name].dtype != wanted:
            raise contract.error(name, args[name], f"dtype must be that of k, {dtype_name(wanted)}")
    for name in ("g", "gk", "initial_state"):
        given = args[name]
        if given is not None and given.dtype.itemsize == 8 and wanted.itemsize != 8:
            raise contract.error(name, given, "dtype must be fp32, or fp64 if k is fp64")


def _heads(contract: Contract, args: dict[str, Any]) -> None:
    (H, K), (HV, V) = args["k"].shape[2:], args["u"].shape[2:]
    if HV == 0 or V == 0:
        raise contract.error("u", args["u"], "HV and V must be at least 1")
    if H == 0 or K == 0:
        raise contract.error("k", args["k"], "H and K must be at least 1")
    if HV % H:
        raise contract.error("u", args["u"], f"HV={HV} must be a multiple of H={H} from k")


def _packing(contract: Contract, args: dict[str, Any]) -> None:
    given = args["cu_seqlens"]
    if given is None:
        for name in ("cu_seqlens_cpu", "chunk_indices", "chunk_offsets"):
            if args[name] is not None:
                raise contract.error(name, args[name], "is of packed sequences: it needs cu_seqlens")
        return
    offsets, S = args["chunk_offsets"], len(given) - 1
    if offsets is not None and len(offsets) not in (S, S + 1):
        raise contract.error("chunk_offsets", offsets, f"must have one element a sequence, {S}, or one more")
    if args["chunk_indices"] is None:
        raise contract.error("chunk_indices", None, "is required with cu_seqlens")


def _sequences(contract: Contract, args: dict[str, Any]) -> None:
    """0 <= ... <= T, and as many chunks."""
    given = args["cu_seqlens"]
    if given is None:
        return
    starts = given.tolist()
    bounds.check(contract, "cu_seqlens", given, starts, args["k"].shape[1], of="tokens")
    each = [-(-(after - here) // CHUNK) for here, after in pairwise(starts)]
    if len(args["chunk_indices"]) != sum(each):
        rule = f"must have a row for each of the {sum(each)} chunks that cu_seqlens makes"
        raise contract.error("chunk_indices", args["chunk_indices"], rule)
    if args["chunk_offsets"] is not None:
        offsets = [sum(each[:s]) for s in range(len(starts))]
        if args["chunk_offsets"].tolist() != offsets[: len(args["chunk_offsets"])]:
            rule = "must be the first chunk of every sequence, as cu_seqlens says"
            raise contract.error("chunk_offsets", args["chunk_offsets"], rule)


states.rule(_options, _one_dtype, _heads, states_fit, _packing)
states.value_rule(_sequences)


# Backends, fastest first

states.backend(
    "hopper", run="kernels_hopper:fwd_h", numerics=str(GDR_1), cannot_run=hopper_cannot_run,
    when="kernels_hopper:why_not", launches=True,
)  # fmt: skip
states.backend(
    "triton", run="kernels_triton:fwd_h", numerics=CLASS, cannot_run=triton_cannot_run,
    when="kernels_triton:why_not", interpreted=True, launches=True,
)  # fmt: skip
states.backend(
    "model", run="model:fwd_h", numerics=str(GDR_1_CPU), when="model:why_not",
    not_by_default=not_on_the_cpu,
)  # fmt: skip
states.backend("reference", run="reference:fwd_h", numerics=NONE)

states.not_differentiable(
    "isobit.chunk_gated_delta_rule_fwd_h is a part of gated_delta_rule and has no gradient of its own: call "
    "it under torch.no_grad(), or on detached tensors."
)
