"""`det_linear` with a weight that is a DTensor: how it is cut says how the ranks compute it.

    weight Shard(0)     a column layer: x whole, y cut along its last dimension
    weight Shard(1)     a row layer: x cut along its last dimension, y whole
    weight Replicate()  every rank computes all of it

x may be a DTensor, and then y is one; or the tensor that this rank has, and then y is too.

FSDP2 cuts parameters in the same way, to gather them around a forward. So a call must say that ranks share
the layer: by the group, or by an x that is a DTensor on the mesh of the weight.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Literal

from torch import Tensor

from isobit.frame.contract import ContractError, describe, is_dtensor
from isobit.frame.op import OPS
from isobit.ops.det_gemm.sharded import layer_of, sharded_linear
from isobit.ranks import as_group


def _kinds() -> tuple[Any, Any, Any]:
    """DTensor, Replicate, Shard: whoever has a DTensor has imported them."""
    distributed = import_module("torch.distributed.tensor")
    return distributed.DTensor, distributed.Replicate, distributed.Shard


def linear_of_dtensors(
    x: Tensor, weight: Any, bias: Any, *, group: Any, validate: bool | None, sequence_dim: int | None = None,
    parts: Sequence[int] | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """`det_linear` of a weight that is a DTensor. `options` are those of `det_linear`. With `parts` its rows
    are in the order of ranks (`in_ranks`)."""
    if not is_dtensor(weight):
        raise ContractError(
            f"det_linear(group: {type(group).__name__}, weight: {describe(weight)}): weight must be a "
            "DTensor here; isobit.parallel.column_linear and row_linear take the shard of a rank"
        )
    DTensor, Replicate, Shard = _kinds()
    mesh, cut = weight.device_mesh, weight.shape
    if mesh.ndim != 1:
        raise _error(
            "weight", weight, f"its mesh has {mesh.ndim} dimensions, {mesh.mesh_dim_names}; it must be cut "
            "along one only. FSDP2 gathers the others around a forward: call this inside one"
        )  # fmt: skip
    (placement,) = weight.placements
    if type(placement) is Replicate:
        return _on_every_rank(x, weight, bias, validate, sequence_dim, options)
    if type(placement) is not Shard or placement.dim not in (0, 1):
        raise _error("weight", weight, f"is placed {placement}; must be Shard(0), Shard(1) or Replicate()")
    _check_shared(x, weight, group)
    kind: Literal["column", "row"] = "column" if placement.dim == 0 else "row"
    layer = layer_of(kind, mesh, parts=parts, sequence_dim=sequence_dim, **options)
    if cut[placement.dim] % layer.group.size:
        raise _error(
            "weight", weight, f"{placement} cuts {cut[placement.dim]} over {layer.group.size} ranks unevenly"
        )  # fmt: skip
    if isinstance(x, DTensor) and (sequence_dim is not None or parts is not None):
        what = "parts" if sequence_dim is None else "tokens that ranks share"
        raise _error("x", x, f"with {what} it must be this rank's tensor (.to_local())")
    wanted = (Replicate(), Shard(0)) if kind == "column" else (Shard(x.ndim - 1), Replicate())
    local = _local("x", x, mesh, wanted[0]), weight.to_local(), _local("bias", bias, mesh, wanted[1])
    y = sharded_linear(layer, *local, validate)
    if not isinstance(x, DTensor):
        return y
    placed = Shard(y.ndim - 1) if kind == "column" else Replicate()
    made: Tensor = DTensor.from_local(y, mesh, [placed], run_check=False)
    return made


def _check_shared(x: Any, weight: Any, group: Any) -> None:
    """An error unless the call says that the ranks of the weight's mesh share the layer."""
    mesh = weight.device_mesh
    if group is not None:
        if group is not mesh and as_group("det_linear", group) != as_group("det_linear", mesh):
            raise _error("weight", weight, "is on another mesh than the ranks of group")
    elif not (is_dtensor(x) and x.device_mesh == mesh):
        raise _error(
            "weight", weight, f"is cut over {mesh.size()} ranks, {weight.placements[0]}. If they share this "
            "layer, say so: group=weight.device_mesh. If FSDP2 has cut it, the module that owns it has all "
            "of it inside its forward: call this there, or through isobit.nn.in_forward"
        )  # fmt: skip


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


def _local(name: str, t: Any, mesh: Any, wanted: Any) -> Any:
    """The part of a tensor that this rank has."""
    if not is_dtensor(t):
        return t
    if t.device_mesh != mesh:
        raise _error(name, t, "must be on the mesh of the weight")
    if tuple(t.placements) != (wanted,):
        raise _error(name, t, f"is placed {t.placements[0]}; with this weight it must be {wanted}")
    return t.to_local(grad_placements=[wanted])


def _error(name: str, t: Any, rule: str) -> ContractError:
    return ContractError(f"det_linear({name}: DTensor {describe(t)}): {rule}")
