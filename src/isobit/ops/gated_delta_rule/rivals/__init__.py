"""What people use instead of `gated_delta_rule` and `chunk_gated_delta_rule_fwd_h`, and the sizes at which
they are timed.

Modes are letters for what is given: g, h (initial_state), n (use_qk_l2norm_in_kernel), and k (gk) for states.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from isobit.ops.delta_rule.proof.packings import TIMED
from isobit.ops.delta_rule.rivals import kernels_of
from isobit.ops.gated_delta_rule import reference, reference_bwd
from isobit.ops.gated_delta_rule.op import forward, gated_delta_rule
from isobit.ops.gated_delta_rule.proof import PROOF, STATES
from isobit.ops.gated_delta_rule.rivals.calls import RIVALS, RIVALS_OF_STATES, RIVALS_OF_TRAINING, Results
from isobit.ops.gated_delta_rule.states_op import chunk_gated_delta_rule_fwd_h, states
from isobit.spec.options import known_options
from isobit.spec.proof import Args, Case, Cost, Proof
from isobit.spec.rotation import copies_for
from isobit.spec.series import Pool, Series
from isobit.spec.trial import cloned
from isobit.spec.truth import Errors, cotangent_like, errors_of

# What is timed


def _make(proof: Proof) -> Callable[[Case, Pool], list[Args]]:
    def make(case: Case, pool: Pool) -> list[Args]:
        args = proof.make(case, pool.device, pool.inputs)
        size = sum(v.nbytes for v in args.values() if isinstance(v, Tensor))
        return [args, *(cloned(args) for _ in range(copies_for(size, pool.device) - 1))]

    return make


def _call(args: Args, backend: str | None) -> Results:
    return gated_delta_rule(**args, output_final_state=True, backend=backend)


def _call_training(args: Args, backend: str | None) -> Tensor:
    return gated_delta_rule(**args, backend=backend)[0]


def _call_states(args: Args, backend: str | None) -> Results:
    return chunk_gated_delta_rule_fwd_h(**args, output_final_state=True, backend=backend)


def _cost(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """q, k and v are read once and o is written once; backward these and do are read, and dq, dk and dv
    written. What kernels pass on to each other is left out: one kernel would not need it. The backward has
    the products of the forward twice, and computes states again."""
    tokens, HV, K, V = dims["B"] * dims["T"], dims["HV"], dims["K"], dims["V"]
    own, values = 2 * tokens * dims["H"] * K, tokens * HV * V
    flops = 2 * tokens * HV * (64 * (3 * K + 2 * V) + 3 * K * V)
    again = 4 * tokens * HV * K * V
    return Cost(
        fwd_bytes=(own + 2 * values) * dtype.itemsize, bwd_bytes=(2 * own + 3 * values) * dtype.itemsize,
        fwd_flops=flops, bwd_flops=2 * flops + again,
    )  # fmt: skip


def _cost_of_states(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """k, w and u are read once, v_new and one state per chunk written once."""
    tokens, HV, K, V = dims["B"] * dims["T"], dims["HV"], dims["K"], dims["V"]
    elements = tokens * (dims["H"] * K + HV * (K + 2 * V)) + -(-tokens // 64) * HV * K * V
    return Cost(fwd_bytes=elements * dtype.itemsize, fwd_flops=4 * tokens * HV * K * V)


@dataclass(frozen=True)
class _LastHeads:
    """Truth in fp64: the results of the last heads, of the first batch element or of all packed sequences.
    `axes` are those of heads."""

    axes: tuple[int, ...]
    known: tuple[Tensor, ...]

    def error(self, direction: str, result: Results) -> Errors:
        """The worst of them, figure by figure; NaN if any is NaN."""
        pairs = zip(result, self.known, self.axes, strict=True)
        errors = []
        for ours, true, axis in pairs:
            if ours is not None:
                heads = true.shape[axis]
                last = ours.detach().narrow(axis, ours.shape[axis] - heads, heads)
                errors.append(errors_of(last[: len(true)], true))
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


def _judge(args: Args) -> _LastHeads:
    o, final = reference.formula(**_last_head(args, ("q", "k", "v", "g", "beta")))
    return _LastHeads((2, 1), (o, final))


def _judge_training(args: Args) -> _LastHeads:
    """o and all gradients. Those of q and k are sums over the value heads that share them."""
    group = args["v"].shape[2] // args["q"].shape[2]
    one = dict(args)
    for name in INPUTS:
        heads = 1 if name in ("q", "k") else group
        one[name] = args[name][:1, :, -heads:].double()
    do = cotangent_like(args["v"])[:1, :, -group:].double()
    o, _ = reference.formula(**one)
    wanted = {f"want_{name}": name in INPUTS for name in (*INPUTS, "initial_state")}
    gradients = reference_bwd.gated_delta_rule_bwd(**one, do=do, dfinal_state=None, **wanted)
    known = (o, *(t for t in gradients if t is not None))
    return _LastHeads((2,) * len(known), known)


def _judge_states(args: Args) -> _LastHeads:
    return _LastHeads((2, 2, 1), reference.states(**_last_head(args, ("k", "w", "u", "g", "gk"))))


def _case(B: int, T: int, H: int, HV: int, mode: str = "gn", **options: Any) -> Case:
    dims = {"B": B, "T": T, "H": H, "HV": HV, "K": 128, "V": 128}
    return Case(dims, torch.bfloat16, data="random", options={"mode": mode, **options})


#: Gradients that training takes.
INPUTS = ("q", "k", "v", "g", "beta")

#: FLA's own sizes; those of Qwen3-Next, 32 value heads and 16 of q and k, whole and on one of four GPUs.
GRID = [_case(B, T, H, H) for B in (1, 2, 4) for H in (16, 32) for T in (2048, 4096, 8192, 16384)]
GROUPED = [_case(B, T, *heads) for B in (1, 4) for heads in ((16, 32), (4, 8)) for T in (4096, 16384)]
PACKED = [
    *(_case(1, 8192, 16, 32, lengths=lengths) for lengths in ("8x1024", "64x128")),
    *(_case(1, 8192, H, H, lengths=TIMED[3]) for H in (16, 32)),
]
STATES_GRID = [_case(B, T, 16, 32, mode) for B in (1, 4) for T in (2048, 8192) for mode in ("g", "gh")]


def _series(name: str, cases: list[Case], **rest: Any) -> Series:
    return Series(
        op=forward, name=name, cases=cases, make=_make(PROOF), cost=_cost, against="fla", kernels=kernels_of,
        takes=tuple(known_options(forward)), **rest,
    )  # fmt: skip


def _small(T: int, lengths: str | None = None) -> list[Case]:
    """For a CPU."""
    dims = {"B": 1, "T": T, "H": 1, "HV": 2, "K": 64, "V": 64}
    options = {"mode": "gn"} | ({} if lengths is None else {"lengths": lengths})
    return [Case(dims, torch.bfloat16, data="random", options=options)]


def _forward(name: str, cases: list[Case], **rest: Any) -> Series:
    return _series(name, cases, call=_call, judge=_judge, rivals=RIVALS, directions=("fwd",), **rest)


def _training(name: str, cases: list[Case], **rest: Any) -> Series:
    return _series(
        name, cases, call=_call_training, judge=_judge_training, rivals=RIVALS_OF_TRAINING, inputs=INPUTS,
        directions=("fwd_bwd",), **rest,
    )  # fmt: skip


def _core(cases: list[Case]) -> list[Case]:
    return [case for case in cases if case.dims["T"] == 8192 and case.dims["B"] != 2]


def _of_all_sizes(make: Callable[..., Series], name: str, about: str) -> tuple[Series, ...]:
    """The grid, and apart from it what it lacks: grouped heads and packed sequences."""
    return (
        make(name, GRID, core=_core(GRID), small=_small(70), about=about),
        make(
            f"{name}_grouped", GROUPED, core=GROUPED[:1], small=_small(5), declared_only=True,
            about=f"{about}, with two value heads for each of q and k",
        ),
        make(
            f"{name}_packed", PACKED, core=PACKED[::2], small=_small(70, "30+0+40"), declared_only=True,
            about=f"{about}, with packed sequences",
        ),
    )  # fmt: skip


SERIES = (
    *_of_all_sizes(_forward, "gated_delta_rule", "`gated_delta_rule`, forward"),
    *_of_all_sizes(_training, "gated_delta_rule_train", "forward and backward"),
    Series(
        op=states, name="fwd_h", cases=STATES_GRID, core=STATES_GRID[2:3], make=_make(STATES),
        call=_call_states, cost=_cost_of_states, judge=_judge_states, rivals=RIVALS_OF_STATES,
        directions=("fwd",), takes=tuple(known_options(states)), against="fla", kernels=kernels_of,
        about="`chunk_gated_delta_rule_fwd_h`, the states between chunks",
    ),
)  # fmt: skip
