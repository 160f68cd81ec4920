"""More than one GPU, with the bits of one: linear layers that ranks share, on torch.distributed.

`DetColwise` and `DetRowwise` are styles for `torch.distributed.tensor.parallel.parallelize_module`.
`column_linear` and `row_linear` take what one rank has, and a process group. `det_linear` understands a
weight that is a DTensor. All have the same bits on 1, 2, 4 and 8 ranks as `det_linear` of class tree8 on one.
`in_turn` runs several ranks in one process, to test that.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from isobit.frame.composed import outside_graphs
from isobit.frame.contract import ContractError
from isobit.numerics import Numerics
from isobit.ops.det_gemm.sharded import Parts, device_of, in_parts, layer_of, sharded_linear
from isobit.ops.det_gemm.sharded import shard_parts as _shard_parts
from isobit.ranks import Group, RanksError, as_group, in_turn

if TYPE_CHECKING:
    from isobit.layers.styles import DetColwise, DetRowwise

__all__ = [
    "DetColwise", "DetRowwise", "Group", "RanksError", "column_linear", "in_turn", "join_parts", "row_linear",
    "shard_parts",
]  # fmt: skip


def column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Any,
    parts: Sequence[int] | None = None,
    sequence_dim: int | None = None,
    operand_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    validate: bool | None = None,
    numerics: str | Numerics | None = "tree8",
    backend: str | None = None,
) -> Tensor:
    """A linear layer of which every rank has some of the N columns of the output.

    Args:
        x: [*, K], the same on every rank; or this rank's tokens, with sequence_dim.
        weight: [N / ranks, K], the rows of this rank: those of rank 0 come first in the whole weight.
        bias: [N / ranks] of this rank, or None.
        group: a ProcessGroup of torch.distributed or a DeviceMesh of one dimension, with 1, 2, 4 or 8 ranks.
            None is a single rank, and not all of them, as in torch.distributed: that is `group.WORLD` there.
        parts: for a weight in which several are fused, such as q, k and v: how many of the N columns each
            has, in the whole weight. A rank has its share of each, one after the other (`shard_parts`). Each
            is a multiple of 8. The gradient of x depends on the parts, so one rank must declare them as well.
        sequence_dim: the dimension of x along which ranks share the tokens; it is gathered.
        operand_dtype, out_dtype, backend: as for `isobit.det_linear`.
        validate: exchange a hash of the call with the other ranks first, so that each raises an error if one
            makes another call. True: in every call. None: in every call on CPU tensors, or with
            ISOBIT_VALIDATE=1, and else in the first call of its kind. False: never, on all ranks.
        numerics: "tree8"; or "chain16", if x needs no gradient.

    Returns:
        [*, N / ranks], the columns of this rank.

    Gradients: that of x is the sum over all N in class tree8, rounded once, on every rank. Those of weight
    and bias are this rank's own.

    Example:
        >>> import torch, isobit
        >>> x, weight = torch.randn(3, 64).bfloat16(), torch.randn(32, 64).bfloat16()
        >>> def on_one_rank(group):
        ...     mine = weight.chunk(group.size)[group.rank]
        ...     return isobit.parallel.column_linear(x, mine, group=group)
        >>> y = torch.cat(isobit.parallel.in_turn(2, on_one_rank), -1)
        >>> torch.equal(y, isobit.det_linear(x, weight, numerics="tree8"))
        True
    """
    ranks = as_group("column_linear", group)

    def parts_here() -> Parts:
        layer = layer_of(
            "column", ranks, parts=parts, sequence_dim=sequence_dim, operand_dtype=operand_dtype,
            out_dtype=out_dtype, numerics=numerics, backend=backend,
        )  # fmt: skip
        return layer, x, weight, bias

    return sharded_linear(ranks, parts_here, device_of(weight), validate)


def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: Any,
    sequence_dim: int | None = None,
    operand_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    validate: bool | None = None,
    numerics: str | Numerics | None = "tree8",
    backend: str | None = None,
) -> Tensor:
    """A linear layer of which every rank has some of the K columns of the input.

    Args:
        x: [*, K / ranks], the columns of this rank: those of rank 0 come first.
        weight: [N, K / ranks], its columns of the weight.
        bias: [N], the same on every rank, or None. It is added once.
        group: as for `column_linear`.
        sequence_dim: the dimension of the output along which ranks share the tokens: each returns its part of
            them. Their number must be a multiple of the number of ranks. None: every rank returns all.
        operand_dtype, out_dtype, backend: as for `isobit.det_linear`.
        validate: as for `column_linear`.
        numerics: "tree8", the only class with a sum over ranks.

    Returns:
        [*, N], on every rank the bits of `det_linear` of class tree8 with the whole x and weight.

    Gradients: each rank has those of its columns of x and weight; that of the bias is whole on every rank.

    Example:
        >>> import torch, isobit
        >>> x, weight = torch.randn(3, 64).bfloat16(), torch.randn(32, 64).bfloat16()
        >>> def on_one_rank(group):
        ...     mine = [t.chunk(group.size, 1)[group.rank] for t in (x, weight)]
        ...     return isobit.parallel.row_linear(*mine, group=group)
        >>> one, other = isobit.parallel.in_turn(2, on_one_rank)
        >>> torch.equal(one, other), torch.equal(one, isobit.det_linear(x, weight, numerics="tree8"))
        (True, True)
    """
    ranks = as_group("row_linear", group)

    def parts_here() -> Parts:
        layer = layer_of(
            "row", ranks, sequence_dim=sequence_dim, operand_dtype=operand_dtype, out_dtype=out_dtype,
            numerics=numerics, backend=backend,
        )  # fmt: skip
        return layer, x, weight, bias

    return sharded_linear(ranks, parts_here, device_of(weight), validate)


_WHY = "it exchanges tensors with other ranks"
column_linear = outside_graphs(column_linear, _WHY)
row_linear = outside_graphs(row_linear, _WHY)


def shard_parts(weight: Tensor, parts: Sequence[int], group: Any) -> Tensor:
    """This rank's rows of a fused weight or bias: its share of every part.

    Args:
        weight: [N, K] or [N], whole.
        parts: how many of its rows each part has.
        group: as for `column_linear`.

    Example:
        >>> import torch, isobit
        >>> qkv = torch.arange(16)  # eight rows of q, four of k, four of v
        >>> isobit.parallel.in_turn(2, lambda group: isobit.parallel.shard_parts(qkv, (8, 4, 4), group))[1]
        tensor([ 4,  5,  6,  7, 10, 11, 14, 15])
    """
    ranks = as_group("shard_parts", group)
    if sum(parts) != len(weight) or any(part % ranks.size for part in parts):
        raise ContractError(
            f"shard_parts(parts: {tuple(parts)}): must add up to the {len(weight)} rows, and each must be a "
            f"multiple of the {ranks.size} ranks"
        )
    made: Tensor = _shard_parts(weight, parts, ranks)
    return made


def join_parts(weight: Tensor, parts: Sequence[int], ranks: int) -> Tensor:
    """A fused weight or bias whose rows are those of rank 0, then those of rank 1, in the order of its parts
    again. `DetColwise(parts=...)` keeps them in the order of ranks.

    Args:
        weight: [N, K] or [N]: what all ranks have, such as the `full_tensor()` of a DTensor.
        parts: how many of its rows each part has.
        ranks: how many ranks it is of.

    Example:
        >>> import torch, isobit
        >>> gate_up = torch.arange(8)  # four rows of gate, four of up
        >>> of_ranks = isobit.parallel.in_turn(
        ...     2, lambda group: isobit.parallel.shard_parts(gate_up, (4, 4), group)
        ... )
        >>> torch.cat(of_ranks)
        tensor([0, 1, 4, 5, 2, 3, 6, 7])
        >>> isobit.parallel.join_parts(torch.cat(of_ranks), (4, 4), ranks=2)
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    if sum(parts) != len(weight) or ranks < 1 or any(part % ranks for part in parts):
        raise ContractError(
            f"join_parts(parts: {tuple(parts)}): must add up to the {len(weight)} rows, and each must be a "
            f"multiple of the {ranks} ranks"
        )
    return in_parts(weight, parts, ranks)


def __getattr__(name: str) -> Any:
    """The styles are imported when they are first used: they need torch.distributed.tensor."""
    if name in ("DetColwise", "DetRowwise"):
        from isobit.layers import styles

        return getattr(styles, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
