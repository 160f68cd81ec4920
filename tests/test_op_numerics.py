"""Guards numerics classes in the frame: asking for one, classes that the device decides, backends that serve
only by name, and what a backward is bound to that calls several ops."""

# ruff: noqa: F722
# "* V" in an annotation names dimensions, not types.

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import isobit
from isobit import ContractError, UnsupportedError
from isobit.frame.backend import NONE
from isobit.frame.contract import F32, Float
from isobit.frame.op import op
from isobit.numerics import CHAIN16, SEG16_512

#: (op, backend, its arguments) of every backend that ran.
RAN: list[tuple[str, str, dict[str, Any]]] = []

#: What keeps a backend from serving, by (op, backend).
REASONS: dict[tuple[str, str], str] = {}


@op("test_numerics_double")
def double(
    x: Float[Tensor, "*"],
    y: Float[Tensor, "*"],
) -> F32[Tensor, "*"]:
    """2 x + 3 y."""


@op("test_numerics_times")
def times(x: Float[Tensor, "*"], factor: float) -> F32[Tensor, "*"]:
    """factor x: what the backward is made of."""


def add(target: Any, name: str, numerics: Any, run: Any, **options: Any) -> None:
    def logged(**args: Any) -> Tensor:
        RAN.append((target.name, name, args))
        return run(**args)

    key = (target.name, name)
    target.backend(name, run=logged, numerics=numerics, when=lambda args: REASONS.get(key), **options)


def of_the_device(device: torch.device) -> str:
    return "a/1" if device.type == "cuda" else f"a/1/{device.type}"


def by_name_only(args: dict[str, Any]) -> str | None:
    return "it is slow"


for target, run in (
    (double, lambda x, y: 2 * x + 3 * y),
    (times, lambda x, factor: factor * x),
):
    add(target, "quick", "a/1", run)
    add(target, "mixed", of_the_device, run)
    add(target, "sure", "a/1", run)
    add(target, "shy", "a/2", run, not_by_default=by_name_only)
add(double, "alone", "a/3", lambda x, y: 2 * x + 3 * y)
add(double, "plain", NONE, lambda x, y: 2 * x + 3 * y)
add(times, "timid", "a/3", lambda x, factor: factor * x, not_by_default=by_name_only)
add(times, "plain", NONE, lambda x, factor: factor * x)


def _gradient(kept: dict[str, Any], grads: tuple[Tensor | None, ...]) -> dict[str, Tensor]:
    return {
        name: times(x=grads[0], factor=factor, **kept["follow"])
        for name, factor in (("x", 2.0), ("y", 3.0))
        if name in kept["needs"]
    }


double.derivative(
    "x",
    "y",
    by=times,
    outputs=("out",),
    gradient=_gradient,
    once="double has no second derivative",
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    forget()
    RAN.clear()
    REASONS.clear()
    yield


def forget() -> None:
    """Reasons change from test to test here, which those of a backend never do: answers are not kept."""
    for toy in (double, times):
        toy.forget()


def ran() -> list[str]:
    return [name for _, name, _ in RAN]


X = torch.ones(3)


# Asking for a class


@pytest.mark.parametrize(
    ("numerics", "served"), [(None, "quick"), ("a/1", "quick"), ("a/1/cpu", "mixed"), ("none", "plain")]
)
def test_the_first_backend_of_the_class_serves(numerics: str | None, served: str) -> None:
    double(x=X, y=X, numerics=numerics, backend=None)
    assert ran() == [served] and set(RAN[0][2]) == {"x", "y"}  # backends do not see it
    assert double.explain(x=X, y=X, numerics=numerics).backend == served


def test_a_backend_that_cannot_serve_is_passed_over_within_the_class() -> None:
    REASONS["test_numerics_double", "quick"] = "not today"
    double(x=X, y=X, numerics="a/1", backend=None)
    assert ran() == ["sure"]


def test_a_class_that_no_backend_has_here_lists_those_there_are() -> None:
    for call in (double, double.explain):
        with pytest.raises(ContractError) as error:
            call(x=X, y=X, numerics="b/1")
        assert str(error.value) == (
            "test_numerics_double(numerics: 'b/1'): unknown numerics class on cpu; "
            "known: a/1, a/1/cpu, a/2, a/3, none"
        )
    assert ran() == []


def test_a_forced_backend_of_another_class_is_an_error() -> None:
    with pytest.raises(UnsupportedError) as error:
        double(x=X, y=X, numerics="a/1", backend="mixed")
    assert str(error.value) == (
        "test_numerics_double(backend='mixed'): its numerics class here is 'a/1/cpu', not 'a/1'"
    )
    double(x=X, y=X, numerics="a/1", backend="sure")
    assert ran() == ["sure"]


def test_a_class_whose_backends_cannot_serve_is_an_error_with_every_reason() -> None:
    with pytest.raises(UnsupportedError) as error:
        double(x=X, y=X, numerics="a/2", backend=None)
    assert str(error.value) == (
        "test_numerics_double: no backend of numerics class 'a/2' can serve this call (shy: it is slow)"
    )


def test_explain_reports_the_class_on_the_device_of_the_call() -> None:
    found = double.explain(x=X, y=X, backend="mixed")
    assert (found.backend, found.numerics) == ("mixed", "a/1/cpu")
    found = double.explain(x=X, y=X, numerics="a/3")
    assert (found.backend, found.numerics) == ("alone", "a/3")
    assert found.reasons["quick"] == "its numerics class here is 'a/1', not 'a/3'"


def test_the_class_is_a_function_of_the_device() -> None:
    mixed = double.backend_named("mixed")
    assert mixed.numerics_on(torch.device("cuda", 0)) == "a/1"
    assert mixed.numerics_on(torch.device("cpu")) == "a/1/cpu"
    assert double.backend_named("sure").numerics_on(torch.device("cpu")) == "a/1"


def test_a_backend_that_serves_by_name_only_does_when_named() -> None:
    double(x=X, y=X, numerics=None, backend="shy")
    assert ran() == ["shy"]
    assert double.explain(x=X, y=X).reasons["shy"] == "it is slow"


# Backwards of several ops


def gradients(numerics: str | None, backend: str | None, needs: tuple[bool, bool] = (True, True)) -> list:
    x, y = (torch.ones(3, requires_grad=need) for need in needs)
    double(x=x, y=y, numerics=numerics, backend=backend).sum().backward()
    return [x.grad, y.grad]


@pytest.mark.parametrize(
    ("numerics", "backend", "served"),
    [
        (None, None, "quick quick quick"),
        ("a/1/cpu", None, "mixed mixed mixed"),
        (None, "sure", "sure sure sure"),
        (None, "mixed", "mixed mixed mixed"),
        (None, "shy", "shy shy shy"),  # by name, so in the backward too
        ("none", "plain", "plain plain plain"),
    ],
)
def test_what_the_forward_was_bound_to_binds_every_op_of_the_backward(
    numerics: str | None, backend: str | None, served: str
) -> None:
    dx, dy = gradients(numerics, backend)
    assert ran() == served.split() and dx.tolist() == [2.0] * 3 and dy.tolist() == [3.0] * 3


def test_a_forced_backend_that_cannot_serve_the_backward_is_followed_by_its_class() -> None:
    REASONS["test_numerics_times", "quick"] = "odd strides"
    gradients(None, "quick")
    assert ran() == ["quick", "sure", "sure"]
    REASONS["test_numerics_times", "sure"] = "nor this one"
    forget()
    with pytest.raises(UnsupportedError) as error:
        gradients(None, "quick")
    assert str(error.value) == (
        "test_numerics_times: no backend of numerics class 'a/1' can serve this call "
        "(quick: odd strides; sure: nor this one)"
    )


def test_a_backend_by_name_only_does_not_step_in_for_another_one() -> None:
    with pytest.raises(UnsupportedError, match=r"of numerics class 'a/3' can serve .*\(timid: it is slow\)$"):
        gradients(None, "alone")


def test_a_gradient_that_is_not_needed_is_not_computed() -> None:
    assert gradients(None, None, (True, False))[1] is None and ran() == ["quick", "quick"]
    assert RAN[1][2]["factor"] == 2.0


def test_prefer_is_not_a_public_argument() -> None:
    for backend in ("quick or a/1", "bogus or none"):
        with pytest.raises(ContractError, match="unknown backend"):
            double(x=X, y=X, backend=backend)
    for function in (isobit.logp, isobit.linear_logp, isobit.det_gemm, isobit.det_linear, isobit.det_gemm_dw):
        assert "prefer" not in inspect.signature(function).parameters


def test_a_second_derivative_is_refused_whatever_is_differentiated() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    out = double(x=x, y=y)
    weight = torch.ones(3, requires_grad=True)
    (dy,) = torch.autograd.grad((out * weight).sum(), y, create_graph=True)
    assert dy.tolist() == [3.0] * 3
    for leaf in (x, weight):
        with pytest.raises(RuntimeError, match=r"^double has no second derivative$"):
            torch.autograd.grad(dy.sum(), leaf, retain_graph=True)


# Meta tensors


def test_meta_tensors_have_shapes_and_need_no_backend() -> None:
    x = torch.empty(5, device="meta", requires_grad=True)
    out = double(x=x, y=x)
    out.sum().backward()
    assert list(out.shape) == [5] and out.device.type == "meta" and x.grad is not None and ran() == []


def test_a_class_is_as_good_as_its_name() -> None:
    x, weight = torch.ones(2, 16, dtype=torch.bfloat16), torch.ones(3, 16, dtype=torch.bfloat16)
    assert torch.equal(isobit.det_linear(x, weight, numerics=CHAIN16), isobit.det_linear(x, weight))
    with pytest.raises(ContractError, match="unknown numerics class"):
        isobit.det_linear(x, weight, numerics=SEG16_512)
