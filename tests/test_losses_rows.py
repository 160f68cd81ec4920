"""Guards what `isobit.losses` does with rows: sums that add up over chunks, masked rows, packed
sequences, ratios that overflow, gradients of any value."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import isobit
from isobit import losses

F32, F64 = torch.float32, torch.float64
INF, NAN = math.inf, math.nan

TOKEN_LOSSES = [losses.dapo, losses.dr_grpo, losses.dual_clip_ppo, losses.cispo]
SEQUENCE_LOSSES = [losses.grpo, losses.gspo]
POLICY_LOSSES = TOKEN_LOSSES + SEQUENCE_LOSSES
each_policy_loss = pytest.mark.parametrize("loss", POLICY_LOSSES, ids=lambda f: f.__name__)
each_sequence_loss = pytest.mark.parametrize("loss", SEQUENCE_LOSSES, ids=lambda f: f.__name__)


# A batch of random numbers


def batch(B: int = 5, T: int = 7, dtype: torch.dtype = F64, seed: int = 0) -> dict[str, Tensor]:
    """Every input of a policy loss, ratios on both sides of every bound, and a sequence of which nothing
    counts."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=F64).to(dtype)

    logp = draw(B, T) - 2
    lengths = torch.randint(1, T + 1, (B,), generator=g)
    lengths[1] = 0
    return {
        "logp": logp,
        "entropy": draw(B, T).abs(),
        "old_logp": logp + draw(B, T),
        "ref_logp": logp + draw(B, T),
        "advantages": draw(B, T),
        "rollout_weights": draw(B, T).exp(),
        "mask": torch.arange(T) < lengths[:, None],
    }


EXTRAS = {"normalizer": 11.0, "beta": 0.1, "entropy_coef": 0.03}


def outcome(
    loss: Callable[..., Any], given: dict[str, Tensor], **more: Any
) -> tuple[Tensor, Tensor, Tensor, Any]:
    """Loss, dlogp, dentropy, stats."""
    given = dict(given)
    logp, entropy = (given.pop(name).detach().clone().requires_grad_() for name in ("logp", "entropy"))
    value, stats = loss(logp, entropy, **given, **EXTRAS | more)
    value.backward()
    assert value.shape == () and all(stat.shape == () for stat in stats.values())
    return value.detach(), logp.grad, entropy.grad, stats


@pytest.mark.parametrize("unbiased_kl", [False, True])
@pytest.mark.parametrize(
    "loss", [f for f in POLICY_LOSSES if f is not losses.cispo], ids=lambda f: f.__name__
)
def test_gradients_are_those_of_the_value(loss: Callable[..., Any], unbiased_kl: bool) -> None:
    given = batch(3, 4)
    leaves = [given.pop(name).requires_grad_() for name in ("logp", "entropy")]

    def value(logp: Tensor, entropy: Tensor) -> Tensor:
        return loss(logp, entropy, **given, **EXTRAS, unbiased_kl=unbiased_kl)[0]

    assert torch.autograd.gradcheck(value, leaves)


def test_the_gradient_of_cispo_is_that_of_fixed_weights() -> None:
    given = batch(3, 4)
    _, found, _, _ = outcome(losses.cispo, given, beta=0.0, clip_high=0.5)
    ratio = (given["logp"] - given["old_logp"]).exp().clamp(max=1.5)
    expected = -ratio * given["advantages"] * given["rollout_weights"] * given["mask"] / EXTRAS["normalizer"]
    torch.testing.assert_close(found, expected)


def packed(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The live rows, and two masked ones, one sequence after another; ids need not be consecutive."""
    some = given["mask"].clone()
    some[:2, -1] = True  # the second sequence has this row alone
    ids = (torch.tensor([7, 3, 4, 0, 9])[:, None]).expand_as(some)
    return {name: tensor[some] for name, tensor in {**given, "sequence_ids": ids}.items()}


@each_sequence_loss
def test_packed_sequences_have_the_loss_of_padded_ones(loss: Callable[..., Any]) -> None:
    given = batch()
    value, dlogp, dentropy, stats = outcome(loss, given)
    flat_value, flat_dlogp, flat_dentropy, flat_stats = outcome(loss, packed(given))
    torch.testing.assert_close(flat_value, value)
    padded = {"mask": given["mask"], "logp": dlogp, "entropy": dentropy}
    torch.testing.assert_close(flat_dlogp, packed(padded)["logp"])
    torch.testing.assert_close(flat_dentropy, packed(padded)["entropy"])
    torch.testing.assert_close(flat_stats, stats)


@each_policy_loss
def test_packed_sequences_take_one_advantage_each(loss: Callable[..., Any]) -> None:
    rows = packed(batch())
    each = {"advantages": torch.randn(5, dtype=F64), "rollout_weights": torch.rand(5, dtype=F64)}
    order = torch.tensor([7, 3, 4, 0, 9])
    at = (rows["sequence_ids"][:, None] == order).int().argmax(-1)
    repeated = {name: values[at] for name, values in each.items()}
    torch.testing.assert_close(
        outcome(loss, rows | each), outcome(loss, rows | repeated), rtol=0, atol=0, equal_nan=False
    )


@each_policy_loss
@pytest.mark.parametrize("count", [1, 4, 6])
def test_another_number_of_advantages_than_of_sequences_makes_the_loss_nan(
    loss: Callable[..., Any], count: int
) -> None:
    rows = packed(batch())
    value, *_ = outcome(loss, rows | {"advantages": torch.ones(count, dtype=F64)})
    assert value.isnan()


def test_packed_sequences_have_the_weights_of_padded_ones() -> None:
    given = {name: tensor for name, tensor in batch().items() if name in ("logp", "old_logp", "mask")}
    padded = losses.truncated_weights(given["logp"], given["old_logp"], mask=given["mask"], level="sequence")
    rows = packed({**given, "weights": padded})
    found = losses.truncated_weights(
        rows["logp"], rows["old_logp"], mask=rows["mask"], level="sequence", sequence_ids=rows["sequence_ids"]
    )
    torch.testing.assert_close(found, rows["weights"])


@each_policy_loss
def test_chunks_add_up(loss: Callable[..., Any]) -> None:
    given = batch()
    whole = outcome(loss, given)
    chunks = [{name: tensor[part] for name, tensor in given.items()} for part in (slice(0, 3), slice(3, 5))]
    assert_adds_up(loss, chunks, whole)
    if loss in TOKEN_LOSSES:  # also where a sequence is cut
        lines = {name: tensor.flatten() for name, tensor in given.items()}
        cut = [
            {name: tensor[part] for name, tensor in lines.items()} for part in (slice(0, 10), slice(10, 35))
        ]
        assert_adds_up(loss, cut, whole)
    else:
        rows = packed(given)
        end = (rows["sequence_ids"] == 4).nonzero().max() + 1
        parts = (slice(0, end), slice(end, None), slice(0, 0))  # and one without rows
        cut = [{name: tensor[part] for name, tensor in rows.items()} for part in parts]
        assert_adds_up(loss, cut, outcome(loss, rows))


def assert_adds_up(loss: Callable[..., Any], chunks: list[dict[str, Tensor]], whole: Any) -> None:
    value, dlogp, dentropy, stats = whole
    parts = [outcome(loss, chunk) for chunk in chunks]
    torch.testing.assert_close(sum(part[0] for part in parts), value)
    torch.testing.assert_close(torch.cat([part[1].flatten() for part in parts]), dlogp.flatten())
    torch.testing.assert_close(torch.cat([part[2].flatten() for part in parts]), dentropy.flatten())
    torch.testing.assert_close({name: sum(part[3][name] for part in parts) for name in stats}, stats)


@each_policy_loss
def test_one_advantage_per_sequence_applies_to_each_of_its_tokens(loss: Callable[..., Any]) -> None:
    given = batch()
    for name in ("advantages", "rollout_weights"):
        given[name] = given[name][:, :1].expand(-1, 7)
    whole = outcome(loss, given)
    short = outcome(loss, given | {name: given[name][:, 0] for name in ("advantages", "rollout_weights")})
    torch.testing.assert_close(short, whole, rtol=0, atol=0)


@each_policy_loss
def test_half_precision_is_widened(loss: Callable[..., Any]) -> None:
    given = batch(dtype=torch.bfloat16)
    value, dlogp, _, stats = outcome(loss, given)
    assert value.dtype == F32 and dlogp.dtype == torch.bfloat16
    assert {stat.dtype for stat in stats.values()} == {F32}
    wide = {name: tensor.float() if name != "mask" else tensor for name, tensor in given.items()}
    assert torch.equal(value, outcome(loss, wide)[0])
    torch.testing.assert_close(
        value.double(), outcome(loss, {n: t.double() if n != "mask" else t for n, t in wide.items()})[0],
        rtol=1e-5, atol=0,
    )  # fmt: skip


@each_policy_loss
def test_no_result_follows_the_default_dtype(loss: Callable[..., Any]) -> None:
    given = batch(dtype=F32)
    expected = outcome(loss, given)
    torch.set_default_dtype(F64)
    try:
        found = outcome(loss, given)
    finally:
        torch.set_default_dtype(F32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@each_policy_loss
def test_gradients_go_to_logp_and_entropy_alone(loss: Callable[..., Any]) -> None:
    given = batch()
    constants = [
        tensor.requires_grad_() for name, tensor in given.items() if name not in ("logp", "entropy", "mask")
    ]
    normalizer = torch.tensor(11.0, requires_grad=True)
    outcome(loss, given, normalizer=normalizer)
    assert len(constants) == 4 and all(tensor.grad is None for tensor in [*constants, normalizer])


# Masked rows


def naive(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """The mask after the exp, where it is too late."""
    return torch.where(mask, (logp - old_logp).exp(), 0.0).sum()


@each_policy_loss
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_what_masked_rows_hold_reaches_nothing(loss: Callable[..., Any], poison: float) -> None:
    given = batch()
    mask = given["mask"]
    poisoned = {n: t if n == "mask" else torch.where(mask, t, poison) for n, t in given.items()}
    expected, found = outcome(loss, given), outcome(loss, poisoned)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not found[1][~mask].any() and not found[2][~mask].any() and found[1][mask].all()
    logp = poisoned["logp"].clone().requires_grad_()
    naive(logp, given["old_logp"], mask).backward()
    assert logp.grad is not None and (poison == -INF or logp.grad.isnan().any())  # the poison would work


@each_policy_loss
@pytest.mark.parametrize("normalizer", [torch.tensor(0), torch.tensor(0.0), 0, 3.0])
def test_where_nothing_counts_the_loss_is_0(loss: Callable[..., Any], normalizer: Any) -> None:
    given = batch()
    given = {n: torch.zeros_like(t) if n == "mask" else torch.full_like(t, NAN) for n, t in given.items()}
    value, dlogp, dentropy, stats = outcome(loss, given, normalizer=normalizer)
    assert value == 0 and not dlogp.any() and not dentropy.any() and not any(stats.values())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_masks_may_be_bool_or_integer(dtype: torch.dtype) -> None:
    given = batch()
    expected = outcome(losses.grpo, given)
    found = outcome(
        losses.grpo, given | {"mask": given["mask"].to(dtype) * (1 if dtype == torch.bool else 3)}
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@each_policy_loss
def test_no_mask_is_a_mask_of_ones(loss: Callable[..., Any]) -> None:
    given = batch() | {"mask": torch.ones(5, 7, dtype=torch.bool)}
    expected = outcome(loss, given)
    del given["mask"]
    torch.testing.assert_close(outcome(loss, given), expected, rtol=0, atol=0)


# What overflows


@pytest.mark.parametrize(
    ("loss", "advantage", "expected"),
    [
        (losses.dapo, 1.0, -1.28),
        (losses.dual_clip_ppo, -1.0, 3.0),
        (losses.dapo, 0.0, 0.0),  # a group with equal rewards
        (losses.gspo, 1.0, -(1 + 4e-4)),
        (losses.cispo, 1.0, 5 * 10.0),  # its gradient goes through logp
    ],
)
def test_a_clipped_ratio_may_overflow(loss: Callable[..., Any], advantage: float, expected: float) -> None:
    logp = torch.tensor([[-10.0, 0.0]], requires_grad=True)
    old_logp, mask = torch.tensor([[-1000.0, 0.0]]), torch.tensor([[1, 0]])  # exp(990)
    advantages = torch.tensor([advantage])
    value, stats = loss(logp, old_logp=old_logp, advantages=advantages, mask=mask, normalizer=1)
    value.backward()
    assert value.item() == pytest.approx(expected) and logp.grad is not None
    assert logp.grad.tolist() == [[-5 if loss is losses.cispo else 0, 0]]
    assert stats["ratio"] == INF  # and not NaN: the other token has no part in it


@each_policy_loss
def test_without_an_upper_bound_an_advantage_of_0_still_has_no_term(loss: Callable[..., Any]) -> None:
    """It was 0 * inf: equal rewards and one token that overflows made the loss NaN."""
    logp = torch.tensor([[-10.0, -1.0], [-10.0, -2.0]], requires_grad=True)
    old_logp = torch.tensor([[-1000.0, -1001.0], [-10.0, -2.0]])  # exp(990), exp(1000); 1, 1
    given = {"old_logp": old_logp, "advantages": torch.tensor([0.0, 1.0]), "clip_high": INF, "normalizer": 1}
    value, stats = loss(logp, **given)
    value.backward()
    alone, _ = loss(logp[1:], **given | {"old_logp": old_logp[1:], "advantages": torch.ones(1)})
    assert value.isfinite() and value == alone and stats["policy_loss"] == alone
    assert logp.grad is not None and not logp.grad[0].any() and (logp.grad[1] < 0).all()
    nan, _ = loss(torch.full((1, 2), NAN), **given | {"old_logp": old_logp[:1], "advantages": torch.zeros(1)})
    assert nan.isnan()  # but what is not a number is not hidden


@each_policy_loss
@pytest.mark.parametrize("given", [None, -INF])
def test_the_ratio_of_a_token_of_probability_0_to_itself_is_1(
    loss: Callable[..., Any], given: float | None
) -> None:
    """Top-k filtering gives such tokens; -inf - -inf is NaN, and was the loss."""
    logp = torch.tensor([[-INF, -1.0]], requires_grad=True)
    old_logp = None if given is None else torch.tensor([[given, -1.0]])
    value, stats = loss(logp, old_logp=old_logp, advantages=torch.ones(1), normalizer=1)
    value.backward()
    each = 1 / 2 if loss in SEQUENCE_LOSSES else 1.0
    assert stats["ratio"] == 2 and logp.grad is not None and logp.grad.tolist() == [[-each, -each]]
    assert value == (INF if loss is losses.cispo else -2 * each)


def test_cispo_has_no_term_where_the_weight_is_0() -> None:
    logp = torch.tensor([-INF, -INF], requires_grad=True)  # a ratio of 0, and an advantage of 0
    old_logp, advantages = torch.tensor([-1.0, -INF]), torch.tensor([1.0, 0.0])
    value, _ = losses.cispo(logp, old_logp=old_logp, advantages=advantages, normalizer=1)
    value.backward()
    assert value == 0 and logp.grad is not None and logp.grad.tolist() == [0, 0]


def test_equal_probabilities_of_0_have_a_rollout_weight_of_1() -> None:
    old_logp, rollout_logp = torch.tensor([-INF, -INF, -1.0]), torch.tensor([-INF, -1.0, -INF])
    assert losses.truncated_weights(old_logp, rollout_logp).tolist() == [1.0, 0.0, 2.0]


@pytest.mark.parametrize(
    ("estimator", "expected", "gradient"),
    [
        (losses.k1, [-INF, INF, 0.0], [1, 1, 1]),
        (losses.k2, [INF, INF, 0.0], [-INF, INF, 0]),
        (losses.k3, [INF, INF, 0.0], [-INF, 1, 0]),
    ],
)
def test_kl_of_tokens_of_probability_0(
    estimator: Callable[..., Any], expected: list[float], gradient: list[float]
) -> None:
    """0 under the policy, under the reference, and under both. k3 was NaN in the first case."""
    logp, ref_logp = torch.tensor([-INF, -1.0, -INF]).requires_grad_(), torch.tensor([-1.0, -INF, -INF])
    kl = estimator(logp, ref_logp)
    kl.sum().backward()
    assert kl.tolist() == expected and logp.grad is not None and logp.grad.tolist() == gradient
    _, ours = isobit.ratio_kl(torch.tensor([[-INF, 0.0]]), torch.zeros(1, 2), torch.tensor([0]))
    assert estimator is not losses.k3 or ours.item() == expected[0]


@each_policy_loss
@pytest.mark.parametrize("ref_logp", [None, NAN, 1000.0])
def test_without_beta_there_is_no_kl(loss: Callable[..., Any], ref_logp: float | None) -> None:
    given = batch(dtype=F32)
    expected = outcome(loss, given, beta=0.0)
    given["ref_logp"] = None if ref_logp is None else torch.full_like(given["logp"], ref_logp)
    found = outcome(loss, given, beta=0.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found[0].isfinite() and "kl" not in found[3]


# Torch's machinery


def test_ratios_can_be_transformed_and_compiled() -> None:
    """Where both log-probabilities are -inf, the derivative is by a function of our own."""
    logp, old_logp = torch.tensor([-INF, -1.0]), torch.tensor([-INF, -1.5])

    def loss(logp: Tensor, old_logp: Tensor) -> Tensor:
        options = {"advantages": torch.ones(2), "normalizer": 1}
        return losses.dr_grpo(logp, old_logp=old_logp, clip_high=9.0, **options)[0]

    expected = torch.tensor([-1.0, -math.exp(0.5)])
    torch.testing.assert_close(torch.func.grad(loss)(logp, old_logp), expected)
    both = torch.vmap(torch.func.grad(loss))(torch.stack((logp, logp)), torch.stack((old_logp, old_logp)))
    torch.testing.assert_close(both, torch.stack((expected, expected)))
    _, tangent = torch.func.jvp(lambda x: loss(x, old_logp), (logp,), (torch.ones(2),))
    torch.testing.assert_close(tangent.float(), expected.sum())
    leaf = logp.clone().requires_grad_()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(leaf, old_logp)
    compiled.backward()
    torch.testing.assert_close(leaf.grad, expected)


@each_policy_loss
def test_nothing_is_read_back_from_the_device(loss: Callable[..., Any]) -> None:
    given = batch()
    given |= {"sequence_ids": torch.arange(35).view(5, 7)} if loss in SEQUENCE_LOSSES else {}
    with FakeTensorMode() as mode:  # tensors without values: reading one is an error
        fake = {name: mode.from_tensor(tensor) for name, tensor in given.items()}
        value, dlogp, _, _ = outcome(loss, fake, normalizer=fake["mask"].sum())
        assert value.shape == () and dlogp.shape == (5, 7)
        flat = {name: tensor.flatten() for name, tensor in fake.items()}
        flat |= {"advantages": torch.ones(5), "sequence_ids": torch.zeros(35, dtype=torch.int64)}
        assert outcome(loss, flat)[1].shape == (35,)
        with pytest.raises(DataDependentOutputException):
            bool(fake["mask"].any())
