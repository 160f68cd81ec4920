"""The states of the forward pass on Hopper: the recurrence of class gdr/1.

The twin of the recurrence backwards (`ops/delta_rule/kernels_hopper`), from a sequence's first chunk to its
last. One program carries 64 columns of a head's state, transposed, in the registers of one warpgroup, and
both products read it or its results from there:

    X   = S^T W^T      S as 16-bit numbers, W from shared memory
    X   = u^T - X      one rounding: the new values
    S^T = decay S^T + (X 2^(g[last] - g)) K

Loads and stores are the same. Chunks of a sequence depend on one another, so the latency of a chunk decides
the speed: nothing but these two products and the roundings between them is in its way.
"""

import torch
from torch import Tensor

from isobit.frame.launch import Launch, run, unused
from isobit.kernels.hopper.descriptors import descriptor, matrix
from isobit.kernels.hopper.pipeline import (
    PRODUCER_REGISTERS,
    after,
    gdc_launch_dependents,
    gl,
    gluon,
    kernel,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from isobit.ops.delta_rule.kernels_hopper import (
    GATE_REGISTERS,
    Turns,
    clear_rows,
    placed,
    plan,
    rows_of,
)
from isobit.ops.delta_rule.kernels_hopper_io import (
    CHUNK,
    COLUMNS,
    KVW,
    OF_CHUNK,
    Items,
    Out,
    Ring,
    load_chunks,
    load_gates,
    store_rows,
    store_states,
)


@gluon.jit
def _forward(S, turns, items, item, ring, out, row, left, OF_STATE: gl.constexpr, LAST: gl.constexpr):
    """S after a chunk, from S before it. LAST: the chunk has fewer than 64 tokens. This warpgroup itself
    stores its new values then, if they are stored."""
    DTYPE: gl.constexpr = ring.k_desc.dtype
    BY_ITSELF: gl.constexpr = LAST and not ring.OUTPUTS
    stage, phase = turns.stage, turns.phase
    k, u, w = ring.k.index(stage), ring.dv.index(stage), ring.w.index(stage)
    narrow = S.to(DTYPE)
    mbarrier.wait(ring.ready.index(2 * stage + KVW), phase)
    if LAST:
        clear_rows(k, w, left)
        clear_rows(u, u, left)
    if ring.HAS_G or ring.HAS_GK:
        S = S * ring.decay.index(stage).load(OF_STATE)
    X = warpgroup_mma(
        gl.convert_layout(narrow, gl.DotOperandLayout(0, OF_CHUNK, 2)), w.permute((1, 0)),
        gl.zeros((COLUMNS, CHUNK), gl.float32, OF_CHUNK), use_acc=False, is_async=True,
    )  # fmt: skip
    out.put_state(narrow, turns.dh)
    u_turned = u.permute((1, 0)).load(OF_CHUNK).to(gl.float32)
    X, u_turned = warpgroup_mma_wait(0, deps=(X, u_turned))
    new = (u_turned - X).to(DTYPE)
    gated = new
    if ring.HAS_G:
        gated = (new.to(gl.float32) * ring.of_x.index(stage).load(OF_CHUNK)).to(DTYPE)
    S = warpgroup_mma(gl.convert_layout(gated, gl.DotOperandLayout(0, OF_STATE, 2)), k, S, is_async=True)
    out.put_rows(items, item, new, turns.dv2, row, left, BY_ITSELF)
    S = warpgroup_mma_wait(0, deps=(S,))
    mbarrier.arrive(ring.empty.index(2 * stage + KVW))
    next_stage, next_phase = after(stage, phase, ring.STAGES)
    row_turn = turns.dv2
    if not BY_ITSELF:
        row_turn = row_turn ^ 1
    return S, Turns(next_stage, next_phase, turns.dh ^ 1, row_turn)


@gluon.jit
def consume_forward(items, ring, out, OF_STATE: gl.constexpr):
    """The consumer: every item from its first chunk to its last."""
    turns = Turns(gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))
    item_turn = gl.to_tensor(0)
    for t in range(gl.program_id(0), items.count(), gl.num_programs(0)):
        item = items.item(t)
        S = gl.zeros((COLUMNS, ring.K), gl.float32, OF_STATE)
        if out.HAS_DHT:
            S = out.take_given(item_turn, OF_STATE)
        full = item.tokens // CHUNK
        left = item.tokens - full * CHUNK
        for _ in range(full):
            S, turns = _forward(
                S, turns, items, item, ring, out, item.token, CHUNK, OF_STATE, LAST=False
            )  # fmt: skip
        if left > 0:
            S, turns = _forward(
                S, turns, items, item, ring, out, item.token + full * CHUNK, left, OF_STATE, LAST=True
            )  # fmt: skip
        if out.HAS_DH0:
            out.put_final(S, item_turn, turns.dh, turns.dv2)
        out.end(turns.dh)
        item_turn = item_turn ^ 1


@kernel
def states_kernel(
    new, g, gk, cu_seqlens, offsets, unit, T, S, HV, group, V, chunks,
    k_desc, w_desc, u_desc, h_desc, new_desc, initial_desc, final_desc,
    K: gl.constexpr, STAGES: gl.constexpr, OF_STATE: gl.constexpr, PACKED: gl.constexpr,
    HAS_G: gl.constexpr, HAS_GK: gl.constexpr, HAS_INITIAL: gl.constexpr, HAS_FINAL: gl.constexpr,
    V_FIRST: gl.constexpr, SEPARATE: gl.constexpr, OFFSETS: gl.constexpr, OVERLAPPING: gl.constexpr,
):  # fmt: skip
    """OVERLAPPING: the next kernel may start when all programs of this one have."""
    if OVERLAPPING:
        gdc_launch_dependents()
    items = Items(cu_seqlens, offsets, T, S, HV, group, V, chunks, PACKED, OFFSETS, True)
    ring = Ring.create(k_desc, k_desc, w_desc, u_desc, u_desc, K, STAGES, HAS_G, HAS_GK, True)
    out = Out.create(
        h_desc, new_desc, initial_desc, final_desc, new, K, V_FIRST, HAS_INITIAL, HAS_FINAL, SEPARATE, True
    )
    if HAS_G or HAS_GK:
        gl.warp_specialize(
            [(consume_forward, (items, ring, out, OF_STATE)),
             (load_chunks, (items, ring)), (store_states, (items, out, K)), (store_rows, (items, out, K)),
             (load_gates, (items, ring, g, gk, unit, unit))],
            [1, 1, 1, 1], [PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, GATE_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(consume_forward, (items, ring, out, OF_STATE)),
             (load_chunks, (items, ring)), (store_states, (items, out, K)), (store_rows, (items, out, K))],
            [1, 1, 1], [PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


# Launcher


def states(
    k: Tensor, w: Tensor, u: Tensor, g: Tensor | None, gk: Tensor | None, initial: Tensor | None,
    cu_seqlens: Tensor | None, offsets: Tensor | None, chunks: int, v_first: bool, want_values: bool,
    want_final: bool, launch: Launch = run, sms: int = 0, overlapping: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(h [B, chunks, HV, K, V], v_new, final), those that are wanted. `overlapping`: the kernel that is
    launched next reads nothing of this one and may start. `sms`: the SMs to make a schedule for; 0: those of
    the device."""
    B, T, HV, V = u.shape
    H, K = k.shape[2:]
    S = B if cu_seqlens is None else len(cu_seqlens) - 1
    state = (HV, V, K) if v_first else (HV, K, V)
    h = torch.empty((B, chunks, *state), dtype=k.dtype, device=k.device)
    new = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    final = torch.empty((S, *state), dtype=torch.float32, device=k.device) if want_final else None
    initial = None if initial is None else placed(initial.float())
    if B * T == 0:
        if final is not None:
            final.zero_() if initial is None else final.copy_(initial)
        return h, new if want_values else None, final
    keys, ws, us = (rows_of(t) for t in (k, w, u))
    made = plan(
        h, new, (initial, final), S, v_first, has_g=g is not None, has_gk=gk is not None,
        packed=cu_seqlens is not None, forward=True, sms=sms,
    )  # fmt: skip
    launch(
        states_kernel, made.grid,
        new, *(unused(new) if t is None else t for t in (g, gk, cu_seqlens, offsets)),
        1.0, T, S, HV, HV // H, V, chunks,
        *(descriptor(matrix(t), 64, K) for t in (keys, ws)),
        descriptor(matrix(us), 64, 64),
        *made.written, HAS_INITIAL=initial is not None, HAS_FINAL=final is not None,
        OFFSETS=offsets is not None, OVERLAPPING=overlapping, **made.options,
    )  # fmt: skip
    return h, new if want_values else None, final
