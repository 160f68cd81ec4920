"""Weights that correct for the difference between the rollout engine and the trainer."""

from typing import Literal

from torch import Tensor

from isobit.kernels.host.difference import difference
from isobit.losses.rows import Rows


def truncated_weights(
    old_logp: Tensor,
    rollout_logp: Tensor,
    *,
    mask: Tensor | None = None,
    cap: float = 2.0,
    level: Literal["token", "sequence"] = "token",
    sequence_ids: Tensor | None = None,
) -> Tensor:
    """Truncated importance sampling: min(exp(old_logp - rollout_logp), cap), as `rollout_weights` of a loss.

    The engine that sampled the tokens and the trainer that computed `old_logp` have the same parameters but
    different kernels, so their log-probabilities differ. The weights correct for that, and the cap limits the
    weight of a single token or sequence. E. Ionides, "Truncated Importance Sampling", Journal of
    Computational and Graphical Statistics 17(2), 2008.

    In TRL these are `vllm_importance_sampling_mode="token_truncate"` and `"sequence_truncate"` with
    `vllm_importance_sampling_clip_max`; in verl `algorithm.rollout_correction.rollout_is` with
    `rollout_is_threshold`, which also clamps the logarithm to +-20. A token for which the engine reported NaN
    gets the weight 1 in TRL. Here it gets NaN: replace it by `old_logp` for a weight of 1.

    Args:
        old_logp: [n] or [B, T], log-probabilities of the tokens under the policy before the update, as the
            trainer computes them.
        rollout_logp: as reported by the engine, of that shape.
        mask: bool or integer, of that shape; rows where it is 0 are masked and have the weight 0.
        cap: the largest weight.
        level: "token" for a weight per token, "sequence" for the capped product over the tokens of a
            sequence, repeated at each of them.
        sequence_ids: integers of the shape of the rows, for whole sequences packed one after another: a new
            sequence begins where the id changes. Without them each line of [B, T] is one sequence.

    Returns:
        Weights of the shape of the rows, without a gradient.

    Example:
        >>> import torch
        >>> from isobit import losses
        >>> old_logp, rollout_logp = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -0.5, -9.0])
        >>> losses.truncated_weights(old_logp, rollout_logp, cap=2.0)
        tensor([1.0000, 0.6065, 2.0000])
    """
    rows = Rows("truncated_weights", old_logp, mask, sequence_ids, name="old_logp")
    cap = rows.number("cap", cap, 0.0)
    log_weight = difference(rows.logp.detach(), rows.constant("rollout_logp", rollout_logp))
    if level == "sequence":
        log_weight = rows.sequence_sum(log_weight)
    elif level != "token":
        raise rows.error("level", level, "must be 'token' or 'sequence'")
    return rows.zero_masked(log_weight.exp().clamp(max=cap))
