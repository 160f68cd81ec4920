"""`attention_sink` in plain PyTorch: the formula that is the truth, and the backend that runs anywhere."""

import torch
import torch.nn.functional as F
from torch import Tensor


def formula(x: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor]:
    """(out,) by definition, in fp64 for fp64 inputs and in fp32 for all others."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return ((x.to(wide) * _kept(lse, sinks)).to(x.dtype),)


def _kept(lse: Tensor, sinks: Tensor) -> Tensor:
    """[*, H, 1]: the share of the probability that keys have. The difference of two -inf would be NaN, and
    so would its gradient. logsigmoid, because the gradient of sigmoid loses 1 - f where f rounds to 1."""
    seen = lse != -torch.inf
    score = torch.where(seen, lse, 0.0) - sinks.to(lse.dtype)
    return torch.where(seen, F.logsigmoid(score).exp(), 0.0)[..., None]


def attention_sink(x: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Forward. Written apart from the formula, which judges it."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) * _kept(lse, sinks)).to(x.dtype).contiguous()


def attention_sink_bwd(
    x: Tensor, lse: Tensor, sinks: Tensor, dout: Tensor, want_x: bool, want_lse: bool, want_sinks: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dlse, dsinks), those that are wanted. x and dout of a query that sees no key may be NaN."""
    wide = torch.promote_types(x.dtype, torch.float32)
    f, seen = _kept(lse, sinks), (lse != -torch.inf)[..., None]
    g = torch.where(seen, dout.to(wide), 0.0)
    dx = (g * f).to(x.dtype).contiguous() if want_x else None
    if not (want_lse or want_sinks):
        return dx, None, None
    dot = (g * torch.where(seen, x.to(wide), 0.0)).sum(-1)
    h = torch.where(seen[..., 0], torch.sigmoid(sinks.to(lse.dtype) - lse), 0.0)
    dlse = (dot * f[..., 0] * h).contiguous()
    dsinks = -dlse.reshape(-1, len(sinks)).sum(0).to(sinks.dtype) if want_sinks else None
    return dx, dlse if want_lse else None, dsinks
