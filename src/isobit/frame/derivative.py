"""The gradient of an op by its backward, which is an op too: what is saved, and how the backward is called.

The backward's arguments are matched by name:

    an argument of the op       saved from the call
    an output of the op         saved, or None if it was not requested
    d<output>                   the gradient of that output
    want_<argument>             whether that argument needs a gradient

Its outputs are the gradients of the op's differentiable arguments, in their order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.frame.autograd import Refusal, Saved
from isobit.frame.contract import MISSING, Contract, Param, is_given

Args = dict[str, Any]
Grads = tuple[Tensor | None, ...]


class Derivative:
    """What `Op.derivative` declares. `bound_to(scalars, device)` gives the controls by which the backward has
    the numerics class of the call."""

    def __init__(
        self,
        contract: Contract,
        bound_to: Callable[[Args, torch.device], Args],
        backward: Callable[..., Any],
        backward_params: Sequence[Param],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        constant: tuple[str, ...],
        save: Callable[[Args, Args], Args],
        gradient: Callable[[Args, Grads], dict[str, Tensor | None]] | None,
        once: str | None,
    ) -> None:
        own = {p.name: p for p in contract.params}
        place = {name: i for i, name in enumerate(outputs)}
        if len(outputs) != len(contract.outputs):
            raise TypeError(f"{contract.name} has {len(contract.outputs)} outputs, not {', '.join(outputs)}")
        self._names, self._bound_to, self._backward = contract.names, bound_to, backward
        self._inputs, self._outputs = inputs, outputs
        self._save, self._once = save, once
        self._gradient = gradient or self._by_backward
        #: Outputs without a gradient, and those that have one only if they were requested.
        self._constant = {place[name] for name in constant}
        self._optional = [(i, spec.when) for i, spec in enumerate(contract.outputs) if spec.when]
        self._saved_args = [p.name for p in backward_params if p.name in own and own[p.name].spec]
        self._saved_outputs: list[tuple[str, int, str | None]] = []
        self._given: list[str] = []
        self._cotangents: list[tuple[str, int]] = []
        self._required: list[tuple[str, str]] = []
        self._wanted: list[tuple[str, str]] = []
        #: Outputs whose gradient must have a contiguous last dimension: as the backward says, or, if it does
        #: not take the gradient by that name, as the output itself has.
        contiguous = [spec.contiguous_last for spec in contract.outputs]
        for p in backward_params:
            if p.name in own:
                self._given.append(p.name)
            elif p.name in place:
                self._given.append(p.name)
                i = place[p.name]
                self._saved_outputs.append((p.name, i, contract.outputs[i].when))
            elif p.name[0] == "d" and p.name[1:] in place:
                i = place[p.name[1:]]
                self._cotangents.append((p.name, i))
                if not p.optional:
                    self._required.append((p.name, p.name[1:]))
                contiguous[i] = p.spec is not None and p.spec.contiguous_last
            elif p.name.startswith("want_") and p.name[5:] in inputs:
                self._wanted.append((p.name, p.name[5:]))
            elif p.default is MISSING and gradient is None:
                self._given.append(p.name)  # `save` adds it
        self._contiguous = [i for i, must in enumerate(contiguous) if must]

    # The two functions of autograd. A body is a call without its tensors (`isobit.frame.autograd`).

    def setup_context(self, ctx: Any, inputs: tuple[Any, ...], outputs: Any) -> None:
        body, *tensors = inputs
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        saved = body.saved
        if saved is None:
            args = dict(zip(self._names, body.values(tensors), strict=True))
            absent = {i for i, when in self._optional if not is_given(args[str(when)])}
            constant = sorted(self._constant | absent)
            saved = Saved.of(self._saved(args, several), (*tensors, *several), constant)
            # A tensor that is given twice, as in a a^T, is saved from its first position. The next call may
            # have two different tensors there, so this cannot be cached.
            if len({id(t) for t in tensors}) == len(tensors):
                body.cache_saved(saved)
        ctx.save_for_backward(*saved.among((*tensors, *several)))
        ctx.call = body, saved
        ctx.set_materialize_grads(False)
        if saved.constant:
            constants = [several[i] for i in saved.constant]
            ctx.mark_non_differentiable(*[t for t in constants if t is not None])

    def backward(self, ctx: Any, *grads: Tensor | None) -> Any:
        (body, saved), wanted, names = ctx.call, ctx.needs_input_grad[1:], self._names
        common = body.common.get(wanted)
        if common is None:
            scalars = dict(zip(names, body.template, strict=True))
            needs = {names[p] for p, needed in zip(body.positions, wanted, strict=True) if needed}
            follow = self._bound_to(scalars, saved.device)
            common = body.common[wanted] = {**scalars, **saved.rest, "follow": follow, "needs": needs}
        given = common.copy()
        given.update(zip(saved.names, ctx.saved_tensors, strict=True))
        grads = self._usable(grads)
        if not torch.is_grad_enabled():
            gradients = self._gradient(given, grads)
        else:  # double backward: a graph of the backward is needed
            with torch.set_grad_enabled(self._once is None):
                gradients = self._gradient(given, grads)
            if self._once is not None:
                watched = [t for t in (*ctx.saved_tensors, *grads) if t is not None]
                made = {name: g for name, g in gradients.items() if g is not None}
                gradients = {n: Refusal.apply(_first, self._once, g, *watched) for n, g in made.items()}
        return (None, *[gradients.get(names[p]) for p in body.positions])

    def _saved(self, args: Args, outputs: Sequence[Any]) -> Args:
        """What the backward needs of a call, by name."""
        saved = {name: args[name] for name in self._saved_args}
        for name, i, when in self._saved_outputs:
            saved[name] = outputs[i] if when is None or is_given(args[when]) else None
        return self._save(dict(zip(self._outputs, outputs, strict=True)) | args, saved)

    def _usable(self, grads: Grads) -> Grads:
        """Gradients as the backward takes them: where its contract requires a contiguous last dimension, they
        have one. (The gradient of a sum is one number, expanded. A clone, because contiguous() returns an
        empty tensor itself, whatever its strides.)"""
        for i in self._contiguous:
            grad = grads[i]
            if grad is not None and grad.stride(-1) != 1:
                clone = grad.clone(memory_format=torch.contiguous_format)
                grads = (*grads[:i], clone, *grads[i + 1 :])
        return grads

    def _by_backward(self, saved: Args, grads: Grads) -> dict[str, Tensor | None]:
        """Gradients by argument name, from one call of the backward."""
        given = {name: saved[name] for name in self._given}
        for name, i in self._cotangents:
            given[name] = grads[i]
        for name, output in self._required:
            if given[name] is None:  # only other outputs were used
                if output not in saved:
                    return {}
                given[name] = torch.zeros_like(saved[output])
        needs = saved["needs"]
        for name, argument in self._wanted:
            given[name] = argument in needs
        gradients = self._backward(**given, **saved["follow"])
        if not isinstance(gradients, tuple):
            gradients = (gradients,)
        return {name: g for name, g in zip(self._inputs, gradients, strict=True) if name in needs}


def _first(gradient: Tensor, *watched: Tensor) -> Tensor:
    return gradient.view_as(gradient)
