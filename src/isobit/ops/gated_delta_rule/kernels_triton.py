"""The gated delta rule in portable Triton: NVIDIA, AMD, and the CPU interpreter. Steps are as in the class.

    gates_kernel     step 1         one program per chunk and some value heads
    prepare_kernel   steps 2 to 4   one program per chunk and value head: u, w
    fold_kernel      step 4         the same from a given T
    states_kernel    steps 5, 7     one program per sequence, value head and BV columns of the state, from the
                                    first chunk to the last: h (states at the starts of chunks), v_new
    output_kernel    step 6         one program per chunk, value head and BV columns

Tiles of packed sequences: sequence s has the chunks from tile cu_seqlens[s] // 64 + s on. That leaves enough
tiles for all sequences before it, and some are empty. So the host need not know where sequences begin.

Every edge is masked: missing tokens, features and columns are zeros, which change no sum. Where only the
order of one element's sum matters, the compiler may choose layouts; it may not choose an order, so products
are `product`, and a row is selected by adding -0.0 to it.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.host.temperature import LOG2E
from isobit.kernels.triton.chain import fma, product
from isobit.kernels.triton.interpreter import narrow, rounded
from isobit.ops.attention.kernels_triton import piece_of, row_sums
from isobit.ops.delta_rule.kernels_triton import bounds_of, chunk_offsets
from isobit.ops.gated_delta_rule.model import CHUNK, EPS, why_not

__all__ = ["fwd_h", "gated_delta_rule", "why_not"]

_CHUNK, _LOG2E, _EPS = tl.constexpr(CHUNK), tl.constexpr(LOG2E), tl.constexpr(float(EPS))

#: Columns of T that one static step of the substitution takes: those of one group of registers of a matrix
#: product, so that the selection of a column folds to one register.
_GROUP = tl.constexpr(8)

#: Rows of A that are loaded at once: a load takes longer than a step, and each step that is unrolled makes
#: compiling longer.
_AT_ONCE = tl.constexpr(4)

#: Rows of q and k that one program normalizes.
ROWS = 16

#: Columns of o, u and w at a time, however few there are: with 16 or 32 ptxas 12.8, the one in Triton 3.6 and
#: 3.7, loses the address of an operand (see `isobit.check.sass`).
COLUMNS = 64

#: Heads whose gates one program sums.
HEADS = 32


# Where a chunk is


@triton.jit
def chunk_of(tile, cu_seqlens, T, SEQUENCES):
    """(first row, rows) of the chunk of a tile; no rows if the tile is empty."""
    sequence, first, count, start = piece_of(tile, cu_seqlens, T, SEQUENCES, _CHUNK)
    row = first.to(tl.int64) + start
    if cu_seqlens is None:
        row = sequence.to(tl.int64) * T + start
    return row, tl.minimum(count - start, _CHUNK)


# Products of triangles
#
# Row i of the left factor has zeros after column i. Row i of the product is defined with later rows of the
# right factor replaced by zeros: 0 times an infinity or NaN would be NaN. An infinity or NaN in row i of the
# right factor makes row i of the plain product so. If there is none, the plain product is the result.
# If there is one, rows are computed one by one.


@triton.jit
def not_finite(x):
    """1 if an element is an infinity or NaN, else 0."""
    return tl.max(tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1), 1), 0)


@triton.jit
def up_to(x, i):
    """Rows 0 to i of x; zeros after them."""
    return tl.where((tl.arange(0, _CHUNK) <= i)[:, None], x, tl.zeros_like(x))


@triton.jit
def triangular(left, right, acc, rows):
    """left [64, 64] times right [64, n], added to acc."""
    out = product(left, right, acc)
    if not_finite(right.to(tl.float32)) > 0:
        for i in range(rows):
            own = product(left, up_to(right, i), acc)
            out = tl.where((tl.arange(0, _CHUNK) == i)[:, None], own, out)
    return out


# Kernels


@triton.jit(do_not_specialize=["N"])
def norm_kernel(x, out, norms, N, K: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr):
    """Rows of q or k divided by their norm; and the inverse norms, if `norms` is not None."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i_k = tl.arange(0, BK)
    inside = (row < N)[:, None] & (i_k < K)[None, :]
    own = tl.load(x + row[:, None] * K + i_k[None, :], mask=inside, other=0.0).to(tl.float32)
    size = tl.sqrt_rn(row_sums(own * own) + _EPS)
    inverse = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), size)
    if norms is not None:
        tl.store(norms + row, inverse, mask=row < N)
    own = own * inverse[:, None]
    tl.store(out + row[:, None] * K + i_k[None, :], narrow(own, out), mask=inside)


@triton.jit(do_not_specialize=["T", "SEQUENCES"])
def gates_kernel(g, cu_seqlens, g2, T, SEQUENCES, HV, HEADS: tl.constexpr):
    """Sums of gates within a chunk, token by token, in log2."""
    row, rows = chunk_of(tl.program_id(0), cu_seqlens, T, SEQUENCES)
    hv = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = row * HV + hv
    total = tl.full([HEADS], -0.0, tl.float32)  # which changes no gate that is added to it
    for first in range(0, rows, _GROUP):
        steps = ()  # loads that do not wait for each other
        for i in tl.static_range(_GROUP):
            inside = (hv < HV) & (first + i < rows)
            steps = steps + (tl.load(g + at + (first + i) * HV, mask=inside, other=0.0).to(tl.float32),)
        for i in tl.static_range(_GROUP):
            total += steps[i]
            tl.store(g2 + at + (first + i) * HV, total * _LOG2E, mask=(hv < HV) & (first + i < rows))


@triton.jit
def inverse(system, rows, DTYPE: tl.constexpr):
    """T transposed, [c, i], from -A transposed in memory, `system` [j, i]: column i takes the columns before
    it in ascending order. Only the first `rows` of them exist. A program's own memory holds A, because each
    thread needs a whole row of it at each step. The identity is a product with itself for the sake of its
    layout, in which a row of T is in four threads of a warp: that makes the selection of a column cheap."""
    c, i = tl.arange(0, _CHUNK), tl.arange(0, _CHUNK)
    eye = tl.where(c[:, None] == i[None, :], 1.0, 0.0).to(DTYPE)
    T = product(eye, eye, tl.zeros([_CHUNK, _CHUNK], tl.float32))
    for block in tl.static_range(_CHUNK // _GROUP):
        for first in range(block * _GROUP, tl.minimum(rows, (block + 1) * _GROUP), _AT_ONCE):
            at = system + first * _CHUNK + i
            loaded = ()  # loads that do not wait for each other
            for s in tl.static_range(_AT_ONCE):
                loaded = loaded + (tl.load(at + s * _CHUNK),)
            for s in tl.static_range(_AT_ONCE):
                j = first + s
                here = (i // _GROUP == block) & (i % _GROUP == j % _GROUP)
                t = tl.sum(tl.where(here[None, :], T, -0.0), 1)
                t = tl.where(c <= j, t, 0.0)
                after = (i // _GROUP > block) | ((i // _GROUP == block) & (i % _GROUP > j % _GROUP))
                a = tl.broadcast_to(loaded[s][None, :], T.shape)
                T = tl.where(after[None, :], fma(a, t[:, None], T), T)
    return tl.where(c[:, None] <= i[None, :], T, 0.0)


@triton.jit
def rows_times(at, inside, factor, DTYPE: tl.constexpr):
    """Rows at these addresses, each times its factor."""
    return rounded(factor[:, None] * tl.load(at, mask=inside, other=0.0).to(tl.float32), DTYPE)


@triton.jit
def fold_columns(Tb, at, to, inside, factor, rows, BN: tl.constexpr):
    """T times rows that are multiplied by a factor, for BN columns. If something is not finite, rows are
    loaded again, from places that the compiler does not know to be the same: so they, and their addresses,
    occupy no registers until then."""
    zeros = tl.zeros([_CHUNK, BN], tl.float32)
    own = product(Tb, rows_times(at, inside, factor, Tb.dtype), zeros)
    tl.store(to, narrow(own, to), mask=inside)
    wrong = not_finite(own)
    if wrong > 0:
        tl.debug_barrier()  # several threads may store an element
        at, to = at + (wrong - 1) * 64, to + (wrong - 1) * 64
        for i in tl.range(rows, num_stages=1):
            own = product(Tb, up_to(rows_times(at, inside, factor, Tb.dtype), i), zeros)
            tl.store(to, narrow(own, to), mask=inside & (tl.arange(0, _CHUNK) == i)[:, None])


@triton.jit
def fold(Tb, k, v, u, w, row, live, rows, b, on_k, h, hv, H, HV, K, V, BN: tl.constexpr):
    """u = T (beta v) and w = T (beta 2^g k)."""
    for start in range(0, V, BN):
        col = start + tl.arange(0, BN)
        at = (row * HV + hv)[:, None] * V + col[None, :]
        fold_columns(Tb, v + at, u + at, live[:, None] & (col < V)[None, :], b, rows, BN)
    for start in range(0, K, BN):
        col = start + tl.arange(0, BN)
        at = k + (row * H + h)[:, None] * K + col[None, :]
        to = w + (row * HV + hv)[:, None] * K + col[None, :]
        fold_columns(Tb, at, to, live[:, None] & (col < K)[None, :], on_k, rows, BN)


@triton.jit(do_not_specialize=["T", "SEQUENCES"])
def prepare_kernel(
    k, v, beta, g2, cu_seqlens, systems, u, w, inverses, T, SEQUENCES, H, HV, K, V, BK: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """u and w of a chunk, for one value head; and T, rounded, if `inverses` is given."""
    pid = tl.program_id(0).to(tl.int64)
    hv = pid % HV
    h = hv // (HV // H)
    row, rows = chunk_of((pid // HV).to(tl.int32), cu_seqlens, T, SEQUENCES)
    if rows <= 0:
        return
    r, i_k = tl.arange(0, _CHUNK), tl.arange(0, BK)
    live = r < rows
    row = row + r
    by_k = live[:, None] & (i_k < K)[None, :]
    k_c = tl.load(k + (row * H + h)[:, None] * K + i_k[None, :], mask=by_k, other=0.0)
    b = tl.load(beta + row * HV + hv, mask=live, other=0.0).to(tl.float32)
    kk = product(k_c, tl.trans(k_c), tl.zeros([_CHUNK, _CHUNK], tl.float32))
    # Transposed: A_ij is at [j, i]. A product of k with itself is symmetric to the bit.
    factor = tl.broadcast_to(b[None, :], [_CHUNK, _CHUNK])
    on_k = b
    if g2 is not None:
        g_c = tl.load(g2 + row * HV + hv, mask=live, other=0.0)
        factor = factor * tl.exp2(g_c[None, :] - g_c[:, None])
        on_k = b * tl.exp2(g_c)
    below = (r[:, None] < r[None, :]) & live[None, :]
    system = systems + pid * (_CHUNK * _CHUNK)
    tl.store(system + r[:, None] * _CHUNK + r[None, :], tl.where(below, -(kk * factor), 0.0))
    tl.debug_barrier()  # other threads of this program read it
    solved = inverse(system, rows, k.dtype.element_ty)
    tl.debug_barrier()  # they have read it
    # By way of memory: on Hopper, Triton before 3.7.1 miscompiles products whose left operand is a transposed
    # result of another one.
    tl.store(system + r[None, :] * _CHUNK + r[:, None], solved)
    tl.debug_barrier()
    Tb = rounded(tl.load(system + r[:, None] * _CHUNK + r[None, :]), k.dtype.element_ty)
    if inverses is not None:
        tl.store(inverses + (row * HV + hv)[:, None] * _CHUNK + r[None, :], Tb, mask=live[:, None])
    fold(Tb, k, v, u, w, row, live, rows, b, on_k, h, hv, H, HV, K, V, BN)


@triton.jit(do_not_specialize=["T", "SEQUENCES"])
def fold_kernel(
    k, v, beta, g2, cu_seqlens, inverses, u, w, T, SEQUENCES, H, HV, K: tl.constexpr, V: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """u and w of a chunk, for one value head, from T."""
    pid = tl.program_id(0).to(tl.int64)
    hv = pid % HV
    h = hv // (HV // H)
    row, rows = chunk_of((pid // HV).to(tl.int32), cu_seqlens, T, SEQUENCES)
    if rows <= 0:
        return
    r = tl.arange(0, _CHUNK)
    live = r < rows
    row = row + r
    b = tl.load(beta + row * HV + hv, mask=live, other=0.0).to(tl.float32)
    on_k = b
    if g2 is not None:
        on_k = b * tl.exp2(tl.load(g2 + row * HV + hv, mask=live, other=0.0))
    at = inverses + (row * HV + hv)[:, None] * _CHUNK + r[None, :]
    Tb = tl.load(at, mask=live[:, None], other=0.0)
    fold(Tb, k, v, u, w, row, live, rows, b, on_k, h, hv, H, HV, K, V, BN)


@triton.jit(do_not_specialize=["T", "NT"])
def states_kernel(
    k, w, u, g, gk, initial, cu_seqlens, offsets, h, v_new, final, T, NT, H, HV, K, V, BK: tl.constexpr,
    BV: tl.constexpr, V_FIRST: tl.constexpr,
):  # fmt: skip
    """All chunks of one sequence, for one value head and BV columns of its state. Without `offsets`, the
    first chunk of each packed sequence, states are at the places of tiles."""
    # One dimension: CUDA limits the others to 65535 programs, which thousands of short sequences exceed.
    tiles = tl.cdiv(V, BV)
    tile, item = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    n, hv = item // HV, item % HV
    head = hv // (HV // H)
    if cu_seqlens is not None:
        first, tokens = bounds_of(cu_seqlens, n, T)
        if offsets is not None:
            chunk = tl.load(offsets + n).to(tl.int64)
        else:
            chunk = first // _CHUNK + n
    else:
        first, tokens = n * T, T
        chunk = n * NT
    i_k = tl.arange(0, BK)
    i_v = tile * BV + tl.arange(0, BV)
    in_k, in_v = i_k < K, i_v < V
    inside = in_k[:, None] & in_v[None, :]
    if V_FIRST:
        at = i_v.to(tl.int64)[None, :] * K + i_k[:, None]
    else:
        at = i_k.to(tl.int64)[:, None] * V + i_v[None, :]
    state = (n * HV + hv) * K * V
    S = tl.zeros([BK, BV], tl.float32)
    if initial is not None:
        S = tl.load(initial + state + at, mask=inside, other=0.0).to(tl.float32)
    for c in range(tl.cdiv(tokens, _CHUNK)):
        left = tl.minimum(tokens - c * _CHUNK, _CHUNK)
        t = tl.arange(0, _CHUNK)
        live = t < left
        row = first + c * _CHUNK + t
        Sb = rounded(S, k.dtype.element_ty)
        # Invalid bounds and offsets may name chunks that h does not have.
        fits = ((chunk + c >= 0) & (chunk + c < NT)) | (cu_seqlens is None)
        tl.store(h + ((chunk + c) * HV + hv) * K * V + at, Sb, mask=inside & fits)
        by_k = live[:, None] & in_k[None, :]
        by_v = live[:, None] & in_v[None, :]
        k_c = tl.load(k + (row * H + head)[:, None] * K + i_k[None, :], mask=by_k, other=0.0)
        w_c = tl.load(w + (row * HV + hv)[:, None] * K + i_k[None, :], mask=by_k, other=0.0)
        at_v = (row * HV + hv)[:, None] * V + i_v[None, :]
        X = tl.load(u + at_v, mask=by_v, other=0.0).to(tl.float32)
        X = X - product(w_c, Sb, tl.zeros([_CHUNK, BV], tl.float32))
        Xb = rounded(X, k.dtype.element_ty)
        if v_new is not None:
            tl.store(v_new + at_v, Xb, mask=by_v)
        last = (first + c * _CHUNK + left - 1) * HV + hv
        if g is not None:
            g_c = tl.load(g + row * HV + hv, mask=live, other=0.0)
            g_last = tl.load(g + last)
            # Rows that do not exist are zeros, which an infinite factor would turn to NaN.
            factor = tl.where(live, tl.exp2(g_last - g_c), 0.0)
            Xb = rounded(Xb.to(tl.float32) * factor[:, None], k.dtype.element_ty)
        if gk is not None:
            decay = tl.load(gk + last * K + i_k, mask=in_k, other=0.0)
            if g is not None:
                decay += g_last
            S = S * tl.exp2(decay)[:, None]
        elif g is not None:
            S = S * tl.exp2(g_last)
        S = product(tl.trans(k_c), Xb, S)
    if final is not None:
        tl.store(final + state + at, S, mask=inside)


@triton.jit(do_not_specialize=["T", "SEQUENCES"])
def output_kernel(
    q, k, v_new, g2, h, cu_seqlens, o, scale, T, SEQUENCES, H, HV, K, V, BK: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr,
):  # fmt: skip
    """o of a chunk, for one value head and BV columns."""
    tiles = tl.cdiv(V, BV)
    part, item = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    chunk, hv = item // HV, item % HV
    head = hv // (HV // H)
    row, rows = chunk_of(chunk.to(tl.int32), cu_seqlens, T, SEQUENCES)
    if rows <= 0:
        return
    r, i_k, i_v = tl.arange(0, _CHUNK), tl.arange(0, BK), part * BV + tl.arange(0, BV)
    live, in_k, in_v = r < rows, i_k < K, i_v < V
    row = row + r
    by_k, by_v = live[:, None] & in_k[None, :], live[:, None] & in_v[None, :]
    q_c = tl.load(q + (row * H + head)[:, None] * K + i_k[None, :], mask=by_k, other=0.0)
    k_c = tl.load(k + (row * H + head)[:, None] * K + i_k[None, :], mask=by_k, other=0.0)
    if V_FIRST:
        at = i_v.to(tl.int64)[None, :] * K + i_k[:, None]
    else:
        at = i_k.to(tl.int64)[:, None] * V + i_v[None, :]
    Sb = tl.load(h + (chunk * HV + hv) * K * V + at, mask=in_k[:, None] & in_v[None, :], other=0.0)
    p = product(q_c, tl.trans(k_c), tl.zeros([_CHUNK, _CHUNK], tl.float32))
    acc = product(q_c, Sb, tl.zeros([_CHUNK, BV], tl.float32))
    if g2 is not None:
        g_c = tl.load(g2 + row * HV + hv, mask=live, other=0.0)
        p = p * tl.exp2(g_c[:, None] - g_c[None, :])
        acc = acc * tl.exp2(g_c)[:, None]
    p = tl.where(r[:, None] >= r[None, :], p, 0.0)
    at_v = (row * HV + hv)[:, None] * V + i_v[None, :]
    values = tl.load(v_new + at_v, mask=by_v, other=0.0)
    acc = triangular(rounded(p, q.dtype.element_ty), values, acc, rows)
    tl.store(o + at_v, narrow(acc * scale, o), mask=by_v)


# Launchers

#: Functions like `states`, `prepare` and `outputs`.
States = Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]
Prepare = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]
Finish = Callable[..., tuple[Tensor, Tensor | None]]

_OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}


def _rows_of(K: int) -> int:
    return max(16, triton.next_power_of_2(K))


def columns_of(V: int, most: int) -> int:
    return min(most, max(16, triton.next_power_of_2(V)))


def tiles_of(T: int, sequences: int, cu_seqlens: Tensor | None) -> int:
    """Chunks; for packed sequences an upper bound, wherever they begin."""
    if cu_seqlens is None:
        return sequences * -(-T // CHUNK)
    return T // CHUNK + sequences if sequences else 0


def l2norm(x: Tensor, launch: Launch = run, norms: Tensor | None = None) -> Tensor:
    """Rows divided by their norm, like x. Their inverse norms are stored in `norms`, in fp32."""
    x, N, K = x.contiguous(), x.numel() // x.shape[-1], x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(norm_kernel, (-(-N // ROWS),), x, out, norms, N, K=K, BK=_rows_of(K), ROWS=ROWS, **_OPTIONS)
    return out


def gates(g: Tensor, cu_seqlens: Tensor | None, launch: Launch = run) -> Tensor:
    """g2 [B, T, HV]."""
    B, T, HV = g.shape
    S = B if cu_seqlens is None else len(cu_seqlens) - 1
    g2 = torch.empty(g.shape, dtype=torch.float32, device=g.device)
    grid = (tiles_of(T, S, cu_seqlens), -(-HV // HEADS))
    options = _OPTIONS | {"num_warps": 1}
    launch(gates_kernel, grid, g.contiguous(), cu_seqlens, g2, T, S, HV, HEADS=HEADS, **options)
    return g2


def prepare(
    k: Tensor, v: Tensor, beta: Tensor, g2: Tensor | None, cu_seqlens: Tensor | None, inverses: bool = False,
    launch: Launch = run, normed: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(k, u, w, T rounded to the dtype of k: [B, T, HV, 64], if `inverses`). `normed`: k is divided by its
    norm."""
    if normed:
        k = l2norm(k, launch)
    B, T, HV, V = v.shape
    H, K = k.shape[2:]
    S = B if cu_seqlens is None else len(cu_seqlens) - 1
    programs = tiles_of(T, S, cu_seqlens) * HV
    u, w = torch.empty_like(v), torch.empty(B, T, HV, K, dtype=k.dtype, device=k.device)
    T_b = torch.empty(B, T, HV, CHUNK, dtype=k.dtype, device=k.device) if inverses else None
    systems = torch.empty(programs, CHUNK, CHUNK, dtype=torch.float32, device=k.device)
    launch(
        prepare_kernel, (programs,),
        k, v, beta, g2, cu_seqlens, systems, u, w, T_b, T, S, H, HV, K, V,
        BK=_rows_of(K), BN=COLUMNS, **_OPTIONS,
    )  # fmt: skip
    return k, u, w, T_b


def folded(
    k: Tensor, v: Tensor, beta: Tensor, g2: Tensor | None, cu_seqlens: Tensor | None, inverses: Tensor,
    launch: Launch = run,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(u, w) from T, rounded."""
    B, T, HV, V = v.shape
    H, K = k.shape[2:]
    S = B if cu_seqlens is None else len(cu_seqlens) - 1
    u, w = torch.empty_like(v), torch.empty(B, T, HV, K, dtype=k.dtype, device=k.device)
    launch(
        fold_kernel, (tiles_of(T, S, cu_seqlens) * HV,),
        k, v, beta, g2, cu_seqlens, inverses, u, w, T, S, H, HV, K=K, V=V,
        BN=COLUMNS, **_OPTIONS,
    )  # fmt: skip
    return u, w


def states(
    k: Tensor, w: Tensor, u: Tensor, g: Tensor | None, gk: Tensor | None, initial: Tensor | None,
    cu_seqlens: Tensor | None, offsets: Tensor | None, chunks: int, v_first: bool, want_values: bool,
    want_final: bool, launch: Launch = run,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(h [B, chunks, HV, K, V], v_new, final), those that are wanted."""
    B, T, HV, V = u.shape
    H, K = k.shape[2:]
    S = B if cu_seqlens is None else len(cu_seqlens) - 1
    state = (HV, V, K) if v_first else (HV, K, V)
    h = torch.empty((B, chunks, *state), dtype=k.dtype, device=k.device)
    v_new = torch.empty(u.shape, dtype=u.dtype, device=u.device) if want_values else None
    final = torch.empty((S, *state), dtype=torch.float32, device=k.device) if want_final else None
    BK = _rows_of(K)
    BV = columns_of(V, {256: 16, 128: 32}.get(BK, 64))
    launch(
        states_kernel, (-(-V // BV) * S * HV,),
        k, w, u, g, gk, initial, cu_seqlens, offsets, h, v_new, final, T, chunks, H, HV, K, V,
        BK=BK, BV=BV, V_FIRST=v_first, **_OPTIONS,
    )  # fmt: skip
    return h, v_new, final


def fwd_h(
    launch: Launch = run, carry: States = states, **args: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(h, v_new, final_state) of `chunk_gated_delta_rule_fwd_h`. `carry` computes the states."""
    names = ("k", "w", "u", "g", "gk", "initial_state", "cu_seqlens")
    given: Any = [None if args[name] is None else args[name].contiguous() for name in names]
    chunks = -(-args["k"].shape[1] // CHUNK) if args["cu_seqlens"] is None else len(args["chunk_indices"])
    return carry(
        *given, chunk_offsets(args, launch), chunks, args["state_v_first"],
        args["save_new_value"], args["output_final_state"], launch,
    )  # fmt: skip


def outputs(
    q: Tensor, k: Tensor, w: Tensor, u: Tensor, g2: Tensor | None, initial: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, v_first: bool, want_final: bool, launch: Launch = run,
    normed: bool = False, carry: States = states,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(o, final). `normed`: q is divided by its norm. `carry` computes the states."""
    if normed:
        q = l2norm(q, launch)
    B, T, HV, V = u.shape
    H, K = k.shape[2:]
    S = B if cu_seqlens is None else len(cu_seqlens) - 1
    tiles = tiles_of(T, S, cu_seqlens)
    chunks = -(-T // CHUNK) if cu_seqlens is None else tiles
    h, v_new, final = carry(
        k, w, u, g2, None, initial, cu_seqlens, None, chunks, v_first, True, want_final, launch
    )
    o = torch.empty(u.shape, dtype=q.dtype, device=u.device)
    launch(
        output_kernel, (-(-V // COLUMNS) * tiles * HV,),
        q, k, v_new, g2, h, cu_seqlens, o, scale, T, S, H, HV, K, V,
        BK=_rows_of(K), BV=COLUMNS, V_FIRST=v_first, **_OPTIONS,
    )  # fmt: skip
    return o, final


def gated_delta_rule(
    launch: Launch = run, begin: Prepare = prepare, finish: Finish = outputs, **args: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(o, final_state, inverse). `begin` normalizes k and computes u and w, `finish` normalizes q and
    computes states and o."""
    names = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens")
    given: Any = (None if args[name] is None else args[name].contiguous() for name in names)
    q, k, v, g, beta, initial, bounds = given
    normed = args["use_qk_l2norm_in_kernel"]
    g2 = None if g is None else gates(g, bounds, launch)
    k, u, w, inverse = begin(k, v, beta, g2, bounds, args["return_inverse"], launch, normed)
    o, final = finish(
        q, k, w, u, g2, initial, bounds, float(args["scale"]), args["state_v_first"],
        args["output_final_state"], launch, normed,
    )  # fmt: skip
    return o, final, inverse
