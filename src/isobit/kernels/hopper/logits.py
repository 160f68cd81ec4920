"""Stored rows of logits, summed in the order of class lse/1 (`isobit.kernels.hopper.lse`).

A kernel loads them into the register layout of a product's accumulator, and they go through the same
functions. So a fused and an unfused path can agree bit for bit.
"""

import torch
from torch import Tensor

from isobit.frame.launch import Launch
from isobit.kernels.hopper.lse import (
    COLUMNS,
    LANES,
    OF_ROWS,
    Slots,
    columns_from,
    fold_tile,
    pick,
    splits_of,
    spread,
    store_split,
)
from isobit.kernels.hopper.pipeline import ROWS, gl, kernel
from isobit.kernels.host.temperature import LOG2E

_COLUMNS = gl.constexpr(COLUMNS)


@kernel
def fold_kernel(
    partial, picked_out, logits, ids, scales, N, V, stride, capacity, ENTROPY: gl.constexpr,
):  # fmt: skip
    """Sums of one split of 64 rows, and the logits of their tokens if they are in it."""
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, OF_ROWS)
    split = gl.program_id(1)
    tiles = gl.cdiv(V, _COLUMNS)
    first = split * tiles // gl.num_programs(1)
    end = (split + 1) * tiles // gl.num_programs(1)
    inside = row < N
    token = gl.load(ids + row, mask=inside, other=-1)
    scale = gl.expand_dims(gl.load(scales + row, mask=inside, other=1.0), 1)
    live = spread(gl.expand_dims(inside & (token != -2), 1))
    start = spread(gl.expand_dims(row.to(gl.int64) * stride, 1))
    m = gl.full((ROWS, 4), float("-inf"), gl.float32, LANES)
    s = gl.zeros((ROWS, 4), gl.float32, LANES)
    t = gl.zeros((ROWS, 4), gl.float32, LANES)
    picked = gl.zeros((ROWS, 4), gl.float32, LANES)
    for n in range(first, end):
        column = columns_from(n * _COLUMNS)
        z = gl.load(logits + start + column, mask=live & (column < V), other=float("-inf")).to(gl.float32)
        picked = pick(z, column, token, n * _COLUMNS, picked)
        m, s, t, _ = fold_tile(z, m, s, t, scale, ENTROPY)
    store_split(
        partial, picked_out, m, s, t, picked, scale, token, row, inside, split, first * _COLUMNS,
        end * _COLUMNS, capacity, ENTROPY,
    )  # fmt: skip


def why_not(name: str, logits: Tensor) -> str | None:
    """Why these logits cannot be read, or None."""
    if logits.dtype == torch.float64:
        return f"{name} are fp64; the kernels compute in fp32"
    if _rows(logits) is None:
        return f"rows of {name} are not a fixed distance apart: strides {logits.stride()}"
    return None


def _rows(logits: Tensor) -> Tensor | None:
    """[N, V] without a copy, or None."""
    try:
        return logits.view(-1, logits.shape[-1])
    except RuntimeError:
        return None


def slots_of(
    V: int, token_ids: Tensor, mask: Tensor | None, ignore_index: int, temperature: float | Tensor,
    launch: Launch,
) -> Slots:  # fmt: skip
    """The rows of a call, each in its own slot (not packed)."""
    each, scale = (temperature, LOG2E) if isinstance(temperature, Tensor) else (None, LOG2E / temperature)
    return Slots(token_ids, mask, each, ignore_index, scale, V, False, launch)


def results(
    logits: Tensor,
    slots: Slots,
    launch: Launch,
    entropy: bool = False,
    lse: bool = False,
    stats: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(logp, entropy, lse, stats [2, *]) of rows; logp always, the others if they are requested."""
    z = _rows(logits)
    assert z is not None
    N, V = z.shape
    partial = torch.empty((splits_of(V), 3, slots.capacity), dtype=torch.float32, device=z.device)
    picked = torch.empty(slots.capacity, dtype=torch.float32, device=z.device)
    launch(
        fold_kernel, (-(-N // 64), splits_of(V)),
        partial, picked, z, slots.ids, slots.scales, N, V, z.stride(0), slots.capacity,
        ENTROPY=entropy, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return slots.merge(partial, picked, logits.shape[:-1], V, 1.0, entropy, lse, stats, launch)
