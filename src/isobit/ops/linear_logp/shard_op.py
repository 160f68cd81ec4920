"""The parts of `linear_logp` between which ranks that share a vocabulary exchange something: the states of
the splits that are here, and results from the states of all ranks. The third part is the op's backward."""

from typing import Any

from torch import Tensor

from isobit.frame.contract import F32, Contract
from isobit.frame.op import op
from isobit.kernels.host import tokens
from isobit.kernels.host.vocab_shards import SPLITS_PER_SHARD, misfit
from isobit.ops.linear_logp.op import ROW_RULES, SHARDED, forward, padding

_ROWS = ("hidden", "weight", "token_ids", "bias", "mask", "ignore_index", "temperature", "softcap")
_MORE = ("logit_scale", "logits_dtype", "vocab_size", "padded_vocab", "workspace_bytes")


def _capacity(ids: Tensor) -> int:
    return -(-ids.numel() // 128) * 128


def _state_sizes(args: dict[str, Any]) -> dict[str, int]:
    return {"S": 3 * SPLITS_PER_SHARD * args["shards"] + 1, "C": _capacity(args["token_ids"])}


@op("linear_logp_states", like=forward.params(*_ROWS, *_MORE), sizes=_state_sizes)
def states(shard: int, shards: int, return_entropy: bool) -> F32[Tensor, "S C"]:
    """(m, s, t) of the four splits of each of `shards` shards from `shard` on, whose rows the weight holds,
    and the logit of the row's token. By rows or by slots, as the backend likes."""


@op(
    "linear_logp_merged",
    like=forward.params("token_ids", "mask", ..., "ignore_index", "temperature", "logit_scale"),
)
def merged(
    states: F32[Tensor, "R S C"],
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
    """(logp, entropy, lse, stats) of rows, as `linear_logp` returns them, from the states of all R ranks."""


# Rules that annotations cannot express


def _rows_here(contract: Contract, args: dict[str, Any]) -> None:
    """The weight has the rows of whole shards; behind the last token they may be missing."""
    V, P = args["vocab_size"], args["padded_vocab"]
    padding(contract, args, V)
    rule = misfit(V, P, args["shard"], args["shards"], len(args["weight"]), "row")
    if rule is not None:
        raise contract.error("weight", args["weight"], rule)


def _one_device(contract: Contract, args: dict[str, Any]) -> None:
    if args["states"].shape[2] != _capacity(args["token_ids"]):
        raise contract.error("states", args["states"], f"must have {_capacity(args['token_ids'])} columns")


states.rule(*ROW_RULES, _rows_here)
merged.rule(tokens.scalars, _one_device)

_RUN = {
    "hopper-8x4": "kernels_hopper_shards",
    "triton-8x4": "kernels_triton_shards",
    "model-8x4": "model_shards",
}
for _name, _module in _RUN.items():
    _options = SHARDED[_name]
    states.backend(_name, run=f"{_module}:linear_logp_states", **_options)
    # Whatever has made the states can merge them.
    merged.backend(_name, run=f"{_module}:linear_logp_merged", numerics=_options["numerics"])

_WHY = "isobit.linear_logp computes gradients over ranks itself: its parts have none of their own."
states.not_differentiable(_WHY)
merged.not_differentiable(_WHY)
