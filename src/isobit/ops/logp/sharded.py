"""`logp` with a vocabulary that several ranks share, in the class of eight shards.

    forward    the sums of the rank's own shards, 2 or 3 numbers a row and shard; one all-gather; every rank
               folds all eight shards, and takes a token's logit from the rank that has it
    backward   the gradient of a column needs the sums of its row alone: nothing is exchanged

So the bits do not depend on the number of ranks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isobit.frame.backend import Explanation
from isobit.frame.composed import outside_graphs
from isobit.frame.contract import ContractError, is_dtensor
from isobit.kernels.host import tokens
from isobit.kernels.host.vocab_shards import SHARDS
from isobit.ops.logp import shard_op
from isobit.ops.logp.op import forward
from isobit.ranks import Call, OfVocabulary, ranks_that_share, shown

_ROWS = ("token_ids", "mask", "ignore_index", "temperature")


def _shards(call: Call) -> dict[str, int]:
    return call.here | {"vocab": call.args["vocab_size"]}


class _Sharded(torch.autograd.Function):
    """logp, entropy and lse of rows; None or, through PyTorch's dispatcher, (0,) for what is not wanted."""

    @staticmethod
    def forward(ctx: Any, call: Call, logits: Tensor) -> tuple[Tensor | None, ...]:
        own = shard_op.states(
            logits=logits, **call.given(*_ROWS, "padded_vocab", "return_entropy"), **_shards(call),
            backend=call.backend, validate=False,
        )  # fmt: skip
        logp, entropy, lse, stats = shard_op.merged(
            states=call.group.all_gather(own),
            **call.given(*_ROWS, "padded_vocab", "return_entropy", "return_lse"),
            vocab=call.args["vocab_size"], return_stats=True, backend=call.backend, validate=False,
        )  # fmt: skip
        ctx.call = call
        ctx.save_for_backward(logits, stats, entropy if call.args["return_entropy"] else None)
        ctx.set_materialize_grads(False)
        return logp, entropy, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        logits, stats, entropy = ctx.saved_tensors
        of_outputs = dict(zip(("dlogp", "dentropy", "dlse"), grads, strict=True))
        if not call.args["return_entropy"]:
            of_outputs["dentropy"] = None
        dlogits = shard_op.backward(
            logits=logits, **call.given(*_ROWS), stats=stats, entropy=entropy, **of_outputs,
            first_column=call.here["shard"] * call.args["padded_vocab"] // SHARDS,
            tokens=call.args["vocab_size"], backend=call.backend, validate=False,
        )  # fmt: skip
        return None, dlogits


def _logp_sharded(given: dict[str, Any], group: Any) -> Tensor | tuple[Tensor, ...]:
    """`logp` of a rank: `given` are its arguments."""
    logits = given["logits"]
    own = ranks_that_share("logp", "logits", logits, logits, group)
    call = _LOGP.call_of(own, given, logits.device if isinstance(logits, Tensor) else torch.device("cpu"))
    logp, entropy, lse = _Sharded.apply(call, call.args["logits"])
    wanted = [each for each, name in ((entropy, "entropy"), (lse, "lse")) if given[f"return_{name}"]]
    return (logp, *wanted) if wanted else logp


logp_sharded = outside_graphs(_logp_sharded, "ranks exchange tensors inside this call")


def _said(args: dict[str, Any]) -> str:
    """What must be the same on all ranks. Columns may be fewer on the last."""
    names = ("token_ids", "ignore_index", "temperature", "vocab_size", "padded_vocab", "return_entropy")
    told = {name: shown(args[name]) for name in (*names, "return_lse", "numerics", "backend")}
    told |= {"with mask": str(args["mask"] is not None), "dtype": str(getattr(args["logits"], "dtype", None))}
    return "logp: " + ", ".join(f"{k}={v}" for k, v in told.items())


def _explain(call: Call, controls: dict[str, Any]) -> Explanation:
    rows = call.given("logits", *_ROWS, "padded_vocab", "return_entropy")
    return shard_op.states.explain(**rows, **_shards(call), **controls)


def explained(given: dict[str, Any]) -> Explanation:
    """What serves a call with a group on this rank. Exchanges nothing."""
    own = ranks_that_share("logp", "logits", given["logits"], given["logits"], given["group"])
    return _LOGP.explained(own, given)


def _check_values(args: dict[str, Any]) -> None:
    tokens.ids_below(args["vocab_size"], forward.contract, args)
    tokens.temperatures_are_positive(forward.contract, args)


def _local(given: dict[str, Any]) -> dict[str, Any]:
    """The rank's own columns of DTensor logits, and the vocabulary."""
    logits, V = given["logits"], given["vocab_size"]
    if not is_dtensor(logits):
        return {}
    if not logits.placements[0].is_shard(logits.ndim - 1):
        rule = "must be cut by columns, (Shard(-1),); or pass .full_tensor()"
        raise ContractError(f"logp(logits: placements {logits.placements}): {rule}")
    return {"logits": logits.to_local(), "vocab_size": logits.shape[-1] if V is None else V}


_LOGP = OfVocabulary(
    "logp", "logp_states", _explain, _local,
    tokens_here=lambda given: (getattr(given["logits"], "shape", None) or (1,))[-1],
    said=_said, alike=("token_ids", "temperature"), check_values=_check_values,
)  # fmt: skip
