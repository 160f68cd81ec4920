"""`ratio_kl` in portable Triton: NVIDIA, AMD, and the CPU interpreter.

Forward, three kernels:

    list_rows      lists the rows that count
    sum_parts      reads the logits, each once: one program a part of a row of the policy or of the reference
    finish_rows    adds the parts of each row and makes its results

A part is a row, or some of its splits where few rows count: so the GPU is as busy with a tenth of the rows as
with all of them. How many count is known on the device alone, and there the parts are chosen. Rows are summed
as in `logp`, in its order, whatever the parts: so logp here has the bits of `logp`, and a policy that is
compared with itself has a ratio of exactly 1.

Backward, one read and one write of the policy's logits, from the sums and the slopes of ratio and kl that the
forward kept: `isobit.blocks.triton_logits`.

Token ids: of a row whose id is `ignore_index` or whose mask is 0 nothing else is read; its ratio is 1, its
other results and its gradient are 0. A live row with an id outside [0, V) reads nothing at that id; its
results and its gradient are NaN.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.arch import sm_count
from isobit.blocks.interpreter import INTERPRETED
from isobit.blocks.launch import Launch, run
from isobit.blocks.rows import row_strides, walkable
from isobit.blocks.temperature import scaling
from isobit.blocks.triton_exp import exp, k3_and_expm1
from isobit.blocks.triton_logits import BATCH, as_bytes, gradient_of, plan_of, word_of
from isobit.blocks.triton_rows import (
    finite_or_zero,
    fold,
    own_or,
    rescale,
    row_results,
    split_sums,
)

#: Rows that a program of `list_rows` lists in one go and that it counts in one go, how many programs there
#: are of it at most, and rows that a program of `finish_rows` finishes. Schedule only.
LISTED, COUNTED, LISTS, FINISHED = 1024, 8192, 16, 32

#: Programs of `sum_parts` an SM, where rows have splits enough: 16 run at a time, and four times as many
#: leave no SM idle for long at the end. Schedule only; the interpreter, with one SM, meets both kinds of
#: parts with few rows.
PARTS_PER_SM = 16 if INTERPRETED.value else 64

_BATCH = (*BATCH, "old_so", "given_so", "programs", "room", "tiles")


@triton.jit
def offset(row, inner, outer_stride, inner_stride):
    """`row_offset` of rows in 32 bits, by a division in 32 bits."""
    outer = row // inner
    return outer.to(tl.int64) * outer_stride + (row - outer * inner).to(tl.int64) * inner_stride


@triton.jit
def which_count(ids, mask, row, inside, inner, ids_so, ids_si, mask_so, mask_si, ignore_index):
    """(ids, which count) of the rows inside."""
    token = tl.load(ids + offset(row, inner, ids_so, ids_si), mask=inside, other=0)
    live = inside & (token != ignore_index)
    if mask is not None:
        live = live & (tl.load(mask + offset(row, inner, mask_so, mask_si), mask=inside, other=0) != 0)
    return token, live


@triton.jit(do_not_specialize=_BATCH)
def list_rows(
    rows, ids, mask, ignore_index, N, inner, tiles, ids_so, ids_si, mask_so, mask_si,
    LISTED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """How many rows count, and behind it which, ascending. One program lists those of its own `tiles` times
    LISTED rows, and counts those before."""
    begin = tl.program_id(0) * tiles * LISTED
    before = tl.zeros([COUNTED], tl.int32)
    for first in range(0, begin, COUNTED):
        row = first + tl.arange(0, COUNTED)
        _, live = which_count(
            ids, mask, row, row < begin, inner, ids_so, ids_si, mask_so, mask_si, ignore_index
        )
        before += live.to(tl.int32)
    found = tl.sum(before, 0)
    for first in range(begin, tl.minimum(begin + tiles * LISTED, N), LISTED):
        row = first + tl.arange(0, LISTED)
        _, live = which_count(ids, mask, row, row < N, inner, ids_so, ids_si, mask_so, mask_si, ignore_index)
        some = live.to(tl.int32)
        tl.store(rows + found + tl.cumsum(some, 0), row, mask=live)
        found += tl.sum(some, 0)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(rows, found)


@triton.jit
def parts_of(count, programs, splits):
    """Into how many parts a row is cut where `count` of them share the programs."""
    return tl.maximum(tl.minimum(programs // tl.maximum(count, 1), splits), 1)


@triton.jit
def sum_part(
    logits, start, part, parts, splits, sums, place, room, V, scale, ENTROPY: tl.constexpr,
    WORD: tl.constexpr, LOG_BLOCK: tl.constexpr, UNROLL: tl.constexpr, STEPS: tl.constexpr,
    LOG_SPLITS: tl.constexpr,
):  # fmt: skip
    """(m, s, t) of a part of the row that starts at element `start`, into planes of `room` numbers: those of
    each split at [place, split], or those of the row at [place] if there is no other part."""
    index = tl.arange(0, 1 << LOG_SPLITS)
    m = tl.full([1 << LOG_SPLITS], float("-inf"), tl.float32)
    s = tl.zeros([1 << LOG_SPLITS], tl.float32)
    t = tl.zeros([1 << LOG_SPLITS], tl.float32)
    lo, hi = part * splits // parts, (part + 1) * splits // parts
    for split in range(lo, hi):
        m1, s1, t1 = split_sums(logits, start, split, V, scale, ENTROPY, WORD, LOG_BLOCK, UNROLL, STEPS)
        m = tl.where(index == split, m1, m)
        s = tl.where(index == split, s1, s)
        t = tl.where(index == split, t1, t)
    if parts == 1:
        m1, s1, t1 = fold(m, s, t, scale, LOG_SPLITS)
        tl.store(sums + place, m1)
        tl.store(sums + room + place, s1)
        if ENTROPY:
            tl.store(sums + 2 * room + place, t1)
    else:
        at, own = sums + place * splits + index, (index >= lo) & (index < hi)
        tl.store(at, m, mask=own)
        tl.store(at + room, s, mask=own)
        if ENTROPY:
            tl.store(at + 2 * room, t, mask=own)


@triton.jit(do_not_specialize=_BATCH)
def sum_parts(
    policy, ref, rows, sums, scales, scale, V, inner, room, policy_so, policy_si, ref_so, ref_si,
    ENTROPY: tl.constexpr, WORD: tl.constexpr, REF_WORD: tl.constexpr, LOG_BLOCK: tl.constexpr,
    UNROLL: tl.constexpr, STEPS: tl.constexpr, LOG_SPLITS: tl.constexpr,
):  # fmt: skip
    """One program a part of a row that counts, of the policy or of the reference."""
    program, programs, count = tl.program_id(0), tl.num_programs(0), tl.load(rows)
    splits = tl.cdiv(V, (UNROLL << LOG_BLOCK) * STEPS)
    parts = parts_of(count, programs, splits)
    place = program // parts
    if place >= count:
        return
    part = program - place * parts
    row = tl.load(rows + 1 + place)
    place = place.to(tl.int64)
    scale = own_or(scale, scales, row, None)
    if tl.program_id(1) == 0:
        sum_part(
            policy, offset(row, inner, policy_so, policy_si), part, parts, splits, sums, place, room, V,
            scale, ENTROPY, WORD, LOG_BLOCK, UNROLL, STEPS, LOG_SPLITS,
        )  # fmt: skip
    elif ref is not None:
        sum_part(
            ref, offset(row, inner, ref_so, ref_si), part, parts, splits, sums + (2 + ENTROPY) * room,
            place, room, V, scale, False, REF_WORD, LOG_BLOCK, UNROLL, STEPS, LOG_SPLITS,
        )  # fmt: skip


@triton.jit
def sums_of(
    sums, place, inside, splits, room, scale, ENTROPY: tl.constexpr, ROWS: tl.constexpr,
    LOG_SPLITS: tl.constexpr,
):  # fmt: skip
    """(m, s, t) of rows from those of their splits: what `fold` does, of many rows. Of a row that is summed
    already there is one, and it stays as it is."""
    index = tl.arange(0, 1 << LOG_SPLITS)[None, :]
    at, there = sums + place.to(tl.int64)[:, None] * splits + index, inside[:, None] & (index < splits)
    m = tl.load(at, mask=there, other=float("-inf"))
    s = tl.load(at + room, mask=there, other=0.0)
    t = tl.zeros([ROWS, 1 << LOG_SPLITS], tl.float32)
    if ENTROPY:
        t = tl.load(at + 2 * room, mask=there, other=0.0)
    top = tl.max(m, axis=1)
    s, t = rescale(m, s, t, finite_or_zero(top)[:, None], scale[:, None])
    for i in tl.static_range(LOG_SPLITS):  # a tree of neighbours, as `tree_sum`
        s = tl.sum(tl.reshape(s, [ROWS, 1 << (LOG_SPLITS - 1 - i), 2]), axis=2)
        t = tl.sum(tl.reshape(t, [ROWS, 1 << (LOG_SPLITS - 1 - i), 2]), axis=2)
    return top, tl.max(s, axis=1), tl.max(t, axis=1)  # of one number each


@triton.jit
def logp_of(logits, start, token, good, m, s, t, inverse):
    """(logp, entropy, s) of rows from their sums; NaN where a token is none."""
    z = tl.load(logits + start + token, mask=good, other=0.0).to(tl.float32)
    logp, entropy, _, s = row_results(z, m, s, t, inverse)
    nan = tl.where(good, 0.0, float("nan"))
    return logp + nan, entropy + nan, s


@triton.jit
def store_rows(row, mask, N, ratio, kl, logp, entropy, stats, slopes, found):
    """Results of rows: (ratio, kl, logp, entropy, m, s, slope of kl). The slope of ratio is ratio itself."""
    tl.store(ratio + row, found[0], mask=mask)
    if kl is not None:
        tl.store(kl + row, found[1], mask=mask)
    if logp is not None:
        tl.store(logp + row, found[2], mask=mask)
    if entropy is not None:
        tl.store(entropy + row, found[3], mask=mask)
    if stats is not None:
        tl.store(stats + row, found[4], mask=mask)
        tl.store(stats + N + row, found[5], mask=mask)
        tl.store(slopes + row, found[0], mask=mask)
        tl.store(slopes + N + row, found[6], mask=mask)


@triton.jit(do_not_specialize=_BATCH)
def finish_rows(
    policy, ids, mask, ref, old_logp, ref_logp, ratio, kl, logp, entropy, stats, slopes, scales, inverses,
    scale, inverse, ignore_index, N, V, inner, rows, sums, programs, room, splits,
    policy_so, policy_si, ids_so, ids_si, mask_so, mask_si, ref_so, ref_si, old_so, old_si, given_so,
    given_si, LOG_SPLITS: tl.constexpr, FINISHED: tl.constexpr,
):  # fmt: skip
    """One program the rows in FINISHED places of the list, and as many that do not count."""
    ENTROPY: tl.constexpr = entropy is not None
    place = tl.program_id(0) * FINISHED + tl.arange(0, FINISHED)
    _, live = which_count(ids, mask, place, place < N, inner, ids_so, ids_si, mask_so, mask_si, ignore_index)
    store_rows(
        place, (place < N) & (live == 0), N, ratio, kl, logp, entropy, stats, slopes,
        (1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0),
    )  # fmt: skip

    count = tl.load(rows)
    inside = place < count
    row = tl.load(rows + 1 + place, mask=inside, other=0)
    token = tl.load(ids + offset(row, inner, ids_so, ids_si), mask=inside, other=-1)
    good = inside & (token >= 0) & (token < V)
    scale, inverse = own_or(scale, scales, row, inside), own_or(inverse, inverses, row, inside)
    left = tl.where(parts_of(count, programs, splits) == 1, 1, splits)  # sums of a row
    m, s, t = sums_of(sums, place, inside, left, room, scale, ENTROPY, FINISHED, LOG_SPLITS)
    start = offset(row, inner, policy_so, policy_si)
    own, own_entropy, s = logp_of(policy, start, token, good, m, s, t, inverse)
    old = own
    if old_logp is not None:
        old = tl.load(old_logp + offset(row, inner, old_so, old_si), mask=inside, other=0.0)
    penalty = tl.zeros([FINISHED], tl.float32)
    slope = tl.zeros([FINISHED], tl.float32)
    if kl is not None:
        if ref is not None:
            of_ref = sums + (2 + ENTROPY) * room
            ref_m, ref_s, none = sums_of(
                of_ref, place, inside, left, room, scale, False, FINISHED, LOG_SPLITS
            )
            start = offset(row, inner, ref_so, ref_si)
            other, _, _ = logp_of(ref, start, token, good, ref_m, ref_s, none, inverse)
        else:
            other = tl.load(ref_logp + offset(row, inner, given_so, given_si), mask=inside, other=0.0)
        penalty, expm1 = k3_and_expm1(other - own)
        slope = -expm1
    store_rows(
        row, inside, N, ratio, kl, logp, entropy, stats, slopes,
        (exp(own - old), penalty, own, own_entropy, m + tl.where(good, 0.0, float("nan")), s, slope),
    )  # fmt: skip


def ratio_kl(launch: Launch = run, **args: Any) -> tuple[Tensor | None, ...]:
    """(ratio, kl, logp, entropy, stats [2, *] = (m, s), slopes [2, *] of ratio and kl in logp); None for what
    was not asked."""
    logits, ids, mask = args["policy_logits"], args["token_ids"], as_bytes(args["mask"])
    ref, given = (args[name] if args["return_kl"] else None for name in ("ref_logits", "ref_logp"))
    lead, V, device = logits.shape[:-1], logits.shape[-1], logits.device
    empty = partial(torch.empty, device=device, dtype=torch.float32)
    ratio = empty(lead)
    kl, logp, entropy = (
        empty(lead) if args[f"return_{name}"] else None for name in ("kl", "logp", "entropy")
    )
    stats, slopes = (empty((2, *lead)) if args["return_stats"] else None for _ in "ms")
    results = (ratio, kl, logp, entropy, stats, slopes)
    N = ratio.numel()
    if N == 0:
        return results
    of_rows = (walkable(lead, t) for t in (args["old_logp"], given))
    inner, tensors, strides = row_strides(lead, (logits, ids, mask, ref, *of_rows))
    z, ids, mask, ref = tensors[:4]
    scaled, plan = scaling(args["temperature"], N), plan_of(V)
    programs = max(N, min(N * plan.splits, PARTS_PER_SM * sm_count(device)))
    # Sums of every split are kept only where a row has two parts or more.
    room = max(N, min(N, programs // 2) * plan.splits)
    rows = torch.empty(1 + N, dtype=torch.int32, device=device)
    sums = empty((2 if ref is None else 4) + (entropy is not None), room)
    tiles = -(-N // (LISTED * LISTS))
    launch(
        list_rows, (-(-N // (LISTED * tiles)),), rows, ids, mask, args["ignore_index"], N, inner, tiles,
        *strides[2:6], LISTED=LISTED, COUNTED=COUNTED, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    launch(
        sum_parts, (programs, 1 if ref is None else 2), z, ref, rows, sums, scaled.scales, scaled.scale,
        V, inner, room, *strides[:2], *strides[6:8], ENTROPY=entropy is not None,
        WORD=word_of(z, strides[:2]), REF_WORD=1 if ref is None else word_of(ref, strides[6:8]),
        LOG_SPLITS=plan.log_splits, **plan.order, **plan.options,
    )  # fmt: skip
    launch(
        finish_rows, (-(-N // FINISHED),), *tensors, *results, *scaled, args["ignore_index"], N, V, inner,
        rows, sums, programs, room, plan.splits, *strides,
        LOG_SPLITS=plan.log_splits, FINISHED=FINISHED, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return results


def ratio_kl_bwd(launch: Launch = run, **args: Any) -> Tensor:
    """The gradient of the policy's logits, contiguous, in their dtype."""
    return gradient_of(args["policy_logits"], launch, args)
