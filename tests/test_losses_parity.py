"""Holds `isobit.losses` to the losses of TRL and verl, which their own code computes (`trl_and_verl.py`), in
the environment that `make parity` makes: values, gradients, and what they report of clipping and KL."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit import losses
from parity_env import in_parity

ROOT = Path(__file__).parent.parent

TOLERANCE = 1e-9  # relative, in fp64
REPORTED = 1e-6  # what they report is a mean in fp32

# Four sequences, one of which no token of counts.
B, T, LENGTHS = 4, 6, (6, 4, 1, 0)
TOKENS = sum(LENGTHS)
MASK = (torch.arange(T) < torch.tensor(LENGTHS)[:, None]).long()


def inputs(*names: str) -> dict[str, Tensor]:
    """Ratios from 0.3 to 4.5, so that every bound is met by some token; none of verl's cuts at +-20 is."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    logp = draw(B, T) - 2
    drift = 0.4 * draw(B, T)
    drift[0, :3], drift[1, :3] = torch.tensor([-1.2, 1.5, 0.0]), torch.tensor([1.5, -1.2, 0.0])
    drift[2, 0] = 0.3  # and the ratio of this sequence, of one token, is beyond the bounds for sequences
    made = {
        "logp": logp,
        "entropy": draw(B, T).abs(),
        "old_logp": logp - drift,
        "ref_logp": logp + 0.5 * draw(B, T),
        "rollout_weights": draw(B, T).exp().clamp(max=2.0),
        "advantages": torch.tensor([1.0, -1.5, 0.8, 2.0], dtype=torch.float64),
        "num_items": torch.tensor(40),  # of a batch of which this is a part
    }
    return {name: made[name] for name in ("logp", "entropy", "advantages", *names)} | {"mask": MASK}


@dataclass
class Case:
    name: str
    framework: str
    options: dict[str, Any]
    loss: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    arguments: dict[str, Any]
    also: tuple[str, ...] = ("old_logp",)
    reported: dict[str, tuple[str, ...]] = field(default_factory=dict)  # theirs: our stats, over "tokens"

    def given(self) -> dict[str, Any]:
        """For the program of the other environment."""
        tensors = inputs(*self.also)
        if self.framework == "verl":  # it has a value for every token, and always an old policy
            tensors["advantages"] = tensors["advantages"][:, None].expand(B, T)
            tensors.setdefault("old_logp", tensors["logp"].clone())
        return {"framework": self.framework, "options": self.options, "inputs": tensors}

    def ours(self, **changed: Any) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Tensor]]:
        tensors = inputs(*self.also)
        tensors.pop("num_items", None)
        logp, entropy = (tensors.pop(name).requires_grad_() for name in ("logp", "entropy"))
        loss, stats = self.loss(logp, entropy, **tensors, **self.arguments | changed)
        loss.backward()
        return loss.detach(), logp.grad, entropy.grad, stats


CLIPS = {"clip_ratio/low_mean": ("clip_low",), "clip_ratio/high_mean": ("clip_high",)}
KL = {"kl": ("kl",)}


def trl(name: str, loss: Any, options: dict[str, Any], arguments: dict[str, Any], **more: Any) -> Case:
    return Case(f"TRL {name}", "trl", options, loss, arguments, **more)


def with_bonus(
    logp: Tensor, entropy: Tensor, *, coef: float, **given: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """TRL's bonus is a mean over tokens whatever the loss type: a loss of its own."""
    loss, stats = losses.grpo(logp, entropy, **given)
    bonus, _ = losses.entropy_bonus(logp, entropy, mask=given["mask"], normalizer=TOKENS, coef=coef)
    return loss + bonus, stats


OLD, REF = ("old_logp",), ("old_logp", "ref_logp")
BIASED = {"beta": 0.04, "use_bias_correction_kl": False}
SEQUENCE = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
TRL = [
    trl("grpo", losses.grpo, {"loss_type": "grpo"}, {"normalizer": B}, reported=CLIPS),
    trl("grpo on-policy", losses.grpo, {"loss_type": "grpo"}, {"normalizer": B}, also=()),
    trl("dapo on-policy", losses.dapo, {"loss_type": "dapo", "epsilon_high": 0.28},
        {"normalizer": 40}, also=("num_items",)),
    trl("dr_grpo on-policy", losses.dr_grpo, {"loss_type": "dr_grpo", "max_completion_length": 9},
        {"normalizer": B * 9}, also=()),
    trl("grpo, two steps of accumulation", losses.grpo,
        {"loss_type": "grpo", "accumulation": 2}, {"normalizer": 2 * B}),
    trl("grpo with KL", losses.grpo, {"loss_type": "grpo", **BIASED},
        {"normalizer": B, "beta": 0.04}, also=REF, reported=KL),
    trl("grpo with unbiased KL, as is TRL's default", losses.grpo, {"loss_type": "grpo", "beta": 0.04},
        {"normalizer": B, "beta": 0.04, "unbiased_kl": True}, also=REF, reported=KL),
    trl("grpo, two-sided", losses.grpo, {"loss_type": "grpo", "delta": 3.0, "epsilon_high": 0.28},
        {"normalizer": B, "dual_clip": 3.0, "clip_high": 0.28}, reported=CLIPS),
    trl("grpo with an entropy bonus", with_bonus, {"loss_type": "grpo", "entropy_coef": 0.01},
        {"normalizer": B, "coef": 0.01}),
    trl("dapo", losses.dapo, {"loss_type": "dapo", "epsilon_high": 0.28},
        {"normalizer": 40}, also=(*OLD, "num_items"), reported=CLIPS),
    trl("dapo with KL", losses.dapo, {"loss_type": "dapo", "epsilon_high": 0.28, **BIASED},
        {"normalizer": 40, "beta": 0.04}, also=(*REF, "num_items"), reported=KL),
    trl("dapo with rollout weights and KL", losses.dapo,
        {"loss_type": "dapo", "epsilon_high": 0.28, "use_vllm": True, **BIASED},
        {"normalizer": 40, "beta": 0.04}, also=(*REF, "rollout_weights", "num_items")),
    trl("dr_grpo", losses.dr_grpo, {"loss_type": "dr_grpo", "max_completion_length": 9},
        {"normalizer": B * 9}, reported=CLIPS),
    trl("dr_grpo with KL", losses.dr_grpo, {"loss_type": "dr_grpo", "max_completion_length": 9, **BIASED},
        {"normalizer": B * 9, "beta": 0.04}, also=REF, reported=KL),
    trl("gspo", losses.gspo, {**SEQUENCE, "epsilon": 0.05, "epsilon_high": 0.06},
        {"normalizer": B, "clip_low": 0.05, "clip_high": 0.06}),
    trl("gspo at the paper's bounds", losses.gspo, {**SEQUENCE, "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"normalizer": B}),
    trl("gspo with KL", losses.gspo, {**SEQUENCE, **BIASED},
        {"normalizer": B, "clip_low": 0.2, "clip_high": 0.2, "beta": 0.04}, also=REF, reported=KL),
    trl("gspo with unbiased KL and rollout weights", losses.gspo,
        {**SEQUENCE, "use_vllm": True, "beta": 0.04},
        {"normalizer": B, "clip_low": 0.2, "clip_high": 0.2, "beta": 0.04, "unbiased_kl": True},
        also=(*REF, "rollout_weights"), reported=KL),
    trl("cispo", losses.cispo, {"loss_type": "cispo", "epsilon_high": 5.0},
        {"normalizer": 40}, also=(*OLD, "num_items")),
    trl("cispo at a bound that is met", losses.cispo, {"loss_type": "cispo", "epsilon_high": 1.3, **BIASED},
        {"normalizer": 40, "clip_high": 0.3, "beta": 0.04}, also=(*REF, "num_items"), reported=KL),
]  # fmt: skip


def verl(
    name: str, loss: Any, options: dict[str, Any], arguments: dict[str, Any], dp_size: int = 1, **more: Any
) -> Case:
    """In a global batch of 40 tokens in 8 sequences."""
    batch = {"dp_size": dp_size, "batch_num_tokens": 40, "global_batch_size": 8}
    return Case(f"verl {name}", "verl", {"batch": batch, **options}, loss, arguments, **more)


VANILLA = {"loss_mode": "vanilla", "clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
WIDER = VANILLA | {"clip_ratio_high": 0.28}
NO_DUAL = {"clip_ratio_c": 100.0}  # beyond every ratio here; verl has no way to leave it out
MEANS, SUMS = {"loss_agg_mode": "seq-mean-token-mean"}, {"loss_agg_mode": "seq-mean-token-sum-norm"}
WITH_KL = {"use_kl_loss": True, "kl_loss_coef": 0.04}
ANY_CLIP = {"actor/pg_clipfrac": ("clip_low", "clip_high")}
ALL_CLIPS = ANY_CLIP | {"actor/pg_clipfrac_lower": ("clip_dual",)}
VERL = [
    verl("dual clip", losses.dual_clip_ppo, VANILLA, {"normalizer": 40}, reported=ALL_CLIPS),
    verl("dual clip on-policy", losses.dual_clip_ppo, VANILLA, {"normalizer": 40}, also=()),
    verl("grpo on-policy", losses.grpo, VANILLA | MEANS, {"normalizer": 8, "dual_clip": 3.0}, also=()),
    verl("dr_grpo on-policy", losses.dr_grpo, VANILLA | SUMS | {"loss_scale_factor": 9},
         {"normalizer": 8 * 9, "dual_clip": 3.0}, also=()),
    verl("dual clip on two ranks", losses.dual_clip_ppo, VANILLA, {"normalizer": 40 / 2}, dp_size=2),
    verl("dual clip with entropy", losses.dual_clip_ppo, VANILLA | {"entropy_coeff": 0.01},
         {"normalizer": 40, "entropy_coef": 0.01}),
    verl("dual clip with rollout weights and KL", losses.dual_clip_ppo, {**VANILLA, **WITH_KL},
         {"normalizer": 40, "beta": 0.04}, also=(*REF, "rollout_weights")),
    verl("dapo", losses.dapo, WIDER | NO_DUAL, {"normalizer": 40}, reported=ANY_CLIP),
    verl("grpo", losses.grpo, VANILLA | MEANS | NO_DUAL, {"normalizer": 8}, reported=ANY_CLIP),
    verl("grpo with dual clip, KL and entropy", losses.grpo,
         VANILLA | MEANS | WITH_KL | {"entropy_coeff": 0.01},
         {"normalizer": 8, "dual_clip": 3.0, "beta": 0.04, "entropy_coef": 0.01},
         also=REF, reported=ALL_CLIPS),
    verl("dr_grpo", losses.dr_grpo, VANILLA | SUMS | NO_DUAL | {"loss_scale_factor": 9},
         {"normalizer": 8 * 9}),
    verl("gspo", losses.gspo, VANILLA | MEANS | {"loss_mode": "gspo", "clip_ratio_low": 0.05},
         {"normalizer": 8, "clip_low": 0.05, "clip_high": 0.2}, reported=ANY_CLIP),
    verl("gspo with KL", losses.gspo, VANILLA | MEANS | WITH_KL | {"loss_mode": "gspo"},
         {"normalizer": 8, "clip_low": 0.2, "clip_high": 0.2, "beta": 0.04}, also=REF),
    verl("cispo", losses.cispo, WIDER | {"loss_mode": "cispo"},
         {"normalizer": 40, "clip_low": 0.2, "clip_high": 0.28}, reported=ANY_CLIP),
    *(verl(f"dual clip with {k}", losses.dual_clip_ppo, VANILLA | WITH_KL | {"kl_loss_type": k},
           {"normalizer": 40, "beta": 0.04, "kl_estimator": k}, also=REF) for k in ("k1", "k2", "k3")),
]  # fmt: skip

CASES = TRL + VERL
LEVELS = ("token", "sequence")


def weights_case(level: str) -> dict[str, Any]:
    given = inputs("old_logp")
    rollout = {"old_logp": given["logp"], "rollout_logp": given["old_logp"], "mask": MASK}
    options = {"rollout_is": level, "rollout_is_threshold": 2.0}
    return {"framework": "verl weights", "options": options, "inputs": rollout}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the frameworks compute, by the name of a case."""
    place = tmp_path_factory.mktemp("parity")
    torch.save([*(case.given() for case in CASES), *map(weights_case, LEVELS)], place / "cases")
    in_parity(ROOT / "tests" / "trl_and_verl.py", place / "cases", place / "found", path=())
    *found, versions = torch.load(place / "found")
    names = [case.name for case in CASES] + [f"weights {level}" for level in LEVELS]
    return dict(zip(names, found, strict=True)) | {"versions": versions}


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * 1e-3)  # gradients are some 0.1


def test_these_are_the_frameworks_that_are_named(theirs: dict[str, Any]) -> None:
    versions = theirs["versions"]
    assert versions["trl"].startswith("1.16.") and versions["verl"] == "0.9.1"
    assert versions["torch"] == torch.__version__  # the same sums on both sides


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_loss_and_gradients_match_the_frameworks(case: Case, theirs: dict[str, Any]) -> None:
    loss, dlogp, dentropy, stats = case.ours()
    found = theirs[case.name]
    assert abs(found["loss"]) > 1e-3 and found["dlogp"].abs().max() > 1e-3  # zeros would agree as well
    assert close(loss, found["loss"]) and close(dlogp, found["dlogp"])
    # Without a weight of the entropy it has no gradient, or one of zeros.
    assert close(*(torch.zeros_like(dlogp) if d is None else d for d in (dentropy, found["dentropy"])))
    assert ("entropy" in case.name) == (dentropy is not None)
    for name, ours in case.reported.items():
        fraction = sum(stats[key] for key in ours) / stats["tokens"]
        assert fraction.item() == pytest.approx(found["reported"][name], rel=REPORTED), name


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_another_normalizer_would_be_noticed(case: Case, theirs: dict[str, Any]) -> None:
    loss, dlogp, _, _ = case.ours(normalizer=case.arguments["normalizer"] * (1 + 1e-7))
    found = theirs[case.name]
    assert not close(loss, found["loss"]) and not close(dlogp, found["dlogp"])


def test_the_cases_meet_every_bound() -> None:
    """Or losses that clip otherwise would agree too."""
    stats = {case.name: case.ours()[3] for case in CASES}
    assert all(stats["verl dual clip"][key] > 0 for key in ("clip_low", "clip_high", "clip_dual"))
    for name in ("TRL gspo", "verl gspo"):
        assert 0 < stats[name]["clip_low"] + stats[name]["clip_high"] < TOKENS
    assert stats["TRL cispo at a bound that is met"]["clip_high"] > 0 and stats["verl cispo"]["clip_low"] > 0


# The terms of the three sequences are -1.0, 1.5 and -0.8 at every token.
PER_TOKEN, PER_SEQUENCE = -(6 * 1.0 - 4 * 1.5 + 1 * 0.8), -(1.0 - 1.5 + 0.8)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("TRL grpo on-policy", PER_SEQUENCE / 4),
        ("TRL dapo on-policy", PER_TOKEN / 40),
        ("TRL dr_grpo on-policy", PER_TOKEN / (4 * 9)),
        ("verl grpo on-policy", PER_SEQUENCE / 8),
        ("verl dual clip on-policy", PER_TOKEN / 40),
        ("verl dr_grpo on-policy", PER_TOKEN / (8 * 9)),
    ],
)
def test_on_policy_the_loss_is_a_number_that_the_normalizer_decides(
    name: str, expected: float, theirs: dict[str, Any]
) -> None:
    (case,) = (case for case in CASES if case.name == name)
    assert case.ours()[0].item() == pytest.approx(expected, rel=TOLERANCE)
    assert theirs[name]["loss"].item() == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("level", LEVELS)
def test_rollout_weights_match_the_frameworks(level: str, theirs: dict[str, Any]) -> None:
    given = weights_case(level)["inputs"]
    ours = losses.truncated_weights(**given, cap=2.0, level=level)
    assert close(ours, theirs[f"weights {level}"]["weights"])
    assert (ours == 2.0).any() and ((ours > 0) & (ours < 2.0)).any() and not ours[MASK == 0].any()
