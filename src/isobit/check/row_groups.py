"""The parts of a batch that are independent: single rows, or groups of rows that act together."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from isobit.spec.proof import Args, Groups, Proof


@dataclass(frozen=True)
class RowGroups:
    """The sizes of the groups, in order. `groups` names the arguments that define them; None for single
    rows."""

    sizes: Sequence[int]
    groups: Groups | None
    device: torch.device

    @property
    def count(self) -> int:
        return len(self.sizes)

    def rows(self, index: Tensor) -> Tensor:
        """The rows of these groups."""
        if self.groups is None:
            return index
        first = [0, *accumulate(self.sizes)]
        rows = [torch.arange(first[i], first[i + 1]) for i in index.tolist()]
        return torch.cat([torch.arange(0), *rows]).to(self.device)

    def args_of(self, args: Args, index: Sequence[int]) -> Args:
        """The arguments for these groups only, with adjusted bounds."""
        if self.groups is None or args[self.groups.bounds] is None:  # groups of equal size need no change
            return args
        bounds = torch.tensor([0, *accumulate(self.sizes[i] for i in index)], device=self.device)
        return args | {self.groups.bounds: bounds.to(args[self.groups.bounds].dtype)}


def row_groups_of(proof: Proof, args: Args, rows: int, device: torch.device) -> RowGroups:
    """Single rows, unless these arguments define groups."""
    groups = proof.groups
    if groups is not None and args[groups.size] is not None:
        size = args[groups.size]
        return RowGroups([size] * (rows // size), groups, device)
    if groups is not None and args[groups.bounds] is not None:
        return RowGroups([b - a for a, b in pairwise(args[groups.bounds].tolist())], groups, device)
    return RowGroups([1] * rows, None, device)
