"""The terms of policy losses. With the ratio r = exp(logp - old_logp) of a row and its advantage A, a term is

    clipped    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)    grpo, dapo, dr_grpo, dual_clip_ppo, gspo
    CISPO      -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp     cispo; no gradient goes through sg

times its rollout weight, plus beta times an estimate of the KL, minus entropy_coef times the entropy. Losses
differ in the term, in how terms are summed, and in the meaning of `normalizer`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from isobit.losses.kl import ESTIMATORS, Estimator
from isobit.losses.rows import INF, Rows, Stats


def clipped(
    rows: Rows,
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Stats]:
    """The clipped terms, and how many rows are clipped on which side."""
    low, high = 1 - rows.number("clip_low", clip_low, 0, 1), 1 + rows.number("clip_high", clip_high, 0)
    A = rows.constant("advantages", advantages, per_sequence=True)
    ratio = log_ratio.detach().exp()
    is_low, is_high = (ratio < low) & (A < 0), (ratio > high) & (A > 0)
    stats = {"clip_low": rows.total(is_low), "clip_high": rows.total(is_high)}
    is_constant, constant = is_low | is_high | (A == 0), finite_if_unused(ratio.clamp(low, high), A, high)
    if dual_clip is not None:
        is_dual = (ratio > rows.number("dual_clip", dual_clip, 1)) & (A < 0)
        is_constant, constant = is_constant | is_dual, torch.where(is_dual, dual_clip, constant)
        stats["clip_dual"] = rows.total(is_dual)
    # Clipped ratios do not go through exp: one that overflows would have the gradient 0 * inf.
    return -A * torch.where(is_constant, constant, torch.where(is_constant, 0.0, log_ratio).exp()), stats


def finite_if_unused(ratio: Tensor, A: Tensor, most: float) -> Tensor:
    """The ratio, at most `most`, with 1 in place of an infinite one whose advantage is 0: 0 * inf must be 0
    there."""
    return ratio if most < INF else torch.where((A == 0) & (ratio == INF), 1.0, ratio)


class Extras(NamedTuple):
    """What every policy loss applies to its terms: rollout weights, KL and entropy, as the caller gave
    them."""

    rollout_weights: Tensor | None
    beta: float
    ref_logp: Tensor | None
    kl_estimator: Estimator
    unbiased_kl: bool
    entropy: Tensor | None
    entropy_coef: float


def summed(
    rows: Rows,
    policy: Tensor,
    log_ratio: Tensor,
    clips: Stats,
    extras: Extras,
    normalizer: float | Tensor,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """(loss, stats) from the terms of the policy: apply weights, add KL and entropy, divide by lengths, sum.
    With few rows the GPU waits for the host meanwhile, so no operation is made that is not needed."""
    weights, beta, ref_logp, kl_estimator, unbiased_kl, entropy, entropy_coef = extras
    if weights is not None:
        policy = policy * rows.constant("rollout_weights", weights, per_sequence=True)

    def share(terms: Tensor) -> Tensor:
        return rows.normalized(terms if lengths is None else terms / lengths, normalizer)

    terms = policy
    stats = {**clips, "ratio": rows.total(log_ratio.detach().exp()), "tokens": rows.active.sum()}
    if kl_estimator not in ESTIMATORS:  # a mistake, even if beta is 0 so far
        raise rows.error("kl_estimator", kl_estimator, f"must be one of {', '.join(ESTIMATORS)}")
    if rows.finite("beta", beta, 0) != 0:  # otherwise 0 times a KL that overflows would be NaN
        kl = ESTIMATORS[kl_estimator](rows.logp, rows.constant("ref_logp", ref_logp))
        kl = kl * log_ratio.exp() if unbiased_kl else kl
        terms, stats["kl"] = terms + beta * kl, rows.total(kl)
    if entropy is not None:
        stats["entropy"] = rows.total(rows.differentiable("entropy", entropy))
    if rows.finite("entropy_coef", entropy_coef) != 0:
        terms = terms - entropy_coef * rows.differentiable("entropy", entropy)
    loss = share(terms)
    of_policy = loss.detach().clone() if terms is policy else share(policy.detach())
    return loss, {"policy_loss": of_policy, **stats}
