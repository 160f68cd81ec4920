"""Guards `isobit.losses`: values and gradients worked out by hand, and errors of wrong calls."""

import doctest
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from isobit import ContractError, losses

F64 = torch.float64
INF, NAN = math.inf, math.nan

TOKEN_LOSSES = [losses.dapo, losses.dr_grpo, losses.dual_clip_ppo, losses.cispo]
SEQUENCE_LOSSES = [losses.grpo, losses.gspo]
POLICY_LOSSES = TOKEN_LOSSES + SEQUENCE_LOSSES
each_policy_loss = pytest.mark.parametrize("loss", POLICY_LOSSES, ids=lambda f: f.__name__)


# By hand
#
# Two sequences of three tokens and of two. Ratios are P / OLD:
#
#     1.25  0.5  1       with an advantage of  2
#     0.5   4.5          with an advantage of -1
#
# Clipped to [0.8, 1.2], terms are -2.4 (clipped), -1, -2 and 0.8 (clipped), 4.5: they add up to -5.4 and 5.3.

P = [[0.5, 0.2, 0.3], [0.4, 0.9, 0.7]]
OLD = [[0.4, 0.4, 0.3], [0.8, 0.2, 0.1]]
MASK = [[1, 1, 1], [1, 1, 0]]
A = [2.0, -1.0]


def by_hand(loss: Callable[..., Any], **given: Any) -> tuple[float, list[list[float]], dict[str, float]]:
    """Loss, gradient and stats of the two sequences in fp64."""
    logp = torch.tensor(P, dtype=F64).log().requires_grad_()
    given = {"old_logp": torch.tensor(OLD, dtype=F64).log(), "advantages": torch.tensor(A)} | given
    value, stats = loss(logp, mask=torch.tensor(MASK), **given)
    value.backward()
    assert logp.grad is not None and not any(stat.requires_grad for stat in stats.values())
    return value.item(), logp.grad.tolist(), {name: stat.item() for name, stat in stats.items()}


def about(expected: Any) -> Any:
    if isinstance(expected, list):
        return [about(part) for part in expected]
    return pytest.approx(expected, rel=1e-12, abs=1e-15)


def about_stats(**expected: float) -> Any:
    return pytest.approx(expected, rel=1e-12)


def test_grpo() -> None:
    value, gradient, stats = by_hand(losses.grpo, normalizer=2)
    assert value == about((-5.4 / 3 + 5.3 / 2) / 2)
    assert gradient == about([[0, -1.0 / 6, -2.0 / 6], [0, 4.5 / 4, 0]])  # clipped terms have none
    assert stats == about_stats(clip_low=1, clip_high=1, ratio=7.75, tokens=5, policy_loss=value)


def test_dapo() -> None:
    value, gradient, stats = by_hand(losses.dapo, normalizer=5)
    assert value == about((-2.5 - 1 - 2 + 0.8 + 4.5) / 5)  # 1.25 is below 1.28
    assert gradient == about([[-2.5 / 5, -1.0 / 5, -2.0 / 5], [0, 4.5 / 5, 0]])
    assert stats == about_stats(clip_low=1, clip_high=0, ratio=7.75, tokens=5, policy_loss=value)


def test_dr_grpo() -> None:
    value, gradient, _ = by_hand(losses.dr_grpo, normalizer=2 * 4)
    assert value == about((-5.4 + 5.3) / 8)
    assert gradient == about([[0, -1.0 / 8, -2.0 / 8], [0, 4.5 / 8, 0]])


def test_dual_clip_ppo() -> None:
    value, gradient, stats = by_hand(losses.dual_clip_ppo, normalizer=5)
    assert value == about((-5.4 + 0.8 + 3.0) / 5)  # 4.5 is clipped to 3
    assert gradient == about([[0, -1.0 / 5, -2.0 / 5], [0, 0, 0]])
    assert stats == about_stats(clip_low=1, clip_high=1, clip_dual=1, ratio=7.75, tokens=5, policy_loss=value)


@pytest.mark.parametrize("loss", [losses.grpo, losses.dapo, losses.dr_grpo])
def test_the_second_bound_is_an_option_of_the_others(loss: Callable[..., Any]) -> None:
    value, gradient, stats = by_hand(loss, normalizer=1, dual_clip=4.0)
    free, _, _ = by_hand(loss, normalizer=1)
    weight = 1 / 2 if loss is losses.grpo else 1
    assert (
        free - value == about((4.5 - 4.0) * weight) and gradient[1] == [0, 0, 0] and stats["clip_dual"] == 1
    )


def test_gspo() -> None:
    # The sequences' ratios are (1.25 * 0.5 * 1)^(1/3) = 0.855 and (0.5 * 4.5)^(1/2) = 1.5.
    first, second = 0.625 ** (1 / 3), 1.5
    value, gradient, stats = by_hand(losses.gspo, normalizer=2, clip_low=0.2, clip_high=0.2)
    assert value == about((-2 * first + second) / 2)
    assert gradient == about([[-2 * first / 3 / 2] * 3, [second / 2 / 2] * 2 + [0]])
    ratios = 3 * first + 2 * second  # one a token
    assert stats == about_stats(clip_low=0, clip_high=0, ratio=ratios, tokens=5, policy_loss=value)
    other = {"advantages": torch.tensor([-2.0, 1.0]), "clip_low": 0.1, "clip_high": 0.1}
    value, gradient, stats = by_hand(losses.gspo, normalizer=2, **other)
    assert value == about((2 * 0.9 - 1.1) / 2) and gradient == [[0, 0, 0], [0, 0, 0]]
    assert (stats["clip_low"], stats["clip_high"]) == (3, 2)


def test_cispo() -> None:
    value, gradient, stats = by_hand(losses.cispo, normalizer=5, clip_low=0.4, clip_high=0.3)
    weights = [[1.25, 0.6, 1.0], [0.6, 1.3, 0]]  # of ratios 1.25, 0.5, 1, 0.5, 4.5
    first = sum(-w * 2.0 * math.log(p) for w, p in zip(weights[0], P[0], strict=True))
    second = sum(w * 1.0 * math.log(p) for w, p in zip(weights[1], P[1], strict=True))
    assert value == about((first + second) / 5)
    assert gradient == about([[-w * 2.0 / 5 for w in weights[0]], [w * 1.0 / 5 for w in weights[1]]])
    assert stats == about_stats(clip_low=2, clip_high=1, ratio=7.75, tokens=5, policy_loss=value)


@pytest.mark.parametrize("bounds", [{}, {"clip_low": 1.0, "clip_high": 4.0}])
def test_cispo_has_by_default_no_lower_bound_and_5_above(bounds: dict[str, float]) -> None:
    ratio = torch.tensor([1e-6, 0.5, 4.9, 50.0], dtype=F64)
    logp = ratio.log().requires_grad_()
    loss, _ = losses.cispo(logp, old_logp=0 * ratio, advantages=-torch.ones(4), normalizer=1, **bounds)
    loss.backward()
    assert logp.grad is not None and logp.grad.tolist() == about([1e-6, 0.5, 4.9, 5.0])


LOG2 = math.log(2)
# Where the reference has twice the probability, and half of it; then the gradients with respect to logp.
KL_BY_HAND = {
    "k1": ([-LOG2, LOG2], [1, 1]),
    "k2": ([LOG2**2 / 2, LOG2**2 / 2], [-LOG2, LOG2]),
    "k3": ([2 - 1 - LOG2, 0.5 - 1 + LOG2], [1 - 2, 1 - 0.5]),
}


@pytest.mark.parametrize("name", KL_BY_HAND)
def test_kl_estimators(name: str) -> None:
    logp = torch.tensor([0.1, 0.4], dtype=F64).log().requires_grad_()
    kl = getattr(losses, name)(logp, torch.tensor([0.2, 0.2], dtype=F64).log())
    kl.sum().backward()
    values, gradients = KL_BY_HAND[name]
    assert kl.tolist() == about(values) and logp.grad.tolist() == about(gradients)


def test_k3_keeps_its_digits_where_policies_are_close() -> None:
    d = 1e-4  # k3 is d^2 / 2 + d^3 / 6 there; exp(d) - 1 - d in fp32 has no digit of it
    logp = torch.tensor([-1.0])
    ref_logp = torch.tensor([-1.0 + d])
    given = (ref_logp - logp).double().item()
    assert losses.k3(logp, ref_logp).item() == pytest.approx(given**2 / 2 + given**3 / 6, rel=1e-3)
    naive = ((ref_logp - logp).exp() - 1 - (ref_logp - logp)).item()
    assert naive != pytest.approx(given**2 / 2, rel=0.5)  # so it is worth testing


@each_policy_loss
@pytest.mark.parametrize("name", KL_BY_HAND)
def test_beta_adds_the_kl_as_terms_are_added(loss: Callable[..., Any], name: str) -> None:
    ref_logp = (torch.tensor(P, dtype=F64) * 2).log()
    value, gradient, stats = by_hand(loss, normalizer=4, beta=0.1, ref_logp=ref_logp, kl_estimator=name)
    without, free, _ = by_hand(loss, normalizer=4)
    kl, slope = KL_BY_HAND[name][0][0], KL_BY_HAND[name][1][0]
    tokens = [1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2] if loss in SEQUENCE_LOSSES else [1.0] * 5
    assert value - without == about(0.1 * kl * sum(tokens) / 4)
    for there, here, weight in zip(flat(free), flat(gradient), tokens, strict=True):
        assert here - there == pytest.approx(0.1 * slope * weight / 4, abs=1e-12)
    assert stats["kl"] == about(5 * kl) and stats["policy_loss"] == about(without)


def flat(lines: list[list[float]]) -> list[float]:
    """The five live tokens."""
    return lines[0] + lines[1][:2]


def test_unbiased_kl_is_multiplied_by_the_ratio() -> None:
    ref_logp = (torch.tensor(P, dtype=F64) * 2).log()
    given = {"normalizer": 1, "advantages": torch.zeros(2), "beta": 1.0, "ref_logp": ref_logp}
    value, gradient, stats = by_hand(losses.dapo, unbiased_kl=True, **given)
    k3 = 1 - LOG2
    assert value == about(7.75 * k3) and stats["kl"] == about(7.75 * k3)
    # r (k3 + dk3) = r (1 - log 2 + 1 - 2) = -r log 2: the gradient of the KL
    assert flat(gradient) == about([-LOG2 * r for r in (1.25, 0.5, 1.0, 0.5, 4.5)])


@each_policy_loss
def test_entropy_coef_subtracts_entropies_as_terms_are_added(loss: Callable[..., Any]) -> None:
    entropy = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, NAN]], dtype=F64, requires_grad=True)
    value, _, stats = by_hand(loss, normalizer=4, entropy=entropy, entropy_coef=0.1)
    without, _, _ = by_hand(loss, normalizer=4)
    mean = loss in SEQUENCE_LOSSES
    assert value - without == about(-0.1 * ((0.6 / 3 + 0.9 / 2) if mean else 1.5) / 4)
    weights = [1 / 3] * 3 + [1 / 2] * 2 if mean else [1.0] * 5
    assert flat(entropy.grad.tolist()) == about([-0.1 * w / 4 for w in weights]) and entropy.grad[1, 2] == 0
    assert stats["entropy"] == about(1.5) and stats["policy_loss"] == about(without)


def test_entropy_bonus() -> None:
    entropy = torch.tensor([0.5, 1.0, NAN], dtype=F64, requires_grad=True)
    given = {"mask": torch.tensor([True, True, False]), "normalizer": 4, "coef": 0.01}
    loss, stats = losses.entropy_bonus(torch.zeros(3, dtype=F64), entropy, **given)
    loss.backward()
    assert loss.item() == about(-0.01 * 1.5 / 4) and entropy.grad.tolist() == about([-0.0025, -0.0025, 0])
    assert {name: stat.item() for name, stat in stats.items()} == {"entropy": 1.5, "tokens": 2}


def test_truncated_weights() -> None:
    old_logp = torch.tensor([[0.5, 0.1, 0.6, NAN], [0.2, 0.2, NAN, NAN]], dtype=F64).log()
    rollout_logp = torch.tensor([[0.4, 0.2, 0.2, 0.1], [0.4, 0.4, 0.1, 0.1]], dtype=F64).log()
    given = {"mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])}
    token = losses.truncated_weights(old_logp.requires_grad_(), rollout_logp, cap=2.0, **given)
    assert token.tolist() == about([[1.25, 0.5, 2.0, 0], [0.5, 0.5, 0, 0]])  # the third is 3
    assert not token.requires_grad
    sequence = losses.truncated_weights(old_logp, rollout_logp, cap=1.5, level="sequence", **given)
    assert sequence.tolist() == about([[1.5, 1.5, 1.5, 0], [0.25, 0.25, 0, 0]])  # 1.25 * 0.5 * 3 = 1.875


@pytest.mark.parametrize("weights", [[0.5, 2.0], [[0.5, 0.5, 0.5], [2.0, 2.0, NAN]]])
def test_rollout_weights_multiply_the_terms_of_the_policy_alone(weights: Any) -> None:
    ref_logp = (torch.tensor(P, dtype=F64) * 2).log()
    given = {"normalizer": 5, "beta": 0.1, "ref_logp": ref_logp}
    value, _, stats = by_hand(losses.dual_clip_ppo, rollout_weights=torch.tensor(weights), **given)
    policy = (0.5 * -5.4 + 2.0 * (0.8 + 3.0)) / 5
    assert stats["policy_loss"] == about(policy) and value == about(policy + 0.1 * 5 * (1 - LOG2) / 5)


@each_policy_loss
def test_without_an_old_policy_ratios_are_1(loss: Callable[..., Any]) -> None:
    value, gradient, stats = by_hand(loss, normalizer=1, old_logp=None)
    per_token = [-2.0, -2.0, -2.0, 1.0, 1.0]  # -A, the gradient of REINFORCE
    weights = [1 / 3] * 3 + [1 / 2] * 2 if loss in SEQUENCE_LOSSES else [1.0] * 5
    assert flat(gradient) == about([w * g for w, g in zip(weights, per_token, strict=True)])
    assert stats["ratio"] == 5 and stats["clip_low"] == stats["clip_high"] == 0
    if loss is not losses.cispo:
        assert value == about(sum(w * g for w, g in zip(weights, per_token, strict=True)))


# Errors


def test_signatures_are_one() -> None:
    for loss in [*POLICY_LOSSES, losses.entropy_bonus]:
        first, second, *others = inspect.signature(loss).parameters.values()
        assert (first.name, second.name, second.default) == ("logp", "entropy", None)
        assert all(p.kind == p.KEYWORD_ONLY for p in others)
        assert {p.name for p in others} >= {"normalizer", "mask"}
    shared = set.intersection(*({*inspect.signature(loss).parameters} for loss in POLICY_LOSSES))
    assert shared == {
        "logp", "entropy", "advantages", "normalizer", "old_logp", "mask", "clip_low", "clip_high",
        "rollout_weights", "beta", "ref_logp", "kl_estimator", "unbiased_kl", "entropy_coef",
        "sequence_ids",
    }  # fmt: skip


@pytest.mark.parametrize("name", losses.__all__)
def test_examples_run(name: str) -> None:
    function = getattr(losses, name)
    assert "Args:" in function.__doc__ and "Returns:" in function.__doc__ and "Example:" in function.__doc__
    (test,) = doctest.DocTestFinder(recurse=False).find(function, name)
    assert any(example.want for example in test.examples)
    output: list[str] = []
    assert doctest.DocTestRunner(verbose=False).run(test, out=output.append).failed == 0, "".join(output)


ROWS, THREE = torch.zeros(2, 3), torch.zeros(3)
FLAT = {"logp": THREE, "advantages": THREE}


@pytest.mark.parametrize(
    ("loss", "wrong", "told"),
    [
        (losses.dapo, {"advantages": THREE}, "advantages: [3] fp32): must be a tensor [2, 3] or [2], as the"),
        (
            losses.dapo,
            {"advantages": 1.0},
            "advantages: 1.0): must be a tensor [2, 3] or [2], as the rows are",
        ),
        (losses.dapo, {"old_logp": torch.zeros(2)}, "old_logp: [2] fp32): must be a tensor [2, 3], as the"),
        (losses.dapo, {"rollout_weights": torch.zeros(2, 1)}, "rollout_weights: [2, 1] fp32): must be"),
        (losses.dapo, {"beta": 0.1}, "ref_logp: None): must be a tensor [2, 3], as the rows are [2, 3]"),
        (losses.dapo, {"beta": torch.tensor(0.1)}, "beta: [] fp32): must be a number not below 0"),
        (losses.dapo, {"beta": -1.0}, "beta: -1.0): must be a number not below 0"),
        (losses.dapo, {"beta": 1.0, "kl_estimator": "k4"}, "kl_estimator: 'k4'): must be one of k1, k2, k3"),
        (losses.dapo, {"kl_estimator": "k4"}, "kl_estimator: 'k4'): must be one of k1, k2, k3"),
        (losses.dapo, {"beta": INF, "ref_logp": ROWS}, "beta: inf): must be finite"),
        (losses.dapo, {"beta": True, "ref_logp": ROWS}, "beta: True): must be a number not below 0"),
        (losses.dapo, {"entropy_coef": -INF, "entropy": ROWS}, "entropy_coef: -inf): must be finite"),
        (losses.dapo, {"entropy_coef": INF, "entropy": ROWS}, "entropy_coef: inf): must be finite"),
        (losses.dapo, {"normalizer": True}, "normalizer: True): must be a number not below 0"),
        (losses.dapo, {"normalizer": INF}, "normalizer: inf): must be finite"),
        (losses.dapo, {"clip_high": True}, "clip_high: True): must be a number not below 0"),
        (losses.dapo, {"entropy_coef": 0.1}, "entropy: None): must be a tensor [2, 3], as the rows are"),
        (losses.dapo, {"entropy_coef": NAN}, "entropy_coef: nan): must be a number"),
        (losses.dapo, {"mask": ROWS}, "mask: [2, 3] fp32): must be a bool or integer tensor [2, 3]"),
        (losses.dapo, {"mask": torch.ones(2).bool()}, "mask: [2] bool): must be a bool or integer tensor"),
        (losses.dapo, {"clip_low": 1.5}, "clip_low: 1.5): must be a number from 0 to 1"),
        (losses.dapo, {"clip_high": NAN}, "clip_high: nan): must be a number not below 0"),
        (losses.dapo, {"dual_clip": 0.5}, "dual_clip: 0.5): must be a number not below 1"),
        (losses.dapo, {"normalizer": -1}, "normalizer: -1): must be a number not below 0"),
        (
            losses.dapo,
            {"normalizer": THREE},
            "normalizer: [3] fp32): must be a number or a tensor without dim",
        ),
        (losses.cispo, {"clip_low": -0.1}, "clip_low: -0.1): must be a number from 0 to 1"),
        (losses.grpo, {"sequence_ids": ROWS}, "sequence_ids: [2, 3] fp32): must be an integer tensor [2, 3]"),
        (
            losses.dapo,
            {"logp": THREE, "advantages": torch.ones(2)},
            "advantages: [2] fp32): must be a tensor [3], or one per sequence with sequence_ids, as the rows",
        ),
        (
            losses.dapo,
            {"logp": THREE, "advantages": torch.ones(4), "sequence_ids": torch.zeros(3).long()},
            "advantages: [4] fp32): must be a tensor [3], or one per sequence with sequence_ids, as the rows",
        ),
        (
            losses.dapo,
            FLAT | {"old_logp": torch.ones(2), "sequence_ids": torch.zeros(3).long()},
            "old_logp: [2] fp32): must be a tensor [3], as the rows are [3]",
        ),
        (losses.grpo, FLAT, "logp: [3] fp32): whole sequences are needed: rows [B, T], or sequence_ids"),
        (losses.gspo, FLAT, "logp: [3] fp32): whole sequences are needed: rows [B, T], or sequence_ids"),
        (losses.grpo, {"logp": THREE.long()}, "logp: [3] int64): must be a floating point tensor [n] or"),
        (losses.grpo, {"logp": torch.tensor(0.0)}, "logp: [] fp32): must be a floating point tensor [n] or"),
        (
            losses.grpo,
            {"logp": torch.zeros(2, 2, 3)},
            "logp: [2, 2, 3] fp32): must be a floating point",
        ),
    ],
)
def test_wrong_calls(loss: Callable[..., Any], wrong: dict[str, Any], told: str) -> None:
    given: dict[str, Any] = {"logp": ROWS, "advantages": ROWS, "normalizer": 1}
    with pytest.raises(ContractError, match="^" + re.escape(f"{loss.__name__}({told}")):
        loss(**given | wrong)


def test_wrong_calls_of_the_others() -> None:
    with pytest.raises(ContractError, match=r"entropy_bonus\(entropy: None\): must be a tensor \[2, 3\]"):
        losses.entropy_bonus(ROWS, normalizer=1, coef=0.1)
    with pytest.raises(ContractError, match=r"entropy_bonus\(coef: inf\): must be finite"):
        losses.entropy_bonus(ROWS, ROWS, normalizer=1, coef=INF)
    with pytest.raises(ContractError, match=r"truncated_weights\(old_logp: \[1, 2, 3\] fp32\): must be a fl"):
        losses.truncated_weights(ROWS[None], ROWS[None])
    with pytest.raises(ContractError, match=r"truncated_weights\(level: 'row'\): must be 'token' or"):
        losses.truncated_weights(ROWS, ROWS, level="row")
    with pytest.raises(ContractError, match=r"truncated_weights\(cap: -1\): must be a number not below 0"):
        losses.truncated_weights(ROWS, ROWS, cap=-1)


@pytest.mark.parametrize(
    "name",
    [
        "old_logp", "advantages", "mask", "ref_logp", "entropy", "rollout_weights", "sequence_ids",
        "normalizer",
    ],
)  # fmt: skip
def test_an_input_on_another_device_is_named(name: str) -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    given: dict[str, Any] = {"advantages": ROWS, "normalizer": torch.tensor(2.0), "mask": ids, "beta": 0.1}
    given |= dict.fromkeys(("old_logp", "ref_logp", "entropy", "rollout_weights"), ROWS)
    given["sequence_ids"] = ids
    given[name] = given[name].to("meta")
    with pytest.raises(ContractError, match=rf"^grpo\({name}: .*\): is on meta but logp is on cpu$"):
        losses.grpo(ROWS, **given)


def test_a_normalizer_on_the_cpu_divides_rows_elsewhere() -> None:
    rows = ROWS.to("meta")
    assert losses.dapo(rows, advantages=rows, normalizer=torch.tensor(2.0))[0].device.type == "meta"


@pytest.mark.parametrize("estimator", [losses.k1, losses.k2, losses.k3], ids=lambda f: f.__name__)
def test_wrong_calls_of_kl_estimators(estimator: Callable[..., Any]) -> None:
    with pytest.raises(ContractError, match=r"^k\d\(ref_logp: \[3\] fp32\): is on meta but logp is on cpu$"):
        estimator(THREE, THREE.to("meta"))
    with pytest.raises(ContractError, match=r"^k\d\(ref_logp: None\): must be a tensor$"):
        estimator(THREE, None)


@pytest.mark.parametrize("normalizer", [0, torch.tensor(0), torch.tensor(0.0)])
def test_a_normalizer_of_0_divides_nothing_and_never_by_1(normalizer: Any) -> None:
    """It was taken for 1: the sum of all terms passed for the loss."""
    logp = torch.randn(2, 3).requires_grad_()
    given = {"advantages": torch.ones(2), "normalizer": normalizer}
    none, _ = losses.dapo(logp, mask=torch.zeros(2, 3, dtype=torch.bool), **given)
    (gradient,) = torch.autograd.grad(none, logp)
    assert none == 0 and not gradient.any()
    some, _ = losses.dapo(logp, mask=torch.eye(2, 3, dtype=torch.int64), **given)
    assert not some.isfinite()
