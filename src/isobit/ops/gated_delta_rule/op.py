"""The gated delta rule in chunks (Gated DeltaNet: Qwen3-Next, Qwen3.5), with one set of bits for training,
prefill and decoding.

A value head carries a state S [K, V] through a sequence. For each token, with q and k of the head's key head:

    S = exp(g) S
    S = S + k (beta (v - S^T k))^T
    o = scale S^T q

It is computed in chunks of 64 tokens, counted from the sequence's own first token (`model` has every step).
With G the sum of g within the chunk, and S the state at its start:

    A     = beta_i (k_i k_j) exp(G_i - G_j),  j < i
    T     = (I + A)^-1                            forward substitution, row by row
    u, w  = T (beta v),  T (beta exp(G) k)
    v_new = u - w S
    o     = scale (exp(G) q S + tril(q k^T exp(G_i - G_j)) v_new)
    S     = exp(G_last) S + k^T (exp(G_last - G) v_new)

Row i of each depends on rows 0 to i of its chunk and on S, never on later rows. Sums have a fixed order, and
zeros leave them unchanged. So a chunk of which only the first rows exist gives these the bits of the whole
chunk.

Backward, with dv_new the gradient of v_new: r = beta v - beta exp(G) k S is (I + A) v_new. So dr is
T^T dv_new, and the gradient of A is -dr v_new^T (`kernels_triton_bwd` has every step). The gradients of a
sequence are its own: sums run within a chunk, along the sequence, and over value heads of a key head, in a
fixed order.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.frame.backend import NONE
from isobit.frame.contract import F32, Contract, Float, Int, dtype_name
from isobit.frame.device import arch_key, hopper_cannot_run, triton_cannot_run
from isobit.frame.op import op
from isobit.frame.public_op import public_op
from isobit.kernels.host import bounds
from isobit.numerics import Numerics

CHUNK = 64

#: Arguments that have a row for each token.
BY_TOKEN = ("q", "k", "v", "g", "beta")

GDR_1 = Numerics(
    "gdr/1",
    "The gated delta rule in chunks of 64 tokens from the sequence's own first. Gates are summed token by"
    " token in fp32, the triangular system is inverted by forward substitution in fp32 with fused"
    " multiply-adds, all products are chains of 16 of 16-bit factors, and the state is carried in fp32. A row"
    " is a function of its chunk's rows up to itself and of the state at the chunk's start. Gradients take"
    " those of states from dhu/1, or from dhu/triton-1 where that does not serve the sizes. `exp2` as Triton"
    " emits it.",
    "NVIDIA Hopper (sm_90), each Triton version for itself",
)

GDR_1_CPU = Numerics(
    "gdr/1/cpu",
    "The order of gdr/1 on a CPU: a step of a chain adds 16 products in ascending order in fp32 and then the"
    " sum to the accumulator; `exp2` is numpy's.",
    "any CPU, each numpy version for itself",
)


def _sizes(args: dict[str, Any]) -> dict[str, int]:
    """Sizes of outputs that do not occur in an input."""
    packed, K, V = args["cu_seqlens"], args["q"].shape[-1], args["v"].shape[-1]
    X, Y = (V, K) if args["state_v_first"] else (K, V)
    return {"S": args["q"].shape[0] if packed is None else len(packed) - 1, "X": X, "Y": Y, "C": CHUNK}


def _flops(args: dict[str, Any]) -> int:
    """Products k k, q k, T v, T k, w S, q S, p v_new and k v_new, as if all chunks were whole."""
    B, T, HV, V = args["v"].shape
    K = args["q"].shape[-1]
    return 2 * B * T * HV * (CHUNK * (3 * K + 2 * V) + 3 * K * V)


@public_op("gated_delta_rule", sizes=_sizes, flops=_flops)
def forward(return_inverse: bool = False) -> tuple[
    Float[Tensor, "B T HV V in q"],
    F32[Tensor, "S HV X Y if output_final_state"],
    Float[Tensor, "B T HV C in q if return_inverse"],
]:  # fmt: skip
    """(o, final_state, inverse): inverse has the rows of T, in the dtype of q. Autograd asks for it where a
    backward may follow: T is what takes the forward longest, and small."""


@forward.public
def gated_delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV; any strides"] | None,
    beta: Float[Tensor, "B T HV; any strides"],
    scale: float | None = None,
    initial_state: Float[Tensor, "S HV X Y"] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Int[Tensor, "S+1; any strides"] | None = None,
    *,
    chunk_size: int = 64,
    use_gate_in_kernel: bool = False,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule: what FLA's `chunk_gated_delta_rule` computes, with bits that depend on the
    sequence alone.

    Args:
        q, k: [B, T, H, K] in bf16 or fp16 (fp32 and fp64 on the reference), K a multiple of 16 up to 256.
        v: [B, T, HV, V], of the same dtype, V a multiple of 16. HV is a multiple of H: groups of value heads
            share q and k.
        g: [B, T, HV], the natural logarithm of each token's decay, not summed; None is no decay.
        beta: [B, T, HV].
        scale: factor on the output; None is K ** -0.5. A run-time value.
        initial_state: [S, HV, K, V], one state for each sequence; None is 0.
        output_final_state: return the last states too.
        use_qk_l2norm_in_kernel: divide each row of q and k by its norm first, and round it to their dtype.
        use_beta_sigmoid_in_kernel, allow_neg_eigval, use_gate_in_kernel: arguments of FLA that are refused:
            apply these functions to beta and g before the call.
        state_v_first: states are [..., V, K].
        cu_seqlens: [S + 1], int32 or int64: the first token of each packed sequence, from 0 to T, with B = 1.
            Sequences may be empty. None: every batch element is a sequence.
        chunk_size: 64, which is part of the class.
        validate: check cu_seqlens on a GPU too (a host sync). None checks on CPU tensors, and everywhere with
            ISOBIT_VALIDATE=1. Without the check, wrong bounds give wrong results, but no access is out of
            bounds.
        numerics: the numerics class that the result must have, "gdr/1" on a Hopper GPU; None takes that of
            the backend that serves. It is an error if no backend can keep it.
        backend: force "hopper", "triton", "model" (CPU) or "reference"; None takes the first that can serve.

    Returns:
        (o, final_state): o like v, final_state [S, HV, K, V] in fp32, or None. A row of o depends on its
        sequence's tokens up to itself, and on its state at the start, and on nothing else.

    Example:
        >>> import torch, isobit
        >>> q, k = (torch.nn.functional.normalize(torch.randn(1, 70, 1, 16), dim=-1) for _ in range(2))
        >>> v, g, beta = torch.randn(1, 70, 2, 16), -torch.rand(1, 70, 2), torch.rand(1, 70, 2)
        >>> q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
        >>> o, state = isobit.gated_delta_rule(q, k, v, g, beta, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 70, 2, 16]), torch.Size([1, 2, 16, 16]))
        >>> first, _ = isobit.gated_delta_rule(q[:, :5], k[:, :5], v[:, :5], g[:, :5], beta[:, :5])
        >>> torch.equal(first, o[:, :5])  # a prefix has the bits of the whole
        True
    """
    given: dict[str, Any] = {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "scale": scale, "initial_state": initial_state,
        "output_final_state": output_final_state, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel, "allow_neg_eigval": allow_neg_eigval,
        "state_v_first": state_v_first, "cu_seqlens": cu_seqlens, "chunk_size": chunk_size,
        "use_gate_in_kernel": use_gate_in_kernel, "validate": validate, "numerics": numerics,
        "backend": backend,
    }  # fmt: skip
    o, final_state, _ = forward(**_adapt(given))
    return o, final_state if output_final_state else None


# Arguments that callers may leave out. This runs before the contract is checked, so what violates it is left
# as it is.


def _adapt(given: dict[str, Any]) -> dict[str, Any]:
    q = given.get("q")
    if given.get("scale") is None and isinstance(q, Tensor) and q.ndim and q.shape[-1]:
        return {**given, "scale": q.shape[-1] ** -0.5}
    return given


forward.adapt = _adapt


@op(
    "gated_delta_rule_bwd",
    like=forward.params(
        *BY_TOKEN, "scale", "initial_state", "use_qk_l2norm_in_kernel", "state_v_first",
        "cu_seqlens",
    ),
    sizes=_sizes,
    flops=lambda args: 3 * _flops(args),
)  # fmt: skip
def backward(
    inverse: Float[Tensor, "B T HV C"],
    do: Float[Tensor, "B T HV V"],
    dfinal_state: F32[Tensor, "S HV X Y; any strides"] | None,
    *,
    want_q: bool,
    want_k: bool,
    want_v: bool,
    want_g: bool,
    want_beta: bool,
    want_initial_state: bool,
) -> tuple[
    Float[Tensor, "B T H K in q if want_q"],
    Float[Tensor, "B T H K in k if want_k"],
    Float[Tensor, "B T HV V in v if want_v"],
    Float[Tensor, "B T HV in g if want_g"],
    Float[Tensor, "B T HV in beta if want_beta"],
    Float[Tensor, "S HV X Y in initial_state if want_initial_state"],
]:
    """(dq, dk, dv, dg, dbeta, dinitial_state); the ones not wanted are None."""


# Rules that annotations cannot express


def _options(contract: Contract, args: dict[str, Any]) -> None:
    if args["chunk_size"] != CHUNK:
        raise contract.error("chunk_size", args["chunk_size"], "must be 64: chunks are part of the class")
    for name, instead in (
        ("use_gate_in_kernel", "pass g = -exp(A_log) * softplus(a + dt_bias)"),
        ("use_beta_sigmoid_in_kernel", "pass beta after its sigmoid"),
        ("allow_neg_eigval", "pass 2 * sigmoid(beta) as beta"),
    ):
        if args[name]:
            raise contract.error(name, args[name], f"is not served: {instead}")
    if args["scale"] is not None and not -1e38 <= args["scale"] <= 1e38:  # kernels take it in fp32
        raise contract.error("scale", args["scale"], "must be a finite number, -1e38 to 1e38")


def _one_dtype(contract: Contract, args: dict[str, Any]) -> None:
    wanted = args["q"].dtype
    for name in ("k", "v"):
        if args[name].dtype != wanted:
            raise contract.error(name, args[name], f"dtype must be that of q, {dtype_name(wanted)}")
    for name in ("g", "beta", "initial_state"):
        given = args[name]
        if given is not None and given.dtype == torch.float64 and wanted != torch.float64:
            raise contract.error(name, given, "dtype must be fp32 or that of q")


def _heads(contract: Contract, args: dict[str, Any]) -> None:
    (H, K), (HV, V) = args["q"].shape[2:], args["v"].shape[2:]
    if HV == 0 or V == 0:
        raise contract.error("v", args["v"], "HV and V must be at least 1")
    if H == 0 or K == 0:
        raise contract.error("q", args["q"], "H and K must be at least 1")
    if HV % H:
        raise contract.error("v", args["v"], f"HV={HV} must be a multiple of H={H} from q")


def states_fit(contract: Contract, args: dict[str, Any]) -> None:
    """One state for each sequence, of packed ones if there are bounds. Also a rule of the states' own op."""
    given, (B, _, _, K) = args["cu_seqlens"], args["k"].shape
    if given is not None and B != 1:
        raise contract.error("cu_seqlens", given, f"needs packed sequences, B = 1, but B={B} from k")
    if given is not None and len(given) == 0:
        raise contract.error("cu_seqlens", given, "needs at least one element, the 0 it begins with")
    state, V = args["initial_state"], (args["v"] if "v" in args else args["u"]).shape[-1]
    if state is None:
        return
    wanted = B if given is None else len(given) - 1
    if wanted != state.shape[0]:
        rule = f"must have one state a sequence, {wanted}, not {state.shape[0]}"
        raise contract.error("initial_state", state, rule)
    order, shape = ("V, K", [V, K]) if args["state_v_first"] else ("K, V", [K, V])
    if shape != list(state.shape[2:]):
        raise contract.error("initial_state", state, f"states must be [{order}] = {shape}")


def _sequences(contract: Contract, args: dict[str, Any]) -> None:
    given = args["cu_seqlens"]
    if given is not None:
        bounds.check(contract, "cu_seqlens", given, given.tolist(), args["q"].shape[1], of="tokens")


forward.rule(_options, _one_dtype, _heads, states_fit)
backward.rule(_one_dtype, _heads, states_fit)
forward.value_rule(_sequences)


# Backends, fastest first


def of_this_hardware(own: Numerics, on_a_cpu: Numerics, device: torch.device) -> str:
    """The class of a `tl.dot` chain. On other GPUs than Hopper a step is whatever the hardware does, so the
    class carries its name. The interpreter uses the steps of the model."""
    if device.type in ("cpu", "meta"):
        return str(on_a_cpu)
    arch = arch_key(device)
    return str(own) if arch == "sm_90" else f"{own}/{arch}"


def not_on_the_cpu(args: dict[str, Any]) -> str | None:
    if args["k"].device.type == "cpu":
        return None
    return "it computes on the CPU, thousands of times slower: select it by name to compare"


CLASS = partial(of_this_hardware, GDR_1, GDR_1_CPU)

_HOPPER: dict[str, Any] = {
    "numerics": str(GDR_1),
    "cannot_run": hopper_cannot_run,
    "when": "kernels_hopper:why_not",
    "launches": True,
}
_TRITON: dict[str, Any] = {
    "numerics": CLASS,
    "cannot_run": triton_cannot_run,
    "when": "kernels_triton:why_not",
    "interpreted": True,
    "launches": True,
}
_MODEL: dict[str, Any] = {
    "numerics": str(GDR_1_CPU),
    "when": "model:why_not",
    "not_by_default": not_on_the_cpu,
}
forward.backend("hopper", run="kernels_hopper:gated_delta_rule", **_HOPPER)
backward.backend("hopper", run="kernels_hopper:gated_delta_rule_bwd", **_HOPPER)
forward.backend("triton", run="kernels_triton:gated_delta_rule", **_TRITON)
backward.backend("triton", run="kernels_triton_bwd:gated_delta_rule_bwd", **_TRITON)
forward.backend("model", run="model:gated_delta_rule", **_MODEL)
backward.backend("model", run="model_bwd:gated_delta_rule_bwd", **_MODEL)
forward.backend("reference", run="reference:gated_delta_rule", numerics=NONE)
backward.backend("reference", run="reference_bwd:gated_delta_rule_bwd", numerics=NONE)


# Autograd, once for all backends

forward.derivative(
    *BY_TOKEN, "initial_state",
    by=backward, outputs=("o", "final_state", "inverse"), constant=("inverse",), flags=("return_inverse",),
)  # fmt: skip
backward.not_differentiable(
    "isobit.gated_delta_rule has no second derivative: its backward is made of kernels without a gradient of "
    "their own."
)
