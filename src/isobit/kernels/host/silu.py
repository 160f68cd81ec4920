"""silu and its derivative in numpy, operation by operation as in `isobit.kernels.triton.silu`.

numpy's exp has the same bits wherever an element is in an array. PyTorch's on a CPU has not: the last
elements of a tensor, behind the last whole vector, go another way."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_ONE = np.float32(1)


def sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        y: Array = _ONE / (_ONE + np.exp(-x))
    return y


def silu(x: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        y: Array = x / (_ONE + np.exp(-x))
    return y


def silu_slope(x: Array) -> Array:
    s = sigmoid(x)
    with np.errstate(over="ignore", invalid="ignore"):
        y: Array = s * (_ONE + x * (_ONE - s))
    return y
