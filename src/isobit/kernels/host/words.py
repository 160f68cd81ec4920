"""Host side of kernels that read rows in whole words, whatever the strides are."""

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

from torch import Tensor

from isobit.kernels.host.rows import row_strides


class Rows(NamedTuple):
    """How a kernel indexes tensors of one leading shape row by row, in words of `word` elements."""

    inner: int | None  # rows of the inner dimension; None if all rows have the same stride
    tensors: list[Any]
    strides: list[int]  # (outer, inner) of each, in words
    word: int  # elements: the alignment of every row of every tensor, and of the offsets in it


def rows_in_words(lead: Sequence[int], tensors: Sequence[Tensor], *offsets: int) -> Rows:
    """A word is 16 bytes, or the part of it to which all rows are aligned, and all these offsets inside a
    row. Kernels multiply strides by it, so the compiler knows the alignment: loads are as wide as possible,
    and another stride does not recompile."""
    inner, views, strides = row_strides(lead, tensors)
    count = 1
    for size in lead:
        count *= size
    pairs = list(zip(strides[::2], strides[1::2], strict=True))
    even = count <= inner or all(outer == inner * step for outer, step in pairs)
    word = gcd(16 // tensors[0].element_size(), *offsets, *strides)
    return Rows(None if even else inner, views, [s // word for s in strides], word)
