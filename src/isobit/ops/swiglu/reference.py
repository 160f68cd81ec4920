"""`swiglu` in plain PyTorch: the formula that is the truth, and the backend that runs anywhere.

`formula` is the text of Hugging Face's models: autograd gives its gradients, in fp64 for fp64 inputs.
`swiglu` and `swiglu_bwd` are the backend: the same roundings, with an explicit gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def formula(gate: Tensor, up: Tensor) -> tuple[Tensor]:
    """(out,) by definition."""
    return (F.silu(gate) * up,)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Forward."""
    return (F.silu(gate) * up).contiguous()


def swiglu_bwd(
    gate: Tensor, up: Tensor, dout: Tensor, want_gate: bool, want_up: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Backward. Returns (dgate, dup), each if it is wanted."""
    dgate = dup = None
    if want_gate:
        dgate = torch.ops.aten.silu_backward(dout * up, gate).contiguous()
    if want_up:
        dup = (dout * F.silu(gate)).contiguous()
    return dgate, dup
