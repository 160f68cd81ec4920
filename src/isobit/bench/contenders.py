"""The calls of a contender: one per copy of the inputs, in one direction, for isobit and for rivals."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.bench.timing import Call
from isobit.spec.compare import differing
from isobit.spec.proof import Args
from isobit.spec.rival import Rival
from isobit.spec.truth import cotangent_like

#: Number of elements whose bits are compared, if there are that many: with fewer, a difference in one of a
#: thousand might be missed.
COMPARED = 1 << 18


def step_calls(function: Callable[[Args], Any], copies: Sequence[Args]) -> list[Call]:
    """Calls of a function that computes its own gradients, and returns (output, *gradients)."""
    return [partial(function, args) for args in copies]


def calls_of(
    function: Callable[[Args], Any],
    prepared: Sequence[Args],
    inputs: tuple[str, ...],
    direction: str,
    once: bool = False,
) -> list[Call]:
    """One call per copy of the inputs. With `once`, nothing is called here: the first call of each is
    timed."""
    return [_call(function, args, inputs, direction, once) for args in prepared]


def _call(
    function: Callable[[Args], Any], args: Args, inputs: tuple[str, ...], direction: str, once: bool
) -> Call:
    """A call that returns (output, *gradients), as its direction has them, and accumulates nothing. If the
    function returns several outputs, they are all returned, and each has a cotangent. A call without
    gradients runs under a `no_grad` that surrounds all calls, so that it is not timed with each."""
    leaves = [args[name].detach().requires_grad_() for name in inputs]
    args = args | dict(zip(inputs, leaves, strict=True))

    def fwd() -> tuple[Tensor, ...]:
        outputs = function(args)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    if direction == "fwd" or not inputs:
        return fwd

    def fwd_bwd_once() -> tuple[Tensor, ...]:
        outputs = fwd()
        return (*outputs, *torch.autograd.grad(outputs, leaves, [o.detach() for o in outputs]))

    if once:
        assert direction == "fwd_bwd"  # for a backward alone the forward has run before
        return fwd_bwd_once
    kept = fwd()
    cotangents = [cotangent_like(o) for o in kept]
    if direction == "bwd":
        return lambda: torch.autograd.grad(kept, leaves, cotangents, retain_graph=True)

    def fwd_bwd() -> tuple[Tensor, ...]:
        outputs = fwd()
        return (*outputs, *torch.autograd.grad(outputs, leaves, cotangents))

    return fwd_bwd


def prepared_for(rival: Rival, copies: Sequence[Args]) -> list[Args]:
    with torch.no_grad():
        return [rival.prepare(args) for args in copies]


def equal_bits(ours: Sequence[Call], theirs: Sequence[Call]) -> float | None:
    """The fraction of first outputs with equal bits, over enough calls; None for another dtype or shape."""
    equal = seen = 0
    for our_call, their_call in zip(ours, theirs, strict=True):
        mine, other = our_call()[0], their_call()[0]
        if mine.dtype != other.dtype or mine.shape != other.shape:
            return None
        equal += mine.numel() - int(differing(mine, other).sum())
        seen += mine.numel()
        if seen >= COMPARED:
            break
    return equal / seen
