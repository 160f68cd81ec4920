"""The proof of `swiglu_packed`: gate and up in one tensor, and the clamped activation of GPT-OSS."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobit.ops.swiglu import reference
from isobit.ops.swiglu.op import packed, swiglu
from isobit.ops.swiglu.proof import plain
from isobit.ops.swiglu.proof.plain import ALL_DTYPES, BF16, F16, F32, F64, MB
from isobit.spec import inputs as alter
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args, Case, InputOptions, Kernels, Mutant, NoSum, Proof, Sample
from isobit.spec.trial import Trial

LIMIT, ALPHA = 7.0, 1.702


# Inputs


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    """Of `swiglu`; up reaches the limit too."""
    *lead, C = case.dims.values()
    halves = Case({str(i): n for i, n in enumerate((*lead, C // 2))}, case.dtype, case.data, heavy=case.heavy)
    both = plain.make(halves, device, options)
    gate, up = both["gate"], both["up"]
    interleaved, clamped = (case.options.get(name, False) for name in ("interleaved", "clamped"))
    if clamped:
        up = up * 4
        if case.dtype == BF16 and not case.heavy:  # a sigmoid that Triton's interpreter can round to bf16
            gate = gate.clamp(min=-40.0)
    gate_up = torch.stack([gate, up], -1).flatten(-2) if interleaved else torch.cat([gate, up], -1)
    args = {"gate_up": gate_up, "interleaved": interleaved, "limit": LIMIT if clamped else None}
    return lay_out(args | {"alpha": ALPHA}, case.layout)


def lay_out(args: Args, layout: str) -> Args:
    return alter.laid_out_some(args, ("gate_up",), layout)


def pairs(args: Args, name: str, value: Tensor) -> Tensor:
    """A gate and its up."""
    number = torch.arange(value.numel(), device=value.device).view(value.shape)
    if name == "gate_up" and args["interleaved"]:
        number[..., 1::2] = number[..., ::2]
    elif name == "gate_up":
        half = value.shape[-1] // 2
        number[..., half:] = number[..., :half]
    return number


# Truth


def scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """Two sigmoids are a few units apart, and one may round to the other neighbour in 16 bits. All that
    follows is the same arithmetic. So results are followed from both ends of an interval, and the
    units of their own last roundings are added. On a GPU PyTorch rounds each step inside the gradient of a
    sigmoid, as the op does; on a CPU it does not for bf16."""
    gate, up = reference.parts(args["gate_up"], args["interleaved"])
    if args["limit"] is None:
        sizes = plain.scale({"gate": gate, "up": up}, outputs, cotangents)
        if not cotangents:
            return sizes
        return {
            "out": sizes["out"],
            "gradient:gate_up": _packed(args, sizes["gradient:gate"], sizes["gradient:up"]),
        }
    dtype = plain.dtype_of(args["gate_up"])
    eps = 2.0**-52 if dtype == F64 else 2.0**-23
    x = gate.clamp(max=args["limit"])
    a = (x * args["alpha"]).to(dtype).double()
    s, near = a.sigmoid(), 4 * eps * (1 + a.abs())
    ends = [_steps(args, dtype, (s * (1 + side * near)).to(dtype).double(), cotangents) for side in (-1, 1)]
    names = ("out", "gradient:gate_up") if cotangents else ("out",)
    sizes = {n: (ends[0][n] - ends[1][n]).abs() / eps + 8 * ends[0][f"{n} size"] for n in names}
    if cotangents and not args["gate_up"].is_cuda and dtype != F64:
        info, v1 = torch.finfo(dtype), up.clamp(-args["limit"], args["limit"]) + 1
        slope = (cotangents[0] * v1 * x * s * args["alpha"]).abs()
        inside = 3 * (info.eps * slope + info.smallest_normal * info.eps)
        inside += info.eps * (cotangents[0] * v1 * s).abs()  # the sum may round to the other neighbour
        sizes["gradient:gate_up"] += _packed(args, inside / eps, torch.zeros_like(up))
    return sizes


def _steps(args: Args, dtype: torch.dtype, s: Tensor, cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """Results of these sigmoids, rounded as the op does, and the sizes of what they are made of."""

    def r(t: Tensor) -> Tensor:
        return t.to(dtype).double()

    gate, up = reference.parts(args["gate_up"], args["interleaved"])
    limit, alpha = args["limit"], args["alpha"]
    x, v1 = gate.clamp(max=limit), r(up.clamp(-limit, limit) + 1)
    glu = r(x * s)
    results = {"out": r(v1 * glu), "out size": (v1 * x * s).abs()}
    if cotangents:
        g = cotangents[0]
        dglu = r(g * v1)
        da = r(r(r(dglu * x) * r(1 - s)) * s)
        dgate = torch.where(gate <= limit, r(r(dglu * s) + r(da * alpha)), 0.0)
        dup = torch.where(up.abs() <= limit, r(g * glu), 0.0)
        size = (dglu * s).abs() * (1 + alpha * x.abs())
        results["gradient:gate_up"] = _packed(args, dgate, dup)
        results["gradient:gate_up size"] = _packed(args, size, (g * x * s).abs())
    return results


def _packed(args: Args, gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack([gate, up], -1).flatten(-2) if args["interleaved"] else torch.cat([gate, up], -1)


# Bits


def exact(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Sample]:
    """On a GPU PyTorch's eager ops and their autograd; on a CPU numpy, whose exp the interpreter has."""
    if args["gate_up"].is_cuda:
        results = _eager(args, cotangents)
    elif args["limit"] is None:
        gate, up = reference.parts(args["gate_up"], args["interleaved"])
        halves = plain.in_numpy({"gate": gate, "up": up}, cotangents)
        results = {"out": halves["out"]}
        if cotangents:
            results["gradient:gate_up"] = _packed(args, halves["gradient:gate"], halves["gradient:up"])
    else:
        results = _in_numpy(args, cotangents)
    return {name: ((slice(None),), t.cpu()) for name, t in results.items()}


def _eager(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """The gradients are those of gate and up: autograd adds zeros to those of interleaved columns, and a
    -0 would become 0."""
    parts = reference.parts(args["gate_up"], args["interleaved"])
    gate, up = (t.detach().requires_grad_() for t in parts)
    with torch.enable_grad():
        (out,) = reference.packed_of(gate, up, args["limit"], args["alpha"])
    results = {"out": out.detach()}
    if cotangents:
        results["gradient:gate_up"] = _packed(args, *torch.autograd.grad(out, (gate, up), cotangents[0]))
    return results


@np.errstate(all="ignore")
def _in_numpy(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    dtype, one = args["gate_up"].dtype, np.float32(1)

    def r(x: Any) -> Any:
        return torch.from_numpy(np.asarray(x, np.float32)).to(dtype).float().numpy()

    parts = reference.parts(args["gate_up"], args["interleaved"])
    gate, up, *g = (t.float().contiguous().numpy() for t in (*parts, *cotangents))
    limit, alpha = np.float32(args["limit"]), np.float32(args["alpha"])
    x, v1 = np.minimum(gate, limit), r(np.clip(up, -limit, limit) + one)
    s = r(one / (one + np.exp(-r(x * alpha))))
    glu = r(x * s)
    results = {"out": v1 * glu}
    if cotangents:
        dglu = r(g[0] * v1)
        da = r(r(r(dglu * x) * r(one - s)) * s)
        dgate = np.where(gate <= limit, r(dglu * s) + r(da * alpha), 0)
        dup = np.where(np.abs(up) <= limit, g[0] * glu, 0)
        both = (torch.from_numpy(np.asarray(t, np.float32)) for t in (dgate, dup))
        results["gradient:gate_up"] = _packed(args, *both).numpy()
    return {n: torch.from_numpy(np.asarray(t, np.float32)).to(dtype) for n, t in results.items()}


def as_swiglu(trial: Trial) -> list[OutputCheck]:
    """Without a limit the bits of `swiglu`."""
    args = trial.args()
    if args["limit"] is not None:
        return []
    (out,) = trial.forward(args)
    gate, up = (t.contiguous() for t in reference.parts(args["gate_up"], args["interleaved"]))
    return [same_bits("0:out", out, swiglu(gate, up, backend=trial.backend), "against swiglu")]


# Memory and kernels


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs, outputs and gradients."""
    return MB + (0 if backend == "triton" else 64 * math.prod(case.dims.values()))


def record(launch: Any, dtype: torch.dtype) -> None:
    """Both layouts of columns with and without a limit, whole tiles and partial ones. For others than bf16,
    which differ only in conversions, one call."""
    from isobit.ops.swiglu import kernels_triton_packed as kernels

    kinds = (
        [(2048, True, LIMIT)]
        if dtype != BF16
        else [(2048, False, None), (700, True, LIMIT), (700, True, None)]
    )
    for D, interleaved, limit in kinds:
        gate_up, dout = (torch.empty(64, n, dtype=dtype, device="meta") for n in (2 * D, D))
        call = {"gate_up": gate_up, "interleaved": interleaved, "limit": limit, "alpha": ALPHA}
        kernels.swiglu_packed(launch, **call)
        kernels.swiglu_packed_bwd(launch, **call, dout=dout)


# Cases


def _case(N: int, C: int, dtype: torch.dtype, **rest: Any) -> Case:
    return Case({"N": N, "C": C}, dtype, **rest)


_OSS = {"interleaved": True, "clamped": True}

PACKED = Proof(
    op=packed,
    op_class="swiglu",
    outputs=("out",),
    make=make,
    formula=lambda args: reference.packed_formula(**args),
    scale=scale,
    controls=NoSum("a gate and its up", pairs),
    padding=lambda args, rows: {"gate_up": alter.rows_of_nan(args["gate_up"], rows)},
    layouts=("padded", "offset", "apart"),
    lay_out=lay_out,
    memory=memory,
    cases=[
        _case(7, 66, BF16, options=_OSS),
        _case(7, 514, F32),
        _case(6, 2100, F16, layout="offset", options=_OSS),
        Case({"B": 2, "T": 4, "C": 40}, F32, layout="padded", options=_OSS),
        _case(3, 0, BF16),
        _case(7, 40, F64, options=_OSS),
        _case(7, 64, BF16, options={"interleaved": True}),
        _case(7, 36, F16, options={"clamped": True}),
        _case(100, 5760, BF16, heavy=True, options=_OSS),
    ],
    bit_cases=[
        _case(4, 34, BF16, data="random", options=_OSS),
        _case(4, 20, F32, data="random"),
    ],
    memory_cases=[_case(64, 1400, F32)],
    mutants=[
        Mutant("columns that are odd in number", "gate_up",
               lambda a: a | {"gate_up": a["gate_up"][:, :-1].contiguous()}),
        Mutant("a limit of 0", "limit", lambda a: a | {"limit": 0.0}),
    ],
    bad_value=None,
    kernels={"triton": Kernels(record)},
    exact=exact,
    agree_cases=[
        _case(20, 600, BF16, options=_OSS),
        _case(20, 300, F32, options=_OSS),
        _case(12, 600, F16),
        _case(12, 300, BF16, options={"interleaved": True}),
        # So many numbers that most of those of 16 bits occur.
        *(_case(4096, 5760, dtype, heavy=True, options=_OSS) for dtype in ALL_DTYPES),
        _case(4096, 6144, BF16, heavy=True),
    ],
    also=as_swiglu,
)  # fmt: skip
