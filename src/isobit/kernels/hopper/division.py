"""Divisions with the bits of `div_rn`, which inspects every operand and branches.

With y = RN(1 / b), q = RN(a y) and r = RN(b q - a), RN(q - r y) = RN(a / b), unless something over- or
underflows: q - r y is a / b up to 1.3 2^-23 ulp. Where the midpoint between two numbers is that near, r is
exact, q is one of the two, and a / b, which for a, b from 1 to 2 is at least 2^-24 ulp / b away from it,
stays on its side. The steps, and the one remaining pair of significands, are in
`tests/test_attention_division.py`.
"""

from isobit.kernels.hopper.pipeline import gl, gluon


@gluon.jit
def quotient(a, b, y):
    """a / b rounded to nearest, for y = 1 / b rounded to nearest; zeros keep their sign. See above for why,
    and `divides` for when."""
    q = a * y
    return gl.fma(gl.fma(q, b, -a), -y, q)


@gluon.jit
def reciprocal(b):
    """1 / b rounded to nearest, for b from 1 to 2 - 2^-22. One step from a y within an ulp gives the rounded
    result (except for 2 - 2^-23). The step before it brings y within an ulp, whatever the hardware gives."""
    y = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [b], gl.float32, True, 1)
    one = gl.full_like(b, 1.0)
    y = gl.fma(gl.fma(-b, y, one), y, y)
    return gl.fma(gl.fma(-b, y, one), y, y)


@gluon.jit
def divides(pieces, s):
    """Whether `quotient` can divide all of these tensors by s, a number for each of their rows: elements from
    2^-100 to 2^100, or zeros, by numbers from 2^-20 to 2^20. Then quotients are normal, and r is a multiple
    of the smallest number."""
    MINUS_TWO: gl.constexpr = (1 << 32) - 2
    LEAST: gl.constexpr = (1 << 32) - 2 * (27 << 23)  # 2^-100
    largest = gl.abs(pieces[0])
    # As integers, so that zero gives 0 and the smallest numbers the largest.
    least = pieces[0].to(gl.uint32, bitcast=True) * MINUS_TWO
    for i in gl.static_range(1, len(pieces)):
        largest = gl.maximum(largest, gl.abs(pieces[i]))
        least = gl.maximum(least, pieces[i].to(gl.uint32, bitcast=True) * MINUS_TWO)
    usual = (s >= 2.0**-20) & (s <= 2.0**20) & (gl.max(largest, 1) <= 2.0**100) & (gl.max(least, 1) <= LEAST)
    return gl.min(usual.to(gl.int32), 0) > 0


@gluon.jit
def divided(pieces, s, USUAL: gl.constexpr):
    """Each row of these tensors by its number s, every quotient rounded to nearest. USUAL: `divides`
    holds."""
    y = s
    if USUAL:
        y = gl.div_rn(gl.full_like(s, 1.0), s)
    quotients = ()
    for i in gl.static_range(len(pieces)):
        zeros = gl.zeros_like(pieces[i])
        divisor = gl.expand_dims(s, 1) + zeros
        if USUAL:
            quotients = quotients + (quotient(pieces[i], divisor, gl.expand_dims(y, 1) + zeros),)
        else:
            quotients = quotients + (gl.div_rn(pieces[i], divisor),)
    return quotients
