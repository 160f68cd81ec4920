"""The errors of what is timed: a fast wrong answer must be visible in its own row."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isobit.frame.op import Op
from isobit.spec.proof import Args
from isobit.spec.proofs import proof_of

#: Rows that are compared: few enough that fp64 never needs more memory than the case itself.
ROWS = 64


@dataclass(frozen=True)
class Errors:
    """Errors of a result: the largest and the mean, the largest relative to the largest true value, and the
    root mean square relative to that of the truth."""

    max_abs: float
    mean_abs: float
    max_rel: float
    rel_rms: float


@dataclass(frozen=True)
class Verdict:
    """The quality of a result: its errors, and the fraction of its elements that have isobit's bits."""

    max_abs: float | None = None
    equal_bits: float | None = None
    #: More keys of a row, if the judge knows them: `mean_abs`, `max_rel` and `rel_rms`, for example.
    more: Mapping[str, float] = field(default_factory=dict)


def errors_of(found: Tensor, truth: Tensor) -> Errors:
    wrong = (found.double() - truth).abs()

    def share(of_wrong: Tensor, of_truth: Tensor) -> float:
        return float(of_wrong / of_truth) if of_wrong else 0.0  # also 0 if all values are 0

    rms = share(wrong.square().mean().sqrt(), truth.square().mean().sqrt())
    return Errors(float(wrong.max()), float(wrong.mean()), share(wrong.max(), truth.abs().max()), rms)


@dataclass(frozen=True)
class Truth:
    """The formula in fp64 on some rows of a case: the first output, and the gradients that have rows, by
    their index among all gradients that are computed. One line per row."""

    rows: Tensor
    total_rows: int
    output: Tensor
    gradients: dict[int, Tensor]
    taken: int  # number of gradients, including those that are sums over rows

    def error(self, direction: str, result: tuple[Tensor, ...]) -> float | None:
        """Largest error of what a direction returns, in the known rows; None if it returns only sums over
        rows."""
        pairs = [] if direction == "bwd" else [(result[0], self.output)]
        if direction != "fwd":
            found = result[-self.taken :]
            pairs += [(found[i], truth) for i, truth in self.gradients.items()]
        errors = [
            (ours.detach().reshape(self.total_rows, -1)[self.rows].double() - truth).abs().max()
            for ours, truth in pairs
        ]
        return float(torch.stack(errors).max()) if errors else None  # NaN if any is NaN


@dataclass(frozen=True)
class Window:
    """Some rows and columns of an output that are known in fp64: they depend on a few rows and columns of the
    operands only, whatever the other sizes."""

    rows: Tensor
    columns: Tensor
    known: Tensor

    def error(self, direction: str, result: tuple[Tensor, ...]) -> float | None:
        found = result[0][self.rows[:, None], self.columns[None, :]]
        return float((found.double() - self.known).abs().max())


def spread_evenly(total: int, wanted: int, device: torch.device) -> Tensor:
    """Up to `wanted` of `total` indices, including the first and the last."""
    return torch.linspace(0, total - 1, min(total, wanted), dtype=torch.float64, device=device).long()


def cotangent_like(output: Tensor) -> Tensor:
    """The same random numbers for every implementation, whatever the shape of its output."""
    gen = torch.Generator(output.device).manual_seed(1)  # a CPU would take seconds for large outputs
    numbers = torch.randn(output.numel(), generator=gen, device=output.device)
    return numbers.reshape(output.shape).to(output)


def truth_of(op: Op, args: Args, inputs: Sequence[str] | None = None) -> Truth | None:
    """The truth of a call with gradients with respect to `inputs`, by default all. None for an op whose
    output has no rows: a part of it cannot be judged alone. Only gradients that have rows are judged; one
    that is a sum over all rows is not known from some of them."""
    row_dims = {p.name: p.spec.dims for p in op.contract.params if p.spec and p.spec.dims[:1] == ("*",)}
    if inputs is None:
        inputs = [name for name in op.differentiable if args.get(name) is not None]
    if op.contract.outputs[0].dims[:1] != ("*",):
        return None
    first = next(args[name] for name in row_dims)
    lead = first.dim() - len(next(iter(row_dims.values()))) + 1
    total = math.prod(first.shape[:lead])
    rows = spread_evenly(total, ROWS, first.device)
    exact = dict(args)
    for name, value in args.items():
        if isinstance(value, Tensor):
            if name in row_dims:
                value = value.reshape(total, *value.shape[lead:])[rows]
            exact[name] = value.double() if value.is_floating_point() else value
    alone = [i for i, name in enumerate(inputs) if name in row_dims]
    leaves = [exact[inputs[i]].requires_grad_() for i in alone]
    output = proof_of(op).formula(exact)[0]
    cotangent = cotangent_like(output.new_empty(total, *output.shape[1:]))[rows]
    gradients = torch.autograd.grad(output, leaves, cotangent) if leaves else ()
    flat = {i: g.reshape(len(rows), -1) for i, g in zip(alone, gradients, strict=True)}
    return Truth(rows, total, output.detach().reshape(len(rows), -1), flat, len(inputs))
