"""The recurrence on Hopper: class dhu/1.

A sequence's chunks follow one another, so the time of a chunk is what counts. One program carries 64 columns
of a head's state, transposed, in the registers of one warpgroup (V takes the 64 rows of a `wgmma`), and both
products of the chain take it from there:

    X = E K^T          E = -D [64, K] as 16-bit numbers, K from shared memory
    X = dv^T - X       one rounding: dv2
    E = decay E - scale do^T Q + X W

With E = -D nothing is ever negated on the way. Beside this warpgroup, the *walker*, a *loader* warp brings
the tiles of the next chunks by TMA, and a *gater* warp turns the gates into powers of two, once for all
threads of the walker. Rings of stages connect them. What leaves a chunk, dh and dv2, is stored by TMA while
the tensor cores are at work on W.

do^T Q is not in the chain. Without a gate it has an accumulator of its own. With one, do is multiplied by
gate and scale first and split into two 16-bit numbers, high + low, whose products with Q are added to E: one
number would lose digits that the state has. K = 256 leaves no registers for a second accumulator, and takes
that way too.

The last chunk of a sequence may have fewer tokens than 64. Then the rest of its tiles, which are another
sequence's, are set to zero in shared memory, and dv2 is stored under a mask.

Programs take items (sequence, head, columns) by turns. Which program takes an item, and how many there are,
decides no bit.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.arch import sm_count
from isobit.blocks.hopper_pipe import (
    LOADER_REGISTERS,
    accumulator_layout,
    after,
    descriptor,
    fence_async_shared,
    gl,
    gluon,
    kernel,
    matrix,
    mbarrier,
    record,
    tma,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from isobit.blocks.launch import Launch, run
from isobit.blocks.temperature import LOG2E
from isobit.ops.delta_rule.kernels_triton import chunk_offsets, outputs

#: Tokens of a chunk, and columns of the state that a program carries.
CHUNK, COLUMNS = gl.constexpr(64), gl.constexpr(64)

#: Stages of the ring: as many as fit beside what is stored, 227 KB together.
STAGES = {64: 4, 128: 3, 256: 1}

#: Registers of a thread at launch, and what the gater keeps of its.
REGISTERS, GATER_REGISTERS = 232, gl.constexpr(48)

OF_CHUNK = gl.constexpr(accumulator_layout(64))
BY_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
ALONG_CHUNK = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [1, 1], [1, 0]))


@record
class Items:
    """What programs take by turns: 64 columns of one head's state in one sequence."""

    cu_seqlens: gl.tensor
    offsets: gl.tensor
    T: gl.tensor
    S: gl.tensor
    HV: gl.tensor
    group: gl.tensor  # value heads that share q and k
    V: gl.tensor
    PACKED: gl.constexpr

    @gluon.jit
    def count(self):
        return self.S * self.HV * (self.V // COLUMNS)

    @gluon.jit
    def item(self, t):
        """(sequence, value head, first column, first token, tokens, first chunk) of item t. Bounds of packed
        sequences are taken to lie inside of the T tokens, whatever they are."""
        tiles = self.V // COLUMNS
        column = t % tiles * COLUMNS
        hv = t // tiles % self.HV
        n = t // (tiles * self.HV)
        first = n * self.T
        tokens = self.T
        chunk = n * gl.cdiv(self.T, CHUNK)
        if self.PACKED:
            first = gl.minimum(gl.maximum(gl.load(self.cu_seqlens + n), 0), self.T).to(gl.int32)
            end = gl.minimum(gl.maximum(gl.load(self.cu_seqlens + n + 1), first), self.T).to(gl.int32)
            tokens = end - first
            chunk = gl.load(self.offsets + n).to(gl.int32)
        return n, hv, column, first, tokens, chunk


@record
class Ring:
    """Stages of shared memory, one for each chunk on its way. `ready`: tiles and gates have arrived; `empty`:
    the walker is done with them."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    w_desc: tma.tensor_descriptor
    do_desc: tma.tensor_descriptor
    dv_desc: tma.tensor_descriptor
    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    w: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    dv: gl.shared_memory_descriptor
    of_do: gl.shared_memory_descriptor  # [1, 64]: -scale 2^g
    of_x: gl.shared_memory_descriptor  # [1, 64]: 2^(g[last] - g)
    decay: gl.shared_memory_descriptor  # [1, K], or [1, 1] without gk
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    K: gl.constexpr
    STAGES: gl.constexpr
    HAS_G: gl.constexpr
    HAS_GK: gl.constexpr

    @gluon.jit
    def create(
        q_desc, k_desc, w_desc, do_desc, dv_desc,
        K: gl.constexpr, STAGES: gl.constexpr, HAS_G: gl.constexpr, HAS_GK: gl.constexpr,
    ):  # fmt: skip
        wide: gl.constexpr = [STAGES] + q_desc.block_type.shape
        slim: gl.constexpr = [STAGES] + do_desc.block_type.shape
        q = gl.allocate_shared_memory(q_desc.dtype, wide, q_desc.layout)
        k = gl.allocate_shared_memory(q_desc.dtype, wide, q_desc.layout)
        w = gl.allocate_shared_memory(q_desc.dtype, wide, q_desc.layout)
        do = gl.allocate_shared_memory(q_desc.dtype, slim, do_desc.layout)
        dv = gl.allocate_shared_memory(q_desc.dtype, slim, do_desc.layout)
        of_do = q  # not touched without the gates
        of_x = q
        decay = q
        if HAS_G:
            of_do = gl.allocate_shared_memory(gl.float32, [STAGES, 1, CHUNK], PLAIN)
            of_x = gl.allocate_shared_memory(gl.float32, [STAGES, 1, CHUNK], PLAIN)
        if HAS_G or HAS_GK:
            decay = gl.allocate_shared_memory(gl.float32, [STAGES, 1, K if HAS_GK else 1], PLAIN)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for s in gl.static_range(STAGES):
            mbarrier.init(ready.index(s), count=2 if HAS_G or HAS_GK else 1)
            mbarrier.init(empty.index(s), count=1)
        fence_async_shared()  # TMA signals these barriers, and must see them initialised
        return Ring(
            q_desc, k_desc, w_desc, do_desc, dv_desc, q, k, w, do, dv, of_do, of_x, decay, ready, empty,
            K, STAGES, HAS_G, HAS_GK,
        )  # fmt: skip


@gluon.jit
def _load_chunks(items, ring):
    """The loader: tiles of every chunk, as fast as stages come free."""
    BYTES: gl.constexpr = 3 * ring.q_desc.block_type.nbytes + 2 * ring.do_desc.block_type.nbytes
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # of `empty`: a fresh barrier counts as one whose phase 1 is complete
    for t in range(gl.program_id(0), items.count(), gl.num_programs(0)):
        _, hv, column, first, tokens, _ = items.item(t)
        by_k, by_v = hv // items.group * ring.K, hv * items.V + column
        chunks = gl.cdiv(tokens, CHUNK)
        for i in range(chunks):
            row = first + (chunks - 1 - i) * CHUNK
            bar = ring.ready.index(stage)
            mbarrier.wait(ring.empty.index(stage), phase)
            mbarrier.expect(bar, BYTES)
            tma_load(ring.k_desc, [row, by_k], bar, ring.k.index(stage))
            tma_load(ring.do_desc, [row, by_v], bar, ring.do.index(stage))
            tma_load(ring.q_desc, [row, by_k], bar, ring.q.index(stage))
            tma_load(ring.dv_desc, [row, by_v], bar, ring.dv.index(stage))
            tma_load(ring.w_desc, [row, hv * ring.K], bar, ring.w.index(stage))
            stage, phase = after(stage, phase, ring.STAGES)


@gluon.jit
def _load_gates(items, ring, g, gk, scale, unit):
    """The gater. `unit` turns the gates into powers of two. Tokens that are another sequence's have factor
    zero."""
    ALONG_K: gl.constexpr = gl.BlockedLayout([1, ring.K // 32], [1, 32], [1, 1], [1, 0])
    token = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(0, ALONG_CHUNK)), 0)
    feature = gl.expand_dims(gl.arange(0, ring.K, gl.SliceLayout(0, ALONG_K)), 0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for t in range(gl.program_id(0), items.count(), gl.num_programs(0)):
        _, hv, _, first, tokens, _ = items.item(t)
        chunks = gl.cdiv(tokens, CHUNK)
        for i in range(chunks):
            start = (chunks - 1 - i) * CHUNK
            left = gl.minimum(tokens - start, CHUNK)
            at = (first + start).to(gl.int64) * items.HV + hv
            last = at + (left - 1).to(gl.int64) * items.HV
            g_last = gl.to_tensor(0.0)
            if ring.HAS_G:
                live = token < left
                each = gl.load(g + at + token.to(gl.int64) * items.HV, mask=live, other=0.0) * unit
                g_last = gl.load(g + last) * unit
            if ring.HAS_GK:
                of_k = gl.load(gk + last * ring.K + feature) * unit
            mbarrier.wait(ring.empty.index(stage), phase)
            if ring.HAS_G:
                ring.of_do.index(stage).store(gl.where(live, gl.exp2(each) * -scale, 0.0))
                ring.of_x.index(stage).store(gl.where(live, gl.exp2(g_last - each), 0.0))
            if ring.HAS_GK:
                ring.decay.index(stage).store(gl.exp2(of_k + g_last))
            else:
                ring.decay.index(stage).store(gl.full((1, 1), 1.0, gl.float32, ALONG_CHUNK) * gl.exp2(g_last))
            mbarrier.arrive(ring.ready.index(stage))
            stage, phase = after(stage, phase, ring.STAGES)


@record
class Out:
    """Where dh and dv2 leave to: through a buffer each and TMA, dv2 of a last chunk by its address."""

    dh_desc: tma.tensor_descriptor
    dv2_desc: tma.tensor_descriptor
    dh: gl.shared_memory_descriptor
    dv2: gl.shared_memory_descriptor
    dv2_at: gl.tensor
    V_FIRST: gl.constexpr

    @gluon.jit
    def create(dh_desc, dv2_desc, dv2_at, V_FIRST: gl.constexpr):
        dh = gl.allocate_shared_memory(dh_desc.dtype, dh_desc.block_type.shape, dh_desc.layout)
        dv2 = gl.allocate_shared_memory(dv2_desc.dtype, dv2_desc.block_type.shape, dv2_desc.layout)
        return Out(dh_desc, dv2_desc, dh, dv2, dv2_at, V_FIRST)

    @gluon.jit
    def put(self, items, E, X, hv, column, row, chunk, left, K: gl.constexpr, LAST: gl.constexpr):
        """dh = -E and dv2 = X of a chunk, both transposed, once those of the chunk before have left."""
        tma.store_wait(0)
        if self.V_FIRST:
            self.dh.store(-E)
        else:
            self.dh.permute((1, 0)).store(-E)
        if not LAST:
            self.dv2.permute((1, 0)).store(X)
        fence_async_shared()
        if self.V_FIRST:
            tma_store(self.dh_desc, [(chunk * items.HV + hv) * items.V + column, 0], self.dh)
        else:
            tma_store(self.dh_desc, [(chunk * items.HV + hv) * K, column], self.dh)
        if LAST:
            token = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(0, OF_CHUNK)), 0)
            v = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(1, OF_CHUNK)), 1)
            at = ((row.to(gl.int64) + token) * items.HV + hv) * items.V + column + v
            gl.store(self.dv2_at + at, X, mask=token < left)
        else:
            tma_store(self.dv2_desc, [row, hv * items.V + column], self.dv2)


@gluon.jit
def _clear(tile, left):
    """Zeros in the rows of a tile that are another sequence's."""
    token = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(1, BY_ROWS)), 1)
    tile.store(gl.where(token < left, tile.load(BY_ROWS), 0.0))


@gluon.jit
def _chunk(
    E, stage, phase, items, ring, out, hv, column, row, chunk, left, scale,
    OF_STATE: gl.constexpr, FOLDED: gl.constexpr, LAST: gl.constexpr,
):  # fmt: skip
    """E before a chunk, from E after it. LAST: it has fewer than 64 tokens."""
    DTYPE: gl.constexpr = ring.q_desc.dtype
    q, k, w = ring.q.index(stage), ring.k.index(stage), ring.w.index(stage)
    do, dv = ring.do.index(stage), ring.dv.index(stage)
    narrow = E.to(DTYPE)
    mbarrier.wait(ring.ready.index(stage), phase)
    if LAST:
        _clear(q, left)
        _clear(k, left)
        _clear(w, left)
        _clear(do, left)
        _clear(dv, left)
        fence_async_shared()
    # Before the first product is on its way: registers of one that was must rest while another is.
    if ring.HAS_G or ring.HAS_GK:
        E = E * ring.decay.index(stage).load(OF_STATE)
    X = warpgroup_mma(
        gl.convert_layout(narrow, gl.DotOperandLayout(0, OF_CHUNK, 2)), k.permute((1, 0)),
        gl.zeros((COLUMNS, CHUNK), gl.float32, OF_CHUNK), use_acc=False, is_async=True,
    )  # fmt: skip
    A: gl.constexpr = gl.DotOperandLayout(0, OF_STATE, 2)
    if FOLDED:
        y = do.permute((1, 0)).load(OF_CHUNK).to(gl.float32)
        if ring.HAS_G:
            y = y * ring.of_do.index(stage).load(OF_CHUNK)
        else:
            y = y * -scale
        high = y.to(DTYPE)
        low = (y - high.to(gl.float32)).to(DTYPE)
        E = warpgroup_mma(gl.convert_layout(high, A), q, E, is_async=True)
        E = warpgroup_mma(gl.convert_layout(low, A), q, E, is_async=True)
    else:
        P = gl.zeros((COLUMNS, ring.K), gl.float32, OF_STATE)
        P = warpgroup_mma(do.permute((1, 0)), q, P, use_acc=False, is_async=True)
    dv_turned = dv.permute((1, 0)).load(OF_CHUNK).to(gl.float32)
    X = warpgroup_mma_wait(2 if FOLDED else 1, deps=(X,))
    if ring.HAS_G:
        X = X * ring.of_x.index(stage).load(OF_CHUNK)
    X = (dv_turned - X).to(DTYPE)
    operand = gl.convert_layout(X, A)
    if not FOLDED:
        # The operand too: otherwise the compiler would leave X until after the wait.
        P, operand = warpgroup_mma_wait(0, deps=(P, operand))
        E = gl.fma(P, gl.full_like(P, -scale), E)
    E = warpgroup_mma(operand, w, E, is_async=True)
    out.put(items, narrow, X, hv, column, row, chunk, left, ring.K, LAST)
    E = warpgroup_mma_wait(0, deps=(E,))
    mbarrier.arrive(ring.empty.index(stage))
    return E


@gluon.jit
def _state(v, k, V, K: gl.constexpr, V_FIRST: gl.constexpr):
    """Where element (v, k) of a state lies."""
    if V_FIRST:
        at = v * K + k
    else:
        at = k * V + v
    return at


@gluon.jit
def _walk(
    items, ring, out, dht, dh0, scale,
    OF_STATE: gl.constexpr, FOLDED: gl.constexpr, HAS_DHT: gl.constexpr, HAS_DH0: gl.constexpr,
):  # fmt: skip
    """The walker: every item from its last chunk to its first."""
    K: gl.constexpr = ring.K
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    i = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(1, OF_STATE)), 1)
    j = gl.expand_dims(gl.arange(0, K, gl.SliceLayout(0, OF_STATE)), 0)
    for t in range(gl.program_id(0), items.count(), gl.num_programs(0)):
        n, hv, column, first, tokens, chunk = items.item(t)
        base = (n * items.HV + hv).to(gl.int64) * K * items.V
        E = gl.zeros((COLUMNS, K), gl.float32, OF_STATE)
        if HAS_DHT:
            E = -gl.load(dht + base + _state(column + i, j, items.V, K, out.V_FIRST)).to(gl.float32)
        full = tokens // CHUNK
        left = tokens - full * CHUNK
        if left > 0:
            E = _chunk(
                E, stage, phase, items, ring, out, hv, column, first + full * CHUNK, chunk + full, left,
                scale, OF_STATE, FOLDED, True,
            )  # fmt: skip
            stage, phase = after(stage, phase, ring.STAGES)
        for c in range(full):
            back = full - 1 - c
            E = _chunk(
                E, stage, phase, items, ring, out, hv, column, first + back * CHUNK, chunk + back, CHUNK,
                scale, OF_STATE, FOLDED, False,
            )  # fmt: skip
            stage, phase = after(stage, phase, ring.STAGES)
        if HAS_DH0:
            # A sum with 0 that the compiler cannot see through, or it would hold the addresses above in
            # registers until here.
            V = items.V + gl.minimum(tokens, 0)
            gl.store(dh0 + base + _state(column + i, j + V - items.V, V, K, out.V_FIRST), -E)
    tma.store_wait(0)


@kernel
def dhu_kernel(
    dv2, g, gk, dht, dh0, cu_seqlens, offsets, scale, unit, T, S, HV, group, V,
    q_desc, k_desc, w_desc, do_desc, dv_desc, dh_desc, dv2_desc,
    K: gl.constexpr, STAGES: gl.constexpr, OF_STATE: gl.constexpr, PACKED: gl.constexpr,
    HAS_G: gl.constexpr, HAS_GK: gl.constexpr, HAS_DHT: gl.constexpr, HAS_DH0: gl.constexpr,
    V_FIRST: gl.constexpr, FOLDED: gl.constexpr,
):  # fmt: skip
    items = Items(cu_seqlens, offsets, T, S, HV, group, V, PACKED)
    ring = Ring.create(q_desc, k_desc, w_desc, do_desc, dv_desc, K, STAGES, HAS_G, HAS_GK)
    out = Out.create(dh_desc, dv2_desc, dv2, V_FIRST)
    if HAS_G or HAS_GK:
        gl.warp_specialize(
            [(_walk, (items, ring, out, dht, dh0, scale, OF_STATE, FOLDED, HAS_DHT, HAS_DH0)),
             (_load_chunks, (items, ring)), (_load_gates, (items, ring, g, gk, scale, unit))],
            [1, 1], [LOADER_REGISTERS, GATER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_walk, (items, ring, out, dht, dh0, scale, OF_STATE, FOLDED, HAS_DHT, HAS_DH0)),
             (_load_chunks, (items, ring))],
            [1], [LOADER_REGISTERS],
        )  # fmt: skip


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


def _rows(t: Tensor) -> Tensor:
    """[B, T, heads, columns] as the matrix [B T, heads columns] that TMA reads, copied where it cannot."""
    t = t.contiguous()
    if t.data_ptr() % 16:
        t = t.clone()
    return t.view(t.shape[0] * t.shape[1], t.shape[2] * t.shape[3])


def dhu(launch: Launch = run, **args: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    B, T, H, K = args["q"].shape
    HV, V = args["dv"].shape[2:]
    dh, dh0, dv2, S = outputs(args)
    given = {name: None if args[name] is None else args[name].contiguous() for name in ("g", "gk", "dht")}
    g, gk, dht = given.values()
    if B * T == 0:
        if dh0 is not None:
            dh0.zero_() if dht is None else dh0.copy_(dht)
        return dh, dh0, dv2
    v_first, bounds = args["state_v_first"], args["cu_seqlens"]
    q, k, w, do, dv = (_rows(args[name]) for name in ("q", "k", "w", "do", "dv"))
    flat = dh.view(-1, dh.shape[-1]) if dh.numel() else dv  # no chunk, nothing to store: any matrix
    items = S * HV * (V // 64)

    def or_other(t: Tensor | None) -> Tensor:
        return dv2 if t is None else t

    launch(
        dhu_kernel, (min(items, sm_count(dv2.device)),),
        dv2, or_other(g), or_other(gk), or_other(dht), or_other(dh0),
        or_other(None if bounds is None else bounds.contiguous()), or_other(chunk_offsets(args, launch)),
        float(args["scale"]), 1.0 if args["use_exp2"] else LOG2E, T, S, HV, HV // H, V,
        *(descriptor(matrix(t), 64, K) for t in (q, k, w)),
        *(descriptor(matrix(t), 64, 64) for t in (do, dv)),
        descriptor(matrix(flat), *((64, K) if v_first else (K, 64))),
        descriptor(matrix(dv2.view(dv.shape)), 64, 64),
        K, STAGES[K], accumulator_layout(K), bounds is not None, g is not None, gk is not None,
        dht is not None, dh0 is not None, v_first, g is not None or K == 256,
        num_warps=4, maxnreg=REGISTERS, enable_fp_fusion=False,
    )  # fmt: skip
    return dh, dh0, dv2
