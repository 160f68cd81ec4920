"""The proof of `det_grouped_dw`: for every expert a sum over its own rows."""

import math
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from isobit.kernels.host.token_stream import GROUP
from isobit.ops.det_gemm.op import det_gemm_dw
from isobit.ops.det_gemm.proof import inputs as of_products
from isobit.ops.det_gemm.proof import truth
from isobit.ops.det_gemm.proof.gemm import HOPPER, MB, memory_of_model
from isobit.ops.det_grouped_linear.op import grouped_dw
from isobit.ops.det_grouped_linear.proof import inputs
from isobit.ops.det_grouped_linear.proof.inputs import INT64, groups, sequences
from isobit.ops.det_grouped_linear.proof.plans import BLANK, Plan, in_other_order, plans, taken
from isobit.spec import error_bounds as errors
from isobit.spec import inputs as alter
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args, Case, Control, Kernels, Mutant, Proof, Sample
from isobit.spec.trial import Trial

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

_X_AND_DY = ("x", "dy")

#: Experts whose sums are sampled.
SAMPLED_EXPERTS = 5


def _flat(args: Args) -> Args:
    return args | {n: args[n].flatten(0, -2) for n in _X_AND_DY}


# Numbers


def formula(args: Args) -> tuple[Tensor, ...]:
    args = _flat(args)
    x, dy, init = args["x"], args["dy"], args["init"]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    sums = [
        truth.token_sum(x[first:end], dy[first:end], None, None if init is None else init[e])
        for e, first, end in groups(args)
    ]
    return (torch.stack(sums) if sums else x.new_zeros((0, dy.shape[1], x.shape[1]), dtype=wide),)


def scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    args = _flat(args)
    sizes = torch.zeros_like(outputs[0])
    for e, first, end in groups(args):
        bounds = errors.cut(sequences(args, e, first, end), errors.SEGMENT)
        start = None if args["init"] is None else args["init"][e]
        sizes[e] = errors.segment_error(args["dy"][first:end].mT, args["x"][first:end], bounds, start)
    return {"dw": sizes}


def exact(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Sample]:
    args = _flat(args)
    several = sorted(groups(args), key=lambda group: group[1] - group[2])[:SAMPLED_EXPERTS]
    found, where = [], None
    for e, first, end in several:
        start = None if args["init"] is None else args["init"][e]
        lengths = sequences(args, e, first, end)
        where, bits = truth.segment_sample(
            args["dy"][first:end].mT, args["x"][first:end], lengths, start, F32
        )
        found.append(bits)
    assert where is not None
    experts = torch.tensor([e for e, _, _ in several])
    return {"dw": ((experts[:, None, None], *(i[None] for i in where)), torch.stack(found))}


# Bits


def invariant(trial: Trial) -> list[OutputCheck]:
    """dW of an expert depends on its rows, on their order and on where its sequences begin: not on other
    experts, their number or their order, on rows of none, or on how many calls compute it."""
    args = _flat(trial.args())
    whole = trial.forward(args)[0]
    checks = []
    for plan in plans(args, ()):
        pairs = plan.whole(args)
        if pairs:
            places, experts = (torch.tensor(side, device=trial.device) for side in zip(*pairs, strict=True))
            ours = trial.forward(_call(plan, args))[0]
            checks.append(same_bits("0:dw", ours[places], whole[experts], plan.what))
    for layout in trial.proof.layouts:
        laid = inputs.lay_out_dw(args, layout)
        ours = trial.in_class(laid).forward(laid)[0]
        checks.append(same_bits("0:dw", ours, whole, f"layout {layout}"))
    for what, cuts in _cuts(args).items():
        checks.append(same_bits("0:dw", _in_two_calls(trial, args, cuts), whole, what))
    half = {e: min(GROUP // 2, end - first) for e, first, end in groups(args)}
    others = {
        "a cut after 8 rows of every expert": _in_two_calls(trial, args, half),
        "another first row of every expert": trial.forward(_call(in_other_order(args, GROUP // 2), args))[0],
    }
    return checks + [trial.control(what, [whole], [other]) for what, other in others.items()]


def _call(plan: Plan, args: Args) -> Args:
    """The arguments of a plan. What has one entry per expert follows it; sequences of a plan with other rows
    are those of nobody, and it is not compared."""
    device = args["x"].device
    index, experts, offsets = plan.index(device), plan.experts(device), plan.offsets(args["offsets"])
    call = args | {n: taken(args[n], index) for n in _X_AND_DY} | {"offsets": offsets}
    if args["init"] is not None:
        call["init"] = taken(args["init"], experts)
    if args["cu_seqlens"] is not None:
        old, begins = args["offsets"].tolist(), offsets.tolist()
        rows = []
        for i, (e, own) in enumerate(plan.groups):
            inside = [] if e == BLANK else (args["cu_seqlens"][e] - old[e]).tolist()
            inside = inside or [0] * args["cu_seqlens"].shape[1]
            rows.append([begins[i] + min(b, len(own)) for b in inside[:-1]] + [begins[i + 1]])
        call["cu_seqlens"] = torch.tensor(rows, dtype=offsets.dtype, device=device)
    return call


def _cuts(args: Args) -> dict[str, dict[int, int]]:
    """Where a batch may be split into two calls: (what) -> the rows of each expert in the first one."""
    sizes = {e: end - first for e, first, end in groups(args)}
    if args["cu_seqlens"] is None:
        segment = errors.SEGMENT
        return {f"a cut after {segment} rows of every expert": {e: min(segment, n) for e, n in sizes.items()}}
    after = {e: [*accumulate(sequences(args, e, first, end))] for e, first, end in groups(args)}
    count = args["cu_seqlens"].shape[1] - 1
    return {
        f"a cut after {n} of {count} sequences": {e: after[e][n - 1] for e in after} for n in (1, count - 1)
    }


def _in_two_calls(trial: Trial, args: Args, cuts: dict[int, int]) -> Tensor:
    """The first rows of every expert in a call of their own, the others in one that begins with its sums."""
    device = args["x"].device
    parts = []
    for second in (False, True):
        own, bounds = [], [0]
        for e, first, end in groups(args):
            rows = range(first + cuts[e], end) if second else range(first, first + cuts[e])
            own.append((e, [*rows]))
            bounds.append(bounds[-1] + len(rows))
        plan = Plan("", own)
        call = args | {n: taken(args[n], plan.index(device)) for n in _X_AND_DY}
        call["offsets"] = plan.offsets(args["offsets"])
        if args["cu_seqlens"] is not None:
            lines = []
            for (e, first, _), begin, size in zip(
                groups(args), bounds, map(len, (r for _, r in own)), strict=False
            ):
                away = first + cuts[e] if second else first
                inside = [min(max(b - away, 0), size) for b in args["cu_seqlens"][e].tolist()]
                lines.append([begin, *(begin + b for b in inside[1:-1]), begin + size])
            call["cu_seqlens"] = torch.tensor(lines, dtype=args["offsets"].dtype, device=device)
        parts.append(call)
    start = trial.forward(parts[0])[0]
    return trial.forward(parts[1] | {"init": start})[0]


def as_det_gemm_dw(trial: Trial) -> list[OutputCheck]:
    """Expert by expert the bits of `det_gemm_dw`."""
    args = _flat(trial.args())
    whole, checks = trial.forward(args)[0], []
    for e, first, end in sorted(groups(args), key=lambda group: group[1] - group[2])[:SAMPLED_EXPERTS]:
        call = {n: args[n][first:end] for n in _X_AND_DY}
        if args["init"] is not None:
            call["init"] = args["init"][e]
        if args["cu_seqlens"] is not None:
            call["cu_seqlens"] = args["cu_seqlens"][e] - first
        alone = det_gemm_dw(**call, numerics=trial.numerics)
        checks.append(same_bits("0:dw", whole[e], alone, f"expert {e} against det_gemm_dw"))
    return checks


# Kernels, memory, cases


def record(module: str, launch: Any, dtype: torch.dtype) -> None:
    """Narrow tiles and wide ones; in fp32 with sequences and a start, and rounded as for the layer."""
    kernels = import_module(f"isobit.ops.det_grouped_linear.{module}")
    M, E = 4096, 16

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for K, N, some, out_dtype in ((64, 64, False, F32), (2048, 1536, True, F32), (2048, 1536, False, dtype)):
        cuts = empty(E, 9, dtype=torch.int32) if some else None
        init = empty(E, N, K, dtype=F32) if some else None
        offsets = empty(E + 1, dtype=torch.int32)
        kernels.token_product(empty(M, K), empty(M, N), offsets, cuts, init, out_dtype, launch=launch)


def memory(case: Case, backend: str, direction: str) -> int:
    *lead, E, K, N = case.dims.values()
    M = math.prod(lead)
    if backend == "model":
        return memory_of_model(K, M, N) + 16 * E * N * K
    return MB + 16 * (M + E)


def _first_sequence_elsewhere(args: Args) -> Args:
    """cu_seqlens of an expert that do not begin with its first row."""
    offsets = args["offsets"]
    bounds = torch.stack([offsets[:-1], offsets[1:]], 1).contiguous()
    bounds[-1, 0] += 1
    bounds[-1, 1] += 1
    return args | {"cu_seqlens": bounds}


DW = Proof(
    op=grouped_dw,
    op_class="token_sum",
    outputs=("dw",),
    make=inputs.make_dw,
    formula=formula,
    scale=scale,
    controls=[
        Control(
            "another order of the groups of 16 rows",
            lambda args: _call(in_other_order(args, GROUP), _flat(args) | {"cu_seqlens": None}),
        ),
    ],
    padding=lambda args, rows: {n: alter.rows_of_nan(args[n], rows) for n in _X_AND_DY},
    layouts=of_products.LAYOUTS,
    lay_out=inputs.lay_out_dw,
    memory=memory,
    cases=[
        Case({"M": 60, "E": 4, "K": 32, "N": 24}, BF16),
        Case({"M": 0, "E": 3, "K": 8, "N": 5}, BF16, options={"init": True}),
        Case({"M": 9, "E": 1, "K": 5, "N": 1}, F16, options={"groups": "one"}),
        Case({"B": 3, "T": 50, "E": 5, "K": 24, "N": 8}, BF16, options={"sequences": 3}),
        Case({"M": 700, "E": 3, "K": 9, "N": 21}, F16, options={"sequences": 5, "init": True}),
        Case({"M": 530, "E": 2, "K": 17, "N": 33}, F16, layout="strided", options={"groups": "one"}),
        Case({"M": 100, "E": 10, "K": 16, "N": 17}, BF16, layout="transposed", options={"offsets": INT64}),
        Case({"M": 40, "E": 4, "K": 70, "N": 65}, BF16, layout="offset"),
        Case({"M": 4097, "E": 40, "K": 520, "N": 264}, BF16, heavy=True, options={"sequences": 9}),
        Case({"M": 16384, "E": 8, "K": 512, "N": 1003}, F16, data="random", heavy=True,
             options={"init": True}),
    ],
    bit_cases=[
        Case({"M": 1100, "E": 3, "K": 24, "N": 16}, BF16),
        Case({"M": 900, "E": 4, "K": 18, "N": 24}, F16, options={"sequences": 4, "init": True}),
        Case({"M": 8200, "E": 64, "K": 1024, "N": 768}, BF16, data="random", heavy=True,
             options={"groups": "routed"}),
        Case({"M": 8192, "E": 8, "K": 1000, "N": 2048}, F16, data="random", heavy=True,
             options={"sequences": 20}),
    ],
    memory_cases=[
        Case({"M": 300, "E": 4, "K": 64, "N": 96}, BF16, data="random"),
        Case({"M": 8192, "E": 16, "K": 2048, "N": 1024}, BF16, data="random", heavy=True,
             options={"sequences": 16}),
    ],
    mutants=[
        Mutant("fp32 operands", "x", lambda args: args | {n: args[n].float() for n in _X_AND_DY}),
        Mutant("two dtypes", "dy", lambda args: args | {"dy": alter.in_other_dtype(args["dy"])}),
        Mutant("float offsets", "offsets", lambda args: args | {"offsets": args["offsets"].float()}),
        Mutant("no offsets", "offsets", lambda args: args | {"offsets": args["offsets"][:0]}),
        Mutant("bounds of all experts together", "cu_seqlens",
               lambda args: args | {"cu_seqlens": args["offsets"]}),
        Mutant("bounds of too few experts", "cu_seqlens",
               lambda args: args | {"cu_seqlens": args["offsets"][None]}),
        Mutant("bounds that begin elsewhere", "cu_seqlens", _first_sequence_elsewhere, values=True),
        Mutant("a narrow init", "init",
               lambda args: args | {"init": args["dy"].new_zeros(
                   len(args["offsets"]) - 1, args["dy"].shape[-1], args["x"].shape[-1])}),
        Mutant("an init of one expert", "init",
               lambda args: args | {"init": args["dy"].new_zeros(
                   args["dy"].shape[-1], args["x"].shape[-1]).float()}),
    ],
    bad_value=inputs.descending,
    kernels={
        "hopper": Kernels(partial(record, "kernels_hopper"), targets=HOPPER),
        "triton": Kernels(partial(record, "kernels_triton")),
    },
    exact=exact,
    agree_cases=[
        Case({"M": 600, "E": 3, "K": 20, "N": 23}, BF16, options={"init": True}),
        *(Case({"M": 600, "E": 2, "K": 16, "N": 16}, BF16, data=kind, options={"sequences": 3})
          for kind in of_products.ADVERSARIAL),
        *(Case({"M": 4100, "E": 9, "K": 1000, "N": 264}, BF16, data=kind, heavy=True)
          for kind in of_products.ADVERSARIAL),
        Case({"M": 16384, "E": 32, "K": 2048, "N": 1536}, BF16, data="random", heavy=True),
        Case({"M": 8192, "E": 8, "K": 2048, "N": 1000}, F16, data="random", heavy=True,
             options={"sequences": 20}),
    ],
    slow=("model",),
    invariant=invariant,
    also=as_det_gemm_dw,
)  # fmt: skip
