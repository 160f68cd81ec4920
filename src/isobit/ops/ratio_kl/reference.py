"""`ratio_kl` in plain PyTorch: the formula that is the truth, and the backend that runs anywhere.

`formula` defines the op. It is differentiable, computes in fp64 for fp64 logits and in fp32 for all others,
and needs a few [N, V] temporaries. `ratio_kl` and `ratio_kl_bwd` are the backend: the same numbers, for a
limited number of rows at a time, with an explicit gradient.
"""

import math
from typing import Any

import torch
from torch import Tensor

from isobit.kernels.host import logits as stored
from isobit.kernels.host import logprob
from isobit.kernels.host.difference import difference
from isobit.kernels.host.k3 import k3
from isobit.kernels.host.tokens import live_rows


def formula(
    policy_logits: Tensor,
    ref_logits: Tensor | None,
    token_ids: Tensor,
    old_logp: Tensor | None = None,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    ref_logp: Tensor | None = None,
    temperature: float | Tensor = 1.0,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(ratio, kl, logp, entropy) by definition; no kl without a reference. Masked rows have ratio 1 and
    otherwise 0, whatever their values."""
    live = live_rows(token_ids, mask, ignore_index)
    tokens = (token_ids, mask, ignore_index, temperature)
    logp, entropy, _ = stored.formula(policy_logits, *tokens)
    old_logp = logp.detach() if old_logp is None else torch.where(live, old_logp, 0.0)
    ratio = torch.exp(difference(logp, old_logp))
    if ref_logits is not None:
        ref_logp = stored.formula(ref_logits.detach(), *tokens)[0].to(logp.dtype)
    if ref_logp is None:
        return ratio, None, logp, entropy
    d = difference(torch.where(live, ref_logp, 0.0), logp)
    return ratio, torch.expm1(d) - torch.where(d == math.inf, 0.0, d), logp, entropy


def ratio_kl(**args: Any) -> tuple[Tensor | None, ...]:
    """Forward. Returns (ratio, kl, logp, entropy, stats [2, *] = (m, s), slopes [2, *]: derivatives of ratio
    and kl by logp); None for outputs that were not requested."""
    lead, (z, rows) = args["token_ids"].shape, _by_rows(args["policy_logits"], args)
    results = stored.results(z, rows, args["return_entropy"], stored.wide(z))
    logp, entropy, _, m, s = results.reshape(5, *lead)
    live = rows.live.reshape(lead)
    old_logp, ref_logp = args["old_logp"], args["ref_logp"]
    old_logp = logp if old_logp is None else torch.where(live, old_logp, 0.0).to(logp)
    ratio = torch.exp(difference(logp, old_logp))
    kl = slope = torch.zeros_like(logp)
    if args["return_kl"]:
        if args["ref_logits"] is not None:
            z, rows = _by_rows(args["ref_logits"], args)
            ref_logp = stored.results(z, rows, False, stored.wide(z))[0].reshape(lead)
        d = difference(torch.where(live, ref_logp, 0.0).to(logp), logp)
        kl, slope = k3(d), -torch.expm1(d)
    optional = {"kl": kl, "logp": logp.clone(), "entropy": entropy.clone()}
    saved = (torch.stack((m, s)), torch.stack((ratio, slope))) if args["return_stats"] else (None, None)
    return ratio, *(x if args[f"return_{name}"] else None for name, x in optional.items()), *saved


def ratio_kl_bwd(**args: Any) -> Tensor:
    """Backward. Returns the gradient of the policy's logits, contiguous, in their dtype."""
    z, rows = _by_rows(args["policy_logits"], args)
    stats, dlogp = args["stats"].reshape(2, -1), args["dlogp"]
    total = torch.zeros_like(stats[0]) if dlogp is None else dlogp.reshape(-1)
    for i, name in enumerate(("dratio", "dkl")):
        if args[name] is not None:
            given = args[name].reshape(-1)
            # If the gradient is 0, as for a clipped ratio, the slope may be infinite: 0 * inf must be 0 here.
            total = total + torch.where(given == 0, 0.0, given * args["slopes"][i].reshape(-1))
    entropy, dentropy = args["entropy"], args["dentropy"]
    dlogits = stored.gradient(z, rows, stats, entropy, total, dentropy, None)
    return dlogits.view(args["policy_logits"].shape)


def _by_rows(logits: Tensor, args: dict[str, Any]) -> tuple[Tensor, logprob.Rows]:
    """Logits [N, V], as a view if possible, and properties of their rows."""
    ids, V, dtype = args["token_ids"], logits.shape[-1], stored.wide(logits)
    rows = logprob.Rows.of(ids, args["mask"], args["ignore_index"], args["temperature"], V, dtype)
    return logits.reshape(ids.numel(), V), rows
