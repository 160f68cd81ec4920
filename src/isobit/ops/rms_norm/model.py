"""Class rms/1 in elementwise PyTorch: every addition of a sum is an addition of two tensors.

The order of PyTorch's own reductions depends on sizes. Elementwise additions, products and quotients are
IEEE arithmetic, rounded to nearest, whatever the size. Square roots in fp32 are not: on an x86 CPU PyTorch
takes those of MKL, of which some are a bit off. So they are computed in fp64. This gives the bits of the
class on any device. It is the backend for CPU tensors: a few passes over the rows, some rows at a time.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from isobit.ops.rms_norm.order import GROUP, log_lanes

#: Elements that are processed at a time.
CHUNK = 1 << 20


def rms_norm(**args: Any) -> tuple[Tensor | None, ...]:
    """(out, h, rstd); None for outputs that were not requested."""
    x, residual, dtype = _rows(args["x"]), args["residual"], args["x"].dtype
    N, D = x.shape
    w = _weight(args["weight"], args["offset"])
    residual = None if residual is None else _rows(residual)
    out = torch.empty(N, D, dtype=dtype, device=x.device)
    summed = None if residual is None else torch.empty_like(out)
    rstd = torch.empty(N, dtype=torch.float32, device=x.device)
    for some in _pieces(N, D):
        h = x[some].float()
        if residual is not None and summed is not None:
            summed[some] = h + residual[some].float()
            h = summed[some].float()
        rstd[some] = 1.0 / root(row_means(h * h) + args["eps"])
        y = h * rstd[some, None]
        if args["cast"] == "before":
            y = y.to(dtype).float()
        out[some] = y * w
    lead = args["x"].shape[:-1]
    return (
        out.view(*lead, D),
        None if summed is None else summed.view(*lead, D),
        rstd.view(lead) if args["return_rstd"] else None,
    )


def rms_norm_bwd(**args: Any) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dweight); None for what is not wanted."""
    h, dout, dsummed = (None if args[n] is None else _rows(args[n]) for n in ("h", "dout", "dsummed"))
    assert h is not None and dout is not None
    N, D = h.shape
    rstd, w = args["rstd"].reshape(N, 1), _weight(args["weight"], args["offset"])
    dx = torch.empty(N, D, dtype=h.dtype, device=h.device) if args["want_h"] else None
    groups = []
    for some in _pieces(N, D):
        y, g = h[some].float() * rstd[some], dout[some].float()
        if args["want_weight"]:
            groups.append(group_sums(g * y))
        if dx is not None:
            g = g * w
            own = rstd[some] * (g - y * row_means(g * y)[:, None])
            dx[some] = own if dsummed is None else own + dsummed[some].float()
    dweight = None
    if args["want_weight"]:
        empty = h.new_zeros(1, D, dtype=torch.float32)
        dweight = tree_of_rows(torch.cat([*groups, empty[N > 0 :]])).to(args["weight"].dtype)
    return None if dx is None else dx.view(args["h"].shape), dweight


# The order of sums


def row_sums(terms: Tensor) -> Tensor:
    """[N, D] -> [N]: each lane adds chunks of columns one after another from +0, then a tree of
    neighbours."""
    N, D = terms.shape
    lanes = 1 << log_lanes(D)
    total = terms.new_zeros(N, lanes)
    for first in range(0, D, lanes):
        part = terms[:, first : first + lanes]
        total[:, : part.shape[1]] += part
    while total.shape[1] > 1:
        total = total[:, 0::2] + total[:, 1::2]
    return total[:, 0]


def row_means(terms: Tensor) -> Tensor:
    """Sums of rows divided by D. On a GPU PyTorch divides by a Python number by multiplying with its inverse,
    so D is a tensor."""
    sums = row_sums(terms)
    return sums / sums.new_full((), terms.shape[1])


def root(x: Tensor) -> Tensor:
    """The square root in fp32, rounded to nearest. That of an fp32 number is never so close to the middle of
    two fp32 numbers that an error in the last bit of an fp64 root could move it to the other side."""
    return x.double().sqrt().float()


def group_sums(terms: Tensor) -> Tensor:
    """[N, D] -> [groups, D]: the rows of each group one after another from +0."""
    N, D = terms.shape
    count = -(-N // GROUP)
    total = terms.new_zeros(count, D)
    for k in range(GROUP):
        part = terms[k::GROUP]
        total[: len(part)] += part
    return total


def tree_of_rows(sums: Tensor) -> Tensor:
    """[groups, D] -> [D]: a tree of neighbours, padded with +0."""
    while len(sums) > 1:
        if len(sums) % 2:
            sums = torch.cat([sums, torch.zeros_like(sums[:1])])
        sums = sums[0::2] + sums[1::2]
    return sums[0]


# Views


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1]) if t.numel() else t.new_empty(t.shape[:-1].numel(), t.shape[-1])


def _weight(weight: Tensor, offset: float) -> Tensor:
    """An offset of 0 is not added: -0 would become +0."""
    return weight.float() + offset if offset else weight.float()


def _pieces(N: int, D: int) -> Iterator[slice]:
    """Slices of rows in order, whole groups at a time."""
    rows = max(CHUNK // D // GROUP, 1) * GROUP
    return (slice(first, first + rows) for first in range(0, N, rows))
