"""Parts of the attention kernels in portable Triton: which queries and keys a program has, loads that stay in
bounds whatever the integer tensors hold, and sums in a fixed order.

Rows of a tile are queries times the G heads of one KV head: row r is query r // G of the tile in head r % G.
Which rows share a tile does not affect any sum.

The compiler must not choose any order of additions. So a reduction is a tree of additions of two numbers, a
matrix product is `product`, and kernels are compiled without contraction to fused multiply-adds.
"""

import numpy as np
import triton
import triton.language as tl

from isobit.kernels.triton.interpreter import INTERPRETED
from isobit.ops.attention.model import fused

#: Products that are added to an accumulator in one matrix step.
GROUP = 16

#: Upper bound on halvings of a row, for unrolled loops; the ones that are not needed generate no code.
MOST = tl.constexpr(8)


# Which queries and keys


@triton.jit
def clamped(at, low, high):
    """The integer at this address, clamped to [low, high]: unchecked input."""
    return tl.minimum(tl.maximum(tl.load(at), low), high).to(tl.int32)


@triton.jit
def piece_of(tile, cu, rows, SEQUENCES, PER: tl.constexpr):
    """(sequence, first row, number of rows, first row in this tile) for tiles of PER rows.

    Without `cu` each sequence has `rows` rows of its own, from 0. Packed sequences share them. Sequence s
    then starts at tile cu[s] // PER + s. That leaves enough tiles for all sequences before it, and some are
    empty. So the host need not know where sequences begin.
    """
    if cu is None:
        tiles = tl.cdiv(rows, PER)
        sequence = tile // tiles
        first = tl.zeros([], tl.int32)
        count = first + rows
        start = (tile - sequence * tiles) * PER
    else:
        sequence = tl.zeros([], tl.int32)
        after = sequence + SEQUENCES
        while after - sequence > 1:
            middle = (sequence + after) // 2
            begun = clamped(cu + middle, 0, rows) // PER + middle <= tile
            sequence = tl.where(begun, middle, sequence)
            after = tl.where(begun, after, middle)
        first = clamped(cu + sequence, 0, rows)
        count = clamped(cu + sequence + 1, first, rows) - first
        start = tl.maximum(tile - (first // PER + sequence), 0) * PER
    return sequence, first, count, start


@triton.jit
def keys_of(sequence, key_start, key_end, cu_k, S):
    """(first key, number of keys) of a sequence, within S."""
    first = tl.zeros([], tl.int32)
    end = first + S
    if cu_k is not None:
        first = clamped(cu_k + sequence, 0, S)
        end = clamped(cu_k + sequence + 1, first, S)
    if key_start is not None:
        first = clamped(key_start + sequence, 0, S)
    if key_end is not None:
        end = clamped(key_end + sequence, first, S)
    return first, tl.maximum(end - first, 0)


@triton.jit
def load_keys(
    at, table, sequence, first, key, keys, P, stride_p, stride_s, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, PACKED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Rows of k or v, [keys, DP]; zeros where there is no key, and beyond D. `at` points at the head, `key`
    counts from the first key of the sequence, `table` points at the pages of the sequence."""
    there = key < keys
    place = (first + key).to(tl.int64)
    if table is not None:
        page = tl.load(table + place // PAGE, mask=there, other=0).to(tl.int64)
        page = tl.minimum(tl.maximum(page, 0), P - 1)  # a wrong table must not cause a read out of bounds
        offset = page * stride_p + place % PAGE * stride_s
    elif PACKED:
        offset = place * stride_s
    else:
        offset = sequence.to(tl.int64) * stride_p + place * stride_s
    d = tl.arange(0, DP)
    if MASKED:
        inside = there[:, None]
        if D < DP:
            inside = inside & (d < D)[None, :]
        return tl.load(at + offset[:, None] + d[None, :], mask=inside, other=0.0)
    if D < DP:
        inside = (d < D)[None, :] & (key >= 0)[:, None]
        return tl.load(at + offset[:, None] + d[None, :], mask=inside, other=0.0)
    return tl.load(at + offset[:, None] + d[None, :])


@triton.jit
def load_rows(at, offset, live, D: tl.constexpr, DP: tl.constexpr):
    """Rows of q or of a gradient at these offsets, [rows, DP]; zeros where a row is not live, and beyond
    D."""
    d = tl.arange(0, DP)
    inside = live[:, None] & (d < D)[None, :]
    return tl.load(at + offset[:, None] + d[None, :], mask=inside, other=0.0)


# Sums in a stated order


if INTERPRETED.value:

    def product(left, right, acc):
        """The same on a CPU, on the numpy arrays of the interpreter. A step adds its 16 products in ascending
        order in fp32, then their sum to the accumulator. As on a tensor core no step gives -0, so a step of
        zeros changes nothing. numpy's own product would use an order that depends on the shapes."""
        acc = acc + 0.0  # a copy
        a, b, total = left.to(tl.float32).handle.data, right.to(tl.float32).handle.data, acc.handle.data
        for first in range(0, a.shape[1], GROUP):
            step = a[:, first, None] * b[first]
            for i in range(first + 1, first + GROUP):
                step += a[:, i, None] * b[i]
            total += step + 0.0
        return acc

    def fma(x, y, z):
        """The same on a CPU: `tl.fma` of the interpreter rounds twice up to Triton 3.8."""
        found = x * y + z
        factor = np.float32(y) if isinstance(y, float) else y.handle.data
        found.handle.data[...] = fused(x.handle.data, factor, z.handle.data)
        return found

else:

    @triton.jit
    def product(left, right, acc):
        """left [m, k] times right [k, n], added to acc by matrix steps over ascending k."""
        return tl.dot(left, right, acc, input_precision="ieee")

    @triton.jit
    def fma(x, y, z):
        """x y + z with one rounding."""
        return tl.fma(x, y, z)


@triton.jit
def row_sums(x):
    """Sums of rows, [rows, 2^n]: repeatedly adds the second half to the first."""
    for _ in tl.static_range(MOST):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), 1)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def lane_sums(p):
    """Sums over the keys of a block by lanes, [rows, 4]: lane i has the keys 8 g + 2 i and 8 g + 2 i + 1.
    First halves of g, which one thread holds in the register layout of a matrix product, then the two of a
    pair."""
    for _ in tl.static_range(MOST):
        if p.shape[1] > 8:
            p = tl.sum(tl.reshape(p, [p.shape[0], 2, p.shape[1] // 2]), 1)
    return tl.sum(tl.reshape(p, [p.shape[0], 4, 2]), 2)


@triton.jit
def joined(lanes):
    """(0 + 1) + (2 + 3)."""
    return tl.sum(tl.sum(tl.reshape(lanes, [lanes.shape[0], 2, 2]), 2), 1)


# Softmax


@triton.jit
def tanh(x):
    """A series near 0, because the quotient cancels there. Divisions round to nearest."""
    a = tl.abs(x)
    e = tl.exp2(a * -2.8853900817779268)  # exp(-2a)
    far = tl.div_rn(1.0 - e, 1.0 + e)
    y = x * x
    near = 0.13333333333333333 + y * (-0.053968253968253968 + y * 0.021869488536155203)
    near = a + a * y * (-0.33333333333333333 + y * near)
    found = tl.where(a < 0.25, near, far)
    return tl.where(x < 0, -found, found)


@triton.jit
def finite(m):
    """The maximum to subtract: 0 if no key has been seen yet, because -inf - -inf is NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def fold(total_m, total_s, total, m, s, acc, c):
    """Fold one more segment into the totals. A row that has seen no key of the segment is left unchanged.
    This is decided by s = 0 and not by the maximum, which is -inf also if all scores are NaN."""
    top = tl.maximum(total_m, m)
    old, new = tl.exp2((total_m - finite(top)) * c), tl.exp2((m - finite(top)) * c)
    seen = s != 0.0
    total_s = tl.where(seen, fma(s, new, total_s * old), total_s)
    total = tl.where(seen[:, None], fma(acc, new[:, None], total * old[:, None]), total)
    return tl.where(seen, top, total_m), total_s, total


@triton.jit
def finished(m, s, acc, c):
    """(out, lse) of rows in fp32; 0 and -inf for rows that see no key."""
    ln2: tl.constexpr = 0.6931471805599453
    seen = s != 0.0
    s = tl.where(seen, s, 1.0)
    out = tl.where(seen[:, None], tl.div_rn(acc, s[:, None]), 0.0)
    return out, tl.where(seen, (m * c + tl.log2(s)) * ln2, float("-inf"))
