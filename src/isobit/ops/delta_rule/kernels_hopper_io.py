"""Everything around the consumer warpgroup: work items, loads of tiles and gates, stores of results. Each
kind of traffic has its own warp, which waits for its own barriers only.

Names are those of the recurrence backwards (`kernels_hopper`). The recurrence forwards (`gated_delta_rule`)
goes from a sequence's first chunk to its last, and has no q and do: its dv is u, its dh, dv2, dht and dh0 are
the states h, the new values, the initial state and the final one. FORWARD says which of them it is.

OUTPUTS: forwards, with outputs (`gated_delta_rule/kernels_hopper_outputs`). A second consumer takes the
buffers of states and new values, which are not stored then. It needs k too, and q.
"""

from isobit.kernels.hopper.pipeline import (
    accumulator_layout,
    after,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    record,
    reinterpreted,
    tma,
    tma_load,
    tma_store,
)

#: Tokens per chunk, and columns of the state per program.
CHUNK, COLUMNS = gl.constexpr(64), gl.constexpr(64)

#: The two parts of a stage: q and do, and k, dv and w. A part has its own barriers, number 2 stage + part.
#: With OUTPUTS the first one is q and the gates g, and only the second consumer waits for it.
QDO, KVW = gl.constexpr(0), gl.constexpr(1)

#: The buffers of outputs, by the number of their barriers.
DH, DV2, DH0 = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)

OF_CHUNK = gl.constexpr(accumulator_layout(64))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
ALONG_CHUNK = gl.constexpr(gl.BlockedLayout([1, 2], [1, 32], [1, 1], [1, 0]))
ONE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ONE_EACH = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def put_number(buffer, x, DTYPE: gl.constexpr):
    """A loading warp stores one number: shared memory stores tensors, not scalars."""
    buffer.store(gl.full((1,), 0, DTYPE, ONE_EACH) + x)


@record
class Item:
    """64 columns of one head's state in one sequence."""

    sequence: gl.tensor
    head: gl.tensor  # of the values
    column: gl.tensor  # the first of the 64
    token: gl.tensor  # the first of the sequence
    tokens: gl.tensor  # of the sequence
    chunk: gl.tensor  # the first of the sequence, in dh


@record
class Items:
    """All work items of a call."""

    cu_seqlens: gl.tensor
    offsets: gl.tensor
    T: gl.tensor
    S: gl.tensor
    HV: gl.tensor
    group: gl.tensor  # value heads that share q and k
    V: gl.tensor
    chunks: gl.tensor  # that dh has room for, if sequences are packed
    PACKED: gl.constexpr
    OFFSETS: gl.constexpr  # whether there are offsets; else sequence n has the chunks from first // 64 + n on
    FORWARD: gl.constexpr

    @gluon.jit
    def count(self):
        return self.S * self.HV * (self.V // COLUMNS)

    @gluon.jit
    def chunk(self, i, chunks):
        """The i-th of so many chunks, in the order of the recurrence."""
        if not self.FORWARD:
            i = chunks - 1 - i
        return i

    @gluon.jit
    def item(self, t):
        """Item t. Bounds of packed sequences are clamped to the T tokens, and first chunks to those of dh and
        one past them, whatever they are: a store by TMA may go beyond the end of a tensor, where it is
        dropped, but not before it."""
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
            chunk = first // CHUNK + n
            if self.OFFSETS:
                chunk = gl.load(self.offsets + n)
            chunk = gl.minimum(gl.maximum(chunk, 0), self.chunks).to(gl.int32)
        return Item(n, hv, column, first, tokens, chunk)


@record
class Ring:
    """Stages of shared memory, one for each chunk in flight. A chunk has two parts: q and do, which are used
    before the previous chunk is finished, and k, dv and w. `ready`: the tiles and gates of a part have
    arrived; `empty`: the consumer is done with them."""

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
    of_do: gl.shared_memory_descriptor  # [1, 64]: -scale 2^g; with OUTPUTS g itself
    of_x: gl.shared_memory_descriptor  # [1, 64]: -2^(g[last] - g); FORWARD without the sign
    decay: gl.shared_memory_descriptor  # [1, K], or [1, 1] without gk
    left: gl.shared_memory_descriptor  # [1]: tokens of the chunk
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    K: gl.constexpr
    STAGES: gl.constexpr
    HAS_G: gl.constexpr
    HAS_GK: gl.constexpr
    FORWARD: gl.constexpr
    OUTPUTS: gl.constexpr

    @gluon.jit
    def create(
        q_desc, k_desc, w_desc, do_desc, dv_desc, K: gl.constexpr, STAGES: gl.constexpr,
        HAS_G: gl.constexpr, HAS_GK: gl.constexpr, FORWARD: gl.constexpr, OUTPUTS: gl.constexpr = False,
    ):  # fmt: skip
        wide: gl.constexpr = [STAGES] + k_desc.block_type.shape
        slim: gl.constexpr = [STAGES] + dv_desc.block_type.shape
        k = gl.allocate_shared_memory(k_desc.dtype, wide, k_desc.layout)
        w = gl.allocate_shared_memory(k_desc.dtype, wide, k_desc.layout)
        dv = gl.allocate_shared_memory(k_desc.dtype, slim, dv_desc.layout)
        q = k  # unused forwards
        do = dv
        if not FORWARD or OUTPUTS:
            q = gl.allocate_shared_memory(k_desc.dtype, wide, k_desc.layout)
        if not FORWARD:
            do = gl.allocate_shared_memory(k_desc.dtype, slim, dv_desc.layout)
        of_do = k  # unused without gates
        of_x = k
        decay = k
        if HAS_G:
            of_x = gl.allocate_shared_memory(gl.float32, [STAGES, 1, CHUNK], PLAIN)
            if not FORWARD or OUTPUTS:
                of_do = gl.allocate_shared_memory(gl.float32, [STAGES, 1, CHUNK], PLAIN)
        if HAS_G or HAS_GK:
            decay = gl.allocate_shared_memory(gl.float32, [STAGES, 1, K if HAS_GK else 1], PLAIN)
        left = gl.allocate_shared_memory(gl.int32, [STAGES, 1], ONE)
        ready = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
        for s in gl.static_range(STAGES):
            mbarrier.init(ready.index(2 * s + QDO), count=2 if HAS_G else 1)
            mbarrier.init(ready.index(2 * s + KVW), count=2 if HAS_G or HAS_GK else 1)
            mbarrier.init(empty.index(2 * s + QDO), count=1)
            mbarrier.init(empty.index(2 * s + KVW), count=2 if OUTPUTS else 1)
        fence_async_shared()  # TMA signals these barriers, and must see them initialised
        return Ring(
            q_desc, k_desc, w_desc, do_desc, dv_desc, q, k, w, do, dv, of_do, of_x, decay, left, ready, empty,
            K, STAGES, HAS_G, HAS_GK, FORWARD, OUTPUTS,
        )  # fmt: skip


@gluon.jit
def load_chunks(items, ring):
    """The producer of tiles: those of every chunk, as soon as a stage is free."""
    WIDE: gl.constexpr = ring.k_desc.block_type.nbytes
    SLIM: gl.constexpr = ring.dv_desc.block_type.nbytes
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # of `empty`: a fresh barrier counts as one whose phase 1 is complete
    for t in range(gl.program_id(0), items.count(), gl.num_programs(0)):
        item = items.item(t)
        by_k, by_v = item.head // items.group * ring.K, item.head * items.V + item.column
        chunks = gl.cdiv(item.tokens, CHUNK)
        for i in range(chunks):
            start = items.chunk(i, chunks) * CHUNK
            row = item.token + start
            if not ring.FORWARD:
                bar = ring.ready.index(2 * stage + QDO)
                mbarrier.wait(ring.empty.index(2 * stage + QDO), phase)
                put_number(ring.left.index(stage), item.tokens - start, gl.int32)
                mbarrier.expect(bar, WIDE + SLIM)
                tma_load(ring.do_desc, [row, by_v], bar, ring.do.index(stage))
                tma_load(ring.q_desc, [row, by_k], bar, ring.q.index(stage))
            bar = ring.ready.index(2 * stage + KVW)
            mbarrier.wait(ring.empty.index(2 * stage + KVW), phase)
            mbarrier.expect(bar, 2 * WIDE + SLIM)
            tma_load(ring.k_desc, [row, by_k], bar, ring.k.index(stage))
            tma_load(ring.dv_desc, [row, by_v], bar, ring.dv.index(stage))
            tma_load(ring.w_desc, [row, item.head * ring.K], bar, ring.w.index(stage))
            if ring.OUTPUTS:
                bar = ring.ready.index(2 * stage + QDO)
                mbarrier.wait(ring.empty.index(2 * stage + QDO), phase)
                mbarrier.expect(bar, WIDE)
                tma_load(ring.q_desc, [row, by_k], bar, ring.q.index(stage))
            stage, phase = after(stage, phase, ring.STAGES)
    if not ring.FORWARD:
        # The consumer starts the product of q and do of a chunk before it finishes the previous one, and so
        # also after the last chunk. The result of that one is not used.
        mbarrier.wait(ring.empty.index(2 * stage + QDO), phase)
        put_number(ring.left.index(stage), 64, gl.int32)
        mbarrier.arrive(ring.ready.index(2 * stage + QDO))


@gluon.jit
def load_gates(items, ring, g, gk, scale, unit):
    """The producer of gates. `unit` turns them into powers of two. Tokens of another sequence get factor
    zero."""
    ALONG_K: gl.constexpr = gl.BlockedLayout([1, ring.K // 32], [1, 32], [1, 1], [1, 0])
    token = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(0, ALONG_CHUNK)), 0)
    feature = gl.expand_dims(gl.arange(0, ring.K, gl.SliceLayout(0, ALONG_K)), 0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for t in range(gl.program_id(0), items.count(), gl.num_programs(0)):
        item = items.item(t)
        chunks = gl.cdiv(item.tokens, CHUNK)
        for i in range(chunks):
            start = items.chunk(i, chunks) * CHUNK
            left = gl.minimum(item.tokens - start, CHUNK)
            at = (item.token + start).to(gl.int64) * items.HV + item.head
            last = at + (left - 1).to(gl.int64) * items.HV
            g_last = gl.to_tensor(0.0)
            if ring.HAS_GK:
                of_k = gl.load(gk + last * ring.K + feature) * unit
            if ring.HAS_G:
                live = token < left
                each = gl.load(g + at + token.to(gl.int64) * items.HV, mask=live, other=0.0) * unit
                g_last = gl.load(g + last) * unit
                of_x = gl.exp2(g_last - each)
                if not ring.FORWARD:
                    of_x = -of_x
                    mbarrier.wait(ring.empty.index(2 * stage + QDO), phase)
                    ring.of_do.index(stage).store(gl.where(live, gl.exp2(each) * -scale, 0.0))
                    mbarrier.arrive(ring.ready.index(2 * stage + QDO))
                if ring.OUTPUTS:
                    mbarrier.wait(ring.empty.index(2 * stage + QDO), phase)
                    ring.of_do.index(stage).store(each)
                    mbarrier.arrive(ring.ready.index(2 * stage + QDO))
            mbarrier.wait(ring.empty.index(2 * stage + KVW), phase)
            if ring.HAS_G:
                ring.of_x.index(stage).store(gl.where(live, of_x, 0.0))
            if ring.HAS_GK:
                ring.decay.index(stage).store(gl.exp2(of_k + g_last))
            else:
                ring.decay.index(stage).store(gl.full((1, 1), 1.0, gl.float32, ALONG_CHUNK) * gl.exp2(g_last))
            mbarrier.arrive(ring.ready.index(2 * stage + KVW))
            stage, phase = after(stage, phase, ring.STAGES)
    if ring.HAS_G and not ring.FORWARD:
        mbarrier.wait(ring.empty.index(2 * stage + QDO), phase)
        mbarrier.arrive(ring.ready.index(2 * stage + QDO))


@record
class Out:
    """Outputs: dh and dv2 have a buffer each, and each has a *store warp* that stores it by TMA. `full` and
    `free`: barriers of the buffers of dh, dv2 and dh0. The consumer does not store by itself, because the
    fence that TMA needs would wait for the products in flight.

    The states at the ends of a sequence pass through shared memory too: dht before the first chunk that is
    processed, dh0 after the last. The store warp of dv2, the buffer that the consumer fills last, moves these
    states. `given`: dht has arrived; `taken`: the consumer has read it.

    SEPARATE: each of these states has a buffer of its own. Then dht of an item is loaded, and dh0 of an item
    is stored, while the consumer is at another item. Otherwise there is one buffer for a state in fp32. The
    buffers of dh and dv2 are parts of it, and the consumer waits for the load and for the store.

    Backwards the consumer carries E = -D, so states change sign on their way in and out.

    `ended`: FORWARD, unless SEPARATE, all dh of an item are stored. A barrier tells only odd phases from even
    ones. Backwards the warp that loads dht is at most one store of dh behind. Forwards the last chunk of an
    item has no dv2 to store if it is short, so it may be two behind."""

    dh_desc: tma.tensor_descriptor
    dv2_desc: tma.tensor_descriptor
    dht_desc: tma.tensor_descriptor
    dh0_desc: tma.tensor_descriptor
    dh: gl.shared_memory_descriptor
    dv2: gl.shared_memory_descriptor
    dht: gl.shared_memory_descriptor
    dh0: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    given: gl.shared_memory_descriptor
    taken: gl.shared_memory_descriptor
    ended: gl.shared_memory_descriptor
    dv2_at: gl.tensor
    V_FIRST: gl.constexpr
    HAS_DHT: gl.constexpr
    HAS_DH0: gl.constexpr
    SEPARATE: gl.constexpr
    FORWARD: gl.constexpr

    @gluon.jit
    def create(
        dh_desc, dv2_desc, dht_desc, dh0_desc, dv2_at,
        K: gl.constexpr, V_FIRST: gl.constexpr, HAS_DHT: gl.constexpr, HAS_DH0: gl.constexpr,
        SEPARATE: gl.constexpr, FORWARD: gl.constexpr,
    ):  # fmt: skip
        of_dh: gl.constexpr = dh_desc.block_type.shape
        of_dv2: gl.constexpr = dv2_desc.block_type.shape
        of_state: gl.constexpr = dh0_desc.block_type.shape
        if SEPARATE:
            dh = gl.allocate_shared_memory(dh_desc.dtype, of_dh, dh_desc.layout)
            dv2 = gl.allocate_shared_memory(dv2_desc.dtype, of_dv2, dv2_desc.layout)
            dht = dh  # unused without these states
            dh0 = dh
            if HAS_DHT:
                dht = gl.allocate_shared_memory(gl.float32, of_state, dht_desc.layout)
            if HAS_DH0:
                dh0 = gl.allocate_shared_memory(gl.float32, of_state, dh0_desc.layout)
        else:
            dht = gl.allocate_shared_memory(gl.float32, of_state, dht_desc.layout)
            dh0 = dht
            dh = reinterpreted(dht, dh_desc.dtype, [2] + of_dh, dh_desc.layout).index(0)
            dv2 = reinterpreted(dht, dv2_desc.dtype, [K // 32] + of_dv2, dv2_desc.layout).index(K // 64)
        BUFFERS: gl.constexpr = 3 if HAS_DH0 else 2
        full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
        free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(BUFFERS):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(free.index(i), count=1)
        given = full  # unused without dht
        taken = free
        ended = free
        if HAS_DHT:
            given = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
            taken = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
            mbarrier.init(given.index(0), count=1)
            mbarrier.init(taken.index(0), count=1)
            if FORWARD and not SEPARATE:
                ended = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
                mbarrier.init(ended.index(0), count=1)
            fence_async_shared()
        return Out(
            dh_desc, dv2_desc, dht_desc, dh0_desc, dh, dv2, dht, dh0, full, free, given, taken, ended, dv2_at,
            V_FIRST, HAS_DHT, HAS_DH0, SEPARATE, FORWARD,
        )  # fmt: skip

    @gluon.jit
    def of_consumer(self, buffer):
        """A buffer of a state as the consumer has it, by columns."""
        if not self.V_FIRST:
            buffer = buffer.permute((1, 0))
        return buffer

    @gluon.jit
    def signed(self, state):
        if not self.FORWARD:
            state = -state
        return state

    @gluon.jit
    def take_given(self, turn, OF_STATE: gl.constexpr):
        """The state that an item begins with: E = -dht."""
        mbarrier.wait(self.given.index(0), turn)
        dht = self.of_consumer(self.dht).load(OF_STATE)
        mbarrier.arrive(self.taken.index(0))
        return self.signed(dht)

    @gluon.jit
    def put_state(self, E, turn):
        """dh = -E of a chunk."""
        mbarrier.wait(self.free.index(DH), turn ^ 1)
        self.of_consumer(self.dh).store(self.signed(E))
        mbarrier.arrive(self.full.index(DH))

    @gluon.jit
    def end(self, dh_turn):
        """Tell that all dh of an item are stored, FORWARD."""
        if self.HAS_DHT and not self.SEPARATE:
            mbarrier.wait(self.free.index(DH), dh_turn ^ 1)
            mbarrier.arrive(self.ended.index(0))

    @gluon.jit
    def put_final(self, E, turn, dh_turn, dv_turn):
        """The state that an item ends with: dh0 = -E. Unless buffers are SEPARATE it returns when dh0 is
        stored: the next dh takes its place."""
        if self.SEPARATE:
            mbarrier.wait(self.free.index(DH0), turn ^ 1)
        else:
            mbarrier.wait(self.free.index(DH), dh_turn ^ 1)
            mbarrier.wait(self.free.index(DV2), dv_turn ^ 1)
        self.of_consumer(self.dh0).store(self.signed(E))
        mbarrier.arrive(self.full.index(DH0))
        if not self.SEPARATE:
            mbarrier.wait(self.free.index(DH0), turn)

    @gluon.jit
    def put_rows(self, items, item, X, turn, row, left, LAST: gl.constexpr):
        """dv2 = X of a chunk. For a LAST chunk the consumer itself stores it, with a mask."""
        if LAST:
            token = gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(0, OF_CHUNK)), 0)
            v = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(1, OF_CHUNK)), 1)
            at = ((row.to(gl.int64) + token) * items.HV + item.head) * items.V + item.column + v
            gl.store(self.dv2_at + at, X, mask=token < left)
        else:
            mbarrier.wait(self.free.index(DV2), turn ^ 1)
            self.dv2.permute((1, 0)).store(X)
            mbarrier.arrive(self.full.index(DV2))


@gluon.jit
def _corner(items, state, column, K: gl.constexpr, V_FIRST: gl.constexpr):
    """Row and column where the 64 columns of a state begin, in the matrix of all states."""
    if V_FIRST:
        corner = (state * items.V + column, gl.to_tensor(0))
    else:
        corner = (state * K, column)
    return corner


@gluon.jit
def _store(out, desc, row, column, buffer, turn, WHICH: gl.constexpr):
    """Store what the consumer puts into a buffer next."""
    mbarrier.wait(out.full.index(WHICH), turn)
    fence_async_shared()
    tma_store(desc, [row, column], buffer)
    tma.store_wait(0)
    mbarrier.arrive(out.free.index(WHICH))
    return turn ^ 1


@gluon.jit
def store_states(items, out, K: gl.constexpr):
    """The store warp of dh."""
    turn = gl.to_tensor(0)
    for t in range(gl.program_id(0), items.count(), gl.num_programs(0)):
        item = items.item(t)
        chunks = gl.cdiv(item.tokens, CHUNK)
        for i in range(chunks):
            state = (item.chunk + items.chunk(i, chunks)) * items.HV + item.head
            row, left = _corner(items, state, item.column, K, out.V_FIRST)
            turn = _store(out, out.dh_desc, row, left, out.dh, turn, DH)


@gluon.jit
def _load_given(items, out, t, K: gl.constexpr):
    """Start the load of dht of item t, if there is such an item."""
    if t < items.count():
        item = items.item(t)
        row, left = _corner(items, item.sequence * items.HV + item.head, item.column, K, out.V_FIRST)
        mbarrier.expect(out.given.index(0), out.dht_desc.block_type.nbytes)
        tma_load(out.dht_desc, [row, left], out.given.index(0), out.dht)


@gluon.jit
def store_rows(items, out, K: gl.constexpr, ROWS: gl.constexpr = True):
    """The store warp of dv2, of chunks with 64 tokens, and of dh0. It also loads dht. Without ROWS dv2 is not
    stored, and buffers are SEPARATE."""
    turn = gl.to_tensor(0)
    dh_turn = gl.to_tensor(0)
    item_turn = gl.to_tensor(0)
    if out.HAS_DHT and out.SEPARATE:
        _load_given(items, out, gl.program_id(0), K)
    for t in range(gl.program_id(0), items.count(), gl.num_programs(0)):
        item = items.item(t)
        full = item.tokens // CHUNK
        if out.HAS_DHT:
            if not out.SEPARATE:  # when dh of the previous item is stored
                if out.FORWARD:
                    mbarrier.wait(out.ended.index(0), item_turn ^ 1)
                else:
                    mbarrier.wait(out.free.index(DH), dh_turn ^ 1)
                    dh_turn = dh_turn ^ (gl.cdiv(item.tokens, CHUNK) & 1)
                _load_given(items, out, t, K)
            mbarrier.wait(out.taken.index(0), item_turn)
            if out.SEPARATE:
                _load_given(items, out, t + gl.num_programs(0), K)
        if ROWS:
            for i in range(full):
                start = item.token + items.chunk(i, full) * CHUNK
                turn = _store(out, out.dv2_desc, start, item.head * items.V + item.column, out.dv2, turn, DV2)
        if out.HAS_DH0:
            row, left = _corner(items, item.sequence * items.HV + item.head, item.column, K, out.V_FIRST)
            _store(out, out.dh0_desc, row, left, out.dh0, item_turn, DH0)
        item_turn = item_turn ^ 1
