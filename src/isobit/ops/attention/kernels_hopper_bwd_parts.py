"""What the two gradient kernels of attention on Hopper have in common."""

from isobit.blocks.hopper_pipe import fence_async_shared, gl, gluon, tma_load
from isobit.ops.attention.kernels_hopper_io import ONE_EACH, ONE_OF_FOUR, reinterpreted
from isobit.ops.attention.kernels_hopper_parts import BY_ROWS

#: Registers of a thread at launch, of one that multiplies, and of the loader.
AT_LAUNCH, REGISTERS, OF_LOADER = 168, gl.constexpr(240), gl.constexpr(24)

#: A tile on its way out: eight rows of one store lie in different banks.
LEAVING = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))

#: Rows that are cleared at once.
PIECE = gl.constexpr(32)


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
    """The numbers of an item, by the loader, to those who wait for its data."""
    for i in gl.static_range(8):
        items.index(slot * 8 + i).store(gl.full((1,), 0, gl.int32, ONE_EACH) + values[i])


@gluon.jit
def told(items, slot, WHICH: gl.constexpr):
    """One of these numbers."""
    return gl.max(items.index(slot * 8 + WHICH).load(ONE_OF_FOUR), 0)


@gluon.jit
def load_box(desc, batch, head, row, room, bar):
    box = reinterpreted(room, desc.dtype, desc.block_type.shape, desc.layout)
    tma_load(desc, [batch, head, row, 0], bar, box)


@gluon.jit
def clear(room, begin, end, SIZE: gl.constexpr):
    """Zeros for the rows of a block of SIZE before `begin` and from `end` on."""
    row = gl.expand_dims(gl.arange(0, PIECE, gl.SliceLayout(1, BY_ROWS)), 1)
    for i in gl.static_range(SIZE // PIECE):
        if (begin > i * PIECE) | (end < (i + 1) * PIECE):
            piece = room.slice(i * PIECE, PIECE)
            live = (row + i * PIECE >= begin) & (row + i * PIECE < end)
            piece.store(gl.where(live, piece.load(BY_ROWS), 0.0))
    fence_async_shared()
