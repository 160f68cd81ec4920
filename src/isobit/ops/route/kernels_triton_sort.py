"""A stable sort of the rows of tokens by expert, in portable Triton. Entry r = t k + j is expert j of token
t.

Few entries, those of a decoding step, are sorted by one launch, in which each is compared with all:

    rank_kernel     how many entries have a lower expert, or the same one and come earlier

More are counted, by three launches, whatever the sizes:

    count_kernel    how many entries each expert has in each block of BLOCK entries, [E + 1, blocks]
    ahead_kernel    for each expert, how many it has in the blocks before; and its total
    place_kernel    the first row of the expert, plus its entries in earlier blocks, plus those before it
                    in the same block

No atomics: every number is a count, and no race decides one. An expert outside [0, E) counts as E, and what
is computed is always a permutation of the rows, so nothing is written out of bounds.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.triton.interpreter import INTERPRETED

#: Entries that are sorted by one launch, at most. Affects the schedule only. In the interpreter fewer, so
#: that small cases take both ways.
FEW = 64 if INTERPRETED.value else 1024

#: Entries that a step of `rank_kernel` compares with.
COMPARED = 256

#: Entries of a block: their comparisons with one another, BLOCK * BLOCK, stay in registers.
BLOCK = 64

#: Experts whose entries are counted at a time.
COUNTED = 64

#: Blocks that a step of `ahead_kernel` takes.
STEP = 1024


# Kernels


@triton.jit
def experts_of(experts, entry, R, E):
    """Those of entries; E for what is no expert, and -1 beyond the last entry."""
    e = tl.load(experts + entry, mask=entry < R, other=0)
    e = tl.where((e >= 0) & (e < E), e, E).to(tl.int32)
    return tl.where(entry < R, e, -1)


@triton.jit(do_not_specialize=["R", "E", "blocks"])
def rank_kernel(experts, place, offsets, R, E, blocks, BLOCK: tl.constexpr, COMPARED: tl.constexpr):
    """The first `blocks` programs compute places of entries, the others offsets of experts: an expert begins
    where an entry of it would be that comes before all others."""
    program, i = tl.program_id(0), tl.arange(0, BLOCK)
    entry = program * BLOCK + i
    expert = (program - blocks) * BLOCK + i
    own = tl.where(program < blocks, experts_of(experts, entry, R, E), expert)
    at = tl.where(program < blocks, entry, -1)
    rank = tl.zeros([BLOCK], tl.int32)
    for first in range(0, R, COMPARED):
        j = first + tl.arange(0, COMPARED)
        e = experts_of(experts, j, R, E)
        before = (e[None, :] < own[:, None]) | ((e[None, :] == own[:, None]) & (j[None, :] < at[:, None]))
        rank += tl.sum((before & (e >= 0)[None, :]).to(tl.int32), axis=1)
    if program < blocks:
        tl.store(place + entry, rank, mask=entry < R)
    else:
        tl.store(offsets + expert, rank, mask=expert <= E)


@triton.jit(do_not_specialize=["R", "E", "blocks"])
def count_kernel(experts, counts, R, E, blocks, BLOCK: tl.constexpr, COUNTED: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    e = experts_of(experts, block * BLOCK + tl.arange(0, BLOCK), R, E)
    for first in range(0, E + 1, COUNTED):
        wanted = first + tl.arange(0, COUNTED)
        own = tl.sum((e[:, None] == wanted[None, :]).to(tl.int32), axis=0)
        tl.store(counts + wanted.to(tl.int64) * blocks + block, own, mask=wanted <= E)


@triton.jit(do_not_specialize=["blocks"])
def ahead_kernel(counts, totals, blocks, STEP: tl.constexpr):
    """One program per expert. Counts become those of the blocks before."""
    expert = tl.program_id(0).to(tl.int64)
    at = counts + expert * blocks
    total = tl.zeros([], tl.int32)
    for first in range(0, blocks, STEP):
        block = first + tl.arange(0, STEP)
        own = tl.load(at + block, mask=block < blocks, other=0)
        tl.store(at + block, total + tl.cumsum(own, 0) - own, mask=block < blocks)
        total += tl.sum(own, 0)
    tl.store(totals + expert, total)


@triton.jit(do_not_specialize=["R", "E", "blocks"])
def place_kernel(
    experts, counts, totals, place, offsets, R, E, blocks, BLOCK: tl.constexpr, EXPERTS: tl.constexpr
):
    """EXPERTS: a power of two that is larger than E."""
    block = tl.program_id(0).to(tl.int64)
    every = tl.arange(0, EXPERTS)
    size = tl.load(totals + every, mask=every <= E, other=0)
    first = tl.cumsum(size, 0) - size
    if block == 0:
        tl.store(offsets + every, first, mask=every <= E)
    i = tl.arange(0, BLOCK)
    entry = block * BLOCK + i
    e = experts_of(experts, entry, R, E)
    inside = e >= 0
    at = tl.where(inside, e, 0)
    before = tl.load(counts + at.to(tl.int64) * blocks + block, mask=inside, other=0)
    same = (e[:, None] == e[None, :]) & (i[None, :] < i[:, None])
    rank = tl.sum(same.to(tl.int32), axis=1)
    tl.store(place + entry, tl.gather(first, at, axis=0) + before + rank, mask=inside)


# The launcher


def expert_rows(launch: Launch = run, **args: Any) -> tuple[Tensor, Tensor]:
    return sort(launch, args["experts"].contiguous(), args["count"])


def sort(launch: Launch, experts: Tensor, E: int) -> tuple[Tensor, Tensor]:
    """(place, offsets) of contiguous experts."""
    R, device = experts.numel(), experts.device
    blocks = triton.cdiv(R, BLOCK)
    place = torch.empty(experts.shape, dtype=torch.int32, device=device)
    if R == 0:
        return place, torch.zeros(E + 1, dtype=torch.int32, device=device)
    offsets = torch.empty(E + 1, dtype=torch.int32, device=device)
    if R <= FEW:
        launch(
            rank_kernel, (blocks + triton.cdiv(E + 1, BLOCK),), experts, place, offsets, R, E, blocks,
            BLOCK=BLOCK, COMPARED=COMPARED, num_warps=4,
        )  # fmt: skip
        return place, offsets
    counts = torch.empty(E + 1, blocks, dtype=torch.int32, device=device)
    totals = torch.empty(E + 1, dtype=torch.int32, device=device)
    launch(count_kernel, (blocks,), experts, counts, R, E, blocks, BLOCK=BLOCK, COUNTED=COUNTED, num_warps=4)
    launch(ahead_kernel, (E + 1,), counts, totals, blocks, STEP=STEP, num_warps=4)
    launch(
        place_kernel, (blocks,), experts, counts, totals, place, offsets, R, E, blocks, BLOCK=BLOCK,
        EXPERTS=triton.next_power_of_2(E + 1), num_warps=4,
    )  # fmt: skip
    return place, offsets
