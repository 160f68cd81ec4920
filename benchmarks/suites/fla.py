"""Attention with a gated delta rule, through the public functions of flash-linear-attention (FLA):

    fla      FLA as it is
    isobit   the same inside `isobit.integrations.fla.enable()`

`bwd` is the backward alone, `fwd_bwd` forward and backward. isobit computes one of several kernels of the
backward and none of the forward, so this shows what that kernel gains in training. FLA's kernel for states is
autotuned again for each case, which its autotuner would not do by itself.

Before anything is timed, isobit must have served the call, and the gradients must agree with those of FLA
alone, each within the limits that FLA's own tests allow between it and plain PyTorch: `LIMITS`. `max_abs` is
their largest difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from torch import Tensor
from torch.nn import functional as F

from isobit.bench.check_gate import CheckFailed
from isobit.bench.goals import Cell, Goal
from isobit.frame.contract import ContractError
from isobit.frame.device import triton_cannot_run
from isobit.integrations import fla
from isobit.ops.delta_rule.rivals import forget_tuning
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival
from isobit.spec.rotation import copies_for
from isobit.spec.series import NotHere, Pool, Series

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


# Series

CASES = [
    Case({"B": B, "T": T, "H": H, "D": 128}, torch.bfloat16, data="random")
    for B, T, H in ((1, 8192, 16), (2, 4096, 32), (1, 32768, 8))
]
#: For Triton's interpreter.
SMALL = [Case({"B": 1, "T": 70, "H": 1, "D": 16}, torch.float32, data="random")]


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


_TIMED = [(op, direction) for op in GATES_OF_FEATURES for direction in PLAIN]
SERIES: Sequence[Series] = tuple(_series(*each) for each in _TIMED)
GOALS = tuple(_goal(*each) for each in _TIMED)
