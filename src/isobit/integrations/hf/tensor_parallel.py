"""A model whose linear layers the ranks of a mesh share: `zero_drift(model, tp=mesh)`.

Which layers are cut, and along which dimension, is what transformers itself declares for a model
(`base_model_tp_plan`): q, k, v, gate and up by columns, o and down by rows. So every rank has some heads, and
attention needs no sum over ranks. Embedding, norms and LM head stay whole on every rank. Norms of single
heads (Qwen 3) get this rank's heads; the gradient of their weight is that of all heads, on every rank.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from isobit.integrations.hf.norms import DetRMSNorm
from isobit.integrations.hf.refusals import refusal
from isobit.layers.classes import Classes, class_given, layers_of_adapters
from isobit.layers.linear import DetLinear
from isobit.numerics import LEAVES, TREE8
from isobit.ranks import agree, as_group, shown

T = TypeVar("T")

#: On the model: the names of the layers that were cut.
CUT = "cut_by_zero_drift"

_KINDS = ("colwise", "rowwise")

#: The word of a plan for a norm of single heads.
_OF_HEADS = "replicated_with_grad_allreduce"


def layers_to_cut(model: Any) -> dict[str, str]:
    """The linear layers that the plan of a model names, with its word for how each is cut."""
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    prefix, results = f"{model.base_model_prefix}.", {}
    for name, module in model.named_modules():
        key = ".".join("*" if part.isdigit() else part for part in name.removeprefix(prefix).split("."))
        if name.startswith(prefix) and key in plan and isinstance(module, nn.Module):
            results[name] = plan[key]
    return results


def check_tp(model: Any, mesh: Any, numerics: Classes) -> None:
    """An error, the same on every rank, if the ranks of this mesh cannot share this model."""
    ranks = as_group("zero_drift", mesh).size
    layers, config = layers_to_cut(model), model.config
    if any(getattr(module, "of_ranks", False) for module in model.modules()):
        raise refusal(model, "tp: ranks share its layers already; call zero_drift without tp")
    if not layers:
        raise refusal(model, "tp: its config has no plan (base_model_tp_plan) of how to cut its layers")
    for name, how in layers.items():
        layer = model.get_submodule(name)
        if how == _OF_HEADS:
            continue
        if how not in _KINDS or not isinstance(layer, nn.Linear):
            raise refusal(
                model, f"tp: {name} is {how!r} in its plan; only linear layers can be cut, by columns or rows"
            )  # fmt: skip
        given = class_given(numerics, name)
        if given is None or given.split("/")[0] != TREE8:
            raise refusal(
                model,
                f'tp: {name} must be of class {TREE8}: give numerics="{TREE8}", on one rank as on several',
            )
        cut = layer.out_features if how == "colwise" else layer.in_features
        if cut % LEAVES:
            raise refusal(model, f"tp: {name} has {cut} features to cut, and not a multiple of {LEAVES}")
    if layers_of_adapters(model):
        raise refusal(model, "tp: it has adapters, whose layers would be cut as well; merge them first")
    for what in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, what, None)
        if heads is not None and heads % ranks:
            raise refusal(
                model, f"tp: {what}={heads} cannot be divided among {ranks} ranks: every rank has whole "
                "heads, and heads of keys and values are not copied to several. Use fewer ranks"
            )  # fmt: skip


def _norms_of_heads(model: Any) -> dict[str, Any]:
    """The norms of single heads in the plan of a model."""
    names = [name for name, how in layers_to_cut(model).items() if how == _OF_HEADS]
    return {name: model.get_submodule(name) for name in names}


def check_cut(model: Any) -> None:
    """An error if layers of a model were cut before, and it has norms that were not."""
    if not any(getattr(module, "of_ranks", False) for module in model.modules()):
        return
    for name, module in _norms_of_heads(model).items():
        if getattr(module, "heads_at", None) is None:
            raise refusal(
                model, f"ranks share its layers, and {name} is a norm of single heads, whose gradient is a "
                "sum over ranks: give zero_drift the whole model, with tp=mesh"
            )  # fmt: skip


def dimensions_of_heads(model: Any) -> dict[str, int]:
    """The norms of single heads in the plan of a model, with the dimension of their input that has the heads;
    an error if one cannot be served. The model is still whole, and its norms are swapped."""
    modules = _norms_of_heads(model)
    for name, module in modules.items():
        if not isinstance(module, DetRMSNorm):
            raise refusal(model, f"tp: {name} is shared by ranks, and not a norm that isobit computes")
    return _dimensions_seen(model, modules) if modules else {}


@torch.no_grad()
def _dimensions_seen(model: Any, modules: dict[str, nn.Module]) -> dict[str, int]:
    """Seen in a forward whose batch and length are no number of heads. Models have heads before or after
    tokens."""
    config = model.config
    heads = {config.num_attention_heads, getattr(config, "num_key_value_heads", config.num_attention_heads)}
    batch, length = [size for size in range(1, 5) if size not in heads][:2]
    shapes: dict[str, torch.Size] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, given, name=name: shapes.update({name: given[0].shape}))
        for name, module in modules.items()
    ]
    try:
        model(torch.zeros(batch, length, dtype=torch.int64, device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    dims = {}
    for name in modules:
        shape = shapes.get(name, torch.Size())
        at = [dim for dim, size in enumerate(shape[:-1]) if size in heads]
        if len(at) != 1:
            raise refusal(model, f"tp: {name} does not get its heads in a dimension of their own: {[*shape]}")
        dims[name] = at[0]
    return dims


def prepared(
    model: Any, mesh: Any, prepare: Callable[[], tuple[T, dict[str, int]]], numerics: Callable[[str], str]
) -> tuple[T, dict[str, int]]:
    """What `prepare` returns, of which the second are the norms of single heads, if all ranks are ready to
    cut the same model in the same way. If it raises an error on one of them each raises one."""
    made: list[tuple[T, dict[str, int]]] = []
    if mesh is None:
        return prepare()
    if not hasattr(mesh, "device_type"):
        raise refusal(model, f"tp: must be a DeviceMesh of one dimension, not a {type(mesh).__name__}")

    def ready() -> str:
        made.append(prepare())
        cuts = layers_to_cut(model)
        layers = [
            (name, how, [*map(shown, model.get_submodule(name).parameters(recurse=False))], numerics(name))
            for name, how in cuts.items()
        ]
        whole = [name for name, m in model.named_modules() if isinstance(m, DetLinear) and name not in cuts]
        layers += [(name, "whole", [], numerics(name)) for name in whole]
        kinds = Counter((how, given) for _, how, _, given in layers)
        return (
            f"zero_drift(model: {type(model).__name__}): {dict(kinds)}, {shown(made[0][1])}, {shown(layers)}"
        )

    agree(as_group("zero_drift", mesh), ready, lambda: None, torch.device(mesh.device_type), True)
    return made[0]


def cut(model: Any, mesh: Any, heads: dict[str, int]) -> None:
    """Every rank keeps its part of each layer. `heads`: the norms of single heads, as
    `dimensions_of_heads` returns them. An error leaves the model whole: layers get their parts at the end."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    from isobit.layers.styles import DetColwise, DetRowwise

    puts: list[Callable[[], None]] = []
    for name, how in layers_to_cut(model).items():
        module = model.get_submodule(name)
        if name in heads:
            weight = module.weight
            whole = nn.Parameter(
                distribute_tensor(weight.data, mesh, [Replicate()]), requires_grad=weight.requires_grad
            )
            puts.append(partial(setattr, module, "weight", whole))
            puts.append(partial(setattr, module, "heads_at", heads[name]))
        else:
            style = DetColwise() if how == "colwise" else DetRowwise()
            puts.append(partial(style.put, module, style.placed(module, mesh)))
    for put in puts:
        put()
    setattr(model, CUT, [*layers_to_cut(model)])


def is_cut(model: Any) -> bool:
    """Whether `cut` has cut it: to make it whole again, all ranks exchange their parts."""
    return CUT in vars(model)


def join(model: Any) -> None:
    """Every rank has all of each layer again. All ranks must call it."""
    layers = {name: model.get_submodule(name) for name in getattr(model, CUT, ())}
    for name, layer in layers.items():
        if any(parameter.device_mesh.ndim > 1 for parameter in layer.parameters(recurse=False)):
            raise refusal(model, f"{name} was sharded afterwards; the model cannot be restored")
    for layer in layers.values():
        for key, parameter in [*layer.named_parameters(recurse=False)]:
            whole = parameter.data.full_tensor()
            setattr(layer, key, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        for key in ("of_ranks", "heads_at"):
            vars(layer).pop(key, None)
    vars(model).pop(CUT, None)
