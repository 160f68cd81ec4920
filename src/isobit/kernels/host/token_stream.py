"""The token stream: which rows a sum over tokens includes, in which order, and where its segments begin.

The live rows are put into *slots*, sequence after sequence in the caller's order. Every sequence begins at a
slot that is a multiple of 64, so that kernels read whole blocks of 64 slots; the rest of a sequence's last
block are gaps. A sequence is summed in segments of 512 of its own rows, the last one shorter, and a segment
begins at a block. So the bits of a sum depend on the live rows and on nothing else: not on where they were,
nor on what was between them.

torch builds the tables on the device, without a host sync, and their sizes depend on shapes alone. It uses
integer arithmetic and searches in sorted tables, no scatter, so it is deterministic.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

#: Rows per segment: the 512 of the class seg16/512.
SEGMENT = 512

#: Rows that are added in one tensor-core step.
GROUP = 16

#: Slots per block. Sequences and segments begin at a multiple of it.
BLOCK = 64


@dataclass(frozen=True)
class Stream:
    """Tables on the device, int32. Kernels loop up to `count` and need no other size."""

    #: [slots]: the row in each slot, -1 for a gap. `slots` is a multiple of BLOCK.
    rows: Tensor
    #: [segments]: the first slot of each segment. Segments from `count` on are empty, and begin at 0.
    first: Tensor
    #: [segments]: the number of its blocks of 64 slots, 1 to 8 (0 from `count` on).
    blocks: Tensor
    #: [1]: the number of segments.
    count: Tensor


def capacity(T: int, sequences: int) -> tuple[int, int]:
    """(slots, segments) that are enough for any T rows in this many sequences. An empty sequence needs
    none."""
    filled = min(T, sequences)
    return (T + (BLOCK - 1) * filled) // BLOCK * BLOCK, (T + (SEGMENT - 1) * filled) // SEGMENT


def build(T: int, mask: Tensor | None, cu_seqlens: Tensor | None, device: torch.device) -> Stream:
    """The stream of T rows: those whose mask [T] is nonzero, in the sequences that begin at cu_seqlens.

    Whatever cu_seqlens holds, no table points outside the rows: bounds are clamped to [0, T] and made
    ascending, rows before the first belong to the first sequence and rows after the last to the last one.
    """
    seen = torch.arange(1, T + 1, device=device)  # [T]: live rows up to this one, inclusive
    if mask is not None:
        seen = (mask != 0).cumsum(0)
    ends = seen.new_full((1,), T)  # [S]: one past the last row of each sequence
    if cu_seqlens is not None and len(cu_seqlens) > 2:
        ends = torch.cat((cu_seqlens[1:-1].long().clamp(0, T).cummax(0).values, ends))
    slots, segments = capacity(T, len(ends))

    zero = seen.new_zeros(1)
    counted = torch.cat((zero, seen))[ends]  # [S]: live rows up to each sequence's end
    before = torch.cat((zero, counted[:-1]))
    length = counted - before
    slot_end = _rounded_up(length, BLOCK).cumsum(0)
    slot_first = slot_end - _rounded_up(length, BLOCK)

    slot = torch.arange(slots, device=device)
    # Beyond the last sequence the search returns S; such slots become gaps, since no sequence is that long.
    sequence = torch.searchsorted(slot_end, slot, right=True).clamp_(max=len(ends) - 1)
    at = slot - slot_first[sequence]
    row = torch.searchsorted(seen, before[sequence] + at + 1)  # the row at which the count is reached
    rows = torch.where(at < length[sequence], row, -1)

    segment_end = (_rounded_up(length, SEGMENT) // SEGMENT).cumsum(0)
    segment = torch.arange(segments, device=device)
    sequence = torch.searchsorted(segment_end, segment, right=True).clamp_(max=len(ends) - 1)
    at = (segment - segment_end[sequence]) * SEGMENT + _rounded_up(length, SEGMENT)[sequence]
    left = (length[sequence] - at).clamp(0, SEGMENT)
    first = torch.where(left > 0, slot_first[sequence] + at, 0)
    tables = (rows, first, _rounded_up(left, BLOCK) // BLOCK, segment_end[-1:])
    return Stream(*(table.int() for table in tables))


def _rounded_up(x: Tensor, unit: int) -> Tensor:
    return (x + (unit - 1)) // unit * unit
