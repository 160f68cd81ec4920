"""The truth of `grpo_loss`, and the sizes that rounding errors of its results are relative to."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.kernels.host.tokens import live_rows
from isobit.ops.grpo_loss import reference
from isobit.ops.grpo_loss.op import of_rows
from isobit.ops.ratio_kl import reference as rows
from isobit.ops.ratio_kl.proof import truth as rows_truth
from isobit.spec.proof import Args

FP32 = torch.finfo(torch.float32)

OUTPUTS = (
    "loss", "policy_loss", "kl", "clip_fraction_low", "clip_fraction_high", "mean_ratio", "active_tokens",
    "entropy",
)  # fmt: skip


def formula(args: Args) -> tuple[Tensor, ...]:
    loss, *stats = reference.formula(**args)
    stats[5] = stats[5].int()
    return (loss, *stats)


def judged(args: Args, outputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """All numbers in the order of `OUTPUTS`. Without a KL penalty kl is 0."""
    loss, stats = outputs
    return (loss, *(stats.get(name, torch.zeros_like(loss.detach())) for name in OUTPUTS[1:]))


def scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """Largest intermediates, in fp64. The values of `ratio_kl` per token have the errors allowed there. Sums
    have the sum of these errors, and are rounded once more."""
    live = live_rows(args["token_ids"], args["mask"], args["ignore_index"])
    names = ("policy_logits", "ref_logits", "token_ids", "old_logp", "mask", "ignore_index", "ref_logp")
    call = of_rows(args | {"return_entropy": True, "return_kept": True})
    of_tokens = {name: call[name] for name in (*names, "temperature")}
    of_ratio_kl = rows_truth.judged({}, rows.formula(**of_tokens))
    ratio = of_ratio_kl[0].detach()
    own = rows_truth.scale(of_tokens, of_ratio_kl, ())
    A = args["advantages"]
    if A is None:
        groups = {name: args[name] for name in ("rewards", "samples_per_prompt", "group_boundaries", "eps")}
        A = reference.advantages_formula(**groups)[0][:, None].expand(live.shape)
    A = torch.where(live, A, 0.0)
    if args["rollout_weights"] is not None:
        A = A * torch.where(live, args["rollout_weights"], 0.0)
    beta, tokens = args["beta"], live.sum().clamp(min=1)
    share = torch.ones_like(A) / (tokens if args["reduction"] == "token_mean" else 1)
    if args["reduction"] == "sequence_mean":
        share = share / live.sum(-1, keepdim=True).clamp(min=1) / live.any(-1).sum().clamp(min=1)
    if args["normalizer"] is not None:
        length = live.sum(-1, keepdim=True).clamp(min=1) if args["reduction"] == "sequence_mean" else 1
        share = torch.ones_like(A) / length / args["normalizer"]
    share = torch.where(live, share, 0.0)
    sizes = dict(zip(OUTPUTS, (x.double().abs() for x in outputs), strict=True))
    of_kl = torch.zeros_like(A) if beta == 0 else own["kl"]
    off_policy = (share * torch.where(A == 0, 0.0, A.abs() * own["ratio"])).sum()  # 0 * inf is 0 here
    sizes["policy_loss"] = sizes["policy_loss"] + off_policy
    sizes["kl"] = sizes["kl"] + (share * of_kl).sum()
    sizes["loss"] = sizes["policy_loss"] + beta * sizes["kl"]
    sizes["mean_ratio"] = sizes["mean_ratio"] + torch.where(live, own["ratio"], 0.0).sum() / tokens
    sizes["entropy"] = sizes["entropy"] + torch.where(live, own["entropy"], 0.0).sum() / tokens
    if cotangents:
        clipped = ((A < 0) & (ratio < 1 - args["clip_low"])) | ((A > 0) & (ratio > 1 + args["clip_high"]))
        dratio = (cotangents[0] * share * torch.where(clipped, 0.0, A)).abs()
        dkl = (cotangents[0] * share * beta).abs()
        if beta == 0:
            dkl, slope = torch.zeros_like(dratio[:0]), torch.zeros_like(dratio)
        else:
            slope = _slope(of_tokens, of_ratio_kl[2])
        # Three more roundings: of the slope, of the scale and of their product. As much as a second gradient.
        ratio = torch.where(A == 0, 1.0, ratio)
        again = dratio * ratio + (dkl * slope if beta else 0.0)
        given = (dratio, dkl, again, torch.zeros_like(again))
        sizes_there = rows_truth.scale(of_tokens, (ratio, *of_ratio_kl[1:]), given)["gradient:policy_logits"]
        # A subnormal result may be flushed to 0, however small its factors are.
        sizes["gradient:policy_logits"] = sizes_there + FP32.tiny / FP32.eps
    return sizes


def _slope(of_tokens: Args, logp: Tensor) -> Tensor:
    """The derivative of kl by logp."""
    ref = of_tokens["ref_logp"]
    live = live_rows(of_tokens["token_ids"], of_tokens["mask"], of_tokens["ignore_index"])
    if ref is None:
        alone = of_tokens | {"policy_logits": of_tokens["ref_logits"], "ref_logits": None, "old_logp": None}
        ref = rows.formula(**alone)[2]
    return torch.expm1(torch.where(live, ref, 0.0) - logp).abs()
