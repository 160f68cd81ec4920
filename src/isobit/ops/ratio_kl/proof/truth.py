"""The truth of `ratio_kl`, and the sizes that rounding errors of its results are relative to."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from isobit.kernels.host import logits as stored
from isobit.kernels.host.tokens import live_rows
from isobit.ops.ratio_kl import reference
from isobit.spec.proof import Args

EPS = 2.0**-23


def formula(args: Args) -> tuple[Tensor, ...]:
    return judged(args, reference.formula(**{k: v for k, v in args.items() if k != "return_kl"}))


def judged(args: Args, outputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """All four outputs of a call; an empty tensor for a kl that was not requested."""
    given = [x for x in outputs if x is not None]
    if len(given) == 3:
        given.insert(1, given[0].reshape(-1)[:0])
    return tuple(given)


def scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """Largest intermediates, in fp64. A log-probability has the error of some roundings of itself and of a
    sum of V terms. Results that are computed from it inherit that error, times their derivative."""
    policy, ids, temperature = args["policy_logits"], args["token_ids"], args["temperature"]
    live = live_rows(ids, args["mask"], args["ignore_index"])
    tokens = (ids, args["mask"], args["ignore_index"], temperature)
    ratio, kl, logp, entropy = outputs
    log_v = math.log(policy.shape[-1]) + 4.0  # sums of V terms, and exp2/log2 with errors of some ulp
    off = logp.abs() + log_v
    # exp: its argument's error, that of the subtraction, and its own.
    off_ratio = torch.zeros_like(off)
    if args["old_logp"] is not None:
        off_ratio = off + (logp - torch.where(live, args["old_logp"], 0.0)).abs() + 2.0
    sizes = {"ratio": ratio * off_ratio, "logp": off, "entropy": entropy.abs() + 2 * log_v, "kl": kl}
    slope = off_slope = torch.zeros_like(off)  # derivative of kl by logp, and its error
    if args["ref_logits"] is not None or args["ref_logp"] is not None:
        ref, off_ref = args["ref_logp"], torch.zeros_like(off)
        if ref is None:
            ref = stored.formula(args["ref_logits"], *tokens)[0]
            off_ref = ref.abs() + log_v
        d = torch.where(live, ref, 0.0) - logp
        off_d = off + off_ref + d.abs()
        slope, off_slope = torch.expm1(d).abs(), torch.exp(d) * (off_d + 2.0)
        # The derivative is 0 at d = 0, so the second-order term remains.
        sizes["kl"] = slope * off_d + 4 * kl + EPS / 2 * torch.exp(d) * off_d**2
    if cotangents:
        g_ratio, g_kl, g_logp, g_entropy = (g.abs() for g in cotangents)
        if len(g_kl) != len(off):
            g_kl = torch.zeros_like(off)
        each = temperature if isinstance(temperature, Tensor) else torch.full_like(off, temperature)
        each = torch.where(live, each, 1.0)[..., None]
        z = torch.where(live[..., None], policy, 0.0) / each
        log_p = z.log_softmax(-1).clamp(min=-1000.0)
        total = (g_logp + g_ratio * ratio + g_kl * slope)[..., None]
        off_total = (g_ratio * ratio * off_ratio + g_kl * off_slope)[..., None] + 2 * total
        weight = total + g_entropy[..., None] * (log_p.abs() + entropy.abs()[..., None])
        fp32 = torch.finfo(torch.float32)
        p = log_p.exp()
        p_error = p * (log_p.abs() + log_v) + fp32.tiny / fp32.eps  # GPUs flush subnormals to 0
        token = ids.clamp(0, z.shape[-1] - 1).long()[..., None]
        at_token = torch.zeros_like(z).scatter_(-1, token, off_total)
        sizes["gradient:policy_logits"] = (p_error * weight + p * off_total + at_token) / each
    return sizes
