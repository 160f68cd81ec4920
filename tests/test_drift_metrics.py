"""The metrics of `isobit.drift` are those of verl, TRL and NeMo-RL: each is computed here once more, as these
libraries define it, on padded tensors with a mask."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isobit.drift import metrics
from isobit.drift.metrics import THRESHOLDS, batch_metrics

LENGTHS = (9, 4, 1, 14)


def both(spread: float, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    training = [-5 * torch.rand(n, generator=generator) for n in LENGTHS]
    return training, [p + spread * torch.randn(len(p), generator=generator) for p in training]


def padded(rows: list[Tensor]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0.0).double()


def theirs(training: list[Tensor], rollout: list[Tensor]) -> dict[str, float]:
    """By the definitions of the three libraries, with padding and a mask."""
    p, g = padded(training), padded(rollout)
    mask = torch.zeros_like(p)
    for row, n in enumerate(map(len, training)):
        mask[row, :n] = 1

    def mean(x: Tensor) -> float:
        return float((x * mask).sum() / mask.sum())

    per_sequence = [(x * mask).sum(1) / mask.sum(1) for x in (p, g)]
    rho = (p - g).clamp(-20, 20).exp()
    sums = ((p - g) * mask).sum(1).clamp(-20, 20)
    live = mask.bool()
    diff = (p.exp() - g.exp()).abs()[live]
    return {
        # verl, rollout_corr/*; k3_kl is also NeMo-RL's gen_kl_error
        "kl": mean(g - p),
        "k3_kl": mean((p - g).exp() - (p - g) - 1),
        "training_ppl": float((-per_sequence[0]).exp().mean()),
        "rollout_ppl": float((-per_sequence[1]).exp().mean()),
        "log_ppl_diff": float((per_sequence[1] - per_sequence[0]).mean()),
        "ppl_ratio": float((per_sequence[1] - per_sequence[0]).exp().mean()),
        "chi2_token": mean(rho**2) - 1,
        "chi2_seq": float((2 * sums).exp().mean()) - 1,
        # verl, training/rollout_probs_diff_* and rollout_actor_probs_pearson_corr
        "probs_diff_max": float(diff.max()),
        "probs_diff_mean": float(diff.mean()),
        "probs_diff_std": float(diff.std()),
        "pearson": float(torch.corrcoef(torch.stack((p.exp()[live], g.exp()[live])))[0, 1]),
        # TRL, sampling/sampling_logp_difference/*
        "logp_diff_mean": float((p - g)[live].abs().mean()),
        "logp_diff_max": float((p - g)[live].abs().max()),
        # NeMo-RL, token_mult_prob_error
        "mult_prob_error": mean((p - g).abs().exp()),
    }


@pytest.mark.parametrize("spread", [1e-6, 0.01, 1.0, 8.0])
def test_metrics_are_those_of_the_trainers(spread: float) -> None:
    training, rollout = both(spread)
    ours, expected = metrics(training, rollout), theirs(training, rollout)
    for name, value in expected.items():
        # Where they subtract numbers near 1, they lose digits that are not lost here.
        assert math.isclose(ours[name], value, rel_tol=1e-9, abs_tol=1e-12), name
    assert ours["tokens"] == sum(LENGTHS) and ours["sequences"] == len(LENGTHS)


def test_ratios_percentiles_and_thresholds() -> None:
    training, rollout = both(1.0)
    found: dict[str, Any] = metrics(training, rollout)
    p, g = torch.cat(training).double(), torch.cat(rollout).double()
    ratio = (p - g).exp()
    for at, value in found["ratio_percentiles"].items():
        assert math.isclose(value, ratio.quantile(int(at) / 100).item(), rel_tol=1e-12), at
    products = torch.stack([x.prod() for x in ratio.split(LENGTHS)])
    for c in THRESHOLDS:
        assert found["tokens_over"][str(c)] == (ratio > c).double().mean().item() > 0
        assert found["sequences_over"][str(c)] == (products > c).double().mean().item()
    sizes = (p - g).abs()
    assert sum(found["histogram"].values()) == int((sizes > 0).sum())
    assert found["histogram"]["1e-1"] == int(((sizes >= 0.1) & (sizes < 1)).sum()) > 0


def test_equal_log_probabilities_are_exactly_zero_apart() -> None:
    training, _ = both(0.0)
    found: dict[str, Any] = metrics(training, [x.clone() for x in training])
    zeros = ("differ", "kl", "k3_kl", "probs_diff_max", "chi2_token", "chi2_seq", "log_ppl_diff")
    assert all(found[name] == 0 for name in zeros)
    assert found["pearson"] == found["ppl_ratio"] == found["mult_prob_error"] == 1
    assert set(found["ratio_percentiles"].values()) == {1.0} and not sum(found["histogram"].values())


def test_one_bit_of_one_token_is_seen() -> None:
    training, _ = both(0.0)
    rollout = [x.clone() for x in training]
    rollout[3][5] = torch.nextafter(rollout[3][5], torch.tensor(0.0))
    found = metrics(training, rollout)
    assert found["differ"] == 1 and 0 < found["k3_kl"] < 1e-12 and found["logp_diff_max"] > 0


def test_few_tokens_have_no_correlation() -> None:
    found = metrics([torch.tensor([-1.0]), torch.zeros(0)], [torch.tensor([-2.0]), torch.zeros(0)])
    assert found["pearson"] is None and found["probs_diff_std"] == 0 and found["sequences"] == 1


def test_a_trainer_waits_for_its_device_twice() -> None:
    """For the number of tokens, and for all metrics together: more than 20 one by one took 4 ms on a GPU."""
    waits: list[str] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket in (aten._local_scalar_dense, aten.nonzero, aten.equal, aten.bincount):
                waits.append(str(func))
            return func(*args, **(kwargs or {}))

    aten = torch.ops.aten
    training, rollout = (padded(rows).float() for rows in both(0.1))
    mask = torch.arange(training.shape[1]) < torch.tensor(LENGTHS)[:, None]
    with Watching():
        found = batch_metrics(training, rollout, mask)
    assert waits == ["aten.nonzero.default"]  # the copy of all metrics is the other
    assert found["tokens"] == sum(LENGTHS)
