"""Calls that cannot be made, and models that cannot be cut: an error on each of the processes of
`ranks_on_cpus.py`. It may be about one rank alone."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import isobit
from isobit.nn import DetLinear
from isobit.parallel import DetColwise, DetRowwise, column_linear, row_linear
from ranks_layers import Gated, K, Mlp, N, drawn
from ranks_models import CLASSES, by_styles, llama, qwen3


def found(rank: int, mesh: DeviceMesh) -> dict[str, str]:
    """Of models with two ranks, which are as good as four, and quicker."""
    if mesh.size() == 2:
        return refused_models(mesh) | disagreements(rank, mesh)
    return refusals(rank, mesh) | of_vocabularies(rank, mesh)


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
        "x not cut": told(lambda: row_linear(x, part[1], group=group)),
        "words": told(lambda: column_linear(x, columns, group=group, parts="qkv")),  # type: ignore[arg-type]
        "a dimension by name": told(
            lambda: row_linear(*part, group=group, sequence_dim="tokens")),  # type: ignore[arg-type]
        "no tensor": told(lambda: column_linear(x, None, group=group)),  # type: ignore[arg-type]
        "another dtype of x": told(lambda: column_linear(x.half(), columns, group=group)),
        "no group": told(lambda: column_linear(x, columns, group=7)),
    }  # fmt: skip


def of_vocabularies(rank: int, mesh: DeviceMesh) -> dict[str, str]:
    group: Any = dist.group.WORLD
    hidden, ids, other = drawn(1, 3, K), torch.arange(3), int(rank == 1)
    own = drawn(2, 128, K).chunk(mesh.size())[rank]
    z = (hidden @ own.t()).float()
    by_rows = DTensor.from_local(z, mesh, [Shard(0)])

    def head(hidden: Tensor = hidden, own: Tensor = own, ids: Tensor = ids, **options: Any) -> str:
        return told(lambda: isobit.linear_logp(hidden, own, ids, group=group, **options))

    return {
        "another temperature": head(temperature=1.0 + rank),
        "other tokens": head(ids=ids + other),
        "a gradient of one": head(hidden.clone().requires_grad_(not other)),
        "all rows": head(own=drawn(2, 128, K) if other else own, padded_vocab=128, vocab_size=128),
        "rows of one": head(own=own[other:], padded_vocab=128, vocab_size=128),
        "another temperature of logp": told(lambda: isobit.logp(z, ids, temperature=1.0 + rank, group=group)),
        "logits cut by rows": told(lambda: isobit.logp(by_rows, ids)),
    }


def disagreements(rank: int, mesh: DeviceMesh) -> dict[str, str]:
    """Before a model is cut. Nothing is changed on any rank."""
    layers = [Mlp() for _ in range(3)]
    styles: list[Any] = [
        DetRowwise() if rank else DetColwise(),
        DetColwise(numerics=("chain16", "tree8")[rank > 0]),
    ]
    cut = parallelize_module(Mlp(), mesh, {"up": DetColwise()})
    plans, classes = llama(num_hidden_layers=1), llama(num_hidden_layers=1)
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
