"""The truth of `linear_policy_loss`, and its error bound: that of `linear_logp` with the gradients of the
loss, plus a sum of as many terms as there are rows."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from isobit.ops.linear_logp import reference as rows
from isobit.ops.linear_logp.proof import truth as of_rows
from isobit.ops.linear_policy_loss import reference
from isobit.ops.linear_policy_loss.proof.inputs import as_linear_logp
from isobit.spec.proof import Args

_BESIDE = ("cu_seqlens", "workspace_bytes", "padded_vocab")


def formula(args: Args) -> tuple[Tensor, ...]:
    return (reference.formula(**{k: v for k, v in args.items() if k not in _BESIDE}),)


def sent_back(args: Args, outputs: Sequence[Tensor], dloss: Tensor | float) -> tuple[Tensor, Tensor]:
    """(dlogp, dentropy) of a loss with this gradient, for rows with these results."""
    leaves = [o.detach().requires_grad_() for o in outputs[:2]]
    loss, _ = args["loss_fn"](leaves[0], leaves[1] if args["entropy"] else None, **args["inputs"])
    slopes = torch.autograd.grad(loss * dloss, leaves, allow_unused=True)
    dlogp, dentropy = (torch.zeros_like(x) if g is None else g for g, x in zip(slopes, leaves, strict=True))
    return dlogp, dentropy


def scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """Bounds on the errors of the loss and of gradients, in units of 2^-23."""
    call = as_linear_logp(args)
    logps = rows.formula(**{k: v for k, v in call.items() if k not in _BESIDE})
    if not cotangents:
        errors = of_rows.scale(call, logps, ())
        dlogp, dentropy = sent_back(args, logps, 1.0)
        terms = (dlogp * logps[0]).abs() + (dentropy * logps[1]).abs()
        of_terms = dlogp.abs() * errors["logp"] + dentropy.abs() * errors["entropy"]
        # Products and divisions of a term, and a sum whose order is PyTorch's and that of the chunks.
        return {"loss": (of_terms + (8 + math.log2(1 + terms.numel())) * terms).sum()}
    dlogp, dentropy = sent_back(args, logps, cotangents[0])
    sizes = of_rows.scale(call, logps, (dlogp, dentropy, torch.zeros_like(dlogp)))
    return {name: size for name, size in sizes.items() if name.startswith("gradient:")}
