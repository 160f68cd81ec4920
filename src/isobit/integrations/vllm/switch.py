"""On, off, the report, and the plugin that vLLM loads in every process."""

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

import torch

from isobit.frame.backend import UnsupportedError
from isobit.integrations.hf import warmup
from isobit.integrations.hf.errors import by_reason
from isobit.integrations.patch import Enabled, Patch, Switch
from isobit.integrations.rounding import AS, ROUNDINGS, Rounding
from isobit.integrations.vllm import layers, workers
from isobit.integrations.vllm import logprobs as rollout_logprobs
from isobit.integrations.vllm import versions as v
from isobit.integrations.vllm.options import VARIABLE, Options, quoted
from isobit.integrations.vllm.report import VLLMReport, not_enabled
from isobit.integrations.vllm.scores import DTYPES, KINDS
from isobit.integrations.vllm.versions import INSTALL as INSTALL
from isobit.integrations.vllm.versions import PROVEN, refusal
from isobit.integrations.vllm.workers import SERVED
from isobit.layers.classes import Classes

#: Of vLLM: 1 for its V2 model runner, which has another sampler, 0 for V1. Unless it is set, vLLM takes V2
#: for dense models. Where isobit cannot serve V2, `enable` sets it to 0. `disable` restores both variables.
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"

SWITCH = Switch("isobit.integrations.vllm")

#: By device: the name in vLLM's registry, and the class that replaces the one of that name.
BACKENDS = {
    "cpu": ("CPU_ATTN", "isobit.integrations.vllm.cpu_attention.Backend"),
    "cuda": ("FLASH_ATTN", "isobit.integrations.vllm.flash_attention.Backend"),
}
RUNNERS = {"cpu": (v.CPU_RUNNER, "CPUModelRunner"), "cuda": (v.GPU_RUNNER, "GPUModelRunner")}
RUNNER_V2 = (v.GPU_RUNNER_V2, "GPUModelRunner")


@dataclass(eq=False, kw_only=True)
class _Patch(Patch):
    version: str
    device: str
    why_v1: str | None  # why vLLM may not choose its V2 model runner
    options: Options
    calls: Counter[str] = field(default_factory=Counter)
    models: list[str] = field(default_factory=list)
    uncounted: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    undos: list[Callable[[], None]] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)

    def do(self) -> None:
        """In this order; what was done is undone if a step fails."""
        try:
            self._set_variables()
            self._register_attention()
            for place, name in (RUNNERS[self.device], *([] if self.why_v1 else [RUNNER_V2])):
                self._replace(v.find(place, name), "load_model", self._loading)
                if self.options.warm_up and self.device == "cuda":
                    self._replace(v.find(place, name), "profile_run", _rehearsing)
            if self.device == "cpu":
                # vLLM would pack the weights for its own kernels, and drop the originals.
                for place, name in (
                    (v.LINEAR, "UnquantizedLinearMethod"), (v.EMBEDDING, "UnquantizedEmbeddingMethod"),
                    (v.EXPERTS, "UnquantizedFusedMoEMethod"),
                ):  # fmt: skip
                    if (method := v.find(place, name)) is not None:
                        self._replace(method, "process_weights_after_loading", lambda theirs: _keep)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        while self.undos:
            self.undos.pop()()

    def count(self, what: str) -> None:
        if torch.compiler.is_compiling():  # a trace would set the numbers of today at every call
            return
        self.served += 1
        self.calls[what] += 1

    def _set_variables(self) -> None:
        self.variables = {VARIABLE: self.options.text()}
        if self.why_v1 is not None:
            self.variables[RUNNER] = "0"
        self.variables[workers.RAY] = workers.with_ours(os.environ.get(workers.RAY))
        for name, value in self.variables.items():
            self.undos.append(functools.partial(_restore_variable, name, os.environ.get(name)))
            os.environ[name] = value
        if RUNNER in os.environ:  # the user's own, for the report
            self.variables[RUNNER] = os.environ[RUNNER]

    def _register_attention(self) -> None:
        name, ours = BACKENDS[self.device]
        registry = import_module(v.REGISTRY)
        backend = registry.AttentionBackendEnum[name]
        if backend.is_overridden() and backend.get_path() != ours:
            raise refusal(f"another plugin has replaced the attention backend {name}: {backend.get_path()}")
        # vLLM keeps the backends that engines of this process were given, and would give them again.
        forget = v.find(v.SELECTOR, "_cached_get_attn_backend.cache_clear")
        self.undos += [forget, backend.clear_override]  # undone from the last one on
        registry.register_backend(backend, ours)
        forget()

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """The owner may have it from a base class, which keeps it."""
        own = name in vars(owner)
        theirs = getattr(owner, name)
        setattr(owner, name, make(theirs))
        restore = functools.partial(setattr, owner, name, theirs)
        self.undos.append(restore if own else functools.partial(delattr, owner, name))

    def _loading(self, theirs: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(theirs)
        def load_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
            config = runner.vllm_config
            self._check_settings(config)
            layers.separate_caches(config, self.options.text())
            self.uncounted += [each for each in layers.without_python(config) if each not in self.uncounted]
            result = theirs(runner, *args, **kwargs)
            self.admit(runner, runner.get_model())  # runner.model may be a graph of it
            return result

        return load_model

    def _check_settings(self, config: Any) -> None:
        given = self.options.logprobs, self.options.logits_dtype, self.why_v1
        wrong = list(layers.wrong_settings(config, *given))
        if wrong:
            raise refusal(f"this engine cannot have the trainer's bits: {'; '.join(wrong)}")

    def admit(self, runner: Any, model: Any) -> None:
        """Serve a model that vLLM has loaded; or an error that names what cannot be served."""
        rounding = self.options.rounding
        refused = layers.refused(model, rounding)
        name = type(model).__name__
        left = {each or "the model itself": why for each, why in refused.items()}
        if name not in layers.MODELS:
            known = ", ".join(layers.MODELS)
            left = {name: f"its roundings in transformers are not known, as those of {known} are", **left}
        if left and not self.options.allow_others:
            raise refusal(
                f"{name} cannot be served. {by_reason(left)}. enable(allow_others=True) serves the rest, "
                "and leaves these modules to vLLM: bits may then depend on the batch, and differ from the "
                "trainer's"
            )
        for each, reason in left.items():
            self._leave(each, reason)
        served = layers.serve(model, refused, self.count, self.options.classes, rounding)
        if self.options.logprobs == "linear_logp":
            why_not = rollout_logprobs.serve(
                runner, model, refused, getattr(torch, self.options.logits_dtype), self.count
            )
            if why_not is not None:
                self._leave("log-probabilities", f"{name} keeps vLLM's log-probabilities: {why_not}")
        setattr(model, SERVED, self.options)
        workers.answer(self.report)
        which = "V2" if v.is_v2(runner) else "V1"
        modules = ", ".join(f"{n} {kind}" for kind, n in sorted(served.items()))
        self.models.append(f"{name}, {which} model runner: {modules}")

    def _leave(self, what: str, reason: str) -> None:
        self.count_passed(reason)
        self.left[what] = reason

    def report(self) -> VLLMReport:
        own, dtype = self.options.logprobs == "linear_logp", self.options.logits_dtype
        ours = "isobit.linear_logp" + (f", logits_dtype={dtype}" if dtype != "float32" else "")
        return VLLMReport(
            self.version, PROVEN.get(self.version, "not tried"), dict(self.variables), self._runner(),
            ours if own else "torch.log_softmax, of rounded logits",
            f"{AS[self.options.rounding]} (rounding={self.options.rounding!r})", list(self.models),
            dict(self.calls), list(self.uncounted), dict(self.left),
        )  # fmt: skip

    def _runner(self) -> str:
        if self.why_v1 is not None:
            return f"V1, since {self.why_v1}"
        return "V2 if vLLM chooses it, as for dense models, or V1: both are served"


def _rehearsing(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """The run by which an engine measures its memory is the first that computes. It is rehearsed before."""

    @functools.wraps(theirs)
    def profile_run(*args: Any, **kwargs: Any) -> Any:
        warmup.warmup(functools.partial(theirs, *args, **kwargs))
        return theirs(*args, **kwargs)

    return profile_run


def _keep(method: Any, layer: Any) -> None:
    """Instead of packing weights."""


def _restore_variable(name: str, before: str | None) -> None:
    if before is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = before


def _why_v1(version: str, device: str, logprobs: str) -> str | None:
    """Why vLLM may not choose its V2 model runner, or None. Where a user has chosen V2, what cannot be served
    is an error instead."""
    asked = os.environ.get(RUNNER)
    if device == "cpu":
        return "V2 is served on GPUs alone"
    if asked is not None:
        return f"{RUNNER}=0 is set" if asked == "0" else None
    if logprobs != "linear_logp":
        return f"V2 is not served with logprobs={logprobs!r}"
    if any(v.differences(v.V2_NAMES)):
        return f"V2 of vLLM {version} is not the one that isobit was tried with"
    return None


def _on(options: Options) -> Enabled:
    def apply() -> _Patch:
        version = v.installed_version(options.allow_untested)
        device = v.platform()
        why_v1 = _why_v1(version, device, options.logprobs)
        v.check_names(version, device, v2=why_v1 is None)
        patch = _Patch(
            backend=None, instead=f"{SWITCH.name}: vLLM's own code serves a module", version=version,
            device=device, why_v1=why_v1, options=options,
        )  # fmt: skip
        patch.do()
        return patch

    enabled = SWITCH.on(None, apply)
    there = SWITCH.patch
    assert isinstance(there, _Patch)
    if there.options != options:
        raise UnsupportedError(
            f"{SWITCH.name}.enable: it is already enabled with other options "
            f"({VARIABLE}={there.options.text()}); call disable() first"
        )
    return enabled


def enable(
    *,
    allow_untested: bool = False,
    allow_others: bool = False,
    logprobs: Literal["linear_logp", "log_softmax"] = "linear_logp",
    logits_dtype: torch.dtype | None = None,
    warm_up: bool = False,
    rounding: Rounding = "hf",
    numerics: Classes = None,
) -> Enabled:
    """Let engines of vLLM that are made from here on compute with isobit: until `disable`, or as a context
    manager until the end of its block. Their worker processes too: they load isobit's plugin, and find the
    environment variable ISOBIT_VLLM, which this sets. If it is already enabled, it stays enabled.

    An engine keeps what it was made with: one that exists already is not changed, neither by this nor by
    `disable`.

    Args:
        allow_untested: accept a version of vLLM that isobit was not tried with, if the functions that it
            replaces have the expected names and arguments.
        allow_others: leave modules that isobit does not serve to vLLM, with a warning and a line in the
            report. Without it a model that has one is refused when it is loaded.
        logprobs: "linear_logp": the log-probability of a token is `isobit.linear_logp` of the hidden state,
            at the temperature of its request, and the sampler draws from fp32 logits. "log_softmax": logits
            are rounded to the model's dtype, and everything after that is vLLM's.
        logits_dtype: of `linear_logp`, for a trainer that gives it too. bf16 or fp16, that of the model,
            rounds logits, also for the sampler. None keeps fp32.
        warm_up: compile the kernels of the engine's first run in several processes, as `isobit.warmup` does.
        rounding: where norms and rotary embeddings are rounded: "hf" as transformers does it, "vllm" as
            vLLM's CUDA kernels do, for a trainer under
            `isobit.integrations.hf.zero_drift(model, rounding="vllm")`. With "vllm" layers of experts are
            refused.
        numerics: the numerics classes of the trainer's linear layers: one class, or the map that its
            `zero_drift` handle has as `classes`. Layers that vLLM merges (q, k and v; gate and up) must be of
            one class. Layers that are not in the map are chain16.

    Returns:
        A handle with `served`, the number of calls that isobit has computed in this process, and `passed`,
        the number of modules left to vLLM, by reason. `report` has more.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        VLLMError: this version of vLLM was not tried, or differs from what is expected; or worker processes
            would not load isobit's plugin.
        ContractError: it is enabled with other options.

    Example:
        >>> import isobit
        >>> with isobit.integrations.vllm.enable():  # doctest: +SKIP
        ...     llm = vllm.LLM("Qwen/Qwen3-0.6B", dtype="bfloat16")
        ...     outputs = llm.generate(prompts, vllm.SamplingParams(logprobs=0))
        ...     print(*isobit.integrations.vllm.reports(llm))
    """
    if logprobs not in KINDS:
        raise UnsupportedError(f"{SWITCH.name}.enable: logprobs={logprobs!r} is not one of {KINDS}")
    if logits_dtype not in DTYPES:
        raise UnsupportedError(f"{SWITCH.name}.enable: logits_dtype={logits_dtype} is not bf16, fp16 or None")
    if rounding not in ROUNDINGS:
        raise UnsupportedError(f"{SWITCH.name}.enable: rounding={rounding!r} is not one of {ROUNDINGS}")
    if logprobs != "linear_logp" and logits_dtype is not None:
        raise UnsupportedError(f"{SWITCH.name}.enable: logits_dtype is for logprobs='linear_logp'")
    given = quoted(f"{SWITCH.name}.enable", numerics)
    workers.check_plugin()
    return _on(
        Options(allow_untested, allow_others, logprobs, DTYPES[logits_dtype], warm_up, rounding, given)
    )


def disable() -> None:
    """Engines that are made from here on are vLLM's own again. Does nothing if it is not enabled."""
    SWITCH.off()


def report(worker: Any = None) -> VLLMReport:
    """What isobit does for vLLM in this process; if it is not enabled here, the report says so, and `off` is
    the reason. `reports(llm)` has those of an engine's workers, which mostly are other processes.

    Args:
        worker: given by `collective_rpc`; not used.
    """
    patch = SWITCH.patch
    return patch.report() if isinstance(patch, _Patch) else not_enabled(_plugin_was_loaded)


#: Whether vLLM has loaded the plugin in this process.
_plugin_was_loaded = False


def load_plugin() -> None:
    """Called by vLLM in every process (entry point `vllm.general_plugins`). Does nothing unless `enable` has
    set ISOBIT_VLLM in the process that started this one; nor where vLLM only looks at the class of a model,
    which would then import all of the engine."""
    global _plugin_was_loaded
    _plugin_was_loaded = True
    text = os.environ.get(VARIABLE, "")
    main = getattr(sys.modules["__main__"], "__spec__", None)  # of python -m
    if text not in ("", "0") and getattr(main, "name", None) != v.MODEL_REGISTRY:
        _on(Options.read(text))
