"""Stored rows of logits, summed in the order of class lse/1, or lse/8x4 (`isobit.kernels.hopper.lse`).

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
from isobit.kernels.host.vocab_shards import SPLITS_PER_SHARD, Shards

_COLUMNS = gl.constexpr(COLUMNS)


@kernel
def fold_kernel(
    partial, picked_out, logits, ids, scales, N, V, stride, capacity, shard_columns, ENTROPY: gl.constexpr,
    SHARDED: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Sums of one split of 64 rows, and the logits of their tokens if they are in it. SHARDED: columns are
    cut into shards of `shard_columns`, each with SPLITS splits."""
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, OF_ROWS)
    split = gl.program_id(1)
    if SHARDED:
        low = split // SPLITS * shard_columns
        limit = gl.minimum(low + shard_columns, V)
        tiles = gl.cdiv(shard_columns, _COLUMNS)
        high = gl.minimum(low + (split % SPLITS + 1) * tiles // SPLITS * _COLUMNS, limit)
        low = gl.minimum(low + split % SPLITS * tiles // SPLITS * _COLUMNS, limit)
    else:
        tiles, limit = gl.cdiv(V, _COLUMNS), V
        low = split * tiles // gl.num_programs(1) * _COLUMNS
        high = (split + 1) * tiles // gl.num_programs(1) * _COLUMNS
    inside = row < N
    token = gl.load(ids + row, mask=inside, other=-1)
    scale = gl.expand_dims(gl.load(scales + row, mask=inside, other=1.0), 1)
    live = spread(gl.expand_dims(inside & (token != -2), 1))
    start = spread(gl.expand_dims(row.to(gl.int64) * stride, 1))
    m = gl.full((ROWS, 4), float("-inf"), gl.float32, LANES)
    s = gl.zeros((ROWS, 4), gl.float32, LANES)
    t = gl.zeros((ROWS, 4), gl.float32, LANES)
    picked = gl.zeros((ROWS, 4), gl.float32, LANES)
    for first in range(low, high, _COLUMNS):
        column = columns_from(first)
        z = gl.load(logits + start + column, mask=live & (column < limit), other=float("-inf")).to(gl.float32)
        picked = pick(z, column, token, first, picked)
        m, s, t, _ = fold_tile(z, m, s, t, scale, ENTROPY)
    store_split(
        partial, picked_out, m, s, t, picked, scale, token, row, inside, split, low, high, capacity, ENTROPY
    )


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


def splits_in(
    logits: Tensor, slots: Slots, ids: Tensor, partial: Tensor, picked: Tensor, entropy: bool,
    launch: Launch, cut: Shards | None = None,
) -> None:  # fmt: skip
    """Write (m, s, t) of the splits of rows to `partial` [splits, 3, capacity], and the logits of their
    tokens to `picked`. The tokens `ids` count from the first column here. Splits are those of lse/1, or those
    of some shards of lse/8x4."""
    z = _rows(logits)
    assert z is not None
    launch(
        fold_kernel, (-(-len(z) // 64), len(partial)),
        partial, picked, z, ids, slots.scales, len(z),
        z.shape[1] if cut is None else cut.columns,
        z.stride(0), slots.capacity,
        0 if cut is None else cut.width,
        ENTROPY=entropy, SHARDED=cut is not None, SPLITS=SPLITS_PER_SHARD,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def results(
    logits: Tensor,
    slots: Slots,
    launch: Launch,
    entropy: bool = False,
    lse: bool = False,
    stats: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(logp, entropy, lse, stats [2, *]) of rows; logp always, the others if they are requested."""
    V, device = logits.shape[-1], logits.device
    partial = torch.empty((splits_of(V), 3, slots.capacity), dtype=torch.float32, device=device)
    picked = torch.empty(slots.capacity, dtype=torch.float32, device=device)
    splits_in(logits, slots, slots.ids, partial, picked, entropy, launch)
    return slots.merge(partial, picked, logits.shape[:-1], V, 1.0, entropy, lse, stats, launch)
