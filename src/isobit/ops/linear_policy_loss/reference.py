"""`linear_policy_loss` in plain PyTorch: the formula that is the truth. The backend named reference is that
of `linear_logp`, one chunk of rows at a time (`reference_chunk`)."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from isobit.ops.linear_logp import reference


def formula(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    loss_fn: Callable[..., Any],
    inputs: Mapping[str, Any] | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
) -> Tensor:
    """The loss by definition, of all rows at once, in fp64 for fp64 inputs and in fp32 for all others."""
    logp, entropies, _ = reference.formula(
        hidden, weight, token_ids, bias=bias, mask=mask, ignore_index=ignore_index, temperature=temperature
    )
    returned = loss_fn(logp, entropies if entropy else None, **inputs or {})
    loss: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return loss
