"""What `zero_drift` changes in a model, and how it is restored.

Modules get another class, the model another attention, and `generate` may not compile. What was there before
is stored as attributes on the model and its modules, not elsewhere: a copy of a model has them too, and can
be restored like the original.
"""

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from isobit.integrations.hf.attention import NAME
from isobit.integrations.hf.errors import HFError
from isobit.integrations.hf.norms import DetRMSNorm, options_of_all
from isobit.layers.fsdp import class_of
from isobit.layers.linear import DetLinear, Swap, swap_linear

#: On modules: their class before. On the model: the name of its attention before.
CLASS, ATTENTION = "class_before_zero_drift", "attention_before_zero_drift"

#: The method of a model by which `generate` decides whether to compile its steps. Replaced on the object:
#: `generation_config.disable_compile` would be saved with a checkpoint, and lost with another config.
COMPILES = "_valid_auto_compile_criteria"


def never(model_kwargs: dict[str, Any], generation_config: Any) -> bool:
    """Replaces the method `COMPILES`: compiled code rounds in other places than eager code."""
    return False


def is_on(model: nn.Module) -> bool:
    """Whether `turn_on` was called for this model, or for one that it is a copy of."""
    return ATTENTION in vars(model)


def marked(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that have another class."""
    return {name: module for name, module in model.named_modules() if CLASS in vars(module)}


def turn_on(model: Any) -> dict[str, str]:
    """Change what is not changed yet. Returns the linear layers that cannot be, with reasons."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="isobit.nn.swap_linear: left")  # an error of the caller
        swap = swap_linear(model, where=lambda name, layer: not isinstance(layer, DetLinear))
    for name in swap.swapped:
        setattr(model.get_submodule(name), CLASS, nn.Linear)
    for module, options in options_of_all(model):
        setattr(module, CLASS, type(module))
        module.__class__ = DetRMSNorm
        module.options = options  # type: ignore[assignment]  # of the new class
    if not is_on(model):
        setattr(model, ATTENTION, model.config._attn_implementation)
    setattr(model, COMPILES, never)
    model.set_attn_implementation(NAME)
    return swap.skipped


def turn_off(model: Any) -> None:
    """Restore the model. If something else has changed the class of a module since, this is an error, and
    nothing is touched: undo that first."""
    modules = marked(model)
    for name, module in modules.items():
        if class_of(module) is not DetLinear and type(module) is not DetRMSNorm:
            raise HFError(
                f"isobit.integrations.hf.zero_drift(model: {type(model).__name__}): {name} is now a "
                f"{type(module).__name__}; undo that change first"
            )
    model.set_attn_implementation(getattr(model, ATTENTION))  # first: all else cannot fail
    _restore(modules.values())
    delattr(model, ATTENTION)
    vars(model).pop(COMPILES, None)


@contextmanager
def or_as_before(model: Any) -> Iterator[None]:
    """Undoes what this block has changed in a model, and nothing else, if the block ends with an error."""
    known, attention = set(map(id, marked(model).values())), model.config._attn_implementation
    own = {key: vars(model)[key] for key in (ATTENTION, COMPILES) if key in vars(model)}
    try:
        yield
    except BaseException:
        _restore([module for module in marked(model).values() if id(module) not in known])
        model.set_attn_implementation(attention)
        for key in (ATTENTION, COMPILES):
            vars(model).pop(key, None)
        vars(model).update(own)
        raise


def _restore(modules: Collection[nn.Module]) -> None:
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    for module in modules:
        if isinstance(module, DetRMSNorm):
            module.__class__ = getattr(module, CLASS)
            del module.options
        delattr(module, CLASS)
    Swap(_layers=linears).undo()
