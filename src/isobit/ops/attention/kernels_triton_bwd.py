"""Gradients of attention in portable Triton. Probabilities are recomputed from the lse of the forward:

    P     = 2^fma(z, c, -(lse log2e))                     0 where a query does not see a key
    delta = sum over D of out dout, minus the gradient of lse
    dP    = dout V^T,   dS = P (dP - delta)               times 1 - tanh^2 where scores are capped

    dq = scale dS K      one chain over the sequence's keys, 16 by 16 from its first
    dv = P^T dout        one chain over the heads of the group in ascending order, and within each over the
    dk = scale dS^T q      queries, 16 by 16, aligned to their positions among the keys

P and dS are rounded to 16 bits before a matrix product, and each gradient once at the end. Two kernels
compute dS, one for dq and one for dk and dv. So no element is written by two programs (no atomics), and no
order depends on the batch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.host.temperature import LOG2E
from isobit.kernels.triton.chain import fma, product
from isobit.kernels.triton.interpreter import narrow, rounded
from isobit.kernels.triton.tiles import Tile, compile_options
from isobit.ops.attention.calls import Call, call_of, factors_of, key_bounds, which_tanh
from isobit.ops.attention.kernels_triton import (
    clamped,
    count_tiles,
    keys_of,
    like,
    load_keys,
    load_rows,
    piece_of,
    row_sums,
    strides_of,
    tile_of,
    tile_rows,
)
from isobit.ops.attention.kernels_triton_softcap import bent, full, tanh

_LOG2E = tl.constexpr(LOG2E)
#: Counters that the kernel of delta sets to zero, for kernels that take their work from one.
COUNTERS = 4
_COUNTERS = tl.constexpr(COUNTERS)
_SIZES = ["T", "S", "SEQUENCES", "P", "window", "tiles"]


@triton.jit(do_not_specialize=["T", "count"])
def delta_kernel(
    out, dout, dlse, delta, counters, T, count, o_sb, o_st, o_sh, l_sb, l_sh, l_st, H: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta [B, H, T] of ROWS rows, which are numbered (b, t, head); and zeros in the counters, if given."""
    if counters is not None:
        if tl.program_id(0) == 0:
            tl.store(counters + tl.arange(0, _COUNTERS), tl.zeros([_COUNTERS], tl.int32))
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < count
    b, t, h = row // (T * H), row // H % T, row % H
    left = load_rows(out, row * D, live, D, DP).to(tl.float32)
    right = load_rows(dout, b * o_sb + t * o_st + h * o_sh, live, D, DP).to(tl.float32)
    total = row_sums(left * right)
    if dlse is not None:
        total -= tl.load(dlse + b * l_sb + h * l_sh + t * l_st, mask=live, other=0.0)
    tl.store(delta + (b * H + h) * T + t, total, mask=live)


@triton.jit
def probabilities(left, right, sees, lse, c, cap, slope, CAPPED: tl.constexpr):
    """(P, bend) of left times right^T; bend is 1 without a cap, 1 - tanh^2 in class attn/1, and
    P (tanh^2 - 1) in attn/2. `lse` must broadcast against them."""
    z = product(left, tl.trans(right), tl.zeros([left.shape[0], right.shape[0]], tl.float32))
    bend = tl.full(z.shape, 1.0, tl.float32)
    if CAPPED == 1:
        y = tanh(z * slope)
        z, bend = cap * y, 1.0 - y * y
    if CAPPED == 2:
        z = bent(z, slope)
    p = tl.where(sees, tl.exp2(fma(z, c, -(lse * _LOG2E))), 0.0)
    if CAPPED == 2:
        bend = p * fma(z, z, full(z, -1.0))
    return p, bend


@triton.jit
def gradient_of_scores(p, bend, dp, delta, sees, CAPPED: tl.constexpr):
    """dS. It is set to 0 where masked even if dP is NaN: masked keys and queries may hold anything."""
    if CAPPED == 2:
        ds = bend * (delta - dp)
    else:
        ds = p * (dp - delta)
    if CAPPED == 1:
        ds = ds * bend
    return tl.where(sees, ds, 0.0)


@triton.jit(do_not_specialize=_SIZES)
def dq_kernel(
    q, k, v, dout, lse, delta, dq, key_start, key_end, cu_q, cu_k, table, T, S, SEQUENCES, P, window,
    c, cap, slope, scale, table_s, q_sb, q_st, q_sh, k_sp, k_ss, k_sh, v_sp, v_ss, v_sh, o_sb, o_st, o_sh,
    tiles, KV, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries for the heads of one KV head."""
    kv = tl.program_id(0) % KV
    tile = tiles - 1 - tl.program_id(0) // KV
    sequence, row, head, live, first, keys, oldest, newest, begin, end, _ = tile_of(
        tile, cu_q, key_start, key_end, cu_k, T, S, SEQUENCES, window, M, G, BLOCK, CAUSAL, WINDOWED
    )
    batch = sequence.to(tl.int64)
    if cu_q is not None:
        batch = like(batch, 0)
    head = (kv * G + head).to(tl.int64)
    row = row.to(tl.int64)
    own = load_rows(q, batch * q_sb + row * q_st + head * q_sh, live, D, DP)
    do = load_rows(dout, batch * o_sb + row * o_st + head * o_sh, live, D, DP)
    at = (batch * KV * G + head) * T + row
    own_lse = tl.load(lse + at, mask=live, other=0.0)
    own_delta = tl.load(delta + at, mask=live, other=0.0)
    k_at, v_at = k + kv.to(tl.int64) * k_sh, v + kv.to(tl.int64) * v_sh
    if table is not None:
        table = table + sequence.to(tl.int64) * table_s
    total = tl.zeros([M, DP], tl.float32)
    for block in range(begin, end, BLOCK):
        key = block + tl.arange(0, BLOCK)
        k_b = load_keys(
            k_at, table, sequence, first, key, keys, P, k_sp, k_ss, D, DP, PAGE, cu_k is not None, True
        )
        v_b = load_keys(
            v_at, table, sequence, first, key, keys, P, v_sp, v_ss, D, DP, PAGE, cu_k is not None, True
        )
        sees = key[None, :] <= newest[:, None]
        if WINDOWED:
            sees = sees & (key[None, :] >= oldest[:, None])
        p, bend = probabilities(own, k_b, sees, own_lse[:, None], c, cap, slope, CAPPED)
        dp = product(do, tl.trans(v_b), tl.zeros([M, BLOCK], tl.float32))
        ds = gradient_of_scores(p, bend, dp, own_delta[:, None], sees, CAPPED)
        total = product(rounded(ds, k_b.dtype), k_b, total)
    d = tl.arange(0, DP)
    to = ((batch * T + row) * KV * G + head)[:, None] * D + d[None, :]
    tl.store(dq + to, narrow(total * scale, dq), mask=live[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=_SIZES)
def dkv_kernel(
    q, k, v, dout, lse, delta, dk, dv, key_start, key_end, cu_q, cu_k, T, S, SEQUENCES, window,
    c, cap, slope, scale, q_sb, q_st, q_sh, k_sp, k_ss, k_sh, v_sp, v_ss, v_sh, o_sb, o_st, o_sh,
    KV, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """dk and dv of one block of keys for one KV head."""
    kv = (tl.program_id(0) % KV).to(tl.int64)
    sequence, _, _, start = piece_of(tl.program_id(0) // KV, cu_k, S, SEQUENCES, BLOCK)
    first, keys = keys_of(sequence, key_start, key_end, cu_k, S)
    q_first = tl.zeros([], tl.int32)
    rows = q_first + T
    batch = sequence.to(tl.int64)
    if cu_q is not None:
        q_first = clamped(cu_q + sequence, 0, T)
        rows = clamped(cu_q + sequence + 1, q_first, T) - q_first
        batch = like(batch, 0)
    key = start + tl.arange(0, BLOCK)
    k_b = load_keys(
        k + kv * k_sh, None, sequence, first, key, keys, 1, k_sp, k_ss, D, DP, 0, cu_k is not None, True
    )
    v_b = load_keys(
        v + kv * v_sh, None, sequence, first, key, keys, 1, v_sp, v_ss, D, DP, 0, cu_k is not None, True
    )
    before = keys - rows  # position of query 0
    low = before
    high = keys
    if CAUSAL:
        low = tl.maximum(low, start)
        if WINDOWED:
            high = tl.minimum(high, start + BLOCK - 1 + window)
    low = low - ((low % QUERIES) + QUERIES) % QUERIES  # groups of 16 are aligned to positions, also below 0
    high = tl.where(start < keys, high, low)
    dk_b = tl.zeros([BLOCK, DP], tl.float32)
    dv_b = tl.zeros([BLOCK, DP], tl.float32)
    for g in range(G):
        head = kv * G + g
        for position in range(low, high, QUERIES):
            query = position - before + tl.arange(0, QUERIES)
            live = (query >= 0) & (query < rows)
            if CAUSAL:
                live = live & (query + before >= 0)
            row = (q_first + query).to(tl.int64)
            q_b = load_rows(q, batch * q_sb + row * q_st + head * q_sh, live, D, DP)
            do_b = load_rows(dout, batch * o_sb + row * o_st + head * o_sh, live, D, DP)
            at = (batch * KV * G + head) * T + row
            lse_b = tl.load(lse + at, mask=live, other=0.0)
            delta_b = tl.load(delta + at, mask=live, other=0.0)
            sees = live[None, :] & (key < keys)[:, None]
            if CAUSAL:
                sees = sees & (key[:, None] <= (query + before)[None, :])
            if WINDOWED:
                sees = sees & (key[:, None] > (query + before - window)[None, :])
            p, bend = probabilities(k_b, q_b, sees, lse_b[None, :], c, cap, slope, CAPPED)
            dv_b = product(rounded(p, do_b.dtype), do_b, dv_b)
            dp = product(v_b, tl.trans(do_b), tl.zeros([BLOCK, QUERIES], tl.float32))
            ds = gradient_of_scores(p, bend, dp, delta_b[None, :], sees, CAPPED)
            dk_b = product(rounded(ds, q_b.dtype), q_b, dk_b)
    d = tl.arange(0, DP)
    inside = (key < keys)[:, None] & (d < D)[None, :]
    base = batch * S
    to = ((base + first + key) * KV + kv)[:, None] * D + d[None, :]
    tl.store(dk + to, narrow(dk_b * scale, dk), mask=inside)
    tl.store(dv + to, narrow(dv_b, dv), mask=inside)
    if cu_k is None:  # keys outside key_start and key_end get zeros
        place = key  # the same index, counted from the start of the batch element
        outside = (place < S) & ((place < first) | (place >= first + keys))
        to = ((base + place) * KV + kv)[:, None] * D + d[None, :]
        zero = tl.zeros([BLOCK, DP], tl.float32)
        tl.store(dk + to, narrow(zero, dk), mask=outside[:, None] & (d < D)[None, :])
        tl.store(dv + to, narrow(zero, dv), mask=outside[:, None] & (d < D)[None, :])


def _rows(t: Tensor) -> Tensor:
    """Incoming gradients may have any strides; kernels need the last to be 1."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _strides(dout: Tensor, call: Call) -> tuple[int, ...]:
    """Batch, row and head strides; see `strides_of`."""
    return (dout.stride(0) if call.B > 1 else 0, dout.stride(1), dout.stride(2))


def delta_of(launch: Launch, args: dict[str, Any], dout: Tensor, counters: Tensor | None = None) -> Tensor:
    """delta [B, H, T] in fp32. The same kernel sets the counters of the kernels that follow to zero."""
    call, dlse, out = call_of(args), args["dlse"], args["out"].contiguous()
    rows = call.B * call.T * call.H
    delta = torch.empty((call.B, call.H, call.T), dtype=torch.float32, device=dout.device)
    launch(
        delta_kernel,
        (-(-rows // 16),),
        *(out, dout, dlse, delta, counters),
        *(call.T, rows, *_strides(dout, call)),
        *((0, 0, 0) if dlse is None else dlse.stride()),
        H=call.H,
        D=call.D,
        DP=call.padded,
        ROWS=16,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return delta


def attention_bwd(launch: Launch = run, tangent: int = 1, **args: Any) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv), those that are wanted. `tangent` is the class whose tanh caps scores."""
    call, factors = call_of(args), factors_of(args, tangent)
    q, k, v, table = (args[name] for name in ("q", "k", "v", "block_table"))
    lse, dout = args["lse"].contiguous(), _rows(args["dout"])
    want_kv = args["want_k"] or args["want_v"]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if args["want_q"] else None
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device) if want_kv else None
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device) if want_kv else None
    D, DP = call.D, call.padded
    delta = delta_of(launch, args, dout)
    strides = strides_of(call, q, k, v)
    bounds = (args["key_start"], args["key_end"], args["cu_seqlens_q"], key_bounds(args))
    window = args["window"] or 0
    most = 32 if D > 128 else 64
    constants: dict[str, Any] = {
        "G": call.group,
        "D": D,
        "DP": DP,
        "CAUSAL": args["causal"],
        "WINDOWED": args["window"] is not None,
        "CAPPED": which_tanh(args, tangent),
        **compile_options(Tile(most, most, 0, warps=4, stages=2)),
    }
    if dq is not None and dq.numel():
        M = tile_rows(call, max(most, 1 << (call.group - 1).bit_length()))
        tiles = count_tiles(call, M // call.group)
        launch(
            dq_kernel,
            (tiles * call.KV,),
            *(q, k, v, dout, lse, delta, dq, *bounds, table),
            *(call.T, call.S, call.sequences, call.pages, window, *factors),
            0 if table is None else table.stride(0),
            *(*strides, *_strides(dout, call)),
            *(tiles, call.KV),
            M=M,
            BLOCK=most,
            PAGE=call.page,
            **constants,
        )
    if dk is not None and dk.numel():
        block = _block_for(call, most)
        blocks = count_blocks(call, block)
        launch(
            dkv_kernel,
            (blocks * call.KV,),
            *(q, k, v, dout, lse, delta, dk, dv, *bounds),
            *(call.T, call.S, call.sequences, window, *factors),
            *(*strides, *_strides(dout, call)),
            call.KV,
            QUERIES=min(most, max(16, 1 << (max(call.T, 1) - 1).bit_length())),
            BLOCK=block,
            **constants,
        )
    return dq, dk if args["want_k"] else None, dv if args["want_v"] else None


def _block_for(call: Call, most: int) -> int:
    """Keys per program, reduced for short sequences."""
    return min(most, max(16, 1 << (max(call.S, 1) - 1).bit_length()))


def count_blocks(call: Call, per: int) -> int:
    """Number of blocks of `per` keys. For packed sequences an upper bound, wherever they begin."""
    if call.packed_k:
        return call.S // per + call.sequences if call.sequences else 0
    return call.sequences * (-(-call.S // per))
