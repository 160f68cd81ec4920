"""States and outputs of the forward pass on Hopper in one kernel: steps 5 to 7 of class gdr/1.

The consumer of `kernels_hopper_states` puts the state before each chunk, and the chunk's new values, into
buffers from which they are stored there. Here nothing stores them. Two more warpgroups take them from there:

    P = tril(q k^T 2^(g - g'))            one, which needs no state, and is ahead
    o = scale ((q S) 2^g + P new)         the other; S as 16-bit numbers

while the first one continues with the state. So neither states nor new values go through memory, and k is
read once for both. Measured on an H200 (K = V = 128, 2026-11), a chunk takes 1.6 us. The bandwidth of shared
memory explains 1.0 of them: tensor cores, TMA and threads move 220 KB. With one warpgroup for P and o it was
1.8.

Where rows of q are to be divided by their norm first, the warpgroup of P does it, in the ring, ahead of the
others. An earlier version of that made a chunk take 2.4 us; this one, in which threads exchange few numbers
(`TWO_A_ROW`), has not been timed.

A result goes through a buffer of its own and TMA. That of a sequence's last chunk, which may have fewer than
64 tokens, is stored from registers with a mask.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run, unused
from isobit.kernels.hopper.descriptors import descriptor, matrix
from isobit.kernels.hopper.pipeline import (
    PRODUCER_REGISTERS,
    accumulator_layout,
    after,
    fence_async_shared,
    gl,
    gluon,
    kernel,
    mbarrier,
    put_tile,
    record,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from isobit.ops.delta_rule.kernels_hopper import (
    BY_ROWS,
    GATE_REGISTERS,
    SHARED_BYTES,
    Buffers,
    placed,
    rows_of,
)
from isobit.ops.delta_rule.kernels_hopper_io import (
    CHUNK,
    COLUMNS,
    DH,
    DV2,
    KVW,
    OF_CHUNK,
    QDO,
    Items,
    Out,
    Ring,
    load_chunks,
    load_gates,
    store_rows,
)
from isobit.ops.gated_delta_rule.kernels_hopper_solve import divided
from isobit.ops.gated_delta_rule.kernels_hopper_states import consume_forward

#: The most stages of the ring, by K. A stage has k, w and q, u, and gates.
MOST_STAGES = {64: 4, 128: 3}

#: Two lanes for a row of q, which take 8 columns in turn. To add up squares a thread shuffles 8 numbers, and
#: computes one norm: with 8 lanes for a row, as in `BY_ROWS`, it would be 96 and 4. Eight lanes that load at
#: the same time have 8 rows, so no two of them the same banks.
TWO_A_ROW = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [4, 1], [0, 1]))

#: Buffers for P.
BUFFERS = gl.constexpr(2)

#: Registers per thread at launch, and those of the warpgroups of P and of o. That of states keeps 216.
AT_LAUNCH, P_REGISTERS, OUTPUT_REGISTERS = 128, gl.constexpr(96), gl.constexpr(152)


@record
class Scores:
    """P of the chunks in flight. `full`: it is there; `free`: o has taken it."""

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.jit
    def create(desc):
        buffers = gl.allocate_shared_memory(desc.dtype, [BUFFERS] + desc.block_type.shape, desc.layout)
        full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(BUFFERS):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(free.index(i), count=1)
        fence_async_shared()
        return Scores(buffers, full, free)


@gluon.jit
def _not_finite(x):
    """1 if an element is an infinity or NaN, else 0."""
    return gl.max(gl.max(gl.where(gl.abs(x) < float("inf"), 0, 1), 1), 0)


@gluon.jit
def _row_by_row(P, values, acc, out, scratch):
    """Rows of P times values, added to acc, each with the later rows of values replaced by zeros."""
    i = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(1, OF_CHUNK)), 1)
    j = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(1, BY_ROWS)), 1)
    for row in range(CHUNK):
        scratch.store(gl.where(j <= row, values.load(BY_ROWS), 0.0))
        fence_async_shared()
        own = warpgroup_mma(P, scratch, acc, is_async=True)
        own = warpgroup_mma_wait(0, deps=(own,))
        out = gl.where(i == row, own, out)
    return out


@gluon.jit
def _store_output(o, o_desc, staging, place, items, item, row, left):
    """o of a chunk with `left` tokens, whose first one is `row`."""
    if left >= CHUNK:
        put_tile(o, o_desc, staging, row, item.head * items.V + item.column, 0)
    else:
        token = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(1, OF_CHUNK)), 1)
        v = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, OF_CHUNK)), 0)
        at = ((row.to(gl.int64) + token) * items.HV + item.head) * items.V + item.column + v
        gl.store(place + at, o.to(o_desc.dtype), mask=token < left)


@gluon.jit
def _consume_keys(items, ring, scores, NORMED: gl.constexpr):
    """The consumer of q and k: P of every chunk. Rows of q and k that belong to another sequence change only
    rows of P that are not stored, and columns that are set to zero. NORMED: it divides rows of q by their
    norm first, in the ring, also for the consumer of states, which waits for P."""
    DTYPE: gl.constexpr = ring.k_desc.dtype
    i = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(1, OF_CHUNK)), 1)
    j = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(0, OF_CHUNK)), 0)
    zeros = gl.zeros((CHUNK, CHUNK), gl.float32, OF_CHUNK)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    buffer, turn = gl.to_tensor(0), gl.to_tensor(0)
    for t in range(gl.program_id(0), items.count(), gl.num_programs(0)):
        item = items.item(t)
        for _ in range(gl.cdiv(item.tokens, CHUNK)):
            q, k = ring.q.index(stage), ring.k.index(stage)
            mbarrier.wait(ring.ready.index(2 * stage + KVW), phase)
            mbarrier.wait(ring.ready.index(2 * stage + QDO), phase)
            if NORMED:
                q.store(divided(q, TWO_A_ROW))
                fence_async_shared()
            P = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            P = warpgroup_mma_wait(0, deps=(P,))
            mbarrier.arrive(ring.empty.index(2 * stage + KVW))
            if ring.HAS_G:
                g = ring.of_do.index(stage)
                P = P * gl.exp2(g.permute((1, 0)).load(OF_CHUNK) - g.load(OF_CHUNK))
            P = gl.where(i >= j, P, 0.0).to(DTYPE)
            mbarrier.wait(scores.free.index(buffer), turn ^ 1)
            scores.buffers.index(buffer).store(P)
            mbarrier.arrive(scores.full.index(buffer))
            stage, phase = after(stage, phase, ring.STAGES)
            buffer, turn = after(buffer, turn, BUFFERS)


@gluon.jit
def _consume_states(items, ring, out, scores, o_desc, staging, place, scale):
    """The consumer of P, states and new values: o of every chunk. It fences what it takes before the tensor
    cores read it: other warpgroups wrote it."""
    zeros = gl.zeros((CHUNK, COLUMNS), gl.float32, OF_CHUNK)
    stage, phase, taken = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    buffer, turn = gl.to_tensor(0), gl.to_tensor(0)
    state = out.dh
    if out.V_FIRST:
        state = state.permute((1, 0))
    for t in range(gl.program_id(0), items.count(), gl.num_programs(0)):
        item = items.item(t)
        for n in range(gl.cdiv(item.tokens, CHUNK)):
            mbarrier.wait(scores.full.index(buffer), turn)
            mbarrier.wait(out.full.index(DH), taken)
            fence_async_shared()
            acc = warpgroup_mma(ring.q.index(stage), state, zeros, use_acc=False, is_async=True)
            if ring.HAS_G:
                factor = gl.exp2(ring.of_do.index(stage).permute((1, 0)).load(OF_CHUNK))
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(out.free.index(DH))
            mbarrier.arrive(ring.empty.index(2 * stage + QDO))
            if ring.HAS_G:
                acc = acc * factor
            mbarrier.wait(out.full.index(DV2), taken)
            fence_async_shared()
            P = scores.buffers.index(buffer)
            o = warpgroup_mma(P, out.dv2, acc, is_async=True)
            o = warpgroup_mma_wait(0, deps=(o,))
            # A value that is not finite makes its own row so.
            if _not_finite(o) > 0:
                tma.store_wait(0)
                o = _row_by_row(P, out.dv2, acc, o, staging.index(0))
            mbarrier.arrive(out.free.index(DV2))
            mbarrier.arrive(scores.free.index(buffer))
            start = n * CHUNK
            _store_output(
                o * scale, o_desc, staging, place, items, item, item.token + start, item.tokens - start
            )
            stage, phase = after(stage, phase, ring.STAGES)
            buffer, turn = after(buffer, turn, BUFFERS)
            taken = taken ^ 1
    tma.store_wait(0)


@kernel
def outputs_kernel(
    o, g, cu_seqlens, scale, T, S, HV, group, V,
    q_desc, k_desc, w_desc, u_desc, state_desc, o_desc, initial_desc, final_desc,
    K: gl.constexpr, STAGES: gl.constexpr, OF_STATE: gl.constexpr, PACKED: gl.constexpr,
    HAS_G: gl.constexpr, HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr, V_FIRST: gl.constexpr,
    NORMED: gl.constexpr,
):  # fmt: skip
    items = Items(cu_seqlens, g, T, S, HV, group, V, T, PACKED, False, True)
    ring = Ring.create(q_desc, k_desc, w_desc, u_desc, u_desc, K, STAGES, HAS_G, False, True, True)
    out = Out.create(
        state_desc, u_desc, initial_desc, final_desc, o, K, V_FIRST, HAS_INITIAL, HAS_FINAL, True, True
    )
    scores = Scores.create(o_desc)
    staging = gl.allocate_shared_memory(o_desc.dtype, [1] + o_desc.block_type.shape, o_desc.layout)
    if HAS_G:
        gl.warp_specialize(
            [(consume_forward, (items, ring, out, OF_STATE)),
             (_consume_keys, (items, ring, scores, NORMED)),
             (_consume_states, (items, ring, out, scores, o_desc, staging, o, scale)),
             (load_chunks, (items, ring)), (store_rows, (items, out, K, False)),
             (load_gates, (items, ring, g, g, 1.0, 1.0))],
            [4, 4, 1, 1, 1],
            [P_REGISTERS, OUTPUT_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, GATE_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(consume_forward, (items, ring, out, OF_STATE)),
             (_consume_keys, (items, ring, scores, NORMED)),
             (_consume_states, (items, ring, out, scores, o_desc, staging, o, scale)),
             (load_chunks, (items, ring)), (store_rows, (items, out, K, False))],
            [4, 4, 1, 1], [P_REGISTERS, OUTPUT_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


# Launcher


def stages_of(K: int, ends: int, has_g: bool) -> int:
    """As many stages as fit next to so many initial and final states."""
    buffers = Buffers(K, ends, has_g=has_g, forward=True, outputs=True)
    fitting = (s for s in range(MOST_STAGES[K], 1, -1) if buffers.nbytes(s, separate=True) <= SHARED_BYTES)
    return next(fitting)


def outputs(
    q: Tensor, k: Tensor, w: Tensor, u: Tensor, g2: Tensor | None, initial: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, v_first: bool, want_final: bool,
    launch: Launch = run, normed: bool = False, sms: int = 0,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(o, final), for K in MOST_STAGES. `normed`: q is divided by its norm. `sms`: the SMs to make a schedule
    for; 0: those of the device."""
    B, T, HV, V = u.shape
    H, K = k.shape[2:]
    S = B if cu_seqlens is None else len(cu_seqlens) - 1
    state = (S, HV, V, K) if v_first else (S, HV, K, V)
    o = torch.empty(u.shape, dtype=q.dtype, device=u.device)
    final = torch.empty(state, dtype=torch.float32, device=u.device) if want_final else None
    initial = None if initial is None else placed(initial.float())
    if B * T == 0:
        if final is not None:
            final.zero_() if initial is None else final.copy_(initial)
        return o, final
    box = (64, K) if v_first else (K, 64)
    rows = matrix(o.view(B * T, HV * V))
    # What only tells the shape and the layout of a buffer may name any matrix.
    of_states = descriptor(rows, *box)
    ends = [of_states if t is None else descriptor(matrix(t.flatten(0, 2)), *box) for t in (initial, final)]
    items, sms = S * HV * (V // 64), sms or sm_count(u.device)
    there = sum(t is not None for t in (initial, final))
    options: dict[str, Any] = {"num_warps": 4, "maxnreg": AT_LAUNCH, "enable_fp_fusion": False}
    launch(
        outputs_kernel, (min(items, sms),),
        o, *(unused(o) if t is None else t for t in (g2, cu_seqlens)), scale, T, S, HV, HV // H, V,
        *(descriptor(matrix(rows_of(t)), 64, K) for t in (q, k, w)),
        descriptor(matrix(rows_of(u)), 64, 64), of_states, descriptor(rows, 64, 64), *ends,
        K=K, STAGES=stages_of(K, there, g2 is not None), OF_STATE=accumulator_layout(K),
        PACKED=cu_seqlens is not None, HAS_G=g2 is not None, HAS_INITIAL=initial is not None,
        HAS_FINAL=final is not None, V_FIRST=v_first, NORMED=normed, **options,
    )  # fmt: skip
    return o, final
