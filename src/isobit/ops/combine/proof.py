"""The proofs of `combine` and `spread`: inputs, the truth, error bounds, exact bits in numpy, and what must
not change the bits of a token."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobit.ops.combine.op import forward, spreading
from isobit.spec import inputs as alter
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args, Case, Control, InputOptions, Kernels, Mutant, Proof, Sample
from isobit.spec.trial import Trial

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MB = 1 << 20
ALL = (slice(None),)


# Inputs


def make_combine(case: Case, device: torch.device, options: InputOptions) -> Args:
    N, k, D = case.dims.values()
    gen = torch.Generator().manual_seed(options.seed)
    place = _places(N, k, case.options.get("idle", 0), gen)
    R = place.numel() + case.options.get("idle", 0)
    y, weights = torch.randn(R, D, generator=gen), torch.randn(N, k, generator=gen)
    if case.data == "edge" and D:
        y[1::3, -1] += 100.0  # exposes a dropped tail
        weights[..., :1] *= 30.0
    elif case.data == "constant":
        y.fill_(options.constant)
    elif case.data == "cancelling":  # two large terms cancel: what was added between them is lost
        y *= 2.0**-18
        y[place[..., 0].flatten()] *= 2.0**18
        y[place[..., 1].flatten()] = -y[place[..., 0].flatten()]
        weights[..., 1] = weights[..., 0]
    own = case.options.get("weights", case.dtype)
    args = {"y": y.to(device, case.dtype), "weights": weights.to(device, own)}
    args |= {"place": place.to(device, case.options.get("place", torch.int32))}
    return lay_out(args | {"rounding": case.options.get("rounding", "hf")}, case.layout)


def make_spread(case: Case, device: torch.device, options: InputOptions) -> Args:
    N, k, D = case.dims.values()
    gen = torch.Generator().manual_seed(options.seed)
    x = torch.randn(N, D, generator=gen)
    if case.data == "constant":
        x.fill_(options.constant)
    idle = case.options.get("idle", 0)
    place = _places(N, k, idle, gen).to(device, case.options.get("place", torch.int32))
    rows = None if case.options.get("rows") == "all" else place.numel() + idle
    return lay_out({"x": x.to(device, case.dtype), "place": place, "rows": rows}, case.layout)


def _places(N: int, k: int, idle: int, gen: torch.Generator) -> Tensor:
    """No row twice; `idle` rows of no token."""
    return torch.randperm(N * k + idle, generator=gen)[: N * k].view(N, k)


def lay_out(args: Args, layout: str) -> Args:
    return alter.laid_out_some(args, ("y", "x", "weights", "place"), layout)


# Truth


def combined(args: Args) -> tuple[Tensor]:
    y, weights, dtype = args["y"], args["weights"], args["y"].dtype
    rows = y[args["place"].long()]
    if args["rounding"] == "hf":
        return ((rows * weights[..., None]).to(dtype).sum(-2).to(dtype),)
    wide = torch.promote_types(dtype, F32)
    return ((rows.to(wide) * weights[..., None].to(wide)).sum(-2).to(dtype),)


def combine_scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """Terms are rounded as in the formula, so what differs is the order of the sum; a 16-bit result may then
    round to the other neighbour."""
    y, weights, place = args["y"], args["weights"].abs(), args["place"].long()
    k, D = place.shape[-1], y.shape[1]
    rows = y.abs()[place]
    sizes = {"out": 2 * (rows * weights[..., None]).sum(-2) * math.sqrt(k)}
    if cotangents:
        g = cotangents[0].abs()[..., None, :]
        sizes["gradient:y"] = torch.zeros_like(y).index_copy(
            0, place.flatten(), (2 * g * weights[..., None]).flatten(0, -2)
        )
        sizes["gradient:weights"] = 2 * (g * rows).sum(-1) * math.sqrt(max(D, 1))
    return sizes


def spread_out(args: Args) -> tuple[Tensor]:
    x, place = args["x"], args["place"].long()
    R = place.numel() if args["rows"] is None else args["rows"]
    rows = x[..., None, :].expand(*place.shape, x.shape[-1]).flatten(0, -2)
    return (x.new_zeros(R, x.shape[-1]).index_copy(0, place.flatten(), rows),)


def spread_scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    sizes = {"y": outputs[0].abs()}
    if cotangents:
        place = args["place"].long()
        sizes["gradient:x"] = 2 * cotangents[0].abs()[place].sum(-2) * math.sqrt(place.shape[-1])
    return sizes


# The exact bits of the class, in numpy


def combine_exact(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Sample]:
    y, place, dtype = args["y"].cpu(), args["place"].cpu().long(), args["y"].dtype
    rows, w = _wide(y[place]), _wide(args["weights"])[..., None]
    terms = rows * w
    if args["rounding"] == "hf":
        terms = _wide(torch.from_numpy(terms).to(dtype))
    results = {"out": _in_turn(terms, dtype)}
    if cotangents:
        g = _wide(cotangents[0])[..., None, :]
        dy = torch.zeros(y.shape, dtype=dtype)
        dy[place.flatten()] = torch.from_numpy(g * w).to(dtype).flatten(0, -2)
        results |= {"gradient:y": dy, "gradient:weights": _dots(g * rows, args["weights"].dtype)}
    return {name: (ALL, t) for name, t in results.items()}


def spread_exact(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Sample]:
    args = {n: t.cpu() if isinstance(t, Tensor) else t for n, t in args.items()}
    results = {"y": spread_out(args)[0]}
    if cotangents:
        results["gradient:x"] = _in_turn(_wide(cotangents[0].cpu()[args["place"].long()]), args["x"].dtype)
    return {name: (ALL, t) for name, t in results.items()}


def _wide(t: Tensor) -> Any:
    return t.detach().cpu().float().contiguous().numpy()


def _in_turn(terms: Any, dtype: torch.dtype) -> Tensor:
    total = terms[..., 0, :].copy()
    for j in range(1, terms.shape[-2]):
        total = total + terms[..., j, :]
    return torch.from_numpy(total).to(dtype)


def _dots(terms: Any, dtype: torch.dtype) -> Tensor:
    lanes = np.zeros((*terms.shape[:-1], 512), np.float32)
    for first in range(0, terms.shape[-1], 512):
        part = terms[..., first : first + 512]
        lanes[..., : part.shape[-1]] += part
    while lanes.shape[-1] > 1:
        lanes = lanes[..., ::2] + lanes[..., 1::2]
    return torch.from_numpy(lanes[..., 0]).to(dtype)


# Bits


def _token_plans(N: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    gen = torch.Generator().manual_seed(7)
    order = torch.randperm(N, generator=gen).to(device)
    yield from ((f"{n} of {N} tokens alone", order[:n]) for n in sorted({1, 2, N // 2, N - 1}) if 0 < n < N)
    yield "tokens permuted", order


def _elsewhere(place: Tensor, index: Tensor) -> tuple[Tensor, Tensor, int]:
    """(places of these tokens among other rows, the same in another order; the rows they had; how many rows
    there are). Three rows belong to nobody."""
    theirs = place[index].flatten().long()
    R = len(theirs) + 3
    gen = torch.Generator().manual_seed(len(index))
    ours = torch.randperm(R, generator=gen)[: len(theirs)].to(place.device)
    return ours, theirs, R


def combine_invariant(trial: Trial) -> list[OutputCheck]:
    """out of a token, the gradients of its rows and of its weights are functions of that token alone: not of
    other tokens, of which rows it has, or of rows of nobody, which hold NaN."""
    args = trial.args()
    N = len(args["place"])
    (out,), grads = trial.backward(args)
    dout, place, y = trial.cotangents((out,))[0], args["place"], args["y"]
    checks = []
    for what, index in _token_plans(N, trial.device):
        ours, theirs, R = _elsewhere(place, index)
        call = args | {"weights": args["weights"][index], "place": ours.view(len(index), -1).to(place.dtype)}
        call["y"] = y.new_full((R, y.shape[1]), float("nan")).index_copy(0, ours, y[theirs])
        (some,), other = replace(trial, given=(dout[index],)).backward(call)
        checks.append(same_bits("0:out", some, out[index], what))
        if other:
            pairs = (other["weights"], grads["weights"][index]), (other["y"][ours], grads["y"][theirs])
            names = ("gradient:weights", "gradient:y")
            checks += [same_bits(n, *pair, what) for n, pair in zip(names, pairs, strict=True)]
            rest = other["y"].index_fill(0, ours, 0.0)
            checks.append(same_bits("gradient:y", rest, torch.zeros_like(rest), "rows of nobody are 0"))
    for each in trial.proof.layouts:
        (laid,), other = trial.backward(lay_out(args, each))
        checks.append(same_bits("0:out", laid, out, f"layout {each}"))
        checks += [same_bits(f"gradient:{n}", other[n], grads[n], f"layout {each}") for n in grads]
    checks.append(trial.control("another order of the experts", [out], trial.forward(rolled(args))))
    if grads:
        call = args | {"y": y.roll(1, -1)}
        _, other = replace(trial, given=(dout.roll(1, -1),)).backward(call)
        what = "another order of the columns in dweights"
        checks.append(trial.control(what, [grads["weights"]], [other["weights"]]))
    return checks


def spread_invariant(trial: Trial) -> list[OutputCheck]:
    """The rows of a token, and its gradient, are functions of that token alone."""
    args = trial.args()
    N = len(args["place"])
    (y,), grads = trial.backward(args)
    dy, place = trial.cotangents((y,))[0], args["place"]
    checks = []
    for what, index in _token_plans(N, trial.device):
        ours, theirs, R = _elsewhere(place, index)
        call = {"x": args["x"][index], "place": ours.view(len(index), -1).to(place.dtype), "rows": R}
        given = dy.new_full((R, dy.shape[1]), float("nan")).index_copy(0, ours, dy[theirs])
        (some,), other = replace(trial, given=(given,)).backward(call)
        checks.append(same_bits("0:y", some[ours], y[theirs], what))
        checks += [same_bits("gradient:x", other["x"], grads["x"][index], what)] if other else []
        rest = some.index_fill(0, ours, 0.0)
        checks.append(same_bits("0:y", rest, torch.zeros_like(rest), "rows of nobody are 0"))
    for each in trial.proof.layouts:
        (laid,), other = trial.backward(lay_out(args, each))
        checks.append(same_bits("0:y", laid, y, f"layout {each}"))
        checks += [same_bits(f"gradient:{n}", other[n], grads[n], f"layout {each}") for n in grads]
    if grads:
        given = dy.index_copy(0, place.roll(1, -1).flatten().long(), dy[place.flatten().long()])
        _, other = replace(trial, given=(given,)).backward(args)
        checks.append(trial.control("another order of the experts", [grads["x"]], [other["x"]]))
    return checks


def rolled(args: Args) -> Args:
    """The experts of every token in another order: the same sum."""
    return args | {n: args[n].roll(1, -1).contiguous() for n in ("weights", "place") if n in args}


# Kernels and memory


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs, outputs and gradients."""
    return MB + (0 if backend == "triton" else 24 * math.prod(case.dims.values()))


def record(launch: Any, dtype: torch.dtype) -> None:
    """Every kernel, whole tiles and partial ones, with and without weights, every set of gradients. For fp32,
    which differs only in conversions, one call."""
    from isobit.ops.combine import kernels_triton as kernels

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for D, K in ((2048, 8), (700, 3)) if dtype != F32 else ((2048, 8),):
        x, y, place = empty(64, D), empty(64 * K, D), empty(64, K, dtype=torch.int32)
        for own, rounding in ((dtype, "hf"), (F32, "once")) if dtype == BF16 else ((dtype, "hf"),):
            call = {"y": y, "weights": empty(64, K, dtype=own), "place": place}
            kernels.combine(launch, **call, rounding=rounding)
            for both in (True, False) if D == 700 else (True,):
                kernels.combine_bwd(launch, **call, dout=x, want_y=True, want_weights=both)
        kernels.spread(launch, x=x, place=place, rows=None)
        kernels.spread_bwd(launch, dy=y, place=place)


# Cases


def _case(N: int, k: int, D: int, dtype: torch.dtype, **rest: Any) -> Case:
    return Case({"N": N, "k": k, "D": D}, dtype, **rest)


_HEAVY = [
    _case(1000, 8, 2048, BF16, data="random", heavy=True),
    _case(4000, 4, 2880, BF16, data="random", heavy=True, options={"idle": 64}),
]
#: More than 2**31 elements: wrong 32-bit offsets would fail here.
_HUGE = [_case(140000, 8, 2048, BF16, data="random", heavy=True, gpu_gb=120)]

OTHER_PLACES = [
    Mutant(
        "a place outside",
        "place",
        lambda a: a | {"place": a["place"] + len(a.get("y", a["place"].view(-1)))},
        values=True,
    ),
    Mutant("a row twice", "place", lambda a: a | {"place": torch.zeros_like(a["place"])}, values=True),
    Mutant("float places", "place", lambda a: a | {"place": a["place"].float()}),
]

COMBINE = Proof(
    op=forward,
    op_class="combine",
    rows="T",
    outputs=("out",),
    make=make_combine,
    formula=combined,
    scale=combine_scale,
    controls=[Control("the experts of a token in another order", rolled)],
    padding=lambda args, rows: {},  # the invariant law is its own
    layouts=("padded", "offset", "apart"),
    lay_out=lay_out,
    memory=memory,
    cases=[
        _case(7, 3, 33, BF16),
        _case(0, 2, 8, F32),
        _case(5, 2, 1100, F16, options={"weights": F32, "rounding": "once"}),
        _case(6, 4, 40, BF16, layout="padded", options={"weights": F32, "idle": 5}),
        _case(9, 1, 16, F32, layout="offset", options={"place": torch.int64}),
        *_HEAVY,
    ],
    bit_cases=[_case(9, 5, 600, F32, data="random"), _case(1000, 8, 2048, F32, data="random", heavy=True)],
    memory_cases=[_case(64, 4, 700, F32, data="random")],
    mutants=[
        Mutant("weights of a third dtype", "weights",
               lambda a: a | {"weights": a["weights"].to(F16 if a["y"].dtype != F16 else BF16)}),
        Mutant("an unknown rounding", "rounding", lambda a: a | {"rounding": "none"}),
        *OTHER_PLACES,
    ],
    bad_value=lambda a: (a | {"place": torch.full_like(a["place"], -1)}, None),
    kernels={"triton": Kernels(record)},
    exact=combine_exact,
    agree_cases=[
        _case(9, 5, 600, F32, data="random"),
        _case(12, 6, 520, BF16, data="cancelling", options={"weights": F32, "idle": 3}),
        _case(1000, 8, 2048, BF16, data="cancelling", heavy=True),
    ],
    slow=("model",),
    invariant=combine_invariant,
)  # fmt: skip

SPREAD = Proof(
    op=spreading,
    op_class="combine",
    rows="T",
    outputs=("y",),
    make=make_spread,
    formula=spread_out,
    scale=spread_scale,
    # Nothing is added forward. The law of its own has a control for the gradient.
    controls=[Control("the tokens in another order", lambda args: args | {"x": args["x"].flip(0)})],
    padding=lambda args, rows: {},
    layouts=("padded", "offset", "apart"),
    lay_out=lay_out,
    memory=memory,
    cases=[
        _case(7, 3, 33, BF16),
        _case(0, 2, 8, F32),
        _case(5, 2, 1100, F16, options={"rows": "all"}),
        _case(6, 4, 40, BF16, layout="padded", options={"idle": 5}),
        *_HEAVY,
    ],
    bit_cases=[_case(9, 5, 60, F32, data="random"), *_HUGE],
    memory_cases=[_case(64, 4, 700, F32, data="random")],
    mutants=[
        Mutant("fewer rows than none", "rows", lambda a: a | {"rows": -1}),
        *OTHER_PLACES,
    ],
    bad_value=lambda a: (a | {"place": torch.full_like(a["place"], -1)}, None),
    kernels={},
    exact=spread_exact,
    agree_cases=[_case(9, 5, 60, F32, data="random"), *_HEAVY[:1]],
    slow=("model",),
    invariant=spread_invariant,
)

PROOFS = [COMBINE, SPREAD]
