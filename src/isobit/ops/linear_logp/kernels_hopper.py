"""`linear_logp` on Hopper: one matrix product forward, no logits stored; class lse/1.

A persistent kernel multiplies hidden rows with the vocabulary in tiles of 128 x 256 and folds each tile's
logits, which stay in registers, into running sums (`isobit.blocks.hopper_lse`). With a mask the rows that
count are packed first, so that the others cost nothing. Without a mask hidden states are read in place, and
ranges of 64 rows in which every token is `ignore_index` are skipped. None of this affects a row's bits; nor
does the tile height, which is 64 for few rows.

If [N, V] fits in memory it also stores e = 2^((z - m) c) of every logit, and the m that was used, for the
backward in `kernels_hopper_bwd`.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.arch import sm_count
from isobit.blocks.hopper_bias import in_words, multiply_add
from isobit.blocks.hopper_lse import (
    COLUMNS,
    LANES,
    OF_ROWS,
    SPLITS,
    Slots,
    as_lanes,
    columns_of,
    finite,
    fold_tile,
    pick,
    splits_of,
    store_split,
)
from isobit.blocks.hopper_pipe import (
    LOADER_REGISTERS,
    ROWS,
    Pipe,
    accumulator_layout,
    aligned_for_tma,
    descriptor,
    gl,
    gluon,
    kernel,
    load_tiles,
    matrix,
    operand_descriptor,
    put_tile,
    record,
    tma,
)
from isobit.blocks.hopper_product import pack
from isobit.blocks.hopper_tiles import Tile
from isobit.blocks.launch import Launch, run
from isobit.blocks.temperature import LOG2E

#: Tiles of the kernels here. Staging a 16-bit tile takes the shared memory of a fourth stage. The tile of 64
#: rows is for few rows, which are limited by reading the weight: as many stages as fit keep more of it in
#: flight.
_FOLD = Tile(2, COLUMNS, 64, 4, False)
_FOLD_FEW = Tile(1, COLUMNS, 64, 5, False)
TILE_STAGED = Tile(2, COLUMNS, 64, 3, False)

_COLUMNS = gl.constexpr(COLUMNS)
ROUND = {None: None, torch.float32: None, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


# Forward


@record
class Fold:
    """What the multiplying warpgroups of the forward read about the slots, and where their sums go."""

    ids: gl.tensor
    scales: gl.tensor
    bias: gl.tensor
    partial: gl.tensor  # [splits, 3, capacity]: m, s, t
    picked: gl.tensor  # [capacity]: the logit of the row's token
    kept_base: gl.tensor  # [capacity, tiles, 4]: the maximum to which the stored e of a lane are relative
    kept: tma.tensor_descriptor
    staging: gl.shared_memory_descriptor
    rows: gl.tensor
    shift: gl.tensor  # rows in `kept` before that of the first slot
    listed: gl.tensor  # parts of 64 rows with at least one row that counts, if LISTED
    capacity: gl.tensor
    V: gl.tensor
    LAYOUT: gl.constexpr
    ROUND: gl.constexpr  # the dtype that logits are rounded to, or None
    HAS_BIAS: gl.constexpr
    ENTROPY: gl.constexpr
    KEEP: gl.constexpr
    LISTED: gl.constexpr

    @gluon.jit
    def keep(self, e, m, part, n, row, inside, tiles, WHICH: gl.constexpr):
        """Store the e of a tile, and the maximum that each lane subtracted."""
        lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, LANES)), 0)
        at = (gl.expand_dims(row, 1).to(gl.int64) * tiles + n) * 4 + lane
        gl.store(self.kept_base + at, finite(m), mask=gl.expand_dims(inside, 1))
        tile = gl.convert_layout(gl.reshape(e, (ROWS, _COLUMNS)), self.LAYOUT)
        put_tile(tile, self.kept, self.staging, part * ROWS + self.shift, n * _COLUMNS, WHICH)


@gluon.jit
def _fold_splits(WHICH: gl.constexpr, pipe, fold):
    """A multiplying warpgroup of the forward: sums of its 64 rows over each of the program's splits."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for item in range(gl.program_id(0), pipe.items(), gl.num_programs(0)):
        block, first, end, split = pipe.item(item)
        part = block * pipe.MULTIPLIERS + WHICH
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
            acc = gl.zeros((ROWS, _COLUMNS), gl.float32, fold.LAYOUT)
            if fold.HAS_BIAS:
                z, stage, phase = multiply_add(pipe, acc, fold.bias, n, fold.V, stage, phase, WHICH)
            else:
                # The first step overwrites what is in the registers, so nothing sets them to zero.
                acc, stage, phase = pipe.begin(acc, stage, phase, WHICH)
                acc, stage, phase = pipe.go_on(acc, pipe.steps - 1, stage, phase, WHICH)
                z = as_lanes(acc)
            column = columns_of(n)
            if fold.ROUND is not None:
                z = z.to(fold.ROUND).to(gl.float32)
            if (n + 1) * _COLUMNS > fold.V:
                z = gl.where(column < fold.V, z, float("-inf"))
            picked = pick(z, column, token, n, picked)
            m, s, t, e = fold_tile(z, m, s, t, scale, fold.ENTROPY)
            if fold.KEEP:
                fold.keep(e, m, part, n, row, inside, pipe.tiles_n, WHICH)
        store_split(
            fold.partial, fold.picked, m, s, t, picked, scale, token, row, inside, split, first, end,
            fold.capacity, fold.ENTROPY,
        )  # fmt: skip
    if fold.KEEP:
        tma.store_wait(0)


@kernel
def forward_kernel(
    partial, picked, ids, scales, bias, kept_base, count, queued, listed, capacity, V, steps,
    a_desc, b_desc, kept_desc, MULTIPLIERS: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, SPLITS: gl.constexpr,
    LAYOUT: gl.constexpr, ROUND: gl.constexpr, HAS_BIAS: gl.constexpr, ENTROPY: gl.constexpr,
    KEEP: gl.constexpr, QUEUED: gl.constexpr, LISTED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Sums of every split of every row, and the logit of its token. LISTED: only for the listed parts of 64
    rows. QUEUED: `kept` has this many rows of the queue in front."""
    rows = gl.load(count)
    shift = gl.to_tensor(0)
    if QUEUED:
        shift = gl.load(queued)
    tall = rows
    if LISTED:
        tall = gl.load(listed) * ROWS
    pipe = Pipe.create(
        a_desc, b_desc, tall, V, steps, SPLITS, True, True, MULTIPLIERS, _COLUMNS, STEP, STAGES, GROUP
    )
    staging = pipe.a_ring  # not touched unless KEEP
    if KEEP:
        shape: gl.constexpr = [MULTIPLIERS] + kept_desc.block_type.shape
        staging = gl.allocate_shared_memory(kept_desc.dtype, shape, kept_desc.layout)
    fold = Fold(
        ids, scales, bias, partial, picked, kept_base, kept_desc, staging, rows, shift, listed + 1, capacity,
        V, LAYOUT, ROUND, HAS_BIAS, ENTROPY, KEEP, LISTED,
    )  # fmt: skip
    if MULTIPLIERS == 1:
        gl.warp_specialize(
            [(_fold_splits, (0, pipe, fold)), (load_tiles, (pipe, fold.listed, LISTED))],
            [1], [LOADER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_fold_splits, (0, pipe, fold)), (_fold_splits, (1, pipe, fold)),
             (load_tiles, (pipe, fold.listed, LISTED))],
            [4, 1], [REGISTERS, LOADER_REGISTERS],
        )  # fmt: skip


# Launchers


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
    if isinstance(temperature, Tensor):
        each = temperature
    else:
        scale /= temperature
    rows = (args["token_ids"], args["mask"], each)
    slots = Slots(*rows, args["ignore_index"], scale, V, pack_rows, launch, list_parts)
    return slots, factor


def _items(tile: Tile, N: int, V: int) -> int:
    """Number of (tile row, split) pairs: the work items of the programs."""
    return -(-N // tile.rows) * splits_of(V)


def tile_for(N: int, V: int, sms: int) -> Tile:
    """The tile for N rows: the one with 64 rows if there are no more, or if items of 128 rows would leave
    half of the SMs idle. Then twice as many SMs work, and the weight is read from L2 twice as often. Measured
    on an H200 at D = 4096 and V = 128256: 0.63 and 0.38 ms for 128 rows, 0.64 and 0.43 for 200."""
    return _FOLD_FEW if _FOLD_FEW.rows >= N or 2 * _items(_FOLD, N, V) <= sms else _FOLD


def linear_logp(
    launch: Launch = run, into: tuple[Tensor, Tensor, Tensor] | None = None, **args: Any
) -> tuple[Tensor | None, ...]:
    """(logp, entropy, lse, stats, kept, kept_base). Probabilities are stored in new memory, or in `into`:
    memory for kept and kept_base, and the number of queued rows in front of the first (a device tensor)."""
    hidden, weight = args["hidden"], args["weight"]
    V, keep = args["vocab_size"] or len(weight), args["keep"]
    shape, D = hidden.shape[:-1], hidden.shape[-1]
    N = shape.numel()
    packed = args["mask"] is not None or keep
    slots, factor = packed_slots(args, packed, launch, list_parts=not packed)
    flags = (args["return_entropy"], args["return_lse"], args["return_stats"])
    if slots.capacity == 0:  # TMA does not take an empty matrix
        none = hidden.new_empty(0, dtype=torch.float32)
        return *slots.merge(none, none, shape, V, factor, *flags, launch), None, None
    rows = rows_for_tma(hidden)
    if packed:
        rows = pack(rows, slots.rows, launch)
    sms, entropy, bias = sm_count(rows.device), args["return_entropy"], args["bias"]
    tile = TILE_STAGED if keep else tile_for(N, V, sms)
    kept = kept_base = queued = None
    tiles = -(-V // COLUMNS)
    if bias is not None:
        bias = in_words(bias, V)
    if into is not None:
        kept, kept_base, queued = into
    elif keep:
        kept = rows.new_empty(slots.capacity, tiles * COLUMNS)
        kept_base = rows.new_empty(slots.capacity, tiles, 4, dtype=torch.float32)
    partial = torch.empty((splits_of(V), 3, slots.capacity), dtype=torch.float32, device=rows.device)
    picked = torch.empty(slots.capacity, dtype=torch.float32, device=rows.device)
    a_desc, _ = operand_descriptor(matrix(rows), 64, tile.step)
    b_desc, _ = operand_descriptor(matrix(weight)._replace(rows=V), tile.columns, tile.step)
    at_launch, registers = tile.registers
    launch(
        forward_kernel, (min(_items(tile, N, V), sms),),
        partial, picked, slots.ids, slots.scales, weight if bias is None else bias,
        partial if kept_base is None else kept_base, slots.count, slots.count if queued is None else queued,
        slots.listed, slots.capacity, V, -(-D // tile.step), a_desc, b_desc,
        a_desc if kept is None else descriptor(matrix(kept), 64, tile.columns), tile.multipliers,
        tile.step, tile.stages, tile.group, SPLITS, accumulator_layout(tile.columns),
        ROUND[args["logits_dtype"]], bias is not None, entropy, keep, queued is not None, not packed,
        registers, num_warps=4, maxnreg=at_launch, enable_fp_fusion=False,
    )  # fmt: skip
    return *slots.merge(partial, picked, shape, V, factor, *flags, launch), kept, kept_base
