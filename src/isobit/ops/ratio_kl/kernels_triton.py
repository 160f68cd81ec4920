"""`ratio_kl` in portable Triton: NVIDIA, AMD, and the CPU interpreter.

Forward, two kernels:

    sum_parts      reads all logits once: one program takes a part of a segment of the policy or the reference
    finish_rows    adds the splits of each row and computes its results

Programs share segments of rows, and each finds the unmasked rows of its segment by itself. The splits of all
these rows (or the rows, if there are too many to store the sums of their splits) are shared evenly, so that
the GPU is as busy with a tenth of the rows as with all of them. Rows are summed in the order of `logp`,
whatever the parts. So logp here has the bits of `logp`, and a policy that is compared with itself has a ratio
of exactly 1. Where the hardware allows it `finish_rows` is started early: it reads everything but the sums
while `sum_parts` is still running, and then waits for it.

The backward reads and writes the policy's logits once, with the sums and the derivatives of ratio and kl that
the forward saved: `isobit.kernels.triton.logits`.

Token ids: for a row whose id is `ignore_index` or whose mask is 0 nothing else is read; its ratio is 1, its
other results and its gradient are 0. A live row with an id outside [0, V) reads nothing at that id; its
results and its gradient are NaN.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run
from isobit.kernels.host.rows import row_strides, walkable
from isobit.kernels.triton.dependent_launch import (
    dependent_launch_options,
    start_next_launch,
    wait_for_last_launch,
)
from isobit.kernels.triton.exp import difference, exp, k3_and_expm1
from isobit.kernels.triton.interpreter import INTERPRETED
from isobit.kernels.triton.logits import BATCH, as_bytes, gradient_of, schedule_of, word_of
from isobit.kernels.triton.rows import (
    finite_or_zero,
    fold,
    own_or,
    rescale,
    row_results,
    split_sums,
)
from isobit.kernels.triton.temperature import scaling_of_rows

#: Rows per segment: a program looks at all of them to find its own. Affects the schedule only.
SEGMENT = 64

#: The most programs per SM (of policy or reference): 16 run at a time, and four times as many leave no SM
#: idle for long at the end. Affects the schedule only. The interpreter has one SM, and with this value its
#: parts are shorter than a row if there are few rows, and longer if there are many.
PARTS_PER_SM = 16 if INTERPRETED.value else 64

#: Splits per program of `sum_parts` if there are many rows, all live. A program without work still costs
#: about a nanosecond: with a tenth of 8192 rows of 32768 fp16 logits an H200 took 35, 43 and 53 us with 8448,
#: 16896 and 25344 programs (2026-11). To deal few live rows to one wave of programs took 43, 66 and 114 us
#: instead of 39, 61 and 115, for both models and V = 32768, 50257 and 131072. Affects the schedule only.
SPLITS_EACH = 4

#: Sums that a call may store, 0.75 MB of fp32. Affects the schedule only.
MOST_SUMS = 3 << 16

_BATCH = (*BATCH, "old_so", "given_so", "capacity")


@triton.jit
def offset(row, inner, outer_stride, inner_stride):
    """`row_offset` for rows below 2^31, with a 32-bit division."""
    outer = row // inner
    return outer.to(tl.int64) * outer_stride + (row - outer * inner).to(tl.int64) * inner_stride


@triton.jit
def load_ids(ids, mask, row, inside, inner, ids_so, ids_si, mask_so, mask_si, ignore_index):
    """(ids, which of them are live) of the rows inside."""
    token = tl.load(ids + offset(row, inner, ids_so, ids_si), mask=inside, other=0)
    live = inside & (token != ignore_index)
    if mask is not None:
        live = live & (tl.load(mask + offset(row, inner, mask_so, mask_si), mask=inside, other=0) != 0)
    return token, live


@triton.jit
def units_of(live_count, parts, splits, capacity):
    """Into how many units each live row of a segment is divided for programs to share: its parts, or 1 if
    there is no memory for the sums of all splits."""
    return tl.where(live_count * splits <= capacity, parts, 1)


@triton.jit
def sum_splits(
    logits, start, lo, hi, merge, splits, sums, index_of_row, plane, V, scale, ENTROPY: tl.constexpr,
    WORD: tl.constexpr, LOG_BLOCK: tl.constexpr, UNROLL: tl.constexpr, STEPS: tl.constexpr,
    LOG_SPLITS: tl.constexpr,
):  # fmt: skip
    """(m, s, t) of splits lo to hi of the row that starts at element `start`, into three planes of `plane`
    numbers: those of each split at [index_of_row, split], or, if they `merge`, their sum at
    [index_of_row]."""
    index = tl.arange(0, 1 << LOG_SPLITS)
    m = tl.full([1 << LOG_SPLITS], float("-inf"), tl.float32)
    s = tl.zeros([1 << LOG_SPLITS], tl.float32)
    t = tl.zeros([1 << LOG_SPLITS], tl.float32)
    for split in range(lo, hi):
        m1, s1, t1 = split_sums(logits, start, split, V, scale, ENTROPY, WORD, LOG_BLOCK, UNROLL, STEPS)
        m = tl.where(index == split, m1, m)
        s = tl.where(index == split, s1, s)
        t = tl.where(index == split, t1, t)
    if merge:
        m1, s1, t1 = fold(m, s, t, scale, LOG_SPLITS)
        tl.store(sums + index_of_row, m1)
        tl.store(sums + plane + index_of_row, s1)
        if ENTROPY:
            tl.store(sums + 2 * plane + index_of_row, t1)
    else:
        at, own = sums + index_of_row * splits + index, (index >= lo) & (index < hi)
        tl.store(at, m, mask=own)
        tl.store(at + plane, s, mask=own)
        if ENTROPY:
            tl.store(at + 2 * plane, t, mask=own)


@triton.jit(do_not_specialize=_BATCH)
def sum_parts(
    policy, ref, ids, mask, sums, scales, scale, ignore_index, N, V, inner, capacity, parts,
    policy_so, policy_si, ids_so, ids_si, mask_so, mask_si, ref_so, ref_si,
    ENTROPY: tl.constexpr, WORD: tl.constexpr, REF_WORD: tl.constexpr, ALIKE: tl.constexpr,
    LOG_BLOCK: tl.constexpr, UNROLL: tl.constexpr, STEPS: tl.constexpr, LOG_SPLITS: tl.constexpr,
    SEGMENT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sums of the splits of live rows; one half of the programs takes the policy, the other the reference. If
    a segment has fewer splits than programs, its first programs take one each. Neighbouring programs have
    different segments, so that the first programs have work whichever rows are live. A segment has memory for
    `capacity` sums in each plane.

    ALIKE: rows of both are summed by the same code, so that an SM needs one copy of it in its instruction
    cache and not two.
    """
    if EARLY:
        start_next_launch()
    BOTH: tl.constexpr = 1 if ref is None else 2
    segment, of_ref = tl.program_id(0) // BOTH, tl.program_id(0) % BOTH
    segments, nth, programs = tl.num_programs(0) // BOTH, tl.program_id(1), tl.num_programs(1)
    index = tl.arange(0, SEGMENT)
    rows = segment * SEGMENT + index
    _, live = load_ids(ids, mask, rows, rows < N, inner, ids_so, ids_si, mask_so, mask_si, ignore_index)
    nth_live = tl.cumsum(live.to(tl.int32), 0)  # from 1 on
    count = tl.max(nth_live, 0)
    splits = tl.cdiv(V, (UNROLL << LOG_BLOCK) * STEPS)
    units = units_of(count, parts, splits, capacity)
    # This program's part of all units, from the first to the last row.
    each, more = count * units // programs, count * units % programs
    lo = nth * each + tl.minimum(nth, more)
    hi = lo + each + (nth < more).to(tl.int32)
    plane = segments.to(tl.int64) * capacity
    sums += segment.to(tl.int64) * capacity
    for i in range(lo // units, tl.cdiv(hi, units)):  # live rows of the segment
        row = segment * SEGMENT + tl.max(tl.where(live & (nth_live == i + 1), index, 0), 0)
        own = own_or(scale, scales, row, None)
        first, last = tl.maximum(lo - i * units, 0), hi - i * units
        last = tl.where(last < units, last, splits)
        if ALIKE:
            start = offset(row, inner, policy_so, policy_si)
            start = tl.where(of_ref == 0, start, offset(row, inner, ref_so, ref_si))
            sum_splits(
                tl.where(of_ref == 0, policy, ref), start, first, last, units == 1, splits,
                sums + of_ref * 2 * plane, i, plane, V, own, False, WORD, LOG_BLOCK, UNROLL, STEPS,
                LOG_SPLITS,
            )  # fmt: skip
        elif of_ref == 0:
            sum_splits(
                policy, offset(row, inner, policy_so, policy_si), first, last, units == 1, splits, sums,
                i, plane, V, own, ENTROPY, WORD, LOG_BLOCK, UNROLL, STEPS, LOG_SPLITS,
            )  # fmt: skip
        elif ref is not None:
            sum_splits(
                ref, offset(row, inner, ref_so, ref_si), first, last, units == 1, splits,
                sums + (2 + ENTROPY) * plane, i, plane, V, own, False, REF_WORD, LOG_BLOCK, UNROLL,
                STEPS, LOG_SPLITS,
            )  # fmt: skip


@triton.jit
def sums_of(
    sums, index_of_row, inside, splits, plane, scale, ENTROPY: tl.constexpr, ROWS: tl.constexpr,
    LOG_SPLITS: tl.constexpr,
):  # fmt: skip
    """(m, s, t) of rows from those of their splits: `fold` for many rows. A row with a single sum is returned
    unchanged."""
    index = tl.arange(0, 1 << LOG_SPLITS)[None, :]
    at, there = sums + index_of_row[:, None] * splits + index, inside[:, None] & (index < splits)
    m = tl.load(at, mask=there, other=float("-inf"))
    s = tl.load(at + plane, mask=there, other=0.0)
    t = tl.zeros([ROWS, 1 << LOG_SPLITS], tl.float32)
    if ENTROPY:
        t = tl.load(at + 2 * plane, mask=there, other=0.0)
    top = tl.max(m, axis=1)
    s, t = rescale(m, s, t, finite_or_zero(top)[:, None], scale[:, None])
    for i in tl.static_range(LOG_SPLITS):  # a tree of neighbours, as `tree_sum`
        s = tl.sum(tl.reshape(s, [ROWS, 1 << (LOG_SPLITS - 1 - i), 2]), axis=2)
        t = tl.sum(tl.reshape(t, [ROWS, 1 << (LOG_SPLITS - 1 - i), 2]), axis=2)
    return top, tl.max(s, axis=1), tl.max(t, axis=1)  # one number each


@triton.jit
def logp_of(z, good, m, s, t, inverse):
    """(logp, entropy, s) of rows from their sums and the logits z of their tokens; NaN for an invalid
    token."""
    logp, entropy, _, s = row_results(z, m, s, t, inverse)
    nan = tl.where(good, 0.0, float("nan"))
    return logp + nan, entropy + nan, s


@triton.jit
def store_rows(row, mask, N, ratio, kl, logp, entropy, stats, slopes, results):
    """Store results of rows: (ratio, kl, logp, entropy, m, s, derivative of kl). The derivative of ratio is
    ratio itself."""
    own_ratio, own_kl, own_logp, own_entropy, m, s, kl_slope = results
    tl.store(ratio + row, own_ratio, mask=mask)
    if kl is not None:
        tl.store(kl + row, own_kl, mask=mask)
    if logp is not None:
        tl.store(logp + row, own_logp, mask=mask)
    if entropy is not None:
        tl.store(entropy + row, own_entropy, mask=mask)
    if stats is not None:
        tl.store(stats + row, m, mask=mask)
        tl.store(stats + N + row, s, mask=mask)
        tl.store(slopes + row, own_ratio, mask=mask)
        tl.store(slopes + N + row, kl_slope, mask=mask)


@triton.jit(do_not_specialize=_BATCH)
def finish_rows(
    policy, ids, mask, ref, old_logp, ref_logp, ratio, kl, logp, entropy, stats, slopes, scales, inverses,
    scale, inverse, ignore_index, N, V, inner, sums, capacity, parts, splits,
    policy_so, policy_si, ids_so, ids_si, mask_so, mask_si, ref_so, ref_si, old_so, old_si, given_so,
    given_si, LOG_SPLITS: tl.constexpr, SEGMENT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per segment of rows. A kernel that is launched after it, as in `grpo_loss`, may start early
    too."""
    if EARLY:
        start_next_launch()
    ENTROPY: tl.constexpr = entropy is not None
    segment = tl.program_id(0)
    row = segment * SEGMENT + tl.arange(0, SEGMENT)
    token, live = load_ids(ids, mask, row, row < N, inner, ids_so, ids_si, mask_so, mask_si, ignore_index)
    store_rows(  # of masked rows
        row, (row < N) & (live == 0), N, ratio, kl, logp, entropy, stats, slopes,
        (1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0),
    )  # fmt: skip
    nth_live = tl.cumsum(live.to(tl.int32), 0)  # from 1 on
    sums_per_row = tl.where(units_of(tl.max(nth_live, 0), parts, splits, capacity) == 1, 1, splits)
    good = live & (token >= 0) & (token < V)
    scale, inverse = own_or(scale, scales, row, live), own_or(inverse, inverses, row, live)
    at = offset(row, inner, policy_so, policy_si) + token
    own_z = tl.load(policy + at, mask=good, other=0.0).to(tl.float32)
    if ref is not None:
        at = offset(row, inner, ref_so, ref_si) + token
        ref_z = tl.load(ref + at, mask=good, other=0.0).to(tl.float32)
    if old_logp is not None:
        old = tl.load(old_logp + offset(row, inner, old_so, old_si), mask=live, other=0.0)
    if ref_logp is not None:
        other = tl.load(ref_logp + offset(row, inner, given_so, given_si), mask=live, other=0.0)

    if EARLY:
        wait_for_last_launch()  # the previous kernel writes the sums
    sums += segment.to(tl.int64) * capacity
    plane = tl.num_programs(0).to(tl.int64) * capacity
    m, s, t = sums_of(sums, nth_live - 1, live, sums_per_row, plane, scale, ENTROPY, SEGMENT, LOG_SPLITS)
    own, own_entropy, s = logp_of(own_z, good, m, s, t, inverse)
    if old_logp is None:
        old = own
    penalty = tl.zeros([SEGMENT], tl.float32)
    slope = tl.zeros([SEGMENT], tl.float32)
    if kl is not None:
        if ref is not None:
            of_ref = sums + (2 + ENTROPY) * plane
            ref_m, ref_s, none = sums_of(
                of_ref, nth_live - 1, live, sums_per_row, plane, scale, False, SEGMENT, LOG_SPLITS
            )
            other, _, _ = logp_of(ref_z, good, ref_m, ref_s, none, inverse)
        penalty, expm1 = k3_and_expm1(difference(other, own))
        slope = -expm1
    m += tl.where(good, 0.0, float("nan"))
    store_rows(
        row, live, N, ratio, kl, logp, entropy, stats, slopes,
        (exp(difference(own, old)), penalty, own, own_entropy, m, s, slope),
    )  # fmt: skip


def ratio_kl(launch: Launch = run, **args: Any) -> tuple[Tensor | None, ...]:
    """(ratio, kl, logp, entropy, stats [2, *] = (m, s), slopes [2, *]: derivatives of ratio and kl by logp);
    None for outputs that were not requested."""
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
    scaled, schedule = scaling_of_rows(args["temperature"], N, launch), schedule_of(V)
    segments, rows, parts = -(-N // SEGMENT), min(N, SEGMENT), schedule.parts
    wanted = max(1, PARTS_PER_SM * sm_count(device) // segments)  # per segment
    programs = min(rows * parts, wanted, max(rows * parts // SPLITS_EACH, wanted // 4, 1))
    planes = (2 if ref is None else 4) + (entropy is not None)
    capacity = max(rows, min(rows * schedule.splits, MOST_SUMS // (planes * segments)))
    sums = empty(planes, segments, capacity)
    dependent = dependent_launch_options(device)
    of_sums = strides[:8]  # two each of the policy, ids, mask and reference
    word, ref_word = word_of(z, of_sums[:2]), 1 if ref is None else word_of(ref, of_sums[-2:])
    # If only one of them is aligned, its loads would become as narrow as those of the other.
    alike = ref is not None and entropy is None and (z.dtype, word) == (ref.dtype, ref_word)
    alike = alike and (z.data_ptr() % 16 == 0) == (ref.data_ptr() % 16 == 0)
    launch(
        sum_parts, (segments * (1 if ref is None else 2), programs),
        z, ref, ids, mask, sums, scaled.scales,
        scaled.scale, args["ignore_index"], N, V, inner, capacity, parts, *of_sums,
        ENTROPY=entropy is not None, WORD=word, REF_WORD=ref_word, ALIKE=alike,
        LOG_SPLITS=schedule.log_splits, SEGMENT=SEGMENT, EARLY=dependent["EARLY"],
        **schedule.order, **schedule.options,
    )  # fmt: skip
    launch(
        finish_rows, (segments,),
        *tensors, *results, *scaled, args["ignore_index"], N, V, inner,
        sums, capacity, parts, schedule.splits, *strides,
        LOG_SPLITS=schedule.log_splits, SEGMENT=SEGMENT, num_warps=4, enable_fp_fusion=False, **dependent,
    )  # fmt: skip
    return results


def ratio_kl_bwd(launch: Launch = run, **args: Any) -> Tensor:
    """The gradient of the policy's logits, contiguous, in their dtype."""
    return gradient_of(args["policy_logits"], launch, args)
