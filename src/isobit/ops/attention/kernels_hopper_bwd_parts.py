"""What the two gradient kernels of attention on Hopper have in common."""

from isobit.blocks.hopper_pipe import fence_async_shared, gl, gluon
from isobit.ops.attention.kernels_hopper_parts import BY_ROWS

#: Registers of a thread at launch, of one that multiplies, and of the loader.
AT_LAUNCH, REGISTERS, OF_LOADER = 168, gl.constexpr(240), gl.constexpr(24)

#: A tile on its way out: eight rows of one store lie in different banks.
LEAVING = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))

#: Rows that are cleared at once.
PIECE = gl.constexpr(32)


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
