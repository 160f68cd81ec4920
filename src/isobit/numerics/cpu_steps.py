"""Steps of a chain and fused multiply-adds on a CPU, in fp32: what classes that end in `/cpu` compute with.

A step adds its 16 products in ascending order and then their sum to the accumulator. As on a tensor core no
result is -0, so a step of zeros changes nothing. Everything is elementwise: neither the number of rows or
columns nor numpy's own product, whose order depends on shapes, can change a bit.
"""

from typing import Any

import numpy as np
import torch

Array = np.ndarray

#: Products that are added to an accumulator in one step.
GROUP = 16


def product(left: Array, right: Array, acc: Array, dtype: torch.dtype | None = None) -> Array:
    """left [..., m, k] times right [..., k, n], added to acc [..., m, n] by steps over ascending k. `dtype`
    is that of the factors, which fp32 holds exactly."""
    acc = acc.copy()
    for first in range(0, left.shape[-1], GROUP):
        step = left[..., first, None] * right[..., first, None, :]
        for i in range(first + 1, min(first + GROUP, left.shape[-1])):
            step += left[..., i, None] * right[..., i, None, :]
        acc += step + np.float32(0.0)
    return acc


def fused(x: Array, y: Any, z: Array) -> Array:
    """x y + z in fp32 with one rounding. The product is exact in fp64. The sum is rounded to odd in fp64, so
    that the final rounding to fp32 is correct (no double rounding)."""
    product, z = np.broadcast_arrays(x.astype(np.float64) * y, np.asarray(z, np.float64))
    total = product + z
    part = total - product
    lost = (product - (total - part)) + (z - part)
    odd = (total.view(np.int64) & 1).astype(bool)
    toward = np.where((lost > 0) == (total > 0), 1, -1)
    fix = (lost != 0) & ~odd & np.isfinite(total)
    return (total.view(np.int64) + np.where(fix, toward, 0)).view(np.float64).astype(np.float32)
