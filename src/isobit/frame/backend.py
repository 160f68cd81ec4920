"""Backends of an op: their properties, and the choice among them."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from isobit.frame.contract import Contract, ContractError
from isobit.frame.device import arch_key

Args = dict[str, Any]

#: Numerics class of a backend that promises accuracy but no bits.
NONE = "none"


class UnsupportedError(ContractError):
    """A backend that was selected by name cannot run this call; the message is the reason."""


def resolve(path: str) -> Callable[..., Any]:
    """The function that `isobit.ops.logp.kernels_triton:logp` names. Its module is imported at the first
    use."""
    module, _, name = path.partition(":")
    function = getattr(sys.modules.get(module), name, None)  # None too while another thread imports it
    made: Callable[..., Any] = getattr(import_module(module), name) if function is None else function
    return made


def whole_path(path: str, package: str) -> str:
    """`kernels_triton:logp` is relative to the package of an op; with a dot before the colon it is
    absolute."""
    return path if "." in path.partition(":")[0] else f"{package}.{path}"


Reason = Callable[[Args], str | None]


def after_device(cannot_run: Callable[[torch.device], str | None], reason: Reason | str) -> Reason:
    """A reason not to serve a call, asked for only if there is none that the device gives."""

    def reason_of(args: Args) -> str | None:
        device = next(v.device for v in args.values() if hasattr(v, "device"))
        if (no := cannot_run(device)) is not None:
            return no
        ask: Reason = resolve(reason) if isinstance(reason, str) else reason
        return ask(args)

    return reason_of


class _Run:
    """The function of a backend: given as it is, or by its path, which is resolved when it is read."""

    def __get__(self, backend: Any, owner: Any = None) -> Callable[..., Any]:
        if backend is None:
            raise AttributeError("run")  # so the dataclass gives the field no default
        run: Callable[..., Any] | str = vars(backend)["run"]
        return resolve(run) if isinstance(run, str) else run

    def __set__(self, backend: Any, run: Callable[..., Any] | str) -> None:
        vars(backend)["run"] = run


@dataclass(frozen=True)
class Backend:
    """One implementation of an op. `when(args)` returns None, or the reason why it cannot serve the call.
    Like all functions here it must not read tensor values: its answer is cached for calls with the same key.

    `numerics`: its class, or a function of the device if it depends on the hardware.
    `interpreted`: its Triton kernels also run on CPU tensors, in Triton's interpreter. That is for checking
    kernels, so there it is used only if it is requested by name.
    `not_by_default(args)`: any other reason to use it only if it is requested by name.
    `other_class_by_default(args)`: the reason why a call that names no numerics class gets another one. It
    must depend on scalars only, so that all calls of a model agree.
    `launches`: its run takes `launch`, and uses it for all of its launches. If there are only allocations and
    views between them, they are recorded once, and repeated without its run.
    `paths`: those of its functions that are named by a path.
    """

    name: str
    if TYPE_CHECKING:
        run: Callable[..., Any]
    else:
        run: _Run = _Run()
    numerics: str | Callable[[torch.device], str]
    when: Callable[[Args], str | None]
    interpreted: bool
    not_by_default: Callable[[Args], str | None]
    launches: bool = False
    paths: tuple[str, ...] = ()
    other_class_by_default: Callable[[Args], str | None] = lambda args: None

    def numerics_on(self, device: torch.device) -> str:
        return self.numerics if isinstance(self.numerics, str) else self.numerics(device)

    def other_class(self, numerics: str | None, device: torch.device) -> str | None:
        """The reason why it cannot keep a required class, or None."""
        if numerics is None or (own := self.numerics_on(device)) == numerics:
            return None
        return f"its numerics class here is {own!r}, not {numerics!r}"

    def why_not(self, args: Args, device: torch.device, numerics: str | None = None) -> str | None:
        """The reason not to choose this backend by default, for a call that requires this class, or none."""
        if numerics is None and (reason := self.other_class_by_default(args)) is not None:
            return reason
        if self.interpreted and device.type == "cpu":
            return "CPU tensors run only in Triton's interpreter: select it by name to test its kernels"
        return self.not_by_default(args) or self.when(args)


@dataclass(frozen=True)
class Explanation:
    """Which backend serves a call, under which numerics class, and why the others do not."""

    op: str
    backend: str | None
    numerics: str | None
    reasons: dict[str, str | None]

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.backend or 'no backend'} (numerics {self.numerics})"]
        width = max(10, *map(len, self.reasons))
        for name, reason in self.reasons.items():
            mark = "serves this call" if name == self.backend else (reason or "can serve; one above it does")
            lines.append(f"  {name:{width}s} {mark}")
        return "\n".join(lines)


# The choice among the backends of an op, fastest first. `controls` are the caller's requirements.


def backend_named(contract: Contract, backends: Sequence[Backend], name: str) -> Backend:
    for backend in backends:
        if backend.name == name:
            return backend
    known = ", ".join(b.name for b in backends)
    raise ContractError(f"{contract.name}(backend={name!r}): unknown backend; known: {known}")


def choose(
    contract: Contract, backends: Sequence[Backend], args: Args, controls: Args, device: torch.device
) -> Backend:
    """The backend that serves a call; an error with all reasons if none does."""
    forced, numerics, prefer = (controls[name] for name in ("backend", "numerics", "prefer"))
    if numerics is not None and prefer is None:
        _knows_class(contract, backends, numerics, device)
    if forced is not None:
        backend = backend_named(contract, backends, forced)
        reason = backend.other_class(numerics, device) or backend.when(args)
        if reason is not None:
            raise UnsupportedError(f"{contract.name}(backend={forced!r}): {reason}")
        return backend
    reasons = {}
    for backend in sorted(backends, key=lambda b: b.name != prefer):
        if backend.other_class(numerics, device) is None:
            # The preferred backend was requested by name before, so `not_by_default` does not apply.
            reason = backend.when(args) if backend.name == prefer else backend.why_not(args, device, numerics)
            if reason is None:
                return backend
            reasons[backend.name] = reason
    of_class = "" if numerics is None else f" of numerics class {numerics!r}"
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "there are none"
    raise UnsupportedError(f"{contract.name}: no backend{of_class} can serve this call ({why})")


def explain(
    contract: Contract, backends: Sequence[Backend], args: Args, controls: Args, device: torch.device
) -> Explanation:
    """What `choose` would return, and why not the others."""
    forced, numerics = controls["backend"], controls["numerics"]
    if numerics is not None:
        _knows_class(contract, backends, numerics, device)
    reasons = {b.name: b.other_class(numerics, device) or b.why_not(args, device, numerics) for b in backends}
    if not forced and None not in reasons.values():
        return Explanation(contract.name, None, None, reasons)
    chosen = choose(contract, backends, args, controls, device)
    own = chosen.numerics_on(device)
    for other in backends:
        if reasons[other.name] is None and (theirs := other.numerics_on(device)) not in (own, NONE):
            reasons[other.name] = f"can serve, in numerics class {theirs!r}, if that is requested"
    if forced:
        asked = f"can serve; backend={forced!r} was selected"
        reasons = {name: reason or asked for name, reason in reasons.items()} | {chosen.name: None}
    return Explanation(contract.name, chosen.name, own, reasons)


def _knows_class(
    contract: Contract, backends: Sequence[Backend], numerics: str, device: torch.device
) -> None:
    known = {b.numerics_on(device): None for b in backends}  # in order, without duplicates
    if numerics not in known:
        rule = f"unknown numerics class on {arch_key(device)}; known: {', '.join(known)}"
        raise contract.error("numerics", numerics, rule)
