"""How a loss says that it is a sum over rows."""

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

Loss = TypeVar("Loss", bound=Callable[..., Any])


def by_rows(loss_fn: Loss) -> Loss:
    """Declares that a loss is a sum over rows, of terms that depend on one row each: on its log-probability
    and entropy, on the inputs of that row, on those of its sequence, and on what is the same for all rows.

    `linear_policy_loss` then may call it on a part of a sequence, as [1, t] if rows are [B, T]. So logits of
    sequences that do not fit in its workspace are computed only once, and the call takes three matrix
    products instead of four. `dapo`, `dr_grpo`, `dual_clip_ppo`, `cispo` and `entropy_bonus` are declared so.
    `grpo` and `gspo` are not: they take means over whole sequences.

    Args:
        loss_fn: a loss for `linear_policy_loss`.

    Returns:
        The same function; or a `functools.partial` of it if it cannot have attributes, as methods.

    Example:
        >>> from isobit import losses
        >>> @losses.by_rows
        ... def reinforce(logp, entropy, advantages, tokens):
        ...     return -(logp * advantages[:, None]).sum() / tokens
        >>> reinforce.by_rows
        True
    """
    declared: Any = loss_fn if isinstance(loss_fn, FunctionType) else partial(loss_fn)
    declared.by_rows = True
    result: Loss = declared
    return result
