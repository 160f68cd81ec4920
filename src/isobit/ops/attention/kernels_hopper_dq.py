"""dq of attention on Hopper: class attn/1, with the formulas and the chain of `kernels_triton_bwd`.

A program has two warpgroups with 64 queries each, and a warp that brings queries, gradients, keys and values.
Items and their blocks of keys are those of the forward (`kernels_hopper_io.Work`); a program that is done
with one takes the next, and a counter says which. For every block of keys:

    S = Q K^T,  dP = dO V^T      under way
    S is there:     P = 2^(S c - lse log2e), beside dP
    dP is there:    dS = P (dP - delta), dq += dS K

S and dP are chains over D from zero, dq is one chain over all blocks of keys in ascending order, which begin
at multiples of 16 keys. A block that no query of a warpgroup sees is left out, and changes nothing. Keys
behind a sequence's last may be anything, and 0 NaN is NaN: they are set to zero in shared memory where TMA
has not done it.
"""

from isobit.kernels.hopper.pipeline import (
    ROWS,
    after,
    gl,
    gluon,
    kernel,
    mbarrier,
    record,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from isobit.kernels.host.temperature import LOG2E
from isobit.ops.attention.kernels_hopper_bwd_parts import LEAVING, gradient_of_scores, probabilities, taken
from isobit.ops.attention.kernels_hopper_io import (
    OF_LOADER,
    ONE,
    ONE_EACH,
    PARTS,
    REGISTERS,
    Ring,
    Work,
    clear,
    load_box,
    told,
)
from isobit.ops.attention.kernels_hopper_parts import BY_ROWS, packed, unpacked

#: Keys of a block; half as many where scores are capped, which takes registers. 64, with four stages, are
#: faster at 4 x 2048 (0.360 ms, with delta, instead of 0.373), slower at 2 x 8192 (2.362, 2.322; H200).
KEYS = {64: 128, 128: 128}

#: Stages of keys and of values: what fits beside queries and results, 227 KB together.
STAGES = {64: 3, 128: 2}

_LOG2E = gl.constexpr(LOG2E)


# The loader


@record
class Gradients:
    """What comes with an item's queries: the gradients of their results, and two numbers of each."""

    do_desc: tma.tensor_descriptor
    do: gl.shared_memory_descriptor
    base: gl.shared_memory_descriptor  # -lse log2(e)
    delta: gl.shared_memory_descriptor

    @gluon.jit
    def create(do_desc, D: gl.constexpr, FLAT: gl.constexpr):
        do = gl.allocate_shared_memory(do_desc.dtype, [PARTS, ROWS, D], FLAT)
        base = gl.allocate_shared_memory(gl.float32, [PARTS, ROWS], ONE)
        delta = gl.allocate_shared_memory(gl.float32, [PARTS, ROWS], ONE)
        return Gradients(do_desc, do, base, delta)


@gluon.jit
def load_queries(work, ring, given, counter, lse, delta):
    """The loader."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # of `empty`: a fresh barrier counts as one whose phase 1 is complete
    slot = gl.to_tensor(0)
    i = gl.arange(0, ROWS, ONE_EACH)
    t = gl.program_id(0)
    while t < work.tiles * work.H:
        item, first = work.item(t)
        if item.live > 0:
            kv = item.head // work.G
            at = first + item.begin
            if item.blocks > 0:
                ring.load_k(item, kv, at, stage, phase)
            numbers = (item.batch * work.H + item.head).to(gl.int64) * work.T + item.row
            ring.announce(item, slot)
            for w in gl.static_range(PARTS):
                bar = ring.q_ready.index(w)
                if item.blocks > 0:
                    there = w * ROWS + i < item.live
                    base = -(gl.load(lse + numbers + w * ROWS + i, mask=there, other=0.0) * _LOG2E)
                    own = gl.load(delta + numbers + w * ROWS + i, mask=there, other=0.0)
                    row = item.row + w * ROWS
                    mbarrier.expect(bar, ring.q_desc.block_type.nbytes + given.do_desc.block_type.nbytes)
                    load_box(ring.q_desc, item.batch, item.head, row, ring.q.index(w), bar)
                    load_box(given.do_desc, item.batch, item.head, row, given.do.index(w), bar)
                    given.base.index(w).store(base)
                    given.delta.index(w).store(own)
                else:
                    mbarrier.arrive(bar)
                mbarrier.arrive(bar)  # of the whole warp, which has written
            slot = slot ^ 1
            for block in range(item.blocks):
                if block > 0:
                    ring.load_k(item, kv, at, stage, phase)
                ring.load_v(item, kv, at, stage, phase)
                at += ring.BLOCK
                stage, phase = after(stage, phase, ring.STAGES)
        t = taken(counter)
    ring.end(slot)


# Warpgroups


@record
class QueryPart:
    """What a warpgroup works with."""

    work: Work
    ring: Ring
    given: Gradients
    leaving: gl.shared_memory_descriptor
    dq: gl.tensor
    c: gl.tensor
    cap: gl.tensor
    slope: gl.tensor
    scale: gl.tensor
    D: gl.constexpr
    OF_Z: gl.constexpr
    OF_ACC: gl.constexpr
    WHICH: gl.constexpr
    CAPPED: gl.constexpr
    CLEAR: gl.constexpr

    @gluon.jit
    def sees(self, newest, oldest):
        """Which keys of a block a query sees: those from its oldest to its newest."""
        key = gl.expand_dims(gl.arange(0, self.ring.BLOCK, gl.SliceLayout(0, self.OF_Z)), 0)
        found = key <= gl.expand_dims(newest, 1)
        if self.work.WINDOWED:
            found = found & (key >= gl.expand_dims(oldest, 1))
        return found

    @gluon.jit
    def blocks(self, state, begin, end, keys, newest, oldest, MASKED: gl.constexpr):
        """Take in the blocks from `begin` to `end`. A row sees the keys from `oldest` to `newest`; without
        MASKED all rows see all."""
        ring = self.ring
        dq, base, delta, stage, phase = state
        q, do = ring.q.index(self.WHICH), self.given.do.index(self.WHICH)
        for at in range(begin, end, ring.BLOCK):
            k, v = ring.k.index(stage), ring.v.index(stage)
            mbarrier.wait(ring.k_ready.index(stage), phase)
            if MASKED and self.CLEAR:
                if keys < at + ring.BLOCK:
                    clear(ring.k, stage, 0, keys - at, ring.BLOCK)
            nothing = gl.zeros((ROWS, ring.BLOCK), gl.float32, self.OF_Z)
            z = warpgroup_mma(q, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
            mbarrier.wait(ring.v_ready.index(stage), phase)
            dp = warpgroup_mma(do, v.permute((1, 0)), nothing, use_acc=False, is_async=True)
            z = warpgroup_mma_wait(1, deps=(z,))
            p, bend = probabilities(z, gl.expand_dims(base, 1), self.c, self.cap, self.slope, self.CAPPED)
            if MASKED:
                p = gl.where(self.sees(newest - at, oldest - at), p, 0.0)
            # The data has already arrived. But the compiler moves no arithmetic across a barrier, so this
            # wait makes the exponentials overlap with the product in flight.
            mbarrier.wait(ring.v_ready.index(stage), phase)
            if MASKED:
                dp, p, newest, oldest = warpgroup_mma_wait(0, deps=(dp, p, newest, oldest))
            else:
                dp, p = warpgroup_mma_wait(0, deps=(dp, p))
            mbarrier.arrive(ring.v_empty.index(stage))
            ds = gradient_of_scores(p, bend, dp, gl.expand_dims(delta, 1), self.CAPPED)
            if MASKED:
                ds = gl.where(self.sees(newest - at, oldest - at), ds, 0.0)
            words = packed(ds, ring.k_desc.dtype)
            dq = warpgroup_mma(
                unpacked(words, ring.k_desc.dtype, gl.DotOperandLayout(0, self.OF_ACC, 2)), k, dq,
                is_async=True,
            )  # fmt: skip
            dq = warpgroup_mma_wait(0, deps=(dq,))
            mbarrier.arrive(ring.k_empty.index(stage))
            stage, phase = after(stage, phase, ring.STAGES)
        return dq, base, delta, stage, phase

    @gluon.jit
    def skip(self, begin, end, stage, phase):
        """Blocks that no query of this part sees."""
        ring = self.ring
        for _ in range(begin, end, ring.BLOCK):
            mbarrier.wait(ring.k_ready.index(stage), phase)
            mbarrier.arrive(ring.k_empty.index(stage))
            mbarrier.wait(ring.v_ready.index(stage), phase)
            mbarrier.arrive(ring.v_empty.index(stage))
            stage, phase = after(stage, phase, ring.STAGES)
        return stage, phase

    @gluon.jit
    def sum_up(self, slot, blocks, stage, phase):
        """dq of an item's part."""
        work, ring = self.work, self.ring
        begin, keys = told(ring.items, slot, 1), told(ring.items, slot, 2)
        here = told(ring.items, slot, 3) + self.WHICH * ROWS  # the position of the part's first query
        end = begin + blocks * ring.BLOCK
        i = gl.arange(0, ROWS, gl.SliceLayout(1, self.OF_Z))
        newest = i * 0 + keys - 1
        oldest = here + i - work.window + 1
        # This part's blocks are those from lo to hi, and from inner to outer all queries see all keys.
        lo = begin
        hi = end
        outer = keys
        if work.CAUSAL:
            newest = gl.minimum(here + i, newest)
            hi = gl.minimum(end, gl.cdiv(gl.maximum(here + ROWS, 0), ring.BLOCK) * ring.BLOCK)
            outer = gl.minimum(keys, gl.maximum(here + 1, 0))
        inner = lo
        if work.WINDOWED:
            lo = gl.maximum(begin, gl.maximum(here - work.window + 1, 0) // ring.BLOCK * ring.BLOCK)
            lo = gl.minimum(lo, end)
            hi = gl.maximum(hi, lo)
            youngest = gl.maximum(here + ROWS - work.window, 0)  # the oldest key of the last query
            inner = gl.minimum(gl.maximum(lo, gl.cdiv(youngest, ring.BLOCK) * ring.BLOCK), hi)
        hi = gl.maximum(hi, lo)
        outer = gl.maximum(inner, gl.minimum(hi, outer // ring.BLOCK * ring.BLOCK))

        base = self.given.base.index(self.WHICH).load(gl.SliceLayout(1, self.OF_Z))
        delta = self.given.delta.index(self.WHICH).load(gl.SliceLayout(1, self.OF_Z))
        stage, phase = self.skip(begin, lo, stage, phase)
        dq = gl.zeros((ROWS, ring.D), gl.float32, self.OF_ACC)
        state = (dq, base, delta, stage, phase)
        if work.WINDOWED:
            state = self.blocks(state, lo, inner, keys, newest, oldest, True)
        state = self.blocks(state, inner, outer, keys, newest, oldest, False)
        dq, _, _, stage, phase = self.blocks(state, outer, hi, keys, newest, oldest, True)
        mbarrier.arrive(ring.q_empty.index(self.WHICH))
        stage, phase = self.skip(hi, end, stage, phase)
        room = self.leaving.index(self.WHICH)
        room.store((dq * self.scale).to(ring.q_desc.dtype))
        self.put(slot, room.load(BY_ROWS))
        return stage, phase

    @gluon.jit
    def put(self, slot, tile):
        work, ring = self.work, self.ring
        live, row = told(ring.items, slot, 4), told(ring.items, slot, 5)
        batch, head = told(ring.items, slot, 6).to(gl.int64), told(ring.items, slot, 7)
        query = self.WHICH * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, BY_ROWS))
        j = gl.expand_dims(gl.arange(0, ring.D, gl.SliceLayout(0, BY_ROWS)), 0)
        to = gl.expand_dims(((batch * work.T + row + query) * work.H + head) * self.D, 1) + j
        to = gl.multiple_of(self.dq + to, [16, 16])
        gl.store(to, tile, mask=gl.expand_dims(query < live, 1) & (j < self.D))


@gluon.jit
def _sum_up(part):
    """A warpgroup: its part of all of the program's items."""
    ring = part.ring
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)  # of the item, and the phase of its queries
    mbarrier.wait(ring.q_ready.index(part.WHICH), slot)
    blocks = told(ring.items, slot, 0)
    while blocks >= 0:
        if blocks > 0:
            stage, phase = part.sum_up(slot, blocks, stage, phase)
        else:
            part.put(slot, gl.zeros((ROWS, ring.D), ring.q_desc.dtype, BY_ROWS))
            mbarrier.arrive(ring.q_empty.index(part.WHICH))
        slot = slot ^ 1
        mbarrier.wait(ring.q_ready.index(part.WHICH), slot)
        blocks = told(ring.items, slot, 0)


@kernel
def dq_kernel(
    dq, counters, lse, delta, key_start, key_end, cu_q, cu_k, T, S, sequences, window, tiles, H, G, c, cap,
    slope, scale, q_desc, do_desc, k_desc, v_desc,
    D: gl.constexpr, DP: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, FLAT: gl.constexpr,
    OF_Z: gl.constexpr, OF_ACC: gl.constexpr, PACKED: gl.constexpr, STARTS: gl.constexpr, ENDS: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOWED: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    work = Work(
        key_start, key_end, cu_q, cu_k, T, S, sequences, window, tiles, H, G, BLOCK, PACKED, STARTS, ENDS,
        CAUSAL, WINDOWED,
    )  # fmt: skip
    ring = Ring.create(q_desc, k_desc, v_desc, DP, BLOCK, STAGES, FLAT, 2)
    given = Gradients.create(do_desc, DP, FLAT)
    leaving = gl.allocate_shared_memory(q_desc.dtype, [PARTS, ROWS, DP], LEAVING)
    CLEAR: gl.constexpr = PACKED or ENDS
    first = QueryPart(work, ring, given, leaving, dq, c, cap, slope, scale, D, OF_Z, OF_ACC, 0, CAPPED, CLEAR)
    second = QueryPart(
        work, ring, given, leaving, dq, c, cap, slope, scale, D, OF_Z, OF_ACC, 1, CAPPED, CLEAR
    )
    gl.warp_specialize(
        [
            (_sum_up, (first,)), (_sum_up, (second,)),
            (load_queries, (work, ring, given, counters, lse, delta)),
        ],
        [4, 1], [REGISTERS, OF_LOADER],
    )  # fmt: skip
