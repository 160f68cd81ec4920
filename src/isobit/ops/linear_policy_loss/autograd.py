"""The gradients of `linear_policy_loss` in autograd: the forward makes them, and the backward multiplies and
rounds them. If no probabilities are stored, only those of log-probabilities and entropies are made."""

from typing import Any

import torch
from torch import Tensor

from isobit.frame.autograd import Refusal
from isobit.ops.linear_policy_loss.chunk_op import rounded
from isobit.ops.linear_policy_loss.chunked import (
    Call,
    Gradients,
    Postponed,
    Sums,
    differentiate,
    without_probs,
)

_ONCE = (
    "isobit.linear_policy_loss has no second derivative: it computes gradients while it computes the loss. "
    "Differentiate a log_softmax of the logits instead where you need one."
)


class _Root(torch.autograd.Function):
    """An empty tensor that depends on the inputs in autograd's graph. Gradients that were made in advance do
    not, so a double backward would silently return None. Saved with them, this tensor makes it an error, and
    does not keep hidden states alive."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> Tensor:
        ctx.count = len(tensors)
        first = next(t for t in tensors if t is not None)
        return first.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (None,) * ctx.count


class _PolicyLoss(torch.autograd.Function):
    """The forward already computes the gradients (except a postponed dweight); the backward scales them."""

    @staticmethod
    def forward(ctx: Any, call: Call, made: list[Sums], root: Tensor, *tensors: Tensor | None) -> Tensor:
        wanted = dict(zip(Gradients._fields, ctx.needs_input_grad[3:], strict=True))
        result = differentiate(call, wanted)
        ctx.save_for_backward(root, *result.gradients, *(result.postponed or ()))
        ctx.like = [(None, None) if t is None else (t.shape, t.dtype) for t in tensors]
        # Backends without chunks come here only without rows: zeros are rounded by any backend.
        ctx.controls = call.controls if call.backend in ("hopper", "reference") else {}
        made.append(result.sums)
        return result.sums.loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        root, *saved = ctx.saved_tensors
        count = len(Gradients._fields)
        gradients = Gradients(*saved[:count])
        postponed = Postponed(*saved[count:]) if len(saved) > count else None
        with torch.no_grad():
            scaled = [
                sums if sums is None else rounded(
                    sums=sums.view(shape), factor=dloss.to(sums.dtype), dtype=dtype, **ctx.controls
                )
                for sums, (shape, dtype) in zip(gradients, ctx.like, strict=True)
            ]  # fmt: skip
            if postponed is not None:
                scaled[1] = postponed.dweight(ctx.like[1][0][0], dloss.float())
        if torch.is_grad_enabled():  # a graph of the backward is wanted
            scaled = [g if g is None else Refusal.apply(_first, _ONCE, g, dloss, root) for g in scaled]
        return None, None, None, *scaled


def _first(gradient: Tensor, dloss: Tensor, root: Tensor) -> Tensor:
    return gradient.view_as(gradient)


class _Known(torch.autograd.Function):
    """A loss whose gradients with respect to log-probabilities and entropies are already known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor | None], *results: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients[: len(results)])
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        return None, None, *(g if g is None else g * dloss.to(g.dtype) for g in ctx.saved_tensors)


def with_gradients(
    call: Call, tensors: tuple[Tensor | None, Tensor | None, Tensor | None]
) -> tuple[Tensor, dict[str, Any]]:
    """(loss, stats) of a call whose hidden states, weight and bias are these tensors."""
    total: Tensor
    if call.fits:
        kept: list[Sums] = []
        total = _PolicyLoss.apply(call, kept, _Root.apply(*tensors), *tensors)
        return total, kept[0].stats
    sums, share, results = without_probs(call)
    total = _Known.apply(sums.loss, [share.dlogp, share.dentropy], *results)
    return total, sums.stats
