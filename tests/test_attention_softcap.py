"""The tanh of class attn/2, and which class a call gets."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import isobit
from attention_calls import made
from isobit.frame.backend import UnsupportedError
from isobit.ops.attention import model, softcap
from isobit.ops.attention.calls import factors_of

Array = np.ndarray
F32 = np.float32


def tanh_of(z: Array, cap: float, scale: float, exp2: Callable[[Array], Array] = np.exp2) -> Array:
    slope = factors_of(made(1, 1, 1, 1, 1, 64, softcap=cap, scale=scale), 2).slope
    with np.errstate(over="ignore", under="ignore"):
        return softcap.bent(z, F32(slope), exp2, model.fused)


def error(z: Array, t: Array, cap: float, scale: float) -> float:
    return float(np.abs(t - np.tanh(z.astype(np.float64) * scale / cap)).max())


def test_the_error_is_at_most_2_to_the_minus_20() -> None:
    """For scores up to 20 caps, and near 0; and with an exp2 that is off by as much as that of a GPU may be,
    2^-22 of its result, to either side."""
    rng = np.random.default_rng(0)
    x = np.concatenate([np.linspace(0, 20, 60_000), 2.0 ** rng.uniform(-24, 4, 30_000)])
    found = []
    for cap, scale in ((50.0, 1.0), (30.0, 128**-0.5), (1024.0, 3.0)):
        z = (np.concatenate([x, -x]) * cap / scale).astype(F32)
        for off in (0.0, 2.0**-22, -(2.0**-22)):

            def exp2(a: Array, off: float = off) -> Array:
                result: Array = (np.exp2(a.astype(np.float64)) * (1 + off)).astype(F32)
                return np.minimum(result, F32(1.0))

            t = tanh_of(z, cap, scale, exp2)
            found.append(error(z, t, cap, scale))
            assert np.abs(t).max() <= 1 and not np.any(np.sign(t) * np.sign(z) < 0)
    assert 2.0**-22 < max(found) <= 2.0**-20, math.log2(max(found))


@pytest.mark.parametrize("name", ["S2", "S1", "S0", "A3", "A2", "A1", "A0"])
def test_another_coefficient_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it differs by 2^-17. The parabola's own error is corrected, so of its coefficients the result at 0
    shows it, of the others the bound too."""
    z = np.linspace(-300, 300, 4001, dtype=F32)
    assert error(z, tanh_of(z, 50.0, 1.0), 50.0, 1.0) <= 2.0**-20
    monkeypatch.setattr(softcap, name, float(F32(getattr(softcap, name) * (1 + 2.0**-17))))
    assert tanh_of(np.zeros(1, F32), 50.0, 1.0)[0] != 0
    assert name.startswith("S") or error(z, tanh_of(z, 50.0, 1.0), 50.0, 1.0) > 2.0**-20


def test_zero_infinity_and_nan() -> None:
    z = np.array([0.0, -0.0, np.inf, -np.inf, 3e38, -3e38, np.nan], F32)
    t = tanh_of(z, 2.0, 1.0)
    assert t[:-1].tolist() == [0.0, 0.0, 1.0, -1.0, 1.0, -1.0] and np.isnan(t[-1])
    assert np.signbit(t[:2]).tolist() == [False, True]


def test_it_is_the_formula_of_the_page() -> None:
    """Every step computed in fractions and rounded once to fp32, for given values of e."""

    def rounded(x: Fraction) -> Fraction:
        nearest = F32(float(x))  # rounded twice, so look at its neighbours too
        near = [Fraction(float(y)) for y in (np.nextafter(nearest, F32(d)) for d in (-9, 9))]
        return min([Fraction(float(nearest)), *near], key=lambda y: abs(y - x))

    e = np.random.default_rng(1).random(50).astype(F32)
    given = dict(zip(np.arange(50), e, strict=True))
    t = softcap.bent(np.arange(50, dtype=F32), F32(1.0), lambda a: e, model.fused)
    S2, S1, S0, A3, A2, A1, A0 = (
        Fraction(getattr(softcap, n)) for n in ("S2", "S1", "S0", "A3", "A2", "A1", "A0")
    )
    for i, one in given.items():
        x = Fraction(float(one))
        r = rounded(rounded(S2 * x + S1) * x + S0)
        g = rounded(x * r + r)
        q = rounded(rounded(rounded(A3 * g + A2) * g + A1) * g + A0)
        assert Fraction(float(t[i])) == rounded(r * q - 1), (i, one)


def test_coefficients_are_fp32_numbers() -> None:
    for name in ("S2", "S1", "S0", "A3", "A2", "A1", "A0"):
        assert float(F32(getattr(softcap, name))) == getattr(softcap, name), name


# Which class a call gets


def tensors() -> tuple[Any, ...]:
    gen = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 33, 2, 64, generator=gen).half() for _ in range(3))


@pytest.mark.parametrize(
    ("options", "numerics"),
    [
        ({}, "attn/1/cpu"),
        ({"softcap": 50.0}, "attn/2/cpu"),
        ({"softcap": 50.0, "window": 4}, "attn/2/cpu"),
        ({"softcap": 1024.0}, "attn/2/cpu"),
        ({"softcap": 1025.0}, "attn/1/cpu"),
        ({"softcap": 50.0, "numerics": "attn/1/cpu"}, "attn/1/cpu"),
        ({"softcap": 50.0, "backend": "model"}, "attn/1/cpu"),
        ({"numerics": "attn/2/cpu"}, "attn/2/cpu"),
    ],
)  # fmt: skip
def test_the_class_follows_from_the_softcap(options: dict[str, Any], numerics: str) -> None:
    assert isobit.explain("attention", *tensors(), **options).numerics == numerics


def test_explain_says_how_to_get_the_other() -> None:
    q, k, v = tensors()
    capped, plain = (isobit.explain("attention", q, k, v, softcap=cap).reasons for cap in (50.0, None))
    assert "'attn/2'" in (capped["model"] or "") and "numerics=" in (capped["model"] or "")
    assert "'attn/1'" in (plain["model-attn2"] or "") and "same bits" in (plain["model-attn2"] or "")


def test_a_large_softcap_has_no_second_class() -> None:
    with pytest.raises(UnsupportedError, match="softcap must be at most 1024"):
        isobit.attention(*tensors(), softcap=2000.0, numerics="attn/2/cpu")


def results(**options: Any) -> list[torch.Tensor]:
    """out, lse and gradients."""
    leaves = [t.requires_grad_() for t in tensors()]
    out, lse = isobit.attention(*leaves, return_lse=True, **options)
    return [out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), leaves)]


def test_classes_differ_with_a_softcap_alone() -> None:
    """In every result, gradients too: these follow the forward's class."""
    first, second = (results(numerics=f"attn/{n}/cpu", softcap=30.0) for n in (1, 2))
    assert all(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(second, results(softcap=30.0), strict=True))
    first, second = (results(numerics=f"attn/{n}/cpu") for n in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_both_classes_are_near_the_truth() -> None:
    q, k, v = (t.double() for t in tensors())
    true = isobit.attention(q, k, v, softcap=1.5, return_lse=True)[1]
    for n, most in ((1, 2.0**-20), (2, 2.0**-18)):
        lse = results(numerics=f"attn/{n}/cpu", softcap=1.5)[1]
        assert float((lse.detach() - true).abs().max()) <= most
