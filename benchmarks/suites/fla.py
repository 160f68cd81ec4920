"""Attention with a gated delta rule, through the public functions of flash-linear-attention (FLA):

    fla      FLA as it is
    isobit   the same inside `isobit.integrations.fla.enable()`

`bwd` is the backward alone, `fwd_bwd` forward and backward. isobit computes one of several kernels of the
backward and none of the forward, so this shows what that kernel gains in training. FLA's kernel for states is
autotuned again for each case, which its autotuner would not do by itself.

In the series `layer` isobit computes all of `chunk_gated_delta_rule`, inside `enable(whole=...)`, forward
alone and both directions. It is called as FLA's layers call it: gates from their inputs, and q and k to be
normalized. Where FLA refuses its own backward, `fla_pieces` stands for it, which does less
(`isobit.ops.gated_delta_rule.rivals.calls`).

Before anything is timed, isobit must have served the call, and the gradients must agree with those of FLA
alone, each within the limits that FLA's own tests allow between it and plain PyTorch: `LIMITS`. `max_abs` is
their largest difference. A `layer` must agree with fp64, on its last head, within the same limits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.goals.gated_delta_rule import fla_or_pieces
from isobit.bench.check_gate import CheckFailed
from isobit.bench.goals import Cell, Goal
from isobit.frame.contract import ContractError
from isobit.frame.device import triton_cannot_run
from isobit.integrations import fla
from isobit.ops.delta_rule.rivals import forget_tuning
from isobit.ops.gated_delta_rule import reference, reference_bwd
from isobit.ops.gated_delta_rule.rivals.calls import KERNELS, pieces, refused_by_fla
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival
from isobit.spec.rotation import copies_for
from isobit.spec.series import NotHere, Pool, Series
from isobit.spec.truth import cotangent_like

#: Maximum root mean square of a gradient's difference, relative to that of the gradient.
LIMITS = {"q": 0.008, "k": 0.008, "v": 0.008, "g": 0.02, "beta": 0.02}

#: Whether gates are one number per token and head, or one per feature of a head.
GATES_OF_FEATURES = {"chunk_gated_delta_rule": False, "chunk_kda": True}


# Calls


def make(op: str, case: Case, pool: Pool) -> list[Args]:
    reason = triton_cannot_run(pool.device)
    if reason is not None:
        raise ContractError(f"bench fla: FLA's kernels cannot run: {reason}")
    first = inputs(op, case, pool.device, pool.inputs.seed)
    copies = copies_for(sum(t.nbytes for t in first.values() if isinstance(t, Tensor)), pool.device)
    return [first, *(inputs(op, case, pool.device, pool.inputs.seed + i) for i in range(1, copies))]


def inputs(op: str, case: Case, device: torch.device, seed: int) -> Args:
    """Inputs as a layer of FLA passes them to `op`: directions of length 1, gates that forget slowly."""
    B, T, H, D = case.dims.values()
    gen = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen, device=device)

    q, k, v, do = (normal(B, T, H, D) for _ in range(4))
    gates = (B, T, H, D) if GATES_OF_FEATURES[op] else (B, T, H)
    made = {"q": F.normalize(q, dim=-1), "k": F.normalize(k, dim=-1), "v": v}
    made = {name: t.to(case.dtype) for name, t in made.items()}
    made |= {"g": F.logsigmoid(normal(*gates)) / 16, "beta": normal(B, T, H).sigmoid()}
    return {"op": op, "do": do.to(case.dtype)} | {name: t.requires_grad_() for name, t in made.items()}


def _forward(args: Args) -> Tensor:
    function = getattr(import_module("fla.ops"), args["op"])
    with torch.enable_grad():
        output: Tensor = function(**{name: args[name] for name in LIMITS})[0]
    return output


def _gradients(output: Tensor, args: Args, **options: bool) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, [args[name] for name in LIMITS], args["do"], **options)


def backward(args: Args) -> tuple[Tensor, ...]:
    """The gradients. The first call runs the forward and keeps its output."""
    if "output" not in args:
        args["output"] = _forward(args)
    return _gradients(args["output"], args, retain_graph=True)


def both(args: Args) -> tuple[Tensor, ...]:
    """(output, *gradients)."""
    output = _forward(args)
    return (output.detach(), *_gradients(output, args))


PLAIN = {"bwd": backward, "fwd_bwd": both}


def tuned_afresh(args: Args) -> Args:
    forget_tuning()
    return args


def with_isobit(direction: str, args: Args, backend: str | None) -> tuple[Tensor, ...]:
    assert backend is None
    with fla.enable(_serving(args)):
        return PLAIN[direction](args)


def _serving(args: Args) -> str:
    return "hopper" if args["q"].is_cuda else "reference"


# The check


@dataclass(frozen=True)
class Agreement:
    """Gradients of FLA alone, with which others are compared."""

    op: str
    known: tuple[Tensor, ...]

    def error(self, direction: str, result: tuple[Tensor, ...]) -> float:
        """The largest difference. Raises CheckFailed if a gradient differs too much."""
        gradients = result[-len(self.known) :]
        for (name, limit), ours, theirs in zip(LIMITS.items(), gradients, self.known, strict=True):
            share = float(_rms(ours.double() - theirs.double()) / _rms(theirs.double()))
            if not share <= limit:  # NaN is never close
                raise CheckFailed(
                    f"fla: the gradient of {name} of {self.op} is {share:.3g} of itself away from FLA's, "
                    f"more than {limit:g}, so nothing is timed"
                )
        pairs = zip(gradients, self.known, strict=True)
        return max(float((ours.double() - theirs.double()).abs().max()) for ours, theirs in pairs)


def _rms(t: Tensor) -> Tensor:
    return t.square().mean().sqrt()


def agreement(args: Args) -> Agreement:
    """Raises CheckFailed unless isobit serves such a call: otherwise both would be FLA. On Hopper FLA has no
    backward of `chunk_gated_delta_rule` with some versions of Triton, and raises an error."""
    try:
        known = backward(dict(args))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise NotHere(f"FLA without isobit does not run: {error}") from error
    with fla.enable(_serving(args)) as on:
        both(args)
    if not on.served:
        reasons = "; ".join(on.passed) or "it was not called"
        raise CheckFailed(f"fla: isobit has not served {args['op']}, so nothing is timed: {reasons}")
    return Agreement(args["op"], known)


# A layer

LAYER, RULE = "layer", "chunk_gated_delta_rule"

#: What FLA's layers leave to its kernels.
LEFT = {
    "use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True,
}  # fmt: skip

#: Tensors with gradients; the last two have one number per head.
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")

#: Largest differences from fp64. A gradient of A_log or dt_bias is one sum over all tokens, of terms of both
#: signs: what is left of it may be as small as its error. The laws of `delta_gates` are about these.
LIMITS_OF_LAYER = {"o": 0.008} | LIMITS


def make_layer(case: Case, pool: Pool) -> list[Args]:
    """Inputs of a layer after its convolutions: gates from linear layers, A and dt as FLA initializes
    them."""
    B, T, H, D = case.dims.values()
    gen = torch.Generator(pool.device).manual_seed(pool.inputs.seed)

    def one() -> Args:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen, device=pool.device)

        q, k, v = (normal(B, T, H, D).to(case.dtype) for _ in range(3))
        g, beta = (normal(B, T, H).to(case.dtype) for _ in range(2))
        uniform = torch.rand(2, H, generator=gen, device=pool.device)
        A_log, dt = (16 * uniform[0] + 1e-3).log(), 1e-3 * 100 ** uniform[1]
        dt_bias = dt + (-torch.expm1(-dt)).log()  # softplus of it is dt
        return {"q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias}

    first = one()
    copies = copies_for(sum(t.nbytes for t in first.values()), pool.device)
    return [first, *(one() for _ in range(1, copies))]


def by_fla(args: Args) -> Tensor:
    output: Tensor = getattr(import_module("fla.ops"), RULE)(**args, **LEFT)[0]
    return output


def by_isobit(args: Args, backend: str | None) -> Tensor:
    assert backend is None
    serving = _serving(args)
    with fla.enable(serving, whole=serving):
        return by_fla(args)


def by_pieces(args: Args) -> Tensor:
    output: Tensor = unwrap(pieces().chunk_gated_delta_rule)(**args, **LEFT)[0]
    return output


def _whole_runs(case: Case, device: torch.device) -> str | None:
    return refused_by_fla()


def _pieces_run(case: Case, device: torch.device) -> str | None:
    return None if refused_by_fla() else "FLA's own backward runs here"


def _all_tuned_afresh(args: Args) -> Args:
    forget_tuning(*KERNELS)
    return args


@dataclass(frozen=True)
class LastHead:
    """o and the gradients of the last head in fp64, of the first batch element."""

    known: dict[str, Tensor]

    def error(self, direction: str, result: tuple[Tensor, ...]) -> float:
        """The largest difference. Raises CheckFailed if a result differs too much."""
        far = [0.0]
        for (name, true), ours in zip(self.known.items(), result, strict=False):  # forward has o alone
            difference = ours[:1, :, -1:].detach().double() - true
            share = float(_rms(difference) / _rms(true))
            if not share <= LIMITS_OF_LAYER[name]:  # NaN is never close
                raise CheckFailed(
                    f"fla: {name if name == 'o' else f'the gradient of {name}'} of a layer is {share:.3g} of "
                    f"itself away from fp64, more than {LIMITS_OF_LAYER[name]:g}, so nothing is timed"
                )
            far.append(float(difference.abs().max()))
        return max(far)


def truth_of_layer(args: Args) -> LastHead:
    """Raises CheckFailed unless isobit serves such a call: otherwise both would be FLA."""
    serving = _serving(args)
    with fla.enable(serving, whole=serving) as on:
        by_fla(args)
    if not on.served:
        reasons = "; ".join(on.passed) or "it was not called"
        raise CheckFailed(f"fla: isobit has not served {RULE}, so nothing is timed: {reasons}")
    one = {n: args[n][-1:] if args[n].ndim == 1 else args[n][:1, :, -1:] for n in INPUTS}
    one = {n: t.detach().double() for n, t in one.items()}
    raw = one["g"].requires_grad_(), one["beta"].requires_grad_()
    with torch.enable_grad():
        g = -one["A_log"].exp() * F.softplus(one["g"] + one["dt_bias"])
        beta = one["beta"].sigmoid()
    call: Args = {n: one[n] for n in ("q", "k", "v")} | {"g": g.detach(), "beta": beta.detach()}
    call |= {"scale": call["q"].shape[-1] ** -0.5, "initial_state": None, "use_qk_l2norm_in_kernel": True}
    call |= {"state_v_first": False, "cu_seqlens": None}
    o, _ = reference.formula(**call)
    wanted: Args = {f"want_{n}": n != "initial_state" for n in ("q", "k", "v", "g", "beta", "initial_state")}
    do = cotangent_like(args["v"])[:1, :, -1:].double()
    *own, dg, dbeta, _ = reference_bwd.gated_delta_rule_bwd(**call, do=do, dfinal_state=None, **wanted)
    gates = torch.autograd.grad((g, beta), raw, (dg, dbeta))
    known: dict[str, Any] = dict(zip(LIMITS_OF_LAYER, (o, *own, *gates), strict=True))
    return LastHead(known)


def _layer_series(direction: str) -> Series:
    rival: Any = partial(Rival, directions=None, prepare=_all_tuned_afresh)
    rivals = [rival("fla", by_fla)]
    if direction == "fwd_bwd":
        rivals = [
            rival("fla", by_fla, available=_whole_runs),
            rival("fla_pieces", by_pieces, available=_pieces_run, judged=False),
        ]
    return Series(
        op=None, name=LAYER, cases=CASES, core=CASES[:1], small=SMALL_LAYER, make=make_layer, call=by_isobit,
        cost=partial(cost, RULE), judge=truth_of_layer, rivals={each.name: each for each in rivals},
        inputs=INPUTS, directions=(direction,), about=f"FLA's `{RULE}` by isobit, as layers call it",
        needs=("gated_delta_rule", "delta_gates"), imports=("fla.ops",), against="fla", copy=False,
    )  # fmt: skip


# Series

CASES = [
    Case({"B": B, "T": T, "H": H, "D": 128}, torch.bfloat16, data="random")
    for B, T, H in ((1, 8192, 16), (2, 4096, 32), (1, 32768, 8))
]
#: For Triton's interpreter.
SMALL = [Case({"B": 1, "T": 70, "H": 1, "D": 16}, torch.float32, data="random")]
SMALL_LAYER = [Case({"B": 1, "T": 70, "H": 2, "D": 16}, torch.bfloat16, data="random")]


def cost(op: str, dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Inputs and results once in each direction. Products, and traffic between FLA's kernels, are not
    counted."""
    B, T, H, D = dims.values()
    matrix, gates = D * dtype.itemsize, 4 * ((D if GATES_OF_FEATURES[op] else 1) + 1)
    heads = B * T * H
    return Cost(heads * (4 * matrix + gates), heads * (7 * matrix + 2 * gates))


def _series(op: str, direction: str) -> Series:
    return Series(
        op=None, name=op, cases=CASES, core=CASES[:1], small=SMALL, make=partial(make, op),
        call=partial(with_isobit, direction), cost=partial(cost, op), judge=agreement,
        rivals={"fla": Rival("fla", PLAIN[direction], directions=None, prepare=tuned_afresh)},
        directions=(direction,),
        about=f"FLA's `{op}` with isobit inside",
        needs=(fla.NAME,), imports=("fla.ops",), against="fla", copy=False,
    )  # fmt: skip


def _goal(op: str, direction: str) -> Goal:
    def own(cell: Cell) -> bool:
        return (cell.op, cell.direction) == (op, direction)

    return Goal(f"{op}, {direction}", own, least=1.0)


def _layer_goal(direction: str) -> Goal:
    def own(cell: Cell) -> bool:
        return (cell.op, cell.direction) == (LAYER, direction)

    base = "fla" if direction == "fwd" else fla_or_pieces("ms")
    return Goal(f"{LAYER}, {direction}", own, least=1.0, against=base)


_TIMED = [(op, direction) for op in GATES_OF_FEATURES for direction in PLAIN]
_OF_LAYER = ("fwd", "fwd_bwd")
SERIES: Sequence[Series] = (*(_series(*each) for each in _TIMED), *map(_layer_series, _OF_LAYER))
GOALS = (*(_goal(*each) for each in _TIMED), *map(_layer_goal, _OF_LAYER))
