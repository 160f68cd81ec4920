"""The gradients of a chunk on Hopper in one kernel: steps 9 to 15 of class gdr/1. Only the sums of dbeta and
dG over their parts, and that of dG over rows, are left to `finish_kernel` of `kernels_triton_bwd`.

With the names of that module, for each value head of a chunk:

    dr  = T^T dvn                                dv = beta dr
    dS  = do vn^T 2^(g_i - g_j)                  j <= i
    N   = -dr vn^T 2^(g_i - g_j),  M = beta N    j <  i
    x   = 2^g do S^T + dS k                      dq += scale x
    z   = -beta 2^g dr S^T + M k + M^T k         dk += z
    y   = 2^(g_last - g) vn D^T + scale dS^T q   dk += y

A program takes one item after another: a chunk and a key head. Two warpgroups share it. Each has 64 of the
128 columns of v for dr, and 64 of those of k for the rest; its dq and dk stay in registers until all value
heads have been added. dr, dS and M are operands that both need. They go through shared memory: dr to where
dvn was, dS from the first warpgroup, M from the second one. If rows were normalized, dq and dk then take the
gradient of the norm, with sums over all of K: one warpgroup has them for q, the other one for k, and each
sends its products for the other's.

Every tensor has one buffer; for a second one there is no room:

    16 KB   q, k, do, vn, dvn, v, and q and k before the norm
    32 KB   S, D
     8 KB   T, dS, M

The products with S and D come as early as they can. Then all tiles of a head have been read, and those of the
next one arrive during the second half of this one. Only k, q and the rows before the norm are needed longer.

A result leaves by TMA from the buffer of what it is the gradient of: dv from that of v, dq and dk from those
of the rows before the norm. That of a chunk with fewer than 64 rows is stored with a mask. There the rest of
the tiles belongs to other sequences, or to none. In T, dvn, vn, q and k it is set to zero, because sums go
over rows; in other tensors it changes only rows that are not stored.

A sum by halves adds column c + 32 to column c, then c + 16, and so on. In the layout of a product the columns
of the first three steps are in one thread, and those of the next two in its neighbours.
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
    record,
    reinterpreted,
    tma,
    tma_load,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from isobit.ops.delta_rule.kernels_hopper import BY_ROWS, ONE_OF_FOUR, clear, rows_of
from isobit.ops.delta_rule.kernels_hopper_io import ONE, ONE_EACH, put_number
from isobit.ops.gated_delta_rule.kernels_hopper_solve import chunk_of
from isobit.ops.gated_delta_rule.kernels_triton import tiles_of
from isobit.ops.gated_delta_rule.model import CHUNK

#: Rows of a chunk, and columns of every tile; tiles in a row of q and k, and of v: one for each warpgroup.
C, HALVES = gl.constexpr(CHUNK), gl.constexpr(2)

#: K and V that the kernel serves.
WIDTH = CHUNK * HALVES.value

#: Layouts: of a product, of numbers of its rows and of its columns; of numbers of rows in a loading warp, and
#: where every warp of a warpgroup has all of them.
OF_TILE = gl.constexpr(accumulator_layout(CHUNK))
OF_ROWS, OF_COLUMNS = (gl.constexpr(gl.SliceLayout(axis, OF_TILE.value)) for axis in (1, 0))
ALONG = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))
IN_A_WARP = gl.constexpr(gl.BlockedLayout([2, 2], [32, 1], [4, 1], [1, 0]))

#: Numbers of rows in shared memory.
ONE_BY_ONE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

#: fp32 tiles that one warpgroup sends to the other: 32 bytes of eight rows lie in different banks.
SENT = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))

#: Gates and betas of how many value heads are loaded ahead.
AHEAD = gl.constexpr(2)

#: Parts of dbeta and of dG.
PARTS = gl.constexpr(3)

#: Registers per thread at launch, of 12 warps; those of the second warpgroup, the first one has as many; and
#: those of the warp that loads gates.
AT_LAUNCH, CONSUMER_REGISTERS, GATE_REGISTERS = 168, gl.constexpr(232), gl.constexpr(40)


@record
class Items:
    """All items of a call: a chunk of a key head each."""

    cu_seqlens: gl.tensor
    T: gl.tensor
    S: gl.tensor
    H: gl.tensor
    HV: gl.tensor
    group: gl.tensor  # value heads that share q and k
    tiles: gl.tensor
    PACKED: gl.constexpr

    @gluon.jit
    def count(self):
        return self.tiles * self.H

    @gluon.jit
    def place(self, t):
        """(first row, rows) of item t; no rows if there is no chunk in its tile."""
        row, left = chunk_of(t // self.H, self.cu_seqlens, self.T, self.S, self.PACKED)
        return row.to(gl.int32), left.to(gl.int32)


@record
class Tiles:
    """The buffers of tiles [64, 64]."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    raw_q: gl.shared_memory_descriptor  # before the norm; results leave from here
    raw_k: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    new: gl.shared_memory_descriptor
    dr: gl.shared_memory_descriptor  # first dvn
    v: gl.shared_memory_descriptor  # then dv
    inverse: gl.shared_memory_descriptor
    states: gl.shared_memory_descriptor  # tile 2 k + v
    dstates: gl.shared_memory_descriptor
    scores: gl.shared_memory_descriptor  # dS and M
    V_FIRST: gl.constexpr
    NORMED: gl.constexpr

    @gluon.jit
    def create(desc, V_FIRST: gl.constexpr, NORMED: gl.constexpr):
        row: gl.constexpr = [HALVES, C, C]
        q = gl.allocate_shared_memory(desc.dtype, row, desc.layout)
        k = gl.allocate_shared_memory(desc.dtype, row, desc.layout)
        raw_q = gl.allocate_shared_memory(desc.dtype, row, desc.layout)
        raw_k = gl.allocate_shared_memory(desc.dtype, row, desc.layout)
        do = gl.allocate_shared_memory(desc.dtype, row, desc.layout)
        new = gl.allocate_shared_memory(desc.dtype, row, desc.layout)
        dr = gl.allocate_shared_memory(desc.dtype, row, desc.layout)
        v = gl.allocate_shared_memory(desc.dtype, row, desc.layout)
        inverse = gl.allocate_shared_memory(desc.dtype, [1, C, C], desc.layout)
        states = gl.allocate_shared_memory(desc.dtype, [HALVES * HALVES, C, C], desc.layout)
        dstates = gl.allocate_shared_memory(desc.dtype, [HALVES * HALVES, C, C], desc.layout)
        scores = gl.allocate_shared_memory(desc.dtype, row, desc.layout)
        return Tiles(q, k, raw_q, raw_k, do, new, dr, v, inverse, states, dstates, scores, V_FIRST, NORMED)


@gluon.jit
def _barrier(COUNT: gl.constexpr):
    """One barrier, in memory of its own: the compiler makes a warpgroup wait for its own threads between two
    uses of the same memory."""
    bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bar.index(0), count=COUNT)
    return bar.index(0)


@record
class Barriers:
    """What has arrived; what both warpgroups are done with; and what they tell each other."""

    first: gl.shared_memory_descriptor  # T and dvn have arrived
    values: gl.shared_memory_descriptor  # v
    pair: gl.shared_memory_descriptor  # do and new values
    states: gl.shared_memory_descriptor  # S and D
    keys: gl.shared_memory_descriptor
    queries: gl.shared_memory_descriptor
    raw: gl.shared_memory_descriptor
    head_free: gl.shared_memory_descriptor  # all tiles of a value head
    keys_free: gl.shared_memory_descriptor
    queries_free: gl.shared_memory_descriptor
    raw_free: gl.shared_memory_descriptor  # by an item: the last item's results have left
    has_dr: gl.shared_memory_descriptor  # dr is there
    has_ds: gl.shared_memory_descriptor
    has_m: gl.shared_memory_descriptor
    here: gl.shared_memory_descriptor  # both warpgroups

    @gluon.jit
    def create():
        made = Barriers(
            _barrier(1), _barrier(1), _barrier(1), _barrier(1), _barrier(1), _barrier(1), _barrier(1),
            _barrier(2), _barrier(2), _barrier(2), _barrier(2), _barrier(2), _barrier(1), _barrier(1),
            _barrier(2),
        )  # fmt: skip
        fence_async_shared()  # TMA signals these barriers, and must see them initialised
        return made

    @gluon.jit
    def meet(self, met):
        """Both warpgroups go on when both are here."""
        mbarrier.arrive(self.here)
        mbarrier.wait(self.here, met)
        return met ^ 1


@record
class Rows:
    """Numbers of a value head's rows, and the item that it belongs to, in AHEAD stages; what warpgroups tell
    each other about rows."""

    gate: gl.shared_memory_descriptor  # [64]; 0 where there is no row, and without gates
    beta: gl.shared_memory_descriptor
    of_q: gl.shared_memory_descriptor  # 1 / norm of a row of q, and of k
    of_k: gl.shared_memory_descriptor
    end: gl.shared_memory_descriptor  # [1]: the gate of the last row
    item: gl.shared_memory_descriptor  # [1]
    row: gl.shared_memory_descriptor  # [1]: the first of the chunk
    left: gl.shared_memory_descriptor  # [1]: rows of the chunk; 0 after the last item
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor  # [6, 64] for each stage: the parts of dbeta and of dG, for `_flush`
    last: gl.shared_memory_descriptor  # [2, 1] for each stage: those of dlast
    sums: gl.shared_memory_descriptor  # [3, 64]: of dr v; of the products for the norms of q and k
    HAS_G: gl.constexpr
    NORMED: gl.constexpr

    @gluon.jit
    def create(HAS_G: gl.constexpr, NORMED: gl.constexpr):
        gate = gl.allocate_shared_memory(gl.float32, [AHEAD, C], ONE_BY_ONE)
        beta = gl.allocate_shared_memory(gl.float32, [AHEAD, C], ONE_BY_ONE)
        of_q = gl.allocate_shared_memory(gl.float32, [AHEAD, C], ONE_BY_ONE)
        of_k = gl.allocate_shared_memory(gl.float32, [AHEAD, C], ONE_BY_ONE)
        end = gl.allocate_shared_memory(gl.float32, [AHEAD, 1], ONE)
        item = gl.allocate_shared_memory(gl.int32, [AHEAD, 1], ONE)
        row = gl.allocate_shared_memory(gl.int32, [AHEAD, 1], ONE)
        left = gl.allocate_shared_memory(gl.int32, [AHEAD, 1], ONE)
        full = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
        out = gl.allocate_shared_memory(gl.float32, [AHEAD * 2 * PARTS, C], ONE_BY_ONE)
        last = gl.allocate_shared_memory(gl.float32, [AHEAD * HALVES, 1], ONE)
        sums = gl.allocate_shared_memory(gl.float32, [3, C], ONE_BY_ONE)
        for i in gl.static_range(AHEAD):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=2)
        fence_async_shared()
        return Rows(gate, beta, of_q, of_k, end, item, row, left, full, empty, out, last, sums, HAS_G, NORMED)

    @gluon.jit
    def place(self, stage, phase):
        """(item, first row, rows) of the value head at a stage."""
        mbarrier.wait(self.full.index(stage), phase)
        item = gl.max(self.item.index(stage).load(ONE_OF_FOUR), 0)
        row = gl.max(self.row.index(stage).load(ONE_OF_FOUR), 0)
        left = gl.max(self.left.index(stage).load(ONE_OF_FOUR), 0)
        return item, row, left


# Loads


@gluon.jit
def _load_halves(desc, bar, buffer, row, column):
    """Two tiles of 64 rows."""
    for half in gl.static_range(HALVES):
        tma_load(desc, [row, column + half * C], bar, buffer.index(half))


@gluon.jit
def _load_state(desc, bar, buffer, state, V_FIRST: gl.constexpr):
    """The four tiles of a state."""
    row = state * (HALVES * C)
    for k in gl.static_range(HALVES):
        for v in gl.static_range(HALVES):
            if V_FIRST:
                tma_load(desc, [row + v * C, k * C], bar, buffer.index(HALVES * k + v))
            else:
                tma_load(desc, [row + k * C, v * C], bar, buffer.index(HALVES * k + v))


@gluon.jit
def _load_tiles(
    items, tiles, bars, q_desc, k_desc, raw_q_desc, raw_k_desc, v_desc, do_desc, new_desc, dvn_desc,
    inverse_desc, states_desc, dstates_desc,
):  # fmt: skip
    """The producer of tiles, in the order in which they are needed and their buffers become free."""
    TILE: gl.constexpr = q_desc.block_type.nbytes
    turn, item_turn = gl.to_tensor(0), gl.to_tensor(0)
    for t in range(gl.program_id(0), items.count(), gl.num_programs(0)):
        row, left = items.place(t)
        if left > 0:
            head = t % items.H
            for each in range(items.group):
                hv = head * items.group + each
                state, column = t // items.H * items.HV + hv, hv * (HALVES * C)
                mbarrier.wait(bars.head_free, turn ^ 1)  # a fresh barrier counts as one whose phase 1 is over
                mbarrier.expect(bars.first, (1 + HALVES) * TILE)
                tma_load(inverse_desc, [row, hv * C], bars.first, tiles.inverse.index(0))
                _load_halves(dvn_desc, bars.first, tiles.dr, row, column)
                mbarrier.expect(bars.values, HALVES * TILE)
                _load_halves(v_desc, bars.values, tiles.v, row, column)
                mbarrier.expect(bars.pair, 2 * HALVES * TILE)
                _load_halves(do_desc, bars.pair, tiles.do, row, column)
                _load_halves(new_desc, bars.pair, tiles.new, row, column)
                if each == 0:
                    mbarrier.wait(bars.keys_free, item_turn ^ 1)
                    mbarrier.expect(bars.keys, HALVES * TILE)
                    _load_halves(k_desc, bars.keys, tiles.k, row, head * (HALVES * C))
                mbarrier.expect(bars.states, 2 * HALVES * HALVES * TILE)
                _load_state(states_desc, bars.states, tiles.states, state, tiles.V_FIRST)
                _load_state(dstates_desc, bars.states, tiles.dstates, state, tiles.V_FIRST)
                if each == 0:
                    mbarrier.wait(bars.queries_free, item_turn ^ 1)
                    mbarrier.expect(bars.queries, HALVES * TILE)
                    _load_halves(q_desc, bars.queries, tiles.q, row, head * (HALVES * C))
                    if tiles.NORMED:
                        mbarrier.wait(bars.raw_free, item_turn)
                        mbarrier.expect(bars.raw, 2 * HALVES * TILE)
                        _load_halves(raw_q_desc, bars.raw, tiles.raw_q, row, head * (HALVES * C))
                        _load_halves(raw_k_desc, bars.raw, tiles.raw_k, row, head * (HALVES * C))
                    item_turn = item_turn ^ 1
                turn = turn ^ 1


@gluon.jit
def _flush(items, rows, dbeta, dgate, dlast, stage, row, left, hv, tile, all_rows):
    """Store what the warpgroups have left at a stage for the rows of a value head: here no fence of theirs
    waits for it."""
    i = gl.arange(0, C, ALONG)
    at = (row + i).to(gl.int64) * items.HV + hv
    for part in gl.static_range(PARTS):
        to = at + part * all_rows.to(gl.int64) * items.HV
        gl.store(dbeta + to, rows.out.index(2 * PARTS * stage + part).load(ALONG), mask=i < left)
        if rows.HAS_G:
            gl.store(dgate + to, rows.out.index(2 * PARTS * stage + PARTS + part).load(ALONG), mask=i < left)
    if rows.HAS_G:
        here = gl.arange(0, 1, ONE_EACH)
        own = dlast + (tile * items.HV + hv).to(gl.int64) * HALVES
        for half in gl.static_range(HALVES):
            x = rows.last.index(HALVES * stage + half).load(ONE_EACH)
            gl.store(own + half + here, x, mask=here < left)


@gluon.jit
def _load_rows(items, rows, g, beta, q_norms, k_norms, dbeta, dgate, dlast, all_rows):
    """The producer of gates and betas. It tells the warpgroups where they are, too: to find the chunk of a
    packed sequence takes a search."""
    i = gl.arange(0, C, ALONG)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # of `empty`: a fresh barrier counts as one whose phase 1 is complete
    # The value heads before: whose results are at this stage, and at the other one.
    old_row, old_left, old_hv, old_tile = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    new_row, new_left, new_hv, new_tile = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    for t in range(gl.program_id(0), items.count(), gl.num_programs(0)):
        row, left = items.place(t)
        if left > 0:
            head = t % items.H
            for each in range(items.group):
                hv = head * items.group + each
                at = (row + i).to(gl.int64) * items.HV + hv
                of_beta = gl.load(beta + at, mask=i < left, other=0.0).to(gl.float32)
                gate = gl.zeros((C,), gl.float32, ALONG)
                end = gl.to_tensor(0.0)
                if rows.HAS_G:
                    gate = gl.load(g + at, mask=i < left, other=0.0)
                    end = gl.load(g + (row + left - 1).to(gl.int64) * items.HV + hv)
                of_q, of_k = gate, gate
                if rows.NORMED:
                    key = (row + i).to(gl.int64) * items.H + head
                    of_q = gl.load(q_norms + key, mask=i < left, other=0.0)
                    of_k = gl.load(k_norms + key, mask=i < left, other=0.0)
                mbarrier.wait(rows.empty.index(stage), phase)
                _flush(items, rows, dbeta, dgate, dlast, stage, old_row, old_left, old_hv, old_tile, all_rows)
                old_row, old_left, old_hv, old_tile = new_row, new_left, new_hv, new_tile
                new_row, new_left, new_hv, new_tile = row, left, hv, t // items.H
                rows.gate.index(stage).store(gate)
                rows.beta.index(stage).store(of_beta)
                if rows.NORMED:
                    rows.of_q.index(stage).store(of_q)
                    rows.of_k.index(stage).store(of_k)
                put_number(rows.end.index(stage), end, gl.float32)
                put_number(rows.item.index(stage), t, gl.int32)
                put_number(rows.row.index(stage), row, gl.int32)
                put_number(rows.left.index(stage), left, gl.int32)
                mbarrier.arrive(rows.full.index(stage))
                stage, phase = after(stage, phase, AHEAD)
    mbarrier.wait(rows.empty.index(stage), phase)
    _flush(items, rows, dbeta, dgate, dlast, stage, old_row, old_left, old_hv, old_tile, all_rows)
    put_number(rows.left.index(stage), 0, gl.int32)
    mbarrier.arrive(rows.full.index(stage))
    stage, phase = after(stage, phase, AHEAD)
    mbarrier.wait(rows.empty.index(stage), phase)
    _flush(items, rows, dbeta, dgate, dlast, stage, new_row, new_left, new_hv, new_tile, all_rows)


# Pieces of the computation


@gluon.jit
def _row_sums(x):
    """Sums of rows, [64, 64]: repeatedly adds the second half to the first."""
    for _ in gl.static_range(5):
        x = gl.sum(gl.reshape(x, (C, 2, x.shape[1] // 2)), 1)
    return gl.convert_layout(gl.sum(x, 1), OF_ROWS)


@gluon.jit
def _whole_sum(x, y, factor):
    """The sum of x, and that of y times a factor, together; likewise."""
    both = gl.convert_layout(gl.join(x, y), IN_A_WARP)
    for _ in gl.static_range(5):
        both = gl.sum(gl.reshape(both, (2, both.shape[0] // 2, 2)), 0)
    both = gl.sum(both, 0)
    first = gl.arange(0, 2, gl.SliceLayout(0, IN_A_WARP)) == 0
    both = gl.convert_layout(both, gl.SliceLayout(0, IN_A_WARP))
    return gl.sum(gl.where(first, both, both * factor), 0)


@gluon.jit
def down(x):
    """Numbers of rows as a column."""
    return gl.expand_dims(x, 1)


@gluon.jit
def _begun(left, right, acc, TURN_LEFT: gl.constexpr, TURN_RIGHT: gl.constexpr, FRESH: gl.constexpr):
    """left right, added to acc unless FRESH; in flight. A factor that is turned is transposed."""
    if TURN_LEFT:
        left = left.permute((1, 0))
    if TURN_RIGHT:
        right = right.permute((1, 0))
    return warpgroup_mma(left, right, acc, use_acc=not FRESH, is_async=True)


@gluon.jit
def _chain(left, right, zero, TURN_RIGHT: gl.constexpr, FIRST: gl.constexpr = 0):
    """The chain over the 128 columns of two tiles of `left`, from 0; in flight. Those of `right` begin at
    tile FIRST. `zero` is 0, but the compiler must not know it: it would compute the addresses of all operands
    before the loop, and spill them."""
    zeros = gl.zeros((C, C), gl.float32, OF_TILE)
    acc = _begun(left.index(zero), right.index(zero + FIRST), zeros, False, TURN_RIGHT, True)
    return _begun(left.index(zero + 1), right.index(zero + FIRST + 1), acc, False, TURN_RIGHT, False)


@gluon.jit
def send(desc, buffer, place, row, left, column, width):
    """Store what is in a buffer, and fenced: by TMA, or with a mask if it has fewer rows."""
    if left >= C:
        tma_store(desc, [row, column], buffer)
    else:
        i = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, BY_ROWS)), 1)
        c = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, BY_ROWS)), 0)
        at = (row + i).to(gl.int64) * width + column + c
        gl.store(gl.multiple_of(place + at, (1, 16)), buffer.load(BY_ROWS), mask=i < left)


@gluon.jit
def _of_states(tiles, WHICH: gl.constexpr):
    """The sum over V of S D for each of the warpgroup's features."""
    total = gl.zeros((C,), gl.float32, OF_ROWS)
    for v in range(HALVES):  # not unrolled: this kernel is slower the longer its code is
        h, dh = tiles.states.index(HALVES * WHICH + v), tiles.dstates.index(HALVES * WHICH + v)
        if tiles.V_FIRST:
            h, dh = h.permute((1, 0)), dh.permute((1, 0))
        total += _row_sums(h.load(OF_TILE).to(gl.float32) * dh.load(OF_TILE).to(gl.float32))
    return total


@gluon.jit
def _keep_of_system(db, n, kk, tiles, rows, stage):
    """The first parts of dbeta and dG: what they have from N and M."""
    rows.out.index(2 * PARTS * stage).store(db + _row_sums(n * kk))
    if rows.HAS_G:
        m = tiles.scores.index(1)  # to load 16-bit numbers is faster than to convert them in registers
        of_rows = _row_sums(m.load(OF_TILE).to(gl.float32) * kk)
        of_columns = _row_sums(m.permute((1, 0)).load(OF_TILE).to(gl.float32) * kk)  # kk is symmetric
        rows.out.index(2 * PARTS * stage + PARTS).store(of_rows - of_columns)


@gluon.jit
def _norm_gradients(dq, dk, r_q, r_k, tiles, rows, bars, met, WHICH: gl.constexpr):
    """dq and dk of rows before the norm. The first warpgroup has sums over all of K for the rows of q, the
    second one for those of k. Products are sent where dS and M were, and where q was."""
    of_q = reinterpreted(tiles.scores, gl.float32, [C, C], SENT)
    of_k = reinterpreted(tiles.q, gl.float32, [C, C], SENT)
    met = bars.meet(met)  # nobody reads dS, M and q any more
    n_q = tiles.raw_q.index(WHICH).load(OF_TILE).to(gl.float32) * r_q
    n_k = tiles.raw_k.index(WHICH).load(OF_TILE).to(gl.float32) * r_k
    if WHICH == 0:
        of_k.store(n_k * dk)
        met = bars.meet(met)
        rows.sums.index(1).store(_row_sums(n_q * dq + of_q.load(OF_TILE)))
    else:
        of_q.store(n_q * dq)
        met = bars.meet(met)
        rows.sums.index(2).store(_row_sums(n_k * dk + of_k.load(OF_TILE)))
    fence_async_shared()  # TMA writes q, and products read dS and M
    met = bars.meet(met)
    dq = (dq - n_q * down(rows.sums.index(1).load(OF_ROWS))) * r_q
    dk = (dk - n_k * down(rows.sums.index(2).load(OF_ROWS))) * r_k
    return dq, dk, met


# The warpgroups


@gluon.jit
def _consume(
    items, tiles, rows, bars, dq_at, dk_at, dv_at, scale, dq_desc, dk_desc, dv_desc,
    ALONE: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """The warpgroup of tile WHICH of the columns of k and of v."""
    DTYPE: gl.constexpr = dv_desc.dtype
    i = gl.arange(0, C, OF_ROWS)
    j = gl.expand_dims(gl.arange(0, C, OF_COLUMNS), 0)
    zeros = gl.zeros((C, C), gl.float32, OF_TILE)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    turn, item_turn, met = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    item, row, left = rows.place(stage, phase)
    while left > 0:
        dq, dk = zeros, zeros
        r_q, r_k = gl.zeros((C,), gl.float32, OF_ROWS), gl.zeros((C,), gl.float32, OF_ROWS)
        live = i < left
        until = down(gl.where(live, i, -1))  # one comparison tells whether a row lives and j <= i
        head = item % items.H
        for each in range(items.group):
            hv = head * items.group + each
            zero = gl.minimum(hv, 0)
            mbarrier.wait(rows.full.index(stage), phase)
            gate, beta = rows.gate.index(stage).load(OF_ROWS), rows.beta.index(stage).load(OF_ROWS)
            mbarrier.wait(bars.first, turn)
            if left < C:
                mbarrier.wait(bars.pair, turn)
                clear(tiles.dr.index(WHICH), left)
                clear(tiles.new.index(WHICH), left)
                if WHICH == 0:
                    clear(tiles.inverse.index(0), left)
                if each == 0:
                    mbarrier.wait(bars.keys, item_turn)
                    clear(tiles.k.index(WHICH), left)
                    mbarrier.wait(bars.queries, item_turn)
                    clear(tiles.q.index(WHICH), left)
                fence_async_shared()
                met = bars.meet(met)
            # dr, db and dv
            dr = _begun(tiles.inverse.index(zero), tiles.dr.index(zero + WHICH), zeros, True, False, True)
            dr = warpgroup_mma_wait(0, deps=(dr,))
            mbarrier.wait(bars.values, turn)
            db = _row_sums(dr * tiles.v.index(WHICH).load(OF_TILE).to(gl.float32))
            if WHICH == 0:
                rows.sums.index(0).store(db)
            tiles.dr.index(WHICH).store(dr.to(DTYPE))
            fence_async_shared()
            mbarrier.arrive(bars.has_dr)
            if each == 0:
                tma.store_wait(0)  # dq and dk of the last item
                mbarrier.arrive(bars.raw_free)
            column = (hv * HALVES + WHICH) * C
            tiles.v.index(WHICH).store((dr * down(beta)).to(DTYPE))
            fence_async_shared()
            send(dv_desc, tiles.v.index(WHICH), dv_at, row, left, column, items.HV * (HALVES * C))
            # dS, or M. The other warpgroup is done with the last ones: it has this dr.
            mbarrier.wait(bars.pair, turn)
            if WHICH == 0:  # not earlier: a fence waits for products in flight, and the other one for dr
                scores = _chain(tiles.do, tiles.new, zero, True)
            decay = gl.exp2(down(gate) - gl.expand_dims(rows.gate.index(stage).load(OF_COLUMNS), 0))
            if WHICH == 0:
                scores = warpgroup_mma_wait(0, deps=(scores,))
                scores = gl.where(j <= until, scores * decay, 0.0).to(DTYPE)
                mbarrier.wait(bars.has_dr, turn)
                tiles.scores.index(0).store(scores)
                fence_async_shared()
                mbarrier.arrive(bars.has_ds)
            else:
                mbarrier.wait(bars.has_dr, turn)
                change = _chain(tiles.dr, tiles.new, zero, True)
                mbarrier.wait(bars.keys, item_turn)
                kk = _chain(tiles.k, tiles.k, zero, True)
                # 0 takes the sums of both tiles.
                db = gl.zeros((C,), gl.float32, OF_ROWS) + rows.sums.index(0).load(OF_ROWS) + db
                change, kk = warpgroup_mma_wait(0, deps=(change, kk))
                n = gl.where(j < until, -change * decay, 0.0)
                both = (n * down(beta)).to(DTYPE)
                tiles.scores.index(1).store(both)
                fence_async_shared()
                mbarrier.arrive(bars.has_m)
                if not ALONE:
                    _keep_of_system(db, n, kk, tiles, rows, stage)
            # Own columns of k
            mbarrier.wait(bars.states, turn)
            z = _chain(tiles.dr, tiles.states, zero, not tiles.V_FIRST, HALVES * WHICH)
            x = _chain(tiles.do, tiles.states, zero, not tiles.V_FIRST, HALVES * WHICH)
            y = _chain(tiles.new, tiles.dstates, zero, not tiles.V_FIRST, HALVES * WHICH)
            if ALONE and WHICH == 1:
                _keep_of_system(db, n, kk, tiles, rows, stage)
            if rows.HAS_G:
                of_states = _of_states(tiles, WHICH)
            x, y, z = warpgroup_mma_wait(0, deps=(x, y, z))
            tma.store_wait(0)  # dv
            mbarrier.arrive(bars.head_free)
            mbarrier.wait(bars.keys, item_turn)
            keys = tiles.k.index(WHICH).load(OF_TILE).to(gl.float32)
            start = gl.exp2(gate)
            from_state = start * _row_sums(keys * z)
            rows.out.index(2 * PARTS * stage + 1 + WHICH).store(-from_state)
            x = x * down(start)
            z = -(z * down(beta * start))
            mbarrier.wait(bars.has_ds, turn)
            x = _begun(tiles.scores.index(zero), tiles.k.index(zero + WHICH), x, False, False, False)
            mbarrier.wait(bars.has_m, turn)
            z = _begun(tiles.scores.index(zero + 1), tiles.k.index(zero + WHICH), z, False, False, False)
            z = _begun(tiles.scores.index(zero + 1), tiles.k.index(zero + WHICH), z, True, False, False)
            mbarrier.wait(bars.queries, item_turn)
            if ALONE:
                s = _begun(tiles.scores.index(zero), tiles.q.index(zero + WHICH), zeros, True, False, True)
            x, z = warpgroup_mma_wait(1 if ALONE else 0, deps=(x, z))
            mbarrier.arrive(bars.keys_free, pred=each == items.group - 1)
            x = x * scale
            dq += x
            dk += z
            if rows.HAS_G:
                of_q = _row_sums(tiles.q.index(WHICH).load(OF_TILE).to(gl.float32) * x)
            if not ALONE:
                s = _begun(tiles.scores.index(zero), tiles.q.index(zero + WHICH), zeros, True, False, True)
            s = warpgroup_mma_wait(0, deps=(s,))
            end = gl.max(rows.end.index(stage).load(ONE_OF_FOUR), 0)
            y = y * down(gl.where(live, gl.exp2(end - gate), 0.0))
            if rows.HAS_G:
                last = _whole_sum(_row_sums(keys * y), of_states, gl.exp2(end))
                rows.last.index(HALVES * stage + WHICH).store(
                    gl.full((1,), 0.0, gl.float32, ONE_OF_FOUR) + last
                )
            y = y + s * scale
            dk += y
            if rows.HAS_G:
                own = of_q - _row_sums(keys * y) - beta * from_state
                rows.out.index(2 * PARTS * stage + PARTS + 1 + WHICH).store(own)
            if tiles.NORMED:  # those of the last head are used, and all heads have the same ones
                r_q, r_k = rows.of_q.index(stage).load(OF_ROWS), rows.of_k.index(stage).load(OF_ROWS)
            mbarrier.arrive(rows.empty.index(stage))
            stage, phase = after(stage, phase, AHEAD)
            turn = turn ^ 1
        if tiles.NORMED:
            mbarrier.wait(bars.raw, item_turn)
            dq, dk, met = _norm_gradients(dq, dk, down(r_q), down(r_k), tiles, rows, bars, met, WHICH)
        mbarrier.arrive(bars.queries_free)
        column, width = (head * HALVES + WHICH) * C, items.H * (HALVES * C)
        tiles.raw_q.index(WHICH).store(dq.to(DTYPE))
        tiles.raw_k.index(WHICH).store(dk.to(DTYPE))
        fence_async_shared()
        send(dq_desc, tiles.raw_q.index(WHICH), dq_at, row, left, column, width)
        send(dk_desc, tiles.raw_k.index(WHICH), dk_at, row, left, column, width)
        item_turn = item_turn ^ 1
        item, row, left = rows.place(stage, phase)
    tma.store_wait(0)


@kernel
def gradients_kernel(
    dq, dk, dv, dbeta, dgate, dlast, g, beta, q_norms, k_norms, cu_seqlens, scale, T, S, H, HV, group,
    tile_count, all_rows,
    q_desc, k_desc, raw_q_desc, raw_k_desc, v_desc, do_desc, new_desc, dvn_desc, inverse_desc, states_desc,
    dstates_desc, dq_desc, dk_desc, dv_desc,
    PACKED: gl.constexpr, HAS_G: gl.constexpr, V_FIRST: gl.constexpr, NORMED: gl.constexpr,
    ALONE: gl.constexpr,
):  # fmt: skip
    if ALONE:  # then sums over heads need no registers while a head is computed
        group = gl.to_tensor(1)
    items = Items(cu_seqlens, T, S, H, HV, group, tile_count, PACKED)
    tiles = Tiles.create(q_desc, V_FIRST, NORMED)
    rows = Rows.create(HAS_G, NORMED)
    bars = Barriers.create()
    gl.warp_specialize(
        [(_consume, (items, tiles, rows, bars, dq, dk, dv, scale, dq_desc, dk_desc, dv_desc, ALONE, 0)),
         (_consume, (items, tiles, rows, bars, dq, dk, dv, scale, dq_desc, dk_desc, dv_desc, ALONE, 1)),
         (_load_tiles, (items, tiles, bars, q_desc, k_desc, raw_q_desc, raw_k_desc, v_desc, do_desc, new_desc,
                        dvn_desc, inverse_desc, states_desc, dstates_desc)),
         (_load_rows, (items, rows, g, beta, q_norms, k_norms, dbeta, dgate, dlast, all_rows))],
        [4, 1, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS, GATE_REGISTERS],
    )  # fmt: skip


# Launcher


def why_not(q: Tensor, v: Tensor) -> str | None:
    """Why this kernel cannot serve a call, or None."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return "tensor cores take bf16 and fp16"
    if (q.shape[-1], v.shape[-1]) != (WIDTH, WIDTH):
        return f"K={q.shape[-1]}, V={v.shape[-1]}; each of two warpgroups has 64 of 128 columns"
    return None


def gradients(
    raw_q: Tensor, raw_k: Tensor, q: Tensor, k: Tensor, v: Tensor, g2: Tensor | None, beta: Tensor,
    inverse: Tensor, do: Tensor, new: Tensor, dvn: Tensor, states: Tensor, dstates: Tensor,
    cu_seqlens: Tensor | None, scale: float, v_first: bool, norms: tuple[Tensor, Tensor] | None,
    launch: Launch = run, sms: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """(dq, dk, dv, the parts of dbeta and dG [3, rows, HV], and what dG of last rows has in addition [tiles,
    HV, 2]), where `why_not` is None. `norms`: the inverse norms of raw_q and raw_k, [B, T, H] each; None if q
    and k are raw_q and raw_k. `sms`: the SMs to make a schedule for; 0: those of the device."""
    B, T, HV, _ = v.shape
    H, parts = q.shape[2], 1 + HALVES.value
    S = B if cu_seqlens is None else len(cu_seqlens) - 1
    tiles, all_rows = tiles_of(T, S, cu_seqlens), B * T

    def empty(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.float32, device=v.device)

    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    dbeta, dgate, dlast = empty(parts, all_rows, HV), None, None
    if g2 is not None:
        dgate, dlast = empty(parts, all_rows, HV), empty(tiles, HV, parts - 1)
    if all_rows == 0:
        return dq, dk, dv, dbeta, dgate, dlast
    by_rows = (rows_of(t) for t in (q, k, raw_q, raw_k, v, do, new, dvn, inverse))
    by_states = (t.view(-1, t.shape[-1]) for t in (states, dstates))
    results = (rows_of(t) for t in (dq, dk, dv))
    options: dict[str, Any] = {"num_warps": 4, "maxnreg": AT_LAUNCH, "enable_fp_fusion": False}
    launch(
        gradients_kernel, (min(tiles * H, sms or sm_count(v.device)),),
        dq, dk, dv, dbeta, *(unused(dbeta) if t is None else t for t in (dgate, dlast, g2)), beta,
        *((unused(dbeta), unused(dbeta)) if norms is None else norms),
        unused(dbeta) if cu_seqlens is None else cu_seqlens,
        scale, T, S, H, HV, HV // H, tiles, all_rows,
        *(descriptor(matrix(t), CHUNK, CHUNK) for t in (*by_rows, *by_states, *results)),
        PACKED=cu_seqlens is not None, HAS_G=g2 is not None, V_FIRST=v_first, NORMED=norms is not None,
        ALONE=H == HV,
        **options,
    )  # fmt: skip
    return dq, dk, dv, dbeta, dgate, dlast
