"""Guards `grpo_loss`: losses and gradients worked out by hand, what may not reach them, and wrong calls."""

import contextlib
import io
import math
import runpy
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit import ContractError, explain, group_advantages, grpo_loss, logp, losses
from isobit.frame.op import OPS
from isobit.ops.grpo_loss import reference

F32, F64, INF, NAN = torch.float32, torch.float64, float("inf"), float("nan")
REDUCTIONS = ("token_mean", "sequence_mean", "sum")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# By hand: two tokens in the vocabulary, so that the log-probability of the first is -log(1 + exp(-x)) where
# its logit is x and the other's is 0.


def logits_of(x: tuple[tuple[float, ...], ...]) -> Tensor:
    first = torch.tensor(x, dtype=F64)
    return torch.stack((first, torch.zeros_like(first)), -1)


def logp_of(x: float) -> float:
    return -math.log1p(math.exp(-x))


class Hand:
    """Three sequences of up to two tokens; the last token of the second is masked. In scalar Python."""

    x, ref = ((0.3, -0.2), (1.0, 9.0), (-0.5, 0.4)), ((0.1, 0.2), (0.0, -7.0), (0.5, 0.3))
    # Ratios of 1.65 and 0.67 are beyond the clip, and so are 1.49 and 0.55.
    log_ratio = ((0.05, 0.5), (-0.4, 0.0), (0.4, -0.6))
    A, weights = (2.0, -1.5, -0.5), ((1.0, 0.5), (0.25, 3.0), (1.5, 2.0))
    live = ((1, 1), (1, 0), (1, 1))
    low, high, beta = 0.2, 0.3, 0.05

    def tokens(self) -> Iterator[tuple[int, int]]:
        return ((b, t) for b in range(3) for t in range(2) if self.live[b][t])

    def clipped(self, b: int, t: int) -> bool:
        ratio = math.exp(self.log_ratio[b][t])
        return ratio > 1 + self.high if self.A[b] > 0 else ratio < 1 - self.low

    def surrogate(self, b: int, t: int) -> float:
        ratio, A = math.exp(self.log_ratio[b][t]), self.A[b]
        inside = min(max(ratio, 1 - self.low), 1 + self.high)
        return -min(ratio * A, inside * A) * self.weights[b][t]

    def kl(self, b: int, t: int) -> float:
        d = logp_of(self.ref[b][t]) - logp_of(self.x[b][t])
        return math.exp(d) - d - 1

    def share(self, b: int, reduction: str) -> float:
        """Of a token in the loss."""
        return {"sum": 1.0, "token_mean": 1 / 5, "sequence_mean": 1 / sum(self.live[b]) / 3}[reduction]

    def loss(self, reduction: str) -> float:
        terms = ((self.surrogate(*at) + self.beta * self.kl(*at), at[0]) for at in self.tokens())
        return sum(term * self.share(b, reduction) for term, b in terms)

    def slope(self, b: int, t: int, reduction: str) -> float:
        """Of the loss in the log-probability of a token."""
        if not self.live[b][t]:
            return 0.0
        ratio = math.exp(self.log_ratio[b][t])
        policy = 0.0 if self.clipped(b, t) else -ratio * self.A[b] * self.weights[b][t]
        d = logp_of(self.ref[b][t]) - logp_of(self.x[b][t])
        return (policy + self.beta * (1 - math.exp(d))) * self.share(b, reduction)

    def args(self) -> dict[str, Any]:
        lines = zip(self.x, self.log_ratio, strict=True)
        old = [[logp_of(x) - r for x, r in zip(*line, strict=True)] for line in lines]
        args: dict[str, Any] = {"ref_logits": logits_of(self.ref), "token_ids": torch.zeros(3, 2).long()}
        args |= {"old_logp": torch.tensor(old, dtype=F64), "advantages": torch.tensor(self.A, dtype=F64)}
        args |= {"mask": torch.tensor(self.live), "rollout_weights": torch.tensor(self.weights)}
        return args | {"clip_low": self.low, "clip_high": self.high, "beta": self.beta}


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_and_gradient_by_hand(reduction: str) -> None:
    hand = Hand()
    assert {hand.clipped(*at) for at in hand.tokens()} == {True, False}
    z = logits_of(hand.x).requires_grad_()
    loss, _ = grpo_loss(z, **hand.args(), reduction=reduction)
    assert loss.item() == pytest.approx(hand.loss(reduction), rel=1e-13)
    loss.backward()
    for b in range(3):
        for t in range(2):
            p = 1 / (1 + math.exp(-hand.x[b][t]))  # dlogp/dx = 1 - p
            expected = hand.slope(b, t, reduction) * (1 - p)
            assert z.grad[b, t].tolist() == pytest.approx([expected, -expected], rel=1e-12, abs=1e-18)


def test_stats_by_hand() -> None:
    hand = Hand()
    loss, stats = grpo_loss(logits_of(hand.x).requires_grad_(), **hand.args(), return_entropy=True)
    tokens = list(hand.tokens())
    entropy = 0.0
    for b, t in tokens:
        p = 1 / (1 + math.exp(-hand.x[b][t]))
        entropy -= (p * math.log(p) + (1 - p) * math.log(1 - p)) / 5
    expected = {
        "policy_loss": sum(hand.surrogate(*at) for at in tokens) / 5,
        "kl": sum(hand.kl(*at) for at in tokens) / 5,
        "clip_fraction_low": 2 / 5,  # of the second sequence, and the last token
        "clip_fraction_high": 1 / 5,
        "mean_ratio": sum(math.exp(hand.log_ratio[b][t]) for b, t in tokens) / 5,
        "entropy": entropy,
        "active_tokens": 5,
    }
    assert {name: float(x) for name, x in stats.items()} == pytest.approx(expected, rel=1e-12)
    assert loss.requires_grad and not any(x.requires_grad for x in stats.values())
    assert all(x.ndim == 0 for x in stats.values()) and stats["active_tokens"].dtype == torch.int32
    assert loss.item() == pytest.approx(float(stats["policy_loss"] + hand.beta * stats["kl"]), rel=1e-13)


def test_stats_that_were_not_requested_are_absent() -> None:
    _, stats = grpo_loss(torch.zeros(2, 3, 4), None, torch.zeros(2, 3).long(), advantages=torch.ones(2))
    expected = ["policy_loss", "clip_fraction_low", "clip_fraction_high", "mean_ratio", "active_tokens"]
    assert sorted(stats) == sorted(expected)


# Random batches


def batch(B: int = 4, T: int = 5, V: int = 7, dtype: torch.dtype = F64) -> dict[str, Any]:
    gen = generator()
    z, ref = (torch.randn(B, T, V, generator=gen, dtype=F64).to(dtype) for _ in range(2))
    ids = torch.randint(0, V, (B, T), generator=gen)
    wide = torch.promote_types(dtype, F32)
    old = logp(z, ids) + 0.3 * torch.randn(B, T, generator=gen).to(wide)
    mask = torch.rand(B, T, generator=gen) < 0.7
    return {"policy_logits": z, "ref_logits": ref, "token_ids": ids, "old_logp": old, "mask": mask}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_reference_passes_gradcheck(reduction: str, beta: float) -> None:
    args = batch(3, 2, 4) | {"rewards": torch.randn(3, generator=generator(1)), "samples_per_prompt": 3}
    z = args.pop("policy_logits").requires_grad_()

    def loss(z: Tensor) -> Tensor:
        return grpo_loss(z, **args, reduction=reduction, beta=beta)[0]

    assert torch.autograd.gradcheck(loss, z)


@pytest.mark.parametrize("groups", [{"samples_per_prompt": 2}, {"group_boundaries": [0, 1, 4]}])
def test_rewards_are_advantages_of_groups(groups: dict[str, Any]) -> None:
    args, rewards = batch(), torch.randn(4, generator=generator(2))
    by_rewards, stats = grpo_loss(**args, rewards=rewards, **groups, beta=0.1, eps=0.9)
    own = group_advantages(rewards, **groups, eps=0.9)
    for advantages in (own, own[:, None].expand(4, 5), own[:, None].repeat(1, 5)):
        found, others = grpo_loss(**args, advantages=advantages, beta=0.1)
        assert torch.equal(found, by_rewards) and all(torch.equal(others[k], stats[k]) for k in stats)


def test_advantages_of_tokens_are_their_own() -> None:
    args, each = batch(), torch.randn(4, 5, dtype=F64, generator=generator(3))
    whole, _ = grpo_loss(**args, advantages=each, reduction="sum")
    parts = []
    for t in range(5):
        only = args["mask"].clone()
        only[:, torch.arange(5) != t] = False
        parts.append(grpo_loss(**args | {"mask": only}, advantages=each[:, t], reduction="sum")[0])
    torch.testing.assert_close(whole, sum(parts), rtol=1e-12, atol=0)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_micro_batches_add_up_to_the_batch(reduction: str, as_tensor: bool) -> None:
    """With the normalizer of the whole batch, their losses and gradients do."""
    args = batch() | {"advantages": torch.randn(4, generator=generator(4)), "beta": 0.1}
    live = args["mask"]
    count = {"token_mean": live.sum(), "sequence_mean": live.any(-1).sum(), "sum": torch.tensor(1)}[reduction]
    normalizer = count if as_tensor else float(count)
    z = args["policy_logits"].clone().requires_grad_()
    whole, _ = grpo_loss(**args | {"policy_logits": z}, reduction=reduction)
    (gradient,) = torch.autograd.grad(whole, z)
    parts, gradients = [], []
    for rows in (slice(0, 1), slice(1, 4)):
        part = {name: x[rows] if isinstance(x, Tensor) else x for name, x in args.items()}
        z = part["policy_logits"].clone().requires_grad_()
        loss, _ = grpo_loss(**part | {"policy_logits": z}, reduction=reduction, normalizer=normalizer)
        parts.append(loss.detach())
        gradients.append(torch.autograd.grad(loss, z)[0])
    torch.testing.assert_close(sum(parts), whole.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.cat(gradients), gradient, rtol=1e-12, atol=1e-15)


def test_rollout_weights_leave_the_penalty_alone() -> None:
    args = batch() | {"advantages": torch.randn(4, generator=generator(5)), "beta": 0.1}
    none, twice = torch.zeros(4, 5), torch.full((4, 5), 2.0)
    plain, stats = grpo_loss(**args)
    doubled, of_doubled = grpo_loss(**args, rollout_weights=twice)
    alone, of_alone = grpo_loss(**args, rollout_weights=none)
    torch.testing.assert_close(of_doubled["policy_loss"], 2 * stats["policy_loss"])
    assert of_alone["policy_loss"] == 0 and of_alone["kl"] == stats["kl"] == of_doubled["kl"]
    torch.testing.assert_close(alone, 0.1 * stats["kl"])
    torch.testing.assert_close(doubled - plain, stats["policy_loss"])


def test_the_gradient_is_scaled_by_the_upstream_gradient() -> None:
    args = batch(dtype=F32) | {"advantages": torch.randn(4, generator=generator(6))}
    found = []
    for factor in (1.0, -0.25):
        z = args["policy_logits"].clone().requires_grad_()
        (grpo_loss(**args | {"policy_logits": z})[0] * factor).backward()
        found.append(z.grad)
    assert torch.equal(found[1], -0.25 * found[0])


@pytest.mark.parametrize(("reduction", "loss"), [("token_mean", losses.dapo), ("sequence_mean", losses.grpo)])
def test_it_is_the_loss_of_plain_log_probabilities(reduction: str, loss: Any) -> None:
    """That of `isobit.losses`, which is held to the losses of TRL and verl."""
    args = batch() | {"advantages": torch.tensor([1.0, -2.0, 0.5, -1.0], dtype=F64), "beta": 0.1}
    args |= {"clip_low": 0.1, "clip_high": 0.12, "rollout_weights": torch.rand(4, 5, generator=generator(9))}
    live = args["mask"]
    count = live.sum() if reduction == "token_mean" else live.any(-1).sum()
    z = args["policy_logits"].requires_grad_()
    ours, stats = grpo_loss(**args, reduction=reduction, return_entropy=True)
    names = ("old_logp", "advantages", "mask", "clip_low", "clip_high", "beta", "rollout_weights")
    own, entropy = logp(z, args["token_ids"], mask=live, return_entropy=True)
    ref = logp(args["ref_logits"], args["token_ids"], mask=live)
    given = {name: args[name] for name in names}
    theirs, sums = loss(own, entropy, **given, ref_logp=ref, normalizer=count)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    gradients = [torch.autograd.grad(found, z, retain_graph=True)[0] for found in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-15)
    torch.testing.assert_close(stats["policy_loss"], sums["policy_loss"], rtol=1e-12, atol=0)
    means = {"clip_fraction_low": "clip_low", "clip_fraction_high": "clip_high", "mean_ratio": "ratio"}
    for mean, total in {**means, "entropy": "entropy"}.items():
        torch.testing.assert_close(stats[mean], (sums[total] / live.sum()).double(), rtol=1e-12, atol=0)
    assert stats["clip_fraction_low"] > 0 and stats["clip_fraction_high"] > 0
    assert stats["active_tokens"] == sums["tokens"]


# What may not reach the loss


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("normalizer", [None, 3.0, torch.tensor(0)])
def test_where_nothing_counts_loss_and_gradient_are_zero(reduction: str, normalizer: Any) -> None:
    args = batch() | {"mask": torch.zeros(4, 5).int(), "advantages": torch.full((4,), NAN), "beta": 0.1}
    for name in ("policy_logits", "ref_logits", "old_logp"):
        args[name] = torch.full_like(args[name], NAN)
    z = args.pop("policy_logits").requires_grad_()
    loss, stats = grpo_loss(z, **args, reduction=reduction, normalizer=normalizer, return_entropy=True)
    loss.backward()
    assert loss == 0 and not z.grad.any() and not any(x.any() for x in stats.values())


def test_without_a_penalty_no_reference_is_read() -> None:
    args = batch() | {"advantages": torch.randn(4, generator=generator(7))}
    results = []
    overflowing = torch.zeros_like(args["policy_logits"])
    overflowing[..., 0], overflowing[..., 1] = 1e6, -1e6  # a KL of exp(10^6), if it were computed
    for ref in (None, overflowing, torch.full_like(overflowing, NAN)):
        z = args["policy_logits"].clone().requires_grad_()
        loss, stats = grpo_loss(**args | {"policy_logits": z, "ref_logits": ref}, beta=0.0)
        (gradient,) = torch.autograd.grad(loss, z)
        assert "kl" not in stats and gradient.isfinite().all() and gradient.any()
        results.append((loss, gradient))
    assert all(torch.equal(loss, results[0][0]) and torch.equal(g, results[0][1]) for loss, g in results)


def test_a_ratio_that_overflows_is_clipped_with_its_gradient() -> None:
    """With a positive advantage it is the bound, with none it is nothing, and neither has a gradient."""
    z, ids = torch.zeros(3, 2, 4, requires_grad=True), torch.zeros(3, 2).long()
    old = torch.full((3, 2), -1e4)
    old[2] = math.log(0.25)
    A = torch.tensor([2.0, 0.0, 1.0])
    loss, stats = grpo_loss(z, None, ids, old_logp=old, advantages=A, reduction="sum")
    loss.backward()
    assert loss.item() == pytest.approx(-2 * 2 * 1.2 - 2.0, rel=1e-6) and stats["mean_ratio"] == INF
    assert not z.grad[:2].any() and z.grad[2].isfinite().all() and z.grad[2].any()


@pytest.mark.parametrize("formula", [False, True])
def test_without_an_upper_bound_an_advantage_of_0_still_has_no_term(formula: bool) -> None:
    """It was 0 * inf. The truth of the laws overflows as well, if the old policy gives probability 0."""
    z = torch.zeros(2, 2, 4, dtype=F64, requires_grad=True)
    old = torch.tensor([[-math.inf, -1e4], [-1.0, -1.0]], dtype=F64)
    options = {"old_logp": old, "clip_high": math.inf, "reduction": "sum"}
    advantages, ids = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.zeros(2, 2, dtype=torch.int64)
    if formula:
        loss, *_ = reference.formula(z, None, ids, advantages=advantages, **options)
    else:
        loss, stats = grpo_loss(z, None, ids, advantages=advantages, **options)
        assert stats["mean_ratio"] == math.inf and stats["policy_loss"] == loss
    loss.backward()
    assert loss.item() == pytest.approx(-2 * math.exp(math.log(0.25) + 1))
    assert z.grad is not None and not z.grad[0].any() and z.grad.isfinite().all() and z.grad[1].any()


def test_rewards_that_are_not_finite_are_reported_for_live_sequences() -> None:
    nan = float("nan")
    args = {"rewards": torch.tensor([1.0, 0.0, nan, 1.0]), "samples_per_prompt": 2, "validate": True}
    z, ids = torch.zeros(4, 2, 3), torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(
        ContractError, match=r"^grpo_loss\(rewards: .*\[2\] is nan.* group 1, sequences 2 to 3$"
    ):
        grpo_loss(z, None, ids, **args)
    mask = torch.tensor([1, 1, 0, 0])[:, None].expand(4, 2)
    assert grpo_loss(z, None, ids, mask=mask, **args)[0] == 0


def test_an_unclipped_ratio_that_overflows_is_visible_in_the_loss() -> None:
    z, ids = torch.zeros(1, 1, 4), torch.zeros(1, 1).long()
    loss, _ = grpo_loss(z, None, ids, old_logp=torch.full((1, 1), -1e4), advantages=-torch.ones(1))
    assert loss == INF


def test_an_invalid_token_id_is_an_error_or_nan_in_its_own_row() -> None:
    args = batch() | {"advantages": torch.ones(4), "reduction": "sum", "mask": None}
    good = args["policy_logits"].clone().requires_grad_()
    (expected,) = torch.autograd.grad(grpo_loss(**args | {"policy_logits": good})[0], good)
    args["token_ids"][1, 2] = 99
    with pytest.raises(ContractError, match=r"^grpo_loss\(token_ids: \[4, 5\] int64\): id 99 at \[1, 2\]"):
        grpo_loss(**args)
    z = args["policy_logits"].clone().requires_grad_()
    loss, _ = grpo_loss(**args | {"policy_logits": z}, validate=False)
    (found,) = torch.autograd.grad(loss, z)
    others = torch.ones(4, 5, dtype=torch.bool)
    others[1, 2] = False
    assert loss.isnan() and found[1, 2].isnan().all() and torch.equal(found[others], expected[others])


def test_padding_changes_no_bit() -> None:
    """Behind sequences, and as sequences of its own."""
    args = batch(dtype=F32) | {"advantages": torch.randn(4, generator=generator(8)), "beta": 0.1}
    wide: dict[str, Any] = {}
    for name, x in args.items():
        if isinstance(x, Tensor):
            shape = (6, 9, *x.shape[2:]) if x.ndim > 1 else (6,)
            fill = NAN if x.is_floating_point() else -100 if name == "token_ids" else 0
            wide[name] = x.new_full(shape, fill)
            wide[name][tuple(slice(0, n) for n in x.shape[:2])] = x
    for reduction in REDUCTIONS:
        found, padded = (grpo_loss(**a, beta=0.1, reduction=reduction) for a in (_without(args), wide))
        assert torch.equal(found[0], padded[0])
        assert all(torch.equal(found[1][name], padded[1][name]) for name in found[1])


def _without(args: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in args.items() if name != "beta"}


#: What would wait for a GPU to read what a tensor holds.
READS = ("item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy")


@pytest.mark.parametrize("validate", [False, True])
def test_nothing_is_read_unless_it_is_to_be_validated(
    validate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = batch() | {"rewards": torch.randn(4), "samples_per_prompt": 2, "normalizer": torch.tensor(5)}
    z, read = args.pop("policy_logits").requires_grad_(), set()

    def noticed(self: Tensor, name: str, own: Any, *rest: Any) -> Any:
        read.add(name)
        return own(self, *rest)

    for name in READS:
        monkeypatch.setattr(Tensor, name, partialmethod(noticed, name, getattr(Tensor, name)))
    grpo_loss(z, **args, beta=0.1, validate=validate)[0].backward()
    monkeypatch.undo()
    assert bool(read) is validate, read


# Wrong calls


@pytest.mark.parametrize(
    ("arg", "changes"),
    [
        ("rewards", {}),
        ("advantages", {"advantages": torch.ones(4), "rewards": torch.ones(4), "samples_per_prompt": 2}),
        ("advantages", {"advantages": torch.ones(3)}),
        ("advantages", {"advantages": torch.ones(4, 4)}),
        ("advantages", {"advantages": torch.ones(4, 5, 1)}),
        ("advantages", {"advantages": torch.ones(4).int()}),
        ("samples_per_prompt", {"rewards": torch.ones(4)}),
        ("samples_per_prompt", {"rewards": torch.ones(4), "samples_per_prompt": 3}),
        ("samples_per_prompt", {"advantages": torch.ones(4), "samples_per_prompt": 2}),
        ("group_boundaries", {"advantages": torch.ones(4), "group_boundaries": torch.tensor([0, 4])}),
        ("group_boundaries", {"advantages": torch.ones(4), "group_boundaries": [0, 4]}),
        ("group_boundaries", {"rewards": torch.ones(4), "samples_per_prompt": 2, "group_boundaries": [0, 4]}),
        ("group_boundaries", {"rewards": torch.ones(4), "group_boundaries": [0, 3]}),
        ("group_boundaries", {"rewards": torch.ones(4), "group_boundaries": torch.tensor([0, 4, 4])}),
        ("ref_logits", {"advantages": torch.ones(4), "beta": 0.1, "ref_logits": None}),
        ("ref_logp", {"advantages": torch.ones(4), "beta": 0.1, "ref_logp": torch.zeros(4, 5)}),
        ("ref_logp", {"advantages": torch.ones(4), "ref_logp": torch.zeros(4, 5)}),
        ("beta", {"advantages": torch.ones(4), "beta": -0.1}),
        ("clip_low", {"advantages": torch.ones(4), "clip_low": 1.1}),
        ("clip_high", {"advantages": torch.ones(4), "clip_high": -0.1}),
        ("reduction", {"advantages": torch.ones(4), "reduction": "mean"}),
        ("normalizer", {"advantages": torch.ones(4), "normalizer": 0}),
        ("normalizer", {"advantages": torch.ones(4), "normalizer": torch.tensor(-1.0)}),
        ("normalizer", {"advantages": torch.ones(4), "normalizer": torch.ones(1)}),
        ("mask", {"advantages": torch.ones(4), "mask": torch.ones(4, 5)}),
        ("old_logp", {"advantages": torch.ones(4), "old_logp": torch.zeros(4, 5, dtype=torch.bfloat16)}),
        ("rollout_weights", {"advantages": torch.ones(4), "rollout_weights": torch.ones(4)}),
        ("advantages", {"advantages": torch.ones(4, requires_grad=True)}),
        ("temperature", {"advantages": torch.ones(4), "temperature": 0.0}),
    ],
)
def test_a_wrong_call_names_the_argument(arg: str, changes: dict[str, Any]) -> None:
    args = batch(dtype=F32) | changes
    args["policy_logits"].requires_grad_()
    with pytest.raises(ContractError, match=rf"^grpo_loss\({arg}: "):
        grpo_loss(**args)


@pytest.mark.parametrize(("changes", "message"), [
    ({"advantages": torch.ones(4), "group_boundaries": [0, 4]}, r"group_boundaries: \[2\] int64\): is for"),
    ({"group_boundaries": (0, 4)}, r"rewards: None\): is required unless advantages are given"),
    ({"rewards": torch.ones(4, 1), "group_boundaries": [0, 4]}, r"rewards: \[4, 1\] fp32\): needs 1 dim"),
])  # fmt: skip
def test_a_list_of_boundaries_is_not_blamed_for_other_mistakes(changes: Any, message: str) -> None:
    with pytest.raises(ContractError, match=rf"^grpo_loss\({message}"):
        grpo_loss(**batch(dtype=F32) | changes)


def test_the_number_0_is_no_normalizer() -> None:
    """A tensor that contains 0 is one if no token counts."""
    masked = {"advantages": torch.ones(4), "mask": torch.zeros(4, 5, dtype=torch.bool)}
    with pytest.raises(ContractError, match=r"^grpo_loss\(normalizer: 0.*must be a positive number"):
        grpo_loss(**batch(dtype=F32) | masked, normalizer=0)
    assert grpo_loss(**batch(dtype=F32) | masked, normalizer=torch.tensor(0))[0] == 0


def test_an_unknown_reduction_lists_the_known() -> None:
    with pytest.raises(ContractError, match="known: token_mean, sequence_mean, sum"):
        grpo_loss(**batch(), advantages=torch.ones(4), reduction="mean")


def test_explain_takes_what_the_function_takes() -> None:
    args = batch()
    groups = {"rewards": torch.ones(4), "group_boundaries": [0, 1, 4]}
    for given in ({"advantages": torch.ones(4)}, {"advantages": torch.ones(4, 5)}, groups):
        found = explain("grpo_loss", **args, **given)
        assert found.backend == "reference"
        assert list(found.reasons) == [b.name for b in OPS["ratio_kl"].backends]


def test_every_backend_of_ratio_kl_is_one_here() -> None:
    for name in ("", "_bwd"):
        ours, theirs = OPS[f"grpo_loss{name}"].backends, OPS[f"ratio_kl{name}"].backends
        assert {(b.name, b.numerics) for b in ours} == {(b.name, b.numerics) for b in theirs}


def test_groups_by_a_list_can_be_compiled() -> None:
    args = batch(dtype=F32) | {"rewards": torch.randn(4), "group_boundaries": [0, 1, 4]}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(args: dict[str, Any]) -> Tensor:
        return grpo_loss(**args)[0]

    assert torch.equal(step(args), grpo_loss(**args)[0])
    torch._dynamo.reset()


# The example


def test_the_example_learns() -> None:
    scope = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "grpo_step.py"))
    with contextlib.redirect_stdout(io.StringIO()):
        assert scope["main"](steps=25) > 0.5  # a tenth, to begin with
