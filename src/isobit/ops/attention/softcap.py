"""The tanh of class attn/2: ten operations for a score, none of them a division.

For a product z of q and k, k = -2 log2(e) scale / softcap and e = exp2(|z| k), which is exp(-2 |x|) of
x = scale z / softcap, tanh |x| = 2 / (1 + e) - 1. In place of the division a parabola r is 2 / (1 + e) within
1 %, and a polynomial of (1 + e) r, which is near 2, corrects it:

    r = (S2 e + S1) e + S0
    g = e r + r
    t = r (((A3 g + A2) g + A1) g + A0) - 1
    tanh x = t with the sign of z

Every product and sum together is one fma. The error is at most 2^-20, with that of `exp2` on a GPU too
(`tests/test_attention_softcap.py`); nearly all of it is rounding. It is absolute: a score has an error of
softcap 2^-20, and `MOST` keeps that below the rounding of a probability to bf16. The coefficients were found
by trial among those with tanh 0 = 0, tanh inf = 1, and no result above 1 or with the wrong sign.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray

#: All are fp32 numbers.
S2, S1, S0 = 0.6399760842323303, -1.5999476909637451, 1.9599716663360596
A3, A2, A1, A0 = -0.1301441192626953, 1.030737280845642, -3.061220407485962, 4.040644645690918

#: The largest softcap of class attn/2; attn/1 has others.
MOST = 1024.0


def too_large(args: dict[str, Any]) -> str | None:
    """Why class attn/2 does not serve a softcap, or None."""
    if args["softcap"] is None or args["softcap"] <= MOST:
        return None
    return f"the tanh of class attn/2 has an error of softcap 2^-20, so softcap must be at most {MOST:.0f}"


def is_capped(args: dict[str, Any]) -> str | None:
    """Why attn/1 is not the default, or None."""
    if args["softcap"] is None or too_large(args) is not None:
        return None
    return "with a softcap the default is class 'attn/2', which is faster: request this one by numerics="


def is_not_capped(args: dict[str, Any]) -> str | None:
    """Why attn/2 is not the default, or None."""
    if args["softcap"] is not None:
        return None
    return "without a softcap the default is class 'attn/1', of the same bits: request this one by numerics="


def bent(z: Array, slope: np.float32, exp2: Callable[[Array], Array], fma: Callable[..., Array]) -> Array:
    """tanh in numpy, with the operations of a device; `slope` is k."""

    def plus(x: Array, y: Any, c: float) -> Array:
        return fma(x, y, np.full_like(x, c))

    e = exp2(np.abs(z) * slope)
    r = plus(plus(e, np.float32(S2), S1), e, S0)
    g = fma(e, r, r)
    q = plus(plus(plus(g, np.float32(A3), A2), g, A1), g, A0)
    t = plus(r, q, -1.0)
    return np.copysign(t, z)
