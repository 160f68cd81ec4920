"""One new row of a sequence in portable Triton: the kernel of plain decoding.

Matrix instructions take 16 rows at least, and there are two to multiply: q and k with the keys, q and w with
S. So they are two rows of one tile, and each matrix is read once.
"""

import triton
import triton.language as tl

from isobit.kernels.host.temperature import LOG2E
from isobit.kernels.triton.chain import fma, product
from isobit.kernels.triton.interpreter import narrow
from isobit.ops.attention.kernels_triton import row_sums
from isobit.ops.gated_delta_rule.model import EPS
from isobit.ops.gated_delta_rule_step.kernels_triton_chunk import CHUNK, TILE, close_tile, counts_of

_LOG2E, _EPS = tl.constexpr(LOG2E), tl.constexpr(float(EPS))

_STRIDES = [f"{name}_s{of}" for name in ("q", "k", "v", "g", "beta") for of in ("b", "h")]


@triton.jit
def unit_rows(x):
    """Rows divided by their norm, with the operations of `norm_kernel`."""
    size = tl.sqrt_rn(row_sums(x * x) + _EPS)
    return x * tl.div_rn(tl.full([x.shape[0]], 1.0, tl.float32), size)[:, None]


@triton.jit
def row_of(tile, row):
    """One row of a tile in registers. Adding -0.0 changes nothing."""
    here = tl.arange(0, tile.shape[0]) == row
    return tl.sum(tl.where(here[:, None], tile.to(tl.float32), -0.0), 0)


@triton.jit
def pair(first, second, ROWS: tl.constexpr):
    """[ROWS, n] with these two rows first. Others are zeros."""
    i = tl.arange(0, ROWS)[:, None]
    return tl.where(i == 0, first[None, :], tl.where(i == 1, second[None, :], tl.zeros_like(first)[None, :]))


@triton.jit(do_not_specialize=["SLOTS", *_STRIDES, "scale"])
def token_kernel(
    q, k, v, g, beta, slots, lengths, start, start16, k_rows, bv_rows, vn_rows, inverse, beta_rows, gate_rows,
    place, minus_a, new_k, new_gates, out, scale, SLOTS, H, HV, V,
    q_sb, q_sh, k_sb, k_sh, v_sb, v_sh, g_sb, g_sh, beta_sb, beta_sh,
    K: tl.constexpr, BV: tl.constexpr, HALVES: tl.constexpr, NORM: tl.constexpr, WORD: tl.constexpr,
):  # fmt: skip
    """One new row of a sequence, for BV columns, and what later calls read, but for what `keep_kernel` writes.
    Tiles have k, or what becomes of it, in row 0 and q in row 1. Strides of q, k and v are in words of WORD
    elements."""
    tiles = V // BV
    tile, item = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, hv = item // HV, item % HV
    h = hv // (HV // H)
    there, slot, rows, chunks, _, seeded, left = counts_of(place, slots, lengths, b, 0, SLOTS, 1)
    i, j, d = tl.arange(0, TILE), tl.arange(0, CHUNK), tl.arange(0, K)
    e = tile * BV + tl.arange(0, BV)
    to = (b * HV + hv) * V + e
    if left <= 0:
        tl.store(out + to, tl.zeros([BV], tl.float32).to(out.dtype.element_ty))
        return
    old = slot * HALVES + (chunks & (HALVES - 1))
    held = (chunks != 0) | (seeded != 0)
    if rows == CHUNK:
        half = slot * HALVES + ((chunks + 1) & (HALVES - 1))
        close_tile(start, start16, k_rows, vn_rows, gate_rows, old, half, hv, tile, held, H, HV, K, V, BV)
        tl.debug_barrier()  # other threads of this program read it
        old = half
        held = rows == CHUNK
        rows = rows * 0
    at_rows = (old * HV + hv) * CHUNK
    cached, own = j < rows, j == rows
    # Loads that do not wait for each other come first.
    k_t = tl.load(k + b * (k_sb * WORD) + h * (k_sh * WORD) + d)
    q_t = tl.load(q + b * (q_sb * WORD) + h * (q_sh * WORD) + d)
    v_t = tl.load(v + b * (v_sb * WORD) + hv * (v_sh * WORD) + e)
    beta_t = tl.load(beta + b * beta_sb + hv * beta_sh).to(tl.float32)
    gate_t = tl.load(gate_rows + at_rows + rows - 1, mask=rows > 0, other=0.0)
    if g is not None:
        gate_t += tl.load(g + b * g_sb + hv * g_sh).to(tl.float32)
    gates = tl.load(gate_rows + at_rows + j, mask=cached, other=0.0)
    betas = tl.load(beta_rows + at_rows + j, mask=cached, other=0.0)
    at_k = ((old * H + h) * CHUNK + j)[:, None] * K + d[None, :]
    keys = tl.load(k_rows + at_k, mask=cached[:, None], other=0.0)
    columns = inverse + at_rows * CHUNK + j
    above = ()
    for of in tl.static_range(CHUNK - 1):
        above = above + (tl.load(columns + of * CHUNK, mask=(j <= of) & (rows > of), other=0.0),)
    at_v = (at_rows + j)[:, None] * V + e[None, :]
    bv = tl.load(bv_rows + at_v, mask=cached[:, None], other=0.0)
    inside = d.to(tl.int64)[:, None] * V + e[None, :]
    S = tl.load(start16 + (old * HV + hv) * K * V + inside, mask=(inside >= 0) & held, other=0.0)
    vn = tl.load(vn_rows + at_v, mask=cached[:, None], other=0.0)
    if NORM:
        both = pair(k_t, q_t, 2).to(tl.float32)
        both = unit_rows(both)
        k_t, q_t = narrow(row_of(both, 0), k_rows), narrow(row_of(both, 1), k_rows)
    zeros = tl.zeros([TILE, CHUNK], tl.float32)
    keys = tl.where(own[:, None], k_t[None, :], keys)
    by_keys = product(pair(k_t, q_t, TILE), tl.trans(keys), zeros)
    g2_t = gate_t * _LOG2E
    g2 = tl.where(own, gate_t, gates) * _LOG2E
    betas = tl.where(own, beta_t, betas)
    decay = tl.exp2(g2_t - g2)
    a = tl.where(cached, row_of(by_keys, 0) * (beta_t * decay), 0.0)
    scratch = minus_a + tl.program_id(0).to(tl.int64) * CHUNK
    tl.store(scratch + j, -a)
    tl.debug_barrier()  # all threads read it
    p = narrow(tl.where(cached | own, row_of(by_keys, 1) * decay, 0.0), out)
    bk = narrow(keys.to(tl.float32) * (betas * tl.exp2(g2))[:, None], out)
    factors = ()
    for of in tl.static_range(CHUNK - 1):
        factors = factors + (tl.load(scratch + of),)
    acc = tl.where(own, 1.0, 0.0)
    for of in tl.static_range(CHUNK - 1):
        acc = fma(tl.zeros([CHUNK], tl.float32) + factors[of], above[of], acc)
    acc = tl.where(cached | own, acc, 0.0)
    row = narrow(acc, out)
    only = pair(row, tl.zeros_like(row), TILE)
    w = narrow(product(only, bk, tl.zeros([TILE, K], tl.float32)), out)
    bv_t = narrow(beta_t * v_t.to(tl.float32), bv_rows)
    bv = tl.where(own[:, None], bv_t[None, :], bv)
    u = narrow(product(only, bv, tl.zeros([TILE, BV], tl.float32)), bv_rows).to(tl.float32)
    w = tl.where((i == 0)[:, None], w, pair(q_t, q_t, TILE))
    by_S = product(w, S, tl.zeros([TILE, BV], tl.float32))
    vn_t = narrow(row_of(u - by_S, 0), vn_rows)
    vn = tl.where(own[:, None], vn_t[None, :], vn)
    result = product(pair(tl.zeros_like(p), p, TILE), vn, by_S * tl.exp2(g2_t))
    tl.store(out + to, narrow(row_of(result, 1) * scale, out))
    tl.store(bv_rows + (at_rows + rows) * V + e, bv_t)
    tl.store(vn_rows + (at_rows + rows) * V + e, vn_t)
    if tile == 0:
        tl.store(columns + rows * CHUNK, acc)
        tl.store(new_gates + b * HV + hv, gate_t)
        tl.store(beta_rows + at_rows + rows, beta_t)
        if hv % (HV // H) == 0:
            tl.store(new_k + (b * H + h) * K + d, k_t)


@triton.jit(do_not_specialize=["SLOTS"])
def keep_kernel(
    new_k, new_gates, place, slots, lengths, k_rows, gate_rows, SLOTS, H, HV, K: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """What programs of the same sequence read in `token_kernel`, after its new row: counts, and keys and gates,
    by which each of them may have closed the chunk before."""
    b = tl.program_id(0).to(tl.int64)
    there, slot, rows, chunks, _, _, left = counts_of(place, slots, lengths, b, 0, SLOTS, 1)
    if left <= 0:
        return
    full = rows == CHUNK
    chunks = tl.where(full, chunks + 1, chunks)
    row = tl.where(full, 0, rows)
    half = slot * HALVES + (chunks & (HALVES - 1))
    d = tl.arange(0, K)
    for first in range(0, H, TILE):
        h = first + tl.arange(0, TILE)
        own = tl.load(new_k + (b * H + h)[:, None] * K + d[None, :], mask=(h < H)[:, None], other=0.0)
        tl.store(k_rows + ((half * H + h) * CHUNK + row)[:, None] * K + d[None, :], own, mask=(h < H)[:, None])
    for first in range(0, HV, CHUNK):
        hv = first + tl.arange(0, CHUNK)
        own = tl.load(new_gates + b * HV + hv, mask=hv < HV, other=0.0)
        tl.store(gate_rows + (half * HV + hv) * CHUNK + row, own, mask=hv < HV)
    tl.debug_barrier()  # all threads have read the counts
    at = place + slot * 4
    tl.store(at, row + 1)
    if full:
        tl.store(at + 1, chunks)
        tl.store(at + 2, chunks + (1 - HALVES))
