"""What can be declared for an op, and what a declaration gives: its name, its schema, its gradient."""

# ruff: noqa: F722, F821
# "* V" in an annotation names dimensions, not types.

from typing import Any

import pytest
import torch
from torch import Tensor

from isobit import UnsupportedError
from isobit.frame.backend import NONE
from isobit.frame.contract import F32, Contract, Float, Like
from isobit.frame.op import OPS, Op, op
from toy_op import scale


def test_an_op_is_registered_under_its_name() -> None:
    assert OPS["test_op_scale"] is scale and scale.name == "test_op_scale"
    assert str(torch.ops.isobit.test_op_scale.default._schema) == f"isobit::{scale.contract.schema()}"


def test_a_name_can_be_declared_only_once() -> None:
    with pytest.raises(RuntimeError, match="test_op_scale"):

        @op("test_op_scale")
        def again(x: Float[Tensor, "N"]) -> Like[Tensor, "x"]: ...

    assert OPS["test_op_scale"] is scale


def test_gradients_arrive_with_the_strides_that_the_backward_takes() -> None:
    """The gradient of a sum is one number, expanded: its strides are 0."""

    @op("test_op_strides")
    def forward(x: Float[Tensor, "* V"]) -> tuple[Like[Tensor, "x"], Like[Tensor, "x"]]: ...

    @op("test_op_strides_bwd")
    def backward(
        dfirst: Float[Tensor, "* V"] | None, dsecond: Float[Tensor, "* V; any strides"] | None
    ) -> Float[Tensor, "* V in dfirst or dsecond"]: ...

    strides: list[Any] = []

    def run(dfirst: Tensor, dsecond: Tensor) -> Tensor:
        strides.extend((dfirst.stride(), dsecond.stride()))
        return dfirst + dsecond

    forward.backend("only", run=lambda x: (x.clone(), x.clone()), numerics=NONE)
    backward.backend("only", run=run, numerics=NONE)
    forward.derivative("x", by=backward, outputs=("first", "second"))
    x = torch.ones(2, 3, requires_grad=True)
    first, second = forward(x=x)
    (first.sum() + second.sum()).backward()
    assert strides == [(3, 1), (0, 0)] and x.grad is not None and x.grad.tolist() == [[2.0] * 3] * 2


def test_an_op_without_a_derivative_gives_no_gradient_silently() -> None:
    @op("test_op_opaque")
    def opaque(x: Float[Tensor, "N"]) -> Like[Tensor, "x"]: ...

    opaque.backend("only", run=lambda x: x.detach().clone(), numerics=NONE)
    assert isinstance(opaque, Op)
    assert not opaque(x=torch.ones(2, requires_grad=True)).requires_grad


def test_a_backward_of_the_class_that_cannot_serve_is_passed_over() -> None:
    """Forced forward, no backward of that name: the best one of the class that can serve, or all reasons."""

    @op("adv_class")
    def forward(x: Float[Tensor, "*"]) -> F32[Tensor, "*"]:
        """x, doubled."""

    @op("adv_class_bwd")
    def backward(dy: F32[Tensor, "*"]) -> F32[Tensor, "*"]:
        """dx."""

    served: list[str] = []
    reasons: dict[str, str | None] = {"hopper": "needs a Hopper GPU", "portable": None}
    forward.backend("fast", run=lambda x: x * 2, numerics="c/1")
    for name in reasons:
        run = lambda dy, name=name: (served.append(name), dy * 2)[1]  # noqa: E731
        backward.backend(name, run=run, numerics="c/1", when=lambda args, name=name: reasons[name])
    forward.derivative("x", by=backward, outputs=("y",))
    x = torch.ones(3, requires_grad=True)
    forward(x=x, backend="fast").sum().backward()
    assert served == ["portable"] and x.grad is not None and x.grad.tolist() == [2.0] * 3
    reasons["portable"] = "not today"
    with pytest.raises(
        UnsupportedError, match=r"class 'c/1' can serve .*\(hopper: needs a Hopper GPU; portable: not today"
    ):
        # Of another kind than the call above, whose answer is remembered.
        forward(x=torch.ones(4, requires_grad=True), backend="fast").sum().backward()


def test_every_output_needs_a_spec() -> None:
    with pytest.raises(TypeError, match="every output needs an annotation"):
        Contract("bare", bare)


def bare(x: Float[Tensor, "*"]) -> Tensor:
    """No spec on the output."""
    raise NotImplementedError
