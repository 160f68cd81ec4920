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


@triton.jit
def rows_of_experts(offsets, e, R, E):
    """(first row, end) of all experts e."""
    given = tl.load(offsets + e, mask=e <= E, other=0).to(tl.int64)
    given = tl.minimum(tl.maximum(given, 0), R).to(tl.int32)
    first = tl.associative_scan(tl.where(e == 0, 0, given), 0, _larger)
    after = tl.load(offsets + e + 1, mask=e < E, other=0).to(tl.int64)
    return first, tl.maximum(first, tl.minimum(tl.maximum(after, 0), R).to(tl.int32))


@triton.jit(do_not_specialize=["table", "offsets", "R", "E", "height"])
def strips_kernel(table, offsets, R, E, height, EXPERTS: tl.constexpr, EARLY: tl.constexpr):
    """EXPERTS: a power of two that is larger than E."""
    if EARLY:
        wait_for_last_launch()
        start_next_launch()
    e = tl.arange(0, EXPERTS)
    first, end = rows_of_experts(offsets, e, R, E)
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


# Where the rows of experts begin and end


@triton.jit
def rows_of_expert(offsets, expert, R, E, EXPERTS: tl.constexpr):
    """(first row, end) of an expert, as `strips_kernel` reads offsets."""
    e = tl.arange(0, EXPERTS)
    given = tl.load(offsets + e, mask=(e <= E) & (e > 0), other=0).to(tl.int64)
    given = tl.minimum(tl.maximum(given, 0), R)
    return tl.max(tl.where(e <= expert, given, 0), 0), tl.max(tl.where(e <= expert + 1, given, 0), 0)


@triton.jit(do_not_specialize=["R", "E"])
def bounds_kernel(bounds, offsets, R, E, EXPERTS: tl.constexpr, EARLY: tl.constexpr):
    """bounds [E, 2]: first row and end of each expert, as `strips_kernel` reads offsets."""
    if EARLY:
        wait_for_last_launch()
        start_next_launch()
    e = tl.arange(0, EXPERTS)
    first, end = rows_of_experts(offsets, e, R, E)
    tl.store(bounds + e * 2, first, mask=e < E)
    tl.store(bounds + e * 2 + 1, end, mask=e < E)


def bounds(x: Tensor, offsets: Tensor, launch: Launch) -> Tensor:
    """[E, 2] of the rows of x, int32 on its device."""
    E = offsets.shape[0] - 1
    made = torch.empty(E, 2, dtype=torch.int32, device=x.device)
    launch(
        bounds_kernel, (1,), made, offsets, x.shape[0], E, EXPERTS=triton.next_power_of_2(E + 1),
        num_warps=4, enable_fp_fusion=False, **dependent_launch_options(x.device),
    )  # fmt: skip
    return made
