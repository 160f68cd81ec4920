"""Calls of `rope` and `swiglu` in Triton's interpreter, held to eager code: prints what differs."""

import itertools
import json

import torch
import torch.nn.functional as F
from torch import Tensor

import isobit
from isobit.ops.rope import reference


def bits(t: Tensor) -> Tensor:
    return t.detach().contiguous().view({2: torch.int16, 4: torch.int32}[t.element_size()])


def differing(ours: list[Tensor], theirs: list[Tensor]) -> list[int]:
    return [int((bits(a) != bits(b)).sum()) for a, b in zip(ours, theirs, strict=True)]


def rope(dtype: torch.dtype, D: int, R: int, rounding: str) -> list[int]:
    """[B, H, T, D] views, tables of one sequence, and a token with cos = sin = 0, whose gradients are zeros
    of both signs."""
    gen = torch.Generator().manual_seed(D + R)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(dtype)

    q, k, cos, sin = draw(2, 3, 2, D), draw(2, 1, 2, D), draw(1, 2, R), draw(2, R)
    cos[:, 1], sin[1] = 0, 0
    q, k = (t.transpose(1, 2).requires_grad_() for t in (q, k))
    ours = isobit.rope(q, k, cos, sin, rounding=rounding, backend="triton")
    theirs = reference.formula(q, k, cos[0], sin, rounding)
    given = [draw(*o.shape) for o in ours]
    found = [[*out, *torch.autograd.grad(out, (q, k), given)] for out in (ours, theirs)]
    return differing(*found)


def swiglu(dtype: torch.dtype) -> float:
    """The part of elements that differ: exp is numpy's here, and PyTorch's there."""
    gate_up = 3 * torch.randn(6, 2 * 333, generator=torch.Generator().manual_seed(1))
    gate_up = gate_up.to(dtype).requires_grad_()
    gate, up = gate_up.chunk(2, -1)
    ours, theirs = isobit.swiglu(gate, up, backend="triton"), F.silu(gate) * up
    dout = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    found = [[out, *torch.autograd.grad(out, gate_up, dout)] for out in (ours, theirs)]
    return sum(differing(*found)) / sum(t.numel() for t in found[0])


dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
some = [*itertools.product(("bf16", "fp16"), (8, 4), ("hf", "vllm"))][:-2]
ropes = {f"{name} {R} {rounding}": rope(dtypes[name], 8, R, rounding) for name, R, rounding in some}
ropes["fp32 4 hf"] = rope(dtypes["fp32"], 8, 4, "hf")
print(json.dumps({"rope": ropes, "swiglu": {name: swiglu(dtype) for name, dtype in dtypes.items()}}))
