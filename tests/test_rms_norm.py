"""Guards what no law states about `rms_norm`: values worked out by hand, what models compute, rows that are
not numbers, what the call refuses and returns, and autograd's bookkeeping."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import isobit
from isobit import ContractError, rms_norm
from isobit.ops.rms_norm import model

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAN = float("nan")


def rows(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


# Values


@pytest.mark.parametrize("backend", ["model", "reference"])
def test_values_worked_out_by_hand(backend: str) -> None:
    x = torch.tensor([[1.0, -7.0, 5.0, 5.0]], requires_grad=True)  # the mean of squares is 25
    weight = torch.tensor([5.0, 10.0, -1.0, 0.0], requires_grad=True)
    out = rms_norm(x, weight, eps=0.0, backend=backend)
    assert out.tolist() == [[1.0, -14.0, -1.0, 0.0]]
    out.backward(torch.tensor([[5.0, 0.0, 0.0, 0.0]]))
    # y = x / 5, g = (25, 0, 0, 0), mean(g y) = 25 / 5 / 4 = 1.25, dx = (g - 1.25 y) / 5.
    assert x.grad.flatten().tolist() == pytest.approx([4.95, 0.35, -0.25, -0.25], rel=1e-6)
    assert weight.grad.tolist() == pytest.approx([1.0, 0.0, 0.0, 0.0], rel=1e-6)


def test_eps_is_added_to_the_mean_of_squares() -> None:
    assert rms_norm(torch.full((1, 4), 3.0), torch.ones(4), eps=16.0).tolist() == [[0.6000000238418579] * 4]
    assert rms_norm(torch.zeros(1, 4), torch.ones(4)).tolist() == [[0.0] * 4]


def test_an_offset_of_zero_is_not_added() -> None:
    zeros = torch.tensor([-0.0, -0.0])
    assert torch.signbit(rms_norm(torch.ones(1, 2), zeros)).all()
    assert not torch.signbit(rms_norm(torch.ones(1, 2), zeros, offset=1.0)).any()


# What models compute


def hugging_face(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    z = x.float()
    return weight * (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def gemma(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    z = x.float()
    return (z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + eps) * (1.0 + weight.float())).type_as(x)


def torchs(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def vllms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The text of its CUDA kernels, 0.26.0 and 0.32.0."""
    z = x.float()
    return (z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "hugging face": (hugging_face, {}),
    "gemma": (gemma, {"cast": "after", "offset": 1.0}),
    "torch": (torchs, {"cast": "after"}),
    "vllm": (vllms, {"cast": "after"}),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_roundings_are_those_of_models(name: str, dtype: torch.dtype) -> None:
    """All but a few numbers in a hundred thousand: where the last bit of rstd decides a rounding. Roundings
    in another place change one number in four."""
    function, options = MODELS[name]
    x, weight = rows(100, 512, dtype=dtype), rows(512, dtype=dtype, seed=1)
    expected = function(x, weight, 1e-6)
    assert int((rms_norm(x, weight, **options) != expected).sum()) <= (2 if dtype == BF16 else 16)
    other = options | {"cast": "before" if options.get("cast") == "after" else "after"}
    assert float((rms_norm(x, weight, **other) != expected).float().mean()) > 0.05


def test_the_sum_is_that_of_torch() -> None:
    x, residual, weight = rows(9, 40, dtype=BF16), rows(9, 40, dtype=BF16, seed=1), rows(40, dtype=BF16)
    out, summed = rms_norm(x, weight, residual=residual)
    assert torch.equal(summed, x + residual) and torch.equal(out, rms_norm(x + residual, weight))


# The class as the page has it


def on_the_page() -> dict[str, Any]:
    page = Path(__file__).parent.parent / "docs" / "numerics" / "rms_norm.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    scope: dict[str, Any] = {}
    exec(code, scope)
    return scope


@pytest.mark.parametrize(("N", "D"), [(1, 1), (40, 5), (35, 1030), (3, 3000)])
@pytest.mark.parametrize(
    ("dtype", "cast", "offset"), [(F32, "before", 0.0), (BF16, "after", 1.0), (F16, "before", 0.5)]
)
def test_the_model_matches_the_documented_code(
    N: int, D: int, dtype: torch.dtype, cast: str, offset: float
) -> None:
    page = on_the_page()
    h, dout, weight = rows(N, D, dtype=dtype), rows(N, D, dtype=dtype, seed=1), rows(D, dtype=dtype, seed=2)
    wide = [t.float().numpy() for t in (h, weight, dout)]
    found = rms_norm(h.requires_grad_(), weight.requires_grad_(), cast=cast, offset=offset, backend="model")  # type: ignore[call-overload]
    found.backward(dout)
    narrow = lambda y: torch.from_numpy(y).to(dtype).float().numpy()  # noqa: E731
    out, rstd = page["rms_norm"](*wide[:2], 1e-6, offset, cast, narrow)
    dx, dweight = page["rms_norm_gradients"](*wide[:2], rstd, offset, wide[2])
    for ours, theirs in ((found, out), (h.grad, dx), (weight.grad, dweight)):
        assert torch.equal(ours, torch.from_numpy(np.ascontiguousarray(theirs)).to(dtype))


@pytest.mark.parametrize("N", [1, 7, 16, 17, 300])
def test_the_model_does_not_depend_on_how_many_rows_are_in_work(
    N: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step() -> tuple[Tensor, ...]:
        x, weight = rows(N, 30).requires_grad_(), rows(30, seed=1).requires_grad_()
        out = rms_norm(x, weight, backend="model")
        out.backward(rows(N, 30, seed=2))
        return out, x.grad, weight.grad

    whole = step()
    monkeypatch.setattr(model, "CHUNK", 100)  # 16 rows
    assert all(torch.equal(a, b) for a, b in zip(step(), whole, strict=True))


# Rows


def test_what_is_not_a_number_stays_in_its_row() -> None:
    x, weight = rows(3, 20), rows(20, seed=1)
    clean = rms_norm(x, weight)
    x[1, 7] = NAN
    x.requires_grad_()
    found = rms_norm(x, weight)
    found.backward(torch.ones_like(found))
    assert torch.equal(found[::2], clean[::2]) and bool(found[1].isnan().all())
    assert not x.grad[::2].isnan().any() and bool(x.grad[1].isnan().all())


@pytest.mark.parametrize("shape", [(7,), (1, 7), (2, 3, 7), (2, 1, 3, 7), (0, 7), (2, 0, 7)])
@pytest.mark.parametrize("backend", ["model", "reference"])
def test_any_leading_shape(shape: tuple[int, ...], backend: str) -> None:
    x, weight, residual = rows(*shape).requires_grad_(), rows(7).requires_grad_(), rows(*shape, seed=1)
    out, summed = rms_norm(x, weight, residual=residual, backend=backend)
    assert out.shape == summed.shape == x.shape
    out.sum().backward()
    assert x.grad.shape == x.shape and weight.grad.shape == (7,)
    if not x.numel():
        assert not weight.grad.any()


# Autograd


def gradients(wanted: str, use: str, backend: str) -> dict[str, Tensor | None]:
    args = {name: rows(4, 9, seed=i) for i, name in enumerate(("x", "residual"))} | {
        "weight": rows(9, seed=3)
    }
    for name in wanted.split():
        args[name].requires_grad_()
    out, summed = rms_norm(args["x"], args["weight"], residual=args["residual"], backend=backend)
    a, b = rows(4, 9, seed=4), rows(4, 9, seed=5)
    total = {"out": (out * a).sum(), "summed": (summed * b).sum()}
    sum(total[name] for name in use.split()).backward()  # type: ignore[union-attr]
    return {name: t.grad for name, t in args.items()}


@pytest.mark.parametrize("backend", ["model", "reference"])
def test_gradients_go_where_they_are_wanted(backend: str) -> None:
    every = gradients("x residual weight", "out summed", backend)
    assert torch.equal(every["x"], every["residual"])
    for wanted in ("x", "residual", "weight", "x weight"):
        found = gradients(wanted, "out summed", backend)
        for name, grad in found.items():
            assert (grad is None) == (name not in wanted.split())
            assert grad is None or torch.equal(grad, every[name])


def test_gradients_of_one_result_alone() -> None:
    both, out, summed = (gradients("x weight", use, "model") for use in ("out summed", "out", "summed"))
    assert torch.equal(summed["x"], rows(4, 9, seed=5)) and summed["weight"] is None
    torch.testing.assert_close(out["x"] + summed["x"], both["x"])
    assert torch.equal(out["weight"], both["weight"])


def test_a_gradient_that_is_one_number_for_all() -> None:
    x, weight = rows(5, 8).requires_grad_(), rows(8).requires_grad_()
    rms_norm(x, weight).sum().backward()
    expanded = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    rms_norm(x, weight).backward(torch.ones(5, 8))
    assert torch.equal(x.grad, expanded[0]) and torch.equal(weight.grad, expanded[1])


def test_gradients_by_finite_differences() -> None:
    shapes = ((3, 5), (5,), (3, 5))
    given = [rows(*shape, dtype=F64, seed=i).requires_grad_() for i, shape in enumerate(shapes)]

    def call(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm(x, weight, residual=residual, offset=1.0)

    assert torch.autograd.gradcheck(call, given)


# Refusals, and which backend serves


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": rows(7)}, "rms_norm(weight: [7] fp32): D=7 but D=8 from x"),
        ({"weight": rows(8, dtype=BF16)}, "rms_norm(weight: [8] bf16): dtype must be that of x, fp32"),
        ({"residual": rows(2, 8, dtype=BF16)}, "rms_norm(residual: [2, 8] bf16): dtype must be that of x"),
        ({"residual": rows(3, 8)}, "rms_norm(residual: [3, 8] fp32): leading shape=[3] but"),
        ({"eps": -1.0}, "rms_norm(eps: -1.0): must be a finite number, 0 or more"),
        ({"offset": NAN}, "rms_norm(offset: nan): must be a finite number"),
        ({"cast": "both"}, "rms_norm(cast: 'both'): must be 'before' or 'after' (the weight)"),
        ({"x": rows(2, 16)[:, ::2]}, "rms_norm(x: [2, 8] fp32): last dimension must be contiguous"),
        ({"x": rows(2, 0), "weight": rows(0)}, "rms_norm(x: [2, 0] fp32): D must be at least 1"),
    ],
)
def test_bad_calls_say_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError) as error:
        rms_norm(**{"x": rows(2, 8), "weight": rows(8)} | change)
    assert message in str(error.value)


def test_a_weight_in_fp32_with_rows_in_16_bits() -> None:
    x, weight = rows(3, 8, dtype=BF16).requires_grad_(), rows(8, seed=1).requires_grad_()
    out = rms_norm(x, weight)
    assert out.dtype == BF16
    out.sum().backward()
    assert x.grad.dtype == BF16 and weight.grad.dtype == F32


def test_which_backend_serves() -> None:
    x, weight = rows(2, 8), rows(8)
    assert str(isobit.explain("rms_norm", x, weight)).startswith("rms_norm: model (numerics rms/1)")
    wide = isobit.explain("rms_norm", x.double(), weight.double())
    assert wide.backend == "reference" and "fp64" in str(wide.reasons["model"])
    with pytest.raises(isobit.UnsupportedError, match="rms/1"):
        rms_norm(x.double(), weight.double(), numerics="rms/1")
