"""The claim of an op that it adds nothing, tested in place of the controls that it cannot have.

A sum over an input has at least two of its elements as terms. So where every element of a result depends on
one element of each input at most, there is no such sum, and no order of one. (Inputs may be added to each
other, element by element: that is one expression, whatever the batch. An op that takes a maximum would be
refused too: it does add nothing, but that cannot be seen from outside.)

Elements are told apart by the bits of their numbers. For each bit, the elements that have it are replaced,
and then all others. A result that depends on one element changes in one of the two calls alone. One that
depends on two changes in both, for any bit in which their numbers differ; and there is such a bit. So the
number of calls grows as the logarithm of the size.

The two terms of one addition may share a number, if the claim says so: a + b has no other order. A number
that three elements share is refused, because a sum of three has several.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from isobit.spec.compare import OutputCheck, differing, passed
from isobit.spec.proof import Args, NoSum
from isobit.spec.trial import LawBroken, Trial

#: The output of the check, where other laws have a control.
SHOWN = "no sum"

Results = dict[str, Tensor]


def nothing_is_added(trial: Trial, args: Args, claim: NoSum) -> OutputCheck:
    """Outputs and gradients of rows, by arguments and incoming gradients."""
    other = replace(trial, inputs=replace(trial.inputs, seed=trial.inputs.seed + 1)).args()
    given = trial.cotangents(trial.forward(args))

    def results(changed: Args, cotangents: list[Tensor]) -> Results:
        outputs, grads = replace(trial, given=tuple(cotangents)).backward(changed)
        named = dict(zip(trial.proof.outputs, outputs, strict=True))
        return named | {f"gradient:{name}": g for name, g in grads.items()}

    def of_argument(name: str, value: Tensor) -> Results:
        return results(args | {name: value}, given)

    def of_gradient(i: int, value: Tensor) -> Results:
        return results(args, [*given[:i], value, *given[i + 1 :]])

    whole, calls = results(args, given), 0
    for name, value in args.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            changed, number = other[name].reshape(value.shape), _numbers(claim, args, name, value)
            calls += _one_element_each(name, value, changed, number, whole, partial(of_argument, name))
    for i, name in enumerate(trial.proof.outputs) if trial.leaves(args) else ():
        if given[i].is_floating_point():
            what, changed = f"the gradient of {name}", given[i] / 2 + 3
            number = _numbers(claim, args, name, given[i])
            calls += _one_element_each(what, given[i], changed, number, whole, partial(of_gradient, i))
    each = "one element each" if claim.pairs is None else "one element or one pair each"
    return passed(SHOWN, f"nothing is added ({claim.why}): {calls} calls show dependence on {each}")


def _numbers(claim: NoSum, args: Args, name: str, value: Tensor) -> Tensor:
    """A number for every element, the same for the two of a pair."""
    if claim.pairs is None or not value.numel():
        return torch.arange(value.numel(), device=value.device).view(value.shape)
    number = claim.pairs(args, name, value)
    if int(number.flatten().bincount().max()) > 2:
        raise LawBroken(f"declared as NoSum, but a pair of {name} has more than two elements")
    return number


def _one_element_each(
    what: str, value: Tensor, changed: Tensor, number: Tensor, whole: Results,
    results: Callable[[Tensor], Results],
) -> int:  # fmt: skip
    """Raises LawBroken if an element of a result depends on two elements of this input. Returns the number of
    calls."""
    bits = max(value.numel() - 1, 0).bit_length()
    for bit in range(bits):
        has = (number >> bit) % 2 == 1
        halves = [results(torch.where(these, changed, value)) for these in (has, ~has)]
        for name, before in whole.items():
            both = differing(halves[0][name], before) & differing(halves[1][name], before)
            if bool(both.any()):
                at = [int(i) for i in both.nonzero()[0]]
                rule = f"{name} at {at} depends on two elements of {what} or more"
                raise LawBroken(f"declared as NoSum, but {rule}")
    return 2 * bits
