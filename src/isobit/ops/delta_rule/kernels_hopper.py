"""The recurrence on Hopper: class dhu/1.

The chunks of a sequence depend on one another, so the latency of a chunk decides the speed. One program
carries 64 columns of a head's state, transposed, in the registers of one warpgroup (V takes the 64 rows of a
`wgmma`). Both products of the recurrence read it from there:

    X = E K^T          E = -D [64, K] as 16-bit numbers, K from shared memory
    X = dv^T - X       one rounding: dv2
    E = decay E - scale do^T Q + X W

With E = -D nothing has to be negated on the way. This warpgroup is the consumer. Other warps load tiles,
gates and dht and store dh, dv2 and dh0 (`kernels_hopper_io`), so that the consumer waits for the tensor cores
only.

do^T Q does not depend on the state. Without a gate it has an accumulator of its own and starts one chunk
ahead: the tensor cores compute it while the consumer rounds E. With a gate, do is first multiplied by gate
and scale and split into two 16-bit numbers, high + low, whose products with Q are added to E while the
consumer computes X; a single number would lose digits of the state. K = 256 leaves no registers for a second
accumulator, and is computed like this too.

The last chunk of a sequence may have fewer than 64 tokens. The rest of its tiles belongs to another sequence
and is set to zero in shared memory, and dv2 is stored with a mask.

Items (sequence, head, columns) are dealt to programs round-robin. Which program takes an item, and how many
programs there are, affects no bit.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    gdc_wait,
    gl,
    gluon,
    kernel,
    mbarrier,
    record,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from isobit.kernels.host.temperature import LOG2E
from isobit.ops.delta_rule.kernels_hopper_io import (
    CHUNK,
    COLUMNS,
    KVW,
    OF_CHUNK,
    QDO,
    Items,
    Out,
    Ring,
    load_chunks,
    load_gates,
    store_rows,
    store_states,
)
from isobit.ops.delta_rule.kernels_triton import chunk_offsets, outputs

#: Stages of the ring by K: as many as fit next to the output buffers. Both gates and a state leave no room
#: for a third stage of K = 128.
STAGES = {64: 4, 128: 3, 256: 1}

#: The same where most SMs have a program. Then the memory is the limit, and it is faster with less in flight:
#: 64 heads of 8192 tokens (128 programs) took 260 us on an H200 with two stages, 273 with three. With 80
#: programs it was 100 and 89, with 112 124 and 127 (2026-11). Affects the schedule only.
STAGES_OF_MANY = {64: 4, 128: 2, 256: 1}

#: Both for the recurrence forwards, whose stages have three tiles instead of five: as many as fit with a
#: state, and with the two states of several items per program.
STAGES_FORWARD, STAGES_OF_MANY_FORWARD = {64: 4, 128: 4, 256: 2}, {64: 4, 128: 3, 256: 2}

#: Bytes of shared memory per program, and those of them that barriers and alignment may take.
SHARED_BYTES, BARRIER_BYTES = 227 * 1024, 1024

#: Registers per thread at launch, and those that the producer of gates keeps.
REGISTERS, GATE_REGISTERS = 240, gl.constexpr(48)

BY_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
ONE_OF_FOUR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def clear(tile, left):
    """Zeros the rows of a tile that belong to another sequence: those from `left` on. Not fenced."""
    token = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(1, BY_ROWS)), 1)
    tile.store(gl.where(token < left, tile.load(BY_ROWS), 0.0))


@gluon.jit
def clear_rows(one, other, left):
    """Zeros the rows of two tiles that belong to another sequence."""
    clear(one, left)
    clear(other, left)
    fence_async_shared()


@gluon.jit
def _gated(ring, stage, scale, OF_STATE: gl.constexpr):
    """do^T times gate and -scale, as high + low."""
    DTYPE: gl.constexpr = ring.q_desc.dtype
    A: gl.constexpr = gl.DotOperandLayout(0, OF_STATE, 2)
    y = ring.do.index(stage).permute((1, 0)).load(OF_CHUNK).to(gl.float32)
    if ring.HAS_G:
        y = y * ring.of_do.index(stage).load(OF_CHUNK)
    else:
        y = y * -scale
    if gl.bfloat16 == DTYPE:
        # Add half a unit and truncate the lower half: y.to(bf16) and back takes four times as long.
        bits = y.to(gl.int32, bitcast=True)
        high = ((bits + 0x8000) & -0x10000).to(gl.float32, bitcast=True)
    else:
        high = y.to(DTYPE).to(gl.float32)
    low = (y - high).to(DTYPE)
    return gl.convert_layout(high.to(DTYPE), A), gl.convert_layout(low, A)


@gluon.jit
def _arrived(ring, stage, phase, WHOLE: gl.constexpr):
    """Wait for q and do of a chunk. WHOLE: it is known to have 64 tokens."""
    mbarrier.wait(ring.ready.index(2 * stage + QDO), phase)
    if not WHOLE:
        left = gl.max(ring.left.index(stage).load(ONE_OF_FOUR), 0)
        if left < CHUNK:
            clear_rows(ring.q.index(stage), ring.do.index(stage), left)


@gluon.jit
def _begin(ring, stage, phase, OF_STATE: gl.constexpr, AHEAD: gl.constexpr, WHOLE: gl.constexpr):
    """Start P = do^T Q of a chunk, if it is computed AHEAD."""
    P = gl.to_tensor(0)
    if AHEAD:
        _arrived(ring, stage, phase, WHOLE)
        P = gl.zeros((COLUMNS, ring.K), gl.float32, OF_STATE)
        do, q = ring.do.index(stage).permute((1, 0)), ring.q.index(stage)
        P = warpgroup_mma(do, q, P, use_acc=False, is_async=True)
    return P


@record
class Turns:
    """Where the consumer is in the ring, and the phases of the two buffers that it fills for each chunk."""

    stage: gl.tensor
    phase: gl.tensor  # of the barriers of the ring
    dh: gl.tensor
    dv2: gl.tensor


@gluon.jit
def _chunk(
    E, P, turns, items, item, ring, out, row, left, scale,
    OF_STATE: gl.constexpr, AHEAD: gl.constexpr, LAST: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """E before a chunk, from E after it, and P of the next chunk to process. LAST: the chunk has fewer than
    64 tokens. FIRST: the next chunk may be of another sequence, and have fewer.

    The registers of an accumulator must not be touched while another product is in flight, or the compiler
    serialises all products. So E is written only where none is in flight."""
    DTYPE: gl.constexpr = ring.q_desc.dtype
    A: gl.constexpr = gl.DotOperandLayout(0, OF_STATE, 2)
    stage, phase = turns.stage, turns.phase
    k, dv, w = ring.k.index(stage), ring.dv.index(stage), ring.w.index(stage)
    narrow = E.to(DTYPE)
    mbarrier.wait(ring.ready.index(2 * stage + KVW), phase)
    if LAST:
        clear_rows(k, w, left)
        clear_rows(dv, dv, left)
    if not AHEAD:
        if ring.HAS_G or ring.HAS_GK:
            E = E * ring.decay.index(stage).load(OF_STATE)
    X = warpgroup_mma(
        gl.convert_layout(narrow, gl.DotOperandLayout(0, OF_CHUNK, 2)), k.permute((1, 0)),
        gl.zeros((COLUMNS, CHUNK), gl.float32, OF_CHUNK), use_acc=False, is_async=True,
    )  # fmt: skip
    if not AHEAD:
        _arrived(ring, stage, phase, not LAST)
        high, low = _gated(ring, stage, scale, OF_STATE)
        E = warpgroup_mma(high, ring.q.index(stage), E, is_async=True)
        E = warpgroup_mma(low, ring.q.index(stage), E, is_async=True)
    out.put_state(narrow, turns.dh)
    dv_turned = dv.permute((1, 0)).load(OF_CHUNK).to(gl.float32)
    if AHEAD:
        X, P, dv_turned = warpgroup_mma_wait(0, deps=(X, P, dv_turned))
    else:
        X = warpgroup_mma_wait(2, deps=(X,))
    if ring.HAS_G:
        X = gl.fma(X, ring.of_x.index(stage).load(OF_CHUNK), dv_turned)
    else:
        X = dv_turned - X
    X = X.to(DTYPE)
    if AHEAD:
        if ring.HAS_GK:
            E = E * ring.decay.index(stage).load(OF_STATE)
        E = gl.fma(P, gl.full_like(P, -scale), E)
    E = warpgroup_mma(gl.convert_layout(X, A), w, E, is_async=True)
    next_stage, next_phase = after(stage, phase, ring.STAGES)
    P = _begin(ring, next_stage, next_phase, OF_STATE, AHEAD, not FIRST)
    if AHEAD:
        mbarrier.arrive(ring.empty.index(2 * stage + QDO))
    out.put_rows(items, item, X, turns.dv2, row, left, LAST)
    E = warpgroup_mma_wait(1 if AHEAD else 0, deps=(E,))
    if not AHEAD:
        mbarrier.arrive(ring.empty.index(2 * stage + QDO))
    mbarrier.arrive(ring.empty.index(2 * stage + KVW))
    dv_turn = turns.dv2
    if not LAST:
        dv_turn = dv_turn ^ 1
    return E, P, Turns(next_stage, next_phase, turns.dh ^ 1, dv_turn)


@gluon.jit
def _consume(items, ring, out, scale, OF_STATE: gl.constexpr, AHEAD: gl.constexpr):
    """The consumer: every item from its last chunk to its first."""
    turns = Turns(gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))
    item_turn = gl.to_tensor(0)
    P = _begin(ring, turns.stage, turns.phase, OF_STATE, AHEAD, False)
    for t in range(gl.program_id(0), items.count(), gl.num_programs(0)):
        item = items.item(t)
        E = gl.zeros((COLUMNS, ring.K), gl.float32, OF_STATE)
        if out.HAS_DHT:
            E = out.take_given(item_turn, OF_STATE)
        full = item.tokens // CHUNK
        left = item.tokens - full * CHUNK
        if left > 0:
            E, P, turns = _chunk(
                E, P, turns, items, item, ring, out, item.token + full * CHUNK, left, scale, OF_STATE, AHEAD,
                LAST=True, FIRST=True,
            )  # fmt: skip
        # All of these but the sequence's first chunk are followed by another whole chunk.
        for _ in range(full - 1 if AHEAD else full):
            E, P, turns = _chunk(
                E, P, turns, items, item, ring, out, item.token, CHUNK, scale, OF_STATE, AHEAD,
                LAST=False, FIRST=False,
            )  # fmt: skip
        if AHEAD:
            if full > 0:
                E, P, turns = _chunk(
                    E, P, turns, items, item, ring, out, item.token, CHUNK, scale, OF_STATE, AHEAD,
                    LAST=False, FIRST=True,
                )  # fmt: skip
        if out.HAS_DH0:
            out.put_final(E, item_turn, turns.dh, turns.dv2)
        item_turn = item_turn ^ 1
    if AHEAD:
        P = warpgroup_mma_wait(0, deps=(P,))


@kernel
def dhu_kernel(
    dv2, g, gk, cu_seqlens, offsets, scale, unit, T, S, HV, group, V, chunks,
    q_desc, k_desc, w_desc, do_desc, dv_desc, dh_desc, dv2_desc, dht_desc, dh0_desc,
    K: gl.constexpr, STAGES: gl.constexpr, OF_STATE: gl.constexpr, PACKED: gl.constexpr,
    HAS_G: gl.constexpr, HAS_GK: gl.constexpr, HAS_DHT: gl.constexpr, HAS_DH0: gl.constexpr,
    V_FIRST: gl.constexpr, SEPARATE: gl.constexpr, AHEAD: gl.constexpr, OVERLAPPING: gl.constexpr,
):  # fmt: skip
    """OVERLAPPING: it may start before the kernel before it is complete, of which it reads nothing. It is
    complete only when that one is, so the kernel after it may read both."""
    items = Items(cu_seqlens, offsets, T, S, HV, group, V, chunks, PACKED, True, False)
    ring = Ring.create(q_desc, k_desc, w_desc, do_desc, dv_desc, K, STAGES, HAS_G, HAS_GK, False)
    out = Out.create(
        dh_desc, dv2_desc, dht_desc, dh0_desc, dv2, K, V_FIRST, HAS_DHT, HAS_DH0, SEPARATE, False
    )
    if HAS_G or HAS_GK:
        gl.warp_specialize(
            [(_consume, (items, ring, out, scale, OF_STATE, AHEAD)),
             (load_chunks, (items, ring)), (store_states, (items, out, K)), (store_rows, (items, out, K)),
             (load_gates, (items, ring, g, gk, scale, unit))],
            [1, 1, 1, 1], [PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, GATE_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consume, (items, ring, out, scale, OF_STATE, AHEAD)),
             (load_chunks, (items, ring)), (store_states, (items, out, K)), (store_rows, (items, out, K))],
            [1, 1, 1], [PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    if OVERLAPPING:
        gdc_wait()


# Launcher


def why_not(args: dict[str, Any]) -> str | None:
    """Why this kernel cannot serve a call, or None."""
    dtype, K, V = args["q"].dtype, args["q"].shape[-1], args["dv"].shape[-1]
    if dtype not in (torch.bfloat16, torch.float16):
        return "tensor cores take bf16 and fp16; other dtypes are triton's"
    if args["chunk_size"] != 64:
        return f"chunk_size={args['chunk_size']}; its chunks have 64 tokens"
    if K not in STAGES:
        return f"K={K}; its states have 64, 128 or 256 rows"
    if V % 64:
        return f"V={V}; a program carries 64 columns of the state"
    return None


def placed(t: Tensor) -> Tensor:
    """A tensor as it is, or a copy if TMA cannot read it in place."""
    t = t.contiguous()
    return t.clone() if t.data_ptr() % 16 else t


def rows_of(t: Tensor) -> Tensor:
    """[B, T, heads, columns] as the matrix [B T, heads columns] for TMA."""
    return placed(t).view(t.shape[0] * t.shape[1], t.shape[2] * t.shape[3])


class Buffers(NamedTuple):
    """What a program has in shared memory, apart from the number of stages."""

    K: int
    states: int  # how many of dht and dh0 there are
    has_g: bool = False
    has_gk: bool = False
    forward: bool = False
    outputs: bool = False  # forwards, q too, two tiles of P, and one of results

    def nbytes(self, stages: int, separate: bool) -> int:
        """`separate`: dht and dh0 have buffers of their own. Otherwise one buffer for a state is shared by
        these two, dh and dv2."""
        wide, slim = (2 + self.outputs, 1) if self.forward else (3, 2)  # k, w and u; or q, k, w and do, dv
        tiles = stages * 64 * (wide * self.K + slim * 64) * 2
        gates = stages * ((slim + self.outputs) * 64 * self.has_g + (self.K if self.has_gk else 1)) * 4
        outputs, state = 64 * (self.K + 64 + 192 * self.outputs) * 2, 64 * self.K * 4
        if separate:
            outputs += self.states * state
        elif self.states:
            outputs = max(outputs, state)
        return tiles + gates + outputs + BARRIER_BYTES


def stages_of(buffers: Buffers, items: int, sms: int) -> int:
    """Stages of the ring, for so many items of 64 columns."""
    few, many = (STAGES_FORWARD, STAGES_OF_MANY_FORWARD) if buffers.forward else (STAGES, STAGES_OF_MANY)
    stages = (many if 5 * sms <= 6 * items else few)[buffers.K]
    if buffers.nbytes(stages, separate=buffers.states == 0) > SHARED_BYTES:
        stages = many[buffers.K]
    return stages


def fits_separate_buffers(buffers: Buffers, stages: int) -> bool:
    """Whether dht and dh0 fit in shared memory next to the ring, dh, dv2, gates and barriers. Three stages at
    K = 128 leave no room; there each program has one item, so sharing is safe."""
    return buffers.nbytes(stages, separate=True) <= SHARED_BYTES


class Plan(NamedTuple):
    """What the launchers of both directions have in common."""

    grid: tuple[int]
    #: Descriptors of the states at the chunks, of the new values, and of the first and the last state.
    written: tuple[Any, ...]
    options: dict[str, Any]


def plan(
    states: Tensor, values: Tensor, ends: Sequence[Tensor | None], S: int, v_first: bool, has_g: bool,
    has_gk: bool, packed: bool, forward: bool, sms: int,
) -> Plan:  # fmt: skip
    """For states at the chunks [B, chunks, HV, K, V], new values [B, T, HV, V] and the states at both ends of
    S sequences. `sms`: the SMs to make a schedule for; 0: those of the device."""
    B, T, HV, V = values.shape
    K = states.shape[-1 if v_first else -2]
    rows = values.view(B * T, HV * V)
    # There may be no chunk, and invalid bounds may still name one. Its store must not go into an input.
    flat = states.view(-1, states.shape[-1]) if states.numel() else rows
    box = (64, K) if v_first else (K, 64)
    of_states = descriptor(matrix(flat), *box)
    # Where a state at an end is missing, the kernel does not use its descriptor.
    there = [descriptor(matrix(t.flatten(0, 2)), *box) for t in ends if t is not None]
    first, last = (there[0], there[-1]) if there else (of_states, of_states)
    items, sms = S * HV * (V // 64), sms or sm_count(values.device)
    buffers = Buffers(K, len(there), has_g=has_g, has_gk=has_gk, forward=forward)
    stages = stages_of(buffers, items, sms)
    options: dict[str, Any] = {
        "K": K, "STAGES": stages, "OF_STATE": accumulator_layout(K), "PACKED": packed, "HAS_G": has_g,
        "HAS_GK": has_gk, "V_FIRST": v_first, "SEPARATE": fits_separate_buffers(buffers, stages),
        "num_warps": 4, "maxnreg": REGISTERS, "enable_fp_fusion": False,
    }  # fmt: skip
    return Plan((min(items, sms),), (of_states, descriptor(matrix(rows), 64, 64), first, last), options)


def dhu(
    launch: Launch = run, sms: int = 0, before: Callable[[], None] | None = None, **args: Any
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`before` launches a kernel that this one need not wait for. It is called when all that this one reads
    has been launched and all that it writes is allocated, and this one is launched next. That kernel itself
    must wait for those before it. `sms`: the SMs to make a schedule for; 0: those of the device."""
    B, T, H, K = args["q"].shape
    HV, V = args["dv"].shape[2:]
    dh, dh0, dv2, S = outputs(args)
    g, gk = (None if args[name] is None else args[name].contiguous() for name in ("g", "gk"))
    dht = None if args["dht"] is None else placed(args["dht"].float())
    if B * T == 0:
        if dh0 is not None:
            dh0.zero_() if dht is None else dh0.copy_(dht)
        if before is not None:
            before()
        return dh, dh0, dv2
    v_first, bounds = args["state_v_first"], args["cu_seqlens"]
    q, k, w, do, dv = (rows_of(args[name]) for name in ("q", "k", "w", "do", "dv"))
    made = plan(
        dh, dv2, (dht, dh0), S, v_first, has_g=g is not None, has_gk=gk is not None,
        packed=bounds is not None, forward=False, sms=sms,
    )  # fmt: skip
    offsets = chunk_offsets(args, launch)
    bounds = None if bounds is None else bounds.contiguous()
    early: dict[str, Any] = {}
    if before is not None:
        before()
        early = {"launch_pdl": True}
    launch(
        dhu_kernel, made.grid,
        dv2, *(unused(dv2) if t is None else t for t in (g, gk, bounds, offsets)),
        float(args["scale"]), 1.0 if args["use_exp2"] else LOG2E, T, S, HV, HV // H, V, dh.shape[1],
        *(descriptor(matrix(t), 64, K) for t in (q, k, w)),
        *(descriptor(matrix(t), 64, 64) for t in (do, dv)),
        *made.written, HAS_DHT=dht is not None, HAS_DH0=dh0 is not None, AHEAD=g is None and K < 256,
        OVERLAPPING=before is not None, **made.options, **early,
    )  # fmt: skip
    return dh, dh0, dv2
