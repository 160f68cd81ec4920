"""One new row of a sequence on Hopper: the kernel of plain decoding.

One program per sequence, value head and BV columns of V. All that it reads of the state is copied to shared
memory at once, so the memory is busy while the program waits only once. The new row is put among the others
there. Products have two rows: q and k with the keys, q and w with S, and of P and T with rows of the chunk.
They are row 1 and row 0 of a tile of 16, the least that a matrix instruction takes; its other rows hold
anything.

Whatever slots, lengths and counts are in memory, they are clamped before they become addresses.
"""

from math import gcd
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from isobit.frame.launch import Launch, run
from isobit.kernels.hopper.pipeline import gl, gluon, reinterpreted
from isobit.kernels.host.temperature import LOG2E
from isobit.ops.gated_delta_rule.model import EPS
from isobit.ops.gated_delta_rule_step import kernels_triton, state
from isobit.ops.gated_delta_rule_step.kernels_hopper_keep import keep_kernel

# Triton 3.9 has another name for it than 3.6 and 3.7.
begin_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

CHUNK, TILE = gl.constexpr(state.CHUNK), gl.constexpr(16)

_LOG2E, _EPS = gl.constexpr(LOG2E), gl.constexpr(float(EPS))

WARPS = gl.constexpr(4)

#: Of products. Warps share the columns.
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8]))
LEFT, RIGHT = (gl.constexpr(gl.DotOperandLayout(i, MMA.value, 2)) for i in range(2))

#: Of a row of T: a thread has a column.
COLUMN = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

OF_T = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))

#: In shared memory: rows that matrix instructions read, and numbers.
ROWS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
ONE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


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
):  # fmt: skip
    """Strides of q, k and v are in words of WORD elements."""
    DTYPE: gl.constexpr = out.dtype.element_ty
    OF_K: gl.constexpr = by_row(K)
    OF_V: gl.constexpr = by_row(BV)
    tiles = V // BV
    tile, item = gl.program_id(0) % tiles, (gl.program_id(0) // tiles).to(gl.int64)
    b, hv = item // HV, item % HV
    h = hv // (HV // H)
    e = gl.arange(0, BV, gl.SliceLayout(0, OF_V)) + tile * BV
    to = (b * HV + hv) * V
    # What is not of the state: loads that wait for nothing.
    c = gl.arange(0, K, gl.SliceLayout(0, OF_K))
    k_t = gl.load(k + b * WORD * k_sb + h * WORD * k_sh + c)
    q_t = gl.load(q + b * WORD * q_sb + h * WORD * q_sh + c)
    v_t = gl.load(v + b * WORD * v_sb + hv * WORD * v_sh + e)
    beta_t = gl.load(beta + b * beta_sb + hv * beta_sh).to(gl.float32)
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
    rows = gl.minimum(gl.maximum(gl.load(place + slot * 4), 0), CHUNK)
    chunks = gl.load(place + slot * 4 + 1)
    held = (chunks != 0) | (gl.load(place + slot * 4 + 3) != 0)
    half = slot * HALVES + (chunks & (HALVES - 1))
    keys = gl.allocate_shared_memory(DTYPE, [4, TILE, K], ROWS)
    bvs = gl.allocate_shared_memory(DTYPE, [4, TILE, BV], ROWS)
    vns = gl.allocate_shared_memory(DTYPE, [4, TILE, BV], ROWS)
    S = gl.allocate_shared_memory(DTYPE, [K, BV], ROWS)
    T = gl.allocate_shared_memory(gl.float32, [CHUNK * CHUNK], ONE)
    left = gl.allocate_shared_memory(DTYPE, [TILE, K], ROWS)
    of_chunk = gl.allocate_shared_memory(DTYPE, [TILE, CHUNK], ROWS)
    factors = gl.allocate_shared_memory(gl.float32, [CHUNK], ONE)
    full = rows == CHUNK
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
    if not full:
        i_S = gl.arange(0, K, gl.SliceLayout(1, OF_V))
        begin_copy(
            S, start16 + (half * HV + hv) * K * V + (i_S[:, None] * V + e[None, :]),
            mask=(i_S >= 0)[:, None] & (e >= 0)[None, :] & held,
        )  # fmt: skip
    copy_rows(vns, vn_rows + at_rows * V + tile * BV, rows, V, BV)
    async_copy.commit_group()
    # Gates and factors of the rows.
    OF_J: gl.constexpr = gl.SliceLayout(0, MMA)
    j = gl.arange(0, CHUNK, OF_J)
    gate_t = gl.load(gate_rows + (at_rows + rows - 1), mask=rows > 0, other=0.0)
    if g is not None:
        gate_t += gl.load(g + b * g_sb + hv * g_sh).to(gl.float32)
    gates = gl.where(j == rows, gate_t, gl.load(gate_rows + at_rows + j, mask=j < rows, other=0.0))
    betas = gl.where(j == rows, beta_t, gl.load(beta_rows + at_rows + j, mask=j < rows, other=0.0))
    if NORM:
        k_t = unit(k_t.to(gl.float32), K).to(DTYPE)
        q_t = unit(q_t.to(gl.float32), K).to(DTYPE)
    i_K = gl.arange(0, TILE, gl.SliceLayout(1, OF_K))
    left.store(gl.where((i_K == 0)[:, None], k_t[None, :], q_t[None, :]))
    g2_t, g2 = gate_t * _LOG2E, gates * _LOG2E
    decay = gl.exp2(g2_t - g2)
    on_k = gl.convert_layout(betas * gl.exp2(g2), gl.SliceLayout(1, RIGHT))
    async_copy.wait_group(1)
    with_row(keys, rows, k_t, OF_K)
    by_j = reinterpreted(keys, DTYPE, [CHUNK, K], ROWS)
    by_keys = mma_v2(
        left.load(LEFT), by_j.permute((1, 0)).load(RIGHT), gl.zeros([TILE, CHUNK], gl.float32, MMA)
    )
    factors.store(-gl.where(j < rows, row_of(by_keys, 0) * (beta_t * decay), 0.0))
    p = gl.where(j <= rows, row_of(by_keys, 1) * decay, 0.0)
    bk = (by_j.load(RIGHT).to(gl.float32) * on_k[:, None]).to(DTYPE)
    # Row `rows` of T, from those above it.
    column = gl.arange(0, CHUNK, COLUMN)
    acc = gl.where(column == rows, 1.0, 0.0)
    above = reinterpreted(T, gl.float32, [CHUNK, CHUNK], ONE)
    each = reinterpreted(factors, gl.float32, [CHUNK, 1], ONE)
    for first in range(0, rows, TILE):
        for n in gl.static_range(TILE):
            factor = each.index(first + n).load(COLUMN)
            acc = gl.fma(
                gl.zeros([CHUNK], gl.float32, COLUMN) + factor, above.index(first + n).load(COLUMN), acc
            )
    acc = gl.where(column <= rows, acc, 0.0)
    OF_16: gl.constexpr = by_row(CHUNK)
    i_J = gl.arange(0, TILE, gl.SliceLayout(1, OF_16))
    row = gl.convert_layout(acc.to(DTYPE), gl.SliceLayout(0, OF_16))
    p = gl.convert_layout(p.to(DTYPE), gl.SliceLayout(0, OF_16))
    of_chunk.store(gl.where((i_J == 0)[:, None], row[None, :], p[None, :]))
    T_and_P = of_chunk.load(LEFT)
    w = mma_v2(T_and_P, bk, gl.zeros([TILE, K], gl.float32, MMA)).to(DTYPE)
    i = gl.arange(0, TILE, gl.SliceLayout(1, MMA))[:, None]
    left.store(gl.where(i == 0, w, left.load(MMA)))
    async_copy.wait_group(0)
    bv_t = (beta_t * v_t.to(gl.float32)).to(DTYPE)
    with_row(bvs, rows, bv_t, OF_V)
    zeros = gl.zeros([TILE, BV], gl.float32, MMA)
    u = mma_v2(T_and_P, reinterpreted(bvs, DTYPE, [CHUNK, BV], ROWS).load(RIGHT), zeros)
    by_S = mma_v2(left.load(LEFT), S.load(RIGHT), zeros)
    vn_t = row_of(u.to(DTYPE).to(gl.float32) - by_S, 0).to(DTYPE)
    vn_t = gl.convert_layout(vn_t, gl.SliceLayout(0, OF_V))
    with_row(vns, rows, vn_t, OF_V)
    o = mma_v2(T_and_P, reinterpreted(vns, DTYPE, [CHUNK, BV], ROWS).load(RIGHT), by_S * gl.exp2(g2_t))
    e_o = gl.arange(0, BV, gl.SliceLayout(0, MMA)) + tile * BV
    gl.store(out + to + e_o, (row_of(o, 1) * scale).to(DTYPE))
    gl.store(bv_rows + (at_rows + rows) * V + e, bv_t)
    gl.store(vn_rows + (at_rows + rows) * V + e, vn_t)
    if tile == 0:
        gl.store(inverse + (at_rows + rows) * CHUNK + column, acc)
        gl.store(new_gates + b * HV + hv, gate_t)
        gl.store(beta_rows + at_rows + rows, beta_t)
        if hv % (HV // H) == 0:
            gl.store(new_k + (b * H + h) * K + c, k_t)


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


def token(
    args: dict[str, Any], out: Tensor, launch: Launch = run, columns: int = 0, **options: Any
) -> Tensor:
    """One token of each sequence. `columns`: of V per program; 0 is the rule."""
    q, v, of = args["q"], args["v"], {name: args[name] for name in state.TENSORS}
    (B, _, H, K), (HV, V), (N, HALVES) = q.shape, v.shape[2:], of["start"].shape[:2]
    columns = columns or columns_of(B, HV, K, V)
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
        K=K, BV=columns, HALVES=HALVES, NORM=args["use_qk_l2norm_in_kernel"], WORD=word, num_warps=4,
        enable_fp_fusion=False, **options,
    )  # fmt: skip
    launch(
        keep_kernel, (B,), new_k, new_gates, of["place"], slots, lengths, of["k_rows"], of["gate_rows"], N, H,
        HV, K=K, HALVES=HALVES, num_warps=4, enable_fp_fusion=False,
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
