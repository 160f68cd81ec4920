"""The laws of numbers. Each is one promise, written once for every op. Tests with known-bad kernels prove
that each of them can fail.

A law takes a `Trial` and returns the checks that it made; any exception becomes a FAIL row with that reason.
`Unsupported` means that the law does not apply to this backend here.
"""

import torch
from torch import Tensor

from isobit.spec.compare import OutputCheck, against_truth
from isobit.spec.proof import Args
from isobit.spec.trial import LawBroken, Trial, Unsupported, in_fp64, with_gradient


def accuracy(trial: Trial) -> list[OutputCheck]:
    """Every element is at most as far from the fp64 truth as plain PyTorch is, plus a few ulps."""
    args = trial.args()
    return _forward_checks(trial, args, trial.forward(args))


def _forward_checks(trial: Trial, args: Args, ours: tuple[Tensor, ...]) -> list[OutputCheck]:
    proof, exact = trial.proof, in_fp64(args)
    truth = proof.formula(exact)
    plain = proof.formula(args)
    scales = proof.scale(exact, truth, ())
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
    """The same for gradients under a random cotangent; the truth is autograd through the fp64 formula."""
    if not trial.gradient:
        raise Unsupported("gradients are switched off on the command line")
    args, proof = trial.args(), trial.proof
    names = trial.leaves(args)
    if not names:
        raise Unsupported("no argument has a gradient")
    outputs = trial.forward(args)
    bad = [c for c in _forward_checks(trial, args, outputs) if not c.passed]
    if bad:  # gradients of wrong results prove nothing, and their failure would hide the cause
        raise LawBroken(f"the forward is already wrong ({bad[0].output}: {bad[0].message})")
    _, ours = trial.backward(args)
    exact, cotangents = in_fp64(args), trial.cotangents(outputs)
    truth_outputs, truth = _formula_gradient(trial, exact, cotangents)
    _, plain = _formula_gradient(trial, args, cotangents)
    scales = proof.scale(exact, truth_outputs, [g.double() for g in cotangents])
    ulps = trial.tolerances.ulps(proof.op_class, "gradient", trial.case.dtype, trial.arch)
    return [
        against_truth(
            f"gradient:{name}",
            ours[name],
            plain[name],
            truth[name],
            scales[f"gradient:{name}"],
            ulps,
            _eps(args),
        )
        for name in names
    ]


def _formula_gradient(
    trial: Trial, args: Args, cotangents: list[Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Outputs and gradients of the formula, with the same cotangents as the op."""
    args, names = dict(args), trial.leaves(args)
    for name in names:
        args[name] = args[name].detach().clone().requires_grad_()
    outputs = trial.proof.formula(args)
    leaves = [args[name] for name in names]
    several, given = with_gradient(outputs, cotangents)
    grads = torch.autograd.grad(several, leaves, [g.to(o.dtype) for g, o in zip(given, several, strict=True)])
    return tuple(o.detach() for o in outputs), dict(zip(names, grads, strict=True))
