"""Gradients of attention on Hopper: class attn/1, with the formulas and chains of `kernels_triton_bwd`.

Two kernels compute dS, each for its own sum: `kernels_hopper_dq` over keys, `kernels_hopper_dkv` over heads
and queries. Nothing is added by two programs, and no order depends on the batch.
"""

from typing import Any

import torch
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run
from isobit.kernels.hopper.pipeline import accumulator_layout
from isobit.ops.attention import kernels_hopper, kernels_hopper_dkv, kernels_hopper_dq
from isobit.ops.attention.calls import call_of, factors_of, key_bounds
from isobit.ops.attention.kernels_hopper_io import AT_LAUNCH, descriptor, flat_layout, why_not_tma
from isobit.ops.attention.kernels_triton import count_tiles
from isobit.ops.attention.kernels_triton_bwd import count_blocks, delta_of


def why_not(args: dict[str, Any]) -> str | None:
    """Why these kernels cannot serve a call, or None."""
    if args["q"].shape[-1] > 128:
        return "sums of more than 128 columns do not fit into its registers"
    if args["block_table"] is not None:
        return "keys in pages have no gradient"
    if 0 in args["q"].shape:
        return "there are no queries, and TMA cannot read an empty tensor"
    return kernels_hopper.why_not(args)


def _readable(t: Tensor) -> Tensor:
    """A gradient comes with any strides."""
    if t.stride(-1) == 1 and why_not_tma("dout", t) is None:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def attention_bwd(launch: Launch = run, **args: Any) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv), those that are wanted."""
    call, factors = call_of(args), factors_of(args)
    q, k, v = (args[name] for name in ("q", "k", "v"))
    lse, dout = args["lse"].contiguous(), _readable(args["dout"])
    want_kv = args["want_k"] or args["want_v"]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if args["want_q"] else None
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device) if want_kv else None
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device) if want_kv else None
    counters = torch.empty(2, dtype=torch.int32, device=q.device)
    delta = delta_of(launch, args, dout, counters)
    DP, most = call.padded, sm_count(q.device)
    capped = args["softcap"] is not None

    def or_other(t: Tensor | None) -> Tensor:
        return lse if t is None else t

    given = (
        lse, delta, or_other(args["key_start"]), or_other(args["key_end"]), or_other(args["cu_seqlens_q"]),
        or_other(key_bounds(args)), call.T, call.S, call.sequences, args["window"] or 0,
    )  # fmt: skip
    flags = (
        call.packed_q, args["key_start"] is not None, args["key_end"] is not None, args["causal"],
        args["window"] is not None, capped,
    )  # fmt: skip
    flat, of_acc = flat_layout(DP, q.dtype), accumulator_layout(DP)
    options = {"num_warps": 4, "maxnreg": AT_LAUNCH, "enable_fp_fusion": False}
    if dq is not None:
        tiles, block = count_tiles(call, 128), kernels_hopper_dq.KEYS[DP] // (2 if capped else 1)
        launch(
            kernels_hopper_dq.dq_kernel, (min(tiles * call.H, most),), dq, counters, *given, tiles,
            call.H, call.group, *factors, descriptor(q, 64, DP), descriptor(dout, 64, DP),
            descriptor(k, block, DP), descriptor(v, block, DP), call.D, DP, block,
            kernels_hopper_dq.STAGES[DP], flat, accumulator_layout(block), of_acc, *flags, **options,
        )  # fmt: skip
    if dk is not None:
        tiles = count_blocks(call, 128)
        block = kernels_hopper_dkv.QUERIES[DP] // (2 if capped else 1)
        launch(
            kernels_hopper_dkv.dkv_kernel, (min(tiles * call.KV, most),), dk, dv, counters, *given,
            tiles, call.KV, call.group, *factors, descriptor(q, block, DP), descriptor(dout, block, DP),
            descriptor(k, 64, DP), descriptor(v, 64, DP), call.D, DP, block, kernels_hopper_dkv.STAGES[DP],
            kernels_hopper_dkv.SLOTS, flat, accumulator_layout(block), of_acc, *flags, **options,
        )  # fmt: skip
    return dq, dk if args["want_k"] else None, dv if args["want_v"] else None
