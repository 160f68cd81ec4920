"""A causal LM of transformers in which no token's bits depend on the batch: `zero_drift`.

    with isobit.integrations.hf.zero_drift(model) as on:
        print(on)
        model.generate(...)

Everything that sums is computed by isobit: attention, linear layers, the LM head, experts, norms. The
rest (embeddings, rotary embeddings, activations, other norms) stays torch's, and is tested: see `trial`. A
model with other modules, or that fails the test, is refused and stays unchanged. One that is changed later is
noticed by the next forward: see `guard`.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from isobit.frame.caller import warn
from isobit.integrations.hf import adapters, delta_nets, guard, refusals, rotary, trial
from isobit.integrations.hf.attention import NAME, PAGED, register_attention
from isobit.integrations.hf.delta_nets import DetGatedDeltaNet, DetRMSNormGated
from isobit.integrations.hf.errors import HFError, by_reason
from isobit.integrations.hf.experts import DetRouter
from isobit.integrations.hf.norms import DetRMSNorm, options_of_all
from isobit.integrations.hf.refusals import refusal
from isobit.integrations.hf.rotary import DetAttention
from isobit.integrations.hf.swaps import (
    check_numerics,
    check_rounding,
    is_on,
    or_as_before,
    own_layers,
    rounding_of,
    turn_off,
    turn_on,
)
from isobit.integrations.hf.tensor_parallel import (
    check_cut,
    check_tp,
    cut,
    dimensions_of_heads,
    is_cut,
    prepared,
)
from isobit.integrations.hf.warmup import of_calls, of_model
from isobit.integrations.patch import Handle, Patch, Switch
from isobit.integrations.rounding import AS, ROUNDINGS, Rounding
from isobit.layers.classes import Classes, class_given
from isobit.layers.experts import DetExperts
from isobit.layers.fsdp import class_of
from isobit.layers.linear import DetLinear, class_here
from isobit.numerics import CHAIN16

#: The result of a trial: the classes of modules that torch computes, and whether they were called.
Tried = dict[trial.ModuleClass, bool]


@dataclass(frozen=True)
class Report:
    """By what a model is computed."""

    model: str
    changed: dict[str, list[str]]  # names of modules, by the function of isobit that computes them
    left: dict[str, int]  # how many modules of each class stay torch's; each class was tested
    untried: dict[str, int]  # classes that were not called, so not tested
    new: dict[str, int]  # classes that were not there when the model was tested
    rounded: int = 0  # linear layers in fp32, whose operands are rounded
    since: dict[str, str] = field(default_factory=dict)  # what was changed afterwards and may cause drift
    classes: dict[str, str] = field(default_factory=dict)  # numerics classes of linear layers
    rounding: Rounding = "hf"  # where it rounds

    def __str__(self) -> str:
        width = max(map(len, [*self.changed, *self.left, *self.untried, *self.new]))
        rows = [(name, len(names), "computed by isobit") for name, names in self.changed.items()]
        rows += [(name, count, "left, same bits alone and in a batch") for name, count in self.left.items()]
        rows += [(name, count, "left, never called") for name, count in self.untried.items()]
        rows += [(name, count, "computed by torch, not tested") for name, count in self.new.items()]
        lines = [f"  {name:{width}s} {count:5d}  {what}" for name, count, what in rows]
        if self.rounded:
            lines.append(
                f"  {self.rounded} linear layers are fp32 adapters: operands rounded, results in fp32"
            )
        classes = Counter(self.classes.values())
        if classes.keys() - {str(CHAIN16)}:
            counts = ", ".join(f"{count} {name}" for name, count in sorted(classes.items()))
            lines.append(f"  linear layers by numerics class: {counts}")
        if self.rounding != "hf":
            lines.append(f"  rounded {AS[self.rounding]} (rounding={self.rounding!r})")
        if self.since:
            lines.append(f"  CHANGED, may depend on the batch: {by_reason(self.since)}")
        return "\n".join([self.model, *lines])


def _report(model: Any, tried: Tried, since: dict[str, str] | None = None) -> Report:
    """By what a model is computed now."""
    kinds: dict[str, Any] = {"isobit.det_linear": DetLinear, "isobit.rms_norm": DetRMSNorm}
    kinds |= {"isobit.nn.DetExperts": DetExperts, "isobit router": DetRouter}
    kinds |= {"isobit.gated_delta_rule": DetGatedDeltaNet, "isobit.rms_norm_gated": DetRMSNormGated}
    kinds |= {"isobit.rope": DetAttention}
    changed = {"isobit.attention": _attention_layers(model)}
    changed |= {key: [n for n, m in model.named_modules() if isinstance(m, kinds[key])] for key in kinds}
    left, untried, new = Counter[str](), Counter[str](), Counter[str]()
    for each, count in Counter(map(trial.class_of_module, _leaves(model))).items():
        there = new if each not in tried else left if tried[each] else untried
        there[each[0].__name__] += count
    rounded = sum(isinstance(m, DetLinear) and m.operand_dtype is not None for m in model.modules())
    changed = {key: names for key, names in changed.items() if names}
    classes = {n: class_here(m) for n, m in own_layers(model).items() if isinstance(m, DetLinear)}
    return Report(
        class_of(model).__name__, changed, dict(left), dict(untried), dict(new), rounded, since or {},
        classes, rounding_of(model),
    )  # fmt: skip


def _attention_layers(model: Any) -> list[str]:
    """Layers with attention by isobit."""
    return [
        name
        for name, m in model.named_modules()
        if hasattr(m, "is_causal")
        and hasattr(m, "layer_idx")
        and getattr(m, "config", model.config)._attn_implementation in (NAME, PAGED)
    ]


def _leaves(model: nn.Module) -> list[nn.Module]:
    """Modules without children that isobit does not compute, except empty containers."""
    not_these = (
        DetLinear,
        DetRMSNorm,
        DetExperts,
        DetRouter,
        DetRMSNormGated,
        nn.ModuleDict,
        nn.ModuleList,
        nn.ParameterDict,
        nn.ParameterList,
    )
    leaves = [m for m in model.modules() if not [*m.children()] and not isinstance(m, not_these)]
    uncalled = delta_nets.convolutions(model)
    return [m for m in leaves if m not in uncalled]


# On and off


@dataclass(eq=False, kw_only=True)
class _Patch(Patch):
    """It keeps no model alive. What to restore is stored on the model itself."""

    model: "weakref.ref[Any]"
    tried: Tried
    report: Report  # of the model when it was last free of drift
    snapshots: int = 0  # of its guard at that time
    adopted: bool  # the model is a copy of one that was on

    def undo(self) -> None:
        model = self.model()
        if model is not None:
            turn_off(model)

    def stays_after(self, error: BaseException) -> bool:
        """Ranks make a model whole together, and this one may have the error alone: others would be waited
        for that never come."""
        model = self.model()
        if model is None or not is_cut(model):
            return False
        text = (
            f"isobit: the {type(model).__name__} stays cut, and enabled: ranks make it whole together, and "
            "an error has ended this with-block. Call disable() on all ranks"
        )
        if hasattr(error, "add_note"):
            error.add_note(text)
        else:  # Python 3.10
            warn(text)
        return True

    def look(self) -> Report:
        """The report on the model as it is now."""
        model: Any = self.model()
        watch = None if model is None else guard.of(model)
        if watch is None or (guard.is_unchanged(model) and self.snapshots == watch.snapshots):
            return self.report
        now = _report(model, self.tried, watch.changes(model))
        if guard.is_unchanged(model):
            self.report, self.snapshots = now, watch.snapshots
        return now


class ZeroDrift(Handle):
    """The result of `zero_drift`. `print` it to see by what the model is computed now; `check` tests it
    again. The end of a with-block, or `disable`, restores the model."""

    @property
    def report(self) -> Report:
        """By what the model is computed now; after `disable`, what it was until then."""
        assert isinstance(self._patch, _Patch)
        return self._patch.look() if self._patch is self._switch.patch else self._patch.report

    @property
    def changed(self) -> dict[str, list[str]]:
        """Names of modules, by the function of isobit that computes them."""
        return self.report.changed

    @property
    def left(self) -> dict[str, int]:
        """How many modules of each class torch computes as before. All of them were tested."""
        return self.report.left

    @property
    def classes(self) -> dict[str, str]:
        """The numerics class of each linear layer that isobit computes, by name; without those that adapters
        have added. It can be written as JSON, and given to `zero_drift` as `numerics`: the model then has the
        same bits."""
        return dict(self.report.classes)

    @property
    def rounding(self) -> Rounding:
        """Where the model rounds: "hf" or "vllm"."""
        return self.report.rounding

    def check(self) -> Report:
        """Test the model again as it is now: that nothing in it has been changed so that its bits may depend
        on the batch, and that they do not in a trial, as in `zero_drift`. Changes nothing.

        Returns:
            The report.

        Raises:
            HFError: the model has changed, fails the trial, or is not enabled.
        """
        with self._switch.lock:
            patch = self._patch
            assert isinstance(patch, _Patch)
            model = patch.model()
            if patch is not self._switch.patch or model is None:
                raise HFError(f"{self._switch.name}: it is not enabled; call zero_drift again")
            _check_refusals(model)
            watch = guard.of(model)
            assert watch is not None
            if changes := watch.changes(model):
                raise guard.changed(model, changes)
            patch.tried = _tried(model)
            patch.report, patch.snapshots = _report(model, patch.tried), watch.snapshots
            return patch.report

    def disable(self) -> None:
        """Restore the model. Does nothing the second time. If something else has changed the class of a
        module since, this is an error, and the model stays enabled: undo that first."""
        if self._patch is self._switch.patch:
            self._switch.off()

    def __repr__(self) -> str:
        off = self._patch is not self._switch.patch
        name, *rows = str(self.report).splitlines()
        return "\n".join([name + (", restored; until then:" if off else ""), *rows])


_switches: "weakref.WeakKeyDictionary[nn.Module, Switch]" = weakref.WeakKeyDictionary()


def zero_drift(
    model: Any,
    *,
    numerics: Classes = None,
    rounding: Rounding | None = None,
    tp: Any = None,
    batch: int | Sequence[int] = 1,
    lengths: int | Sequence[int] = (),
    train: bool = False,
) -> ZeroDrift:
    """Make a causal LM of transformers give every token the same bits: in training, in prefill at once or in
    chunks, in decoding with a cache, alone or in any batch. `generate` and everything else stay as they are.

    Attention goes through `isobit.attention` (`register_attention`), linear layers and the LM head through
    `isobit.det_linear`, experts through `isobit.nn.DetExperts`, norms through `isobit.rms_norm`, gated delta
    nets through `isobit.gated_delta_rule` and `isobit.causal_conv1d`. All other modules stay torch's. Each
    class of them is tested on this machine, and so is the model as a whole: see `trial`. A static cache lets
    `generate` compile its steps on a GPU; that is turned off, because compiled code rounds in other places.

    Args:
        model: a `PreTrainedModel` with an LM head, in bf16 or fp16; or in fp32, and called under autocast.
            Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3, the mixtures of experts Qwen3-MoE, Mixtral and OLMoE,
            and Qwen3-Next and the text models of Qwen3.5 are covered by isobit's tests; others are tested by
            this call. It may have LoRA adapters, in its dtype or in fp32, and may be in a `PeftModel`.
        numerics: the numerics class of linear layers, "chain16" or "tree8"; or a map {name: class}, as for
            `isobit.nn.swap_linear`: names may be glob patterns such as "*.down_proj", and layers that are not
            in the map are chain16, like all layers without a map. Adapters are always chain16. None keeps
            the classes of a model that is enabled already.
        rounding: where norms and rotary embeddings are rounded: "hf" as transformers does it, "vllm" as
            vLLM's CUDA kernels do, for a trainer of engines with
            `isobit.integrations.vllm.enable(rounding="vllm")`. Then rotary embeddings go through
            `isobit.rope`, and a model other than Llama, Mistral, Qwen 2 or Qwen 3 is refused, and so is tp.
            None keeps that of a model that is enabled already, and is "hf" for others.
        tp: a DeviceMesh of one dimension whose ranks share the linear layers, 1, 2, 4 or 8 of them: all call
            this with the same model, whole, and keep their parts of it. All layers that are cut must be of
            class tree8; logits, and gradients of what every rank has, then have the bits of one rank. See
            isobit.parallel. With `disable()`, which all ranks must call, the model is whole again. A model
            whose layers `DetColwise` and `DetRowwise` have cut is given without it, and stays cut.
        batch, lengths, train: what to compile in parallel beforehand, as for `isobit.warmup`, together with
            what the test of the model needs. Without lengths kernels are compiled when they are first used.

    Returns:
        A handle: `print` it, `check()` or `disable()` it, or use it as a context manager. `changed` and
        `left` list what was done; `classes` is the numerics class of each linear layer: save it with the
        model, and give it as `numerics` again. If the model is already enabled, or a copy of an enabled one,
        it stays enabled at the end of a with-block; `disable()` restores it. An enabled model that was
        changed is served and tested again.

    Raises:
        HFError: the model cannot be served. The message names the modules and the reasons; the model is
            unchanged. A forward raises it too, if the model was changed so that its bits may depend on the
            batch.

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
    if rounding not in (None, *ROUNDINGS):
        known = " or ".join(map(repr, ROUNDINGS))
        raise HFError(f"isobit.integrations.hf.zero_drift(rounding: {rounding!r}): must be {known}")
    given, model = model, adapters.base_of(model)
    switch = _switches.get(model) if isinstance(model, nn.Module) else None
    if switch is None:
        switch = Switch(f"isobit.integrations.hf.zero_drift(model: {type(given).__name__})")
    with switch.lock:
        sizes = Warmup(given, batch, lengths, train)
        if tp is not None and switch.patch is not None:
            prepared(model, tp, partial(_enabled_already, model), str)
        patch, new = switch.applied(None, lambda: _apply(model, numerics, rounding, sizes, tp))
        assert isinstance(patch, _Patch)
        if not new:
            check_numerics(model, numerics)
            check_rounding(model, rounding)
        if not new and not guard.is_unchanged(model):  # what was added since
            again = _apply(model, numerics, rounding, sizes, None)
            patch.tried, patch.report, patch.snapshots = again.tried, again.report, 0
    _switches[model] = switch
    return ZeroDrift(switch, patch, new and not patch.adopted)


class Warmup(NamedTuple):
    """What to compile before a model is tested: nothing if there are no lengths."""

    model: Any  # with its adapters
    batch: int | Sequence[int]
    lengths: int | Sequence[int]
    train: bool

    def of_norms(self, norms: Callable[[], object]) -> None:
        """Before it is known by what norms are computed."""
        if self.lengths != ():
            of_calls(self.model, norms)

    def of_all(self, trial: Callable[[], object]) -> None:
        """Of its layers, for the trial and for calls of these sizes."""
        if self.lengths != ():
            of_model(self.model, self.batch, self.lengths, self.train, None, False, trial)


def _enabled_already(model: Any) -> tuple[None, dict[str, int]]:
    raise refusal(model, "tp: zero_drift was called already; call disable() first")


def _apply(model: Any, numerics: Classes, rounding: Rounding | None, warmup: Warmup, tp: Any) -> _Patch:
    """Until the ranks of tp have agreed, an error on any of them leaves the model as it was on all."""
    adopted = is_on(model)
    with ExitStack() as undo:

        def ready() -> tuple[Tried, dict[str, int]]:
            _check_refusals(model)
            _check_rounding(model, rounding, tp)
            if tp is not None:
                check_tp(model, tp, numerics)
            check_cut(model)
            check_numerics(model, numerics)
            register_attention()
            undo.enter_context(or_as_before(model))
            return _turned_on(model, numerics, rounding, warmup, tp)

        tried, heads = prepared(model, tp, ready, lambda name: str(class_given(numerics, name)))
        if tp is not None:
            cut(model, tp, heads)
    guard.put_on(model)
    report = _report(model, tried)
    return _Patch(
        backend=None, instead="", model=weakref.ref(model), tried=tried, report=report, adopted=adopted
    )


def _turned_on(
    model: Any, numerics: Classes, rounding: Rounding | None, warmup: Warmup, tp: Any
) -> tuple[Tried, dict[str, int]]:
    """The model computed by isobit, and tested: the classes of modules that torch computes, and the norms of
    single heads that ranks are to share."""
    warmup.of_norms(partial(options_of_all, model))
    skipped = turn_on(model, numerics, rounding)
    if skipped:
        raise refusal(model, by_reason(skipped))
    if not _attention_layers(model):
        raise refusal(model, "no module in it uses transformers' AttentionInterface")
    warmup.of_all(partial(trial.of_model, model, _vocab(model), ()))
    return _tried(model), {} if tp is None else dimensions_of_heads(model)


def _check_refusals(model: Any) -> None:
    reason = refusals.of_model(model)
    if reason is not None:
        raise refusal(model, reason)
    refused = refusals.of_modules(model)
    if refused:
        raise refusal(model, by_reason(refused))


def _check_rounding(model: Any, rounding: Rounding | None, tp: Any) -> None:
    check_rounding(model, rounding)
    if (rounding or rounding_of(model)) == "vllm":
        reason = rotary.why_not(model)
        if tp is not None or any(getattr(module, "of_ranks", False) for module in model.modules()):
            reason = "rounding='vllm': its layers are shared by ranks, with which this was not tried"
        if reason is not None:
            raise refusal(model, reason)


def _vocab(model: Any) -> int:
    return int(model.get_output_embeddings().weight.shape[0])


def _tried(model: Any) -> Tried:
    """The classes of modules that torch computes, and whether they were called; raises an error if one
    depends on the batch, or the model as a whole."""
    left: Collection[trial.ModuleClass] = set(map(trial.class_of_module, _leaves(model)))
    differing, calls = trial.of_model(model, _vocab(model), left)
    wrong = {each[0].__name__: reason for each, call in calls.items() if (reason := trial.of_module(call))}
    if wrong:
        raise refusal(model, f"these depend on the batch on this machine: {by_reason(wrong)}")
    for what, count in differing.items():
        if count:
            raise refusal(model, f"{count} logits have other bits {what}; and no single module explains it")
    return {each: each in calls for each in left}
