"""Attention forward in portable Triton: NVIDIA, AMD, and the CPU interpreter.

The keys of a sequence are split into segments of 1024, counted from its own first key, and segments into
blocks of 128 keys (64 where D > 128). Each segment starts with a fresh online-softmax state (m, s, acc) and
takes its blocks in ascending order:

    z     = scores, or cap tanh(slope scores)            one chain of matrix steps over ascending D
    m'    = max(m, z)
    a     = 2^((m - m') c),   p = 2^fma(z, c, -(m' c))
    s     = fma(s, a, sums of p)                         four lanes, by trees
    acc   = acc a, then the chain continues with p V     p rounded to the dtype of v

The states of segments are then folded in ascending order. Nothing else affects the bits. Sizes decide between
two schedules:

    prefill    one program per tile of queries and KV head; it loops over all segments and folds as it goes
    decoding   one program per tile, KV head and run of segments; it writes the segments' states to memory,
               and a second kernel folds those of a row in ascending order

Rows of a tile are queries times the G heads of one KV head: row r is query r // G of the tile in head r % G.
Which rows share a tile does not affect any sum.

The compiler must not choose any order of additions. So a reduction is a tree of additions of two numbers, a
matrix product is `product`, and kernels are compiled without contraction to fused multiply-adds.

The backward (`kernels_triton_bwd`) uses the pieces of this file.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from isobit.frame.contract import dtype_name
from isobit.frame.launch import Launch, run
from isobit.kernels.triton.chain import fma, product
from isobit.kernels.triton.interpreter import narrow, rounded
from isobit.kernels.triton.tiles import Tile, compile_options
from isobit.ops.attention.calls import (
    FEW_ROWS,
    SEGMENT,
    Call,
    block_keys,
    call_of,
    decodes,
    factors_of,
    key_bounds,
    which_tanh,
)
from isobit.ops.attention.kernels_triton_softcap import capped

#: With this many programs even the largest GPUs are full, and splitting the keys further gains nothing.
MANY_PROGRAMS = 1024

#: States of a row that are loaded at once while they are folded.
STATES_AT_ONCE = 16

#: Upper bound on halvings of a row, for unrolled loops; the ones that are not needed generate no code.
MOST_HALVINGS = tl.constexpr(8)

#: What differs between calls, sizes and where bounds begin in memory: one compilation serves them all.
_BOUNDS = ["key_start", "key_end", "cu_q", "cu_k", "table"]
_SIZES = [*_BOUNDS, "T", "S", "SEQUENCES", "P", "window", "tiles", "segments", "programs"]


# Which queries and keys


@triton.jit
def like(x, value):
    """`value` with the type and shape of x. A variable that a branch changes must keep them, and a constant
    has others. The compiler folds the product."""
    return x * 0 + value


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


@triton.jit
def row_sums(x):
    """Sums of rows, [rows, 2^n]: repeatedly adds the second half to the first."""
    for _ in tl.static_range(MOST_HALVINGS):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), 1)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def lane_sums(p):
    """Sums over the keys of a block by lanes, [rows, 4]: lane i has the keys 8 g + 2 i and 8 g + 2 i + 1.
    First halves of g, which one thread holds in the register layout of a matrix product, then the two of a
    pair."""
    for _ in tl.static_range(MOST_HALVINGS):
        if p.shape[1] > 8:
            p = tl.sum(tl.reshape(p, [p.shape[0], 2, p.shape[1] // 2]), 1)
    return tl.sum(tl.reshape(p, [p.shape[0], 4, 2]), 2)


@triton.jit
def joined(lanes):
    """(0 + 1) + (2 + 3)."""
    return tl.sum(tl.sum(tl.reshape(lanes, [lanes.shape[0], 2, 2]), 2), 1)


# Softmax


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


# Kernels


@triton.jit
def scores(q, k, cap, slope, CAPPED: tl.constexpr):
    """z [rows, keys]."""
    z = product(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
    if CAPPED:
        z = capped(z, cap, slope, CAPPED)
    return z


@triton.jit
def add_block(
    m, s, acc, q, k_at, v_at, table, sequence, first, block, keys, oldest, newest, P, k_sp, k_ss, v_sp, v_ss,
    c, cap, slope, BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    PACKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The state of a segment after one more block. A row sees the keys from `oldest` to `newest`. Without
    MASKED every row sees the whole block."""
    key = block + tl.arange(0, BLOCK)
    k = load_keys(k_at, table, sequence, first, key, keys, P, k_sp, k_ss, D, DP, PAGE, PACKED, MASKED)
    v = load_keys(v_at, table, sequence, first, key, keys, P, v_sp, v_ss, D, DP, PAGE, PACKED, MASKED)
    z = scores(q, k, cap, slope, CAPPED)
    if MASKED:
        sees = key[None, :] <= newest[:, None]
        if WINDOWED:
            sees = sees & (key[None, :] >= oldest[:, None])
        z = tl.where(sees, z, float("-inf"))
    top = tl.maximum(m, tl.max(z, 1))
    base = finite(top)
    a = tl.exp2((m - base) * c)
    p = tl.exp2(fma(z, c, -(base * c)[:, None]))
    s = fma(s, a[:, None], lane_sums(p))
    acc = product(rounded(p, v.dtype), v, acc * a[:, None])
    return top, s, acc


@triton.jit
def segment_state(
    q, k_at, v_at, table, sequence, first, begin, end, whole, keys, oldest, newest, P, k_sp, k_ss, v_sp, v_ss,
    c, cap, slope, M: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    PAGE: tl.constexpr, PACKED: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """(m, s, acc) of the keys from `begin`, a block boundary, to `end`. Every row sees all keys before
    `whole`. Blocks that no row sees are skipped; they would not change the state."""
    m = tl.full([M], float("-inf"), tl.float32)
    s = tl.zeros([M, 4], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    middle = begin
    if not WINDOWED:
        middle = tl.maximum(begin, tl.minimum(end, whole // BLOCK * BLOCK))
        for block in range(begin, middle, BLOCK):
            m, s, acc = add_block(
                m, s, acc, q, k_at, v_at, table, sequence, first, block, keys, oldest, newest, P, k_sp, k_ss,
                v_sp, v_ss, c, cap, slope, BLOCK, D, DP, PAGE, PACKED, WINDOWED, CAPPED, MASKED=False,
            )  # fmt: skip
    for block in range(middle, end, BLOCK):
        m, s, acc = add_block(
            m, s, acc, q, k_at, v_at, table, sequence, first, block, keys, oldest, newest, P, k_sp, k_ss,
            v_sp, v_ss, c, cap, slope, BLOCK, D, DP, PAGE, PACKED, WINDOWED, CAPPED, MASKED=True,
        )  # fmt: skip
    return m, joined(s), acc


@triton.jit
def tile_of(
    tile, cu_q, key_start, key_end, cu_k, T, S, SEQUENCES, window, M: tl.constexpr, G: tl.constexpr,
    BLOCK: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """The rows of a tile and the keys they see: (sequence, row of q, head in the group, whether the row
    exists; first key, number of keys; oldest and newest key of each row; `begin` and `end` of the keys that
    any row sees, with `begin` at a block boundary; `whole`, before which every row sees all keys)."""
    PER: tl.constexpr = M // G
    sequence, first_row, rows, start = piece_of(tile, cu_q, T, SEQUENCES, PER)
    first, keys = keys_of(sequence, key_start, key_end, cu_k, S)
    r = tl.arange(0, M)
    query = start + r // G
    live = (query < rows) & (r < PER * G)
    position = keys - rows + query
    newest = tl.zeros([M], tl.int32) + keys - 1
    end = keys
    whole = keys
    if CAUSAL:
        newest = tl.minimum(position, keys - 1)
        end = tl.minimum(tl.maximum(keys - rows + tl.minimum(start + PER, rows), 0), keys)
        whole = tl.maximum(keys - rows + start + 1, 0)
    newest = tl.where(live, newest, -1)
    oldest = position - window + 1
    begin = tl.zeros([], tl.int32)
    if WINDOWED:
        begin = tl.maximum(keys - rows + start - window + 1, 0) // BLOCK * BLOCK
    end = tl.where(start < rows, end, 0)
    return sequence, first_row + query, r % G, live, first, keys, oldest, newest, begin, end, whole


@triton.jit(do_not_specialize=_SIZES)
def prefill_kernel(
    q, k, v, out, lse, key_start, key_end, cu_q, cu_k, table, T, S, SEQUENCES, P, window, c, cap, slope,
    table_s, q_sb, q_st, q_sh, k_sp, k_ss, k_sh, v_sp, v_ss, v_sh, tiles, KV, G: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr,
    PAGE: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """One tile of queries for the heads of one KV head, over all of its keys."""
    kv = tl.program_id(0) % KV
    tile = tiles - 1 - tl.program_id(0) // KV  # the last queries see most keys: run them first
    sequence, row, head, live, first, keys, oldest, newest, begin, end, whole = tile_of(
        tile, cu_q, key_start, key_end, cu_k, T, S, SEQUENCES, window, M, G, BLOCK, CAUSAL, WINDOWED
    )
    batch = sequence.to(tl.int64)
    if cu_q is not None:
        batch = like(batch, 0)
    head = kv * G + head
    q_off = batch * q_sb + row.to(tl.int64) * q_st + head.to(tl.int64) * q_sh
    own = load_rows(q, q_off, live, D, DP)
    k_at, v_at = k + kv.to(tl.int64) * k_sh, v + kv.to(tl.int64) * v_sh
    if table is not None:
        table = table + sequence.to(tl.int64) * table_s
    total_m = tl.full([M], float("-inf"), tl.float32)
    total_s = tl.zeros([M], tl.float32)
    total = tl.zeros([M, DP], tl.float32)
    for at in range(begin // SEGMENT * SEGMENT, end, SEGMENT):
        m, s, acc = segment_state(
            own, k_at, v_at, table, sequence, first, tl.maximum(at, begin), tl.minimum(at + SEGMENT, end),
            whole, keys, oldest, newest, P, k_sp, k_ss, v_sp, v_ss, c, cap, slope, M, BLOCK, D, DP, PAGE,
            cu_k is not None, WINDOWED, CAPPED,
        )  # fmt: skip
        total_m, total_s, total = fold(total_m, total_s, total, m, s, acc, c)
    row_out, row_lse = finished(total_m, total_s, total, c)
    d = tl.arange(0, DP)
    to = ((batch * T + row) * KV * G + head)[:, None] * D + d[None, :]
    tl.store(out + to, narrow(row_out, out), mask=live[:, None] & (d < D)[None, :])
    if lse is not None:
        tl.store(lse + (batch * KV * G + head) * T + row, row_lse, mask=live)


@triton.jit
def seen_segments(keys, T, window, SEGMENT: tl.constexpr, WINDOWED: tl.constexpr):
    """(first, end) of the segments with a key that one of the T queries of a sequence sees."""
    first = like(keys, 0)
    if WINDOWED:
        first = tl.maximum(keys - T - window + 1, 0) // SEGMENT
    return first, tl.cdiv(keys, SEGMENT)


@triton.jit(do_not_specialize=_SIZES)
def segments_kernel(
    q, k, v, sums, states, key_start, key_end, cu_q, cu_k, table, T, S, SEQUENCES, P, window, c, cap, slope,
    table_s, q_sb, q_st, q_sh, k_sp, k_ss, k_sh, v_sp, v_ss, v_sh, segments, programs, KV, G: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, SEGMENT: tl.constexpr,
    PAGE: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """The states of some segments, for one tile of queries and the heads of one KV head: m and s in `sums`
    [rows, heads, segments, 2], acc in `states` [rows, heads, segments, D]. `programs` share the segments of a
    tile: all if queries are packed, or else those with a key that a query of the sequence sees. For a segment
    that a row does not see, s = 0 and acc is not written."""
    kv = tl.program_id(0) % KV
    sequence, row, head, live, first, keys, oldest, newest, begin, end, whole = tile_of(
        tl.program_id(0) // KV, cu_q, key_start, key_end, cu_k, T, S, SEQUENCES, window, M, G, BLOCK, CAUSAL,
        WINDOWED,
    )  # fmt: skip
    batch = sequence.to(tl.int64)
    if cu_q is not None:
        batch = like(batch, 0)
    head = kv * G + head
    q_off = batch * q_sb + row.to(tl.int64) * q_st + head.to(tl.int64) * q_sh
    own = load_rows(q, q_off, live, D, DP)
    k_at, v_at = k + kv.to(tl.int64) * k_sh, v + kv.to(tl.int64) * v_sh
    if table is not None:
        table = table + sequence.to(tl.int64) * table_s
    d = tl.arange(0, DP)
    state = ((batch * T + row) * KV * G + head) * segments
    after = tl.zeros([], tl.int32) + segments
    from_segment = like(after, 0)
    if cu_q is None:
        from_segment, after = seen_segments(keys, T, window, SEGMENT, WINDOWED)
    each = tl.cdiv(after - from_segment, programs)
    from_segment += tl.program_id(1) * each
    for j in range(from_segment, tl.minimum(from_segment + each, after)):
        m, s, acc = segment_state(
            own, k_at, v_at, table, sequence, first, tl.maximum(j * SEGMENT, begin),
            tl.minimum((j + 1) * SEGMENT, end), whole, keys, oldest, newest, P, k_sp, k_ss, v_sp, v_ss,
            c, cap, slope, M, BLOCK, D, DP, PAGE, cu_k is not None, WINDOWED, CAPPED,
        )  # fmt: skip
        tl.store(sums + (state + j) * 2, m, mask=live)
        tl.store(sums + (state + j) * 2 + 1, s, mask=live)
        seen = (live & (s != 0.0))[:, None] & (d < D)[None, :]
        tl.store(states + (state + j)[:, None] * D + d[None, :], acc, mask=seen)


@triton.jit(do_not_specialize=["key_start", "key_end", "T", "S", "window", "segments"])
def fold_kernel(
    sums, states, out, lse, key_start, key_end, T, S, window, segments, c, H: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, SEGMENT: tl.constexpr, WINDOWED: tl.constexpr, AT_ONCE: tl.constexpr,
    EARLY: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Fold the states of one row in ascending order; rows are numbered (b, t, head). AT_ONCE states are
    loaded together, because memory latency is longer than a fold. EARLY: this kernel was started while the
    kernel that writes the states was still running. ALL segments have a state, or only those with a key that
    some query of the sequence sees."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    one, d = tl.arange(0, 1), tl.arange(0, DP)
    sums += row * segments * 2 + one
    states += row * segments * D + d[None, :]
    inside = (d < D)[None, :]
    total_m = tl.full([1], float("-inf"), tl.float32)
    total_s = tl.zeros([1], tl.float32)
    total = tl.zeros([1, DP], tl.float32)
    begin = tl.zeros([], tl.int32)
    end = begin + segments
    if not ALL:
        _, keys = keys_of(row // (T * H), key_start, key_end, None, S)
        begin, end = seen_segments(keys, T, window, SEGMENT, WINDOWED)
    for first in range(begin, end, AT_ONCE):
        m, s, acc = (), (), ()
        for i in tl.static_range(AT_ONCE):
            j = first + i
            there = one + j < end
            m = m + (tl.load(sums + j * 2, mask=there, other=float("-inf")),)
            s = s + (tl.load(sums + j * 2 + 1, mask=there, other=0.0),)
            # acc of a segment without a visible key is uninitialised memory; the fold ignores it: s = 0.
            acc = acc + (tl.load(states + j * D, mask=there[:, None] & inside, other=0.0),)
        for i in tl.static_range(AT_ONCE):
            total_m, total_s, total = fold(total_m, total_s, total, m[i], s[i], acc[i], c)
    row_out, row_lse = finished(total_m, total_s, total, c)
    tl.store(out + row * D + d[None, :], narrow(row_out, out), mask=inside)
    if lse is not None:
        b, t, h = row // (T * H), row // H % T, row % H
        tl.store(lse + (b * H + h) * T + t + one, row_lse)


# Launchers


def why_not(args: dict[str, Any]) -> str | None:
    """Why these kernels cannot serve a call, or None."""
    if args["q"].dtype.itemsize != 2:
        return f"inputs are {dtype_name(args['q'].dtype)}; the kernels multiply bf16 and fp16"
    if call_of(args).group > FEW_ROWS:
        return f"{call_of(args).group} query heads share a KV head; a tile has room for {FEW_ROWS}"
    return None


def tile_rows(call: Call, most: int) -> int:
    """Rows per tile, a power of two, for the average number of queries per sequence."""
    queries = -(-call.T // max(call.sequences, 1)) if call.packed_q else call.T
    wanted = max(queries, 1) * call.group
    return min(most, max(16, 1 << (wanted - 1).bit_length(), 1 << (call.group - 1).bit_length()))


def count_tiles(call: Call, per: int) -> int:
    """Number of tiles of `per` queries. For packed sequences an upper bound, wherever they begin."""
    if call.packed_q:
        return call.T // per + call.sequences if call.sequences else 0
    return call.sequences * (-(-call.T // per))


def strides_of(call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Batch, row and head strides of each. The batch stride of a single batch element is set to 0: it is
    unused, and as a product of sizes its divisibility would cause recompiles."""

    def first(t: Tensor) -> int:
        return t.stride(0) if t.shape[0] > 1 else 0

    return tuple(s for t in (q, k, v) for s in (first(t), t.stride(1), t.stride(2)))


def launch_fold(
    launch: Launch, sums: Tensor, states: Tensor, out: Tensor, lse: Tensor | None, args: dict[str, Any],
    segment: int, early: bool = False, tangent: int = 1,
) -> None:  # fmt: skip
    """`early`: start while the previous launch is still running (programmatic dependent launch). NVIDIA GPUs
    from Hopper on only."""
    call = call_of(args)
    rows, segments = sums.shape[:2]
    options = {"launch_pdl": True} if early else {}
    launch(
        fold_kernel,
        (rows,),
        *(sums, states, out, lse, args["key_start"], args["key_end"]),
        *(call.T, call.S, args["window"] or 0, segments, factors_of(args, tangent).c),
        H=call.H,
        D=call.D,
        DP=call.padded,
        SEGMENT=segment,
        WINDOWED=args["window"] is not None,
        AT_ONCE=STATES_AT_ONCE,
        EARLY=early,
        ALL=call.packed_q,
        num_warps=1,
        enable_fp_fusion=False,
        **options,
    )


def attention(
    launch: Launch = run,
    segment: int = SEGMENT,
    block: int | None = None,
    split: bool | None = None,
    out: Tensor | None = None,
    tangent: int = 1,
    **args: Any,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse); `out` is the memory to write it to, if the caller has some. `segment` and `block` are fixed
    by the class, and sizes decide whether keys are split. Tests override them to reach the boundaries with
    few keys. `tangent` is the class whose tanh caps scores."""
    call, factors = call_of(args), factors_of(args, tangent)
    q, k, v, table = args["q"], args["k"], args["v"], args["block_table"]
    shape = (call.B, call.H, call.T)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(shape, dtype=torch.float32, device=q.device) if args["return_lse"] else None
    if out.numel() == 0:
        return out, lse
    M = tile_rows(call, 64 if call.D > 128 else 128)
    tiles = count_tiles(call, M // call.group)
    given = (
        *(args["key_start"], args["key_end"], args["cu_seqlens_q"], key_bounds(args), table),
        *(call.T, call.S, call.sequences, call.pages, args["window"] or 0),
        *(factors.c, factors.cap, factors.slope),
        0 if table is None else table.stride(0),
        *strides_of(call, q, k, v),
    )
    constants: dict[str, Any] = {
        "G": call.group,
        "D": call.D,
        "DP": call.padded,
        "M": M,
        "BLOCK": block or block_keys(call.D),
        "SEGMENT": segment,
        "PAGE": call.page,
        "CAUSAL": args["causal"],
        "WINDOWED": args["window"] is not None,
        "CAPPED": which_tanh(args, tangent),
        **compile_options(Tile(M, 0, 0, warps=8 if M == 128 else 4, stages=2)),
    }
    if split is None:  # not if there are many programs without: states would take memory and gain nothing
        split = decodes(call, segment) and tiles * call.KV < MANY_PROGRAMS
    if not split:
        launch(prefill_kernel, (tiles * call.KV,), q, k, v, out, lse, *given, tiles, call.KV, **constants)
        return out, lse
    segments, rows = -(-call.S // segment), call.B * call.T * call.H
    each = max(1, tiles * call.KV * segments // MANY_PROGRAMS)
    sums = torch.empty(rows, segments, 2, dtype=torch.float32, device=q.device)
    states = torch.empty(rows, segments, call.D, dtype=torch.float32, device=q.device)
    grid = (tiles * call.KV, -(-segments // each))
    launch(segments_kernel, grid, q, k, v, sums, states, *given, segments, grid[1], call.KV, **constants)
    launch_fold(launch, sums, states, out, lse, args, segment, tangent=tangent)
    return out, lse
