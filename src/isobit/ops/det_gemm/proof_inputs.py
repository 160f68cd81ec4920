"""Inputs that would expose a wrong product: factors of many kinds, under many strides.

Plain random numbers hide a dropped tail, a rounding in the wrong place and a sum that is merely short.
"""

import math
from typing import Any

import torch
from torch import Tensor

from isobit.check.proof import Args, Case, InputOptions

#: Kinds of data that are there for bits: nothing in them is accurate, everything must still agree.
ADVERSARIAL = ("cancelling", "spread", "subnormal", "special")

LAYOUTS = ("apart", "padded", "offset", "transposed", "strided")


def factors(lines: int, K: int, kind: str, dtype: torch.dtype, gen: torch.Generator, side: int) -> Tensor:
    """[lines, K] factors whose products with others of the same kind, and the other side, are hard to add."""
    x = torch.randn(lines, K, generator=gen)
    if kind == "edge":
        _edge_lines(x, gen, side)
    elif kind == "cancelling":  # large pairs that cancel exactly, and what is left is small
        half = K // 2
        if side == 0:
            x[:, half : 2 * half] = -x[:, :half]
        else:
            x[:, half : 2 * half] = x[:, :half]
        x[:, :half] += 2.0**-9 * torch.randn(lines, half, generator=gen)
        x *= _powers(lines, K, 0, 6, gen)[:, :1]
    elif kind == "spread":
        low, high = (-60, 60) if dtype == torch.bfloat16 else (-14, 10)
        x *= _powers(lines, K, low, high, gen)
    elif kind == "subnormal":  # factors and products below the least normal number, and sums that underflow
        low, high = (-134, (-20, -60)[side]) if dtype == torch.bfloat16 else (-24, (12, -8)[side])
        x *= _powers(lines, K, low, high, gen)
    elif kind == "special":
        rare = 0.2 / max(K, 1)  # so that many sums have none of them, or they could show nothing else
        values = {float("inf"): rare, float("-inf"): rare, float("nan"): rare, -0.0: 0.05, 2.0**15: 0.01}
        for value, share in values.items():
            x[torch.rand(lines, K, generator=gen) < share] = value
        if dtype == torch.bfloat16:
            x[::5] *= 2.0**62  # products of two such lines overflow
    return x.to(dtype)


def addends(shape: tuple[int, ...], kind: str, narrow: torch.dtype, gen: torch.Generator) -> Tensor:
    """What is added to products of this kind: of their size, or their bits would not show."""
    size = 1.0
    if kind == "subnormal":
        size = 2.0**-130 if narrow == torch.bfloat16 else 2.0**-36
    return size * torch.randn(shape, generator=gen)


def _edge_lines(x: Tensor, gen: torch.Generator, side: int) -> None:
    """By turns. The kinds of the two sides meet in every combination."""
    lines, K = x.shape
    half = K // 2
    for i in range(lines):
        kind = i % (8 if side == 0 else 5)
        if kind == 1:  # most of the sum in the last k: a dropped tail shows
            x[i, -1:] = 16.0
        elif kind == 2:  # one sign: truncation has a bias
            x[i].abs_()
        elif kind == 3:
            x[i] *= _powers(1, K, -10, 2, gen)[0]
        elif kind == 4:  # cancels exactly with the same kind on the other side
            x[i, half : 2 * half] = x[i, :half] if side else -x[i, :half]
        elif kind == 5:
            x[i] *= 2.0**-10
        elif kind == 6:
            x[i] *= 2.0**4
        elif kind == 7:
            x[i] = 0.0


def _powers(lines: int, K: int, low: int, high: int, gen: torch.Generator) -> Tensor:
    return torch.exp2(torch.randint(low, high + 1, (lines, K), generator=gen).double()).float()


def matrix(
    lines: tuple[int, ...], K: int, case: Case, device: torch.device, options: InputOptions, side: int
) -> Tensor:
    """[*lines, K] of the case's kind. Random ones are drawn where they live: heavy cases hold billions."""
    total = math.prod(lines)
    if case.data in ("random", "constant"):
        x = torch.empty(total, K, dtype=case.dtype, device=device).fill_(options.constant)
        if case.data == "random":
            x.normal_(generator=torch.Generator(device).manual_seed(options.seed + side))
        return x.view(*lines, K)
    gen = torch.Generator().manual_seed(options.seed + side)
    return factors(total, K, case.data, case.dtype, gen, side).to(device).view(*lines, K)


def lay_out(t: Tensor, layout: str) -> Tensor:
    """The same values under other strides and alignments; what lies between them is NaN."""
    *lead, R, C = t.shape
    if layout == "dense":
        return t
    if layout == "apart":  # rows farther apart, whole 16-byte words
        view = t.new_full((*lead, R, C + 16), float("nan"))[..., :C]
    elif layout == "padded":  # rows farther apart, at every alignment
        view = t.new_full((*lead, R, C + 5), float("nan"))[..., :C]
    elif layout == "offset":  # the tensor itself starts between two 16-byte words
        view = t.new_full((*lead, R, C + 3), float("nan"))[..., 1 : C + 1]
    elif layout == "transposed":
        view = t.new_full((*lead, C, R), float("nan")).mT
    else:  # "strided": no dimension is contiguous
        view = t.new_full((*lead, R, C, 2), float("nan"))[..., 0]
    view.copy_(t)
    return view


def lay_out_some(args: Args, names: tuple[str, ...], layout: str) -> Args:
    return args | {name: lay_out(args[name], layout) for name in names if args.get(name) is not None}


def rows_of_nan(like: Tensor, rows: int) -> Tensor:
    """NaN and infinities by turns, in the place of rows of a [*, rows, K] tensor."""
    found = like.new_full((*like.shape[:-2], rows, like.shape[-1]), float("nan"))
    found[..., 1::3, :] = float("inf")
    found[..., 2::3, :] = float("-inf")
    return found


def in_other_dtype(t: Tensor) -> Tensor:
    """In the 16-bit dtype that it does not have."""
    return t.to(torch.float16 if t.dtype == torch.bfloat16 else torch.bfloat16)


def in_other_groups(t: Tensor, axis: int) -> Tensor:
    """Groups of 16 along an axis in another order: the last comes first."""
    groups = torch.arange(t.shape[axis], device=t.device).split(16)
    return t.index_select(axis, torch.cat(groups[::-1]))


def shifted(t: Tensor, axis: int) -> Tensor:
    """Eight zeros in front along an axis: the same sum, and every group begins elsewhere."""
    shape: list[Any] = list(t.shape)
    shape[axis] = 8
    return torch.cat([t.new_zeros(shape), t], axis)
