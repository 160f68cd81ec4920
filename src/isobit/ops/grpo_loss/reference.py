"""`grpo_loss` and `group_advantages` in plain PyTorch: the formulas that are the truth, and the backends that
run anywhere. Values per token come from `ratio_kl`."""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from isobit.kernels.host.difference import difference
from isobit.kernels.host.tokens import live_rows
from isobit.ops.ratio_kl import reference as ratio_kl

#: The unit of a group of fp64 rewards whose sums, or sums of squares, overflow. A power of two, so that only
#: exponents change.
SMALL_UNIT = 2.0**-600


# Formulas


def advantages_formula(
    rewards: Tensor,
    samples_per_prompt: int | None = None,
    group_boundaries: Tensor | None = None,
    eps: float = 1e-6,
    scale: bool = True,
) -> tuple[Tensor]:
    """(advantages,) by definition, one group after another. In fp64 whatever the rewards are."""
    r = rewards.double()
    if group_boundaries is None:
        assert samples_per_prompt is not None
        bounds = list(range(0, len(r) + 1, samples_per_prompt))
    else:
        bounds = group_boundaries.tolist()
    advantages = [r[:0]]
    for first, end in pairwise(bounds):
        unit = 1.0 if r[first:end].abs().max() < 1e100 else SMALL_UNIT
        group = r[first:end] * unit - r[first] * unit
        from_mean = group - group.mean()
        divisor = from_mean.square().mean().sqrt().clamp(min=eps * unit) if scale else unit
        advantages.append(from_mean / divisor)
    return (torch.cat(advantages).to(_wide(rewards)),)


def formula(
    policy_logits: Tensor,
    ref_logits: Tensor | None,
    token_ids: Tensor,
    old_logp: Tensor | None = None,
    rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    mask: Tensor | None = None,
    samples_per_prompt: int | None = None,
    group_boundaries: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta: float = 0.0,
    reduction: str = "token_mean",
    normalizer: float | Tensor | None = None,
    rollout_weights: Tensor | None = None,
    ref_logp: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    eps: float = 1e-6,
    ignore_index: int = -100,
) -> tuple[Tensor, ...]:
    """(loss, policy_loss, kl, clip_low, clip_high, ratio, active_tokens, entropy) by definition. Only the
    loss is differentiable."""
    live = live_rows(token_ids, mask, ignore_index)
    reference = (ref_logits, ref_logp) if beta > 0 else (None, None)
    ratio, kl, logp, entropy = ratio_kl.formula(
        policy_logits, reference[0], token_ids, old_logp=old_logp, mask=mask, ignore_index=ignore_index,
        ref_logp=reference[1], temperature=temperature,
    )  # fmt: skip
    if advantages is None:
        assert rewards is not None
        (own,) = advantages_formula(rewards, samples_per_prompt, group_boundaries, eps)
        advantages = own[:, None].expand(token_ids.shape)
    A = torch.where(live, advantages.to(ratio.dtype), 0.0)
    # -min(ratio A, clip(ratio) A). A ratio that is clipped, or multiplied by 0, may be infinite: no gradient
    # goes through its exponential, where it would be 0 * inf.
    clipped = ratio.detach().clamp(1 - clip_low, 1 + clip_high)
    zero, is_clipped = (A == 0) & (ratio == math.inf), clipped * A < ratio.detach() * A
    old_logp = logp.detach() if old_logp is None else torch.where(live, old_logp, 0.0)
    log_ratio = torch.where(zero | is_clipped, 0.0, difference(logp, old_logp))
    surrogate = -torch.where(zero, 0.0, torch.where(is_clipped, clipped, log_ratio.exp()) * A)
    if rollout_weights is not None:
        surrogate = surrogate * torch.where(live, rollout_weights.to(ratio.dtype), 0.0)
    tokens = live.sum()

    def reduced(term: Tensor) -> Tensor:
        if reduction == "sequence_mean":
            term, count = term / live.sum(-1, keepdim=True).clamp(min=1), live.any(-1).sum()
        else:
            count = tokens if reduction == "token_mean" else torch.ones_like(tokens)
        divisor = count.clamp(min=1) if normalizer is None else normalizer
        return term.sum() / torch.where(tokens == 0, 1, divisor)

    policy_loss = reduced(surrogate)
    mean_kl = torch.zeros_like(policy_loss) if kl is None else reduced(kl)
    with torch.no_grad():
        share = 1 / tokens.clamp(min=1).to(ratio.dtype)
        low = ((A < 0) & (ratio < 1 - clip_low)).sum() * share
        high = ((A > 0) & (ratio > 1 + clip_high)).sum() * share
        mean_ratio = torch.where(live, ratio, 0.0).sum() * share
        stats = (policy_loss, mean_kl, low, high, mean_ratio, tokens, entropy.sum() * share)
    return (policy_loss + beta * mean_kl, *(x.detach() for x in stats))


# Backends


def group_advantages(
    rewards: Tensor, samples_per_prompt: int | None, group_boundaries: Tensor | None, eps: float, scale: bool
) -> Tensor:
    """All groups at once, without reading boundaries that are on a GPU: invalid ones make everything NaN."""
    B, device = len(rewards), rewards.device
    if group_boundaries is None:
        assert samples_per_prompt is not None
        bounds, good = torch.arange(0, B + 1, samples_per_prompt, device=device), None
    elif len(group_boundaries) == 1:  # no group: valid only without sequences
        return torch.full((B,), float("nan"), dtype=_wide(rewards), device=device)
    else:
        bounds = group_boundaries.long()
        good = (bounds[0] == 0) & (bounds[-1] == B) & (bounds.diff() > 0).all()
        nth = torch.arange(len(bounds), device=device)
        some = torch.where(nth == len(bounds) - 1, B, nth.clamp(max=B))  # valid ones, not used
        bounds = torch.where(good, bounds, some)
    count = bounds.diff()
    own = torch.searchsorted(bounds, torch.arange(B, device=device), right=True) - 1

    def mean(x: Tensor) -> Tensor:
        return (torch.segment_reduce(x, "sum", offsets=bounds, unsafe=True) / count)[own]

    def in_unit(unit: float) -> tuple[Tensor, Tensor]:
        """Rewards relative to the mean of their group, and the divisors, both in this unit."""
        r = rewards.double() * unit
        from_first = r - r[bounds[own]]
        from_mean = from_first - mean(from_first)
        divisor = mean(from_mean.square()).sqrt().clamp(min=eps * unit) if scale else None
        return from_mean, torch.full_like(from_mean, unit) if divisor is None else divisor

    from_mean, divisor = in_unit(1.0)
    advantages = from_mean / divisor
    if rewards.dtype == torch.float64:
        # A group whose sums overflow, in a unit in which they do not.
        finite = mean(from_mean.isfinite().double()) == 1
        small, by = in_unit(SMALL_UNIT)
        advantages = torch.where(finite & (divisor < math.inf), advantages, small / by)
    if good is not None:
        advantages = torch.where(good, advantages, float("nan"))
    return advantages.to(_wide(rewards))


def token_loss(
    ratio: Tensor, kl: Tensor | None, entropy: Tensor | None, slopes: Tensor | None, **args: Any
) -> tuple[Tensor | None, ...]:
    """(loss, policy_loss, kl, clip_low, clip_high, ratio, active_tokens, entropy, slope, scale), like the
    kernels: in fp64, from the results of `ratio_kl` per token."""
    dtype, (B, T) = ratio.dtype, ratio.shape
    live = live_rows(args["token_ids"], args["mask"], args["ignore_index"])
    A = args["advantages"]
    if A is None:
        groups = {name: args[name] for name in ("rewards", "samples_per_prompt", "group_boundaries", "eps")}
        A = group_advantages(**groups, scale=True)[:, None].expand(B, T)
    r, A = ratio.double(), torch.where(live, A.double(), 0.0)
    low, high = 1 - args["clip_low"], 1 + args["clip_high"]
    below, above = (A < 0) & (r < low), (A > 0) & (r > high)
    clipped = torch.where(above, high, torch.where(below, low, r))
    # An overflowed ratio of a token with advantage 0: 0 * inf must be 0 here.
    term = torch.where((A == 0) & ((r > high) | (r == math.inf)), 0.0, -(clipped * A))
    if args["rollout_weights"] is not None:
        term = term * torch.where(live, args["rollout_weights"].double(), 0.0)
    of_sequence = [term.sum(-1), term.new_zeros(B) if kl is None else kl.double().sum(-1)]
    length = live.sum(-1)
    active, divisor = length.sum(), torch.ones((), dtype=torch.float64, device=ratio.device)
    if args["reduction"] == "sequence_mean":
        of_sequence = [x / length.clamp(min=1) for x in of_sequence]
        divisor = (length > 0).sum().double()
    elif args["reduction"] == "token_mean":
        divisor = active.double()
    normalizer = args["normalizer"]
    if normalizer is not None:
        is_tensor = isinstance(normalizer, Tensor)
        divisor = normalizer.double() if is_tensor else torch.full_like(divisor, normalizer)
    divisor = torch.where(active == 0, 1.0, divisor)
    policy_loss, mean_kl = (x.sum() / divisor for x in of_sequence)
    tokens = active.clamp(min=1).double()
    means = [below.sum() / tokens, above.sum() / tokens, torch.where(live, r, 0.0).sum() / tokens]
    of_batch = [policy_loss + args["beta"] * mean_kl, policy_loss, mean_kl, *means]
    results = (*(x.to(dtype) for x in of_batch), active.int())
    of_entropy = None if entropy is None else (entropy.double().sum() / tokens).to(dtype)
    if not args["return_kept"]:
        return (*results, of_entropy, None, None)
    slope = torch.where(below | above, 0.0, term)
    if kl is not None:
        assert slopes is not None
        slope = slope + args["beta"] * slopes[1].double()
    scale = torch.ones_like(of_sequence[0]) / divisor
    if args["reduction"] == "sequence_mean":
        scale = scale / length.clamp(min=1)
    return (*results, of_entropy, torch.where(live, slope, 0.0).to(dtype), scale.to(dtype))


def token_loss_bwd(slope: Tensor, scale: Tensor, dloss: Tensor) -> Tensor:
    """dlogp [B, T], for the backward of `ratio_kl`. A slope of 0 stays 0 even if the loss is not finite."""
    dlogp = slope.double() * (dloss.double() * scale.double())[:, None]
    return torch.where(slope == 0, 0.0, dlogp).to(slope.dtype)


def _wide(rewards: Tensor) -> torch.dtype:
    return torch.promote_types(rewards.dtype, torch.float32)
