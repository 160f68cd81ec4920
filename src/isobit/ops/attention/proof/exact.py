"""The exact bits that a class prescribes: `model` with the operations of the hardware, on one KV head of a
batch element.

On a GPU these are the tensor-core step of `isobit.numerics`, a fused multiply-add, and the device's own
`exp2` and `log2`. There is no model of the last two; a kernel computes them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.numerics import chain
from isobit.numerics.cpu_steps import fused
from isobit.ops.attention import model
from isobit.ops.attention.op import backward, forward
from isobit.spec.proof import Args, Sample

Array = np.ndarray


@triton.jit
def _function(x, out, count, LOG: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < count, other=1.0)
    tl.store(out + i, tl.log2(value) if LOG else tl.exp2(value), mask=i < count)


def _on(device: torch.device, log: bool, x: Array) -> Array:
    there = torch.from_numpy(np.ascontiguousarray(x)).to(device)
    out = torch.empty_like(there)
    _function[(-(-there.numel() // 1024),)](there, out, there.numel(), log, 1024)
    return out.cpu().numpy()


def _steps(left: Array, right: Array, acc: Array, dtype: torch.dtype) -> Array:
    a, b = (torch.from_numpy(np.ascontiguousarray(x)).to(dtype) for x in (left, right))
    return chain(a, b, torch.from_numpy(np.ascontiguousarray(acc))).numpy()


def arithmetic(device: torch.device) -> model.Arithmetic:
    if device.type == "cpu":
        return model.CPU
    exp2, log2 = (partial(_on, device, log) for log in (False, True))
    return model.Arithmetic(_steps, fused, exp2, log2)


def exact(args: Args, cotangents: Sequence[Tensor], tangent: int = 1) -> dict[str, Sample]:
    """Samples from the last batch element, or from all packed sequences, in the first KV head. `tangent` is
    the class whose tanh caps scores."""
    do, group = arithmetic(args["q"].device), args["q"].shape[2] // args["k"].shape[2]
    last = slice(max(len(args["q"]) - 1, 0), None)
    one: dict[str, Any] = {p.name: args.get(p.name) for p in forward.contract.params} | {"return_lse": True}
    one |= {n: args[n][last, :, :heads].cpu() for n, heads in (("q", group), ("k", 1), ("v", 1))}
    one |= {n: None if one[n] is None else one[n][last].cpu() for n in ("key_start", "key_end")}
    one |= {n: None if one[n] is None else one[n].cpu() for n in ("cu_seqlens_q", "cu_seqlens_k")}
    out, lse = model.attention(do=do, tangent=tangent, **_known(one))
    assert lse is not None
    here = (last, slice(None), slice(0, group))
    result: dict[str, Sample] = {"out": (here, out), "lse": ((last, slice(0, group)), lse)}
    if cotangents:
        dout, dlse = cotangents[0][here].cpu(), cotangents[1][last, :group].cpu()
        given = {p.name: one.get(p.name) for p in backward.contract.params}
        given |= {
            "out": out,
            "lse": lse,
            "dout": dout,
            "dlse": dlse,
            "want_q": True,
            "want_k": True,
            "want_v": True,
        }
        grads = model.attention_bwd(do=do, tangent=tangent, **_known(given))
        places = (here, (last, slice(None), slice(0, 1)), (last, slice(None), slice(0, 1)))
        result |= {
            f"gradient:{n}": (at, g) for n, at, g in zip("qkv", places, grads, strict=True) if g is not None
        }
    return result


def _known(args: dict[str, Any]) -> dict[str, Any]:
    """Without validate, numerics and backend, which no backend takes."""
    return {n: v for n, v in args.items() if n not in ("validate", "numerics", "backend", "prefer")}
