"""Gradients of `linear_logp` on Hopper, one chunk of rows after another, with the bits of all rows at once.

dH is independent per row. dW and dbias are sums over all live rows, in segments of 512, and a chunk may end
anywhere. So the rows after its last whole segment, at most 511, wait with their d-logits and hidden states in
the *queue* for the chunk that completes the segment. They are stored in front of the next chunk's rows, in
the chunk buffers (`chunk_buffers`):

    memory   [queued | rows of the chunk | 64 of zeros] x [columns]    e of the forward, then d-logits
    queue    [queued | rows of the chunk | 64 of zeros] x [D]          hidden states

All whole segments go from there into dH, dW and dbias, and the remaining rows are moved to the front. The
number of queued rows is known only on the device; the host never waits for it.

If the probabilities of a chunk do not fit in memory, d-logits are computed one slab of columns at a time,
each after the same columns of the queue, from recomputed logits. A chunk with a gradient of the entropy does
the same in one slab.

If all rows are one chunk, dW may be postponed until a factor is known by which it is multiplied. Then one
kernel computes and rounds it, and there are no fp32 sums of it in memory.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run, unused
from isobit.frame.traced import decides
from isobit.kernels.hopper.bias import in_words
from isobit.kernels.hopper.lse import Slots
from isobit.kernels.hopper.pipeline import triton_kernel
from isobit.kernels.hopper.product import pack, sum_into
from isobit.kernels.host.token_stream import BLOCK, SEGMENT
from isobit.ops.linear_logp import kernels_hopper as forward
from isobit.ops.linear_logp.kernels_hopper_bwd import (
    Block,
    from_probs,
    recompute,
    sum_bias,
    unpack,
    weigh,
)
from isobit.ops.linear_policy_loss.chunk_buffers import columns_of, rows_in_memory, slots_of

#: Options that a chunk does not have.
_PLAIN: dict[str, Any] = dict.fromkeys(("softcap", "logit_scale", "logits_dtype", "vocab_size", "dlse"))


@decides
def _slab_width(elements: int, V: int, height: int, queues: bool) -> int:
    """Columns of a slab with this many rows in this much memory, after the queue's d-logits."""
    left = elements - (SEGMENT * columns_of(V) if queues else 0)
    return min(max(left // height // SEGMENT, 1), -(-V // SEGMENT)) * SEGMENT


@triton_kernel
def take_kernel(
    out, out_rows, counts, source, rows, queued, count, first_row, blocks, stride_words, words,
    WAIT: tl.constexpr, SEGMENT: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Row queued + s of out = row rows[s] of the source, for blocks * 128 slots; zeros for gaps, and for 64
    rows after them. Also stores which row it is, -1 for zeros. Widths and strides count words of 8 columns.

    counts [4] are set to: the number of rows now; of those, the rows in whole segments, if others may WAIT;
    the rows that wait; and 0."""
    columns = words * 8
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(rows + slot, mask=slot < blocks * 128, other=-1).to(tl.int64)
    there, inside = (row >= 0)[:, None], (j < columns)[None, :]
    at = tl.multiple_of(source + row[:, None] * (stride_words * 8) + j[None, :], (1, 16))
    values = tl.load(at, mask=there & inside, other=0.0)
    before = tl.load(queued)
    place = before + slot
    to = tl.multiple_of(out + place.to(tl.int64)[:, None] * columns + j[None, :], (1, 16))
    tl.store(to, values, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(out_rows + place, tl.where(row >= 0, row + first_row, -1).to(tl.int32))
        total = before + tl.load(count)
        whole = total
        if WAIT:
            whole = total // SEGMENT * SEGMENT
        tl.store(counts, total)  # all programs write the same values
        tl.store(counts + 1, whole)
        tl.store(counts + 2, total - whole)
        tl.store(counts + 3, 0)


@triton_kernel
def move_kernel(
    out, source, table, first, count, words, out_words, source_words,
    TABLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Row i of out = row first + i of the source, for i < count, and the same in a TABLE with one number per
    row. `first` and `count` are on the device. Widths and strides count words of 8 columns. Source and
    destination must not overlap, unless they are identical."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    taken = i < tl.load(count)
    inside = taken[:, None] & (j < words * 8)[None, :]
    row = i.to(tl.int64)
    from_row = row + tl.load(first)
    at = from_row[:, None] * (source_words * 8) + j[None, :]
    values = tl.load(tl.multiple_of(source + at, (1, 16)), mask=inside)
    to = row[:, None] * (out_words * 8) + j[None, :]
    tl.store(tl.multiple_of(out + to, (1, 16)), values, mask=inside)
    if TABLE:
        if tl.program_id(1) == 0:
            tl.store(table + row, tl.load(table + from_row, mask=taken), mask=taken)


@triton_kernel
def clear_kernel(out, count, words, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeros ROWS rows from row `count` on, because sums over tokens read whole blocks. A row has `words`
    words of 8 columns."""
    i = (tl.load(count) + tl.arange(0, ROWS)).to(tl.int64)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    to = tl.multiple_of(out + i[:, None] * (words * 8) + j[None, :], (1, 16))
    tl.store(to, tl.zeros((ROWS, COLUMNS), out.dtype.element_ty), mask=(j < words * 8)[None, :])


@triton_kernel
def round_kernel(out, sums, factor, size, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """out = sums * factor, rounded to its dtype. `size` counts words of 8 numbers if they are WHOLE."""
    if WHOLE:
        size = size * 8
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    inside = at < size
    values = tl.load(tl.multiple_of(sums + first, 16) + tl.arange(0, BLOCK), mask=inside)
    to = tl.multiple_of(out + first, 16) + tl.arange(0, BLOCK)
    tl.store(to, (values * tl.load(factor)).to(out.dtype.element_ty), mask=inside)


# Launchers


def linear_logp_chunk(launch: Launch = run, **args: Any) -> tuple[Tensor | None, ...]:
    """(logp, entropy, stats); memory holds e of these rows, after the queued ones."""
    memory, V, rows = args["memory"], len(args["weight"]), args["token_ids"].numel()
    width = columns_of(V)
    probs = memory[: memory.numel() // width * width].view(-1, width)
    assert len(args["kept_base"]) >= slots_of(rows) <= len(probs), "memory is of other chunks"
    into = (probs, args["kept_base"], args["queued"])
    given = args | _PLAIN | {"return_lse": False, "return_stats": True, "keep": True}
    logp, entropy, _, stats, *_ = forward.linear_logp(launch, into if rows else None, **given)
    return logp, entropy, stats


def linear_logp_chunk_bwd(launch: Launch = run, **args: Any) -> Tensor:
    """The number of queued rows, including those whose terms of dweight are postponed. Writes into dhidden,
    dweight and dbias, as far as they are given."""
    args = args | _PLAIN
    weight, memory, queue, rows = (args[name] for name in ("weight", "memory", "queue", "queue_rows"))
    dhidden, dweight, dbias, queued = (args[name] for name in ("dhidden", "dweight", "dbias", "queued"))
    V, D = weight.shape
    if args["bias"] is not None:
        args["bias"] = in_words(args["bias"], V)
    N, first_row, last = args["token_ids"].numel(), args["first_row"], args["last"]
    over_tokens = dweight is not None or dbias is not None
    queues = over_tokens and not (args["first"] and last)
    slots, factor = forward.packed_slots(args, True, launch)
    source = forward.rows_for_tma(args["hidden"])
    counts = rows.new_empty(4)
    _take(queue, rows, counts, source, slots, queued, first_row, queues and not last, launch)
    total, whole, left, none = counts.split(1)

    height, columns = rows_in_memory(N, queues), columns_of(V)
    assert len(rows) == len(queue) >= height, "memory is of other chunks"
    fits = args["kept"]  # d-logits of all columns fit, and the forward has stored e there
    use_probs = fits and args["dentropy"] is None  # the entropy's gradient needs the logits again
    width = columns if fits else _slab_width(memory.numel(), V, height, queues)
    waiting = memory[: SEGMENT * columns].view(SEGMENT, columns) if queues else None
    first_free = waiting.numel() if waiting is not None and not fits else 0
    slab = memory[first_free : first_free + height * width].view(height, width)
    weights, used = weigh(slots, slots.capacity, args, N, V, factor, launch)
    block = Block(
        hidden=source if use_probs else pack(source, slots.rows, launch),
        rows=slots.rows,
        ids=slots.ids,
        scales=slots.scales,
        weights=weights,
        count=used,
        probs=slab if use_probs else None,
        probs_base=args["kept_base"],
    )
    dh = queue.new_empty(height - BLOCK, D, dtype=torch.float32) if dhidden is not None else None
    for first in range(0, V, width):
        here = slice(first, min(first + width, V))
        dz = slab[:, : here.stop - first]
        if waiting is not None and not fits:
            _move(slab, waiting[:, first:], none, queued, launch)
        if use_probs:
            from_probs(dz, block, 0, launch, queued)
        else:
            recompute(dz, block, weight[here], args, first, launch, queued)
        if last:
            _clear(slab, total, launch)
        if dh is not None:
            init = dh if first else None
            sum_into(dh, weight[here], dz[: len(dh)].t(), init=init, rows=whole, launch=launch)
        if dweight is not None:
            own = dweight[here]
            init = None if args["first"] else own
            sum_into(own, queue[:height], dz, init=init, counted=whole, launch=launch)
        if dbias is not None:
            sum_bias(dbias[here], dz, whole, not args["first"], launch)
        if waiting is not None and not last:
            _move(waiting[:, first:], slab, whole, left, launch)
    if dh is not None:
        # Every row here has a valid token, so its row number stands for the id.
        unpack(dhidden, dh, rows, rows, whole, (1 << 31) - 1, launch)
        slots.blank(dhidden[first_row : first_row + N], launch)
    if waiting is not None and not last:
        _move(queue, queue, whole, left, launch, rows)
    return total if args["postpone"] else left


def linear_logp_chunk_dw(launch: Launch = run, **args: Any) -> Tensor:
    """factor dz^T hidden over the rows in memory and queue, in their dtype."""
    memory, queue, V = args["memory"], args["queue"], args["vocab"]
    width = columns_of(V)
    dz = memory[: memory.numel() // width * width].view(-1, width)[:, :V]
    out = queue.new_empty(V, queue.shape[1])
    sum_into(out, queue, dz, counted=args["count"], factor=args["factor"], launch=launch)
    return out


def linear_logp_chunk_rounded(launch: Launch = run, **args: Any) -> Tensor:
    """sums * factor. PyTorch's own product with a factor on the GPU reads and writes single elements, and
    takes three times as long."""
    sums = args["sums"]
    out = torch.empty_like(sums, dtype=args["dtype"])
    if sums.numel() == 0:
        return out
    whole = sums.numel() % 8 == 0
    launch(
        round_kernel, (-(-sums.numel() // 4096),),
        out, sums, args["factor"], sums.numel() // 8 if whole else sums.numel(),
        WHOLE=whole,
        BLOCK=4096,
        num_warps=8,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _take(
    queue: Tensor, queue_rows: Tensor, counts: Tensor, source: Tensor, slots: Slots, queued: Tensor,
    first_row: int, wait: bool, launch: Launch,
) -> None:  # fmt: skip
    """Copies the hidden states of the slots into the queue, after the queued ones, and fills `counts`."""
    D = queue.shape[1]
    launch(
        take_kernel, ((slots.capacity + BLOCK) // BLOCK, -(-D // 256)),
        queue, queue_rows, counts, source, slots.rows, queued, slots.count,
        first_row, slots.capacity // 128, source.stride(0) // 8, D // 8,
        WAIT=wait,
        SEGMENT=SEGMENT,
        SLOTS=BLOCK,
        COLUMNS=256,
        enable_fp_fusion=False,
    )  # fmt: skip


def _move(
    out: Tensor, source: Tensor, first: Tensor, count: Tensor, launch: Launch, table: Tensor | None = None
) -> None:
    """Moves at most one segment of rows, over the columns that both have."""
    columns = min(out.shape[1], source.shape[1])
    launch(
        move_kernel, (SEGMENT // 16, -(-columns // 512)),
        out, source,
        unused(first) if table is None else table,
        first, count, columns // 8, out.stride(0) // 8, source.stride(0) // 8,
        TABLE=table is not None,
        ROWS=16,
        COLUMNS=512,
        enable_fp_fusion=False,
    )  # fmt: skip


def _clear(out: Tensor, count: Tensor, launch: Launch) -> None:
    """Zeros one block of rows, from row `count` on."""
    columns = out.shape[1]
    launch(
        clear_kernel, (-(-columns // 256),),
        out, count, columns // 8,
        ROWS=BLOCK,
        COLUMNS=256,
        enable_fp_fusion=False,
    )  # fmt: skip
