"""Scheduling and loads of the attention kernel on Hopper: which program takes which queries, where their keys
are, and the loader warp.

An *item* is 128 queries of one head: two parts of 64, one for each of two warpgroups. Items are dealt to
programs round-robin, those with most keys first and every other round in reverse, so that programs get about
the same number of blocks. Heads that share keys are neighbours, and so read them from L2 at about the same
time. None of this affects bits.

TMA reads tensors in place as [B, H, T, D] with any strides, and fills with zeros outside of T or D.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isobit.frame.cache_key import CacheKey, remember
from isobit.kernels.hopper.pipeline import (
    ROWS,
    TensorDescriptor,
    after,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    record,
    tma,
    tma_load,
)
from isobit.ops.attention.calls import call_of, decodes
from isobit.ops.attention.kernels_hopper_parts import BY_ROWS

# Triton 3.9 has other names for these than 3.6 and 3.7.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_Shared = gl.shared_memory_descriptor
reinterpreted = getattr(_Shared, "reinterpret", None) or _Shared._reinterpret

#: Warpgroups that multiply, and so parts of an item.
PARTS = gl.constexpr(2)

#: Registers per thread at launch, of a warp that multiplies, and of the loader.
AT_LAUNCH, REGISTERS, OF_LOADER = 168, gl.constexpr(240), gl.constexpr(24)

ONE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ONE_EACH = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
ONE_OF_FOUR = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def clamped(at, low, high):
    """The integer at this address, clamped to [low, high]: unchecked input."""
    return gl.minimum(gl.maximum(gl.load(at), low), high).to(gl.int32)


@gluon.jit
def packed_piece(cu, tile, length, sequences):
    """(sequence, where it begins, first of its rows or keys in this tile of 128), of packed ones between the
    borders `cu`. Sequence s begins with tile cu[s] // 128 + s, which leaves room for all before it: some are
    empty."""
    PER: gl.constexpr = PARTS * ROWS
    sequence = gl.to_tensor(0)
    beyond = sequences
    while beyond - sequence > 1:
        middle = (sequence + beyond) // 2
        begun = clamped(cu + middle, 0, length) // PER + middle <= tile
        sequence = gl.where(begun, middle, sequence)
        beyond = gl.where(begun, beyond, middle)
    first = clamped(cu + sequence, 0, length)
    return sequence, first, gl.maximum(tile - (first // PER + sequence), 0) * PER


@gluon.jit
def turn(i):
    """The number of the item that this program takes in round i; there may be no such item. Every other round
    goes in the opposite direction: items come in the order of their work, and so every program gets about as
    much as the others."""
    place = gl.program_id(0)
    if i % 2 == 1:
        place = gl.num_programs(0) - 1 - place
    return i * gl.num_programs(0) + place


@gluon.jit
def tell(items, slot, values):
    """Written by the loader: the fields of an item, for the warps that wait for its data."""
    for i in gl.static_range(8):
        items.index(slot * 8 + i).store(gl.full((1,), 0, gl.int32, ONE_EACH) + values[i])


@gluon.jit
def told(items, slot, WHICH: gl.constexpr):
    """Read one of these fields, by its index."""
    return gl.max(items.index(slot * 8 + WHICH).load(ONE_OF_FOUR), 0)


@gluon.jit
def load_box(desc, batch, head, row, room, bar):
    box = reinterpreted(room, desc.dtype, desc.block_type.shape, desc.layout)
    tma_load(desc, [batch, head, row, 0], bar, box)


@gluon.jit
def load_when_free(desc, batch, head, row, room, ready, empty, phase):
    """One box, as soon as its slot is free."""
    mbarrier.wait(empty, phase)
    mbarrier.expect(ready, desc.block_type.nbytes)
    load_box(desc, batch, head, row, room, ready)


@gluon.jit
def clear(rooms, stage, begin, end, SIZE: gl.constexpr):
    """Zeros for the rows of a stage's block of SIZE before `begin` and from `end` on."""
    PIECE: gl.constexpr = 32  # rows at once
    row = gl.expand_dims(gl.arange(0, PIECE, gl.SliceLayout(1, BY_ROWS)), 1)
    for i in gl.static_range(SIZE // PIECE):
        if (begin > i * PIECE) | (end < (i + 1) * PIECE):
            piece = rooms.index(stage).slice(i * PIECE, PIECE)
            live = (row + i * PIECE >= begin) & (row + i * PIECE < end)
            piece.store(gl.where(live, piece.load(BY_ROWS), 0.0))
    fence_async_shared()


@record
class Item:
    """128 queries of a head, and the keys that some of them see: `blocks` blocks from `begin` on, counted
    from the sequence's first key."""

    blocks: gl.tensor  # -1: there is no more work
    begin: gl.tensor
    keys: gl.tensor  # of the sequence
    position: gl.tensor  # of the first query
    live: gl.tensor  # queries from the first to the sequence's last
    row: gl.tensor  # the first query's, in q
    batch: gl.tensor
    head: gl.tensor


@record
class Work:
    """All items of a call."""

    key_start: gl.tensor
    key_end: gl.tensor
    cu_q: gl.tensor
    cu_k: gl.tensor
    T: gl.tensor
    S: gl.tensor
    sequences: gl.tensor
    window: gl.tensor
    tiles: gl.tensor  # of 128 queries, of all sequences together
    H: gl.tensor
    G: gl.tensor  # heads that share a head of k and v
    BLOCK: gl.constexpr
    PACKED: gl.constexpr
    STARTS: gl.constexpr
    ENDS: gl.constexpr
    CAUSAL: gl.constexpr
    WINDOWED: gl.constexpr

    @gluon.jit
    def rounds(self):
        return gl.cdiv(self.tiles * self.H, gl.num_programs(0))

    @gluon.jit
    def _piece(self, tile):
        """(sequence, its first row, its rows, first of them in this tile)."""
        if self.PACKED:
            sequence, row, start = packed_piece(self.cu_q, tile, self.T, self.sequences)
            rows = clamped(self.cu_q + sequence + 1, row, self.T) - row
        else:
            # The last queries see most keys: they come first, those of all sequences.
            sequence = tile % self.sequences
            start = (tile // self.sequences) * (PARTS * ROWS)
            row = gl.to_tensor(0)
            rows = self.T
        return sequence, row, rows, start

    @gluon.jit
    def item(self, t):
        """(item t, where its keys begin in k)."""
        head = t % self.H
        sequence, row, rows, start = self._piece(self.tiles - 1 - t // self.H)
        first = gl.to_tensor(0)
        last = self.S
        batch = sequence
        if self.PACKED:
            first = clamped(self.cu_k + sequence, 0, self.S)
            last = clamped(self.cu_k + sequence + 1, first, self.S)
            batch = gl.to_tensor(0)
        if self.STARTS:
            first = clamped(self.key_start + sequence, 0, self.S)
        if self.ENDS:
            last = clamped(self.key_end + sequence, first, self.S)
        keys = gl.maximum(last - first, 0)
        position = keys - rows + start
        begin = gl.to_tensor(0)
        end = keys
        if self.CAUSAL:
            newest = keys - rows + gl.minimum(start + PARTS * ROWS, rows)
            end = gl.minimum(gl.maximum(newest, 0), keys)
        if self.WINDOWED:
            begin = gl.maximum(position - self.window + 1, 0) // self.BLOCK * self.BLOCK
        blocks = gl.maximum(gl.cdiv(end - begin, self.BLOCK), 0)
        return Item(blocks, begin, keys, position, rows - start, row + start, batch, head), first


@record
class Ring:
    """Shared memory: an item's queries, and stages of blocks of keys and values. `ready`: bytes have arrived;
    `empty`: whoever multiplies with them is done. What an item is comes with its queries, in one of two
    slots: it is needed until the results are stored, when queries of the next may have come."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    items: gl.shared_memory_descriptor
    q_ready: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_ready: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_ready: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    D: gl.constexpr  # filled up
    BLOCK: gl.constexpr
    STAGES: gl.constexpr
    ARRIVALS: gl.constexpr  # that make queries ready: of TMA, and of whoever else writes

    @gluon.jit
    def create(
        q_desc, k_desc, v_desc, D: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
        FLAT: gl.constexpr, ARRIVALS: gl.constexpr = 1,
    ):  # fmt: skip
        q = gl.allocate_shared_memory(q_desc.dtype, [PARTS, ROWS, D], FLAT)
        k = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK, D], FLAT)
        v = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BLOCK, D], FLAT)
        items = gl.allocate_shared_memory(gl.int32, [16, 1], ONE)
        bars: gl.constexpr = mbarrier.MBarrierLayout()
        q_ready = gl.allocate_shared_memory(gl.int64, [PARTS, 1], bars)
        q_empty = gl.allocate_shared_memory(gl.int64, [PARTS, 1], bars)
        k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
        for i in gl.static_range(PARTS):
            mbarrier.init(q_ready.index(i), count=ARRIVALS)
            mbarrier.init(q_empty.index(i), count=1)
        for i in gl.static_range(STAGES):
            mbarrier.init(k_ready.index(i), count=1)
            mbarrier.init(k_empty.index(i), count=PARTS)
            mbarrier.init(v_ready.index(i), count=1)
            mbarrier.init(v_empty.index(i), count=PARTS)
        fence_async_shared()  # TMA signals these barriers, and must see them initialised
        return Ring(
            q_desc, k_desc, v_desc, q, k, v, items, q_ready, q_empty, k_ready, k_empty, v_ready, v_empty,
            D, BLOCK, STAGES, ARRIVALS,
        )  # fmt: skip

    @gluon.jit
    def load_k(self, item, kv, at, stage, phase):
        """The keys of a block, as soon as their room is free."""
        load_when_free(
            self.k_desc, item.batch, kv, at, self.k.index(stage), self.k_ready.index(stage),
            self.k_empty.index(stage), phase,
        )  # fmt: skip

    @gluon.jit
    def load_v(self, item, kv, at, stage, phase):
        """The values of a block, as soon as their room is free."""
        load_when_free(
            self.v_desc, item.batch, kv, at, self.v.index(stage), self.v_ready.index(stage),
            self.v_empty.index(stage), phase,
        )  # fmt: skip

    @gluon.jit
    def announce(self, item, slot):
        """What an item is, as soon as both parts are done with the queries before its own."""
        for w in gl.static_range(PARTS):
            mbarrier.wait(self.q_empty.index(w), slot ^ 1)
        values = (
            item.blocks, item.begin, item.keys, item.position, item.live, item.row, item.batch, item.head
        )  # fmt: skip
        tell(self.items, slot, values)

    @gluon.jit
    def end(self, slot):
        """There is no more work."""
        none = gl.to_tensor(-1)
        self.announce(Item(none, none, none, none, none, none, none, none), slot)
        for w in gl.static_range(PARTS):
            for _ in gl.static_range(self.ARRIVALS):
                mbarrier.arrive(self.q_ready.index(w))


@gluon.jit
def load_items(work, ring):
    """The loader. Keys of a block are asked for before the values of the block before: that is the order in
    which they are multiplied, and room becomes free."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # of `empty`: a fresh barrier counts as one whose phase 1 is complete
    slot = gl.to_tensor(0)
    for i in range(work.rounds()):
        t = turn(i)
        if t < work.tiles * work.H:
            item, first = work.item(t)
            if item.live > 0:
                kv = item.head // work.G
                at = first + item.begin
                if item.blocks > 0:
                    ring.load_k(item, kv, at, stage, phase)
                ring.announce(item, slot)
                for w in gl.static_range(PARTS):
                    if item.blocks > 0:
                        load_when_free(
                            ring.q_desc, item.batch, item.head, item.row + w * ROWS, ring.q.index(w),
                            ring.q_ready.index(w), ring.q_empty.index(w), slot ^ 1,
                        )  # fmt: skip
                    else:
                        mbarrier.arrive(ring.q_ready.index(w))
                slot = slot ^ 1
                for block in range(item.blocks):
                    k_stage, k_phase = after(stage, phase, ring.STAGES)
                    if block + 1 < item.blocks:
                        ring.load_k(item, kv, at + ring.BLOCK, k_stage, k_phase)
                    ring.load_v(item, kv, at, stage, phase)
                    at += ring.BLOCK
                    stage, phase = after(stage, phase, ring.STAGES)
    ring.end(slot)


# Host side

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@lru_cache(maxsize=64)
def flat_layout(D: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Of boxes in shared memory, for multiplying: D is filled up."""
    return gl.NVMMASharedLayout.get_default_for([64, D], _TYPES[dtype])


@lru_cache(maxsize=64)
def _box_layout(rows: int, D: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, D], _TYPES[dtype])


#: What descriptors hold beside their tensor.
_descriptors: dict[CacheKey, dict[str, Any]] = {}


def why_not_tma(name: str, t: Tensor) -> str | None:
    """Why TMA cannot read [B, T, H, D] where it lies, or None. A dimension of 1 has any stride."""
    each = 16 // t.element_size()
    if t.device.type != "meta" and t.data_ptr() % 16:
        return f"{name} begins at an address that is not a multiple of 16 bytes, which TMA needs"
    for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True):
        if size > 1 and (stride <= 0 or stride % each):
            return f"TMA reads rows that are multiples of 16 bytes apart; strides of {name} are not"
    return None


def why_not_paged(args: dict[str, Any]) -> str | None:
    """Why keys in pages are another's, or None. Decoding reads them, in boxes of keys that lie together.
    Small boxes are slow: with pages of 16 it took 1.7 times as long as triton (H200)."""
    call = call_of(args)
    if not call.page:
        return None
    if call.packed_q or args["key_start"] is not None:
        return "keys in pages with packed queries or key_start are not supported"
    if not decodes(call):
        return "keys in pages with many queries or few keys are not supported"
    if call.page % 64:
        return f"keys in pages of {call.page}: pages must be multiples of 64 keys"
    return None


def descriptor(t: Tensor, rows: int, D: int) -> TensorDescriptor:
    """What TMA needs to read [B, T, H, D] in boxes of some rows of one head, D filled up."""
    key = (t.shape, t.stride(), t.dtype, rows, D)
    known = _descriptors.get(key)
    if known is None:
        known = _form(t, rows, D)
        remember(_descriptors, key, known)
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(known, base=t)
    return made


def _form(t: Tensor, rows: int, D: int) -> dict[str, Any]:
    """What descriptors of such a tensor have in common; with a place for tensor maps, see `entry.Entry`."""
    B, T, H, width = t.shape
    b, r, h, _ = t.stride()
    whole = -(-width // 8) * 8  # a stride that is not taken, as TMA wants it
    strides = [b if B > 1 else whole, h if H > 1 else whole, r if T > 1 else whole, 1]
    made = TensorDescriptor(t, [B, H, T, width], strides, [1, 1, rows, D], _box_layout(rows, D, t.dtype))
    return vars(made) | {"base": None, "maps": []}
