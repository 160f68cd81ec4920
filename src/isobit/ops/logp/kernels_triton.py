"""`logp` in portable Triton: NVIDIA, AMD, and the CPU interpreter.

The forward reads the logits once. With many rows one program takes a whole row. With few rows one program
takes a split of a row, and a second kernel adds the splits. Both add in the order of
`isobit.kernels.triton.rows`, so N and the number of SMs affect the schedule and never the bits.

The backward reads and writes once: `isobit.kernels.triton.logits`, which also has the rest of the forward.

Token ids: a row whose id is `ignore_index` or whose mask is 0 is not read; its results and gradients are
0. A live row with an id outside [0, V) reads nothing at that id; its results and gradients are NaN.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.host.rows import row_strides
from isobit.kernels.triton.logits import (
    BATCH,
    as_bytes,
    gradient_of,
    merged_sums,
    row_state,
    row_sums,
    schedule_of,
    store_split,
    word_of,
)
from isobit.kernels.triton.rows import own_or, row_offset, row_results, split_sums
from isobit.kernels.triton.temperature import scaling_of_rows


@triton.jit
def store_row(
    z_ptr, token, good, row, N, m, s, t, inverse, logp, entropy, lse, stats,
):  # fmt: skip
    """Turn the sums of a live row into its results."""
    z = tl.load(z_ptr + token, mask=good, other=0.0).to(tl.float32)
    nan = tl.where(good, 0.0, float("nan"))
    own_logp, own_entropy, own_lse, s = row_results(z, m, s, t, inverse)
    tl.store(logp + row, own_logp + nan)
    if stats is not None:
        tl.store(stats + row, m + nan)
        tl.store(stats + N + row, s)
    if lse is not None:
        tl.store(lse + row, own_lse + nan)
    if entropy is not None:
        tl.store(entropy + row, own_entropy + nan)


@triton.jit
def store_masked_row(row, N, logp, entropy, lse, stats):
    tl.store(logp + row, 0.0)
    if stats is not None:
        tl.store(stats + row, 0.0)
        tl.store(stats + N + row, 1.0)
    if lse is not None:
        tl.store(lse + row, 0.0)
    if entropy is not None:
        tl.store(entropy + row, 0.0)


@triton.jit(do_not_specialize=BATCH)
def logp_rows(
    logits, ids, mask, logp, entropy, lse, stats, scales, inverses, scale, inverse, ignore_index, N, V, inner,
    logits_so, logits_si, ids_so, ids_si, mask_so, mask_si, WORD: tl.constexpr,
    LOG_BLOCK: tl.constexpr, UNROLL: tl.constexpr, STEPS: tl.constexpr, LOG_SPLITS: tl.constexpr,
):  # fmt: skip
    """Forward, one program a row."""
    row = tl.program_id(0).to(tl.int64)
    token, live, good = row_state(ids, mask, row, inner, ids_so, ids_si, mask_so, mask_si, ignore_index, V)
    if live == 0:
        store_masked_row(row, N, logp, entropy, lse, stats)
        return
    scale, inverse = own_or(scale, scales, row, None), own_or(inverse, inverses, row, None)
    start = row_offset(row, inner, logits_so, logits_si)
    m, s, t = row_sums(
        logits, start, V, scale, entropy is not None, WORD, LOG_BLOCK, UNROLL, STEPS, LOG_SPLITS
    )
    z_ptr = logits + start
    store_row(z_ptr, token, good, row, N, m, s, t, inverse, logp, entropy, lse, stats)


@triton.jit(do_not_specialize=BATCH)
def logp_splits(
    logits, ids, mask, partials, scales, scale, ignore_index, N, V, inner,
    logits_so, logits_si, ids_so, ids_si, mask_so, mask_si, ENTROPY: tl.constexpr, WORD: tl.constexpr,
    LOG_BLOCK: tl.constexpr, UNROLL: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Forward with few rows, one program a split: (m, s, t) of each into partials [3, N, splits]."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, live, _ = row_state(ids, mask, row, inner, ids_so, ids_si, mask_so, mask_si, ignore_index, V)
    if live == 0:
        return
    scale = own_or(scale, scales, row, None)
    start = row_offset(row, inner, logits_so, logits_si)
    m, s, t = split_sums(logits, start, split, V, scale, ENTROPY, WORD, LOG_BLOCK, UNROLL, STEPS)
    store_split(partials, row, split, N, tl.num_programs(1), m, s, t, ENTROPY)


@triton.jit(do_not_specialize=BATCH)
def logp_merge(
    logits, ids, mask, partials, logp, entropy, lse, stats, scales, inverses, scale, inverse, ignore_index,
    N, V, inner, n_splits, logits_so, logits_si, ids_so, ids_si, mask_so, mask_si,
    LOG_SPLITS: tl.constexpr,
):  # fmt: skip
    """Forward with few rows, second kernel: add the splits of each row."""
    row = tl.program_id(0).to(tl.int64)
    token, live, good = row_state(ids, mask, row, inner, ids_so, ids_si, mask_so, mask_si, ignore_index, V)
    if live == 0:
        store_masked_row(row, N, logp, entropy, lse, stats)
        return
    scale, inverse = own_or(scale, scales, row, None), own_or(inverse, inverses, row, None)
    m, s, t = merged_sums(partials, row, N, n_splits, scale, entropy is not None, LOG_SPLITS)
    z_ptr = logits + row_offset(row, inner, logits_so, logits_si)
    store_row(z_ptr, token, good, row, N, m, s, t, inverse, logp, entropy, lse, stats)


def logp(launch: Launch = run, **args: Any) -> tuple[Tensor | None, ...]:
    """(logp, entropy, lse, stats [2, *] = (m, s)); None for outputs that were not requested."""
    logits, ids, mask = args["logits"], args["token_ids"], as_bytes(args["mask"])
    lead, V = logits.shape[:-1], logits.shape[-1]
    empty = partial(torch.empty, device=logits.device, dtype=torch.float32)
    out = empty(lead)
    entropy = empty(lead) if args["return_entropy"] else None
    lse = empty(lead) if args["return_lse"] else None
    stats = empty((2, *lead)) if args["return_stats"] else None
    results = (out, entropy, lse, stats)
    N = out.numel()
    if N == 0:
        return results
    inner, (z, ids, mask), strides = row_strides(lead, (logits, ids, mask))
    scaled = scaling_of_rows(args["temperature"], N, launch)
    schedule, word = schedule_of(V), word_of(z, strides[:2])
    sizes = (args["ignore_index"], N, V, inner)
    if schedule.takes_whole_rows(N, logits.device):
        launch(
            logp_rows, (N,),
            z, ids, mask, *results, *scaled, *sizes, *strides,
            WORD=word, LOG_SPLITS=schedule.log_splits, **schedule.order, **schedule.options,
        )  # fmt: skip
    else:
        partials = empty((2 if entropy is None else 3, N, schedule.splits))
        launch(
            logp_splits, (N, schedule.splits),
            z, ids, mask, partials, scaled.scales, scaled.scale, *sizes, *strides,
            ENTROPY=entropy is not None, WORD=word, **schedule.order, **schedule.options,
        )  # fmt: skip
        launch(
            logp_merge, (N,),
            z, ids, mask, partials, *results, *scaled, *sizes, schedule.splits, *strides,
            LOG_SPLITS=schedule.log_splits, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return results


def logp_bwd(launch: Launch = run, **args: Any) -> Tensor:
    """dlogits, contiguous, in the dtype of the logits."""
    return gradient_of(args["logits"], launch, args)
