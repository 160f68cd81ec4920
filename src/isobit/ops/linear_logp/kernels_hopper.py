"""`linear_logp` on Hopper: one matrix product forward, no logits stored; class lse/1, and the main kernel of
lse/8x4 (`kernels_hopper_shards`).

A persistent kernel multiplies hidden rows with the vocabulary in tiles of 128 x 256 and folds each tile's
logits, which stay in registers, into running sums (`isobit.kernels.hopper.lse`). With a mask the live rows
are packed first, so that masked rows cost nothing. Without a mask hidden states are read in place, and ranges
of 64 rows in which every token is `ignore_index` are skipped. None of this affects a row's bits; nor does the
tile height, which is 64 for few rows, nor whether a program computes whole splits of the vocabulary or pieces
of them (`isobit.kernels.hopper.pieces`).

If [N, V] fits in memory, the kernel also stores unnormalised probabilities e = 2^((z - m) c) of all logits,
and the m that each is relative to, for the backward in `kernels_hopper_bwd`.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run, unused
from isobit.frame.traced import decides
from isobit.kernels.hopper.bias import in_words, multiply_add
from isobit.kernels.hopper.descriptors import aligned_for_tma, descriptor, matrix, operand_descriptor
from isobit.kernels.hopper.lse import (
    COLUMNS,
    LANES,
    OF_ROWS,
    SPLITS,
    Slots,
    as_lanes,
    columns_from,
    finite,
    fold_tile,
    pick,
    splits_of,
    store_picked,
    store_split,
)
from isobit.kernels.hopper.pieces import Pieces, counters_of, load_pieces, sums_of
from isobit.kernels.hopper.pipeline import (
    PRODUCER_REGISTERS,
    ROWS,
    Pipe,
    accumulator_layout,
    gl,
    gluon,
    kernel,
    load_tiles,
    put_tile,
    record,
    tma,
    triton_kernel,
)
from isobit.kernels.hopper.product import pack
from isobit.kernels.hopper.tiles import Tile
from isobit.kernels.host.temperature import LOG2E
from isobit.kernels.host.vocab_shards import SPLITS_PER_SHARD, Shards

# Tiles

#: The tile of the forward.
_TILE = Tile(consumers=2, columns=COLUMNS, step=64, stages=4, swapped=False)
#: For few rows. These are limited by reading the weight, and as many stages as fit keep more of it in flight.
_TILE_FEW_ROWS = Tile(consumers=1, columns=COLUMNS, step=64, stages=5, swapped=False)
#: For kernels that store a 16-bit tile: staging it takes the shared memory of the fourth stage.
TILE_STAGED = Tile(consumers=2, columns=COLUMNS, step=64, stages=3, swapped=False)

# When programs share splits, and the model of their time. Times were fitted on an H200, see `Schedule.us`.

#: Splits are shared up to this many rows, for which partial sums take 6 MB.
MAX_SHARED_ROWS = 3840
#: They are shared if the model predicts that this fraction of the time is saved.
MIN_SAVING = 0.05
#: A shared split has at most this many pieces, or one per tile.
MAX_PIECES = 6
#: To launch a kernel, to fill its ring, and to store its last tile.
LAUNCH_US = 3.1
#: The tensor cores of one SM, and bytes from L2 into one SM, from L2 to all SMs, and from memory.
FLOPS_PER_US = 5.6e6
SM_BYTES_PER_US = 158e3
L2_BYTES_PER_US = 15e6
HBM_BYTES_PER_US = 4.3e6
#: Time of a tile that is not hidden behind its product, by number of consumers: one of two consumers folds
#: while the other multiplies.
EPILOGUE_US_PER_TILE = {1: 1.0, 2: 0.0}
#: Slowdown of a tile if splits are shared, by number of consumers: programs that run at the same time then
#: share fewer operands in L2.
SHARED_SPLIT_SLOWDOWN = {1: 1.2, 2: 1.0}
#: Cost of handing a piece of several tiles over, in tiles.
HANDOVER_TILES = 0.2
#: Cost of handing over, if every tile is a piece.
HANDOVER_US = 3.0
#: Time from the sums of a tile to the sums of the next one, which another program computes.
HANDOVER_LATENCY_US = 4.5

_COLUMNS = gl.constexpr(COLUMNS)
#: The dtype that logits are rounded to, by `logits_dtype`.
ROUND = {None: None, torch.float32: None, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


# Forward


@record
class Fold:
    """What the consumer warpgroups of the forward read about the slots, and where their sums go."""

    ids: gl.tensor
    scales: gl.tensor
    bias: gl.tensor
    partial: gl.tensor  # [splits, 3, capacity]: m, s, t
    picked: gl.tensor  # [capacity]: the logit of the row's token
    probs_base: gl.tensor  # [capacity, tiles, 4]: the maximum to which the stored e of a lane are relative
    probs: tma.tensor_descriptor
    staging: gl.shared_memory_descriptor
    rows: gl.tensor
    shift: gl.tensor  # rows of `probs` before that of the first slot
    listed: gl.tensor  # parts of 64 rows with at least one live row, if LISTED
    pieces: Pieces  # unused unless SHARE_SPLITS
    capacity: gl.tensor
    V: gl.tensor
    LAYOUT: gl.constexpr
    ROUND: gl.constexpr  # the dtype that logits are rounded to, or None
    HAS_BIAS: gl.constexpr
    ENTROPY: gl.constexpr
    STORE_PROBS: gl.constexpr
    LISTED: gl.constexpr
    SHARE_SPLITS: gl.constexpr

    @gluon.jit
    def store(self, m, s, t, picked, scale, token, row, inside, split, first, end):
        """The sums of a split, and the token's logit if it was in the columns from `first` on, before
        `end`."""
        store_split(
            self.partial, self.picked, m, s, t, picked, scale, token, row, inside, split, first, end,
            self.capacity, self.ENTROPY,
        )  # fmt: skip

    @gluon.jit
    def store_probs(self, e, m, part, n, row, inside, tiles, WHICH: gl.constexpr):
        """Store the e of a tile, and the maximum that each lane subtracted."""
        lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, LANES)), 0)
        at = (gl.expand_dims(row, 1).to(gl.int64) * tiles + n) * 4 + lane
        gl.store(self.probs_base + at, finite(m), mask=gl.expand_dims(inside, 1))
        tile = gl.convert_layout(gl.reshape(e, (ROWS, _COLUMNS)), self.LAYOUT)
        put_tile(tile, self.probs, self.staging, part * ROWS + self.shift, n * _COLUMNS, WHICH)


@gluon.jit
def _fold_items(WHICH: gl.constexpr, pipe, fold, stage, phase, begin, items, stride):
    """The sums of 64 rows over each of these items: splits, or the tickets of pieces."""
    for item in range(begin, items, stride):
        if fold.SHARE_SPLITS:
            block, split, split_first, split_end, first, end = fold.pieces.piece(pipe, item)
        else:
            block, first, end, split = pipe.item(item)
        part = block * pipe.CONSUMERS + WHICH
        place = part  # of the sums that are handed over: before the list is looked up
        if fold.LISTED:
            part = gl.load(fold.listed + part)
        row = part * ROWS + gl.arange(0, ROWS, OF_ROWS)
        inside = row < fold.rows
        token = gl.load(fold.ids + row, mask=inside, other=-1)
        scale = gl.expand_dims(gl.load(fold.scales + row, mask=inside, other=1.0), 1)
        m = gl.full((ROWS, 4), float("-inf"), gl.float32, LANES)
        s = gl.zeros((ROWS, 4), gl.float32, LANES)
        t = gl.zeros((ROWS, 4), gl.float32, LANES)
        picked = gl.zeros((ROWS, 4), gl.float32, LANES)
        for n in range(first, end):
            begin_column, limit = pipe.column(n), pipe.limit(n)
            acc = gl.zeros((ROWS, _COLUMNS), gl.float32, fold.LAYOUT)
            if fold.HAS_BIAS:
                z, stage, phase = multiply_add(
                    pipe, acc, fold.bias, begin_column, fold.V, stage, phase, WHICH
                )
            else:
                # The first step overwrites the registers, so the compiler does not set them to zero.
                acc, stage, phase = pipe.begin_chain(acc, stage, phase, WHICH)
                acc, stage, phase = pipe.finish_chain(acc, pipe.steps - 1, stage, phase, WHICH)
                z = as_lanes(acc)
            column = columns_from(begin_column)
            if fold.ROUND is not None:
                z = z.to(fold.ROUND).to(gl.float32)
            if begin_column + _COLUMNS > limit:
                z = gl.where(column < limit, z, float("-inf"))
            picked = pick(z, column, token, begin_column, picked)
            if fold.SHARE_SPLITS:
                if (n == first) & (first > split_first):
                    m, s, t = fold.pieces.take_over(place, split, first - split_first, t)
            m, s, t, e = fold_tile(z, m, s, t, scale, fold.ENTROPY)
            if fold.STORE_PROBS:
                fold.store_probs(e, m, part, n, row, inside, pipe.tiles_n, WHICH)
        low = pipe.column(first)
        high = low + (end - first) * _COLUMNS
        if pipe.SHARDED:
            high = gl.minimum(high, pipe.limit(first))
        if fold.SHARE_SPLITS:
            if end < split_end:
                fold.pieces.hand_over(place, split, end - split_first, m, s, t)
                store_picked(fold.picked, picked, token, row, inside, low, high)
            else:
                fold.store(m, s, t, picked, scale, token, row, inside, split, low, high)
        else:
            fold.store(m, s, t, picked, scale, token, row, inside, split, low, high)
    return stage, phase


@gluon.jit
def _fold_splits(WHICH: gl.constexpr, pipe, fold):
    """A consumer warpgroup of the forward: 64 rows of each of the program's items."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    if fold.SHARE_SPLITS:
        ticket = fold.pieces.wait_for_ticket(pipe, stage, phase)
        while ticket < fold.pieces.count:
            stage, phase = _fold_items(WHICH, pipe, fold, stage, phase, ticket, ticket + 1, 1)
            ticket = fold.pieces.wait_for_ticket(pipe, stage, phase)
    else:
        _fold_items(WHICH, pipe, fold, stage, phase, gl.program_id(0), pipe.items(), gl.num_programs(0))
    if fold.STORE_PROBS:
        tma.store_wait(0)


@gluon.jit
def _produce(pipe, fold):
    """The producer warp of the forward."""
    if fold.SHARE_SPLITS:
        load_pieces(pipe, fold.pieces, fold.listed, fold.LISTED)
    else:
        load_tiles(pipe, fold.listed, fold.LISTED)


@kernel
def forward_kernel(
    partial, picked, ids, scales, bias, probs_base, count, queued, listed, capacity, V, steps, pieces,
    counters, sums, shards, shard_columns, a_desc, b_desc, probs_desc,
    CONSUMERS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    SPLITS: gl.constexpr, LAYOUT: gl.constexpr, ROUND: gl.constexpr, HAS_BIAS: gl.constexpr,
    ENTROPY: gl.constexpr, STORE_PROBS: gl.constexpr, QUEUED: gl.constexpr, LISTED: gl.constexpr,
    SHARE_SPLITS: gl.constexpr, SHARDED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Sums of every split of every row, and the logit of its token.

    LISTED: only for the listed parts of 64 rows. STORE_PROBS: also store e, and the maxima it is relative to.
    QUEUED: the memory of e begins with `queued` rows of the queue. SHARE_SPLITS: programs share splits,
    each of which is cut into `pieces` pieces, or into its tiles. SHARDED: the columns are `shards` shards of
    `shard_columns`, each with SPLITS splits."""
    rows = gl.load(count)
    shift = gl.to_tensor(0)
    if QUEUED:
        shift = gl.load(queued)
    height = rows
    if LISTED:
        height = gl.load(listed) * ROWS
    pipe = Pipe.create(
        a_desc, b_desc, height, V, steps, SPANS=SPLITS, A_BY_K=True, B_BY_K=True,
        CONSUMERS=CONSUMERS, COLUMNS=_COLUMNS, STEP=STEP, STAGES=STAGES, GROUP=GROUP,
        shards=shards, shard_columns=shard_columns, SHARDED=SHARDED,
    )  # fmt: skip
    staging = pipe.a_ring  # unused unless STORE_PROBS
    if STORE_PROBS:
        shape: gl.constexpr = [CONSUMERS] + probs_desc.block_type.shape
        staging = gl.allocate_shared_memory(probs_desc.dtype, shape, probs_desc.layout)
    shared = Pieces.create(pipe, counters, sums, pieces, ENTROPY, SHARE_SPLITS)
    fold = Fold(
        ids, scales, bias, partial, picked, probs_base, probs_desc, staging, rows, shift, listed + 1, shared,
        capacity, V, LAYOUT, ROUND, HAS_BIAS, ENTROPY, STORE_PROBS, LISTED, SHARE_SPLITS,
    )  # fmt: skip
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_fold_splits, (0, pipe, fold)), (_produce, (pipe, fold))], [1], [PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_fold_splits, (0, pipe, fold)), (_fold_splits, (1, pipe, fold)), (_produce, (pipe, fold))],
            [4, 1], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


@triton_kernel
def zero_kernel(out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.zeros((BLOCK,), out.dtype.element_ty), mask=at < size)


# Launchers


def zero(out: Tensor, launch: Launch) -> Tensor:
    """The same tensor, contiguous, filled with zeros. PyTorch's own zeros between two launches would keep
    them from being replayed (`isobit.frame.replay`)."""
    launch(zero_kernel, (-(-out.numel() // 1024),), out, out.numel(), BLOCK=1024, enable_fp_fusion=False)
    return out


def why_not(args: dict[str, Any]) -> str | None:
    """Why these kernels cannot serve a call, or None."""
    hidden, weight = args["hidden"], args["weight"]
    D = hidden.shape[-1]
    if hidden.dtype not in (torch.bfloat16, torch.float16):
        return "tensor cores multiply bf16 and fp16 only"
    if args["softcap"] is not None:
        return "softcap is not supported: it is not linear, and the sums here scale logits by one factor"
    if args["logit_scale"] is not None and args["logit_scale"] <= 0:
        return "logit_scale must be positive: otherwise maxima would become minima"
    if D % 8 or not aligned_for_tma(matrix(weight)) or weight.stride(1) != 1:
        return f"TMA reads rows that are multiples of 16 bytes apart; D = {D} or weight's strides are not"
    return None


def rows_for_tma(hidden: Tensor) -> Tensor:
    """[N, D] that TMA can read: a view where that is possible."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    if aligned_for_tma(matrix(flat)) and flat.stride(1) == 1:
        return flat
    return flat.clone(memory_format=torch.contiguous_format)  # contiguous() may keep an unaligned start


def packed_slots(
    args: dict[str, Any], pack_rows: bool, launch: Launch, list_parts: bool = False
) -> tuple[Slots, float]:
    """(slots of the rows of a call, factor on its logits)."""
    factor = 1.0 if args["logit_scale"] is None else args["logit_scale"]
    V, temperature = args["vocab_size"] or len(args["weight"]), args["temperature"]
    each, scale = None, LOG2E * factor
    if isinstance(temperature, float | int):
        scale /= temperature
    else:
        each = temperature
    rows = (args["token_ids"], args["mask"], each)
    slots = Slots(*rows, args["ignore_index"], scale, V, pack_rows, launch, list_parts)
    return slots, factor


class Schedule(NamedTuple):
    """How the forward is divided among programs."""

    tile: Tile
    pieces: int = 0  # of each split; 0 if programs take whole splits

    def items(self, N: int, V: int, splits: int = 0) -> int:
        """Work items of the programs: the splits, or the pieces, of every row of tiles. The splits are those
        of lse/1, or as many as are given."""
        return -(-N // self.tile.rows) * (splits or splits_of(V)) * (self.pieces or 1)

    def us(self, N: int, D: int, V: int, sms: int, splits: int = 0) -> float:
        """Microseconds of the kernel by a model. The constants are from the times of 128 schedules of 18
        calls on an H200 (tests/golden/schedules_h200.json), where what `schedule_for` chooses took 1 % longer
        than the fastest schedule in geometric mean, and 8 % at worst."""
        items = self.items(N, V, splits)
        busy, longest = min(items, sms), -(-V // COLUMNS) / (splits or splits_of(V))
        flops = self.tile.rows * self.tile.columns * 64 * 2
        bytes_ = (self.tile.rows + self.tile.columns) * 64 * 2
        step_us = max(flops / FLOPS_PER_US, bytes_ / SM_BYTES_PER_US, bytes_ * busy / L2_BYTES_PER_US)
        tile_us = -(-D // 64) * step_us + EPILOGUE_US_PER_TILE[self.tile.consumers]
        if not self.pieces:
            return -(-items // sms) * math.ceil(longest) * tile_us
        tile_us *= SHARED_SPLIT_SLOWDOWN[self.tile.consumers]
        if self.pieces < longest:
            return -(-items // sms) * (longest / self.pieces + HANDOVER_TILES) * tile_us
        tiles = -(-N // self.tile.rows) * -(-V // COLUMNS)
        weight_us = V * D * 2 / HBM_BYTES_PER_US
        chain_us = tile_us + longest * HANDOVER_LATENCY_US
        return max(-(-tiles // sms) * (tile_us + HANDOVER_US), chain_us, weight_us)


def whole_splits(N: int, V: int, sms: int, splits: int = 0) -> Schedule:
    """The tile of 64 rows if there are no more, or if items of 128 rows would leave half of the SMs idle:
    twice as many SMs work, and the weight is read from L2 twice as often."""
    few, many = Schedule(_TILE_FEW_ROWS), Schedule(_TILE)
    return few if _TILE_FEW_ROWS.rows >= N or 2 * many.items(N, V, splits) <= sms else many


@decides
def schedule_for(N: int, D: int, V: int, sms: int, splits: int = 0) -> Schedule:
    """The schedule for this many rows, which is that for the next multiple of 64: tiles have 64 or 128. So
    most batches of a new size find one that was made before."""
    return _schedule(-(-N // 64) * 64, D, V, sms, splits)


@lru_cache(maxsize=4096)
def _schedule(N: int, D: int, V: int, sms: int, splits: int) -> Schedule:
    """Pieces, if the model predicts that they save at least MIN_SAVING of the time: for each split as many as
    divide best over the SMs, or one per tile if there are fewer splits than SMs."""
    whole = whole_splits(N, V, sms, splits)
    longest = -(-V // COLUMNS)
    longest = -(-longest // (splits or splits_of(V)))
    if N > MAX_SHARED_ROWS or longest == 1:
        return whole
    shared = []
    for tile in (_TILE_FEW_ROWS, _TILE):
        enough = Schedule(tile).items(N, V, splits) >= sms
        cuts = range(2, min(longest, MAX_PIECES + 1)) if enough else (longest,)
        shared += [Schedule(tile, pieces) for pieces in cuts]
    best = min(shared, key=lambda s: s.us(N, D, V, sms, splits), default=whole)
    saves = best.us(N, D, V, sms, splits) <= (1 - MIN_SAVING) * whole.us(N, D, V, sms, splits)
    return best if saves else whole


def linear_logp(
    launch: Launch = run, into: tuple[Tensor, Tensor, Tensor] | None = None, sms: int = 0, **args: Any
) -> tuple[Tensor | None, ...]:
    """(logp, entropy, lse, stats, probs, probs_base). Probabilities are stored in new memory, or in `into`:
    memory for both, and the number of queued rows in front of the first (a device tensor). `sms`: the number
    of SMs to make a schedule for; 0 is that of the device."""
    hidden, weight = args["hidden"], args["weight"]
    V, keep = args["vocab_size"] or len(weight), args["keep"]
    shape, D = hidden.shape[:-1], hidden.shape[-1]
    N = shape.numel()
    packed = args["mask"] is not None or keep
    sms = sms or sm_count(hidden.device)
    schedule = Schedule(TILE_STAGED) if keep else schedule_for(N, D, V, sms)
    slots, factor = packed_slots(args, packed, launch, list_parts=not packed)
    flags = (args["return_entropy"], args["return_lse"], args["return_stats"])
    if slots.capacity == 0:  # TMA does not take an empty matrix
        none = hidden.new_empty(0, dtype=torch.float32)
        return *slots.merge(none, none, shape, V, factor, *flags, launch), None, None
    rows = rows_for_tma(hidden)
    if packed:
        rows = pack(rows, slots.rows, launch)
    probs = probs_base = queued = None
    tiles = -(-V // COLUMNS)
    if into is not None:
        probs, probs_base, queued = into
    elif keep:
        probs = rows.new_empty(slots.capacity, tiles * COLUMNS)
        probs_base = rows.new_empty(slots.capacity, tiles, 4, dtype=torch.float32)
    partial = torch.empty((splits_of(V), 3, slots.capacity), dtype=torch.float32, device=rows.device)
    picked = torch.empty(slots.capacity, dtype=torch.float32, device=rows.device)
    stored = None if probs is None else (probs, probs_base, queued)
    fold_splits(partial, picked, rows, slots, slots.ids, V, schedule, sms, args, launch, stored=stored)
    return *slots.merge(partial, picked, shape, V, factor, *flags, launch), probs, probs_base


def fold_splits(
    partial: Tensor, picked: Tensor, rows: Tensor, slots: Slots, ids: Tensor, V: int, schedule: Schedule,
    sms: int, args: dict[str, Any], launch: Launch, *,
    stored: tuple[Tensor, Tensor | None, Tensor | None] | None = None, cut: Shards | None = None,
) -> None:  # fmt: skip
    """Write (m, s, t) of the splits of the rows' logits to `partial` [splits, 3, capacity], and the logits of
    their tokens to `picked`. There are V columns here, and the tokens `ids` count from the first of them.
    Splits are those of lse/1, or those of some shards of lse/8x4."""
    weight, bias = args["weight"], args["bias"]
    tile, shared, N, D = schedule.tile, schedule.pieces > 0, args["token_ids"].numel(), rows.shape[1]
    probs, probs_base, queued = (None, None, None) if stored is None else stored
    if bias is not None:
        bias = in_words(bias, V)
    counters, sums = unused(slots.count), unused(partial)
    if shared:
        counters = zero(torch.empty(counters_of(N), dtype=torch.int32, device=rows.device), launch)
        sums = torch.empty(sums_of(N), dtype=torch.float32, device=rows.device)
    a_desc, _ = operand_descriptor(matrix(rows), 64, tile.step)
    b_desc, _ = operand_descriptor(matrix(weight)._replace(rows=V), tile.columns, tile.step)
    at_launch, registers = tile.registers
    launch(
        forward_kernel, (min(schedule.items(N, V, len(partial)), sms),),
        partial, picked, ids, slots.scales,
        unused(weight) if bias is None else bias,
        unused(partial) if probs_base is None else probs_base,
        slots.count,
        unused(slots.count) if queued is None else queued,
        slots.listed, slots.capacity, V, -(-D // tile.step), schedule.pieces, counters, sums,
        0 if cut is None else cut.count,
        0 if cut is None else cut.width,
        a_desc, b_desc,
        unused(a_desc) if probs is None else descriptor(matrix(probs), 64, tile.columns),
        CONSUMERS=tile.consumers,
        STEP=tile.step,
        STAGES=tile.stages,
        GROUP=tile.group,
        SPLITS=SPLITS if cut is None else SPLITS_PER_SHARD,
        LAYOUT=accumulator_layout(tile.columns),
        ROUND=ROUND[args["logits_dtype"]],
        HAS_BIAS=bias is not None,
        ENTROPY=args["return_entropy"],
        STORE_PROBS=probs is not None,
        QUEUED=queued is not None,
        LISTED=not slots.packed,
        SHARE_SPLITS=shared,
        SHARDED=cut is not None,
        REGISTERS=registers,
        num_warps=4,
        maxnreg=at_launch,
        enable_fp_fusion=False,
    )  # fmt: skip
