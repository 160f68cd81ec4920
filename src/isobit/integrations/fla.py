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
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import TracebackType
from typing import Any

import torch

from isobit.backend import Backend, UnsupportedError
from isobit.caller import warn
from isobit.contract import dtype_name
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


@dataclass(eq=False)
class _Session:
    """The time from on to off: which backend serves, what it has done, and who has asked for it."""

    backend: Backend
    served: int = 0
    passed: Counter[str] = field(default_factory=Counter)
    blocks: int = 0  # with-blocks that are open
    until_disabled: bool = True  # else until the last of these is left
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count_served(self) -> None:
        with self.lock:
            self.served += 1

    def count_passed(self, reason: str) -> None:
        with self.lock:
            self.passed[reason] += 1
            first = self.passed[reason] == 1
        if first:
            warn(f"isobit.integrations.fla: FLA's own kernel serves {NAME} here: {reason}")


class Enabled:
    """What `enable` returns: counts, and a context manager whose end restores what was before."""

    def __init__(self, session: _Session, turned_on: bool) -> None:
        self._session, self._turned_on = session, turned_on

    @property
    def backend(self) -> str:
        """isobit's backend that serves."""
        return self._session.backend.name

    @property
    def served(self) -> int:
        """Calls that isobit has computed, since it was turned on."""
        return self._session.served

    @property
    def passed(self) -> Counter[str]:
        """Calls that went on to FLA's own kernel, by reason; a copy."""
        with self._session.lock:
            return self._session.passed.copy()

    def __enter__(self) -> "Enabled":
        with _lock:
            if self._session is not _current:
                raise UnsupportedError("isobit.integrations.fla: it has been turned off; enable() it again")
            self._session.blocks += 1
            if self._turned_on:
                self._session.until_disabled = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            self._session.blocks -= 1
            if self._session is _current and not (self._session.blocks or self._session.until_disabled):
                disable()

    def __repr__(self) -> str:
        passed = sum(self.passed.values())
        return f"<isobit in FLA: {self.backend}, {self.served} calls served, {passed} passed on>"


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
        session: _Session

        def verify(self, function_name: str, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
            """Whether a call is for us. Not FLA's way, which takes an error in here for a No."""
            if function_name != NAME:
                return False, f"isobit has {NAME} alone"
            given = dict(zip(OURS, args, strict=False)) | kwargs
            if given["q"] is _PROBE:
                return True, None
            reason = why_not(self.session.backend, given)
            if reason is not None:
                self.session.count_passed(reason)
            return reason is None, reason

        def chunk_gated_delta_rule_bwd_dhu(self, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("q") is _PROBE:
                return _PROBE
            with torch.no_grad():  # FLA's kernels leave no graph either
                found = chunk_gated_delta_rule_bwd_dhu(*args, **kwargs, backend=self.session.backend.name)
            self.session.count_served()
            return found

    return IsobitBackend


def _register(fla: _Fla, session: _Session) -> None:
    backend = _backend_class(fla.base)()
    backend.session = session
    fla.registry.register(backend)


def _checked() -> _Fla:
    """The installed FLA, whose function asks a backend that is registered."""
    fla = _installed()
    _register(fla, _Session(op.backends[0]))
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

_lock = threading.RLock()
_fla: _Fla | None = None  # checked
_current: _Session | None = None


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
    global _fla, _current
    serving = op.backend_named(backend)
    with _lock:
        if _current is not None:
            if _current.backend is not serving:
                raise UnsupportedError(
                    f"isobit.integrations.fla.enable(backend={backend!r}): it is on with "
                    f"{_current.backend.name!r}; disable() it first"
                )
            return Enabled(_current, turned_on=False)
        session = _Session(serving)
        if _fla is None or getattr(sys.modules.get(MODULE), NAME, None) is not _fla.function:
            _fla = _checked()
        _register(_fla, session)
        _current = session
        return Enabled(session, turned_on=True)


def disable() -> None:
    """Leave everything to FLA again. Nothing happens where it is off."""
    global _current
    with _lock:
        if _fla is not None and _current is not None:
            _unregister(_fla)
        _current = None
