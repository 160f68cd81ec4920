"""A plugin that verl loads by itself if isobit is installed (the entry point `verl.plugins`). It registers a
policy loss under a new name, and changes no existing one.

    actor_rollout_ref.actor.policy_loss.loss_mode=isobit_clip

is the clipped loss of `isobit.losses` with the bounds, the dual clip and the `loss_agg_mode` of verl's own
"vanilla". There are two differences: log-ratios are not clamped to +-20, and values at masked tokens, NaN
included, reach no result.
"""

from typing import Any

from torch import Tensor
from verl.trainer.ppo.core_algos import register_policy_loss

from isobit import losses
from isobit.frame.contract import ContractError

#: The loss of isobit with the same reduction, by verl's loss_agg_mode.
LOSSES = {
    "token-mean": losses.dual_clip_ppo,
    "token-sum": losses.dual_clip_ppo,
    "seq-mean-token-sum": losses.dr_grpo,
    "seq-mean-token-sum-norm": losses.dr_grpo,
    "seq-mean-token-mean": losses.grpo,
}


@register_policy_loss("isobit_clip")
def clipped(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """(loss, metrics), as verl's registry of policy losses requires."""
    if loss_agg_mode not in LOSSES:
        known = ", ".join(LOSSES)
        raise ContractError(f"isobit_clip(loss_agg_mode: {loss_agg_mode!r}): must be one of {known}")
    low, high = (
        config.clip_ratio if bound is None else bound
        for bound in (config.clip_ratio_low, config.clip_ratio_high)
    )
    mask = response_mask != 0
    loss, stats = LOSSES[loss_agg_mode](
        log_prob, old_logp=old_log_prob, advantages=advantages, mask=mask,
        normalizer=_normalizer(loss_agg_mode, mask, **config.global_batch_info),
        clip_low=low, clip_high=high, dual_clip=config.get("clip_ratio_c", 3.0),
        rollout_weights=rollout_is_weights,
    )  # fmt: skip
    tokens = stats["tokens"].clamp(min=1)
    log_ratio = (log_prob - old_log_prob).detach().masked_fill(~mask, 0.0)
    metrics = {
        "actor/pg_clipfrac": (stats["clip_low"] + stats["clip_high"]) / tokens,
        "actor/ppo_kl": -log_ratio.sum() / tokens,
        "actor/pg_clipfrac_lower": stats["clip_dual"] / tokens,
    }
    return loss, {name: float(value) for name, value in metrics.items()}


def _normalizer(
    mode: str,
    mask: Tensor,
    dp_size: int = 1,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    loss_scale_factor: float | None = None,
) -> Any:
    """verl's divisor of the sum, for the batch of all ranks, over `dp_size`: gradients are averaged over
    ranks."""
    if mode == "token-sum":
        return 1 / dp_size
    tokens = mode == "token-mean"
    size: Any = batch_num_tokens if tokens else global_batch_size
    if size is None:
        if dp_size > 1:
            missing = "batch_num_tokens" if tokens else "global_batch_size"
            raise ContractError(f"isobit_clip({missing}: None): is required with dp_size={dp_size}")
        size = mask.sum() if tokens else mask.any(-1).sum()
    if mode == "seq-mean-token-sum-norm":
        size = size * (mask.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    return size / dp_size
