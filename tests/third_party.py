"""Candidates for `logp` as others would write them: some that are right, and others with a fault each."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _rows(logits: Tensor, token_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Row by row, so that no row can touch another."""
    z = logits.float().reshape(-1, logits.shape[-1])
    ids = token_ids.reshape(-1).long()
    live = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.reshape(-1) != 0
    found = [z[i].log_softmax(-1)[ids[i]].clone() if live[i] else z.new_zeros(()) for i in range(len(ids))]
    return torch.stack(found).reshape(token_ids.shape) if found else z.sum(-1).reshape(token_ids.shape)


def right(logits: Tensor, token_ids: Tensor, mask: Tensor | None = None) -> Tensor:
    return _rows(logits, token_ids, mask)


@torch.no_grad()
def forward_only(logits: Tensor, token_ids: Tensor, **kwargs: Any) -> Tensor:
    """`**kwargs` swallows options, so it takes none."""
    return _rows(logits, token_ids, None)


def in_bf16(logits: Tensor, token_ids: Tensor) -> Tensor:
    return _rows(logits, token_ids, None).bfloat16()


def entropy_too(logits: Tensor, token_ids: Tensor, return_entropy: bool = False) -> Any:
    log_p = logits.float().log_softmax(-1)
    found = log_p.gather(-1, token_ids.long()[..., None])[..., 0]
    return (found, -(log_p.exp() * log_p.clamp(min=-200.0)).sum(-1)) if return_entropy else found


# With a fault


def drops_a_tail(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Sums whole blocks of 16 columns alone."""
    z = logits.float()
    whole = max(1, z.shape[-1] // 16 * 16)
    return z.gather(-1, token_ids.long()[..., None])[..., 0] - z[..., :whole].logsumexp(-1)


def order_depends_on_rows(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Splits the sum into as many parts as there are rows."""
    z = logits.float()
    top = z.amax(-1, keepdim=True)
    parts = [part.sum(-1) for part in (z - top).exp().tensor_split(min(token_ids.numel(), 64) or 1, -1)]
    return (z - top).gather(-1, token_ids.long()[..., None])[..., 0] - sum(parts[1:], parts[0]).log()


class _Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


def wrong_gradient_of_weight(hidden: Tensor, weight: Tensor, token_ids: Tensor) -> Tensor:
    """For `linear_logp`: the gradient of one of two inputs is off by a factor."""
    return _rows(hidden.float() @ _Halved.apply(weight).float().T, token_ids, None)


def leaks_masked_nan(logits: Tensor, token_ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Multiplies by the mask: 0 * NaN is NaN."""
    found = _rows(logits, token_ids, None)
    return found if mask is None else found * mask


def answers_for_ignored(logits: Tensor, token_ids: Tensor, ignore_index: int = -100) -> Tensor:
    """Right in every other row, and it takes no mask: only rows that are ignored by their id show it."""
    live = token_ids != ignore_index
    found = _rows(logits, torch.where(live, token_ids, 0), live)
    return torch.where(live, found, 123.0)


class _Leaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, live: Tensor) -> Tensor:
        ctx.save_for_backward(live)
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (live,) = ctx.saved_tensors
        return torch.where(live[..., None], grad, 1.0), None


def gradient_for_ignored(logits: Tensor, token_ids: Tensor, ignore_index: int = -100) -> Tensor:
    """The same fault in the gradient alone."""
    live = token_ids != ignore_index
    return _rows(_Leaking.apply(logits, live), torch.where(live, token_ids, 0), live)


def counting_ignored(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of isobit as one without a mask, that lets ignored rows count: 123 is added for each."""

    def counts(**given: Any) -> Any:
        found = function(**given)
        first, *rest = found if isinstance(found, tuple) else (found,)
        more = 123.0 * (given["token_ids"] == given["ignore_index"])
        first = first + (more if first.ndim else more.sum())
        return (first, *rest) if rest else first

    made: Any = counts
    left = ("mask", "validate", "numerics", "backend")
    params = [p for p in inspect.signature(function).parameters.values() if p.name not in left]
    made.__signature__ = inspect.Signature(params)
    return counts


_BUFFERS: dict[Any, Tensor] = {}


@torch.no_grad()
def returns_one_buffer(logits: Tensor, token_ids: Tensor) -> Tensor:
    """The next call of this shape overwrites what this one returned."""
    found = _rows(logits, token_ids, None)
    return _BUFFERS.setdefault(found.shape, torch.empty_like(found)).copy_(found)


_KEPT: dict[Any, tuple[Tensor, ...]] = {}


@torch.no_grad()
def keeps_results(logits: Tensor, token_ids: Tensor) -> Tensor:
    """By address, and so that no address is used again: right until something else is written there."""
    where = (logits.data_ptr(), token_ids.data_ptr(), logits.shape)
    if where not in _KEPT:
        _KEPT[where] = (_rows(logits, token_ids, None), logits, token_ids)
    return _KEPT[where][0].clone()


def writes_into_its_input(logits: Tensor, token_ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits -= logits.amax(-1, keepdim=True)
    return _rows(logits, token_ids, None)


# Through an adapter


def adapt(cross_entropy: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.nn.functional.cross_entropy` as a `logp`: other names, another sign, rows in one dimension."""

    def logp(logits: Tensor, token_ids: Tensor, ignore_index: int = -100) -> Tensor:
        z, ids = logits.float().flatten(0, -2), token_ids.reshape(-1).long()
        z = z.masked_fill((ids == ignore_index)[:, None], 0.0)  # or its gradient of an ignored NaN is NaN
        loss = cross_entropy(z, ids, ignore_index=ignore_index, reduction="none")
        return -loss.reshape(token_ids.shape)

    return logp


def cannot_adapt(function: Callable[..., Any]) -> Callable[..., Any]:
    raise KeyError("entropy")
