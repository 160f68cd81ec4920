"""Matrix products and fused multiply-adds in a stated order, on a GPU and in Triton's CPU interpreter.

The compiler must not choose any order of additions. On a GPU a product is a chain of the hardware's matrix
steps over ascending k. In the interpreter it is the chain of `isobit.numerics.cpu_steps`: numpy's own product
would use an order that depends on the shapes.
"""

import numpy as np
import triton
import triton.language as tl

from isobit.kernels.triton.interpreter import INTERPRETED
from isobit.numerics import cpu_steps

if INTERPRETED.value:

    def product(left, right, acc):
        """On the interpreter's numpy arrays."""
        acc = acc + 0.0  # a copy
        a, b = left.to(tl.float32).handle.data, right.to(tl.float32).handle.data
        acc.handle.data[...] = cpu_steps.product(a, b, acc.handle.data)
        return acc

    def fma(x, y, z):
        """In the interpreter, whose own `tl.fma` rounds twice up to Triton 3.8."""
        result = x * y + z  # a tensor of the right shape
        factor = np.float32(y) if isinstance(y, float) else y.handle.data
        result.handle.data[...] = cpu_steps.fused(x.handle.data, factor, z.handle.data)
        return result

else:

    @triton.jit
    def product(left, right, acc):
        """left [m, k] times right [k, n], added to acc by matrix steps over ascending k."""
        return tl.dot(left, right, acc, input_precision="ieee")

    @triton.jit
    def fma(x, y, z):
        """x y + z with one rounding."""
        return tl.fma(x, y, z)
