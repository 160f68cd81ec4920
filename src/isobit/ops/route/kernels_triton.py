"""Scores, the choice of experts and their weights, in portable Triton: NVIDIA, AMD, and the CPU interpreter.
Class route/1, see docs/route.md.

A program takes some rows, each whole and in registers. Experts are chosen one after another: the largest key,
which is the score in an order that integers have too, and of the experts that have it the lowest. Whatever
the logits hold, NaN included, the experts of a token are different: what was chosen has the key NEVER, which
is no score's. Largest, lowest and the one weight are reductions of 32-bit integers, for which NVIDIA's GPUs
have an instruction within a warp. A program is one warp, so nothing passes through shared memory.

exp is that of the device's math library. Kernels are compiled without contraction.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from isobit.frame.launch import Launch, run
from isobit.kernels.host.rows import row_strides, walkable
from isobit.kernels.triton.interpreter import INTERPRETED, narrow
from isobit.kernels.triton.logits import as_bytes
from isobit.kernels.triton.rows import row_offset
from isobit.ops.route.kernels_triton_sort import sort

#: Numbers that a program, one warp, has in registers; at least a row.
ELEMENTS = 256

#: Less than every key, for what cannot be chosen.
NEVER = tl.constexpr(-(2**31))

#: Arguments that change with the batch. They are not specialised, to avoid recompiles.
BATCH = ("N", "inner", "z_so", "z_si", "mask_so", "mask_si")


# Kernels


@triton.jit
def exp(x):
    if INTERPRETED:
        y = tl.exp(x)  # there it is numpy's, and there is no library
    else:
        y = libdevice.exp(x)
    return y


@triton.jit
def tree_of_rows(x, ROWS: tl.constexpr, LOG: tl.constexpr):
    """Sums of rows of 2**LOG numbers: neighbours are added repeatedly."""
    for i in tl.static_range(LOG):
        # An axis of two: one commutative addition, whichever threads hold the two.
        x = tl.sum(tl.reshape(x, [ROWS, 1 << (LOG - 1 - i), 2]), axis=2)
    return tl.max(x, axis=1)  # one element is left


@triton.jit
def load_rows(logits, mask, row, N, inner, z_so, z_si, mask_so, mask_si, E: tl.constexpr, EP: tl.constexpr):
    """(logits of rows [ROWS, EP], which rows are live)."""
    live = row < N
    if mask is not None:
        live = live & (tl.load(mask + row_offset(row, inner, mask_so, mask_si), mask=live, other=0) != 0)
    e = tl.arange(0, EP)
    at = logits + row_offset(row, inner, z_so, z_si)[:, None] + e[None, :]
    z = tl.load(at, mask=live[:, None] & (e < E)[None, :], other=float("-inf")).to(tl.float32)
    return z, live


@triton.jit
def scores(z, SIGMOID: tl.constexpr, ROWS: tl.constexpr, LOG: tl.constexpr):
    one = tl.full(z.shape, 1.0, tl.float32)
    if SIGMOID:
        p = tl.div_rn(one, one + exp(-z))
    else:
        e = exp(z - tl.max(z, axis=1)[:, None])
        p = tl.div_rn(e, tree_of_rows(e, ROWS, LOG)[:, None] * one)
    return p


@triton.jit
def key_of(score):
    """Larger for a larger score. NaN counts as -inf, -0 as 0."""
    score = tl.where(score != score, float("-inf"), tl.where(score == 0.0, 0.0, score))
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def first_largest(key, number, AXIS: tl.constexpr):
    """(the largest key, the lowest number that has it) along an axis."""
    largest = tl.max(key, axis=AXIS)
    return largest, tl.min(tl.where(key == tl.expand_dims(largest, AXIS), number, 0x7FFFFFFF), axis=AXIS)


@triton.jit
def in_best_groups(key, ROWS: tl.constexpr, EP: tl.constexpr, GROUPS: tl.constexpr, TOP: tl.constexpr):
    """Keys of experts of the TOP groups in which the two largest scores have the largest sum; NEVER for
    others."""
    SIZE: tl.constexpr = EP // GROUPS
    by_group = tl.reshape(key, [ROWS, GROUPS, SIZE])
    i = tl.arange(0, SIZE)[None, None, :]
    first, at = first_largest(by_group, i, 2)
    second = tl.max(tl.where(i == at[:, :, None], NEVER, by_group), axis=2)
    g = tl.arange(0, GROUPS)[None, :]
    left = key_of(score_of(first) + score_of(second))
    taken = tl.zeros([ROWS, GROUPS], tl.int32)
    for _ in tl.static_range(TOP):
        _, at = first_largest(left, g, 1)
        best = g == at[:, None]
        taken = tl.where(best, 1, taken)
        left = tl.where(best, NEVER, left)
    return tl.reshape(tl.where(taken[:, :, None] != 0, by_group, NEVER), [ROWS, EP])


@triton.jit
def at_expert(x, hit):
    """The element of every row that is hit, +0 for -0: a sum of its bits and of zeros."""
    bits = tl.sum(tl.where(hit, x.to(tl.int32, bitcast=True), 0), axis=1)
    return bits.to(tl.float32, bitcast=True) + 0.0


@triton.jit(do_not_specialize=BATCH)
def route_rows(
    logits, bias, mask, weights, experts, N, inner, z_so, z_si, mask_so, mask_si,
    E: tl.constexpr, K: tl.constexpr, LOG: tl.constexpr, LOG_K: tl.constexpr, ROWS: tl.constexpr,
    SIGMOID: tl.constexpr, OVER_K: tl.constexpr, NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
):  # fmt: skip
    """OVER_K: a softmax of the chosen logits alone."""
    EP: tl.constexpr = 1 << LOG
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    z, live = load_rows(logits, mask, row, N, inner, z_so, z_si, mask_so, mask_si, E, EP)
    e = tl.arange(0, EP)[None, :]
    p = z
    if not OVER_K:
        p = scores(z, SIGMOID, ROWS, LOG)
    score = z
    if GROUPS > 0:
        score = p
    if bias is not None:
        score = p + tl.load(bias + e, mask=e < E, other=0.0)
    key = tl.where(e < E, key_of(score), NEVER)
    if GROUPS > 0:
        key = in_best_groups(key, ROWS, EP, GROUPS, TOP_GROUPS)
    j_of = tl.arange(0, 1 << LOG_K)[None, :]
    w = tl.zeros([ROWS, 1 << LOG_K], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    top = tl.zeros([ROWS], tl.float32)
    for j in tl.static_range(K):
        _, number = first_largest(key, e, 1)
        hit = e == number[:, None]
        key = tl.where(hit, NEVER, key)
        own = at_expert(p, hit)
        if OVER_K:
            if j == 0:
                top = own
            own = exp(own - top)
        if j == 0:
            total = own
        else:
            total += own
        w = tl.where(j_of == j, own[:, None], w)
        tl.store(experts + row * K + j, tl.where(live, number, E), mask=row < N)
    if NORMALIZE or OVER_K:
        w = tl.div_rn(w, tl.zeros([ROWS, 1 << LOG_K], tl.float32) + total[:, None])
    w = tl.where(live[:, None], w, 0.0)
    at = weights + row[:, None] * K + j_of
    tl.store(at, narrow(w, weights), mask=(row < N)[:, None] & (j_of < K))


@triton.jit(do_not_specialize=(*BATCH, "g_so", "g_si"))
def route_rows_bwd(
    logits, mask, experts, dweights, dlogits, N, inner, z_so, z_si, mask_so, mask_si, g_so, g_si,
    E: tl.constexpr, K: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr,
    SIGMOID: tl.constexpr, OVER_K: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    EP: tl.constexpr = 1 << LOG
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    z, live = load_rows(logits, mask, row, N, inner, z_so, z_si, mask_so, mask_si, E, EP)
    e = tl.arange(0, EP)[None, :]
    if OVER_K:
        first = tl.load(experts + row * K, mask=live, other=0)
        p = exp(z - at_expert(z, e == first[:, None])[:, None])
    else:
        p = scores(z, SIGMOID, ROWS, LOG)
    total = tl.zeros([ROWS], tl.float32)
    if NORMALIZE or OVER_K:
        for j in tl.static_range(K):
            number = tl.load(experts + row * K + j, mask=live, other=0)
            own = at_expert(p, e == number[:, None])
            if j == 0:
                total = own
            else:
                total += own
    w = p
    if NORMALIZE or OVER_K:
        w = tl.div_rn(p, tl.zeros([ROWS, EP], tl.float32) + total[:, None])
    d = tl.zeros([ROWS], tl.float32)
    g = tl.zeros([ROWS, EP], tl.float32)
    chosen = tl.zeros([ROWS, EP], tl.int32)
    given = dweights + row_offset(row, inner, g_so, g_si)
    for j in tl.static_range(K):
        number = tl.load(experts + row * K + j, mask=live, other=0)
        hit = e == number[:, None]
        own = tl.load(given + j, mask=live, other=0.0).to(tl.float32)
        if j == 0:
            d = own * at_expert(w, hit)
        else:
            d += own * at_expert(w, hit)
        g = tl.where(hit, own[:, None], g)
        chosen = tl.where(hit, 1, chosen)
    if SIGMOID:
        if NORMALIZE:
            g = tl.div_rn(g - d[:, None], tl.zeros([ROWS, EP], tl.float32) + total[:, None])
        dz = tl.where(chosen != 0, g * p * (1.0 - p), 0.0)
    else:
        dz = w * (g - d[:, None])
        if NORMALIZE or OVER_K:
            dz = tl.where(chosen != 0, dz, 0.0)
    dz = tl.where(live[:, None], dz, 0.0)
    tl.store(dlogits + row[:, None] * E + e, narrow(dz, dlogits), mask=(row < N)[:, None] & (e < E))


# Launchers


def route(launch: Launch = run, **args: Any) -> tuple[Tensor | None, ...]:
    logits, K, dtype = args["logits"], args["top_k"], args["dtype"]
    lead, E = logits.shape[:-1], logits.shape[-1]
    weights = torch.empty(*lead, K, dtype=logits.dtype if dtype is None else dtype, device=logits.device)
    experts = torch.empty(*lead, K, dtype=torch.int32, device=logits.device)
    inner, (z, mask), strides = row_strides(lead, (logits, walkable(lead, as_bytes(args["mask"]))))
    bias, tiles = args["bias"], _tiles(E, args)
    launch(
        route_rows, (triton.cdiv(lead.numel(), tiles["ROWS"]),),
        z, bias if bias is None else bias.contiguous(), mask, weights, experts, lead.numel(), inner, *strides,
        **tiles, LOG_K=(K - 1).bit_length(), GROUPS=args["groups"] or 0, TOP_GROUPS=args["top_groups"] or 0,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    place, offsets = sort(launch, experts, E) if args["sort"] else (None, None)
    return weights, experts, place, offsets


def route_bwd(launch: Launch = run, **args: Any) -> Tensor:
    logits, experts = args["logits"], args["experts"].contiguous()
    lead, E = logits.shape[:-1], logits.shape[-1]
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    tensors = (logits, walkable(lead, as_bytes(args["mask"])), args["dweights"])
    inner, (z, mask, g), strides = row_strides(lead, tensors)
    tiles = _tiles(E, args)
    launch(
        route_rows_bwd, (triton.cdiv(lead.numel(), tiles["ROWS"]),),
        z, mask, experts, g, dlogits, lead.numel(), inner, *strides, **tiles, num_warps=1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return dlogits


def _tiles(E: int, args: dict[str, Any]) -> dict[str, Any]:
    """The rows of a program, and what is fixed when a kernel is compiled."""
    log = (E - 1).bit_length()
    return {
        "E": E, "K": args["top_k"], "LOG": log, "ROWS": min(max(ELEMENTS >> log, 1), 8),
        "SIGMOID": args["scoring"] == "sigmoid", "OVER_K": args["order"] == "topk_softmax",
        "NORMALIZE": args["normalize"],
    }  # fmt: skip
