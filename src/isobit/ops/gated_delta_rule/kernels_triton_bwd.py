"""Gradients of the gated delta rule in Triton, chunk by chunk.

Per chunk of 64 rows and value head, with G the gate summed within the chunk, S the state at its start, D the
gradient of the state at its end, T = (I + A)^-1 and vn = T (beta v - beta e^G k S):

    P   = q k^T e^(G_i - G_j)                    j <= i
    dvn = e^(G_last - G) k D + scale P^T do      the states' op computes it, and D of every chunk
    dr  = T^T dvn                                r = (I + A) vn, so beta v - beta e^G k S
    dS  = do vn^T e^(G_i - G_j)                  j <= i
    N   = -dr vn^T e^(G_i - G_j),  M = beta N    j <  i: the gradient of A is -dr vn^T

    dq    = scale (e^G do S^T + dS k)
    dk1   = e^(G_last - G) vn D^T + scale dS^T q
    dk    = dk1 + M k + M^T k - beta e^G dr S^T
    dv    = beta dr
    dbeta = sum_j N kk^T + sum_v dr v - e^G sum_k k (dr S^T)
    dG    = sum_k q dq - sum_k k dk1 - beta e^G sum_k k (dr S^T) + sum_j M kk^T - sum_i M kk^T
    dG of the last row:   + sum of k times the first term of dk1 + e^G_last sum of S D
    dg    = sums of dG from the chunk's last row back

Since r = (I + A) vn, neither the gradient of T nor those of w and u are needed: A's gradient is a product of
two tensors that there are anyway.

Roundings to the dtype of q, x16: P, dvn, dr (as an operand; dv and dbeta take it in fp32), dS, M, every
result once. Products are chains of 16 over ascending k; dq continues e^G do S^T with dS k, and -beta e^G dr S^T
is continued by M k and then by M^T k. All other arithmetic is fp32 without contraction. Sums over K and V go by tiles of 64 columns
in ascending order and halve a tile, second half to first; sums over rows and columns of a chunk halve too.
Sums over the value heads of a key head are fp32 additions in ascending order. dg is summed row by row.

A result of a product is an operand of another one only on its right side and as it is, never transposed: on
Hopper, Triton 3.4 to 3.7.0 miscompiles a product whose left operand is the transposed accumulator of another
(FLA's backward refuses these versions for that reason), and ptxas before 13.3 may overwrite a left operand in
registers before it is read. Where another form is needed, the matrix goes through memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.triton.chain import product
from isobit.kernels.triton.interpreter import narrow, rounded

#: Rows of a chunk, and columns of every tile.
C = tl.constexpr(64)
_SIZES = ["T", "S", "NT"]


# Where a chunk is


@triton.jit
def place_of(chunk, cu_seqlens, T, S, NT):
    """(first row, rows) of a chunk; no rows if there is no such chunk. Packed sequence n has the chunks from
    cu_seqlens[n] // 64 + n on: that leaves enough for all sequences before it, some without rows. So the host
    need not know where sequences begin. Any bounds give rows within T."""
    if cu_seqlens is None:
        n = chunk // NT
        start = (chunk - n * NT) * C
        first = n.to(tl.int64) * T + start
        left = T - start
    else:
        n = tl.zeros([], tl.int32)
        after = n + S
        while after - n > 1:
            middle = (n + after) // 2
            begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + middle), 0), T).to(tl.int32)
            begun = begin // C + middle <= chunk
            n = tl.where(begun, middle, n)
            after = tl.where(begun, after, middle)
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + n), 0), T).to(tl.int32)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1), begin), T).to(tl.int32)
        start = tl.maximum(chunk - (begin // C + n), 0) * C
        first = (begin + start).to(tl.int64)
        left = end - begin - start
    return first, tl.minimum(left, C)


@triton.jit
def tile(at, row, heads, head, SIZE: tl.constexpr, column, live):
    """[64, 64]: rows of one head of a [rows, heads, SIZE] tensor, from this column on; zeros where a row is
    not live, and beyond SIZE."""
    col = column + tl.arange(0, C)
    inside = live[:, None]
    if SIZE % 64:
        inside = inside & (col < SIZE)[None, :]
    return tl.load(at + (row * heads + head)[:, None] * SIZE + col[None, :], mask=inside, other=0.0)


@triton.jit
def transposed(at, row, heads, head, SIZE: tl.constexpr, column, live):
    """(addresses, mask) of `tile`, [column, row]."""
    col = column + tl.arange(0, C)
    inside = live[None, :]
    if SIZE % 64:
        inside = inside & (col < SIZE)[:, None]
    return at + (row * heads + head)[None, :] * SIZE + col[:, None], inside


@triton.jit
def state_tile(K: tl.constexpr, V: tl.constexpr, first, column, V_FIRST: tl.constexpr):
    """(offsets, mask) of 64 rows and columns of a state, [k, v] in either layout."""
    k, v = first + tl.arange(0, C)[:, None], column + tl.arange(0, C)[None, :]
    if V_FIRST:
        at = v * K + k
    else:
        at = k * V + v
    return at, (k < K) & (v < V)


@triton.jit
def gates(g, row, heads, head, live):
    """The chunk's cumulated gate in log2; zeros without one, and where a row is not live."""
    if g is None:
        value = tl.zeros([C], tl.float32)
    else:
        value = tl.load(g + row * heads + head, mask=live, other=0.0)
    return value


@triton.jit
def last_gate(g, first, left, heads, head):
    if g is None:
        value = tl.zeros([], tl.float32)
    else:
        value = tl.load(g + (first + left - 1) * heads + head, mask=left > 0, other=0.0)
    return value


# Sums in a stated order: repeatedly the second half is added to the first


@triton.jit
def sums_of_rows(x):
    for _ in tl.static_range(8):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), 1)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def sums_of_columns(x):
    for _ in tl.static_range(6):
        x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2, C]), 0)
    return tl.reshape(x, [C])


@triton.jit
def whole_sum(x):
    for _ in tl.static_range(6):
        x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2]), 0)
    return tl.max(x, 0)  # one element is left: make it a scalar


# Kernels


@triton.jit(do_not_specialize=_SIZES)
def local_kernel(
    q, k, g, do, dv, scale, cu_seqlens, T, S, NT, H, HV, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """dv = scale P^T do of one chunk and value head: the part of dvn from inside the chunk."""
    chunk, hv = tl.program_id(0) // HV, (tl.program_id(0) % HV).to(tl.int64)
    h = hv // (HV // H)
    first, left = place_of(chunk, cu_seqlens, T, S, NT)
    if left <= 0:
        return
    i = tl.arange(0, C)
    live, row = i < left, first + i
    gate = gates(g, row, HV, hv, live)
    s = tl.zeros([C, C], tl.float32)
    for column in range(0, K, C):
        s = product(
            tile(q, row, H, h, K, column, live), tl.trans(tile(k, row, H, h, K, column, live)), s
        )
    # Selected, not multiplied: above the diagonal the factor may be infinite, and so may that of a dead row.
    sees = (i[:, None] >= i[None, :]) & live[:, None]
    p = rounded(tl.where(sees, s * tl.exp2(gate[:, None] - gate[None, :]), 0.0), q.dtype.element_ty)
    for column in range(0, V, C):
        do_t = tl.trans(tile(do, row, HV, hv, V, column, live))
        x = product(do_t, p, tl.zeros([C, C], tl.float32))  # [column, row]
        to, inside = transposed(dv, row, HV, hv, V, column, live)
        tl.store(to, narrow(x * scale, dv), mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def inner_kernel(
    k, v, g, beta, t, do, vn, dvn, dr, dv, ds, m, dbeta, dgate, cu_seqlens, T, S, NT, H, HV,
    K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """dr, dv, dS, M^T and what they add to dbeta and dG, of one chunk and value head."""
    chunk, hv = tl.program_id(0) // HV, (tl.program_id(0) % HV).to(tl.int64)
    h = hv // (HV // H)
    first, left = place_of(chunk, cu_seqlens, T, S, NT)
    if left <= 0:
        return
    i = tl.arange(0, C)
    live, row = i < left, first + i
    gate = gates(g, row, HV, hv, live)
    b = tl.load(beta + row * HV + hv, mask=live, other=0.0).to(tl.float32)
    solve = tile(t, row, HV, hv, C, 0, live)
    scores = tl.zeros([C, C], tl.float32)  # dS [i, j], before the gate
    change = tl.zeros([C, C], tl.float32)  # -dA [j, i]
    db = tl.zeros([C], tl.float32)
    for column in range(0, V, C):
        vn_c = tile(vn, row, HV, hv, V, column, live)
        scores = product(tile(do, row, HV, hv, V, column, live), tl.trans(vn_c), scores)
        dvn_t = tl.trans(tile(dvn, row, HV, hv, V, column, live))
        x = product(dvn_t, solve, tl.zeros([C, C], tl.float32))  # dr [column, row]
        at, inside = transposed(v, row, HV, hv, V, column, live)
        db += sums_of_columns(x * tl.load(at, mask=inside, other=0.0).to(tl.float32))
        at, inside = transposed(dv, row, HV, hv, V, column, live)
        tl.store(at, narrow(x * b[None, :], dv), mask=inside)
        x = rounded(x, dr.dtype.element_ty)
        at, inside = transposed(dr, row, HV, hv, V, column, live)
        tl.store(at, x, mask=inside)
        change = product(vn_c, x, change)
    at = (chunk.to(tl.int64) * HV + hv) * (C * C) + i[:, None] * C + i[None, :]
    sees = (i[:, None] >= i[None, :]) & live[:, None]
    scores = tl.where(sees, scores * tl.exp2(gate[:, None] - gate[None, :]), 0.0)
    tl.store(ds + at, narrow(scores, ds))
    kk = tl.zeros([C, C], tl.float32)
    for column in range(0, K, C):
        k_c = tile(k, row, H, h, K, column, live)
        kk = product(k_c, tl.trans(k_c), kk)
    sees = (i[:, None] < i[None, :]) & live[None, :]
    n = tl.where(sees, -change * tl.exp2(gate[None, :] - gate[:, None]), 0.0)  # [j, i]
    both = rounded(n * b[None, :], m.dtype.element_ty)
    tl.store(m + at, both)
    tl.store(dbeta + row * HV + hv, db + sums_of_columns(n * kk), mask=live)
    if dgate is not None:
        x = both.to(tl.float32) * kk
        tl.store(dgate + row * HV + hv, sums_of_columns(x) - sums_of_rows(x), mask=live)


@triton.jit(do_not_specialize=[*_SIZES, "rows"])
def outer_kernel(
    q, k, g, beta, h, dh, do, vn, dr, ds, m, dq, dk, dbeta, dgate, dlast, scale, cu_seqlens, T, S,
    NT, rows, H, HV, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr,
):  # fmt: skip
    """64 columns of dq and dk of one chunk and key head, the sum over its value heads; and what these columns
    add to dbeta and dG of each. `rows` are those of a part of dbeta and dG."""
    parts: tl.constexpr = (K + 63) // 64
    part, item = tl.program_id(0) % parts, tl.program_id(0) // parts
    chunk, key_head = (item // H).to(tl.int64), (item % H).to(tl.int64)
    group = HV // H
    first, left = place_of(item // H, cu_seqlens, T, S, NT)
    if left <= 0:
        return
    i = tl.arange(0, C)
    live, row = i < left, first + i
    q_c = tile(q, row, H, key_head, K, part * C, live)
    k_c = tile(k, row, H, key_head, K, part * C, live)
    dq_c = tl.zeros([C, C], tl.float32)
    dk_c = tl.zeros([C, C], tl.float32)
    for each in range(group):
        hv = key_head * group + each
        gate = gates(g, row, HV, hv, live)
        end = last_gate(g, first, left, HV, hv)
        b = tl.load(beta + row * HV + hv, mask=live, other=0.0).to(tl.float32)
        state = (chunk * HV + hv) * (K * V)
        at = (chunk * HV + hv) * (C * C) + i[:, None] * C + i[None, :]
        # Two passes over V: the accumulators of one would not fit into registers.
        x = tl.zeros([C, C], tl.float32)  # do S^T
        z = tl.zeros([C, C], tl.float32)  # dr S^T
        for column in range(0, V, C):
            cells, inside = state_tile(K, V, part * C, column, V_FIRST)
            h_t = tl.trans(tl.load(h + state + cells, mask=inside, other=0.0))
            x = product(tile(do, row, HV, hv, V, column, live), h_t, x)
            z = product(tile(dr, row, HV, hv, V, column, live), h_t, z)
        ds_c = tl.load(ds + at)
        x = product(ds_c, k_c, x * tl.exp2(gate)[:, None]) * scale
        dq_c += x
        change = sums_of_rows(q_c.to(tl.float32) * x)
        from_state = tl.exp2(gate) * sums_of_rows(k_c.to(tl.float32) * z)
        to = ((part + 1).to(tl.int64) * rows + row) * HV + hv
        tl.store(dbeta + to, -from_state, mask=live)
        m_c = tl.load(m + at)
        z = product(tl.trans(m_c), k_c, -(z * (b * tl.exp2(gate))[:, None]))
        dk_c += product(m_c, k_c, z)
        y = tl.zeros([C, C], tl.float32)  # vn D^T
        of_states = tl.zeros([C], tl.float32)  # S D
        for column in range(0, V, C):
            cells, inside = state_tile(K, V, part * C, column, V_FIRST)
            dh_c = tl.load(dh + state + cells, mask=inside, other=0.0)
            y = product(tile(vn, row, HV, hv, V, column, live), tl.trans(dh_c), y)
            if dgate is not None:
                h_c = tl.load(h + state + cells, mask=inside, other=0.0)
                of_states += sums_of_rows(h_c.to(tl.float32) * dh_c.to(tl.float32))
        y = y * tl.where(live, tl.exp2(end - gate), 0.0)[:, None]
        if dgate is not None:
            whole = whole_sum(sums_of_rows(k_c.to(tl.float32) * y))
            whole += tl.exp2(end) * whole_sum(of_states)
            tl.store(dlast + (chunk * HV + hv) * parts + part, whole)
        ds_c = tl.load(ds + at)
        y = y + product(tl.trans(ds_c), q_c, tl.zeros([C, C], tl.float32)) * scale
        dk_c += y
        if dgate is not None:
            change = change - sums_of_rows(k_c.to(tl.float32) * y) - b * from_state
            tl.store(dgate + to, change, mask=live)
    where = (row * H + key_head)[:, None] * K + part * C + i[None, :]
    inside = live[:, None] & (part * C + i < K)[None, :]
    tl.store(dq + where, narrow(dq_c, dq), mask=inside)
    tl.store(dk + where, narrow(dk_c, dk), mask=inside)


@triton.jit(do_not_specialize=[*_SIZES, "rows"])
def finish_kernel(
    dbeta, dgate, dlast, out_beta, out_g, cu_seqlens, T, S, NT, rows, HV, PARTS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """dbeta and dg of one chunk and HEADS value heads: parts in ascending order, rows from the last one back.
    Part 0 is that of `inner_kernel`."""
    blocks = tl.cdiv(HV, HEADS)
    chunk, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    first, left = place_of(chunk, cu_seqlens, T, S, NT)
    if left <= 0:
        return
    head = block * HEADS + tl.arange(0, HEADS)
    there = head < HV
    total = tl.zeros([HEADS], tl.float32)
    if out_g is not None:
        at = dlast + (chunk.to(tl.int64) * HV + head) * (PARTS - 1)
        for part in tl.static_range(PARTS - 1):
            total += tl.load(at + part, mask=there, other=0.0)
    for i in range(left):
        to = (first + left - 1 - i) * HV + head
        b = tl.zeros([HEADS], tl.float32)
        for part in tl.static_range(PARTS):
            b += tl.load(dbeta + to + part * rows.to(tl.int64) * HV, mask=there, other=0.0)
        tl.store(out_beta + to, narrow(b, out_beta), mask=there)
        if out_g is not None:
            change = tl.zeros([HEADS], tl.float32)
            for part in tl.static_range(PARTS):
                change += tl.load(dgate + to + part * rows.to(tl.int64) * HV, mask=there, other=0.0)
            total += change
            tl.store(out_g + to, narrow(total, out_g), mask=there)


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(x, dy, dx, rows, K: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, EPS: tl.constexpr):
    """dx of y = x r, r = 1 / sqrt(sum of squares + EPS), from dy in fp32: r (dy - x r sum(x r dy))."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (col < K)[None, :]
    at = row[:, None] * K + col[None, :]
    x_c = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    dy_c = tl.load(dy + at, mask=inside, other=0.0)
    r = tl.div_rn(1.0, tl.sqrt_rn(sums_of_rows(x_c * x_c) + EPS))
    y = x_c * r[:, None]
    tl.store(dx + at, narrow((dy_c - y * sums_of_rows(y * dy_c)[:, None]) * r[:, None], dx), mask=inside)


@triton.jit(do_not_specialize=["T", "S"])
def offsets_kernel(offsets, cu_seqlens, T, S, BLOCK: tl.constexpr):
    """The first chunk of packed sequences, as `place_of` counts them."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + n, mask=n < S, other=0), 0), T).to(tl.int32)
    tl.store(offsets + n, begin // C + n, mask=n < S)


# Launchers


class Shape(NamedTuple):
    """Sizes of a call, and where its sequences are."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    bounds: Tensor | None
    S: int  # sequences
    NT: int  # chunks per batch element; packed: of all, some of them without rows

    @property
    def chunks(self) -> int:
        return self.B * self.NT

    @property
    def place(self) -> tuple[Tensor | None, int, int, int]:
        """The arguments of `place_of`."""
        return self.bounds, self.T, self.S, self.NT


def shape_of(args: dict[str, Any]) -> Shape:
    (B, T, H, K), (HV, V), bounds = args["q"].shape, args["v"].shape[2:], args["cu_seqlens"]
    if bounds is None:
        return Shape(B, T, H, HV, K, V, None, B, -(-T // 64))
    S = len(bounds) - 1
    return Shape(B, T, H, HV, K, V, bounds.contiguous(), S, T // 64 + S if S else 0)


def chunk_offsets(shape: Shape, launch: Launch) -> Tensor | None:
    """[S] if sequences are packed."""
    if shape.bounds is None:
        return None
    offsets = torch.empty(max(shape.S, 1), dtype=torch.int32, device=shape.bounds.device)
    grid = (-(-shape.S // 128),)
    launch(offsets_kernel, grid, offsets, shape.bounds, shape.T, shape.S, BLOCK=128, num_warps=4)
    return offsets


#: Compile options of the kernels with products.
_OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}


class Saved(NamedTuple):
    """What the forward computed: gates in log2, the inverse, w, states at the chunks' starts, new values."""

    g2: Tensor | None
    t: Tensor
    w: Tensor
    h: Tensor
    vn: Tensor


def gradients(
    launch: Launch, args: dict[str, Any], saved: Saved, dhu: Callable[..., Any]
) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dg, dbeta, dinitial_state), where q and k of the arguments are those that the forward
    multiplied; dq and dk in fp32 if these were normalized. `dhu` computes the gradients of states."""
    q, k, v, beta, do = (args[name].contiguous() for name in ("q", "k", "v", "beta", "do"))
    shape, g, scale = shape_of(args), saved.g2, float(args["scale"])
    B, T, H, HV, K, V = shape[:6]
    sizes, narrow_dtype = {"K": K, "V": V}, q.dtype
    wide = args["use_qk_l2norm_in_kernel"]

    def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=q.device)

    local = empty(*v.shape, dtype=narrow_dtype)
    grid = (shape.chunks * HV,)
    launch(local_kernel, grid, q, k, g, do, local, scale, *shape.place, H, HV, **sizes, **_OPTIONS)
    dht = args["dfinal_state"]
    dh, dh0, dvn = dhu(
        launch=launch, q=q, k=k, w=saved.w, do=do, dv=local, g=g, gk=None, h0=args["initial_state"],
        dht=None if dht is None else dht.contiguous(), scale=scale, state_v_first=args["state_v_first"],
        cu_seqlens=shape.bounds, chunk_size=64, chunk_indices=_as_many(shape), use_exp2=True,
        chunk_offsets=chunk_offsets(shape, launch),
    )  # fmt: skip
    dr, dv = local, empty(*v.shape, dtype=narrow_dtype)  # `local` is no longer needed
    ds, m = (empty(shape.chunks, HV, 64, 64, dtype=narrow_dtype) for _ in range(2))
    # Part 0 of dbeta and dG is that of `inner_kernel`, then one for every 64 columns of k.
    parts = 1 + -(-K // 64)
    dbeta, dgate, dlast = empty(parts, B * T, HV), None, None
    if g is not None:
        dgate, dlast = empty(parts, B * T, HV), empty(shape.chunks, HV, parts - 1)
    launch(
        inner_kernel, grid, k, v, g, beta, saved.t, do, saved.vn, dvn, dr, dv, ds, m, dbeta, dgate,
        *shape.place, H, HV, **sizes, **_OPTIONS,
    )  # fmt: skip
    dq, dk = (empty(*q.shape, dtype=torch.float32 if wide else narrow_dtype) for _ in range(2))
    launch(
        outer_kernel, (shape.chunks * H * (parts - 1),), q, k, g, beta, saved.h, dh, do, saved.vn, dr, ds, m,
        dq, dk, dbeta, dgate, dlast, scale, *shape.place, B * T, H, HV,
        **sizes, V_FIRST=args["state_v_first"], **_OPTIONS,
    )  # fmt: skip
    out_beta = empty(*beta.shape, dtype=beta.dtype)
    out_g = None if args["g"] is None else empty(*args["g"].shape, dtype=args["g"].dtype)
    launch(
        finish_kernel, (shape.chunks * -(-HV // 32),), dbeta, dgate, dlast, out_beta, out_g, *shape.place,
        B * T, HV, PARTS=parts, HEADS=32, num_warps=1, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    return dq, dk, dv, out_g, out_beta, dh0


def _as_many(shape: Shape) -> Tensor | None:
    """Of packed sequences: a tensor as long as there are chunks, which is all that dhu reads of it."""
    if shape.bounds is None:
        return None
    return torch.empty((shape.NT, 2), dtype=torch.int32, device=shape.bounds.device)


def norm_gradient(launch: Launch, x: Tensor, dy: Tensor) -> Tensor:
    """That of a normalized row, from dy in fp32."""
    dx, K = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1]
    rows, width = x.numel() // K, max(16, triton.next_power_of_2(K))
    launch(
        norm_kernel, (-(-rows // 16),), x.contiguous(), dy, dx, rows,
        K=K, WIDTH=width, ROWS=16, EPS=1e-6, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return dx
