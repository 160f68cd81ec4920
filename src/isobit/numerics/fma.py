"""A fused multiply-add of fp32 numbers in numpy, for models of a GPU's arithmetic."""

from typing import Any

import numpy as np

Array = np.ndarray


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
