"""One declaration per op: validate, choose a backend, run; and everything PyTorch wants around that.

    @op("logp")
    def forward(logits: Float[Tensor, "* V"], ..., validate: bool | None = None,
                backend: str | None = None) -> tuple[F32[Tensor, "*"], ...]: ...

    @forward.backend("triton", numerics="lse/triton-1", when=cannot_serve)
    def _(**args): ...

The signature is the contract (`isobit.contract`). It becomes a `torch.library` op, so that
`torch.compile`, `opcheck`, CUDA graphs and autocast work; its body checks the contract, picks the
first backend that can serve and calls it. Autograd is written once per op, above the backends, in
terms of other ops. `validate`, `numerics` and `backend` are read here and never reach a backend.

The choice is made when the op runs, not when it is traced: strides, alignment and the device decide, and
a compiled graph must not freeze what they were.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from isobit.arch import arch_key
from isobit.contract import Contract, ContractError
from isobit.kinds import Kind, kind_of, remember

F = TypeVar("F", bound=Callable[..., Any])

#: Every op by name, filled by the declarations as they are imported.
OPS: dict[str, "Op"] = {}

_LIBRARY = torch.library.Library("isobit", "FRAGMENT")

#: Numerics class of a backend that promises accuracy but no bits.
NONE = "none"

#: Between a backend and a numerics class: "hopper or chain16" is what a backward asks for whose forward was
#: forced to hopper. A string, because the choice is made inside the `torch.library` op.
_OR = " or "


class UnsupportedError(ContractError):
    """A backend that was asked for by name cannot serve this call; the message is its reason."""


def follow(backend: str | None, numerics: str | None) -> str | None:
    """What a backward asks for after a forward that was forced to `backend`: that one if it can serve in
    this numerics class, else the best one of the class."""
    return None if backend is None else f"{backend.partition(_OR)[0]}{_OR}{numerics}"


@dataclass(frozen=True)
class Backend:
    """One way to compute an op. `when(args)` returns None, or the reason it cannot serve the call. Like all
    functions here it must not look at what tensors hold: its answer is kept for calls of the same kind.

    `numerics`: its class, or a function of the device where the hardware decides it.
    `interpreted`: its Triton kernels also run on CPU tensors, in Triton's interpreter. That is for checking
    kernels, so there it serves only when asked for by name.
    `unasked(args)`: any other reason to serve only when asked for by name.
    """

    name: str
    run: Callable[..., Any]
    numerics: str | Callable[[torch.device], str]
    when: Callable[[dict[str, Any]], str | None]
    interpreted: bool
    unasked: Callable[[dict[str, Any]], str | None]

    def numerics_on(self, device: torch.device) -> str:
        return self.numerics if isinstance(self.numerics, str) else self.numerics(device)

    def other_class(self, numerics: str | None, device: torch.device) -> str | None:
        """The reason why it cannot keep a class that was asked for."""
        if numerics is None or (own := self.numerics_on(device)) == numerics:
            return None
        return f"its numerics class here is {own!r}, not {numerics!r}"

    def why_not(self, args: dict[str, Any], device: torch.device) -> str | None:
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


@dataclass
class Op:
    """An op: its contract, its backends (fastest first), its derivative and its proof."""

    contract: Contract
    doc: str
    package: str  # that it is declared in, as `isobit.ops.logp`: its proof and its rivals are there too
    backends: list[Backend] = field(default_factory=list)
    rules: list[Callable[[Contract, dict[str, Any]], None]] = field(default_factory=list)
    value_rules: list[Callable[[Contract, dict[str, Any]], None]] = field(default_factory=list)
    #: Arguments of the public function as those of the op, where one name means two things there.
    translate: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    #: (args) -> sizes by name, for dimensions of outputs that no input has.
    sizes: Callable[[dict[str, Any]], dict[str, int]] | None = None
    backward: "Op | None" = None  # the op that is there for this one's derivative alone, if there is one
    function: Callable[..., Any] | None = None  # what people call, for the ops that they do

    @property
    def name(self) -> str:
        return self.contract.name

    @property
    def folder(self) -> str:
        """`logp` for `isobit/ops/logp`: where an op is declared names its results."""
        return self.package.rpartition(".")[2]

    def __post_init__(self) -> None:
        _LIBRARY.define(self.contract.schema())
        _LIBRARY.impl(self.name, self._run_for_torch, "CompositeExplicitAutograd")
        torch.library.register_fake(f"isobit::{self.name}", self._fake, lib=_LIBRARY)
        self._torch_op = getattr(torch.ops.isobit, self.name).default
        self._differentiable: Any = None
        self._served: dict[Kind, Backend] = {}
        self._served_of: list[Backend] = []  # the backends that were chosen from
        OPS[self.name] = self

    # Declaring

    def public(self, function: F) -> F:
        """Mark the function that people call this op by."""
        self.function = function
        return function

    def backend(
        self,
        name: str,
        *,
        numerics: str | Callable[[torch.device], str],
        when: Callable[[dict[str, Any]], str | None] = lambda args: None,
        interpreted: bool = False,
        unasked: Callable[[dict[str, Any]], str | None] = lambda args: None,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add a backend; the order of declaration is the order of preference."""

        def add(run: Callable[..., Any]) -> Callable[..., Any]:
            self.backends.append(Backend(name, run, numerics, when, interpreted, unasked))
            return run

        return add

    def rule(self, check: Callable[[Contract, dict[str, Any]], None]) -> None:
        """A check that the annotations cannot express, on shapes, dtypes and scalars; not on what tensors
        hold."""
        self.rules.append(check)
        self._served = {}

    def value_rule(self, check: Callable[[Contract, dict[str, Any]], None]) -> None:
        """A check that reads tensor values: on CPU tensors, or where `validate=True` allows the sync."""
        self.value_rules.append(check)

    def derivative(
        self,
        backward: "Op | None",
        *,
        save: Callable[[dict[str, Any], Any], dict[str, Tensor | None]],
        gradient: Callable[[dict[str, Any], tuple[Tensor | None, ...]], dict[str, Tensor]],
        constant: tuple[int, ...] = (),
        flags: tuple[str, ...] = (),
        once: str | None = None,
    ) -> None:
        """Autograd for this op, whatever the backend.

        `save(args, outputs)` names the tensors to keep; `gradient(kept, grads)` calls `backward`, or any
        ops, and returns gradients by argument name. `kept` also holds the scalar arguments; `needs`, the
        names of the arguments that a gradient is wanted for; and what the forward was bound to, to be passed
        on: `numerics`, a class or None, and `backend`, a forced backend as `follow` writes it or None.
        Outputs numbered in `constant` have no gradient, nor have optional ones that were not asked for.
        Arguments named in `flags` are made true where a backward can follow. `once` says why there is no
        second derivative, where the ops that `gradient` calls would not say it themselves.
        """
        self.backward = backward
        this, names, specs = self, self.contract.names, self.contract.outputs

        class Derivative(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, run: Callable[..., Any], *values: Any) -> Any:
                outputs = run(*values)
                args = dict(zip(names, values, strict=True))
                kept = save(args, outputs)
                several = outputs if isinstance(outputs, tuple) else (outputs,)
                ctx.kept_names = list(kept)
                ctx.save_for_backward(*kept.values())
                ctx.scalars = {k: v for k, v in args.items() if not isinstance(v, Tensor) and k not in kept}
                ctx.device = values[0].device
                ctx.set_materialize_grads(False)
                ctx.mark_non_differentiable(
                    *(o for i, o in enumerate(several)
                      if o is not None and (i in constant or not args.get(str(specs[i].when), True)))
                )  # fmt: skip
                return outputs

            @staticmethod
            def backward(ctx: Any, *grads: Tensor | None) -> Any:
                kept = dict(zip(ctx.kept_names, ctx.saved_tensors, strict=True)) | ctx.scalars
                kept |= this._bound_to(ctx.scalars, ctx.device)
                needed = zip(names, ctx.needs_input_grad[1:], strict=True)
                kept["needs"] = {name for name, needs in needed if needs}
                twice = torch.is_grad_enabled()  # a graph of the backward is wanted
                with torch.set_grad_enabled(twice and once is None):
                    found = gradient(kept, grads)
                if twice and once is not None:
                    watched = [t for t in (*ctx.saved_tensors, *grads) if t is not None]
                    found = {
                        name: _Refusal.apply(once, lambda *_, g=g: g, *watched) for name, g in found.items()
                    }
                return (None, *(found.get(name) for name in names))

        self._set_autograd(Derivative.apply, flags)

    def not_differentiable(self, why: str) -> None:
        """Make a gradient through this op an error that says why (used by backwards)."""
        self._set_autograd(partial(_Refusal.apply, why))

    def _bound_to(self, scalars: dict[str, Any], device: torch.device) -> dict[str, str | None]:
        """What a call was bound to by name: gradients of another class must not follow it."""
        forced, numerics = scalars.get("backend"), scalars.get("numerics")
        if forced is not None:
            numerics = self._by_name(forced.partition(_OR)[0]).numerics_on(device)
        return {"backend": follow(forced, numerics), "numerics": numerics}

    def _set_autograd(self, apply: Callable[..., Any], flags: tuple[str, ...] = ()) -> None:
        positions = {self.contract.names.index(name) for name in flags}

        def differentiable(run: Callable[..., Any], values: tuple[Any, ...]) -> Any:
            if positions:
                values = tuple(True if i in positions else v for i, v in enumerate(values))
            return apply(run, *values)

        self._differentiable = differentiable

        def below_autograd(*values: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return self._torch_op(*values)

        def autograd(*values: Any) -> Any:
            if self._needs_grad(values):
                return differentiable(below_autograd, values)
            return below_autograd(*values)

        _LIBRARY.impl(self.name, autograd, "Autograd")

    def _needs_grad(self, values: tuple[Any, ...]) -> bool:
        """Whether autograd watches: a tensor requires grad, or one has a forward-mode tangent (which the
        autograd functions refuse: dropping it would be a silent zero)."""
        if torch.is_grad_enabled():
            for i in self.contract.tensor_positions:
                if values[i] is not None and values[i].requires_grad:
                    return True
        if forward_ad._current_level >= 0:
            tensors = (values[i] for i in self.contract.tensor_positions if values[i] is not None)
            return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)
        return False

    # Running

    def __call__(self, *values: Any) -> Any:
        """Call with every argument, in the order of the signature.

        Plain tensors outside any tracing take a short way to the body that the `torch.library` op has too:
        PyTorch's dispatcher reaches a Python body in two hops, which cost tens of microseconds a call.
        """
        self.contract.check_types(values)
        if torch.compiler.is_compiling() or not self._plain(values):
            return self._torch_op(*values)
        if self._differentiable is not None and self._needs_grad(values):
            return self._differentiable(self._run, values)
        return self._run(*values)

    def _plain(self, values: tuple[Any, ...]) -> bool:
        """No tensor subclass, no dispatch mode, no functorch transform or trace, no lazy negation or zeros:
        nothing that the dispatcher would have seen to first."""
        for i in self.contract.tensor_positions:
            t = values[i]
            if t is None:
                continue
            if type(t) not in (Tensor, torch.nn.Parameter) or t.is_neg() or t._is_zerotensor():
                return False
            if torch._C._functorch.is_legacy_batchedtensor(t):
                return False
        watched = torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None
        return not watched and torch._C._functorch.peek_interpreter_stack() is None

    def _run(self, *values: Any) -> Any:
        device = values[0].device.type
        if device == "meta":  # shapes without values: no backend has anything to compute
            return self._fake(*values)
        args, backend = self._admit(values)
        if torch.is_autocast_enabled(device):  # the inputs' dtypes decide, never the context's
            with torch.autocast(device, enabled=False):
                return backend.run(**args)
        return backend.run(**args)

    def _run_for_torch(self, *values: Any) -> Any:
        """The body as `torch.library` wants it: an output that was not asked for is an empty tensor, where
        backends return None and save an allocation."""
        outputs = self._run(*values)
        if isinstance(outputs, Tensor):
            return outputs
        specs, dtype_of = self.contract.outputs, self.contract.output_dtype
        return tuple(
            values[0].new_empty(0, dtype=dtype_of(spec, values)) if o is None else o
            for spec, o in zip(specs, outputs, strict=True)
        )

    def _fake(self, *values: Any) -> Any:
        _, dims = self._validated(values)
        if self.sizes is not None:
            found = self.sizes(dict(zip(self.contract.names, values, strict=True)))
            dims |= {name: (size, "sizes") for name, size in found.items()}
        outputs = self.contract.empty_outputs(values, dims)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def _admit(self, values: tuple[Any, ...]) -> tuple[dict[str, Any], Backend]:
        """(arguments, the backend that serves them), or the reason why not.

        The contract, its rules and the choice of a backend look at everything but what tensors hold. So a
        call like an earlier one is served as that was, without asking again, which takes longer than many
        a kernel runs.
        """
        served = self._served
        if self._served_of != self.backends:  # a new dictionary, because another thread may hold the old one
            served = self._served = {}
            self._served_of = list(self.backends)
        kind = kind_of(values)
        backend = None if kind is None else served.get(kind)
        if backend is None:
            args, _ = self._validated(values)
        else:
            args = dict(zip(self.contract.names, values, strict=True))
        self._check_values(args)
        forced, numerics = args.pop("backend", None), args.pop("numerics", None)
        if backend is None:
            backend = self._choose(args, forced, numerics)
            remember(served, kind, backend)
        return args, backend

    def _validated(self, values: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(arguments, dimensions) of a call that keeps the contract, whatever its tensors hold."""
        dims = self.contract.check(values)
        args = dict(zip(self.contract.names, values, strict=True))
        for rule in self.rules:
            rule(self.contract, args)
        return args, dims

    def _check_values(self, args: dict[str, Any]) -> None:
        """What tensors hold, where it may be read."""
        validate = args.pop("validate", None)
        if not self.value_rules:
            return
        if validate is None:
            on_cpu = args[self.contract.names[0]].device.type == "cpu"
            validate = on_cpu or os.environ.get("ISOBIT_VALIDATE") == "1"
        if validate:
            for rule in self.value_rules:
                rule(self.contract, args)

    # Choosing

    def _choose(self, args: dict[str, Any], forced: str | None, numerics: str | None) -> Backend:
        device = args[self.contract.names[0]].device
        name, follows, wanted = (forced or "").partition(_OR)
        if follows:
            return self._choose_after(name, wanted, args, device)
        if numerics is not None:
            self._knows_class(numerics, device)
        if forced is not None:
            backend = self._by_name(forced)
            reason = backend.other_class(numerics, device) or backend.when(args)
            if reason is not None:
                raise UnsupportedError(f"{self.name}(backend={forced!r}): {reason}")
            return backend
        reasons = {}
        for backend in self.backends:
            reason = backend.other_class(numerics, device) or backend.why_not(args, device)
            if reason is None:
                return backend
            reasons[backend.name] = reason
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise UnsupportedError(f"{self.name}: no backend can serve this call ({why})")

    def _choose_after(self, name: str, numerics: str, args: dict[str, Any], device: torch.device) -> Backend:
        """The backend that a forward was forced to if it is here and can serve, else the best one of the
        same numerics class: a forced forward must not be followed by gradients of another class."""
        reasons = {}
        for backend in sorted(self.backends, key=lambda b: b.name != name):
            if backend.other_class(numerics, device) is None:
                reason = backend.when(args) if backend.name == name else backend.why_not(args, device)
                if reason is None:
                    return backend
                reasons[backend.name] = reason
        why = "".join(f"; {name}: {reason}" for name, reason in reasons.items())
        raise UnsupportedError(f"{self.name}: no backend of numerics class {numerics!r} can serve{why}")

    def _by_name(self, name: str) -> Backend:
        for backend in self.backends:
            if backend.name == name:
                return backend
        known = ", ".join(b.name for b in self.backends)
        raise ContractError(f"{self.name}(backend={name!r}): unknown backend; known: {known}")

    def _knows_class(self, numerics: str, device: torch.device) -> None:
        known = {b.numerics_on(device): None for b in self.backends}  # in order, each once
        if numerics not in known:
            rule = f"unknown numerics class on {arch_key(device)}; known: {', '.join(known)}"
            raise self.contract.error("numerics", numerics, rule)

    def explain(self, *positional: Any, **named: Any) -> Explanation:
        """What would serve this call, and why not the others. Same validation, nothing is launched."""
        names = self.contract.names
        if len(positional) > len(names):
            raise ContractError(f"{self.name}: takes {len(names)} arguments, {len(positional)} were given")
        twice = [name for name in names[: len(positional)] if name in named]
        unknown = sorted(set(named) - set(names))
        if twice or unknown:
            what = "given twice" if twice else "unknown"
            raise ContractError(f"{self.name}: argument(s) {what}: {', '.join(twice or unknown)}")
        given = dict(zip(names, positional, strict=False)) | named
        given = given if self.translate is None else self.translate(given)
        values = tuple(given.get(p.name, p.default) for p in self.contract.params)
        self.contract.check_types(values)
        args, _ = self._validated(values)
        args.pop("validate", None)
        forced, numerics = args.pop("backend", None), args.pop("numerics", None)
        device = values[0].device
        if numerics is not None:
            self._knows_class(numerics, device)
        reasons = {b.name: b.other_class(numerics, device) or b.why_not(args, device) for b in self.backends}
        chosen = self._choose(args, forced, numerics) if forced or None in reasons.values() else None
        if chosen is None:
            return Explanation(self.name, None, None, reasons)
        if forced:
            asked = f"can serve; backend={forced!r} was asked for"
            reasons = {name: reason or asked for name, reason in reasons.items()} | {chosen.name: None}
        return Explanation(self.name, chosen.name, chosen.numerics_on(device), reasons)


class _Refusal(torch.autograd.Function):
    """Runs, and makes a gradient through the result an error that says why there is none."""

    @staticmethod
    def forward(ctx: Any, why: str, run: Callable[..., Any], *values: Any) -> Any:
        ctx.why = why
        return run(*values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(ctx.why)


def op(name: str) -> Callable[[Callable[..., Any]], Op]:
    """Declare an op: the signature of the decorated function is the contract, its body is empty."""

    def declare(fn: Callable[..., Any]) -> Op:
        return Op(Contract(name, fn), fn.__doc__ or "", fn.__module__.rpartition(".")[0])

    return declare


def known_op(name: str) -> Op:
    """The op people call by this name, or an error that lists those there are."""
    public = public_ops()
    if name not in public:
        raise ContractError(f"unknown op {name!r}; known: {', '.join(sorted(public))}")
    return public[name]


def public_ops() -> dict[str, Op]:
    """The ops that people call, by name."""
    return {name: op for name, op in OPS.items() if op.function is not None}
