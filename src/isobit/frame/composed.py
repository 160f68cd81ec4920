"""Functions over ops: public functions that combine several ops with the caller's own code between them.

    @composed("linear_policy_loss")
    def declared() -> F32[Tensor, ""]: ...

    @declared.public
    def linear_policy_loss(hidden: Float[Tensor, "* D"], loss_fn: Callable[..., Any], ...) -> ...

Such a function has a contract, rules, backends and a proof, like an op. It is not a `torch.library` op,
because a graph cannot contain code that is unknown before it runs, nor an object that is written into: `why`
says which. An argument that is neither a tensor nor a number may be anything; its rules check it.
"""

import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import torch

from isobit.frame.backend import Args, choose
from isobit.frame.cache_key import cache_key_of, remember
from isobit.frame.call_plan import validates
from isobit.frame.contract import Contract, ContractError
from isobit.frame.op import CONTROLS, OPS, Op
from isobit.frame.public_op import F, PublicOp


class Served(NamedTuple):
    """A call that satisfies the contract: its arguments, its backend, and whether tensor values are
    checked."""

    args: Args
    backend: str
    validated: bool
    like: "Known | None" = None  # the same object for calls that differ in tensor values only


@dataclass(eq=False)
class Composed(PublicOp):
    """A function over ops, with its public name."""

    why: str = "it runs the caller's own code between them"  # why a graph cannot contain a call

    def _register(self) -> None:
        OPS[self.name] = self

    @property
    def untraceable(self) -> str:
        """Why a graph cannot contain a call."""
        return f"{self.name} is a function over ops: {self.why}"

    def __call__(self, **given: Any) -> Any:
        raise TypeError(f"{self.untraceable}; call isobit.{self.name}")

    def public(self, function: F) -> F:
        """Mark the public function, as for an op; and exclude it from `torch.compile`: a compiled caller has
        a graph break there, or an error with the reason if it allows no breaks."""
        super().public(function)
        self.function = made = outside_graphs(function, self.untraceable)
        return made

    def like(self, op: Op, more: Args) -> None:
        """Take over the backends of an op: a backend can serve this if it can serve the op with these
        additional arguments."""

        def with_more(reason: Callable[[Args], str | None]) -> Callable[[Args], str | None]:
            return lambda args: reason(args | more)

        for each in op.backends:
            self.backend(
                each.name, run=self, numerics=each.numerics, when=with_more(each.when),
                interpreted=each.interpreted, not_by_default=with_more(each.not_by_default),
                other_class_by_default=with_more(each.other_class_by_default),
            )  # fmt: skip

    def forget(self) -> None:
        super().forget()
        self._known: dict[Any, Known] = {}

    def serve(self, given: Args, forms: Mapping[str, Hashable] | None = None) -> Served:
        """Check a call against the contract and choose its backend, or raise an error.

        `forms` has, for each argument that is neither a tensor nor a number, all that anybody asks of it
        before kernels run. With it, calls that differ in tensor values only are checked once.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise ContractError(f"{self.untraceable}, so no transform of torch.func can see through it")
        if self._planned_for != self.backends:
            self.forget()
        key = None
        if forms is not None:
            plain = self.contract.in_order({**given, **dict.fromkeys(forms)})
            own = cache_key_of(plain, torch.is_grad_enabled())
            key = None if own is None else (own, *forms.values())
            known = self._known.get(key)
            if known is not None and not validated(known.validate, known.on_cpu):
                args = {**known.scalars, **{name: given[name] for name in known.others}}
                return Served(args, known.backend, False, known)
        values = self.bind(given)
        args, _ = self._validated(values)
        controls = {p.name: args.pop(p.name) for p in CONTROLS}
        device = values[0].device
        backend = choose(self.contract, self.backends, args, controls, device)
        validate = validated(controls["validate"], device.type == "cpu")
        if validate:
            self._check_values(values)
        if forms is not None and key is not None:
            others = [name for name, v in args.items() if name in forms or isinstance(v, torch.Tensor)]
            scalars = args | dict.fromkeys(others)  # in order, and without tensors, which would be kept alive
            known = Known(scalars, others, backend.name, controls["validate"], device.type == "cpu")
            remember(self._known, key, known)
        return Served(args, backend.name, validate)


@dataclass(eq=False, slots=True)
class Known:
    """What is known of calls with one cache key."""

    scalars: Args
    others: list[str]  # arguments that are not scalars
    backend: str
    validate: bool | None
    on_cpu: bool


def validated(validate: bool | None, on_cpu: bool) -> bool:
    """Whether tensor values are checked: always, never, or if that waits for nothing or was asked for."""
    return (on_cpu or validates(None)) if validate is None else validate


def outside_graphs(function: F, why: str) -> F:
    """The function, excluded from `torch.compile`: a compiled caller has a graph break there, or an error
    with the reason if it allows no breaks."""
    uncompiled: list[Callable[..., Any]] = []  # created when needed

    @wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # nobody compiles; importing it takes seconds
            return function(*args, **kwargs)
        if not uncompiled:
            uncompiled.append(torch.compiler.disable(function, reason=why))
        return uncompiled[0](*args, **kwargs)

    made: Any = outside
    made._torchdynamo_disable, made._torchdynamo_disable_msg = True, why
    return made


def composed(
    name: str, *, why: str = Composed.why, aside: tuple[str, ...] = (), explained: str | None = None
) -> Callable[[Callable[..., Any]], Composed]:
    """Declare a function over ops: what its public function does not say, as for `public_op`; and why a graph
    cannot contain it."""

    def declare(fn: Callable[..., Any]) -> Composed:
        package = fn.__module__.rpartition(".")[0]
        return Composed(
            Contract(name, fn, CONTROLS), package, declared=fn, why=why, aside=aside, explained=explained
        )

    return declare
