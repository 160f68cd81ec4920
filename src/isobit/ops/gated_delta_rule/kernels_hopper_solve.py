"""The inverse of a chunk's triangular system on Hopper: steps 2 and 3 of class gdr/1.

    T_tc = fma(-A_tj, T_jc, T_tc) for j = 0, 1, .., t - 1, from the row of the identity

A program has four systems. The tensor cores compute k k^T of one after another, and then every warp solves a
system of its own: nothing in a solution depends on another one. A lane has two columns, and goes from one
block of 16 rows to the next:

    the rows of the block, in registers, take the rows of T before the block, one after another
    the block itself: a row that is finished is taken by the rows after it
    it is stored, for the blocks after it

So each element takes its terms in ascending order. A row of T that is read serves 16 rows, and an element
of A, which all lanes read at the same time, two columns.

Where rows of k are to be divided by their norm first, that is done here, in the tile that the product reads,
and they are stored for the kernels after this one: a kernel of its own would read and write all of them once
more.

-A is stored transposed, [j, i], above the diagonal of a square; T takes the rest of it. [j, system, i]: a row
j of all systems is a place that a loop can compute.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.frame.launch import Launch, run, unused
from isobit.kernels.hopper.descriptors import descriptor, matrix
from isobit.kernels.hopper.pieces import barrier
from isobit.kernels.hopper.pipeline import (
    accumulator_layout,
    fence_async_shared,
    gl,
    gluon,
    kernel,
    mbarrier,
    reinterpreted,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from isobit.ops.delta_rule.kernels_hopper import BY_ROWS, rows_of
from isobit.ops.gated_delta_rule.kernels_triton import tiles_of
from isobit.ops.gated_delta_rule.model import CHUNK, EPS

#: Systems of a program, one a warp; rows of a block; rows of T whose loads do not wait for each other.
SYSTEMS, BLOCK, AT_ONCE = gl.constexpr(4), gl.constexpr(16), gl.constexpr(4)

#: Rows of a chunk, and what is added to the square of a norm.
C, _EPS = gl.constexpr(CHUNK), gl.constexpr(float(EPS))

#: [system, row, column]: whole columns in a lane; and tiles of 8 rows and 4 columns, which need two thirds of
#: the loads for as many multiply-adds.
OF_TILES = gl.constexpr(gl.BlockedLayout([1, 8, 4], [1, 2, 16], [4, 1, 1], [2, 1, 0]))
OF_BLOCK = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))
ONE_EACH = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
OF_PRODUCT = gl.constexpr(accumulator_layout(64))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
CUBE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))

#: Registers per thread: two programs on an SM, as many as its shared memory holds.
REGISTERS = 255


#: Buffers for k, and the most columns of it for which there is room next to the systems. With one buffer bits
#: differed on an H200, at K = 128 and 8192 tokens. Scratch lay in k then during the last product, which may
#: be why; one buffer was not tried again.
BUFFERS, WIDEST = 2, 128


@gluon.jit
def _clamped(at, low, high):
    """The integer at this address, clamped to [low, high]: unchecked input."""
    return gl.minimum(gl.maximum(gl.load(at), low), high).to(gl.int32)


@gluon.jit
def chunk_of(tile, cu_seqlens, T, S, PACKED: gl.constexpr):
    """(first row, rows) of the chunk of a tile, as `kernels_triton.chunk_of` has them."""
    if PACKED:
        sequence = tile * 0
        after = sequence + S
        while after - sequence > 1:
            middle = (sequence + after) // 2
            begun = _clamped(cu_seqlens + middle, 0, T) // C + middle <= tile
            sequence = gl.where(begun, middle, sequence)
            after = gl.where(begun, after, middle)
        first = _clamped(cu_seqlens + sequence, 0, T)
        count = _clamped(cu_seqlens + sequence + 1, first, T) - first
        start = gl.maximum(tile - (first // C + sequence), 0) * C
    else:
        tiles = gl.cdiv(T, C)
        sequence = tile // tiles
        start = (tile - sequence * tiles) * C
        first = sequence * T
        count = T
    return first + start, gl.minimum(count - start, C)


@gluon.jit
def _of_chunk(at, row, rows, hv, HV):
    """A number of each row of the chunk; 0 where there is no row."""
    i = gl.arange(0, C, ONE_EACH)
    return gl.load(at + (row + i).to(gl.int64) * HV + hv, mask=i < rows, other=0.0).to(gl.float32)


@gluon.jit
def divided(tile, LAYOUT: gl.constexpr):
    """Rows of a tile divided by their norm, with the operations of `norm_kernel`."""
    x = tile.load(LAYOUT).to(gl.float32)
    total = x * x
    for _ in gl.static_range(8):
        if total.shape[1] > 2:
            total = gl.sum(gl.reshape(total, (C, 2, total.shape[1] // 2)), 1)
    size = gl.sqrt_rn(gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, LAYOUT)) + _EPS)
    inverse = gl.div_rn(gl.full_like(size, 1.0), size)
    return (x * gl.expand_dims(inverse, 1)).to(tile.dtype)


@gluon.jit
def _normalize(keys, normal, row, rows, head, H):
    """Rows of a tile divided by their norm: there, and in memory."""
    K: gl.constexpr = keys.shape[1]
    i = gl.arange(0, C, gl.SliceLayout(1, BY_ROWS))
    own = divided(keys, BY_ROWS)
    keys.store(own)
    fence_async_shared()
    c = gl.expand_dims(gl.arange(0, K, gl.SliceLayout(0, BY_ROWS)), 0)
    at = ((row + i).to(gl.int64) * H + head) * K
    gl.store(
        gl.multiple_of(normal + gl.expand_dims(at, 1) + c, (1, 16)), own, mask=gl.expand_dims(i < rows, 1)
    )


@gluon.jit
def _system(keys, beta, gate, HAS_G: gl.constexpr):
    """-A transposed, [j, i]; what is not above the diagonal, and what belongs to no row, is anything. The
    wait names keys too: or scratch of the conversions before it may lie in them while the product reads."""
    kk = warpgroup_mma(
        keys, keys.permute((1, 0)), gl.zeros((C, C), gl.float32, OF_PRODUCT), use_acc=False, is_async=True
    )
    factor = gl.expand_dims(gl.convert_layout(-beta, gl.SliceLayout(0, OF_PRODUCT)), 0)
    if HAS_G:
        of_i = gl.expand_dims(gl.convert_layout(gate, gl.SliceLayout(0, OF_PRODUCT)), 0)
        of_j = gl.expand_dims(gl.convert_layout(gate, gl.SliceLayout(1, OF_PRODUCT)), 1)
        factor = factor * gl.exp2(of_i - of_j)
    kk, _ = warpgroup_mma_wait(0, deps=(kk, keys))
    return kk * factor


@gluon.jit
def _take(block, squares, j, t, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """The rows of a block after row j, whose row of T is t."""
    a = squares.index(j).slice(FIRST, BLOCK, 1).load(gl.SliceLayout(2, LAYOUT))
    c = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))), 0)
    t = gl.expand_dims(gl.where(c <= j, t, 0.0), 1)
    return gl.fma(gl.expand_dims(a, 2), t, block)


@gluon.jit
def _places(LAYOUT: gl.constexpr):
    """(rows of a block, columns), [1, 16, 1] and [1, 1, 64]."""
    i = gl.arange(0, BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    c = gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    return gl.expand_dims(gl.expand_dims(i, 0), 2), gl.expand_dims(gl.expand_dims(c, 0), 1)


@gluon.jit
def _solved(squares, FIRST: gl.constexpr):
    """16 rows of T of all systems, from row FIRST on."""
    i, c = _places(OF_TILES)
    block = gl.where(i + FIRST == c, gl.full((SYSTEMS, BLOCK, C), 1.0, gl.float32, OF_TILES), 0.0)
    for first in range(0, FIRST, AT_ONCE):
        for s in gl.static_range(AT_ONCE):
            t = squares.index(first + s).load(gl.SliceLayout(1, OF_TILES))
            block = _take(block, squares, first + s, t, FIRST, OF_TILES)
    block = gl.convert_layout(block, OF_BLOCK)
    i, c = _places(OF_BLOCK)
    for s in gl.static_range(BLOCK - 1):
        t = gl.sum(gl.where(i == s, block, -0.0), 1)  # which selects a row
        block = gl.where(i > s, _take(block, squares, FIRST + s, t, FIRST, OF_BLOCK), block)
    return gl.where(c <= i + FIRST, block, 0.0)


@gluon.jit
def _finish(squares, whole, inverses, place, there, HV, FIRST: gl.constexpr):
    """Solve a block, and store it for the caller and for the blocks after it."""
    i, c = _places(OF_BLOCK)
    solved = _solved(squares, FIRST)
    at = (place + (i + FIRST) * HV) * C + c
    live = i + FIRST < there
    gl.store(gl.multiple_of(inverses + at, (1, 1, 16)), solved.to(inverses.dtype.element_ty), mask=live)
    if FIRST + BLOCK < C:
        rows = whole.slice(FIRST, BLOCK).permute((1, 0, 2))
        old = rows.load(OF_BLOCK)
        rows.store(gl.where(c <= i + FIRST, solved, old))
        barrier()  # here, or the compiler has one for every step of the next block


@kernel
def solve_kernel(
    beta, g2, cu_seqlens, inverses, normal, T, S, HV, group, count, k_desc,
    K: gl.constexpr, PACKED: gl.constexpr, HAS_G: gl.constexpr, NORMED: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """T, rounded, of four systems: chunks and value heads, of which there are `count`. NORMED: rows of k are
    divided by their norm, and stored in `normal`."""
    number = gl.program_id(0) * SYSTEMS
    keys = gl.allocate_shared_memory(k_desc.dtype, [BUFFERS] + k_desc.block_type.shape, k_desc.layout)
    squares = gl.allocate_shared_memory(gl.float32, [C, SYSTEMS, C], FLAT)  # one by one
    by_system = reinterpreted(squares, gl.float32, [C, SYSTEMS * C], FLAT)
    whole = reinterpreted(squares, gl.float32, [C, SYSTEMS, C], CUBE)
    ready = gl.allocate_shared_memory(gl.int64, [SYSTEMS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(SYSTEMS):
        mbarrier.init(ready.index(s), count=1)
    fence_async_shared()  # TMA signals these barriers, and must see them initialised
    of_system = gl.arange(0, SYSTEMS, gl.SliceLayout(1, gl.SliceLayout(2, OF_BLOCK)))
    place, there = of_system.to(gl.int64) * 0, of_system * 0
    row, rows, betas, gates = (), (), (), ()
    for s in gl.static_range(SYSTEMS):
        n = gl.minimum(number + s, count - 1)
        own_row, own_rows = chunk_of(n // HV, cu_seqlens, T, S, PACKED)
        own_rows = gl.where(number + s < count, own_rows, 0)
        row, rows = row + (own_row,), rows + (own_rows,)
        betas = betas + (_of_chunk(beta, own_row, own_rows, n % HV, HV),)
        if HAS_G:
            gates = gates + (_of_chunk(g2, own_row, own_rows, n % HV, HV),)
        else:
            gates = gates + (betas[s],)
        place = gl.where(of_system == s, own_row.to(gl.int64) * HV + n % HV, place)
        there = gl.where(of_system == s, own_rows, there)
        if s < BUFFERS:
            _load_keys(k_desc, keys, ready, s, own_row, n % HV // group, K, BUFFERS)
    for s in gl.static_range(SYSTEMS):
        mbarrier.wait(ready.index(s), 0)
        if NORMED:
            hv = gl.minimum(number + s, count - 1) % HV
            few = gl.where(hv % group == 0, rows[s], 0)  # the first value head of a key head stores
            _normalize(keys.index(s % BUFFERS), normal, row[s], few, hv // group, HV // group)
        own = _system(keys.index(s % BUFFERS), betas[s], gates[s], HAS_G)
        by_system.slice(s * C, C, 1).store(own)
        if s + BUFFERS < SYSTEMS:
            barrier()  # all warps have finished the product
            hv = gl.minimum(number + s + BUFFERS, count - 1) % HV
            _load_keys(k_desc, keys, ready, s + BUFFERS, row[s + BUFFERS], hv // group, K, BUFFERS)
    barrier()
    place = gl.expand_dims(gl.expand_dims(place, 1), 2)
    there = gl.expand_dims(gl.expand_dims(there, 1), 2)
    for block in gl.static_range(C // BLOCK):
        _finish(squares, whole, inverses, place, there, HV, block * BLOCK)


@gluon.jit
def _load_keys(k_desc, keys, ready, s, row, head, K: gl.constexpr, BUFFERS: gl.constexpr):
    mbarrier.expect(ready.index(s), k_desc.block_type.nbytes)
    tma_load(k_desc, [row, head * K], ready.index(s), keys.index(s % BUFFERS))


def solve(
    k: Tensor, beta: Tensor, g2: Tensor | None, cu_seqlens: Tensor | None, launch: Launch = run,
    normal: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """T, rounded to the dtype of k: [B, T, HV, 64]. K is at most WIDEST. `normal`, if given, takes the rows
    of k in chunks, divided by their norm, and T is that of these rows."""
    B, T, HV = beta.shape
    H, K = k.shape[2:]
    S = B if cu_seqlens is None else len(cu_seqlens) - 1
    inverses = torch.empty(B, T, HV, CHUNK, dtype=k.dtype, device=k.device)
    systems = tiles_of(T, S, cu_seqlens) * HV
    if B * T == 0:
        return inverses
    options: dict[str, Any] = {"num_warps": 4, "maxnreg": REGISTERS, "enable_fp_fusion": False}
    launch(
        solve_kernel, (-(-systems // SYSTEMS.value),),
        beta, *(unused(beta) if t is None else t for t in (g2, cu_seqlens)), inverses,
        unused(inverses) if normal is None else normal, T, S, HV, HV // H, systems,
        descriptor(matrix(rows_of(k)), 64, K), K=K, PACKED=cu_seqlens is not None, HAS_G=g2 is not None,
        NORMED=normal is not None, BUFFERS=BUFFERS, **options,
    )  # fmt: skip
    return inverses
