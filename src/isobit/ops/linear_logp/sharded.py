"""`linear_logp` with a vocabulary that several ranks share, in the classes of eight shards.

    forward    the states of the rank's own splits, 12 numbers a row and shard; one all-gather; every rank
               merges all 32 splits in ascending order, and takes a token's logit from the rank that has it
    backward   d-logits of the rank's columns need lse alone: dweight and dbias stay where they are. dhidden
               is a sum over the vocabulary: the rank's part of the tree in fp32, then the tree over ranks
               (`isobit.ranks.ordered_sum`), rounded once

So the bits do not depend on the number of ranks.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isobit.frame.backend import Explanation
from isobit.frame.composed import outside_graphs
from isobit.frame.contract import ContractError, describe, is_dtensor
from isobit.ops.linear_logp import shard_op
from isobit.ops.linear_logp.op import backward, forward
from isobit.ranks import (
    Call,
    OfVocabulary,
    dtensor_error,
    local_part,
    ordered_sum,
    ranks_that_share,
    shown,
)

_OPTIONS = ("ignore_index", "temperature", "softcap", "logit_scale", "logits_dtype")


#: What the parts of a call take in addition to its tensors.
_HEAD = ("vocab_size", "padded_vocab", "workspace_bytes", *_OPTIONS)


def _said(what: str, args: dict[str, Any]) -> str:
    """What must be the same on all ranks."""
    names = ("hidden", "token_ids", "vocab_size", "padded_vocab", *_OPTIONS, "return_entropy", "return_lse")
    told = {name: shown(args[name]) for name in (*names, "numerics", "backend")}
    told |= {f"with {name}": str(args[name] is not None) for name in ("bias", "mask")}
    needs = getattr(args["hidden"], "requires_grad", False) and torch.is_grad_enabled()
    return f"{what}: " + ", ".join(f"{k}={v}" for k, v in told.items()) + f", gradient={needs}"


class _Sharded(torch.autograd.Function):
    """logp, entropy and lse of rows; None or, through PyTorch's dispatcher, (0,) for what is not wanted."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        args, rows = call.args, {name: call.args[name] for name in ("token_ids", "mask")}
        flags = {name: args[name] for name in ("return_entropy", "return_lse")}
        own = shard_op.states(
            hidden=hidden, weight=weight, bias=bias, **rows, **call.given(*_HEAD), **call.here,
            return_entropy=args["return_entropy"], backend=call.backend, validate=False,
        )  # fmt: skip
        every = call.group.all_gather(own)
        options = {
            name: args[name] for name in ("ignore_index", "temperature", "logit_scale", "padded_vocab")
        }
        logp, entropy, lse, stats = shard_op.merged(
            states=every, **rows, **options, vocab=args["vocab_size"], **flags, return_stats=True,
            backend=call.backend, validate=False,
        )  # fmt: skip
        ctx.call = call
        ctx.save_for_backward(hidden, weight, bias, stats, entropy if args["return_entropy"] else None)
        ctx.set_materialize_grads(False)
        return logp, entropy, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        hidden, weight, bias, stats, entropy = ctx.saved_tensors
        _, want_hidden, want_weight, want_bias = ctx.needs_input_grad
        given = {name: call.args[name] for name in ("token_ids", "mask")}
        of_outputs = dict(zip(("dlogp", "dentropy", "dlse"), grads, strict=True))
        dhidden, dweight, dbias = backward(
            hidden=hidden, weight=weight, bias=bias, **given, **call.given(*_HEAD), **call.here, stats=stats,
            entropy=entropy, kept=None, kept_base=None, **of_outputs, want_hidden=want_hidden,
            want_weight=want_weight, want_bias=want_bias, grad_dtype=None, dhidden_dtype=torch.float32,
            backend=call.backend, validate=False,
        )  # fmt: skip
        if want_hidden:
            flat = dhidden.reshape(-1, hidden.shape[-1])
            dhidden = ordered_sum(call.group, flat, out_dtype=hidden.dtype).view(hidden.shape)
        wanted = (want_hidden, want_weight, want_bias)
        results = zip((dhidden, dweight, dbias), wanted, strict=True)
        return (None, *(grad if want else None for grad, want in results))


def call_of(
    given: dict[str, Any], group: Any, what: str = "linear_logp", more: Callable[[], str] = str,
    also: Callable[[dict[str, Any]], None] = lambda given: None, values: Callable[[], dict[str, str]] = dict,
) -> Call:  # fmt: skip
    """The call of a rank, which all ranks agree to make: `given` are arguments of `linear_logp`. A function
    `what` that is made of it says by `more` and `values` what else must be the same, and checks more of its
    own arguments by `also`, which gets those of this rank's part of the vocabulary."""
    hidden = given["hidden"]
    own = ranks_that_share(what, "weight", given["weight"], hidden, group)
    device = hidden.device if isinstance(hidden, Tensor) else torch.device("cpu")
    return _function(what, more).call_of(own, given, device, also, values)


def rows_of(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(logp, entropy, lse) of rows; None for what is not wanted."""
    args = call.args
    logp, entropy, lse = _Sharded.apply(call, args["hidden"], args["weight"], args["bias"])
    return logp, entropy if args["return_entropy"] else None, lse if args["return_lse"] else None


def _linear_logp_sharded(given: dict[str, Any], group: Any) -> Tensor | tuple[Tensor, ...]:
    """`linear_logp` of a rank: `given` are its arguments."""
    call = call_of(given, group)
    logp, *others = rows_of(call)
    wanted = [each for each in others if each is not None]
    return (logp, *wanted) if wanted else logp


linear_logp_sharded = outside_graphs(_linear_logp_sharded, "ranks exchange tensors inside this call")


def _explain(call: Call, controls: dict[str, Any]) -> Explanation:
    rows = call.given("hidden", "weight", "token_ids", "bias", "mask", "return_entropy", *_HEAD)
    return shard_op.states.explain(**rows, **call.here, **controls)


def explained(given: dict[str, Any], what: str = "linear_logp") -> Explanation:
    """What serves a call with a group on this rank. Exchanges nothing."""
    own = ranks_that_share(what, "weight", given["weight"], given["hidden"], given["group"])
    return _function(what).explained(own, given)


def _check_values(args: dict[str, Any]) -> None:
    for rule in forward.value_rules:
        rule(forward.contract, args)


def _function(what: str, more: Callable[[], str] = str) -> OfVocabulary:
    """`linear_logp`, or a function that is made of it."""
    return OfVocabulary(
        what, "linear_logp_states", _explain, partial(_local, what),
        tokens_here=lambda given: getattr(given["weight"], "shape", (1,))[0],
        said=lambda args: _said(what, args) + more(), alike=("token_ids", "hidden", "temperature"),
        check_values=_check_values,
    )  # fmt: skip


def _local(what: str, given: dict[str, Any]) -> dict[str, Any]:
    """What this rank has of DTensors, and the vocabulary of all ranks."""
    weight, bias = given["weight"], given["bias"]
    if not is_dtensor(weight):
        if is_dtensor(bias):
            raise dtensor_error(what, "bias", bias, "must be the rank's own part, as weight is")
        return {}
    placements = import_module("torch.distributed.tensor")
    by_rows, mesh, V = placements.Shard(0), weight.device_mesh, given["vocab_size"]
    if bias is not None and not is_dtensor(bias):
        raise ContractError(f"{what}(bias: {describe(bias)}): must be a DTensor on the mesh of weight")
    wanted = {"weight": by_rows, "bias": by_rows, "hidden": placements.Replicate()}
    local = {name: local_part(what, name, given[name], mesh, each) for name, each in wanted.items()}
    return local | {"vocab_size": weight.shape[0] if V is None else V}
