"""isobit inside of flash-linear-attention (FLA).

    isobit.integrations.fla.enable()

From here on FLA takes the gradients of delta-rule states from `isobit.chunk_gated_delta_rule_bwd_dhu`, in the
backward of `chunk_gated_delta_rule`, of `chunk_kda` and of all its other ops that call the function of this
name. That function asks a registry of backends at each call, so one entry there reaches every caller, also
those that imported the function earlier.

    with isobit.integrations.fla.enable() as on:
        loss.backward()
    print(on.served, on.passed)

Calls that isobit does not serve go on to FLA's own kernel. They are counted by reason, and the first of each
warns.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import torch

from isobit.backend import Backend, UnsupportedError
from isobit.contract import dtype_name
from isobit.integrations.session import Enabled, Session, Switch
from isobit.ops.delta_rule.op import backward as op
from isobit.ops.delta_rule.op import chunk_gated_delta_rule_bwd_dhu

NAME, MODULE = "chunk_gated_delta_rule_bwd_dhu", "fla.ops.common.chunk_delta_h"
OURS = inspect.signature(chunk_gated_delta_rule_bwd_dhu).parameters

#: Versions of FLA, and how many of our function's arguments FLA's has there. Others are refused even if they
#: look the same: gates were natural logarithms once, under the same names.
ARGUMENTS = {"0.5.2": 14, "0.6.0": 16}

INSTALL = "pip install fla-core==0.6.0"

#: FLA asks the lowest first, and has 5 where nothing is said. Only its own backend for Ascend, which is not
#: there on a GPU, comes earlier.
PRIORITY = 1


class FLAError(UnsupportedError):
    """The installed FLA is not one that isobit knows how to serve. The message says what was found."""


# The installed FLA


@dataclass(frozen=True)
class _Fla:
    """What is used of FLA."""

    version: str
    function: Callable[..., Any]  # which FLA's ops call
    registry: Any  # of the backends that it asks
    base: type  # of a backend


def _installed() -> _Fla:
    """The FLA that is installed; or an error that says what there is instead."""
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
        raise _refusal(f"the registry of backends of {version} is another: {error!r}") from error
    if not shaped:
        raise _refusal(f"the registry of backends of {version} is another: {type(registry).__name__}")
    found = _Fla(version, function, registry, base)
    _check_signature(found)
    return found


def _check_signature(fla: _Fla) -> None:
    """Names, order and defaults of arguments are those that are passed on."""
    found = _text(inspect.signature(fla.function).parameters.values())
    wanted = _text(list(OURS.values())[: ARGUMENTS[fla.version]])
    if found != wanted:
        raise _refusal(f"found {NAME}({found}) in version {fla.version}, wants {NAME}({wanted})")


def _text(parameters: Iterable[inspect.Parameter]) -> str:
    """Without annotations, which change nothing."""
    return ", ".join(str(p.replace(annotation=p.empty)) for p in parameters)


def _refusal(what: str) -> FLAError:
    return FLAError(f"isobit.integrations.fla: {what} (it knows {' and '.join(ARGUMENTS)}: {INSTALL})")


# The backend that is registered


def why_not(backend: Backend, given: dict[str, Any]) -> str | None:
    """Why a call of FLA's is not for this backend of isobit, or None. FLA's kernel takes more than isobit's
    contract does; what breaks the contract otherwise, FLA cannot compute either, and it is an error."""
    if given.get("use_graph"):
        return "use_graph=True wants results in FLA's own static buffers"
    if given.get("chunk_offsets") is not None:  # this is how use_graph=True of chunk_kda arrives here
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
        return f"chunk_size={chunk_size} is none of 16, 32 and 64"
    return backend.when({**given, "chunk_size": chunk_size})


#: What a probing call has instead of tensors.
_PROBE = object()


@cache  # of the classes that a process sees there are one or two, and a with-block may stand in a hot loop
def _backend_class(base: type) -> Any:
    """What FLA's registry takes, as a class over the one that FLA has for it."""

    class IsobitBackend(base):
        backend_type = "isobit"
        priority = PRIORITY
        session: "_Session"

        def verify(self, function_name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            """Whether a call is for us. Not FLA's way, which takes an error in here for a No."""
            if function_name != NAME:
                return False, f"isobit has {NAME} alone"
            given = dict(zip(OURS, args, strict=False)) | kwargs
            if given["q"] is _PROBE:
                return True, None
            reason = why_not(self.session.serving, given)
            if reason is not None:
                self.session.count_passed(reason)
            return reason is None, reason

        def chunk_gated_delta_rule_bwd_dhu(self, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("q") is _PROBE:
                return _PROBE
            with torch.no_grad():  # FLA's kernels leave no graph either
                found = chunk_gated_delta_rule_bwd_dhu(*args, **kwargs, backend=self.session.serving.name)
            self.session.count_served()
            return found

    return IsobitBackend


def _register(fla: _Fla, session: "_Session") -> None:
    backend = _backend_class(fla.base)()
    backend.session = session
    fla.registry.register(backend)


def _checked() -> _Fla:
    """The installed FLA, whose function asks a backend that is registered."""
    fla = _installed()
    _register(fla, _Session(fla, op.backends[0]))
    try:
        found = fla.function(**dict.fromkeys(("q", "k", "w", "do", "dv"), _PROBE))
    except Exception as error:
        raise _refusal(
            f"{NAME} of version {fla.version} does not ask the backends that are registered. Is "
            "FLA_DISABLE_BACKEND_DISPATCH=1 set?"
        ) from error
    finally:
        _unregister(fla)
    if found is not _PROBE:
        raise _refusal(f"another backend of FLA serves {NAME} before isobit's")
    return fla


def _unregister(fla: _Fla) -> None:
    """FLA has no function for this."""
    fla.registry._backends.pop("isobit", None)
    if hasattr(fla.registry, "_update_active_backend"):  # 0.5 keeps which one comes first
        fla.registry._active = None
        fla.registry._update_active_backend()


# On and off


class _Session(Session):
    def __init__(self, fla: _Fla, serving: Backend) -> None:
        own = f"{SWITCH.name}: FLA's own kernel serves {NAME} here"
        super().__init__(backend=serving.name, instead=own)
        self.fla, self.serving = fla, serving

    def end(self) -> None:
        _unregister(self.fla)


SWITCH = Switch("isobit.integrations.fla")
_fla: _Fla | None = None  # checked


def enable(backend: str = "hopper") -> Enabled:
    """Let FLA take the gradients of delta-rule states from isobit: until `disable`, or as a context manager
    until its block is left. Where it is on already, it stays on, and counts go on.

    Args:
        backend: isobit's backend that serves: "hopper", or, without such a GPU, "triton" or "reference".
            What it cannot serve goes on to FLA's own kernel.

    Returns:
        An object with `served`, how many calls isobit has computed, and `passed`, how many it has not, by
        reason.

    Raises:
        ModuleNotFoundError: FLA is not installed.
        FLAError: the installed FLA is not 0.6.0 or 0.5.2, or is not as these are.
        ContractError: no such backend, or another one is on.

    Example:
        >>> import isobit
        >>> with isobit.integrations.fla.enable() as on:  # doctest: +SKIP
        ...     loss.backward()
        >>> on.served, on.passed  # doctest: +SKIP
        (24, Counter())
    """
    serving = op.backend_named(backend)

    def begin() -> _Session:
        global _fla
        if _fla is None or getattr(sys.modules.get(MODULE), NAME, None) is not _fla.function:
            _fla = _checked()
        session = _Session(_fla, serving)
        _register(_fla, session)
        return session

    return SWITCH.on(backend, begin)


def disable() -> None:
    """Leave everything to FLA again. Nothing happens where it is off."""
    SWITCH.off()
