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
    computed on the device of the tensors, which is waited for twice. Without a single token there are no
    metrics: an empty dict."""
    live = mask.bool()
    at = live.flatten().nonzero().squeeze(1)
    if not len(at):
        return {}
    both32 = [x.float() for x in (training, rollout)]
    # Zeros where nothing counts: no NaN of padding reaches a sum.
    both = [x.double().masked_fill(~live, 0.0) for x in both32]
    counts, sums = live.sum(1), (both[0] - both[1]).sum(1)
    some = counts > 0
    log_ppl = [-x.sum(1) / counts.clamp(min=1) for x in both]
    log_ppl_diff = log_ppl[0] - log_ppl[1]
    trained, rolled = (x.flatten()[at] for x in both)
    log_ratio = trained - rolled
    ratio, p, q = log_ratio.exp(), trained.exp(), rolled.exp()
    probs_diff = (p - q).abs()

    def of_sequences(x: Tensor) -> Tensor:
        """The mean over the sequences that have a token."""
        return x.masked_fill(~some, 0.0).sum() / some.sum()

    of_device: dict[str, Tensor] = {
        "sequences": some.sum(),
        "differ": (differing(*both32) & live).sum(),
        "logp_diff_mean": log_ratio.abs().mean(),
        "logp_diff_max": log_ratio.abs().max(),
        "kl": (rolled - trained).mean(),
        "k3_kl": (log_ratio.expm1() - log_ratio).mean(),
        "mult_prob_error": log_ratio.abs().exp().mean(),
        "probs_diff_max": probs_diff.max(),
        "probs_diff_mean": probs_diff.mean(),
        "probs_diff_std": probs_diff.std(correction=1) if len(at) > 1 else log_ratio.new_zeros(()),
        "pearson": _pearson(p, q),
        "chi2_token": _square_minus_1(log_ratio).mean(),
        "chi2_seq": of_sequences(_square_minus_1(sums)),
        "training_ppl": of_sequences(log_ppl[0].exp()),
        "rollout_ppl": of_sequences(log_ppl[1].exp()),
        "log_ppl_diff": of_sequences(log_ppl_diff),
        "ppl_ratio": of_sequences(log_ppl_diff.exp()),
        "ratio_percentiles": _quantiles(ratio, PERCENTILES),
        "tokens_over": torch.stack([(ratio > c).double().mean() for c in THRESHOLDS]),
        "sequences_over": torch.stack([of_sequences((sums > math.log(c)).double()) for c in THRESHOLDS]),
        "histogram": _histogram(log_ratio),
    }  # fmt: skip
    numbers = _on_the_host(of_device)
    correlation = numbers["pearson"]
    return {"tokens": len(at)} | numbers | {
        "sequences": int(numbers["sequences"]),
        "differ": int(numbers["differ"]),
        "pearson": None if math.isnan(correlation) else correlation,
        "ratio_percentiles": dict(zip(map(str, PERCENTILES), numbers["ratio_percentiles"], strict=True)),
        "tokens_over": dict(zip(map(str, THRESHOLDS), numbers["tokens_over"], strict=True)),
        "sequences_over": dict(zip(map(str, THRESHOLDS), numbers["sequences_over"], strict=True)),
        "histogram": {
            f"1e{first}": int(n) for first, n in zip(DECADES, numbers["histogram"], strict=True)
        },
    }  # fmt: skip


def _on_the_host(several: Mapping[str, Tensor]) -> dict[str, Any]:
    """Numbers, and lists of them, in one copy from the device."""
    together = torch.cat([x.double().flatten() for x in several.values()]).tolist()
    numbers: dict[str, Any] = {}
    for name, x in several.items():
        own, together = together[: x.numel()], together[x.numel() :]
        numbers[name] = own if x.ndim else own[0]
    return numbers


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


def _square_minus_1(log_ratio: Tensor) -> Tensor:
    return torch.expm1(2 * log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def _quantiles(x: Tensor, percentiles: Sequence[int]) -> Tensor:
    """With linear interpolation. torch.quantile has a limit on the number of elements."""
    ordered, last = x.sort().values, len(x) - 1
    places = [at / 100 * last for at in percentiles]
    ends = torch.tensor([[int(at), min(int(at) + 1, last)] for at in places]).to(x.device)
    weights = torch.tensor([at - int(at) for at in places], dtype=x.dtype).to(x.device)
    low, high = ordered[ends].unbind(1)
    return torch.lerp(low, high, weights)


def _pearson(p: Tensor, q: Tensor) -> Tensor:
    """NaN where it is not defined: with fewer than two tokens, or without any spread. Equal numbers have a
    correlation of exactly 1."""
    a, b = p - p.mean(), q - q.mean()
    norm = a.norm() * b.norm()
    value = torch.where(norm > 0, (a * b).sum() / norm, math.nan)
    return torch.where((p == q).all(), 1.0, value) if len(p) > 1 else torch.full_like(value, math.nan)


def _histogram(log_ratio: Tensor) -> Tensor:
    """Tokens by the decade of |log r|. Zeros are not counted; the first decade has everything smaller, the
    last everything larger."""
    size = log_ratio.abs()
    decade = size.log10().floor().clamp(DECADES[0], DECADES[-1])
    edges = torch.arange(DECADES[0], DECADES[-1] + 1, dtype=decade.dtype).to(decade.device)
    return ((decade[:, None] == edges) & (size > 0)[:, None]).sum(0)
