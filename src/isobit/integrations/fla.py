"""isobit inside flash-linear-attention (FLA).

    isobit.integrations.fla.enable()

From here on FLA takes the gradients of delta-rule states from `isobit.chunk_gated_delta_rule_bwd_dhu`, in the
backward of `chunk_gated_delta_rule`, of `chunk_kda` and of all its other ops that call the function of this
name. That function looks into a registry of backends at each call, so one entry there reaches every caller,
including those that imported the function earlier.

    with isobit.integrations.fla.enable() as on:
        loss.backward()
    print(on.served, on.passed)

With `enable(states="triton")` FLA also takes the states of its forward from
`isobit.chunk_gated_delta_rule_fwd_h`, in the class `gdr/1`. With `enable(whole="triton")` all of its
`chunk_gated_delta_rule`, forward and backward, is `isobit.gated_delta_rule` (`fla_whole`).

Calls that isobit does not serve are passed on to FLA's own kernel. They are counted by reason, with a warning
for the first of each. Where no call can be served, because there is no GPU for the backend, `enable` warns at
once.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from isobit.frame.backend import Backend, UnsupportedError
from isobit.frame.caller import warn
from isobit.frame.contract import dtype_name
from isobit.frame.device import default_device, hopper_cannot_run, triton_cannot_run
from isobit.integrations import fla_whole
from isobit.integrations.patch import Enabled, Patch, Switch
from isobit.ops.delta_rule.op import backward as op
from isobit.ops.delta_rule.op import chunk_gated_delta_rule_bwd_dhu
from isobit.ops.gated_delta_rule import chunk_gated_delta_rule_fwd_h
from isobit.ops.gated_delta_rule.op import forward as whole_op
from isobit.ops.gated_delta_rule.states_op import states as forward_op

NAME, MODULE = "chunk_gated_delta_rule_bwd_dhu", "fla.ops.common.chunk_delta_h"
OURS = inspect.signature(chunk_gated_delta_rule_bwd_dhu).parameters

#: The states of the forward.
FORWARD = "chunk_gated_delta_rule_fwd_h"
OF_FORWARD = inspect.signature(chunk_gated_delta_rule_fwd_h).parameters

#: Versions of FLA, and how many arguments of our function FLA's has there. Other versions are refused even if
#: they look the same: gates were once natural logarithms under the same names.
ARGUMENTS = {"0.5.2": 14, "0.6.0": 16}
FORWARD_ARGUMENTS = {"0.5.2": 13, "0.6.0": 14}

INSTALL = "pip install fla-core==0.6.0"

#: FLA tries backends in ascending order; the default is 5. Only its own backend for Ascend, which does not
#: exist on a GPU, comes earlier.
PRIORITY = 1


class FLAError(UnsupportedError):
    """isobit does not support the installed FLA. The message says what was found."""


# The installed FLA


@dataclass(frozen=True)
class _Fla:
    """The parts of FLA that are used."""

    version: str
    function: Callable[..., Any]  # called by FLA's ops
    registry: Any  # of its backends
    base: type  # of a backend


def _installed() -> _Fla:
    """The installed FLA; or an error that says what was found instead."""
    try:
        version = import_module("fla").__version__
    except ModuleNotFoundError as error:
        if error.name != "fla":
            raise
        raise ModuleNotFoundError(
            f"isobit.integrations.fla: flash-linear-attention is not installed: {INSTALL}", name="fla"
        ) from error
    if version not in ARGUMENTS:
        raise _refusal(f"found version {version}")
    function = vars(import_module(MODULE)).get(NAME)
    if function is None:
        raise _refusal(f"version {version} has no {NAME} in {MODULE}")
    try:
        if version.startswith("0.5."):
            base = import_module("fla.ops.backends").BaseBackend
            registry = import_module("fla.ops.common.backends").common_registry
        else:
            backends = import_module("fla.backends")
            base, registry = backends.BaseBackend, backends._operation_registries["common"]
        shaped = isinstance(registry._backends, dict) and callable(registry.register)
    except (ImportError, AttributeError, KeyError) as error:
        raise _refusal(f"the backend registry of {version} is unknown: {error!r}") from error
    if not shaped:
        raise _refusal(f"the backend registry of {version} is unknown: {type(registry).__name__}")
    fla = _Fla(version, function, registry, base)
    _check_signature(fla)
    return fla


def _check_signature(fla: _Fla) -> None:
    """Checks that names, order and defaults of the arguments are the expected ones."""
    theirs = _text(inspect.signature(fla.function).parameters.values())
    ours = _text(list(OURS.values())[: ARGUMENTS[fla.version]])
    if theirs != ours:
        raise _refusal(f"found {NAME}({theirs}) in version {fla.version}, but isobit needs {NAME}({ours})")


def _check_forward(fla: _Fla) -> None:
    """The same for the states of the forward, if they are wanted."""
    function = vars(import_module(MODULE)).get(FORWARD)
    if function is None:
        raise _refusal(f"version {fla.version} has no {FORWARD} in {MODULE}")
    theirs = _text(inspect.signature(function).parameters.values())
    ours = _text(list(OF_FORWARD.values())[: FORWARD_ARGUMENTS[fla.version]])
    if theirs != ours:
        what = f"found {FORWARD}({theirs}) in version {fla.version}, but isobit needs {FORWARD}({ours})"
        raise _refusal(what)


def _text(parameters: Iterable[inspect.Parameter]) -> str:
    """Without annotations, which do not matter."""
    return ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)


def _refusal(what: str) -> FLAError:
    supported = f"isobit supports {' and '.join(ARGUMENTS)}: {INSTALL}"
    return FLAError(f"isobit.integrations.fla: {what} ({supported})")


# The backend that is registered


def why_not(backend: Backend, given: dict[str, Any]) -> str | None:
    """Why this backend of isobit cannot serve a call of FLA's, or None. These are calls that FLA's kernel
    accepts and isobit's contract does not. Other violations of the contract are errors: FLA cannot compute
    them either."""
    if given.get("use_graph"):
        return "use_graph=True needs results in FLA's own static buffers"
    if given.get("chunk_offsets") is not None:  # use_graph=True of chunk_kda arrives here like this
        return "chunk_offsets is of a graph, whose chunk_indices are padded"
    if given.get("chunk_indices") is not None and given.get("cu_seqlens") is None:
        return "chunk_indices comes without cu_seqlens"
    q = given["q"]
    for name in ("k", "w", "do", "dv"):
        if given[name].dtype != q.dtype:
            return f"{name} is {dtype_name(given[name].dtype)} and q is {dtype_name(q.dtype)}"
    for name in ("g", "gk"):
        gate = given.get(name)
        if gate is not None and gate.dtype != torch.float32:
            return f"{name} is {dtype_name(gate.dtype)} and not fp32"
    chunk_size = given.get("chunk_size", 64)
    if chunk_size not in (16, 32, 64):
        return f"chunk_size={chunk_size} is not 16, 32 or 64"
    return backend.when({**given, "chunk_size": chunk_size})


def why_not_forward(backend: Backend, given: dict[str, Any]) -> str | None:
    """The same for the states of the forward."""
    chunk_size, k = given.get("chunk_size", 64), given["k"]
    if chunk_size != 64:
        return f"chunk_size={chunk_size} of {FORWARD} is not 64"
    if given.get("chunk_indices") is not None and given.get("cu_seqlens") is None:
        return "chunk_indices comes without cu_seqlens"
    for name in ("w", "u"):
        if given[name].dtype != k.dtype:
            return f"{name} is {dtype_name(given[name].dtype)} and k is {dtype_name(k.dtype)}"
    for name in ("g", "gk"):
        gate = given.get(name)
        if gate is not None and gate.dtype != torch.float32:
            return f"{name} is {dtype_name(gate.dtype)} and not fp32"
    return backend.when(given)


#: Stands for tensors in a probing call.
_PROBE = object()


@cache  # a process has one or two such classes, and a with-block may be in a hot loop
def _backend_class(base: type) -> Any:
    """The entry for FLA's registry, a subclass of FLA's own base class."""

    class IsobitBackend(base):
        backend_type = "isobit"
        priority = PRIORITY
        patch: "_Patch"

        def verify(self, function_name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            """Whether isobit serves a call. FLA's own method would treat an error in here as a refusal."""
            if function_name == FORWARD and self.patch.states is not None:
                given = dict(zip(OF_FORWARD, args, strict=False)) | kwargs
                reason = why_not_forward(self.patch.states, given)
                if reason is not None:
                    self.patch.count_passed(reason)
                return reason is None, reason
            if function_name != NAME:
                return False, f"isobit has {NAME} alone"
            given = dict(zip(OURS, args, strict=False)) | kwargs
            if given["q"] is _PROBE:
                return True, None
            reason = why_not(self.patch.serving, given)
            if reason is not None:
                self.patch.count_passed(reason)
            return reason is None, reason

        def chunk_gated_delta_rule_bwd_dhu(self, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("q") is _PROBE:
                return _PROBE
            with torch.no_grad():  # FLA's kernels leave no graph either
                results = chunk_gated_delta_rule_bwd_dhu(*args, **kwargs, backend=self.patch.serving.name)
            self.patch.count_served()
            return results

        def chunk_gated_delta_rule_fwd_h(self, *args: Any, **kwargs: Any) -> Any:
            assert self.patch.states is not None  # or `verify` would have refused
            with torch.no_grad():
                results = chunk_gated_delta_rule_fwd_h(*args, **kwargs, backend=self.patch.states.name)
            self.patch.count_served()
            return results

    return IsobitBackend


def _register(fla: _Fla, patch: "_Patch") -> None:
    backend = _backend_class(fla.base)()
    backend.patch = patch
    fla.registry.register(backend)


def _checked() -> _Fla:
    """The installed FLA, after checking that its function uses registered backends."""
    fla = _installed()
    _register(fla, _Patch(fla, op.backends[0]))
    try:
        answer = fla.function(**dict.fromkeys(("q", "k", "w", "do", "dv"), _PROBE))
    except Exception as error:
        raise _refusal(
            f"{NAME} of version {fla.version} does not use the backends that are registered. Is "
            "FLA_DISABLE_BACKEND_DISPATCH=1 set?"
        ) from error
    finally:
        fla_whole.unregister(fla.registry)
    if answer is not _PROBE:
        raise _refusal(f"another backend of FLA serves {NAME} before isobit's")
    return fla


# On and off


class _Patch(Patch):
    def __init__(
        self, fla: _Fla, serving: Backend, states: Backend | None = None, whole: Backend | None = None
    ) -> None:
        own = f"{SWITCH.name}: FLA's own kernel serves {NAME} here"
        super().__init__(backend=serving.name, instead=own)
        self.fla, self.serving, self.states, self.whole = fla, serving, states, whole

    def undo(self) -> None:
        fla_whole.unregister(self.fla.registry)
        if self.whole is not None:
            fla_whole.unregister(fla_whole.registry(self.fla.version))


SWITCH = Switch("isobit.integrations.fla")

#: Why the kernels of a backend cannot run on a device; the others run everywhere.
_CANNOT_RUN = {"hopper": hopper_cannot_run, "triton": triton_cannot_run}


def _warn_if_nothing_is_served(backend: str) -> None:
    """A GPU that is not in use yet is not looked at: that would start CUDA, and a process that is forked
    later could not use it."""
    if backend not in _CANNOT_RUN or (torch.accelerator.is_available() and not torch.cuda.is_initialized()):
        return
    reason = _CANNOT_RUN[backend](default_device())
    if reason is not None:
        warn(
            f"{SWITCH.name}: backend {backend!r} can serve no call here: {reason}. Calls are passed on to "
            "FLA's own kernels, which need a GPU. enable('triton') is for GPUs that are not Hopper, and "
            "enable('reference') for CPU tensors"
        )


_fla: _Fla | None = None  # checked


def enable(backend: str = "hopper", states: str | None = None, whole: str | None = None) -> Enabled:
    """Let FLA take the gradients of delta-rule states from isobit: until `disable`, or as a context manager
    until the end of its block. If it is already enabled, it stays enabled and keeps counting.

    Args:
        backend: the backend of isobit to use: "hopper", or, without such a GPU, "triton" or "reference".
            Calls that it cannot serve are passed on to FLA's own kernel. If it can serve none, because there
            is no such GPU, this warns.
        states: the backend that computes the states of the forward too, "hopper", "triton", "model" (CPU) or
            "reference"; None leaves them to FLA.
        whole: the backend that computes all of `chunk_gated_delta_rule`, forward and backward, one of the
            same names; None leaves it to FLA, which then takes what `backend` and `states` select. FLA's
            `fused_recurrent_gated_delta_rule` stays FLA's.

    Returns:
        An object with `served`, the number of calls that isobit has computed, and `passed`, the number of
        calls that it has passed on, by reason.

    Raises:
        ModuleNotFoundError: FLA is not installed.
        FLAError: the installed FLA is not 0.6.0 or 0.5.2, or differs from these.
        ContractError: no such backend, or it is enabled with another one.

    Example:
        >>> import isobit
        >>> with isobit.integrations.fla.enable() as on:  # doctest: +SKIP
        ...     loss.backward()
        >>> on.served, on.passed  # doctest: +SKIP
        (24, Counter())
    """
    serving = op.backend_named(backend)
    of_forward = None if states is None else forward_op.backend_named(states)
    of_whole = None if whole is None else whole_op.backend_named(whole)

    def apply() -> _Patch:
        global _fla
        if _fla is None or getattr(sys.modules.get(MODULE), NAME, None) is not _fla.function:
            _fla = _checked()
        if of_forward is not None:
            _check_forward(_fla)
        registry = None if of_whole is None else fla_whole.check(_fla.version, _fla.base, _refusal)
        _warn_if_nothing_is_served(backend)
        patch = _Patch(_fla, serving, of_forward, of_whole)
        _register(_fla, patch)
        if of_whole is not None:
            fla_whole.register(registry, _fla.base, _fla.version, of_whole, patch)
        return patch

    with SWITCH.lock:
        known = SWITCH.patch
        if isinstance(known, _Patch) and known.backend == backend:
            _same("states", known.states, of_forward)
            _same("whole", known.whole, of_whole)
        return SWITCH.on(backend, apply)


def _same(argument: str, known: Backend | None, wanted: Backend | None) -> None:
    if known is not wanted:
        before, now = (None if each is None else each.name for each in (known, wanted))
        raise UnsupportedError(
            f"{SWITCH.name}.enable({argument}={now!r}): it is already enabled with {argument}={before!r}; "
            "call disable() first"
        )


def disable() -> None:
    """Leave everything to FLA again. Does nothing if it is not enabled."""
    SWITCH.off()
