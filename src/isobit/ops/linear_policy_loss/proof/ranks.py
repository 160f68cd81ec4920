"""`linear_policy_loss` with a vocabulary that ranks share. The controls are those of `linear_logp`: sums over
ranks as others make them, which must have other bits."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.ops.linear_logp.op import linear_logp
from isobit.ops.linear_logp.proof.shards import (
    dhidden_in_turn,
    lse_of_ranks,
    sum_of_dhidden,
    whole_rows,
    wider,
)
from isobit.ops.linear_policy_loss.chunked import PLAIN
from isobit.ops.linear_policy_loss.op import linear_policy_loss
from isobit.ops.linear_policy_loss.proof.bits import results
from isobit.ops.linear_policy_loss.proof.inputs import as_linear_logp
from isobit.ranks import Group
from isobit.spec.proof import Args, Shards
from isobit.spec.trial import Trial, cloned

Results = dict[str, Tensor]


def _results(trial: Trial, args: Args, cotangents: Sequence[Tensor], **more: Any) -> Results:
    mine = cloned(args)
    leaves = [name for name in trial.leaves(args) if mine[name] is not None]
    for name in leaves:
        mine[name].requires_grad_()
    loss, _ = linear_policy_loss(**mine, backend=trial.backend, validate=False, **more)
    grads = torch.autograd.grad(loss, [mine[name] for name in leaves], cotangents[0])
    results = {"loss": loss.detach()}
    return results | {f"gradient:{name}": grad for name, grad in zip(leaves, grads, strict=True)}


def _on_a_rank(group: Group, trial: Trial, args: Args, cotangents: Sequence[Tensor]) -> Results:
    whole = whole_rows(args | PLAIN)
    rows = whole["padded_vocab"] // group.size
    own = slice(group.rank * rows, (group.rank + 1) * rows)
    part = {name: None if whole[name] is None else whole[name][own] for name in ("weight", "bias")}
    vocabulary = {"padded_vocab": whole["padded_vocab"]}
    return _results(trial, args | part | vocabulary, cotangents, vocab_size=whole["vocab_size"], group=group)


def _alone(trial: Trial, args: Args, cotangents: Sequence[Tensor]) -> Results:
    """Rows of padding have no gradient: zeros, which ranks must have too."""
    P, V = whole_rows(args | PLAIN)["padded_vocab"], len(args["weight"])
    results = _results(trial, args | {"padded_vocab": P}, cotangents)
    for name, padding in (("gradient:weight", (0, 0, 0, P - V)), ("gradient:bias", (0, P - V))):
        if name in results:
            results[name] = F.pad(results[name], padding)
    return results


def _other_sums(
    trial: Trial, args: Args, cotangents: Sequence[Tensor]
) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    whole = whole_rows(as_linear_logp(args))
    with torch.no_grad():
        logp, entropy, lse = linear_logp(
            **whole, return_entropy=True, return_lse=True, backend=trial.backend, validate=False
        )
    leaves = [logp.detach().requires_grad_(), entropy.detach().requires_grad_()]
    loss, _ = args["loss_fn"](leaves[0], leaves[1] if args["entropy"] else None, **args["inputs"])
    dlogp, dentropy = torch.autograd.grad(loss * cotangents[0], leaves, allow_unused=True)
    grads = (dlogp, dentropy, None)
    return [
        _of_another_width(trial, args, grads),
        ("a log-sum-exp of the ranks' own", [logp], [(logp + lse) - lse_of_ranks(whole, lse)]),
        dhidden_in_turn(trial, whole, entropy, grads),
    ]


def _of_another_width(
    trial: Trial, args: Args, grads: Sequence[Tensor | None]
) -> tuple[str, list[Tensor], list[Tensor]]:
    """What loss_fn gets, and dhidden before it is rounded. A loss and 16-bit gradients of a small case may
    have equal bits by chance."""

    def of(padded_vocab: int | None) -> list[Tensor]:
        call = args | {"padded_vocab": padded_vocab}
        whole, (logp, *entropy) = whole_rows(as_linear_logp(call)), results(trial, call)
        return [logp, *entropy, sum_of_dhidden(trial, whole, entropy[0] if entropy else None, grads)]

    return "shards of another width", of(args["padded_vocab"]), of(wider(args | PLAIN)["padded_vocab"])


VOCABULARY = Shards(
    "a vocabulary cut into shards", _on_a_rank, _alone,
    spread={"loss": None, "gradient:hidden": None, "gradient:weight": 0, "gradient:bias": 0},
    controls=_other_sums,
)  # fmt: skip
