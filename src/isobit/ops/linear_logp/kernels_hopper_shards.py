"""Class lse/8x4 of `linear_logp` on Hopper: the kernels of lse/1 with the splits of eight shards of the
vocabulary (`isobit.kernels.host.vocab_shards`), all of them or those of one rank.

dhidden is a sum over the vocabulary. A shard's part is made as in lse/1, in segments of 512 from the shard's
start, and the shards are added as a balanced tree. In order, a tree of eight needs at most four fp32 [N, D]
sums at a time: those of 0-3, 4-5, 6 and 7.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run
from isobit.frame.traced import decides
from isobit.kernels.hopper.bias import in_words
from isobit.kernels.hopper.lse import Slots
from isobit.kernels.hopper.product import pack, sum_into
from isobit.kernels.hopper.shards import all_splits, make_empty, new_states, tokens_here
from isobit.kernels.host.vocab_shards import TILE, Shards, shards_of
from isobit.ops.linear_logp.kernels_hopper import (
    fold_splits,
    packed_slots,
    rows_for_tma,
    schedule_for,
    zero,
)
from isobit.ops.linear_logp.kernels_hopper_bwd import (
    Block,
    blocks_of,
    recompute,
    sum_bias,
    unpack,
    weigh,
)
from isobit.ops.linear_logp.pending import Pending
from isobit.ops.linear_logp.shard_calls import vocabulary_of
from isobit.ops.linear_logp.slabs import Slab, block_slots, default_slab_bytes, slabs

# Forward


def _states(
    cut: Shards, launch: Launch, sms: int, args: dict[str, Any]
) -> tuple[Slots, float, tuple[Tensor, Tensor, Tensor]]:
    """(slots, factor on logits, states as `new_states` returns them)."""
    hidden, packed = args["hidden"], args["mask"] is not None
    slots, factor = packed_slots(args, packed, launch, list_parts=not packed)
    made = new_states(cut, slots.capacity, hidden.device)
    _, partial, picked = made
    if slots.capacity == 0:
        return slots, factor, made
    if cut.columns == 0:  # TMA does not take an empty matrix
        make_empty(partial, launch)
        return slots, factor, made
    sms = sms or sm_count(hidden.device)
    wide = cut.count * cut.tiles * TILE
    schedule = schedule_for(hidden.shape[:-1].numel(), hidden.shape[-1], wide, sms, cut.splits)
    if schedule.pieces and cut.has_empty_splits:
        make_empty(partial, launch)  # pieces without tiles are not taken, so nothing is stored for them
    rows = rows_for_tma(hidden)
    if packed:
        rows = pack(rows, slots.rows, launch)
    ids = tokens_here(slots, cut, launch)
    fold_splits(partial, picked, rows, slots, ids, cut.columns, schedule, sms, args, launch, cut=cut)
    return slots, factor, made


def linear_logp(launch: Launch = run, sms: int = 0, **args: Any) -> tuple[Tensor | None, ...]:
    """(logp, entropy, lse, stats). `sms`: the number of SMs to make a schedule for; 0 is that of the
    device."""
    cut, shape = shards_of(args, vocabulary_of(args)), args["hidden"].shape[:-1]
    slots, factor, (_, partial, picked) = _states(cut, launch, sms, args)
    flags = (args["return_entropy"], args["return_lse"], args["return_stats"])
    return slots.merge(partial, picked, shape, cut.V, factor, *flags, launch, cut.splits)


def linear_logp_states(**args: Any) -> Tensor:
    """[12 shards + 1, capacity]: see `isobit.kernels.hopper.shards`."""
    cut = shards_of(args, vocabulary_of(args))
    _, _, (states, _, _) = _states(cut, run, 0, args)
    return states


def linear_logp_merged(**args: Any) -> tuple[Tensor | None, ...]:
    """(logp, entropy, lse, stats) from the states of all ranks."""
    ids, V = args["token_ids"], args["vocab"]
    head = {"weight": args["states"], "vocab_size": V}
    slots, factor = packed_slots(args | head, args["mask"] is not None, run)
    partial, picked = all_splits(args["states"], slots, args["padded_vocab"])
    flags = (args["return_entropy"], args["return_lse"], args["return_stats"])
    return slots.merge(partial, picked, ids.shape, V, factor, *flags, run, len(partial))


# Backward


def linear_logp_bwd(
    launch: Launch = run, grad_dtype: torch.dtype | None = None, **args: Any
) -> tuple[Tensor | None, ...]:
    """(dhidden, dweight, dbias), each if it is wanted. With some of the shards, dhidden is their part of the
    tree."""
    hidden, weight, bias = args["hidden"], args["weight"], args["bias"]
    cut = shards_of(args, vocabulary_of(args))
    want_hidden, want_weight, want_bias = (args[f"want_{x}"] for x in ("hidden", "weight", "bias"))
    dtype = args["dhidden_dtype"] or grad_dtype or hidden.dtype
    if hidden.numel() == 0:
        dtypes = (dtype, grad_dtype, grad_dtype)
        wanted = zip((hidden, weight, bias), (want_hidden, want_weight, want_bias), dtypes, strict=True)
        return tuple(torch.zeros_like(t, dtype=kind) if want else None for t, want, kind in wanted)
    if bias is not None:
        args["bias"] = in_words(bias, cut.columns)
    rows = rows_for_tma(hidden)
    N, D = rows.shape
    over_tokens = want_weight or want_bias
    packed = over_tokens or args["mask"] is not None
    slots, factor = packed_slots(args, packed, launch)
    out = rows.new_empty(slots.capacity, D, dtype=dtype) if want_hidden else None
    if packed:  # packed rows are in the memory of dhidden, if it has their dtype
        place = out if out is not None and out.dtype == rows.dtype else None
        rows = pack(rows, slots.rows, launch, out=place)
    height = slots.capacity if over_tokens else block_slots(slots.capacity)
    pending = Pending(cut.count, height, D, rows.device) if want_hidden else None
    dweight = dbias = None
    if want_weight:
        dweight = torch.empty_like(weight, dtype=grad_dtype, memory_format=torch.contiguous_format)
    if want_bias:
        dbias = torch.empty_like(bias, dtype=grad_dtype)
    weights, counts = weigh(slots, height, args, N, cut.V, factor, launch)
    ids = tokens_here(slots, cut, launch)
    slab_bytes = args["workspace_bytes"]
    if slab_bytes is None:
        slab_bytes = default_slab_bytes(height, weight.nbytes)
    sms, plan = sm_count(rows.device), []
    for first, end in cut.bounds():
        plan.append((first, decides(slabs)(end - first, height, D, slab_bytes, 0, 0, sms)))
    stride = max((slab.stride for _, made in plan for slab in made), default=0)
    own = rows.new_empty(height * stride)

    def of_slab(block: Block, here: Tensor, start: int, slab: Slab) -> None:
        columns = slice(start + slab.first, start + slab.end)
        dz = own[: height * slab.stride].view(height, slab.stride)
        dz = dz[: block.rows.shape[0], : slab.end - slab.first]
        recompute(dz, block._replace(ids=here), weight[columns], args, columns.start, launch)
        if pending is not None:
            dh = pending.next()
            init = dh if slab.first else None
            sum_into(dh, weight[columns], dz.t(), init=init, rows=block.count, launch=launch)
        if dweight is not None:
            sum_into(dweight[columns], rows, dz, counted=slots.count, launch=launch)
        if dbias is not None:
            sum_bias(dbias[columns], dz, block.count, False, launch)

    # A packed row is at its own index or before it. So, going from the last block to the first, a block's
    # rows of dhidden overwrite no row that is still to be read.
    blocks = blocks_of(rows, slots, weights, counts, None, None, height)
    for i in reversed(range(len(blocks))):
        block, here = blocks[i], ids[i * height : (i + 1) * height]
        for start, made in plan:
            for slab in made:
                of_slab(block, here, start, slab)
            if pending is not None:
                if not made:
                    zero(pending.next(), launch)
                pending.add(launch)
        if out is not None and pending is not None:
            unpack(out, pending.total(), block.rows, block.ids, block.count, cut.V, launch)
    if out is not None:
        out = out[:N]
        if packed:
            slots.blank(out, launch)
        out = out.view(hidden.shape)
    for padding in (dweight, dbias):
        if padding is not None and len(padding) > cut.columns:
            zero(padding[cut.columns :], launch)
    return out, dweight, dbias
