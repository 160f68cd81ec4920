"""The exact bits that the class prescribes: `model` with the operations of the hardware, on the last value
head of a batch element.

On a GPU these are the tensor-core step of `isobit.numerics`, a fused multiply-add, and the device's own
`exp2`. There is no model of the last; a kernel computes it.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.ops.gated_delta_rule import model
from isobit.ops.gated_delta_rule.op import forward
from isobit.ops.gated_delta_rule.states_op import states
from isobit.spec.proof import Args, Sample

Array = np.ndarray


@triton.jit
def _power(x, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < count, other=0.0)
    tl.store(out + i, tl.exp2(value), mask=i < count)


def _on(device: torch.device, x: Array) -> Array:
    there = torch.from_numpy(np.ascontiguousarray(x)).to(device)
    out = torch.empty_like(there)
    _power[(-(-there.numel() // 1024),)](there, out, there.numel(), 1024)
    return out.cpu().numpy()


def arithmetic(device: torch.device) -> model.Arithmetic:
    return model.CPU if device.type == "cpu" else model.hopper(partial(_on, device))


def _sample(args: Args, heads: dict[str, int], by_sequence: tuple[str, ...]) -> tuple[Args, slice, slice]:
    """(arguments of the last value head of the last batch element, its batch, its head); `heads` has the
    value heads per head of each argument that has heads."""
    last = slice(max(len(args["k"]) - 1, 0), None)
    one = {n: t.cpu() if isinstance(t, Tensor) else t for n, t in args.items()}
    for name in heads:
        if one[name] is not None:
            one[name] = one[name][last, :, -1:]
    for name in by_sequence:
        if one[name] is not None:
            one[name] = one[name][last if one["cu_seqlens"] is None else slice(None), -1:]
    return one, last, slice(-1, None)


def exact(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Sample]:
    known = {p.name: args.get(p.name) for p in forward.contract.params} | {"output_final_state": True}
    known["return_inverse"] = False
    one, last, head = _sample(known, dict.fromkeys(("q", "k", "v", "g", "beta"), 1), ("initial_state",))
    o, final, _ = model.gated_delta_rule(do=arithmetic(args["q"].device), **one)
    assert final is not None
    where = last if args["cu_seqlens"] is None else slice(None)
    return {"o": ((last, slice(None), head), o), "final_state": ((where, head), final)}


def exact_states(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Sample]:
    known = {p.name: args.get(p.name) for p in states.contract.params}
    known |= {"output_final_state": True, "save_new_value": True}
    one, last, head = _sample(known, dict.fromkeys(("k", "w", "u", "g", "gk"), 1), ("initial_state",))
    h, v_new, final = model.fwd_h(do=arithmetic(args["k"].device), **one)
    assert v_new is not None and final is not None
    where = last if args["cu_seqlens"] is None else slice(None)
    return {
        "h": ((last, slice(None), head), h),
        "v_new": ((last, slice(None), head), v_new),
        "final_state": ((where, head), final),
    }
