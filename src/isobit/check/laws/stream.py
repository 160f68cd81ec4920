"""Law W: the bits of a sum over rows.

The live rows, in their order, are a stream. The stream alone determines the bits: not the positions of
its rows among masked rows, not the layout of the batch, and not whether the sum was computed in
one call or in several, where the result of one call is the initial value of the next. Calls may be split
between sequences if the op takes their bounds, and elsewhere after whole segments of the stream.

Only rows are moved here, so the law is the same for every op; `Stream` names the arguments that it uses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from isobit.check.rows import Rows, rows_of
from isobit.kernels.host.token_stream import GROUP
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args, Stream
from isobit.spec.trial import Trial


def sums_over_rows(trial: Trial, stream: Stream) -> list[OutputCheck]:
    rows = rows_of(trial.op)
    args = rows.flat(trial.args())
    law = _Law(trial, stream, rows, args, trial.forward(args))
    return [*law.masked_rows(), *law.packed(), *law.layouts(), *law.cuts(), *law.controls()]


@dataclass(frozen=True)
class _Law:
    """One batch of rows and its sums: `args` with one leading dimension, `whole` the outputs."""

    trial: Trial
    stream: Stream
    rows: Rows
    args: Args
    whole: tuple[Tensor, ...]

    @cached_property
    def total(self) -> int:
        return self.rows.count(self.args)

    @cached_property
    def live(self) -> Tensor:
        mask = self.args[self.stream.mask]
        return torch.ones(self.total, dtype=torch.bool) if mask is None else mask.cpu() != 0

    @cached_property
    def counting(self) -> Tensor:
        """The live rows, by number."""
        return self.live.nonzero()[:, 0]

    @cached_property
    def bounds(self) -> list[int] | None:
        """First row of each sequence and the end of the last; None if the op takes no bounds."""
        cuts = self.args[self.stream.cuts]
        return None if cuts is None else cuts.tolist()

    # W1: masked rows

    def masked_rows(self) -> list[OutputCheck]:
        gen = torch.Generator().manual_seed(11)
        T, few, many = self.total, 9, self.total // 3 + 9
        places = {
            "in front": (torch.arange(T) + few, T + few),
            "behind": (torch.arange(T), T + few),
            "anywhere": (torch.randperm(T + many, generator=gen)[:T].sort().values, T + many),
        }
        checks = []
        for where, (at, total) in places.items():
            checks += self._same(f"masked rows full of NaN {where}", self._among(at, total, self._nan, False))
        return checks

    def packed(self) -> list[OutputCheck]:
        """Without the masked rows; and as a rectangle of padded sequences."""
        checks = []
        if len(self.counting) < self.total:
            before = torch.cat([torch.zeros(1, dtype=torch.int64), self.live.cumsum(0)])
            bounds = None if self.bounds is None else [int(before[b]) for b in self.bounds]
            only = self._with(self.rows.select(self.args, self._there(self.counting)), None, bounds)
            checks += self._same("packed: masked rows taken out", only)
        # Without sequences the lines of the rectangle may be any split: masked rows must not matter.
        ends = self.bounds or [0, self.total // 5, self.total // 2, self.total]
        lengths = [b - a for a, b in pairwise(ends)]
        width = max([*lengths, 1]) + 3
        at = [line * width + step for line, length in enumerate(lengths) for step in range(length)]
        size = len(lengths) * width
        wide = self._among(torch.tensor(at, dtype=torch.int64), size, self._nan, False)
        if self.bounds is not None:
            wide = self._with(wide, wide[self.stream.mask], list(range(0, size + 1, width)))
        lines = {n: wide[n].unflatten(0, (len(lengths), width)) for n in self.rows.present(wide)}
        return checks + self._same("padded: in lines with NaN behind each", wide | lines)

    # W0: schedule, strides, alignment

    def layouts(self) -> list[OutputCheck]:
        checks = self._same("a second run", self.args)
        for layout in self.trial.proof.layouts:
            # If the kernels cannot read a layout, another backend of their class serves it.
            laid = self.trial.proof.lay_out(self.args, layout)
            changed = self.trial.in_class(laid).forward(laid)
            checks += self._compared(f"layout {layout}", changed)
        return checks

    # W2: several calls

    def cuts(self) -> list[OutputCheck]:
        places = self._between_sequences() if self.bounds is not None else self._after_segments()
        what = f"after {self.stream.segment} live rows" if self.bounds is None else "between sequences"
        checks = []
        for place in places[:3]:
            checks += self._compared(f"cut at row {place}, {what}", self._in_calls([place]))
        several = places[:: max(1, len(places) // 8)]
        if len(several) > 1:
            checks += self._compared(f"cut at {len(several)} rows, {what}", self._in_calls(several))
        return checks

    def _between_sequences(self) -> list[int]:
        assert self.bounds is not None
        return sorted({b for b in self.bounds if 0 < b < self.total})

    def _after_segments(self) -> list[int]:
        step = self.stream.segment
        return [self._after(n) for n in range(step, len(self.counting), step)]

    def _after(self, count: int) -> int:
        """The row after the first `count` live rows; with fewer of those, after the last."""
        return int(self.counting[min(count, len(self.counting)) - 1]) + 1 if len(self.counting) else 0

    def _in_calls(self, places: list[int]) -> tuple[Tensor, ...]:
        """The sum in several calls, each starting from the result of the one before."""
        start, result = self.args[self.stream.start], self.whole
        edges = [0, *places, self.total]
        for first, end in pairwise(edges):
            part = self.rows.select(self.args, self._there(torch.arange(first, end)))
            if self.bounds is not None:
                inside = [b - first for b in self.bounds if first < b < end]
                part = self._with(part, part[self.stream.mask], [0, *inside, end - first])
            result = self.trial.forward(part | {self.stream.start: start})
            start = result[0]
        return result

    # Controls

    def controls(self) -> list[OutputCheck]:
        """The same sum in another order must change some bit, or equal bits above prove nothing."""
        half, segment = GROUP // 2, self.stream.segment  # a shift by half a group changes every group
        enough = len(self.counting) > segment + half
        odd = self._after(segment + half) if enough and self.bounds is None else self._after(half)
        zeros = self._among(torch.arange(self.total) + half, self.total + half, self._zeros, counts=True)
        result = {
            f"a cut after a multiple of {half} rows": self._in_calls([odd]),
            f"{half} rows of zeros in front": self.trial.forward(zeros),
        }
        if self.bounds is None:
            groups = torch.arange(self.total).split(GROUP)
            reversed_groups = self.rows.select(self.args, self._there(torch.cat(groups[::-1])))
            result[f"groups of {GROUP} rows in another order"] = self.trial.forward(reversed_groups)
        return [self.trial.control(what, self.whole, outputs) for what, outputs in result.items()]

    # Moving rows

    def _among(self, at: Tensor, total: int, others: Callable[[int], Args], counts: bool) -> Args:
        """The rows at these places among `total` rows, in their order; the rest are `others`."""
        base, at = others(total), self._there(at)
        names = [n for n in self.rows.present(self.args) if n != self.stream.mask]
        moved = {n: base[n].index_copy(base[n].ndim + self.rows.args[n], at, self.args[n]) for n in names}
        mask = torch.full((total,), counts, dtype=torch.bool, device=self.trial.device)
        mask = mask.index_copy(0, at, self._there(self.live))
        bounds = None
        if self.bounds is not None:  # a sequence may begin anywhere after the last row of the previous one
            before = torch.cat([at.new_zeros(1), at + 1]).tolist()
            bounds = [before[b] for b in self.bounds[:-1]] + [total]
            bounds[0] = 0
        return self._with(self.args | moved, mask, bounds)

    def _nan(self, n: int) -> Args:
        return self.trial.proof.padding(self.args, n)

    def _zeros(self, n: int) -> Args:
        result = {}
        for name in self.rows.present(self.args):
            shape = list(self.args[name].shape)
            shape[self.rows.args[name]] = n
            result[name] = self.args[name].new_zeros(shape)
        return result

    def _with(self, args: Args, mask: Tensor | None, bounds: list[int] | None) -> Args:
        given, own = self.args[self.stream.mask], self.args[self.stream.cuts]
        if mask is not None and given is not None:
            mask = mask.to(given.dtype)
        cuts = None if bounds is None else torch.tensor(bounds, dtype=own.dtype, device=own.device)
        return args | {self.stream.mask: mask, self.stream.cuts: cuts}

    def _there(self, t: Tensor) -> Tensor:
        return t.to(self.trial.device)

    # Comparing

    def _same(self, what: str, changed: Args) -> list[OutputCheck]:
        return self._compared(what, self.trial.forward(changed))

    def _compared(self, what: str, outputs: tuple[Tensor, ...]) -> list[OutputCheck]:
        names = enumerate(self.trial.proof.outputs)
        return [same_bits(f"{i}:{n}", outputs[i], self.whole[i], what) for i, n in names]
