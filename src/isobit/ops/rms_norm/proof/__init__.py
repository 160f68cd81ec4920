"""The proof of `rms_norm`: inputs that would expose a wrong kernel, the truth, error bounds, its class in
numpy, and other calls that must give the same bits."""

import math
from typing import Any

import torch
from torch import Tensor

from isobit.ops.rms_norm import model
from isobit.ops.rms_norm.op import forward
from isobit.ops.rms_norm.order import GROUP
from isobit.ops.rms_norm.proof.bits import same_elsewhere
from isobit.ops.rms_norm.proof.exact import exact
from isobit.ops.rms_norm.proof.inputs import half_rolled, lay_out, make, padding, reordered
from isobit.ops.rms_norm.proof.ranks import HEADS
from isobit.ops.rms_norm.proof.truth import formula, judged, scale
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, Control, Kernels, Mutant, Proof

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MB = 1 << 20


# Memory and kernels


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs, outputs and gradients."""
    D = case.dims["D"]
    N = math.prod(size for name, size in case.dims.items() if name != "D")
    if backend == "reference":
        return 12 * max(case.dtype.itemsize, 4) * N * D + MB
    sums = 4 * D * (-(-N // GROUP) + 1) if direction != "fwd" else 0  # of groups, and of groups of groups
    if backend == "model":
        return 2 * sums + 16 * 4 * (min(N * D, model.CHUNK) + GROUP * D) + 8 * N + MB
    return sums + sums // 64 + 4 * N + MB


def record(launch: Any, dtype: torch.dtype) -> None:
    """Every kernel with every value of its compile-time branches: few and many rows, short and long ones,
    whole tiles and partial ones, with all options and with none. For fp32, which differs only in conversions,
    two calls."""
    from isobit.ops.rms_norm import kernels_triton, kernels_triton_bwd

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    many = [((1 << 18, 128), True), ((3, 7000, 2560), False), ((1 << 15, 7000), False)]
    calls = [*many[:1], ((20, 128), True), *many[1:], ((3, 7, 2560), False), ((20, 17001), True)]
    for shape, full in calls if dtype != F32 else calls[:2]:
        D, lead = shape[-1], shape[:-1]
        # Two leading dimensions that cannot be flattened into one.
        x = empty(lead[0], lead[1] + 1, D)[:, :-1] if len(lead) == 2 else empty(*shape)
        weight = empty(D, dtype=F32 if full else dtype)
        options: Args = {"eps": 1e-6, "offset": 1.0 if full else 0.0, "cast": "after" if full else "before"}
        options |= {"residual": x if full else None, "return_rstd": full}
        kernels_triton.rms_norm(launch, x=x, weight=weight, **options)
        options = {"offset": options["offset"], "dsummed": x if full else None}
        alone = [(True, False), (False, True)] if D == 128 and dtype != F32 else []
        for wanted in [(True, True), *alone]:
            kernels_triton_bwd.rms_norm_bwd(
                launch, h=x, weight=weight, rstd=empty(*lead, dtype=F32), dout=x, **options,
                want_h=wanted[0], want_weight=wanted[1],
            )  # fmt: skip


# Cases


def _case(N: int, D: int, dtype: torch.dtype, **rest: Any) -> Case:
    own = {n: rest.pop(n) for n in ("data", "layout", "heavy", "gpu_gb") if n in rest}
    return Case({"N": N, "D": D}, dtype, options=rest, **own)


# Some laws use every third case; these are the quick ones.
_SMALL = [
    _case(0, 7, F32, residual=True),
    _case(7, 257, F32),
    _case(7, 2100, F32, layout="offset", residual=True, cast="after"),
    Case({"B": 2, "T": 9, "D": 33}, BF16, layout="shifted", options={"residual": True}),
    _case(7, 1100, F16, weight=F32, residual=True, eps=1e-5),
    _case(2, 8200, BF16, weight=F32, residual=True),
    Case({"B": 2, "T": 3, "H": 4, "D": 64}, BF16),
    _case(7, 40, F64, residual=True, offset=1.0),
    _case(2, 16400, F32),
    _case(7, 1, F16, residual=True),
    _case(20, 129, BF16, cast="after", offset=1.0),
    _case(20, 40, F16, layout="padded", offset=1.0),
]
_HEAVY = [
    _case(3000, 128, BF16, data="random", heavy=True),
    _case(100, 4096, BF16, data="random", heavy=True, residual=True),
    _case(60, 5120, F16, data="random", heavy=True, weight=F32),
    _case(40, 8192, BF16, heavy=True, cast="after", offset=1.0, residual=True),
    _case(10, 20000, BF16, heavy=True),
    _case(100, 2560, F32, data="random", heavy=True),
]
# Another order of a sum of squares changes few bits: in one row of ten, and in fp32 only. With a residual, so
# that there are two outputs to compare; without one they are the same, see `same_elsewhere`.
_BITS = [
    _case(70, 300, F32, data="random", residual=True),
    _case(19, 1100, F32, data="random", residual=True, cast="after", offset=1.0),
    _case(9000, 1024, BF16, data="random", residual=True, heavy=True),
    _case(40000, 2048, BF16, data="random", residual=True, heavy=True),
    _case(2200, 8192, F16, data="random", residual=True, cast="after", heavy=True),
    _case(300, 20000, F32, data="random", residual=True, heavy=True),
    # More than 2**31 elements: wrong 32-bit offsets would fail here.
    _case(1050000, 2048, BF16, data="random", residual=True, heavy=True, gpu_gb=120),
]
_AGREE = [
    _case(20, 1100, F32, data="random"),
    _case(70, 300, F32, data="random", residual=True, offset=1.0),
    _case(4500, 4096, BF16, data="random", residual=True, heavy=True),
    _case(40000, 2048, BF16, data="random", heavy=True),
    _case(70000, 128, BF16, data="random", cast="after", offset=1.0, heavy=True),
    _case(3000, 5120, F16, data="random", weight=F32, heavy=True),
    _case(300, 20000, F32, data="random", cast="after", heavy=True),
]

# Heads between tokens, as Qwen 3 has them, and before them, as Gemma 3.
_SHARDS = [
    Case({"B": 1, "T": 5, "H": 8, "D": 24}, BF16, "random", options={"weight": F32}),
    Case({"B": 2, "H": 8, "T": 3, "D": 16}, F32, "random",
         options={"cast": "after", "offset": 1.0, "eps": 1e-5}),
    Case({"B": 4, "T": 2000, "H": 32, "D": 128}, BF16, "random", heavy=True, options={"weight": F32}),
]  # fmt: skip

MUTANTS = [
    Mutant("no columns", "x", lambda a: a | {"x": a["x"][..., :0], "weight": a["weight"][:0]}),
    Mutant(
        "a weight of another dtype", "weight", lambda a: a | {"weight": alter.in_other_dtype(a["weight"])}
    ),
    Mutant(
        "a residual of another dtype", "residual", lambda a: a | {"residual": alter.in_other_dtype(a["x"])}
    ),
    Mutant("a residual of another shape", "residual", lambda a: a | {"residual": a["x"][1:]}),
    Mutant("eps below 0", "eps", lambda a: a | {"eps": -1e-6}),
    Mutant("eps NaN", "eps", lambda a: a | {"eps": float("nan")}),
    Mutant("eps infinite", "eps", lambda a: a | {"eps": float("inf")}),
    Mutant("offset NaN", "offset", lambda a: a | {"offset": float("nan")}),
    Mutant("an unknown cast", "cast", lambda a: a | {"cast": "never"}),
]


def _back(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(half_rolled(o, -1) for o in outputs)


PROOF = Proof(
    op=forward,
    op_class="rms_norm",
    outputs=("out", "summed"),
    make=make,
    formula=formula,
    scale=scale,
    controls=[Control("half of the columns rolled by one", reordered, back=_back)],
    padding=padding,
    layouts=("shifted", "padded", "offset", "apart"),
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
    slow=("model",),
    positive=("D",),
    judged=judged,
    also=same_elsewhere,
    shards=[HEADS],
    shard_cases=_SHARDS,
)

PROOFS = [PROOF]
