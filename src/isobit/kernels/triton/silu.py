"""silu and its derivative with the exp of the device's math library, which PyTorch's eager kernels call too.

Triton's own exp is faster and has other bits. Quotients are rounded to nearest; kernels that use these
functions are compiled without contraction. In the interpreter exp is numpy's.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from isobit.kernels.triton.interpreter import INTERPRETED


@triton.jit
def exp(x):
    if INTERPRETED:
        y = tl.exp(x)  # there it is numpy's, and there is no library
    else:
        y = libdevice.exp(x)
    return y


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), 1.0 + exp(-x))


@triton.jit
def silu(x):
    """x / (1 + e^-x)."""
    return tl.div_rn(x, 1.0 + exp(-x))


@triton.jit
def silu_slope(x):
    """s (1 + x (1 - s)) with s = sigmoid(x): the derivative of silu."""
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))
