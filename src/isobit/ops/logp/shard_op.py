"""The parts of `logp` between which ranks that share a vocabulary exchange something: the sums of the shards
that are here, results from the sums of all ranks, and the gradient of the columns that are here."""

from typing import Any

from torch import Tensor

from isobit.frame.contract import F32, Contract, Like
from isobit.frame.op import op
from isobit.kernels.host import tokens
from isobit.kernels.host.vocab_shards import misfit
from isobit.ops.logp.op import SHARDED, forward, padding


def _sizes(args: dict[str, Any]) -> dict[str, int]:
    sums = 3 if args["return_entropy"] else 2
    return {"N": args["token_ids"].numel(), "S": sums * args["shards"] + 1}


@op(
    "logp_states",
    like=forward.params(
        "logits", "token_ids", "mask", ..., "ignore_index", "temperature", "padded_vocab", "return_entropy"
    ),
    sizes=_sizes,
)
def states(*, vocab: int, shard: int, shards: int) -> F32[Tensor, "N S"]:
    """The sums of each of `shards` shards from `shard` on, whose columns the logits are, and the logit of the
    row's token. `vocab` counts the tokens of all ranks."""


@op("logp_merged", like=forward.params("token_ids", "mask", ..., "ignore_index", "temperature"))
def merged(
    states: F32[Tensor, "R N S"],
    *,
    vocab: int,
    padded_vocab: int,
    return_entropy: bool,
    return_lse: bool,
    return_stats: bool,
) -> tuple[
    F32[Tensor, "*"],
    F32[Tensor, "* if return_entropy"],
    F32[Tensor, "* if return_lse"],
    F32[Tensor, "2 * if return_stats"],
]:
    """(logp, entropy, lse, stats) of rows, as `logp` returns them, from the states of all R ranks."""


@op(
    "logp_shard_bwd",
    like=forward.params("logits", "token_ids", "mask", ..., "ignore_index", "temperature"),
)
def backward(
    stats: F32[Tensor, "2 *"],
    entropy: F32[Tensor, "*"] | None,
    dlogp: F32[Tensor, "*"] | None,
    dentropy: F32[Tensor, "*"] | None,
    dlse: F32[Tensor, "*"] | None,
    *,
    first_column: int,
    tokens: int,
) -> Like[Tensor, "logits"]:
    """dlogits of columns from `first_column` on of a vocabulary of `tokens`; 0 behind the last token."""


# Rules that annotations cannot express


def _columns_here(contract: Contract, args: dict[str, Any]) -> None:
    """The logits are the columns of whole shards; behind the last token they may be missing."""
    V, P = args["vocab"], args["padded_vocab"]
    padding(contract, args, V)
    rule = misfit(V, P, args["shard"], args["shards"], args["logits"].shape[-1], "column")
    if rule is not None:
        raise contract.error("logits", args["logits"], rule)


def _rows_of_states(contract: Contract, args: dict[str, Any]) -> None:
    if args["states"].shape[1] != args["token_ids"].numel():
        raise contract.error("states", args["states"], f"must have {args['token_ids'].numel()} rows")


states.rule(tokens.scalars, _columns_here)
merged.rule(tokens.scalars, _rows_of_states)
backward.rule(tokens.scalars, tokens.entropy_is_there)

for _name, _module in (("triton-8x1", "kernels_triton_shards"), ("model-8x1", "model_shards")):
    _options = SHARDED[_name]
    states.backend(_name, run=f"{_module}:logp_states", **_options)
    # Whatever has made the states can merge them.
    _kept = {name: value for name, value in _options.items() if name in ("numerics", "launches")}
    merged.backend(_name, run=f"{_module}:logp_merged", **_kept)
    backward.backend(_name, run=f"{_module}:logp_shard_bwd", **_options)

_WHY = "isobit.logp computes gradients over ranks itself: its parts have none of their own."
states.not_differentiable(_WHY)
merged.not_differentiable(_WHY)
backward.not_differentiable(_WHY)
