"""Part of law V: the bits of a call do not depend on strides, of any tensor that it takes.

A proof names layouts for the tensors that its kernels are made for. Tables of integers are easily forgotten
there, and in launchers too: one that passes a [E, S] tensor as a pointer reads the wrong rows where it is a
slice of a wider one. Which strides a tensor may have is in the contract, so no proof has to say it.
"""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from isobit.frame.backend import UnsupportedError
from isobit.frame.contract import Spec
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.inputs import laid_out
from isobit.spec.proof import Args
from isobit.spec.trial import Trial


def strides_of_arguments(trial: Trial) -> list[OutputCheck]:
    """Tensors in wider ones have the bits that they have alone: integers and masks, then all."""
    return [check for one, args in cases_in_wider_tensors(trial) for check in _in_wider_tensors(one, args)]


def cases_in_wider_tensors(trial: Trial) -> Iterator[tuple[Trial, Args]]:
    """The case of the trial; and with the first of the proof's cases of bits also others, which have the
    tensors that none of those has."""
    args = trial.args()
    yield trial, args
    small = [case for case in trial.proof.bit_cases if not case.heavy]
    if trial.case not in small[:1]:
        return
    seen = {name for case in small[1:] for name in _tensors(trial.args(case))} | _tensors(args)
    for case in trial.proof.cases:
        if case.heavy or case.gpu_gb:
            continue
        other, args = replace(trial, case=case), trial.args(case)
        if not _tensors(args) <= seen and _serves(other, args):
            seen |= _tensors(args)
            yield other, args


def _tensors(args: Args) -> set[str]:
    return {name for name, value in args.items() if isinstance(value, Tensor)}


def _serves(trial: Trial, args: Args) -> bool:
    """Whether this backend takes such a call: the other cases are those of all backends."""
    try:
        trial.op.explain(**args, backend=trial.backend)
    except UnsupportedError:
        return False
    return trial.refusal(args) is None


def _class_serves(trial: Trial, args: Args) -> bool:
    if trial.bound is None:
        return True
    try:
        return trial.op.explain(**args, numerics=trial.bound).backend is not None
    except UnsupportedError:
        return False


def _in_wider_tensors(trial: Trial, args: Args) -> list[OutputCheck]:
    """Where that changes a bit, each tensor alone, to name it. Integers are also tried apart from numbers: a
    kernel that cannot read numbers so leaves the call to another of its class. In a check of all laws only
    integers are tried: proofs have layouts of numbers."""
    free = {p.name: p.spec for p in trial.op.contract.params if p.spec is not None and not p.spec.written}
    apart = {n: laid_out(args[n], how) for n, spec in free.items() if (how := _layout(args.get(n), spec))}
    integers = {n: t for n, t in apart.items() if not t.is_floating_point()}
    kinds = {"integers": integers} if integers else {}
    if len(apart) > len(integers) and not trial.brief:
        kinds["tensors"] = apart
    whole = trial.backward(args) if kinds else ((), {})
    checks: list[OutputCheck] = []
    for what, changed in kinds.items():
        alone = _compared(trial, args | changed, f"all {what} in wider ones", whole)
        if not all(check.passed for check in alone):
            for name, t in changed.items():
                checks += _compared(trial, args | {name: t}, f"{name} in a wider tensor", whole)
        checks += alone
    return checks


def _layout(t: object, spec: Spec) -> str | None:
    """The least regular layout that the contract allows; None if it allows one only."""
    if not isinstance(t, Tensor) or t.ndim == 0 or (spec.contiguous_last and t.ndim == 1):
        return None
    return "padded" if spec.contiguous_last else "strided"


def _compared(
    trial: Trial, args: Args, what: str, whole: tuple[tuple[Tensor, ...], dict[str, Tensor]]
) -> list[OutputCheck]:
    one = trial.in_class(args)
    if trial.refusal(args) is not None or not _class_serves(one, args):
        return []  # a candidate may not take all that isobit does, nor a class that TMA alone keeps
    outputs, grads = one.backward(args)
    pairs = [(f"{i}:{n}", outputs[i], whole[0][i]) for i, n in enumerate(trial.proof.outputs)]
    pairs += [(f"gradient:{n}", grads[n], whole[1][n]) for n in grads]
    return [same_bits(name, ours, other, what) for name, ours, other in pairs]
