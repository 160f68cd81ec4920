"""Hopper kernels of class tree8: a product whose k is cut into eight leaves, each a chain of its own.

    ((l0 + l1) + (l2 + l3)) + ((l4 + l5) + (l6 + l7))

The tree is fixed, and who computes which part of it is not. A tile of the output is computed whole by one
program, or in 2, 4 or 8 *parts*: subtrees of 4, 2 or 1 consecutive leaves. A part is stored in fp32, and a
second kernel adds the parts of a tile in the order of the tree. So a layer with few outputs and a long k
keeps all SMs busy. If there are more tiles than SMs, full rounds of them are computed whole, and those that
are left over may be computed in parts. The bits are the same.

A program takes leaves in pairs, a step of one and a step of the other in turn: the tensor cores always have
work of a second chain. Up to two sums wait meanwhile: that of a pair, in registers, and that of the first
four leaves, in shared memory.

A leaf may end inside a step of k. Leaves are a dimension of the tensor maps, so TMA fills the step with zeros
there, which change no bit of a chain.
"""

import math
from functools import partial

import torch
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run, unused
from isobit.kernels.hopper.descriptors import Matrix, leaf_descriptor, matrix
from isobit.kernels.hopper.pipeline import (
    PRODUCER_REGISTERS,
    ROWS,
    Pipe,
    after,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    kernel,
    last_start,
    mbarrier,
    record,
    tile_at,
    tma,
    warpgroup_mma_wait,
)
from isobit.kernels.hopper.product import outputs
from isobit.numerics import LEAVES
from isobit.ops.det_gemm.kernels_hopper import (
    finish,
    ones,
    operands,
    token_product,
    why_not_tma,
    why_not_token_product,
)
from isobit.ops.det_gemm.kernels_hopper import product as chain_product
from isobit.ops.det_gemm.leaves import why_not_leaves
from isobit.ops.det_gemm.plans_hopper_tree import Plan, fitting, plan_of, planned

__all__ = ["ones", "product", "token_product", "why_not_product", "why_not_token_product"]

# Kernels


@record
class Waiting:
    """Where the sum of the first four leaves waits, one buffer per consumer."""

    buffers: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor

    @gluon.jit
    def create(pipe, output, output_rest, WHOLE: gl.constexpr):
        buffers = pipe.a_ring  # unused with fewer leaves
        rest = pipe.a_ring
        if WHOLE:
            buffers = _buffers(pipe, output)
            if pipe.REST:
                rest = _buffers(pipe, output_rest)
        return Waiting(buffers, rest)


@gluon.jit
def _buffers(pipe, output):
    """Rows are swizzled by 32 bytes, which four lanes store at once, so that no bank has two of them."""
    shape: gl.constexpr = [pipe.CONSUMERS, ROWS, output.COLUMNS]
    PHASES: gl.constexpr = 4 if output.COLUMNS >= 32 else output.COLUMNS // 8
    return gl.allocate_shared_memory(gl.float32, shape, gl.SwizzledSharedLayout(8, 1, PHASES, [1, 0]))


@gluon.jit
def _half_step(pipe, one, one_rest, other, other_rest, begun, stage, phase, WHICH: gl.constexpr):
    """Issue the next step of `one`. What was issued before is complete on return, and keeps its stage."""
    one = pipe.issue(one, begun, stage, phase, WHICH)
    if pipe.REST:
        one_rest = pipe.issue(one_rest, begun, stage, phase, WHICH, 1)
        one, one_rest, other, other_rest = warpgroup_mma_wait(2, deps=(one, one_rest, other, other_rest))
    else:
        one, other = warpgroup_mma_wait(1, deps=(one, other))
    return one, one_rest, other, other_rest


@gluon.jit
def _pair(pipe, output, output_rest, second, second_rest, stage, phase, WHICH: gl.constexpr):
    """The sum of two leaves, computed in turn; the second one in the registers given."""
    # Zeros, although the first step overwrites them: so nothing keeps these registers between pairs, where
    # sums are added.
    first = output.zeros()
    first_rest = output_rest.zeros()
    for step in range(pipe.steps):
        first, first_rest, second, second_rest = _half_step(
            pipe, first, first_rest, second, second_rest, step > 0, stage, phase, WHICH
        )
        mbarrier.arrive(pipe.empty.index(pipe.before(stage)), pred=step > 0)
        stage, phase = after(stage, phase, pipe.STAGES)
        second, second_rest, first, first_rest = _half_step(
            pipe, second, second_rest, first, first_rest, step > 0, stage, phase, WHICH
        )
        mbarrier.arrive(pipe.empty.index(pipe.before(stage)))
        stage, phase = after(stage, phase, pipe.STAGES)
    if pipe.REST:
        second, second_rest = warpgroup_mma_wait(0, deps=(second, second_rest))
    else:
        second = warpgroup_mma_wait(0, deps=(second,))
    mbarrier.arrive(pipe.empty.index(pipe.before(stage)))
    if pipe.REST:
        second_rest = first_rest + second_rest
    return first + second, second_rest, stage, phase


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
def _subtree(
    pipe, output, output_rest, waiting, acc, rest, two, two_rest, stage, phase,
    WHICH: gl.constexpr, LEAVES: gl.constexpr,
):  # fmt: skip
    """The sum of LEAVES leaves, in `acc` and `rest`; `two` and `two_rest` are for what waits."""
    if LEAVES == 1:
        acc, rest, _, stage, phase = pipe.multiply_parts(acc, rest, rest, pipe.steps, stage, phase, WHICH)
    else:
        for pair in range(LEAVES // 2):
            acc, rest, stage, phase = _pair(pipe, output, output_rest, acc, rest, stage, phase, WHICH)
            acc, two = _fold(acc, two, pair, waiting.buffers.index(WHICH), output.LAYOUT, LEAVES)
            if pipe.REST:
                buffer = waiting.rest.index(WHICH)
                rest, two_rest = _fold(rest, two_rest, pair, buffer, output_rest.LAYOUT, LEAVES)
    return acc, rest, two, two_rest, stage, phase


@gluon.jit
def _put_part(output, total, at):
    """Store a consumer's sums, at `at`: groups of 8 columns, each with its 64 rows. So the lanes of a warp
    store one piece of memory at a time."""
    i = gl.arange(0, ROWS, gl.SliceLayout(1, output.LAYOUT))
    j = output.OFFSET + gl.arange(0, output.COLUMNS, gl.SliceLayout(0, output.LAYOUT))
    to = at + (i * 8)[:, None] + (j // 8 * (8 * ROWS) + j % 8)[None, :]
    gl.store(gl.multiple_of(to, (1, 16)), total)


@gluon.jit
def _consume(
    WHICH: gl.constexpr, pipe, output, output_rest, waiting, parts, first,
    WHOLE: gl.constexpr, PARTS: gl.constexpr, LEAVES: gl.constexpr, TOTAL: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: the first tiles whole, the others in parts."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    acc = output.zeros()
    two = output.zeros()
    rest = output_rest.zeros()
    two_rest = output_rest.zeros()
    if WHOLE:
        for t in range(gl.program_id(0), first, gl.num_programs(0)):
            acc, rest, two, two_rest, stage, phase = _subtree(
                pipe, output, output_rest, waiting, acc, rest, two, two_rest, stage, phase, WHICH, TOTAL
            )
            m, n, _, _ = pipe.item(t)
            finish(output, acc, pipe, m, n, WHICH)
            if pipe.REST:
                finish(output_rest, rest, pipe, m, n, WHICH)
        if output.STAGED:
            tma.store_wait(0)
    if PARTS > 1:
        others = pipe.items() - first
        size: gl.constexpr = pipe.COLUMNS * ROWS
        for t in range(gl.program_id(0), others * PARTS, gl.num_programs(0)):
            acc, rest, two, two_rest, stage, phase = _subtree(
                pipe, output, output_rest, waiting, acc, rest, two, two_rest, stage, phase, WHICH, LEAVES
            )
            part = t % others * PARTS + t // others
            at = parts + (part * pipe.CONSUMERS + WHICH).to(gl.int64) * size
            _put_part(output, acc, at)
            if pipe.REST:
                _put_part(output_rest, rest, at)


@gluon.jit
def _load_leaves(pipe, t, begin, stage, phase, LEAVES: gl.constexpr):
    """Load LEAVES leaves of a tile, in the order in which `_subtree` takes their steps."""
    m, n, _, _ = pipe.item(t)
    rows = pipe.rows(m, None, False)
    if LEAVES == 1:
        for step in range(pipe.steps):
            stage, phase = pipe.load(rows, n, step, stage, phase, begin)
    else:
        for pair in range(LEAVES // 2):
            for step in range(pipe.steps):
                stage, phase = pipe.load(rows, n, step, stage, phase, begin + 2 * pair)
                stage, phase = pipe.load(rows, n, step, stage, phase, begin + 2 * pair + 1)
    return stage, phase


@gluon.jit
def _produce(
    pipe, first, WHOLE: gl.constexpr, PARTS: gl.constexpr, LEAVES: gl.constexpr, TOTAL: gl.constexpr
):  # fmt: skip
    """The producer."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    if WHOLE:
        for t in range(gl.program_id(0), first, gl.num_programs(0)):
            stage, phase = _load_leaves(pipe, t, 0, stage, phase, TOTAL)
    if PARTS > 1:
        others = pipe.items() - first
        for t in range(gl.program_id(0), others * PARTS, gl.num_programs(0)):
            stage, phase = _load_leaves(pipe, first + t % others, t // others * LEAVES, stage, phase, LEAVES)
    gdc_launch_dependents()


@kernel
def tree_kernel(
    out, ld, M, N, steps, bias, a_desc, b_desc, out_desc, b_rest_desc, out_rest_desc, parts, first,
    A_BY_K: gl.constexpr, B_BY_K: gl.constexpr, CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, REST: gl.constexpr,
    LAYOUT: gl.constexpr, LAYOUT_REST: gl.constexpr, WHOLE: gl.constexpr, PARTS: gl.constexpr,
    LEAVES: gl.constexpr, TOTAL: gl.constexpr, SWAPPED: gl.constexpr, HAS_BIAS: gl.constexpr,
    STAGED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """out [M, N] = a b + bias for the `first` tiles; of the others fp32 sums of LEAVES leaves, PARTS of them,
    in `parts`. `steps` are those of a leaf, and TOTAL is how many leaves k has. If SWAPPED, M is the N of
    the weight."""
    pipe = Pipe.create(
        a_desc, b_desc, M, N, steps, SPANS=0, A_BY_K=A_BY_K, B_BY_K=B_BY_K, CONSUMERS=CONSUMERS,
        COLUMNS=COLUMNS, STEP=STEP, STAGES=STAGES, GROUP=GROUP, rest_desc=b_rest_desc, REST=REST,
        BY_COLUMNS=SWAPPED, OVERLAP=True, BY_LEAF=True,
    )  # fmt: skip
    output, output_rest = outputs(
        pipe, out, ld, M, N, bias, out_desc, out_rest_desc, LAYOUT, LAYOUT_REST, SWAPPED, HAS_BIAS, STAGED
    )
    waiting = Waiting.create(pipe, output, output_rest, WHOLE and TOTAL == 8)
    gdc_wait()  # before anything is read or written: see `product_kernel`
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_consume, (0, pipe, output, output_rest, waiting, parts, first, WHOLE, PARTS, LEAVES, TOTAL)),
             (_produce, (pipe, first, WHOLE, PARTS, LEAVES, TOTAL))],
            [1], [PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_consume, (0, pipe, output, output_rest, waiting, parts, first, WHOLE, PARTS, LEAVES, TOTAL)),
             (_consume, (1, pipe, output, output_rest, waiting, parts, first, WHOLE, PARTS, LEAVES, TOTAL)),
             (_produce, (pipe, first, WHOLE, PARTS, LEAVES, TOTAL))],
            [4, 1], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


@kernel
def fold_kernel(
    out, ld, M, N, bias, parts, first, tiles_m, tiles_n,
    A_BY_K: gl.constexpr, B_BY_K: gl.constexpr, CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr,
    GROUP: gl.constexpr, PARTS: gl.constexpr, FOLDED: gl.constexpr, SWAPPED: gl.constexpr,
    EIGHTS: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """FOLDED elements of a tile after the `first`: out = the sums of its parts in the order of the tree +
    bias, rounded once. EIGHTS: rows are stored eight elements at a time; their length is a multiple of 8."""
    gdc_wait()
    gdc_launch_dependents()
    size: gl.constexpr = COLUMNS * ROWS  # of a consumer
    per_tile: gl.constexpr = CONSUMERS * size
    each: gl.constexpr = per_tile // FOLDED
    t = gl.program_id(0) // each
    begin = gl.program_id(0) % each * FOLDED
    at = gl.arange(0, FOLDED, gl.BlockedLayout([8 if EIGHTS else 4], [32], [4], [0]))
    total = _folded(parts + t.to(gl.int64) * (PARTS * per_tile) + begin, at, per_tile, 0, PARTS)
    if SWAPPED:
        n, m = tile_at(first + t, tiles_n, tiles_m, GROUP)
    else:
        m, n = tile_at(first + t, tiles_m, tiles_n, GROUP)
    # As in `Pipe`: the last tile ends where the output does.
    row = gl.minimum((m * CONSUMERS + begin // size) * ROWS, last_start(M, ROWS, A_BY_K))
    column = gl.minimum(n * COLUMNS, last_start(N, COLUMNS, B_BY_K)) + begin % size // ROWS
    i = row + at // 8 % ROWS
    if EIGHTS:
        eight = column // 8 + at // (8 * ROWS)
        j = eight * 8 + at % 8
        inside = (i < M) & (eight < N // 8)
        to = gl.multiple_of(out + (i.to(gl.int64) * (ld // 8) + eight) * 8 + at % 8, 16)
    else:
        j = column + at // (8 * ROWS) * 8 + at % 8
        inside = (i < M) & (j < N)
        to = out + (j.to(gl.int64) * ld + i if SWAPPED else i.to(gl.int64) * ld + j)
    if HAS_BIAS:
        total += gl.load(bias + (i if SWAPPED else j), mask=inside, other=0).to(gl.float32)
    gl.store(to, total.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def _folded(parts, at, size, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """The sum of COUNT parts from FIRST on, as a tree."""
    if COUNT == 1:
        return gl.load(gl.multiple_of(parts + FIRST * size + at, 16))
    else:
        HALF: gl.constexpr = COUNT // 2
        left = _folded(parts, at, size, FIRST, HALF)
        return left + _folded(parts, at, size, FIRST + HALF, HALF)


# Launchers


def why_not_product(a: Tensor, b: Tensor, leaves: int = LEAVES) -> str | None:
    reason = why_not_leaves(a, leaves) or why_not_tma(a=a, b=b)
    if reason is not None or leaves == 1:
        return reason
    leaf = a.shape[-1] // leaves
    if leaf * a.element_size() % 16 and (matrix(a).is_row_major() or matrix(b).transposed().is_row_major()):
        return (
            f"TMA reads leaves of k that begin at multiples of 16 bytes: with k contiguous it must be a "
            f"multiple of {16 // a.element_size() * leaves}, and is {a.shape[-1]}"
        )
    return None


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype, leaves: int = LEAVES,
    launch: Launch = run,
) -> Tensor:  # fmt: skip
    """a [Z, M, K] times b [Z, K, N], plus bias [N]; or without a Z. K is that of some `leaves` of the tree: a
    single one is a chain."""
    if leaves == 1:
        return chain_product(a, b, bias, out_dtype, launch=launch)
    (*lead, M, K), N = a.shape, b.shape[-1]
    out = a.new_empty((*lead, M, N), dtype=out_dtype)
    plan = plan_of(M, N, K, sm_count(a.device), out_dtype.itemsize, leaves)
    if 8 in plan.tile.parts and not matrix(a).is_row_major():
        wider = planned(
            plan.tile.consumers, plan.tile.columns + 8, plan.tile.swapped, out_dtype.itemsize, plan.parts,
            plan.whole and plan.parts == 1, leaves, plan.tile.per_sm,
        )  # fmt: skip
        assert wider is not None
        plan = wider
    for z in range(len(a) if lead else 1):
        left, right = matrix(a[z] if z else a), matrix(b[z] if z else b)
        _multiply(out[z] if z else out, left, right, bias, plan, launch)
    return out


def _multiply(out: Tensor, a: Matrix, b: Matrix, bias: Tensor | None, plan: Plan, launch: Launch) -> None:
    """out = a b + bias."""
    leaf, ld, sms = a.columns // plan.total, b.columns, sm_count(out.device)
    tile = fitting(plan.tile, leaf)
    if tile.swapped:
        a, b = b.transposed(), a.transposed()
    M, N = a.rows, b.columns
    staged = plan.whole and ld * out.element_size() % 16 == 0
    given, constants = operands(out, a, b, bias, tile, staged, partial(leaf_descriptor, leaves=plan.total))
    tiles_m, tiles_n = -(-M // tile.rows), -(-N // tile.columns)
    first = plan.first(tiles_m * tiles_n, sms)
    others, area = tiles_m * tiles_n - first, tile.rows * tile.columns
    parts = out.new_empty((others, plan.parts, area), dtype=torch.float32) if plan.parts > 1 else unused(out)
    launch(
        tree_kernel, (min(first + others * plan.parts, tile.per_sm * sms),),
        out, ld, M, N, -(-leaf // tile.step), *given, parts, first,
        WHOLE=plan.whole, PARTS=plan.parts, LEAVES=plan.leaves, TOTAL=plan.total, **constants,
    )  # fmt: skip
    if plan.parts == 1:
        return
    folded = 512 * math.gcd(tile.columns // 8, 4)
    taken = ("A_BY_K", "B_BY_K", "CONSUMERS", "COLUMNS", "GROUP", "SWAPPED", "HAS_BIAS", "enable_fp_fusion")
    launch(
        fold_kernel, (others * area // folded,), out, ld, M, N, given[0], parts, first, tiles_m, tiles_n,
        PARTS=plan.parts, FOLDED=folded, EIGHTS=not tile.swapped and ld % 8 == 0,
        **{name: constants[name] for name in taken}, num_warps=4, launch_pdl=True,
    )  # fmt: skip
