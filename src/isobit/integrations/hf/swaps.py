"""What `zero_drift` changes in a model, and how it is restored.

Modules get another class, the model another attention and the hooks of a guard, and `generate` may not
compile. What was there before is stored as attributes on the model and its modules, not elsewhere: a copy of
a model has them too, and can be restored like the original.
"""

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from isobit.integrations.hf import adapters, delta_nets, guard, rotary
from isobit.integrations.hf.attention import NAME
from isobit.integrations.hf.batching import KEPT, MAKES, Makes
from isobit.integrations.hf.delta_nets import DetGatedDeltaNet, DetRMSNormGated
from isobit.integrations.hf.experts import DetClampedExperts, DetRouter, routing_of, swapped_class
from isobit.integrations.hf.norms import DetRMSNorm, options_of_all
from isobit.integrations.hf.refusals import COMPILES, refusal
from isobit.integrations.hf.rotary import DetAttention
from isobit.integrations.hf.tensor_parallel import join
from isobit.integrations.rounding import Rounding, cast_of
from isobit.layers.classes import (
    Classes,
    as_map,
    check_keys,
    class_given,
    classes_given,
    layers_of_adapters,
    plain_name,
)
from isobit.layers.experts import DetExperts
from isobit.layers.fsdp import class_of
from isobit.layers.linear import DetLinear, Swap, class_here, default_class, linear_layers, swap_linear

#: On modules: their class before. On the model: the name of its attention before, the numerics classes that
#: its layers were to have, and where it rounds.
CLASS, ATTENTION = "class_before_zero_drift", "attention_before_zero_drift"
NUMERICS, ROUNDING = "numerics_of_zero_drift", "rounding_of_zero_drift"

#: The classes that modules get, other than linear layers.
SWAPPED = (
    DetRMSNorm, DetExperts, DetClampedExperts, DetRouter, DetGatedDeltaNet, DetRMSNormGated, DetAttention,
)  # fmt: skip


def never(model_kwargs: dict[str, Any], generation_config: Any) -> bool:
    """Replaces the method `COMPILES` on the object: compiled code rounds in other places than eager code.
    `generation_config.disable_compile` would be saved with a checkpoint, and lost with another config."""
    return False


def is_on(model: nn.Module) -> bool:
    """Whether `turn_on` was called for this model, or for one that it is a copy of."""
    return ATTENTION in vars(model)


def marked(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that have another class."""
    return {name: module for name, module in model.named_modules() if CLASS in vars(module)}


def own_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of a model by the names that they have without adapters, and none of these."""
    added = layers_of_adapters(model)
    return {plain_name(name): each for name, each in linear_layers(model).items() if name not in added}


def check_numerics(model: nn.Module, numerics: Classes) -> None:
    """An error if these classes are not for this model, or if a layer that is computed by isobit already has
    another one."""
    if numerics is None:
        return
    layers = own_layers(model)
    check_keys("zero_drift", numerics, layers)
    for name, given in classes_given("zero_drift", numerics, layers).items():
        layer = layers[name]
        if isinstance(layer, DetLinear):
            wanted, there = given or default_class(layer.weight.device), class_here(layer)
            if wanted != there:
                reason = f"{name} is of numerics class {there} already, not {wanted}"
                raise refusal(model, f"{reason}; call disable(), or undo() of swap_linear, first")


def rounding_of(model: nn.Module) -> Rounding:
    """Where a model rounds; "hf" if it is not on."""
    known: Rounding = vars(model).get(ROUNDING, "hf")
    return known


def check_rounding(model: nn.Module, rounding: Rounding | None) -> None:
    """An error if a model that is on already rounds elsewhere."""
    if rounding is not None and is_on(model) and rounding != (there := rounding_of(model)):
        raise refusal(model, f"it has rounding={there!r} already, not {rounding!r}; call disable() first")


def turn_on(model: Any, numerics: Classes, rounding: Rounding | None) -> dict[str, str]:
    """Change what is not changed yet. Returns the modules that cannot be, with reasons."""
    if numerics is not None:
        setattr(model, NUMERICS, as_map(numerics))
    where = rounding or rounding_of(model)
    setattr(model, ROUNDING, where)
    narrow, skipped = adapters.operand_dtypes(model), dict[str, str]()
    for dtype in {None, *narrow.values()}:
        skipped |= _swap(model, narrow, dtype)
    for module, options in options_of_all(model):
        setattr(module, CLASS, type(module))
        module.__class__ = DetRMSNorm
        module.options = options._replace(cast=cast_of(where, options.cast))  # type: ignore[assignment]
    if where == "vllm":
        skipped |= _round_as_vllm(model)
    for module in model.modules():
        if (other := swapped_class(module)) is not None:
            if other is DetRouter:
                module.routing = routing_of(module)
            setattr(module, CLASS, type(module))
            module.__class__ = other
        elif (other := delta_nets.swapped_class(module)) is not None:
            setattr(module, CLASS, type(module))
            module.__class__ = other
    if not is_on(model):
        setattr(model, ATTENTION, model.config._attn_implementation)
    setattr(model, COMPILES, never)
    setattr(model, MAKES, Makes(model))
    model.set_attn_implementation(NAME)
    return skipped


def _round_as_vllm(model: nn.Module) -> dict[str, str]:
    """Swap the attention of a model whose norms are swapped. Returns what would round elsewhere."""
    skipped = dict[str, str]()
    for name, module in model.named_modules():
        if isinstance(module, DetAttention | DetRMSNorm):
            continue
        if rotary.rotates(module):
            setattr(module, CLASS, type(module))
            rotary.swap(module)
        elif hasattr(module, "layer_idx") and hasattr(module, "is_causal"):
            skipped[name] = f"rounding='vllm': its forward is not one that calls {rotary.ROTATES}"
        elif "RMSNorm" in type(module).__name__:
            skipped[name] = (
                "rounding='vllm': a norm that isobit.rms_norm does not compute, such as one in fp32"
            )
    return skipped


def _swap(model: nn.Module, narrow: dict[str, torch.dtype], dtype: torch.dtype | None) -> dict[str, str]:
    """Swap the layers whose operands are to be rounded to `dtype`."""

    def chosen(name: str, layer: nn.Linear) -> bool:
        return not isinstance(layer, DetLinear) and narrow.get(name) is dtype

    given = getattr(model, NUMERICS, None)
    classes = {name: each for name in own_layers(model) if (each := class_given(given, name)) is not None}
    out_dtype = None if dtype is None else torch.float32  # as the fp32 layer has it
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="isobit.nn.swap_linear: left")  # an error of the caller
        swap = swap_linear(model, chosen, operand_dtype=dtype, out_dtype=out_dtype, numerics=classes)
    for name in swap.swapped:
        setattr(model.get_submodule(name), CLASS, nn.Linear)
    return swap.skipped


def turn_off(model: Any) -> None:
    """Restore the model. If something else has changed the class of a module since, this is an error, and
    nothing is touched: undo that first."""
    modules = marked(model)
    for name, module in modules.items():
        if class_of(module) is not DetLinear and type(module) not in SWAPPED:
            raise refusal(model, f"{name} is now a {type(module).__name__}; undo that change first")
    join(model)
    model.set_attn_implementation(getattr(model, ATTENTION))  # all else cannot fail
    if KEPT in vars(model):
        model.destroy_cached_continuous_batching_manager()
    guard.take_off(model)
    _restore(modules.values())
    delattr(model, ATTENTION)
    for key in (COMPILES, MAKES, NUMERICS, ROUNDING):
        vars(model).pop(key, None)


@contextmanager
def or_as_before(model: Any) -> Iterator[None]:
    """Undoes what this block has changed in a model, and nothing else, if the block ends with an error. There
    is no guard inside it: the model is to change."""
    known, attention = set(map(id, marked(model).values())), model.config._attn_implementation
    keys = (ATTENTION, COMPILES, MAKES, NUMERICS, ROUNDING)
    own = {key: vars(model)[key] for key in keys if key in vars(model)}
    before = guard.of(model)
    guard.take_off(model)
    try:
        yield
    except BaseException:
        _restore([module for module in marked(model).values() if id(module) not in known])
        model.set_attn_implementation(attention)
        for key in keys:
            vars(model).pop(key, None)
        vars(model).update(own)
        if before is not None:
            guard.put_on(model, before)
        raise


def _restore(modules: Collection[nn.Module]) -> None:
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    for module in modules:
        if isinstance(module, DetRMSNorm):
            module.__class__ = getattr(module, CLASS)
            del module.options
            vars(module).pop("heads_at", None)
        elif isinstance(module, SWAPPED):
            module.__class__ = getattr(module, CLASS)
            for key in ("routing", "own"):
                vars(module).pop(key, None)
        delattr(module, CLASS)
    Swap(_layers=linears).undo()
