"""Scheduling and loads of the attention backward on Hopper: which program takes which keys, which queries see
them, and the loader warp.

An *item* is 128 keys of one head: two parts of 64, one for each of two warpgroups. Its queries come in blocks
of BLOCK, counted by their positions among the keys, for every head of the group one after the other. A
program that is done with an item takes the next: a counter says which. Those that most queries see come
first. Heads and sequences are neighbours, and so items that read the same queries are at work at about the
same time. Nothing of this decides bits.

What is outside of a tensor comes from TMA as zeros, in front of its first row too.
"""

from isobit.kernels.hopper.pipeline import (
    ROWS,
    after,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    record,
    tma,
)
from isobit.kernels.host.temperature import LOG2E
from isobit.ops.attention.kernels_hopper_bwd_parts import taken
from isobit.ops.attention.kernels_hopper_io import (
    ONE,
    ONE_EACH,
    PARTS,
    clamped,
    load_box,
    packed_piece,
    tell,
)

_LOG2E = gl.constexpr(LOG2E)


@record
class Keys:
    """128 keys of a head, and the queries that see some of them: for each head of the group `blocks` blocks
    from position `low` on."""

    blocks: gl.tensor  # -1: there is no more work
    low: gl.tensor
    keys: gl.tensor  # of the sequence
    before: gl.tensor  # the position of query 0
    start: gl.tensor  # the first of these keys, counted from the sequence's first
    first: gl.tensor  # which is there in k
    batch: gl.tensor
    kv: gl.tensor


@record
class KeyWork:
    """All items of a call."""

    key_start: gl.tensor
    key_end: gl.tensor
    cu_q: gl.tensor
    cu_k: gl.tensor
    lse: gl.tensor
    delta: gl.tensor
    counter: gl.tensor  # of items that were taken beside the first of each program
    T: gl.tensor
    S: gl.tensor
    sequences: gl.tensor
    window: gl.tensor
    tiles: gl.tensor  # of 128 keys, of all sequences together
    KV: gl.tensor
    G: gl.tensor  # heads that share a head of k and v
    BLOCK: gl.constexpr
    PACKED: gl.constexpr
    STARTS: gl.constexpr
    ENDS: gl.constexpr
    CAUSAL: gl.constexpr
    WINDOWED: gl.constexpr

    @gluon.jit
    def _piece(self, tile):
        """(sequence, first of its keys in this tile)."""
        if self.PACKED:
            sequence, _, start = packed_piece(self.cu_k, tile, self.S, self.sequences)
        else:
            # Most queries see the first keys: they come first, those of all sequences.
            sequence = tile % self.sequences
            start = (tile // self.sequences) * (PARTS * ROWS)
        return sequence, start

    @gluon.jit
    def item(self, t):
        """(item t, the row of its query 0 in q)."""
        kv = t % self.KV
        sequence, start = self._piece(t // self.KV)
        first = gl.to_tensor(0)
        last = self.S
        row = gl.to_tensor(0)
        rows = self.T
        batch = sequence
        if self.PACKED:
            first = clamped(self.cu_k + sequence, 0, self.S)
            last = clamped(self.cu_k + sequence + 1, first, self.S)
            row = clamped(self.cu_q + sequence, 0, self.T)
            rows = clamped(self.cu_q + sequence + 1, row, self.T) - row
            batch = gl.to_tensor(0)
        if self.STARTS:
            first = clamped(self.key_start + sequence, 0, self.S)
        if self.ENDS:
            last = clamped(self.key_end + sequence, first, self.S)
        keys = gl.maximum(last - first, 0)
        before = keys - rows
        low = before
        high = keys
        if self.CAUSAL:
            low = gl.maximum(low, start)
        if self.WINDOWED:
            high = gl.minimum(high, start + PARTS * ROWS - 1 + self.window)
        low = low & (0 - self.BLOCK)  # a multiple, also below 0
        blocks = gl.cdiv(gl.maximum(high - low, 0), self.BLOCK)
        blocks = gl.where((start < keys) & (rows > 0), blocks, 0)
        return Keys(blocks, low, keys, before, start, first, batch, kv), row


@record
class KeyRing:
    """Shared memory: slots of 128 keys and values with what their item is, and stages of queries, gradients,
    and two numbers of each query. `ready`: bytes have arrived; `empty`: whoever needs them is done."""

    q_desc: tma.tensor_descriptor
    do_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    base: gl.shared_memory_descriptor  # -lse log2(e)
    delta: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    items: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    numbers: gl.shared_memory_descriptor  # ready: base and delta
    empty: gl.shared_memory_descriptor
    kv_ready: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    D: gl.constexpr  # filled up
    BLOCK: gl.constexpr
    STAGES: gl.constexpr
    SLOTS: gl.constexpr

    @gluon.jit
    def create(
        q_desc, do_desc, k_desc, v_desc, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
        SLOTS: gl.constexpr, FLAT: gl.constexpr,
    ):  # fmt: skip
        q = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK, D], FLAT)
        do = gl.allocate_shared_memory(do_desc.dtype, [STAGES, BLOCK, D], FLAT)
        base = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], ONE)
        delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], ONE)
        k = gl.allocate_shared_memory(k_desc.dtype, [SLOTS * PARTS, ROWS, D], FLAT)
        v = gl.allocate_shared_memory(v_desc.dtype, [SLOTS * PARTS, ROWS, D], FLAT)
        items = gl.allocate_shared_memory(gl.int32, [8 * SLOTS, 1], ONE)
        bars: gl.constexpr = mbarrier.MBarrierLayout()
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        numbers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        kv_ready = gl.allocate_shared_memory(gl.int64, [SLOTS * PARTS, 1], bars)
        kv_empty = gl.allocate_shared_memory(gl.int64, [SLOTS * PARTS, 1], bars)
        for i in gl.static_range(STAGES):
            mbarrier.init(ready.index(i), count=1)
            mbarrier.init(numbers.index(i), count=1)
            mbarrier.init(empty.index(i), count=PARTS)
        for i in gl.static_range(SLOTS * PARTS):
            mbarrier.init(kv_ready.index(i), count=1)
            mbarrier.init(kv_empty.index(i), count=1)
        fence_async_shared()  # TMA signals these barriers, and must see them initialised
        return KeyRing(
            q_desc, do_desc, k_desc, v_desc, q, do, base, delta, k, v, items, ready, numbers, empty, kv_ready,
            kv_empty, D, BLOCK, STAGES, SLOTS,
        )  # fmt: skip


@gluon.jit
def load_keys(work, ring):
    """The loader. A block's two numbers of each query are asked for before its room is free, and written when
    it is."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # of `empty`: a fresh barrier counts as one whose phase 1 is complete
    slot = gl.to_tensor(0)
    kv_phase = gl.to_tensor(1)
    j = gl.arange(0, ring.BLOCK, ONE_EACH)
    t = gl.program_id(0)
    while t < work.tiles * work.KV:
        item, row = work.item(t)
        for w in gl.static_range(PARTS):
            mbarrier.wait(ring.kv_empty.index(slot * PARTS + w), kv_phase)
        values = (
            item.blocks, item.low, item.keys, item.before, item.start, item.first, item.batch, item.kv
        )  # fmt: skip
        tell(ring.items, slot, values)
        for w in gl.static_range(PARTS):
            bar = ring.kv_ready.index(slot * PARTS + w)
            if item.blocks > 0:
                at = item.first + item.start + w * ROWS
                mbarrier.expect(bar, ring.k_desc.block_type.nbytes + ring.v_desc.block_type.nbytes)
                load_box(ring.k_desc, item.batch, item.kv, at, ring.k.index(slot * PARTS + w), bar)
                load_box(ring.v_desc, item.batch, item.kv, at, ring.v.index(slot * PARTS + w), bar)
            else:
                mbarrier.arrive(bar)
        slot, kv_phase = after(slot, kv_phase, ring.SLOTS)
        for g in range(work.G):
            head = item.kv * work.G + g
            at = row + item.low - item.before
            numbers = (item.batch * work.KV * work.G + head).to(gl.int64) * work.T + at
            last = row + item.keys - item.before
            for block in range(item.blocks):
                live = (at + j >= row) & (at + j < last)
                base = -(gl.load(work.lse + numbers + j, mask=live, other=0.0) * _LOG2E)
                delta = gl.load(work.delta + numbers + j, mask=live, other=0.0)
                bar = ring.ready.index(stage)
                mbarrier.wait(ring.empty.index(stage), phase)
                mbarrier.expect(bar, ring.q_desc.block_type.nbytes + ring.do_desc.block_type.nbytes)
                load_box(ring.q_desc, item.batch, head, at, ring.q.index(stage), bar)
                load_box(ring.do_desc, item.batch, head, at, ring.do.index(stage), bar)
                ring.base.index(stage).store(base)
                ring.delta.index(stage).store(delta)
                mbarrier.arrive(ring.numbers.index(stage))
                at += ring.BLOCK
                numbers += ring.BLOCK
                stage, phase = after(stage, phase, ring.STAGES)
        t = taken(work.counter)
    for w in gl.static_range(PARTS):
        mbarrier.wait(ring.kv_empty.index(slot * PARTS + w), kv_phase)
    none = gl.to_tensor(-1)
    tell(ring.items, slot, (none, none, none, none, none, none, none, none))
    for w in gl.static_range(PARTS):
        mbarrier.arrive(ring.kv_ready.index(slot * PARTS + w))
