"""Ops that people call: the signature of the public function is the contract."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from isobit.frame.backend import Args
from isobit.frame.contract import Contract, params_of
from isobit.frame.op import CONTROLS, Op

F = TypeVar("F", bound=Callable[..., Any])

_PUBLIC_CONTROLS = {p.name for p in CONTROLS} - {"prefer"}


@dataclass(eq=False)
class PublicOp(Op):
    """An op with a public function. Its contract is complete, and it can be called, once that is declared."""

    declared: Callable[..., Any] | None = None  # declares the outputs, and arguments that people do not give
    before: str | None = None  # the public argument that these stand before; else they come last
    #: Arguments of the public function that are not of the op: it does something else if they are given.
    aside: tuple[str, ...] = ()
    #: With one of them: the path of a function (arguments by name) -> what serves the call then.
    explained: str | None = None

    def __post_init__(self) -> None:
        self.forget()

    def public(self, function: F) -> F:
        """Mark the public function. Its annotations and defaults are the contract's, and it takes the
        controls."""
        params = params_of(function)
        missing = _PUBLIC_CONTROLS - {p.name for p in params if p.default is None}
        if missing:
            raise TypeError(f"{self.name}: {function.__name__} has no {', '.join(sorted(missing))} = None")
        params = [p for p in params if p.name not in _PUBLIC_CONTROLS and p.name not in self.aside]
        own, names = params_of(self.declared), [p.name for p in params]
        if twice := {p.name for p in own} & {*names}:
            raise TypeError(f"{self.name}: {', '.join(sorted(twice))} is declared twice")
        at = len(params) if self.before is None else names.index(self.before)
        self.contract = Contract(self.name, self.declared, CONTROLS, [*params[:at], *own, *params[at:]])
        self.function = function
        self._register()
        return function


def public_op(
    name: str,
    *,
    before: str | None = None,
    aside: tuple[str, ...] = (),
    explained: str | None = None,
    sizes: Callable[[Args], dict[str, int]] | None = None,
    flops: Callable[[Args], int] | None = None,
) -> Callable[[Callable[..., Any]], PublicOp]:
    """Declare what the public function of an op does not say: the outputs of the op, and its arguments that
    only our own code gives, which stand before the public argument `before`, or last. Public arguments named
    in `aside` are not of the op, and `explained` says what serves a call with them."""

    def declare(fn: Callable[..., Any]) -> PublicOp:
        package = fn.__module__.rpartition(".")[0]
        contract = Contract(name, fn, CONTROLS)
        return PublicOp(
            contract, package, sizes, flops, declared=fn, before=before, aside=aside, explained=explained
        )

    return declare
