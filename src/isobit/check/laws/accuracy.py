"""The laws of numbers. Each is one promise, written once for every op. Tests with known-bad kernels prove
that each of them can fail.

A law takes a `Trial` and returns the checks that it made; any exception becomes a FAIL row with that reason.
`Unsupported` means that the law does not apply to this backend here.
"""

from dataclasses import replace

import torch
from torch import Tensor

from isobit.frame.backend import NONE
from isobit.spec.compare import OutputCheck, against_truth, same_bits
from isobit.spec.inputs import incoming
from isobit.spec.proof import Args
from isobit.spec.proofs import is_candidate
from isobit.spec.trial import LawBroken, Trial, Unsupported, cloned, in_fp64, with_gradient

#: By the name of the argument.
Gradients = dict[str, Tensor]
Outputs = tuple[Tensor, ...]


def accuracy(trial: Trial) -> list[OutputCheck]:
    """Every element is at most as far from the fp64 truth as plain PyTorch is, plus a few ulps."""
    args = trial.args()
    plain, truth = trial.proof.formula(args), trial.proof.formula(in_fp64(args))
    return _forward_checks(trial, args, trial.forward(args), plain, truth)


def _forward_checks(
    trial: Trial, args: Args, ours: Outputs, plain: Outputs, truth: Outputs
) -> list[OutputCheck]:
    proof = trial.proof
    scales = proof.scale(in_fp64(args), truth, ())
    ulps = trial.tolerances.ulps(proof.op_class, "forward", trial.case.dtype, trial.arch)
    eps = _eps(args)
    return [
        against_truth(f"{i}:{name}", ours[i], plain[i], truth[i], scales[name], ulps, eps)
        for i, name in enumerate(proof.outputs)
    ]


def _eps(args: Args) -> float:
    """eps of fp32, in which narrower inputs are computed too, unless the first input and all of the same
    shape (logits of a reference, for example) are fp64."""
    inputs = [t for t in args.values() if isinstance(t, Tensor) and t.is_floating_point()]
    wide = all(t.dtype == torch.float64 for t in inputs if t.shape == inputs[0].shape)
    return torch.finfo(torch.float64 if wide else torch.float32).eps


def gradient(trial: Trial) -> list[OutputCheck]:
    """The same for gradients under a random cotangent; the truth is autograd through the fp64 formula. The
    strides of the incoming gradients change nothing: not those of a sum, whose gradient has stride 0, nor
    transposed nor sliced ones."""
    if not trial.gradient:
        raise Unsupported("gradients are switched off on the command line")
    args = trial.args()
    if not trial.leaves(args):
        raise Unsupported("no argument has a gradient")
    outputs, ours = trial.backward(args)
    random = _Judge(trial, args, trial.cotangents(outputs))
    forward = _forward_checks(trial, args, outputs, random.plain_outputs, random.true_outputs)
    bad = [check for check in forward if not check.passed]
    if bad:  # gradients of wrong results prove nothing, and their failure would hide the cause
        raise LawBroken(f"the forward is already wrong ({bad[0].output}: {bad[0].message})")
    checks = random.against_truth("gradient", ours)
    return [*checks, *_of_other_strides(trial, args, outputs, ours, random)] if _in_turn(trial) else checks


def _in_turn(trial: Trial) -> bool:
    """Whether this case is one of those in which strides of incoming gradients are changed. Kernels do not
    read them by size: of isobit's own a third of the cases shows it, at a third of the time."""
    cases = trial.proof.cases
    return not trial.case.heavy and (
        is_candidate(trial.op) or trial.case not in cases or trial.case in cases[::3]
    )


def _of_other_strides(
    trial: Trial, args: Args, outputs: Outputs, ours: Gradients, random: "_Judge"
) -> list[OutputCheck]:
    """Incoming gradients that are not contiguous. Where a class promises bits, they have those of contiguous
    ones; otherwise each is compared with the truth."""
    equal = trial.numerics != NONE and not is_candidate(trial.op)
    ones = [torch.ones_like(o) for o in outputs]
    expanded = _gradients_of_a_sum(trial, args)
    if equal:
        _, whole = replace(trial, given=tuple(ones)).backward(args)
        checks = _same("expanded", expanded, whole)
    else:
        checks = _Judge(trial, args, ones).against_truth("expanded gradient", expanded)
    for layout in ("transposed", "sliced"):
        given = tuple(incoming(g, layout) for g in random.cotangents)
        if all(g.is_contiguous() for g in given):
            continue  # a loss has one number
        _, laid_out = replace(trial, given=given).backward(args)
        checks += (
            _same(layout, laid_out, ours) if equal else random.against_truth(f"{layout} gradient", laid_out)
        )
    return checks


def _same(layout: str, ours: Gradients, other: Gradients) -> list[OutputCheck]:
    return [
        same_bits(f"{layout} gradient:{name}", ours[name], other[name], "against a contiguous one")
        for name in other
    ]


def _gradients_of_a_sum(trial: Trial, args: Args) -> Gradients:
    """As `out.sum().backward()` computes them: every output gets a 1 with stride 0."""
    mine, names = cloned(args), trial.leaves(args)
    leaves = [mine[name].requires_grad_() for name in names]
    graded = [o for o in trial.call(mine) if o.requires_grad]
    try:
        torch.stack([o.sum().float() for o in graded]).sum().backward()
    except Exception as error:
        raise LawBroken(f"out.sum().backward() raises {type(error).__name__}: {error}") from error
    missing = [name for name, leaf in zip(names, leaves, strict=True) if leaf.grad is None]
    if missing:
        raise LawBroken(f"out.sum().backward() gives no gradient for {', '.join(missing)}")
    return {name: leaf.grad for name, leaf in zip(names, leaves, strict=True) if leaf.grad is not None}


class _Judge:
    """What gradients are compared with, for one set of incoming gradients."""

    def __init__(self, trial: Trial, args: Args, cotangents: list[Tensor]) -> None:
        exact = in_fp64(args)
        self.trial, self.cotangents, self.eps = trial, cotangents, _eps(args)
        self.true_outputs, self.truth = _formula_gradient(trial, exact, cotangents)
        self.plain_outputs, self.plain = _formula_gradient(trial, args, cotangents)
        self.scales = trial.proof.scale(exact, self.true_outputs, [g.double() for g in cotangents])

    def against_truth(self, what: str, ours: Gradients) -> list[OutputCheck]:
        trial = self.trial
        ulps = trial.tolerances.ulps(trial.proof.op_class, "gradient", trial.case.dtype, trial.arch)
        return [
            against_truth(
                f"{what}:{name}", ours[name], self.plain[name], truth, self.scales[f"gradient:{name}"],
                ulps, self.eps,
            )
            for name, truth in self.truth.items()
        ]  # fmt: skip


def _formula_gradient(trial: Trial, args: Args, cotangents: list[Tensor]) -> tuple[Outputs, Gradients]:
    """Outputs and gradients of the formula, with the same cotangents as the op."""
    args, names = dict(args), trial.leaves(args)
    for name in names:
        args[name] = args[name].detach().clone().requires_grad_()
    outputs = trial.proof.formula(args)
    leaves = [args[name] for name in names]
    several, given = with_gradient(outputs, cotangents)
    grads = torch.autograd.grad(several, leaves, [g.to(o.dtype) for g, o in zip(given, several, strict=True)])
    return tuple(o.detach() for o in outputs), dict(zip(names, grads, strict=True))
