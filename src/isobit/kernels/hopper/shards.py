"""Small kernels of class lse/8x4: tokens counted from the first column of a rank, states of splits without
columns, and the one buffer that a rank sends.

    states [12 shards + 1, capacity]    (m, s, t) of every split of the rank's shards, then the logit of the
                                        row's token, if it is here
"""

import torch
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch
from isobit.kernels.hopper.lse import Slots
from isobit.kernels.hopper.pipeline import triton_kernel
from isobit.kernels.host.vocab_shards import Shards


@triton_kernel
def here_kernel(out, ids, first, columns, size, BLOCK: tl.constexpr):
    """Tokens counted from column `first`; -1 for one that is not among these columns, -2 for a masked row."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + i, mask=i < size, other=-2)
    here = (token >= first) & (token - first < columns)
    tl.store(out + i, tl.where(here, token - first, tl.maximum(tl.minimum(token, -1), -2)), mask=i < size)


@triton_kernel
def empty_kernel(states, size, capacity, BLOCK: tl.constexpr):
    """States of splits without columns: m = -inf, s = t = 0."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(states + i, tl.where(i // capacity % 3 == 0, float("-inf"), 0.0), mask=i < size)


def tokens_here(slots: Slots, cut: Shards, launch: Launch) -> Tensor:
    """The tokens of slots, counted from the first column here."""
    if cut.column == 0 and cut.columns == cut.V:
        return slots.ids
    out = torch.empty_like(slots.ids)
    launch(
        here_kernel, (-(-slots.capacity // 1024),), out, slots.ids, cut.column, cut.columns, slots.capacity,
        BLOCK=1024, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def new_states(cut: Shards, capacity: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(states, the part of the splits [splits, 3, capacity], the logits of tokens [capacity])."""
    states = torch.empty((3 * cut.splits + 1, capacity), dtype=torch.float32, device=device)
    return states, states[:-1].view(cut.splits, 3, capacity), states[-1]


def make_empty(partial: Tensor, launch: Launch) -> None:
    """Every split as one without columns."""
    launch(
        empty_kernel, (-(-partial.numel() // 1024),), partial, partial.numel(), partial.shape[-1],
        BLOCK=1024, enable_fp_fusion=False,
    )  # fmt: skip


def all_splits(states: Tensor, slots: Slots, P: int) -> tuple[Tensor, Tensor]:
    """(sums of all splits [32, 3, capacity], logits of tokens) from the states [ranks, 12 shards + 1,
    capacity] of all ranks. A token's logit comes from the rank that has its column."""
    ranks, _, capacity = states.shape
    if ranks == 1:
        return states[0, :-1].view(-1, 3, capacity), states[0, -1]
    owner = (slots.ids.long() // (P // ranks)).clamp_(0, ranks - 1)
    return states[:, :-1].reshape(-1, 3, capacity), states[:, -1].gather(0, owner[None])[0]
