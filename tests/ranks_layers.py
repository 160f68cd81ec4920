"""Linear layers that the processes of `ranks_on_cpus.py` share, compared with the same layers on one."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import isobit
from isobit.nn import DetLinear, swap_linear
from isobit.parallel import DetColwise, DetRowwise, column_linear, join_parts, row_linear
from isobit.ranks import as_group

BF16 = torch.bfloat16
K, N = 64, 32


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def differentiated(call: Callable[..., Tensor], dy: Tensor, *tensors: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = call(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def found(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    ranks = mesh.size()
    results = functions(rank, ranks, 5) | functions(rank, ranks, 520)
    results |= (
        modules(rank, mesh, False) | modules(rank, mesh, True) | dtensors(rank, mesh) | fused(rank, mesh)
    )
    # Layers are called with a group in every forward.
    known = as_group("", mesh) is as_group("", mesh.get_group()) is as_group("", mesh)
    results["one view of a group"] = known and as_group("", dist.group.WORLD) is as_group(
        "", dist.group.WORLD
    )
    return results | (with_fsdp(rank) if ranks == 4 else {})


# Functions


def functions(rank: int, ranks: int, rows: int) -> dict[str, bool]:
    """With few rows partial sums are gathered whole, with many each rank folds a slice."""
    group, numerics = dist.group.WORLD, "tree8"
    x, weight, bias, dy = drawn(1, rows, K), drawn(2, N, K), drawn(3, N), drawn(4, rows, N)

    def mine(t: Tensor, dim: int) -> Tensor:
        return t.chunk(ranks, dim)[rank]

    def plain(*tensors: Tensor) -> Tensor:
        return isobit.det_linear(*tensors, numerics=numerics)

    y, dx, dw, db = differentiated(plain, dy, x, weight, bias)
    if rank == ranks - 1:
        time.sleep(0.3)  # one that is late
    row = differentiated(lambda *t: row_linear(*t, group=group), dy, mine(x, 1), mine(weight, 1), bias)
    column = differentiated(
        lambda *t: column_linear(*t, group=group), mine(dy, 1), x, mine(weight, 0), mine(bias, 0)
    )
    return {
        f"row, {rows}": equal(row, [y, mine(dx, 1), mine(dw, 1), db]),
        f"column, {rows}": equal(column, [mine(y, 1), dx, mine(dw, 0), mine(db, 0)]),
    }


# Modules


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(K, N), nn.Linear(N, K)
        for i, parameter in enumerate(self.parameters()):
            parameter.data = drawn(10 + i, *parameter.shape) / 8

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(x)))
        return out


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad for p in model.parameters()]
    return [g.full_tensor() if isinstance(g, DTensor) else g for g in found if g is not None]


def modules(rank: int, mesh: DeviceMesh, tokens: bool) -> dict[str, bool]:
    """Styles on layers, swapped before or after, and tokens cut between layers."""
    found, ranks = {}, mesh.size()
    x, dy = drawn(5, 8, 3, K), drawn(6, 8, 3, K)
    whole = Mlp()
    swap_linear(whole, numerics="tree8")
    given = x.clone().requires_grad_()
    y = whole(given)
    y.backward(dy)
    assert given.grad is not None
    for first in ("swap", "shard") if tokens else ("swap", "shard", "torch's styles"):
        model, dim = Mlp(), 0 if tokens else None
        if first == "swap":
            swap_linear(model, numerics="tree8")
        plan: dict[str, Any] = {"up": DetColwise(sequence_dim=dim), "down": DetRowwise(sequence_dim=dim)}
        if first == "torch's styles":
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
        if first == "torch's styles":
            swap_linear(model, numerics="tree8")
        assert isinstance(model.up, DetLinear) and isinstance(model.up.weight, DTensor)

        def own(t: Tensor) -> Tensor:
            return t.chunk(ranks)[rank] if tokens else t

        mine = own(x).clone().requires_grad_()
        ours = model(mine)
        ours.backward(own(dy))
        assert mine.grad is not None
        theirs = [own(y), own(given.grad), *gradients(whole)]
        found[f"{first} first{', tokens cut' if tokens else ''}"] = equal(
            [ours, mine.grad, *gradients(model)], theirs
        )
    return found


def compiled(rank: int, mesh: DeviceMesh) -> dict[str, bool]:
    """A compiled model has graph breaks around what exchanges tensors."""
    model, x = Mlp(), drawn(5, 8, K)
    parallelize_module(model, mesh, {"up": DetColwise(), "down": DetRowwise()})
    whole = Mlp()
    swap_linear(whole, numerics="tree8")
    return {"compiled": torch.equal(torch.compile(model, backend="eager")(x), whole(x))}


class Gated(nn.Module):
    """With gate and up in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(K, 2 * N), nn.Linear(N, K)
        for i, parameter in enumerate(self.parameters()):
            parameter.data = drawn(10 + i, *parameter.shape) / 8

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(torch.relu(gate) * up)
        return out


def fused(rank: int, mesh: DeviceMesh) -> dict[str, bool]:
    """A layer in parts, by a style; on one rank its parts are declared as well."""
    x, dy, parts, found = drawn(5, 8, K), drawn(6, 8, K), (N, N), []
    alone = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("dp", "tp"))["tp"]
    for where in (mesh, alone):
        model = Gated()
        parallelize_module(model, where, {"gate_up": DetColwise(parts=parts), "down": DetRowwise()})
        given = x.clone().requires_grad_()
        y = model(given)
        y.backward(dy)
        assert given.grad is not None
        weight, bias, *down = gradients(model)
        joined = [join_parts(t, parts, where.size()) for t in (weight, bias)]
        found.append([y.detach(), given.grad, *joined, *down])
    plain = Gated()
    swap_linear(plain, numerics="tree8")
    made = column_linear(x, plain.gate_up.weight, plain.gate_up.bias, group=None, parts=parts)
    return {
        "fused by a style": equal(*found),
        "fused: y is that of no parts": torch.equal(found[0][0], plain(x)) and torch.equal(
            made, plain.gate_up(x)),
    }  # fmt: skip


def dtensors(rank: int, mesh: DeviceMesh) -> dict[str, bool]:
    """DTensors in and out."""
    x, weight, bias = drawn(1, 5, K), drawn(2, N, K), drawn(3, N)
    y = isobit.det_linear(x, weight, bias, numerics="tree8")

    def spread(t: Tensor, placement: Any) -> Tensor:
        return distribute_tensor(t, mesh, [placement])

    def product(*placements: Any) -> Any:
        tensors = [spread(t, p) for t, p in zip((x, weight, bias), placements, strict=True)]
        return isobit.det_linear(*tensors, numerics="tree8")

    cut = [spread(t, Shard(0)) for t in (weight, bias)]
    said = isobit.det_linear(x, *cut, numerics="tree8", group=mesh)
    column = product(Replicate(), Shard(0), Shard(0))
    row = product(Shard(1), Shard(1), Replicate())
    whole = product(Replicate(), Replicate(), Replicate())
    return {
        "DTensor weight and a group": torch.equal(said, y.chunk(mesh.size(), 1)[rank]),
        "DTensor column": column.placements == (Shard(1),) and torch.equal(column.full_tensor(), y),
        "DTensor row": row.placements == (Replicate(),) and torch.equal(row.to_local(), y),
        "DTensor whole": torch.equal(whole.to_local(), y),
    }


def with_fsdp(rank: int) -> dict[str, bool]:
    """FSDP2 on one dimension of a mesh, ranks that share layers on the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, whole = Mlp(), Mlp()
    swap_linear(whole, numerics="tree8")
    parallelize_module(model, mesh["tp"], {"up": DetColwise(), "down": DetRowwise()})
    fully_shard(model, mesh=mesh["dp"])
    x, dy = drawn(20 + rank // 2, 8, K), drawn(6, 8, K)
    y = model(x)
    y.backward(dy)
    theirs = whole(x)
    theirs.backward(dy)
    own, together = gradients(whole), gradients(model)
    other = drawn(20 + 1 - rank // 2, 8, K)
    whole.zero_grad()
    whole(other).backward(dy)
    means = [(a.float() + b.float()) / 2 for a, b in zip(own, gradients(whole), strict=True)]
    near = all(
        torch.allclose(a.float(), b, rtol=0.02, atol=0.02) for a, b in zip(together, means, strict=True)
    )
    return {"FSDP2: forward": torch.equal(y, theirs), "FSDP2: gradients are means": near}
