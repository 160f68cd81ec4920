"""The truth of `rms_norm`, and the allowed difference between plain PyTorch and a correct kernel."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from isobit.ops.rms_norm import reference
from isobit.ops.rms_norm.order import GROUP, log_lanes
from isobit.spec.proof import Args

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def dtype_of(*given: Tensor | None) -> torch.dtype:
    """The dtype that these fp64 tensors came from: the narrowest that represents all values."""
    for dtype in DTYPES:
        if all(t is None or bool((t.to(dtype).double() == t).all()) for t in given):
            return dtype
    return torch.float64


def formula(args: Args) -> tuple[Tensor, ...]:
    """(out, h), h an empty tensor without a residual. Rounding h is part of the definition and not an error:
    in fp64 it is rounded to the dtype that the inputs came from."""
    x, residual = args["x"], args["residual"]
    if residual is not None and x.dtype == torch.float64:
        exact = x + residual
        lost = exact.to(dtype_of(x, residual)).double() - exact
        return judged(args, reference.formula(**args | {"residual": residual + lost.detach()}))
    return judged(args, reference.formula(**args))


def judged(args: Args, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    out = outputs[0]
    return out, out.new_empty(0) if args["residual"] is None else outputs[1]


def scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """The difference that two fp32 computations can have, in units of eps.

    A sum of squares has one rounding error for every addition that a term goes through, so the relative error
    of y = h rstd is `share`. A value with an error d that is then rounded to 16 bits may round to the other
    neighbour: out is followed through its roundings from both ends of the interval of y. A gradient is
    rounded once, to nearest, and its error is at most 2 d where plain PyTorch happens to be right.
    """
    x, weight, dtype = args["x"], args["weight"], dtype_of(args["x"], args["residual"])
    eps = 2.0**-52 if dtype == torch.float64 else 2.0**-23
    h = x if args["residual"] is None else outputs[1]
    D = h.shape[-1]
    additions = -(-D >> log_lanes(D)) + log_lanes(D) + 2
    share = 0.5 * additions + 4.0  # half of the sum's error, a root, a quotient and a product
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + args["eps"])
    y, w = h * rstd, weight + args["offset"]
    sizes = {"out": _apart(y, share * eps * y.abs(), w, eps, args["cast"], dtype) / eps}
    sizes["summed"] = h.abs() if args["residual"] is not None else h.new_zeros(0)
    if cotangents:
        dout = cotangents[0].abs()
        g, products = dout * w.abs(), dout * w.abs() * y.abs()
        mean = products.mean(-1, keepdim=True)
        off = rstd * ((g + y.abs() * mean) * (2 * share + 4.0) + y.abs() * mean * additions)
        dx = off if args["residual"] is None else off + cotangents[1].abs()
        sizes["gradient:x"] = sizes["gradient:residual"] = 2 * dx
        rows = max(dout[..., 0].numel(), 1)
        through = 0.5 * (GROUP + math.log2(rows) + 1) + share + 1.0
        sizes["gradient:weight"] = 2 * (dout * y.abs()).reshape(-1, D).sum(0) * through
    return sizes


def _apart(y: Tensor, off: Tensor, w: Tensor, eps: float, cast: str, dtype: torch.dtype) -> Tensor:
    """The largest difference of two results whose y are within `off` of this one."""
    low, high = y - off, y + off
    if cast == "before":
        low, high = low.to(dtype).double(), high.to(dtype).double()
    ends = torch.stack([low * w, high * w])
    wide = 2 * eps * ends.abs().amax(0)  # the rounding of the offset and of the product
    low, high = ends.amin(0) - wide, ends.amax(0) + wide
    return high.to(dtype).double() - low.to(dtype).double()
