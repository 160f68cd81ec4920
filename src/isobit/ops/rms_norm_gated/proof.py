"""The proof of `rms_norm_gated`: inputs that would expose a wrong kernel, the truth, error bounds, and its
class by definition."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.ops.rms_norm_gated.op import forward
from isobit.spec import inputs as alter
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args, Case, Control, InputOptions, Kernels, Mutant, Proof
from isobit.spec.trial import Trial

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MB = 1 << 20
BY_ROWS = ("x", "gate")


# Inputs


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    """Options: eps, and `wide`, a weight in fp32."""
    *lead, D = case.dims.values()
    gen = torch.Generator().manual_seed(options.seed)
    x, gate = (torch.randn(*lead, D, generator=gen) for _ in BY_ROWS)
    if case.data == "edge":
        rows, gates = (t.view(math.prod(lead), D) for t in (x, gate))
        rows[1::5, -1:] += 50.0  # exposes a dropped tail
        rows[2::5] *= 1e-3  # eps matters
        rows[3::5] *= 1e3
        gates[1::5] *= 30.0  # exp overflows
        gates[4::5, ::2] = -0.0
    elif case.data == "constant":
        x.fill_(options.constant)
    weight = (torch.randn(D, generator=gen) * 0.5 + 1.0).to(
        device, F32 if case.options.get("wide") else case.dtype
    )
    args: Args = {"x": x.to(device, case.dtype), "weight": weight, "gate": gate.to(device, case.dtype)}
    args["eps"] = case.options.get("eps", 1e-6)
    return alter.laid_out_some(args, BY_ROWS, case.layout)


def padding(args: Args, rows: int) -> Args:
    return {n: alter.rows_of_nan(args[n], rows) for n in BY_ROWS}


def rolled(args: Args) -> Args:
    """Every column one farther: the same mathematics, another tree."""
    return args | {n: args[n].roll(1, -1) for n in (*BY_ROWS, "weight")}


def _back(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(o.roll(-1, -1) for o in outputs)


# Truth


def formula(args: Args) -> tuple[Tensor]:
    """The text of Hugging Face's module, in fp64 for fp64 inputs."""
    x, weight = args["x"], args["weight"]
    h = x.to(torch.promote_types(x.dtype, F32))
    y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + args["eps"])
    m = weight * y.to(x.dtype)
    return ((m * F.silu(args["gate"].to(h.dtype))).to(x.dtype),)


def _dtype_of(*given: Tensor) -> torch.dtype:
    """The dtype that these fp64 tensors came from: the narrowest that represents all values."""
    for dtype in (BF16, F16):
        if all(bool((t.to(dtype).double() == t).all()) for t in given):
            return dtype
    return F32


def scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """In fp32 a handful of roundings. In 16 bits every intermediate that is rounded to them may round to the
    other neighbour: one unit of that dtype each, in units of fp32."""
    x, weight, gate = args["x"], args["weight"], args["gate"]
    D, dtype = x.shape[-1], _dtype_of(x, gate)
    unit = {BF16: 2.0**16, F16: 2.0**13, F32: 1.0}[dtype]
    rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + args["eps"])
    y, s = x * rstd, torch.sigmoid(gate)
    act = gate * s
    rounds = 2 * unit if dtype != F32 else 0.0
    near = math.sqrt(D) + 12
    sizes = {"out": (rounds + near) * (y * weight * act).abs()}
    tiny = 2.0**-24 / 2.0**-23 if dtype == F16 else 0.0  # subnormal fp16
    sizes["out"] = sizes["out"] + tiny * 4
    if cotangents:
        dout = cotangents[0]
        dm = dout * act
        g = dm * weight
        mean = (g * y).abs().mean(-1, keepdim=True)
        size = rstd * (g.abs() + y.abs() * mean)
        slope = s * (1 + gate.abs() * (1 - s))
        every = tuple(range(x.ndim - 1))
        rows = math.sqrt(max(math.prod(x.shape[:-1]), 1))
        sizes["gradient:x"] = (rounds + near) * size * 2 + tiny * 4
        sizes["gradient:gate"] = (rounds + near) * (dout * y * weight).abs() * slope * 2 + tiny * 4
        sizes["gradient:weight"] = (rounds + near) * rows * (dm * y).abs().sum(every) * 2 + tiny * 4
    return sizes


# Bits


def _chain(terms: Any) -> Any:
    total = np.zeros(terms.shape[1:], np.float32)
    for term in terms:
        total = total + term
    return total


def _tree(level: list[Any]) -> Any:
    while len(level) > 1:
        level = level + [np.zeros_like(level[0])] * (len(level) % 2)
        level = [a + b for a, b in zip(level[0::2], level[1::2], strict=True)]
    return level[0]


@np.errstate(all="ignore")
def by_definition(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """The class in numpy, independent of every backend."""
    dtype, D, one = args["x"].dtype, args["x"].shape[-1], np.float32(1)
    x, gate = (args[n].float().reshape(-1, D).numpy() for n in BY_ROWS)
    w = args["weight"].float().numpy()

    def narrow(t: Any) -> Any:
        return torch.from_numpy(t).to(dtype).float().numpy()

    def mean(t: Any) -> Any:
        return (_tree(list(t.T)) / np.float32(D))[:, None]

    rstd = one / np.sqrt(mean(x * x) + np.float32(args["eps"]))
    below = one + np.exp(-gate)
    y, act = x * rstd, gate / below
    m = narrow(y) * w
    m = narrow(m) if args["weight"].dtype == dtype else m
    expected = {"out": m * act}
    if cotangents:
        dout = cotangents[0].float().reshape(-1, D).numpy()
        dm, s = dout * act, one / below
        g = dm * w
        expected["gradient:x"] = rstd * (g - y * mean(g * y))
        expected["gradient:gate"] = dout * m * (s * (one + gate * (one - s)))
        groups = [_chain((dm * y)[i : i + 16]) for i in range(0, max(len(x), 1), 16)]
        expected["gradient:weight"] = _tree(groups)
    return {name: torch.from_numpy(np.ascontiguousarray(t)) for name, t in expected.items()}


def same_elsewhere(trial: Trial) -> list[OutputCheck]:
    """The class by its definition, on a CPU. dweight depends on the sequence of rows only, not on their
    layout nor on rows at the end whose dout is 0. Controls: one rounding less, and rows in another order."""
    args = trial.args()
    outputs, grads = trial.backward(args)
    cotangents = trial.cotangents(outputs)
    checks: list[OutputCheck] = []
    if trial.device.type == "cpu":
        ours = {"out": outputs[0]} | {f"gradient:{n}": g for n, g in grads.items()}
        for name, expected in by_definition(args, cotangents if grads else ()).items():
            own = ours[name]
            same = expected.to(own.dtype).view(own.shape)
            checks.append(same_bits(name, own, same, f"{trial.numerics} by its definition"))
    if args["x"].dtype != F32:
        once = formula(args | {n: args[n].float() for n in (*BY_ROWS, "weight")})[0].to(args["x"].dtype)
        checks.append(trial.control("one rounding", [outputs[0]], [once]))
    if not grads:
        return checks
    flat = args | {n: args[n].flatten(0, -2) for n in BY_ROWS} | {"weight": args["weight"].float()}
    dout = cotangents[0].flatten(0, -2)

    def dweight(changed: Args, dout: Tensor) -> Tensor:
        return replace(trial, given=(dout,), only=("weight",)).backward(changed)[1]["weight"]

    whole = dweight(flat, dout)
    padded = dweight(alter.laid_out_some(flat, BY_ROWS, "padded"), dout)
    checks.append(same_bits("gradient:weight", padded, whole, "layout padded"))
    longer = flat | {n: torch.cat([flat[n], flat[n][:1].expand(20, -1)]) for n in BY_ROWS}
    ended = dweight(longer, torch.cat([dout, torch.zeros_like(dout[:1]).expand(20, -1)]))
    checks.append(same_bits("gradient:weight", ended, whole, "20 rows without a gradient behind"))
    turned = dweight(flat | {n: flat[n].roll(1, 0) for n in BY_ROWS}, dout.roll(1, 0))
    checks.append(trial.control("rows rolled by one", [whole], [turned]))
    return checks


# Memory, kernels, cases


def memory(case: Case, backend: str, direction: str) -> int:
    elements = math.prod(case.dims.values())
    if backend == "model":
        return 80 * elements + MB
    return MB + (elements // 16 + 64 * case.dims["D"] if direction != "fwd" else 0)


def record(launch: Any, dtype: torch.dtype) -> None:
    """Both kernels, whole rows and partial ones. For other dtypes than bf16 one call each."""
    from isobit.ops.rms_norm_gated import kernels_triton

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for full in (True, False) if dtype == BF16 else (True,):
        x = empty(64, 32, 128) if full else empty(3, 8, 100)[:, :-1]
        args: Args = {"x": x, "gate": x, "weight": empty(x.shape[-1], dtype=dtype if full else F32)}
        kernels_triton.rms_norm_gated(launch, **args, eps=1e-6, return_rstd=full)
        wanted = {"want_x": True, "want_weight": full, "want_gate": full}
        rstd = empty(*x.shape[:-1], dtype=F32)
        kernels_triton.rms_norm_gated_bwd(launch, **args, rstd=rstd, dout=x, **wanted)


def _case(N: int, D: int, dtype: torch.dtype, **rest: Any) -> Case:
    own = {n: rest.pop(n) for n in ("data", "layout", "heavy") if n in rest}
    return Case({"N": N, "D": D}, dtype, options=rest, **own)


_SMALL = [
    _case(0, 7, F32),
    _case(7, 33, F32, layout="offset"),
    Case({"B": 2, "T": 3, "H": 2, "D": 64}, BF16),
    _case(19, 40, BF16, layout="padded", wide=True),
    _case(6, 128, F16, eps=1e-5),
    _case(3, 1, BF16),
]
MUTANTS = [
    Mutant("no columns", "x", lambda a: a | {n: a[n][..., :0] for n in (*BY_ROWS, "weight")}),
    Mutant("a gate of another dtype", "gate", lambda a: a | {"gate": alter.in_other_dtype(a["gate"])}),
    Mutant("a gate of another shape", "gate", lambda a: a | {"gate": a["gate"][1:]}),
    Mutant(
        "a weight of another dtype", "weight", lambda a: a | {"weight": alter.in_other_dtype(a["weight"])}
    ),
    Mutant("eps below 0", "eps", lambda a: a | {"eps": -1e-6}),
]

PROOF = Proof(
    op=forward,
    op_class="rms_norm_gated",
    outputs=("out",),
    make=make,
    formula=formula,
    scale=scale,
    controls=[Control("the columns rolled by one", rolled, back=_back)],
    padding=padding,
    layouts=("shifted", "padded", "offset", "apart"),
    lay_out=lambda args, layout: alter.laid_out_some(args, BY_ROWS, layout),
    memory=memory,
    cases=[*_SMALL, _case(3000, 128, BF16, data="random", heavy=True)],
    bit_cases=[_case(30, 300, F32, data="random"), _case(9000, 256, F32, data="random", heavy=True)],
    memory_cases=[_case(64, 128, F32)],
    mutants=MUTANTS,
    bad_value=None,
    kernels={"triton": Kernels(record)},
    agree_cases=[
        _case(290, 20, F32, data="random"),
        _case(20, 128, BF16),
        _case(40000, 128, F32, data="random", heavy=True),
    ],
    slow=("model",),
    positive=("D",),
    also=same_elsewhere,
)

PROOFS = [PROOF]
