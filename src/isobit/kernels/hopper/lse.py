"""Sums over the vocabulary in the registers of a `wgmma` accumulator: classes lse/1 and lse/8x4.

In an accumulator of 64 x 256 a thread holds, of a row, the columns 8i + 2q and 8i + 2q + 1 for one q of 4: a
*lane*. Each lane keeps its own maximum m and sum s over one *split* of the vocabulary, so that folding a tile
needs no exchange between threads. With c = log2(e) / temperature and M = m c, rounded once:

    m' = max(m, z),  s' = s 2^(M - M') + sum 2^u,  u = fma(z, c, -M')

and for the entropy t, the sum of u 2^u. The rounded M is subtracted everywhere, so a common shift of all
logits adds no error. The kernels are compiled without contraction, or M would not be rounded.

At the end of a split the four lanes are rescaled to their common maximum and added. A split is one of 33
ranges of tiles, which depend on V alone; 33 of them keep 132 SMs busy for any multiple of 512 rows. In
lse/8x4 there are 32 others (`isobit.kernels.host.vocab_shards`), and tiles begin where its shards do.
`merge_kernel` folds a row's splits in ascending order. So a row's bits depend on its own logits and on V, and
the same fp32 logits give the same bits, from a fused product or from a kernel that reads them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, unused
from isobit.kernels.hopper.pipeline import ROWS, gl, gluon, triton_kernel

#: Columns per tile, and splits per row. Both affect the order of sums.
COLUMNS = 256
SPLITS = 33

#: The part of a tile that a thread holds, as (row, i, lane, parity): column = 8 i + 2 lane + parity.
TILE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [8, 0, 0, 0], *([0, 1 << b, 0, 0] for b in range(5))],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[64, 32, 4, 2],
    )
)
#: Layout of the (row, lane) sums that a thread keeps, and of their rows.
LANES = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(3, TILE.value)))
OF_ROWS = gl.constexpr(gl.SliceLayout(1, LANES.value))

_COLUMNS = gl.constexpr(COLUMNS)


def splits_of(V: int) -> int:
    return min(SPLITS, -(-V // COLUMNS))


@gluon.jit
def as_lanes(acc):
    """64 x 256 sums by (row, i, lane, parity): the same values in the same registers."""
    return gl.convert_layout(gl.reshape(acc, (ROWS, 32, 4, 2)), TILE)


@gluon.jit
def spread(x):
    """[row, lane] broadcast over the columns of a tile."""
    return gl.expand_dims(gl.expand_dims(x, 1), 3)


@gluon.jit
def _i_and_lane():
    """The indices (i, lane) of a tile, each by (row, i, lane)."""
    i = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, TILE))))
    q = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, TILE))))
    return gl.expand_dims(gl.expand_dims(i, 0), 2), gl.expand_dims(gl.expand_dims(q, 0), 1)


@gluon.jit
def pairs_from(first):
    """Numbers of the pairs of columns of a tile that begins at an even column, by (row, i, lane): pair p has
    the columns 2p and 2p + 1."""
    i, q = _i_and_lane()
    return first // 2 + 4 * i + q


@gluon.jit
def columns_from(first):
    """Column numbers of a tile that begins at column `first`, by (row, i, lane, parity)."""
    i, q = _i_and_lane()
    b = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, TILE))))
    b = gl.expand_dims(gl.expand_dims(gl.expand_dims(b, 0), 1), 2)
    return first + 8 * gl.expand_dims(i, 3) + 2 * gl.expand_dims(q, 3) + b


@gluon.jit
def _maximum(x):
    return gl.max(gl.max(x, 3), 1)


@gluon.jit
def _parted(parts):
    """Each of the tensors split in two along its last dimension: all first halves, then the others."""
    firsts = ()
    seconds = ()
    for k in gl.static_range(len(parts)):
        first, second = gl.split(parts[k])
        firsts = firsts + (first,)
        seconds = seconds + (second,)
    return firsts + seconds


@gluon.jit
def _sum(x):
    """Sums of the lanes: the two of a pair, then the pairs one after another, i ascending.

    Written out because `gl.sum` adds registers in a chain up to Triton 3.7 and in a tree from 3.8 on. All of
    it is in one thread, so splitting it into pieces costs no instruction.
    """
    even, odd = gl.split(x)
    pairs = gl.reshape(gl.permute(even + odd, (0, 2, 1)), (ROWS, 4, 2, 2, 2, 2, 2))
    parts = _parted(_parted(_parted(_parted(_parted((pairs,))))))  # by i: its lowest bit was split off first
    total = parts[0]
    for i in gl.static_range(1, 32):
        total += parts[i]
    return gl.convert_layout(total, LANES, assert_trivial=True)


@gluon.jit
def finite(m):
    """The maximum to subtract: 0 for an infinite one, because inf - inf is NaN. So the sum of a row with +inf
    is +inf, and NaN only if the row has a NaN."""
    return gl.where(gl.abs(m) == float("inf"), 0.0, m)


@gluon.jit
def _factor(m, d):
    """2^d, by which the sums of a lane with maximum m are rescaled; 0 if it has seen no logit yet."""
    return gl.exp2(gl.where(m == float("-inf"), float("-inf"), d))


@gluon.jit
def fold_tile(z, m, s, t, scale, ENTROPY: gl.constexpr):
    """(m, s, t, e): the lanes' sums after a tile's logits z, and e = 2^u."""
    top = gl.maximum(m, _maximum(z))
    base = finite(top) * scale
    u = gl.fma(z, spread(scale), -spread(base))
    e = gl.exp2(u)
    d = finite(m) * scale - base
    r = _factor(m, d)
    if ENTROPY:
        t = gl.where(r == 0.0, 0.0, r * gl.fma(d, s, t)) + _sum(e * gl.maximum(u, -1000.0))
    s = gl.fma(s, r, _sum(e))
    return top, s, t, e


@gluon.jit
def pick(z, column, token, first, picked):
    """Add the logit of each row's token, in the one tile that has it. Most tiles have none. All other terms
    of the sum are 0, so its order does not matter."""
    if gl.max(((token >= first) & (token < first + _COLUMNS)).to(gl.int32), 0) > 0:
        picked += _sum(gl.where(column == spread(gl.expand_dims(token, 1)), z, 0.0))
    return picked


@gluon.jit
def _join(x):
    """(0 + 2) + (1 + 3) of a row's lanes: reductions of two have only one order."""
    halves = gl.sum(gl.reshape(x, (ROWS, 2, 2)), 1)
    return gl.convert_layout(gl.sum(halves, 1), OF_ROWS, assert_trivial=True)


@gluon.jit
def join_lanes(m, s, t, scale, ENTROPY: gl.constexpr):
    """(m, s, t) of the rows: their four lanes rescaled to a common maximum."""
    top = gl.max(m, 1)
    d = finite(m) * scale - gl.expand_dims(finite(top), 1) * scale
    r = _factor(m, d)
    joined = top
    if ENTROPY:
        joined = _join(gl.where(r == 0.0, 0.0, r * gl.fma(d, s, t)))
    return top, _join(s * r), joined


@gluon.jit
def store_picked(picked_out, picked, token, row, inside, first, end):
    """Store the token's logit, if it was in the columns from `first` on and before `end`."""
    in_tiles = inside & (token >= first) & (token < end)
    gl.store(picked_out + row, _join(picked), mask=in_tiles)


@gluon.jit
def store_split(
    partial, picked_out, m, s, t, picked, scale, token, row, inside, split, first, end, capacity,
    ENTROPY: gl.constexpr,
):  # fmt: skip
    """Store a split's sums for `merge_kernel`, and the token's logit if it was in this split."""
    m, s, t = join_lanes(m, s, t, scale, ENTROPY)
    out = partial + split.to(gl.int64) * 3 * capacity + row
    gl.store(out, m, mask=inside)
    gl.store(out + capacity, s, mask=inside)
    if ENTROPY:
        gl.store(out + 2 * capacity, t, mask=inside)
    store_picked(picked_out, picked, token, row, inside, first, end)


@triton_kernel
def compact_kernel(
    rows, ids, scales, count, listed, token_ids, mask, row_temperature, N, blocks, ignore_index, scale, V,
    HAS_MASK: tl.constexpr, PER_ROW: tl.constexpr, PACK: tl.constexpr, LIST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Fills blocks * 128 slots with the row of each, its token and its scale. With PACK these are the live
    rows with a token below V, in the caller's order, followed by gaps with row -1; without, every row has its
    own slot. The token of a gap or of a masked row is -2.

    With LIST `listed` is set to the number of parts of 64 rows with a live row, then these parts in ascending
    order, then a part without any rows, for tiles of two parts. With PACK or LIST there is only one program,
    because it must count through all rows."""
    capacity = blocks * 128
    seen = 0
    parts = 0
    begin, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    for first in range(begin, capacity, step):
        i = first + tl.arange(0, BLOCK)
        there = i < N
        token = tl.load(token_ids + i, mask=there, other=0)
        live = there & (token != ignore_index)
        if HAS_MASK:
            live = live & (tl.load(mask + i, mask=there, other=0) != 0)
        # A token that does not fit in 32 bits is outside any vocabulary, like -1.
        known = tl.where((token >= 0) & (token < 2147483647), token, -1).to(tl.int32)
        own = tl.full((BLOCK,), scale, tl.float32)
        if PER_ROW:
            own = scale / tl.load(row_temperature + i, mask=live, other=1.0)
        if PACK:
            taken = live & (token >= 0) & (token < V)
            slot = seen + tl.cumsum(taken.to(tl.int32), 0) - 1
            seen += tl.sum(taken.to(tl.int32), 0)
            tl.store(rows + slot, i, mask=taken)
            tl.store(ids + slot, known, mask=taken)
            tl.store(scales + slot, own, mask=taken)
        else:
            inside = i < capacity
            tl.store(tl.multiple_of(rows + i, 16), tl.where(there, i, -1), mask=inside)
            tl.store(tl.multiple_of(ids + i, 16), tl.where(live, known, -2), mask=inside)
            tl.store(tl.multiple_of(scales + i, 16), tl.where(there, own, 1.0), mask=inside)
        if LIST:
            some = tl.max(tl.reshape(live.to(tl.int32), (BLOCK // 64, 64)), 1)
            at = parts + tl.cumsum(some, 0)
            parts += tl.sum(some, 0)
            tl.store(listed + at, first // 64 + tl.arange(0, BLOCK // 64), mask=some > 0)
    if PACK:
        for first in range(begin, capacity, step):
            slot = first + tl.arange(0, BLOCK)
            hole = (slot >= seen) & (slot < capacity)
            tl.store(rows + slot, -1, mask=hole)
            tl.store(ids + slot, -2, mask=hole)
            tl.store(scales + slot, 1.0, mask=hole)
    else:
        seen = N
    tl.store(count, seen)  # all programs write the same value
    if LIST:
        tl.store(listed, parts)
        tl.store(listed + parts + 1, capacity // 64)


@triton.jit
def _without_slot(token_ids, mask, i, N, ignore_index, V, HAS_MASK: tl.constexpr):
    """(whether rows i have no slot, the result of such a row): 0 if it is masked, else NaN."""
    token = tl.load(token_ids + i, mask=i < N, other=0)
    live = token != ignore_index
    if HAS_MASK:
        live = live & (tl.load(mask + i, mask=i < N, other=0) != 0)
    blank = (i < N) & ((live == 0) | (token < 0) | (token >= V))
    return blank, tl.where(live, float("nan"), 0.0)


@triton_kernel
def blank_kernel(
    out, token_ids, mask, N, words, ignore_index, V,
    HAS_MASK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Fills the rows of out that have no slot. out has N rows of `words` times 8 columns."""
    columns = words * 8
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    blank, value = _without_slot(token_ids, mask, i, N, ignore_index, V, HAS_MASK)
    value = value[:, None] + tl.zeros((ROWS, COLUMNS), tl.float32)
    at = tl.multiple_of(out + i.to(tl.int64)[:, None] * columns + j[None, :], (1, 16))
    tl.store(at, value.to(out.dtype.element_ty), mask=blank[:, None] & (j < columns)[None, :])


@triton.jit
def _taken(x, i):
    """Column i of x [BLOCK, 8]: a thread has all of a row in its registers. All other terms are 0, so the
    order of this sum does not matter."""
    return tl.sum(tl.where((tl.arange(0, 8) == i)[None, :], x, 0.0), 1)


@triton.jit
def _finite(m):
    return tl.where(tl.abs(m) == float("inf"), 0.0, m)


@triton_kernel
def merge_kernel(
    logp, entropy, lse, stats, partial, picked, rows, ids, scales, count, token_ids, mask, ignore_index,
    N, blocks, V, splits, factor, ENTROPY: tl.constexpr, LSE: tl.constexpr, STATS: tl.constexpr,
    PACKED: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fold a row's splits in ascending order, and write the results to its original row. If rows are PACKED,
    this also fills rows that have no slot, as many per program as it has slots.

    Splits are loaded 8 at a time to hide latency; missing ones are empty and change no sum. Sums of masked
    rows are not read: they may never have been written.
    """
    capacity = blocks * 128
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < tl.load(count)
    row = tl.load(rows + slot, mask=inside, other=0).to(tl.int64)
    scale = tl.load(scales + slot, mask=inside, other=1.0)
    token = tl.load(ids + slot, mask=inside, other=-2)
    live = token != -2
    m = tl.full((BLOCK,), float("-inf"), tl.float32)
    s = tl.zeros((BLOCK,), tl.float32)
    t = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, splits, 8):
        split = first + tl.arange(0, 8)
        at = partial + split.to(tl.int64)[None, :] * 3 * capacity + slot[:, None]
        there = live[:, None] & (split < splits)[None, :]
        ms = tl.load(at, mask=there, other=float("-inf"))
        ss = tl.load(at + capacity, mask=there, other=0.0)
        if ENTROPY:
            ts = tl.load(at + 2 * capacity, mask=there, other=0.0)
        for i in tl.static_range(8):
            m1, s1 = _taken(ms, i), _taken(ss, i)
            top = tl.maximum(m, m1)
            base = _finite(top) * scale
            d = _finite(m) * scale - base
            d1 = _finite(m1) * scale - base
            r = tl.exp2(tl.where(m == float("-inf"), float("-inf"), d))
            r1 = tl.exp2(tl.where(m1 == float("-inf"), float("-inf"), d1))
            if ENTROPY:
                t1 = _taken(ts, i)
                old = tl.where(r == 0.0, 0.0, r * tl.fma(d, s, t))
                t = old + tl.where(r1 == 0.0, 0.0, r1 * tl.fma(d1, s1, t1))
            s = tl.fma(s, r, s1 * r1)
            m = top
    LN2: tl.constexpr = 0.6931471805599453
    known = (token >= 0) & (token < V)
    bad = tl.where(known, 0.0, float("nan"))  # an invalid token
    # A row with +inf has inf - inf everywhere but in lse.
    undefined = tl.where(m == float("inf"), float("nan"), bad)
    z = tl.load(picked + slot, mask=known, other=0.0)
    base = m * scale
    log2_s = tl.log2(s)
    at_token = (tl.fma(z, scale, -base) - log2_s) * LN2 + undefined
    tl.store(logp + row, tl.where(live, at_token, 0.0), mask=inside)
    if ENTROPY:
        tl.store(entropy + row, tl.where(live, (log2_s - t / s) * LN2 + undefined, 0.0), mask=inside)
    if LSE:
        tl.store(lse + row, tl.where(live, (base + log2_s) * LN2 + bad, 0.0), mask=inside)
    if STATS:
        own = s * tl.exp2(-tl.fma(m, scale, -base))  # relative to m itself
        tl.store(stats + row, tl.where(live, m * factor, 0.0), mask=inside)
        tl.store(stats + N + row, tl.where(live, own, 1.0), mask=inside)
    if PACKED:
        blank, value = _without_slot(token_ids, mask, slot, N, ignore_index, V, HAS_MASK)
        tl.store(logp + slot, value, mask=blank)
        if ENTROPY:
            tl.store(entropy + slot, value, mask=blank)
        if LSE:
            tl.store(lse + slot, value, mask=blank)
        if STATS:
            tl.store(stats + slot, 0.0, mask=blank)
            tl.store(stats + N + slot, 0.0, mask=blank)


class Slots:
    """The rows of a call on the device, in `capacity` slots (a multiple of 128), of which `count` are used.
    If requested, `listed` has the parts of 64 slots with a live row: their number, then the parts, then one
    part beyond all slots."""

    def __init__(
        self, token_ids: Tensor, mask: Tensor | None, row_temperature: Tensor | None,
        ignore_index: int, scale: float, V: int, pack: bool, launch: Launch, list_parts: bool = False,
    ) -> None:  # fmt: skip
        N = token_ids.numel()
        device = token_ids.device
        self.packed, self.ignore_index, self.V = pack, ignore_index, V
        self.capacity = -(-N // 128) * 128
        blocks = self.capacity // 128
        ints = torch.empty(2 * self.capacity + 2 * blocks + 3, dtype=torch.int32, device=device)
        self.rows, self.ids, self.listed, self.count = ints.split(
            (self.capacity, self.capacity, 2 * blocks + 2, 1)
        )
        self.scales = torch.empty(self.capacity, dtype=torch.float32, device=device)
        if mask is not None and mask.dtype == torch.bool:
            mask = mask.view(torch.uint8)
        self._tokens = token_ids.contiguous()
        self._mask = unused(self.count) if mask is None else mask.contiguous()
        self._has_mask = mask is not None
        block, programs = (4096, 1) if pack or list_parts else (512, -(-self.capacity // 512))
        launch(
            compact_kernel, (programs,),
            self.rows, self.ids, self.scales, self.count, self.listed, self._tokens, self._mask,
            unused(self.count) if row_temperature is None else row_temperature.contiguous(),
            N, blocks, ignore_index, scale, V,
            HAS_MASK=self._has_mask,
            PER_ROW=row_temperature is not None,
            PACK=pack,
            LIST=list_parts,
            BLOCK=block,
            num_warps=block // 256,
            enable_fp_fusion=False,
        )  # fmt: skip

    def blank(self, out: Tensor, launch: Launch) -> None:
        """Fills the rows that no slot will write in a matrix with one line per row: 0 if the row is masked,
        NaN if its token is invalid. Lines are whole words of 8 columns."""
        N, columns = out.shape
        launch(
            blank_kernel, (-(-N // 64), -(-columns // 256)),
            out, self._tokens, self._mask, N, columns // 8, self.ignore_index, self.V,
            HAS_MASK=self._has_mask,
            ROWS=64,
            COLUMNS=256,
            enable_fp_fusion=False,
        )  # fmt: skip

    def merge(
        self, partial: Tensor, picked: Tensor, shape: torch.Size, V: int, factor: float,
        entropy: bool, lse: bool, stats: bool, launch: Launch, splits: int | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        """(logp, entropy, lse, stats) of rows of the given leading shape, from the sums of their splits:
        those of class lse/1, unless another number is given."""

        def new(wanted: bool, *lead: int) -> Tensor | None:
            return partial.new_empty((*lead, *shape)) if wanted else None

        out = (new(True), new(entropy), new(lse), new(stats, 2))
        launch(
            merge_kernel, (self.capacity // 128,),
            *(unused(partial) if o is None else o for o in out),
            partial, picked, self.rows, self.ids, self.scales, self.count, self._tokens, self._mask,
            self.ignore_index, shape.numel(), self.capacity // 128, V,
            splits_of(V) if splits is None else splits,
            factor,
            ENTROPY=entropy,
            LSE=lse,
            STATS=stats,
            PACKED=self.packed,
            HAS_MASK=self.packed and self._has_mask,
            BLOCK=128,
            num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
        return out  # type: ignore[return-value]
