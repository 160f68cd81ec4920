"""Layers that several processes on a CPU share over gloo, and the same layers on one: a program.

    python tests/ranks_on_cpus.py

It prints JSON: by number of ranks and rank, what each case found. True is: the bits of one rank.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which FSDP2 imports at its first forward
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import isobit
from isobit.nn import DetLinear, swap_linear
from isobit.parallel import DetColwise, DetRowwise, RanksError, column_linear, join_parts, row_linear

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


# A model


#: The head stays whole, and its vocabulary is no multiple of 8.
CLASSES = {"model.layers.*": "tree8"}


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=53, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        **{"num_key_value_heads": 4} | options,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(BF16).eval()


def qwen3() -> Any:
    """With norms of single heads."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=53, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=4, head_dim=8,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to(BF16).eval()


def by_styles(mesh: DeviceMesh) -> Any:
    """A Llama whose layers are cut before it is given to `zero_drift`."""
    columns = ("q", "k", "v", "gate", "up")
    plan: dict[str, Any] = {f"model.layers.*.*.{name}_proj": DetColwise() for name in columns}
    plan |= {f"model.layers.*.*.{name}_proj": DetRowwise() for name in ("o", "down")}
    return parallelize_module(llama(), mesh, plan)


def run(model: Any) -> dict[str, Any]:
    """Logits, loss, gradients, and a step of decoding."""
    ids = torch.randint(0, 53, (2, 5), generator=torch.Generator().manual_seed(1))
    out = model(ids, labels=ids)
    out.loss.backward()
    with torch.no_grad():
        cache = model(ids[:, :4], use_cache=True).past_key_values
        step = model(ids[:, 4:], past_key_values=cache).logits
    found = {"logits": out.logits, "loss": out.loss, "step": step, "keys": cache.layers[-1].keys}
    return {name: t.detach() for name, t in found.items()} | {"gradients": gradients(model)}


def on_one(place: str) -> None:
    """What the others are compared with, by a model that knows of no ranks."""
    for made in (llama, qwen3):
        model = made()
        isobit.nn.zero_drift(model, numerics=CLASSES)
        torch.save(run(model), f"{place}/{made.__name__}")


def compared(what: str, model: Any, place: str, rank: int, ranks: int) -> dict[str, Any]:
    """A model of ranks with one that knows of none."""
    ours, whole = run(model), torch.load(f"{place}/{what.split()[0]}")
    last = [torch.equal(ours["step"][:, 0], ours["logits"][:, 4])]
    last += [torch.equal(ours[name], whole[name]) for name in ("logits", "loss", "step")]
    return {
        f"{what}: logits, loss, a step": all(last),
        f"{what}: gradients": equal(ours["gradients"], whole["gradients"]),
        f"{what}: heads are cut": torch.equal(ours["keys"], whole["keys"].chunk(ranks, 1)[rank]),
    }


def models(rank: int, mesh: DeviceMesh, place: str) -> dict[str, Any]:
    """With heads, and their keys and values, cut: by `zero_drift`, or before it."""
    found = dict[str, Any]()
    for made in (llama, qwen3):
        model = made()
        on = isobit.nn.zero_drift(model, numerics=CLASSES, tp=mesh)
        found |= compared(made.__name__, model, place, rank, mesh.size())
        on.disable()
        pairs = zip(model.parameters(), made().parameters(), strict=True)
        whole = all(type(a) is nn.Parameter and torch.equal(a, b) for a, b in pairs)
        found[f"{made.__name__}: whole again"] = whole
    if mesh.size() > 2:
        return found
    model = by_styles(mesh)
    with isobit.nn.zero_drift(model, numerics=CLASSES) as on:
        found |= compared("llama by styles", model, place, rank, mesh.size())
        on.check()
    found["llama by styles: still cut"] = isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)
    return found


def an_error_in_a_block(rank: int, mesh: DeviceMesh) -> dict[str, bool]:
    """On one rank: it is raised, and the model stays cut until all ranks restore it."""
    model, notes = llama(), []
    on = isobit.nn.zero_drift(model, numerics=CLASSES, tp=mesh)
    try:
        with on:
            if rank == 1:
                raise KeyError("of one rank")
    except KeyError as error:
        notes = getattr(error, "__notes__", ["stays cut, and enabled"])  # Python 3.10 warns
        notes += [] if isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor) else ["whole"]
        on.disable()
    pairs = zip(model.parameters(), llama().parameters(), strict=True)
    told = rank != 1 or (len(notes) == 1 and "stays cut, and enabled" in notes[0])
    return {"an error in a block": told and all(torch.equal(a, b) for a, b in pairs)}


def disagreements(rank: int, mesh: DeviceMesh) -> dict[str, str]:
    """Before a model is cut. Nothing is changed on any rank."""
    layers = [Mlp() for _ in range(3)]
    styles: list[Any] = [
        DetRowwise() if rank else DetColwise(),
        DetColwise(numerics=("chain16", "tree8")[rank > 0]),
    ]
    cut = parallelize_module(Mlp(), mesh, {"up": DetColwise()})
    plans, classes = llama(), llama()
    if rank == 1:
        plans.config.base_model_tp_plan = None
    given = CLASSES | ({"lm_head": "tree8"} if rank == 1 else {})
    found = {
        "another style": told(lambda: styles[0]._apply(layers[0].up, mesh)),
        "another class of a style": told(lambda: styles[1]._apply(layers[1].up, mesh)),
        "cut otherwise": told(lambda: DetRowwise()._apply(cut.up, mesh)),
        "refused by one": told(lambda: isobit.nn.zero_drift(plans, numerics=CLASSES, tp=mesh), Exception),
        "classes of one": told(lambda: isobit.nn.zero_drift(classes, numerics=given, tp=mesh)),
    }  # fmt: skip
    for model in (*layers, plans, classes):
        assert not any(isinstance(module, DetLinear) for module in model.modules())
    return found


def refused_models(mesh: DeviceMesh) -> dict[str, str]:
    few, plain = llama(num_key_value_heads=1), llama()
    cut, normed = by_styles(mesh), qwen3()
    parallelize_module(normed.model.layers[0].mlp, mesh, {"up_proj": DetColwise()})
    torchs = llama()
    parallelize_module(torchs.model.layers[0].mlp, mesh, {"up_proj": ColwiseParallel()})
    return {
        "cut already": told(lambda: isobit.nn.zero_drift(cut, numerics=CLASSES, tp=mesh)),
        "norms of heads": told(lambda: isobit.nn.zero_drift(normed, numerics=CLASSES)),
        "cut by torch's styles": told(lambda: isobit.nn.zero_drift(torchs, numerics=CLASSES)),
        "few heads": told(lambda: isobit.nn.zero_drift(few, numerics=CLASSES, tp=mesh)),
        "a model of chain16": told(lambda: isobit.nn.zero_drift(plain, tp=mesh)),
    }


# Errors


def told(call: Callable[[], Any], kind: Any = isobit.ContractError) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return ""


def refusals(rank: int, mesh: DeviceMesh) -> dict[str, str]:
    group, ranks = dist.group.WORLD, mesh.size()
    x, weight = drawn(1, 3, K), drawn(2, N, K)
    part = [t.chunk(ranks, 1)[rank] for t in (x, weight)]
    columns = weight.chunk(ranks)[rank]
    needs_x = x.clone().requires_grad_()
    uneven = distribute_tensor(drawn(2, N, 30), mesh, [Shard(1)])
    flat = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "tp"))
    two = distribute_tensor(weight, flat, [Shard(0), Shard(1)])
    rows, cut = (distribute_tensor(weight, mesh, [Shard(dim)]) for dim in (0, 1))
    cut_twice = parallelize_module(Gated(), mesh, {"gate_up": DetColwise()})
    odd = weight[: 5 * ranks].chunk(ranks)[rank]
    return {
        "another class": told(lambda: column_linear(
            x, columns, group=group, numerics="chain16" if rank == 1 else "tree8")),
        "another dtype": told(lambda: row_linear(
            *part, group=group, out_dtype=torch.float32 if rank == 0 else None)),
        "other rows": told(lambda: row_linear(part[0][: 2 + (rank == 1)], part[1], group=group)),
        "refused on one": told(lambda: row_linear(
            part[0] if rank else part[0].half(), part[1], group=group)),
        "chain16": told(lambda: row_linear(*part, group=group, numerics="chain16")),
        "chain16 and a gradient": told(lambda: column_linear(
            needs_x, columns, group=group, numerics="chain16")),
        "odd": told(lambda: column_linear(needs_x, odd, group=group)),
        "parts": told(lambda: column_linear(x, columns, group=group, parts=(8, 8))),
        "two dimensions": told(lambda: isobit.det_linear(x, two, numerics="tree8")),
        "parts of a style": told(
            lambda: parallelize_module(Gated(), mesh, {"gate_up": DetColwise(parts=(N, 8))})),
        "parts of a shard": told(
            lambda: parallelize_module(cut_twice, mesh, {"gate_up": DetColwise(parts=(N, N))})),
        "a mesh": told(lambda: column_linear(x, columns, group=flat)),
        "no class": told(lambda: isobit.det_linear(part[0], cut, group=mesh)),
        "uneven": told(lambda: isobit.det_linear(drawn(1, 3, 7), uneven, numerics="tree8", group=mesh)),
        "not said": told(lambda: isobit.det_linear(x, rows, numerics="tree8")),
        "another mesh": told(lambda: isobit.det_linear(x, rows, numerics="tree8", group=flat["tp"])),
        "a plain shard": told(lambda: isobit.det_linear(x, columns, numerics="tree8", group=mesh)),
        "no group": told(lambda: column_linear(x, columns, group=7)),
    }  # fmt: skip


def deaths(rank: int) -> dict[str, Any]:
    """The last rank ends in the middle of a call; others must not wait for the time-out."""
    ranks = dist.get_world_size()
    part = drawn(1, 300, K).chunk(ranks, 1)[rank], drawn(2, N, K).chunk(ranks, 1)[rank]
    row_linear(*part, group=dist.group.WORLD)
    if rank == ranks - 1:
        os._exit(0)
    begun = time.monotonic()
    said = told(lambda: row_linear(*part, group=dist.group.WORLD), RanksError)
    return {"said": said, "seconds": time.monotonic() - begun}


def main(rank: int, ranks: int, place: str, dies: bool) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if ranks == 1:
        on_one(place)
        return
    store = dist.FileStore(f"{place}/store of {ranks} {dies}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    if dies:
        found = deaths(rank)
    else:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        found |= functions(rank, ranks, 5) | functions(rank, ranks, 520)
        found |= modules(rank, mesh, False) | modules(rank, mesh, True) | dtensors(rank, mesh)
        found |= fused(rank, mesh) | compiled(rank, mesh) | an_error_in_a_block(rank, mesh)
        if ranks == 4:
            found |= with_fsdp(rank)
        found |= models(rank, mesh, place)
        found["refusals"] = refusals(rank, mesh) | refused_models(mesh) | disagreements(rank, mesh)
    Path(place, str(rank)).write_text(json.dumps(found))
    if not dies:
        dist.destroy_process_group()
    else:
        os._exit(0)  # an orderly end would wait for the rank that is no more


def on(place: str, ranks: int, dies: bool = False) -> list[Any]:
    fork = multiprocessing.get_context("fork")  # so that imports, which take the longest, are made once
    processes = [fork.Process(target=main, args=(rank, ranks, place, dies)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(f"the processes ended with {[process.exitcode for process in processes]}")
    left = range(ranks - 1) if dies else range(ranks)
    return [json.loads(Path(place, str(rank)).read_text()) for rank in left] if ranks > 1 else []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        on(place, 1)
        print(json.dumps({"2": on(place, 2), "4": on(place, 4), "a death": on(place, 4, dies=True)}))
