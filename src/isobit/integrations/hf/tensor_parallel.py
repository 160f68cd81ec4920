"""A model whose linear layers the ranks of a mesh share: `zero_drift(model, tp=mesh)`.

Which layers are cut, and along which dimension, is what transformers itself declares for a model
(`base_model_tp_plan`): q, k, v, gate and up by columns, o and down by rows. So every rank has some heads, and
attention needs no sum over ranks. Embedding, norms and LM head stay whole on every rank.
"""

from typing import Any

from torch import nn

from isobit.integrations.hf.refusals import refusal
from isobit.layers.classes import Classes, class_given, layers_of_adapters
from isobit.numerics import LEAVES, TREE8
from isobit.ranks import as_group

#: On the model: the names of the layers that were cut.
CUT = "cut_by_zero_drift"

_KINDS = ("colwise", "rowwise")


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
    if not layers:
        raise refusal(model, "tp: its config has no plan (base_model_tp_plan) of how to cut its layers")
    for name, how in layers.items():
        layer = model.get_submodule(name)
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


def cut(model: Any, mesh: Any) -> None:
    """Every rank keeps its part of each layer."""
    from isobit.layers.styles import DetColwise, DetRowwise

    layers = layers_to_cut(model)
    for name, how in layers.items():
        style = DetColwise() if how == "colwise" else DetRowwise()
        style._apply(model.get_submodule(name), mesh)
    setattr(model, CUT, [*layers])


def join(model: Any) -> None:
    """Every rank has all of each layer again. All ranks must call it."""
    for name in getattr(model, CUT, ()):
        layer = model.get_submodule(name)
        for key, parameter in [*layer.named_parameters(recurse=False)]:
            if parameter.device_mesh.ndim > 1:
                raise refusal(model, f"{name} was sharded afterwards; the model cannot be restored")
            whole = parameter.data.full_tensor()
            setattr(layer, key, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        vars(layer).pop("of_ranks", None)
    vars(model).pop(CUT, None)
