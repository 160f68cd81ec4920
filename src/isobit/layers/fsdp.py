"""Modules that FSDP2 (`fully_shard`) has sharded: their gathered parameters, and their class."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")


def in_forward(module: nn.Module, function: Callable[..., T], *inputs: Any, **named: Any) -> T:
    """Call `function` in place of the module's own forward, with everything that surrounds a forward.

    FSDP2 (`fully_shard`) gathers the parameters of a module before its forward and again before its backward;
    at other times they are shards, DTensors that no op of isobit takes. Inside `function` they are whole.
    A parameter belongs to the innermost module that was given to `fully_shard`. Calls can be nested: the
    whole model first, and the head inside it, makes the parameters of both available.

    Args:
        module: the module that was sharded, such as an LM head or the whole model.
        function: is called once. It must return every tensor through which a gradient goes: a tensor, or
            tensors in tuples, lists or dicts.
        inputs, named: its arguments, after FSDP2 has cast them according to its `mp_policy`. Tensors that
            need gradients should be passed here and not captured by the function.

    Returns:
        What the function returns, cast according to the `mp_policy`.

    Example:
        >>> import torch, isobit
        >>> head, hidden = torch.nn.Linear(16, 50, bias=False), torch.randn(7, 16)
        >>> ids = torch.arange(7)
        >>> logp = isobit.nn.in_forward(head, lambda h: isobit.linear_logp(h, head.weight, ids), hidden)
        >>> torch.equal(logp, isobit.linear_logp(hidden, head.weight, ids))
        True
    """
    own = vars(module).get("forward")

    def restore() -> None:
        vars(module).pop("forward", None)
        if own is not None:
            module.forward = own

    def once(*given: Any, **named_given: Any) -> T:
        restore()
        return function(*given, **named_given)

    module.forward = once
    try:
        return module(*inputs, **named)
    finally:
        restore()


def class_of(module: nn.Module) -> type:
    """The class of a module, without the subclass that `fully_shard` creates."""
    cls, fsdp = type(module), sys.modules.get("torch.distributed.fsdp")
    return cls.__bases__[-1] if fsdp is not None and issubclass(cls, fsdp.FSDPModule) else cls


#: (class of a sharded layer, class that it should have below) -> class of a sharded layer.
_sharded: dict[tuple[type, type], type] = {}


def set_class(layer: nn.Module, below: type) -> None:
    """Give a layer another class; below that of FSDP2, if it is sharded."""
    cls, before = type(layer), class_of(layer)
    if cls is before:
        layer.__class__ = below
        return
    if (cls, below) not in _sharded:  # made as fully_shard makes its own, and cached in both directions
        copying = {"__deepcopy__": vars(cls)["__deepcopy__"]}
        made = type(f"FSDP{below.__name__}", (*cls.__bases__[:-1], below), copying)
        _sharded[cls, below], _sharded[made, before] = made, cls
    layer.__class__ = _sharded[cls, below]
