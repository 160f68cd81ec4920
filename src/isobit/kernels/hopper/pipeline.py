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
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
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

from isobit.frame.cache_key import CacheKey
from isobit.frame.traced import recalled

__all__ = [
    "PRODUCER_REGISTERS", "ROWS", "Matrix", "Pipe", "TensorDescriptor", "accumulator_layout", "after",
    "aligned_for_tma", "descriptor", "fence_async_shared", "gdc_launch_dependents", "gdc_wait", "gl", "gluon",
    "kernel", "load_tiles", "matrix", "mbarrier", "operand_descriptor", "put_tile", "record", "tma",
    "tma_load", "tma_store", "triton_kernel", "warpgroup_mma", "warpgroup_mma_wait",
]  # fmt: skip

# Triton 3.9 has other names for the two copies than 3.6 and 3.7.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

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
def _item(t, tiles_m, spans, GROUP: gl.constexpr):
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
def _last_start(size, LENGTH: gl.constexpr, BY_K: gl.constexpr):
    """Where the last LENGTH of `size` rows or columns begin. If they are contiguous in memory, at a multiple
    of 16 bytes: TMA starts at no other place, so up to 7 of them may be outside."""
    start = gl.maximum(size - LENGTH, 0)
    if not BY_K:
        start = gl.cdiv(start, 8) * 8
    return start


@record
class Pipe:
    """The ring, and its tiles: tiles_m x tiles_n of them, each with `steps` steps of k. Every row of tiles is
    divided into `spans` spans whose lengths differ by at most one tile: SPANS of them, or one per tile if
    SPANS is 0 or larger than the number of tiles.

    The number of columns of a tensor must be a power of two. So a tile may consist of two tensors, 160
    columns as 128 and 32: the last REST columns have a descriptor, a ring and an accumulator of their own.

    Programs that start one after the other take tiles that read the same columns of b; BY_COLUMNS: the same
    rows of a.

    OVERLAP: the last tile of a row or column ends where the output ends, and computes some of the one before
    again. Otherwise TMA fills it with zeros, which takes longer: on an H200 2 ns for a row of 128 bytes."""

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    rest_desc: tma.tensor_descriptor
    a_ring: gl.shared_memory_descriptor
    b_ring: gl.shared_memory_descriptor
    rest_ring: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    M: gl.tensor
    N: gl.tensor
    tiles_m: gl.tensor
    tiles_n: gl.tensor
    spans: gl.tensor
    steps: gl.tensor
    SPANS: gl.constexpr
    A_BY_K: gl.constexpr  # k is contiguous in a
    B_BY_K: gl.constexpr
    CONSUMERS: gl.constexpr
    COLUMNS: gl.constexpr
    STEP: gl.constexpr
    STAGES: gl.constexpr
    GROUP: gl.constexpr
    REST: gl.constexpr
    BY_COLUMNS: gl.constexpr
    OVERLAP: gl.constexpr

    @gluon.jit
    def create(
        a_desc, b_desc, M, N, steps, SPANS: gl.constexpr,
        A_BY_K: gl.constexpr, B_BY_K: gl.constexpr, CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr,
        STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, rest_desc=None, REST: gl.constexpr = 0,
        BY_COLUMNS: gl.constexpr = False, OVERLAP: gl.constexpr = False,
    ):  # fmt: skip
        """The ring of an M x N output, all stages empty. COLUMNS include the REST."""
        a_shape: gl.constexpr = [STAGES * CONSUMERS] + a_desc.block_type.shape
        b_shape: gl.constexpr = [STAGES] + b_desc.block_type.shape
        a_ring = gl.allocate_shared_memory(a_desc.dtype, a_shape, a_desc.layout)
        b_ring = gl.allocate_shared_memory(b_desc.dtype, b_shape, b_desc.layout)
        rest_ring = b_ring  # unused without REST
        if REST:
            rest_shape: gl.constexpr = [STAGES] + rest_desc.block_type.shape
            rest_ring = gl.allocate_shared_memory(rest_desc.dtype, rest_shape, rest_desc.layout)
        else:
            rest_desc = b_desc
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
        return Pipe(
            a_desc, b_desc, rest_desc, a_ring, b_ring, rest_ring, ready, empty,
            M, N, gl.cdiv(M, CONSUMERS * ROWS), tiles_n, spans, steps,
            SPANS, A_BY_K, B_BY_K, CONSUMERS, COLUMNS, STEP, STAGES, GROUP, REST,
            BY_COLUMNS, OVERLAP,
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
            span, m = _item(t, self.spans, self.tiles_m, self.GROUP)
        else:
            m, span = _item(t, self.tiles_m, self.spans, self.GROUP)
        first, end = span, span + 1  # for SPANS = 0, where span * tiles_n might overflow 32 bits
        if self.SPANS:
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
    def issue(self, acc, use_acc, stage, phase, WHICH: gl.constexpr, REST: gl.constexpr = False):
        """Issue the products of one stage once it has arrived; those of the REST columns if REST."""
        a = self.a_ring.index(stage * self.CONSUMERS + WHICH)
        if REST:
            b = self.rest_ring.index(stage)
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
        acc, _, stage, phase = self.multiply_both(acc, acc, steps, stage, phase, WHICH)
        return acc, stage, phase

    @gluon.jit
    def begin_chain(self, acc, stage, phase, WHICH: gl.constexpr):
        """The first step of a chain, in the registers of `acc`. It is still in flight on return: see
        `finish_chain`."""
        acc = self.issue(acc, False, stage, phase, WHICH)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        stage, phase = after(stage, phase, self.STAGES)
        return acc, stage, phase

    @gluon.jit
    def finish_chain(self, acc, steps, stage, phase, WHICH: gl.constexpr):
        """The other steps of a chain; on return it is complete."""
        for _ in range(steps):
            acc = self.issue(acc, True, stage, phase, WHICH)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(self.empty.index(self.before(stage)))
            stage, phase = after(stage, phase, self.STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(self.empty.index(self.before(stage)))
        return acc, stage, phase

    @gluon.jit
    def multiply_both(self, acc, rest, steps, stage, phase, WHICH: gl.constexpr):
        """The same for all columns of a tile, with the REST columns, if any, in the registers of `rest`.

        The `wgmma` groups of one stage stay in flight while the next are issued. A stage is released when the
        groups after it have been issued and its own are complete.
        """
        for step in range(steps):
            acc = self.issue(acc, step > 0, stage, phase, WHICH)
            if self.REST:
                rest = self.issue(rest, step > 0, stage, phase, WHICH, True)
                acc, rest = warpgroup_mma_wait(2, deps=(acc, rest))
            else:
                acc = warpgroup_mma_wait(1, deps=(acc,))
            # The previous stage is recomputed here, because the frontend treats a variable that is assigned
            # another loop variable as loop-invariant.
            mbarrier.arrive(self.empty.index(self.before(stage)), pred=step > 0)
            stage, phase = after(stage, phase, self.STAGES)
        if self.REST:
            acc, rest = warpgroup_mma_wait(0, deps=(acc, rest))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(self.empty.index(self.before(stage)))
        return acc, rest, stage, phase

    @gluon.jit
    def row(self, part):
        """The first of the 64 rows of a part."""
        row = part * ROWS
        if self.OVERLAP:
            row = gl.minimum(row, _last_start(self.M, ROWS, self.A_BY_K))
        return row

    @gluon.jit
    def column(self, n):
        """The first column of the n-th tile of a row."""
        column = n * self.COLUMNS
        if self.OVERLAP:
            column = gl.minimum(column, _last_start(self.N, self.COLUMNS, self.B_BY_K))
        return column

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
    def load(self, rows, n, step, stage, phase):
        """Load one step of k of a tile as soon as a stage is empty; returns (stage, phase) of the next."""
        k = step * self.STEP
        column = self.column(n)
        bar = self.ready.index(stage)
        mbarrier.wait(self.empty.index(stage), phase)
        bytes_per_stage: gl.constexpr = (
            self.CONSUMERS * self.a_desc.block_type.nbytes
            + self.b_desc.block_type.nbytes
            + self.rest_desc.block_type.nbytes * (self.REST > 0)
        )
        mbarrier.expect(bar, bytes_per_stage)
        for w in gl.static_range(self.CONSUMERS):
            a = self.a_ring.index(stage * self.CONSUMERS + w)
            if self.A_BY_K:
                tma_load(self.a_desc, [rows[w], k], bar, a)
            else:
                tma_load(self.a_desc, [k, rows[w]], bar, a)
        if self.B_BY_K:
            tma_load(self.b_desc, [column, k], bar, self.b_ring.index(stage))
        else:
            tma_load(self.b_desc, [k, column], bar, self.b_ring.index(stage))
        if self.REST:
            column += self.COLUMNS - self.REST
            if self.B_BY_K:
                tma_load(self.rest_desc, [column, k], bar, self.rest_ring.index(stage))
            else:
                tma_load(self.rest_desc, [k, column], bar, self.rest_ring.index(stage))
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

_GLUON_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@cache
def _shared_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], _GLUON_TYPES[dtype])


@cache
def accumulator_layout(columns: int) -> gl.NVMMADistributedLayout:
    """Register layout of one consumer's 64 x columns sums."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


class Matrix(NamedTuple):
    """Rows x columns in the memory of a tensor, from its first element on. Launchers need several of these
    per call, and a view of a tensor takes microseconds to make."""

    base: Tensor
    rows: int
    columns: int
    row_stride: int  # elements from a row to the next
    column_stride: int

    def transposed(self) -> "Matrix":
        return Matrix(self.base, self.columns, self.rows, self.column_stride, self.row_stride)

    def is_row_major(self) -> bool:
        """Whether rows are contiguous and begin at multiples of 16 bytes (a single row may begin
        anywhere)."""
        return (self.columns == 1 or self.column_stride == 1) and (self.rows == 1 or self.rows_aligned())

    def rows_aligned(self) -> bool:
        return self.row_stride > 0 and self.row_stride * self.base.element_size() % 16 == 0


def matrix(t: Tensor) -> Matrix:
    """The matrix in the last two dimensions of a tensor; the first one if there are several."""
    *_, rows, columns = t.shape
    *_, row_stride, column_stride = t.stride()
    return Matrix(t, rows, columns, row_stride, column_stride)


def aligned_for_tma(m: Matrix) -> bool:
    """Whether TMA can read this matrix in place, row-major or column-major."""
    return m.base.data_ptr() % 16 == 0 and (m.is_row_major() or m.transposed().is_row_major())


#: Fields of descriptors other than the tensor, by matrix form and box.
_descriptors: dict[CacheKey, dict[str, Any]] = {}


def descriptor(m: Matrix, rows: int, columns: int) -> TensorDescriptor:
    """The TMA descriptor for rows x columns boxes of a row-major matrix."""
    base, size, width, stride, _ = m
    key = (size, width, stride, base.dtype, rows, columns)
    known = recalled(_descriptors, key, _form, m, rows, columns)
    # Triton validates every descriptor when it is made, which takes longer than all the rest. It has already
    # validated one of this form; only the address differs.
    assert base.data_ptr() % 16 == 0, "TMA reads what begins at a multiple of 16 bytes"
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(known, base=base)
    return made


def _form(m: Matrix, rows: int, columns: int) -> dict[str, Any]:
    """Fields that descriptors of such a matrix have in common, and a list for tensor maps: see
    `entry.Entry`."""
    stride, size = m.row_stride, m.base.element_size()
    if not m.rows_aligned():  # a single row: its stride is unused, but TMA needs a valid one
        assert m.rows == 1, f"TMA cannot read rows that are {stride} elements apart"
        stride = 16 * (m.columns * size // 16 + 1) // size
    known = _checked(m.base.dtype, m.columns, stride, rows, columns)
    return {**known, "shape": [m.rows, m.columns], "maps": []}


@lru_cache(maxsize=4096)
def _checked(dtype: torch.dtype, width: int, stride: int, rows: int, columns: int) -> dict[str, Any]:
    """The fields of a descriptor for a matrix with one row: Triton does not check the number of rows."""
    layout = _shared_layout(rows, columns, dtype)
    made = TensorDescriptor(_Nowhere(dtype), [1, width], [stride, 1], [rows, columns], layout)
    return vars(made) | {"base": None}


class _Nowhere(NamedTuple):
    """The parts of a tensor that Triton checks."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        return 0


def operand_descriptor(m: Matrix, side: int, step: int) -> tuple[TensorDescriptor, bool]:
    """Descriptor of an operand [side, k], in tiles of `side` by `step`, and whether k is contiguous."""
    if m.is_row_major():
        return descriptor(m, side, step), True
    return descriptor(m.transposed(), step, side), False
