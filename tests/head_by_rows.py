"""A head whose rows have the same bits in any batch, on a CPU. There `linear_logp` promises none: how
PyTorch computes a product depends on its number of rows, and, on x86, what an element becomes on its place in
a tensor."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor

from isobit.ops.linear_logp import reference


def one_at_a_time(hidden: Tensor, *rest: Any) -> Iterator[slice]:
    return (slice(row, row + 1) for row in range(len(hidden)))


def head_by_rows() -> Any:
    """A context in which the reference computes one row after another."""
    return mock.patch.object(reference, "chunks", one_at_a_time)
