"""New rows of chunks in portable Triton: NVIDIA, AMD, and the CPU interpreter. Two kernels:

rows_kernel     one program per sequence and value head: what does not depend on V. Sums of gates, the new
                rows of A and T, and the factors w (of S) and P (of v_new). More programs of the same launch,
                one per tile of V, first close a chunk that is full.
values_kernel   one program per sequence, value head and tile of V: u, v_new and out. S is read here, once,
                in 16 bits.

A call with more than one token launches them twice: for the rows up to the end of a sequence's chunk, and
for those of its next chunk. Within a launch nothing is written that another program reads: rows_kernel reads
the cached rows of the chunk and writes T and scratch memory, values_kernel writes the rows. Counts are read
by rows_kernel only, which leaves them in scratch memory, and written by values_kernel.

Rows that do not exist, and k-groups of them, are zeros: a step of zeros leaves a chain as it is. So a row has
the bits that it has in a whole chunk. A zero of T or P times an infinity would be NaN: if a later row of the
same call is not finite, rows are multiplied one by one, with later rows as zeros.

Whatever slots, lengths and counts are in memory, they are clamped before they become addresses.
"""

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.host.temperature import LOG2E
from isobit.kernels.triton.chain import fma, product
from isobit.kernels.triton.interpreter import narrow
from isobit.ops.gated_delta_rule.kernels_triton import l2norm
from isobit.ops.gated_delta_rule_step import state

CHUNK, PLACE = tl.constexpr(state.CHUNK), tl.constexpr(state.PLACE)

#: Rows of a tile of new rows: the least that a matrix instruction takes.
TILE = tl.constexpr(16)

#: Rows of T that are loaded at once.
AHEAD = tl.constexpr(16)

_LOG2E = tl.constexpr(LOG2E)

#: Fields of a sequence in scratch memory: slot or -1, its first new row, the half of the state, how many new
#: rows, how many rows of the call came before them, chunks and the first stored chunk after the call, and
#: whether there is a state at the start of the chunk.
FIELDS = tl.constexpr(8)

_STRIDES = [f"{name}_s{of}" for name in ("q", "k", "v", "g", "beta") for of in ("b", "t", "h")]
_SIZES = ["slots", "lengths", "later", "SLOTS", "T", *_STRIDES]


@triton.jit
def any_infinite(x):
    """Whether an element is NaN or infinite."""
    size = tl.abs(x.to(tl.float32))
    return tl.max(tl.max(tl.where(size < float("inf"), 0, 1), 1), 0) > 0


@triton.jit
def up_to_each(left, right, begin, MANY: tl.constexpr):
    """Row i of `left` [TILE, CHUNK] times the rows of `right` up to `begin + i`: later ones are zeros."""
    zeros = tl.zeros([left.shape[0], right.shape[1]], tl.float32)
    total = product(left, right, zeros)
    if MANY:
        total = exact_rows(left, right, zeros, total, begin)
    return total


@triton.jit
def exact_rows(left, right, start, total, begin):
    """`total`, or, if `right` is not finite, row by row from `start`."""
    if any_infinite(right):
        row, j = tl.arange(0, TILE), tl.arange(0, CHUNK)
        for i in range(TILE):
            seen = tl.where((j <= begin + i)[:, None], right.to(tl.float32), 0.0).to(right.dtype)
            total = tl.where((row == i)[:, None], product(left, seen, start), total)
    return total


@triton.jit
def counts_of(place, slots, lengths, b, first, SLOTS, T):
    """(whether the sequence takes part, its slot, rows, chunks, whether the first state was given, new rows)
    from unchecked integers. `first` rows of the call are done."""
    slot = b
    if slots is not None:
        slot = tl.load(slots + b).to(tl.int64)
    there = (slot >= 0) & (slot < SLOTS)
    slot = tl.where(there, slot, 0)
    at = place + slot * PLACE
    rows = tl.minimum(tl.maximum(tl.load(at, mask=there, other=0), 0), CHUNK)
    chunks = tl.load(at + 1, mask=there, other=0)
    oldest = tl.load(at + 2, mask=there, other=0)
    seeded = tl.load(at + 3, mask=there, other=0)
    count = tl.zeros([], tl.int32) + T
    if lengths is not None:
        count = tl.minimum(tl.maximum(tl.load(lengths + b), 0), T).to(tl.int32)
    count = tl.where(there, count - first, 0)
    return there, slot, rows, chunks, oldest, seeded, count


@triton.jit
def close_tile(
    start, start16, k_rows, vn_rows, gate_rows, old, new, hv, tile, held, H, HV, K: tl.constexpr, V,
    BV: tl.constexpr,
):  # fmt: skip
    """The state at the start of the next chunk, for BV columns. `old` and `new` are the halves of slots that
    hold the two chunks."""
    j, d, e = tl.arange(0, CHUNK), tl.arange(0, K), tile * BV + tl.arange(0, BV)
    h = hv // (HV // H)
    at_rows = (old * HV + hv) * CHUNK
    g2 = tl.load(gate_rows + at_rows + j) * _LOG2E
    last = tl.load(gate_rows + at_rows + CHUNK - 1) * _LOG2E
    vn = tl.load(vn_rows + (at_rows + j)[:, None] * V + e[None, :]).to(tl.float32)
    decayed = narrow(vn * tl.exp2(last - g2)[:, None], start16)
    k = tl.load(k_rows + ((old * H + h) * CHUNK + j)[None, :] * K + d[:, None])
    inside = d.to(tl.int64)[:, None] * V + e[None, :]
    S = tl.load(start + (old * HV + hv) * K * V + inside, mask=(inside >= 0) & held, other=0.0)
    S = product(k, decayed, S * tl.exp2(last))
    to = (new * HV + hv) * K * V + inside
    tl.store(start + to, S)
    tl.store(start16 + to, narrow(S, start16))


@triton.jit(do_not_specialize=_SIZES)
def rows_kernel(
    q, k, g, beta, slots, lengths, start, start16, k_rows, vn_rows, inverse, beta_rows, gate_rows, place,
    before, now, gates, minus_a, w, p, later, SLOTS, T, H, HV, V,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, g_sb, g_st, g_sh, beta_sb, beta_st, beta_sh,
    K: tl.constexpr, BV: tl.constexpr, HALVES: tl.constexpr, MANY: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """What does not depend on V, for new rows of one chunk; and the closing of the chunk before it. Strides
    of q and k are in words of WORD elements."""
    q_sb, q_st, q_sh = q_sb.to(tl.int64) * WORD, q_st.to(tl.int64) * WORD, q_sh.to(tl.int64) * WORD
    k_sb, k_st, k_sh = k_sb.to(tl.int64) * WORD, k_st.to(tl.int64) * WORD, k_sh.to(tl.int64) * WORD
    tiles = V // BV
    part, item = tl.program_id(0) % (tiles + 1), (tl.program_id(0) // (tiles + 1)).to(tl.int64)
    b, hv = item // HV, item % HV
    # Rows that the launches before did.
    first = tl.load(before + b * FIELDS + 3, mask=later != 0, other=0)
    there, slot, rows, chunks, oldest, seeded, left = counts_of(place, slots, lengths, b, first, SLOTS, T)
    full = (rows == CHUNK) & (left > 0)
    old = slot * HALVES + (chunks & (HALVES - 1))
    held = (chunks != 0) | (seeded != 0)
    if full:
        oldest = chunks + (2 - HALVES)
        chunks = chunks + 1
        rows = rows * 0
    half = slot * HALVES + (chunks & (HALVES - 1))
    count = tl.minimum(left, -rows + CHUNK)
    if part > 0:
        if full:
            close_tile(
                start, start16, k_rows, vn_rows, gate_rows, old, half, hv, part - 1, held, H, HV, K, V, BV
            )
    elif count > 0:
        new_rows(
            q, k, g, beta, k_rows, inverse, beta_rows, gate_rows, gates, minus_a, w, p, b, hv, half, rows,
            first, count, T, H, HV, q_sb, q_st, q_sh, k_sb, k_st, k_sh, g_sb, g_st, g_sh, beta_sb, beta_st,
            beta_sh, K, MANY,
        )  # fmt: skip
    if (part == 0) & (hv == 0):
        to = now + b * FIELDS
        tl.store(to, tl.where(there, slot, -1).to(tl.int32))
        tl.store(to + 1, rows)
        tl.store(to + 2, (chunks & (HALVES - 1)))
        tl.store(to + 3, count)
        tl.store(to + 4, first)
        tl.store(to + 5, chunks)
        tl.store(to + 6, oldest)
        tl.store(to + 7, ((chunks != 0) | (seeded != 0)).to(tl.int32))


@triton.jit
def new_rows(
    q, k, g, beta, k_rows, inverse, beta_rows, gate_rows, gates, minus_a, w, p, b, hv, half, rows, first,
    count, T, H, HV, q_sb, q_st, q_sh, k_sb, k_st, k_sh, g_sb, g_st, g_sh, beta_sb, beta_st, beta_sh,
    K: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Rows `rows` to `rows + count` of a chunk are tokens `first` and following of sequence b."""
    h = hv // (HV // H)
    at_rows = (half * HV + hv) * CHUNK
    # Gates are summed one after another, from the chunk's start.
    total = tl.load(gate_rows + at_rows + rows - 1, mask=rows > 0, other=0.0)
    for i in range(count):
        if g is not None:
            total += tl.load(g + b * g_sb + (first + i).to(tl.int64) * g_st + hv * g_sh).to(tl.float32)
        tl.store(gates + (b * T + first + i) * HV + hv, total)
    tl.debug_barrier()
    j, d, i_tile = tl.arange(0, CHUNK), tl.arange(0, K), tl.arange(0, TILE)
    cached, fresh = j < rows, (j >= rows) & (j < rows + count)
    token = tl.where(fresh, first + j - rows, 0).to(tl.int64)
    g2 = tl.load(gate_rows + at_rows + j, mask=cached, other=0.0)
    g2 += tl.load(gates + (b * T + token) * HV + hv, mask=fresh, other=0.0)
    g2 = g2 * _LOG2E
    betas = tl.load(beta_rows + at_rows + j, mask=cached, other=0.0)
    own = tl.load(beta + b * beta_sb + token * beta_st + hv * beta_sh, mask=fresh, other=0.0)
    betas = tl.where(fresh, own.to(tl.float32), betas)
    at_k = k + b * k_sb + h * k_sh
    keys = tl.load(
        k_rows + ((half * H + h) * CHUNK + j)[:, None] * K + d[None, :], mask=cached[:, None], other=0.0
    )
    own_keys = tl.load(at_k + (token * k_st)[:, None] + d[None, :], mask=fresh[:, None], other=0.0)
    keys = tl.where(fresh[:, None], own_keys, keys)
    bk = narrow(keys.to(tl.float32) * (betas * tl.exp2(g2))[:, None], w)
    scratch = minus_a + (b * HV + hv) * (TILE * CHUNK)
    columns = inverse + at_rows * CHUNK + j
    for done in range(0, count, TILE):
        few = tl.minimum(count - done, TILE)
        live = i_tile < few
        row = rows + done + i_tile
        its = tl.where(live, first + done + i_tile, 0).to(tl.int64)
        k_t = tl.load(at_k + (its * k_st)[:, None] + d[None, :], mask=live[:, None], other=0.0)
        q_t = tl.load(
            q + b * q_sb + h * q_sh + (its * q_st)[:, None] + d[None, :], mask=live[:, None], other=0.0
        )
        g2_t = tl.load(gates + (b * T + its) * HV + hv, mask=live, other=0.0) * _LOG2E
        beta_t = tl.load(beta + b * beta_sb + its * beta_st + hv * beta_sh, mask=live, other=0.0)
        decay = tl.exp2(g2_t[:, None] - g2[None, :])
        zeros = tl.zeros([TILE, CHUNK], tl.float32)
        kk = product(k_t, tl.trans(keys), zeros)
        below = (j[None, :] < row[:, None]) & live[:, None]
        a = tl.where(below, kk * (beta_t.to(tl.float32)[:, None] * decay), 0.0)
        tl.store(scratch + i_tile[:, None] * CHUNK + j[None, :], -a)
        tl.debug_barrier()
        for i in range(few):
            t = rows + done + i
            acc = tl.where(j == t, 1.0, 0.0)
            for from_row in range(0, t, AHEAD):
                for n in tl.static_range(AHEAD):
                    of = from_row + n
                    factor = tl.load(scratch + i * CHUNK + of)
                    above = tl.load(columns + of * CHUNK, mask=(j >= 0) & (of < t), other=0.0)
                    acc = fma(tl.zeros([CHUNK], tl.float32) + factor, above, acc)
            tl.store(columns + t * CHUNK, tl.where(j <= t, acc, 0.0))
            tl.debug_barrier()
        at_t = (at_rows + row)[:, None] * CHUNK + j[None, :]
        upto = (j[None, :] <= row[:, None]) & live[:, None]
        t_rows = narrow(tl.load(inverse + at_t, mask=upto, other=0.0), w)
        seen = tl.where((j < rows + done + few)[:, None], bk.to(tl.float32), 0.0).to(bk.dtype)
        w_t = up_to_each(t_rows, seen, rows + done, MANY)
        at = (b * T + its) * HV + hv
        tl.store(w + at[:, None] * K + d[None, :], narrow(w_t, w), mask=live[:, None])
        qk = product(q_t, tl.trans(keys), zeros)
        tl.store(p + at[:, None] * CHUNK + j[None, :], narrow(tl.where(upto, qk * decay, 0.0), p),
                 mask=live[:, None])  # fmt: skip


@triton.jit(do_not_specialize=["later", "T", *_STRIDES, "scale"])
def values_kernel(
    q, k, v, beta, start16, k_rows, bv_rows, vn_rows, inverse, beta_rows, gate_rows, place,
    now, gates, w, p, out, scale, later, T, H, HV, V,
    q_sb, q_st, q_sh, k_sb, k_st, k_sh, v_sb, v_st, v_sh, beta_sb, beta_st, beta_sh,
    K: tl.constexpr, BV: tl.constexpr, HALVES: tl.constexpr, MANY: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """u, v_new and out of new rows, for BV columns; and everything that later calls read. Strides of q, k and
    v are in words of WORD elements."""
    q_sb, q_st, q_sh = q_sb.to(tl.int64) * WORD, q_st.to(tl.int64) * WORD, q_sh.to(tl.int64) * WORD
    k_sb, k_st, k_sh = k_sb.to(tl.int64) * WORD, k_st.to(tl.int64) * WORD, k_sh.to(tl.int64) * WORD
    v_sb, v_st, v_sh = v_sb.to(tl.int64) * WORD, v_st.to(tl.int64) * WORD, v_sh.to(tl.int64) * WORD
    tiles = V // BV
    tile, item = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, hv = item // HV, item % HV
    h = hv // (HV // H)
    own = now + b * FIELDS
    slot = tl.load(own).to(tl.int64)
    rows, count, first = tl.load(own + 1), tl.load(own + 3), tl.load(own + 4)
    half = slot * HALVES + tl.load(own + 2)
    held = tl.load(own + 7) != 0
    j, d, i_tile = tl.arange(0, CHUNK), tl.arange(0, K), tl.arange(0, TILE)
    e = tile * BV + tl.arange(0, BV)
    if later == 0:  # rows that are not there, and those of the later launches for now
        for done in range(0, T, TILE):
            i = done + i_tile
            at = ((b * T + i) * HV + hv)[:, None] * V + e[None, :]
            nothing = tl.zeros([TILE, BV], tl.float32).to(out.dtype.element_ty)
            tl.store(out + at, nothing, mask=((i >= count) & (i < T))[:, None])
    if count > 0:
        at_rows = (half * HV + hv) * CHUNK
        inside = d.to(tl.int64)[:, None] * V + e[None, :]
        S = tl.load(start16 + (half * HV + hv) * K * V + inside, mask=(inside >= 0) & held, other=0.0)
        cached, fresh = j < rows, (j >= rows) & (j < rows + count)
        token = tl.where(fresh, first + j - rows, 0).to(tl.int64)
        at_v = (at_rows + j)[:, None] * V + e[None, :]
        bv = tl.load(bv_rows + at_v, mask=cached[:, None], other=0.0)
        betas = tl.load(beta + b * beta_sb + token * beta_st + hv * beta_sh, mask=fresh, other=0.0)
        new_v = tl.load(
            v + b * v_sb + hv * v_sh + (token * v_st)[:, None] + e[None, :], mask=fresh[:, None], other=0.0
        )
        new_bv = narrow(betas.to(tl.float32)[:, None] * new_v.to(tl.float32), bv_rows)
        bv = tl.where(fresh[:, None], new_bv, bv)
        tl.store(bv_rows + at_v, new_bv, mask=fresh[:, None])
        for done in range(0, count, TILE):
            few = tl.minimum(count - done, TILE)
            live = i_tile < few
            row = rows + done + i_tile
            its = tl.where(live, first + done + i_tile, 0).to(tl.int64)
            at = (b * T + its) * HV + hv
            at_t = (at_rows + row)[:, None] * CHUNK + j[None, :]
            upto = (j[None, :] <= row[:, None]) & live[:, None]
            t_rows = narrow(tl.load(inverse + at_t, mask=upto, other=0.0), bv_rows)
            there = (j < rows + done + few)[:, None]
            seen = tl.where(there, bv.to(tl.float32), 0.0).to(bv.dtype)
            u = narrow(up_to_each(t_rows, seen, rows + done, MANY), bv_rows).to(tl.float32)
            w_t = tl.load(w + at[:, None] * K + d[None, :], mask=live[:, None], other=0.0)
            zeros = tl.zeros([TILE, BV], tl.float32)
            vn = narrow(u - product(w_t, S, zeros), vn_rows)
            to = (at_rows + row)[:, None] * V + e[None, :]
            tl.store(vn_rows + to, vn, mask=live[:, None])
            tl.debug_barrier()
            vns = tl.load(vn_rows + at_v, mask=there & (at_v >= 0), other=0.0)
            q_t = tl.load(
                q + b * q_sb + h * q_sh + (its * q_st)[:, None] + d[None, :], mask=live[:, None], other=0.0
            )
            g2_t = tl.load(gates + at, mask=live, other=0.0) * _LOG2E
            p_t = tl.load(p + at[:, None] * CHUNK + j[None, :], mask=live[:, None], other=0.0)
            begun = product(q_t, S, zeros) * tl.exp2(g2_t)[:, None]
            acc = product(p_t, vns, begun)
            if MANY:
                acc = exact_rows(p_t, vns, begun, acc, rows + done)
            tl.store(out + at[:, None] * V + e[None, :], narrow(acc * scale, out), mask=live[:, None])
        if tile == 0:
            keep = j < count
            its = tl.where(keep, first + j, 0).to(tl.int64)
            if hv % (HV // H) == 0:
                given = tl.load(
                    k + b * k_sb + h * k_sh + (its * k_st)[:, None] + d[None, :],
                    mask=keep[:, None],
                    other=0.0,
                )
                to = ((half * H + h) * CHUNK + rows + j)[:, None] * K + d[None, :]
                tl.store(k_rows + to, given, mask=keep[:, None])
            sums = tl.load(gates + (b * T + its) * HV + hv, mask=keep, other=0.0)
            tl.store(gate_rows + at_rows + rows + j, sums, mask=keep)
            factors = tl.load(beta + b * beta_sb + its * beta_st + hv * beta_sh, mask=keep, other=0.0)
            tl.store(beta_rows + at_rows + rows + j, factors.to(tl.float32), mask=keep)
            if hv == 0:
                tl.store(place + slot * PLACE, rows + count)
                tl.store(place + slot * PLACE + 1, tl.load(own + 5))
                tl.store(place + slot * PLACE + 2, tl.load(own + 6))


def columns_of(B: int, HV: int) -> int:
    """Columns of V per program: fewer where there are few programs. This affects no sum."""
    return 32 if B * HV <= 64 else 64


def _registers(count: int, K: int, T: int) -> dict[str, int]:
    """The limit on registers per thread for calls with one token. They wait for memory most of the time, so
    programs that share an SM decide the speed. These are the fewest that ptxas 12.8 needs without spilling,
    in steps of one more program. K = 256 and more tokens need all there are."""
    return {"maxnreg": count} if T == 1 and K <= 128 and torch.version.hip is None else {}


def strides_of(t: Tensor | None) -> list[int]:
    """Of the first three dimensions; 0 where there is one element, of which no stride is used."""
    return (
        [0, 0, 0] if t is None else [s if n > 1 else 0 for n, s in zip(t.shape, t.stride(), strict=True)][:3]
    )


def rows(launch: Launch = run, **args: Any) -> Tensor:
    q, k, v, g, beta = (args[name] for name in ("q", "k", "v", "g", "beta"))
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    out = torch.empty((B, T, HV, V), dtype=q.dtype, device=q.device)
    if B == 0 or T == 0:
        return out
    if args["use_qk_l2norm_in_kernel"]:
        q, k = l2norm(q, launch), l2norm(k, launch)
    # The counts of both pairs of launches: the second reads those of the first.
    counts = torch.empty((2, B, FIELDS.value), dtype=torch.int32, device=q.device)
    gates = torch.empty((B, T, HV), dtype=torch.float32, device=q.device)
    minus_a = torch.empty((B, HV, TILE.value, CHUNK.value), dtype=torch.float32, device=q.device)
    w = torch.empty((B, T, HV, K), dtype=q.dtype, device=q.device)
    p = torch.empty((B, T, HV, CHUNK.value), dtype=q.dtype, device=q.device)
    slots, lengths = (None if args[n] is None else args[n].contiguous() for n in ("slots", "lengths"))
    of = {n: args[n] for n in state.TENSORS}
    BV = columns_of(B, HV)
    strides = {n: strides_of(t) for n, t in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))}
    # What all rows of q, k and v are aligned to, at most 16 bytes: so loads are as wide.
    word = gcd(16 // q.element_size(), *strides["q"], *strides["k"], *strides["v"])
    for name in ("q", "k", "v"):
        strides[name] = [s // word for s in strides[name]]
    for later in range(1 + (T > 1)):
        before, now = counts[0], counts[later]
        options: dict[str, Any] = {
            "K": K, "BV": BV, "HALVES": of["start"].shape[1], "MANY": T > 1, "WORD": word, "num_warps": 4,
            "num_stages": 2, "enable_fp_fusion": False,
        }  # fmt: skip
        launch(
            rows_kernel, (B * HV * (V // BV + 1),),
            q, k, g, beta, slots, lengths, of["start"], of["start16"], of["k_rows"], of["vn_rows"],
            of["inverse"], of["beta_rows"], of["gate_rows"], of["place"], before, now, gates, minus_a, w,
            p, later, of["start"].shape[0], T, H, HV, V,
            *strides["q"], *strides["k"], *strides["g"], *strides["beta"], **options,
            **_registers(168, K, T),
        )  # fmt: skip
        launch(
            values_kernel, (B * HV * (V // BV),),
            q, k, v, beta, of["start16"], of["k_rows"], of["bv_rows"], of["vn_rows"], of["inverse"],
            of["beta_rows"], of["gate_rows"], of["place"], now, gates, w, p, out, float(args["scale"]),
            later, T, H, HV, V,
            *strides["q"], *strides["k"], *strides["v"], *strides["beta"], **options,
            **_registers(128, K, T),
        )  # fmt: skip
    return out
