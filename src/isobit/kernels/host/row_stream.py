"""The order of sums over rows of `isobit.kernels.triton.row_stream`, in numpy."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: Rows per group.
GROUP = 16


def over_rows(terms: Array) -> Array:
    """[N, ...] fp32 -> [...]: groups of 16 rows one after another from +0, groups by a tree of neighbours."""
    short = -len(terms) % GROUP if len(terms) else GROUP
    whole = np.concatenate([terms, np.zeros((short, *terms.shape[1:]), np.float32)])
    groups = whole.reshape(-1, GROUP, *terms.shape[1:])
    sums = np.zeros_like(groups[:, 0])
    for k in range(GROUP):
        sums = sums + groups[:, k]
    while len(sums) > 1:
        if len(sums) % 2:
            sums = np.concatenate([sums, np.zeros_like(sums[:1])])
        sums = sums[0::2] + sums[1::2]
    total: Array = sums[0]
    return total
