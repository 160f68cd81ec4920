"""The proof of `rope`: inputs that would expose a wrong kernel, the truth, and the eager code of models, with
the same bits."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.ops.rope import reference
from isobit.ops.rope.op import forward
from isobit.spec import inputs as alter
from isobit.spec.compare import OutputCheck
from isobit.spec.proof import Args, Case, InputOptions, Kernels, Mutant, NoSum, Proof, Sample
from isobit.spec.trial import Trial

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MB = 1 << 20
BY_ROWS = ("q", "k", "cos", "sin")


# Inputs


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    """Inputs of a case. Options: rounding."""
    dims = dict(case.dims)
    H, G, D, R = (dims.pop(name) for name in ("H", "G", "D", "R"))
    lead = tuple(dims.values())
    where = device if case.heavy or case.data == "random" else torch.device("cpu")
    gen = torch.Generator(where).manual_seed(options.seed)

    def drawn(*shape: int) -> Tensor:
        wide = F64 if case.dtype == F64 else F32
        return torch.empty(*lead, *shape, dtype=wide, device=where).normal_(generator=gen)

    q, k = drawn(H, D), drawn(G, D)
    # Halves of cos and sin that differ, which those of models do not: a kernel must not exchange them.
    angle = 3.0 * drawn(R)
    cos, sin = angle.cos(), angle.sin()
    if case.data == "edge":
        tokens = [t.view(math.prod(lead), *t.shape[len(lead) :]) for t in (q, k, cos, sin)]
        tokens[0][1::5, :, -1] += 100.0  # the last column
        tokens[1][2::5] *= 1e-3
        for t in tokens[2:]:
            t[3::5] = 0.0  # zeros of both signs, from products
    elif case.data == "constant":
        q.fill_(options.constant)
        k.fill_(options.constant)
    args: Args = {"q": q, "k": k, "cos": cos, "sin": sin}
    args = {name: t.to(device, case.dtype) for name, t in args.items()}
    return lay_out(args | {"rounding": "hf"} | case.options, case.layout)


def lay_out(args: Args, layout: str) -> Args:
    """`heads`: memory in the order [B, H, T, D], as models have it after a transpose."""
    if layout != "heads":
        return alter.laid_out_some(args, BY_ROWS, layout)
    heads = {n: args[n].transpose(-3, -2).contiguous().transpose(-3, -2) for n in ("q", "k")}
    return args | heads


def padding(args: Args, rows: int) -> Args:
    """Rows of NaN and infinities; they must not change others."""
    like = {n: args[n].flatten(1) for n in BY_ROWS}
    return {n: alter.rows_of_nan(t, rows).view(rows, *args[n].shape[1:]) for n, t in like.items()}


def pairs(args: Args, name: str, value: Tensor) -> Tensor:
    """A column of the first half and its column of the second are the two terms of a sum."""
    number = torch.arange(value.numel(), device=value.device).view(value.shape)
    half = args["cos"].shape[-1] // 2
    if name not in ("cos", "sin"):
        number[..., half : 2 * half] = number[..., :half]
    return number


# Truth


def scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    """The two products of every element; what passes through is exact."""
    absolute = {n: args[n].abs() for n in BY_ROWS}
    half = args["cos"].shape[-1] // 2
    found = {}

    def sizes(x: Tensor, back: bool) -> Tensor:
        size = torch.zeros_like(x)
        c1, c2 = absolute["cos"][..., None, :].chunk(2, -1)
        s1, s2 = absolute["sin"][..., None, :].chunk(2, -1)
        x1, x2 = x[..., :half], x[..., half : 2 * half]
        size[..., :half] = x1 * c1 + x2 * (s2 if back else s1)
        size[..., half : 2 * half] = x2 * c2 + x1 * (s1 if back else s2)
        return size

    for i, name in enumerate(("q", "k")):
        found[f"{name}_out"] = sizes(absolute[name], back=False)
        if cotangents:
            found[f"gradient:{name}"] = sizes(cotangents[i].abs(), back=True)
    return found


# Bits


def exact(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Sample]:
    """The eager code of models and its autograd, on the device of the inputs; of the last rows of a batch of
    gigabytes."""
    last = slice(-1000 if args["q"].numel() > 1 << 28 else None, None)
    args = args | {n: args[n][last] for n in BY_ROWS}
    cotangents = [g[last] for g in cotangents]
    leaves = {n: args[n].detach().requires_grad_() for n in ("q", "k")}
    with torch.enable_grad():
        outputs = reference.formula(**args | leaves)
    found = {f"{n}_out": o.detach() for n, o in zip(leaves, outputs, strict=True)}
    if cotangents:
        grads = torch.autograd.grad(outputs, list(leaves.values()), list(cotangents))
        found |= {f"gradient:{n}": g for n, g in zip(leaves, grads, strict=True)}
    return {name: ((last,), t.cpu()) for name, t in found.items()}


def roundings_show(trial: Trial) -> list[OutputCheck]:
    """Equal bits prove something about roundings only if the other rounding has others. In fp32 it has
    none."""
    args = trial.args()
    if args["q"].dtype not in (BF16, F16):
        return []
    other = args | {"rounding": "vllm" if args["rounding"] == "hf" else "hf"}
    both = (reference.formula(**args), reference.formula(**other))
    return [trial.control("the other rounding", *both)]


# Memory and kernels


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs, outputs and gradients."""
    if backend == "triton":
        return MB
    return 8 * max(case.dtype.itemsize, 4) * _elements(case.dims) + MB


def _elements(dims: dict[str, int]) -> int:
    tokens = math.prod(size for name, size in dims.items() if name not in "HGDR")
    return tokens * (dims["H"] + dims["G"]) * dims["D"]


def record(launch: Any, dtype: torch.dtype) -> None:
    """Every branch fixed at compile time: whole and partial heads, tiles with and without a mask, rows with
    one stride and with two, both roundings. For fp32, which differs only in conversions, one call."""
    from isobit.ops.rope import kernels_triton

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    whole = (empty(64, 32, 128), empty(64, 16, 128), empty(64, 128), "hf")
    part = (
        empty(2, 9, 12, 80)[:, :-1],
        empty(2, 9, 3, 80)[:, :-1],
        empty(8, 32).expand(2, 8, 32),
        "vllm",
    )
    for q, k, table, rounding in (whole, part) if dtype != F32 else (whole,):
        common = {"cos": table, "sin": table, "rounding": rounding}
        kernels_triton.rope(launch, q=q, k=k, **common)
        kernels_triton.rope_bwd(launch, dq_out=q, dk_out=k, **common)


# Cases


def _case(lead: dict[str, int], heads: tuple[int, int, int, int], dtype: torch.dtype, **rest: Any) -> Case:
    own = {n: rest.pop(n) for n in ("data", "layout", "heavy", "gpu_gb") if n in rest}
    return Case(lead | dict(zip("HGDR", heads, strict=True)), dtype, options=rest, **own)


# Some laws use every third case; these are the quick ones.
_SMALL = [
    _case({"N": 0}, (2, 1, 8, 8), F32),
    _case({"N": 6}, (4, 2, 16, 16), F32),
    _case({"N": 6}, (3, 2, 12, 4), F16, layout="padded"),
    _case({"B": 2, "T": 3}, (2, 1, 64, 64), BF16, layout="heads"),
    _case({"B": 2, "T": 3}, (5, 0, 80, 32), BF16, layout="offset", rounding="vllm"),
    _case({"N": 6}, (1, 1, 6, 6), F64),
    _case({"B": 2, "C": 2, "T": 2}, (2, 2, 24, 24), F16, layout="heads", rounding="vllm"),
    _case({"N": 5}, (2, 3, 7, 0), BF16),
]
_HEAVY = [
    _case({"B": 3, "T": 30}, (32, 8, 128, 128), BF16, data="random", layout="heads", heavy=True),
    _case({"N": 50}, (40, 40, 96, 48), F16, data="random", heavy=True, rounding="vllm"),
]
_BITS = [
    _case({"N": 3}, (2, 1, 4, 2), F16, data="random"),
    _case({"N": 20}, (32, 8, 128, 128), BF16, data="random", heavy=True),
    _case({"N": 20}, (6, 2, 80, 32), F16, data="random", heavy=True, rounding="vllm"),
]
_AGREE = [
    _case({"N": 8}, (3, 2, 40, 24), BF16),
    _case({"B": 2, "T": 3}, (4, 2, 64, 64), F16, layout="heads", rounding="vllm"),
    _case({"N": 6}, (2, 1, 32, 32), F32, data="random"),
    _case({"N": 150}, (32, 8, 128, 128), BF16, data="random", heavy=True),
    _case({"B": 4, "T": 30}, (16, 8, 128, 128), BF16, data="random", heavy=True, rounding="vllm"),
    _case({"N": 70}, (40, 40, 80, 32), F16, data="random", heavy=True),
    _case({"N": 70}, (32, 8, 128, 128), F32, data="random", heavy=True),
    # More than 2**31 elements of q: wrong 32-bit offsets would fail here.
    _case({"N": 530000}, (32, 1, 128, 128), BF16, data="random", heavy=True, gpu_gb=120),
]

MUTANTS = [
    Mutant(
        "cos with an odd number of columns", "cos", lambda a: a | {n: a[n][..., :-1] for n in ("cos", "sin")}
    ),
    Mutant(
        "cos wider than a head",
        "cos",
        lambda a: a | {n: a[n].repeat_interleave(4, -1) for n in ("cos", "sin")},
    ),
    Mutant("sin of another width", "sin", lambda a: a | {"sin": a["sin"][..., :-2]}),
    Mutant("cos of other tokens", "cos", lambda a: a | {"cos": a["cos"][1:]}),
    Mutant("keys of another dtype", "k", lambda a: a | {"k": alter.in_other_dtype(a["k"])}),
    Mutant("cos of another dtype", "cos", lambda a: a | {"cos": alter.in_other_dtype(a["cos"])}),
    Mutant("sin of another dtype", "sin", lambda a: a | {"sin": alter.in_other_dtype(a["sin"])}),
    Mutant("keys of another head size", "k", lambda a: a | {"k": a["k"][..., :-1]}),
    Mutant("an unknown rounding", "rounding", lambda a: a | {"rounding": "never"}),
]

PROOF = Proof(
    op=forward,
    op_class="rope",
    outputs=("q_out", "k_out"),
    make=make,
    formula=lambda args: reference.formula(**args),
    scale=scale,
    controls=NoSum("a sum of two products", pairs),
    padding=padding,
    layouts=("heads", "shifted", "padded", "offset"),
    lay_out=lay_out,
    memory=memory,
    cases=_SMALL + _HEAVY,
    bit_cases=_BITS,
    memory_cases=[
        _case({"N": 8}, (2, 1, 64, 64), F32),
        _case({"N": 300}, (32, 8, 128, 128), BF16, data="random", heavy=True),
    ],
    mutants=MUTANTS,
    bad_value=None,
    kernels={"triton": Kernels(record)},
    exact=exact,
    agree_cases=_AGREE,
    also=roundings_show,
)

PROOFS = [PROOF]
