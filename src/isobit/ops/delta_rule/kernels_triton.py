"""The recurrence in portable Triton: NVIDIA, AMD, and the CPU interpreter.

One program processes one sequence of one value head, for BV columns of the state: columns are independent,
and sums run over K. The state stays in registers from the last chunk to the first. Every edge is masked:
missing tokens, features and columns are zeros, so the bits of a sequence do not depend on what follows it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.launch import Launch, run
from isobit.kernels.host.temperature import LOG2E
from isobit.kernels.triton.chain import product
from isobit.kernels.triton.interpreter import narrow, rounded


@triton.jit
def bounds_of(cu_seqlens, n, T):
    """(first token, tokens) of a packed sequence, clamped to the T tokens whatever the bounds are."""
    first = tl.minimum(tl.maximum(tl.load(cu_seqlens + n), 0), T)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1), first), T)
    return first.to(tl.int64), (end - first).to(tl.int32)


@triton.jit(do_not_specialize=["S", "T"])
def offsets_kernel(offsets, cu_seqlens, S, T, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """The first chunk of every packed sequence. One program."""
    total = tl.zeros([], tl.int32)
    for start in range(0, S, BLOCK):
        n = start + tl.arange(0, BLOCK)
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens + n, mask=n < S, other=0), 0), T)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1, mask=n < S, other=0), first), T)
        chunks = tl.where(n < S, tl.cdiv(end - first, CHUNK), 0).to(tl.int32)
        tl.store(offsets + n, total + tl.cumsum(chunks, 0) - chunks, mask=n < S)
        total += tl.sum(chunks, 0)


@triton.jit(do_not_specialize=["T", "NT"])
def dhu_kernel(
    q, k, w, do, dv, g, gk, dht, cu_seqlens, offsets, dh, dh0, dv2, scale, unit, T, NT, H, HV, K, V,
    CHUNK: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """All chunks of one sequence, for one value head and BV columns of its state."""
    # One dimension: CUDA limits the others to 65535 programs, which thousands of short sequences exceed.
    tiles = tl.cdiv(V, BV)
    tile, item = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    n, hv = item // HV, item % HV
    h = hv // (HV // H)
    if cu_seqlens is not None:
        first, tokens = bounds_of(cu_seqlens, n, T)
        chunk = tl.load(offsets + n).to(tl.int64)
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
    D = tl.zeros([BK, BV], tl.float32)
    if dht is not None:
        D = tl.load(dht + state + at, mask=inside, other=0.0).to(tl.float32)
    chunks = tl.cdiv(tokens, CHUNK)
    for i in range(chunks):
        c = chunks - 1 - i
        left = tl.minimum(tokens - c * CHUNK, CHUNK)
        t = tl.arange(0, CHUNK)
        live = t < left
        row = first + c * CHUNK + t
        # Invalid bounds and offsets may name chunks that dh does not have.
        fits = ((chunk + c >= 0) & (chunk + c < NT)) | (cu_seqlens is None)
        to = dh + ((chunk + c) * HV + hv) * K * V + at
        tl.store(to, narrow(D, dh), mask=inside & fits)
        by_k = live[:, None] & in_k[None, :]
        by_v = live[:, None] & in_v[None, :]
        k_c = tl.load(k + (row * H + h)[:, None] * K + i_k[None, :], mask=by_k, other=0.0)
        q_c = tl.load(q + (row * H + h)[:, None] * K + i_k[None, :], mask=by_k, other=0.0)
        w_c = tl.load(w + (row * HV + hv)[:, None] * K + i_k[None, :], mask=by_k, other=0.0)
        at_v = (row * HV + hv)[:, None] * V + i_v[None, :]
        do_c = tl.load(do + at_v, mask=by_v, other=0.0)
        dv_c = tl.load(dv + at_v, mask=by_v, other=0.0).to(tl.float32)
        X = product(k_c, rounded(D, k.dtype.element_ty), tl.zeros([CHUNK, BV], tl.float32))
        last = (first + c * CHUNK + left - 1) * HV + hv
        factor = tl.full([CHUNK], 1.0, tl.float32) * scale
        if g is not None:
            g_c = tl.load(g + row * HV + hv, mask=live, other=0.0) * unit
            g_last = tl.load(g + last) * unit
            X = X * tl.where(live, tl.exp2(g_last - g_c), 0.0)[:, None]
            factor = tl.exp2(g_c) * scale
        if gk is not None:
            decay = tl.load(gk + last * K + i_k, mask=in_k, other=0.0) * unit
            if g is not None:
                decay += g_last
            D = D * tl.exp2(decay)[:, None]
        elif g is not None:
            D = D * tl.exp2(g_last)
        X = rounded(X + dv_c, dv2.dtype.element_ty)
        tl.store(dv2 + at_v, X, mask=by_v)
        if SPLIT:
            # Gate and scale are folded into do, as a pair of numbers: a single one would lose digits of D.
            y = do_c.to(tl.float32) * factor[:, None]
            high = rounded(y, do.dtype.element_ty)
            low = rounded(y - high.to(tl.float32), do.dtype.element_ty)
            D += product(tl.trans(q_c), high, tl.zeros([BK, BV], tl.float32))
            D += product(tl.trans(q_c), low, tl.zeros([BK, BV], tl.float32))
        else:
            y = do_c
            if g is not None:
                y = y * tl.exp2(g_c)[:, None]
            D += product(tl.trans(q_c), y, tl.zeros([BK, BV], tl.float32)) * scale
        D -= product(tl.trans(w_c), X, tl.zeros([BK, BV], tl.float32))
    if dh0 is not None:
        tl.store(dh0 + state + at, D, mask=inside)


def columns_of(rows: int) -> int:
    """Columns of the state per program, for K filled up to `rows`. With 64 rows and 32 columns ptxas 12.8,
    the one in Triton 3.6 and 3.7, loses the address of an operand if K is not a multiple of 16 (see
    `isobit.check.sass`)."""
    return 64 if rows == 64 else 32


def why_not(args: dict[str, Any]) -> str | None:
    if args["q"].dtype == torch.float64:
        return "inputs are fp64; the kernels compute in fp32"
    K = args["q"].shape[-1]
    if K > 256:
        return f"K={K}; a program holds at most 256 rows of the state"
    return None


def chunk_offsets(args: dict[str, Any], launch: Launch) -> Tensor | None:
    """[S] or [S + 1], if sequences are packed."""
    bounds, given = args["cu_seqlens"], args["chunk_offsets"]
    if bounds is None:
        return None
    if given is not None:
        return given.contiguous()
    S = len(bounds) - 1
    offsets = torch.empty(max(S, 1), dtype=torch.int32, device=bounds.device)
    launch(
        offsets_kernel, (1,),
        offsets, bounds.contiguous(), S, args["q"].shape[1],
        CHUNK=args["chunk_size"], BLOCK=1024, num_warps=4,
    )  # fmt: skip
    return offsets


def outputs(args: dict[str, Any]) -> tuple[Tensor, Tensor | None, Tensor, int]:
    """(dh, dh0, dv2, sequences), allocated."""
    q, dv, bounds = args["q"], args["dv"], args["cu_seqlens"]
    B, T, _, K = q.shape
    HV, V = dv.shape[2:]
    S = B if bounds is None else len(bounds) - 1
    NT = -(-T // args["chunk_size"]) if bounds is None else len(args["chunk_indices"])
    state = (HV, V, K) if args["state_v_first"] else (HV, K, V)
    dh = torch.empty((B, NT, *state), dtype=q.dtype, device=q.device)
    dh0 = torch.empty((S, *state), dtype=torch.float32, device=q.device) if args["h0"] is not None else None
    return dh, dh0, torch.empty(dv.shape, dtype=dv.dtype, device=dv.device), S


def dhu(launch: Launch = run, **args: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    q, g = args["q"], args["g"]
    T, H, K = q.shape[1:]
    HV, V = args["dv"].shape[2:]
    dh, dh0, dv2, S = outputs(args)
    rows = max(16, triton.next_power_of_2(K))
    columns = columns_of(rows)
    names = ("q", "k", "w", "do", "dv", "g", "gk", "dht", "cu_seqlens")
    given = (None if args[name] is None else args[name].contiguous() for name in names)
    launch(
        dhu_kernel, (-(-V // columns) * S * HV,),
        *given, chunk_offsets(args, launch), dh, dh0, dv2,
        float(args["scale"]), 1.0 if args["use_exp2"] else LOG2E, T, dh.shape[1], H, HV, K, V,
        CHUNK=args["chunk_size"], BK=rows, BV=columns,
        V_FIRST=args["state_v_first"], SPLIT=g is not None and q.dtype != torch.float32,
        num_warps=4, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip
    return dh, dh0, dv2
