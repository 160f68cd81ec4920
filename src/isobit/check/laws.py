"""The laws of numbers. Each is one promise, written once for every op. The law of bits carries a control in
every run; that each of them can fail is tested with kernels that are known to be bad.

A law takes a `Trial` and returns the checks it made; whatever it raises becomes a FAIL row with that reason.
`Unsupported` says that the law has no meaning for this backend here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isobit.check.compare import OutputCheck, against_truth, differing, failure, same_bits, slack_ulps
from isobit.check.proof import Args
from isobit.check.trial import LawBroken, Trial, Unsupported, cloned, in_fp64
from isobit.op import NONE, Op

# Accuracy


def accuracy(trial: Trial) -> list[OutputCheck]:
    """Every element is at most as far from the fp64 truth as plain PyTorch is, plus a few ulps."""
    args = trial.args()
    return _forward_checks(trial, args, trial.forward(args))


def _forward_checks(trial: Trial, args: Args, ours: tuple[Tensor, ...]) -> list[OutputCheck]:
    proof, exact = trial.proof, in_fp64(args)
    truth = proof.formula(exact)
    plain = proof.formula(args)
    scales = proof.scale(exact, truth, ())
    ulps = slack_ulps(proof.op_class, "forward", trial.case.dtype, trial.arch)
    eps = _eps(trial.case.dtype)
    return [
        against_truth(f"{i}:{name}", ours[i], plain[i], truth[i], scales[name], ulps, eps)
        for i, name in enumerate(proof.outputs)
    ]


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


def gradient(trial: Trial) -> list[OutputCheck]:
    """The same for gradients under a random cotangent; the truth is autograd through the fp64 formula."""
    if not trial.gradient:
        raise Unsupported("gradients are switched off on the command line")
    args, proof = trial.args(), trial.proof
    outputs = trial.forward(args)
    bad = [c for c in _forward_checks(trial, args, outputs) if not c.passed]
    if bad:  # a gradient of wrong results proves nothing, and its failure would hide theirs
        raise LawBroken(f"the forward is already wrong ({bad[0].output}: {bad[0].message})")
    _, ours = trial.backward(args)
    exact = in_fp64(args)
    truth_outputs, truth = _formula_gradient(trial, exact)
    _, plain = _formula_gradient(trial, args)
    cotangents = [g.double() for g in trial.cotangents(outputs)]
    scales = proof.scale(exact, truth_outputs, cotangents)
    ulps = slack_ulps(proof.op_class, "gradient", trial.case.dtype, trial.arch)
    return [
        against_truth(
            f"gradient:{name}",
            ours[name],
            plain[name],
            truth[name],
            scales[f"gradient:{name}"],
            ulps,
            _eps(trial.case.dtype),
        )
        for name in proof.grad_inputs
    ]


def _formula_gradient(trial: Trial, args: Args) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    args = dict(args)
    for name in trial.proof.grad_inputs:
        args[name] = args[name].detach().clone().requires_grad_()
    outputs = trial.proof.formula(args)
    leaves = [args[name] for name in trial.proof.grad_inputs]
    grads = torch.autograd.grad(outputs, leaves, trial.cotangents(outputs))
    return tuple(o.detach() for o in outputs), dict(zip(trial.proof.grad_inputs, grads, strict=True))


# Bits


def repeatable(trial: Trial) -> list[OutputCheck]:
    """The same call gives the same bits, forward and backward."""
    args = trial.args()
    first, again = trial.backward(args), trial.backward(args)
    return _compare_runs(trial, again, first, "second run against first")


def _compare_runs(trial: Trial, ours: Any, other: Any, what: str) -> list[OutputCheck]:
    checks = [same_bits(f"{i}:{n}", ours[0][i], other[0][i], what) for i, n in enumerate(trial.proof.outputs)]
    return checks + [same_bits(f"gradient:{n}", ours[1][n], other[1][n], what) for n in other[1]]


def written(trial: Trial) -> list[OutputCheck]:
    """Every element of every output is written: memory that is handed out full of NaN changes nothing."""
    args = trial.args()
    clean = trial.backward(args)
    with poisoned_memory():
        poisoned = trial.backward(args)
    return _compare_runs(trial, poisoned, clean, "with NaN-filled memory")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """PyTorch fills what `torch.empty` returns with NaN (or the largest integer)."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    deterministic: Any = torch.utils.deterministic
    fill = deterministic.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = True
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = fill


def invariant(trial: Trial) -> list[OutputCheck]:
    """Laws F and V: a row's bits do not depend on the other rows, their number or order, padding, cuts into
    chunks, strides, alignment, or on what else is asked for. Control: another order of the sum shows."""
    if trial.numerics == NONE:
        raise Unsupported(f"{trial.backend} has numerics class 'none': it promises accuracy, not bits")
    if trial.case.data == "constant":
        raise Unsupported("constant inputs: every order of a sum of equal terms is the same")
    args = trial.args()
    rows = _row_args(trial.op, args)
    args |= {name: _by_rows(trial.op, name, args[name]) for name in rows}
    N = args[rows[0]].shape[0]
    whole = trial.backward(args)
    checks: list[OutputCheck] = []

    def compare(what: str, index: Tensor, changed: Args, take: Tensor | None = None) -> None:
        """Rows `take` of the changed batch (all by default) must equal rows `index` of the whole one, given
        the cotangents that those had."""
        given = [g[index] for g in trial.cotangents(whole[0])]
        if take is not None:
            total = changed[rows[0]].shape[0]
            given = [g.new_zeros(total).index_copy(0, take, g) for g in given]
        outputs, grads = replace(trial, given=tuple(given)).backward(changed)
        if take is not None:
            outputs, grads = tuple(o[take] for o in outputs), {k: g[take] for k, g in grads.items()}
        base = tuple(o[index] for o in whole[0]), {k: g[index] for k, g in whole[1].items()}
        checks.extend(_compare_runs(trial, (outputs, grads), base, what))

    gen = torch.Generator().manual_seed(7)
    everyone = torch.arange(N, device=trial.device)
    for size in sorted(n for n in {1, 2, 3, 7, N // 2, N - 1} if 0 < n < N):
        index = torch.randperm(N, generator=gen)[:size].to(trial.device)
        compare(f"{size} of {N} rows alone", index, select(args, rows, index))
    compare("rows permuted", (p := torch.randperm(N, generator=gen).to(trial.device)), select(args, rows, p))
    cut = N // 3
    compare("first chunk", everyone[:cut], select(args, rows, everyone[:cut]))
    compare("second chunk", everyone[cut:], select(args, rows, everyone[cut:]))
    extra = trial.proof.padding(args, 3)
    padded = args | {k: torch.cat([extra[k][:2], args[k], extra[k][2:]]) for k in rows if args[k] is not None}
    compare("padding rows full of NaN around", everyone, padded, take=everyone + 2)
    for layout in trial.proof.layouts:
        compare(f"layout {layout}", everyone, trial.proof.lay_out(args, layout))
    alone = trial.proof.call_alone(cloned(args), trial.backend)
    for i, output in enumerate(alone):
        checks.append(same_bits(f"{i}:{trial.proof.outputs[i]}", output, whole[0][i], "asked for alone"))
    checks.append(_control(trial, args, whole[0]))
    return checks


def _control(trial: Trial, args: Args, outputs: tuple[Tensor, ...]) -> OutputCheck:
    """The same sum in another order must change some bit, or equal bits above prove nothing."""
    changed = trial.forward(trial.proof.reorder(args))
    if any(bool(differing(a, b).any()) for a, b in zip(outputs, changed, strict=True)):
        what = "control: another order of the sum changes bits, as it must"
        return same_bits("control", outputs[0], outputs[0], what)
    if all(trial.case.dims != case.dims for case in trial.proof.bit_cases):
        raise Unsupported("these inputs are too few to show the order of a sum: another order changes no bit")
    return failure(
        "control", "another order of the sum changed no bit: these inputs cannot show a wrong order"
    )


def _row_args(op: Op, args: Args) -> list[str]:
    """Arguments with a leading shape: those that rows are picked from."""
    names = [p.name for p in op.contract.params if p.spec and p.spec.dims[:1] == ("*",)]
    return [n for n in names if args.get(n) is not None]


def _by_rows(op: Op, name: str, t: Tensor) -> Tensor:
    """One leading dimension instead of any number of them."""
    spec = next(p.spec for p in op.contract.params if p.name == name)
    assert spec is not None
    lead = t.ndim - (len(spec.dims) - 1)
    return t.flatten(0, lead - 1) if lead else t[None]


def select(args: Args, rows: list[str], index: Tensor) -> Args:
    return args | {name: args[name][index] for name in rows}
