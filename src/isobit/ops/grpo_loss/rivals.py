"""What people use instead of `grpo_loss`, and the sizes at which both are timed.

Six series, as in `ratio_kl`: from the logits of a reference, and from its log-probabilities (`_given`), with
all tokens counting, half of them (`_half`) and a tenth (`_tenth`). Liger's GRPO loss takes log-probabilities
of a reference, so it is timed where isobit gets them as well and reads as many bytes. isobit gets rewards and
normalises them in groups; the others get advantages.
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from isobit.kernels.host.tokens import live_rows
from isobit.ops.grpo_loss import reference
from isobit.ops.grpo_loss.op import grpo_loss
from isobit.ops.ratio_kl.rivals import (
    CASES,
    DENSITIES,
    about,
    cost,
    liger_available,
    with_last_step,
    zeros_in_masked_rows,
)
from isobit.spec.proof import Args
from isobit.spec.rival import Rival
from isobit.spec.series import Series, by_rows
from isobit.spec.truth import ROWS, cotangent_like, spread_evenly

# Rivals


def native(args: Args) -> Tensor:
    """As trainers write it: log-probabilities of all tokens, then the loss."""
    ids, temperature = args["token_ids"].long()[..., None], args["temperature"]

    def chosen(logits: Tensor) -> Tensor:
        return (logits.float() / temperature).log_softmax(-1).gather(-1, ids).squeeze(-1)

    logp, ref = chosen(args["policy_logits"]), args["ref_logp"]
    if ref is None:
        with torch.no_grad():
            ref = chosen(args["ref_logits"])
    A, d = args["group_advantages"][:, None], ref - logp
    ratio = torch.exp(logp - args["old_logp"])
    clipped = ratio.clamp(1 - args["clip_low"], 1 + args["clip_high"])
    term = -torch.minimum(ratio * A, clipped * A) + args["beta"] * (torch.exp(d) - d - 1)
    return (term * args["live"]).sum() / args["live"].sum()


def _advantages(args: Args) -> Tensor:
    groups = {name: args[name] for name in ("rewards", "samples_per_prompt", "group_boundaries", "eps")}
    return reference.advantages_formula(**groups)[0]


def _of_live_tokens(args: Args) -> Args:
    """With the advantages, and zeros in masked tokens."""
    live = live_rows(args["token_ids"], args["mask"], args["ignore_index"])
    changed = args | {"group_advantages": _advantages(args).float(), "live": live.float()}
    return changed if args["mask"] is None else zeros_in_masked_rows(changed, live)


def _liger(args: Args) -> Tensor:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    loss: Tensor = triton_grpo_loss(
        logits=args["policy_logits"], old_logp=args["old_logp"], ref_logp=args["ref_logp"],
        completion_ids=args["token_ids"], advantages=args["group_advantages"],
        completion_mask=args["live"].int(), temperature=args["temperature"], beta=args["beta"],
        eps_low=args["clip_low"], eps_high=args["clip_high"], inplace=False, loss_type="bnpo", reduce=True,
    )[0]  # fmt: skip
    return loss


def _liger_inputs(args: Args) -> Args:
    args = _of_live_tokens(args)
    return args | {"policy_logits": with_last_step(args["policy_logits"])}


_TAKES = ("by", "mask", "temperature", "ids", "ref", "ref_dtype", "layout")

NATIVE = Rival("native", native, prepare=_of_live_tokens, jit=False, takes=_TAKES)
# A compiled backward frees its buffers, so it cannot run twice after one forward.
COMPILED = Rival(
    "torch.compile", native, directions=("fwd", "fwd_bwd"), prepare=_of_live_tokens, compiled=True,
    takes=_TAKES,
)  # fmt: skip
LIGER = Rival(
    "liger", _liger, prepare=_liger_inputs, available=liger_available,
    takes=("by", "mask", "temperature", "ref", "layout"),
)  # fmt: skip


# The truth


@dataclass(frozen=True)
class Known:
    """Truth in fp64: the loss, and the gradient of some live tokens."""

    loss: float
    at: tuple[Tensor, Tensor]  # (sequences, steps)
    gradient: Tensor

    def error(self, direction: str, result: tuple[Tensor, ...]) -> float | None:
        errors = [] if direction == "bwd" else [(result[0].detach().double() - self.loss).abs()]
        if direction != "fwd" and len(self.gradient):
            errors.append((result[-1][self.at].double() - self.gradient).abs().max())
        return float(torch.stack(errors).max()) if errors else None  # NaN if any is NaN


#: Tokens computed at a time, so that fp64 needs no more memory than the case itself.
_AT_ONCE = 128

_OF_TOKENS = ("policy_logits", "ref_logits", "token_ids", "old_logp", "ref_logp")


def known(args: Args) -> Known:
    """Token by token, each as a sequence of its own; the sum is divided by the number of tokens that
    count."""
    ids, advantages = args["token_ids"], _advantages(args).double()
    live = live_rows(ids, args["mask"], args["ignore_index"])
    rest = {name: args[name] for name in ("clip_low", "clip_high", "beta", "temperature", "ignore_index")}
    rest |= {"reduction": "sum", "normalizer": float(live.sum().clamp(min=1))}

    def some(b: Tensor, t: Tensor) -> Args:
        given = {name: None if args[name] is None else args[name][b, t][:, None] for name in _OF_TOKENS}
        wide = {n: v.double() if v is not None and v.is_floating_point() else v for n, v in given.items()}
        return rest | wide | {"advantages": advantages[b][:, None]}

    b, t = live.nonzero(as_tuple=True)
    loss = 0.0
    for part in torch.arange(len(b), device=b.device).split(_AT_ONCE):
        with torch.no_grad():
            loss += float(reference.formula(**some(b[part], t[part]))[0])
    chosen = spread_evenly(len(b), ROWS, b.device)
    with torch.enable_grad():  # forwards are judged under no_grad
        exact = some(b[chosen], t[chosen])
        leaf = exact["policy_logits"].requires_grad_()
        losses = reference.formula(**exact)[0]
        (gradient,) = torch.autograd.grad(losses, leaf, cotangent_like(losses))
    return Known(loss, (b[chosen], t[chosen]), gradient[:, 0])


# Series

#: The subset for `--core`: an odd vocabulary, which is slow to read, and an aligned one.
_CORE = [CASES[1], CASES[3]]


def _series(given: bool, suffix: str, density: float) -> Series:
    options = {"by": "samples"} | ({"ref": "logp"} if given else {})
    name = f"grpo_loss{'_given' if given else ''}{suffix}"
    rivals = (NATIVE, LIGER) if given else (NATIVE, COMPILED)
    plain = name == "grpo_loss"
    made = by_rows(
        "grpo_loss", CASES, partial(cost, density, given), {rival.name: rival for rival in rivals}, name=name,
        judge=known, about=about(given, density),
        options=options | ({} if density == 1 else {"mask": density}), core=_CORE,
        also={"triton": _CORE, "hopper": _CORE if plain else []},
    )  # fmt: skip
    return replace(made, call=_loss)


def _loss(args: Args, backend: str | None) -> Tensor:
    return grpo_loss(**args, backend=backend)[0]


SERIES = [_series(given, *density) for given in (False, True) for density in DENSITIES.items()]
