"""What the two gradient kernels of attention on Hopper have in common."""

from isobit.kernels.hopper.pipeline import gl, gluon
from isobit.ops.attention.kernels_hopper_parts import tanh

#: A tile on its way out: eight rows of one store lie in different banks.
LEAVING = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@gluon.jit
def probabilities(z, base, c, cap, slope, CAPPED: gl.constexpr):
    """(P, 1 - tanh^2 where scores are capped) of scores. `base`, which is -lse log2(e), is shaped to meet
    them: queries are rows or columns."""
    bend = z
    if CAPPED:
        y = tanh(z * slope)
        z = cap * y
        bend = 1.0 - y * y
    return gl.exp2(gl.fma(z, gl.full_like(z, c), base)), bend


@gluon.jit
def gradient_of_scores(p, bend, dp, delta, CAPPED: gl.constexpr):
    """dS, where a query sees a key; `delta` is shaped to meet it."""
    ds = p * (dp - delta)
    if CAPPED:
        ds = ds * bend
    return ds


@gluon.jit
def taken(counter):
    """The number of the next item that no program has taken; past the last there is none. A program's first
    item is the one with its own number."""
    return gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
