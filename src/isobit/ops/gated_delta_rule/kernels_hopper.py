"""The gated delta rule on Hopper, from its kernels.

    solve     T of each chunk                      `kernels_hopper_solve`
    fold      u and w                              `kernels_hopper_fold`: for K = V = 128
    outputs   states, new values and o together    `kernels_hopper_outputs`
    states    states and new values                `kernels_hopper_states`: for the backward, and for fwd_h
    gradients those inside a chunk                 `kernels_hopper_gradients`: for K = V = 128

The rest is Triton's, with the same bits.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.frame.launch import Launch, run
from isobit.ops.delta_rule.kernels_hopper import STAGES_FORWARD, dhu
from isobit.ops.gated_delta_rule import (
    kernels_hopper_fold,
    kernels_hopper_gradients,
    kernels_triton,
    kernels_triton_bwd,
)
from isobit.ops.gated_delta_rule.kernels_hopper_outputs import MOST_STAGES, outputs
from isobit.ops.gated_delta_rule.kernels_hopper_solve import WIDEST, solve
from isobit.ops.gated_delta_rule.kernels_hopper_states import states
from isobit.ops.gated_delta_rule.kernels_triton import tiles_of


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
    k: Tensor, w: Tensor, u: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """`states`, or those of Triton, which have the same bits, where they are faster: 256 rows and 64 columns
    are more than the registers of a warpgroup hold, and as long as four times as many programs of 16 columns
    have an SM each, they take half the time. `options` are those of `states`."""
    B, _, HV, V = u.shape
    sequences = B if rest[3] is None else len(rest[3]) - 1
    if k.shape[-1] == 256 and sequences * HV * (V // 16) <= sm_count(u.device):
        return kernels_triton.states(k, w, u, *rest)
    return states(k, w, u, *rest, **options)


def recurrences(
    forwards: Sequence[Any], backwards: Mapping[str, Any], launch: Launch, sms: int = 0
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The states again, and their gradients, side by side: each takes the chunks of a sequence one after the
    other, so with few heads neither of them keeps all SMs busy. `sms`: the SMs to make schedules for; 0:
    those of the device."""
    of_states: list[Any] = []

    def begin() -> None:
        of_states.extend(carried(*forwards, launch, overlapping=True, sms=sms))

    of_gradients = dhu(launch=launch, before=begin, sms=sms, **backwards)
    return tuple(of_states), of_gradients


def prepare(
    k: Tensor, v: Tensor, beta: Tensor, g2: Tensor | None, cu_seqlens: Tensor | None, inverses: bool = False,
    launch: Launch = run, normed: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(k, u, w, T rounded to the dtype of k: [B, T, HV, 64], if `inverses`). `normed`: k is divided by its
    norm; rows of no sequence are then anything."""
    if k.shape[-1] > WIDEST:
        return kernels_triton.prepare(k, v, beta, g2, cu_seqlens, inverses, launch, normed)
    normal = torch.empty_like(k) if normed else None
    T_b = solve(k, beta, g2, cu_seqlens, launch, normal)
    k = k if normal is None else normal
    return k, *fold(k, v, beta, g2, cu_seqlens, T_b, launch), T_b if inverses else None


def fold(
    k: Tensor, v: Tensor, beta: Tensor, g2: Tensor | None, cu_seqlens: Tensor | None, inverses: Tensor,
    launch: Launch, sms: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(u, w) from T, rounded. `sms`: the SMs to make a schedule for; 0: those of the
    device."""
    if kernels_hopper_fold.serves(k, v):
        return kernels_hopper_fold.folded(k, v, beta, g2, cu_seqlens, inverses, launch, sms)
    return kernels_triton.folded(k, v, beta, g2, cu_seqlens, inverses, launch)


def in_one_kernel(K: int, items: int, sms: int) -> bool:
    """Whether states and outputs of so many items of 64 columns of a state are computed by one kernel. A
    chunk takes 1.6 us there and 0.9 in the kernel for states alone, but no state and no new value goes
    through memory: on an H200 204 us instead of 190 for 32 items of 128 chunks, instead of 291 for 64, and
    409 instead of 982 for 256 (2026-11). 256 rows leave no registers for more warpgroups."""
    return K in MOST_STAGES and 3 * items > sms


def finish(
    q: Tensor, k: Tensor, w: Tensor, u: Tensor, g2: Tensor | None, initial: Tensor | None,
    cu_seqlens: Tensor | None, *rest: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    B, _, HV, V = u.shape
    items = (B if cu_seqlens is None else len(cu_seqlens) - 1) * HV * (V // 64)
    if in_one_kernel(k.shape[-1], items, sm_count(u.device)):
        return outputs(q, k, w, u, g2, initial, cu_seqlens, *rest)
    return kernels_triton.outputs(q, k, w, u, g2, initial, cu_seqlens, *rest, carry=carried)


def is_spread(items: int, group: int, sms: int) -> bool:
    """Whether one kernel for gradients of a chunk is expected to be no slower than several. An item there is
    a chunk of a key head. Its value heads follow one another: 12 to 16 us each on an H200, where several took
    0.16 to 0.24 us for each chunk of a value head (2026-11). That several take 40 us however few chunks there
    are is assumed: some 6 us for each launch. The rule itself was not timed."""
    return -(-items // sms) * group * 14 <= 40 + 0.2 * items * group


def gradients(
    raw_q: Tensor, raw_k: Tensor, q: Tensor, k: Tensor, v: Tensor, g2: Tensor | None, beta: Tensor,
    inverse: Tensor, do: Tensor, vn: Tensor, dvn: Tensor, h: Tensor, dh: Tensor, bounds: Tensor | None,
    scale: float, v_first: bool, norms: tuple[Tensor, Tensor] | None, launch: Launch,
) -> tuple[Any, ...]:  # fmt: skip
    """Those of each chunk by itself, as `kernels_triton_bwd.gradients` has them."""
    B, T, H, _ = q.shape
    items = H * tiles_of(T, B if bounds is None else len(bounds) - 1, bounds)
    given = (
        raw_q, raw_k, q, k, v, g2, beta, inverse, do, vn, dvn, h, dh, bounds, scale, v_first, norms,
    )  # fmt: skip
    spread = is_spread(items, v.shape[2] // H, sm_count(v.device))
    if spread and kernels_hopper_gradients.why_not(q, v) is None:
        return kernels_hopper_gradients.gradients(*given, launch=launch)
    return kernels_triton_bwd.gradients(*given, launch)


fwd_h = partial(kernels_triton.fwd_h, carry=carried)
gated_delta_rule = partial(kernels_triton.gated_delta_rule, begin=prepare, finish=finish)
gated_delta_rule_bwd = partial(
    kernels_triton_bwd.gated_delta_rule_bwd, fold=fold, recur=recurrences, inside=gradients
)
