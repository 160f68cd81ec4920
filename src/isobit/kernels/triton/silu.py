"""silu and its derivative with the exp of the device's math library, which PyTorch's eager kernels call too.

Triton's own exp is faster and has other bits. Quotients are rounded to nearest; kernels that use these
functions are compiled without contraction. In the interpreter exp is numpy's.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.target_info import cuda_capability_geq

from isobit.kernels.triton.interpreter import INTERPRETED


@triton.jit
def exp(x):
    if INTERPRETED:
        y = tl.exp(x)  # there it is numpy's, and there is no library
    else:
        y = libdevice.exp(x)
    return y


@triton.jit
def quotient(a, d):
    """a / d rounded to nearest, for d = 1 + e^-x, and a = x or 1.

    `div_rn` inspects its operands and branches, so quotients are computed one after another, and each waits
    for its reciprocal. Here both are first scaled so that no step over- or underflows where d is finite, and
    then the steps are those that NVIDIA's compiler makes for such operands. Where a or d is infinite they
    give NaN, and where a is -0 they give 0: there a times the reciprocal is the quotient. Where a is
    subnormal d is 2, and nothing but the quotient is rounded."""
    if not INTERPRETED and cuda_capability_geq(8, 0):
        scale = tl.where(d > 18446744073709551616.0, 5.421010862427522e-20, 1.0)  # 2^64 and 2^-64
        a, d = a * scale, d * scale
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], tl.float32, True, 1)
        near = a * y
        y = tl.fma(tl.fma(-d, y, 1.0), y, y)
        q = a * y
        q = tl.fma(tl.fma(-d, q, a), y, q)
        q = tl.where(tl.abs(q) > 0.0, q, near)
    else:
        q = tl.div_rn(a, d)
    return q


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return quotient(tl.full(x.shape, 1.0, tl.float32), 1.0 + exp(-x))


@triton.jit
def silu(x):
    """x / (1 + e^-x)."""
    return quotient(x, 1.0 + exp(-x))


@triton.jit
def silu_slope(x):
    """s (1 + x (1 - s)) with s = sigmoid(x): the derivative of silu."""
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))
