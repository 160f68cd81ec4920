"""Class lse/triton-8x1 of `logp`: sums of eight shards of the vocabulary, all of them or those of one rank.

A shard is summed as a row of lse/triton-1 with as many columns (`isobit.kernels.triton.logits`), and the
eight are folded as the splits of such a row are. Between the two is what ranks exchange:

    states [ranks, N, 3 shards + 1]    of every row, m of each of a rank's shards, then s, then t, then the
                                       logit of the row's token if the rank has its column, else 0

Without entropy there is no t. The gradient is that of lse/triton-1: from the (m, s) of a row, elementwise.

Token ids: as in `kernels_triton`, with V the tokens of all ranks.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.host.rows import row_strides
from isobit.kernels.host.vocab_shards import SHARDS, Shards, shards_of
from isobit.kernels.triton.logits import (
    BATCH,
    as_bytes,
    gradient_of,
    row_state,
    row_sums,
    schedule_of,
    word_of,
)
from isobit.kernels.triton.rows import fold, own_or, row_offset
from isobit.kernels.triton.temperature import scaling_of_rows
from isobit.ops.logp.kernels_triton import store_masked_row, store_row


@triton.jit(do_not_specialize=(*BATCH, "V", "first", "columns"))
def logp_shards(
    logits, ids, mask, states, scales, scale, ignore_index, N, V, first, columns, width, inner,
    logits_so, logits_si, ids_so, ids_si, mask_so, mask_si, ENTROPY: tl.constexpr, WORD: tl.constexpr,
    LOG_BLOCK: tl.constexpr, UNROLL: tl.constexpr, STEPS: tl.constexpr, LOG_SPLITS: tl.constexpr,
):  # fmt: skip
    """One program a shard of a row, of `width` columns. The first column here is column `first` of V tokens.
    If some columns here are no tokens, `columns` counts those that are."""
    row, shard, shards = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    sums: tl.constexpr = 3 if ENTROPY else 2
    token, live, good = row_state(ids, mask, row, inner, ids_so, ids_si, mask_so, mask_si, ignore_index, V)
    at = states + row * (sums * shards + 1)
    m = 0.0
    s = 0.0
    t = 0.0
    z = 0.0
    if live:  # otherwise nothing is read
        start = row_offset(row, inner, logits_so, logits_si)
        end = width
        if columns is not None:  # of the shard
            end = tl.minimum(tl.maximum(columns - shard * width, 0), width)
        m, s, t = row_sums(
            logits, start + shard * width, end, own_or(scale, scales, row, None), ENTROPY, WORD,
            LOG_BLOCK, UNROLL, STEPS, LOG_SPLITS,
        )  # fmt: skip
        here = token - first
        if columns is None:
            inside = good & (here >= 0) & (here < shards * width)
        else:
            inside = good & (here >= 0) & (here < columns)
        z = tl.load(logits + start + here, mask=inside, other=0.0).to(tl.float32)
    tl.store(at + shard, m)
    tl.store(at + shards + shard, s)
    if ENTROPY:
        tl.store(at + 2 * shards + shard, t)
    if shard == 0:
        tl.store(at + sums * shards, z)


@triton.jit(do_not_specialize=(*BATCH, "V", "rank_columns"))
def logp_of_shards(
    states, ids, mask, logp, entropy, lse, stats, scales, inverses, scale, inverse, ignore_index, N, V,
    rank_columns, inner, ids_so, ids_si, mask_so, mask_si, RANKS: tl.constexpr, SUMS: tl.constexpr,
    LOG_SHARDS: tl.constexpr,
):  # fmt: skip
    """Fold the shards of a row, and write its results. A rank has `rank_columns` columns, and SUMS
    numbers of a shard."""
    row = tl.program_id(0).to(tl.int64)
    token, live, good = row_state(ids, mask, row, inner, ids_so, ids_si, mask_so, mask_si, ignore_index, V)
    if live == 0:
        store_masked_row(row, N, logp, entropy, lse, stats)
        return
    scale, inverse = own_or(scale, scales, row, None), own_or(inverse, inverses, row, None)
    shards: tl.constexpr = (1 << LOG_SHARDS) // RANKS
    size: tl.constexpr = SUMS * shards + 1
    index = tl.arange(0, 1 << LOG_SHARDS)
    at = states + ((index // shards) * N.to(tl.int64) + row) * size + index % shards
    m = tl.load(at)
    s = tl.load(at + shards)
    t = tl.zeros([1 << LOG_SHARDS], tl.float32)
    if entropy is not None:
        t = tl.load(at + 2 * shards)
    m, s, t = fold(m, s, t, scale, LOG_SHARDS)
    owner = tl.where(good, token, 0).to(tl.int64) // rank_columns
    z_ptr = states + (owner * N + row) * size + (size - 1)
    store_row(z_ptr, 0, good, row, N, m, s, t, inverse, logp, entropy, lse, stats)


# Launchers


def _states(cut: Shards, launch: Launch, args: dict[str, Any]) -> Tensor:
    """[N, S]: the states of the shards that are here."""
    logits, ids, mask = args["logits"], args["token_ids"], as_bytes(args["mask"])
    N, entropy = ids.numel(), args["return_entropy"]
    size = (3 if entropy else 2) * cut.count + 1
    states = torch.empty((N, size), dtype=torch.float32, device=logits.device)
    if N == 0:
        return states
    inner, (z, ids, mask), strides = row_strides(logits.shape[:-1], (logits, ids, mask))
    scaled, schedule = scaling_of_rows(args["temperature"], N, launch), schedule_of(cut.width)
    whole = cut.columns == cut.count * cut.width
    # The compiler knows nothing of a shard's end before the last column: words make up for it.
    word = word_of(z, (*strides[:2], cut.width if whole else 1))
    launch(
        logp_shards, (N, cut.count),
        z, ids, mask, states, scaled.scales, scaled.scale, args["ignore_index"], N, cut.V, cut.column,
        None if whole else cut.columns, cut.width, inner, *strides,
        ENTROPY=entropy, WORD=word, LOG_SPLITS=schedule.log_splits, **schedule.order, **schedule.options,
    )  # fmt: skip
    return states


def logp_states(launch: Launch = run, **args: Any) -> Tensor:
    """[N, S] of the shards of a rank."""
    return _states(shards_of(args, args["vocab"]), launch, args)


def logp_merged(launch: Launch = run, **args: Any) -> tuple[Tensor | None, ...]:
    """(logp, entropy, lse, stats [2, *] = (m, s)) from the states [R, N, S] of all ranks."""
    ids, mask, states = args["token_ids"], as_bytes(args["mask"]), args["states"]
    lead, N, ranks = ids.shape, ids.numel(), len(states)
    empty = partial(torch.empty, device=states.device, dtype=torch.float32)
    logp = empty(lead)
    entropy = empty(lead) if args["return_entropy"] else None
    lse = empty(lead) if args["return_lse"] else None
    stats = empty((2, *lead)) if args["return_stats"] else None
    results = (logp, entropy, lse, stats)
    if N == 0:
        return results
    inner, (ids, mask), strides = row_strides(lead, (ids, mask))
    scaled = scaling_of_rows(args["temperature"], N, launch)
    launch(
        logp_of_shards, (N,),
        states, ids, mask, *results, *scaled, args["ignore_index"], N, args["vocab"],
        args["padded_vocab"] // ranks, inner, *strides,
        RANKS=ranks, SUMS=2 if entropy is None else 3, LOG_SHARDS=SHARDS.bit_length() - 1, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return results


def logp(launch: Launch = run, **args: Any) -> tuple[Tensor | None, ...]:
    """(logp, entropy, lse, stats) with all shards here."""
    cut = shards_of(args, args["logits"].shape[-1])
    states = _states(cut, launch, args)[None]
    return logp_merged(launch, **args | {"states": states, "vocab": cut.V, "padded_vocab": cut.P})


def logp_shard_bwd(launch: Launch = run, **args: Any) -> Tensor:
    """dlogits of a rank's columns, contiguous, in the dtype of the logits."""
    return gradient_of(args["logits"], launch, args)
