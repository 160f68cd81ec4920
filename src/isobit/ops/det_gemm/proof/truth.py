"""The truth of products: the formula, and the exact bits of the class on a sample of outputs. Bounds on the
difference of the two are in `isobit.spec.error_bounds`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from isobit.kernels.host.token_stream import SEGMENT
from isobit.numerics import canonical, cut, segments
from isobit.spec.proof import Sample

#: A product of two matrices in fp32, as a class defines it.
Product = Callable[[Tensor, Tensor], Tensor]

#: Rows and columns in a sample.
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
    """init + dy^T x over the unmasked rows."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x, dy = (t.reshape(-1, t.shape[-1]) for t in (x, dy))
    if mask is not None:
        live = mask.reshape(-1, 1) != 0
        x, dy = (torch.where(live, t, 0.0) for t in (x, dy))
    out = dy.to(wide).mT @ x.to(wide)
    return out if init is None else out + init.to(wide)


# The exact bits of the class


def places(total: int) -> Tensor:
    """Sampled indices of an axis: all of a short one; the ends of a long one and random indices between
    them."""
    if total <= SAMPLED:
        return torch.arange(total)
    inner = 1 + torch.randperm(total - 2, generator=torch.Generator().manual_seed(3))[: SAMPLED - 2]
    return torch.cat([torch.tensor([0, total - 1]), inner]).sort().values


def at(lead: Sequence[int], rows: Tensor, columns: Tensor) -> tuple[Tensor, ...]:
    """The index of these columns and these rows, which count over a leading shape."""
    return (*(i[:, None] for i in torch.unravel_index(rows, tuple(lead))), columns[None, :])


def product_sample(
    of_two: Product, lead: Sequence[int], a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Sample:
    """Some outputs of a [R, K] b [K, N] + bias by the model of a class, `chain` or `tree`; the rows have the
    leading shape `lead`."""
    rows, columns = places(a.shape[0]), places(b.shape[1])
    result = of_two(_of(a, 0, rows), _of(b, 1, columns))
    if bias is not None:
        result = canonical(result + _of(bias, 0, columns).float())
    return at(lead, rows, columns), rounded(result, out_dtype)


def segment_sample(
    a: Tensor, b: Tensor, lengths: Sequence[int], init: Tensor | None, dtype: torch.dtype
) -> Sample:
    """Some outputs of init + a [R, K] b [K, N] in seg16/512, over sequences of these lengths along k."""
    rows, columns = places(a.shape[0]), places(b.shape[1])
    start = None if init is None else _of(_of(init, 0, rows), 1, columns)
    result = segments(_of(a, 0, rows), _of(b, 1, columns), cut(lengths, SEGMENT), start)
    return (rows[:, None], columns[None, :]), rounded(result, dtype)


def rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """As the GPU does, which has one NaN."""
    exact = exact.to(dtype)
    if dtype != torch.float32:
        exact.view(torch.int16).masked_fill_(exact.isnan(), 0x7FFF)
    return exact


def _of(t: Tensor, axis: int, index: Tensor) -> Tensor:
    return t.index_select(axis, index.to(t.device)).cpu()
