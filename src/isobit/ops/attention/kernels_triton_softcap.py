"""Capped scores of both classes, for the Triton kernels. CAPPED is the number of the
class. And the functions of the backend of attn/2, which are those of attn/1 with another tanh."""

from typing import Any

import triton
import triton.language as tl

from isobit.frame.backend import resolve
from isobit.kernels.triton.chain import fma
from isobit.ops.attention import softcap

_S2, _S1, _S0 = tl.constexpr(softcap.S2), tl.constexpr(softcap.S1), tl.constexpr(softcap.S0)
_A3, _A2 = tl.constexpr(softcap.A3), tl.constexpr(softcap.A2)
_A1, _A0 = tl.constexpr(softcap.A1), tl.constexpr(softcap.A0)


@triton.jit
def tanh(x):
    """That of class attn/1: a series near 0, because the quotient cancels there. Divisions round to
    nearest."""
    a = tl.abs(x)
    e = tl.exp2(a * -2.8853900817779268)  # exp(-2a)
    far = tl.div_rn(1.0 - e, 1.0 + e)
    y = x * x
    near = 0.13333333333333333 + y * (-0.053968253968253968 + y * 0.021869488536155203)
    near = a + a * y * (-0.33333333333333333 + y * near)
    size = tl.where(a < 0.25, near, far)
    return tl.where(x < 0, -size, size)


@triton.jit
def full(x, VALUE: tl.constexpr):
    """A constant with the shape of x: in the interpreter `fma` takes tensors."""
    return tl.full(x.shape, VALUE, tl.float32)


@triton.jit
def bent(z, slope):
    """The tanh of class attn/2; see `softcap`."""
    e = tl.exp2(tl.abs(z) * slope)
    r = fma(fma(e, full(e, _S2), full(e, _S1)), e, full(e, _S0))
    g = fma(e, r, r)
    q = fma(fma(fma(g, full(g, _A3), full(g, _A2)), g, full(g, _A1)), g, full(g, _A0))
    t = fma(r, q, full(r, -1.0))
    bits = (t.to(tl.int32, bitcast=True) & 0x7FFFFFFF) | (z.to(tl.int32, bitcast=True) & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def capped(z, cap, slope, CAPPED: tl.constexpr):
    """Scores of products z. In class attn/2 they are in units of the cap."""
    if CAPPED == 1:
        z = cap * tanh(z * slope)
    else:
        z = bent(z, slope)
    return z


# Launchers


def why_not(args: dict[str, Any]) -> str | None:
    """Why these kernels cannot serve a call, or None."""
    reason: str | None = resolve(f"{__package__}.kernels_triton:why_not")(args)
    return softcap.too_large(args) or reason


def attention(**args: Any) -> Any:
    return resolve(f"{__package__}.kernels_triton:attention")(tangent=2, **args)


def attention_bwd(**args: Any) -> Any:
    return resolve(f"{__package__}.kernels_triton_bwd:attention_bwd")(tangent=2, **args)
