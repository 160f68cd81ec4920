"""Notices that a model has been changed after `zero_drift`.

An adapter that is added, an LM head of another size, another attention: each brings back modules that torch
computes. Every forward therefore compares the model with a snapshot of what decides by what it is computed:
which module is where, the name of the attention, the classes of modules, and whether their forward was
replaced on the object. These are a few comparisons of lists, in C. Of a large model, classes, forwards and
the parts of adapters are compared for some modules in each forward, and for all of them in turn. Only if
something differs is every module looked at. A change that brings back no drift, such as an adapter that was
merged or a model that was sharded, gives a new snapshot; any other is an error that names what has changed.

The comparison is a hook of the backbone and not of the whole model, which PEFT has called past its hooks.
"""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from isobit.frame.caller import warn
from isobit.integrations.hf import adapters, delta_nets
from isobit.integrations.hf.attention import NAME, PAGED
from isobit.integrations.hf.delta_nets import DetGatedDeltaNet, DetRMSNormGated
from isobit.integrations.hf.errors import HFError, by_reason
from isobit.integrations.hf.experts import DetClampedExperts, DetRouter
from isobit.integrations.hf.norms import DetRMSNorm
from isobit.integrations.hf.refusals import is_compiled, of_module, refusal
from isobit.integrations.hf.rotary import DetAttention
from isobit.layers.experts import DetExperts
from isobit.layers.fsdp import class_of
from isobit.layers.linear import DetLinear

#: Modules whose children may be added later, and other modules that compute nothing: they may come and go.
_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)
_NEUTRAL = (*_CONTAINERS, nn.Identity, nn.ParameterDict, nn.ParameterList)

#: Modules whose classes and attributes are compared in a forward. 36 layers have 547 modules: to compare all
#: of them took 59 us on a busy core (Neoverse N1), and a third of them 38 us.
AT_ONCE = 200


class Children:
    """Which modules some modules contain."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.now: list[Any] = [m._modules for m in modules if m._modules or isinstance(m, _CONTAINERS)]
        self.then = [dict(each) for each in self.now]

    def hold(self) -> bool:
        return self.now == self.then


class Part:
    """Some modules of a model: their classes, and the number of attributes of those that are not the head, on
    which `token_logps` works in a forward. A forward that is replaced on an object is one more. Also what
    those of them contain that are inside adapters."""

    def __init__(self, modules: list[nn.Module], head: Any, in_adapters: set[nn.Module]) -> None:
        self.modules, self.classes = modules, [*map(type, modules)]
        self.attributes = [vars(m) for m in modules if m is not head]
        self.size = sum(map(len, self.attributes))
        self.children = Children([m for m in modules if m in in_adapters])

    def holds(self) -> bool:
        return (
            [*map(type, self.modules)] == self.classes
            and sum(map(len, self.attributes)) == self.size
            and self.children.hold()
        )


class Snapshot:
    """What decides by what a model is computed. It refers to the modules of a model, but not to the model
    itself, so that it does not keep that alive."""

    def __init__(self, model: nn.Module) -> None:
        in_adapters = {m for lora in model.modules() if adapters.is_lora(lora) for m in lora.modules()}
        self.children = Children([m for m in model.modules() if m not in in_adapters])
        self.configs = _configs_of(model)
        # Modules of one name next to each other: what is done to a module of every layer is in every part.
        named = [(name, m) for name, m in model.named_modules() if m is not model]
        modules = [m for _, m in sorted(named, key=lambda each: each[0].rpartition(".")[2])]
        count, head = -(-len(modules) // AT_ONCE), _head_of(model)
        self.parts = [Part(modules[i::count], head, in_adapters) for i in range(count)]
        self.turn = 0

    def holds(self, everywhere: bool = False) -> bool:
        """Whether the model is as it was; not everywhere in every forward."""
        if not self.children.hold():
            return False
        for config in self.configs:
            if config._attn_implementation not in (NAME, PAGED):
                return False
        if everywhere:
            return all(part.holds() for part in self.parts)
        self.turn = (self.turn + 1) % len(self.parts)
        return self.parts[self.turn].holds()


#: By model, and not on it: a copy of a model needs a snapshot of its own.
_snapshots: "weakref.WeakKeyDictionary[nn.Module, Snapshot]" = weakref.WeakKeyDictionary()


def _head_of(model: Any) -> Any:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def _configs_of(model: nn.Module) -> list[Any]:
    """The configs from which its modules read the name of the attention; mostly one."""
    configs = (vars(m).get("config") for m in model.modules())
    return [*{id(c): c for c in configs if hasattr(c, "_attn_implementation")}.values()]


class Guard:
    """Two hooks of a model. A copy of the model has a copy of them, which finds its model when that is
    called."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = weakref.ref(model)
        self.known = frozenset(map(class_of, model.modules()))
        self.replaced = frozenset(name for name, _ in _replaced_forwards(model))
        self.told = False
        self.hook = -1  # of the backbone: its key there, which is the same in a copy
        self.snapshots = 0  # how many there were after the first

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"model": None}

    def at_model(self, module: nn.Module, args: Any) -> None:
        """Before a forward of the model: its backbone may be another one, without the hook."""
        if torch.compiler.is_compiling():
            return
        if self.model is None or self.model() is not module:
            self.model = weakref.ref(module)
        whole: Any = module
        backbone = module._modules.get(whole.base_model_prefix, module)
        if backbone is None or self.hook not in backbone._forward_pre_hooks:
            self.compare(module)

    def at_backbone(self, module: nn.Module, args: Any) -> None:
        """Before a forward of the backbone."""
        if torch.compiler.is_compiling():
            self.tell_compiled()
            return
        model = None if self.model is None else self.model()
        self.compare(module if model is None else model)

    def compare(self, model: nn.Module) -> None:
        """Raises an error if the model has changed, so that its bits may depend on the batch."""
        snapshot = _snapshots.get(model)
        if snapshot is not None and snapshot.holds():
            return
        changes = self.changes(model)
        if changes:
            raise changed(model, changes)
        if any(map(is_compiled, model.modules())):
            self.tell_compiled()
        _snapshots[model] = Snapshot(model)
        self.snapshots += 1

    def tell_compiled(self) -> None:
        """Say it once."""
        if not self.told:
            self.told = True
            warn(COMPILED)

    def changes(self, model: nn.Module) -> dict[str, str]:
        """What has changed since the model was tested so that its bits may depend on the batch: reasons by
        the name of a module."""
        reasons: dict[str, str] = {}
        for config in _configs_of(model):
            if config._attn_implementation not in (NAME, PAGED):
                reasons["attention"] = f"computed by {config._attn_implementation!r}"
        uncalled = delta_nets.convolutions(model)
        for name, module in model.named_modules():
            reason = None if module in uncalled else of_module(module) or self._new(module)
            if reason is not None:
                reasons[name] = reason
        for name, module in _replaced_forwards(model):
            if name not in self.replaced and not _calls_its_own(module):
                reasons[name] = "its forward was replaced on the object"
        return reasons

    def _new(self, module: nn.Module) -> str | None:
        kind = class_of(module)
        plain = (DetLinear, DetRMSNorm, DetExperts, DetClampedExperts, DetRouter)
        served = (*plain, DetGatedDeltaNet, DetRMSNormGated, DetAttention)
        if isinstance(module, served):
            ours = type(module).forward in [each.forward for each in served]
            return None if ours else f"its class is {kind.__name__} now"
        if kind is nn.Linear:
            return "a Linear that torch computes"
        if kind in self.known or kind in _NEUTRAL or adapters.is_lora(module) or is_compiled(module):
            return None
        if kind.__module__.startswith("torch.distributed."):  # a wrapper that shards or recomputes
            return None
        return f"a {kind.__module__}.{kind.__qualname__}, which was not tested"


def _replaced_forwards(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    head = _head_of(model)
    for name, module in model.named_modules():
        if "forward" in vars(module) and module is not model and module is not head:
            yield name, module


def _calls_its_own(module: nn.Module) -> bool:
    """Whether accelerate has replaced a forward, to move inputs or cast outputs around the module's own."""
    own: Any = vars(module).get("_old_forward")
    return getattr(own, "__func__", None) is type(module).forward


def changed(model: nn.Module, changes: dict[str, str]) -> HFError:
    return refusal(
        model,
        f"the model was changed afterwards, and its bits may depend on the batch: {by_reason(changes)}. "
        "Call zero_drift again, which serves what was added and tests the whole model, or undo the change",
    )


COMPILED = (
    "isobit.integrations.hf.zero_drift: the model is compiled. Compiled code rounds in other places than "
    "eager code: its bits are not those of eager calls, and nothing is promised about them. Roll out and "
    "train without torch.compile"
)


# On and off


def put_on(model: Any, guard: Guard | None = None) -> None:
    """Guard a model as it is now; or as it was for a guard that was taken off."""
    take_off(model)
    # The tracer calls it, and what it makes does not. Not as a decorator: this imports all of
    # `torch._dynamo`, two seconds of every command that has no model.
    torch.compiler.assume_constant_result(Guard.tell_compiled)
    if guard is None:
        guard = Guard(model)
        _snapshots[model] = Snapshot(model)
    model.register_forward_pre_hook(guard.at_model)
    if model.base_model is not model:
        guard.hook = model.base_model.register_forward_pre_hook(guard.at_backbone).id


def take_off(model: Any) -> None:
    for module in (model, model.base_model):
        for key in [key for key, hook in module._forward_pre_hooks.items() if _guard_of(hook)]:
            del module._forward_pre_hooks[key]
    _snapshots.pop(model, None)


def of(model: Any) -> Guard | None:
    """The guard of a model."""
    return next(filter(None, map(_guard_of, model._forward_pre_hooks.values())), None)


def is_unchanged(model: nn.Module) -> bool:
    """Whether the model is the same as when it was last found to be free of drift."""
    snapshot = _snapshots.get(model)
    return snapshot is not None and snapshot.holds(everywhere=True)


def _guard_of(hook: Any) -> Guard | None:
    guard = getattr(hook, "__self__", None)
    return guard if isinstance(guard, Guard) else None
