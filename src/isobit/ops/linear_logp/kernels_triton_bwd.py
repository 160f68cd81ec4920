"""The backward of `linear_logp` in portable Triton.

It takes a *slab* of the vocabulary and a chunk of slots (live rows, see `kernels_triton.py`) at a time, as
large as the workspace allows. One kernel recomputes the logits with the code of the forward, and writes
their gradients dz in the inputs' dtype:

    dz = (dlogp * [col = id] + p * (dlse - dlogp - dentropy * (log p + entropy))) / temperature * slope

with p = 2^u / s from the (m, s) that the forward saved. Then

    dhidden += dz weight        one chain over ascending columns: a slab continues the chain of the last
    dweight  = dz^T hidden      a fresh chain for every 512 slots, folded in ascending order
    dbias    = dz^T 1           the same

Unfinished sums of a slab or a chunk are stored in fp32, so the workspace size does not change bits.
"""

from functools import partial
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.triton.interpreter import narrow
from isobit.kernels.triton.rows import given_at, own_or, row_offset, row_weights
from isobit.kernels.triton.tiles import SEGMENT, place, steps
from isobit.ops.linear_logp.kernels_triton import listed, logits_tile, prepare
from isobit.ops.linear_logp.slabs import SLAB_BYTES

#: Slab widths are multiples of this many columns.
SLAB = 256

#: For narrower slabs most time goes into loading and storing the sums of dhidden; chunks of slots are better.
WIDE_SLAB = 4096


@triton.jit(do_not_specialize=["blocks", "first", "slots", "col_first", "N", "inner"])
def dlogits_tile(
    hidden, weight, bias, ids, rows, count, stats, entropy, dlogp, dentropy, dlse, dz, scales, inverses,
    scale, inverse, first, slots, col_first, width, N, V, D, blocks, inner, hidden_so, hidden_si, weight_s,
    softcap, inv_softcap, logit_scale,
    LOGITS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """dz [slots, width] of one slab and chunk: gradients of the logits as they come out of the product."""
    tile, tile_n = place(tl.cdiv(slots, ROWS), tl.cdiv(width, COLS), tl.program_id(0))
    live_slots = tl.load(count) - first
    if tile * ROWS >= live_slots:
        return
    slot = tile * ROWS + tl.arange(0, ROWS)
    row, live = listed(rows + first, slot, live_slots)
    token = tl.load(ids + row, mask=live, other=0)
    col_in_slab = tile_n * COLS + tl.arange(0, COLS)
    col = col_first + col_in_slab
    z = logits_tile(
        hidden + row_offset(row, inner, hidden_so, hidden_si), live, weight, bias, col, V, D, blocks,
        weight_s, softcap, inv_softcap, logit_scale, LOGITS, ROWS, COLS, K,
    )  # fmt: skip

    each, inv = own_or(scale, scales, row, live), own_or(inverse, inverses, row, live)
    m = tl.load(stats + row, mask=live, other=0.0)
    s = tl.load(stats + N + row, mask=live, other=1.0)
    on_target, on_p, on_plogp = row_weights(
        given_at(entropy, row, live), given_at(dlogp, row, live), given_at(dentropy, row, live),
        given_at(dlse, row, live), inv,
    )  # fmt: skip
    u = (z - m[:, None]) * each[:, None]
    p = tl.exp2(u) * (1.0 / s)[:, None]
    weighted = tl.zeros([ROWS, COLS], tl.float32) + on_p[:, None]
    if dentropy is not None:
        ln2: tl.constexpr = 0.6931471805599453
        # 2^-1000 is 0 in fp32, and 0 * -inf would be NaN.
        weighted += on_plogp[:, None] * ((tl.maximum(u, -1000.0) - tl.log2(s)[:, None]) * ln2)
    d = p * weighted + tl.where(col[None, :] == token[:, None], on_target[:, None], 0.0)
    if softcap is not None:
        slope = z * inv_softcap
        d = d * (1.0 - slope * slope)
    if logit_scale is not None:
        d = d * logit_scale
    d = tl.where((col < V)[None, :], d, 0.0)
    at = dz + slot.to(tl.int64)[:, None] * width + col_in_slab[None, :]
    tl.store(at, narrow(d, dz), mask=live[:, None] & (col_in_slab < width)[None, :])


@triton.jit(do_not_specialize=["first", "slots", "col_first"])
def dhidden_tile(
    dz, weight, rows, count, open_sums, dhidden, first, slots, col_first, width, V, D, weight_s,
    FIRST: tl.constexpr, LAST: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile of dz weight. The chain continues from open_sums [slots, D] (except in the FIRST slab) and is
    stored there again (except in the LAST)."""
    tile, tile_n = place(tl.cdiv(slots, ROWS), tl.cdiv(D, COLS), tl.program_id(0))
    live_slots = tl.load(count) - first
    if tile * ROWS >= live_slots:
        return
    slot = tile * ROWS + tl.arange(0, ROWS)
    row, live = listed(rows + first, slot, live_slots)
    d = tile_n * COLS + tl.arange(0, COLS)
    v = tl.arange(0, K)
    inside = live[:, None] & (d < D)[None, :]
    sums_at = slot.to(tl.int64)[:, None] * D + d[None, :]
    left_at = dz + slot.to(tl.int64)[:, None] * width + v[None, :]
    right_at = weight + (col_first + v).to(tl.int64)[:, None] * weight_s + d[None, :]
    step = tl.full([], K, tl.int64) * weight_s
    acc = tl.zeros([ROWS, COLS], tl.float32)
    if not FIRST:
        acc = tl.load(open_sums + sums_at, mask=inside, other=0.0)
    for i in range(tl.cdiv(width, K)):
        left = tl.load(left_at, mask=live[:, None] & (v < width - i * K)[None, :], other=0.0)
        real = v < V - col_first - i * K
        right = tl.load(right_at, mask=real[:, None] & (d < D)[None, :], other=0.0)
        acc = steps(left, right, acc)
        left_at += K
        right_at += step
    if LAST:
        tl.store(dhidden + row[:, None] * D + d[None, :], narrow(acc, dhidden), mask=inside)
    else:
        tl.store(open_sums + sums_at, acc, mask=inside)


@triton.jit(do_not_specialize=["first", "slots", "col_first", "inner"])
def dweight_tile(
    dz, hidden, rows, count, open_sums, dweight, first, slots, col_first, width, V, D, inner,
    hidden_so, hidden_si, FIRST: tl.constexpr, LAST: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A tile of dz^T hidden, one chain per segment of slots. The fold continues from open_sums [width, D]
    (except in the FIRST chunk) and is stored there again (except in the LAST)."""
    tile, tile_n = place(tl.cdiv(width, ROWS), tl.cdiv(D, COLS), tl.program_id(0))
    col_in_slab = tile * ROWS + tl.arange(0, ROWS)
    d = tile_n * COLS + tl.arange(0, COLS)
    wide = col_in_slab < width
    sums_at = col_in_slab.to(tl.int64)[:, None] * D + d[None, :]
    inside = wide[:, None] & (d < D)[None, :]
    total = tl.zeros([ROWS, COLS], tl.float32)
    if not FIRST:
        total = tl.load(open_sums + sums_at, mask=inside, other=0.0)
    live_slots = tl.minimum(tl.load(count) - first, slots)
    for start in range(0, live_slots, SEGMENT):
        stop = tl.minimum(start + SEGMENT, live_slots)
        acc = tl.zeros([ROWS, COLS], tl.float32)
        for slot0 in range(start, stop, K):
            slot = slot0 + tl.arange(0, K)
            row, live = listed(rows + first, slot, live_slots)
            left_at = dz + slot.to(tl.int64)[None, :] * width + col_in_slab[:, None]
            left = tl.load(left_at, mask=wide[:, None] & live[None, :], other=0.0)
            right_at = hidden + row_offset(row, inner, hidden_so, hidden_si)[:, None] + d[None, :]
            right = tl.load(right_at, mask=live[:, None] & (d < D)[None, :], other=0.0)
            acc = steps(left, right, acc)
        total += acc
    if LAST:
        col = col_first + col_in_slab
        at = dweight + col.to(tl.int64)[:, None] * D + d[None, :]
        tl.store(at, narrow(total, dweight), mask=inside & (col < V)[:, None])
    else:
        tl.store(open_sums + sums_at, total, mask=inside)


# Launchers


def parts(N: int, vocab: int, itemsize: int, workspace_bytes: int | None) -> tuple[int, int]:
    """(slots per chunk, columns per slab) of the backward. Affects the schedule only.

    All slots and a wide slab if they fit; otherwise chunks of slots, with unfinished sums of dweight between
    them. A chunk is a multiple of a segment. At least one segment by one SLAB is used, whatever the limit.
    """
    elements = (SLAB_BYTES if workspace_bytes is None else workspace_bytes) // itemsize
    slots, columns = triton.cdiv(N, SEGMENT.value) * SEGMENT.value, triton.cdiv(vocab, SLAB) * SLAB
    width = min(columns, elements // slots // SLAB * SLAB)
    if width < min(columns, WIDE_SLAB):
        width = min(columns, WIDE_SLAB, max(SLAB, elements // SEGMENT.value // SLAB * SLAB))
        slots = min(slots, max(1, elements // width // SEGMENT.value) * SEGMENT.value)
    return slots, width


def linear_logp_bwd(
    launch: Launch = run, grad_dtype: torch.dtype | None = None, **args: Any
) -> tuple[Tensor | None, ...]:
    """(dhidden, dweight, dbias), each if it is wanted; in grad_dtype, or in the dtypes of their
    parameters."""
    call, weight, bias = prepare(args), args["weight"], args["bias"]
    N, D, V, hidden, tile = call.N, call.D, call.V, call.hidden, call.tile
    want_hidden, want_weight, want_bias = (args[f"want_{x}"] for x in ("hidden", "weight", "bias"))
    dhidden = dweight = dbias = None
    if want_hidden:
        dhidden = call.blank(grad_dtype or hidden.dtype)[:, None].expand(N, D).contiguous().view(hidden.shape)
    if want_weight:
        dweight = torch.zeros(weight.shape, dtype=grad_dtype or weight.dtype, device=weight.device)
    if want_bias:
        dbias = torch.zeros(bias.shape, dtype=grad_dtype or bias.dtype, device=bias.device)
    if N == 0:
        return dhidden, dweight, dbias

    slots, width = parts(N, V, hidden.element_size(), args["workspace_bytes"])
    empty = partial(torch.empty, device=hidden.device, dtype=torch.float32)
    dz = empty(min(slots, N), width, dtype=hidden.dtype)
    # With a frozen head a chunk goes through all slabs before the next begins, so only its sums are
    # unfinished.
    chunk_by_chunk = not (want_weight or want_bias)
    open_rows = empty(len(dz) if chunk_by_chunk else N, D) if want_hidden and width < V else None
    open_columns = empty(width, D) if want_weight and slots < N else None
    open_bias = empty(width, 1) if want_bias and slots < N else None
    ones = hidden.new_ones(1)  # one number, read with stride 0
    # The gradient of a sum arrives with stride 0, and saved-tensor hooks may restore tensors with any
    # strides.
    given = (args[name] for name in ("stats", "entropy", "dlogp", "dentropy", "dlse"))
    given = [x if x is None else x.contiguous() for x in given]
    tiles_of_rows, tiles_of_columns = triton.cdiv(len(dz), tile.rows), triton.cdiv(width, tile.cols)
    tiles_of_d = triton.cdiv(D, tile.cols)
    chunks, slabs = range(0, N, slots), range(0, V, width)
    each_part = product(chunks, slabs) if chunk_by_chunk else ((f, c) for c, f in product(slabs, chunks))
    for first, col in each_part:
        here = (first, len(dz), col, width)
        launch(
            dlogits_tile, (tiles_of_rows * tiles_of_columns,),
            hidden, weight, bias, call.ids, call.rows, call.count, *given, dz, *call.scaled, *here,
            N, V, D, triton.cdiv(D, tile.k), *call.walk, weight.stride(0), *call.transforms,
            LOGITS=call.rounding, **call.constants,
        )  # fmt: skip
        if want_hidden:
            open_here = open_rows if open_rows is None or chunk_by_chunk else open_rows[first:]
            launch(
                dhidden_tile, (tiles_of_rows * tiles_of_d,),
                dz, weight, call.rows, call.count, open_here, dhidden, *here, V, D, weight.stride(0),
                FIRST=col == 0, LAST=col + width >= V, **call.constants,
            )  # fmt: skip
        at_end = {"FIRST": first == 0, "LAST": first + slots >= N}
        if want_weight:
            launch(
                dweight_tile, (triton.cdiv(width, tile.rows) * tiles_of_d,),
                dz, hidden, call.rows, call.count, open_columns, dweight, *here, V, D, *call.walk,
                **at_end, **call.constants,
            )  # fmt: skip
        if want_bias:
            launch(
                dweight_tile, (triton.cdiv(width, tile.rows),),
                dz, ones, call.rows, call.count, open_bias, dbias, *here, V, 1, None, 0, 0,
                **at_end, **call.constants,
            )  # fmt: skip
    return dhidden, dweight, dbias
