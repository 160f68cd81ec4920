"""Quotients of the attention kernel on Hopper are rounded to nearest, with numpy's division as the judge and
fused multiply-adds that round once.

Why RN(q - r y) = RN(a / b) for y = RN(1 / b), q = RN(a y), r = RN(b q - a). Signs and powers of two change
nothing, so let 1 <= a, b < 2, and x = a / b; u is an ulp of x, 2^-24 if a < b, else 2^-23. Then
|y - 1/b| = d <= 2^-25, and with r exact q - r y = x + b (q - x) (y - 1/b).

- A middle m between two numbers has a - b m != 0, a multiple of 2^-24 u: |x - m| >= 2^-24 u / b.
- If the result is wrong, a middle m is no farther from x than what is rounded. If q is one of the two numbers
  next to m, then |q - x| is u / 2 up to 2^-22 u, r is exact, and b (u / 2) d >= 2^-24 u / b to first order.
  So b^2 >= 4, which holds for no b < 2; b = 2 - 2^-23 is far enough from that for the rest.
- If q is another, then |a y - m| >= u, so a d >= u - |x - m|. For a >= b that is impossible, as a d < u / 2.
  For a < b it means a > 2 - 3 2^-23, because |x - m| < 1.3 2^-23 u: then a and b are the largest that there
  are, 2 - 2^-22 and 2 - 2^-23, which `near_two` tries.
"""

from typing import Any

import numpy as np
import pytest

from gluon_on_a_cpu import Device, approximate_reciprocal, array
from isobit.kernels.hopper import division, pipeline, softmax
from isobit.ops.attention import model

F32 = np.float32
PARTS: dict[str, Any] = Device(model.CPU, 1).scope(pipeline, division, softmax)
Pair = tuple[np.ndarray, np.ndarray]


def significands(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1 << 23, 1 << 24, n)


def numbers(whole: np.ndarray) -> np.ndarray:
    """Significands as numbers from 1 to 2."""
    return np.ldexp(whole.astype(F32), -23).astype(F32)


def quotients(a: np.ndarray, b: np.ndarray, y: np.ndarray | None = None) -> np.ndarray:
    y = F32(1.0) / b if y is None else y
    with np.errstate(all="ignore"):
        return np.asarray(PARTS["quotient"](array(a), array(b), array(y)))


def wrong(a: np.ndarray, b: np.ndarray, y: np.ndarray | None = None) -> int:
    """How many quotients have other bits than a / b."""
    with np.errstate(all="ignore"):
        known = (a / b).astype(F32)
    return int((quotients(a, b, y).view(np.int32) != known.view(np.int32)).sum())


def at_random() -> Pair:
    return numbers(significands(1 << 20, 1)), numbers(significands(1 << 20, 2))


def closest_to_middles() -> Pair:
    """a 2^n = b m - k for small k, which is as close as a quotient comes to a middle m / 2^n: of a given odd
    b and k there is one m, by the inverse of b modulo 2^n."""
    b = np.concatenate((significands(1 << 16, 3) | 1, (1 << 24) - 1 - 2 * np.arange(1 << 13)))
    inverse = b.copy()
    for _ in range(5):  # each step doubles the bits that are right, and the first three are
        inverse = (inverse * (2 - b * inverse)) & ((1 << 25) - 1)
    pairs = []
    for n in (24, 25):
        for k in (-5, -3, -1, 1, 3, 5):
            m = (k * inverse) & ((1 << n) - 1)
            m = np.where((n == 24) | (m < 1 << 24), m | (1 << 24), m)
            a, rest = np.divmod(b * m - k, 1 << n)
            fits = (rest == 0) & (a >= 1 << 23) & (a < 1 << 24) & (m % 2 == 1)
            pairs.append((a[fits], b[fits]))
    a, b = (numbers(np.concatenate(each)) for each in zip(*pairs, strict=True))
    assert len(a) > 1 << 18
    return a, b


def near_two() -> Pair:
    """All pairs of the largest significands, that of the proof among them, and with small ones."""
    ends = np.concatenate(((1 << 24) - 1 - np.arange(600), (1 << 23) + np.arange(200)))
    a, b = (each.ravel() for each in np.meshgrid(ends, ends))
    return numbers(a), numbers(b)


def of_any_size() -> Pair:
    """As far as `divides` goes, both signs, and zeros with theirs."""
    rng = np.random.default_rng(4)
    n = 1 << 19
    a = np.ldexp(numbers(significands(n, 5)), rng.integers(-100, 100, n)) * rng.choice([-1, 1], n)
    b = np.ldexp(numbers(significands(n, 6)), rng.integers(-20, 20, n))
    a[:1000], a[1000:2000] = 0.0, -0.0
    return a.astype(F32), b.astype(F32)


KINDS = {f.__name__: f for f in (at_random, closest_to_middles, near_two, of_any_size)}


@pytest.mark.parametrize("kind", KINDS)
def test_quotients_are_rounded_to_nearest(kind: str) -> None:
    assert wrong(*KINDS[kind]()) == 0


def test_quotients_closest_to_a_tie_need_every_bit() -> None:
    """Controls: without the correction, with a reciprocal that is an ulp off, and with fused multiply-adds
    that round twice, some are wrong."""
    a, b = closest_to_middles()
    y = F32(1.0) / b
    assert ((a * y) != a / b).mean() > 0.1
    assert wrong(a, b, np.nextafter(y, F32(0.0))) and wrong(a, b, np.nextafter(y, F32(1.0)))
    q = a * y
    twice = q - (q * b - a) * y
    assert (twice != a / b).any()


def test_reciprocals_are_rounded_to_nearest() -> None:
    """All numbers from 1 to 1.61, starting from an approximation with an error of up to one ulp."""
    end = int(1.61 * (1 << 23))
    for first in range(1 << 23, end, 1 << 20):
        b = numbers(np.arange(first, min(first + (1 << 20), end)))
        ours = np.asarray(PARTS["reciprocal"](array(b)))
        assert np.array_equal(ours, F32(1.0) / b)
        assert first > 1 << 23 or (np.asarray(approximate_reciprocal(b)) != F32(1.0) / b).mean() > 0.5


def divides(x: float, s: float = 1.0) -> bool:
    """Of 64 rows, one of which has such a number, and such a sum."""
    pieces, sums = array(np.ones((2, 64, 32), F32)), array(np.ones(64, F32))
    pieces[1, 50, 30], sums[50] = x, s
    with np.errstate(all="ignore"):
        return bool(PARTS["divides"]((pieces[0], pieces[1]), sums))


def test_operands_out_of_range_are_detected() -> None:
    for x in (1.0, -3.0, 0.0, -0.0, 2.0**-100, -(2.0**-100), 2.0**100, 3e-30):
        assert divides(x), x
    below = float(np.nextafter(F32(2.0**-100), F32(0.0)))
    for x in (below, -below, 1e-45, -1e-45, 1e-38, 1.3e30, -1.3e30, float("inf"), -float("inf"), 3e38):
        assert not divides(x), x
    for s in (2.0**-20, 2.0**20, 1.5):
        assert divides(1.0, s), s
    for s in (9e-7, 1.1e6, 1e-45, float("inf"), float("nan"), -1.0):
        assert not divides(1.0, s), s


def test_out_of_range_the_fast_quotient_would_be_wrong() -> None:
    """So the range is needed."""
    a, b = closest_to_middles()
    assert wrong(np.ldexp(a, -126).astype(F32), b) > 0
    assert wrong(np.full(1, np.inf, F32), np.ones(1, F32)) == 1
