"""The sums of `grpo_loss` and `group_advantages` in their exact order: numpy's fp64, one addition at a time.
It shares no code with the kernels."""

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from isobit.frame.op import OPS
from isobit.kernels.host.tokens import live_rows
from isobit.ops.grpo_loss.op import group_advantages
from isobit.ops.grpo_loss.proof.truth import OUTPUTS
from isobit.ops.ratio_kl.op import ratio_kl
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args, Sample
from isobit.spec.trial import Trial

REWARDS, TOKENS, CHUNK, SEQUENCES = 128, 512, 4096, 128


def in_lanes(numbers: np.ndarray, lanes: int) -> np.float64:
    """Lane j adds numbers j, j + lanes, ... one after another; then the lanes are added by a tree of
    neighbours."""
    total = np.zeros(lanes, numbers.dtype)
    for first in range(0, len(numbers), lanes):
        part = numbers[first : first + lanes]
        total[: len(part)] += part
    while len(total) > 1:
        total = total[0::2] + total[1::2]
    return total[0]


def of_sequence(terms: np.ndarray) -> np.float64:
    total = terms.dtype.type(0)
    for first in range(0, len(terms), CHUNK):
        total += in_lanes(terms[first : first + CHUNK], TOKENS)
    return total


# Advantages


def advantages(args: Args) -> Tensor:
    """Of rewards on the CPU, in the dtype of the result."""
    rewards = args["rewards"].cpu()
    r, n = rewards.double().numpy(), args["samples_per_prompt"]
    bounds = list(range(0, len(r) + 1, n)) if n else args["group_boundaries"].tolist()
    result = np.zeros(len(r))
    for first, end in pairwise(bounds):
        for unit in (1.0, 2.0**-600):  # the second one where the first overflows
            result[first:end], overflows = _group(r[first:end] * unit, args, unit)
            if not overflows:
                break
    return torch.from_numpy(result).to(torch.promote_types(rewards.dtype, torch.float32))


def _group(r: np.ndarray, args: Args, unit: float) -> tuple[np.ndarray, bool]:
    """(advantages of a group of rewards in this unit, whether a sum overflows). NaN affects no other
    group."""
    with np.errstate(invalid="ignore", over="ignore"):
        group = r - r[0]
        mean = in_lanes(group, REWARDS) / np.float64(len(group))
        from_mean, divisor = group - mean, np.float64(unit)
        if args.get("scale", True):
            std = np.sqrt(in_lanes(from_mean * from_mean, REWARDS) / np.float64(len(group)))
            divisor = max(std, args["eps"] * unit)
        return from_mean / divisor, not (np.isfinite(mean) and np.isfinite(divisor))


def exact_advantages(args: Args, cotangents: object) -> dict[str, Sample]:
    return {"advantages": ((slice(None),), advantages(args))}


# The loss


def losses(args: Args, ratio: Tensor, kl: Tensor | None, A: Tensor, dtype: type = np.float64) -> list[float]:
    """loss, policy_loss, kl and mean_ratio from the values per token, added in this dtype."""
    live = live_rows(args["token_ids"], args["mask"], args["ignore_index"]).cpu().numpy()
    r, A64 = ratio.cpu().double().numpy(), A.cpu().double().numpy()
    low, high = 1 - args["clip_low"], 1 + args["clip_high"]
    clipped = np.where((A64 > 0) & (r > high), high, np.where((A64 < 0) & (r < low), low, r))
    with np.errstate(invalid="ignore"):
        product = -(clipped * A64)
    term = np.where((A64 == 0) & np.isposinf(r), 0.0, product)  # and not 0 * inf
    if args["rollout_weights"] is not None:
        term = term * args["rollout_weights"].cpu().double().numpy()
    of_kl = np.zeros_like(term) if kl is None else kl.cpu().double().numpy()
    length = live.sum(1)
    sums = []
    for each in (term, of_kl, r):
        each = np.where(live, each, 0.0).astype(dtype)
        sums.append(np.array([of_sequence(line) for line in each]))
    policy, penalty, ratios = sums
    divisor = max(int(length.sum()), 1) if args["reduction"] == "token_mean" else 1
    if args["reduction"] == "sequence_mean":
        policy, penalty = policy / np.maximum(length, 1), penalty / np.maximum(length, 1)
        divisor = max(int((length > 0).sum()), 1)
    divisor = np.float64(divisor if args["normalizer"] is None else float(args["normalizer"]))
    total, total_kl = in_lanes(policy, SEQUENCES), in_lanes(penalty, SEQUENCES)
    result = ((total + np.float64(args["beta"]) * total_kl) / divisor, total / divisor, total_kl / divisor)
    return [float(x) for x in (*result, in_lanes(ratios, SEQUENCES) / np.float64(max(int(length.sum()), 1)))]


def as_ratio_kl(trial: Trial) -> list[OutputCheck]:
    """The loss has exactly the bits that follow from ratio and kl of `ratio_kl` on the same backend, added in
    the documented order. Control: the same in fp32."""
    args = trial.args()
    names = ("old_logp", "mask", "ignore_index", "temperature")
    call = {name: args[name] for name in names} | {"return_kl": args["beta"] > 0, "backend": trial.backend}
    reference = (args["ref_logits"], args["ref_logp"]) if args["beta"] > 0 else (None, None)
    tokens = ratio_kl(args["policy_logits"], reference[0], args["token_ids"], ref_logp=reference[1], **call)
    ratio, kl = tokens if isinstance(tokens, tuple) else (tokens, None)
    A = args["advantages"]
    if A is None:
        groups = {name: args[name] for name in ("samples_per_prompt", "group_boundaries", "eps")}
        known = {backend.name for backend in OPS["group_advantages"].backends}
        own = group_advantages(
            args["rewards"], **groups, backend=trial.backend if trial.backend in known else None
        )
        A = own[:, None].expand(ratio.shape)
    outputs = trial.forward(args)
    which = [OUTPUTS.index(name) for name in ("loss", "policy_loss", "kl", "mean_ratio")]
    ours = [outputs[i].cpu() for i in which]

    def modelled(dtype: type) -> list[Tensor]:
        return [torch.tensor(x, dtype=torch.float32) for x in losses(args, ratio, kl, A, dtype)]

    checks = [
        same_bits(f"{i}:{OUTPUTS[i]}", one, expected, "in the order of docs/numerics.md")
        for i, one, expected in zip(which, ours, modelled(np.float64), strict=True)
    ]
    assert all(math.isfinite(float(x)) for x in ours)
    return [*checks, trial.control("terms added in fp32", ours, modelled(np.float32))]
