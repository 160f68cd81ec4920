"""`swiglu` in plain PyTorch: the formula that is the truth, and the backend that runs anywhere.

`formula` is the text of Hugging Face's models: autograd gives its gradients, in fp64 for fp64 inputs.
`swiglu` and `swiglu_bwd` are the backend: the same roundings, with an explicit gradient. So are those of
`swiglu_packed`; their sigmoid is that of fp64, rounded, because PyTorch's vectorised one is another one for
the last elements of a tensor.
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


# Gate and up in one tensor


def parts(gate_up: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """(gate, up)."""
    if interleaved:
        return gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate_up.chunk(2, -1)
    return gate, up


def packed_formula(
    gate_up: Tensor, interleaved: bool, limit: float | None, alpha: float
) -> tuple[Tensor]:  # fmt: skip
    """(out,) by definition."""
    return packed_of(*parts(gate_up, interleaved), limit, alpha)


def packed_of(gate: Tensor, up: Tensor, limit: float | None, alpha: float) -> tuple[Tensor]:
    """The same of gate and up."""
    if limit is None:
        return formula(gate, up)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * (gate * torch.sigmoid(gate * alpha)),)


def swiglu_packed(gate_up: Tensor, interleaved: bool, limit: float | None, alpha: float) -> Tensor:
    """Forward."""
    gate, up = parts(gate_up, interleaved)
    if limit is None:
        return (_silu(gate) * up).contiguous()
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * (gate * _sigmoid(gate * alpha).to(gate.dtype))).contiguous()


def swiglu_packed_bwd(
    gate_up: Tensor, interleaved: bool, limit: float | None, alpha: float, dout: Tensor
) -> Tensor:  # fmt: skip
    """Backward. Returns dgate_up."""
    gate, up = parts(gate_up, interleaved)
    dtype = gate.dtype
    if limit is None:
        s = _sigmoid(gate)
        wide = gate.to(s.dtype)
        dgate = ((dout * up).to(s.dtype) * s * (1 + wide * (1 - s))).to(dtype)
        dup = dout * _silu(gate)
    else:
        x, v = gate.clamp(max=limit), up.clamp(-limit, limit)
        s = _sigmoid(x * alpha).to(dtype)
        dglu = dout * (v + 1)
        da = dglu * x * (1 - s) * s
        dgate = torch.where(gate <= limit, dglu * s + da * alpha, 0.0)
        dup = torch.where((up >= -limit) & (up <= limit), dout * (x * s), 0.0)
    if interleaved:
        return torch.stack([dgate, dup], -1).flatten(-2)
    return torch.cat([dgate, dup], -1)


def _sigmoid(x: Tensor) -> Tensor:
    """In fp32, or fp64 for fp64."""
    return (1 / (1 + (-x.double()).exp())).to(torch.promote_types(x.dtype, torch.float32))


def _silu(gate: Tensor) -> Tensor:
    wide = gate.double()
    narrow = (wide / (1 + (-wide).exp())).to(torch.promote_types(gate.dtype, torch.float32))
    return narrow.to(gate.dtype)
