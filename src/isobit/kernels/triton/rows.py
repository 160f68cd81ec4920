"""Row reductions in an order that is fixed here, and not by the compiler's register layout.

A row of V columns is divided into *splits*, a split into *steps* of UNROLL x BLOCK columns. Lane j of BLOCK
lanes takes columns j, j + BLOCK, j + 2 BLOCK, ... of its split in ascending order and keeps an online
log-sum-exp of them, rescaled to a new maximum once per step. At the end of a split its lanes are added by a
pairwise tree, and at the end of the row the splits are, by the same tree.

Everything inside a lane is elementwise, and a tree adds two numbers at a time. So neither the vector width
of a load (which the compiler derives from pointer alignment) nor the number of warps can reorder a sum.
One program may take a whole row, or one program each split: the bits are the same. The order is named
`lse/triton-1`; `exp2`, `log2` and division are the device's own.

Rows that start inside a 16-byte word (an odd V) are still read in whole words. The BLOCK lanes then hold the
columns rotated by the row's offset from the word: the first few lanes find theirs one tile later, and the
lanes are rotated back before the tree. The sum of a lane is the same.

State of a sum: m, the largest logit seen (raw units); s = sum of 2^u; t = sum of u 2^u (for the entropy),
where u = (z - m) * scale and scale = log2(e) / temperature.

Kernels that use these functions must be compiled with `enable_fp_fusion=False`: whether a product and a sum
are contracted to one rounding must not depend on the kernel into which they are inlined.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from isobit.kernels.triton.interpreter import INTERPRETED


@triton.jit
def row_offset(row, inner, outer_stride, inner_stride):
    """Element offset of a row of a [outer, inner, ...] view with any strides; without `inner`, all rows are
    `inner_stride` apart."""
    offset = row * inner_stride
    if inner is not None:
        outer = row // inner
        offset = outer * outer_stride + (row - outer * inner) * inner_stride
    return offset


@triton.jit
def at_row(numbers, row, live, OTHER: tl.constexpr):
    """Numbers of rows from a table: OTHER for masked rows. If `live` is None, it is one row, and live."""
    if live is None:
        values = tl.load(numbers + row)
    else:
        values = tl.load(numbers + row, mask=live, other=OTHER)
    return values


@triton.jit
def own_or(number, numbers, row, live):
    """Each row's own number if there is a table, otherwise the one number for all rows."""
    own = tl.full(row.shape, number, tl.float32)
    if numbers is not None:
        own = at_row(numbers, row, live, 1.0)
    return own


@triton.jit
def given_at(numbers, row, live):
    """Each row's number from a table, 0 for masked rows; None if there is no table."""
    values = None
    if numbers is not None:
        values = at_row(numbers, row, live, 0.0)
    return values


@triton.jit
def row_weights(entropy, dlogp, dentropy, dlse, inverse):
    """(on_target, on_p, on_plogp) of rows, where dz = p (on_p + on_plogp log p) + on_target at the token.
    Gradients are one number per row, or None."""
    on_target = tl.zeros(inverse.shape, tl.float32)
    on_p = tl.zeros(inverse.shape, tl.float32)
    on_plogp = tl.zeros(inverse.shape, tl.float32)
    if dlogp is not None:
        on_target = dlogp * inverse
        on_p = -on_target
    if dlse is not None:
        on_p += dlse * inverse
    if dentropy is not None:
        on_plogp = -dentropy * inverse
        on_p += on_plogp * entropy
    return on_target, on_p, on_plogp


@triton.jit
def finite_or_zero(m):
    """A maximum that can be subtracted. An empty sum has m = -inf, and -inf - -inf is NaN, as is inf - inf.
    Relative to 0 a logit of +inf makes s infinite, and only a NaN among the logits makes it NaN."""
    return tl.where(tl.abs(m) == float("inf"), 0.0, m)


@triton.jit
def rescale(m, s, t, ref, scale):
    """Convert sums relative to m into sums relative to ref >= m."""
    d = (m - ref) * scale
    r = tl.exp2(d)
    # d is -inf for an empty sum, whose t is 0: avoid -inf * 0.
    return s * r, tl.where(r > 0, r * (t + d * s), 0.0)


@triton.jit
def tree_sum(x, LOG: tl.constexpr):
    """Sum of 2**LOG numbers: neighbours are added repeatedly."""
    for i in tl.static_range(LOG):
        # An axis of two: one commutative addition, whichever threads hold the two.
        x = tl.sum(tl.reshape(x, [1 << (LOG - 1 - i), 2]), axis=1)
    return tl.max(x, axis=0)  # one element is left: make it a scalar


@triton.jit
def at_top(m, s, t, scale):
    """The largest of all m, and the sums relative to it."""
    top = tl.max(m, axis=0)
    s, t = rescale(m, s, t, finite_or_zero(top), scale)
    return top, s, t


@triton.jit
def fold(m, s, t, scale, LOG: tl.constexpr):
    """Add 2**LOG sums into one."""
    top, s, t = at_top(m, s, t, scale)
    return top, tree_sum(s, LOG), tree_sum(t, LOG)


@triton.jit
def row_results(z, m, s, t, inv_temperature):
    """(logp, entropy, lse) of a row from its sums and the logit z of its token, and s for the backward."""
    ln2: tl.constexpr = 0.6931471805599453
    log_s = tl.log2(s) * ln2
    lse = m * inv_temperature + log_s
    # A row with +inf has an lse, +inf, but no distribution.
    none = m == float("inf")
    log_s = tl.where(none, float("nan"), log_s)
    # (z - m) first: both may be huge, but their difference is accurate.
    logp = (z - m) * inv_temperature - log_s
    return logp, log_s - t / s * ln2, lse, tl.where(none, float("nan"), s)


@triton.jit
def split_sums(
    z_ptr, start, split, V, scale, ENTROPY: tl.constexpr, WORD: tl.constexpr,
    LOG_BLOCK: tl.constexpr, UNROLL: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """(m, s, t) of one split of the row that starts at element `start` of `z_ptr`.

    WORD is the number of elements in 16 bytes if rows may start or end inside such a word. It is 1 if no row
    does, or if z_ptr itself is not aligned to a word, so that no word of a row is.
    """
    BLOCK: tl.constexpr = 1 << LOG_BLOCK
    STEP: tl.constexpr = UNROLL << LOG_BLOCK
    shift = 0  # offset of the row from the word in which it starts
    if WORD > 1:
        shift = (start % WORD).to(tl.int32)
    words = z_ptr + start // WORD * WORD
    lo = split * (STEP * STEPS)
    hi = tl.minimum(lo + STEP * STEPS, V)
    whole = lo + (hi - lo) // STEP * STEP
    if WORD > 1:  # only steps that are followed by a whole word
        filled = (V + shift) // WORD * WORD
        whole = tl.minimum(whole, lo + tl.maximum(filled - WORD - lo, 0) // STEP * STEP)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    s = tl.zeros([BLOCK], tl.float32)
    t = tl.zeros([BLOCK], tl.float32)
    for first in range(lo, whole, STEP):
        z = load_tiles(words, first, shift, WORD, BLOCK, UNROLL)
        m, s, t = add_step(m, s, t, z, scale, ENTROPY, UNROLL)
    for first in range(whole, hi, STEP):
        z = load_last_tiles(words, first, V + shift, shift, WORD, BLOCK, UNROLL)
        m, s, t = add_step(m, s, t, z, scale, ENTROPY, UNROLL)
    top, s, t = at_top(m, s, t, scale)
    if WORD > 1:
        back = (tl.arange(0, BLOCK) + shift) % BLOCK
        s = tl.gather(s, back, axis=0)
        if ENTROPY:
            t = tl.gather(t, back, axis=0)
    return top, tree_sum(s, LOG_BLOCK), tree_sum(t, LOG_BLOCK)


@triton.jit
def in_pairs(x):
    """Whether the GPU has instructions for two numbers of x at once: NVIDIA's have them for 16 bits. A step
    with fewer instructions, and logits that stay in 16 bits, leaves registers for more programs."""
    return not INTERPRETED and x.dtype.primitive_bitwidth == 16 and cuda_capability_geq(8, 0)


@triton.jit
def chosen(which, x, y, condition=True):
    """x where `which` and `condition` hold, otherwise y; `condition` is one bool for all elements."""
    if in_pairs(x):
        bits = tl.where(which, -1, 0).to(tl.int16)
        some = tl.where(condition, -1, 0).to(tl.int16)
        z = tl.inline_asm_elementwise(
            "{ .reg .b32 c; and.b32 c, $3, $4; lop3.b32 $0, $1, $2, c, 0xD8; }", "=r,r,r,r,r",
            [y, x, bits, some], dtype=x.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        z = tl.where(which & condition, x, y)
    return z


@triton.jit
def largest(z, COUNT: tl.constexpr):
    """The largest of COUNT tiles, lane by lane, in fp32. A maximum is exact in any dtype."""
    if in_pairs(z[0]):
        MAX: tl.constexpr = "max.bf16x2 $0, $1, $2;" if z[0].dtype == tl.bfloat16 else "max.f16x2 $0, $1, $2;"
        top = z[0]
        for i in tl.static_range(1, COUNT):
            top = tl.inline_asm_elementwise(MAX, "=r,r,r", [top, z[i]], dtype=top.dtype, is_pure=True, pack=2)
        top = top.to(tl.float32)
    else:
        top = z[0].to(tl.float32)
        for i in tl.static_range(1, COUNT):
            top = tl.maximum(top, z[i].to(tl.float32))
    return top


@triton.jit
def in_lanes(tiles, shift, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """COUNT tiles of one column per lane from one more: lanes before `shift` have theirs one tile later."""
    lane = tl.arange(0, BLOCK)
    z = ()
    for i in tl.static_range(COUNT):
        z = z + (chosen(lane < shift, tiles[i + 1], tiles[i]),)
    return z


@triton.jit
def load_tiles(words, first, shift, WORD: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """COUNT tiles of columns from `first` on. They and the word after them are inside the row. Words are read
    whole, also the one that the row shares with the row before it."""
    lane = tl.arange(0, BLOCK)
    tiles = ()
    for i in tl.static_range(COUNT):
        tiles = tiles + (tl.load(words + first + i * BLOCK + lane),)
    if WORD > 1:
        behind = words + first + COUNT * BLOCK + lane
        tiles = tiles + (tl.load(behind, mask=lane < WORD, other=float("-inf")),)
        tiles = in_lanes(tiles, shift, BLOCK, COUNT)
    return tiles


@triton.jit
def load_last_tiles(
    words, first, end, shift, WORD: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """COUNT tiles of columns from `first` on; -inf from `end` on, where the row ends.

    Masks are the same for all elements of a word, so that words are read whole. The incomplete word at the
    end of a row is read by element: after the last row the memory may not belong to the tensor.
    """
    lane = tl.arange(0, BLOCK)
    low = float("-inf")
    filled = end // WORD * WORD
    tiles = ()
    for i in tl.static_range(COUNT):
        at = first + i * BLOCK + lane
        tiles = tiles + (tl.load(words + at, mask=at < filled, other=low),)
    if WORD > 1:
        at = first + COUNT * BLOCK + lane
        tiles = tiles + (tl.load(words + at, mask=(at < filled) & (lane < WORD), other=low),)
        at = filled // BLOCK * BLOCK
        some = tl.load(words + at + lane, mask=(at + lane >= filled) & (at + lane < end), other=low)
        incomplete = lane // WORD == filled % BLOCK // WORD
        read = ()
        for i in tl.static_range(COUNT + 1):
            read = read + (chosen(incomplete, some, tiles[i], at == first + i * BLOCK),)
        tiles = in_lanes(read, shift, BLOCK, COUNT)
    return tiles


@triton.jit
def add_step(m, s, t, z, scale, ENTROPY: tl.constexpr, UNROLL: tl.constexpr):
    """Add UNROLL tiles to the lanes' sums, with one rescaling for all of them."""
    top = tl.maximum(m, largest(z, UNROLL))
    ref = finite_or_zero(top)
    s, t = rescale(m, s, t, ref, scale)
    for i in tl.static_range(UNROLL):
        u = (z[i].to(tl.float32) - ref) * scale
        e = tl.exp2(u)
        s = s + e
        if ENTROPY:
            t = t + e * tl.maximum(u, -1000.0)  # 2^-1000 is 0 in fp32, and 0 * -inf would be NaN
    return top, s, t
