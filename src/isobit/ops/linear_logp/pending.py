"""dhidden as a sum over shards of the vocabulary: sums that wait for their neighbours in a balanced tree."""

import torch
import triton
from torch import Tensor

from isobit.frame.launch import Launch
from isobit.kernels.triton.tree_fold import BLOCK, fold_slice


class Pending:
    """Sums of dhidden that wait for their neighbours in the tree: [sums, rows, D]."""

    def __init__(self, shards: int, rows: int, D: int, device: torch.device) -> None:
        self.sums = torch.empty((shards.bit_length(), rows, D), dtype=torch.float32, device=device)
        self.waiting = self.done = 0

    def next(self) -> Tensor:
        """Where the next shard's sum goes."""
        return self.sums[self.waiting]

    def add(self, launch: Launch) -> None:
        """The next shard's sum is there: add every pair of neighbours that is complete."""
        self.waiting, self.done = self.waiting + 1, self.done + 1
        pairs = self.done
        while pairs % 2 == 0:
            left, count = self.sums[self.waiting - 2], self.sums[0].numel()
            launch(
                fold_slice, (triton.cdiv(count, BLOCK),), left, None, left, count, count, 0, 1,
                PARTS=2, BLOCK=BLOCK, enable_fp_fusion=False,
            )  # fmt: skip
            self.waiting, pairs = self.waiting - 1, pairs // 2

    def total(self) -> Tensor:
        assert self.waiting == 1
        self.waiting = self.done = 0
        return self.sums[0]
