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

The forward keeps T. u and w (step 4 of the class), S and vn (steps 5 and 7) are computed again from it.

Roundings to the dtype of q: P, scale P^T do, dvn, dr (as an operand; dv and dbeta take it in fp32), dS, M, D
as an operand, and every result once. Products are chains of 16 over ascending k from zero, but dq continues
e^G do S^T with dS k, and -beta e^G dr S^T is continued by M k and then by M^T k. All other arithmetic is fp32
without contraction, from left to right as written above. A sum over K or V takes tiles of 64 columns in
ascending order, and within a tile repeatedly adds the second half to the first, as do sums over rows and
columns of a chunk. For every value head of a key head in ascending order dq takes one addition, and dk two:
the chain with M, then dk1. dg begins with what the last row has in addition, and takes row after row.

A result of a product is an operand of another one only on its right side and as it is, never transposed: on
Hopper, Triton 3.4 to 3.7.0 miscompiles a product whose left operand is the transposed accumulator of another
(FLA's backward refuses these versions for that reason), and ptxas before 13.3 may overwrite a left operand in
registers before it is read. Where another form is needed, the matrix goes through memory.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.device import hopper_cannot_run
from isobit.frame.launch import Launch, run
from isobit.kernels.triton.chain import product
from isobit.kernels.triton.interpreter import narrow, rounded
from isobit.ops.attention.kernels_triton import row_sums
from isobit.ops.delta_rule import kernels_triton as portable_states
from isobit.ops.gated_delta_rule.kernels_triton import (
    chunk_of,
    folded,
    gates,
    l2norm,
    states,
    tiles_of,
    why_not,
)
from isobit.ops.gated_delta_rule.model import CHUNK

__all__ = ["gated_delta_rule_bwd", "why_not"]

#: Rows of a chunk, and columns of every tile.
C = tl.constexpr(CHUNK)
_SIZES = ["T", "S"]

#: Rows that `finish_kernel` loads at once.
AT_ONCE = tl.constexpr(8)


# Tiles of 64 rows and columns


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
def store(at, x, row, heads, head, SIZE: tl.constexpr, column, live):
    """x where `tile` reads."""
    col = column + tl.arange(0, C)
    inside = live[:, None] & (col < SIZE)[None, :]
    tl.store(at + (row * heads + head)[:, None] * SIZE + col[None, :], x, mask=inside)


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
def gates_of(g, row, heads, head, live):
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


# Sums in a stated order, as `row_sums`: repeatedly the second half is added to the first


@triton.jit
def whole_sum(x):
    for _ in tl.static_range(6):
        x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2]), 0)
    return tl.max(x, 0)  # one element is left: make it a scalar


# Kernels


@triton.jit(do_not_specialize=_SIZES)
def local_kernel(
    q, k, g, do, dv, scale, cu_seqlens, T, S, H, HV, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """dv = scale P^T do of one chunk and value head: the part of dvn from inside the chunk."""
    chunk, hv = tl.program_id(0) // HV, (tl.program_id(0) % HV).to(tl.int64)
    h = hv // (HV // H)
    first, left = chunk_of(chunk, cu_seqlens, T, S)
    if left <= 0:
        return
    i = tl.arange(0, C)
    live, row = i < left, first + i
    gate = gates_of(g, row, HV, hv, live)
    s = tl.zeros([C, C], tl.float32)
    for column in range(0, K, C):
        s = product(tile(q, row, H, h, K, column, live), tl.trans(tile(k, row, H, h, K, column, live)), s)
    # Selected, not multiplied: above the diagonal the factor may be infinite, and so may that of a dead row.
    sees = (i[:, None] >= i[None, :]) & live[:, None]
    p = rounded(tl.where(sees, s * tl.exp2(gate[:, None] - gate[None, :]), 0.0), q.dtype.element_ty)
    for column in range(0, V, C):
        do_t = tl.trans(tile(do, row, HV, hv, V, column, live))
        x = product(do_t, p, tl.zeros([C, C], tl.float32))  # [column, row]
        to, inside = transposed(dv, row, HV, hv, V, column, live)
        tl.store(to, narrow(x * scale, dv), mask=inside)


@triton.jit(do_not_specialize=_SIZES)
def dr_kernel(
    v, beta, t, dvn, dr, dv, dbeta, cu_seqlens, T, S, HV, V: tl.constexpr,
):  # fmt: skip
    """dr, dv and what they add to dbeta, of one chunk and value head."""
    chunk, hv = tl.program_id(0) // HV, (tl.program_id(0) % HV).to(tl.int64)
    first, left = chunk_of(chunk, cu_seqlens, T, S)
    if left <= 0:
        return
    i = tl.arange(0, C)
    live, row = i < left, first + i
    b = tl.load(beta + row * HV + hv, mask=live, other=0.0).to(tl.float32)
    solve = tile(t, row, HV, hv, C, 0, live)
    db = tl.zeros([C], tl.float32)
    for column in range(0, V, C):
        dvn_c = tile(dvn, row, HV, hv, V, column, live)
        x = product(tl.trans(solve), dvn_c, tl.zeros([C, C], tl.float32))
        db += row_sums(x * tile(v, row, HV, hv, V, column, live).to(tl.float32))
        store(dv, narrow(x * b[:, None], dv), row, HV, hv, V, column, live)
        store(dr, narrow(x, dr), row, HV, hv, V, column, live)
    tl.store(dbeta + row * HV + hv, db, mask=live)


@triton.jit(do_not_specialize=_SIZES)
def inner_kernel(
    k, g, beta, do, vn, dr, ds, m, dbeta, dgate, cu_seqlens, T, S, H, HV, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """dS, M and what they add to dbeta and dG, of one chunk and value head. Sums over j are those of rows,
    which are cheap; for the sum over i, M is read again, transposed."""
    chunk, hv = tl.program_id(0) // HV, (tl.program_id(0) % HV).to(tl.int64)
    h = hv // (HV // H)
    first, left = chunk_of(chunk, cu_seqlens, T, S)
    if left <= 0:
        return
    i = tl.arange(0, C)
    live, row = i < left, first + i
    scores = tl.zeros([C, C], tl.float32)  # dS, before the gate
    change = tl.zeros([C, C], tl.float32)  # -dA
    for column in range(0, V, C):
        vn_c = tile(vn, row, HV, hv, V, column, live)
        scores = product(tile(do, row, HV, hv, V, column, live), tl.trans(vn_c), scores)
        change = product(tile(dr, row, HV, hv, V, column, live), tl.trans(vn_c), change)
    gate = gates_of(g, row, HV, hv, live)
    b = tl.load(beta + row * HV + hv, mask=live, other=0.0).to(tl.float32)
    own = (chunk.to(tl.int64) * HV + hv) * (C * C)
    at = own + i[:, None] * C + i[None, :]
    decay = tl.exp2(gate[:, None] - gate[None, :])
    sees = (i[:, None] >= i[None, :]) & live[:, None]
    tl.store(ds + at, narrow(tl.where(sees, scores * decay, 0.0), ds))
    sees = (i[:, None] > i[None, :]) & live[:, None]
    n = tl.where(sees, -change * decay, 0.0)
    both = rounded(n * b[:, None], m.dtype.element_ty)
    tl.store(m + at, both)
    kk = tl.zeros([C, C], tl.float32)
    for column in range(0, K, C):
        k_c = tile(k, row, H, h, K, column, live)
        kk = product(k_c, tl.trans(k_c), kk)
    to = row * HV + hv
    tl.store(dbeta + to, tl.load(dbeta + to, mask=live, other=0.0) + row_sums(n * kk), mask=live)
    if dgate is not None:
        of_rows = row_sums(both.to(tl.float32) * kk)
        tl.debug_barrier()  # other threads read M
        turned = tl.load(m + own + i[None, :] * C + i[:, None])
        tl.store(dgate + to, of_rows - row_sums(turned.to(tl.float32) * kk), mask=live)


@triton.jit(do_not_specialize=[*_SIZES, "rows"])
def dq_kernel(
    q, k, g, h, do, ds, dq, dgate, scale, cu_seqlens, T, S, rows, H, HV, K: tl.constexpr,
    V: tl.constexpr, V_FIRST: tl.constexpr,
):  # fmt: skip
    """64 columns of dq of one chunk and key head, the sum over its value heads; and what these columns add to
    dG of each. `rows` are those of a part of dG."""
    parts: tl.constexpr = (K + 63) // 64
    part, item = tl.program_id(0) % parts, tl.program_id(0) // parts
    chunk, key_head = item // H, (item % H).to(tl.int64)
    first, left = chunk_of(chunk, cu_seqlens, T, S)
    if left <= 0:
        return
    i = tl.arange(0, C)
    live, row = i < left, first + i
    q_c = tile(q, row, H, key_head, K, part * C, live)
    k_c = tile(k, row, H, key_head, K, part * C, live)
    total = tl.zeros([C, C], tl.float32)
    group = HV // H
    for each in range(group):
        hv = key_head * group + each
        gate = gates_of(g, row, HV, hv, live)
        own = chunk.to(tl.int64) * HV + hv
        x = tl.zeros([C, C], tl.float32)  # do S^T
        for column in range(0, V, C):
            cells, inside = state_tile(K, V, part * C, column, V_FIRST)
            h_c = tl.load(h + own * (K * V) + cells, mask=inside, other=0.0)
            x = product(tile(do, row, HV, hv, V, column, live), tl.trans(h_c), x)
        ds_c = tl.load(ds + own * (C * C) + i[:, None] * C + i[None, :])
        x = product(ds_c, k_c, x * tl.exp2(gate)[:, None]) * scale
        total += x
        if dgate is not None:
            to = ((part + 1).to(tl.int64) * rows + row) * HV + hv
            tl.store(dgate + to, row_sums(q_c.to(tl.float32) * x), mask=live)
    store(dq, narrow(total, dq), row, H, key_head, K, part * C, live)


@triton.jit(do_not_specialize=[*_SIZES, "rows"])
def dk_kernel(
    q, k, g, beta, h, dh, vn, dr, ds, m, dk, dbeta, dgate, dlast, scale, cu_seqlens, T, S, rows, H, HV,
    K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr,
):  # fmt: skip
    """64 columns of dk of one chunk and key head, the sum over its value heads; and what these columns add to
    dbeta and dG of each. `rows` are those of a part of dbeta and dG."""
    parts: tl.constexpr = (K + 63) // 64
    part, item = tl.program_id(0) % parts, tl.program_id(0) // parts
    chunk, key_head = item // H, (item % H).to(tl.int64)
    first, left = chunk_of(chunk, cu_seqlens, T, S)
    if left <= 0:
        return
    i = tl.arange(0, C)
    live, row = i < left, first + i
    q_c = tile(q, row, H, key_head, K, part * C, live)
    k_c = tile(k, row, H, key_head, K, part * C, live)
    total = tl.zeros([C, C], tl.float32)
    group = HV // H
    for each in range(group):
        hv = key_head * group + each
        gate = gates_of(g, row, HV, hv, live)
        end = last_gate(g, first, left, HV, hv)
        own = chunk.to(tl.int64) * HV + hv
        y = tl.zeros([C, C], tl.float32)  # vn D^T
        z = tl.zeros([C, C], tl.float32)  # dr S^T
        of_states = tl.zeros([C], tl.float32)  # S D
        for column in range(0, V, C):
            cells, inside = state_tile(K, V, part * C, column, V_FIRST)
            h_c = tl.load(h + own * (K * V) + cells, mask=inside, other=0.0)
            dh_c = tl.load(dh + own * (K * V) + cells, mask=inside, other=0.0)
            y = product(tile(vn, row, HV, hv, V, column, live), tl.trans(dh_c), y)
            z = product(tile(dr, row, HV, hv, V, column, live), tl.trans(h_c), z)
        if dgate is not None:
            for column in range(0, V, C):  # a loop of its own: see isobit.check.pipelines
                cells, inside = state_tile(K, V, part * C, column, V_FIRST)
                h_c = tl.load(h + own * (K * V) + cells, mask=inside, other=0.0)
                dh_c = tl.load(dh + own * (K * V) + cells, mask=inside, other=0.0)
                of_states += row_sums(h_c.to(tl.float32) * dh_c.to(tl.float32))
        b = tl.load(beta + row * HV + hv, mask=live, other=0.0).to(tl.float32)
        k_f, to = k_c.to(tl.float32), ((part + 1).to(tl.int64) * rows + row) * HV + hv
        from_state = tl.exp2(gate) * row_sums(k_f * z)
        tl.store(dbeta + to, -from_state, mask=live)
        at = own * (C * C) + i[:, None] * C + i[None, :]
        m_c = tl.load(m + at)
        z = product(m_c, k_c, -(z * (b * tl.exp2(gate))[:, None]))
        total += product(tl.trans(m_c), k_c, z)
        y = y * tl.where(live, tl.exp2(end - gate), 0.0)[:, None]
        if dgate is not None:
            whole = whole_sum(row_sums(k_f * y)) + tl.exp2(end) * whole_sum(of_states)
            tl.store(dlast + own * parts + part, whole)
        y = y + product(tl.trans(tl.load(ds + at)), q_c, tl.zeros([C, C], tl.float32)) * scale
        total += y
        if dgate is not None:
            change = tl.load(dgate + to, mask=live, other=0.0)
            tl.debug_barrier()  # several threads may have read an element that one of them replaces
            tl.store(dgate + to, change - row_sums(k_f * y) - b * from_state, mask=live)
    store(dk, narrow(total, dk), row, H, key_head, K, part * C, live)


@triton.jit
def parts_of(at, inside, rows, HV, PARTS: tl.constexpr):
    """A row's numbers in all parts."""
    parts = ()
    for part in tl.static_range(PARTS):
        parts = parts + (tl.load(at + part * rows.to(tl.int64) * HV, mask=inside, other=0.0),)
    return parts


@triton.jit
def added(parts, PARTS: tl.constexpr, HEADS: tl.constexpr):
    total = tl.zeros([HEADS], tl.float32)
    for part in tl.static_range(PARTS):
        total += parts[part]
    return total


@triton.jit(do_not_specialize=[*_SIZES, "rows"])
def finish_kernel(
    dbeta, dgate, dlast, out_beta, out_g, cu_seqlens, T, S, rows, HV, PARTS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """dbeta and dg of one chunk and HEADS value heads: parts in ascending order, rows from the last one back.
    Part 0 is that of `dr_kernel` and `inner_kernel`."""
    blocks = tl.cdiv(HV, HEADS)
    chunk, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    first, left = chunk_of(chunk, cu_seqlens, T, S)
    if left <= 0:
        return
    head = block * HEADS + tl.arange(0, HEADS)
    there = head < HV
    total = tl.zeros([HEADS], tl.float32)
    if out_g is not None:
        at = dlast + (chunk.to(tl.int64) * HV + head) * (PARTS - 1)
        for part in tl.static_range(PARTS - 1):
            total += tl.load(at + part, mask=there, other=0.0)
    for start in range(0, left, AT_ONCE):
        of_beta, of_gate = (), ()  # loads that do not wait for each other
        for i in tl.static_range(AT_ONCE):
            to, inside = (first + left - 1 - start - i) * HV + head, there & (start + i < left)
            of_beta = of_beta + (parts_of(dbeta + to, inside, rows, HV, PARTS),)
            if out_g is not None:
                of_gate = of_gate + (parts_of(dgate + to, inside, rows, HV, PARTS),)
        for i in tl.static_range(AT_ONCE):
            to, inside = (first + left - 1 - start - i) * HV + head, there & (start + i < left)
            tl.store(out_beta + to, narrow(added(of_beta[i], PARTS, HEADS), out_beta), mask=inside)
            if out_g is not None:
                total += added(of_gate[i], PARTS, HEADS)
                tl.store(out_g + to, narrow(total, out_g), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def norm_gradient_kernel(
    x, norms, dy, dx, rows, K: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx of y = x r, where r is the inverse norm of x, from dy in fp32: r (dy - x r sum(x r dy))."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (col < K)[None, :]
    at = row[:, None] * K + col[None, :]
    x_c = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    dy_c = tl.load(dy + at, mask=inside, other=0.0)
    r = tl.load(norms + row, mask=row < rows, other=0.0)
    y = x_c * r[:, None]
    own = (dy_c - y * row_sums(y * dy_c)[:, None]) * r[:, None]
    tl.store(dx + at, narrow(own, dx), mask=inside)


@triton.jit(do_not_specialize=["T", "S"])
def offsets_kernel(offsets, cu_seqlens, T, S, BLOCK: tl.constexpr):
    """The first chunk of packed sequences, as `chunk_of` counts them."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + n, mask=n < S, other=0), 0), T).to(tl.int32)
    tl.store(offsets + n, begin // C + n, mask=n < S)


# Launchers

#: Compile options of the kernels with products.
_OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}

#: Value heads that one program of `finish_kernel` sums.
HEADS = 32


def chunk_offsets(bounds: Tensor | None, T: int, launch: Launch) -> Tensor | None:
    """[S] if sequences are packed."""
    if bounds is None:
        return None
    S = len(bounds) - 1
    offsets = torch.empty(max(S, 1), dtype=torch.int32, device=bounds.device)
    launch(offsets_kernel, (-(-S // 128),), offsets, bounds, T, S, BLOCK=128, num_warps=4)
    return offsets


def dhu_of(q: Tensor, v: Tensor) -> Callable[..., Any]:
    """The kernel for the gradients of states: that of Hopper where it serves these sizes. Device and sizes
    decide, so the class has one set of bits."""
    from isobit.ops.delta_rule import kernels_hopper  # loaded where there is a GPU for it

    if kernels_hopper.why_not({"q": q, "dv": v, "chunk_size": CHUNK}) is None:
        return kernels_hopper.dhu
    return portable_states.dhu


def recurrences(
    forwards: Sequence[Any],
    backwards: Mapping[str, Any],
    launch: Launch,
    dhu: Callable[..., Any] | None = None,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What `states` returns for arguments, and what `dhu` returns for others. Neither reads the other's."""
    of_states = states(*forwards, launch)
    if dhu is None:
        v = backwards["dv"]
        on_hopper = v.device.type != "cpu" and hopper_cannot_run(v.device) is None
        dhu = dhu_of(backwards["q"], v) if on_hopper else portable_states.dhu
    return of_states, dhu(launch=launch, **backwards)


def gated_delta_rule_bwd(
    launch: Launch = run, recur: Callable[..., Any] = recurrences, fold: Callable[..., Any] = folded,
    inside: Callable[..., Any] | None = None, **args: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """(dq, dk, dv, dg, dbeta, dinitial_state), those that are wanted. `fold` computes u and w, `recur` the
    states and their gradients, and `inside`, by default `gradients`, each chunk by itself."""
    names = ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens", "inverse", "do", "dfinal_state")
    given: Any = (None if args[name] is None else args[name].contiguous() for name in names)
    raw_q, raw_k, v, g, beta, initial, bounds, inverse, do, dht = given
    scale, v_first, normed = float(args["scale"]), args["state_v_first"], args["use_qk_l2norm_in_kernel"]
    B, T, HV, V = v.shape
    H, K = raw_q.shape[2:]
    S = B if bounds is None else len(bounds) - 1
    tiles = tiles_of(T, S, bounds)
    chunks = -(-T // CHUNK) if bounds is None else tiles
    chunk_gradients: Callable[..., Any] = inside or gradients

    def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=v.device)

    # What the forward had
    q, k, norms = raw_q, raw_k, None
    if normed:
        norms = (empty(*q.shape[:3]), empty(*k.shape[:3]))
        q, k = (l2norm(x, launch, r) for x, r in zip((raw_q, raw_k), norms, strict=True))
    g2 = None if g is None else gates(g, bounds, launch)
    u, w = fold(k, v, beta, g2, bounds, inverse, launch)
    place, sizes = (bounds, T, S), {"H": H, "HV": HV, "K": K, "V": V, **_OPTIONS}
    local = torch.empty_like(v)
    launch(local_kernel, (tiles * HV,), q, k, g2, do, local, scale, *place, **sizes | {"num_stages": 3})

    # From the first chunk to the last, and from the last one to the first
    forwards = (k, w, u, g2, None, initial, bounds, None, chunks, v_first, True, False)
    backwards = {
        "q": q, "k": k, "w": w, "do": do, "dv": local, "g": g2, "gk": None,
        "h0": initial if args["want_initial_state"] else None, "dht": dht, "scale": scale,
        "state_v_first": v_first, "cu_seqlens": bounds, "chunk_size": CHUNK, "use_exp2": True,
        # dhu reads nothing of chunk_indices but their number.
        "chunk_indices": None if bounds is None else empty(chunks, 2, dtype=torch.int32),
        "chunk_offsets": chunk_offsets(bounds, T, launch),
    }  # fmt: skip
    (h, vn, _), (dh, dh0, dvn) = recur(forwards, backwards, launch)
    del u, w, local, forwards, backwards  # gradients have room where these were

    dq, dk, dv, dbeta, dgate, dlast = chunk_gradients(
        raw_q, raw_k, q, k, v, g2, beta, inverse, do, vn, dvn, h, dh, bounds, scale, v_first, norms, launch
    )
    parts, rows = dbeta.shape[:2]
    out_beta = empty(*beta.shape, dtype=beta.dtype)
    out_g = None if g is None else empty(*g.shape, dtype=g.dtype)
    launch(
        finish_kernel, (tiles * -(-HV // HEADS),),
        dbeta, dgate, dlast, out_beta, out_g, *place, rows, HV,
        PARTS=parts, HEADS=HEADS, num_warps=1, num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip
    all_of = {"q": dq, "k": dk, "v": dv, "g": out_g, "beta": out_beta}
    results = [gradient if args[f"want_{name}"] else None for name, gradient in all_of.items()]
    return *results, None if dh0 is None else dh0.to(initial.dtype)


def gradients(
    raw_q: Tensor, raw_k: Tensor, q: Tensor, k: Tensor, v: Tensor, g2: Tensor | None, beta: Tensor,
    inverse: Tensor, do: Tensor, vn: Tensor, dvn: Tensor, h: Tensor, dh: Tensor, bounds: Tensor | None,
    scale: float, v_first: bool, norms: tuple[Tensor, Tensor] | None, launch: Launch,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, dbeta, dgate, dlast), each chunk by itself; the last three as `finish_kernel` takes them.
    q and k are raw_q and raw_k without `norms`, and otherwise divided by their norms; `norms` are the inverse
    ones."""
    B, T, HV, V = v.shape
    H, K = q.shape[2:]
    S = B if bounds is None else len(bounds) - 1
    tiles = tiles_of(T, S, bounds)

    def empty(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=v.device)

    place, sizes = (bounds, T, S), {"H": H, "HV": HV, "K": K, "V": V, **_OPTIONS}
    by_value_head, (dr, dv) = (tiles * HV,), (empty(*v.shape, dtype=v.dtype) for _ in range(2))
    ds, m = (empty(tiles, HV, CHUNK, CHUNK, dtype=v.dtype) for _ in range(2))
    # Part 0 of dbeta and dG is that of `dr_kernel` and `inner_kernel`; then each 64 columns of k have one.
    parts, rows = 1 + -(-K // CHUNK), B * T
    dbeta, dgate, dlast = empty(parts, rows, HV), None, None
    if g2 is not None:
        dgate, dlast = empty(parts, rows, HV), empty(tiles, HV, parts - 1)
    of_values = {"HV": HV, "V": V, **_OPTIONS}
    launch(dr_kernel, by_value_head, v, beta, inverse, dvn, dr, dv, dbeta, *place, **of_values)
    launch(
        inner_kernel, by_value_head, k, g2, beta, do, vn, dr, ds, m, dbeta, dgate, *place, **sizes
    )  # fmt: skip
    dq, dk = (empty(*q.shape, dtype=torch.float32 if norms is not None else q.dtype) for _ in range(2))
    by_part = (tiles * H * (parts - 1),)
    launch(
        dq_kernel, by_part,
        q, k, g2, h, do, ds, dq, dgate, scale, *place, rows, V_FIRST=v_first, **sizes,
    )  # fmt: skip
    launch(
        dk_kernel, by_part,
        q, k, g2, beta, h, dh, vn, dr, ds, m, dk, dbeta, dgate, dlast, scale, *place, rows,
        V_FIRST=v_first, **sizes,
    )  # fmt: skip
    if norms is not None:
        dq, dk = (
            norm_gradient(*given, launch) for given in zip((raw_q, raw_k), norms, (dq, dk), strict=True)
        )
    return dq, dk, dv, dbeta, dgate, dlast


def norm_gradient(x: Tensor, norms: Tensor, dy: Tensor, launch: Launch) -> Tensor:
    """That of normalized rows, from dy in fp32."""
    dx, K = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1]
    rows, width = x.numel() // K, max(16, triton.next_power_of_2(K))
    launch(
        norm_gradient_kernel, (-(-rows // 16),), x, norms, dy, dx, rows,
        K=K, WIDTH=width, ROWS=16, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return dx
