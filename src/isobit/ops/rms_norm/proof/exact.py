"""Class rms/1 in numpy, independent of every backend."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobit.spec.proof import Args, Sample

f32 = np.float32

Array = np.ndarray[Any, Any]


def neighbours(x: Array) -> Array:
    """Sums over the first axis by a tree of neighbours, padded with +0 to a power of two."""
    missing = (1 << (len(x) - 1).bit_length()) - len(x)
    x = np.concatenate([x, np.zeros((missing, *x.shape[1:]), f32)])
    while len(x) > 1:
        x = x[0::2] + x[1::2]
    return x[0]


def chain(x: Array) -> Array:
    """Sums over the first axis, one after another from +0."""
    total = np.zeros(x.shape[1:], f32)
    for part in x:
        total = total + part
    return total


def whole(x: Array, size: int) -> Array:
    """Padded with zeros along the first axis, up to a multiple."""
    return np.concatenate([x, np.zeros((-len(x) % size, *x.shape[1:]), f32)])


def row_sums(terms: Array) -> Array:
    """[N, D] -> [N]."""
    columns = whole(terms.T, 1024)
    return neighbours(chain(columns.reshape(-1, 1024, len(terms))))


def row_stream(terms: Array) -> Array:
    """[N, D] -> [D]."""
    rows = whole(terms, 16)
    return neighbours(chain(rows.reshape(-1, 16, terms.shape[1]).swapaxes(0, 1)))


def to(dtype: torch.dtype, x: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype)


def wide(t: Tensor) -> Array:
    return t.detach().cpu().reshape(-1, t.shape[-1]).float().numpy()


@np.errstate(all="ignore")
def exact(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Sample]:
    """The second half of the columns, which the control does not move; all of the gradients."""
    x, weight, residual = args["x"], args["weight"], args["residual"]
    dtype, D, offset = x.dtype, x.shape[-1], f32(args["offset"])
    w = wide(weight[None])[0]
    w = w + offset if offset else w
    h = wide(x) if residual is None else to(dtype, wide(x) + wide(residual)).float().numpy()
    rstd = (f32(1) / np.sqrt(row_sums(h * h) / f32(D) + f32(args["eps"])))[:, None]
    y = h * rstd
    narrow = to(dtype, y).float().numpy() if args["cast"] == "before" else y
    here = (Ellipsis, slice(D // 2, None))
    result: dict[str, Sample] = {"out": (here, to(dtype, narrow * w).view(x.shape)[here])}
    if residual is not None:
        result["summed"] = (here, to(dtype, h).view(x.shape)[here])
    if cotangents:
        dout = wide(cotangents[0])
        g = dout * w
        mean = (row_sums(g * y) / f32(D))[:, None]
        dx = rstd * (g - y * mean)
        if residual is not None:
            dx = dx + wide(cotangents[1])
        everywhere = (Ellipsis,)
        result["gradient:x"] = (everywhere, to(dtype, dx).view(x.shape))
        if residual is not None:
            result["gradient:residual"] = result["gradient:x"]
        result["gradient:weight"] = (everywhere, to(weight.dtype, row_stream(dout * y)))
    return result
