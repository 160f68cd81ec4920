"""What a temperature is to a kernel: numbers to multiply by, one for all rows or one for each."""

import math
from typing import NamedTuple

from torch import Tensor

LOG2E = math.log2(math.e)


class Scaling(NamedTuple):
    """Numbers for all rows, and [N] fp32 tensors in their place where rows have temperatures of their own.

    Both are computed in fp64 and rounded once to fp32, the numbers when they are handed to a kernel. So a row
    has the same bits either way.
    """

    scales: Tensor | None
    inverses: Tensor | None
    scale: float  # log2(e) / temperature
    inverse: float  # 1 / temperature


def scaling(temperature: float | Tensor, N: int) -> Scaling:
    """Of a number, or of a tensor of N elements with any strides."""
    if not isinstance(temperature, Tensor):
        return Scaling(None, None, LOG2E / temperature, 1.0 / temperature)
    each = temperature.reshape(N).double()
    return Scaling((LOG2E / each).float(), (1.0 / each).float(), 1.0, 1.0)
