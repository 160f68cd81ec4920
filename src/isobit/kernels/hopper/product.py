"""Products on Hopper for more than one op: their outputs, packing rows for TMA, and the segmented sum of
class seg16/512."""

from functools import lru_cache

import triton.language as tl
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run, unused
from isobit.frame.traced import decides
from isobit.kernels.hopper.descriptors import descriptor, matrix, operand_descriptor
from isobit.kernels.hopper.pipeline import (
    PRODUCER_REGISTERS,
    ROWS,
    Pipe,
    accumulator_layout,
    fence_async_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    kernel,
    mbarrier,
    put_tile,
    record,
    tma,
    tma_load,
    triton_kernel,
)
from isobit.kernels.hopper.tiles import FIXED_US, Tile, fitted, microseconds
from isobit.kernels.host.token_stream import BLOCK, SEGMENT, Stream

#: Two sets of sums (the segment's and the total) leave registers for 128 columns. 192 as 128 and 64 fit too,
#: and were 13 to 30 % slower on an H200. Small tiles are for outputs that would leave most SMs idle.
_SUMS = tuple(
    fitted(consumers, columns, swapped=False, itemsize=4, step=64, group=8, accumulators=2)
    for consumers, columns in ((2, 128), (1, 128), (1, 64))
)
#: Their times beyond the start, as multiples of what the model of products expects. On an H200 64 x 64 took
#: 1.1 to 1.4 times that, for eight small outputs (tests/golden/sums_h200.json).
_LONGER = (1.0, 1.0, 1.15)


@lru_cache(maxsize=4096)
def choose_sum_tile(M: int, N: int, K: int, sms: int, itemsize: int = 4) -> tuple[Tile, float]:
    """The tile for an M x N output of segmented sums over K rows, and the expected microseconds."""
    (times,) = microseconds(_SUMS, (M,), N, K, sms, itemsize)
    times = FIXED_US + (times - FIXED_US) * _LONGER
    best = int(times.argmin())
    return _SUMS[best], float(times[best])


#: What depends on the tile grows with the rows of the sums in one proportion for all tiles, so the choice for
#: this many is that for any number: a batch of a new size finds it made.
_ROWS_OF_CHOICE = 4096


@decides
def sum_tile(M: int, N: int, sms: int, itemsize: int) -> Tile:
    """The tile for an M x N output of segmented sums."""
    return choose_sum_tile(M, N, _ROWS_OF_CHOICE, sms, itemsize)[0]


# Kernels

#: Rows per segment of the stream, seg16/512, and per block.
SEGMENT_ROWS = gl.constexpr(SEGMENT)
BLOCK_ROWS = gl.constexpr(BLOCK)


@record
class Output:
    """Where a consumer stores its tiles, and what is added before they are rounded: an M x N matrix with
    contiguous rows (columns if SWAPPED) and leading dimension `ld`. It takes COLUMNS columns of a tile, from
    OFFSET on: those of one accumulator.

    `extra` is the bias, one per column (one per row if SWAPPED), or the initial value of sums over tokens.
    STAGED tiles are stored through shared memory and TMA.
    """

    out: gl.tensor
    ld: gl.tensor
    M: gl.tensor
    N: gl.tensor
    extra: gl.tensor
    desc: tma.tensor_descriptor
    staging: gl.shared_memory_descriptor
    OFFSET: gl.constexpr
    COLUMNS: gl.constexpr
    LAYOUT: gl.constexpr
    SWAPPED: gl.constexpr
    HAS_EXTRA: gl.constexpr
    STAGED: gl.constexpr

    @gluon.jit
    def create(
        pipe, out, ld, M, N, extra, desc, OFFSET: gl.constexpr, COLUMNS: gl.constexpr,
        LAYOUT: gl.constexpr, SWAPPED: gl.constexpr, HAS_EXTRA: gl.constexpr, STAGED: gl.constexpr,
        staging=None,
    ):  # fmt: skip
        if staging is None:
            staging = pipe.a_ring  # unused unless STAGED
            if STAGED:
                shape: gl.constexpr = [pipe.CONSUMERS] + desc.block_type.shape
                staging = gl.allocate_shared_memory(desc.dtype, shape, desc.layout)
        return Output(
            out, ld, M, N, extra, desc, staging, OFFSET, COLUMNS, LAYOUT, SWAPPED, HAS_EXTRA, STAGED
        )

    @gluon.jit
    def zeros(self):
        """An accumulator."""
        return gl.zeros((ROWS, self.COLUMNS), gl.float32, self.LAYOUT)

    @gluon.jit
    def place(self, pipe, m, n, WHICH: gl.constexpr):
        """(rows, columns) of a consumer's part of tile (m, n)."""
        i = pipe.row(m * pipe.CONSUMERS + WHICH) + gl.arange(0, ROWS, gl.SliceLayout(1, self.LAYOUT))
        j = pipe.column(n) + self.OFFSET + gl.arange(0, self.COLUMNS, gl.SliceLayout(0, self.LAYOUT))
        return i, j

    @gluon.jit
    def offsets(self, i, j):
        if self.SWAPPED:
            return i[:, None] + j.to(gl.int64)[None, :] * self.ld
        else:
            return i.to(gl.int64)[:, None] * self.ld + j[None, :]

    @gluon.jit
    def inside(self, i, j):
        return (i < self.M)[:, None] & (j < self.N)[None, :]

    @gluon.jit
    def store(self, pipe, acc, m, n, WHICH: gl.constexpr):
        """Round once and store."""
        if self.STAGED:
            row = pipe.row(m * pipe.CONSUMERS + WHICH)
            column = pipe.column(n) + self.OFFSET
            others: gl.constexpr = 1 if pipe.REST and 2 * pipe.REST != pipe.COLUMNS else 0
            put_tile(acc, self.desc, self.staging, row, column, WHICH, self.SWAPPED, others)
        else:
            i, j = self.place(pipe, m, n, WHICH)
            values = acc.to(self.out.dtype.element_ty)
            gl.store(self.out + self.offsets(i, j), values, mask=self.inside(i, j))


@gluon.jit
def outputs(
    pipe, out, ld, M, N, bias, desc, rest_desc, LAYOUT: gl.constexpr, LAYOUT_REST: gl.constexpr,
    SWAPPED: gl.constexpr, HAS_BIAS: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    """One for each accumulator of a tile: its first columns, and the REST of them; twice the same if there
    is no REST."""
    WIDE: gl.constexpr = pipe.COLUMNS - pipe.REST
    output = Output.create(
        pipe, out, ld, M, N, bias, desc, OFFSET=0, COLUMNS=WIDE, LAYOUT=LAYOUT, SWAPPED=SWAPPED,
        HAS_EXTRA=HAS_BIAS, STAGED=STAGED,
    )  # fmt: skip
    rest = output
    if pipe.REST == WIDE:  # equal halves leave through one buffer
        rest = Output.create(
            pipe, out, ld, M, N, bias, rest_desc, OFFSET=WIDE, COLUMNS=pipe.REST, LAYOUT=LAYOUT_REST,
            SWAPPED=SWAPPED, HAS_EXTRA=HAS_BIAS, STAGED=STAGED, staging=output.staging,
        )  # fmt: skip
    elif pipe.REST:
        rest = Output.create(
            pipe, out, ld, M, N, bias, rest_desc, OFFSET=WIDE, COLUMNS=pipe.REST, LAYOUT=LAYOUT_REST,
            SWAPPED=SWAPPED, HAS_EXTRA=HAS_BIAS, STAGED=STAGED,
        )  # fmt: skip
    return output, rest


@record
class Start:
    """The initial value of sums, loaded while the first segment is computed, through the buffers that the
    output tiles use later. Two barriers per consumer, as for a stage of the ring:

        empty[w]   the previous tile has left the buffer   consumer -> producer
        ready[w]   the initial value has arrived           producer -> consumer
    """

    desc: tma.tensor_descriptor
    staging: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGED: gl.constexpr

    @gluon.jit
    def create(pipe, output, desc, STAGED: gl.constexpr):
        ready = pipe.ready  # unused unless STAGED
        empty = pipe.empty
        if STAGED:
            ready = gl.allocate_shared_memory(gl.int64, [pipe.CONSUMERS, 1], mbarrier.MBarrierLayout())
            empty = gl.allocate_shared_memory(gl.int64, [pipe.CONSUMERS, 1], mbarrier.MBarrierLayout())
            for w in gl.static_range(pipe.CONSUMERS):
                mbarrier.init(ready.index(w), count=1)
                mbarrier.init(empty.index(w), count=1)
            fence_async_shared()
        return Start(desc, output.staging, ready, empty, STAGED)

    @gluon.jit
    def release_buffer(self, WHICH: gl.constexpr):
        """A consumer calls this at the beginning of a tile: its previous tile leaves the buffer, and the
        producer may load into it."""
        tma.store_wait(0)
        mbarrier.arrive(self.empty.index(WHICH))

    @gluon.jit
    def load(self, pipe, rows, n, step, turn):
        """The producer calls this after each step of k. It loads once the ring has wrapped around in this
        tile: by then the consumers work on the same tile, so the producer does not stall."""
        if step == gl.minimum(pipe.STAGES, pipe.steps - 1):
            for w in gl.static_range(pipe.CONSUMERS):
                mbarrier.wait(self.empty.index(w), turn)
                mbarrier.expect(self.ready.index(w), self.desc.block_type.nbytes)
                tma_load(self.desc, [rows[w], n * pipe.COLUMNS], self.ready.index(w), self.staging.index(w))

    @gluon.jit
    def wait_for(self, turn, LAYOUT: gl.constexpr, WHICH: gl.constexpr):
        """Wait for the value to which a consumer adds the first segment."""
        mbarrier.wait(self.ready.index(WHICH), turn)
        return self.staging.index(WHICH).load(LAYOUT)


@gluon.jit
def _initial(pipe, output, m, n, WHICH: gl.constexpr):
    """The value to which a consumer adds the segments of tile (m, n), unless it comes through `Start`."""
    total = output.zeros()
    if output.HAS_EXTRA:
        i, j = output.place(pipe, m, n, WHICH)
        total = gl.load(output.extra + output.offsets(i, j), mask=output.inside(i, j), other=0.0)
    return total


@gluon.jit
def _store_sums(pipe, output, total, times, m, n, WHICH: gl.constexpr, SCALED: gl.constexpr):
    """Store the sums of tile (m, n)."""
    if SCALED:
        total = total * times
    output.store(pipe, total, m, n, WHICH)


@gluon.jit
def _steps(pipe, blocks, s, HAS_BLOCKS: gl.constexpr):
    """How many steps segment s has."""
    FULL: gl.constexpr = SEGMENT_ROWS // pipe.STEP
    steps = gl.minimum(pipe.steps - s * FULL, FULL)
    if HAS_BLOCKS:
        steps = gl.load(blocks + s)
    return steps


@gluon.jit
def _segments(
    WHICH: gl.constexpr, pipe, output, start, blocks, count, times,
    HAS_BLOCKS: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """A consumer of `token_product`: a fresh chain for each segment, folded in ascending order; SCALED: the
    total is multiplied by a number. A tile is stored while the first step of the next one is in flight, so
    that the tensor cores have work meanwhile."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    segments = gl.cdiv(pipe.steps, SEGMENT_ROWS // pipe.STEP)
    if HAS_BLOCKS:
        segments = gl.load(count)
    first = gl.program_id(0)
    end = pipe.items()
    m, n, _, _ = pipe.item(first)
    if segments == 0:
        for t in range(first, end, gl.num_programs(0)):
            m, n, _, _ = pipe.item(t)
            _store_sums(pipe, output, _initial(pipe, output, m, n, WHICH), times, m, n, WHICH, SCALED)
        end = first
    # The first step of a segment overwrites what the one before has left, so this is never set to zero again.
    acc = output.zeros()
    total = output.zeros()
    for t in range(first, end, gl.num_programs(0)):
        acc, stage, phase = pipe.begin_chain(acc, stage, phase, WHICH)
        if t > first:
            _store_sums(pipe, output, total, times, m, n, WHICH, SCALED)
        m, n, _, _ = pipe.item(t)
        total = _initial(pipe, output, m, n, WHICH)
        if start.STAGED:
            start.release_buffer(WHICH)
        steps = _steps(pipe, blocks, 0, HAS_BLOCKS)
        acc, stage, phase = pipe.finish_chain(acc, steps - 1, stage, phase, WHICH)
        if start.STAGED:
            total = start.wait_for(turn, output.LAYOUT, WHICH)
        total += acc
        for s in range(1, segments):
            acc, stage, phase = pipe.multiply(acc, _steps(pipe, blocks, s, HAS_BLOCKS), stage, phase, WHICH)
            total += acc
        turn = turn ^ 1
    if first < end:
        _store_sums(pipe, output, total, times, m, n, WHICH, SCALED)
    if output.STAGED:
        tma.store_wait(0)


@gluon.jit
def _load_sums(pipe, start):
    """The producer of `token_product`."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    turn = gl.to_tensor(0)
    for t in range(gl.program_id(0), pipe.items(), gl.num_programs(0)):
        m, n, _, _ = pipe.item(t)
        rows = pipe.rows(m, None, False)
        for step in range(pipe.steps):
            stage, phase = pipe.load(rows, n, step, stage, phase)
            if start.STAGED:
                start.load(pipe, rows, n, step, turn)
        turn = turn ^ 1
    gdc_launch_dependents()


@kernel
def sum_kernel(
    out, ld, M, N, K, init, first, blocks, count, factor, a_desc, b_desc, out_desc, init_desc,
    A_BY_K: gl.constexpr, B_BY_K: gl.constexpr, CONSUMERS: gl.constexpr, COLUMNS: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr,
    HAS_INIT: gl.constexpr, HAS_BLOCKS: gl.constexpr, COUNTED_K: gl.constexpr, COUNTED_ROWS: gl.constexpr,
    STAGED: gl.constexpr, STAGED_INIT: gl.constexpr, SCALED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """out [M, N] = init + a b in segments of k.

    HAS_BLOCKS: there are `count` segments, and segment s has blocks[s] blocks from slot first[s] on; without,
    all of K is divided into full segments. COUNTED_K, COUNTED_ROWS: K, M is a number on the device. STAGED,
    STAGED_INIT: out, init go through shared memory and TMA. A sum that may have no terms reads init directly,
    or writes nothing if init is out. SCALED: the sums are multiplied by the factor."""
    gdc_wait()  # before anything is read or written: see `product_kernel`
    if HAS_BLOCKS:  # segments are contiguous, so the end of the last one is the end of all
        last = gl.load(count) - 1
        K = gl.load(first + last, mask=last >= 0, other=0)
        K += gl.load(blocks + last, mask=last >= 0, other=0) * BLOCK_ROWS
    elif COUNTED_K:
        K = gl.load(K)
    steps = gl.cdiv(K, STEP)
    if COUNTED_ROWS:
        M = gl.load(M)
    if COUNTED_K and STAGED_INIT:  # in place, and without terms
        M = gl.where(K == 0, 0, M)
    times = gl.to_tensor(1.0)
    if SCALED:
        times = gl.load(factor)
    pipe = Pipe.create(
        a_desc, b_desc, M, N, steps, SPANS=0, A_BY_K=A_BY_K, B_BY_K=B_BY_K,
        CONSUMERS=CONSUMERS, COLUMNS=COLUMNS, STEP=STEP, STAGES=STAGES, GROUP=GROUP,
    )  # fmt: skip
    output = Output.create(
        pipe, out, ld, M, N, init, out_desc, OFFSET=0, COLUMNS=COLUMNS, LAYOUT=LAYOUT, SWAPPED=False,
        HAS_EXTRA=HAS_INIT and not STAGED_INIT, STAGED=STAGED,
    )  # fmt: skip
    start = Start.create(pipe, output, init_desc, STAGED_INIT)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [(_segments, (0, pipe, output, start, blocks, count, times, HAS_BLOCKS, SCALED)),
             (_load_sums, (pipe, start))],
            [1], [PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_segments, (0, pipe, output, start, blocks, count, times, HAS_BLOCKS, SCALED)),
             (_segments, (1, pipe, output, start, blocks, count, times, HAS_BLOCKS, SCALED)),
             (_load_sums, (pipe, start))],
            [4, 1], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip


@triton_kernel
def pack_kernel(
    out, rows, source, words_out, stride_row, stride_column, columns,
    WORD: tl.constexpr, WHOLE: tl.constexpr, ROW_MAJOR: tl.constexpr,
    SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Slot s of out = row rows[s] of the source, or zeros for a gap. TMA cannot gather, so it reads this
    copy.

    A word is 16 bytes, WORD elements. The row stride of out is in words, and so is that of the source if it
    is ROW_MAJOR; columns count words if they are WHOLE ones."""
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.load(rows + slot).to(tl.int64)
    if WHOLE:
        columns = columns * WORD
    inside = (j < columns)[None, :]
    if ROW_MAJOR:
        at = tl.multiple_of(source + row[:, None] * (stride_row * WORD) + j[None, :], (1, 16))
    else:
        at = source + row[:, None] * stride_row + j.to(tl.int64)[None, :] * stride_column
    values = tl.load(at, mask=(row >= 0)[:, None] & inside, other=0.0)
    to = tl.multiple_of(out + slot[:, None] * (words_out * WORD) + j[None, :], (1, 16))
    tl.store(to, values, mask=inside)


# Launchers


def pack(t: Tensor, rows: Tensor, launch: Launch = run, out: Tensor | None = None) -> Tensor:
    """The rows of t in the slots given by `rows`, a multiple of 64 slots; zeros where it is -1. The row
    stride of the result is a multiple of 16 bytes, so TMA can read it whatever t was."""
    slots, columns = rows.shape[0], t.shape[1]
    word = 16 // t.element_size()
    if out is None:
        out = t.new_empty(slots, -(-columns // word) * word)[:, :columns]
    whole = columns % word == 0
    row_stride = t.stride(0) if t.shape[0] > 1 else 0  # the stride of a single row is unused
    row_major = t.stride(1) == 1 and row_stride % word == 0 and t.data_ptr() % 16 == 0
    launch(
        pack_kernel, (slots // BLOCK, -(-columns // 256)),
        out, rows, t, out.stride(0) // word, row_stride // word if row_major else row_stride, t.stride(1),
        columns // word if whole else columns,
        WORD=word,
        WHOLE=whole,
        ROW_MAJOR=row_major,
        SLOTS=BLOCK,
        COLUMNS=256,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def sum_into(
    out: Tensor, x: Tensor, dy: Tensor, *, init: Tensor | None = None, stream: Stream | None = None,
    counted: Tensor | None = None, rows: Tensor | None = None, factor: Tensor | None = None,
    launch: Launch = run,
) -> None:  # fmt: skip
    """out = init + dy^T x in segments of 512 rows of x and dy, in out's dtype; multiplied by a factor, if
    there is one. The rows are those of a packed stream, or the first `counted` ones followed by zeros up to a
    multiple of 64, or all. Only the first `rows` rows of out are computed. `counted` and `rows` are numbers
    on the device."""
    a, b = matrix(dy).transposed(), matrix(x)
    M, N, K = a.rows, b.columns, b.rows
    sms = sm_count(out.device)
    tile = sum_tile(M, N, sms, out.element_size())
    a_desc, a_by_k = operand_descriptor(a, 64, tile.step)
    b_desc, b_by_k = operand_descriptor(b.transposed(), tile.columns, tile.step)
    staged = N * out.element_size() % 16 == 0
    out_desc = init_desc = descriptor(matrix(out), 64, tile.columns) if staged else unused(a_desc)
    staged_init = False
    if init is not None and staged and stream is None and (counted is None or init is out):
        # It is loaded through the buffers of the output, and added to the first segment. There is a first
        # segment, or init is out and stays as it is.
        staged_init = init.dtype == out.dtype and init.data_ptr() % 16 == 0
        if staged_init and init is not out:
            init_desc = descriptor(matrix(init), 64, tile.columns)
    at_launch, registers = tile.registers
    tiles = -(-M // tile.rows) * -(-N // tile.columns)
    tables = (unused(out),) * 3 if stream is None else (stream.first, stream.blocks, stream.count)
    launch(
        sum_kernel, (min(tiles, sms),),
        out, out.stride(0),
        M if rows is None else rows,
        N,
        K if counted is None else counted,
        unused(out) if init is None else init,
        *tables,
        unused(out) if factor is None else factor,
        a_desc, b_desc, out_desc, init_desc,
        A_BY_K=a_by_k,
        B_BY_K=b_by_k,
        CONSUMERS=tile.consumers,
        COLUMNS=tile.columns,
        STEP=tile.step,
        STAGES=tile.stages,
        GROUP=tile.group,
        LAYOUT=accumulator_layout(tile.columns),
        HAS_INIT=init is not None,
        HAS_BLOCKS=stream is not None,
        COUNTED_K=counted is not None,
        COUNTED_ROWS=rows is not None,
        STAGED=staged,
        STAGED_INIT=staged_init,
        SCALED=factor is not None,
        REGISTERS=registers,
        num_warps=4,
        maxnreg=at_launch,
        enable_fp_fusion=False,
        launch_pdl=True,
    )  # fmt: skip
