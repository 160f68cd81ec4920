"""One declaration per op: validate, choose a backend, run; and everything that PyTorch needs around that.

    @public_op("logp")                                    # isobit.frame.public_op
    def forward(return_stats: bool = False) -> tuple[F32[Tensor, "*"], ...]: ...

    @forward.public
    def logp(logits: Float[Tensor, "* V"], token_ids: Int[Tensor, "*"], ...) -> Tensor: ...

    @op("logp_bwd", like=forward.params("logits", "token_ids", ..., "temperature"))
    def backward(stats: F32[Tensor, "2 *"], ...) -> Like[Tensor, "logits"]: ...

    forward.backend("triton", run="kernels_triton:logp", numerics="lse/triton-1", when=cannot_serve)
    forward.derivative("logits", by=backward, outputs=("logp", ...))

The signature of the public function is the contract (`isobit.frame.contract`). It becomes a `torch.library`
op, so that `torch.compile`, `opcheck`, CUDA graphs and autocast work. Its body checks the contract, picks the
first backend that can serve the call and runs it. Autograd is written once per op, above the backends, in
terms of other ops. Ops are called by keyword.

Every op takes the same controls in addition to its own arguments: `validate`, `numerics`, `backend`. They are
read here and never reach a backend. A fourth, `prefer`, is only for backwards, see `Op.derivative`.

The backend is chosen when the op runs, not when it is traced: the choice depends on strides, alignment and
the device, and a compiled graph must not freeze these.
"""

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from isobit.frame.autograd import Applied, Body, Refusal, Through, function_of
from isobit.frame.backend import (
    Args,
    Backend,
    Explanation,
    after_device,
    backend_named,
    choose,
    explain,
    whole_path,
)
from isobit.frame.cache_key import CacheKey, cache_key_of, remember
from isobit.frame.call_plan import NAMESPACE, CallPlan
from isobit.frame.contract import MISSING, Contract, ContractError, Param, params_of
from isobit.frame.derivative import Derivative, Grads
from isobit.frame.numerics_class import Numerics
from isobit.frame.plans import Plans
from isobit.frame.watched import is_watched

#: Every op by name. Declarations add themselves when they are imported.
OPS: dict[str, "Op"] = {}

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")

#: Arguments that every op takes. `prefer`: the backend to try first, before all others of the numerics class.
CONTROLS = tuple(
    Param(name, None, kind, True, None)
    for name, kind in (("validate", bool), ("numerics", str), ("backend", str), ("prefer", str))
)
_VALIDATE, _NUMERICS = -4, -3  # positions among the values of a call


@dataclass(eq=False)
class Op:
    """An op: its contract, its backends (fastest first) and its derivative."""

    contract: Contract  # of an op with a public function: complete when that is declared
    package: str  # in which it is declared, as `isobit.ops.logp`; its proof and its rivals are there too
    #: (args) -> sizes by name, for dimensions of outputs that do not occur in an input.
    sizes: Callable[[Args], dict[str, int]] | None = None
    #: (args) -> floating-point operations of the call, for PyTorch's FLOP counter.
    flops: Callable[[Args], int] | None = None
    backends: list[Backend] = field(default_factory=list)
    rules: list[Callable[[Contract, Args], None]] = field(default_factory=list)
    value_rules: list[Callable[[Contract, Args], None]] = field(default_factory=list)
    function: Callable[..., Any] | None = None  # the public function, for ops that have one
    differentiable: tuple[str, ...] = ()  # arguments that get a gradient
    grows: str | None = None  # path of what calls of a family differ in, if not in rows: `family.Varying`
    #: Converts what the public function accepts into what the contract takes: a list, say.
    adapt: Callable[[Args], Args] = lambda args: args

    @property
    def name(self) -> str:
        return self.contract.name

    @property
    def folder(self) -> str:
        """`logp` for `isobit/ops/logp`. Result files are named after it."""
        return self.package.rpartition(".")[2]

    def __post_init__(self) -> None:
        self.forget()
        self._register()

    def _register(self) -> None:
        """Make it an op of `torch.library`."""
        _LIBRARY.define(self.contract.schema())
        _LIBRARY.impl(self.name, self._run_for_torch, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", self._fake_for_torch, lib=_LIBRARY)
        self.torch_op = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        if self.flops is not None:
            register_flop_formula(self.torch_op.overloadpacket, get_raw=True)(self._count_flops)
        self._applied: Applied | None = None  # the autograd function, if the op has a gradient or refuses one
        self._made_true: tuple[int, ...] = ()  # positions of flags that are set where a backward may follow
        OPS[self.name] = self

    def forget(self) -> None:
        """Drop every cached call. A new dictionary, because another thread may hold the old ones."""
        self._plans = Plans(self.contract)
        self._planned_for = list(self.backends)  # the backends that cached plans were made for

    # Declaring

    def backend(
        self,
        name: str,
        *,
        run: Callable[..., Any] | str,
        numerics: str | Callable[[torch.device], str],
        cannot_run: Callable[[torch.device], str | None] = lambda device: None,
        when: Callable[[Args], str | None] | str = lambda args: None,
        interpreted: bool = False,
        not_by_default: Callable[[Args], str | None] | str = lambda args: None,
        launches: bool = False,
        other_class_by_default: Callable[[Args], str | None] | str = lambda args: None,
    ) -> None:
        """Add a backend; the order of declaration is the order of preference.

        "kernels_triton:logp" is the path of a function in a module of the op's package, imported at its first
        use: if `cannot_run(device)` gives a reason, it is not, because `when` is asked afterwards.
        """
        given = (run, when, not_by_default, other_class_by_default)
        named: list[Any] = [whole_path(f, self.package) if isinstance(f, str) else f for f in given]
        cannot_serve, rather_not = (after_device(cannot_run, reason) for reason in named[1:3])
        other_class = after_device(lambda device: None, named[3])
        rest = (launches, tuple(f for f in named if isinstance(f, str)), other_class)
        self.backends += [Backend(name, named[0], numerics, cannot_serve, interpreted, rather_not, *rest)]
        self.forget()

    def rule(self, *checks: Callable[[Contract, Args], None]) -> None:
        """Add checks that annotations cannot express, on shapes, dtypes and scalars; not on tensor values."""
        self.rules += checks
        self.forget()

    def value_rule(self, *checks: Callable[[Contract, Args], None]) -> None:
        """Checks that read tensor values: on CPU tensors, or where `validate=True` allows the sync."""
        self.value_rules += checks
        self.forget()

    @property
    def own_params(self) -> list[Param]:
        """Its parameters without the controls."""
        return self.contract.params[: -len(CONTROLS)]

    def params(self, *names: "str | EllipsisType") -> list[Any]:
        """Parameters of this op for `op(like=...)`, without their defaults. `...` stays where it is."""
        own = {p.name: replace(p, default=MISSING) for p in self.own_params}
        return [name if isinstance(name, EllipsisType) else own[name] for name in names]

    def derivative(
        self,
        *inputs: str,
        by: "Op",
        outputs: tuple[str, ...],
        constant: tuple[str, ...] = (),
        flags: tuple[str, ...] = (),
        save: Callable[[Args, Args], Args] = lambda call, saved: saved,
        gradient: Callable[[Args, Grads], dict[str, Tensor | None]] | None = None,
        once: str | None = None,
    ) -> None:
        """Autograd for this op with respect to these arguments, for all backends, by its backward.

        `outputs` are the names of all outputs. The backward's arguments are matched by name
        (`isobit.frame.derivative`): arguments and outputs of this op are saved, `dlogp` is the gradient of
        `logp`. Gradients may arrive with any strides; where the backward needs a contiguous last dimension
        they are copied. Outputs named in `constant` have no gradient, and neither have optional ones that
        were not requested. Arguments named in `flags` are set to true where a backward may follow.

        `save(call, saved)` may change what is saved, by name: arguments and outputs of the call, and anything
        else that is the same for all calls with one cache key. `gradient(saved, grads)` replaces the call of
        the backward; it calls any ops, and returns gradients by argument name. There `saved` also holds the
        scalar arguments; `needs`, the names of the arguments that need a gradient; and `follow`, controls to
        pass on to those ops, so that gradients have the numerics class that the forward was bound to:
        `numerics`, and `prefer`, the backend that was requested. `once` is the error for a second derivative,
        if the backward would not raise one itself.
        """
        self.differentiable = inputs
        derived = Derivative(
            self.contract, self.bound_to, by, by.own_params, inputs, outputs, constant, save, gradient, once
        )
        function = function_of(self.name, derived.setup_context, derived.backward, CallPlan.run)
        self._set_autograd(function, flags)

    def not_differentiable(self, why: str) -> None:
        """Make a gradient through this op an error with this message (used by backwards)."""

        def refused(body: Body, *tensors: Tensor) -> Any:
            return Refusal.apply(body.run, why, *tensors)

        self._set_autograd(Applied(refused, refused))

    def bound_to(self, scalars: Args, device: torch.device) -> dict[str, str | None]:
        """The class or backend that a call named: gradients must not come from another class."""
        forced = scalars["prefer"] if scalars["backend"] is None else scalars["backend"]
        numerics = scalars["numerics"]
        if forced is not None:
            numerics = self.backend_named(forced).numerics_on(device)
        return {"prefer": forced, "numerics": numerics}

    def _set_autograd(self, applied: Applied, flags: tuple[str, ...] = ()) -> None:
        self._applied = applied
        self._made_true = tuple(self.contract.names.index(name) for name in flags)
        self.forget()

        def below_autograd(*values: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return self.torch_op(*self.contract.to_torch(values))

        def autograd(*given: Any) -> Any:
            values = self.contract.from_torch(given)
            if self._needs_grad(values):
                return self._differentiated(below_autograd, values)
            return below_autograd(*values)

        _LIBRARY.impl(self.name, autograd, "Autograd")

    def _differentiated(self, run: Callable[..., Any], values: Sequence[Any]) -> Any:
        """A call under autograd, through the function that runs the op."""
        assert self._applied is not None
        values = self._followed(values)
        body = Through(run, values)
        return self._applied.anywhere(body, *[values[i] for i in body.positions])

    def _followed(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The values of a call that a backward may follow; raises an error for a tensor that gets no
        gradient."""
        for i in self.contract.tensor_positions if self.differentiable else ():
            name, t = self.contract.names[i], values[i]
            if isinstance(t, Tensor) and t.requires_grad and name not in self.differentiable:
                raise self.contract.error(name, t, "no gradient goes to it; detach() it")
        return tuple(True if i in self._made_true else v for i, v in enumerate(values))

    def _needs_grad(self, values: tuple[Any, ...]) -> bool:
        """Whether autograd is involved: a tensor requires grad, or has a forward-mode tangent (which the
        autograd functions refuse, because dropping it would silently give zero)."""
        if torch.is_grad_enabled():
            for i in self.contract.tensor_positions:
                t = values[i]
                if t is not None and type(t) is not float and t.requires_grad:
                    return True
        if forward_ad._current_level >= 0:
            tensors = (values[i] for i in self.contract.tensor_positions if isinstance(values[i], Tensor))
            return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)
        return False

    # Running

    def __call__(self, *, alike: Hashable = None, **given: Any) -> Any:
        """Call by keyword; omitted arguments have their defaults. Finds the call plan, or makes one, and runs
        it. Plain tensors outside any tracing go past the `torch.library` op, because the dispatcher's hops to
        a Python body cost tens of microseconds. For a known cache key nothing is checked or chosen again. A
        caller who knows that calls have the same key says so by `alike`; then it is not computed."""
        if torch.compiler.is_compiling():
            return self.torch_op(*self.contract.to_torch(self.bind(given)))
        values = self.contract.in_order(given)
        key = plan = None
        watched = is_watched() or forward_ad._current_level >= 0
        if not watched:
            if alike is not None and self._planned_for == self.backends:
                plan = self._plans.alike.get(alike)
            if plan is None:
                key = cache_key_of(values, _grad_enabled())
                plan = self._cached_plan(key)
                if alike is not None and plan is not None:
                    remember(self._plans.alike, alike, plan)
        if plan is None:
            typed = self._typed(values)
            if typed is not values and not watched:  # for example, a numpy number has become a Python number
                key = cache_key_of(typed, _grad_enabled())
                plan = self._cached_plan(key)
            values = typed
        if plan is None:
            if not self._plain(values) or values[0].device.type == "meta":
                return self._without_plan(values)
            plan, values = self._planned(values, key)
        tensors = [values[i] for i in plan.positions]
        return plan.run(*tensors) if plan.applied is None else plan.applied.eager(plan, *tensors)

    def _cached_plan(self, key: CacheKey | None) -> CallPlan | None:
        return None if key is None or self._planned_for != self.backends else self._plans.find(key)

    def _planned(self, values: tuple[Any, ...], key: CacheKey | None) -> tuple[CallPlan, tuple[Any, ...]]:
        """A new plan, and the values that it runs with: those of a call that a backward may follow have some
        flags set."""
        applied = None
        if self._applied is not None and self._needs_grad(values):
            values, applied = self._followed(values), self._applied
        plan = self.plan(values, applied)
        self._keep(key, plan, values)
        return plan, values

    def _keep(self, key: CacheKey | None, plan: CallPlan, values: Sequence[Any]) -> None:
        """Cache a plan. The first one of a family that launches kernels may compile those of others too."""
        launches = plan.launches_on(values[0])
        if launches and self._plans.varying is None:
            from isobit.frame import family

            self._plans.varying = family.varying(self.contract, self.grows)
        if self._plans.keep(key, plan) and launches and self._plans.varying is not None:
            args = dict(zip(self.contract.names, values, strict=True))
            controls, device = _pop_controls(args), values[0].device
            serves = partial(choose, self.contract, self.backends, controls=controls, device=device)
            self._plans.varying.compile_ahead(serves, args)

    def _without_plan(self, values: tuple[Any, ...]) -> Any:
        """A call that the dispatcher must see, or on the meta device: shapes without values."""
        if not self._plain(values):
            if self._applied is not None and torch._C._are_functorch_transforms_active():
                return self._differentiated(self._run_transformed, values)
            return self.torch_op(*self.contract.to_torch(values))
        if self._applied is None or not self._needs_grad(values):
            return self._fake(*values)
        return self._differentiated(self._fake, values)

    def bind(self, given: Args) -> tuple[Any, ...]:
        """The values of a call, in the order of the contract, converted to the declared types."""
        return self._typed(self.contract.in_order(given))

    def _typed(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        if isinstance(values[_NUMERICS], Numerics):
            values = (*values[:_NUMERICS], str(values[_NUMERICS]), *values[_NUMERICS + 1 :])
        return self.contract.typed(values)

    def _plain(self, values: tuple[Any, ...]) -> bool:
        """No tensor subclass, no dispatch mode, no functorch transform or trace, no lazy negation or zeros:
        nothing that the dispatcher would have to handle first."""
        for i in self.contract.tensor_positions:
            t = values[i]
            if t is None or type(t) is float:
                continue
            if type(t) not in (Tensor, torch.nn.Parameter) or t.is_neg() or t._is_zerotensor():
                return False
            if torch._C._functorch.is_functorch_wrapped_tensor(t):  # also after its transform has ended
                return False
            if torch._C._functorch.is_legacy_batchedtensor(t):
                return False
        return not is_watched()

    def _run(self, *values: Any) -> Any:
        """The body, below autograd."""
        if values[0].device.type == "meta":
            return self._fake(*values)
        key = cache_key_of(values, False)
        plan = self._cached_plan(key)
        if plan is None:
            plan = self.plan(values)
            self._keep(key, plan, values)
        return plan.run(*[values[i] for i in plan.positions])

    def _run_for_torch(self, *given: Any) -> Any:
        """The body as `torch.library` needs it: an output that was not requested is an empty tensor, where
        backends return None to save an allocation."""
        values = self.contract.from_torch(given)
        outputs = self._run(*values)
        if isinstance(outputs, Tensor):
            return outputs
        specs, dtype_of = self.contract.outputs, self.contract.output_dtype
        return tuple(
            values[0].new_empty(0, dtype=dtype_of(spec, values)) if o is None else o
            for spec, o in zip(specs, outputs, strict=True)
        )

    def _run_transformed(self, *values: Any) -> Any:
        """Inside `torch.func`: the dispatcher handles the remaining transforms."""
        return self.torch_op(*self.contract.to_torch(values))

    def fake(self, **given: Any) -> tuple[Tensor, ...]:
        """The outputs of a call on the meta device: shapes and dtypes, no values."""
        there = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in given.items()}
        outputs = self._fake(*self.bind(there))
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def _fake_for_torch(self, *given: Any) -> Any:
        return self._fake(*self.contract.from_torch(given))

    def _fake(self, *values: Any) -> Any:
        _, dims = self._validated(values)
        if self.sizes is not None:
            sizes = self.sizes(dict(zip(self.contract.names, values, strict=True)))
            dims |= {name: (size, "sizes") for name, size in sizes.items()}
        outputs = self.contract.empty_outputs(values, dims)
        return tuple(outputs) if len(outputs) > 1 else outputs[0]

    def _count_flops(self, *given: Any, **rest: Any) -> int:
        assert self.flops is not None
        return self.flops(dict(zip(self.contract.names, self.contract.from_torch(given), strict=True)))

    def plan(self, values: Sequence[Any], applied: Applied | None = None) -> CallPlan:
        """The plan of calls like this one; raises an error if no backend can serve them.

        The contract, its rules and the choice of a backend depend on everything but tensor values and the
        number of rows. So the result holds for all calls with the same key, and for its family.
        """
        if self._planned_for != self.backends:
            self.forget()
        args, _ = self._validated(values)
        controls = _pop_controls(args)
        backend = choose(self.contract, self.backends, args, controls, values[0].device)
        validate = values[_VALIDATE] if self.value_rules else False
        if validate is None and values[0].device.type == "cpu":
            validate = True
        return CallPlan(self.name, tuple(args), backend, self._check_values, validate, applied, values)

    def _validated(self, values: Sequence[Any]) -> tuple[Args, dict[str, Any]]:
        """(arguments, dimensions) of a call that satisfies the contract, except for its value rules."""
        dims = self.contract.check(values)
        args = dict(zip(self.contract.names, values, strict=True))
        for rule in self.rules:
            rule(self.contract, args)
        return args, dims

    def _check_values(self, values: Sequence[Any]) -> None:
        """Apply the rules that read tensor values."""
        args = dict(zip(self.contract.names, values, strict=True))
        for rule in self.value_rules:
            rule(self.contract, args)

    # Choosing

    def refusal(self, args: Args) -> str | None:
        """Why it is not called with these arguments, where it cannot raise that itself: a function that is
        checked in place of an op may take fewer options."""
        return None

    def backend_named(self, name: str) -> Backend:
        return backend_named(self.contract, self.backends, name)

    def explain(self, **given: Any) -> Explanation:
        """Which backend would run this call, and why not the others. Checks it, and launches nothing."""
        values = self.bind(given)
        args, _ = self._validated(values)
        controls, device = _pop_controls(args), values[0].device
        return explain(self.contract, self.backends, args, controls, device)


_grad_enabled = torch.is_grad_enabled


def _pop_controls(args: Args) -> Args:
    return {p.name: args.pop(p.name) for p in CONTROLS}


def op(
    name: str,
    *,
    like: Sequence[Any] = (),
    sizes: Callable[[Args], dict[str, int]] | None = None,
    flops: Callable[[Args], int] | None = None,
) -> Callable[[Callable[..., Any]], Op]:
    """Declare an op that only our own code calls: the signature of the decorated function is the contract,
    its body is empty.

    `like` are parameters of another op (`Op.params`), which are not written again. Own parameters stand at
    the `...` in it, or after it; those after a `*` come last.
    """

    def declare(fn: Callable[..., Any]) -> Op:
        own, kinds = params_of(fn), inspect.signature(fn).parameters
        last = [p for p in own if kinds[p.name].kind is inspect.Parameter.KEYWORD_ONLY]
        first = [p for p in own if p not in last]
        at = list(like).index(...) if ... in like else len(like)
        params = [*like[:at], *first, *like[at + 1 :], *last]
        return Op(Contract(name, fn, CONTROLS, params), fn.__module__.rpartition(".")[0], sizes, flops)

    return declare


def known_op(name: str) -> Op:
    """The public op of this name, or an error that lists the known ones."""
    public = public_ops()
    if name not in public:
        raise ContractError(f"unknown op {name!r}; known: {', '.join(sorted(public))}")
    return public[name]


def public_ops() -> dict[str, Op]:
    """The ops that people call, by name."""
    return {name: op for name, op in OPS.items() if op.function is not None}
