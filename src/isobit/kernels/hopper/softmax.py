"""Softmax of 64 rows of scores in the registers of a `wgmma` accumulator, with the operations and the orders
of class attn/1.

Of 64 x 128 scores a thread holds two rows, and of a row the keys 8 g + 2 i and 8 g + 2 i + 1 for its own i of
4: a *lane*. So sums by lanes are sums in one thread.
"""

from isobit.kernels.hopper.division import quotient, reciprocal
from isobit.kernels.hopper.pipeline import ROWS, gl, gluon


def _lane_layout(block: int) -> gl.DistributedLinearLayout:
    """A thread's part of 64 x block scores, as (row, g, lane, parity): key = 8 g + 2 lane + parity."""
    groups = (block // 8 - 1).bit_length()
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [8, 0, 0, 0], *([0, 1 << b, 0, 0] for b in range(groups))],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[64, block // 8, 4, 2],
    )


LANES_OF_128, LANES_OF_64 = gl.constexpr(_lane_layout(128)), gl.constexpr(_lane_layout(64))
#: (row, lane) in a thread.
LANES = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(3, _lane_layout(128))))


@gluon.jit
def halved(parts):
    """Each tensor cut in two by columns, in order."""
    halves = ()
    for i in gl.static_range(len(parts)):
        x = parts[i]
        x = gl.permute(gl.reshape(x, (ROWS, 2, x.shape[1] // 2)), (0, 2, 1))
        first, second = gl.split(x)
        halves = halves + (first, second)
    return halves


@gluon.jit
def finite(m):
    """The maximum to subtract: 0 where no key has been seen yet, because -inf - -inf is NaN."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def tanh(x):
    """As in `kernels_triton`: a series near 0, because the quotient cancels there."""
    a = gl.abs(x)
    e = gl.exp2(a * -2.8853900817779268)
    b = 1.0 + e  # at most 1.61 where the quotient is used
    far = quotient(1.0 - e, b, reciprocal(b))
    y = x * x
    near = 0.13333333333333333 + y * (-0.053968253968253968 + y * 0.021869488536155203)
    near = a + a * y * (-0.33333333333333333 + y * near)
    size = gl.where(a < 0.25, near, far)
    return gl.where(x < 0, -size, size)


@gluon.jit
def lane_sums(p):
    """Sums of a block's keys by lanes, [64, 4]: halves of g, then pairs. All in one thread."""
    GROUPS: gl.constexpr = p.shape[1] // 8
    x = gl.reshape(p, (ROWS, GROUPS, 4, 2))
    x = gl.convert_layout(x, LANES_OF_128 if GROUPS == 16 else LANES_OF_64, assert_trivial=True)
    for _ in gl.static_range(4):
        if x.shape[1] > 1:
            x = gl.sum(gl.reshape(x, (ROWS, 2, x.shape[1] // 2, 4, 2)), 1)
    x = gl.sum(gl.reshape(x, (ROWS, 4, 2)), 2)
    return gl.convert_layout(x, LANES, assert_trivial=True)


@gluon.jit
def joined(lanes):
    """(0 + 1) + (2 + 3)."""
    return gl.sum(gl.sum(gl.reshape(lanes, (ROWS, 2, 2)), 2), 1)


@gluon.jit
def row_maxima(z):
    """Maxima of rows: halves first, which do not wait for one another."""
    for _ in gl.static_range(2):
        z = gl.max(gl.reshape(z, (ROWS, 2, z.shape[1] // 2)), 1)
    return gl.max(z, 1)


@gluon.jit
def packed(p, DTYPE: gl.constexpr):
    """Probabilities rounded to DTYPE, two in a word, as `wgmma` takes them. As words, and with inline
    assembly, because otherwise the compiler moves 16-bit halves between registers from one block to the
    next."""
    even, odd = gl.split(gl.reshape(p, (ROWS, p.shape[1] // 2, 2)))
    ASM: gl.constexpr = (
        "cvt.rn.bf16x2.f32 $0, $2, $1;" if gl.bfloat16 == DTYPE else "cvt.rn.f16x2.f32 $0, $2, $1;"
    )
    return gl.inline_asm_elementwise(ASM, "=r,f,f", [even, odd], gl.int32, True, 1)


@gluon.jit
def unpacked(words, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], (gl.int16, gl.int16), True, 1
    )
    p = gl.join(even.to(DTYPE, bitcast=True), odd.to(DTYPE, bitcast=True))
    return gl.convert_layout(gl.reshape(p, (ROWS, 2 * words.shape[1])), LAYOUT, assert_trivial=True)


@gluon.jit
def per_lane(x):
    """A row's number for each of its lanes."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, LANES), assert_trivial=True), 1)


@gluon.jit
def per_row(x, LAYOUT: gl.constexpr):
    """A number for each row, in the layout of the rows of a tensor with LAYOUT."""
    return gl.convert_layout(x, gl.SliceLayout(1, LAYOUT), assert_trivial=True)


@gluon.jit
def per_column(x, LAYOUT: gl.constexpr):
    """A row's number for each of its columns."""
    return gl.expand_dims(per_row(x, LAYOUT), 1)
