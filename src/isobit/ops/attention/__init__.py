from collections.abc import Container, Hashable, Mapping, Sequence
from types import NoneType
from typing import Any

from isobit.frame.cache_key import CacheKey, Sizes
from isobit.frame.contract import Contract
from isobit.ops.attention.calls import FEW_ROWS, call_of, decodes
from isobit.ops.attention.op import attention, backward, forward

__all__ = ["attention"]

# What calls of a family differ in. Here and not in `op` or `growth`, whose code counts as that of the
# kernels: it changes host time and no number.


class _Shaped:
    """Stands for a tensor of which only the shape is known."""

    __slots__ = ("shape",)

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return self.shape[0]


#: Arguments by which sequences are packed, or keys in pages.
_BOUNDS = ("cu_seqlens_q", "block_table")


def _choice(shapes: Mapping[str, Sequence[int]]) -> Hashable:
    """What the choice of a backend reads of sizes. `slower_because` asks whether there are MANY_QUERIES, in a
    file that imports Gluon, which not every Triton has."""
    given = {name: _Shaped(shapes[name]) if name in shapes else None for name in ("q", "k", *_BOUNDS)}
    call = call_of(given)
    queries = call.T // max(call.sequences, 1) if call.packed_q else call.T
    return decodes(call), queries < FEW_ROWS


def _vary(given: Container[str]) -> Mapping[str, str]:
    """Sequences, queries and keys; not the number of packed sequences, which launchers take the length of.
    Those of a cache in pages have as many keys as their row of the table has room for."""
    packed, paged = "cu_seqlens_q" in given, "block_table" in given
    sequences = {} if packed else {"B": "B", "N": "B"} | ({} if paged else {"P": "B"})
    return sequences | {"T": "T"} | ({"M": "M"} if paged else {"S": "S"})


def sizes(contract: Contract) -> Any:
    """What varies (`Varying`). A step of a decode loop, with one query for each sequence, has a family of its
    own, in which only keys vary: its first call compiles what a longer cache needs."""
    from isobit.frame.family import Varying, dimensions
    from isobit.ops.attention.growth import keys

    steps, calls = keys(contract), dimensions(contract, _vary, _choice)
    others = [contract.names.index(name) for name in _BOUNDS]

    def split(key: CacheKey) -> tuple[CacheKey, Sizes] | None:
        types, queries = key[1], key[3][0]
        step = queries[1:2] == (1,) and all(types[i] is NoneType for i in others)
        return (steps if step else calls).split(key)

    def is_step(args: dict[str, Any]) -> bool:
        return args["q"].shape[1] == 1 and all(args[name] is None for name in _BOUNDS)

    def shape(name: str, args: dict[str, Any], sizes: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        return (steps if is_step(args) else calls).shape(name, args, sizes)

    def ahead(args: dict[str, Any]) -> Sequence[int]:
        return steps.ahead(args) if steps.ahead is not None and is_step(args) else ()

    return Varying(split, shape, ahead)


forward.grows = backward.grows = "isobit.ops.attention:sizes"
