"""A number that two tensors have in common if all their bits are equal, and hardly ever if not."""

import torch
from torch import Tensor

#: Odd, so that a factor of it loses no bits modulo 2^64.
_FACTOR = 0x1E3779B97F4A7C15


def checksum(t: Tensor, live: Tensor | None = None) -> str:
    """Of the bits of a tensor and of their order. `live` [*] says which of its first dimensions count: what
    the others hold reaches no result, and may differ."""
    rows = t.numel() and (live.numel() if live is not None else t.shape[0] if t.ndim else 1)
    if not rows:
        return "empty"
    words = t.detach().reshape(rows, -1).contiguous()
    if words.is_floating_point():
        words = words.view(torch.int16)
    sums = words.sum(-1, dtype=torch.int64) + 1
    if live is not None:
        sums = sums.where(live.reshape(-1).to(sums.device), 0)
    order = torch.arange(1, rows + 1, device=sums.device) * _FACTOR
    return f"{int((sums * (order ^ (order >> 31))).sum()) % (1 << 64):016x}"
