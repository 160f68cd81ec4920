"""SwiGLU and rotary embeddings with the roundings of transformers, in plain operations of torch.

vLLM fuses each into one kernel that rounds once. transformers rounds every intermediate result to the dtype
of the model, and that decides bits as much as the order of a sum does:

    SwiGLU    silu(gate) is rounded, then its product with up
    rotary    cos and sin are rounded; x cos and rotate(x) sin are rounded, then their sum

Both are elementwise: a token's bits do not depend on the batch. A compiler that fuses them drops the
roundings, so they are for eager execution.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [*, 2 F], the gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def inverse_frequencies(base: float, size: int) -> Tensor:
    """[size / 2] in fp32, computed on the CPU as transformers does: `pow` of a GPU has other bits."""
    steps = torch.arange(0, size, 2, dtype=torch.int64, device="cpu").float()
    return 1.0 / (base ** (steps / size))


def rotary_table(inverse: Tensor, positions: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[2, positions, size]: cos and sin of every position, computed in fp32 and rounded to a dtype."""
    steps = torch.arange(positions, device=device).float()
    angles = steps[:, None] * inverse.to(device)[None]
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor, head_size: int) -> Tensor:
    """Rotate the heads of x, [tokens, heads * head_size], by cos and sin, [tokens, rotary size]. Elements of
    a head beyond the rotary size stay as they are."""
    heads = x.reshape(len(x), -1, head_size)
    size = cos.shape[-1]
    turned, rest = heads[..., :size], heads[..., size:]
    first, second = turned.chunk(2, dim=-1)
    rotated = turned * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
    return torch.cat((rotated, rest), dim=-1).view(x.shape)
