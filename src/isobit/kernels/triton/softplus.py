"""softplus with the exp and the log of the device's math library; in the interpreter numpy's."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from isobit.kernels.triton.interpreter import INTERPRETED
from isobit.kernels.triton.silu import exp


@triton.jit
def log(x):
    if INTERPRETED:
        y = tl.log(x)
    else:
        y = libdevice.log(x)
    return y


@triton.jit
def softplus(x):
    """log(1 + e^x), and x itself above 20, as PyTorch has it. With u = 1 + e rounded, log(u) e / (u - 1)
    makes up for what the rounding of u has lost."""
    e = exp(x)
    u = 1.0 + e
    near = tl.div_rn(log(u) * e, tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(x > 20.0, x, tl.where(u == 1.0, e, near))
