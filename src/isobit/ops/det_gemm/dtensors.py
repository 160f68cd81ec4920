"""`det_linear` with a weight that is a DTensor: how it is cut says how the ranks compute it.

    weight Shard(0)     a column layer: x whole, y cut along its last dimension
    weight Shard(1)     a row layer: x cut along its last dimension, y whole
    weight Replicate()  every rank computes all of it

x may be a DTensor, and then y is one; or the tensor that this rank has, and then y is too.

A call must say that ranks share the layer: by the group, or by an x that is a DTensor on the mesh of the
weight (`isobit.ranks.shared`).
"""

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any, Literal

from torch import Tensor

from isobit.frame.backend import Explanation
from isobit.frame.composed import outside_graphs
from isobit.frame.contract import ContractError, describe, is_dtensor
from isobit.frame.op import OPS
from isobit.ops.det_gemm.sharded import Parts, device_of, layer_of, sharded_linear
from isobit.ranks import Group, dtensor_error, local_part, ranks_that_share


def _kinds() -> tuple[Any, Any, Any]:
    """DTensor, Replicate, Shard: whoever has a DTensor has imported them."""
    distributed = import_module("torch.distributed.tensor")
    return distributed.DTensor, distributed.Replicate, distributed.Shard


def _linear_of_dtensors(
    x: Tensor, weight: Any, bias: Any, *, group: Any, validate: bool | None, sequence_dim: int | None = None,
    parts: Sequence[int] | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """`det_linear` of a weight that is a DTensor. `options` are those of `det_linear`. With `parts` its rows
    are in the order of ranks (`in_ranks`)."""
    DTensor, Replicate, Shard = _kinds()
    if is_dtensor(weight) and weight.device_mesh.ndim == 1 and type(weight.placements[0]) is Replicate:
        return _on_every_rank(x, weight, bias, validate, sequence_dim, options)
    own = ranks_that_share("det_linear", "weight", weight, x, group)

    def parts_here() -> Parts:
        mesh, placement = _cut(weight, own)
        kind: Literal["column", "row"] = "column" if placement.dim == 0 else "row"
        if isinstance(x, DTensor) and (sequence_dim is not None or parts is not None):
            said = "parts" if sequence_dim is None else "tokens that ranks share"
            raise _error("x", x, f"with {said} it must be this rank's tensor (.to_local())")
        layer = layer_of(kind, own, parts=parts, sequence_dim=sequence_dim, **options)
        wanted = (Replicate(), Shard(0)) if kind == "column" else (Shard(x.ndim - 1), Replicate())
        local = _local("x", x, mesh, wanted[0]), weight.to_local(), _local("bias", bias, mesh, wanted[1])
        return layer, *local

    y = sharded_linear(own, parts_here, device_of(weight), validate)
    if not isinstance(x, DTensor):
        return y
    placed = Shard(y.ndim - 1) if weight.placements[0].dim == 0 else Replicate()
    made: Tensor = DTensor.from_local(y, weight.device_mesh, [placed], run_check=False)
    return made


linear_of_dtensors = outside_graphs(_linear_of_dtensors, "it exchanges tensors with other ranks")


def _cut(weight: Any, group: Group) -> tuple[Any, Any]:
    """The mesh of a weight, and how it is cut over its ranks."""
    if not is_dtensor(weight):
        raise ContractError(
            f"det_linear(group: {group.size} ranks, weight: {describe(weight)}): weight must be a DTensor "
            "here; isobit.parallel.column_linear and row_linear take the shard of a rank"
        )
    _, _, Shard = _kinds()
    (placement,) = weight.placements
    if type(placement) is not Shard or placement.dim not in (0, 1):
        raise _error("weight", weight, f"is placed {placement!r}; must be Shard(0), Shard(1) or Replicate()")
    size = weight.shape[placement.dim]
    if size % group.size:
        raise _error("weight", weight, f"{placement!r} cuts {size} over {group.size} ranks unevenly")
    return weight.device_mesh, placement


def explained(given: dict[str, Any]) -> Explanation:
    """What serves the product of this rank, of the shards that it has."""
    ranks_that_share("det_linear", "weight", given["weight"], given["x"], given["group"])
    local = {n: t.to_local() if is_dtensor(t) else t for n, t in given.items() if n != "group"}
    return OPS["det_linear"].explain(**OPS["det_linear"].adapt(local))


def _on_every_rank(
    x: Any, weight: Any, bias: Any, validate: bool | None, sequence_dim: int | None, options: dict[str, Any]
) -> Tensor:
    """Every rank has the whole weight."""
    DTensor, Replicate, _ = _kinds()
    if sequence_dim is not None:
        raise _error("weight", weight, "is whole on every rank, where sequence_dim has no meaning")
    local = [_local(n, t, weight.device_mesh, Replicate()) for n, t in (("x", x), ("bias", bias))]
    whole = weight.to_local(grad_placements=[Replicate()])
    y: Tensor = OPS["det_linear"](x=local[0], weight=whole, bias=local[1], validate=validate, **options)
    if not isinstance(x, DTensor):
        return y
    made: Tensor = DTensor.from_local(y, weight.device_mesh, [Replicate()], run_check=False)
    return made


_error = partial(dtensor_error, "det_linear")
_local = partial(local_part, "det_linear")
