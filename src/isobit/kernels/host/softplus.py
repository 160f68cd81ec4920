"""softplus in numpy, operation by operation as in `isobit.kernels.triton.softplus`."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_ONE = np.float32(1)


def softplus(x: Array) -> Array:
    with np.errstate(all="ignore"):
        e = np.exp(x)
        u = _ONE + e
        near = np.log(u) * e / np.where(u == _ONE, _ONE, u - _ONE)
        y: Array = np.where(x > np.float32(20), x, np.where(u == _ONE, e, near))
    return y
