"""Ways to compute an op: what a backend says of itself, and what is said of a choice among several."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from isobit.contract import ContractError

Args = dict[str, Any]

#: Numerics class of a backend that promises accuracy but no bits.
NONE = "none"


class UnsupportedError(ContractError):
    """A backend that was asked for by name cannot serve this call; the message is its reason."""


class Lazy:
    """A module that is imported when something of it is first asked for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._module is None:
            self._module = import_module(self._name)
        return getattr(self._module, name)


@dataclass(frozen=True)
class Backend:
    """One way to compute an op. `when(args)` returns None, or the reason it cannot serve the call. Like all
    functions here it must not look at what tensors hold: its answer is kept for calls of the same kind.

    `numerics`: its class, or a function of the device where the hardware decides it.
    `interpreted`: its Triton kernels also run on CPU tensors, in Triton's interpreter. That is for checking
    kernels, so there it serves only when asked for by name.
    `unasked(args)`: any other reason to serve only when asked for by name.
    `launches`: its run takes `launch`, and makes all of its launches by it. Where there is nothing between
    them but allocations and views they are recorded once, and made again without its run.
    """

    name: str
    run: Callable[..., Any]
    numerics: str | Callable[[torch.device], str]
    when: Callable[[Args], str | None]
    interpreted: bool
    unasked: Callable[[Args], str | None]
    launches: bool = False

    def numerics_on(self, device: torch.device) -> str:
        return self.numerics if isinstance(self.numerics, str) else self.numerics(device)

    def other_class(self, numerics: str | None, device: torch.device) -> str | None:
        """The reason why it cannot keep a class that was asked for."""
        if numerics is None or (own := self.numerics_on(device)) == numerics:
            return None
        return f"its numerics class here is {own!r}, not {numerics!r}"

    def why_not(self, args: Args, device: torch.device) -> str | None:
        """The reason not to choose this backend by itself."""
        if self.interpreted and device.type == "cpu":
            return "on CPU tensors only the interpreter could run it: ask for it by name to check its kernels"
        return self.unasked(args) or self.when(args)


@dataclass(frozen=True)
class Explanation:
    """Which backend serves a call, under which numerics class, and why the others do not."""

    op: str
    backend: str | None
    numerics: str | None
    reasons: dict[str, str | None]

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.backend or 'no backend'} (numerics {self.numerics})"]
        for name, reason in self.reasons.items():
            mark = "serves this call" if name == self.backend else (reason or "can serve; a faster one does")
            lines.append(f"  {name:10s} {mark}")
        return "\n".join(lines)
