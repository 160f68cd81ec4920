"""Policy losses. Their terms are in `terms.py`; the losses differ in how terms are summed and normalised."""

import torch
from torch import Tensor

from isobit.losses.by_rows import by_rows
from isobit.losses.kl import Estimator
from isobit.losses.rows import INF, Rows, Stats
from isobit.losses.terms import Extras, clipped, finite_if_unused, summed


def grpo(
    logp: Tensor,
    entropy: Tensor | None = None,
    *,
    advantages: Tensor,
    normalizer: float | Tensor,
    old_logp: Tensor | None = None,
    mask: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    rollout_weights: Tensor | None = None,
    beta: float = 0.0,
    ref_logp: Tensor | None = None,
    kl_estimator: Estimator = "k3",
    unbiased_kl: bool = False,
    entropy_coef: float = 0.0,
    sequence_ids: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """GRPO: the mean of clipped terms over the tokens of a sequence, summed over sequences.

        term = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + beta KL
        loss = 1 / normalizer  sum_i  1 / |o_i|  sum_t  term

    Z. Shao et al., "DeepSeekMath", 2024, arXiv:2402.03300. `normalizer` is the number of sequences. In TRL:
    `loss_type="grpo"`, with `delta` for dual_clip and `use_bias_correction_kl` for unbiased_kl. In verl:
    `loss_mode="vanilla"` and `loss_agg_mode="seq-mean-token-mean"`, where dual_clip is `clip_ratio_c`, 3 by
    default.

    Args:
        logp: [n] or [B, T], log-probabilities of the tokens under the policy. 16 bits become fp32.
        entropy: of that shape, the entropies of the distributions; needed only for entropy_coef.
        advantages: of that shape, or one per sequence: [B], or, with sequence_ids, [s] in the order of the
            sequences. If they are not as many as the sequences of sequence_ids, the loss is NaN.
        normalizer: divisor of the sum, a number or a tensor without dimensions, for the whole batch and not
            for these rows. If it is 0, all rows should be masked, and the loss is 0.
        old_logp: log-probabilities under the policy before the update; None is on-policy: ratios are 1, with
            the gradient of logp.
        mask: bool or integer; rows where it is 0 are masked, all others are live. The loss and gradient of
            masked rows are 0, and input values there, NaN included, reach no result.
        clip_low, clip_high: ratios are clipped below 1 - clip_low and above 1 + clip_high.
        dual_clip: with a negative advantage, clip ratios above this too: see `dual_clip_ppo`.
        rollout_weights: factors of the policy's terms, shaped like `advantages`: see `truncated_weights`.
        beta: weight of the KL to a reference; if it is 0, the KL is not computed.
        ref_logp: log-probabilities under the reference.
        kl_estimator: "k1", "k2" or "k3".
        unbiased_kl: multiply KL estimates by the ratio, so that they hold for samples of the old policy
            and their gradient is that of the KL (DeepSeek-V3.2, 2025, arXiv:2512.02556).
        entropy_coef: weight of the entropies, which are subtracted, token by token, before terms are summed.
        sequence_ids: integers of the shape of the rows, for whole sequences packed one after another: a new
            sequence begins where the id changes. Without them each line of [B, T] is one sequence.

    Returns:
        (loss, stats): the share of these rows in the loss, and detached sums over the live rows: "ratio",
        "kl" and "entropy" (if they exist), "clip_low", "clip_high" and "clip_dual" (how many rows
        are clipped there), "tokens" (how many are live); "policy_loss" is the loss without KL and entropy.

    Example:
        >>> import torch
        >>> from isobit import losses
        >>> logp = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]], requires_grad=True)
        >>> mask = torch.tensor([[1, 1], [1, 0]])  # one token of the second sequence is live
        >>> loss, stats = losses.grpo(logp, advantages=torch.tensor([1.0, -1.0]), mask=mask, normalizer=2)
        >>> loss.backward()
        >>> logp.grad
        tensor([[-0.2500, -0.2500],
                [ 0.5000,  0.0000]])
    """
    rows = Rows("grpo", logp, mask, sequence_ids)
    log_ratio = rows.log_ratio(old_logp)
    policy, clips = clipped(rows, log_ratio, advantages, clip_low, clip_high, dual_clip)
    extras = Extras(rollout_weights, beta, ref_logp, kl_estimator, unbiased_kl, entropy, entropy_coef)
    return summed(rows, policy, log_ratio, clips, extras, normalizer, rows.lengths())


@by_rows
def dapo(
    logp: Tensor,
    entropy: Tensor | None = None,
    *,
    advantages: Tensor,
    normalizer: float | Tensor,
    old_logp: Tensor | None = None,
    mask: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    rollout_weights: Tensor | None = None,
    beta: float = 0.0,
    ref_logp: Tensor | None = None,
    kl_estimator: Estimator = "k3",
    unbiased_kl: bool = False,
    entropy_coef: float = 0.0,
    sequence_ids: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """DAPO: clipped terms, all tokens weighted equally, with a wider clip range above than below.

        loss = 1 / normalizer  sum_it  -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + beta KL

    Q. Yu et al., "DAPO", 2025, arXiv:2503.14476. `normalizer` is the number of live tokens. Which
    prompts are used, and rewards of overlong answers, are decided before the loss. In TRL:
    `loss_type="dapo"` with `epsilon_high=0.28`. In verl: `loss_mode="vanilla"`,
    `loss_agg_mode="token-mean"`, `clip_ratio_high=0.28`.

    Args:
        logp, entropy: as for `grpo`.
        advantages, normalizer, old_logp, mask: as for `grpo`, but rows need not be whole sequences.
        clip_low, clip_high, dual_clip: as for `grpo`.
        rollout_weights, beta, ref_logp, kl_estimator, unbiased_kl, entropy_coef: as for `grpo`.
        sequence_ids: as for `grpo`; needed only for inputs of packed rows with one entry per sequence.

    Returns:
        (loss, stats), as for `grpo`.

    Example:
        >>> import torch
        >>> from isobit import losses
        >>> logp, old_logp = torch.log(torch.tensor([0.5, 0.5])), torch.log(torch.tensor([0.4, 0.2]))
        >>> loss, stats = losses.dapo(logp, old_logp=old_logp, advantages=torch.ones(2), normalizer=2)
        >>> print(f"{loss:.4f}", stats["clip_high"])  # ratios are 1.25 and 2.5, which is clipped to 1.28
        -1.2650 tensor(1.)
    """
    rows = Rows("dapo", logp, mask, sequence_ids)
    log_ratio = rows.log_ratio(old_logp)
    policy, clips = clipped(rows, log_ratio, advantages, clip_low, clip_high, dual_clip)
    extras = Extras(rollout_weights, beta, ref_logp, kl_estimator, unbiased_kl, entropy, entropy_coef)
    return summed(rows, policy, log_ratio, clips, extras, normalizer)


@by_rows
def dr_grpo(
    logp: Tensor,
    entropy: Tensor | None = None,
    *,
    advantages: Tensor,
    normalizer: float | Tensor,
    old_logp: Tensor | None = None,
    mask: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    rollout_weights: Tensor | None = None,
    beta: float = 0.0,
    ref_logp: Tensor | None = None,
    kl_estimator: Estimator = "k3",
    unbiased_kl: bool = False,
    entropy_coef: float = 0.0,
    sequence_ids: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """Dr. GRPO: clipped terms over a constant, so that the weight of a token does not depend on lengths.

        loss = 1 / normalizer  sum_it  -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + beta KL

    Z. Liu et al., "Understanding R1-Zero-Like Training", 2025, arXiv:2503.20783. `normalizer` is the number
    of sequences times the largest length that an answer may have, a constant of the run. Advantages are
    rewards minus their mean, not divided by a standard deviation. In TRL: `loss_type="dr_grpo"`,
    `scale_rewards="none"`, and the length is `max_completion_length`. In verl: `loss_mode="vanilla"`,
    `loss_agg_mode="seq-mean-token-sum-norm"`, and the length is `loss_scale_factor`.

    Args:
        logp, entropy: as for `grpo`.
        advantages, normalizer, old_logp, mask: as for `grpo`, but rows need not be whole sequences.
        clip_low, clip_high, dual_clip: as for `grpo`.
        rollout_weights, beta, ref_logp, kl_estimator, unbiased_kl, entropy_coef: as for `grpo`.
        sequence_ids: as for `grpo`; needed only for inputs of packed rows with one entry per sequence.

    Returns:
        (loss, stats), as for `grpo`.

    Example:
        >>> import torch
        >>> from isobit import losses
        >>> logp = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]], requires_grad=True)
        >>> mask = torch.tensor([[1, 1], [1, 0]])
        >>> loss, _ = losses.dr_grpo(logp, advantages=torch.tensor([1.0, -1.0]), mask=mask, normalizer=2 * 4)
        >>> loss.backward()
        >>> logp.grad
        tensor([[-0.1250, -0.1250],
                [ 0.1250,  0.0000]])
    """
    rows = Rows("dr_grpo", logp, mask, sequence_ids)
    log_ratio = rows.log_ratio(old_logp)
    policy, clips = clipped(rows, log_ratio, advantages, clip_low, clip_high, dual_clip)
    extras = Extras(rollout_weights, beta, ref_logp, kl_estimator, unbiased_kl, entropy, entropy_coef)
    return summed(rows, policy, log_ratio, clips, extras, normalizer)


@by_rows
def dual_clip_ppo(
    logp: Tensor,
    entropy: Tensor | None = None,
    *,
    advantages: Tensor,
    normalizer: float | Tensor,
    old_logp: Tensor | None = None,
    mask: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
    rollout_weights: Tensor | None = None,
    beta: float = 0.0,
    ref_logp: Tensor | None = None,
    kl_estimator: Estimator = "k3",
    unbiased_kl: bool = False,
    entropy_coef: float = 0.0,
    sequence_ids: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """PPO with a second bound: a token with a negative advantage and a large ratio has a bounded loss.

        term = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)      and, where A < 0, at most  -dual_clip A
        loss = 1 / normalizer  sum_it  term + beta KL

    D. Ye et al., "Mastering Complex Control in MOBA Games", 2019, arXiv:1912.09729; the single clip is that
    of J. Schulman et al., "Proximal Policy Optimization", 2017, arXiv:1707.06347. `normalizer` is the number
    of live tokens. In verl: `loss_mode="vanilla"`, `loss_agg_mode="token-mean"`, where dual_clip is
    `clip_ratio_c`. In TRL: `delta` of the clipped losses.

    Args:
        logp, entropy: as for `grpo`.
        advantages, normalizer, old_logp, mask: as for `grpo`, but rows need not be whole sequences.
        clip_low, clip_high: as for `grpo`.
        dual_clip: the largest ratio with a negative advantage, at least 1.
        rollout_weights, beta, ref_logp, kl_estimator, unbiased_kl, entropy_coef: as for `grpo`.
        sequence_ids: as for `grpo`; needed only for inputs of packed rows with one entry per sequence.

    Returns:
        (loss, stats), as for `grpo`.

    Example:
        >>> import torch
        >>> from isobit import losses
        >>> logp, old_logp = torch.log(torch.tensor([0.5, 0.5])), torch.log(torch.tensor([0.4, 0.1]))
        >>> A = -torch.ones(2)
        >>> loss, stats = losses.dual_clip_ppo(logp, old_logp=old_logp, advantages=A, normalizer=2)
        >>> print(f"{loss:.4f}", stats["clip_dual"])  # ratios are 1.25 and 5, which is clipped to 3
        2.1250 tensor(1.)
    """
    rows = Rows("dual_clip_ppo", logp, mask, sequence_ids)
    log_ratio = rows.log_ratio(old_logp)
    policy, clips = clipped(rows, log_ratio, advantages, clip_low, clip_high, dual_clip)
    extras = Extras(rollout_weights, beta, ref_logp, kl_estimator, unbiased_kl, entropy, entropy_coef)
    return summed(rows, policy, log_ratio, clips, extras, normalizer)


def gspo(
    logp: Tensor,
    entropy: Tensor | None = None,
    *,
    advantages: Tensor,
    normalizer: float | Tensor,
    old_logp: Tensor | None = None,
    mask: Tensor | None = None,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    rollout_weights: Tensor | None = None,
    beta: float = 0.0,
    ref_logp: Tensor | None = None,
    kl_estimator: Estimator = "k3",
    unbiased_kl: bool = False,
    entropy_coef: float = 0.0,
    sequence_ids: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """GSPO: clipped terms with one ratio for a whole sequence, the geometric mean of its tokens' ratios.

        s_i  = exp(1 / |o_i|  sum_t  logp - old_logp)
        loss = 1 / normalizer  sum_i  -min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i) + beta KL_i

    C. Zheng et al., "Group Sequence Policy Optimization", 2025, arXiv:2507.18071. `normalizer` is the number
    of sequences, and KL_i the mean over a sequence's tokens. Rows must be whole sequences. In TRL:
    `importance_sampling_level="sequence"`, `loss_type="grpo"`. In verl: `loss_mode="gspo"`,
    `loss_agg_mode="seq-mean-token-mean"`; the same value and gradient as long as advantages and rollout
    weights are the same for all tokens of a sequence. Where they are not, verl gives a token the gradient of
    its own term, and here, as in TRL, the gradient is that of the loss.

    Args:
        logp, entropy: as for `grpo`.
        advantages, normalizer, old_logp, mask: as for `grpo`.
        clip_low, clip_high: as for `grpo`, for the ratio of a sequence; much smaller, as in the paper.
        rollout_weights, beta, ref_logp, kl_estimator, unbiased_kl, entropy_coef: as for `grpo`; for
            unbiased_kl the ratio is the sequence's.
        sequence_ids: as for `grpo`.

    Returns:
        (loss, stats), as for `grpo`; a sequence's ratio and clipping are counted at each of its tokens.

    Example:
        >>> import torch
        >>> from isobit import losses
        >>> logp = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]], requires_grad=True)
        >>> old_logp = torch.tensor([[-1.1, -1.9], [-2.0, 0.0]])  # sequences have the ratios 1 and exp(-1)
        >>> mask = torch.tensor([[1, 1], [1, 0]])
        >>> loss, stats = losses.gspo(
        ...     logp, old_logp=old_logp, advantages=torch.tensor([1.0, -1.0]), mask=mask, normalizer=2
        ... )
        >>> loss.backward()
        >>> logp.grad  # the second is clipped
        tensor([[-0.2500, -0.2500],
                [ 0.0000,  0.0000]])
    """
    rows = Rows("gspo", logp, mask, sequence_ids)
    lengths = rows.lengths()
    log_ratio = rows.zero_masked(rows.sequence_sum(rows.log_ratio(old_logp)) / lengths)
    policy, clips = clipped(rows, log_ratio, advantages, clip_low, clip_high)
    extras = Extras(rollout_weights, beta, ref_logp, kl_estimator, unbiased_kl, entropy, entropy_coef)
    return summed(rows, policy, log_ratio, clips, extras, normalizer, lengths)


@by_rows
def cispo(
    logp: Tensor,
    entropy: Tensor | None = None,
    *,
    advantages: Tensor,
    normalizer: float | Tensor,
    old_logp: Tensor | None = None,
    mask: Tensor | None = None,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    rollout_weights: Tensor | None = None,
    beta: float = 0.0,
    ref_logp: Tensor | None = None,
    kl_estimator: Estimator = "k3",
    unbiased_kl: bool = False,
    entropy_coef: float = 0.0,
    sequence_ids: Tensor | None = None,
) -> tuple[Tensor, Stats]:
    """CISPO: REINFORCE with a clipped importance weight, so that every token keeps a gradient.

        loss = 1 / normalizer  sum_it  -sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp + beta KL

    MiniMax, "MiniMax-M1", 2025, arXiv:2506.13585. No gradient goes through sg. `normalizer` is the number of
    live tokens. By default there is no lower bound, as in the paper, and the upper one is 5, as in
    D. Khatri et al., "The Art of Scaling Reinforcement Learning Compute for LLMs", 2025, arXiv:2510.13786. In
    TRL: `loss_type="cispo"`, where `epsilon_high` is the bound itself, 1 + clip_high, and clip_low is 1. In
    verl: `loss_mode="cispo"`, `loss_agg_mode="token-mean"`.

    Args:
        logp, entropy: as for `grpo`.
        advantages, normalizer, old_logp, mask: as for `grpo`, but rows need not be whole sequences.
        clip_low, clip_high: weights are clipped below 1 - clip_low and above 1 + clip_high, whatever the sign
            of the advantage.
        rollout_weights, beta, ref_logp, kl_estimator, unbiased_kl, entropy_coef: as for `grpo`.
        sequence_ids: as for `grpo`; needed only for inputs of packed rows with one entry per sequence.

    Returns:
        (loss, stats), as for `grpo`; "clip_low" and "clip_high" count clipped weights.

    Example:
        >>> import torch
        >>> from isobit import losses
        >>> logp = torch.tensor([-1.0, -2.0], requires_grad=True)
        >>> old_logp = torch.tensor([-1.0, -9.0])  # ratios are 1 and exp(7), which is clipped to 5
        >>> loss, _ = losses.cispo(logp, old_logp=old_logp, advantages=torch.ones(2), normalizer=2)
        >>> loss.backward()
        >>> logp.grad
        tensor([-0.5000, -2.5000])
    """
    rows = Rows("cispo", logp, mask, sequence_ids)
    low, high = 1 - rows.number("clip_low", clip_low, 0, 1), 1 + rows.number("clip_high", clip_high, 0)
    log_ratio = rows.log_ratio(old_logp)
    ratio = log_ratio.detach().exp()
    A = rows.constant("advantages", advantages, per_sequence=True)
    weight = -finite_if_unused(ratio.clamp(low, high), A, high) * A
    # A token of probability 0 that has no weight: 0 * -inf must be 0 here.
    policy = weight * torch.where((weight == 0) & (rows.logp == -INF), 0.0, rows.logp)
    clips = {"clip_low": rows.total(ratio < low), "clip_high": rows.total(ratio > high)}
    extras = Extras(rollout_weights, beta, ref_logp, kl_estimator, unbiased_kl, entropy, entropy_coef)
    return summed(rows, policy, log_ratio, clips, extras, normalizer)
