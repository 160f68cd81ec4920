"""What a contender calls: one call per copy of the inputs, in one direction, for ours and for rivals."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.bench.rival import Rival
from isobit.bench.timing import Call
from isobit.bench.truth import cotangent_like
from isobit.check.compare import differing
from isobit.check.proof import Args

#: Elements whose bits are compared, if that many calls are at hand: where one in a thousand differs, a few
#: thousand elements might not show it.
COMPARED = 1 << 18


def step_calls(function: Callable[[Args], Any], copies: Sequence[Args]) -> list[Call]:
    """Calls of what takes its gradients itself, and returns (output, *gradients)."""
    return [partial(function, args) for args in copies]


def calls_of(
    function: Callable[[Args], Any],
    prepared: Sequence[Args],
    inputs: tuple[str, ...],
    direction: str,
    once: bool = False,
) -> list[Call]:
    """One call per copy of the inputs. With `once`, nothing is called here: what is timed is the first call
    of each."""
    return [_call(function, args, inputs, direction, once) for args in prepared]


def _call(
    function: Callable[[Args], Any], args: Args, inputs: tuple[str, ...], direction: str, once: bool
) -> Call:
    """A call that returns (output, *gradients), as far as its direction has them, and accumulates nothing.
    Where the function returns several outputs, they are all there, and each has a cotangent. One without
    gradients is made in `no_grad`, which is around all of them and not in each, where it would be timed as
    well."""
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
        assert direction == "fwd_bwd"  # a backward alone has had its forward
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
    """The share of first outputs with the same bits, over enough calls; None for another dtype or shape."""
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
