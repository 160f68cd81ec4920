"""The backward of `rms_norm` in portable Triton. With y = h rstd and g = dout w, for every row

    dx      = rstd (g - y mean(g y)) + dsummed
    dweight = sum over rows of dout y

A program takes groups of 16 rows and holds their sum of dweight in registers: one read of h and dout, one
write of dx, and one partial sum of dweight per program, which a second kernel adds. Rows that do not fit in
registers are read again by a kernel for dweight.

Order of dweight: the rows of a group one after another from +0, groups by a tree of neighbours, padded with
+0 to a power of two. So it does not matter which program takes which groups, nor how many. Sums of a row are
as in the forward.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.arch import sm_count
from isobit.blocks.interpreter import INTERPRETED, narrow
from isobit.blocks.launch import Launch, run
from isobit.blocks.triton_rows import row_offset
from isobit.ops.rms_norm.kernels_triton import (
    UNROLL,
    load_tile,
    load_weight,
    mask_of,
    or_none,
    store_tile,
    tile_of,
    tree_sums,
    walk,
)
from isobit.ops.rms_norm.order import GROUP, log_lanes

#: Elements of a tile of several short rows.
TILE = 2048

#: The longest row that a program holds in registers, beside its sums of dweight.
HELD = 8192

#: Partial sums that a program of the last kernel adds (log2), and its columns. Affects the schedule only. The
#: interpreter has a cost per operation, so it takes more columns, and fewer sums so that more than one launch
#: is needed.
LOG_FAN, COLUMNS = (2, 4096) if INTERPRETED.value else (8, 32)


# Kernels

BATCH = (
    "N", "inner", "steps", "h_so", "h_si", "dout_so", "dout_si", "dsummed_so", "dsummed_si", "P",
)  # fmt: skip


@triton.jit
def over_rows(x, LOG_ROWS: tl.constexpr, LANES: tl.constexpr):
    """Sums over 2**LOG_ROWS rows: neighbours are added repeatedly. [1, LANES]."""
    for i in tl.static_range(LOG_ROWS):
        x = tl.sum(tl.reshape(x, [1 << (LOG_ROWS - 1 - i), 2, LANES]), axis=1)
    return x


@triton.jit
def load_rows(
    h, dout, row, live, inner, h_so, h_si, dout_so, dout_si,
    D: tl.constexpr, WORD: tl.constexpr, LOG_LANES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The chunks of h and of dout; zeros for rows that do not exist."""
    lane = tl.arange(0, 1 << LOG_LANES)
    h_start = row_offset(row, inner, h_so, h_si) * WORD
    dout_start = row_offset(row, inner, dout_so, dout_si) * WORD
    hs = ()
    douts = ()
    for i in tl.static_range(CHUNKS):
        col = (i << LOG_LANES) + lane
        mask = live[:, None] & (col < D)[None, :]
        hs = hs + (load_tile(h, h_start, col, mask),)
        douts = douts + (load_tile(dout, dout_start, col, mask),)
    return hs, douts


@triton.jit
def zero_tiles(ROWS: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(CHUNKS):
        tiles = tiles + (tl.zeros([ROWS, LANES], tl.float32),)
    return tiles


@triton.jit
def add_rows(totals, sums, LOG_ROWS: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr):
    """Chunks of totals plus the sums over rows of `sums`."""
    found = ()
    for i in tl.static_range(CHUNKS):
        found = found + (totals[i] + over_rows(sums[i], LOG_ROWS, LANES),)
    return found


@triton.jit(do_not_specialize=BATCH)
def gradient_rows(
    h, dout, dsummed, weight, rstd, dx, partials, offset, N, inner, steps,
    h_so, h_si, dout_so, dout_si, dsummed_so, dsummed_si,
    D: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr, LOG_LANES: tl.constexpr, CHUNKS: tl.constexpr,
    LOG_ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One program takes `steps` times ROWS groups of GROUP rows; steps is 1 or 2. Row i of a tile belongs to
    group i, and the next rows are loaded before these are computed."""
    LANES: tl.constexpr = 1 << LOG_LANES
    lane = tl.arange(0, LANES)
    base = tl.program_id(0).to(tl.int64) * steps * (ROWS * GROUP)
    count = tl.minimum(N - base, steps * GROUP).to(tl.int32)  # the last program may have few rows
    first = base + tl.arange(0, ROWS) * GROUP
    strides = (inner, h_so, h_si, dout_so, dout_si)
    totals = zero_tiles(1, LANES, CHUNKS)
    sums = zero_tiles(ROWS, LANES, CHUNKS)
    hs, douts = load_rows(h, dout, first, first < N, *strides, D, WORD, LOG_LANES, CHUNKS)
    for k in range(count):
        row = first + k // GROUP * (ROWS * GROUP) + k % GROUP
        after = first + (k + 1) // GROUP * (ROWS * GROUP) + (k + 1) % GROUP
        live = (after < N) & (k + 1 < count)
        next_hs, next_douts = load_rows(h, dout, after, live, *strides, D, WORD, LOG_LANES, CHUNKS)
        scale = tl.load(rstd + row, mask=row < N, other=0.0)
        if dx is not None:
            products = tl.zeros([ROWS, LANES], tl.float32)
            for i in tl.static_range(CHUNKS):
                g = douts[i].to(tl.float32) * load_weight(weight, offset, i * LANES + lane, D)
                products = products + g * (hs[i].to(tl.float32) * scale[:, None])
            products = tree_sums(products, ROWS, LOG_LANES)
            mean = tl.div_rn(products, tl.full(products.shape, D, tl.float32))
            dsummed_start = row_offset(row, inner, dsummed_so, dsummed_si) * WORD
            for i in tl.static_range(CHUNKS):
                col = i * LANES + lane
                mask = (row < N)[:, None] & (col < D)[None, :]
                # The weight is loaded again, from L1: keeping it would take as many registers as a row.
                g = douts[i].to(tl.float32) * load_weight(weight, offset, col, D)
                y = hs[i].to(tl.float32) * scale[:, None]
                d = scale[:, None] * (g - y * mean[:, None])
                if dsummed is not None:
                    d = d + load_tile(dsummed, dsummed_start, col, mask).to(tl.float32)
                store_tile(dx, row * D, col, narrow(d, dx), mask)
        if partials is not None:
            if k == GROUP:  # a second step
                totals = add_rows(totals, sums, LOG_ROWS, LANES, CHUNKS)
                sums = zero_tiles(ROWS, LANES, CHUNKS)
            more = ()
            for i in tl.static_range(CHUNKS):
                y = hs[i].to(tl.float32) * scale[:, None]
                more = more + (sums[i] + douts[i].to(tl.float32) * y,)
            sums = more
        hs = next_hs
        douts = next_douts
    if partials is not None:
        totals = add_rows(totals, sums, LOG_ROWS, LANES, CHUNKS)  # two steps are two neighbours of the tree
        own = tl.program_id(0).to(tl.int64) * D + tl.zeros([1], tl.int64)
        for i in tl.static_range(CHUNKS):
            col = i * LANES + lane
            mask = mask_of(own, col, 0, D, i * LANES, LANES, 1)
            store_tile(partials, own, col, totals[i], mask)


@triton.jit(do_not_specialize=BATCH)
def gradient_long_rows(
    h, dout, dsummed, weight, rstd, dx, offset, N, inner,
    h_so, h_si, dout_so, dout_si, dsummed_so, dsummed_si,
    D: tl.constexpr, WORD: tl.constexpr, LOG_LANES: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """dx of rows that do not fit in registers: one program per row, which it reads twice."""
    LANES: tl.constexpr = 1 << LOG_LANES
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    lane = tl.arange(0, LANES)
    h_start = row_offset(row, inner, h_so, h_si) * WORD
    dout_start = row_offset(row, inner, dout_so, dout_si) * WORD
    dsummed_start = row_offset(row, inner, dsummed_so, dsummed_si) * WORD
    scale = tl.load(rstd + row, mask=row < N, other=0.0)
    products = tl.zeros([1, LANES], tl.float32)
    for first in range(0, D, UNROLL * LANES):
        for i in tl.static_range(UNROLL):
            col = first + i * LANES + lane
            mask = (row < N)[:, None] & (col < D)[None, :]
            g = load_tile(dout, dout_start, col, mask).to(tl.float32) * load_weight(weight, offset, col, D)
            y = load_tile(h, h_start, col, mask).to(tl.float32) * scale[:, None]
            products = products + g * y
    products = tree_sums(products, 1, LOG_LANES)
    mean = tl.div_rn(products, tl.full(products.shape, D, tl.float32))
    for first in range(0, D, UNROLL * LANES):
        for i in tl.static_range(UNROLL):
            col = first + i * LANES + lane
            mask = (row < N)[:, None] & (col < D)[None, :]
            g = load_tile(dout, dout_start, col, mask).to(tl.float32) * load_weight(weight, offset, col, D)
            y = load_tile(h, h_start, col, mask).to(tl.float32) * scale[:, None]
            d = scale[:, None] * (g - y * mean[:, None])
            if dsummed is not None:
                d = d + load_tile(dsummed, dsummed_start, col, mask).to(tl.float32)
            store_tile(dx, row * D, col, narrow(d, dx), mask)


@triton.jit(do_not_specialize=BATCH)
def sum_groups(
    h, dout, rstd, partials, N, inner, h_so, h_si, dout_so, dout_si,
    D: tl.constexpr, WORD: tl.constexpr, LOG_LANES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Sums of dweight for long rows: one program takes some columns of one group."""
    group = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * (1 << LOG_LANES) + tl.arange(0, 1 << LOG_LANES)
    total = tl.zeros([1, 1 << LOG_LANES], tl.float32)
    for k in range(tl.minimum(N - group * GROUP, GROUP).to(tl.int32)):
        row = group * GROUP + k + tl.arange(0, 1)
        mask = (row < N)[:, None] & (col < D)[None, :]
        scale = tl.load(rstd + row, mask=row < N, other=0.0)
        y = load_tile(h, row_offset(row, inner, h_so, h_si) * WORD, col, mask).to(tl.float32) * scale[:, None]
        dout_start = row_offset(row, inner, dout_so, dout_si) * WORD
        total = total + load_tile(dout, dout_start, col, mask).to(tl.float32) * y
    own = group * D + tl.zeros([1], tl.int64)
    store_tile(partials, own, col, total, (own >= 0)[:, None] & (col < D)[None, :])


@triton.jit(do_not_specialize=BATCH)
def fold(partials, out, P, D: tl.constexpr, COLUMNS: tl.constexpr, LOG_FAN: tl.constexpr):
    """One program adds some columns of 2**LOG_FAN of the P sums: [P, D] becomes [programs, D]."""
    part = tl.program_id(0).to(tl.int64)
    at = (part << LOG_FAN) + tl.arange(0, 1 << LOG_FAN)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    found = load_tile(partials, at * D, col, (at < P)[:, None] & (col < D)[None, :])
    found = over_rows(found, LOG_FAN, COLUMNS)
    own = part * D + tl.zeros([1], tl.int64)
    store_tile(out, own, col, narrow(found, out), (own >= 0)[:, None] & (col < D)[None, :])


# Launchers


def steps_of(N: int, rows: int, device: torch.device) -> int:
    """Steps of a program that takes this many rows per step: two, if that leaves at least four programs per
    SM. It halves the number of partial sums, and does not affect the order."""
    return 2 if 8 * rows * sm_count(device) <= N else 1


def sum_of(partials: Tensor, dtype: torch.dtype, launch: Launch) -> Tensor:
    """[P, D] -> [D] by the tree of neighbours, some levels per launch."""
    D = partials.shape[1]
    while True:
        P = len(partials)
        parts = triton.cdiv(P, 1 << LOG_FAN)
        out = torch.empty((parts, D), dtype=dtype if parts == 1 else torch.float32, device=partials.device)
        launch(
            fold, (parts, triton.cdiv(D, COLUMNS)), partials, out, P, D, COLUMNS, LOG_FAN,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        if parts == 1:
            return out.view(D)
        partials = out


def rms_norm_bwd(launch: Launch = run, **args: Any) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dweight); None for what is not wanted."""
    h, weight, rstd = args["h"], args["weight"], args["rstd"].contiguous()
    lead, D = h.shape[:-1], h.shape[-1]
    N, device, dtype = lead.numel(), h.device, weight.dtype
    dx = torch.empty(h.shape, dtype=h.dtype, device=device) if args["want_h"] else None
    if N == 0:
        return dx, torch.zeros(D, dtype=dtype, device=device) if args["want_weight"] else None
    inner, tensors, strides, word = walk(lead, D, h, args["dout"], args["dsummed"])
    offset, options = or_none(args["offset"]), {"enable_fp_fusion": False}
    tile = tile_of(D, TILE)
    rows = tile["ROWS"] * GROUP
    steps = steps_of(N, rows, device) if D <= HELD else 1
    partials = None
    if args["want_weight"]:
        partials = torch.empty((triton.cdiv(N, rows * steps), D), dtype=torch.float32, device=device)
    if D <= HELD:
        launch(
            gradient_rows, (triton.cdiv(N, rows * steps),), *tensors, weight, rstd, dx, partials, offset, N,
            inner, steps, *strides, D=D, WORD=word, **tile, LOG_ROWS=tile["ROWS"].bit_length() - 1,
            GROUP=GROUP,
            num_warps=4 if D <= HELD // 2 else 8, **options,
        )  # fmt: skip
    else:
        log = log_lanes(D)
        if dx is not None:
            launch(
                gradient_long_rows, (N,), *tensors, weight, rstd, dx, offset, N, inner, *strides,
                D=D, WORD=word, LOG_LANES=log, UNROLL=UNROLL, num_warps=4, **options,
            )  # fmt: skip
        if partials is not None:
            launch(
                sum_groups, (len(partials), triton.cdiv(D, 1 << log)), *tensors[:2], rstd, partials, N, inner,
                *strides[:4], D=D, WORD=word, LOG_LANES=log, GROUP=GROUP, num_warps=4, **options,
            )  # fmt: skip
    return dx, None if partials is None else sum_of(partials, dtype, launch)
