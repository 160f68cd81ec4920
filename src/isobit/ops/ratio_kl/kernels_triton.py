"""`ratio_kl` in portable Triton: NVIDIA, AMD, and the CPU interpreter.

Forward, one read of the policy's logits and of the reference's. With many rows one program walks a row of the
policy and then that of the reference; with few, one program walks a split of one of them, and a second kernel
adds the splits. Both are summed as in `logp`, in its order: so logp here has the bits of `logp`, and a policy
that is compared with itself has a ratio of exactly 1.

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

from isobit.blocks.launch import Launch, run
from isobit.blocks.rows import row_strides, walkable
from isobit.blocks.temperature import scaling
from isobit.blocks.triton_exp import exp, k3_and_expm1
from isobit.blocks.triton_logits import (
    BATCH,
    as_bytes,
    gradient_of,
    merged_sums,
    plan_of,
    row_state,
    row_sums,
    store_split,
    word_of,
)
from isobit.blocks.triton_rows import own_or, row_offset, row_results, split_sums

_BATCH = (*BATCH, "old_so", "given_so")


@triton.jit
def logp_of(z_ptr, token, good, m, s, t, inverse):
    """(logp, entropy, s) of a live row from its sums; NaN if its token is none."""
    z = tl.load(z_ptr + token, mask=good, other=0.0).to(tl.float32)
    logp, entropy, _, s = row_results(z, m, s, t, inverse)
    nan = tl.where(good, 0.0, float("nan"))
    return logp + nan, entropy + nan, s


@triton.jit
def store_row(
    policy, ref, old_logp, ref_logp, token, good, row, N, m, s, t, ref_m, ref_s, inverse,
    ratio, kl, logp, entropy, stats, slopes,
):  # fmt: skip
    """Turn the sums of a live row into its results. Pointers are to the row; of references there is one, or
    none without a kl. The slope of ratio in logp is ratio itself."""
    own, own_entropy, s = logp_of(policy, token, good, m, s, t, inverse)
    old = own
    if old_logp is not None:
        old = tl.load(old_logp)
    own_ratio = exp(own - old)
    tl.store(ratio + row, own_ratio)
    slope = tl.zeros([], tl.float32)
    if kl is not None:
        if ref is not None:
            other, _, _ = logp_of(ref, token, good, ref_m, ref_s, 0.0, inverse)
        else:
            other = tl.load(ref_logp)
        penalty, expm1 = k3_and_expm1(other - own)
        tl.store(kl + row, penalty)
        slope = -expm1
    if logp is not None:
        tl.store(logp + row, own)
    if entropy is not None:
        tl.store(entropy + row, own_entropy)
    if stats is not None:
        tl.store(stats + row, m + tl.where(good, 0.0, float("nan")))
        tl.store(stats + N + row, s)
        tl.store(slopes + row, own_ratio)
        tl.store(slopes + N + row, slope)


@triton.jit
def store_dead_row(row, N, ratio, kl, logp, entropy, stats, slopes):
    tl.store(ratio + row, 1.0)
    if kl is not None:
        tl.store(kl + row, 0.0)
    if logp is not None:
        tl.store(logp + row, 0.0)
    if entropy is not None:
        tl.store(entropy + row, 0.0)
    if stats is not None:
        tl.store(stats + row, 0.0)
        tl.store(stats + N + row, 1.0)
        tl.store(slopes + row, 1.0)
        tl.store(slopes + N + row, 0.0)


@triton.jit
def at(pointer, row, inner, outer_stride, inner_stride):
    """Where a row of an optional argument is."""
    found = None
    if pointer is not None:
        found = pointer + row_offset(row, inner, outer_stride, inner_stride)
    return found


@triton.jit(do_not_specialize=_BATCH)
def ratio_kl_rows(
    policy, ids, mask, ref, old_logp, ref_logp, ratio, kl, logp, entropy, stats, slopes, scales, inverses,
    scale, inverse, ignore_index, N, V, inner, policy_so, policy_si, ids_so, ids_si, mask_so, mask_si,
    ref_so, ref_si, old_so, old_si, given_so, given_si, WORD: tl.constexpr, REF_WORD: tl.constexpr,
    LOG_BLOCK: tl.constexpr, UNROLL: tl.constexpr, STEPS: tl.constexpr, LOG_SPLITS: tl.constexpr,
):  # fmt: skip
    """Forward, one program a row."""
    row = tl.program_id(0).to(tl.int64)
    token, live, good = row_state(ids, mask, row, inner, ids_so, ids_si, mask_so, mask_si, ignore_index, V)
    if live == 0:
        store_dead_row(row, N, ratio, kl, logp, entropy, stats, slopes)
        return
    scale, inverse = own_or(scale, scales, row, None), own_or(inverse, inverses, row, None)
    start = row_offset(row, inner, policy_so, policy_si)
    m, s, t = row_sums(
        policy, start, V, scale, entropy is not None, WORD, LOG_BLOCK, UNROLL, STEPS, LOG_SPLITS
    )
    ref_m, ref_s = m, s
    if ref is not None:
        ref_start = row_offset(row, inner, ref_so, ref_si)
        ref_m, ref_s, _ = row_sums(
            ref, ref_start, V, scale, False, REF_WORD, LOG_BLOCK, UNROLL, STEPS, LOG_SPLITS
        )
    store_row(
        policy + start, at(ref, row, inner, ref_so, ref_si), at(old_logp, row, inner, old_so, old_si),
        at(ref_logp, row, inner, given_so, given_si), token, good, row, N, m, s, t, ref_m, ref_s, inverse,
        ratio, kl, logp, entropy, stats, slopes,
    )  # fmt: skip


@triton.jit(do_not_specialize=BATCH)
def ratio_kl_splits(
    policy, ids, mask, ref, partials, scales, scale, ignore_index, N, V, inner,
    policy_so, policy_si, ids_so, ids_si, mask_so, mask_si, ref_so, ref_si,
    ENTROPY: tl.constexpr, WORD: tl.constexpr, REF_WORD: tl.constexpr,
    LOG_BLOCK: tl.constexpr, UNROLL: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Forward with few rows, one program a split of a row of the policy, or of the reference: (m, s, t) of
    each into partials [2, 3, N, splits]."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, live, _ = row_state(ids, mask, row, inner, ids_so, ids_si, mask_so, mask_si, ignore_index, V)
    if live == 0:
        return
    scale = own_or(scale, scales, row, None)
    n_splits = tl.num_programs(1)
    if tl.program_id(2) == 0:
        start = row_offset(row, inner, policy_so, policy_si)
        m, s, t = split_sums(policy, start, split, V, scale, ENTROPY, WORD, LOG_BLOCK, UNROLL, STEPS)
        store_split(partials, row, split, N, n_splits, m, s, t, ENTROPY)
    elif ref is not None:
        start = row_offset(row, inner, ref_so, ref_si)
        m, s, t = split_sums(ref, start, split, V, scale, False, REF_WORD, LOG_BLOCK, UNROLL, STEPS)
        store_split(partials + 3 * N * n_splits, row, split, N, n_splits, m, s, t, False)


@triton.jit(do_not_specialize=_BATCH)
def ratio_kl_merge(
    policy, ids, mask, ref, old_logp, ref_logp, partials, ratio, kl, logp, entropy, stats, slopes, scales,
    inverses, scale, inverse, ignore_index, N, V, inner, n_splits, policy_so, policy_si, ids_so, ids_si,
    mask_so, mask_si, ref_so, ref_si, old_so, old_si, given_so, given_si, LOG_SPLITS: tl.constexpr,
):  # fmt: skip
    """Forward with few rows, second kernel: add the splits of each row."""
    row = tl.program_id(0).to(tl.int64)
    token, live, good = row_state(ids, mask, row, inner, ids_so, ids_si, mask_so, mask_si, ignore_index, V)
    if live == 0:
        store_dead_row(row, N, ratio, kl, logp, entropy, stats, slopes)
        return
    scale, inverse = own_or(scale, scales, row, None), own_or(inverse, inverses, row, None)
    m, s, t = merged_sums(partials, row, N, n_splits, scale, entropy is not None, LOG_SPLITS)
    ref_m, ref_s = m, s
    if ref is not None:
        ref_m, ref_s, _ = merged_sums(partials + 3 * N * n_splits, row, N, n_splits, scale, False, LOG_SPLITS)
    store_row(
        policy + row_offset(row, inner, policy_so, policy_si), at(ref, row, inner, ref_so, ref_si),
        at(old_logp, row, inner, old_so, old_si), at(ref_logp, row, inner, given_so, given_si),
        token, good, row, N, m, s, t, ref_m, ref_s, inverse, ratio, kl, logp, entropy, stats, slopes,
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
    scaled = scaling(args["temperature"], N)
    plan, sizes = plan_of(V), (args["ignore_index"], N, V, inner)
    words = {"WORD": word_of(tensors[0], strides[:2])}
    words["REF_WORD"] = 1 if ref is None else word_of(tensors[3], strides[6:8])
    if plan.walks_rows(N, device):
        launch(
            ratio_kl_rows, (N,), *tensors, *results, *scaled, *sizes, *strides,
            **words, LOG_SPLITS=plan.log_splits, **plan.order, **plan.options,
        )  # fmt: skip
    else:
        partials = empty((1 if ref is None else 2, 3, N, plan.splits))
        launch(
            ratio_kl_splits, (N, plan.splits, len(partials)), *tensors[:4], partials, scaled.scales,
            scaled.scale, *sizes, *strides[:8], ENTROPY=entropy is not None, **words, **plan.order,
            **plan.options,
        )  # fmt: skip
        launch(
            ratio_kl_merge, (N,), *tensors, partials, *results, *scaled, *sizes, plan.splits, *strides,
            LOG_SPLITS=plan.log_splits, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return results


def ratio_kl_bwd(launch: Launch = run, **args: Any) -> Tensor:
    """The gradient of the policy's logits, contiguous, in their dtype."""
    return gradient_of(args["policy_logits"], launch, args)
