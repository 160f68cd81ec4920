"""Sums over the rows of a batch in an order that is fixed here: groups of 16 rows one after another from +0,
groups by a tree of neighbours, padded with +0 to a power of two. It is the order of `rms_norm`'s dweight.

A kernel adds the rows of 2**LOG_GROUPS groups at a time, one group per row of a tile, and ends with
`over_groups`: one partial sum per program. `sum_of` adds these by the rest of the tree. So it does not matter
how many groups a program takes, as long as it is a power of two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch
from isobit.kernels.triton.interpreter import INTERPRETED, narrow

#: Rows per group.
GROUP = 16

#: Groups (log2) of a program.
LOG_GROUPS = 4

#: Partial sums that a program adds (log2), and its columns. Affects the schedule only. The interpreter has a
#: cost per operation, so it takes more columns, and fewer sums so that more than one launch is needed.
LOG_FAN, COLUMNS = (1, 4096) if INTERPRETED.value else (6, 64)


@triton.jit
def over_groups(x, LOG: tl.constexpr, LANES: tl.constexpr):
    """Sums over 2**LOG rows of a tile: neighbours are added repeatedly. [1, LANES]."""
    for i in tl.static_range(LOG):
        # An axis of two: one commutative addition, whichever threads hold the two.
        x = tl.sum(tl.reshape(x, [1 << (LOG - 1 - i), 2, LANES]), axis=1)
    return tl.reshape(x, [1, LANES])


@triton.jit(do_not_specialize=["P"])
def fold_sums(partials, out, P, D, COLUMNS: tl.constexpr, LOG_FAN: tl.constexpr):
    """One program adds some columns of 2**LOG_FAN of the P sums: [P, D] becomes [programs, D]."""
    part = tl.program_id(0).to(tl.int64)
    at = (part << LOG_FAN) + tl.arange(0, 1 << LOG_FAN)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (at < P)[:, None] & (col < D)[None, :]
    sums = tl.load(partials + at[:, None] * D + col[None, :], mask=mask, other=0.0)
    total = over_groups(sums, LOG_FAN, COLUMNS)
    own = part * D + tl.zeros([1], tl.int64)
    tl.store(out + own[:, None] + col[None, :], narrow(total, out), mask=(col < D)[None, :])


def programs_of(rows: int, log_groups: int = LOG_GROUPS) -> int:
    """How many programs add the groups of so many rows."""
    return max(triton.cdiv(rows, GROUP << log_groups), 1)


def sum_of(partials: Tensor, dtype: torch.dtype, launch: Launch) -> Tensor:
    """[P, D] -> [D] by the tree of neighbours, some levels per launch, rounded in the last one."""
    D = partials.shape[1]
    while len(partials) > 1 or partials.dtype != dtype:
        P = len(partials)
        parts = triton.cdiv(P, 1 << LOG_FAN)
        out = torch.empty((parts, D), dtype=dtype if parts == 1 else torch.float32, device=partials.device)
        launch(
            fold_sums, (parts, triton.cdiv(D, COLUMNS)),
            partials, out, P, D,
            COLUMNS=COLUMNS, LOG_FAN=LOG_FAN, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        partials = out
    return partials.view(D)
