"""The same rows and experts in other calls. A `Plan` says which experts a call has, in which order, and which
rows each of them gets; `BLANK` stands for a row or an expert full of NaN."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from isobit.ops.det_grouped_linear.proof.inputs import groups
from isobit.spec.proof import Args

BLANK = -1


@dataclass(frozen=True)
class Plan:
    what: str
    #: (expert, its rows) in the order of the call.
    groups: Sequence[tuple[int, Sequence[int]]]
    #: Rows of no expert.
    rest: Sequence[int] = ()

    def index(self, device: torch.device) -> Tensor:
        """The rows of the call, by their number in the whole batch."""
        rows = [row for _, own in self.groups for row in own]
        return torch.tensor([*rows, *self.rest], dtype=torch.int64, device=device)

    def experts(self, device: torch.device) -> Tensor:
        return torch.tensor([e for e, _ in self.groups], dtype=torch.int64, device=device)

    def offsets(self, like: Tensor) -> Tensor:
        ends = accumulate(len(own) for _, own in self.groups)
        return torch.tensor([0, *ends], dtype=like.dtype, device=like.device)

    def whole(self, args: Args) -> list[tuple[int, int]]:
        """(place in the call, expert) of those that have the same rows as in the whole batch."""
        streams = [list(range(first, end)) for _, first, end in groups(args)]
        return [(i, e) for i, (e, own) in enumerate(self.groups) if e != BLANK and list(own) == streams[e]]


def taken(t: Tensor, index: Tensor) -> Tensor:
    """These rows of a tensor; NaN for those that are BLANK."""
    if len(t) == 0:
        return t.new_full((len(index), *t.shape[1:]), float("nan"))
    chosen = t.index_select(0, index.clamp(min=0))
    chosen[index == BLANK] = float("nan")
    return chosen


def plans(args: Args, batch_sizes: Sequence[int]) -> list[Plan]:
    """Calls in which every row must keep its bits, and every expert with the same rows its sums."""
    gen = torch.Generator().manual_seed(7)
    own = {e: list(range(first, end)) for e, first, end in groups(args)}
    M, last = len(args["x"]), int(args["offsets"][-1])
    rest = list(range(last, M))
    held = [e for e in own if own[e]]
    largest = max(held, key=lambda e: len(own[e]))

    def shuffled(items: Sequence[int]) -> list[int]:
        return [items[i] for i in torch.randperm(len(items), generator=gen).tolist()]

    def some(count: int) -> Plan:
        kept = {*shuffled(range(last))[:count]}
        return Plan(f"{count} of {last} rows alone", [(e, [r for r in own[e] if r in kept]) for e in own])

    def among(rows: list[int]) -> list[int]:
        """With rows of NaN between, before and behind."""
        return [BLANK, *(each for row in rows for each in ((row, BLANK) if row % 3 else (row,))), BLANK]

    several = [some(n) for n in sorted({*batch_sizes, last // 2, last - 1}) if 0 < n < last]
    several += [
        Plan("rows of every expert in another order", [(e, shuffled(own[e])) for e in own], rest),
        Plan("experts in another order", [(e, own[e]) for e in shuffled(list(own))], rest),
        Plan("experts without rows taken out", [(e, own[e]) for e in held]),
        Plan(f"expert {largest} alone", [(largest, own[largest])]),
        Plan("70 more experts without rows", [*((BLANK, []) for _ in range(70)), *own.items()], rest),
        Plan("rows full of NaN in every expert", [(e, among(own[e])) for e in own], [BLANK]),
        Plan(
            "every other expert and its rows full of NaN",
            [(e, own[e]) if i % 2 == 0 else (BLANK, [BLANK] * (len(own[e]) + 3)) for i, e in enumerate(held)],
            [BLANK] * 5,
        ),
    ]  # fmt: skip
    return several


def in_other_order(args: Args, shift: int) -> Plan:
    """For controls: the rows of every expert, those from number `shift` on first."""
    return Plan("", [(e, [*range(first, end)][shift:] + [*range(first, end)][:shift])
                     for e, first, end in groups(args)])  # fmt: skip
