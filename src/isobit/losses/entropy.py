"""The entropy bonus, as a loss of its own."""

from torch import Tensor

from isobit.losses.by_rows import by_rows
from isobit.losses.rows import Rows, Stats


@by_rows
def entropy_bonus(
    logp: Tensor,
    entropy: Tensor | None = None,
    *,
    normalizer: float | Tensor,
    coef: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """-coef / normalizer  sum_it  entropy: keeps distributions from becoming narrow.

    R. Williams and J. Peng, "Function Optimization Using Connectionist Reinforcement Learning Algorithms",
    1991. `entropy_coef` of the other losses uses the normalizer of the loss, and in `grpo` and `gspo` the
    mean over a sequence, which is verl's `entropy_coeff`. This loss has its own normalizer: with the number
    of live tokens it is TRL's `entropy_coef`, whatever the loss type.

    Args:
        logp: [n] or [B, T]; only its shape and dtype are used.
        entropy: of that shape, the entropies of the distributions.
        normalizer: divisor of the sum, a number or a tensor without dimensions.
        coef: weight of the entropies.
        mask: bool or integer; rows where it is 0 are masked, all others are live.

    Returns:
        (loss, stats): the share of these rows in the loss, and the sums "entropy" and "tokens".

    Example:
        >>> import torch
        >>> from isobit import losses
        >>> loss, _ = losses.entropy_bonus(torch.zeros(2), torch.tensor([1.0, 3.0]), normalizer=2, coef=0.01)
        >>> print(f"{loss:.4f}")
        -0.0200
    """
    rows = Rows("entropy_bonus", logp, mask)
    entropies = rows.differentiable("entropy", entropy)
    loss = -rows.finite("coef", coef) * rows.normalized(entropies, normalizer)
    return loss, {"entropy": rows.total(entropies), "tokens": rows.active.sum()}
