"""What people use instead of `chunk_gated_delta_rule_bwd_dhu`, and the sizes at which both are timed.

Modes are letters for what is given: g, k (gk), h (h0, so dh0 is computed), t (dht).
"""

from collections.abc import Hashable
from dataclasses import astuple, dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import triton.testing
from torch import Tensor

from isobit.ops.delta_rule import reference
from isobit.ops.delta_rule.op import backward, chunk_gated_delta_rule_bwd_dhu
from isobit.ops.delta_rule.proof import PROOF
from isobit.ops.delta_rule.proof.packings import TIMED, lengths_of
from isobit.spec.options import known_options
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival, cannot_import
from isobit.spec.rotation import copies_for
from isobit.spec.series import Pool, Series
from isobit.spec.trial import cloned
from isobit.spec.truth import Errors, errors_of

FLA = "fla.ops.common.chunk_delta_h"


#: dh, dh0 (None without h0) and dv2.
Gradients = tuple[Tensor, Tensor | None, Tensor]


def _fla(args: Args) -> Gradients:
    from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_bwd_dhu as dhu

    dh, dh0, dv2 = dhu(**args)
    return dh, dh0, dv2


def forget_tuning(*modules: str) -> None:
    """FLA's autotuner keeps one choice for all B and T, whichever came first, in memory and on disk: let it
    choose again, for the kernels of these modules, by default those of states. It would run each
    configuration for a tenth of a second, up to thousands of calls, and clear the cache before each. A fifth
    of that are still dozens of calls of the longest kernel."""
    trial = partial(triton.testing.do_bench, warmup=5, rep=20)
    for kernel in (each for name in modules or (FLA,) for each in vars(import_module(name)).values()):
        while kernel is not None:
            if hasattr(kernel, "configs") and isinstance(getattr(kernel, "cache", None), dict):
                kernel.cache.clear()
                kernel.cache_results = False
                kernel.do_bench = trial
            kernel = getattr(kernel, "fn", None)


def _tuned_afresh(args: Args) -> Args:
    forget_tuning()
    return {name: value for name, value in args.items() if value is not None}


def _fla_available(case: Case, device: torch.device) -> str | None:
    return cannot_import(FLA) or ("its kernels need a GPU" if device.type == "cpu" else None)


RIVALS = {
    "fla": Rival(
        "fla", _fla, directions=("bwd",), prepare=_tuned_afresh, available=_fla_available, takes=None
    )
}


# What is timed


def _make(case: Case, pool: Pool) -> list[Args]:
    args = PROOF.make(case, pool.device, pool.inputs)
    size = sum(v.nbytes for v in args.values() if isinstance(v, Tensor))
    return [args, *(cloned(args) for _ in range(copies_for(size, pool.device) - 1))]


def _call(args: Args, backend: str | None) -> Gradients:
    return chunk_gated_delta_rule_bwd_dhu(**args, backend=backend)


def _cost(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """q, k, w, do and dv are read once, dv2 and one state per chunk written once. Gates and the first and
    last states are left out: they are at most a few percent."""
    tokens, HV, K, V = dims["B"] * dims["T"], dims["HV"], dims["K"], dims["V"]
    elements = tokens * (2 * dims["H"] * K + HV * (K + 3 * V)) + -(-tokens // 64) * HV * K * V
    return Cost(fwd_bytes=0, bwd_bytes=elements * dtype.itemsize, bwd_flops=6 * tokens * HV * K * V)


@dataclass(frozen=True)
class _OneHead:
    """Truth in fp64: dh, dh0 and dv2 of one head of the first batch element, or of all packed sequences."""

    head: int
    known: Gradients

    def error(self, direction: str, result: tuple[Any, ...]) -> Errors:
        """The worst of the three, figure by figure; NaN if any is NaN."""
        (dh, dh0, dv2), (true_dh, true_dh0, true_dv2) = result, self.known
        errors = [errors_of(dh[:1, :, self.head], true_dh), errors_of(dv2[:1, :, self.head], true_dv2)]
        if true_dh0 is not None:
            errors.append(errors_of(dh0[: len(true_dh0), self.head], true_dh0))
        figures = torch.tensor([astuple(each) for each in errors], dtype=torch.float64)
        return Errors(*figures.amax(0).tolist())


def _judge(args: Args) -> _OneHead:
    """Heads are independent, so one is enough."""
    HV = args["w"].shape[2]
    head, group = HV - 1, HV // args["q"].shape[2]
    one: dict[str, Any] = {p.name: args.get(p.name) for p in backward.contract.params} | {"use_exp2": True}
    S = None if args["cu_seqlens"] is not None else 1  # the states of the first batch element, or of all
    for name in ("q", "k", "w", "do", "dv", "g", "gk", "h0", "dht"):
        t = one[name]
        if t is None:
            continue
        if name in ("h0", "dht"):
            one[name] = t[:S, head : head + 1].double()
        else:
            h = head // group if name in ("q", "k") else head
            one[name] = t[:1, :, h : h + 1].double()
    dh, dh0, dv2 = reference.recurrence(**one, rounded=False)
    return _OneHead(head, (dh[:, :, 0], None if dh0 is None else dh0[:, 0], dv2[:, :, 0]))


def _case(B: int, T: int, H: int, mode: str, HV: int = 0, **options: Any) -> Case:
    dims = {"B": B, "T": T, "H": H, "HV": HV or H, "K": 128, "V": 128}
    return Case(dims, torch.bfloat16, data="random", options={"mode": mode, **options})


MODES = ("none", "ht", "g", "k", "gk")
GRID = [
    _case(B, T, H, mode)
    for B in (1, 2, 4)
    for H in (16, 32)
    for T in (2048, 4096, 8192, 16384)
    for mode in MODES
]
WIDE = [
    _case(1, 2048, 64, "kt"),
    _case(2, 1024, 64, "kht"),
    *(_case(B, 8192, 64, "kht") for B in (1, 2, 4, 8)),
]
PACKED = [
    _case(1, 512, 2, "kt", lengths=TIMED[0]),
    _case(1, 768, 2, "ght", lengths=TIMED[1]),
    *(_case(1, sum(lengths_of(each)), 64, "kht", lengths=each) for each in TIMED[2:]),
]
OTHER = [
    *(_case(1, 512, 4, mode) for mode in ("kt", "gt")),
    *(_case(1, 512, 16, mode) for mode in ("none", "g", "gk")),
    *(_case(2, 4096, 16, "gk", HV=16 * group) for group in (2, 4)),
    *(_case(1, 8192, 32, mode, v_first=True) for mode in ("ht", "gk")),
]


def kernels_of(case: Case) -> Hashable:
    """T is a number at run time, also for FLA, and so are the lengths of packed sequences."""
    options = {name: value for name, value in case.options.items() if name != "lengths"}
    sizes = {name: size for name, size in case.dims.items() if name != "T"}
    return tuple(sizes.values()), tuple(options.items()), "lengths" in case.options


def _series(name: str, cases: list[Case], **rest: Any) -> Series:
    return Series(
        op=backward, name=name, cases=cases, make=_make, call=_call, cost=_cost, judge=_judge, rivals=RIVALS,
        directions=("bwd",), takes=tuple(known_options(backward)), against="fla", difference=True,
        kernels=kernels_of, bandwidth=True, **rest,
    )  # fmt: skip


def _core(cases: list[Case]) -> list[Case]:
    some = [case for case in cases if case.dims["T"] == 8192 and case.dims["B"] != 2]
    return [case for case in some if case.options["mode"] in ("none", "gk")]


SERIES = (
    _series("dhu", GRID, core=_core(GRID), about="`chunk_gated_delta_rule_bwd_dhu`, a grid of sizes"),
    _series("dhu_wide", WIDE, core=WIDE[2:3], declared_only=True, about="the same with 64 heads"),
    _series("dhu_packed", PACKED, core=PACKED[5:6], declared_only=True, about="with packed sequences"),
    _series("dhu_other", OTHER, core=OTHER[-1:], declared_only=True, about="short, grouped, other layout"),
)
