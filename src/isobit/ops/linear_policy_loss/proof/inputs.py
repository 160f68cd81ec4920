"""Inputs that would expose a wrong `linear_policy_loss`: those of `linear_logp`, with a loss that has a
weight per row and a gain per sequence, and calls that must be refused."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from isobit.ops.linear_logp.proof import inputs as rows
from isobit.ops.linear_policy_loss.chunked import PLAIN
from isobit.spec.inputs import NAN, in_other_dtype
from isobit.spec.proof import Args, Case, InputOptions, Mutant

LAYOUTS = ("shifted", "padded", "offset", "inside", "apart", "every other")

#: Factor on the entropies in the loss, if it gets them.
BONUS = 0.25


def weighed(
    logp: Tensor,
    entropy: Tensor | None,
    weights: Tensor,
    gains: Tensor | None = None,
    lengths: Tensor | None = None,
    divisor: float = 1.0,
) -> tuple[Tensor, dict[str, Any]]:
    """sum_i weights_i gain_i (logp_i - BONUS entropy_i) / divisor, with one gain per sequence: a line of [B,
    T], or the rows of one length. Linear, so the gradients of logp are known in closed form."""
    weights = weights.to(logp.dtype)
    if gains is not None and lengths is not None:
        weights = weights * gains.to(logp.dtype).repeat_interleave(lengths)
    elif gains is not None:
        weights = weights * gains.to(logp.dtype)[:, None]
    terms = weights * logp
    if entropy is not None:
        terms = terms - BONUS * weights * entropy
    return terms.sum() / divisor, {"rows": logp.numel(), "weights": weights.sum()}


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    """Inputs of a case of `linear_logp`, and a loss. With `sequences` the rows are packed sequences; one of
    them is empty."""
    of_rows = rows.make(case, device, options)
    args = {name: value for name, value in of_rows.items() if name not in PLAIN}
    ids, chosen = args["token_ids"], case.options
    gen = torch.Generator().manual_seed(options.seed + 1)
    inputs: dict[str, Any] = {"weights": torch.randn(ids.shape, generator=gen).to(device), "divisor": 4.0}
    bounds = None
    if ids.ndim == 2:
        inputs["gains"] = torch.randn(len(ids), generator=gen).to(device)
    elif count := chosen.get("sequences"):
        cuts = torch.randint(0, len(ids) + 1, (count - 2,), generator=gen).sort().values.tolist()
        bounds = [0, 0, *cuts, len(ids)]
        inputs["gains"] = torch.randn(count, generator=gen).to(device)
        inputs["lengths"] = torch.tensor([b - a for a, b in pairwise(bounds)], device=device)
    args |= {"loss_fn": weighed, "inputs": inputs, "cu_seqlens": bounds}
    return args | {"entropy": chosen.get("entropy", False), "workspace_bytes": chosen.get("workspace_bytes")}


def as_linear_logp(args: Args) -> Args:
    """The same call of `linear_logp`, with all probabilities kept if there are any to keep."""
    left = ("loss_fn", "inputs", "cu_seqlens", "entropy")
    room = None if args["entropy"] else rows.FULL
    return {k: v for k, v in args.items() if k not in left} | PLAIN | {"workspace_bytes": room}


def lay_out(args: Args, layout: str) -> Args:
    """The same values with other strides and alignments, also in the inputs of the loss."""
    moved = rows.lay_out(args | PLAIN, layout)
    return {name: moved[name] for name in args}


def padding(args: Args, count: int) -> Args:
    """Masked rows of NaN; they must change nothing. Their weights are finite: the loss does not
    know which rows count, gets log-probability 0 for these, and 0 times NaN is NaN."""
    result = rows.padding(args, count)
    return result | {"weights": torch.ones(count, device=args["hidden"].device)}


# Calls that must be refused


def _with(what: str, name: str, value: Any) -> Mutant:
    """The call with another value of one argument, computed from the arguments."""
    return Mutant(what, name, lambda args: args | {name: value(args)})


def _input(what: str, value: Any) -> Mutant:
    return _with(what, "inputs", lambda args: args["inputs"] | {"weights": value(args)})


def _loss(what: str, loss_fn: Any) -> Mutant:
    """A loss whose gradient is wanted, and that is validated on a GPU too."""
    return Mutant(what, "loss_fn", lambda args: args | {
        "loss_fn": loss_fn, "hidden": args["hidden"].detach().requires_grad_(), "validate": True
    })  # fmt: skip


def _raises(logp: Tensor, entropy: Tensor | None, **inputs: Any) -> Tensor:
    raise KeyError("a mistake in the caller's code")


def _counts_chunks(logp: Tensor, entropy: Tensor | None, **inputs: Any) -> Tensor:
    return logp.sum() + 1e4


MUTANTS = [
    _loss("a loss that is no function", 3.0),
    _loss("a loss that returns None", lambda logp, entropy, **inputs: None),
    _loss("a loss by rows", lambda logp, entropy, **inputs: logp * inputs["weights"]),
    _loss("a loss with a dimension", lambda logp, entropy, **inputs: logp.sum()[None]),
    _loss("a number", lambda logp, entropy, **inputs: 0.0),
    _loss("an integer", lambda logp, entropy, **inputs: logp.numel() + torch.tensor(1)),
    _loss("a detached loss", lambda logp, entropy, **inputs: logp.detach().sum()),
    _loss("a constant loss", lambda logp, entropy, **inputs: torch.ones((), requires_grad=True) * 2),
    _loss("a loss that raises", _raises),
    _loss("a loss without its inputs", lambda logp, entropy: logp.sum()),
    _loss("a mean", lambda logp, entropy, **inputs: logp.mean()),
    _loss("a constant for every chunk", _counts_chunks),
    _loss("sums that are none", lambda logp, entropy, **inputs: (logp.sum(), {"tokens": "many"})),
    _loss(
        "a gradient for others",
        lambda logp, entropy, **inputs: logp.sum() * torch.ones((), requires_grad=True),
    ),
    _with("inputs that are no dict", "inputs", lambda args: [args["inputs"]["weights"]]),
    _input("an input of too few rows", lambda args: args["inputs"]["weights"][1:]),
    _input("an input with a dimension more", lambda args: args["inputs"]["weights"][..., None]),
    _input("an input with a gradient", lambda args: args["inputs"]["weights"].clone().requires_grad_()),
    _with("a negative workspace", "workspace_bytes", lambda args: -1),
    _with("bounds that do not begin with 0", "cu_seqlens", lambda args: [1, len(args["token_ids"])]),
    _with("bounds that descend", "cu_seqlens", lambda args: [0, 3, 2, len(args["token_ids"])]),
    _with("bounds that end early", "cu_seqlens", lambda args: [0, 3]),
    _with("no bounds", "cu_seqlens", lambda args: []),
    _with("bounds that are fractions", "cu_seqlens", lambda args: [0.0, 3.0]),
    _with("bounds in two dimensions", "cu_seqlens", lambda args: torch.zeros(2, 2, dtype=torch.int32)),
    _with("temperature 0", "temperature", lambda args: 0.0),
    _with("temperature NaN", "temperature", lambda args: NAN),
    _with("a weight of another dtype", "weight", lambda args: in_other_dtype(args["weight"])),
    _with("a weight without rows", "weight", lambda args: args["weight"][:0]),
    _with("a short bias", "bias", lambda args: args["weight"][1:, 0].clone()),
    _with("a float mask", "mask", lambda args: torch.ones_like(args["token_ids"], dtype=torch.float32)),
]
