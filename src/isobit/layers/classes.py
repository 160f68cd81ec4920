"""Which numerics class the products of each layer have: one class for all layers, or a map.

    {"*.mlp.down_proj": "tree8", "lm_head": "chain16"}

A class is a property of a layer, like its weight: it is decided once, and does not depend on the rows of a
call. Nor may it depend on the columns of the output, because an engine multiplies by several layers at once
(q, k and v; gate and up), or gives each GPU some of the columns. So the map is explicit, and whoever computes
the model later must have the same one.

A key is the name of a layer or a glob pattern (`fnmatch`), whose `*` matches dots too. A name comes before
all patterns, and patterns that match one layer must agree, so the order of a map has no meaning. A layer that
an adapter of PEFT has wrapped is still known by the name that it had before.
"""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from isobit.frame.contract import ContractError
from isobit.numerics import CHAIN16, LEAVES, NO_CLASS, TREE8, Numerics

#: Classes of layers, as a user gives them: one for all, or a map. None is the default, chain16.
Classes = str | Numerics | Mapping[str, str | Numerics] | None

#: The pattern that matches all layers.
_ALL = "*"

#: PEFT's name for the layer that an adapter wraps.
_WRAPPED = "base_layer"


def plain_name(name: str) -> str:
    """The name of a layer as if no adapter had wrapped it."""
    return name.replace(f".{_WRAPPED}", "")


def layers_of_adapters(model: nn.Module) -> set[str]:
    """The names of modules that adapters of PEFT have added, next to the layer that they wrap. They come and
    go, and are no part of a model."""
    added = set[str]()
    for name, module in model.named_modules():
        for child in module._modules if _WRAPPED in module._modules else ():
            if child != _WRAPPED:
                where = f"{name}.{child}" if name else child
                added.update(inside for inside, _ in model.get_submodule(where).named_modules(prefix=where))
    return added


def as_map(classes: Classes) -> dict[str, str]:
    """One class for all layers is that of the pattern that matches all."""
    if classes is None:
        return {}
    if isinstance(classes, Mapping):
        return {key: str(each) for key, each in classes.items()}
    return {_ALL: str(classes)}


def class_given(classes: Classes, name: str) -> str | None:
    """The class that was given for a layer, or None: the default."""
    by_key = as_map(classes)
    for key in (name, plain_name(name)):
        if key in by_key:
            return by_key[key]
    matching = {by_key[key]: key for key in by_key if _matches(key, name)}
    if len(matching) > 1:
        shown = " and ".join(f"{key!r}, of class {each}" for each, key in matching.items())
        raise ContractError(f"numerics: {name} matches {shown}; give it by its name, or by one of them")
    return next(iter(matching), None)


def check_keys(what: str, classes: Classes, names: Collection[str]) -> None:
    """An error if a class is unknown, or if a key matches none of a model's layers."""
    for key, each in as_map(classes).items():
        check_class(what, each)
        if key != _ALL and key not in names and not any(_matches(key, name) for name in names):
            known = ", ".join(list(names)[:20]) + (", ..." if len(names) > 20 else "")
            raise ContractError(
                f"{what}(numerics: {key!r}): no linear layer has this name; there are: {known}"
            )


def classes_given(what: str, classes: Classes, layers: Mapping[str, Any]) -> dict[str, str | None]:
    """The class that was given for each of these layers; an error if the k of one cannot be cut."""
    given = {name: class_given(classes, name) for name in layers}
    for name, each in given.items():
        K = getattr(layers[name], "in_features", 0)  # a Conv1D has none, and is never swapped
        check_k(f"{what}(numerics: {each!r})", each, K, name)
    return given


def _matches(key: str, name: str) -> bool:
    return any(each == key or fnmatchcase(each, key) for each in (name, plain_name(name)))


def check_class(what: str, numerics: str | Numerics | None) -> None:
    """An error if products have no such class, on any hardware."""
    classes = (str(CHAIN16), str(TREE8), str(NO_CLASS))
    if numerics is not None and str(numerics).split("/")[0] not in classes:
        known = f"{CHAIN16}, {TREE8} (also with the name of other hardware behind it, {CHAIN16}/sm_80)"
        raise ContractError(
            f"{what}(numerics: {str(numerics)!r}): no class of products; known: {known}, {NO_CLASS}"
        )


def check_k(what: str, numerics: str | Numerics | None, K: int, name: str = "") -> None:
    """An error if the k of a layer cannot be summed in this class."""
    if numerics is not None and str(numerics).split("/")[0] == TREE8 and K % LEAVES:
        layer = f"{name}: " if name else ""
        raise ContractError(
            f"{what}: {layer}class {TREE8} cuts k into {LEAVES} equal leaves, and in_features={K} is not a "
            f"multiple of {LEAVES}"
        )


def merged_class(classes: Classes, names: Iterable[str]) -> str:
    """The one class of layers that are merged into one product, as engines do with q, k and v.

    Merged layers have the bits of the separate ones if they are of one class. A product has one order of k,
    so layers of different classes cannot be merged: that is an error.

    Args:
        classes: as for `swap_linear` and `zero_drift`: the map of a model, or one class for all of its
            layers. Layers that are not in it are chain16.
        names: the layers to merge, at least one.

    Returns:
        The name of their class.

    Example:
        >>> import isobit
        >>> classes = {"*.down_proj": "tree8", "*.o_proj": "tree8"}
        >>> isobit.nn.merged_class(classes, ["layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"])
        'chain16'
    """
    found = {name: class_given(classes, name) or str(CHAIN16) for name in names}
    if not found:
        raise ContractError("merged_class(names: []): needs at least one layer")
    first, *others = found
    for name in others:
        if found[name] != found[first]:
            raise ContractError(
                f"merged_class: {first} is of class {found[first]} and {name} of {found[name]}: layers can "
                "only be merged if they are of one class"
            )
    return found[first]
