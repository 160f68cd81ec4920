"""A toy op with a backward, several backends and rules: what the tests of `isobit.frame.op` play with."""

# ruff: noqa: F722, F821
# "* V" in an annotation names dimensions, not types.

from typing import Any

import torch
from torch import Tensor

from isobit.frame.backend import NONE
from isobit.frame.contract import F32, Contract, Float, Like
from isobit.frame.op import op

#: (backend, its arguments, whether autocast was on) of every backend that ran.
RAN: list[tuple[str, dict[str, Any], bool]] = []


@op("test_op_scale")
def scale(
    x: Float[Tensor, "* V"],
    factor: float = 2.0,
    want_sum: bool = False,
) -> tuple[F32[Tensor, "* V"], F32[Tensor, "* if want_sum"], F32[Tensor, "*"]]:
    """(factor * x, its sum, the largest element of x, which has no gradient)."""


@op("test_op_scale_bwd")
def scale_bwd(
    x: Float[Tensor, "* V"],
    dy: F32[Tensor, "* V"] | None,
    dsum: F32[Tensor, "*"] | None,
    factor: float,
) -> Like[Tensor, "x"]:
    """factor * (dy + dsum)."""


def forward_backend(name: str, numerics: str, **options: Any) -> None:
    def run(**args: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        RAN.append((name, args, torch.is_autocast_enabled("cpu")))
        x = args["x"].float()
        y = x @ (args["factor"] * torch.eye(x.shape[-1]))  # a product: autocast would make it bf16
        return y, y.sum(-1) if args["want_sum"] else None, x.amax(-1)

    scale.backend(name, run=run, numerics=numerics, **options)


def backward_backend(name: str, numerics: str) -> None:
    def run(x: Tensor, dy: Tensor | None, dsum: Tensor | None, factor: float) -> Tensor:
        RAN.append((name, {}, torch.is_autocast_enabled("cpu")))
        dx = torch.zeros(x.shape)
        dx += 0.0 if dy is None else factor * dy
        dx += 0.0 if dsum is None else factor * dsum[..., None]
        return dx.to(x.dtype)

    scale_bwd.backend(name, run=run, numerics=numerics)


def odd(args: dict[str, Any]) -> str | None:
    return None if args["x"].shape[-1] % 2 == 0 else f"V={args['x'].shape[-1]} is odd"


forward_backend("kernel", "toy/1", interpreted=True)  # never chosen by itself on a CPU
forward_backend("fast", "toy/1", when=odd)
forward_backend("exact", "toy/1")
forward_backend("plain", NONE)
forward_backend("lonely", "toy/2")
backward_backend("plain", NONE)
backward_backend("exact", "toy/1")
backward_backend("second", "toy/1")


@scale.rule
def _positive(contract: Contract, args: dict[str, Any]) -> None:
    if not args["factor"] > 0:
        raise contract.error("factor", args["factor"], "must be positive")


@scale.value_rule
def _no_nan(contract: Contract, args: dict[str, Any]) -> None:
    RAN.append(("value rule", dict(args), False))
    if args["x"].device.type == "cpu" and bool(args["x"].isnan().any()):
        raise contract.error("x", args["x"], "has a NaN")


scale.derivative("x", by=scale_bwd, outputs=("y", "sum", "largest"), constant=("largest",))
scale_bwd.not_differentiable("the toy has no second derivative")


def ran() -> list[str]:
    return [name for name, _, _ in RAN if name != "value rule"]


def call(x: Tensor, factor: float = 2.0, want_sum: bool = False, **controls: Any) -> tuple[Any, ...]:
    return scale(x=x, factor=factor, want_sum=want_sum, **controls)


def by_torch(
    x: Tensor, factor: float = 2.0, want_sum: bool = False, validate: bool | None = None
) -> tuple[Any, ...]:
    """The same through the `torch.library` op."""
    return torch.ops.isobit.test_op_scale(x, factor, want_sum, validate, None, None, None)


def even(requires_grad: bool = False) -> Tensor:
    return torch.arange(12.0).reshape(3, 4).requires_grad_(requires_grad)
