"""Class linear-lse/triton-8x4 of `linear_logp`: the portable kernels with the splits of eight shards of the
vocabulary (`isobit.kernels.host.vocab_shards`), all of them or those of one rank.

A split is walked in the tiles of `kernels_triton` from its own start. States of splits are

    states [ranks, 12 shards + 1, capacity]    (m, s, t) of every split of a rank's shards by slot, then the
                                               logit of the slot's token, from the rank that has its column

dhidden is one chain over the columns of each shard, and the shards are added as a balanced tree.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.host.vocab_shards import SHARDS, SPLITS_PER_SHARD, TILE, Shards, shards_of
from isobit.kernels.triton.interpreter import narrow
from isobit.kernels.triton.rows import finite_or_zero, own_or, rescale, row_offset, row_results
from isobit.kernels.triton.tiles import place
from isobit.ops.linear_logp.kernels_triton import FOLD_ROWS, Call, listed, logits_tile, prepare, tile_sums
from isobit.ops.linear_logp.kernels_triton_bwd import dhidden_tile, dlogits_tile, dweight_tile, parts
from isobit.ops.linear_logp.pending import Pending
from isobit.ops.linear_logp.shard_calls import vocabulary_of

_SPLITS = tl.constexpr(SPLITS_PER_SHARD)
_SHARDS = tl.constexpr(SHARDS)
_TILE = tl.constexpr(TILE)


# See `logp_splits` for what is not specialised, and why.
@triton.jit(do_not_specialize=["blocks", "slots", "capacity", "inner", "V", "shard_columns"])
def shard_splits(
    hidden, weight, bias, ids, rows, count, states, scales, scale, slots, capacity, V, shard_columns, D,
    blocks, n_splits, inner, hidden_so, hidden_si, weight_s, softcap, inv_softcap, logit_scale,
    LOGITS: tl.constexpr, ENTROPY: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr,
    LOG_COLS: tl.constexpr,
):  # fmt: skip
    """(m, s, t) of a split of each slot, and the logit of its token, from the split that has it. Tokens count
    from the first of the V columns here."""
    tile, split = place(tl.cdiv(slots, ROWS), n_splits, tl.program_id(0))
    live_slots = tl.load(count)
    if tile * ROWS >= live_slots:
        return
    slot = tile * ROWS + tl.arange(0, ROWS)
    row, live = listed(rows, slot, live_slots)
    token = tl.load(ids + row, mask=live, other=-1)
    each = own_or(scale, scales, row, live)
    hidden_at = hidden + row_offset(row, inner, hidden_so, hidden_si)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    t = tl.zeros([ROWS], tl.float32)
    z_token = tl.zeros([ROWS], tl.float32)
    shard, at = split // _SPLITS, split % _SPLITS
    tiles = tl.cdiv(shard_columns, _TILE)
    end = tl.minimum((shard + 1) * shard_columns, V)
    lo = tl.minimum(shard * shard_columns + at * tiles // _SPLITS * _TILE, end)
    hi = tl.minimum(shard * shard_columns + (at + 1) * tiles // _SPLITS * _TILE, end)
    for col0 in range(lo, hi, COLS):
        col = col0 + tl.arange(0, COLS)
        z = logits_tile(
            hidden_at, live, weight, bias, col, V, D, blocks, weight_s, softcap, inv_softcap, logit_scale,
            LOGITS, ROWS, COLS, K,
        )  # fmt: skip
        # At most one column is nonzero here, so the order of this sum does not matter.
        hit = (col[None, :] == token[:, None]) & (col < hi)[None, :]
        z_token += tl.sum(tl.where(hit, z, 0.0), axis=1)
        z = tl.where((col < hi)[None, :], z, float("-inf"))
        m, s, t = tile_sums(m, s, t, z, each, ENTROPY, ROWS, LOG_COLS)
    step = tl.full([], 1, tl.int64) * capacity
    tl.store(states + n_splits * 3 * step + slot, z_token, mask=live & (token >= lo) & (token < hi))
    out = states + split * 3 * step + slot
    tl.store(out, m, mask=live)
    tl.store(out + step, s, mask=live)
    tl.store(out + 2 * step, t, mask=live)


@triton.jit(do_not_specialize=["capacity", "N", "rank_columns"])
def merge_states(
    states, rows, count, ids, logp, entropy, lse, stats, scales, inverses, scale, inverse, capacity, N,
    rank_columns, RANKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Fold the splits of each slot in ascending order, and write its row's results. A rank has `rank_columns`
    columns."""
    live_slots = tl.load(count)
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row, live = listed(rows, slot, live_slots)
    each, inv = own_or(scale, scales, row, live), own_or(inverse, inverses, row, live)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    t = tl.zeros([ROWS], tl.float32)
    step = tl.full([], 1, tl.int64) * capacity
    splits: tl.constexpr = _SHARDS * _SPLITS // RANKS
    for split in range(splits * RANKS):
        at = states + (split * 3 + split // splits) * step + slot
        m1 = tl.load(at, mask=live, other=0.0)
        s1 = tl.load(at + step, mask=live, other=1.0)
        t1 = tl.zeros([ROWS], tl.float32)
        if entropy is not None:
            t1 = tl.load(at + 2 * step, mask=live, other=0.0)
        top = tl.maximum(m, m1)
        ref = finite_or_zero(top)
        s, t = rescale(m, s, t, ref, each)
        s1, t1 = rescale(m1, s1, t1, ref, each)
        m, s, t = top, s + s1, t + t1
    owner = tl.load(ids + row, mask=live, other=0).to(tl.int64) // rank_columns
    owned = states + (owner * (3 * splits + 1) + 3 * splits) * step + slot
    z = tl.load(owned, mask=live, other=0.0)
    own_logp, own_entropy, own_lse, s = row_results(z, m, s, t, inv)
    tl.store(logp + row, own_logp, mask=live)
    if stats is not None:
        tl.store(stats + row, m, mask=live)
        tl.store(stats + N + row, s, mask=live)
    if lse is not None:
        tl.store(lse + row, own_lse, mask=live)
    if entropy is not None:
        tl.store(entropy + row, own_entropy, mask=live)


@triton.jit
def place_rows(sums, rows, count, out, D, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Row rows[slot] of out = the sum of the slot, rounded."""
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row, live = listed(rows, slot, tl.load(count))
    d = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = live[:, None] & (d < D)[None, :]
    value = tl.load(sums + slot.to(tl.int64)[:, None] * D + d[None, :], mask=inside, other=0.0)
    tl.store(out + row[:, None] * D + d[None, :], narrow(value, out), mask=inside)


# Launchers


def _prepared(args: dict[str, Any]) -> tuple[Call, Shards, Tensor]:
    """(the call, its shards, tokens counted from the first column here)."""
    call, cut = prepare(args), shards_of(args, vocabulary_of(args))
    return call, cut, call.ids - cut.column if cut.column else call.ids


def linear_logp_states(launch: Launch = run, **args: Any) -> Tensor:
    """[12 shards + 1, capacity]."""
    call, cut, ids = _prepared(args)
    N, tile, weight = call.N, call.tile, args["weight"]
    capacity = -(-N // 128) * 128
    states = torch.empty((3 * cut.splits + 1, capacity), dtype=torch.float32, device=weight.device)
    if N:
        launch(
            shard_splits, (triton.cdiv(N, tile.rows) * cut.splits,),
            call.hidden, weight, args["bias"], ids, call.rows, call.count, states, call.scaled.scales,
            call.scaled.scale, N, capacity, cut.columns, cut.width, call.D, triton.cdiv(call.D, tile.k),
            cut.splits, *call.walk, weight.stride(0), *call.transforms, LOGITS=call.rounding,
            ENTROPY=args["return_entropy"], LOG_COLS=tile.cols.bit_length() - 1, **call.constants,
        )  # fmt: skip
    return states


def _merged(
    call: Call, states: Tensor, P: int, shape: torch.Size, launch: Launch, args: dict[str, Any]
) -> tuple[Tensor | None, ...]:
    logp = call.blank(torch.float32).view(shape)
    entropy = logp.clone() if args["return_entropy"] else None
    lse = logp.clone() if args["return_lse"] else None
    stats = torch.stack((logp, torch.ones_like(logp))) if args["return_stats"] else None
    ranks, _, capacity = states.shape
    if call.N:
        launch(
            merge_states, (triton.cdiv(call.N, FOLD_ROWS),),
            states, call.rows, call.count, call.ids, logp, entropy, lse, stats, *call.scaled, capacity,
            call.N, P // ranks, RANKS=ranks, ROWS=FOLD_ROWS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return logp, entropy, lse, stats


def linear_logp_merged(**args: Any) -> tuple[Tensor | None, ...]:
    """(logp, entropy, lse, stats) from the states of all ranks."""
    ids, states = args["token_ids"], args["states"]
    no_head = {"hidden": states.new_empty(*ids.shape, 1), "weight": states, "softcap": None}
    call = prepare(args | no_head | {"vocab_size": args["vocab"], "logits_dtype": None})
    return _merged(call, states, args["padded_vocab"], ids.shape, run, args)


def linear_logp(launch: Launch = run, **args: Any) -> tuple[Tensor | None, ...]:
    """(logp, entropy, lse, stats) with all shards here."""
    call, cut, _ = _prepared(args)
    states = linear_logp_states(launch, **args)
    return _merged(call, states[None], cut.P, args["token_ids"].shape, launch, args)


def linear_logp_bwd(
    launch: Launch = run, grad_dtype: torch.dtype | None = None, **args: Any
) -> tuple[Tensor | None, ...]:
    """(dhidden, dweight, dbias), each if it is wanted. With some of the shards, dhidden is their part of the
    tree."""
    call, cut, ids = _prepared(args)
    weight, bias, N, D, hidden, tile = args["weight"], args["bias"], call.N, call.D, call.hidden, call.tile
    want_hidden, want_weight, want_bias = (args[f"want_{x}"] for x in ("hidden", "weight", "bias"))
    dhidden = dweight = dbias = None
    if want_hidden:
        dtype = args["dhidden_dtype"] or grad_dtype or hidden.dtype
        dhidden = call.blank(dtype)[:, None].expand(N, D).contiguous().view(args["hidden"].shape)
    if want_weight:
        dweight = torch.zeros(weight.shape, dtype=grad_dtype or weight.dtype, device=weight.device)
    if want_bias:
        dbias = torch.zeros(bias.shape, dtype=grad_dtype or bias.dtype, device=bias.device)
    if N == 0:
        return dhidden, dweight, dbias

    slots, width = parts(N, cut.width, hidden.element_size(), args["workspace_bytes"])
    empty = partial(torch.empty, device=hidden.device, dtype=torch.float32)
    dz = empty(min(slots, N), width, dtype=hidden.dtype)
    pending = Pending(cut.count, N, D, hidden.device) if want_hidden else None
    open_columns = empty(width, D) if want_weight and slots < N else None
    open_bias = empty(width, 1) if want_bias and slots < N else None
    ones = hidden.new_ones(1)  # one number, read with stride 0
    names = ("stats", "entropy", "dlogp", "dentropy", "dlse")
    given = [None if args[name] is None else args[name].contiguous() for name in names]
    tiles_of_rows, tiles_of_columns = triton.cdiv(len(dz), tile.rows), triton.cdiv(width, tile.cols)
    tiles_of_d = triton.cdiv(D, tile.cols)
    for start, end in cut.bounds():
        if start == end and pending is not None:
            pending.next().zero_()
        for col in range(start, end, width):
            for first in range(0, N, slots):
                here = (first, len(dz), col, width)
                launch(
                    dlogits_tile, (tiles_of_rows * tiles_of_columns,),
                    hidden, weight, bias, ids, call.rows, call.count, *given, dz, *call.scaled, *here,
                    N, end, D, triton.cdiv(D, tile.k), *call.walk, weight.stride(0), *call.transforms,
                    LOGITS=call.rounding, **call.constants,
                )  # fmt: skip
                if pending is not None:
                    launch(
                        dhidden_tile, (tiles_of_rows * tiles_of_d,),
                        dz, weight, call.rows, call.count, pending.next()[first:], None, *here, end, D,
                        weight.stride(0), FIRST=col == start, LAST=False, **call.constants,
                    )  # fmt: skip
                at_end = {"FIRST": first == 0, "LAST": first + slots >= N}
                if want_weight:
                    launch(
                        dweight_tile, (triton.cdiv(width, tile.rows) * tiles_of_d,),
                        dz, hidden, call.rows, call.count, open_columns, dweight, *here, end, D, *call.walk,
                        **at_end, **call.constants,
                    )  # fmt: skip
                if want_bias:
                    launch(
                        dweight_tile, (triton.cdiv(width, tile.rows),),
                        dz, ones, call.rows, call.count, open_bias, dbias, *here, end, 1, None, 0, 0,
                        **at_end, **call.constants,
                    )  # fmt: skip
        if pending is not None:
            pending.add(launch)
    if pending is not None:
        launch(
            place_rows, (triton.cdiv(N, 32), triton.cdiv(D, 128)),
            pending.total(), call.rows, call.count, dhidden, D, ROWS=32, COLS=128, enable_fp_fusion=False,
        )  # fmt: skip
    return dhidden, dweight, dbias
