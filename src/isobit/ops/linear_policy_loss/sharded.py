"""`linear_policy_loss` with a vocabulary that several ranks share.

In the classes of eight shards all rows are one chunk, and their log-probabilities are those of `linear_logp`
by the same ranks. Every rank runs the loss on all rows: it has the same numbers as the others. So nothing is
exchanged but what `linear_logp` exchanges, and dhidden, dweight and dbias are its own.
"""

from dataclasses import replace
from typing import Any

from isobit.frame.contract import describe
from isobit.ops.linear_logp import sharded
from isobit.ops.linear_policy_loss.chunked import PLAIN, Call
from isobit.ops.linear_policy_loss.op import call_of
from isobit.ranks import reads_values

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
        rows | flags, group, "linear_policy_loss", f", cu_seqlens={_shapes(given['cu_seqlens'])}, "
        f"inputs={_shapes(given['inputs'])}", check_loss,
    )  # fmt: skip
    validated = reads_values(given["validate"], call.args["hidden"].device)
    return replace(checked[0], check=validated, of_ranks=lambda: sharded.rows_of(call)[:2])


def _shapes(given: Any) -> str:
    """Of the inputs of a loss, which every rank has."""
    if isinstance(given, dict):
        return str({name: describe(value) for name, value in given.items()})
    return describe(given)
