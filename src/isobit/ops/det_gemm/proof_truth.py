"""What products should be: the formula, how far the class may be from it, and the class's own bits.

One step of chain16 takes 16 products and the running sum P. Each of the 17 terms is cut to 25 bits below the
largest exponent among them, which loses less than 2^-25 of the largest term, and the sum is cut to fp32,
which loses less than 2^-23 of it. With S the sum of the sizes of the 16 products, a step's error is below

    2^-23 * (17/4 * max(|P|, S) + |P after the step|)

and a chain's is the sum of that over its steps: `chain_error`, in units of 2^-23. It is a bound of the class,
not a tolerance: it follows each output's own partial sums, it grows with K because cutting does, and nothing
in it was fitted. A sum in segments adds its segments' errors and half a unit of every partial sum.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from isobit.check.proof import Sample
from isobit.numerics import canonical, chain, cut, segments

SEGMENT = 512
GROUP = 16
UNIT = 2.0**-23

#: The bound is taken along the exact partial sums; those of the chain differ from them by the bound itself.
SECOND_ORDER = 1.01

#: Products are aligned no lower than 2^-133: what a step may lose at least, in units.
LEAST = 17 / 4 * 2.0**-133

#: Rows and columns of a sample.
SAMPLED = 32


# The formula


def product(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """a b + bias with one rounding at the end; at full precision for fp64 factors."""
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    out = a.to(wide) @ b.to(wide)
    if bias is not None:
        out = out + bias.to(wide)
    return out if wide == torch.float64 else out.to(out_dtype or a.dtype)


def token_sum(x: Tensor, dy: Tensor, mask: Tensor | None, init: Tensor | None) -> Tensor:
    """init + dy^T x over the rows that count."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x, dy = (t.reshape(-1, t.shape[-1]) for t in (x, dy))
    if mask is not None:
        live = mask.reshape(-1, 1) != 0
        x, dy = (torch.where(live, t, 0.0) for t in (x, dy))
    out = dy.to(wide).mT @ x.to(wide)
    return out if init is None else out + init.to(wide)


# The error of the class


def chain_error(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(bound on the error of a b in chain16 in units of 2^-23, a b) for fp64 a [*, M, K] and b [*, K, N]."""
    total = a.new_zeros(*a.shape[:-1], b.shape[-1])
    error = torch.zeros_like(total)
    for a_k, b_k in zip(a.split(GROUP, -1), b.split(GROUP, -2), strict=True):
        sizes = a_k.abs() @ b_k.abs()
        error += 17 / 4 * torch.maximum(total.abs(), sizes) + LEAST
        total += a_k @ b_k
        error += total.abs()
    return SECOND_ORDER * error, total


def segment_error(a: Tensor, b: Tensor, bounds: Sequence[tuple[int, int]], init: Tensor | None) -> Tensor:
    """The same for init + a b in seg16/512, with these segments of k."""
    total = a.new_zeros(*a.shape[:-1], b.shape[-1]) if init is None else init.clone()
    error = torch.zeros_like(total)
    for first, end in bounds:
        one, part = chain_error(a[..., first:end], b[..., first:end, :])
        total += part
        error += one + SECOND_ORDER / 2 * total.abs()
    return error


def rounded(error: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The bound after a rounding to a 16-bit dtype. Say a sum is off by d and rounds to the other of two
    neighbours than the truth does: then it is at most 2d farther from the truth than that one."""
    return error if dtype == torch.float32 else 2 * error


def rounded_factor(dy: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """What rounding a cotangent to the operands' dtype may add to a product with it, in units."""
    return torch.finfo(dtype).eps / 2 / UNIT * (dy.abs() @ other.abs())


def narrow_dtype(*factors: Tensor) -> torch.dtype:
    """The 16-bit dtype that these fp64 factors came from."""
    held = all(bool(((t.bfloat16().double() == t) | t.isnan()).all()) for t in factors)
    return torch.bfloat16 if held else torch.float16


# The class's own bits


def places(total: int) -> Tensor:
    """A sample of an axis: all of a short one, of a long one its ends and random places between them."""
    if total <= SAMPLED:
        return torch.arange(total)
    inner = 1 + torch.randperm(total - 2, generator=torch.Generator().manual_seed(3))[: SAMPLED - 2]
    return torch.cat([torch.tensor([0, total - 1]), inner]).sort().values


def at(lead: Sequence[int], rows: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
    """The index of these rows, counted over a leading shape, and columns."""
    return (*(i[:, None] for i in torch.unravel_index(rows, tuple(lead))), columns[None, :])


def chain_sample(
    lead: Sequence[int], a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Sample:
    """Some outputs of a [R, K] b [K, N] + bias by the model; the rows have the leading shape `lead`."""
    rows, columns = places(a.shape[0]), places(b.shape[1])
    found = chain(_of(a, 0, rows), _of(b, 1, columns))
    if bias is not None:
        found = canonical(found + _of(bias, 0, columns).float())
    found = found.to(out_dtype)
    if out_dtype != torch.float32:
        found.view(torch.int16).masked_fill_(found.isnan(), 0x7FFF)  # as the GPU rounds NaN
    return at(lead, rows, columns), found


def segment_sample(
    a: Tensor, b: Tensor, lengths: Sequence[int], init: Tensor | None, dtype: torch.dtype
) -> Sample:
    """Some outputs of init + a [R, K] b [K, N] in seg16/512, over sequences of these lengths along k."""
    rows, columns = places(a.shape[0]), places(b.shape[1])
    start = None if init is None else _of(_of(init, 0, rows), 1, columns)
    found = segments(_of(a, 0, rows), _of(b, 1, columns), cut(lengths, SEGMENT), start)
    # A gradient is rounded by PyTorch, which has a NaN of its own on each device.
    return (rows[:, None], columns[None, :]), found.to(a.device).to(dtype).cpu()


def _of(t: Tensor, axis: int, index: Tensor) -> Tensor:
    return t.index_select(axis, index.to(t.device)).cpu()
