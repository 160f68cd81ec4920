"""Guards the machinery of `isobit.frame.op` with a toy op: the choice of a backend, its reasons, the
requested numerics class and that of the backward, value rules, and what can be declared."""

# ruff: noqa: F821
# "* V" in an annotation names dimensions, not types.

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import isobit
from isobit import ContractError, UnsupportedError
from isobit.frame import cache_key
from isobit.frame.backend import NONE
from isobit.frame.contract import Contract, Float, Like
from isobit.frame.op import op, public_ops
from toy_op import RAN, by_torch, call, even, ran, scale


@pytest.fixture(autouse=True)
def _fresh_log() -> Iterator[None]:
    RAN.clear()
    yield
    RAN.clear()


# Choice


def test_the_first_backend_that_can_serve_does() -> None:
    call(even())
    call(torch.ones(3, 5))
    assert ran() == ["fast", "exact"]


def test_a_backend_asked_for_by_name_serves_even_if_another_comes_first() -> None:
    for name in ("plain", "exact", "lonely", "fast", "kernel"):
        call(even(), backend=name)
    assert ran() == ["plain", "exact", "lonely", "fast", "kernel"]


def test_a_forced_backend_that_cannot_serve_raises_its_reason_and_nothing_runs() -> None:
    with pytest.raises(UnsupportedError) as error:
        call(torch.ones(3, 5), backend="fast")
    assert str(error.value) == "test_op_scale(backend='fast'): V=5 is odd" and ran() == []


@pytest.mark.parametrize("name", ["nope", ""])
def test_an_unknown_backend_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ContractError) as error:
        call(even(), backend=name)
    assert str(error.value) == (
        f"test_op_scale(backend={name!r}): unknown backend; known: kernel, fast, exact, plain, lonely"
    )
    assert not isinstance(error.value, UnsupportedError) and ran() == []


def test_a_call_that_no_backend_can_serve_says_why_for_each() -> None:
    @op("test_op_picky")
    def picky(x: Float[Tensor, "N"]) -> Like[Tensor, "x"]: ...

    picky.backend("never", run="no.such:function", numerics=NONE, when=lambda args: "it never does")
    with pytest.raises(UnsupportedError) as error:
        picky(x=torch.ones(2))
    assert str(error.value) == "test_op_picky: no backend can serve this call (never: it never does)"
    found = picky.explain(x=torch.ones(2))
    assert (found.backend, found.numerics, found.reasons) == (None, None, {"never": "it never does"})
    assert str(found) == "test_op_picky: no backend (numerics None)\n  never      it never does"


def test_backends_see_neither_backend_nor_validate() -> None:
    call(even(), backend="plain", validate=True)
    assert set(RAN[-1][1]) == {"x", "factor", "want_sum"}


def test_an_unknown_op_lists_the_known_ones() -> None:
    public = ", ".join(sorted(public_ops()))
    for name in ("nope", "logp_bwd", "test_op_scale"):  # ops without a proof are not for people to call
        with pytest.raises(ContractError) as error:
            isobit.explain(name)
        assert str(error.value) == f"unknown op {name!r}; known: {public}"


def test_a_function_is_not_the_name_of_an_op() -> None:
    function: Any = isobit.logp
    with pytest.raises(ContractError) as error:
        isobit.explain(function)
    assert str(error.value) == "explain(op): must be the name of an op, such as 'logp', not function"


# Explaining


def test_explain_says_who_serves_and_why_not_the_others() -> None:
    found = scale.explain(x=torch.ones(3, 5))
    asked = "CPU tensors run only in Triton's interpreter: select it by name to test its kernels"
    assert (found.op, found.backend, found.numerics) == ("test_op_scale", "exact", "toy/1")
    other_class = "can serve, in numerics class 'toy/2', if that is requested"
    assert found.reasons == {
        "kernel": asked, "fast": "V=5 is odd", "exact": None, "plain": None, "lonely": other_class,
    }  # fmt: skip
    assert str(found) == (
        "test_op_scale: exact (numerics toy/1)\n"
        f"  kernel     {asked}\n"
        "  fast       V=5 is odd\n"
        "  exact      serves this call\n"
        "  plain      can serve; one above it does\n"
        f"  lonely     {other_class}"
    )
    assert ran() == []


def test_explain_of_a_forced_backend_does_not_call_it_faster() -> None:
    found = scale.explain(x=even(), backend="plain")
    assert (found.backend, found.numerics) == ("plain", NONE)
    text = str(found).splitlines()
    assert text[4] == "  plain      serves this call"
    assert "one above it does" not in str(found)
    assert text[2].startswith("  fast       can serve")


def test_explain_of_a_forced_backend_that_is_served_by_name_only() -> None:
    assert scale.explain(x=even(), backend="kernel").backend == "kernel"


def test_explain_validates_like_a_call() -> None:
    for bad, message in (
        ({"factor": -1.0}, "test_op_scale(factor: -1.0): must be positive"),
        (
            {"x": torch.ones(3, dtype=torch.int64)},
            "test_op_scale(x: [3] int64): dtype must be floating point",
        ),
        ({"backend": "nope"}, "test_op_scale(backend='nope'): unknown backend"),
        ({"backend": "fast", "x": torch.ones(3, 5)}, "test_op_scale(backend='fast'): V=5 is odd"),
        ({"x": None}, "test_op_scale(x: None): is required"),
    ):
        with pytest.raises(ContractError) as error:
            scale.explain(**({"x": even()} | bad))
        assert str(error.value).startswith(message)


def test_explain_reads_no_values() -> None:
    assert scale.explain(x=torch.full((3, 4), float("nan"))).backend == "fast" and RAN == []


@pytest.mark.parametrize(
    ("args", "named"),
    [((), {"temperatur": 1.0}), ((None,), {}), ((), {"logits": torch.ones(2, 2)})],
)
def test_explain_takes_what_the_function_takes(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match=r"^logp: "):
        isobit.explain("logp", torch.ones(1, 2), torch.zeros(1, dtype=torch.int64), *args, **named)


def test_arguments_are_bound_by_name() -> None:
    with pytest.raises(ContractError, match=r"^test_op_scale: unknown argument\(s\): facto$"):
        scale(x=even(), facto=1.0)
    with pytest.raises(ContractError, match=r"^test_op_scale\(x: None\): is required$"):
        scale(factor=1.0)
    with pytest.raises(TypeError):
        scale(even())


# Backward


def gradient(backend: str | None, want_sum: bool = False) -> Tensor:
    x = even(requires_grad=True)
    y, total, _ = call(x, 3.0, want_sum, backend=backend)
    loss = (y * torch.arange(4.0)).sum() + (0.0 if total is None else total.sum())
    loss.backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    ("forced", "followed_by"),
    [
        (None, ["fast", "plain"]),  # nothing is forced: each direction takes its best
        ("plain", ["plain", "plain"]),
        ("exact", ["exact", "exact"]),
        ("fast", ["fast", "exact"]),  # the backward has no "fast": the best one of its numerics class
        ("kernel", ["kernel", "exact"]),
    ],
)
def test_the_backward_keeps_the_numerics_class_of_a_forced_forward(
    forced: str | None, followed_by: list[str]
) -> None:
    found = gradient(forced)
    assert ran() == followed_by
    assert torch.equal(found, 3.0 * torch.arange(4.0).expand(3, 4))


def test_a_backward_without_the_class_of_the_forced_forward_is_an_error() -> None:
    with pytest.raises(UnsupportedError) as error:
        gradient("lonely")
    assert str(error.value) == (
        "test_op_scale_bwd: no backend of numerics class 'toy/2' can serve this call (there are none)"
    )
    assert ran() == ["lonely"]


def test_gradients_of_optional_outputs_are_added() -> None:
    assert torch.equal(gradient(None, want_sum=True), 3.0 * (torch.arange(4.0) + 1.0).expand(3, 4))


@pytest.mark.parametrize("torch_op", [False, True])
def test_constant_and_unasked_outputs_require_no_grad(torch_op: bool) -> None:
    way = by_torch if torch_op else call
    y, total, top = way(even(requires_grad=True))
    assert y.requires_grad and not top.requires_grad
    assert total is None or (list(total.shape) == [0] and not total.requires_grad)


@pytest.mark.parametrize("torch_op", [False, True])
def test_a_second_derivative_is_an_error_that_says_so(torch_op: bool) -> None:
    way = by_torch if torch_op else call
    x = even(requires_grad=True)
    (dx,) = torch.autograd.grad(way(x)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^the toy has no second derivative$"):
        dx.sum().backward()


def test_no_graph_where_none_is_wanted() -> None:
    x = even(requires_grad=True)
    with torch.no_grad():
        assert call(x)[0].grad_fn is None
    with torch.inference_mode():
        assert call(x)[0].is_inference()
    assert call(x.detach())[0].grad_fn is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # PyTorch's own
def test_forward_mode_is_refused_rather_than_dropped() -> None:
    """A tangent that is lost on the way reads as a derivative of 0."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.func.jvp(lambda x: call(x)[0], (even(),), (torch.ones(3, 4),))
    with torch.autograd.forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError)):
        call(torch.autograd.forward_ad.make_dual(even(), torch.ones(3, 4)))


# Rules


NAN = torch.full((2, 4), float("nan"))


def rule_ran() -> bool:
    return any(name == "value rule" for name, _, _ in RAN)


def test_rules_run_on_every_call() -> None:
    for validate in (None, True, False):
        with pytest.raises(ContractError, match=r"^test_op_scale\(factor: -1.0\): must be positive$"):
            call(even(), -1.0, validate=validate)
    with pytest.raises(ContractError, match="must be positive"):
        by_torch(even(), -1.0)


@pytest.mark.parametrize("validate", [None, True])
def test_value_rules_run_on_cpu_tensors(validate: bool | None) -> None:
    for way in (call, by_torch):
        with pytest.raises(ContractError, match=r"^test_op_scale\(x: \[2, 4\] fp32\): has a NaN$"):
            way(NAN, validate=validate)
    assert ran() == []


def test_value_rules_can_be_switched_off() -> None:
    assert bool(call(NAN, validate=False)[0].isnan().all()) and not rule_ran()


def test_value_rules_do_not_run_while_tracing() -> None:
    make_fx(lambda x: call(x, validate=True)[0], tracing_mode="fake")(even())
    assert not rule_ran()


@pytest.mark.parametrize(
    ("validate", "environment", "runs"),
    [
        (None, None, False), (None, "0", False), (None, "", False), (None, "1", True),
        (True, None, True), (True, "0", True), (False, "1", False),
    ],
)  # fmt: skip
def test_value_rules_elsewhere_than_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, validate: bool | None, environment: str | None, runs: bool
) -> None:
    """They cost a sync there, so only on request. The environment is read by the call, not by the import."""
    monkeypatch.delenv("ISOBIT_VALIDATE", raising=False)
    if environment is not None:
        monkeypatch.setenv("ISOBIT_VALIDATE", environment)
    # The meta device represents one that is not a CPU: the rule runs and finds no values to read.
    values = scale.bind({"x": torch.empty(2, 4, device="meta"), "validate": validate})
    assert scale.plan(values)._must_check() is runs


# Calls like earlier ones


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records which rules and backends are evaluated again."""
    seen: list[str] = []

    def rule(contract: Contract, args: dict[str, Any]) -> None:
        seen.append("rule")
        if args["factor"] == 7.0:
            raise contract.error("factor", args["factor"], "is seven")

    def when(args: dict[str, Any]) -> None:
        seen.append("backend")

    monkeypatch.setattr(scale, "rules", [rule])
    monkeypatch.setattr(scale, "backends", [dataclasses.replace(b, when=when) for b in scale.backends])
    return seen


def test_a_call_with_a_cached_key_is_not_validated_again(asked: list[str]) -> None:
    for _ in range(3):
        call(even())
        call(even() + 1.0)
    call(even(requires_grad=True))[0].sum().backward()
    by_torch(even())
    # Once under autograd's eyes and once without; the dispatcher's own call is of the second kind.
    assert asked == ["rule", "backend"] * 3 and ran().count("fast") == 8


@pytest.mark.parametrize(
    "other",
    [
        lambda: call(torch.ones(3, 6)),
        lambda: call(torch.ones(1, 4)),  # one row: it may be anywhere
        lambda: call(torch.ones(3, 8)[:, :4]),  # strides
        lambda: call(torch.ones(13)[1:].view(3, 4)),  # another alignment
        lambda: call(even().bfloat16()),
        lambda: call(even(), 3.0),
        lambda: call(even(), 2.0, True),
        lambda: call(even(), backend="plain"),
        lambda: call(even(), validate=False),
    ],
)
def test_a_call_with_a_new_key_is_validated(asked: list[str], other: Callable[[], Any]) -> None:
    call(even())
    other()
    assert asked == ["rule", "backend"] * 2


def test_errors_are_not_cached(asked: list[str]) -> None:
    for _ in range(2):
        with pytest.raises(ContractError, match="is seven"):
            call(even(), 7.0)
        with pytest.raises(ContractError, match="must be a dense tensor"):
            call(even().to_sparse())
    assert asked == ["rule"] * 2


def test_negative_zero_has_its_own_cache_key(asked: list[str]) -> None:
    """0.0 and -0.0 are equal and have one hash, and are two numbers."""
    for factor in (0.0, -0.0, 0.0, -0.0):
        call(even(), factor)
        assert math.copysign(1.0, RAN[-1][1]["factor"]) == math.copysign(1.0, factor)


def test_tensor_values_are_checked_every_time(asked: list[str]) -> None:
    call(even()[:2])
    with pytest.raises(ContractError, match="has a NaN"):
        call(NAN)
    assert asked == ["rule", "backend"]


def test_changing_the_backends_clears_the_cache(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    call(even())
    first = next(b for b in scale.backends if b.name == "fast")
    monkeypatch.setattr(scale, "backends", [b for b in scale.backends if b is not first])
    call(even())
    assert ran() == ["fast", "exact"]


def test_a_new_rule_applies_to_cached_calls(asked: list[str]) -> None:
    def never(contract: Contract, args: dict[str, Any]) -> None:
        raise contract.error("x", args["x"], "is never right")

    call(even())
    scale.rule(never)
    with pytest.raises(ContractError, match="is never right"):
        call(even())


def test_a_new_value_rule_applies_to_cached_calls(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(contract: Contract, args: dict[str, Any]) -> None:
        raise contract.error("x", args["x"], "holds nothing right")

    monkeypatch.setattr(scale, "value_rules", [])
    scale.forget()
    call(even())
    scale.value_rule(never)
    with pytest.raises(ContractError, match="holds nothing right"):
        call(even())


class Unhashable(float):
    __hash__ = None  # type: ignore[assignment]


def test_numbers_of_no_usual_type_become_usual_ones(asked: list[str]) -> None:
    for _ in range(2):
        assert call(even(), Unhashable(2.0))[0].tolist() == call(even(), validate=None)[0].tolist()
    assert asked == ["rule", "backend"] and len(scale._plans) == 1


def test_the_call_cache_is_bounded(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_key, "MOST_KEYS", 3)
    for n in range(1, 9):
        call(torch.ones(n, 4))
    assert len(scale._plans.families) <= 3 and len(scale._plans) <= 3


def test_another_number_of_rows_is_not_validated_again(asked: list[str]) -> None:
    for shape in ((3, 4), (5, 4), (700, 4)):
        assert call(torch.ones(shape))[0].shape == shape
    assert asked == ["rule", "backend"]
    call(torch.ones(2, 3, 4))  # of another rank
    assert asked == ["rule", "backend"] * 2
