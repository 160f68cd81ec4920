"""What people use instead of `gated_delta_rule` and `chunk_gated_delta_rule_fwd_h`, and the sizes at which
they are timed.

Modes are letters for what is given: g, h (initial_state), n (use_qk_l2norm_in_kernel), and k (gk) for states.
"""

from collections.abc import Callable, Hashable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.ops.delta_rule.rivals import forget_tuning
from isobit.ops.gated_delta_rule import reference
from isobit.ops.gated_delta_rule.op import forward, gated_delta_rule
from isobit.ops.gated_delta_rule.proof import PROOF, STATES
from isobit.ops.gated_delta_rule.states_op import chunk_gated_delta_rule_fwd_h, states
from isobit.spec.options import known_options
from isobit.spec.proof import Args, Case, Cost, Proof
from isobit.spec.rival import Rival, cannot_import
from isobit.spec.rotation import copies_for
from isobit.spec.series import Pool, Series
from isobit.spec.trial import cloned
from isobit.spec.truth import Errors, errors_of

FLA, FLA_STATES = "fla.ops.gated_delta_rule", "fla.ops.common.chunk_delta_h"

#: o and the last states; or h, v_new and the last states.
Results = tuple[Tensor | None, ...]


def _fla_chunk(args: Args) -> Results:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    o, final = chunk_gated_delta_rule(**args, output_final_state=True)
    return o, final


def _fla_recurrent(args: Args) -> Results:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    o, final = fused_recurrent_gated_delta_rule(**args, output_final_state=True)
    return o, final


def _fla_states(args: Args) -> Results:
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h as fwd_h

    h, v_new, final = fwd_h(**args, output_final_state=True)
    return h, v_new, final


def _given(args: Args) -> Args:
    return {name: value for name, value in args.items() if value is not None}


def _tuned_afresh(args: Args) -> Args:
    forget_tuning()
    return _given(args)


def _available(module: str) -> Callable[[Case, torch.device], str | None]:
    def why_not(case: Case, device: torch.device) -> str | None:
        return cannot_import(module) or ("its kernels need a GPU" if device.type == "cpu" else None)

    return why_not


_FORWARD: dict[str, Any] = {"directions": ("fwd",), "takes": None}
RIVALS = {
    "fla": Rival("fla", _fla_chunk, prepare=_tuned_afresh, available=_available(FLA), **_FORWARD),
    "fla_recurrent": Rival(
        "fla_recurrent", _fla_recurrent, prepare=_given, available=_available(FLA), **_FORWARD
    ),
}
RIVALS_OF_STATES = {
    "fla": Rival("fla", _fla_states, prepare=_tuned_afresh, available=_available(FLA_STATES), **_FORWARD)
}


# What is timed


def _make(proof: Proof) -> Callable[[Case, Pool], list[Args]]:
    def make(case: Case, pool: Pool) -> list[Args]:
        args = proof.make(case, pool.device, pool.inputs)
        size = sum(v.nbytes for v in args.values() if isinstance(v, Tensor))
        return [args, *(cloned(args) for _ in range(copies_for(size, pool.device) - 1))]

    return make


def _call(args: Args, backend: str | None) -> Results:
    return gated_delta_rule(**args, output_final_state=True, backend=backend)


def _call_states(args: Args, backend: str | None) -> Results:
    return chunk_gated_delta_rule_fwd_h(**args, output_final_state=True, backend=backend)


def _cost(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """q, k and v are read once and o is written once. What kernels pass on to each other is left out: one
    kernel would not need it."""
    tokens, HV, K, V = dims["B"] * dims["T"], dims["HV"], dims["K"], dims["V"]
    elements = tokens * (2 * dims["H"] * K + 2 * HV * V)
    flops = 2 * tokens * HV * (64 * (3 * K + 2 * V) + 3 * K * V)
    return Cost(fwd_bytes=elements * dtype.itemsize, fwd_flops=flops)


def _cost_of_states(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """k, w and u are read once, v_new and one state per chunk written once."""
    tokens, HV, K, V = dims["B"] * dims["T"], dims["HV"], dims["K"], dims["V"]
    elements = tokens * (dims["H"] * K + HV * (K + 2 * V)) + -(-tokens // 64) * HV * K * V
    return Cost(fwd_bytes=elements * dtype.itemsize, fwd_flops=4 * tokens * HV * K * V)


@dataclass(frozen=True)
class _OneHead:
    """Truth in fp64: the results of the last value head, of the first batch element or of all packed
    sequences. `axes` are those of heads."""

    axes: tuple[int, ...]
    known: tuple[Tensor, ...]

    def error(self, direction: str, result: Results) -> Errors:
        """The worst of them, figure by figure; NaN if any is NaN."""
        pairs = zip(result, self.known, self.axes, strict=True)
        errors = [
            errors_of(ours.narrow(axis, ours.shape[axis] - 1, 1)[: len(true)], true)
            for ours, true, axis in pairs
            if ours is not None
        ]
        figures = torch.tensor([astuple(each) for each in errors], dtype=torch.float64)
        return Errors(*figures.amax(0).tolist())


def _last_head(args: Args, names: tuple[str, ...]) -> Args:
    """Heads are independent, so one is enough."""
    one = dict(args)
    for name in names:
        if args[name] is not None:
            one[name] = args[name][:1, :, -1:].double()
    if args["initial_state"] is not None:
        first = None if args["cu_seqlens"] is not None else 1
        one["initial_state"] = args["initial_state"][:first, -1:].double()
    return one


def _judge(args: Args) -> _OneHead:
    o, final = reference.formula(**_last_head(args, ("q", "k", "v", "g", "beta")))
    return _OneHead((2, 1), (o, final))


def _judge_states(args: Args) -> _OneHead:
    return _OneHead((2, 2, 1), reference.states(**_last_head(args, ("k", "w", "u", "g", "gk"))))


def _case(B: int, T: int, H: int, HV: int, mode: str = "gn", **options: Any) -> Case:
    dims = {"B": B, "T": T, "H": H, "HV": HV, "K": 128, "V": 128}
    return Case(dims, torch.bfloat16, data="random", options={"mode": mode, **options})


#: Value heads of Qwen3-Next, 32 with 16 of q and k, whole and on one of four GPUs.
GRID = [_case(B, T, *heads) for B in (1, 4) for heads in ((16, 32), (4, 8)) for T in (1024, 4096, 16384)]
PACKED = [_case(1, 8192, 16, 32, "ghn", lengths=lengths) for lengths in ("8x1024", "64x128")]
STATES_GRID = [_case(B, T, 16, 32, mode) for B in (1, 4) for T in (2048, 8192) for mode in ("g", "gh")]


def _kernels(case: Case) -> Hashable:
    """T is a number at run time, also for FLA, and so are the lengths of packed sequences."""
    options = {name: value for name, value in case.options.items() if name != "lengths"}
    sizes = {name: size for name, size in case.dims.items() if name != "T"}
    return tuple(sizes.values()), tuple(options.items()), "lengths" in case.options


def _series(name: str, cases: list[Case], **rest: Any) -> Series:
    return Series(
        op=forward, name=name, cases=cases, make=_make(PROOF), call=_call, cost=_cost, judge=_judge,
        rivals=RIVALS, directions=("fwd",), takes=tuple(known_options(forward)), against="fla",
        kernels=_kernels, **rest,
    )  # fmt: skip


SERIES = (
    _series("gated_delta_rule", GRID, core=GRID[1:2], about="`gated_delta_rule`, forward"),
    _series(
        "gated_delta_rule_packed", PACKED, core=PACKED[:1], declared_only=True, about="with packed sequences"
    ),
    Series(
        op=states, name="fwd_h", cases=STATES_GRID, core=STATES_GRID[2:3], make=_make(STATES),
        call=_call_states, cost=_cost_of_states, judge=_judge_states, rivals=RIVALS_OF_STATES,
        directions=("fwd",), takes=tuple(known_options(states)), against="fla", kernels=_kernels,
        about="`chunk_gated_delta_rule_fwd_h`, the states between chunks",
    ),
)  # fmt: skip
