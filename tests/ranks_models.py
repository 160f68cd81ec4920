"""Models whose layers the processes of `ranks_on_cpus.py` share, compared with the same models on one."""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import isobit
from isobit.parallel import DetColwise, DetRowwise
from ranks_layers import BF16, equal, gradients

#: The head stays whole, and its vocabulary is no multiple of 8.
CLASSES = {"model.layers.*": "tree8"}


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=53, hidden_size=32, intermediate_size=32, num_attention_heads=4,
        **{"num_hidden_layers": 2, "num_key_value_heads": 4} | options,
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


def found(rank: int, mesh: DeviceMesh, place: str) -> dict[str, Any]:
    """With heads, and their keys and values, cut: by `zero_drift`, or before it."""
    results = dict[str, Any]()
    for made in (llama, qwen3):
        model = made()
        on = isobit.nn.zero_drift(model, numerics=CLASSES, tp=mesh)
        results |= compared(made.__name__, model, place, rank, mesh.size())
        results |= an_error_in_a_block(rank, model, on) if made is llama else {}
        on.disable()  # again, where the block has
        pairs = zip(model.parameters(), made().parameters(), strict=True)
        whole = all(type(a) is nn.Parameter and torch.equal(a, b) for a, b in pairs)
        results[f"{made.__name__}: whole again"] = whole
    if mesh.size() > 2:
        return results
    model = by_styles(mesh)
    with isobit.nn.zero_drift(model, numerics=CLASSES) as on:
        results |= compared("llama by styles", model, place, rank, mesh.size())
        on.check()
    results["llama by styles: still cut"] = isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)
    return results


def an_error_in_a_block(rank: int, model: Any, on: Any) -> dict[str, bool]:
    """On one rank: it is raised, and the model stays cut there until this rank restores it as well, for which
    the others wait at the end of their blocks."""
    kept = rank != 1
    try:
        with on:
            if rank == 1:
                raise KeyError("of one rank")
    except KeyError as error:
        (note,) = getattr(error, "__notes__", ["stays cut, and enabled"])  # Python 3.10 warns
        cut = isinstance(model.model.layers[0].mlp.up_proj.weight, DTensor)
        kept = cut and "stays cut, and enabled" in note
        on.disable()
    return {"an error in a block": kept}
