"""Capped scores of both classes, for the Hopper kernels. CAPPED is the number of the class. And the functions
of the backend of attn/2, which are those of attn/1 with another tanh."""

from typing import Any

from isobit.frame.backend import resolve
from isobit.kernels.hopper.pipeline import gl, gluon
from isobit.kernels.hopper.softmax import tanh
from isobit.ops.attention import softcap

_S2, _S1, _S0 = gl.constexpr(softcap.S2), gl.constexpr(softcap.S1), gl.constexpr(softcap.S0)
_A3, _A2 = gl.constexpr(softcap.A3), gl.constexpr(softcap.A2)
_A1, _A0 = gl.constexpr(softcap.A1), gl.constexpr(softcap.A0)


@gluon.jit
def bent(z, slope):
    """The tanh of class attn/2; see `softcap`."""
    e = gl.exp2(gl.abs(z) * slope)
    r = gl.fma(gl.fma(e, gl.full_like(e, _S2), gl.full_like(e, _S1)), e, gl.full_like(e, _S0))
    g = gl.fma(e, r, r)
    q = gl.fma(gl.fma(g, gl.full_like(g, _A3), gl.full_like(g, _A2)), g, gl.full_like(g, _A1))
    q = gl.fma(q, g, gl.full_like(g, _A0))
    t = gl.fma(r, q, gl.full_like(r, -1.0))
    # As integers, so that the sign takes one instruction.
    bits = (t.to(gl.int32, bitcast=True) & 0x7FFFFFFF) | (z.to(gl.int32, bitcast=True) & -0x80000000)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def capped(z, cap, slope, CAPPED: gl.constexpr):
    """Scores of products z. In class attn/2 they are in units of the cap."""
    if CAPPED == 1:
        z = cap * tanh(z * slope)
    else:
        z = bent(z, slope)
    return z


# Launchers


def why_not(args: dict[str, Any]) -> str | None:
    """Why these kernels cannot serve a call, or None."""
    reason: str | None = resolve(f"{__package__}.kernels_hopper:why_not")(args)
    return softcap.too_large(args) or reason


def why_not_bwd(args: dict[str, Any]) -> str | None:
    reason: str | None = resolve(f"{__package__}.kernels_hopper_bwd:why_not")(args)
    return softcap.too_large(args) or reason


def attention(**args: Any) -> Any:
    return resolve(f"{__package__}.op:by_hopper")(tangent=2, **args)


def attention_bwd(**args: Any) -> Any:
    return resolve(f"{__package__}.op:gradients_by_hopper")(tangent=2, **args)
