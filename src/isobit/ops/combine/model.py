"""Class combine/1 in elementwise PyTorch: every addition of a sum is an addition of two tensors.

The order of PyTorch's own reductions depends on sizes; elementwise arithmetic is IEEE's whatever the size. So
this gives the bits of the class on any device. It is the backend for CPU tensors.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

#: Lanes of a dot product.
LANES = 512


def combine(**args: Any) -> Tensor:
    y, weights, rounding = args["y"], args["weights"], args["rounding"]
    terms = []
    for j, (row, here) in enumerate(_by_turn(args["place"], len(y))):
        term = _rows(y, row).float() * weights[:, j, None].float()
        if rounding == "hf":
            term = term.to(y.dtype).float()
        terms.append(torch.where(here[:, None], term, 0.0))
    return _added(terms, args["place"], y).to(y.dtype)


def combine_bwd(**args: Any) -> tuple[Tensor | None, Tensor | None]:
    """(dy, dweights); None for what is not wanted."""
    y, weights, place, dout = args["y"], args["weights"], args["place"], args["dout"].float()
    dy = torch.zeros(y.shape, dtype=y.dtype, device=y.device) if args["want_y"] else None
    dots = []
    for j, (row, here) in enumerate(_by_turn(place, len(y))):
        if dy is not None:
            dy[row[here]] = (dout * weights[:, j, None].float()).to(y.dtype)[here]
        if args["want_weights"]:
            dots.append(torch.where(here, dot(dout, _rows(y, row).float()), 0.0))
    if not args["want_weights"]:
        return dy, None
    dweights = torch.stack(dots, 1) if dots else weights.new_zeros(weights.shape)
    return dy, dweights.to(weights.dtype)


def spread(**args: Any) -> Tensor:
    x, place = args["x"], args["place"]
    R = place.numel() if args["rows"] is None else args["rows"]
    y = torch.zeros(R, x.shape[-1], dtype=x.dtype, device=x.device)
    for row, here in _by_turn(place, R):
        y[row[here]] = x[here]
    return y


def spread_bwd(**args: Any) -> Tensor:
    dy, place = args["dy"], args["place"]
    terms = [
        torch.where(here[:, None], _rows(dy, row).float(), 0.0) for row, here in _by_turn(place, len(dy))
    ]
    return _added(terms, place, dy).to(dy.dtype)


def _by_turn(place: Tensor, R: int) -> Iterator[tuple[Tensor, Tensor]]:
    """For each expert of the tokens in turn their rows, and where these exist."""
    for column in place.unbind(1):
        here = (column >= 0) & (column < R)
        yield torch.where(here, column, 0).long(), here


def _rows(y: Tensor, row: Tensor) -> Tensor:
    return y[row] if len(y) else y.new_zeros(len(row), y.shape[1])


def _added(terms: list[Tensor], place: Tensor, like: Tensor) -> Tensor:
    if not terms:
        return torch.zeros(len(place), like.shape[1], device=like.device)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def dot(a: Tensor, b: Tensor) -> Tensor:
    """By rows: lane i takes columns i, i + LANES, ... one after another; then neighbours are added."""
    terms = a * b
    total = torch.zeros(len(terms), LANES, device=terms.device)
    for part in terms.split(LANES, 1):
        total = total + torch.nn.functional.pad(part, (0, LANES - part.shape[1]))
    while total.shape[1] > 1:
        total = total[:, ::2] + total[:, 1::2]
    return total[:, 0]
