"""Guards what callers may pass, and the errors if they may not: numbers of other libraries and of any size,
tensors of special kinds, and controls that every op takes."""

import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

import isobit
from isobit import ContractError
from isobit.frame.contract import F32, Contract, Float, params_of
from isobit.frame.op import public_ops
from isobit.frame.public_op import public_op
from isobit.numerics import NO_CLASS

Z = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([1, 2, 6])
X = Z[:, :4].bfloat16()
HEAD = torch.randn(9, 7, generator=torch.Generator().manual_seed(1))


# Numbers


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.float16(0.5), np.array(0.5)])
def test_numbers_of_numpy_are_numbers(number: Any) -> None:
    assert torch.equal(isobit.logp(Z, IDS, temperature=number), isobit.logp(Z, IDS, temperature=0.5))
    assert torch.equal(
        isobit.logp(Z, IDS, ignore_index=np.int64(2)), isobit.logp(Z, IDS, ignore_index=2)
    )  # fmt: skip
    assert isinstance(isobit.logp(Z, IDS, return_lse=np.bool_(True)), tuple)


def repr_of(value: Any) -> str:
    return repr(value)[:8]


@pytest.mark.parametrize("number", [10**400, -(10**400), float("inf"), float("nan"), 0, -1.0], ids=repr_of)
def test_an_invalid_temperature_is_refused(number: Any) -> None:
    with pytest.raises(ContractError, match=r"^logp\(temperature: .*must be a positive number"):
        isobit.logp(Z, IDS, temperature=number)


def test_numbers_that_64_bits_cannot_hold_are_refused() -> None:
    with pytest.raises(ContractError, match=r"^logp\(ignore_index: .* 64 bits can hold"):
        isobit.logp(Z, IDS, ignore_index=2**70)
    with pytest.raises(ContractError, match=r"^linear_logp\(workspace_bytes: .* 64 bits can hold"):
        isobit.linear_logp(Z, HEAD, IDS, workspace_bytes=10**30)


@pytest.mark.parametrize("ignore", [-(2**63), 2**63 - 1])
def test_every_token_id_can_be_the_ignored_one(ignore: int) -> None:
    found = isobit.logp(Z, torch.tensor([1, ignore, 6]), ignore_index=ignore)
    assert found[1] == 0 and torch.equal(found[[0, 2]], isobit.logp(Z, IDS)[[0, 2]])
    with pytest.raises(ContractError, match="must be a value that token_ids can hold"):
        isobit.logp(Z, IDS.int(), ignore_index=ignore)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": "warm"}, "logp(temperature: 'warm'): must be a number or a tensor, not str"),
        ({"temperature": True}, "logp(temperature: True): must be a number or a tensor, not bool"),
        ({"temperature": torch.ones(2)}, "logp(temperature: [2] fp32): leading shape=[2] but"),
        ({"temperature": torch.ones(3, dtype=torch.float64)}, "logp(temperature: [3] fp64): dtype must be"),
        ({"temperature": torch.tensor([1.0, 0.0, 1.0])}, "logp(temperature: [3] fp32): 0.0 at [1] is not a"),
        ({"temperature": torch.ones(3, requires_grad=True)}, "logp(temperature: [3] fp32): no gradient goes"),
    ],
)
def test_invalid_temperatures_are_named_with_their_rule(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError) as error:
        isobit.logp(Z.clone().requires_grad_(), IDS, **wrong)
    assert str(error.value).startswith(message)
    assert "row_temperature" not in str(error.value)


# A temperature for every row


@pytest.mark.parametrize("backward", [False, True])
def test_a_row_with_its_own_temperature_has_the_result_it_has_alone(backward: bool) -> None:
    each = torch.tensor([0.5, 1.0, 1.7])
    whole = Z.clone().requires_grad_(backward)
    logp, entropy = isobit.logp(whole, IDS, temperature=each, return_entropy=True)
    for i, t in enumerate(each.tolist()):
        one = Z[i : i + 1].clone().requires_grad_(backward)
        alone = isobit.logp(one, IDS[i : i + 1], temperature=t, return_entropy=True)
        torch.testing.assert_close(logp[i : i + 1], alone[0], rtol=2e-7, atol=0)
        torch.testing.assert_close(entropy[i : i + 1], alone[1], rtol=2e-7, atol=2e-7)
        if backward:
            (mine,) = torch.autograd.grad(logp[i], whole, retain_graph=True)
            (theirs,) = torch.autograd.grad(alone[0].sum(), one)
            torch.testing.assert_close(mine[i : i + 1], theirs, rtol=1e-6, atol=1e-7)


def test_fp64_gradients_keep_fp64_accuracy_with_fp32_temperatures() -> None:
    hidden, weight = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 7))
    each = torch.tensor([0.3, 1.1, 1.7])

    def truth(hidden: Tensor, weight: Tensor) -> Tensor:
        z = hidden @ weight.t() / each.double()[:, None]
        return z.log_softmax(-1).gather(-1, IDS[:, None])[:, 0]

    logp = isobit.linear_logp(hidden, weight, IDS, temperature=each)
    ours = torch.autograd.grad(logp.sum(), (hidden, weight))
    theirs = torch.autograd.grad(truth(hidden, weight).sum(), (hidden, weight))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-14)


def test_a_row_with_an_infinity_has_an_infinite_lse() -> None:
    z = Z.clone()
    z[1, 3] = float("inf")
    logp, lse = isobit.logp(z, IDS, return_lse=True)
    assert lse[1] == float("inf") and logp[1].isnan() and bool(lse[[0, 2]].isfinite().all())
    assert torch.equal(lse, z.logsumexp(-1)) or torch.allclose(lse, z.logsumexp(-1))


# Tensors of special kinds


def test_a_nested_tensor_is_refused_in_one_sentence() -> None:
    nested = torch.nested.nested_tensor([Z, Z[:2]], layout=torch.jagged)
    strided = torch.nested.nested_tensor([Z, Z[:2]])
    for t in (nested, strided):
        for ask in (lambda t=t: isobit.logp(t, IDS), lambda t=t: isobit.explain("logp", t, IDS)):
            with pytest.raises(ContractError, match=r"^logp\(logits: nested fp32\): must be a dense tensor"):
                ask()


@pytest.fixture
def dtensor(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], Tensor]:
    """A stand-in for `torch.distributed.tensor`, whose own tensors need a process group."""

    class DTensor(Tensor):
        pass

    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", types.SimpleNamespace(DTensor=DTensor))
    return lambda t: t.as_subclass(DTensor)


def test_a_dtensor_is_refused_with_what_to_do_and_explain_agrees(dtensor: Any) -> None:
    for ask in (isobit.det_gemm, lambda a, b: isobit.explain("det_gemm", a, b)):
        with pytest.raises(ContractError, match=r"^det_gemm\(b: .*\): is a DTensor; .*full_tensor"):
            ask(X, dtensor(X.mT))


# Controls


@pytest.mark.parametrize("name", sorted(public_ops()))
def test_every_function_takes_the_controls(name: str) -> None:
    found = inspect.signature(getattr(isobit, name)).parameters
    for control in ("validate", "numerics", "backend"):
        assert found[control].kind is inspect.Parameter.KEYWORD_ONLY and found[control].default is None


def test_numerics_may_be_a_class_or_its_name() -> None:
    for numerics in ("none", NO_CLASS):
        assert torch.equal(isobit.logp(Z, IDS, numerics=numerics), isobit.logp(Z, IDS))
        assert isobit.explain("logp", Z, IDS, numerics=numerics).backend == "reference"
        assert isobit.linear_logp(Z, HEAD, IDS, numerics=numerics).shape == (3,)
    with pytest.raises(ContractError, match=r"^linear_logp\(numerics: 'lse/2'\): unknown numerics class"):
        isobit.linear_logp(Z, HEAD, IDS, numerics="lse/2")


# What the contract makes of a number or a tensor, and a public function of a contract


def either(x: Float[Tensor, "*"], by: float | F32[Tensor, "*"] = 1.0) -> F32[Tensor, "*"]:  # noqa: F722
    """x / by."""
    raise NotImplementedError


def test_a_number_or_a_tensor_are_two_arguments_of_the_torch_op() -> None:
    contract = Contract("either", either)
    assert contract.schema() == "either(Tensor x, Tensor? by_of_rows, float? by) -> Tensor"
    for by in (2.0, torch.ones(3)):
        values = contract.typed(contract.in_order({"x": Z[:, 0], "by": by}))
        assert len(contract.to_torch(values)) == 3
        assert contract.from_torch(contract.to_torch(values))[1] is by


def test_the_public_function_is_the_contract() -> None:
    Controls = str | bool | None
    Rows = F32[Tensor, "*"]

    @public_op("test_arguments_public", before="last")
    def declared(inner: bool = False) -> F32[Tensor, "* if inner"]:  # noqa: F722
        """Its output, and an argument that people do not give."""
        raise NotImplementedError

    def no_controls(x: Rows, last: int = 1) -> None: ...
    def twice(
        x: Rows,
        inner: bool,
        last: int = 1,
        validate: Controls = None,
        numerics: Controls = None,
        backend: Controls = None,
    ) -> None: ...
    def untyped(x, validate: Controls = None, numerics: Controls = None, backend: Controls = None): ...
    def right(
        x: Rows,
        by: float | Rows = 2.0,
        how: Literal["a", "b"] = "a",
        at: Sequence[int] | Rows | None = None,
        f: Callable[..., Any] | None = None,
        last: int = 1,
        validate: Controls = None,
        numerics: Controls = None,
        backend: Controls = None,
    ) -> None: ...

    reasons = {no_controls: "has no backend, numerics, validate", twice: "inner is declared twice",
               untyped: "needs an annotation"}  # fmt: skip
    for wrong, reason in reasons.items():
        with pytest.raises(TypeError, match=reason):
            declared.public(wrong)
    assert declared.function is None
    kinds = [(p.name, p.spec is not None, p.scalar, p.optional) for p in declared_params(right)]
    assert kinds == [("x", True, None, False), ("by", True, float, False), ("how", False, str, False),
                     ("at", True, None, True), ("f", False, object, True),
                     ("last", False, int, False)]  # fmt: skip

    def simple(
        x: Rows,
        by: float | Rows = 2.0,
        last: int = 1,
        validate: Controls = None,
        numerics: Controls = None,
        backend: Controls = None,
    ) -> None: ...

    assert declared.public(simple) is simple
    assert declared.contract.names[:4] == ["x", "by", "inner", "last"]
    assert declared.contract.in_order({})[1:4] == (2.0, False, 1)
    declared.function = None  # the op of a test is not for people


def declared_params(function: Any) -> list[Any]:
    return [p for p in params_of(function) if p.name not in ("validate", "numerics", "backend")]
