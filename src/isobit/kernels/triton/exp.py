"""Exponentials in Triton, for a few numbers per row, from elementary operations: the same bits on every
device.

    exp(x)     = 2^n (1 + (r + r^2 P(r)))     with x = n ln2 + r, |r| <= ln2 / 2
    k3(d)      = d^2 P(d)                     where |d| < 1, else exp(d) - 1 - d
    expm1(d)   = d + d^2 P(d)                 where |d| < 1, else exp(d) - 1

with P(x) = 1/2! + x/3! + x^2/4! + ..., ten terms. In fp32, with every product and every sum rounded
separately: kernels that use them must be compiled with `enable_fp_fusion=False`. Errors are below 1, 4 and 2
units in the last place. exp(0) is exactly 1. k3 is not computed as a difference near 0, where d^2 / 2 is far
below the last place of d. Overflow gives inf, also for k3 of inf; NaN stays NaN.
"""

import triton
import triton.language as tl

from isobit.kernels.host.temperature import LOG2E

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def _series(x):
    """P(x)."""
    p = x * 2.505210838544172e-08 + 2.755731922398589e-07
    p = p * x + 2.7557319223985893e-06
    p = p * x + 2.48015873015873e-05
    p = p * x + 0.0001984126984126984
    p = p * x + 0.001388888888888889
    p = p * x + 0.008333333333333333
    p = p * x + 0.041666666666666664
    p = p * x + 0.16666666666666666
    return p * x + 0.5


@triton.jit
def _power_of_two(n):
    """2^n for whole -126 <= n <= 127, by its exponent."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exp(x):
    # Beyond these limits the result overflows or is 0, as it does at the limits.
    inside = tl.where(x < 130.0, x, 130.0)
    inside = tl.where(inside > -150.0, inside, -150.0)
    n = tl.floor(inside * _LOG2E + 0.5)
    # ln2 in two parts; n times the first is exact, and so is the difference.
    r = (inside - n * 0.693359375) + n * 2.12194440e-4
    e = 1.0 + (r + r * r * _series(r))
    whole = n.to(tl.int32)
    half = whole >> 1  # 2^n itself may be out of range although the result is not
    result = e * _power_of_two(half) * _power_of_two(whole - half)
    return tl.where(x == x, result, x)


@triton.jit
def difference(a, b):
    """a - b of two log-probabilities, and 0 where both are -inf: equal ones have the ratio 1."""
    return tl.where(a == b, 0.0, a - b)


@triton.jit
def k3_and_expm1(d):
    """(expm1(d) - d, expm1(d))."""
    near = tl.abs(d) < 1.0
    x = tl.where(near, d, 0.0)
    square = x * x * _series(x)
    far = exp(d) - 1.0
    k3 = far - tl.where(d == float("inf"), 0.0, d)
    return tl.where(near, square, k3), tl.where(near, x + square, far)
