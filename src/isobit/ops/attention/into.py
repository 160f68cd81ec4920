"""`isobit.attention` with the result in memory that the caller has: for engines, which give that memory."""

from typing import Any

from torch import Tensor

from isobit.frame.into import call_into
from isobit.ops.attention.op import forward


def attention_into(out: Tensor, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Write `isobit.attention(q, k, v, **options)` to `out`, which has its shape and is contiguous. Nothing
    waits for the device, and only workspaces are allocated: it can be captured into a CUDA graph."""
    given = forward.adapt({"q": q, "k": k, "v": v, **options})
    call_into(forward, out if given["q"] is q else out.unsqueeze(0), given)
