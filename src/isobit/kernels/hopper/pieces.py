"""Splits of the vocabulary that several programs share.

Programs that take whole splits are all busy until the end only if the number of splits is a multiple of the
number of programs. So a split may be cut into *pieces*, runs of neighbouring tiles. The program that has the
first piece folds its tiles and hands the sums of its lanes over; the program that has the next piece
multiplies its first tile, waits for these sums, and continues from them. A lane's logits are added in the
order of the split, so no bit depends on the cut.

Pieces are numbered by their place in their split, then by split: all first pieces, then all second ones. A
program takes the lowest number that no other has, its *ticket*, from a counter in memory. Its producer warp
does so, and publishes the ticket to the consumers in shared memory, at the stage where the piece begins.

No program waits forever, even if only some of them run: a piece waits for one with a lower ticket, which a
running program has taken. A program computes its pieces in the order of their tickets. So the lowest ticket
that is not complete waits for no other, and is computed.

Memory of a call:

    counter  []                      tickets that were taken, 0 at first
    folded   [parts, splits]         tiles of the split whose sums are there, 0 at first
    sums     [parts, splits, 3, 64, 4]   m, s and t of the lanes of a part's 64 rows

Every thread reads the sums that the same thread of another program has stored, and stores its own there. The
threads of a consumer warpgroup wait for one another after their stores, and then one of them releases
`folded`; every thread acquires it before it reads.
"""

from isobit.kernels.hopper.lse import LANES, SPLITS
from isobit.kernels.hopper.pipeline import ROWS, gdc_launch_dependents, gl, gluon, mbarrier, record

# Triton 3.6 has another name for it.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

_SPLITS = gl.constexpr(SPLITS)

#: A number in shared memory, and how the threads of a producer warp and of a consumer warpgroup hold it.
_ONE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_OF_A_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
_OF_FOUR_WARPS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

#: Every thread waits itself, so what it loads afterwards is ordered after what was released. The threads of a
#: warp then continue together, because products and shuffles need all of them.
_ACQUIRE = gl.constexpr("""{
.reg .pred early;
.reg .s32 found;
again:
ld.acquire.gpu.global.s32 found, [$1];
setp.lt.s32 early, found, $2;
@early bra again;
bar.warp.sync 0xffffffff;
mov.s32 $0, found;
}""")


def counters_of(N: int) -> int:
    """How many numbers have to be 0 before a launch for N rows: the counter and `folded`. A tile of two parts
    may have one without any rows."""
    return 1 + -(-N // 128) * 2 * SPLITS


def sums_of(N: int) -> int:
    """How many sums there are."""
    return -(-N // 128) * 2 * SPLITS * 3 * 64 * 4


@record
class Pieces:
    """How splits are cut, and the memory through which sums are handed over."""

    counter: gl.tensor
    folded: gl.tensor
    sums: gl.tensor
    tickets: gl.shared_memory_descriptor  # of the piece that begins at each stage
    each: gl.tensor  # pieces of each split; some may have no tiles
    count: gl.tensor  # pieces of all splits
    ENTROPY: gl.constexpr

    @gluon.jit
    def create(pipe, counters, sums, each, ENTROPY: gl.constexpr, USED: gl.constexpr):
        """If there are fewer splits than programs, each tile is a piece: programs that work on the same split
        at the same time must not wait for one another's runs of tiles."""
        tickets = pipe.ready
        if USED:
            tickets = gl.allocate_shared_memory(gl.int32, [pipe.STAGES, 1], _ONE)
            each = gl.where(pipe.items() < gl.num_programs(0), gl.cdiv(pipe.tiles_n, pipe.spans), each)
        return Pieces(counters, counters + 1, sums, tickets, each, pipe.items() * each, ENTROPY)

    @gluon.jit
    def take_ticket(self):
        """The next ticket. From `count` on there is no piece for it."""
        return gl.atomic_add(self.counter, 1, sem="relaxed")

    @gluon.jit
    def publish_ticket(self, pipe, ticket, stage, phase):
        """The producer stores a ticket for the consumers at a stage, as soon as the stage is empty."""
        mbarrier.wait(pipe.empty.index(stage), phase)
        zeros = gl.full((1,), 0, gl.int32, _OF_A_WARP)
        self.tickets.index(stage).store(zeros + ticket)  # shared memory stores tensors, not scalars

    @gluon.jit
    def wait_for_ticket(self, pipe, stage, phase):
        """A consumer's next ticket, once the stage is ready. The stage stays occupied: the first product of
        the piece reads it."""
        mbarrier.wait(pipe.ready.index(stage), phase)
        return gl.max(self.tickets.index(stage).load(_OF_FOUR_WARPS), 0)

    @gluon.jit
    def piece(self, pipe, ticket):
        """(row of tiles, split, its first tile, one past its last tile, and the same two of the piece)."""
        items = pipe.items()
        m, begin, end, split = pipe.item(ticket % items)
        at, tiles = ticket // items, end - begin
        first, last = gl.cdiv(at * tiles, self.each), gl.cdiv((at + 1) * tiles, self.each)
        return m, split, begin, end, begin + first, begin + last

    @gluon.jit
    def _at(self, part, split):
        """Where the sums m of a part are."""
        row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, LANES)), 1)
        lane = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, LANES)), 0)
        return self.sums + (part * _SPLITS + split).to(gl.int64) * (3 * ROWS * 4) + row * 4 + lane

    @gluon.jit
    def take_over(self, part, split, tiles, t):
        """Wait for (m, s, t) after the first `tiles` tiles of a split."""
        flag = self.folded + part * _SPLITS + split
        gl.inline_asm_elementwise(_ACQUIRE, "=r,l,r", [flag, tiles], gl.int32, False, 1)
        at = self._at(part, split)
        m, s = gl.load(at), gl.load(at + ROWS * 4)
        if self.ENTROPY:
            t = gl.load(at + 2 * ROWS * 4)
        return m, s, t

    @gluon.jit
    def hand_over(self, part, split, tiles, m, s, t):
        """Store the sums after the first `tiles` tiles of a split for the next piece."""
        at = self._at(part, split)
        gl.store(at, m)
        gl.store(at + ROWS * 4, s)
        if self.ENTROPY:
            gl.store(at + 2 * ROWS * 4, t)
        barrier()
        # By one thread: if all of them stored it, a slow one might do so after the next piece has stored its
        # larger number. The piece after that would wait forever.
        gl.atomic_xchg(self.folded + part * _SPLITS + split, tiles, sem="release")


@gluon.jit
def load_pieces(pipe, pieces, listed, LISTED: gl.constexpr):
    """The producer: takes tickets until there is no piece left, and loads every step of k of the tiles of
    each piece."""
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    ticket = pieces.take_ticket()
    while ticket < pieces.count:
        m, _, _, _, first, end = pieces.piece(pipe, ticket)
        if first < end:
            rows = pipe.rows(m, listed, LISTED)
            pieces.publish_ticket(pipe, ticket, stage, phase)
            for n in range(first, end):
                for step in range(pipe.steps):
                    stage, phase = pipe.load(rows, n, step, stage, phase)
        ticket = pieces.take_ticket()
    pieces.publish_ticket(pipe, ticket, stage, phase)
    mbarrier.arrive(pipe.ready.index(stage))
    gdc_launch_dependents()
