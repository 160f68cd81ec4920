"""How a call says that the ranks of a mesh share a weight: the same rule for all functions that take one.

FSDP2 cuts parameters as ranks that share a layer do, and means something else: each rank has tokens of its
own, and gathers the weight around a forward. So a DTensor alone says nothing. A call must name the group, or
have an input that is a DTensor on the mesh of the weight: then every rank of the mesh has the same tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from isobit.frame.contract import ContractError, describe, is_dtensor
from isobit.ranks.group import Group, as_group


def ranks_that_share(what: str, name: str, weight: Any, x: Any, group: Any) -> Group:
    """The ranks that share an argument `name` of the function `what`, or an error if the call does not say
    that any do. `x` is its input with tokens."""
    if not is_dtensor(weight):
        return as_group(what, group)
    mesh = weight.device_mesh
    if mesh.ndim != 1:
        raise dtensor_error(
            what, name, weight, f"its mesh has {mesh.ndim} dimensions, {mesh.mesh_dim_names}; it must be cut "
            "along one only. FSDP2 gathers the others around a forward: call this inside one"
        )  # fmt: skip
    if group is None and not (is_dtensor(x) and x.device_mesh == mesh):
        raise dtensor_error(
            what, name, weight, f"is cut over {mesh.size()} ranks, {weight.placements[0]}. If they share it, "
            f"say so: group={name}.device_mesh. If FSDP2 has cut it, the module that owns it has all of it "
            "inside its forward: call this there, or through isobit.nn.in_forward"
        )  # fmt: skip
    own = as_group(what, mesh)
    if group is not None and group is not mesh and as_group(what, group) != own:
        raise dtensor_error(what, name, weight, "is on another mesh than the ranks of group")
    return own


def local_part(what: str, name: str, t: Any, mesh: Any, wanted: Any) -> Any:
    """The part that this rank has of a tensor that may be a DTensor."""
    if not is_dtensor(t):
        return t
    if t.device_mesh != mesh:
        raise dtensor_error(what, name, t, "must be on the mesh of the weight")
    if tuple(t.placements) != (wanted,):
        raise dtensor_error(
            what, name, t, f"is placed {t.placements[0]!r}; with this weight it must be {wanted!r}"
        )
    return t.to_local(grad_placements=[wanted])


def dtensor_error(what: str, name: str, t: Any, rule: str) -> ContractError:
    return ContractError(f"{what}({name}: DTensor {describe(t)}): {rule}")


@contextmanager
def under_the_name(what: str, part: str) -> Iterator[None]:
    """Errors of an op that is a part of a function, under the name that the user has called."""
    try:
        yield
    except ContractError as error:
        raise type(error)(str(error).replace(f"{part}(", f"{what}(", 1)) from None
