"""The quotients of silu and sigmoid, which GPUs of NVIDIA compute without branches, are those of a division
that is rounded to nearest. The function runs here on numpy's numbers, with reciprocals that are up to an ulp
off, as a GPU's are; numpy's division is the judge."""

import types
from typing import Any

import numpy as np
import pytest

from isobit.kernels.triton import silu
from ptx import flushed, fma

F32 = np.float32


def reciprocal(asm: str, constraints: str, args: list[np.ndarray], *rest: Any) -> np.ndarray:
    """Depending on the last bits one ulp too small, correctly rounded, or one ulp too large. It is correctly
    rounded for powers of two, zero and infinity, and for 2 - 2^-23: the steps of the compiler's own division,
    which these are, need that too."""
    assert asm.startswith("rcp.approx.ftz.f32")
    (x,) = args
    exact = flushed((1 / x).astype(F32))
    bits = x.view(np.int32)
    off = np.where((bits & 0x7FFFFF == 0) | (bits == 0x3FFFFFFF) | (exact == 0), 0, bits % 3 - 1)
    return (exact.view(np.int32) + off).astype(np.int32).view(F32)


def steps(**changes: Any) -> Any:
    """`quotient` on arrays."""

    def where(condition: np.ndarray, x: Any, y: Any) -> np.ndarray:
        return np.where(condition, F32(x) if np.isscalar(x) else x, F32(y) if np.isscalar(y) else y)

    def fused(a: np.ndarray, b: np.ndarray, c: Any) -> np.ndarray:
        return fma(a, b, np.broadcast_to(np.asarray(c, F32), a.shape))

    tl = {
        "where": where,
        "fma": fused,
        "abs": np.abs,
        "inline_asm_elementwise": reciprocal,
        "float32": F32,
    } | changes
    scope = {"INTERPRETED": False, "cuda_capability_geq": lambda *_: True, "tl": types.SimpleNamespace(**tl)}
    return types.FunctionType(silu.quotient.fn.__code__, scope)


def inputs() -> np.ndarray:
    """Numbers of every size, many of those at which e^-x neither vanishes nor overflows, and the special
    ones."""
    random = np.random.default_rng(0)
    every = np.arange(-(2**31), 2**31, 4093, dtype=np.int64).astype(np.int32).view(F32)
    usual = random.uniform(-104, 104, 1 << 20).astype(F32)
    last = random.uniform(-88.73, -87.3, 1 << 16).astype(F32)  # where 1 / (1 + e^-x) is subnormal
    small = random.integers(0, 1 << 24, 1 << 14).astype(np.int32).view(F32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-45, -1e-45], F32)
    return np.concatenate((every, usual, last, small, -small, special))


def wrong(quotient: Any, of_one: bool) -> int:
    x = inputs()
    with np.errstate(all="ignore"):
        d = F32(1) + np.exp(-x)
        a = np.ones_like(x) if of_one else x
        known, ours = (a / d).astype(F32), quotient(a, d)
    return int(((known.view(np.int32) != ours.view(np.int32)) & ~(np.isnan(known) & np.isnan(ours))).sum())


@pytest.mark.parametrize("of_one", [False, True], ids=["silu", "sigmoid"])
def test_quotients_are_rounded_to_nearest(of_one: bool) -> None:
    assert wrong(steps(), of_one) == 0


def test_without_a_correction_or_without_scaling_they_would_not_be() -> None:
    """The controls."""
    unfused = steps(fma=lambda a, b, c: (a * b + c).astype(F32))
    assert wrong(unfused, False) > 0
    unscaled = steps(where=lambda condition, x, y: F32(1.0) if np.isscalar(x) else np.where(condition, x, y))
    assert wrong(unscaled, False) > 0
