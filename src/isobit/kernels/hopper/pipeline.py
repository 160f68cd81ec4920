"""The main loop of Hopper kernels: a ring of shared-memory stages between a producer warp and consumer
warpgroups.

The producer warp loads the operand tiles of one step of k after another by TMA. One to three consumer
warpgroups feed them to the tensor cores (`wgmma`); each has 64 rows of the output tile and keeps its sums in
registers. Two barriers per stage connect them:

    ready[s]   the stage's bytes have arrived        producer -> consumers
    empty[s]   every consumer is done with them      consumers -> producer

TMA fills with zeros outside an operand. So ragged edges need no masks, and k is padded with zeros to whole
groups of 16 in both operands, as the numerics classes require.

A kernel is persistent: program p takes items p, p + programs, p + 2 programs... An item is a *span* of
neighbouring tiles in one row of tiles; a plain product has spans of one tile. While the consumers finish one
tile, the producer is already filling the ring for the next.

All Gluon names that the library uses are imported here; kernels take them from this module.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = [
    "PRODUCER_REGISTERS", "ROWS", "Pipe", "TensorDescriptor", "accumulator_layout", "after",
    "fence_async_shared", "gdc_launch_dependents", "gdc_wait", "gl", "gluon", "kernel", "last_start",
    "load_operand", "load_tiles", "mbarrier", "put_tile", "record", "reinterpreted", "tile_at", "tma",
    "tma_load", "tma_store", "triton_kernel", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip

# Triton 3.9 has other names for these than 3.6 and 3.7.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_Shared = gl.shared_memory_descriptor
reinterpreted = getattr(_Shared, "reinterpret", None) or _Shared._reinterpret

#: Rows of the output that one consumer owns: the M of a `wgmma`.
ROWS = gl.constexpr(64)

#: Registers that the producer's warps keep; the consumers get the rest.
PRODUCER_REGISTERS = gl.constexpr(24)


def _free(fn: Callable[..., None]) -> list[str]:
    """Parameters without an annotation, which are not compile-time constants."""
    return [p.name for p in inspect.signature(fn).parameters.values() if p.annotation is p.empty]


def kernel(fn: Callable[..., None]) -> Any:
    """A Gluon kernel that is specialised on its constants only, so that one compilation serves all sizes,
    strides and alignments."""
    return gluon.jit(fn, do_not_specialize=_free(fn))


def triton_kernel(fn: Callable[..., None]) -> Any:
    """The same in Triton. Alignment is stated in the code: a size that is a multiple of something is passed
    as a count of it, and pointers are marked with `tl.multiple_of`."""
    return triton.jit(fn, do_not_specialize=_free(fn))


def record(cls: type) -> Any:
    """A class for use inside kernels; its annotations are its fields, in the order of the constructor."""
    names = tuple(cls.__annotations__)
    constant = tuple(kind is gl.constexpr for kind in cls.__annotations__.values())

    def __init__(self, *values):  # Triton parses this too, and supports only plain loop targets
        for i in range(len(names)):
            setattr(self, names[i], gl.constexpr(values[i]) if constant[i] else values[i])

    cls.__init__ = gluon.constexpr_function(__init__)
    return aggregate(cls)


# Inside kernels


@gluon.jit
def put_tile(
    tile, desc, staging, row, column, WHICH: gl.constexpr, SWAPPED: gl.constexpr = False,
    OTHERS: gl.constexpr = 0,
):  # fmt: skip
    """Store a consumer's part of a tile, rounded, through its own buffer and TMA; transposed if SWAPPED.
    OTHERS: how many stores of other buffers were started since the last one of this buffer."""
    buffer = staging.index(WHICH)
    tma.store_wait(OTHERS)  # the previous tile has left the buffer
    if SWAPPED:
        buffer.permute((1, 0)).store(tile.to(desc.dtype))
    else:
        buffer.store(tile.to(desc.dtype))
    fence_async_shared()
    if SWAPPED:
        tma_store(desc, [column, row], buffer)
    else:
        tma_store(desc, [row, column], buffer)


@gluon.jit
def tile_at(t, tiles_m, spans, GROUP: gl.constexpr):
    """Item t as (row of tiles, span). Spans are visited in bands of GROUP rows, so that programs that run at
    the same time share operands in L2."""
    band = GROUP * spans
    first = t // band * GROUP
    rows = gl.minimum(tiles_m - first, GROUP)
    return first + t % band % rows, t % band // rows


@gluon.jit
def _by_length(i, spans, tiles_n):
    """The i-th span, in an order in which those that are one tile longer come first."""
    longer = tiles_n % spans
    if i < longer:
        span = gl.cdiv((i + 1) * spans, longer) - 1
    else:
        span = (i - longer) * spans // (spans - longer)
    return span


@gluon.jit
def after(stage, phase, STAGES: gl.constexpr):
    """The next stage, and the phase of its barriers, which flips each time the ring wraps."""
    wraps = stage + 1 == STAGES
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def last_start(size, LENGTH: gl.constexpr, BY_K: gl.constexpr):
    """Where the last LENGTH of `size` rows or columns begin. If they are contiguous in memory, at a multiple
    of 16 bytes: TMA starts at no other place, so up to 7 of them may be outside."""
    start = gl.maximum(size - LENGTH, 0)
    if not BY_K:
        start = gl.cdiv(start, 8) * 8
    return start


@gluon.jit
def _ring(desc, STAGES: gl.constexpr, BY_LEAF: gl.constexpr):
    """Buffers for boxes of a descriptor, without the dimension of its leaves."""
    box: gl.constexpr = desc.block_type.shape[1:] if BY_LEAF else desc.block_type.shape
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box, desc.dtype) if BY_LEAF else desc.layout
    return gl.allocate_shared_memory(desc.dtype, [STAGES] + box, layout)


@gluon.jit
def load_operand(desc, leaf, first, k, bar, buffer, BY_K: gl.constexpr, BY_LEAF: gl.constexpr):
    """Load an operand's part of a step: from row or column `first` on, and from k on."""
    if BY_LEAF:
        buffer = reinterpreted(buffer, desc.dtype, desc.block_type.shape, desc.layout)
        if BY_K:
            tma_load(desc, [leaf, first, k], bar, buffer)
        else:
            tma_load(desc, [leaf, k, first], bar, buffer)
    elif BY_K:
        tma_load(desc, [first, k], bar, buffer)
    else:
        tma_load(desc, [k, first], bar, buffer)


@record
class Pipe:
    """The ring, and its tiles: tiles_m x tiles_n of them, each with `steps` steps of k. Every row of tiles is
    divided into `spans` spans whose lengths differ by at most one tile: SPANS of them, or one per tile if
    SPANS is 0 or larger than the number of tiles.

    The number of columns of a tensor must be a power of two. So a tile may consist of two tensors, 160
    columns as 128 and 32, or of three: the REST columns after the first ones have a descriptor, a ring and an
    accumulator of their own, and so have the LAST ones.

    Programs that start one after the other take tiles that read the same columns of b; BY_COLUMNS: the same
    rows of a.

    OVERLAP: the last tile of a row or column ends where the output ends, and computes some of the one before
    again. Otherwise TMA fills it with zeros, which takes longer: on an H200 2 ns for a row of 128 bytes.

    BY_LEAF: k is cut into leaves, the first dimension of the descriptors, and `steps` are those of a leaf.
    TMA then fills with zeros beyond the end of a leaf too, wherever in a step that is.

    SHARDED: columns are cut into shards of `shard_columns`. Tiles begin anew in each of them, and so do its
    SPANS spans, some of which may be empty; bounds of spans do not depend on N, and tiles that would begin
    behind its end are left out. Columns beyond `limit` belong to the next shard."""

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    rest_desc: tma.tensor_descriptor
    last_desc: tma.tensor_descriptor
    a_ring: gl.shared_memory_descriptor
    b_ring: gl.shared_memory_descriptor
    rest_ring: gl.shared_memory_descriptor
    last_ring: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    M: gl.tensor
    N: gl.tensor
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    spans: gl.tensor
    steps: gl.tensor
    shard_columns: gl.tensor
    shard_tiles: gl.tensor
    SPANS: gl.constexpr
    A_BY_K: gl.constexpr  # k is contiguous in a
    B_BY_K: gl.constexpr
    CONSUMERS: gl.constexpr
    COLUMNS: gl.constexpr
    STEP: gl.constexpr
    STAGES: gl.constexpr
    GROUP: gl.constexpr
    REST: gl.constexpr
    LAST: gl.constexpr
    BY_COLUMNS: gl.constexpr
    OVERLAP: gl.constexpr
    BY_LEAF: gl.constexpr
    SHARDED: gl.constexpr

    @gluon.jit
    def create(
        a_desc, b_desc, M, N, steps, SPANS: gl.constexpr,
        A_BY_K: gl.constexpr, B_BY_K: gl.constexpr, CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr,
        STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, rest_desc=None, REST: gl.constexpr = 0,
        BY_COLUMNS: gl.constexpr = False, OVERLAP: gl.constexpr = False, BY_LEAF: gl.constexpr = False,
        shards=0, shard_columns=0, SHARDED: gl.constexpr = False, last_desc=None, LAST: gl.constexpr = 0,
    ):  # fmt: skip
        """The ring of an M x N output, all stages empty. COLUMNS include the REST and the LAST."""
        a_ring = _ring(a_desc, STAGES * CONSUMERS, BY_LEAF)
        b_ring = _ring(b_desc, STAGES, BY_LEAF)
        rest_ring = b_ring  # unused without REST
        if REST:
            rest_ring = _ring(rest_desc, STAGES, BY_LEAF)
        else:
            rest_desc = b_desc
        last_ring = b_ring
        if LAST:
            last_ring = _ring(last_desc, STAGES, BY_LEAF)
        else:
            last_desc = b_desc
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for s in gl.static_range(STAGES):
            mbarrier.init(ready.index(s), count=1)
            mbarrier.init(empty.index(s), count=CONSUMERS)
        fence_async_shared()  # TMA signals these barriers, and must see them initialised
        tiles_n = gl.cdiv(N, COLUMNS)
        spans = tiles_n
        if SPANS:
            spans = gl.minimum(tiles_n, SPANS)
        shard_tiles = tiles_n
        if SHARDED:
            shard_tiles = gl.cdiv(shard_columns, COLUMNS)
            tiles_n = shards * shard_tiles
            spans = shards * SPANS
        else:
            shard_columns = tiles_n
        return Pipe(
            a_desc, b_desc, rest_desc, last_desc, a_ring, b_ring, rest_ring, last_ring, ready, empty,
            M, N, gl.cdiv(M, CONSUMERS * ROWS), tiles_n, spans, steps, shard_columns, shard_tiles,
            SPANS, A_BY_K, B_BY_K, CONSUMERS, COLUMNS, STEP, STAGES, GROUP, REST, LAST,
            BY_COLUMNS, OVERLAP, BY_LEAF, SHARDED,
        )  # fmt: skip

    @gluon.jit
    def items(self):
        return self.tiles_m * self.spans

    @gluon.jit
    def item(self, t):
        """(row of tiles, first tile, one past the last tile, span) of item t.

        Longer spans come first in one band and last in the next, so that all programs, which take items with
        a fixed stride, get about the same number of tiles.
        """
        if self.BY_COLUMNS:
            span, m = tile_at(t, self.spans, self.tiles_m, self.GROUP)
        else:
            m, span = tile_at(t, self.tiles_m, self.spans, self.GROUP)
        first, end = span, span + 1  # for SPANS = 0, where span * tiles_n might overflow 32 bits
        if self.SHARDED:
            shard, at = span // self.SPANS, span % self.SPANS
            here = gl.minimum(gl.maximum(self.N - shard * self.shard_columns, 0), self.shard_columns)
            before, here = shard * self.shard_tiles, gl.cdiv(here, self.COLUMNS)
            first = before + gl.minimum(at * self.shard_tiles // self.SPANS, here)
            end = before + gl.minimum((at + 1) * self.shard_tiles // self.SPANS, here)
        elif self.SPANS:
            if m // self.GROUP % 2 == 1:
                span = self.spans - 1 - span
            span = _by_length(span, self.spans, self.tiles_n)
            first, end = span * self.tiles_n // self.spans, (span + 1) * self.tiles_n // self.spans
        return m, first, end, span

    @gluon.jit
    def before(self, stage):
        """The stage before this one."""
        return gl.where(stage == 0, self.STAGES - 1, stage - 1)

    @gluon.jit
    def issue(self, acc, use_acc, stage, phase, WHICH: gl.constexpr, PART: gl.constexpr = 0):
        """Issue the products of one stage once it has arrived: those of its first columns, of the REST
        (PART 1) or of the LAST (2)."""
        a = self.a_ring.index(stage * self.CONSUMERS + WHICH)
        if PART == 1:
            b = self.rest_ring.index(stage)
        elif PART == 2:
            b = self.last_ring.index(stage)
        else:
            b = self.b_ring.index(stage)
            mbarrier.wait(self.ready.index(stage), phase)
        if not self.A_BY_K:
            a = a.permute((1, 0))
        if self.B_BY_K:
            b = b.permute((1, 0))
        return warpgroup_mma(a, b, acc, use_acc=use_acc, is_async=True)

    @gluon.jit
    def multiply(self, acc, steps, stage, phase, WHICH: gl.constexpr):
        """One chain from zero over the next `steps` (at least 1) stages, in the registers of `acc`."""
        acc, _, _, stage, phase = self.multiply_parts(acc, acc, acc, steps, stage, phase, WHICH)
        return acc, stage, phase

    @gluon.jit
    def begin_chain(self, acc, stage, phase, WHICH: gl.constexpr):
        """The first step of a chain, in the registers of `acc`. It is still in flight on return: see
        `finish_chain`."""
        acc, _, stage, phase = self.begin_both(acc, acc, stage, phase, WHICH)
        return acc, stage, phase

    @gluon.jit
    def finish_chain(self, acc, steps, stage, phase, WHICH: gl.constexpr):
        """The other steps of a chain; on return it is complete."""
        acc, _, stage, phase = self.finish_both(acc, acc, steps, stage, phase, WHICH)
        return acc, stage, phase

    @gluon.jit
    def begin_both(self, acc, rest, stage, phase, WHICH: gl.constexpr):
        """As `begin_chain`, for all columns of a tile, with the REST columns, if any, in the registers of
        `rest`."""
        acc = self.issue(acc, False, stage, phase, WHICH)
        if self.REST:
            rest = self.issue(rest, False, stage, phase, WHICH, 1)
            acc, rest = warpgroup_mma_wait(2, deps=(acc, rest))
        else:
            acc = warpgroup_mma_wait(1, deps=(acc,))
        stage, phase = after(stage, phase, self.STAGES)
        return acc, rest, stage, phase

    @gluon.jit
    def finish_both(self, acc, rest, steps, stage, phase, WHICH: gl.constexpr):
        """As `finish_chain`, for all columns of a tile."""
        for _ in range(steps):
            acc = self.issue(acc, True, stage, phase, WHICH)
            if self.REST:
                rest = self.issue(rest, True, stage, phase, WHICH, 1)
                acc, rest = warpgroup_mma_wait(2, deps=(acc, rest))
            else:
                acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(self.empty.index(self.before(stage)))
            stage, phase = after(stage, phase, self.STAGES)
        if self.REST:
            acc, rest = warpgroup_mma_wait(0, deps=(acc, rest))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(self.empty.index(self.before(stage)))
        return acc, rest, stage, phase

    @gluon.jit
    def multiply_parts(self, acc, rest, last, steps, stage, phase, WHICH: gl.constexpr):
        """The same for all columns of a tile, with the REST columns, if any, in the registers of `rest`, and
        the LAST ones in those of `last`.

        The `wgmma` groups of one stage stay in flight while the next are issued. A stage is released when the
        groups after it have been issued and its own are complete.
        """
        for step in range(steps):
            acc = self.issue(acc, step > 0, stage, phase, WHICH)
            if self.LAST:
                rest = self.issue(rest, step > 0, stage, phase, WHICH, 1)
                last = self.issue(last, step > 0, stage, phase, WHICH, 2)
                acc, rest, last = warpgroup_mma_wait(3, deps=(acc, rest, last))
            elif self.REST:
                rest = self.issue(rest, step > 0, stage, phase, WHICH, 1)
                acc, rest = warpgroup_mma_wait(2, deps=(acc, rest))
            else:
                acc = warpgroup_mma_wait(1, deps=(acc,))
            # The previous stage is recomputed here, because the frontend treats a variable that is assigned
            # another loop variable as loop-invariant.
            mbarrier.arrive(self.empty.index(self.before(stage)), pred=step > 0)
            stage, phase = after(stage, phase, self.STAGES)
        if self.LAST:
            acc, rest, last = warpgroup_mma_wait(0, deps=(acc, rest, last))
        elif self.REST:
            acc, rest = warpgroup_mma_wait(0, deps=(acc, rest))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(self.empty.index(self.before(stage)))
        return acc, rest, last, stage, phase

    @gluon.jit
    def multiply_loaded(
        self, acc, rest, last, steps, stage, phase, WHICH: gl.constexpr, LAYOUT: gl.constexpr,
        LAYOUT_REST: gl.constexpr, LAYOUT_LAST: gl.constexpr,
    ):  # fmt: skip
        """As `multiply_parts`, but a consumer loads its rows of a into registers once a step, for all its
        accumulators. Otherwise each `wgmma` reads them from shared memory again, which takes as long as 40
        columns. Registers that products read must stay as they are until these are complete, and ptxas
        serialises products that are still under way when a loop begins again. So they are waited for in
        every step, while those of other consumers run. The layouts are those of the accumulators."""
        for step in range(steps):
            mbarrier.wait(self.ready.index(stage), phase)
            a = self.a_ring.index(stage * self.CONSUMERS + WHICH)
            if not self.A_BY_K:
                a = a.permute((1, 0))
            rows = a.load(gl.DotOperandLayout(0, LAYOUT, 2))
            begun = step > 0
            acc = warpgroup_mma(rows, self._b(self.b_ring, stage), acc, use_acc=begun, is_async=True)
            of_rest = gl.convert_layout(rows, gl.DotOperandLayout(0, LAYOUT_REST, 2))
            rest = warpgroup_mma(of_rest, self._b(self.rest_ring, stage), rest, use_acc=begun, is_async=True)
            if self.LAST:
                of_last = gl.convert_layout(rows, gl.DotOperandLayout(0, LAYOUT_LAST, 2))
                last = warpgroup_mma(
                    of_last, self._b(self.last_ring, stage), last, use_acc=begun, is_async=True
                )  # fmt: skip
            acc, rest, last, rows = warpgroup_mma_wait(0, deps=(acc, rest, last, rows))
            mbarrier.arrive(self.empty.index(stage))
            stage, phase = after(stage, phase, self.STAGES)
        return acc, rest, last, stage, phase

    @gluon.jit
    def _b(self, ring, stage):
        b = ring.index(stage)
        if self.B_BY_K:
            b = b.permute((1, 0))
        return b

    @gluon.jit
    def row(self, part):
        """The first of the 64 rows of a part."""
        row = part * ROWS
        if self.OVERLAP:
            row = gl.minimum(row, last_start(self.M, ROWS, self.A_BY_K))
        return row

    @gluon.jit
    def column(self, n):
        """The first column of the n-th tile of a row."""
        column = n * self.COLUMNS
        if self.SHARDED:
            shard = n // self.shard_tiles
            column = shard * self.shard_columns + (n - shard * self.shard_tiles) * self.COLUMNS
        if self.OVERLAP:
            column = gl.minimum(column, last_start(self.N, self.COLUMNS, self.B_BY_K))
        return column

    @gluon.jit
    def limit(self, n):
        """Where the columns end that a tile may hold: those of the output, or of its shard."""
        limit = self.N
        if self.SHARDED:
            limit = gl.minimum(self.N, (n // self.shard_tiles + 1) * self.shard_columns)
        return limit

    @gluon.jit
    def rows(self, m, listed, LISTED: gl.constexpr):
        """The first row of each consumer in row m of tiles. LISTED: taken from the list."""
        first_rows = ()
        for w in gl.static_range(self.CONSUMERS):
            part = m * self.CONSUMERS + w
            if LISTED:
                part = gl.load(listed + part)
            first_rows = first_rows + (self.row(part),)
        return first_rows

    @gluon.jit
    def load(self, rows, n, step, stage, phase, leaf=0):
        """Load one step of k of a tile as soon as a stage is empty; returns (stage, phase) of the next."""
        k = step * self.STEP
        column = self.column(n)
        bar = self.ready.index(stage)
        mbarrier.wait(self.empty.index(stage), phase)
        bytes_per_stage: gl.constexpr = (
            self.CONSUMERS * self.a_desc.block_type.nbytes
            + self.b_desc.block_type.nbytes
            + self.rest_desc.block_type.nbytes * (self.REST > 0)
            + self.last_desc.block_type.nbytes * (self.LAST > 0)
        )
        mbarrier.expect(bar, bytes_per_stage)
        for w in gl.static_range(self.CONSUMERS):
            a = self.a_ring.index(stage * self.CONSUMERS + w)
            load_operand(self.a_desc, leaf, rows[w], k, bar, a, self.A_BY_K, self.BY_LEAF)
        load_operand(self.b_desc, leaf, column, k, bar, self.b_ring.index(stage), self.B_BY_K, self.BY_LEAF)
        if self.REST:
            column += self.COLUMNS - self.REST - self.LAST
            rest = self.rest_ring.index(stage)
            load_operand(self.rest_desc, leaf, column, k, bar, rest, self.B_BY_K, self.BY_LEAF)
        if self.LAST:
            column += self.REST
            last = self.last_ring.index(stage)
            load_operand(self.last_desc, leaf, column, k, bar, last, self.B_BY_K, self.BY_LEAF)
        return after(stage, phase, self.STAGES)


@gluon.jit
def load_tiles(pipe, listed=None, LISTED: gl.constexpr = False):
    """The producer: loads every step of k of each of the program's tiles, as soon as a stage is empty."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)  # of `empty`: a fresh barrier counts as one whose phase 1 is complete
    for t in range(gl.program_id(0), pipe.items(), gl.num_programs(0)):
        m, first, end, _ = pipe.item(t)
        rows = pipe.rows(m, listed, LISTED)
        for n in range(first, end):
            for step in range(pipe.steps):
                stage, phase = pipe.load(rows, n, step, stage, phase)
    gdc_launch_dependents()  # a product that follows may take the place of this program: see `product_kernel`


# Host side. Each layout is made once: Triton uses layouts as keys of compiled kernels, and finds one by
# identity much faster.


@cache
def accumulator_layout(columns: int) -> gl.NVMMADistributedLayout:
    """Register layout of one consumer's 64 x columns sums."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])
