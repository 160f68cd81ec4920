"""The part of `grpo_loss` that comes after `ratio_kl`, and `group_advantages`, in portable Triton: NVIDIA,
AMD, and the interpreter.

All of it is fp64 arithmetic on a few numbers per token, which costs nothing compared with reading logits.
Results are rounded once. The order of every sum is fixed. A sum *in L lanes* is: lane j adds the numbers
j, j + L, j + 2 L, ... in ascending order, and then the lanes are added by a tree of neighbours.

    group       its rewards, in 128 lanes
    chunk       4096 tokens of a sequence, from a multiple of 4096 on, in 512 lanes; masked tokens are 0
    sequence    its chunks, one after another
    batch       its sequences, in 128 lanes

So the sums of a group or of a sequence depend on nothing else in the batch, and not on padding at its end.

Two kernels follow those of `ratio_kl`: `sum_chunks` and `reduce_batch`. Where the hardware allows it both are
started early: they find out which tokens are live and the advantages while `ratio_kl` is still reading
logits.
"""

import struct
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.triton.dependent_launch import (
    dependent_launch_options,
    start_next_launch,
    wait_for_last_launch,
)
from isobit.kernels.triton.logits import as_bytes, gradient_of
from isobit.kernels.triton.rows import tree_sum

#: log2 of the lanes of sums over rewards or sequences, log2 of those of sums over tokens, and the number of
#: tokens per lane in a chunk. These determine the order of sums.
LOG_LANES, LOG_TOKENS, STEPS = 7, 9, 8
CHUNK = STEPS << LOG_TOKENS

#: The unit of a group of fp64 rewards whose sums overflow. A power of two, so that only exponents change.
SMALL_UNIT = tl.constexpr(2.0**-600)

#: Programs that share the groups. Each reads all boundaries, so their number is limited.
PROGRAMS = 1024

#: Rewards, or boundaries, that all sequences together may read to find their own advantages. If they would
#: read more, a separate kernel computes advantages group by group. Affects the schedule only.
MOST_READ = 1 << 20

#: Steps of a chunk that are read together: memory latency is longer than a step. Affects the schedule only.
TOGETHER = 2

#: A chunk writes a line of eight numbers.
LINE = 8

#: Their columns. Sums over live tokens:
SURROGATE, KL, RATIO, ENTROPY = (tl.constexpr(column) for column in range(4))
#: how many tokens are live, are clipped from below, and from above:
TOKENS, CLIPPED_LOW, CLIPPED_HIGH = (tl.constexpr(column) for column in range(4, 7))
#: and 0. `reduce_batch` puts the number of sequences with a live token here, and later the loss.
EXTRA = tl.constexpr(7)

TOKEN_MEAN, SEQUENCE_MEAN, SUM = (tl.constexpr(number) for number in range(3))
REDUCTIONS = {"token_mean": TOKEN_MEAN.value, "sequence_mean": SEQUENCE_MEAN.value, "sum": SUM.value}

#: Arguments that change from batch to batch or from step to step. They are not specialised, to avoid
#: recompiles.
FREE = (
    "B", "T", "G", "chunks", "size", "eps", "low", "high", "beta", "number", "ignore_index",
    "reward_s", "bound_s", "ids_so", "ids_si", "mask_so", "mask_si", "adv_so", "adv_si", "w_so", "w_si",
)  # fmt: skip


@triton.jit
def double(bits):
    """The fp64 number with these bits. Triton would pass a Python float to a kernel in fp32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def tree_of_lines(x, LOG: tl.constexpr, LINE: tl.constexpr):
    """[1, LINE]: the sum of 2**LOG lines of numbers, by a tree of neighbours."""
    for i in tl.static_range(LOG):
        x = tl.sum(tl.reshape(x, [1 << (LOG - 1 - i), 2, LINE]), axis=1)
    return x


# Advantages


@triton.jit
def partition(bounds, bound_s, G, B, LOG_LANES: tl.constexpr):
    """Whether G + 1 boundaries divide B sequences into groups: from 0 to B, strictly ascending."""
    lane = tl.arange(0, 1 << LOG_LANES)
    wrong = tl.zeros([1 << LOG_LANES], tl.int32)
    for first in range(0, G, 1 << LOG_LANES):
        k = (first + lane).to(tl.int64)
        here = tl.load(bounds + k * bound_s, mask=k < G, other=0)
        after = tl.load(bounds + (k + 1) * bound_s, mask=k < G, other=1)
        wrong = wrong | (after <= here).to(tl.int32)
    begins, ends = tl.load(bounds), tl.load(bounds + G.to(tl.int64) * bound_s)
    return (tl.max(wrong, axis=0) == 0) & (begins == 0) & (ends == B)


@triton.jit
def in_units(reward, rewards, unit):
    """A reward in fp64, times the unit of its group. Only fp64 rewards have another unit than 1."""
    wide = reward.to(tl.float64)
    if rewards.dtype.element_ty == tl.float64:
        wide = wide * unit
    return wide


@triton.jit
def deviation(rewards, reward_s, i, inside, origin, unit):
    """fp64 rewards relative to the first of their group; 0 outside the group."""
    own = in_units(tl.load(rewards + i * reward_s, mask=inside, other=0.0), rewards, unit)
    return tl.where(inside, own - origin, 0.0)


@triton.jit
def moments_in(unit, rewards, reward_s, lo, hi, eps, SCALE: tl.constexpr, LOG_LANES: tl.constexpr):
    """(first reward, mean relative to it, divisor) of the group of sequences lo to hi, in this unit."""
    lane = tl.arange(0, 1 << LOG_LANES)
    count = (hi - lo).to(tl.float64)
    origin = in_units(tl.load(rewards + lo * reward_s), rewards, unit)
    total = tl.zeros([1 << LOG_LANES], tl.float64)
    for first in range(lo, hi, 1 << LOG_LANES):
        i = first + lane
        total += deviation(rewards, reward_s, i, i < hi, origin, unit)
    mean = tree_sum(total, LOG_LANES) / count
    divisor = unit
    if SCALE:
        total = tl.zeros([1 << LOG_LANES], tl.float64)
        for first in range(lo, hi, 1 << LOG_LANES):
            i = first + lane
            from_mean = deviation(rewards, reward_s, i, i < hi, origin, unit) - mean
            total += tl.where(i < hi, from_mean * from_mean, 0.0)
        divisor = tl.maximum(tl.sqrt(tree_sum(total, LOG_LANES) / count), double(eps) * unit)
    return origin, mean, divisor


@triton.jit
def moments(rewards, reward_s, lo, hi, eps, SCALE: tl.constexpr, LOG_LANES: tl.constexpr):
    """(first reward, mean relative to it, divisor, unit) of the group of sequences lo to hi. Where sums of
    fp64 rewards overflow, all of this is in a unit in which they do not."""
    unit = tl.full([], 1.0, tl.float64)
    origin, mean, divisor = moments_in(unit, rewards, reward_s, lo, hi, eps, SCALE, LOG_LANES)
    if rewards.dtype.element_ty == tl.float64:
        if (tl.abs(mean) < float("inf")) & (divisor < float("inf")):
            unit = unit
        else:
            unit = tl.full([], SMALL_UNIT, tl.float64)
            origin, mean, divisor = moments_in(unit, rewards, reward_s, lo, hi, eps, SCALE, LOG_LANES)
    return origin, mean, divisor, unit


@triton.jit(do_not_specialize=FREE)
def normalize_groups(
    rewards, bounds, out, B, G, size, eps, reward_s, bound_s, SCALE: tl.constexpr, LOG_LANES: tl.constexpr,
):  # fmt: skip
    """One program takes the groups p, p + programs, ... Invalid boundaries make everything NaN, and nothing
    is read through them."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, 1 << LOG_LANES)
    if bounds is not None:
        if partition(bounds, bound_s, G, B, LOG_LANES) == 0:
            for first in range(program << LOG_LANES, B, programs << LOG_LANES):
                i = (first + lane).to(tl.int64)
                tl.store(out + i, tl.full([1 << LOG_LANES], float("nan"), out.dtype.element_ty), mask=i < B)
            return
    for group in range(program, G, programs):
        nth = tl.full([], 0, tl.int64) + group
        lo = nth * size
        hi = lo + size
        if bounds is not None:
            at = bounds + nth * bound_s
            lo, hi = tl.load(at).to(tl.int64), tl.load(at + bound_s).to(tl.int64)
        origin, mean, divisor, unit = moments(rewards, reward_s, lo, hi, eps, SCALE, LOG_LANES)
        for first in range(lo, hi, 1 << LOG_LANES):
            i = first + lane
            from_mean = deviation(rewards, reward_s, i, i < hi, origin, unit) - mean
            tl.store(out + i, (from_mean / divisor).to(out.dtype.element_ty), mask=i < hi)


@triton.jit
def advantage_of(
    b, rewards, bounds, B, G, size, eps, reward_s, bound_s, LOG_LANES: tl.constexpr,
):  # fmt: skip
    """What `normalize_groups` would write for sequence b."""
    advantage = tl.full([], float("nan"), tl.float64)
    lo = b // tl.maximum(size, 1) * size
    hi = lo + size
    valid = tl.full([], 1, tl.int1)
    if bounds is not None:
        valid = partition(bounds, bound_s, G, B, LOG_LANES)
        lane = tl.arange(0, 1 << LOG_LANES)
        begins = tl.zeros([1 << LOG_LANES], tl.int64)  # the last boundary up to b, among those of a lane
        for first in range(0, G, 1 << LOG_LANES):
            k = (first + lane).to(tl.int64)
            here = tl.load(bounds + k * bound_s, mask=k < G, other=0).to(tl.int64)
            begins = tl.maximum(begins, tl.where(here <= b, here, 0))
        lo = tl.max(begins, axis=0)
        ends = tl.zeros([1 << LOG_LANES], tl.int64) + B
        for first in range(0, G, 1 << LOG_LANES):
            k = (first + lane + 1).to(tl.int64)
            here = tl.load(bounds + k * bound_s, mask=k <= G, other=0).to(tl.int64)
            ends = tl.minimum(ends, tl.where(here > b, here, B))
        hi = tl.min(ends, axis=0)
    if valid:
        origin, mean, divisor, unit = moments(rewards, reward_s, lo, hi, eps, True, LOG_LANES)
        own = in_units(tl.load(rewards + b * reward_s), rewards, unit)
        advantage = ((own - origin) - mean) / divisor
        if rewards.dtype.element_ty != tl.float64:
            advantage = advantage.to(tl.float32).to(tl.float64)
    return advantage


# The loss


@triton.jit
def live_tokens(ids, mask, b, t, T, ids_so, ids_si, mask_so, mask_si, ignore_index):
    """Which of the tokens t of sequence b are live."""
    inside = t < T
    live = inside & (tl.load(ids + b * ids_so + t * ids_si, mask=inside, other=0) != ignore_index)
    if mask is not None:
        live = live & (tl.load(mask + b * mask_so + t * mask_si, mask=inside, other=0) != 0)
    return live


@triton.jit
def clipped_term(r, advantage, low, high):
    """(surrogates before weights, which ratios are clipped from below, which from above)."""
    is_below = (advantage < 0) & (r < low)
    is_above = (advantage > 0) & (r > high)
    clipped = tl.where(is_above, high, tl.where(is_below, low, r))
    # An overflowed ratio of a token with advantage 0: 0 * inf must be 0 here.
    unused = (advantage == 0) & ((r > high) | (r == float("inf")))
    term = tl.where(unused, 0.0, -(clipped * advantage))
    return term, is_below, is_above


@triton.jit(do_not_specialize=FREE)
def sum_chunks(
    ratio, kl, entropy, slopes, ids, mask, advantages, weights, rewards, bounds, sums, slope,
    B, T, G, size, eps, low, high, beta, ignore_index, ids_so, ids_si, mask_so, mask_si, adv_so, adv_si,
    w_so, w_si, reward_s, bound_s, LOG_LANES: tl.constexpr, LOG_TOKENS: tl.constexpr, STEPS: tl.constexpr,
    TOGETHER: tl.constexpr, LINE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per chunk of a sequence. Writes its line of sums [B, chunks, LINE], and what the backward
    scales: the derivative of each token's term by its log-probability. Without advantages of tokens it
    computes that of its sequence from the rewards."""
    if EARLY:
        start_next_launch()
    b, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, 1 << LOG_TOKENS)
    low, high, beta = double(low), double(high), double(beta)
    of_policy = tl.zeros([1 << LOG_TOKENS], tl.float64)
    of_kl = tl.zeros([1 << LOG_TOKENS], tl.float64)
    of_ratio = tl.zeros([1 << LOG_TOKENS], tl.float64)
    of_entropy = tl.zeros([1 << LOG_TOKENS], tl.float64)
    counted = tl.zeros([1 << LOG_TOKENS], tl.int32)
    below = tl.zeros([1 << LOG_TOKENS], tl.int32)
    above = tl.zeros([1 << LOG_TOKENS], tl.int32)
    begin = chunk * (STEPS << LOG_TOKENS)
    steps = tl.cdiv(tl.minimum(T - begin, STEPS << LOG_TOKENS), 1 << LOG_TOKENS)
    which = tl.zeros([1 << LOG_TOKENS], tl.int32)  # bit i: whether the lane's token in step i is live
    for step in range(steps):
        t = (begin + (step << LOG_TOKENS) + lane).to(tl.int64)
        live = live_tokens(ids, mask, b, t, T, ids_so, ids_si, mask_so, mask_si, ignore_index)
        which = which | (live.to(tl.int32) << step)
    if advantages is None:
        of_sequence = advantage_of(b, rewards, bounds, B, G, size, eps, reward_s, bound_s, LOG_LANES)

    if EARLY:
        wait_for_last_launch()  # everything else that is read may come from the previous kernel
    for step in range(0, steps, TOGETHER):
        lives, rs, own_advantages, ws, kls, kl_slopes, entropies = (), (), (), (), (), (), ()
        for i in tl.static_range(TOGETHER):
            t = (begin + (step + i << LOG_TOKENS) + lane).to(tl.int64)
            at, live = b * T + t, ((which >> (step + i)) & 1) != 0
            lives = lives + (live,)
            rs = rs + (tl.load(ratio + at, mask=live, other=1.0).to(tl.float64),)
            if advantages is None:
                own_advantages = own_advantages + (tl.where(live, of_sequence, 0.0),)
            else:
                own = tl.load(advantages + b * adv_so + t * adv_si, mask=live, other=0.0)
                own_advantages = own_advantages + (own.to(tl.float64),)
            if weights is not None:
                own = tl.load(weights + b * w_so + t * w_si, mask=live, other=1.0)
                ws = ws + (own.to(tl.float64),)
            if kl is not None:
                kls = kls + (tl.load(kl + at, mask=live, other=0.0).to(tl.float64),)
                if slope is not None:
                    own = tl.load(slopes + B.to(tl.int64) * T + at, mask=live, other=0.0)
                    kl_slopes = kl_slopes + (own.to(tl.float64),)
            if entropy is not None:
                entropies = entropies + (tl.load(entropy + at, mask=live, other=0.0).to(tl.float64),)
        for i in tl.static_range(TOGETHER):
            t = (begin + (step + i << LOG_TOKENS) + lane).to(tl.int64)
            term, is_below, is_above = clipped_term(rs[i], own_advantages[i], low, high)
            if weights is not None:
                term = term * ws[i]
            of_policy += tl.where(lives[i], term, 0.0)
            of_ratio += tl.where(lives[i], rs[i], 0.0)
            counted += lives[i].to(tl.int32)
            below += is_below.to(tl.int32)
            above += is_above.to(tl.int32)
            if kl is not None:
                of_kl += kls[i]
            if entropy is not None:
                of_entropy += entropies[i]
            if slope is not None:
                by_logp = tl.where(is_below | is_above, 0.0, term)  # the derivative of ratio is ratio
                if kl is not None:
                    by_logp += beta * kl_slopes[i]
                tl.store(slope + b * T + t, tl.where(lives[i], by_logp, 0.0).to(tl.float32), mask=t < T)
    # tl.join stacks its operands in a new last dimension, so the operands of the last join alternate.
    lines = tl.join(tl.join(of_policy, of_ratio), tl.join(of_kl, of_entropy))
    lines = tl.reshape(lines, [1 << LOG_TOKENS, LINE // 2])
    to = sums + (b * tl.num_programs(1) + chunk) * LINE + tl.arange(0, LINE // 2)[None, :]
    tl.store(to, tree_of_lines(lines, LOG_TOKENS, LINE // 2))
    # Counts are exact in any order. None is larger than a chunk, so three of them fit in one number.
    counts = tl.sum(counted.to(tl.int64) + (below.to(tl.int64) << 16) + (above.to(tl.int64) << 32), axis=0)
    nth = tl.arange(0, LINE // 2)[None, :]
    tl.store(to + LINE // 2, ((counts >> (16 * nth)) & 0xFFFF).to(tl.float64))


@triton.jit
def of_sequences(sums, b, B, chunks, LINE: tl.constexpr):
    """[sequences, LINE]: the sums of these sequences, their chunks one after another."""
    at = sums + b[:, None] * chunks * LINE + tl.arange(0, LINE)[None, :]
    total = tl.zeros([b.shape[0], LINE], tl.float64)
    for chunk in range(chunks):
        total += tl.load(at + chunk * LINE, mask=b[:, None] < B, other=0.0)
    return total


@triton.jit
def one_of(line, k, axis: tl.constexpr):
    """The number in column k. All others are 0, so the sum is exact in any order."""
    column = tl.arange(0, line.shape[1])[None, :]
    return tl.sum(tl.where(column == k, line, 0.0), axis=axis)


@triton.jit(do_not_specialize=FREE)
def reduce_batch(
    sums, loss, policy_loss, kl, clip_low, clip_high, ratio, active_tokens, entropy, scale, normalizer,
    B, chunks, beta, number, NORMALIZED: tl.constexpr, REDUCTION: tl.constexpr, LOG_LANES: tl.constexpr,
    LINE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program: the loss, the statistics, and the factor by which the backward scales each sequence."""
    lane = tl.arange(0, 1 << LOG_LANES).to(tl.int64)
    column = tl.arange(0, LINE)[None, :]
    if normalizer is not None:
        given = tl.load(normalizer).to(tl.float64)
    if EARLY:
        wait_for_last_launch()  # the previous kernel writes the sums
    total = tl.zeros([1 << LOG_LANES, LINE], tl.float64)
    for first in range(0, B, 1 << LOG_LANES):
        own = of_sequences(sums, first + lane, B, chunks, LINE)
        if REDUCTION == SEQUENCE_MEAN:
            length = one_of(own, TOKENS, 1)[:, None]
            own = tl.where(column < RATIO, own / tl.maximum(length, 1.0), own)  # surrogate and kl
            own = tl.where(column == EXTRA, (length > 0).to(tl.float64), own)
        total += own
    total = tree_of_lines(total, LOG_LANES, LINE)
    active = tl.max(one_of(total, TOKENS, 1), axis=0)
    tokens = tl.maximum(active, 1.0)
    divisor = tokens
    if REDUCTION == SEQUENCE_MEAN:
        divisor = tl.maximum(tl.max(one_of(total, EXTRA, 1), axis=0), 1.0)
    elif REDUCTION == SUM:
        divisor = tl.full([], 1.0, tl.float64)
    if NORMALIZED:
        divisor = double(number)
        if normalizer is not None:
            divisor = given
    # If no token is live the loss is 0, whatever the divisor.
    divisor = tl.where(active == 0, 1.0, divisor)
    # All quotients at once, because a division in fp64 takes long: 1 / divisor in place of the number of
    # tokens, and the loss in the last column.
    of_loss = (one_of(total, SURROGATE, 1) + double(beta) * one_of(total, KL, 1))[:, None]
    above = tl.where(column == EXTRA, of_loss, tl.where(column == TOKENS, 1.0, total))
    by_divisor = (column < RATIO) | (column == TOKENS) | (column == EXTRA)
    quotient = above / tl.where(by_divisor, divisor, tokens)
    # Each column is stored at the start of an output: one lane of the line writes, the others are masked.
    rounded, start = quotient.to(tl.float32), tl.zeros_like(column)
    tl.store(loss + start, rounded, mask=column == EXTRA)
    tl.store(policy_loss + start, rounded, mask=column == SURROGATE)
    tl.store(kl + start, rounded, mask=column == KL)
    tl.store(ratio + start, rounded, mask=column == RATIO)
    tl.store(clip_low + start, rounded, mask=column == CLIPPED_LOW)
    tl.store(clip_high + start, rounded, mask=column == CLIPPED_HIGH)
    tl.store(active_tokens, active.to(tl.int32))
    if entropy is not None:
        tl.store(entropy + start, rounded, mask=column == ENTROPY)
    if scale is not None:
        # Its bits, because the sum with zeros would lose the sign of a zero.
        bits = tl.where(column == TOKENS, quotient.to(tl.int64, bitcast=True), 0)
        share = tl.max(tl.sum(bits, axis=1), axis=0).to(tl.float64, bitcast=True)
        for first in range(0, B, 1 << LOG_LANES):
            b = first + lane
            own_scale = tl.broadcast_to(share, [1 << LOG_LANES])
            if REDUCTION == SEQUENCE_MEAN:
                length = one_of(of_sequences(sums, b, B, chunks, LINE), TOKENS, 1)
                own_scale = share / tl.maximum(length, 1.0)
            tl.store(scale + b, own_scale.to(tl.float32), mask=b < B)


# Launchers


def bits_of(number: float) -> int:
    """The bits of an fp64 number, as `double` takes them."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def strides_of(t: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if t is None else t.stride()


def stride_of(t: Tensor | None) -> tuple[int, ...]:
    return (0,) if t is None else t.stride()


def groups_of(args: dict[str, Any]) -> tuple[int, int]:
    """(number of groups, sequences per group); 0 sequences if groups are given by their boundaries."""
    bounds, size = args["group_boundaries"], args["samples_per_prompt"]
    return (len(args["rewards"]) // size, size) if bounds is None else (len(bounds) - 1, 0)


def group_advantages(launch: Launch = run, **args: Any) -> Tensor:
    rewards, bounds = args["rewards"], args["group_boundaries"]
    (B,), (G, size) = rewards.shape, groups_of(args)
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    out = torch.empty(B, dtype=dtype, device=rewards.device)
    programs = min(max(G, 1), PROGRAMS) if B else 0  # at least one, to report invalid boundaries
    launch(
        normalize_groups, (programs,),
        rewards, bounds, out, B, G, size, bits_of(args["eps"]), *stride_of(rewards), *stride_of(bounds),
        SCALE=args["scale"], LOG_LANES=LOG_LANES, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def token_loss(
    ratio: Tensor, kl: Tensor | None, entropy: Tensor | None, slopes: Tensor | None, launch: Launch = run,
    **args: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(loss, policy_loss, kl, clip_low, clip_high, ratio, active_tokens, entropy, slope [B, T], scale [B]),
    from the results of `ratio_kl` per token; None for what does not exist or was not requested."""
    ids, mask, weights = args["token_ids"], as_bytes(args["mask"]), args["rollout_weights"]
    B, T = ids.shape
    advantages, rewards, bounds, G, size = args["advantages"], None, None, 0, 0
    if advantages is None:
        G, size = groups_of(args)
        if B * (size or B) <= MOST_READ:
            rewards, bounds = args["rewards"], args["group_boundaries"]
        else:
            groups = ("rewards", "samples_per_prompt", "group_boundaries", "eps")
            own = group_advantages(launch, **{name: args[name] for name in groups}, scale=True)
            advantages = own[:, None].expand(B, T)
    empty = partial(torch.empty, dtype=torch.float32, device=ids.device)
    chunks = -(-T // CHUNK)
    sums = empty((B, chunks, LINE), dtype=torch.float64)
    slope, scale = (empty((B, T)), empty(B)) if args["return_kept"] else (None, None)
    low, high, beta = (bits_of(x) for x in (1 - args["clip_low"], 1 + args["clip_high"], args["beta"]))
    # No contraction to fused multiply-adds: the class fixes where roundings are.
    options = {"num_warps": 4, "enable_fp_fusion": False, **dependent_launch_options(ids.device)}
    launch(
        sum_chunks, (B, chunks),
        ratio, kl, entropy, slopes,
        ids, mask, advantages, weights, rewards, bounds,
        sums, slope,
        B, T, G, size, bits_of(args["eps"]), low, high, beta, args["ignore_index"],
        *strides_of(ids), *strides_of(mask), *strides_of(advantages), *strides_of(weights),
        *stride_of(rewards), *stride_of(bounds),
        LOG_LANES=LOG_LANES, LOG_TOKENS=LOG_TOKENS, STEPS=STEPS, TOGETHER=TOGETHER, LINE=LINE, **options,
    )  # fmt: skip
    normalizer = args["normalizer"]
    by_tensor = isinstance(normalizer, Tensor)
    number = 1.0 if by_tensor or normalizer is None else normalizer
    results = (*(empty(()) for _ in range(6)), empty((), dtype=torch.int32))
    mean_entropy = None if entropy is None else empty(())
    launch(
        reduce_batch, (1,),
        sums, *results, mean_entropy, scale, normalizer if by_tensor else None,
        B, chunks, beta, bits_of(number),
        NORMALIZED=normalizer is not None, REDUCTION=REDUCTIONS[args["reduction"]],
        LOG_LANES=LOG_LANES, LINE=LINE, **options,
    )  # fmt: skip
    return (*results, mean_entropy, slope, scale)


def grpo_loss_bwd(launch: Launch = run, **args: Any) -> Tensor:
    """The gradient of the policy's logits: that of `ratio_kl`, where the gradient of a token's
    log-probability is its slope times the factor of its sequence and the gradient of the loss."""
    slope, scale = args["slope"], args["scale"]
    given = {"dlogp": slope, "shares": scale[:, None].expand(slope.shape)}
    return gradient_of(args["policy_logits"], launch, args | given)
