"""How many rows a chunk has, and the memory that chunks share: sizes, on the host.

    memory      [queued | rows of the chunk | 64 of zeros] x [columns]     probabilities, then d-logits
    queue       [queued | rows of the chunk | 64 of zeros] x [D]           hidden states of the same rows
    queue_rows  [queued | rows of the chunk]                               which rows they are

Rows of a chunk are rounded up to slots of 128, columns to tiles of 256. Where a chunk's probabilities have no
room, its slabs of d-logits lie behind the queue's d-logits of all columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from isobit.blocks.stream import BLOCK, SEGMENT
from isobit.ops.linear_logp.op import KEPT_COLUMNS, KEPT_ROWS

#: Bytes for the probabilities of a chunk and what lies beside them, unless the caller says otherwise.
WORKSPACE_BYTES = 1331 << 20

#: A chunk saves one product of its rows, and costs one read and one write of dweight in fp32, 8 V D bytes:
#: as long as 740 rows of a product take at the rates of an H200 (4.26 TB/s, 787 TFLOP/s), and d-logits are
#: written once more. Where fewer rows have room, logits are computed twice.
LEAST_ROWS = 1024


def capacity(backend: str, V: int, D: int, dtype: torch.dtype, workspace_bytes: int) -> int | None:
    """Rows of a chunk whose probabilities have room; None where nothing is kept, and all rows are one chunk.
    The batch has no say in it: whether a row's probabilities are kept shows in the bits of its gradient."""
    if backend == "reference":
        return max(1, workspace_bytes // (V * _wide(dtype).itemsize))
    if backend != "hopper":
        return None
    beside = bytes_for(0, V, D)
    a_row = bytes_for(1, V, D) - beside
    rows = (workspace_bytes - beside) // a_row // KEPT_ROWS * KEPT_ROWS
    return rows if rows >= LEAST_ROWS else None


def bytes_for(rows: int, V: int, D: int) -> int:
    """Memory of a chunk of so many rows on Hopper: the queue and zeros; and for every row probabilities, what
    they are relative to, hidden states, sums of dhidden, hidden states once more where logits are computed
    again, sums of splits and tables."""
    columns = columns_of(V)
    a_row = 2 * columns + 16 * (columns // KEPT_COLUMNS) + 2 * D + 4 * D + 2 * D + 512
    return (SEGMENT + BLOCK) * 2 * (columns + D) + rows * a_row


class Memory(NamedTuple):
    """What passes from chunk to chunk, by the names of the ops' arguments."""

    memory: Tensor
    kept_base: Tensor | None
    queue: Tensor | None
    queue_rows: Tensor | None

    @classmethod
    def of(
        cls, backend: str, hidden: Tensor, V: int, kept: int, recomputed: int, queues: bool,
        workspace_bytes: int,
    ) -> "Memory":  # fmt: skip
        """For chunks of at most `kept` rows whose probabilities are, and of `recomputed` whose are not."""
        D, device = hidden.shape[-1], hidden.device
        if backend == "reference":
            memory = torch.empty(max(kept, 1) * V, dtype=_wide(hidden.dtype), device=device)
            return cls(memory, None, None, None)
        columns, heights = columns_of(V), [rows_in_memory(rows, queues) for rows in (kept, recomputed)]
        elements = heights[0] * columns if kept else 0
        if recomputed:
            ahead, slab = SEGMENT * columns if queues else 0, heights[1] * SEGMENT
            most = slab * -(-V // SEGMENT)
            elements = max(elements, ahead + min(most, max(slab, workspace_bytes // 2 - ahead)))
        groups = columns // KEPT_COLUMNS
        base = torch.empty(slots_of(kept), groups, 4, dtype=torch.float32, device=device) if kept else None
        return cls(
            torch.empty(elements, dtype=hidden.dtype, device=device), base,
            torch.empty(max(heights), D, dtype=hidden.dtype, device=device),
            torch.empty(max(heights), dtype=torch.int32, device=device),
        )  # fmt: skip


def columns_of(V: int) -> int:
    """Columns of kept probabilities."""
    return -(-V // KEPT_COLUMNS) * KEPT_COLUMNS


def rows_in_memory(rows: int, queues: bool) -> int:
    """Rows of memory that a chunk takes on Hopper."""
    return (SEGMENT if queues else 0) + slots_of(rows) + BLOCK


def slab_width(elements: int, V: int, height: int, queues: bool) -> int:
    """Columns of a slab of so many rows in this much memory, behind the queue's d-logits."""
    left = elements - (SEGMENT * columns_of(V) if queues else 0)
    return min(max(left // height // SEGMENT, 1), -(-V // SEGMENT)) * SEGMENT


def slots_of(rows: int) -> int:
    """Rows of a chunk, in whole tiles."""
    return -(-rows // KEPT_ROWS) * KEPT_ROWS


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
