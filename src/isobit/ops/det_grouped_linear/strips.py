"""Rows of experts in *strips*: up to `height` consecutive rows of one expert, from its first row on.

Where experts begin is known on the device only. One small kernel lists the strips there, and the kernels of
products read the list: no host sync, and the host needs nothing but the number of rows and of experts. Row
s + 1 of the list is strip s, four numbers:

    expert          E for rows that belong to no expert, those after the last one
    first strip     of this expert
    first row, end  of this expert

and row 0 begins with the number of strips. Strips are in the order of experts.

Whatever the offsets hold, the list covers every row once: the first counts as 0, they are clamped to the rows
that exist, and one that is less than an offset before it counts as that one.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch
from isobit.kernels.triton.dependent_launch import (
    dependent_launch_options,
    start_next_launch,
    wait_for_last_launch,
)

#: Programs that write the list. An expert with many rows has many strips, and they share them.
PROGRAMS = 8


def capacity(R: Any, E: int, height: int) -> Any:
    """Strips that are enough for any R rows of E experts, and the rows of none."""
    filled = E + 1 if R > E else R
    return (R + (height - 1) * filled) // height


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["table", "offsets", "R", "E", "height"])
def strips_kernel(table, offsets, R, E, height, EXPERTS: tl.constexpr, EARLY: tl.constexpr):
    """EXPERTS: a power of two that is larger than E."""
    if EARLY:
        wait_for_last_launch()
        start_next_launch()
    e = tl.arange(0, EXPERTS)
    given = tl.load(offsets + e, mask=e <= E, other=0).to(tl.int64)
    given = tl.minimum(tl.maximum(given, 0), R).to(tl.int32)
    first = tl.associative_scan(tl.where(e == 0, 0, given), 0, _larger)
    after = tl.load(offsets + e + 1, mask=e < E, other=0).to(tl.int64)
    end = tl.maximum(first, tl.minimum(tl.maximum(after, 0), R).to(tl.int32))
    end = tl.where(e == E, R, end)
    count = tl.where(e <= E, tl.cdiv(end - first, height), 0)
    ends = tl.cumsum(count, 0)
    begun = ends - count
    for i in range(tl.program_id(0), tl.max(count, 0), tl.num_programs(0)):
        at = table + 4 + (begun + i).to(tl.int64) * 4
        tl.store(at, e, mask=i < count)
        tl.store(at + 1, begun, mask=i < count)
        tl.store(at + 2, first, mask=i < count)
        tl.store(at + 3, end, mask=i < count)
    if tl.program_id(0) == 0:
        tl.store(table, tl.max(ends, 0))


def strips(x: Tensor, offsets: Tensor, height: int, launch: Launch) -> Tensor:
    """The list for the rows of x, int32 on its device."""
    R, E = x.shape[0], offsets.shape[0] - 1
    table = torch.empty(4 * capacity(R, E, height) + 4, dtype=torch.int32, device=x.device)
    launch(
        strips_kernel, (PROGRAMS,), table, offsets, R, E, height, EXPERTS=triton.next_power_of_2(E + 1),
        num_warps=4, enable_fp_fusion=False, **dependent_launch_options(x.device),
    )  # fmt: skip
    return table


# The last rows of experts

#: Columns that a program of `tails_kernel` copies.
COPIED = 256


@triton.jit
def rows_of_expert(offsets, expert, R, E, EXPERTS: tl.constexpr):
    """(first row, end) of an expert, as `strips_kernel` reads offsets."""
    e = tl.arange(0, EXPERTS)
    given = tl.load(offsets + e, mask=(e <= E) & (e > 0), other=0).to(tl.int64)
    given = tl.minimum(tl.maximum(given, 0), R)
    return tl.max(tl.where(e <= expert, given, 0), 0), tl.max(tl.where(e <= expert + 1, given, 0), 0)


@triton.jit(
    do_not_specialize=["R", "E", "K", "N", "x_stride", "dy_stride", "x_words", "dy_words", "x_blocks"]
)
def tails_kernel(
    bounds, x_tails, dy_tails, x, dy, offsets, R, E, K, N, x_stride, dy_stride, x_words, dy_words, x_blocks,
    EXPERTS: tl.constexpr, STEP: tl.constexpr, COPIED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """bounds [E, 2]: first row and end of each expert, as `strips_kernel` reads offsets. tails [E * STEP, *]:
    its rows beyond a multiple of STEP, then zeros. Row strides of the tails are in words of 8 elements."""
    if EARLY:
        wait_for_last_launch()
        start_next_launch()
    expert, block = tl.program_id(0), tl.program_id(1)
    first, end = rows_of_expert(offsets, expert, R, E, EXPERTS)
    if block == 0:
        tl.store(bounds + expert * 2, first.to(tl.int32))
        tl.store(bounds + expert * 2 + 1, end.to(tl.int32))
    i = tl.arange(0, STEP)
    row = end - (end - first) % STEP + i
    to = expert.to(tl.int64) * STEP + i
    if block < x_blocks:
        col = block * COPIED + tl.arange(0, COPIED)
        values = tl.load(
            x + row[:, None] * x_stride + col[None, :],
            mask=(row < end)[:, None] & (col < K)[None, :],
            other=0.0,
        )
        tl.store(x_tails + to[:, None] * (x_words * 8) + col[None, :], values, mask=(col < K)[None, :])
    else:
        col = (block - x_blocks) * COPIED + tl.arange(0, COPIED)
        values = tl.load(
            dy + row[:, None] * dy_stride + col[None, :],
            mask=(row < end)[:, None] & (col < N)[None, :], other=0.0,
        )  # fmt: skip
        tl.store(dy_tails + to[:, None] * (dy_words * 8) + col[None, :], values, mask=(col < N)[None, :])


def _room(t: Tensor, E: int, step: int) -> Tensor:
    """For the last rows of each expert, in rows that TMA can read."""
    return t.new_empty(E * step, -(-t.shape[1] // 8) * 8)[:, : t.shape[1]]


def tails(x: Tensor, dy: Tensor, offsets: Tensor, step: int, launch: Launch) -> tuple[Tensor, Tensor, Tensor]:
    """(bounds, the tails of x, those of dy), for x [R, K] and dy [R, N] with contiguous rows."""
    (R, K), N, E = x.shape, dy.shape[1], offsets.shape[0] - 1
    bounds = torch.empty(E, 2, dtype=torch.int32, device=x.device)
    x_tails, dy_tails = _room(x, E, step), _room(dy, E, step)
    x_blocks = triton.cdiv(K, COPIED)
    launch(
        tails_kernel, (E, x_blocks + triton.cdiv(N, COPIED)),
        bounds, x_tails, dy_tails, x, dy, offsets, R, E, K, N, x.stride(0), dy.stride(0),
        x_tails.stride(0) // 8, dy_tails.stride(0) // 8, x_blocks,
        EXPERTS=triton.next_power_of_2(E + 1), STEP=step, COPIED=COPIED, num_warps=4,
        enable_fp_fusion=False, **dependent_launch_options(x.device),
    )  # fmt: skip
    return bounds, x_tails, dy_tails
