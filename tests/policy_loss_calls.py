"""Small calls of `linear_policy_loss`, and the same through `linear_logp`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import isobit

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAN = float("nan")
V, D = 50, 16

Loss = Callable[..., Any]


def make(*lead: int, dtype: torch.dtype = F32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden, weight, token_ids) of rows of this shape; both of the first have gradients."""
    gen = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(*lead, D, generator=gen), torch.randn(V, D, generator=gen) / 4
    ids = torch.randint(0, V, lead, generator=gen)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), ids


def bytes_for(rows: int, dtype: torch.dtype = F32) -> int:
    """Bytes that are enough for this many rows of the reference."""
    return V * rows * torch.promote_types(dtype, F32).itemsize


def weighed(logp: Tensor, entropy: Tensor | None, weights: Tensor) -> Tensor:
    return -(weights.to(logp.dtype) * logp).sum()


def on_all_rows(
    loss_fn: Loss, tensors: tuple[Tensor, ...], inputs: dict[str, Any], entropy: bool = False, **options: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss through `linear_logp`, and its gradients."""
    logp, result = isobit.linear_logp(*tensors, return_entropy=True, **options)  # type: ignore[misc]
    returned = loss_fn(logp, result if entropy else None, **inputs)
    loss = returned[0] if isinstance(returned, tuple) else returned
    return loss, torch.autograd.grad(loss, tensors[:2])
