"""Splits a batch into chunks, and its tensors with it.

Rows are flat [N], sequences of equal length [B, T], or sequences packed one after another, [N] with their
bounds. Chunks hold whole sequences; flat rows may be split anywhere. A chunk has as many rows as fit in the
workspace. A sequence that does not fit becomes several chunks if the loss is a sum over rows. Otherwise it is
a chunk of its own, and none of its probabilities are stored.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from isobit.kernels.host.token_stream import SEGMENT


@dataclass(frozen=True)
class Chunk:
    """Rows `first` to `end`, which are the units `begin` to `stop`: sequences, or single rows if rows are
    flat; or a part of one sequence. `fits`: their probabilities fit in the workspace."""

    first: int
    end: int
    begin: int
    stop: int
    fits: bool

    @property
    def rows(self) -> int:
        return self.end - self.first

    def joined(self, other: "Chunk") -> "Chunk":
        """Both as one, where the other begins at the end of this one."""
        return Chunk(self.first, other.end, self.begin, other.stop, False)


def cuts(first: int, end: int, capacity: int) -> list[int]:
    """Where to cut rows, from the first to the end, so that as few parts as possible have at most `capacity`
    rows. They are about equally long: a short one would leave most SMs idle. And they end after whole
    segments where that is possible, so that no row has to be queued if all rows are live."""
    most = capacity // SEGMENT * SEGMENT or capacity
    parts = -(-(end - first) // most)
    step = -(-(end - first) // parts)
    if most % SEGMENT == 0:
        step = -(-step // SEGMENT) * SEGMENT
    return [*range(first, end, step), end]


@dataclass(frozen=True)
class Batch:
    """Rows of a leading shape. `bounds` are the first row of each sequence and the end of the last; None:
    rows are flat. `given` are bounds as the caller has them, where some packed sequences have no rows: those
    are in no chunk, so no loss can depend on where chunks end."""

    shape: tuple[int, ...]
    bounds: Sequence[int] | None
    given: Sequence[int] | None = None

    @classmethod
    def packed(cls, given: Sequence[int]) -> "Batch":
        """Sequences one after another, from bounds that may repeat."""
        bounds = [0, *(end for first, end in pairwise(given) if first < end)]
        return cls((given[-1],), bounds, given if len(bounds) < len(given) else None)

    @property
    def rows(self) -> int:
        N = 1
        for size in self.shape:
            N *= size
        return N

    @cached_property
    def everything(self) -> Chunk:
        """All rows, as a chunk that does not fit."""
        return Chunk(0, self.rows, 0, self.rows if self.bounds is None else len(self.bounds) - 1, False)

    def chunks(self, capacity: int | None, by_rows: bool = False) -> list[Chunk]:
        """All rows in chunks of at most `capacity` rows; None: one chunk that does not fit. `by_rows`:
        sequences may be split."""
        N, bounds = self.rows, self.bounds
        if N == 0:
            return []
        if capacity is None or capacity >= N:
            return [replace(self.everything, fits=capacity is not None)]
        if bounds is None:
            return [Chunk(a, b, a, b, True) for a, b in pairwise(cuts(0, N, capacity))]
        made, begin, last = list[Chunk](), 0, len(bounds) - 1
        while begin < last:
            stop = begin + 1
            while stop < last and bounds[stop + 1] - bounds[begin] <= capacity:
                stop += 1
            first, end = bounds[begin], bounds[stop]
            if by_rows and end - first > capacity:
                made += [Chunk(a, b, begin, stop, True) for a, b in pairwise(cuts(first, end, capacity))]
            else:
                made.append(Chunk(first, end, begin, stop, end - first <= capacity))
            begin = stop
        return made

    def halves(self, chunk: Chunk) -> list[Chunk]:
        """A chunk in two parts of about equal length; an empty list if it is a single unit. A part of a
        sequence is cut once more."""
        cut = middle = (chunk.first + chunk.end) // 2
        if self.is_part(chunk):
            return [] if chunk.rows == 1 else [replace(chunk, end=cut), replace(chunk, first=cut)]
        if self.bounds is not None:  # the closest start of a sequence
            inner = range(chunk.begin + 1, chunk.stop)
            middle = min(inner, default=chunk.begin, key=lambda unit: abs(self.bounds[unit] - cut))  # type: ignore[index]
            cut = self.bounds[middle]
        if cut in (chunk.first, chunk.end):
            return []
        return [Chunk(chunk.first, cut, chunk.begin, middle, False),
                Chunk(cut, chunk.end, middle, chunk.stop, False)]  # fmt: skip

    def of_rows(self, t: Any, chunk: Chunk) -> Any:
        """The chunk's part of a tensor with one entry per row; anything else unchanged."""
        if not isinstance(t, Tensor) or t.ndim == 0:
            return t
        return self.part(t, chunk, self.everything)

    def part(self, t: Tensor, part: Chunk, of: Chunk) -> Tensor:
        """A part of a tensor that has the rows of a chunk, or of several."""
        if part.rows == of.rows:  # slicing takes a while on the host
            return t
        if len(self.shape) == 1:
            return t[part.first - of.first : part.end - of.first]
        lines = t[part.begin - of.begin : part.stop - of.begin]
        if not self.is_part(part):
            return lines
        before = of.first if self.is_part(of) else part.begin * self.shape[1]
        return lines[:, part.first - before : part.end - before]

    def is_part(self, chunk: Chunk) -> bool:
        """Whether it is a part of a sequence."""
        if self.bounds is None:
            return False
        return chunk.rows < self.bounds[chunk.stop] - self.bounds[chunk.begin]

    # The inputs of a loss

    def sort(self, inputs: Mapping[str, Any], error: Callable[[str, Any, str], Exception]) -> "Inputs":
        """Sorts inputs into those by row and those by sequence; raises an error for one that is neither."""
        by_rows, by_sequences, same = dict[str, Tensor](), dict[str, Tensor](), dict[str, Any]()
        given = self.bounds if self.given is None else self.given
        sequences = () if given is None else (len(given) - 1,)
        # As many sequences as rows, some of them empty: a tensor of this shape could be either.
        unclear = self.shape == sequences and self.given is not None
        for name, value in inputs.items():
            if not isinstance(value, Tensor):
                if getattr(value, "shape", ()):  # of numpy, say: every chunk would be given all of it
                    raise error(name, value, "is an array; pass a tensor, which is cut like the rows")
                same[name] = value
                continue
            shape = tuple(value.shape)
            if value.requires_grad:
                raise error(name, value, "no gradient goes to it; detach() it")
            if not shape:
                same[name] = value
            elif shape == self.shape and not unclear:
                by_rows[name] = value
            elif shape == sequences and not unclear:
                by_sequences[name] = self._with_rows(value)
            elif unclear:
                reason = "could be per row or per sequence; leave empty sequences out of cu_seqlens"
                raise error(name, value, reason)
            else:
                known = f"must be {list(self.shape)} as the rows"
                known += f", or {list(sequences)} with one for every sequence" if sequences else ""
                raise error(name, value, f"{known}, or without dimensions")
        return Inputs(self, by_rows, by_sequences, same)

    def _with_rows(self, value: Tensor) -> Tensor:
        """The entries of the sequences that have rows."""
        if self.given is None:
            return value
        with_rows = [i for i, (first, end) in enumerate(pairwise(self.given)) if first < end]
        return value[torch.tensor(with_rows, dtype=torch.int64, device=value.device)]


@dataclass(frozen=True)
class Inputs:
    """Inputs of a loss: one entry per row, one per sequence that has rows, or the same for all."""

    batch: Batch
    by_rows: Mapping[str, Tensor]
    by_sequences: Mapping[str, Tensor]
    same: Mapping[str, Any]

    def of(self, chunk: Chunk) -> dict[str, Any]:
        """The inputs of a chunk."""
        inputs = {name: self.batch.of_rows(t, chunk) for name, t in self.by_rows.items()}
        inputs |= {name: t[chunk.begin : chunk.stop] for name, t in self.by_sequences.items()}
        return inputs | dict(self.same)
