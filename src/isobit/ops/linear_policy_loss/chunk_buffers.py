"""How many rows a chunk has, and the buffers that chunks share. All sizes are computed on the host.

    memory      [queued | rows of the chunk | 64 of zeros] x [columns]     probabilities, then d-logits
    queue       [queued | rows of the chunk | 64 of zeros] x [D]           hidden states of the same rows
    queue_rows  [queued | rows of the chunk]                               which rows they are

Rows of a chunk are rounded up to slots of 128, columns to tiles of 256. If a chunk's probabilities do not
fit, its slabs of d-logits are stored after the queue's d-logits of all columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from isobit.kernels.host.token_stream import BLOCK, SEGMENT
from isobit.ops.linear_logp.op import KEPT_COLUMNS, KEPT_ROWS

#: Bytes for the probabilities of a chunk and its other buffers, unless the caller gives another limit. (The
#: much smaller SLAB_BYTES of `linear_logp` are for one slab of gradients.)
CHUNK_BYTES = 1331 << 20

#: Storing the probabilities of a chunk saves one product of its rows. It costs one read and one write of
#: dweight in fp32, 8 V D bytes, which takes as long as 740 rows of a product at the rates of an H200 (4.26
#: TB/s, 787 TFLOP/s), and one more write of d-logits. If fewer rows than this fit, logits are computed twice.
MIN_ROWS = 1024


def capacity(backend: str, V: int, D: int, dtype: torch.dtype, workspace_bytes: int) -> int | None:
    """Rows per chunk whose probabilities fit; None if none are stored and all rows are one chunk. It must not
    depend on the batch: whether probabilities are stored affects the bits of a row's gradient."""
    if backend == "reference":
        return max(1, workspace_bytes // (V * _wide(dtype).itemsize))
    if backend != "hopper":
        return None
    fixed_bytes = bytes_for(0, V, D)
    bytes_per_row = bytes_for(1, V, D) - fixed_bytes
    rows = (workspace_bytes - fixed_bytes) // bytes_per_row // KEPT_ROWS * KEPT_ROWS
    return rows if rows >= MIN_ROWS else None


def bytes_for(rows: int, V: int, D: int) -> int:
    """Memory of a chunk with this many rows on Hopper: the queue and zeros; and for every row its
    probabilities, the maxima they are relative to, hidden states, sums of dhidden, a second copy of hidden
    states if logits are recomputed, sums of splits, and tables."""
    columns = columns_of(V)
    fixed_bytes = (SEGMENT + BLOCK) * 2 * (columns + D)
    bytes_per_row = 2 * columns + 16 * (columns // KEPT_COLUMNS) + 2 * D + 4 * D + 2 * D + 512
    return fixed_bytes + rows * bytes_per_row


class ChunkBuffers(NamedTuple):
    """The buffers that are passed from chunk to chunk, named like the arguments of the ops."""

    memory: Tensor
    kept_base: Tensor | None
    queue: Tensor | None
    queue_rows: Tensor | None

    @classmethod
    def of(
        cls, backend: str, hidden: Tensor, V: int, stored: int, recomputed: int, queues: bool,
        workspace_bytes: int,
    ) -> "ChunkBuffers":  # fmt: skip
        """For chunks of at most `stored` rows whose probabilities are stored, and of at most `recomputed`
        rows whose logits are computed twice."""
        D, device = hidden.shape[-1], hidden.device
        if backend == "reference":
            memory = torch.empty(max(stored, 1) * V, dtype=_wide(hidden.dtype), device=device)
            return cls(memory, None, None, None)
        columns, heights = columns_of(V), [rows_in_memory(rows, queues) for rows in (stored, recomputed)]
        elements = heights[0] * columns if stored else 0
        if recomputed:
            queue_elements, slab = SEGMENT * columns if queues else 0, heights[1] * SEGMENT
            all_slabs = slab * -(-V // SEGMENT)
            slab_elements = min(all_slabs, max(slab, workspace_bytes // 2 - queue_elements))
            elements = max(elements, queue_elements + slab_elements)
        groups = columns // KEPT_COLUMNS
        base = None
        if stored:
            base = torch.empty(slots_of(stored), groups, 4, dtype=torch.float32, device=device)
        return cls(
            torch.empty(elements, dtype=hidden.dtype, device=device), base,
            torch.empty(max(heights), D, dtype=hidden.dtype, device=device),
            torch.empty(max(heights), dtype=torch.int32, device=device),
        )  # fmt: skip


def columns_of(V: int) -> int:
    """Columns of stored probabilities."""
    return -(-V // KEPT_COLUMNS) * KEPT_COLUMNS


def rows_in_memory(rows: int, queues: bool) -> int:
    """Rows of memory that a chunk takes on Hopper."""
    return (SEGMENT if queues else 0) + slots_of(rows) + BLOCK


def slots_of(rows: int) -> int:
    """Rows of a chunk, rounded up to whole tiles."""
    return -(-rows // KEPT_ROWS) * KEPT_ROWS


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
