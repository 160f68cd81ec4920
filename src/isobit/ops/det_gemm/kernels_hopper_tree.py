"""Hopper kernels of class tree8: a product whose k is cut into eight leaves, each a chain of its own.

    ((l0 + l1) + (l2 + l3)) + ((l4 + l5) + (l6 + l7))

The tree is fixed, and who computes which part of it is not. A tile of the output is computed by 1, 2, 4 or 8
programs, its *parts*, with 8, 4, 2 or 1 consecutive leaves each: a subtree. With several parts each program
stores its fp32 sums, and a second kernel adds them in the order of the tree. So a layer with few outputs and
a long k keeps all SMs busy, and its bits are those of one program that computes everything.

A program takes its leaves in pairs, one after the other. Up to two sums wait meanwhile: that of a pair, in
registers, and that of the first four leaves, in shared memory.

A leaf may end inside a step of k. Leaves are a dimension of the tensor maps, so TMA fills the step with zeros
there, which change no bit of a chain.
"""

from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run, unused
from isobit.frame.traced import decides
from isobit.kernels.hopper.descriptors import Matrix, leaf_descriptor, matrix
from isobit.kernels.hopper.pipeline import (
    PRODUCER_REGISTERS,
    ROWS,
    Pipe,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    kernel,
    record,
    tma,
)
from isobit.kernels.hopper.product import Output
from isobit.kernels.hopper.tiles import SHARED_BYTES, Tile, microseconds, tiles_of
from isobit.numerics import LEAVES
from isobit.ops.det_gemm.kernels_hopper import (
    TABLE_ROWS,
    finish,
    ones,
    operands,
    token_product,
    why_not_tma,
    why_not_token_product,
)
from isobit.ops.det_gemm.leaves import why_not_leaves

__all__ = ["ones", "product", "token_product", "why_not_product", "why_not_token_product"]

# Tiles, and in how many parts each is computed


class Plan(NamedTuple):
    tile: Tile
    parts: int

    @property
    def leaves(self) -> int:
        """Of a part."""
        return LEAVES // self.parts


#: Columns of tiles by consumer warpgroups. With more than one leaf a consumer has two accumulators, with more
#: than two a third one, which waits.
_DIRECT = {1: (64, 80, 128, 192, 256), 2: (128, 160, 192, 256)}
_SWAPPED = {
    1: (8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 128, 144, 160, 192),
    2: (16, 32, 64, 96, 128),
}
#: Sums of a consumer's thread, half a column each: what leaves registers for the loop.
_MOST_SUMS = 192


def _planned(consumers: int, columns: int, swapped: bool, itemsize: int, parts: int) -> Plan | None:
    """With as many stages as fit; None if there are too few, or too few registers."""
    leaves, rows = LEAVES // parts, 64 * consumers
    accumulators = 1 if leaves == 1 else 2 if leaves == 2 else 3
    if columns * accumulators // 2 > _MOST_SUMS:
        return None
    taken = rows * columns * (4 if leaves == LEAVES else 0) + rows * columns * (itemsize if parts == 1 else 0)
    step = 128 if rows + columns <= 160 else 64
    stages = min(12, (SHARED_BYTES - taken) // ((rows + columns) * step * 2))
    if stages < 3:
        return None
    return Plan(Tile(consumers, columns, step, stages, swapped, accumulators=accumulators), parts)


@cache
def tree_plans(itemsize: int) -> tuple[Plan, ...]:
    """Every plan for outputs with this many bytes per element."""
    made = [
        _planned(consumers, columns, swapped, itemsize, parts)
        for swapped, sizes in ((False, _DIRECT), (True, _SWAPPED))
        for consumers in sizes
        for columns in sizes[consumers]
        for parts in (1, 2, 4, 8)
    ]
    return tuple(plan for plan in made if plan is not None)


# Estimates, not fitted to timings of these kernels: to launch the kernel that adds the parts, and its bytes
# per microsecond, mostly from L2; and to end a chain and begin the next, in microseconds of each SM.
FOLD_US = 1.6
FOLD_BYTES_PER_US = 3.5e6
LEAF_US = 0.35


def choose_plan(M: int, N: int, K: int, sms: int, itemsize: int = 2) -> tuple[Plan, float]:
    """The plan for an M x N output over K, and the expected time in microseconds."""
    eights = max(-(-M // 8), 1)
    if eights <= TABLE_ROWS // 8:
        return _table(N, K, sms, itemsize)[eights - 1]
    return _chosen((8 * eights,), N, K, sms, itemsize)[0]


@decides
def _plan(M: int, N: int, K: int, sms: int, itemsize: int) -> Plan:
    return choose_plan(M, N, K, sms, itemsize)[0]


@lru_cache(maxsize=256)
def _table(N: int, K: int, sms: int, itemsize: int) -> list[tuple[Plan, float]]:
    return _chosen(range(8, TABLE_ROWS + 1, 8), N, K, sms, itemsize)


def plan_microseconds(
    plans: tuple[Plan, ...], M: Sequence[int], N: int, K: int, sms: int, itemsize: int
) -> np.ndarray:
    """Modelled times: a row for each M, a column for each plan."""
    tiles = tuple(plan.tile for plan in plans)
    parts = np.array([plan.parts for plan in plans])
    leaves = LEAVES // parts
    times = microseconds(tiles, M, N, K, sms, itemsize, parts, leaves * -(-K // (64 * LEAVES)))
    tiles_m, tiles_n = tiles_of(tiles, M, N)
    times += np.ceil(tiles_m * tiles_n * parts / sms) * (leaves - 1) * LEAF_US
    elements = np.array(M)[:, None] * N
    return times + (parts > 1) * (FOLD_US + (4 * parts + itemsize) * elements / FOLD_BYTES_PER_US)


def _chosen(M: Sequence[int], N: int, K: int, sms: int, itemsize: int) -> list[tuple[Plan, float]]:
    """The plan and the time for each M. If two times are equal to 10 ns, the plan with fewer programs."""
    plans = tree_plans(itemsize)
    times = np.round(plan_microseconds(plans, M, N, K, sms, itemsize), 2)
    tiles_m, tiles_n = tiles_of(tuple(plan.tile for plan in plans), M, N)
    best = np.lexsort((tiles_m * tiles_n * np.array([plan.parts for plan in plans]), times))[:, 0]
    return [(plans[i], float(row[i])) for i, row in zip(best, times, strict=True)]


# Kernels


@record
class Waiting:
    """Where the sum of the first four leaves waits, one buffer per consumer."""

    buffers: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    LEAVES: gl.constexpr  # of a program

    @gluon.jit
    def create(pipe, output, output_rest, LEAVES: gl.constexpr):
        buffers = pipe.a_ring  # unused with fewer leaves
        rest = pipe.a_ring
        if LEAVES == 8:
            buffers = _buffers(pipe, output)
            if pipe.REST:
                rest = _buffers(pipe, output_rest)
        return Waiting(buffers, rest, LEAVES)


@gluon.jit
def _buffers(pipe, output):
    """Rows are swizzled by 32 bytes, which four lanes store at once, so that no bank has two of them."""
    shape: gl.constexpr = [pipe.CONSUMERS, ROWS, output.COLUMNS]
    PHASES: gl.constexpr = 4 if output.COLUMNS >= 32 else output.COLUMNS // 8
    return gl.allocate_shared_memory(gl.float32, shape, gl.SwizzledSharedLayout(8, 1, PHASES, [1, 0]))


@gluon.jit
def _fold(total, two, pair, buffer, LAYOUT: gl.constexpr, LEAVES: gl.constexpr):
    """Add what waits for the sum of a pair of leaves, and let the result wait. Returns both; after the last
    pair the first is the sum of all leaves."""
    if LEAVES > 2:
        if pair % 2 == 0:
            two = total
        else:
            total = two + total
    if LEAVES == 8:
        if pair == 1:
            buffer.store(total)
        elif pair == 3:
            total = buffer.load(LAYOUT) + total
    return total, two


@gluon.jit
def _put_part(output, total, pipe, m, n, part, WHICH: gl.constexpr):
    """Store the sums of a part, in fp32."""
    i, j = output.place(pipe, m, n, WHICH)
    first = part.to(gl.int64) * output.M * output.N
    gl.store(output.out + first + output.offsets(i, j), total, mask=output.inside(i, j))


@gluon.jit
def _trees(WHICH: gl.constexpr, pipe, output, output_rest, waiting):
    """A consumer warpgroup that computes all leaves of its tiles. A tile is stored while the first step of
    the next one is in flight, so that the tensor cores have work meanwhile."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    acc = output.zeros()
    two = output.zeros()
    rest = output_rest.zeros()
    two_rest = output_rest.zeros()
    first = gl.program_id(0)
    m, n, _, _ = pipe.item(first)
    for t in range(first, pipe.items(), gl.num_programs(0)):
        for pair in range(4):
            # Zeros, although the first step overwrites them: so nothing keeps these registers between pairs,
            # where sums are added.
            one, one_rest, stage, phase = pipe.begin_both(
                output.zeros(), output_rest.zeros(), stage, phase, WHICH
            )
            if pair == 0:
                if t > first:
                    finish(output, acc, pipe, m, n, WHICH)
                    if pipe.REST:
                        finish(output_rest, rest, pipe, m, n, WHICH)
                m, n, _, _ = pipe.item(t)
            one, one_rest, stage, phase = pipe.finish_both(one, one_rest, pipe.steps - 1, stage, phase, WHICH)
            acc, rest, stage, phase = pipe.multiply_both(acc, rest, pipe.steps, stage, phase, WHICH)
            acc, two = _fold(one + acc, two, pair, waiting.buffers.index(WHICH), output.LAYOUT, 8)
            if pipe.REST:
                buffer = waiting.rest.index(WHICH)
                rest, two_rest = _fold(one_rest + rest, two_rest, pair, buffer, output_rest.LAYOUT, 8)
    if first < pipe.items():
        finish(output, acc, pipe, m, n, WHICH)
        if pipe.REST:
            finish(output_rest, rest, pipe, m, n, WHICH)
    if output.STAGED:
        tma.store_wait(0)


@gluon.jit
def _subtrees(WHICH: gl.constexpr, pipe, output, output_rest, waiting, PARTS: gl.constexpr):
    """A consumer warpgroup that computes one part of each of its tiles."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    acc = output.zeros()
    two = output.zeros()
    rest = output_rest.zeros()
    two_rest = output_rest.zeros()
    for t in range(gl.program_id(0), pipe.items() * PARTS, gl.num_programs(0)):
        m, n, _, _ = pipe.item(t % pipe.items())
        if waiting.LEAVES == 1:
            acc, rest, stage, phase = pipe.multiply_both(acc, rest, pipe.steps, stage, phase, WHICH)
        else:
            for pair in range(waiting.LEAVES // 2):
                one, one_rest, stage, phase = pipe.multiply_both(
                    output.zeros(), output_rest.zeros(), pipe.steps, stage, phase, WHICH
                )
                acc, rest, stage, phase = pipe.multiply_both(acc, rest, pipe.steps, stage, phase, WHICH)
                buffer = waiting.buffers.index(WHICH)
                acc, two = _fold(one + acc, two, pair, buffer, output.LAYOUT, waiting.LEAVES)
                if pipe.REST:
                    rest, two_rest = _fold(
                        one_rest + rest, two_rest, pair, buffer, output_rest.LAYOUT, waiting.LEAVES
                    )
        _put_part(output, acc, pipe, m, n, t // pipe.items(), WHICH)
        if pipe.REST:
            _put_part(output_rest, rest, pipe, m, n, t // pipe.items(), WHICH)


@gluon.jit
def _consume(WHICH: gl.constexpr, pipe, output, output_rest, waiting, PARTS: gl.constexpr):
    if PARTS == 1:
        _trees(WHICH, pipe, output, output_rest, waiting)
    else:
        _subtrees(WHICH, pipe, output, output_rest, waiting, PARTS)


@gluon.jit
def _load_leaves(pipe, PARTS: gl.constexpr, LEAVES: gl.constexpr):
    """The producer."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    for t in range(gl.program_id(0), pipe.items() * PARTS, gl.num_programs(0)):
        m, n, _, _ = pipe.item(t % pipe.items())
        first = t // pipe.items() * LEAVES
        rows = pipe.rows(m, None, False)
        for leaf in range(first, first + LEAVES):
            for step in range(pipe.steps):
                stage, phase = pipe.load(rows, n, step, stage, phase, leaf)
    gdc_launch_dependents()


@kernel
def tree_kernel(
    out, ld, M, N, steps, bias, a_desc, b_desc, out_desc, b_rest_desc, out_rest_desc,
    A_BY_K: gl.constexpr, B_BY_K: gl.constexpr, CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, REST: gl.constexpr,
    LAYOUT: gl.constexpr, LAYOUT_REST: gl.constexpr, PARTS: gl.constexpr, LEAVES: gl.constexpr,
    SWAPPED: gl.constexpr, HAS_BIAS: gl.constexpr, STAGED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """out [M, N] = a b + bias; or with several PARTS out [PARTS, M, N], fp32 sums of LEAVES each. `steps` are
    those of a leaf. If SWAPPED, M is the N of the weight."""
    pipe = Pipe.create(
        a_desc, b_desc, M, N, steps, SPANS=0, A_BY_K=A_BY_K, B_BY_K=B_BY_K, CONSUMERS=CONSUMERS,
        COLUMNS=COLUMNS, STEP=STEP, STAGES=STAGES, GROUP=GROUP, rest_desc=b_rest_desc, REST=REST,
        BY_COLUMNS=SWAPPED, OVERLAP=True, BY_LEAF=True,
    )  # fmt: skip
    WIDE: gl.constexpr = COLUMNS - REST
    output = Output.create(
        pipe, out, ld, M, N, bias, out_desc, OFFSET=0, COLUMNS=WIDE, LAYOUT=LAYOUT, SWAPPED=SWAPPED,
        HAS_EXTRA=HAS_BIAS, STAGED=STAGED,
    )  # fmt: skip
    output_rest = output
    if REST:
        output_rest = Output.create(
            pipe, out, ld, M, N, bias, out_rest_desc, OFFSET=WIDE, COLUMNS=REST, LAYOUT=LAYOUT_REST,
            SWAPPED=SWAPPED, HAS_EXTRA=HAS_BIAS, STAGED=STAGED,
        )  # fmt: skip
    waiting = Waiting.create(pipe, output, output_rest, LEAVES)
    gdc_wait()  # before anything is read or written: see `product_kernel`
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_consume, (0, pipe, output, output_rest, waiting, PARTS)),
             (_load_leaves, (pipe, PARTS, LEAVES))],
            [1], [PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consume, (0, pipe, output, output_rest, waiting, PARTS)),
             (_consume, (1, pipe, output, output_rest, waiting, PARTS)),
             (_load_leaves, (pipe, PARTS, LEAVES))],
            [4, 1], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


#: Elements that a program of `fold_kernel` adds.
FOLDED = gl.constexpr(512)


@kernel
def fold_kernel(
    out, parts, bias, size, N,
    PARTS: gl.constexpr, HAS_BIAS: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """out [size] = the sums of all parts [PARTS, size] in the order of the tree, + bias [N], rounded once. If
    WORDS, the size is given in words of four elements."""
    gdc_wait()
    gdc_launch_dependents()
    if WORDS:
        size = size * 4
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    at = gl.program_id(0).to(gl.int64) * FOLDED + gl.arange(0, FOLDED, layout)
    inside = at < size
    total = _folded(parts, at, size.to(gl.int64), inside, 0, PARTS)
    if HAS_BIAS:
        total += gl.load(bias + at % N, mask=inside, other=0).to(gl.float32)
    gl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _folded(parts, at, size, inside, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """The sum of COUNT parts from FIRST on, as a tree."""
    if COUNT == 1:
        return gl.load(parts + FIRST * size + at, mask=inside, other=0.0)
    else:
        HALF: gl.constexpr = COUNT // 2
        left = _folded(parts, at, size, inside, FIRST, HALF)
        return left + _folded(parts, at, size, inside, FIRST + HALF, HALF)


# Launchers


def why_not_product(a: Tensor, b: Tensor) -> str | None:
    reason = why_not_leaves(a) or why_not_tma(a=a, b=b)
    if reason is not None:
        return reason
    leaf = a.shape[-1] // LEAVES
    if leaf * a.element_size() % 16 and (matrix(a).is_row_major() or matrix(b).transposed().is_row_major()):
        return (
            f"TMA reads leaves of k that begin at multiples of 16 bytes: with k contiguous it must be a "
            f"multiple of {16 // a.element_size() * LEAVES}, and is {a.shape[-1]}"
        )
    return None


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, launch: Launch = run
) -> Tensor:
    """a [Z, M, K] times b [Z, K, N], plus bias [N]; or without a Z."""
    (*lead, M, K), N = a.shape, b.shape[-1]
    out = a.new_empty((*lead, M, N), dtype=out_dtype)
    plan = _plan(M, N, K, sm_count(a.device), out_dtype.itemsize)
    if 8 in plan.tile.parts and not matrix(a).is_row_major():
        wider = _planned(
            plan.tile.consumers, plan.tile.columns + 8, plan.tile.swapped, out_dtype.itemsize, plan.parts
        )
        assert wider is not None
        plan = wider
    for z in range(lead[0] if lead else 1):
        left, right = matrix(a[z] if z else a), matrix(b[z] if z else b)
        _multiply(out[z] if z else out, left, right, bias, plan, launch)
    return out


def _multiply(out: Tensor, a: Matrix, b: Matrix, bias: Tensor | None, plan: Plan, launch: Launch) -> None:
    """out = a b + bias."""
    rows, columns = a.rows, b.columns
    sums = out
    if plan.parts > 1:
        sums = out.new_empty((plan.parts, rows, columns), dtype=torch.float32)
    _leaves(sums, a, b, bias if plan.parts == 1 else None, plan, launch)
    if plan.parts > 1:
        size = rows * columns
        words = columns % 4 == 0
        launch(
            fold_kernel, (-(-size // FOLDED.value),), out, sums, unused(out) if bias is None else bias,
            size // 4 if words else size, columns,
            PARTS=plan.parts, HAS_BIAS=bias is not None, WORDS=words,
            num_warps=4, enable_fp_fusion=False, launch_pdl=True,
        )  # fmt: skip


def _leaves(sums: Tensor, a: Matrix, b: Matrix, bias: Tensor | None, plan: Plan, launch: Launch) -> None:
    """The product, or the sums of its parts."""
    tile, leaf, ld = plan.tile, a.columns // LEAVES, b.columns
    if tile.swapped:
        a, b = b.transposed(), a.transposed()
    M, N = a.rows, b.columns
    staged = plan.parts == 1 and ld * sums.element_size() % 16 == 0
    described = partial(leaf_descriptor, leaves=LEAVES)
    given, constants = operands(sums, a, b, bias, tile, staged, described)
    items = -(-M // tile.rows) * -(-N // tile.columns) * plan.parts
    launch(
        tree_kernel, (min(items, sm_count(sums.device)),),
        sums, ld, M, N, -(-leaf // tile.step), *given,
        PARTS=plan.parts, LEAVES=plan.leaves, **constants,
    )  # fmt: skip
