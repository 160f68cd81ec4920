"""dk and dv of attention on Hopper: class attn/1, with the formulas and chains of `kernels_triton_bwd`.

A program has two warpgroups with 64 keys each, and a loader warp for keys, values and blocks of queries
(`kernels_hopper_dkv_io`). Keys are the rows of all tiles: P^T and dS^T are computed in the registers from
which they are multiplied. For every block of queries:

    S^T = K Q^T,  dP^T = V dO^T       under way
    S^T is there:     P = 2^(S c - lse log2e), beside dP^T
    dP^T is there:    dv += P^T dO, and beside it dS = P (dP - delta)
    dk += dS^T Q      beside the S^T and dP^T of the next block

The order of sums is that of `kernels_triton_bwd`:

- S^T and dP^T are chains over D from zero; D is filled up with zeros, and steps of zeros change nothing.
- dk and dv are one chain each over the heads of the group, and in each over blocks of queries in ascending
  order, which begin at multiples of 16 positions. A block whose queries see no key of a warpgroup is skipped,
  and would change nothing.
- Rows of a block that are not queries of the sequence are zeros: TMA fills them with zeros outside of the
  tensor, and those of packed neighbours, which may be anything, are set to zero in shared memory.
- Keys after a sequence's last only affect their own rows, which are not stored.
"""

from isobit.kernels.hopper.pipeline import (
    ROWS,
    after,
    fence_async_shared,
    gl,
    gluon,
    kernel,
    mbarrier,
    record,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from isobit.ops.attention.kernels_hopper_bwd_parts import LEAVING, gradient_of_scores, probabilities
from isobit.ops.attention.kernels_hopper_dkv_io import KeyRing, KeyWork, load_keys
from isobit.ops.attention.kernels_hopper_io import (
    OF_LOADER,
    PARTS,
    REGISTERS,
    clear,
    reinterpreted,
    told,
)
from isobit.ops.attention.kernels_hopper_parts import BY_ROWS, packed, unpacked

#: Queries of a block, as many as registers hold; half as many where scores are capped, which takes some.
QUERIES = {64: 128, 128: 64}

#: Stages of queries and slots of keys: what 227 KB hold. Two stages, or four and one slot, take within 1.5 %
#: of the same time at 4 x 2048 and 2 x 8192 (D = 128, H200).
STAGES, SLOTS = {64: 4, 128: 3}, 2


@record
class KeyPart:
    """What a warpgroup works with."""

    work: KeyWork
    ring: KeyRing
    dk: gl.tensor
    dv: gl.tensor
    c: gl.tensor
    cap: gl.tensor
    slope: gl.tensor
    scale: gl.tensor
    D: gl.constexpr
    OF_Z: gl.constexpr
    OF_ACC: gl.constexpr
    WHICH: gl.constexpr
    CAPPED: gl.constexpr

    @gluon.jit
    def sees(self, first, last):
        """Which of a block's queries see which keys: those from a key's first to before its last."""
        j = gl.expand_dims(gl.arange(0, self.ring.BLOCK, gl.SliceLayout(0, self.OF_Z)), 0)
        return (j >= gl.expand_dims(first, 1)) & (j < gl.expand_dims(last, 1))

    @gluon.jit
    def seen_from(self, own, item):
        """(first, last): each key's queries, by their positions."""
        work = self.work
        keys, before = item[0], item[1]
        key = own + gl.arange(0, ROWS, gl.SliceLayout(1, self.OF_Z))
        first = key * 0 + before
        last = key * 0 + keys
        if work.CAUSAL:
            first = gl.maximum(first, key)
        if work.WINDOWED:
            last = gl.minimum(last, key + work.window)
        return first, last

    @gluon.jit
    def blocks(self, state, begin, end, own, item, MASKED: gl.constexpr):
        """Take in the blocks from `begin` to `end`."""
        work, ring = self.work, self.ring
        dk, dv, slot, stage, phase = state
        keys, before = item[0], item[1]
        first, last = self.seen_from(own, item)
        k, v = ring.k.index(slot * PARTS + self.WHICH), ring.v.index(slot * PARTS + self.WHICH)
        for at in range(begin, end, ring.BLOCK):
            q, do = ring.q.index(stage), ring.do.index(stage)
            mbarrier.wait(ring.ready.index(stage), phase)
            if MASKED and work.PACKED:
                if (at < before) | (at + ring.BLOCK > keys):
                    clear(ring.q, stage, before - at, keys - at, ring.BLOCK)
                    clear(ring.do, stage, before - at, keys - at, ring.BLOCK)
            nothing = gl.zeros((ROWS, ring.BLOCK), gl.float32, self.OF_Z)
            z = warpgroup_mma(k, q.permute((1, 0)), nothing, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, do.permute((1, 0)), nothing, use_acc=False, is_async=True)
            mbarrier.wait(ring.numbers.index(stage), phase)
            z = warpgroup_mma_wait(1, deps=(z,))
            base = ring.base.index(stage).load(gl.SliceLayout(0, self.OF_Z))
            p, bend = probabilities(z, gl.expand_dims(base, 0), self.c, self.cap, self.slope, self.CAPPED)
            if MASKED:
                p = gl.where(self.sees(first - at, last - at), p, 0.0)
            words = packed(p, ring.do_desc.dtype)
            # The data arrived long ago. But the compiler moves no arithmetic across a barrier, so this wait
            # makes the exponentials overlap with the product in flight.
            mbarrier.wait(ring.ready.index(stage), phase)
            dp, p, words = warpgroup_mma_wait(0, deps=(dp, p, words))
            dv = warpgroup_mma(
                unpacked(words, ring.do_desc.dtype, gl.DotOperandLayout(0, self.OF_ACC, 2)), do, dv,
                is_async=True,
            )  # fmt: skip
            # Nothing to wait for. But the compiler moves no arithmetic across this wait, so dS overlaps
            # with the product.
            if MASKED:
                dp, p, first, last = warpgroup_mma_wait(1, deps=(dp, p, first, last))
            else:
                dp, p = warpgroup_mma_wait(1, deps=(dp, p))
            delta = ring.delta.index(stage).load(gl.SliceLayout(0, self.OF_Z))
            ds = gradient_of_scores(p, bend, dp, gl.expand_dims(delta, 0), self.CAPPED)
            if MASKED:
                ds = gl.where(self.sees(first - at, last - at), ds, 0.0)
            words = packed(ds, ring.q_desc.dtype)
            dk = warpgroup_mma(
                unpacked(words, ring.q_desc.dtype, gl.DotOperandLayout(0, self.OF_ACC, 2)), q, dk,
                is_async=True,
            )  # fmt: skip
            dk, dv = warpgroup_mma_wait(0, deps=(dk, dv))
            mbarrier.arrive(ring.empty.index(stage))
            stage, phase = after(stage, phase, ring.STAGES)
        return dk, dv, slot, stage, phase

    @gluon.jit
    def skip(self, begin, end, stage, phase):
        """Blocks that no key of this part is seen from."""
        ring = self.ring
        for _ in range(begin, end, ring.BLOCK):
            mbarrier.wait(ring.ready.index(stage), phase)
            mbarrier.arrive(ring.empty.index(stage))
            stage, phase = after(stage, phase, ring.STAGES)
        return stage, phase

    @gluon.jit
    def sum_up(self, slot, blocks, stage, phase):
        """dk and dv of an item's part."""
        work, ring = self.work, self.ring
        low, keys, before = told(ring.items, slot, 1), told(ring.items, slot, 2), told(ring.items, slot, 3)
        item = (keys, before)
        own = told(ring.items, slot, 4) + self.WHICH * ROWS
        high = low + blocks * ring.BLOCK
        # This part's blocks are those from lo to hi, and from inner to outer all see all keys.
        lo = low
        hi = high
        inner = before
        outer = keys
        if work.CAUSAL:
            lo = gl.maximum(low, own & (0 - ring.BLOCK))
            inner = gl.maximum(before, own + ROWS - 1)
        if work.WINDOWED:
            hi = gl.minimum(hi, (own + ROWS - 1 + work.window + ring.BLOCK - 1) & (0 - ring.BLOCK))
            outer = gl.minimum(keys, own + work.window)
        hi = gl.where(own < keys, gl.maximum(hi, lo), lo)
        lo = gl.minimum(lo, high)
        hi = gl.minimum(hi, high)
        inner = gl.minimum(gl.maximum((inner + ring.BLOCK - 1) & (0 - ring.BLOCK), lo), hi)
        outer = gl.minimum(gl.maximum(outer & (0 - ring.BLOCK), inner), hi)
        dk = gl.zeros((ROWS, ring.D), gl.float32, self.OF_ACC)
        dv = gl.zeros((ROWS, ring.D), gl.float32, self.OF_ACC)
        for _ in range(work.G):
            stage, phase = self.skip(low, lo, stage, phase)
            state = (dk, dv, slot, stage, phase)
            state = self.blocks(state, lo, inner, own, item, True)
            state = self.blocks(state, inner, outer, own, item, False)
            dk, dv, _, stage, phase = self.blocks(state, outer, hi, own, item, True)
            stage, phase = self.skip(hi, high, stage, phase)
        self.put(slot, self.dk, ring.k.index(slot * PARTS + self.WHICH), dk * self.scale)
        self.put(slot, self.dv, ring.v.index(slot * PARTS + self.WHICH), dv)
        fence_async_shared()
        mbarrier.arrive(ring.kv_empty.index(slot * PARTS + self.WHICH))
        return stage, phase

    @gluon.jit
    def put(self, slot, to, room, tile):
        """A part's tile, by way of the room of its keys; zeros for what lies outside of a sequence's keys."""
        work, ring = self.work, self.ring
        room = reinterpreted(room, ring.k_desc.dtype, [ROWS, ring.D], LEAVING)
        room.store(tile.to(ring.k_desc.dtype))
        keys, own = told(ring.items, slot, 2), told(ring.items, slot, 4) + self.WHICH * ROWS
        first, kv = told(ring.items, slot, 5), told(ring.items, slot, 7)
        row = told(ring.items, slot, 6).to(gl.int64) * work.S
        key = own + gl.arange(0, ROWS, gl.SliceLayout(1, BY_ROWS))
        j = gl.expand_dims(gl.arange(0, ring.D, gl.SliceLayout(0, BY_ROWS)), 0)
        at = gl.expand_dims(((row + first + key) * work.KV + kv) * self.D, 1) + j
        inside = gl.expand_dims(key < keys, 1) & (j < self.D)
        gl.store(gl.multiple_of(to + at, [16, 16]), room.load(BY_ROWS), mask=inside)
        if work.STARTS or work.ENDS:
            outside = (key < work.S) & ((key < first) | (key >= first + keys))
            at = gl.expand_dims(((row + key) * work.KV + kv) * self.D, 1) + j
            zeros = gl.zeros((ROWS, ring.D), ring.k_desc.dtype, BY_ROWS)
            to = gl.multiple_of(to + at, [16, 16])
            gl.store(to, zeros, mask=gl.expand_dims(outside, 1) & (j < self.D))


@gluon.jit
def _sum_up(part):
    """A warpgroup: its part of all of the program's items."""
    ring = part.ring
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    kv_phase = gl.to_tensor(0)
    mbarrier.wait(ring.kv_ready.index(slot * PARTS + part.WHICH), kv_phase)
    blocks = told(ring.items, slot, 0)
    while blocks >= 0:
        stage, phase = part.sum_up(slot, blocks, stage, phase)
        slot, kv_phase = after(slot, kv_phase, ring.SLOTS)
        mbarrier.wait(ring.kv_ready.index(slot * PARTS + part.WHICH), kv_phase)
        blocks = told(ring.items, slot, 0)


@kernel
def dkv_kernel(
    dk, dv, counters, lse, delta, key_start, key_end, cu_q, cu_k, T, S, sequences, window, tiles, KV, G, c,
    cap, slope, scale, q_desc, do_desc, k_desc, v_desc,
    D: gl.constexpr, DP: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr,
    FLAT: gl.constexpr, OF_Z: gl.constexpr, OF_ACC: gl.constexpr, PACKED: gl.constexpr, STARTS: gl.constexpr,
    ENDS: gl.constexpr, CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    work = KeyWork(
        key_start, key_end, cu_q, cu_k, lse, delta, counters + 1, T, S, sequences, window, tiles, KV, G,
        BLOCK, PACKED, STARTS, ENDS, CAUSAL, WINDOWED,
    )  # fmt: skip
    ring = KeyRing.create(q_desc, do_desc, k_desc, v_desc, DP, BLOCK, STAGES, SLOTS, FLAT)
    first = KeyPart(work, ring, dk, dv, c, cap, slope, scale, D, OF_Z, OF_ACC, 0, CAPPED)
    second = KeyPart(work, ring, dk, dv, c, cap, slope, scale, D, OF_Z, OF_ACC, 1, CAPPED)
    gl.warp_specialize(
        [(_sum_up, (first,)), (_sum_up, (second,)), (load_keys, (work, ring))],
        [4, 1], [REGISTERS, OF_LOADER],
    )  # fmt: skip
