"""Sums over ranks with one order. Every rank has one fp32 tensor of a shape; the results are

    ordered_sum       on every rank the whole sum: slices of the flattened tensor go to the ranks
                      (all-to-all), each folds its own, adds the bias and rounds, and the 16-bit results are
                      gathered. Small tensors are gathered whole and folded on every rank, which is one
                      collective instead of two: same bits.
    ordered_scatter   on every rank its rows of the sum: for sequence parallelism

The order is the balanced tree over ranks, ((r0 + r1) + (r2 + r3)) + ...: the upper part of the tree of class
tree8, whose lower part each rank has folded itself.
"""

import torch
from torch import Tensor

from isobit.ranks.fold import fold
from isobit.ranks.group import Group

#: fp32 bytes up to which a tensor is gathered whole.
SMALL_BYTES = 1 << 16

#: Slices begin at multiples of this many elements.
_ALIGNED = 16


def ordered_sum(
    group: Group, partial: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """The sum of `partial` [*, N] fp32 over the ranks, plus bias [N], rounded once to out_dtype; on every
    rank."""
    flat, (N, count) = partial.reshape(-1), (partial.shape[-1], partial.numel())
    if count == 0:
        return partial.to(out_dtype)
    if group.size == 1:
        return fold(flat[None], bias, 0, N, out_dtype).view(partial.shape)
    if 4 * count <= SMALL_BYTES:
        return fold(group.all_gather(flat), bias, 0, N, out_dtype).view(partial.shape)
    each = -(-count // (group.size * _ALIGNED)) * _ALIGNED
    if each * group.size > count:
        flat = torch.nn.functional.pad(flat, (0, each * group.size - count))
    mine = group.all_to_all(flat.view(group.size, each))
    own = fold(mine, bias, group.rank * each, N, out_dtype)
    return group.all_gather(own).view(-1)[:count].view(partial.shape)


def ordered_scatter(
    group: Group, partial: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """This rank's rows of the sum of `partial` [rows, *, N] fp32, plus bias [N], rounded once to out_dtype.
    `rows` is a multiple of the number of ranks."""
    own = (partial.shape[0] // group.size, *partial.shape[1:])
    if partial.numel() == 0:
        return partial.new_empty(own, dtype=out_dtype)
    mine = group.all_to_all(partial.reshape(group.size, -1))
    return fold(mine, bias, 0, partial.shape[-1], out_dtype).view(own)


def gather_rows(group: Group, t: Tensor, dim: int = 0) -> Tensor:
    """The rows of all ranks, joined in the order of ranks along a dimension."""
    if group.size == 1:
        return t
    return torch.cat(group.all_gather(t).unbind(0), dim)
