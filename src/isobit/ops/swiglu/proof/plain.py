"""The proof of `swiglu`: inputs that would expose a wrong kernel, the truth, error bounds, and its class on a
GPU and on a CPU."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.ops.swiglu import reference
from isobit.ops.swiglu.op import forward
from isobit.spec import inputs as alter
from isobit.spec.compare import OutputCheck
from isobit.spec.proof import Args, Case, InputOptions, Kernels, Mutant, NoSum, Proof, Sample
from isobit.spec.trial import Trial

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ALL_DTYPES = (BF16, F16, F32)
MB = 1 << 20
BY_ROWS = ("gate", "up")


# Inputs


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    shape = tuple(case.dims.values())
    # Large inputs are drawn on the device: on a CPU that would take longer than all the rest.
    where = device if case.heavy or case.data == "random" else torch.device("cpu")
    gen = torch.Generator(where).manual_seed(options.seed)
    wide = F64 if case.dtype == F64 else F32
    gate, up = (torch.empty(shape, dtype=wide, device=where).normal_(generator=gen) for _ in BY_ROWS)
    if case.data == "edge":
        rows = gate.view(math.prod(shape[:-1]), shape[-1])
        rows[1::6, -1:] += 50.0  # exposes a dropped tail
        rows[2::6] *= 30.0  # exp overflows
        rows[3::6] *= 1e-3
        rows[4::6, ::2] = 0.0
        rows[4::6, 1::2] = -0.0
        rows[5::6] -= 6.0  # far from 0, where the gradient changes its sign
    elif case.data == "constant":
        gate.fill_(options.constant)
    args = {"gate": gate.to(device, case.dtype), "up": up.to(device, case.dtype)}
    return lay_out(args, case.layout)


def lay_out(args: Args, layout: str) -> Args:
    """`merged`: both halves of one tensor, the result of one product."""
    if layout != "merged":
        return alter.laid_out_some(args, BY_ROWS, layout)
    gate, up = torch.cat([args["gate"], args["up"]], -1).chunk(2, -1)
    return args | {"gate": gate, "up": up}


def padding(args: Args, rows: int) -> Args:
    """Rows of NaN and infinities; they must not change others."""
    return {n: alter.rows_of_nan(args[n], rows) for n in BY_ROWS}


# Truth


def scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """The difference that two computations can have, in units of eps: their exponentials are a few units
    apart, and a number that is then rounded to 16 bits may round to the other neighbour. So every result is
    followed through its roundings from both ends of an interval."""
    x, up = args["gate"], args["up"]
    dtype = dtype_of(x, up)
    eps = 2.0**-52 if dtype == F64 else 2.0**-23
    s = torch.sigmoid(x)
    act = x * s
    # exp 2 units, the sum, the quotient, and as much for the other computation's
    low, high = ((act + side * 4 * eps * act.abs()).to(dtype).double() for side in (-1, 1))

    def between(ends: Sequence[Tensor], off: Tensor) -> Tensor:
        both = torch.stack(tuple(ends))
        least, most = both.amin(0) - off, both.amax(0) + off
        return (most.to(dtype).double() - least.to(dtype).double()) / eps

    def times_act(y: Tensor) -> Tensor:
        ends = (low * y, high * y)
        return between(ends, eps * torch.maximum(ends[0].abs(), ends[1].abs()))

    sizes = {"out": times_act(up)}
    if cotangents:
        g = cotangents[0]
        sizes["gradient:up"] = times_act(g)
        dact = (g * up).to(dtype).double()
        dgate = dact * s * (1 + x * (1 - s))
        # The two terms may cancel: 1 + x (1 - s) is 0 near x = -1.28.
        sizes["gradient:gate"] = between((dgate,), 8 * eps * dact.abs() * s * (1 + x.abs() * (1 - s)))
    return sizes


def dtype_of(*given: Tensor) -> torch.dtype:
    """The dtype that these fp64 tensors came from: the narrowest that represents all values."""
    for dtype in (BF16, F16, F32):
        if all(bool((t.to(dtype).double() == t).all()) for t in given):
            return dtype
    return F64


# Bits


def exact(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Sample]:
    """On a GPU PyTorch's eager ops and their autograd. On a CPU numpy, whose exp the interpreter has, and
    which has no fused multiply-add. Of the last rows of a batch of gigabytes."""
    last = slice(-1000 if args["gate"].numel() > 1 << 28 else None, None)
    args, cotangents = {n: args[n][last] for n in BY_ROWS}, [g[last] for g in cotangents]
    found = _eager(args, cotangents) if args["gate"].is_cuda else in_numpy(args, cotangents)
    return {name: ((last,), t.cpu()) for name, t in found.items()}


def _eager(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    gate, up = (args[n].detach().requires_grad_() for n in BY_ROWS)
    with torch.enable_grad():
        out = F.silu(gate) * up
    found = {"out": out.detach()}
    if cotangents:
        dgate, dup = torch.autograd.grad(out, (gate, up), cotangents[0])
        found |= {"gradient:gate": dgate, "gradient:up": dup}
    return found


@np.errstate(all="ignore")
def in_numpy(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    dtype, one = args["gate"].dtype, np.float32(1)

    def narrow(x: Any) -> Tensor:
        return torch.from_numpy(np.asarray(x, np.float32)).to(dtype)

    x, u, *g = (t.float().contiguous().numpy() for t in (args["gate"], args["up"], *cotangents))
    below = one + np.exp(-x)
    act = narrow(x / below).float().numpy()
    found = {"out": narrow(act * u)}
    if cotangents:
        s = one / below
        dact = narrow(g[0] * u).float().numpy()
        found["gradient:gate"] = narrow(dact * s * (one + x * (one - s)))
        found["gradient:up"] = narrow(g[0] * act)
    return found


def roundings_show(trial: Trial) -> list[OutputCheck]:
    """Equal bits prove something about roundings only if those of a fused kernel are others. In fp32 they are
    not."""
    args = trial.args()
    gate, up = args["gate"], args["up"]
    if gate.dtype not in (BF16, F16):
        return []
    once = (F.silu(gate.float()) * up.float()).to(gate.dtype)
    return [trial.control("one rounding", reference.formula(gate, up), [once])]


# Memory and kernels


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs, outputs and gradients."""
    if backend == "triton":
        return MB
    return 6 * max(case.dtype.itemsize, 4) * math.prod(case.dims.values()) + MB


def record(launch: Any, dtype: torch.dtype) -> None:
    """Whole tiles and partial ones, rows with one stride and with two, every set of gradients. For fp32,
    which differs only in conversions, one call."""
    from isobit.ops.swiglu import kernels_triton

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    halves = tuple(empty(64, 2 * 4096).chunk(2, -1))
    shifted = (empty(3, 8, 700)[:, :-1], empty(3, 8, 700)[:, :-1])
    for gate, up in (halves, shifted) if dtype != F32 else (halves,):
        kernels_triton.swiglu(launch, gate=gate, up=up)
        several = [(True, True), (False, True)] if gate.ndim == 2 else [(True, False)]
        for want_gate, want_up in several if dtype != F32 else several[:1]:
            wanted = {"want_gate": want_gate, "want_up": want_up}
            kernels_triton.swiglu_bwd(launch, gate=gate, up=up, dout=gate, **wanted)


# Cases


def _case(N: int, D: int, dtype: torch.dtype, **rest: Any) -> Case:
    return Case({"N": N, "D": D}, dtype, **rest)


# Some laws use every third case; these are the quick ones.
_SMALL = [
    _case(0, 7, F32),
    _case(7, 257, F32),
    _case(7, 1100, F16, layout="merged"),
    Case({"B": 2, "T": 9, "D": 33}, BF16, layout="shifted"),
    _case(7, 2048, BF16, layout="offset"),
    Case({"B": 2, "T": 2, "C": 2, "D": 40}, F16, layout="padded"),
    _case(7, 40, F64),
    _case(7, 1, BF16),
    _case(3, 0, BF16),
]
_HEAVY = [
    _case(100, 3072, BF16, data="random", layout="merged", heavy=True),
    _case(20, 14336, F16, data="random", heavy=True),
    _case(20, 11008, F32, data="random", heavy=True),
]
_BITS = [
    _case(9, 20, F32, data="random"),
    _case(4, 33, BF16, data="random"),
    _case(1000, 3072, BF16, data="random", layout="merged", heavy=True),
]
_AGREE = [
    _case(20, 300, BF16),
    _case(20, 300, F16, layout="merged"),
    _case(12, 1100, F32),
    # So many numbers that most of those of 16 bits occur.
    _case(4096, 3072, BF16, heavy=True),
    _case(4096, 3072, F16, heavy=True),
    _case(4096, 3072, F32, heavy=True),
    # More than 2**31 elements: wrong 32-bit offsets would fail here.
    _case(160000, 14336, BF16, data="random", heavy=True, gpu_gb=120),
]

MUTANTS = [
    Mutant("up of another dtype", "up", lambda a: a | {"up": alter.in_other_dtype(a["up"])}),
    Mutant("up of another width", "up", lambda a: a | {"up": a["up"][..., :-1]}),
    Mutant("up of other rows", "up", lambda a: a | {"up": a["up"][1:]}),
]

PLAIN = Proof(
    op=forward,
    op_class="swiglu",
    outputs=("out",),
    make=make,
    formula=lambda args: reference.formula(**args),
    scale=scale,
    controls=NoSum("every element is computed alone"),
    padding=padding,
    layouts=("merged", "shifted", "padded", "offset", "apart"),
    lay_out=lay_out,
    memory=memory,
    cases=_SMALL + _HEAVY,
    bit_cases=_BITS,
    memory_cases=[_case(64, 700, F32), _case(300, 4096, BF16, data="random", heavy=True)],
    mutants=MUTANTS,
    bad_value=None,
    kernels={"triton": Kernels(record)},
    exact=exact,
    agree_cases=_AGREE,
    also=roundings_show,
)
