"""Temperatures as kernels take them: factors, one for all rows or one per row."""

import math
from typing import NamedTuple

from torch import Tensor

LOG2E = math.log2(math.e)


class Scaling(NamedTuple):
    """Numbers for all rows, or [N] fp32 tensors instead if each row has its own temperature.

    Both are computed in fp64 and rounded once to fp32, the numbers when they are passed to a kernel. So a row
    has the same bits either way.
    """

    scales: Tensor | None
    inverses: Tensor | None
    scale: float  # log2(e) / temperature
    inverse: float  # 1 / temperature


def scaling(temperature: float | Tensor, N: int) -> Scaling:
    """From a number, or from a tensor of N elements with any strides."""
    if not isinstance(temperature, Tensor):
        return Scaling(None, None, LOG2E / temperature, 1.0 / temperature)
    each = temperature.reshape(N).double()
    return Scaling((LOG2E / each).float(), (1.0 / each).float(), 1.0, 1.0)
