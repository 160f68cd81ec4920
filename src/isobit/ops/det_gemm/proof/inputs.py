"""Inputs that would expose a wrong product: factors of many kinds, with many strides.

Plain random numbers would hide a dropped tail, a misplaced rounding, and a sum that misses a few terms.
"""

import math

import torch
from torch import Tensor

from isobit.spec.proof import Case, InputOptions

#: Kinds of data for bit comparison only: results are not accurate, but bits must agree.
ADVERSARIAL = ("cancelling", "spread", "subnormal", "special")

LAYOUTS = ("apart", "padded", "offset", "transposed", "strided")


def factors(lines: int, K: int, kind: str, dtype: torch.dtype, gen: torch.Generator, side: int) -> Tensor:
    """[lines, K] factors whose products with factors of the same kind from the other side are hard to sum."""
    x = torch.randn(lines, K, generator=gen)
    if kind == "edge":
        _edge_lines(x, gen, side)
    elif kind == "cancelling":  # large pairs that cancel exactly and leave a small rest
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
    elif kind == "subnormal":  # factors and products below the least normal number, sums that underflow
        low, high = (-134, (-20, -60)[side]) if dtype == torch.bfloat16 else (-24, (12, -8)[side])
        x *= _powers(lines, K, low, high, gen)
    elif kind == "special":
        rare = 0.2 / max(K, 1)  # rare, so that many sums have none of them and test something else
        values = {float("inf"): rare, float("-inf"): rare, float("nan"): rare, -0.0: 0.05, 2.0**15: 0.01}
        for value, share in values.items():
            x[torch.rand(lines, K, generator=gen) < share] = value
        if dtype == torch.bfloat16:
            x[::5] *= 2.0**62  # products of two such lines overflow
    return x.to(dtype)


def addends(shape: tuple[int, ...], kind: str, narrow: torch.dtype, gen: torch.Generator) -> Tensor:
    """What is added to products of this kind, of similar size so that it affects their bits."""
    size = 1.0
    if kind == "subnormal":
        size = 2.0**-130 if narrow == torch.bfloat16 else 2.0**-36
    return size * torch.randn(shape, generator=gen)


def _edge_lines(x: Tensor, gen: torch.Generator, side: int) -> None:
    """The kinds alternate over lines, so that the two sides meet in every combination."""
    lines, K = x.shape
    half = K // 2
    for i in range(lines):
        kind = i % (8 if side == 0 else 5)
        if kind == 1:  # most of the sum in the last k: exposes a dropped tail
            x[i, -1:] = 16.0
        elif kind == 2:  # one sign: exposes the bias of truncation
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
    """[*lines, K] of the case's kind. Random ones are drawn on the device: heavy cases have billions of
    elements."""
    total = math.prod(lines)
    if case.data in ("random", "constant"):
        x = torch.empty(total, K, dtype=case.dtype, device=device)
        if case.data == "random":
            x.normal_(generator=torch.Generator(device).manual_seed(options.seed + side))
        else:
            x.fill_(options.constant)
        return x.view(*lines, K)
    gen = torch.Generator().manual_seed(options.seed + side)
    return factors(total, K, case.data, case.dtype, gen, side).to(device).view(*lines, K)
