"""Equal bits prove something only if other bits were possible: that outputs depend on the rows, and that
another order of the same sum shows in these inputs."""

from dataclasses import replace

import torch
from torch import Tensor

from isobit.check.any_function.batch import Batch
from isobit.check.any_function.function import Function, Run
from isobit.spec.compare import OutputCheck, differing, failure, passed
from isobit.spec.trial import LawBroken, Unsupported

#: Why a check without a control is no proof.
UNPROVEN = "no other order of the sum was named, so nothing shows that these inputs would reveal one"

#: Multiples of 1 / GRAIN up to LARGEST add up exactly, whatever the order.
GRAIN, LARGEST = 16, 256


def depends_on_its_rows(batch: Batch) -> list[OutputCheck]:
    """With every row moved by one, the outputs and the gradients of rows are others: those of a function that
    returns a constant are not, and equal bits of it prove nothing. Nor do results that are NaN."""
    mine = batch.mine
    moved = mine.everyone().roll(1)
    given = {name: g.index_select(0, moved) for name, g in batch.cotangents.items()}
    run = mine.backward(mine.select(moved), given)
    floats = [name for name, o in batch.whole.outputs.items() if o.is_floating_point()]
    pairs = {f"output {n}": (batch.whole.outputs[n], run.outputs[n]) for n in floats or mine.outputs}
    pairs |= {f"gradient:{n}": (batch.whole.grads[n], run.grads[n]) for n in mine.graded_rows}
    checks = [_shows(name, *pair, clean=_clean(batch)) for name, pair in pairs.items()]
    if batch.reduction is None:
        checks.append(_inexact(batch))
    return checks


def _shows(name: str, before: Tensor, after: Tensor, clean: bool) -> OutputCheck:
    other = (before != after) & ~(before.isnan() & after.isnan())  # zeros of either sign are one value
    if before.numel() and not bool(other.any()):
        leave = ". If that is right, leave gradients out" if name.startswith("gradient:") else ""
        why = "does not depend on the rows: it is the same with every row moved by one"
        return failure(name, f"{why}{leave}")
    nan = before.isnan().reshape(len(before), -1).any(1).nonzero()[:, 0].tolist()
    if nan and clean:
        rows = f"{len(nan)} of {len(before)} rows, first in row {nan[0]}"
        return failure(name, f"is NaN in {rows}, though no input is: equal NaN prove nothing")
    return passed(name, "other rows give other results")


def _clean(batch: Batch) -> bool:
    return not any(isinstance(v, Tensor) and bool(v.isnan().any()) for v in batch.mine.inputs.values())


def _inexact(batch: Batch) -> OutputCheck:
    """Without a control, at least inputs whose sums are rounded."""
    floats = {n: t for n, t in batch.mine.inputs.items() if isinstance(t, Tensor) and t.is_floating_point()}
    name = ", ".join(floats)
    coarse = (bool((t * GRAIN == (t * GRAIN).round()).all() and (t.abs() <= LARGEST).all())
              for t in (t.double() for t in floats.values()))  # fmt: skip
    if floats and all(coarse):
        why = f"every value is a multiple of 1/{GRAIN} up to {LARGEST}: sums of them are exact in any order"
        return failure(name, f"{why}; make others, torch.randn for example")
    return passed(name or "integers", "values that do not all add up exactly")


def another_order(batch: Batch) -> list[OutputCheck]:
    """The user's function that adds in another order returns other bits, and nearly the same numbers. If it
    has gradients, a sum in the backward may show it too."""
    if batch.reduction is None:
        raise Unsupported(UNPROVEN)
    mine, name = batch.mine, batch.reduction_name
    run = _run(batch, batch.reduction)
    changed, rows = 0, torch.zeros(mine.count, dtype=torch.bool, device=mine.device)
    pairs = {f"output {n}": (batch.whole.outputs[n], o) for n, o in run.outputs.items()}
    pairs |= {f"gradient:{n}": (batch.whole.grads[n], run.grads[n]) for n in mine.graded_rows if run.grads}
    for what, (ours, other) in pairs.items():
        if ours.shape != other.shape or ours.dtype != other.dtype:
            form = f"{list(other.shape)} {other.dtype} instead of {list(ours.shape)} {ours.dtype}"
            return [failure("control", f"{name} returns {what} as {form}")]
        if far := how_far(ours, other):
            return [failure("control", f"{name} is not the same sum in another order: {what} {far}")]
        differ = differing(ours, other).reshape(mine.count, -1)
        changed += int(differ.sum())
        rows |= differ.any(1)
    if not changed:
        why = "these inputs cannot show a wrong order; make longer sums, or values that round"
        return [failure("control", f"{name} changed no bit: {why}")]
    what = f"{changed} elements, in {int(rows.sum())} of {mine.count} rows"
    return [passed("control", f"{name} changes bits, as it must: {what}")]


def _run(batch: Batch, reduction: Function) -> Run:
    """With gradients, unless it has none."""
    other = replace(batch.mine, function=reduction)
    try:
        return other.backward(batch.mine.inputs, batch.cotangents)
    except LawBroken:
        return other.forward(batch.mine.inputs)


def how_far(ours: Tensor, other: Tensor) -> str:
    """How far apart two results are, if rounding does not explain it."""
    if not ours.is_floating_point():
        return ""
    bound = torch.finfo(ours.dtype).eps ** 0.5
    one, two = ours.double(), other.double()
    if not torch.equal(one.isfinite(), two.isfinite()):
        return "is not finite in other places"
    one, two = one.nan_to_num(0, 0, 0), two.nan_to_num(0, 0, 0)
    gap, size = float((one - two).abs().max()), float(one.abs().max())
    return f"differs by {gap:.3g}, of values up to {size:.3g}" if gap > bound * size else ""
