"""One new row of a sequence on Hopper: the kernel of plain decoding.

One program per sequence, value head and BV columns of V. All that it reads of the state is copied to shared
memory at once, so the memory is busy while the program waits only once. Products have two rows: q and k with
the keys, q and w with S, and of P and T with rows of the chunk. They are row 1 and row 0 of a tile of 16, the
least that a matrix instruction takes; its other rows hold anything.

The programs of a sequence all read its counts. If they close a chunk whose memory the next one takes, they
also read keys and gates where those of the new row belong. So these are written after all have read them:

with many programs   by a second launch, `keep_kernel`.
with few (ONE)       by the program that arrives last. A program arrives by adding 1 to a number of the slot,
                     as soon as it has read what others may write: the counts, or, where a chunk is closed in
                     place, at its end. It does not wait for any other. The last
                     one takes all arrivals away again, so every call, and every replay of a graph, begins
                     with 0. A second launch would cost about two microseconds, and one sequence needs few.

Each call takes away as many arrivals as it has added, also where two sequences are given one slot. Were the
number not 0 before, in memory that something else has written, a program would take itself for the last too
early: tokens of this slot could be wrong until it is reset. No other slot is touched, and nothing waits.

Whatever slots, lengths and counts are in memory, they are clamped before they become addresses.
"""

from math import gcd
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from isobit.frame.launch import Launch, run
from isobit.kernels.hopper.pieces import barrier
from isobit.kernels.hopper.pipeline import gdc_launch_dependents, gdc_wait, gl, gluon, reinterpreted
from isobit.kernels.host.temperature import LOG2E
from isobit.ops.gated_delta_rule.model import EPS
from isobit.ops.gated_delta_rule_step import kernels_triton, state
from isobit.ops.gated_delta_rule_step.kernels_hopper_keep import keep_kernel

# Triton 3.9 has another name for it than 3.6 and 3.7.
begin_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

CHUNK, TILE = gl.constexpr(state.CHUNK), gl.constexpr(16)

PLACE, ARRIVED = gl.constexpr(state.PLACE), gl.constexpr(state.ARRIVED)

_LOG2E, _EPS = gl.constexpr(LOG2E), gl.constexpr(float(EPS))

WARPS = gl.constexpr(4)

#: Of products. Warps share the columns.
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8]))
LEFT, RIGHT = (gl.constexpr(gl.DotOperandLayout(i, MMA.value, 2)) for i in range(2))

#: Of a row of T: a thread has a column.
COLUMN = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

OF_T = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))

THREADS = gl.constexpr(32 * WARPS.value)

#: In shared memory: rows that matrix instructions read, and numbers.
ROWS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
FLAT, PLAIN = (gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, order)) for order in ([0], [1, 0]))


@gluon.constexpr_function
def by_row(columns):
    """The layout of rows of this many 16-bit numbers, 16 bytes in a thread."""
    across = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def row_of(tile, row: gl.constexpr):
    """One row of a result. Adding -0.0 changes nothing."""
    i = gl.arange(0, TILE, gl.SliceLayout(1, MMA))
    return gl.sum(gl.where((i == row)[:, None], tile, -0.0), 0)


@gluon.jit
def unit(x, K: gl.constexpr):
    """A row divided by its norm, in fp32, with the operations of `norm_kernel`: it repeatedly adds the second
    half to the first."""
    total = x * x
    for _ in gl.static_range(8):
        if total.shape[0] > 2:
            total = gl.sum(gl.reshape(total, [2, total.shape[0] // 2]), 0)
    size = gl.sqrt_rn(gl.sum(total, 0) + _EPS)
    return x * gl.div_rn(gl.to_tensor(1.0), size)


@gluon.jit
def with_row(rows, row, new, LAYOUT: gl.constexpr):
    """Put a row among those of a chunk, [4, 16, columns]."""
    block = rows.index(row // TILE)
    i = gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
    block.store(gl.where((i == row % TILE)[:, None], new[None, :], block.load(LAYOUT)))


@gluon.constexpr_function
def of_new(columns):
    """The layout of a new row of bv and vn that `among` takes."""
    return gl.SliceLayout(0, RIGHT.value if columns <= 32 else by_row(columns))


@gluon.jit
def among(rows, row, new, COLUMNS: gl.constexpr):
    """Rows of a chunk as the right factor of a product, with a new one among them. Of few columns, it is put
    there in registers, and threads need not wait for one another."""
    if COLUMNS > 32:
        with_row(rows, row, new, by_row(COLUMNS))
    whole = reinterpreted(rows, rows.dtype, [CHUNK, COLUMNS], ROWS).load(RIGHT)
    if COLUMNS <= 32:
        j = gl.arange(0, CHUNK, gl.SliceLayout(1, RIGHT))
        whole = gl.where((j == row)[:, None], new[None, :], whole)
    return whole


@gluon.jit
def repeated(row):
    """A left factor all of whose rows are this."""
    every = (gl.arange(0, TILE, gl.SliceLayout(1, LEFT)) >= 0)[:, None]
    return gl.where(every, row[None, :], row[None, :])


@gluon.jit
def copy_rows(to, start, rows, step, COLUMNS: gl.constexpr):
    """Begin to copy the first `rows` rows, `step` apart. The others become zeros."""
    LAYOUT: gl.constexpr = by_row(COLUMNS)
    j = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
    c = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    whole = reinterpreted(to, to.dtype, [CHUNK, COLUMNS], ROWS)
    begin_copy(whole, start + j[:, None] * step + c[None, :], mask=(j < rows)[:, None] & (c >= 0)[None, :])


@gluon.jit(do_not_specialize=[
    "SLOTS", "scale", *(f"{name}_s{of}" for name in ("q", "k", "v", "g", "beta") for of in ("b", "h"))
])  # fmt: skip
def token_kernel(
    q, k, v, g, beta, slots, lengths, start, start16, k_rows, bv_rows, vn_rows, inverse, beta_rows, gate_rows,
    place, new_k, new_gates, out, scale, SLOTS, H, HV, V,
    q_sb, q_sh, k_sb, k_sh, v_sb, v_sh, g_sb, g_sh, beta_sb, beta_sh,
    K: gl.constexpr, BV: gl.constexpr, HALVES: gl.constexpr, NORM: gl.constexpr, WORD: gl.constexpr,
    ONE: gl.constexpr,
):  # fmt: skip
    """Strides of q, k and v are in words of WORD elements. ONE: there is no second launch."""
    DTYPE: gl.constexpr = out.dtype.element_ty
    OF_K: gl.constexpr = by_row(K)
    OF_V: gl.constexpr = by_row(BV)
    tiles = V // BV
    tile, item = gl.program_id(0) % tiles, (gl.program_id(0) // tiles).to(gl.int64)
    b, hv = item // HV, item % HV
    h = hv // (HV // H)
    e = gl.arange(0, BV, gl.SliceLayout(0, OF_V)) + tile * BV
    e_new = gl.arange(0, BV, of_new(BV)) + tile * BV
    to = (b * HV + hv) * V
    if ONE:  # with `launch_pdl`: see `product_kernel` of `det_gemm`
        gdc_wait()
        gdc_launch_dependents()  # all programs have started, and the next kernel waits for their ends
    # What is not of the state: loads that wait for nothing.
    c = gl.arange(0, K, gl.SliceLayout(0, OF_K))
    k_t = gl.load(k + b * WORD * k_sb + h * WORD * k_sh + c)
    q_t = gl.load(q + b * WORD * q_sb + h * WORD * q_sh + c)
    v_t = gl.load(v + b * WORD * v_sb + hv * WORD * v_sh + e_new)
    beta_t = gl.load(beta + b * beta_sb + hv * beta_sh).to(gl.float32)
    if g is not None:
        g_t = gl.load(g + b * g_sb + hv * g_sh).to(gl.float32)
    # Where the sequence is.
    slot = b
    if slots is not None:
        slot = gl.load(slots + b).to(gl.int64)
    there = (slot >= 0) & (slot < SLOTS)
    if lengths is not None:
        there = there & (gl.load(lengths + b) > 0)
    if not there:
        gl.store(out + to + e, gl.zeros([BV], DTYPE, gl.SliceLayout(0, OF_V)))
        return
    at_slot = place + slot * PLACE
    rows = gl.load(at_slot)
    chunks = gl.load(at_slot + 1)
    seeded = gl.load(at_slot + 3)
    keys = gl.allocate_shared_memory(DTYPE, [4, TILE, K], ROWS)
    bvs = gl.allocate_shared_memory(DTYPE, [4, TILE, BV], ROWS)
    vns = gl.allocate_shared_memory(DTYPE, [4, TILE, BV], ROWS)
    S = gl.allocate_shared_memory(DTYPE, [K, BV], ROWS)
    T = gl.allocate_shared_memory(gl.float32, [CHUNK * CHUNK], FLAT)
    left = gl.allocate_shared_memory(DTYPE, [TILE, K], ROWS)
    factors = gl.allocate_shared_memory(gl.float32, [TILE, CHUNK], PLAIN)
    # Where there is one half, S lies at the same place whatever the counts are.
    AT_ONCE: gl.constexpr = ONE and HALVES == 1
    if AT_ONCE:
        copy_state(S, start16, slot * HV + hv, e, True, V, K, OF_V)
        async_copy.commit_group()
    rows = gl.minimum(gl.maximum(rows, 0), CHUNK)
    held = (chunks != 0) | (seeded != 0)
    half = slot * HALVES + (chunks & (HALVES - 1))
    full = rows == CHUNK
    # Whether nothing but counts is read where another program writes.
    apart = (rows != CHUNK) | (HALVES == 2)
    if full:
        new = slot * HALVES + ((chunks + 1) & (HALVES - 1))
        copy_rows(keys, k_rows + (half * H + h) * CHUNK * K, rows, K, K)
        copy_rows(vns, vn_rows + (half * HV + hv) * CHUNK * V + tile * BV, rows, V, BV)
        async_copy.commit_group()
        close(
            S, start, start16, gate_rows, keys, vns, half * HV + hv, new * HV + hv, tile, held, V, K, BV,
            DTYPE,
        )  # fmt: skip
        rows = rows * 0
        half = new
    at_rows = (half * HV + hv) * CHUNK
    copy_rows(keys, k_rows + (half * H + h) * CHUNK * K, rows, K, K)
    in_T = gl.arange(0, CHUNK * CHUNK, OF_T)
    # Up to the diagonal, by groups of 16 bytes.
    below = in_T // 4 % (CHUNK // 4) <= in_T // (4 * CHUNK)
    begin_copy(T, inverse + at_rows * CHUNK + in_T, mask=below & (in_T < rows * CHUNK))
    async_copy.commit_group()
    copy_rows(bvs, bv_rows + at_rows * V + tile * BV, rows, V, BV)
    if not AT_ONCE:
        if not full:
            copy_state(S, start16, half * HV + hv, e, held, V, K, OF_V)
    copy_rows(vns, vn_rows + at_rows * V + tile * BV, rows, V, BV)
    async_copy.commit_group()
    # Gates and factors of the rows.
    OF_J: gl.constexpr = gl.SliceLayout(0, MMA)
    j = gl.arange(0, CHUNK, OF_J)
    gate_t = gl.load(gate_rows + (at_rows + rows - 1), mask=rows > 0, other=0.0)
    if g is not None:
        gate_t += g_t
    gates = gl.where(j == rows, gate_t, gl.load(gate_rows + at_rows + j, mask=j < rows, other=0.0))
    betas = gl.where(j == rows, beta_t, gl.load(beta_rows + at_rows + j, mask=j < rows, other=0.0))
    if ONE:
        # The first thread arrives, and goes on: it looks at the ticket at the end. What the last one writes
        # depends on its ticket, so it is not written before. It has no acquire: every count that is written
        # there has been used by all threads before the barrier, as an address or a mask.
        thread = gl.arange(0, THREADS, COLUMN)
        one = gl.full([THREADS], 1, gl.int32, COLUMN)
        barrier()  # all threads have read the counts
        ticket = gl.atomic_add(at_slot + (ARRIVED + thread), one, mask=(thread == 0) & apart, sem="release")
    if NORM:
        k_t = unit(k_t.to(gl.float32), K).to(DTYPE)
        q_t = unit(q_t.to(gl.float32), K).to(DTYPE)
    i_K = gl.arange(0, TILE, gl.SliceLayout(1, OF_K))
    left.store(gl.where((i_K == 0)[:, None], k_t[None, :], q_t[None, :]))
    g2_t, g2 = gate_t * _LOG2E, gates * _LOG2E
    decay = gl.exp2(g2_t - g2)
    on_k = gl.convert_layout(betas * gl.exp2(g2), gl.SliceLayout(1, RIGHT))
    async_copy.wait_group(1)
    if AT_ONCE:
        if (held | full) == 0:
            S.store(gl.zeros([K, BV], DTYPE, OF_V))
    with_row(keys, rows, k_t, OF_K)
    by_j = reinterpreted(keys, DTYPE, [CHUNK, K], ROWS)
    stored = by_j.load(RIGHT)
    k_and_q, zeros = left.load(LEFT), gl.zeros([TILE, BV], gl.float32, MMA)
    if ONE:
        if not AT_ONCE:
            async_copy.wait_group(0)
        # The compiler moves no load across it. So part of bk is computed while products run, not after them.
        barrier()
        q_S = mma_v2(k_and_q, S.load(RIGHT), zeros)
    by_keys = mma_v2(k_and_q, by_j.permute((1, 0)).load(RIGHT), gl.zeros([TILE, CHUNK], gl.float32, MMA))
    i = gl.arange(0, TILE, gl.SliceLayout(1, MMA))[:, None]
    a = gl.where((j < rows)[None, :], by_keys * (beta_t * decay)[None, :], 0.0)
    p = gl.where((j <= rows)[None, :], by_keys * decay[None, :], 0.0)
    bk = (stored.to(gl.float32) * on_k[:, None]).to(DTYPE)
    factors.store(gl.where(i == 0, -a, p))
    # Row `rows` of T, from those above it.
    column = gl.arange(0, CHUNK, COLUMN)
    acc = gl.where(column == rows, 1.0, 0.0)
    above = reinterpreted(T, gl.float32, [CHUNK, CHUNK], FLAT)
    each = reinterpreted(factors, gl.float32, [TILE * CHUNK, 1], FLAT)
    OF_LEFT: gl.constexpr = gl.SliceLayout(0, LEFT)
    p_t = reinterpreted(factors, gl.float32, [TILE, CHUNK], FLAT).index(1).load(OF_LEFT)
    p_t = repeated(p_t.to(DTYPE))
    for first in range(0, rows, TILE):
        for n in gl.static_range(TILE):
            factor = each.index(first + n).load(COLUMN)
            acc = gl.fma(
                gl.zeros([CHUNK], gl.float32, COLUMN) + factor, above.index(first + n).load(COLUMN), acc
            )
    acc = gl.where(column <= rows, acc, 0.0)
    T_t = repeated(gl.convert_layout(acc.to(DTYPE), OF_LEFT))
    w = mma_v2(T_t, bk, gl.zeros([TILE, K], gl.float32, MMA)).to(DTYPE)
    if ONE:
        left.store(w)
        async_copy.wait_group(0)
        w_S = mma_v2(left.load(LEFT), S.load(RIGHT), zeros)
    else:
        left.store(gl.where(i == 0, w, left.load(MMA)))
        async_copy.wait_group(0)
        w_S = mma_v2(left.load(LEFT), S.load(RIGHT), zeros)
        q_S = w_S
    bv_t = (beta_t * v_t.to(gl.float32)).to(DTYPE)
    u = mma_v2(T_t, among(bvs, rows, bv_t, BV), zeros)
    vn_t = row_of(u.to(DTYPE).to(gl.float32) - w_S, 0).to(DTYPE)
    vn_new = among(vns, rows, gl.convert_layout(vn_t, of_new(BV)), BV)
    o = mma_v2(p_t, vn_new, q_S * gl.exp2(g2_t))
    e_o = gl.arange(0, BV, gl.SliceLayout(0, MMA)) + tile * BV
    gl.store(out + to + e_o, (row_of(o, 1) * scale).to(DTYPE))
    gl.store(bv_rows + (at_rows + rows) * V + e_new, bv_t)
    gl.store(vn_rows + (at_rows + rows) * V + e_o, vn_t)
    k_to, gate_to = new_k + (b * H + h) * K, new_gates + (b * HV + hv)
    if ONE:
        if apart:
            k_to, gate_to = k_rows + ((half * H + h) * CHUNK + rows) * K, gate_rows + (at_rows + rows)
    if tile == 0:
        gl.store(inverse + (at_rows + rows) * CHUNK + column, acc)
        gl.store(gate_to, gate_t)
        gl.store(beta_rows + at_rows + rows, beta_t)
        if hv % (HV // H) == 0:
            gl.store(k_to + c, k_t)
    if ONE:
        programs = HV * tiles
        if apart:
            last = (thread == 0) & is_last(ticket, programs)
            gl.store(at_slot + thread, one * (rows + 1), mask=last)
            if full:
                gl.store(at_slot + 1 + thread, one * (chunks + 1), mask=last)
                gl.store(at_slot + 2 + thread, one * (chunks + (2 - HALVES)), mask=last)
            gl.atomic_add(at_slot + (ARRIVED + thread), one * -programs, mask=last, sem="relaxed")
        if HALVES == 1:  # of a constant: Triton 3.6 cannot compile an atomic that is never reached
            if not apart:
                barrier()  # all threads have written
                if is_last(gl.atomic_add(at_slot + ARRIVED, 1, sem="acq_rel"), programs):
                    keep_first(new_k, new_gates, k_rows, gate_rows, b, half, H, HV, K)
                    gl.store(at_slot, 1)
                    gl.store(at_slot + 1, chunks + 1)
                    gl.store(at_slot + 2, chunks + 1)
                    gl.atomic_add(at_slot + ARRIVED, -programs, sem="relaxed")


@gluon.jit
def copy_state(S, start16, head, e, there, V, K: gl.constexpr, OF_V: gl.constexpr):
    """Begin to copy S of a head, columns e; or zeros."""
    i = gl.arange(0, K, gl.SliceLayout(1, OF_V))
    begin_copy(
        S, start16 + head * K * V + (i[:, None] * V + e[None, :]),
        mask=(i >= 0)[:, None] & (e >= 0)[None, :] & there,
    )  # fmt: skip


@gluon.jit
def is_last(ticket, programs):
    """Of so many arrivals one after another, whatever the number was before them, this is one."""
    return (ticket & 0x7FFFFFFF) % programs == programs - 1


@gluon.jit
def keep_first(new_k, new_gates, k_rows, gate_rows, b, half, H, HV, K: gl.constexpr):
    """The keys and gates of a sequence, the first row of a chunk, where they belong."""
    OF_K: gl.constexpr = by_row(K)
    i, c = gl.arange(0, TILE, gl.SliceLayout(1, OF_K)), gl.arange(0, K, gl.SliceLayout(0, OF_K))
    for first in range(0, H, TILE):
        h = (i + first)[:, None]
        there = (h < H) & (c >= 0)[None, :]
        own = gl.load(new_k + (b * H + h) * K + c[None, :], mask=there, other=0.0)
        gl.store(k_rows + (half * H + h) * CHUNK * K + c[None, :], own, mask=there)
    column = gl.arange(0, CHUNK, COLUMN)
    for first in range(0, HV, CHUNK):
        hv = column + first
        own = gl.load(new_gates + (b * HV + hv), mask=hv < HV, other=0.0)
        gl.store(gate_rows + (half * HV + hv) * CHUNK, own, mask=hv < HV)


@gluon.jit
def close(
    S, start, start16, gate_rows, keys, vns, old, new, tile, held, V, K: gl.constexpr, BV: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    """The state at the start of the next chunk, in memory and, rounded, in S. `old` and `new` are the heads
    that hold the two chunks."""
    OF_J: gl.constexpr = gl.SliceLayout(1, RIGHT)
    ROWS_AT_ONCE: gl.constexpr = 16
    j = gl.arange(0, CHUNK, OF_J)
    g2 = gl.load(gate_rows + old * CHUNK + j) * _LOG2E
    last = gl.load(gate_rows + (old * CHUNK + CHUNK - 1)) * _LOG2E
    async_copy.wait_group(0)
    vn = reinterpreted(vns, DTYPE, [CHUNK, BV], ROWS).load(RIGHT).to(gl.float32)
    decayed = (vn * gl.exp2(last - g2)[:, None]).to(DTYPE)
    by_k = reinterpreted(keys, DTYPE, [CHUNK, K], ROWS).permute((1, 0))
    e = gl.arange(0, BV, gl.SliceLayout(0, MMA)) + tile * BV
    for first in gl.static_range(0, K, ROWS_AT_ONCE):
        i = gl.arange(0, ROWS_AT_ONCE, gl.SliceLayout(1, MMA)) + first
        inside = i.to(gl.int64)[:, None] * V + e[None, :]
        before = gl.load(start + old * K * V + inside, mask=(inside >= 0) & held, other=0.0)
        after = mma_v2(by_k.slice(first, ROWS_AT_ONCE).load(LEFT), decayed, before * gl.exp2(last))
        gl.store(start + new * K * V + inside, after)
        gl.store(start16 + new * K * V + inside, after.to(DTYPE))
        S.slice(first, ROWS_AT_ONCE).store(after.to(DTYPE))


def columns_of(B: int, HV: int, K: int, V: int) -> int:
    """Columns of V per program: fewer where there are few programs. This affects no sum."""
    if B * HV <= 64:
        return 32
    return 128 if K < 256 and V % 128 == 0 else 64


def in_one_launch(B: int, HV: int) -> bool:
    """Whether the program that arrives last writes what the others read. For few programs: with many, memory
    is the limit, and a small launch less is nothing. On an H200 8 sequences of 32 heads took 7.6 us in one
    launch and 8.2 in two, 16 took 14.3 and 13.5, 64 took 55 and 45 (2026-11, row 0 of a chunk)."""
    return B * HV <= 256


def token(
    args: dict[str, Any], out: Tensor, launch: Launch = run, columns: int = 0, one: bool | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    """One token of each sequence. `columns`: of V per program; 0 is the rule. `one`: in one launch; None is
    the rule."""
    q, v, of = args["q"], args["v"], {name: args[name] for name in state.TENSORS}
    (B, _, H, K), (HV, V), (N, HALVES) = q.shape, v.shape[2:], of["start"].shape[:2]
    columns = columns or columns_of(B, HV, K, V)
    one = in_one_launch(B, HV) if one is None else one
    slots, lengths = (None if args[n] is None else args[n].contiguous() for n in ("slots", "lengths"))
    strides = [kernels_triton.strides_of(args[name])[::2] for name in ("q", "k", "v", "g", "beta")]
    # What all rows of q, k and v are aligned to, at most 16 bytes: so loads are as wide.
    word = gcd(16 // q.element_size(), *strides[0], *strides[1], *strides[2])
    in_words = [s // word for own in strides[:3] for s in own]
    new_k = torch.empty((B, H, K), dtype=q.dtype, device=q.device)
    new_gates = torch.empty((B, HV), dtype=torch.float32, device=q.device)
    launch(
        token_kernel, (B * HV * (V // columns),),
        q, args["k"], v, args["g"], args["beta"], slots, lengths, *of.values(), new_k, new_gates, out,
        float(args["scale"]), N, H, HV, V, *in_words, *strides[3], *strides[4],
        K=K, BV=columns, HALVES=HALVES, NORM=args["use_qk_l2norm_in_kernel"], WORD=word, ONE=one,
        num_warps=4, enable_fp_fusion=False, **({"launch_pdl": True} if one else {}), **options,
    )  # fmt: skip
    if not one:
        launch(
            keep_kernel, (B,), new_k, new_gates, of["place"], slots, lengths, of["k_rows"], of["gate_rows"],
            N, H, HV, K=K, HALVES=HALVES, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def rows(launch: Launch = run, **args: Any) -> Tensor:
    """More tokens than one are Triton's, and so is memory that cannot be copied 16 bytes at a time."""
    v = args["v"]
    if v.shape[1] != 1 or any(args[name].data_ptr() % 16 for name in _COPIED):
        return kernels_triton.rows(launch, **args)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    return out if v.shape[0] == 0 else token(args, out, launch)


_COPIED = ("start16", "k_rows", "bv_rows", "vn_rows", "inverse")
