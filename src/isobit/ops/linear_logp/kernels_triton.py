"""`linear_logp` in portable Triton: NVIDIA, AMD, and the CPU interpreter.

The backward is in `kernels_triton_bwd.py` and uses parts from here.

Live rows with a valid token are listed first, in the caller's order, without a host sync: *slots*. Kernels
read hidden states through that list, so masked rows cost nothing, wherever they are.

A program takes a tile of slots and a *split* of 2048 columns. It loops over the split in tiles of columns:
one chain of matrix steps over ascending D, then an online log-sum-exp (m, s, t) as in
`isobit.kernels.triton.rows`, rescaled to a new maximum once per tile, with the tile's columns added by a tree
of halves. A second kernel folds the splits of a row in ascending order.

Tiles and splits are constants of the dtype, the order over the vocabulary depends on V alone, and no two
programs add to the same element. So the bits of a row depend on no other row, and those of dweight and dbias
depend on the live rows and their order. The class is `linear-lse/triton-1`; each hardware has its own matrix
step.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.host.rows import row_strides
from isobit.kernels.host.temperature import Scaling, scaling
from isobit.kernels.host.tokens import live_rows
from isobit.kernels.triton.interpreter import INTERPRETED, rounded
from isobit.kernels.triton.rows import finite_or_zero, own_or, rescale, row_offset, row_results
from isobit.kernels.triton.tiles import Tile, compile_options, place, steps
from isobit.ops.linear_logp.slabs import SLAB_BYTES

#: Columns per split: enough work for a program, and enough splits to fill a GPU with a few rows.
SPLIT = tl.constexpr(2048)

#: Slots per program of the kernel that folds splits.
FOLD_ROWS = 128

#: By bytes per element. These are constants, because the columns of a tile affect the order of sums. Untuned:
#: on Hopper the other backend is the fast one.
TILES = {2: Tile(128, 128, 64, warps=8, stages=3), 4: Tile(64, 64, 32, warps=4, stages=2)}
if INTERPRETED.value:  # its cost is per operation, and it promises no bits
    TILES[4] = TILES[2]


# Parts of kernels


@triton.jit
def tanh(x):
    a = tl.abs(x)
    e = tl.exp2(a * -2.8853900817779268)  # exp(-2a)
    far = (1.0 - e) / (1.0 + e)
    q = x * x  # the difference above cancels near 0; the series to a^9 does not
    near = a + a * q * (
        -0.33333333333333333
        + q * (0.13333333333333333 + q * (-0.053968253968253968 + q * 0.021869488536155203))
    )
    y = tl.where(a < 0.25, near, far)
    return tl.where(x < 0, -y, y)


@triton.jit
def row_sums(x, ROWS: tl.constexpr, LOG_COLS: tl.constexpr):
    """Sums of the rows of a tile: repeatedly adds the second half to the first.

    Each addition is of two numbers, so the register layout cannot change the order. In the layout of a matrix
    product the high bits of a column are registers of one thread, which makes most of this tree cheap.
    """
    for i in tl.static_range(LOG_COLS):
        x = tl.sum(tl.reshape(x, [ROWS, 2, 1 << (LOG_COLS - 1 - i)]), axis=1)
    return tl.reshape(x, [ROWS])


@triton.jit
def listed(rows, slot, count):
    """(row in this slot, whether there is one)."""
    live = slot < count
    return tl.load(rows + slot, mask=live, other=0).to(tl.int64), live


@triton.jit
def logits_tile(
    hidden_at, live, weight, bias, col, V, D, blocks, weight_s, softcap, inv_softcap, logit_scale,
    LOGITS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Logits of a tile of rows, whose hidden states begin at `hidden_at`, in some columns. Before the
    temperature. Columns from V on are undefined."""
    k = tl.arange(0, K)
    left_at = hidden_at[:, None] + k[None, :]
    right_at = weight + col.to(tl.int64)[None, :] * weight_s + k[:, None]
    z = tl.zeros([ROWS, COLS], tl.float32)
    for i in range(blocks):
        inside = k < D - i * K
        left = tl.load(left_at, mask=live[:, None] & inside[None, :], other=0.0)
        right = tl.load(right_at, mask=inside[:, None] & (col < V)[None, :], other=0.0)
        z = steps(left, right, z)
        left_at += K
        right_at += K
    if bias is not None:
        z += tl.load(bias + col, mask=col < V, other=0.0).to(tl.float32)[None, :]
    if LOGITS is not None:
        z = rounded(z, LOGITS).to(tl.float32)
    if logit_scale is not None:
        z = z * logit_scale
    if softcap is not None:
        z = softcap * tanh(z * inv_softcap)
    return z


@triton.jit
def tile_sums(m, s, t, z, scale, ENTROPY: tl.constexpr, ROWS: tl.constexpr, LOG_COLS: tl.constexpr):
    """Adds the columns of a tile to the sums of its rows."""
    top = tl.maximum(m, tl.max(z, axis=1))
    ref = finite_or_zero(top)
    s, t = rescale(m, s, t, ref, scale)
    u = (z - ref[:, None]) * scale[:, None]
    e = tl.exp2(u)
    s = s + row_sums(e, ROWS, LOG_COLS)
    if ENTROPY:
        # 2^-1000 is 0 in fp32, and 0 * -inf would be NaN.
        t = t + row_sums(e * tl.maximum(u, -1000.0), ROWS, LOG_COLS)
    return top, s, t


# Kernels


# Sizes that depend on the batch are not specialised, so that a new batch size does not recompile. Nor is
# `blocks`: if Triton knew that the loop runs once, from an accumulator of zeros, it would turn the bias that
# is added after the loop into the initial accumulator of the dot, which rounds differently.
@triton.jit(do_not_specialize=["blocks", "first", "slots", "inner"])
def logp_splits(
    hidden, weight, bias, ids, rows, count, at_token, partials, scales, scale, first, slots,
    V, D, blocks, n_splits, inner, hidden_so, hidden_si, weight_s, softcap, inv_softcap, logit_scale,
    LOGITS: tl.constexpr, ENTROPY: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, K: tl.constexpr,
    LOG_COLS: tl.constexpr,
):  # fmt: skip
    """(m, s, t) of a split of each slot from `first` on, into partials [3, splits, slots]; and the logit of
    its token, from the split that has it."""
    tile, split = place(tl.cdiv(slots, ROWS), n_splits, tl.program_id(0))
    live_slots = tl.load(count) - first
    if tile * ROWS >= live_slots:
        return
    slot = tile * ROWS + tl.arange(0, ROWS)
    row, live = listed(rows + first, slot, live_slots)
    token = tl.load(ids + row, mask=live, other=0)
    each = own_or(scale, scales, row, live)
    hidden_at = hidden + row_offset(row, inner, hidden_so, hidden_si)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    t = tl.zeros([ROWS], tl.float32)
    z_token = tl.zeros([ROWS], tl.float32)
    lo = split * SPLIT
    hi = tl.minimum(lo + SPLIT, V)
    for col0 in range(lo, hi, COLS):
        col = col0 + tl.arange(0, COLS)
        z = logits_tile(
            hidden_at, live, weight, bias, col, V, D, blocks, weight_s, softcap, inv_softcap, logit_scale,
            LOGITS, ROWS, COLS, K,
        )  # fmt: skip
        # At most one column is nonzero here, so the order of this sum does not matter.
        z_token += tl.sum(tl.where(col[None, :] == token[:, None], z, 0.0), axis=1)
        z = tl.where((col < V)[None, :], z, float("-inf"))
        m, s, t = tile_sums(m, s, t, z, each, ENTROPY, ROWS, LOG_COLS)
    tl.store(at_token + slot, z_token, mask=live & (token >= lo) & (token < hi))
    at = partials + split.to(tl.int64) * slots + slot
    step = tl.full([], 1, tl.int64) * n_splits * slots
    tl.store(at, m, mask=live)
    tl.store(at + step, s, mask=live)
    if ENTROPY:
        tl.store(at + 2 * step, t, mask=live)


@triton.jit(do_not_specialize=["first", "slots", "N"])
def logp_fold(
    at_token, partials, rows, count, logp, entropy, lse, stats, scales, inverses, scale, inverse,
    first, slots, N, n_splits, ROWS: tl.constexpr,
):  # fmt: skip
    """Fold the splits of each slot in ascending order, and write its row's results."""
    live_slots = tl.load(count) - first
    slot = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row, live = listed(rows + first, slot, live_slots)
    each, inv = own_or(scale, scales, row, live), own_or(inverse, inverses, row, live)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    s = tl.zeros([ROWS], tl.float32)
    t = tl.zeros([ROWS], tl.float32)
    at = partials + slot
    step = tl.full([], 1, tl.int64) * n_splits * slots
    for split in range(n_splits):
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
        at += slots
    z = tl.load(at_token + slot, mask=live, other=0.0)
    own_logp, own_entropy, own_lse, s = row_results(z, m, s, t, inv)
    tl.store(logp + row, own_logp, mask=live)
    if stats is not None:
        tl.store(stats + row, m, mask=live)
        tl.store(stats + N + row, s, mask=live)
    if lse is not None:
        tl.store(lse + row, own_lse, mask=live)
    if entropy is not None:
        tl.store(entropy + row, own_entropy, mask=live)


# Launchers


class Call(NamedTuple):
    """What forward and backward both prepare."""

    N: int
    D: int
    V: int
    live: Tensor  # [N]: not masked
    ids: Tensor  # [N]
    rows: Tensor  # [N], int32: the row in each slot
    count: Tensor  # [1], int32: how many slots there are
    scaled: Scaling
    hidden: Tensor  # indexed as [outer, inner] rows
    walk: tuple[int, ...]  # inner, outer stride, inner stride
    transforms: tuple[float | None, ...]  # softcap, 1 / softcap, logit_scale
    rounding: tl.dtype | None
    tile: Tile
    constants: dict[str, Any]  # of the tile: its sizes and compile options

    def blank(self, dtype: torch.dtype) -> Tensor:
        """[N]: values of rows that no kernel writes: 0 for masked rows, NaN for invalid tokens."""
        return self.live.new_zeros(self.N, dtype=dtype).masked_fill_(self.live, float("nan"))


def prepare(args: dict[str, Any]) -> Call:
    token_ids, softcap = args["token_ids"], args["softcap"]
    N, V = token_ids.numel(), args["vocab_size"] or len(args["weight"])
    ids = token_ids.reshape(N).contiguous()  # kernels read ids with stride 1
    live = live_rows(token_ids, args["mask"], args["ignore_index"]).reshape(N)
    good = live & (ids >= 0) & (ids < V)
    seen = good.cumsum(0)
    # Slot i holds the row at which the count of good rows reaches i + 1. Beyond the last slot this is N,
    # which no kernel reads.
    rows = torch.searchsorted(seen, torch.arange(1, N + 1, device=ids.device)).int()
    scaled = scaling(args["temperature"], N)
    inner, (hidden,), strides = row_strides(token_ids.shape, (args["hidden"],))
    transforms = (softcap, None if softcap is None else 1.0 / softcap, args["logit_scale"])
    rounding = {None: None, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[args["logits_dtype"]]
    tile = TILES[hidden.element_size()]
    constants = {"ROWS": tile.rows, "COLS": tile.cols, "K": tile.k, **compile_options(tile)}
    return Call(
        N, hidden.shape[-1], V, live, ids, rows, seen[-1:].int(), scaled, hidden, (inner, *strides),
        transforms, rounding, tile, constants,
    )  # fmt: skip


def linear_logp(launch: Launch = run, **args: Any) -> tuple[Tensor | None, ...]:
    """(logp, entropy, lse, stats [2, *] = (m, s)); None for outputs that were not requested."""
    call, weight, workspace_bytes = prepare(args), args["weight"], args["workspace_bytes"]
    N, D, V, tile = call.N, call.D, call.V, call.tile
    logp = call.blank(torch.float32).view(args["token_ids"].shape)
    entropy = logp.clone() if args["return_entropy"] else None
    lse = logp.clone() if args["return_lse"] else None
    stats = torch.stack((logp, torch.ones_like(logp))) if args["return_stats"] else None
    results = (logp, entropy, lse, stats)
    if N == 0:
        return results
    splits, sums = triton.cdiv(V, SPLIT.value), 2 if entropy is None else 3
    allowed = SLAB_BYTES if workspace_bytes is None else workspace_bytes  # for sums of splits
    slots = min(N, max(1, allowed // (4 * sums * splits * tile.rows)) * tile.rows)
    empty = partial(torch.empty, device=logp.device, dtype=torch.float32)
    at_token, partials = empty(slots), empty(sums, splits, slots)
    for first in range(0, N, slots):
        launch(
            logp_splits, (triton.cdiv(slots, tile.rows) * splits,),
            call.hidden, weight, args["bias"], call.ids, call.rows, call.count, at_token, partials,
            call.scaled.scales, call.scaled.scale, first, slots, V, D, triton.cdiv(D, tile.k), splits,
            *call.walk, weight.stride(0), *call.transforms, LOGITS=call.rounding,
            ENTROPY=entropy is not None, LOG_COLS=tile.cols.bit_length() - 1, **call.constants,
        )  # fmt: skip
        launch(
            logp_fold, (triton.cdiv(slots, FOLD_ROWS),),
            at_token, partials, call.rows, call.count, *results, *call.scaled, first, slots, N, splits,
            ROWS=FOLD_ROWS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return results
