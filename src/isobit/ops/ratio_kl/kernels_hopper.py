"""`ratio_kl` in the summation order of class lse/1, which `linear_logp` uses for logits that it never stores.

With it a policy whose log-probabilities came from `linear_logp` has a ratio of exactly 1 to itself. The
logits of policy and reference are folded one after the other (`isobit.kernels.hopper.logits`), and a small
kernel computes ratio and kl from the results. The triton backend is faster; this one is used only if it is
requested by name. The backward is that of the triton backend: it is elementwise, so no order of additions is
involved.
"""

from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run, unused
from isobit.kernels.hopper import logits as hopper_logits
from isobit.kernels.hopper.pipeline import triton_kernel
from isobit.kernels.host.rows import row_strides, walkable
from isobit.kernels.triton.exp import difference, exp, k3_and_expm1
from isobit.kernels.triton.rows import row_offset

BLOCK = 128


@triton_kernel
def ratio_kernel(
    ratio, kl, slopes, ids, logp, old_logp, ref_logp, N, inner, old_so, old_si, ref_so, ref_si,
    OLD: tl.constexpr, KL: tl.constexpr, SLOPES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ratio, kl and their derivatives by logp, of BLOCK rows per program. Masked rows are not read: with
    zeros everywhere they have ratio 1 and kl 0."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = row < N
    live = inside & (tl.load(ids + row, mask=inside, other=-2) != -2)
    own = tl.load(logp + row, mask=live, other=0.0)
    old = own
    if OLD:
        old = tl.load(old_logp + row_offset(row, inner, old_so, old_si), mask=live, other=0.0)
    own_ratio = exp(difference(own, old))
    tl.store(ratio + row, own_ratio, mask=inside)
    slope = tl.zeros([BLOCK], tl.float32)
    if KL:
        ref = tl.load(ref_logp + row_offset(row, inner, ref_so, ref_si), mask=live, other=0.0)
        penalty, slope = k3_and_expm1(difference(ref, own))
        tl.store(kl + row, penalty, mask=inside)
    if SLOPES:
        tl.store(slopes + row, own_ratio, mask=inside)  # the derivative of ratio is ratio
        tl.store(slopes + N + row, -slope, mask=inside)


def why_not(args: dict[str, Any]) -> str | None:
    reason = hopper_logits.why_not("policy_logits", args["policy_logits"])
    if reason is None and args["return_kl"] and args["ref_logits"] is not None:
        reason = hopper_logits.why_not("ref_logits", args["ref_logits"])
    return reason


def ratio_kl(launch: Launch = run, **args: Any) -> tuple[Tensor | None, ...]:
    """(ratio, kl, logp, entropy, stats, slopes), as the triton backend returns them."""
    policy, ref, given = (args[name] for name in ("policy_logits", "ref_logits", "ref_logp"))
    lead, V, wanted = policy.shape[:-1], policy.shape[-1], args["return_stats"]
    options = (args[name] for name in ("token_ids", "mask", "ignore_index", "temperature"))
    slots = hopper_logits.slots_of(V, *options, launch)
    logp, entropy, _, stats = hopper_logits.results(
        policy, slots, launch, entropy=args["return_entropy"], stats=wanted
    )
    if args["return_kl"] and ref is not None:
        given = hopper_logits.results(ref, slots, launch)[0]
    empty = partial(torch.empty, device=policy.device, dtype=torch.float32)
    ratio, N = empty(lead), lead.numel()
    kl = empty(lead) if args["return_kl"] else None
    slopes = empty((2, *lead)) if wanted else None
    of_rows = [walkable(lead, t) for t in (args["old_logp"], given if args["return_kl"] else None)]
    inner, (old, given), strides = row_strides(lead, of_rows)
    launch(
        ratio_kernel, (-(-N // BLOCK),),
        ratio,
        unused(logp) if kl is None else kl,
        unused(logp) if slopes is None else slopes,
        slots.ids,
        logp,
        unused(logp) if old is None else old,
        unused(logp) if given is None else given,
        N, inner, *strides,
        OLD=old is not None, KL=kl is not None, SLOPES=wanted, BLOCK=BLOCK,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return ratio, kl, logp if args["return_logp"] else None, entropy, stats, slopes
