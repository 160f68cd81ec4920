"""Autograd functions, named after their ops: graphs and profilers show these names.

They are in the style that `torch.func` needs, so `grad`, `vjp` and `vmap` can transform them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Saved(NamedTuple):
    """What calls with one key save for the backward: tensors, by name and by position among inputs and
    outputs; and other values, which are the same for all of these calls."""

    names: tuple[str, ...]
    places: tuple[int | None, ...]
    rest: dict[str, Any]
    constant: tuple[int, ...]  # outputs that have no gradient
    device: torch.device

    @classmethod
    def of(cls, given: dict[str, Any], tensors: Sequence[Any], constant: Sequence[int]) -> "Saved":
        at = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
        held = {name: t for name, t in given.items() if t is None or isinstance(t, Tensor)}
        places = tuple(None if t is None else at[id(t)] for t in held.values())
        rest = {name: value for name, value in given.items() if name not in held}
        return cls(tuple(held), places, rest, tuple(constant), tensors[0].device)

    def among(self, tensors: Sequence[Any]) -> list[Tensor | None]:
        return [None if i is None else tensors[i] for i in self.places]


class Body:
    """A call without its tensors, which autograd passes separately."""

    __slots__ = ("common", "positions", "saved", "template")

    def __init__(self, values: Sequence[Any]) -> None:
        self.positions = tuple(i for i, v in enumerate(values) if isinstance(v, Tensor))
        self.template = tuple(None if isinstance(v, Tensor) else v for v in values)
        #: Values that backwards of such calls share, by which gradients are needed.
        self.common: dict[tuple[bool, ...], dict[str, Any]] = {}
        self.saved: Saved | None = None  # set if all calls through this body save the same

    def cache_saved(self, saved: Saved) -> None:
        """Called with what a call has saved. Inside a transform nothing can be cached: each level calls this,
        with other tensors that require a gradient."""

    def run(self, *tensors: Tensor) -> Any:
        raise NotImplementedError

    def values(self, tensors: Sequence[Tensor]) -> list[Any]:
        """All values of the call, in the order of the contract."""
        values = list(self.template)
        for i, t in zip(self.positions, tensors, strict=True):
            values[i] = t
        return values


class Through(Body):
    """A body that calls a function with all values."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any], values: Sequence[Any]) -> None:
        super().__init__(values)
        self._function = function

    def run(self, *tensors: Tensor) -> Any:
        return self._function(*self.values(tensors))


class Applied(NamedTuple):
    """How to apply an autograd function to a body and its tensors."""

    anywhere: Callable[..., Any]
    #: To a call plan, without an active transform of `torch.func`. It skips what PyTorch does for transforms
    #: on every call: reading the signature of the forward takes longer than the rest.
    eager: Callable[..., Any]


def function_of(
    name: str, setup_context: Callable[..., None], backward: Callable[..., Any], run: Callable[..., Any]
) -> Applied:
    """The autograd function of an op. Its arguments are a body, followed by the tensors of the call. `run` is
    that of a call plan, which is then the forward itself."""

    def forward(body: Body, *tensors: Tensor) -> Any:
        return body.run(*tensors)

    def vmap(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> Any:
        return _one_by_one(made.apply, info.batch_size, in_dims, values)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            f"isobit.{name} has no derivative in forward mode (jvp, jacfwd, hessian): use backward(), or "
            "grad, vjp or jacrev of torch.func"
        )

    methods: dict[str, Callable[..., Any]] = {
        "forward": forward, "setup_context": setup_context, "backward": backward, "vmap": vmap, "jvp": jvp,
    }  # fmt: skip
    camel = "".join(part.capitalize() for part in name.split("_"))
    made: Any = type(camel, (torch.autograd.Function,), {k: staticmethod(f) for k, f in methods.items()})
    eager: Any = type(camel, (made,), {"forward": staticmethod(run)})
    return Applied(made.apply, super(torch.autograd.Function, eager).apply)


class Refusal(torch.autograd.Function):
    """Runs a function, and makes a gradient through its result an error with a reason."""

    @staticmethod
    def forward(run: Callable[..., Any], why: str, *values: Any) -> Any:
        return run(*values)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], outputs: Any) -> None:
        ctx.why = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(ctx.why)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise RuntimeError(ctx.why)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *values: Any) -> Any:
        return _one_by_one(Refusal.apply, info.batch_size, in_dims, values)


def _one_by_one(
    apply: Callable[..., Any], count: int, in_dims: tuple[int | None, ...], values: tuple[Any, ...]
) -> tuple[Any, Any]:
    """`torch.vmap` as a loop over calls: each has the same bits as alone."""
    results = []
    for i in range(count):
        own = (v if d is None else v.select(d, i).contiguous() for v, d in zip(values, in_dims, strict=True))
        outputs = apply(*own)
        results.append(outputs if isinstance(outputs, tuple) else (outputs,))
    stacked = tuple(torch.stack(each) for each in zip(*results, strict=True))
    return (stacked, (0,) * len(stacked)) if isinstance(outputs, tuple) else (stacked[0], 0)
