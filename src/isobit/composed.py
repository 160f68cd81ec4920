"""Functions over ops: what people call that is made of several ops with the caller's own code between them.

    @composed("linear_policy_loss")
    def declared(hidden: Float[Tensor, "* D"], loss_fn: object, ...) -> F32[Tensor, ""]: ...

Such a function has a contract, rules, backends that it can be asked to be served by, and a proof, as an op
has. It is no `torch.library` op: no graph can hold code that is not known before it runs. An argument that is
declared as an `object` may be anything, and is what its rules say.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch

from isobit.backend import Args, Backend, choose
from isobit.contract import Contract, ContractError
from isobit.op import CONTROLS, OPS, F, Op


class Served(NamedTuple):
    """A call that keeps the contract: its arguments, who serves it, and whether tensors are looked into."""

    args: Args
    backend: str
    validated: bool


@dataclass(eq=False)
class Composed(Op):
    """A function over ops, under the name that people call it by."""

    def __post_init__(self) -> None:
        self.forget()
        OPS[self.name] = self

    @property
    def untraceable(self) -> str:
        """Why no graph can hold a call."""
        return f"{self.name} is a function over ops: it runs the caller's own code between them"

    def __call__(self, **given: Any) -> Any:
        raise TypeError(f"{self.untraceable}; call isobit.{self.name}")

    def public(self, function: F) -> F:
        """Mark the function that people call, as of an op; and keep `torch.compile` out of it: a compiled
        caller has a break there, or an error that says why, where it wants none."""
        super().public(function)
        uncompiled: list[Callable[..., Any]] = []  # made when it is needed

        @wraps(function)
        def outside(*args: Any, **kwargs: Any) -> Any:
            if "torch._dynamo" not in sys.modules:  # nobody compiles, and to import it takes seconds
                return function(*args, **kwargs)
            if not uncompiled:
                uncompiled.append(torch.compiler.disable(function, reason=self.untraceable))
            return uncompiled[0](*args, **kwargs)

        made: Any = outside
        made._torchdynamo_disable, made._torchdynamo_disable_msg = True, self.untraceable
        self.function = made
        return made

    def like(self, op: Op, more: Args) -> None:
        """Take over the backends of an op: what can serve the op, called with these arguments besides, can
        serve this."""

        def when_with_more(backend: Backend) -> Callable[[Args], str | None]:
            return lambda args: backend.when(args | more)

        for each in op.backends:
            self.backend(
                each.name, numerics=each.numerics, when=when_with_more(each), interpreted=each.interpreted
            )(self)

    def serve(self, given: Args) -> Served:
        """Hold a call to the contract and choose who serves it, or raise the rule that it breaks."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise ContractError(f"{self.untraceable}, so no transform of torch.func can see through it")
        values = self.bind(given)
        args, _ = self._validated(values)
        controls = {p.name: args.pop(p.name) for p in CONTROLS}
        device = values[0].device
        backend = choose(self.contract, self.backends, args, controls, device)
        validate = controls["validate"]
        if validate is None:
            validate = device.type == "cpu" or os.environ.get("ISOBIT_VALIDATE") == "1"
        if validate:
            self._check_values(values)
        return Served(args, backend.name, validate)


def composed(name: str) -> Callable[[Callable[..., Any]], Composed]:
    """Declare a function over ops: the signature of the decorated function is the contract."""

    def declare(fn: Callable[..., Any]) -> Composed:
        return Composed(Contract(name, fn, CONTROLS), fn.__module__.rpartition(".")[0])

    return declare
