"""A causal LM of transformers in which no token's bits depend on the batch: `zero_drift`.

    with isobit.integrations.hf.zero_drift(model) as on:
        print(on)
        model.generate(...)

Everything that sums is computed by isobit: attention, linear layers, the LM head, norms. The rest
(embeddings, rotary embeddings, activations, other norms) stays torch's, and is tested: see `trial`. A model
with other modules, or that fails the test, is refused and stays unchanged.
"""

import weakref
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

from isobit.integrations.hf import trial
from isobit.integrations.hf.attention import NAME, register_attention
from isobit.integrations.hf.errors import HFError
from isobit.integrations.hf.norms import DetRMSNorm
from isobit.integrations.hf.swaps import COMPILES, is_on, or_as_before, turn_off, turn_on
from isobit.integrations.patch import Handle, Patch, Switch
from isobit.layers.linear import DetLinear
from isobit.ops.attention.op import HEAD_SIZES

#: Kinds of layers that read keys and values.
_ATTENTION = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Report:
    """What `zero_drift` did to a model."""

    model: str
    changed: dict[str, list[str]]  # names of modules, by the function of isobit that computes them
    left: dict[str, int]  # how many modules of each class stay torch's; each class was tested
    untried: dict[str, int]  # classes that were not called, so not tested

    def __str__(self) -> str:
        width = max(map(len, [*self.changed, *self.left, *self.untried]))
        rows = [(name, len(names), "computed by isobit") for name, names in self.changed.items()]
        rows += [(name, count, "left, same bits alone and in a batch") for name, count in self.left.items()]
        rows += [(name, count, "left, never called") for name, count in self.untried.items()]
        return "\n".join(
            [self.model, *(f"  {name:{width}s} {count:5d}  {what}" for name, count, what in rows)]
        )


# The modules of a model


def _why_not(model: Any) -> str | None:
    """Why a model as a whole cannot be served, or None."""
    if not isinstance(model, import_module("transformers").PreTrainedModel):
        hint = "; pass model.get_base_model()" if hasattr(model, "get_base_model") else ""
        return f"it is not a transformers.PreTrainedModel{hint}"
    config = model.config
    if config.is_encoder_decoder:
        return "it has an encoder in addition to its decoder"
    if config.get_text_config(decoder=True) is not config:
        return (
            "it contains more than a language model; make one that has its text_config, its layers and "
            "its LM head, as in docs/zero_drift.md, and pass that"
        )
    if not model.can_generate() or model.get_output_embeddings() is None:
        return "it is not a causal language model: it has no LM head"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION)
    if others:
        return f"it has layers of {', '.join(others)}"
    if not model._can_set_attn_implementation():
        return "its attention does not use transformers' AttentionInterface"
    if getattr(config, "attention_dropout", 0.0):
        return f"attention_dropout={config.attention_dropout} in its config; set it to 0"
    sharded = next((name for name, p in model.named_parameters() if hasattr(p, "full_tensor")), None)
    if sharded is not None:
        return f"{sharded} is sharded (a DTensor); call zero_drift before fully_shard"
    return None


def _refused(model: nn.Module) -> dict[str, str]:
    """Modules that cannot be served, and why."""
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        moving = _moving_frequencies(module)
        if isinstance(module, nn.Dropout) and module.p > 0:
            reasons[name] = f"Dropout(p={module.p}) is random in training"
        elif moving is not None:
            reasons[name] = (
                f"its rope_type {moving!r} makes frequencies from the longest position in the batch, once "
                "that exceeds a limit of the config"
            )
        elif (sizes := _unequal_heads(module)) is not None:
            reasons[name] = (
                f"{type(module).__name__} has heads of {sizes[0]} elements for queries and {sizes[1]} for "
                "values; isobit.attention takes equal ones"
            )
        elif not isinstance(module, nn.Linear | nn.Embedding):
            own = [key for key, p in module.named_parameters(recurse=False) if p.ndim > 1]
            if own:
                reasons[name] = (
                    f"{type(module).__name__} multiplies by its {', '.join(own)} in a way of its own"
                )
        elif isinstance(module, nn.Linear) and module.weight.dtype not in (torch.bfloat16, torch.float16):
            kind = module.weight.device.type
            if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
                reasons[name] = (
                    f"its weight is {module.weight.dtype}; cast the model to bf16, or call zero_drift under "
                    "torch.autocast, as the model will be called"
                )
    return reasons


def _moving_frequencies(module: nn.Module) -> str | None:
    """The type of a rotary embedding whose frequencies are functions of the batch. The trial run cannot
    detect these: its sequences are too short for the frequencies to change."""
    given = getattr(module, "rope_type", None)
    kinds = given.values() if isinstance(given, dict) else (given,)  # Gemma 3 has one per kind of layer
    return next((k for k in kinds if isinstance(k, str) and ("dynamic" in k or k == "longrope")), None)


def _unequal_heads(module: nn.Module) -> tuple[int, int] | None:
    """Elements of a query and of a value in multi-head latent attention, if they differ."""
    sizes = getattr(module, "qk_head_dim", None), getattr(module, "v_head_dim", None)
    return sizes if None not in sizes and sizes[0] != sizes[1] else None  # type: ignore[return-value]


def _head_size(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


# On and off


@dataclass(eq=False, kw_only=True)
class _Patch(Patch):
    """It keeps no model alive. What to restore is stored on the model itself."""

    model: "weakref.ref[Any]"
    report: Report
    adopted: bool  # the model is a copy of one that was on

    def undo(self) -> None:
        model = self.model()
        if model is not None:
            turn_off(model)


class ZeroDrift(Handle):
    """The result of `zero_drift`. `print` it to see what was changed; the end of a with-block, or `disable`,
    restores the model."""

    @property
    def report(self) -> Report:
        assert isinstance(self._patch, _Patch)
        return self._patch.report

    @property
    def changed(self) -> dict[str, list[str]]:
        """Names of modules, by the function of isobit that computes them."""
        return self.report.changed

    @property
    def left(self) -> dict[str, int]:
        """How many modules of each class torch computes as before. All of them were tested."""
        return self.report.left

    def disable(self) -> None:
        """Restore the model. Does nothing the second time. If something else has changed the class of a
        module since, this is an error, and the model stays enabled: undo that first."""
        if self._patch is self._switch.patch:
            self._switch.off()

    def __repr__(self) -> str:
        return str(self.report)


_switches: "weakref.WeakKeyDictionary[nn.Module, Switch]" = weakref.WeakKeyDictionary()


def zero_drift(model: Any) -> ZeroDrift:
    """Make a causal LM of transformers give every token the same bits: in training, in prefill at once or in
    chunks, in decoding with a cache, alone or in any batch. `generate` and everything else stay as they are.

    Attention goes through `isobit.attention` (`register_attention`), linear layers and the LM head through
    `isobit.det_linear`, norms through `isobit.rms_norm`. All other modules stay torch's. Each class of them
    is tested on this machine, and so is the model as a whole: see `trial`. A static cache lets `generate`
    compile its steps on a GPU; that is turned off, because compiled code rounds in other places.

    Args:
        model: a `PreTrainedModel` with an LM head, in bf16 or fp16; or in fp32, and called under autocast.
            Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3 are covered by isobit's tests; others are tested by
            this call.

    Returns:
        A handle: `print` it, `disable()` it, or use it as a context manager. `changed` and `left` list what
        was done. If the model is already enabled, or a copy of an enabled one, it stays enabled at the end of
        a with-block; `disable()` restores it.

    Raises:
        HFError: the model cannot be served. The message names the modules and the reasons; the model is
            unchanged.

    Example:
        >>> import torch, transformers, isobit
        >>> sizes = dict(vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=1)
        >>> config = transformers.LlamaConfig(**sizes, num_attention_heads=1)
        >>> model = transformers.LlamaForCausalLM(config).bfloat16()
        >>> with isobit.integrations.hf.zero_drift(model) as on:
        ...     ids = torch.tensor([[7, 3, 11, 2], [5, 5, 8, 1]])
        ...     torch.equal(model(ids).logits[1], model(ids[1:]).logits[0])
        True
        >>> len(on.changed["isobit.det_linear"])
        8
    """
    switch = _switches.get(model) if isinstance(model, nn.Module) else None
    if switch is None:
        switch = Switch(f"isobit.integrations.hf.zero_drift(model: {type(model).__name__})")
    patch, new = switch.applied(None, lambda: _apply(model))
    _switches[model] = switch
    return ZeroDrift(switch, patch, new and not (isinstance(patch, _Patch) and patch.adopted))


def _apply(model: Any) -> _Patch:
    reason = _why_not(model)
    if reason is not None:
        raise _refusal(model, reason)
    refused = _refused(model)
    if refused:
        raise _refusal(model, _listed(refused))
    size = _head_size(model.config)
    if size not in HEAD_SIZES:
        known = ", ".join(map(str, HEAD_SIZES))
        raise _refusal(model, f"heads of {size} elements; isobit.attention takes {known} (head_dim)")
    if not hasattr(model, COMPILES):
        raise _refusal(model, f"it has no {COMPILES}: this version of transformers is not supported")
    register_attention()
    adopted = is_on(model)
    with or_as_before(model):
        report = _turned_on(model)
    return _Patch(backend=None, instead="", model=weakref.ref(model), report=report, adopted=adopted)


def _turned_on(model: Any) -> Report:
    skipped = turn_on(model)
    if skipped:
        raise _refusal(model, _listed(skipped))
    layers = [
        name for name, m in model.named_modules() if hasattr(m, "is_causal") and hasattr(m, "layer_idx")
    ]
    if not layers or model.config._attn_implementation != NAME:
        raise _refusal(model, "no module in it uses transformers' AttentionInterface")
    linears, norms = (
        [name for name, m in model.named_modules() if isinstance(m, kind)] for kind in (DetLinear, DetRMSNorm)
    )
    changed = {"isobit.attention": layers, "isobit.det_linear": linears}
    changed |= {"isobit.rms_norm": norms} if norms else {}
    counts = Counter(map(trial.class_of_module, _leaves(model)))
    tried = _tried(model, counts)
    left, untried = Counter[str](), Counter[str]()
    for each, count in counts.items():
        (left if each in tried else untried)[each[0].__name__] += count
    return Report(type(model).__name__, changed, dict(left), dict(untried))


def _leaves(model: nn.Module) -> list[nn.Module]:
    """Modules without children that isobit does not compute."""
    ours = DetLinear | DetRMSNorm
    return [m for m in model.modules() if not [*m.children()] and not isinstance(m, ours)]


def _tried(model: Any, left: Collection[trial.ModuleClass]) -> set[trial.ModuleClass]:
    """The classes of modules that were called and do not depend on the batch; raises an error if any does, or
    the model as a whole."""
    differing, calls = trial.of_model(model, model.get_output_embeddings().weight.shape[0], left)
    wrong = {each[0].__name__: reason for each, call in calls.items() if (reason := trial.of_module(call))}
    if wrong:
        raise _refusal(model, f"these depend on the batch on this machine: {_listed(wrong)}")
    for what, count in differing.items():
        if count:
            raise _refusal(model, f"{count} logits have other bits {what}; and no single module explains it")
    return set(calls)


def _listed(reasons: dict[str, str]) -> str:
    """The first few, and how many more."""
    shown = "; ".join(f"{name}: {reason}" for name, reason in list(reasons.items())[:4])
    return shown + (f"; and {len(reasons) - 4} more" if len(reasons) > 4 else "")


def _refusal(model: Any, reason: str) -> HFError:
    return HFError(f"isobit.integrations.hf.zero_drift(model: {type(model).__name__}): {reason}")
