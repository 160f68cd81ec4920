"""The gated delta rule on Hopper, from its kernels.

    solve     T of each chunk                      `kernels_hopper_solve`
    outputs   states, new values and o together    `kernels_hopper_outputs`
    states    states and new values                `kernels_hopper_states`: for the backward, and for fwd_h

The rest is Triton's, with the same bits.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run
from isobit.ops.delta_rule.kernels_hopper import STAGES_FORWARD
from isobit.ops.gated_delta_rule import kernels_triton, kernels_triton_bwd
from isobit.ops.gated_delta_rule.kernels_hopper_outputs import MOST_STAGES, outputs
from isobit.ops.gated_delta_rule.kernels_hopper_solve import WIDEST, solve
from isobit.ops.gated_delta_rule.kernels_hopper_states import states


def why_not(args: dict[str, Any]) -> str | None:
    """Why this kernel cannot serve a call, or None."""
    dtype, K, V = args["k"].dtype, args["k"].shape[-1], args["v" if "v" in args else "u"].shape[-1]
    if dtype not in (torch.bfloat16, torch.float16):
        return "tensor cores take bf16 and fp16"
    if K not in STAGES_FORWARD:
        return f"K={K}; its states have 64, 128 or 256 rows"
    if V % 64:
        return f"V={V}; a program carries 64 columns of the state"
    return None


def carried(
    k: Tensor, w: Tensor, u: Tensor, *rest: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """`states`, or those of Triton, which have the same bits, where they are faster: 256 rows and 64 columns
    are more than the registers of a warpgroup hold, and as long as four times as many programs of 16 columns
    have an SM each, they take half the time."""
    B, _, HV, V = u.shape
    sequences = B if rest[3] is None else len(rest[3]) - 1
    if k.shape[-1] == 256 and sequences * HV * (V // 16) <= sm_count(u.device):
        return kernels_triton.states(k, w, u, *rest)
    return states(k, w, u, *rest)


def prepare(
    k: Tensor, v: Tensor, beta: Tensor, g2: Tensor | None, cu_seqlens: Tensor | None, inverses: bool = False,
    launch: Launch = run,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(u, w, T rounded to the dtype of k: [B, T, HV, 64], if `inverses`)."""
    if k.shape[-1] > WIDEST:
        return kernels_triton.prepare(k, v, beta, g2, cu_seqlens, inverses, launch)
    T_b = solve(k, beta, g2, cu_seqlens, launch)
    u, w = kernels_triton.folded(k, v, beta, g2, cu_seqlens, T_b, launch)
    return u, w, T_b if inverses else None


def finish(q: Tensor, k: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """`outputs`, or the kernels for states and for outputs one after the other: a state of 256 rows leaves no
    registers for a second warpgroup."""
    if k.shape[-1] not in MOST_STAGES:
        return kernels_triton.outputs(q, k, *rest, **options, carry=carried)
    return outputs(q, k, *rest, **options)


fwd_h = partial(kernels_triton.fwd_h, carry=carried)
gated_delta_rule = partial(kernels_triton.gated_delta_rule, begin=prepare, finish=finish)
gated_delta_rule_bwd = partial(kernels_triton_bwd.gated_delta_rule_bwd, carry=carried)
