"""How far two sets of log-probabilities of the same tokens are from each other, in the numbers that RL
trainers log.

With l the log-probability of a token in training, g the one of the rollout, and r = exp(l - g):

    kl           mean(g - l)                     k1, KL of the rollout's policy from the trainer's
    k3_kl        mean(r - 1 - log r)             k3, the same with less variance
    chi2_token   mean(r^2) - 1                   log r within +-20, as in verl
    chi2_seq     mean over sequences of (product of r)^2, minus 1
    ppl_ratio    mean over sequences of exp(mean(g) - mean(l))

The arithmetic is fp64, so that a difference in the last bit of a log-probability is not lost in a mean.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

#: verl limits the logarithm of a ratio to this before it squares the ratio.
LOG_RATIO_LIMIT = 20.0

#: Ratios at which trainers truncate (TIS) or mask (MIS): verl and ms-swift at 2, TRL at 3.
THRESHOLDS = (2.0, 3.0)

PERCENTILES = (0, 1, 5, 50, 95, 99, 100)

#: Edges of the histogram of |log r|: decades, below the first only what is not 0.
DECADES = tuple(range(-9, 2))


def differing(training: Tensor, rollout: Tensor) -> Tensor:
    """[N] whether the bits of two fp32 log-probabilities differ."""
    return training.contiguous().view(torch.int32) != rollout.contiguous().view(torch.int32)


def metrics(training: Sequence[Tensor], rollout: Sequence[Tensor]) -> dict[str, Any]:
    """The metrics of log-probabilities in fp32, one tensor [T] for each sequence on both sides. Sequences
    without a token are left out."""
    padded = [pad_sequence([x.cpu() for x in side], batch_first=True) for side in (training, rollout)]
    lengths = torch.tensor([len(x) for x in training])
    return batch_metrics(padded[0], padded[1], torch.arange(padded[0].shape[1]) < lengths[:, None])


@dataclass(frozen=True)
class Split:
    """What `of_finite` has found. `nan` are tokens with a NaN on either side, `infinite` those with a
    probability of 0 on one side only."""

    numbers: dict[str, Any]
    nan: int
    infinite: int


def of_finite(
    training: Sequence[Tensor], rollout: Sequence[Tensor], there: Sequence[Tensor] | None = None
) -> Split:
    """The metrics of tokens whose log-probabilities are numbers on both sides, and how many are not. Those
    that are not count as tokens and as differing, and are in no mean. `there` says which tokens count."""
    kept, nan, infinite, equal = (list[Tensor](), list[Tensor]()), 0, 0, 0
    for i, (a, b) in enumerate(zip(training, rollout, strict=True)):
        live = torch.ones_like(a, dtype=torch.bool) if there is None else there[i]
        finite = live & a.isfinite() & b.isfinite()
        not_a_number = live & (a.isnan() | b.isnan())
        other = live & ~finite & ~not_a_number
        nan += int(not_a_number.sum())
        infinite += int((other & (a != b)).sum())
        equal += int((other & (a == b)).sum())
        for side, x in zip(kept, (a, b), strict=True):
            side.append(x[finite])
    numbers = metrics(*kept)
    if numbers:
        numbers["tokens"] += nan + infinite + equal
        numbers["differ"] += nan + infinite
    return Split(numbers, nan, infinite)


def batch_metrics(training: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, Any]:
    """The same of log-probabilities [B, T], where only tokens with a mask that is not 0 count. They are
    computed on the device of the tensors. Without a single token there are no metrics: an empty dict."""
    live = mask.bool()
    some = live.any(1)
    live, trained32, rolled32 = live[some], training.float()[some], rollout.float()[some]
    if not len(live):
        return {}
    # Zeros where nothing counts: no NaN of padding reaches a sum.
    both = [x.double().masked_fill(~live, 0.0) for x in (trained32, rolled32)]
    counts, sums = live.sum(1), (both[0] - both[1]).sum(1)
    log_ppl = [-x.sum(1) / counts for x in both]
    log_ppl_diff = log_ppl[0] - log_ppl[1]
    trained, rolled = (x[live] for x in both)
    log_ratio = trained - rolled
    ratio, p, q = log_ratio.exp(), trained.exp(), rolled.exp()
    probs_diff = (p - q).abs()
    return {
        "tokens": len(trained),
        "sequences": len(live),
        "differ": int(differing(trained32[live], rolled32[live]).sum()),
        "logp_diff_mean": log_ratio.abs().mean().item(),
        "logp_diff_max": log_ratio.abs().max().item(),
        "kl": (rolled - trained).mean().item(),
        "k3_kl": (log_ratio.expm1() - log_ratio).mean().item(),
        "mult_prob_error": log_ratio.abs().exp().mean().item(),
        "probs_diff_max": probs_diff.max().item(),
        "probs_diff_mean": probs_diff.mean().item(),
        "probs_diff_std": probs_diff.std(correction=1).item() if len(trained) > 1 else 0.0,
        "pearson": _pearson(p, q),
        "chi2_token": _mean_square_minus_1(log_ratio),
        "chi2_seq": _mean_square_minus_1(sums),
        "training_ppl": log_ppl[0].exp().mean().item(),
        "rollout_ppl": log_ppl[1].exp().mean().item(),
        "log_ppl_diff": log_ppl_diff.mean().item(),
        "ppl_ratio": log_ppl_diff.exp().mean().item(),
        "ratio_percentiles": {
            str(at): value
            for at, value in zip(PERCENTILES, _quantiles(ratio, PERCENTILES), strict=True)
        },
        "tokens_over": {str(c): (ratio > c).double().mean().item() for c in THRESHOLDS},
        "sequences_over": {str(c): (sums > math.log(c)).double().mean().item() for c in THRESHOLDS},
        "histogram": _histogram(log_ratio),
    }  # fmt: skip


def flat(several: Mapping[str, Any], prefix: str = "drift/") -> dict[str, float]:
    """Metrics as a logger of numbers takes them: `drift/k3_kl`, `drift/ratio_percentiles/99`. The histogram
    is left out, and so is what is not defined."""
    numbers: dict[str, float] = {}
    for name, value in several.items():
        if isinstance(value, Mapping) and name != "histogram":
            numbers |= {f"{prefix}{name}/{part}": each for part, each in value.items()}
        elif isinstance(value, int | float):
            numbers[prefix + name] = value
    return numbers


def _mean_square_minus_1(log_ratio: Tensor) -> float:
    limited = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(2 * limited).mean().item()


def _quantiles(x: Tensor, percentiles: Sequence[int]) -> list[float]:
    """With linear interpolation. torch.quantile has a limit on the number of elements."""
    ordered = x.sort().values
    at = torch.tensor(percentiles, dtype=torch.float64, device=x.device) / 100 * (len(x) - 1)
    low = at.floor().long()
    high = (low + 1).clamp(max=len(x) - 1)
    return torch.lerp(ordered[low], ordered[high], at - low).tolist()


def _pearson(p: Tensor, q: Tensor) -> float | None:
    """None where it is not defined: with fewer than two tokens, or without any spread. Equal numbers have a
    correlation of exactly 1."""
    if torch.equal(p, q) and len(p) > 1:
        return 1.0
    a, b = p - p.mean(), q - q.mean()
    norm = (a.norm() * b.norm()).item()
    return (a @ b).item() / norm if norm > 0 else None


def _histogram(log_ratio: Tensor) -> dict[str, int]:
    """{lower edge of |log r|: tokens}, by decades. Zeros are not in it; the first decade has everything
    smaller, the last everything larger."""
    size = log_ratio.abs()
    decade = size[size > 0].log10().floor().clamp(DECADES[0], DECADES[-1]).long() - DECADES[0]
    counts = torch.bincount(decade, minlength=len(DECADES)).tolist()
    return {f"1e{at}": count for at, count in zip(DECADES, counts, strict=True)}
