"""Where Triton's CPU interpreter computes something else than a GPU, and what kernels do about it there.

`INTERPRETED` is set when kernels are decorated, because Triton decides at that moment too. It is a constant,
so code for the interpreter is not compiled for a GPU.
"""

import triton
import triton.language as tl

from isobit.frame.device import kernels_are_interpreted

INTERPRETED = tl.constexpr(kernels_are_interpreted())


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """fp32 x as DTYPE, rounded to nearest even. The interpreter truncates to bf16 (Triton 3.6 to 3.9), so
    round here first: then it truncates only zeros."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def narrow(x, ptr):
    """fp32 x, converted for a store at ptr."""
    return rounded(x, ptr.dtype.element_ty)
