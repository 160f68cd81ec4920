"""Softmax of the attention kernel on Hopper, with the operations and orders of `kernels_triton_parts`, in the
registers of a `wgmma` accumulator.

Of 64 x 128 scores a thread holds two rows, and of a row the keys 8 g + 2 i and 8 g + 2 i + 1 for its own i of
4: a *lane*. So sums by lanes are sums in one thread.

Divisions have the bits of `div_rn`, which looks at every operand and branches. With y = RN(1 / b),
q = RN(a y) and r = RN(b q - a), RN(q - r y) = RN(a / b), unless something over- or underflows. For q - r y
is a / b up to 1.3 2^-23 ulp; and where the middle between two numbers is that near, r is exact, q is one of
the two, and a / b, which for a, b from 1 to 2 is at least 2^-24 ulp / b from it, stays on its side. The
steps, and the one pair of significands that is left, are in `tests/test_attention_division.py`.
"""

from isobit.kernels.hopper.pipeline import ROWS, accumulator_layout, gl, gluon


def _lanes(block: int) -> gl.DistributedLinearLayout:
    """A thread's share of 64 x block scores, as (row, g, lane, parity): key = 8 g + 2 lane + parity."""
    groups = (block // 8 - 1).bit_length()
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [8, 0, 0, 0], *([0, 1 << b, 0, 0] for b in range(groups))],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[64, block // 8, 4, 2],
    )


OF_128, OF_64 = gl.constexpr(_lanes(128)), gl.constexpr(_lanes(64))
#: A thread's (row, lane).
LANES = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(3, _lanes(128))))
#: Totals in shared memory: eight rows of one store lie in different banks.
TOTALS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
#: Columns of acc that are folded at once: more would need registers that there are not.
PIECE = gl.constexpr(32)
OF_PIECE = gl.constexpr(accumulator_layout(32))
STAGED = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
BY_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))


@gluon.jit
def halved(parts):
    """Each tensor cut in two by columns, in order."""
    found = ()
    for i in gl.static_range(len(parts)):
        x = parts[i]
        x = gl.permute(gl.reshape(x, (ROWS, 2, x.shape[1] // 2)), (0, 2, 1))
        first, second = gl.split(x)
        found = found + (first, second)
    return found


@gluon.jit
def finite(m):
    """What to subtract for a maximum: 0 where no key has been seen, because -inf - -inf is NaN."""
    return gl.where(m == float("-inf"), 0.0, m)


@gluon.jit
def quotient(a, b, y):
    """a / b rounded to nearest, for y = 1 / b rounded to nearest; zeros keep their sign. See above for why,
    and `divides` for when."""
    q = a * y
    return gl.fma(gl.fma(q, b, -a), -y, q)


@gluon.jit
def reciprocal(b):
    """1 / b rounded to nearest, for b from 1 to 2 - 2^-22. A step from what is within an ulp leaves what is
    rounded to nearest (only of 2 - 2^-23 not). The step before it sees to that, whatever hardware gives."""
    y = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], gl.float32, True, 1)
    one = gl.full_like(b, 1.0)
    y = gl.fma(gl.fma(-b, y, one), y, y)
    return gl.fma(gl.fma(-b, y, one), y, y)


@gluon.jit
def tanh(x):
    a = gl.abs(x)
    e = gl.exp2(a * -2.8853900817779268)
    b = 1.0 + e  # at most 1.61 where it counts
    far = quotient(1.0 - e, b, reciprocal(b))
    y = x * x
    near = 0.13333333333333333 + y * (-0.053968253968253968 + y * 0.021869488536155203)
    near = a + a * y * (-0.33333333333333333 + y * near)
    found = gl.where(a < 0.25, near, far)
    return gl.where(x < 0, -found, found)


@gluon.jit
def lane_sums(p):
    """Sums of a block's keys by lanes, [64, 4]: halves of g, then pairs. All in one thread."""
    GROUPS: gl.constexpr = p.shape[1] // 8
    x = gl.reshape(p, (ROWS, GROUPS, 4, 2))
    x = gl.convert_layout(x, OF_128 if GROUPS == 16 else OF_64, assert_trivial=True)
    for _ in gl.static_range(4):
        if x.shape[1] > 1:
            x = gl.sum(gl.reshape(x, (ROWS, 2, x.shape[1] // 2, 4, 2)), 1)
    x = gl.sum(gl.reshape(x, (ROWS, 4, 2)), 2)
    return gl.convert_layout(x, LANES, assert_trivial=True)


@gluon.jit
def row_maxima(z):
    """Maxima of rows: halves first, which do not wait for one another."""
    for _ in gl.static_range(2):
        z = gl.max(gl.reshape(z, (ROWS, 2, z.shape[1] // 2)), 1)
    return gl.max(z, 1)


@gluon.jit
def packed(p, DTYPE: gl.constexpr):
    """Probabilities rounded to DTYPE, two in a word, as they are multiplied. In words, and by an instruction
    of our own, because the compiler would move halves about between one block and the next."""
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
def joined(lanes):
    """(0 + 1) + (2 + 3)."""
    return gl.sum(gl.sum(gl.reshape(lanes, (ROWS, 2, 2)), 2), 1)


@gluon.jit
def per_lane(x):
    """A row's number for each of its lanes."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, LANES), assert_trivial=True), 1)


@gluon.jit
def per_column(x, OF_ACC: gl.constexpr):
    """A row's number for each column of acc."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, OF_ACC), assert_trivial=True), 1)


@gluon.jit
def divides(pieces, s):
    """Whether `quotient` serves all of these by their rows' s: numbers from 2^-100 to 2^100, or zeros, by
    numbers from 2^-20 to 2^20. Then quotients are normal, and r is a whole number of smallest numbers."""
    MINUS_TWO: gl.constexpr = (1 << 32) - 2
    LEAST: gl.constexpr = (1 << 32) - 2 * (27 << 23)  # 2^-100
    largest = gl.abs(pieces[0])
    least = pieces[0].to(gl.uint32, bitcast=True) * MINUS_TWO  # of zeros 0, of what is next to them the most
    for i in gl.static_range(1, len(pieces)):
        largest = gl.maximum(largest, gl.abs(pieces[i]))
        least = gl.maximum(least, pieces[i].to(gl.uint32, bitcast=True) * MINUS_TWO)
    s = gl.convert_layout(s, gl.SliceLayout(1, OF_PIECE), assert_trivial=True)
    usual = (s >= 2.0**-20) & (s <= 2.0**20) & (gl.max(largest, 1) <= 2.0**100) & (gl.max(least, 1) <= LEAST)
    return gl.min(usual.to(gl.int32), 0) > 0


@gluon.jit
def divided(pieces, s, USUAL: gl.constexpr):
    """Rows by their s, every quotient rounded to nearest. USUAL: `divides` says so."""
    y = s
    if USUAL:
        y = gl.div_rn(gl.full_like(s, 1.0), s)
    found = ()
    for i in gl.static_range(len(pieces)):
        zeros = gl.zeros_like(pieces[i])
        each = per_column(s, OF_PIECE) + zeros
        if USUAL:
            found = found + (quotient(pieces[i], each, per_column(y, OF_PIECE) + zeros),)
        else:
            found = found + (gl.div_rn(pieces[i], each),)
    return found
