"""Host side of row-wise kernels: how tensors with any leading shape are indexed row by row."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def row_strides(lead: Sequence[int], tensors: Sequence[Tensor | None]) -> tuple[int, list[Any], list[int]]:
    """Index tensors that share the leading shape `lead` as [outer, inner] rows.

    Returns `inner`, the tensors, and for each its (outer, inner) strides, flattened into one list.
    One or two leading dimensions never copy, whatever their strides (`logits[:, :-1]` is read in place).
    With three or more, a tensor is copied only if no split into two dimensions fits the strides of all.

    A stride that is never used is set to 0: its divisibility is part of a compiled kernel, and a stride that
    is a multiple of N would recompile for another N.
    """
    rank = len(lead)
    if rank == 2:
        pairs = [t if t is None else (t.stride(0) if lead[0] > 1 else 0, t.stride(1)) for t in tensors]
        return lead[1], list(tensors), _flat(pairs)
    if rank == 1:
        return lead[0], list(tensors), _flat([t if t is None else (0, t.stride(0)) for t in tensors])
    if rank == 0:
        return 1, list(tensors), [0] * (2 * len(tensors))
    for cut in range(rank, -1, -1):
        pairs = [t if t is None else _two_strides(lead, t.stride(), cut) for t in tensors]
        if all(pair is not None or t is None for pair, t in zip(pairs, tensors, strict=True)):
            inner = 1
            for size in lead[cut:]:
                inner *= size
            return inner, list(tensors), _flat(pairs)
    return row_strides(lead, [t if t is None else t.contiguous() for t in tensors])


def walkable(lead: Sequence[int], t: Tensor | None) -> Tensor | None:
    """Numbers per row, unchanged if every split fits them, else a copy. They are small compared with logits,
    and must not cause those to be copied."""
    if t is None or len(lead) <= 2 or t.is_contiguous() or not any(t.stride()):
        return t
    return t.contiguous()


def _two_strides(lead: Sequence[int], strides: Sequence[int], cut: int) -> tuple[int, int] | None:
    outer = _one_stride(lead[:cut], strides[:cut])
    inner = _one_stride(lead[cut:], strides[cut : len(lead)])
    return None if outer is None or inner is None else (outer, inner)


def _one_stride(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of these dimensions flattened into one, None if there is none."""
    step, expected = 0, None
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if expected is None:
            step = stride
        elif stride != expected:
            return None
        expected = stride * size
    return step


def _flat(pairs: Sequence[Sequence[int] | None]) -> list[int]:
    return [s for pair in pairs for s in (pair or (0, 0))]
