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
"""

import struct
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.blocks.launch import Launch, run
from isobit.blocks.triton_rows import tree_sum

#: log2 of the lanes of sums over rewards or sequences, log2 of those of sums over tokens, and the number of
#: tokens per lane in a chunk. These determine the order of sums.
LOG_LANES, LOG_TOKENS, STEPS = 7, 9, 8
CHUNK = STEPS << LOG_TOKENS

#: Programs that share the groups. Each reads all boundaries, so their number is limited.
PROGRAMS = 1024

#: A chunk writes a line of eight numbers: sums of surrogate, kl, ratio and entropy; how many tokens count,
#: are clipped from below, and from above; and 0.
LINE = 8

REDUCTIONS = {"token_mean": 0, "sequence_mean": 1, "sum": 2}

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
def deviation(rewards, reward_s, i, inside, origin):
    """fp64 rewards relative to the first of their group; 0 outside of it."""
    own = tl.load(rewards + i * reward_s, mask=inside, other=0.0).to(tl.float64)
    return tl.where(inside, own - origin, 0.0)


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
        count = (hi - lo).to(tl.float64)
        origin = tl.load(rewards + lo * reward_s).to(tl.float64)
        total = tl.zeros([1 << LOG_LANES], tl.float64)
        for first in range(lo, hi, 1 << LOG_LANES):
            i = first + lane
            total += deviation(rewards, reward_s, i, i < hi, origin)
        mean = tree_sum(total, LOG_LANES) / count
        divisor = tl.full([], 1.0, tl.float64)
        if SCALE:
            total = tl.zeros([1 << LOG_LANES], tl.float64)
            for first in range(lo, hi, 1 << LOG_LANES):
                i = first + lane
                from_mean = deviation(rewards, reward_s, i, i < hi, origin) - mean
                total += tl.where(i < hi, from_mean * from_mean, 0.0)
            divisor = tl.maximum(tl.sqrt(tree_sum(total, LOG_LANES) / count), double(eps))
        for first in range(lo, hi, 1 << LOG_LANES):
            i = first + lane
            from_mean = deviation(rewards, reward_s, i, i < hi, origin) - mean
            tl.store(out + i, (from_mean / divisor).to(out.dtype.element_ty), mask=i < hi)


# The loss


@triton.jit
def live_tokens(ids, mask, b, t, T, ids_so, ids_si, mask_so, mask_si, ignore_index):
    """Which of the tokens t of sequence b count."""
    inside = t < T
    live = inside & (tl.load(ids + b * ids_so + t * ids_si, mask=inside, other=0) != ignore_index)
    if mask is not None:
        live = live & (tl.load(mask + b * mask_so + t * mask_si, mask=inside, other=0) != 0)
    return live


@triton.jit(do_not_specialize=FREE)
def sum_chunks(
    ratio, kl, entropy, slopes, ids, mask, advantages, weights, sums, slope,
    B, T, low, high, beta, ignore_index, ids_so, ids_si, mask_so, mask_si, adv_so, adv_si, w_so, w_si,
    LOG_TOKENS: tl.constexpr, STEPS: tl.constexpr, LINE: tl.constexpr,
):  # fmt: skip
    """One program per chunk of a sequence. Writes its line of sums [B, chunks, LINE], and what the backward
    scales: the derivative of each token's term by its log-probability."""
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
    for first in range(begin, tl.minimum(begin + (STEPS << LOG_TOKENS), T), 1 << LOG_TOKENS):
        t = (first + lane).to(tl.int64)
        live = live_tokens(ids, mask, b, t, T, ids_so, ids_si, mask_so, mask_si, ignore_index)
        at = b * T + t
        r = tl.load(ratio + at, mask=live, other=1.0).to(tl.float64)
        advantage = tl.load(advantages + b * adv_so + t * adv_si, mask=live, other=0.0).to(tl.float64)
        weight = tl.full([1 << LOG_TOKENS], 1.0, tl.float64)
        if weights is not None:
            weight = tl.load(weights + b * w_so + t * w_si, mask=live, other=1.0).to(tl.float64)
        is_below = (advantage < 0) & (r < low)
        is_above = (advantage > 0) & (r > high)
        clipped = tl.where(is_above, high, tl.where(is_below, low, r))
        # An overflowed ratio of a token with advantage 0: 0 * inf must be 0 here.
        term = tl.where((advantage == 0) & (r > high), 0.0, -(clipped * advantage)) * weight
        of_policy += tl.where(live, term, 0.0)
        of_ratio += tl.where(live, r, 0.0)
        counted += live.to(tl.int32)
        below += is_below.to(tl.int32)
        above += is_above.to(tl.int32)
        if kl is not None:
            of_kl += tl.load(kl + at, mask=live, other=0.0).to(tl.float64)
        if entropy is not None:
            of_entropy += tl.load(entropy + at, mask=live, other=0.0).to(tl.float64)
        if slope is not None:
            own = tl.where(is_below | is_above, 0.0, term)  # the derivative of ratio is ratio
            if kl is not None:
                own += beta * tl.load(slopes + B.to(tl.int64) * T + at, mask=live, other=0.0).to(tl.float64)
            tl.store(slope + at, tl.where(live, own, 0.0).to(tl.float32), mask=t < T)
    # tl.join stacks its operands in a new last dimension, so what is joined last alternates in a line.
    evens = tl.join(tl.join(of_policy, counted.to(tl.float64)), tl.join(of_ratio, above.to(tl.float64)))
    odds = tl.join(tl.join(of_kl, below.to(tl.float64)), tl.join(of_entropy, tl.zeros_like(of_kl)))
    lines = tl.reshape(tl.join(evens, odds), [1 << LOG_TOKENS, LINE])
    column = tl.arange(0, LINE)[None, :]
    to = sums + (b * tl.num_programs(1) + chunk) * LINE
    tl.store(to + column, tree_of_lines(lines, LOG_TOKENS, LINE))


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
    LINE: tl.constexpr,
):  # fmt: skip
    """One program: the loss, the statistics, and the factor by which the backward scales each sequence."""
    lane = tl.arange(0, 1 << LOG_LANES).to(tl.int64)
    column = tl.arange(0, LINE)[None, :]
    total = tl.zeros([1 << LOG_LANES, LINE], tl.float64)
    for first in range(0, B, 1 << LOG_LANES):
        own = of_sequences(sums, first + lane, B, chunks, LINE)
        length = one_of(own, 4, 1)[:, None]
        if REDUCTION == 1:
            own = tl.where(column < 2, own / tl.maximum(length, 1.0), own)
        total += tl.where(column == 7, (length > 0).to(tl.float64), own)
    total = tree_of_lines(total, LOG_LANES, LINE)
    active = tl.max(one_of(total, 4, 1), axis=0)
    sequences = tl.max(one_of(total, 7, 1), axis=0)
    tokens = tl.maximum(active, 1.0)
    divisor = tokens
    if REDUCTION == 1:
        divisor = tl.maximum(sequences, 1.0)
    elif REDUCTION == 2:
        divisor = tl.full([], 1.0, tl.float64)
    if NORMALIZED:
        divisor = double(number)
        if normalizer is not None:
            divisor = tl.load(normalizer).to(tl.float64)
    # If no token counts the loss is 0, whatever the divisor.
    divisor = tl.where(active == 0, 1.0, divisor)
    one = tl.arange(0, 1)
    of_policy, of_kl = one_of(total, 0, 1), one_of(total, 1, 1)
    tl.store(loss + one, ((of_policy + double(beta) * of_kl) / divisor).to(tl.float32))
    tl.store(policy_loss + one, (of_policy / divisor).to(tl.float32))
    tl.store(kl + one, (of_kl / divisor).to(tl.float32))
    tl.store(ratio + one, (one_of(total, 2, 1) / tokens).to(tl.float32))
    tl.store(clip_low + one, (one_of(total, 5, 1) / tokens).to(tl.float32))
    tl.store(clip_high + one, (one_of(total, 6, 1) / tokens).to(tl.float32))
    tl.store(active_tokens, active.to(tl.int32))
    if entropy is not None:
        tl.store(entropy + one, (one_of(total, 3, 1) / tokens).to(tl.float32))
    if scale is not None:
        for first in range(0, B, 1 << LOG_LANES):
            b = first + lane
            own_scale = tl.full([1 << LOG_LANES], 1.0, tl.float64) / divisor
            if REDUCTION == 1:
                length = one_of(of_sequences(sums, b, B, chunks, LINE), 4, 1)
                own_scale = own_scale / tl.maximum(length, 1.0)
            tl.store(scale + b, own_scale.to(tl.float32), mask=b < B)


@triton.jit(do_not_specialize=FREE)
def scale_slopes(slope, scale, dloss, dlogp, T, TILE: tl.constexpr):
    """Backward, one program per tile of a sequence. A slope of 0 stays 0 even if the loss is not finite:
    tokens that do not count, and those that were clipped."""
    b = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    factor = tl.load(dloss).to(tl.float64) * tl.load(scale + b).to(tl.float64)
    own = tl.load(slope + b * T + t, mask=t < T, other=0.0).to(tl.float64)
    tl.store(dlogp + b * T + t, tl.where(own == 0, 0.0, own * factor).to(tl.float32), mask=t < T)


# Launchers


def bits_of(number: float) -> int:
    """The bits of an fp64 number, as `double` takes them."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def strides_of(t: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if t is None else t.stride()


def as_bytes(mask: Tensor | None) -> Tensor | None:
    return mask.view(torch.uint8) if mask is not None and mask.dtype == torch.bool else mask


def group_advantages(launch: Launch = run, **args: Any) -> Tensor:
    rewards, bounds, size = args["rewards"], args["group_boundaries"], args["samples_per_prompt"]
    (B,) = rewards.shape
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    out = torch.empty(B, dtype=dtype, device=rewards.device)
    G = B // size if bounds is None else len(bounds) - 1
    programs = min(max(G, 1), PROGRAMS) if B else 0  # at least one, to report invalid boundaries
    launch(
        normalize_groups, (programs,), rewards, bounds, out, B, G, size or 0, bits_of(args["eps"]),
        rewards.stride(0), 0 if bounds is None else bounds.stride(0), SCALE=args["scale"],
        LOG_LANES=LOG_LANES, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def token_loss(
    ratio: Tensor, kl: Tensor | None, entropy: Tensor | None, slopes: Tensor | None, launch: Launch = run,
    **args: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(loss, policy_loss, kl, clip_low, clip_high, ratio, active_tokens, entropy, slope [B, T], scale [B]),
    from the results of `ratio_kl` per token; None for what does not exist or was not requested."""
    ids, mask, weights = args["token_ids"], as_bytes(args["mask"]), args["rollout_weights"]
    (B, T), keep = ids.shape, args["return_kept"]
    advantages = args["advantages"]
    if advantages is None:
        groups = {name: args[name] for name in ("rewards", "samples_per_prompt", "group_boundaries", "eps")}
        advantages = group_advantages(launch, **groups, scale=True)[:, None].expand(B, T)
    empty = partial(torch.empty, dtype=torch.float32, device=ids.device)
    chunks = -(-T // CHUNK)
    sums = empty((B, chunks, LINE), dtype=torch.float64)
    slope, scale = (empty((B, T)), empty(B)) if keep else (None, None)
    low, high, beta = (bits_of(x) for x in (1 - args["clip_low"], 1 + args["clip_high"], args["beta"]))
    # No contraction to fused multiply-adds: the class fixes where roundings are.
    options = {"num_warps": 4, "enable_fp_fusion": False}
    launch(
        sum_chunks, (B, chunks), ratio, kl, entropy, slopes, ids, mask, advantages, weights, sums, slope,
        B, T, low, high, beta, args["ignore_index"], *strides_of(ids), *strides_of(mask),
        *strides_of(advantages), *strides_of(weights), LOG_TOKENS=LOG_TOKENS, STEPS=STEPS, LINE=LINE,
        **options,
    )  # fmt: skip
    normalizer = args["normalizer"]
    by_tensor = isinstance(normalizer, Tensor)
    number = 1.0 if by_tensor or normalizer is None else normalizer
    results = (*(empty(()) for _ in range(6)), empty((), dtype=torch.int32))
    mean_entropy = None if entropy is None else empty(())
    launch(
        reduce_batch, (1,), sums, *results, mean_entropy, scale, normalizer if by_tensor else None,
        B, chunks, beta, bits_of(number), NORMALIZED=normalizer is not None,
        REDUCTION=REDUCTIONS[args["reduction"]], LOG_LANES=LOG_LANES, LINE=LINE, **options,
    )  # fmt: skip
    return (*results, mean_entropy, slope, scale)


#: Tokens per program of the backward. It adds nothing up, so this affects the schedule only.
TILE = 512


def token_loss_bwd(slope: Tensor, scale: Tensor, dloss: Tensor, launch: Launch = run) -> Tensor:
    """dlogp [B, T], for the backward of `ratio_kl`."""
    B, T = slope.shape
    dlogp = torch.empty((B, T), dtype=torch.float32, device=slope.device)
    # Saved-tensor hooks may restore tensors with any strides.
    given = slope.contiguous(), scale.contiguous()
    launch(scale_slopes, (B, -(-T // TILE)), *given, dloss, dlogp, T, TILE=TILE, num_warps=4)
    return dlogp
