"""The backward of `rms_norm` in portable Triton. With y = h rstd and g = dout w, for every row

    dx      = rstd (g - y mean(g y)) + dsummed
    dweight = sum over rows of dout y

Many rows: a program takes groups of 16 rows one row after another and holds their sum of dweight in
registers: one read of h and dout, one write of dx, and one partial sum of dweight per program, which a second
kernel adds. Few rows: that would be few programs, each with a long chain of rows. So some programs take a row
each, for dx, and others some columns of all rows, for dweight: h and dout are read twice, the second time
from the L2 cache, and everything at once. Rows that do not fit in registers are read again by a kernel for
dweight.

Order of dweight: the rows of a group one after another from +0, groups by a tree of neighbours, padded with
+0 to a power of two. So it does not matter which program takes which groups, nor how many. Sums of a row are
as in the forward.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run
from isobit.kernels.triton.interpreter import INTERPRETED, narrow
from isobit.kernels.triton.rows import row_offset
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
    weight_of,
    weights_of,
)
from isobit.ops.rms_norm.order import GROUP, log_lanes

#: Elements of a tile of several short rows.
TILE = 2048

#: The longest row that a program holds in registers, in addition to its sums of dweight.
HELD = 8192

#: Bytes of shared memory for rows that are loaded while others are computed. GPUs for which Triton does that
#: have at least this.
PREFETCH_BYTES = 96 << 10

#: The longest row that is loaded there. With longer ones only one program would fit in an SM, and they would
#: be copied in words of 8 bytes: on an H200 32768 rows of 8192 took 518 us so, 477 with the next
#: row loaded ahead in registers, and 439 with LONG_ROW_REGISTERS per thread and nothing ahead (2026-11).
PREFETCHED = 5120

#: Registers per thread for longer rows of 16-bit numbers: two programs of eight warps fit in an SM, and one
#: loads while the other computes.
LONG_ROW_REGISTERS = 128

#: Rows are few if h and dout together have no more bytes than this. Less in the interpreter, so that tests
#: run both kernels.
FEW_BYTES = 1 << 16 if INTERPRETED.value else 16 << 20

#: Groups (log2) and columns of a program that adds dweight of few rows.
LOG_GROUPS, SLICE = 4, 64

#: The most steps of a program if there are many rows: each doubling halves the number of partial sums.
MAX_STEPS = 8

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
    if LOG_ROWS >= 4:  # one trip through shared memory instead of one per level, as in tree_sums
        at = tl.arange(0, 1 << LOG_ROWS)
        x = tl.gather(x, tl.broadcast_to(at[:, None], [1 << LOG_ROWS, LANES]), axis=0)
    for i in tl.static_range(LOG_ROWS):
        x = tl.sum(tl.reshape(x, [1 << (LOG_ROWS - 1 - i), 2, LANES]), axis=1)
    return x


@triton.jit
def zero_tiles(ROWS: tl.constexpr, LANES: tl.constexpr, CHUNKS: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(CHUNKS):
        tiles = tiles + (tl.zeros([ROWS, LANES], tl.float32),)
    return tiles


@triton.jit
def load_rows(
    h, dout, row, N, inner, h_so, h_si, dout_so, dout_si,
    D: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr, LOG_LANES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The chunks of h and of dout; zeros for rows that do not exist, if there are several."""
    LANES: tl.constexpr = 1 << LOG_LANES
    h_start = row_offset(row, inner, h_so, h_si) * WORD
    dout_start = row_offset(row, inner, dout_so, dout_si) * WORD
    hs = ()
    douts = ()
    for i in tl.static_range(CHUNKS):
        col = i * LANES + tl.arange(0, LANES)
        mask = mask_of(row, col, N, D, i * LANES, LANES, ROWS)
        hs = hs + (load_tile(h, h_start, col, mask),)
        douts = douts + (load_tile(dout, dout_start, col, mask),)
    return hs, douts


@triton.jit
def gradient_tile(
    hs, douts, dsummed, ws, weight, offset, scale, dx, row, N, inner, dsummed_so, dsummed_si,
    D: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr, LOG_LANES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Write dx of some rows if it is wanted; return the chunks of dout y. Without `ws` the weight is loaded
    twice, from L1."""
    LANES: tl.constexpr = 1 << LOG_LANES
    if dx is not None:
        dsummed_start = row_offset(row, inner, dsummed_so, dsummed_si) * WORD
        products = tl.zeros([ROWS, LANES], tl.float32)
        for i in tl.static_range(CHUNKS):
            g = douts[i].to(tl.float32) * weight_of(ws, weight, offset, i, D, LANES)
            products = products + g * (hs[i].to(tl.float32) * scale[:, None])
        products = tree_sums(products, ROWS, LOG_LANES)
        mean = tl.div_rn(products, tl.full(products.shape, D, tl.float32))
        for i in tl.static_range(CHUNKS):
            col = i * LANES + tl.arange(0, LANES)
            mask = mask_of(row, col, N, D, i * LANES, LANES, ROWS)
            g = douts[i].to(tl.float32) * weight_of(ws, weight, offset, i, D, LANES)
            y = hs[i].to(tl.float32) * scale[:, None]
            d = scale[:, None] * (g - y * mean[:, None])
            if dsummed is not None:
                d = d + load_tile(dsummed, dsummed_start, col, mask).to(tl.float32)
            store_tile(dx, row * D, col, narrow(d, dx), mask)
    terms = ()
    for i in tl.static_range(CHUNKS):
        terms = terms + (douts[i].to(tl.float32) * (hs[i].to(tl.float32) * scale[:, None]),)
    return terms


@triton.jit(do_not_specialize=BATCH)
def gradient_rows(
    h, dout, dsummed, weight, rstd, dx, partials, offset, N, inner, steps,
    h_so, h_si, dout_so, dout_si, dsummed_so, dsummed_si,
    D: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr, LOG_LANES: tl.constexpr, CHUNKS: tl.constexpr,
    LOG_ROWS: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program takes `steps` times ROWS groups of GROUP rows. Row i of a tile belongs to group i. Sums of
    2**l steps that wait for their neighbour are in partials[l], where the sum of all steps ends up. Rows
    arrive in shared memory, in STAGES. With one stage they are long, loaded into registers when they are
    needed, and the weight is loaded again for each."""
    LANES: tl.constexpr = 1 << LOG_LANES
    lane = tl.arange(0, LANES)
    program = tl.program_id(0).to(tl.int64)
    whole = tl.num_programs(0).to(tl.int64) * D
    strides = (inner, h_so, h_si, dout_so, dout_si)
    ws = None
    if STAGES > 1:
        ws = weights_of(weight, offset, D, LOG_LANES, CHUNKS)
    for step in range(steps):
        base = (program * steps + step) * (ROWS * GROUP)
        sums = zero_tiles(ROWS, LANES, CHUNKS)
        # The last program may have few rows, and steps without any: sums of +0.
        for k in tl.range(0, tl.minimum(N - base, GROUP).to(tl.int32), num_stages=STAGES):
            row = base + k + tl.arange(0, ROWS) * GROUP
            hs, douts = load_rows(h, dout, row, N, *strides, D, WORD, ROWS, LOG_LANES, CHUNKS)
            scale = tl.load(rstd + row, mask=row < N, other=0.0)
            terms = gradient_tile(
                hs, douts, dsummed, ws, weight, offset, scale, dx, row, N, inner, dsummed_so, dsummed_si,
                D, WORD, ROWS, LOG_LANES, CHUNKS,
            )  # fmt: skip
            if partials is not None:
                more = ()
                for i in tl.static_range(CHUNKS):
                    more = more + (sums[i] + terms[i],)
                sums = more
        if partials is not None:
            totals = ()
            for i in tl.static_range(CHUNKS):
                totals = totals + (over_rows(sums[i], LOG_ROWS, LANES),)
            own = program * D + tl.zeros([1], tl.int64)
            level = tl.zeros([], tl.int32)
            while (step >> level) & 1 == 1:  # a neighbour waits
                more = ()
                for i in tl.static_range(CHUNKS):
                    col = i * LANES + lane
                    mask = mask_of(own, col, 0, D, i * LANES, LANES, 1)
                    more = more + (load_tile(partials, own + level * whole, col, mask) + totals[i],)
                totals = more
                level += 1
            for i in tl.static_range(CHUNKS):
                col = i * LANES + lane
                mask = mask_of(own, col, 0, D, i * LANES, LANES, 1)
                store_tile(partials, own + level * whole, col, totals[i], mask)
            tl.debug_barrier()  # the next step may read it, by other threads


@triton.jit
def sum_columns(
    h, dout, rstd, partials, block, part, N, inner, h_so, h_si, dout_so, dout_si,
    D: tl.constexpr, WORD: tl.constexpr, LOG_GROUPS: tl.constexpr, GROUP: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """dweight of some columns of 2**LOG_GROUPS groups of rows, one group per row of a tile."""
    first = (block << LOG_GROUPS) * GROUP + tl.arange(0, 1 << LOG_GROUPS) * GROUP
    col = part * SLICE + tl.arange(0, SLICE)
    hs = ()
    douts = ()
    scales = ()
    for k in tl.static_range(GROUP):  # all loads before the first addition
        row = first + k
        mask = (row < N)[:, None] & (col < D)[None, :]
        hs = hs + (load_tile(h, row_offset(row, inner, h_so, h_si) * WORD, col, mask),)
        douts = douts + (load_tile(dout, row_offset(row, inner, dout_so, dout_si) * WORD, col, mask),)
        scales = scales + (tl.load(rstd + row, mask=row < N, other=0.0),)
    total = tl.zeros([1 << LOG_GROUPS, SLICE], tl.float32)
    for k in tl.static_range(GROUP):
        total = total + douts[k].to(tl.float32) * (hs[k].to(tl.float32) * scales[k][:, None])
    total = over_rows(total, LOG_GROUPS, SLICE)
    own = block * D + tl.zeros([1], tl.int64)
    store_tile(partials, own, col, narrow(total, partials), (own >= 0)[:, None] & (col < D)[None, :])


@triton.jit(do_not_specialize=BATCH)
def gradient_few_rows(
    h, dout, dsummed, weight, rstd, dx, partials, offset, N, inner,
    h_so, h_si, dout_so, dout_si, dsummed_so, dsummed_si,
    D: tl.constexpr, WORD: tl.constexpr, ROWS: tl.constexpr, LOG_LANES: tl.constexpr, CHUNKS: tl.constexpr,
    LOG_GROUPS: tl.constexpr, GROUP: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """For each block of 2**LOG_GROUPS groups: programs that add dweight of SLICE columns, then programs that
    write dx of ROWS rows."""
    BLOCK: tl.constexpr = GROUP << LOG_GROUPS
    SLICES: tl.constexpr = 0 if partials is None else (D + SLICE - 1) // SLICE
    EACH: tl.constexpr = SLICES + (0 if dx is None else BLOCK // ROWS)
    block = tl.program_id(0).to(tl.int64) // EACH
    part = tl.program_id(0) % EACH
    if partials is not None:
        if part < SLICES:
            sum_columns(
                h, dout, rstd, partials, block, part, N, inner, h_so, h_si, dout_so, dout_si,
                D, WORD, LOG_GROUPS, GROUP, SLICE,
            )  # fmt: skip
    if dx is not None:
        if part >= SLICES:
            row = block * BLOCK + (part - SLICES) * ROWS + tl.arange(0, ROWS)
            ws = weights_of(weight, offset, D, LOG_LANES, CHUNKS)
            scale = tl.load(rstd + row, mask=row < N, other=0.0)
            hs, douts = load_rows(
                h, dout, row, N, inner, h_so, h_si, dout_so, dout_si, D, WORD, ROWS, LOG_LANES, CHUNKS
            )
            gradient_tile(
                hs, douts, dsummed, ws, weight, offset, scale, dx, row, N, inner, dsummed_so, dsummed_si,
                D, WORD, ROWS, LOG_LANES, CHUNKS,
            )  # fmt: skip


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
    """One program adds some columns of 2**LOG_FAN of the P sums: [P, D] becomes [programs, D]. The first
    levels of the tree, up to three, are additions inside a thread."""
    LEVELS: tl.constexpr = LOG_FAN if LOG_FAN < 3 else 3
    ROWS: tl.constexpr = 1 << (LOG_FAN - LEVELS)
    part = tl.program_id(0).to(tl.int64)
    first = (part << LOG_FAN) + (tl.arange(0, ROWS) << LEVELS)
    col = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = ()
    for k in tl.static_range(1 << LEVELS):
        at = first + k
        sums = sums + (load_tile(partials, at * D, col, (at < P)[:, None] & (col < D)[None, :]),)
    for i in tl.static_range(LEVELS):
        more = ()
        for k in tl.static_range(1 << (LEVELS - 1 - i)):
            more = more + (sums[2 * k] + sums[2 * k + 1],)
        sums = more
    total = over_rows(sums[0], LOG_FAN - LEVELS, COLUMNS)
    own = part * D + tl.zeros([1], tl.int64)
    store_tile(out, own, col, narrow(total, out), (own >= 0)[:, None] & (col < D)[None, :])


# Launchers


def steps_of(N: int, rows: int, D: int, device: torch.device) -> int:
    """Steps of a program that takes this many rows per step: the more, the fewer partial sums. As many as
    leave an SM no more to do, if it runs two programs at a time, or four with short rows."""
    slots, steps = (4 if D <= HELD // 4 else 2) * sm_count(device), 1
    fewest = triton.cdiv(N, rows * slots)
    while steps < MAX_STEPS and 2 * steps * triton.cdiv(N, 2 * steps * rows * slots) <= fewest:
        steps *= 2
    return steps


def stages_of(nbytes: int, word: int) -> int:
    """Stages of a loop over tiles of so many bytes: one is computed, two are being loaded. With a third fewer
    programs fit in an SM: on an H200 32768 rows of 5120 took 295 us with it, and take 275. Words of less than
    four bytes cannot be copied to shared memory: then one tile is being loaded, into registers."""
    return 1 + min(2, PREFETCH_BYTES // nbytes) if word >= 4 else 2


def sum_of(partials: Tensor, dtype: torch.dtype, launch: Launch) -> Tensor:
    """[P, D] -> [D] by the tree of neighbours, some levels per launch, rounded in the last one."""
    D = partials.shape[1]
    while len(partials) > 1 or partials.dtype != dtype:
        P = len(partials)
        parts = triton.cdiv(P, 1 << LOG_FAN)
        out = torch.empty((parts, D), dtype=dtype if parts == 1 else torch.float32, device=partials.device)
        launch(
            fold, (parts, triton.cdiv(D, COLUMNS)),
            partials, out, P,
            D=D, COLUMNS=COLUMNS, LOG_FAN=LOG_FAN, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        partials = out
    return partials.view(D)


def rms_norm_bwd(launch: Launch = run, **args: Any) -> tuple[Tensor | None, Tensor | None]:
    """(dx, dweight); None for what is not wanted."""
    h, weight, rstd = args["h"], args["weight"], args["rstd"].contiguous()
    lead, D = h.shape[:-1], h.shape[-1]
    N, device, dtype = lead.numel(), h.device, weight.dtype
    dx = torch.empty(h.shape, dtype=h.dtype, device=device) if args["want_h"] else None
    if N == 0:
        return dx, torch.zeros(D, dtype=dtype, device=device) if args["want_weight"] else None
    inner, tensors, strides, word = walk(lead, D, h, args["dout"], args["dsummed"])
    offset, common = or_none(args["offset"]), {"D": D, "WORD": word}
    options: dict[str, Any] = {"enable_fp_fusion": False}
    tile = tile_of(D, TILE)
    rows = tile["ROWS"] * GROUP

    def sums(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.empty((*shape, D), dtype=dtype, device=device) if args["want_weight"] else None

    if D > HELD:
        partials = sums(triton.cdiv(N, GROUP))
        log = log_lanes(D)
        if dx is not None:
            launch(
                gradient_long_rows, (N,),
                *tensors, weight, rstd, dx, offset, N, inner, *strides,
                **common, LOG_LANES=log, UNROLL=UNROLL, num_warps=4, **options,
            )  # fmt: skip
        if partials is not None:
            launch(
                sum_groups, (len(partials), triton.cdiv(D, 1 << log)),
                *tensors[:2], rstd, partials, N, inner, *strides[:4],  # without dsummed
                **common, LOG_LANES=log, GROUP=GROUP, num_warps=4, **options,
            )  # fmt: skip
    elif 2 * h.numel() * h.element_size() <= FEW_BYTES:
        blocks, width = triton.cdiv(N, GROUP << LOG_GROUPS), min(SLICE, triton.next_power_of_2(D))
        partials = sums(blocks, dtype=dtype if blocks == 1 else torch.float32)
        programs = 0 if dx is None else triton.cdiv(N, tile["ROWS"])
        programs += 0 if partials is None else blocks * triton.cdiv(D, width)
        launch(
            gradient_few_rows, (programs,),
            *tensors, weight, rstd, dx, partials, offset, N, inner, *strides,
            **common, **tile, LOG_GROUPS=LOG_GROUPS, GROUP=GROUP, SLICE=width, num_warps=8, **options,
        )  # fmt: skip
    else:
        steps = steps_of(N, rows, D, device)
        programs = triton.cdiv(N, rows * steps)
        waiting = sums(steps.bit_length(), programs)
        nbytes = (2 + (args["dsummed"] is not None)) * max(D, TILE) * h.element_size()
        stages = stages_of(nbytes, word * h.element_size()) if D <= PREFETCHED else 1
        if D > PREFETCHED and h.element_size() == 2 and torch.version.hip is None:  # NVIDIA's option
            options["maxnreg"] = LONG_ROW_REGISTERS
        launch(
            gradient_rows, (programs,),
            *tensors, weight, rstd, dx, waiting, offset, N, inner, steps, *strides,
            **common, **tile, LOG_ROWS=tile["ROWS"].bit_length() - 1, GROUP=GROUP, STAGES=stages,
            num_warps=4 if D <= HELD // 2 else 8, **options,
        )  # fmt: skip
        partials = None if waiting is None else waiting[-1]
    return dx, None if partials is None else sum_of(partials, dtype, launch)
