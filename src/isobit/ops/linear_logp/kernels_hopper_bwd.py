"""The backward of `linear_logp` on Hopper, one slab of the vocabulary at a time.

The main loop of the forward recomputes the logits of a slab and writes their gradient, rounded once to the
inputs' dtype,

    dz = e (a + b u) + [v = token] g,   u = fma(z, c, -M),  e = 2^u

with a, b, g of the row from the gradients of logp, entropy and lse; then

    dH += dz W[slab]       in segments of 512 of ascending v, folded in fp32 from slab to slab
    dW[slab] = dz^T H      in segments of 512 live rows, packed

both in class seg16/512. The width of a slab (`slabs`) changes no bit. If the forward stored its e, dz is
computed from these, and no logits are recomputed.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run, unused
from isobit.frame.traced import decides
from isobit.kernels.hopper.bias import in_words, multiply_add
from isobit.kernels.hopper.descriptors import descriptor, matrix, operand_descriptor
from isobit.kernels.hopper.lse import COLUMNS, Slots
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
from isobit.kernels.hopper.product import pack, sum_into
from isobit.ops.linear_logp.kernels_hopper import (
    ROUND,
    TILE_STAGED,
    packed_slots,
    rows_for_tma,
    zero,
)
from isobit.ops.linear_logp.slabs import block_slots, default_slab_bytes, slabs

_COLUMNS = gl.constexpr(COLUMNS)


@triton_kernel
def weigh_kernel(
    weights, counts, rows, ids, scales, count, stats, entropy, dlogp, dentropy, dlse,
    logp_stride, entropy_stride, lse_stride, N, blocks, height, V, factor,
    HAS_LOGP: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_LSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The four numbers that turn a row's logits into gradients: weights [4, blocks * 128] = M, a, b, g. All 0
    for gaps, masked rows and rows with an invalid token, so that these add 0 to dW.

    Also counts how many of every `height` slots are used. The stride of an incoming gradient is 0 if all rows
    share one number, as in the backward of a sum."""
    capacity = blocks * 128
    LN2: tl.constexpr = 0.6931471805599453
    first = tl.program_id(0) * BLOCK
    taken = tl.load(count)
    if first % height == 0:
        tl.store(counts + first // height, tl.minimum(tl.maximum(taken - first, 0), height))
    slot = first + tl.arange(0, BLOCK)
    token = tl.load(ids + slot)
    live = (slot < taken) & (token >= 0) & (token < V)
    row = tl.load(rows + slot, mask=live, other=0)
    scale = tl.load(scales + slot, mask=live, other=1.0)
    m = tl.load(stats + row, mask=live, other=0.0) / factor
    base = m * scale
    s = tl.load(stats + N + row, mask=live, other=1.0) * tl.exp2(tl.fma(m, scale, -base))  # relative to base
    g = tl.zeros((BLOCK,), tl.float32)
    if HAS_LOGP:
        g = tl.load(dlogp + row * logp_stride, mask=live, other=0.0)
    a = -g
    if HAS_LSE:
        a += tl.load(dlse + row * lse_stride, mask=live, other=0.0)
    b = tl.zeros((BLOCK,), tl.float32)
    if HAS_ENTROPY:
        b = -tl.load(dentropy + row * entropy_stride, mask=live, other=0.0)
        a += b * (tl.load(entropy + row, mask=live, other=0.0) - tl.log2(s) * LN2)
    slope = scale * LN2  # d(softmax input) / d(product): factor / temperature
    tl.store(weights + slot, tl.where(live, base, 0.0))
    tl.store(weights + capacity + slot, tl.where(live, a * slope / s, 0.0))
    tl.store(weights + 2 * capacity + slot, tl.where(live, b * LN2 * slope / s, 0.0))
    tl.store(weights + 3 * capacity + slot, tl.where(live, g * slope, 0.0))


@record
class Differentiated:
    """What the consumer warpgroups of the backward read about the slots, and the slab of d-logits that they
    write."""

    ids: gl.tensor
    scales: gl.tensor
    weights: gl.tensor
    bias: gl.tensor
    desc: tma.tensor_descriptor
    staging: gl.shared_memory_descriptor
    rows: gl.tensor
    shift: gl.tensor  # rows of the slab before that of the first slot
    capacity: gl.tensor
    first: gl.tensor
    V: gl.tensor
    LAYOUT: gl.constexpr
    ROUND: gl.constexpr
    HAS_BIAS: gl.constexpr
    ENTROPY: gl.constexpr


@gluon.jit
def _differentiate(WHICH: gl.constexpr, pipe, slab):
    """A consumer warpgroup of the backward: the d-logits of its 64 rows in each of the program's tiles."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for item in range(gl.program_id(0), pipe.items(), gl.num_programs(0)):
        block, n, _, _ = pipe.item(item)
        row = (block * pipe.CONSUMERS + WHICH) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, slab.LAYOUT))
        column = n * _COLUMNS + gl.arange(0, _COLUMNS, gl.SliceLayout(0, slab.LAYOUT))
        token = gl.load(slab.ids + row) - slab.first
        scale = gl.load(slab.scales + row)[:, None]
        base = gl.load(slab.weights + row)[:, None]
        a = gl.load(slab.weights + slab.capacity + row)[:, None]
        acc = gl.zeros((ROWS, _COLUMNS), gl.float32, slab.LAYOUT)
        if slab.HAS_BIAS:
            bias = slab.bias + slab.first
            z, stage, phase = multiply_add(pipe, acc, bias, n * _COLUMNS, slab.V, stage, phase, WHICH)
            acc = gl.convert_layout(gl.reshape(z, (ROWS, _COLUMNS)), slab.LAYOUT, assert_trivial=True)
        else:
            acc, stage, phase = pipe.multiply(acc, pipe.steps, stage, phase, WHICH)
        if slab.ROUND is not None:
            acc = acc.to(slab.ROUND).to(gl.float32)
        u = gl.fma(acc, scale, -base)
        if slab.ENTROPY:
            b = gl.load(slab.weights + 2 * slab.capacity + row)[:, None]
            dz = gl.exp2(u) * gl.fma(gl.maximum(u, -1000.0), b, a)
        else:
            dz = gl.exp2(u) * a
        if gl.max(((token >= n * _COLUMNS) & (token < (n + 1) * _COLUMNS)).to(gl.int32), 0) > 0:
            g = gl.load(slab.weights + 3 * slab.capacity + row)[:, None]
            dz = gl.where(column[None, :] == token[:, None], dz + g, dz)
        dz = gl.where((row < slab.rows)[:, None], dz, 0.0)  # logits of a gap are the bias: 2^u may be inf
        put_tile(dz, slab.desc, slab.staging, (block * 2 + WHICH) * ROWS + slab.shift, n * _COLUMNS, WHICH)
    tma.store_wait(0)


@kernel
def slab_kernel(
    ids, scales, weights, bias, count, queued, capacity, first, V, steps, a_desc, b_desc, out_desc,
    STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr,
    ROUND: gl.constexpr, HAS_BIAS: gl.constexpr, ENTROPY: gl.constexpr, QUEUED: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """d-logits of V columns from `first` on, for every row. QUEUED: written after this many queued rows."""
    rows = gl.load(count)
    shift = gl.to_tensor(0)
    if QUEUED:
        shift = gl.load(queued)
    pipe = Pipe.create(
        a_desc, b_desc, rows, V, steps, SPANS=0, A_BY_K=True, B_BY_K=True,
        CONSUMERS=2, COLUMNS=_COLUMNS, STEP=STEP, STAGES=STAGES, GROUP=GROUP,
    )  # fmt: skip
    shape: gl.constexpr = [2] + out_desc.block_type.shape
    staging = gl.allocate_shared_memory(out_desc.dtype, shape, out_desc.layout)
    slab = Differentiated(
        ids, scales, weights, bias, out_desc, staging, rows, shift, capacity, first, V,
        LAYOUT, ROUND, HAS_BIAS, ENTROPY,
    )  # fmt: skip
    gl.warp_specialize(
        [(_differentiate, (0, pipe, slab)), (_differentiate, (1, pipe, slab)), (load_tiles, (pipe,))],
        [4, 1], [REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@triton_kernel
def from_probs_kernel(
    out, probs, probs_base, ids, scales, weights, count, queued, capacity, first, tiles, width, stride,
    QUEUED: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """d-logits of a slab from the e of the forward, TILES tiles of a row at a time:

        e 2^(base c - M) a + [v = token] g

    These count tiles of 256 columns: `first`, where the slab begins; `tiles`, the width of a row of e;
    `width`, the width of the slab; `stride`, the row stride of d-logits. QUEUED: rows of e and of d-logits
    follow `queued` rows of the queue. Input and output may be the same memory."""
    slot = tl.program_id(0).to(tl.int64)
    row = slot
    if QUEUED:
        row += tl.load(queued)
    read = tl.where(slot < tl.load(count), width, 0)  # a gap is not read
    n = tl.program_id(1) * TILES + tl.arange(0, TILES)
    column = n[:, None] * 256 + tl.arange(0, 256)[None, :]
    at = tl.multiple_of(probs + (row * tiles + first) * 256 + column, (1, 16))
    e = tl.load(at, mask=(n < read)[:, None], other=0.0)
    lane = (slot * tiles + first + n)[:, None] * 4 + tl.arange(0, 4)[None, :]
    base = tl.load(tl.multiple_of(probs_base + lane, (1, 16)), mask=(n < read)[:, None], other=0.0)
    moved = tl.exp2(base * tl.load(scales + slot) - tl.load(weights + slot))
    # A lane has columns 8 i + 2 lane and 8 i + 2 lane + 1. A lane that has seen only -inf has no base, but
    # then its e are 0, and no factor changes that.
    e = tl.reshape(e.to(tl.float32), (TILES, 32, 4, 2))
    dz = tl.where(e == 0.0, 0.0, e * moved[:, None, :, None]) * tl.load(weights + capacity + slot)
    dz = tl.reshape(dz, (TILES, 256))
    hit = first * 256 + column == tl.load(ids + slot)
    dz = tl.where(hit, dz + tl.load(weights + 3 * capacity + slot), dz)
    to = tl.multiple_of(out + row * stride * 256 + column, (1, 16))
    tl.store(to, dz.to(out.dtype.element_ty), mask=(n < width)[:, None])


@triton.jit
def _in_order(total, groups):
    """Add four groups one after another. They are by (column, lower bit of the group, higher bit)."""
    low, high = tl.split(groups)
    g0, g1 = tl.split(low)
    g2, g3 = tl.split(high)
    return total + g0 + g1 + g2 + g3


@triton_kernel
def bias_kernel(dbias, dz, count, columns, stride, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr):
    """Column sums of d-logits over the first `count` rows, 16 at a time in ascending order. Of 16 rows, row r
    is added to r + 8, then r + 2, r + 1 and r + 4: reductions of two, which have one order in any layout. The
    row stride of dz is `stride` tiles of 256, so that whole blocks of columns can be read. ACCUMULATE: start
    from the sums in dbias.

    128 rows are loaded at a time, to have enough in flight, in an order in which a thread gets all rows of a
    group of 16: only sums of groups go from thread to thread. Missing rows are 0 and change no sum."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(count)
    total = tl.zeros((BLOCK,), tl.float32)
    if ACCUMULATE:
        total = tl.load(dbias + j, mask=j < columns, other=0.0)
    place = tl.arange(0, 128)
    for first in range(0, rows, 128):
        i = first + place % 8 * 16 + place // 8
        at = tl.multiple_of(dz + i.to(tl.int64)[:, None] * (stride * 256) + j[None, :], (1, 16))
        values = tl.load(at, mask=(i < rows)[:, None], other=0.0)
        by_bits = tl.reshape(values.to(tl.float32), (2, 2, 2, 2, 8, BLOCK))  # of the row: 8, 4, 2, 1
        sums = tl.sum(tl.sum(tl.sum(tl.sum(by_bits, 0), 1), 1), 0)
        groups = tl.permute(tl.reshape(sums, (2, 2, 2, BLOCK)), (3, 2, 1, 0))  # of the group: 1, 2, 4
        low, high = tl.split(groups)
        total = _in_order(_in_order(total, low), high)
    tl.store(dbias + j, total.to(dbias.dtype.element_ty), mask=j < columns)


@triton_kernel
def unpack_kernel(out, source, rows, ids, count, V, words, SLOTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row rows[slot] of out = source[slot], rounded; 0 for a masked row, NaN if its token is invalid. Both
    have `words` times 8 columns."""
    columns = words * 8
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (slot < tl.load(count))[:, None] & (j < columns)[None, :]
    row = tl.load(rows + slot).to(tl.int64)
    at = tl.multiple_of(source + slot.to(tl.int64)[:, None] * columns + j[None, :], (1, 16))
    values = tl.load(at, mask=inside, other=0.0)
    token = tl.load(ids + slot)[:, None]
    values = tl.where((token >= 0) & (token < V), values, tl.where(token == -2, 0.0, float("nan")))
    to = tl.multiple_of(out + row[:, None] * columns + j[None, :], (1, 16))
    tl.store(to, values.to(out.dtype.element_ty), mask=inside)


# Launchers


def linear_logp_bwd(
    launch: Launch = run, grad_dtype: torch.dtype | None = None, **args: Any
) -> tuple[Tensor | None, ...]:
    """(dhidden, dweight, dbias), each if it is wanted; in grad_dtype, or in the dtypes of their
    parameters."""
    hidden, weight, bias = args["hidden"], args["weight"], args["bias"]
    V = args["vocab_size"] or len(weight)
    # The entropy's gradient needs the logits themselves, so it does not use stored probabilities.
    probs, probs_base = args["kept"] if args["dentropy"] is None else None, args["kept_base"]
    want_hidden, want_weight, want_bias = (args[f"want_{x}"] for x in ("hidden", "weight", "bias"))
    if hidden.numel() == 0:
        wanted = ((hidden, want_hidden), (weight, want_weight), (bias, want_bias))
        return tuple(torch.zeros_like(t, dtype=grad_dtype) if want else None for t, want in wanted)
    if bias is not None:
        args["bias"] = in_words(bias, V)
    rows = rows_for_tma(hidden)
    N, D = rows.shape
    # Sums over tokens need all rows, packed; dH alone needs neither.
    over_tokens = want_weight or want_bias
    packed = over_tokens or args["mask"] is not None or probs is not None
    slots, factor = packed_slots(args, packed, launch)
    out = rows.new_empty(slots.capacity, D, dtype=grad_dtype or rows.dtype) if want_hidden else None
    if packed:  # packed rows are in the memory of dhidden, if it has their dtype
        place = out if out is not None and out.dtype == rows.dtype else None
        rows = pack(rows, slots.rows, launch, out=place)
    height = slots.capacity if over_tokens else block_slots(slots.capacity)
    dh = rows.new_empty(height, D, dtype=torch.float32) if want_hidden else None
    dweight = dbias = None
    if want_weight:
        dweight = torch.empty_like(weight, dtype=grad_dtype, memory_format=torch.contiguous_format)
    if want_bias:
        dbias = torch.empty_like(bias, dtype=grad_dtype)
    weights, counts = weigh(slots, height, args, N, V, factor, launch)
    slab_bytes = args["workspace_bytes"]
    if slab_bytes is None:
        slab_bytes = default_slab_bytes(height, weight.nbytes)
    if probs is not None:  # they take a part of the workspace
        slab_bytes -= probs.nbytes + probs_base.nbytes
    lent = rows.new_empty(0, 0) if dweight is None else dweight.view(rows.dtype)
    plan = decides(slabs)(V, height, D, slab_bytes, *lent.shape, sm_count(rows.device))
    own = rows.new_empty(height * max((slab.stride for slab in plan if not slab.lent), default=0))
    # A packed row is at its own index or before it. So, going from the last block to the first, a block's
    # rows of dhidden overwrite no row that is still to be read.
    for block in reversed(blocks_of(rows, slots, weights, counts, probs, probs_base, height)):
        for slab in plan:
            columns = slice(slab.first, slab.end)
            memory = lent.view(-1) if slab.lent else own
            dz = memory[-height * slab.stride :].view(height, slab.stride)
            dz = dz[: block.rows.shape[0], : slab.end - slab.first]
            if probs is None:
                recompute(dz, block, weight[columns], args, slab.first, launch)
            else:
                from_probs(dz, block, slab.first, launch)
            if dh is not None:
                init = dh if slab.first else None
                sum_into(dh, weight[columns], dz.t(), init=init, rows=block.count, launch=launch)
            if dweight is not None:
                sum_into(dweight[columns], rows, dz, counted=slots.count, launch=launch)
            if dbias is not None:
                sum_bias(dbias[columns], dz, block.count, False, launch)
        if out is not None and dh is not None:
            unpack(out, dh, block.rows, block.ids, block.count, V, launch)
    if out is not None:
        out = out[:N]
        if packed:
            slots.blank(out, launch)
        out = out.view(hidden.shape)
    for padding in (dweight, dbias):
        if padding is not None and len(padding) > V:
            rest = padding[V:]
            zero(rest, launch)  # the rows of dweight or dbias that are padding
    return out, dweight, dbias


class Block(NamedTuple):
    """Slots whose d-logits are computed and used together."""

    hidden: Tensor  # [slots, D], or fewer if the rest are gaps
    rows: Tensor  # [slots]
    ids: Tensor
    scales: Tensor
    weights: Tensor  # [4, slots]: from `weigh_kernel`
    count: Tensor  # [1]: number of used slots
    probs: Tensor | None  # [slots, C]: e of the forward
    probs_base: Tensor | None  # [slots, G, 4]: the maxima that e is relative to


def blocks_of(
    hidden: Tensor, slots: Slots, weights: Tensor, counts: Tensor, probs: Tensor | None,
    probs_base: Tensor | None, height: int,
) -> list[Block]:  # fmt: skip
    """All slots, `height` at a time."""
    made: list[Block] = []
    start = 0
    while start < slots.capacity:
        i, own = len(made), slice(start, start + height)
        of_slots = (slots.rows[own], slots.ids[own], slots.scales[own])
        both = (None if t is None else t[own] for t in (probs, probs_base))
        made.append(Block(hidden[own], *of_slots, weights[:, own], counts[i : i + 1], *both))
        start += height
    return made


def weigh(
    slots: Slots, height: int, args: dict[str, Any], N: int, V: int, factor: float, launch: Launch
) -> tuple[Tensor, Tensor]:
    """(weights of all slots, how many of every `height` slots are used)."""
    weights = slots.scales.new_empty(4, slots.capacity)
    counts = slots.rows.new_empty(-(-slots.capacity // height))
    entropy, *grads = (args[name] for name in ("entropy", "dlogp", "dentropy", "dlse"))
    has_logp, has_entropy, has_lse = (g is not None for g in grads)
    given, strides = zip(*(_by_rows(unused(weights) if g is None else g) for g in grads), strict=True)
    launch(
        weigh_kernel, (slots.capacity // 128,),
        weights, counts, slots.rows, slots.ids, slots.scales, slots.count, args["stats"].contiguous(),
        unused(weights) if entropy is None else entropy.contiguous(),
        *given, *strides, N, slots.capacity // 128, height, V, factor,
        HAS_LOGP=has_logp,
        HAS_ENTROPY=has_entropy,
        HAS_LSE=has_lse,
        BLOCK=128,
        enable_fp_fusion=False,
    )  # fmt: skip
    return weights, counts


def _by_rows(t: Tensor) -> tuple[Tensor, int]:
    """A tensor with one number per row, and its stride. The gradient of a sum or a mean is one number with
    strides of 0, and is read without a copy."""
    if not any(t.stride()):
        return t, 0
    return t.contiguous(), 1


def from_probs(out: Tensor, block: Block, first: int, launch: Launch, queued: Tensor | None = None) -> None:
    """d-logits of the columns from `first` on, from the stored probabilities. `queued`: number of rows of
    `out` (a device tensor) after which they are written."""
    assert block.probs is not None
    tiles = -(-out.shape[1] // COLUMNS)
    launch(
        from_probs_kernel, (block.rows.shape[0], -(-tiles // 8)),
        out, block.probs, block.probs_base, block.ids, block.scales, block.weights, block.count,
        unused(block.count) if queued is None else queued,
        block.weights.stride(0), first // COLUMNS, block.probs.shape[1] // COLUMNS, tiles,
        out.stride(0) // COLUMNS,
        QUEUED=queued is not None,
        TILES=8,
        num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip


def recompute(
    out: Tensor, block: Block, weight: Tensor, args: dict[str, Any], first: int, launch: Launch,
    queued: Tensor | None = None,
) -> None:  # fmt: skip
    """The same from recomputed logits; `weight` holds the rows of these columns."""
    tile, V, bias = TILE_STAGED, len(weight), args["bias"]
    a_desc, _ = operand_descriptor(matrix(block.hidden), 64, tile.step)
    b_desc, _ = operand_descriptor(matrix(weight), tile.columns, tile.step)
    at_launch, registers = tile.registers
    tiles = block.rows.shape[0] // tile.rows * -(-V // COLUMNS)
    launch(
        slab_kernel, (min(tiles, sm_count(out.device)),),
        block.ids, block.scales, block.weights,
        unused(weight) if bias is None else bias,
        block.count,
        unused(block.count) if queued is None else queued,
        block.weights.stride(0), first, V, -(-weight.shape[1] // tile.step),
        a_desc, b_desc, descriptor(matrix(out), 64, tile.columns),
        STEP=tile.step,
        STAGES=tile.stages,
        GROUP=tile.group,
        LAYOUT=accumulator_layout(tile.columns),
        ROUND=ROUND[args["logits_dtype"]],
        HAS_BIAS=bias is not None,
        ENTROPY=args["dentropy"] is not None,
        QUEUED=queued is not None,
        REGISTERS=registers,
        num_warps=4,
        maxnreg=at_launch,
        enable_fp_fusion=False,
    )  # fmt: skip


def sum_bias(dbias: Tensor, dz: Tensor, count: Tensor, accumulate: bool, launch: Launch) -> None:
    """Column sums of the first `count` rows of d-logits, added to dbias if `accumulate`, else from 0."""
    launch(
        bias_kernel, (-(-len(dbias) // 64),),
        dbias, dz, count, len(dbias), dz.stride(0) // COLUMNS,
        ACCUMULATE=accumulate,
        BLOCK=64,
        num_warps=2,
        enable_fp_fusion=False,
    )  # fmt: skip


def unpack(
    out: Tensor, source: Tensor, rows: Tensor, ids: Tensor, count: Tensor, V: int, launch: Launch
) -> None:
    """Writes the first `count` slots of source to their rows of out."""
    slots, D = min(source.shape[0], rows.shape[0]), source.shape[1]
    launch(
        unpack_kernel, (slots // 64, -(-D // 256)),
        out, source, rows, ids, count, V, D // 8,
        SLOTS=64,
        COLUMNS=256,
        enable_fp_fusion=False,
    )  # fmt: skip
