"""Inputs that several proofs use, and variations of them: hard rows, other layouts of the same values, rows
that must not matter, other orders of the same sum."""

from collections.abc import Iterable

import torch
from torch import Tensor

from isobit.spec.proof import Args

NAN, INF = float("nan"), float("inf")


# Hard rows


def edge_rows(N: int, V: int, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """Kinds of rows that plain randn never produces, alternating: outliers in the last column, large shifts,
    one dominant logit, ties, banned tokens (-inf), a wide spread. The chosen token is at the critical
    place."""
    z = torch.randn(N, V, generator=gen)
    ids = torch.randint(0, V, (N,), generator=gen)
    last = V - 1
    for i in range(N):
        kind = i % 10
        if kind == 1:  # all probability in the last column: exposes a dropped tail
            z[i, last] = 20.0
            ids[i] = last
        elif kind == 2:  # exp overflows without max-subtraction
            z[i] += 200.0
        elif kind == 3:  # exp underflows without it
            z[i] -= 200.0
        elif kind == 4:  # one dominant logit: its logp is tiny
            z[i, ids[i]] += 60.0
        elif kind == 5:  # a common shift must not cost accuracy
            z[i] += 1e4
        elif kind == 6:
            z[i] -= 1e4
        elif kind == 7:  # ties
            z[i] = 0.5
            ids[i] = last
        elif kind == 8:  # banned tokens
            banned = torch.rand(V, generator=gen) < 0.3
            banned[ids[i]] = False
            z[i, banned] = -INF
        elif kind == 9:
            z[i] *= 30.0
    return z, ids


# The same values in other places


def laid_out(t: Tensor, layout: str) -> Tensor:
    """The same values with other strides and alignments; the gaps between them are NaN, or 1."""
    *lead, C = t.shape
    other = NAN if t.is_floating_point() else 1
    if layout == "dense":
        return t
    if layout == "shifted":  # t[:, :-1] of a tensor with one more row in each
        view = t.new_full((*lead[:-1], lead[-1] + 1, C), other)[..., :-1, :]
    elif layout == "apart":  # larger row stride, whole 16-byte words
        view = t.new_full((*lead, C + 16), other)[..., :C]
    elif layout == "padded":  # larger row stride, at every alignment
        view = t.new_full((*lead, C + 5), other)[..., :C]
    elif layout == "offset":  # and the tensor itself starts between two 16-byte words
        view = t.new_full((*lead, C + 3), other)[..., 1 : C + 1]
    elif layout == "inside":  # it starts between two words, without gaps
        view = t.new_full((t.numel() + 1,), other)[1:].view(t.shape)
    elif layout == "transposed":
        view = t.new_full((*lead[:-1], C, lead[-1]), other).mT
    elif layout == "strided":  # no dimension is contiguous
        view = t.new_full((*t.shape, 2), other)[..., 0]
    else:
        raise ValueError(f"unknown layout {layout!r}")
    return view.copy_(t)


def every_other(args: Args, *more: str) -> Args:
    """Arguments with one number per row, with a stride of 2."""
    return laid_out_some(args, ("token_ids", "mask", "temperature", *more), "strided")


def incoming(gradient: Tensor, layout: str) -> Tensor:
    """A gradient as autograd may hand it on: transposed (the column of a matrix, if it has one dimension), or
    sliced out of a larger tensor. What lies between is NaN."""
    if gradient.ndim == 0:
        return gradient
    if gradient.ndim == 1:
        columns, first = (3, 1) if layout == "transposed" else (2, 0)
        return gradient.new_full((len(gradient), columns), NAN)[:, first].copy_(gradient)
    return laid_out(gradient, "transposed" if layout == "transposed" else "offset")


def laid_out_some(args: Args, names: Iterable[str], layout: str) -> Args:
    given = (name for name in names if isinstance(args.get(name), Tensor))
    return args | {name: laid_out(args[name], layout) for name in given}


# Rows that must not matter


def rows_of_nan(like: Tensor, rows: int) -> Tensor:
    """Rows of NaN and rows of infinities, alternating, like rows of a [*, rows, K] tensor."""
    result = like.new_full((*like.shape[:-2], rows, like.shape[-1]), NAN)
    result[..., 1::3, :] = INF
    result[..., 2::3, :] = -INF
    return result


def token_padding(args: Args, rows: int, ignore_index: int) -> Args:
    """For ops that pick tokens, the arguments by rows: ids that do not count, and values that must not be
    read."""
    mask, temperature = args["mask"], args["temperature"]
    result = {"token_ids": args["token_ids"].new_full((rows,), ignore_index)}
    result["mask"] = None if mask is None else mask.new_zeros(rows)
    if isinstance(temperature, Tensor):
        result["temperature"] = temperature.new_full((rows,), NAN)
    return result


#: The option `mask` of a case without a mask, in which some rows are ignored by their id. A function may take
#: `ignore_index` and no mask.
BY_IDS = "ids"


def mask_of(wanted: torch.dtype | float | str, N: int, ids: Tensor, ignore_index: int) -> Tensor | None:
    """A mask of this dtype in which every fourth row is masked; some of the others are then ignored by
    their id, in place. Or a random mask with this fraction of live rows. Or no mask: every third row is
    ignored by its id."""
    index = torch.arange(N)
    if wanted == BY_IDS:
        ids[index % 3 == 1] = ignore_index
        return None
    if isinstance(wanted, torch.dtype):
        ids[index % 8 == 6] = ignore_index
        return mask_in(wanted, index % 4 != 3)
    assert not isinstance(wanted, str)
    return random_mask(wanted, N)


def mask_in(dtype: torch.dtype, live: Tensor) -> Tensor:
    """A mask of this dtype. What counts is not 0, but seldom 1: it may be negative, or have a low byte of 0,
    as far as the dtype has such numbers."""
    if dtype == torch.bool:
        return live
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    some = (value for value in (256, 2, -1, 127, 1 << 32) if least <= value <= most)
    values = torch.tensor(list(some), device=live.device)
    turn = live.flatten().cumsum(0).view(live.shape) % len(values)
    return torch.where(live, values[turn], 0).to(dtype)


def random_mask(fraction: float, N: int) -> Tensor:
    """A mask in which about this fraction of the rows counts."""
    return torch.rand(N, generator=torch.Generator().manual_seed(17)) < fraction


# The same sum in another order


def in_other_groups(t: Tensor, axis: int) -> Tensor:
    """Groups of 16 along an axis in another order: the first comes last. Not from the end to the beginning:
    that would be the same tree of sums, with its branches exchanged."""
    groups = torch.arange(t.shape[axis], device=t.device).split(16)
    return t.index_select(axis, torch.cat([*groups[1:], groups[0]]))


def after_zeros(t: Tensor, axis: int) -> Tensor:
    """Eight zeros in front along an axis: the same sum, but every group begins elsewhere. And 56 behind, so
    that a kernel which reads multiples of 64 can serve it."""

    def zeros(count: int) -> Tensor:
        shape = list(t.shape)
        shape[axis] = count
        return t.new_zeros(shape)

    return torch.cat([zeros(8), t, zeros(56)], axis)


def rolled_ids(ids: Tensor, V: int) -> Tensor:
    """Every token id shifted by one column; invalid ids stay."""
    return torch.where((ids >= 0) & (ids < V), (ids + 1) % V, ids)


# Calls that must be refused


def in_other_dtype(t: Tensor) -> Tensor:
    """In the other 16-bit dtype."""
    return t.to(torch.float16 if t.dtype == torch.bfloat16 else torch.bfloat16)


def one_bad_id(args: Args, V: int) -> tuple[Args, int]:
    """One live row gets a token id one past the end; also returns which row."""
    ids = args["token_ids"].clone()
    row = min(1, ids.numel() - 1)
    ids.view(-1)[row] = V
    return args | {"token_ids": ids}, row
