"""`rms_norm` in plain PyTorch: the formula that is the truth, and the backend that runs anywhere.

`formula` defines the op: differentiable, in fp64 for fp64 inputs and in fp32 for all others. `rms_norm` and
`rms_norm_bwd` are the backend: the same numbers, with an explicit gradient.
"""

from typing import Any

import torch
from torch import Tensor


def formula(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: str = "before",
) -> tuple[Tensor, Tensor]:
    """(out, h) by definition."""
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x if residual is None else x + residual
    z = h.to(wide)
    y = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    if cast == "before":
        y = y.to(x.dtype).to(wide)
    return (y * (offset + weight.to(wide))).to(x.dtype), h


def rms_norm(**args: Any) -> tuple[Tensor | None, ...]:
    """Forward. Returns (out, h, rstd); None for outputs that were not requested."""
    x, residual = args["x"], args["residual"]
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x if residual is None else (x.to(wide) + residual.to(wide)).to(x.dtype)
    z = h.to(wide)
    rstd = 1 / ((z * z).sum(-1) / z.shape[-1] + args["eps"]).sqrt()
    y = z * rstd[..., None]
    if args["cast"] == "before":
        y = y.to(x.dtype).to(wide)
    out = (y * _weight(args, wide)).to(x.dtype)
    return (
        out.contiguous(),
        None if residual is None else h.contiguous(),
        rstd if args["return_rstd"] else None,
    )


def rms_norm_bwd(**args: Any) -> tuple[Tensor | None, Tensor | None]:
    """Backward. Returns (dx, dweight), each if it is wanted, in the dtypes of h and weight."""
    h, rstd, dsummed = args["h"], args["rstd"][..., None], args["dsummed"]
    y, dout = h.to(rstd.dtype) * rstd, args["dout"].to(rstd.dtype)
    dx = dweight = None
    if args["want_h"]:
        g = dout * _weight(args, rstd.dtype)
        dx = rstd * (g - y * (g * y).mean(-1, keepdim=True))
        dx = (dx if dsummed is None else dx + dsummed).to(h.dtype).contiguous()
    if args["want_weight"]:
        dweight = (dout * y).flatten(0, -2).sum(0) if h.ndim > 1 else dout * y
        dweight = dweight.to(args["weight"].dtype)
    return dx, dweight


def _weight(args: dict[str, Any], wide: torch.dtype) -> Tensor:
    weight: Tensor = args["weight"].to(wide)
    return weight + args["offset"]
