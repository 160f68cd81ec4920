"""`linear_policy_loss` with a vocabulary that several ranks share.

In the classes of eight shards all rows are one chunk, and their log-probabilities are those of `linear_logp`
by the same ranks. Every rank runs the loss on all rows: it has the same numbers as the others. So nothing is
exchanged but what `linear_logp` exchanges, and dhidden, dweight and dbias are its own.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isobit.frame.backend import Explanation
from isobit.ops.linear_logp import sharded
from isobit.ops.linear_policy_loss.chunked import PLAIN, Call
from isobit.ops.linear_policy_loss.op import call_of
from isobit.ranks import bits, reads_values, shown

_ROWS = ("hidden", "weight", "token_ids", "bias", "mask", "ignore_index", "temperature")
_MORE = ("padded_vocab", "workspace_bytes", "validate", "numerics", "backend")


def call_of_rank(given: dict[str, Any], vocab_size: int | None, group: Any) -> Call:
    """The call of a rank, which all ranks agree to make. `given` are the arguments of
    `linear_policy_loss`."""
    checked: list[Call] = []

    def check_loss(own: dict[str, Any]) -> None:
        """Of the contract what concerns the loss and its inputs. The rest, and the values of tensors, are
        checked with the whole vocabulary."""
        here = {name: own[name] for name in ("weight", "bias", "padded_vocab")}
        checked[:] = [call_of(given | here | {"validate": False})]

    rows = {name: given[name] for name in _ROWS + _MORE} | PLAIN
    flags = {"vocab_size": vocab_size, "return_entropy": given["entropy"], "return_lse": False}
    call = sharded.call_of(
        rows | flags, group, "linear_policy_loss", lambda: _said(given), check_loss,
        lambda: bits({"cu_seqlens": given["cu_seqlens"]}),
    )  # fmt: skip
    validated = reads_values(given["validate"], call.args["hidden"].device)
    return replace(checked[0], check=validated, of_ranks=lambda: sharded.rows_of(call)[:2])


def explained(given: dict[str, Any]) -> Explanation:
    """What serves a call with a group on this rank."""
    return sharded.explained(given | PLAIN | {"return_entropy": given["entropy"]} | {
        "vocab_size": given["vocab_size"]}, "linear_policy_loss")  # fmt: skip


def _said(given: dict[str, Any]) -> str:
    """What else every rank has: how rows are grouped, and the inputs of the loss."""
    inputs = given["inputs"]
    if isinstance(inputs, Mapping):
        inputs = {name: shown(value) for name, value in inputs.items()}
    return f", cu_seqlens={shown(given['cu_seqlens'])}, inputs={inputs}"
