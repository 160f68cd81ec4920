"""Decoding for gated delta-rule attention (Qwen3-Next, Qwen3.5), with the bits of the forward in chunks.

A head has a state S [K, V]. The recurrence updates it with every token:

    S = exp(g) S + beta k^T (v - k exp(g) S),        o = scale q S

Training does this in chunks of 64 tokens, with other roundings. Here a token is a row of its chunk: with S
the state at the chunk's start, G the sum of g from there, and rows j <= t of the chunk,

    A[t, j] = beta_t (k_t k_j) exp(G_t - G_j)        j < t
    T[t]    = e_t - sum_j A[t, j] T[j]               row t of (I + A)^-1
    v_new_t = sum_j T[t, j] beta_j v_j  -  (sum_j T[t, j] beta_j exp(G_j) k_j) S
    o_t     = scale (exp(G_t) q_t S  +  sum_j (q_t k_j) exp(G_t - G_j) v_new_j)

Rows j < t are read from the state (`DeltaState`), and S is only read. When the first row of the next chunk
arrives, S becomes exp(G_63) S + sum_j exp(G_63 - G_j) k_j^T v_new_j.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobit.frame.composed import composed
from isobit.frame.contract import F32, Contract, Half, Int, Single, dtype_name
from isobit.frame.device import hopper_cannot_run, triton_cannot_run
from isobit.frame.op import op
from isobit.numerics import Numerics
from isobit.ops.gated_delta_rule.op import BY_TOKEN, CHUNK, CLASS, GDR_1, GDR_1_CPU, not_on_the_cpu

if TYPE_CHECKING:
    from isobit.ops.gated_delta_rule_step.state import DeltaState


@composed(
    "gated_delta_rule_step",
    why="its state is an object that is written into, which a graph cannot hold",
)
def declared() -> Half[Tensor, "B T HV V in q"]:
    """out."""


@declared.public
def gated_delta_rule_step(
    state: "DeltaState",
    q: Half[Tensor, "B T H K"],
    k: Half[Tensor, "B T H K"],
    v: Half[Tensor, "B T HV V"],
    g: Single[Tensor, "B T HV; any strides"] | None,
    beta: Single[Tensor, "B T HV; any strides"],
    *,
    slots: Int[Tensor, "B; any strides"] | None = None,
    lengths: Int[Tensor, "B; any strides"] | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    from_empty: bool = False,
    validate: bool | None = None,
    numerics: str | Numerics | None = None,
    backend: str | None = None,
) -> Tensor:
    """The next tokens of sequences, with the bits that a forward over all their tokens gives.

    Sequences may be at different places, and may get different numbers of tokens. A prompt may be split
    anywhere. Nothing waits for the device, and a call can be captured into a CUDA graph and replayed.

    Args:
        state: the state of the layer. The call adds rows to it.
        q, k: [B, T, H, K] in bf16 or fp16, the dtype of the state. T is the number of new tokens, 1 for plain
            decoding. Of many, whole chunks are computed by the kernels of `gated_delta_rule`, all at once,
            wherever sequences are. The bits are the same.
        v: [B, T, HV, V], of the same dtype. HV is a multiple of H: groups of value heads share q and k.
        g: [B, T, HV] in bf16, fp16 or fp32: the natural logarithm of each token's decay, not summed; None is
            no decay.
        beta: [B, T, HV], of any of these dtypes.
        slots: [B] int32 or int64: the slot of each sequence. None is 0, 1, ..., B - 1. A number outside the
            state, -1 for example, makes the call skip this sequence: its output is 0. No number may occur
            twice.
        lengths: [B] int32 or int64: how many of the T tokens are there; the others are not read, and their
            outputs are 0. None is T for all.
        scale: factor on the output; None is K ** -0.5.
        use_qk_l2norm_in_kernel: divide each row of q and k by its norm first, and round it to their dtype.
        from_empty: the slots are empty, so these tokens are the first of their sequences. It saves the
            launches that complete chunks which are open. The bits are the same.
        validate: check slots, lengths and `from_empty` on a GPU too (a host sync). None checks on CPU
            tensors, and everywhere with ISOBIT_VALIDATE=1. Without the check, wrong integers give wrong
            results, but no access is out of bounds.
        numerics: the numerics class that the result must have, on a Hopper GPU "gdr/1". It is an error if no
            backend can keep it.
        backend: force "hopper", "triton" or "model" (CPU); None takes the first that can serve.

    Returns:
        out [B, T, HV, V], of the dtype of q. No gradient goes through it.

    Example:
        >>> import torch, isobit
        >>> state = isobit.DeltaState(4, heads=1, value_heads=2, K=64, V=64)
        >>> q, k = (torch.randn(1, 5, 1, 64).bfloat16() for _ in range(2))
        >>> v, g, beta = torch.randn(1, 5, 2, 64).bfloat16(), -torch.rand(1, 5, 2), torch.rand(1, 5, 2)
        >>> slots = torch.tensor([3])
        >>> prompt = isobit.gated_delta_rule_step(state, q, k, v, g, beta, slots=slots)
        >>> one_by_one = isobit.DeltaState(1, heads=1, value_heads=2, K=64, V=64)
        >>> tokens = [[x[:, t : t + 1] for x in (q, k, v, g, beta)] for t in range(5)]
        >>> decoded = [isobit.gated_delta_rule_step(one_by_one, *token) for token in tokens]
        >>> torch.equal(torch.cat(decoded, 1), prompt)
        True
    """
    given: dict[str, Any] = {
        "state": state, "q": q, "k": k, "v": v, "g": g, "beta": beta, "slots": slots, "lengths": lengths,
        "scale": scale, "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "from_empty": from_empty,
        "validate": validate, "numerics": numerics, "backend": backend,
    }  # fmt: skip
    form = getattr(state, "form", None)  # anything else than a state has none, and is refused
    served = declared.serve(given, None if form is None else {"state": form})
    args = served.args
    del args["state"], args["from_empty"]
    if scale is None:
        args["scale"] = q.shape[-1] ** -0.5
    args |= state.tensors()
    T = q.shape[1]
    if T <= CHUNK and not (from_empty and T == CHUNK):
        return rows(alike=served.like, **args, backend=served.backend)
    from isobit.ops.gated_delta_rule_step import chunks  # it takes a state apart, and this knows of none

    with torch.no_grad():
        first = None
        if not (state.slots and q.shape[0]):
            pass
        elif from_empty and lengths is None:
            first = chunks.first_chunks(state, args, served.backend)
        elif not chunks.by_rows_alone(state, T, from_empty):
            return chunks.continued(state, args, rows, served.backend, from_empty)
        pieces = [] if first is None else [first]
        for done in range(0 if first is None else first.shape[1], T, CHUNK):
            pieces.append(rows(**_piece(args, done), backend=served.backend))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _piece(args: dict[str, Any], first: int) -> dict[str, Any]:
    """The call for the 64 tokens from `first` on."""
    here = {n: None if args[n] is None else args[n][:, first : first + CHUNK] for n in BY_TOKEN}
    lengths = args["lengths"]
    return args | here | {"lengths": None if lengths is None else lengths - first}


@op(
    "gated_delta_rule_step_rows",
    like=declared.params(*BY_TOKEN, "slots", "lengths", "use_qk_l2norm_in_kernel"),
)
def rows(
    scale: float,
    start: F32[Tensor, "N P HV K V; written"],
    start16: Half[Tensor, "N P HV K V; written"],
    k_rows: Half[Tensor, "N P H 64 K; written"],
    bv_rows: Half[Tensor, "N P HV 64 V; written"],
    vn_rows: Half[Tensor, "N P HV 64 V; written"],
    inverse: F32[Tensor, "N P HV 64 64; written"],
    beta_rows: F32[Tensor, "N P HV 64; written"],
    gate_rows: F32[Tensor, "N P HV 64; written"],
    place: Int[Tensor, "N 5; written"],
) -> Half[Tensor, "B T HV V in q"]:
    """out, for at most 64 tokens; the other tensors are those of a `DeltaState`."""


# Rules that annotations cannot express


def _state(contract: Contract, args: dict[str, Any]) -> None:
    state, q, v = args["state"], args["q"], args["v"]
    from isobit.ops.gated_delta_rule_step.state import DeltaState  # loaded by who makes one

    if not isinstance(state, DeltaState):
        raise contract.error("state", state, "must be an isobit.DeltaState")
    for name, t in (("q", q), ("k", args["k"]), ("v", v)):
        if t.dtype != state.dtype:
            raise contract.error(name, t, f"dtype must be that of the state, {dtype_name(state.dtype)}")
    if q.device != state.device and q.device.type != "meta":
        raise contract.error("q", q, f"is on {q.device} but the state is on {state.device}")
    if tuple(q.shape[2:]) != (state.heads, state.K):
        raise contract.error("q", q, f"[H, K] must be those of the state, [{state.heads}, {state.K}]")
    if tuple(v.shape[2:]) != (state.value_heads, state.V):
        raise contract.error("v", v, f"[HV, V] must be those of the state, [{state.value_heads}, {state.V}]")
    B = q.shape[0]
    if args["slots"] is None and state.slots < B:
        raise contract.error("q", q, f"B={B} sequences, but the state has {state.slots} slots")


def _scale(contract: Contract, args: dict[str, Any]) -> None:
    if args["scale"] is not None and not -1e38 <= args["scale"] <= 1e38:  # kernels take it in fp32
        raise contract.error("scale", args["scale"], "must be a finite number, -1e38 to 1e38")


def _no_gradient(contract: Contract, args: dict[str, Any]) -> None:
    for name in BY_TOKEN:
        if torch.is_grad_enabled() and args[name] is not None and args[name].requires_grad:
            rule = "no gradient goes through decoding: call it under torch.no_grad(), or detach() this"
            raise contract.error(name, args[name], rule)


def _integers(contract: Contract, args: dict[str, Any]) -> None:
    """No slot twice, lengths from 0 to T, and slots that are empty if that was said."""
    slots, lengths, (B, T) = args["slots"], args["lengths"], args["q"].shape[:2]
    state = args["state"]
    named = [s for s in (range(B) if slots is None else slots.tolist()) if 0 <= s < state.slots]
    if len(set(named)) < len(named):
        twice = next(s for s in named if named.count(s) > 1)
        raise contract.error("slots", slots, f"slot {twice} occurs twice: a sequence has one state")
    begun = (state.tokens[named] != 0).tolist() if args["from_empty"] else []
    if any(begun):
        slot = named[begun.index(True)]
        raise contract.error(
            "from_empty", True, f"slot {slot} has {int(state.tokens[slot])} tokens; reset it"
        )
    if lengths is not None:
        for b, n in enumerate(lengths.tolist()):
            if not 0 <= n <= T:
                raise contract.error("lengths", lengths, f"must be from 0 to T={T}; sequence {b} has {n}")


def _few(contract: Contract, args: dict[str, Any]) -> None:
    if args["q"].shape[1] > CHUNK:
        raise contract.error("q", args["q"], f"at most {CHUNK} tokens")


declared.rule(_state, _scale, _no_gradient)
declared.value_rule(_integers)
rows.rule(_few)


# Backends, fastest first. There is no plain PyTorch one: what a state holds belongs to the class.


rows.backend(
    "hopper", run="kernels_hopper:rows", numerics=str(GDR_1), cannot_run=hopper_cannot_run, launches=True
)
rows.backend(
    "triton",
    run="kernels_triton:rows",
    numerics=CLASS,
    cannot_run=triton_cannot_run,
    interpreted=True,
    launches=True,
)
rows.backend("model", run="model:rows", numerics=str(GDR_1_CPU), not_by_default=not_on_the_cpu)
rows.not_differentiable("isobit.gated_delta_rule_step has no gradient: call it under torch.no_grad().")
declared.like(rows, {})
