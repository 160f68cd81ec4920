"""`rope` in plain PyTorch: the formula that is the truth, and the backend that runs anywhere.

`formula` is the text of Hugging Face's models, and of vLLM's kernel: autograd gives its gradients. `rope` and
`rope_bwd` are the backend, half by half, with an explicit gradient. Everything is a product, a sum or a
rounding, so both have the same bits on every device.
"""

import torch
from torch import Tensor


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def formula(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rounding: str = "hf") -> tuple[Tensor, Tensor]:
    """(q_out, k_out) by definition."""
    R = cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]

    def rotated(x: Tensor) -> Tensor:
        turned = x if x.shape[-1] == R else x[..., :R]
        if rounding == "hf":
            turned = turned * cos + rotate_half(turned) * sin
        else:
            wide = torch.promote_types(x.dtype, torch.float32)
            z = turned.to(wide)
            turned = (z * cos.to(wide) + rotate_half(z) * sin.to(wide)).to(x.dtype)
        return turned if x.shape[-1] == R else torch.cat((turned, x[..., R:]), -1)

    return rotated(q), rotated(k)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """Forward."""
    (c1, c2), (s1, s2) = _halves(cos, rounding), _halves(sin, rounding)
    return _turned(q, c1, c2, s1, s2), _turned(k, c1, c2, s1, s2)


def rope_bwd(
    cos: Tensor, sin: Tensor, rounding: str, dq_out: Tensor, dk_out: Tensor
) -> tuple[Tensor, Tensor]:
    """Backward: the same with the sines of the other half, and the other sign."""
    (c1, c2), (s1, s2) = _halves(cos, rounding), _halves(sin, rounding)
    dq, dk = (_turned(g, c1, c2, -s2, -s1) for g in (dq_out, dk_out))
    return dq.add_(0.0), dk.add_(0.0)


def _halves(t: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """With a dimension for heads. In the dtype of x PyTorch rounds every product, in a wider one none."""
    if rounding == "vllm":
        t = t.to(torch.promote_types(t.dtype, torch.float32))
    first, second = t[..., None, :].chunk(2, -1)
    return first, second


def _turned(x: Tensor, c1: Tensor, c2: Tensor, s1: Tensor, s2: Tensor) -> Tensor:
    half = c1.shape[-1]
    x1, x2 = x[..., :half].to(c1.dtype), x[..., half : 2 * half].to(c1.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., :half] = x1 * c1 - x2 * s1
    out[..., half : 2 * half] = x2 * c2 + x1 * s2
    out[..., 2 * half :] = x[..., 2 * half :]
    return out
