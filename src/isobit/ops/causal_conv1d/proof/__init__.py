"""The proof of `causal_conv1d`: inputs that would expose a wrong kernel, the truth, error bounds, its class
by definition, and other calls that must give the same bits."""

import math
from typing import Any

import torch
from torch import Tensor

from isobit.ops.causal_conv1d.op import forward
from isobit.ops.causal_conv1d.proof.bits import same_elsewhere
from isobit.ops.causal_conv1d.proof.inputs import (
    T_OF_BITS,
    histories_swapped,
    lay_out,
    make,
    padding,
    swapped_back,
)
from isobit.ops.causal_conv1d.proof.truth import formula, scale
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, Control, Kernels, Mutant, Proof

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MB = 1 << 20


# Memory and kernels


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs, outputs and gradients."""
    elements = math.prod(case.dims.values())
    if backend == "model":
        return 80 * elements + MB
    return (5 * elements * 4 // 256 + 8 * 5 * 4 * case.dims["D"] if direction != "fwd" else 0) + MB


def record(launch: Any, dtype: torch.dtype) -> None:
    """Every kernel: batches and packed sequences, with everything and with nothing. For other dtypes than
    bf16, which differ only in conversions, one call."""
    from isobit.ops.causal_conv1d import kernels_triton, kernels_triton_bwd

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for full in (True, False) if dtype == BF16 else (True,):
        W, D = (4, 8192) if full else (3, 700)
        weight = empty(D, W, dtype=dtype if full else F32)
        args: Args = {"weight": weight, "bias": empty(D, dtype=weight.dtype) if full else None}
        args["activation"] = "silu" if full else None
        x = empty(1 if full else 3, 4096, D)
        where: Args = {"initial_state": empty(5, W - 1, D) if full else None}
        where["cu_seqlens"] = empty(6, dtype=torch.int32) if full else None
        where["first"] = None if full else empty(3, dtype=torch.int64)
        kernels_triton.causal_conv1d(launch, x=x, return_final_state=True, **args, **where)
        kernels_triton_bwd.causal_conv1d_bwd(
            launch, x=x, dout=x, want_x=True, want_weight=True, want_bias=full, **args, **where
        )
        slots = empty(8, dtype=torch.int32) if full else None
        kernels_triton.causal_conv1d_update(
            launch, x=empty(8, 1, D), state=empty(64, W - 1, D), slots=slots, **args
        )


# Cases


def _case(B: int, T: int, D: int, dtype: torch.dtype, **rest: Any) -> Case:
    own = {n: rest.pop(n) for n in ("data", "layout", "heavy", "gpu_gb") if n in rest}
    return Case({"B": B, "T": T, "D": D}, dtype, options=rest, **own)


# Some laws use every third case; these are the quick ones.
_SMALL = [
    _case(2, 0, 7, F32),
    _case(2, 9, 33, F32, state=False, bias=False),
    _case(1, 23, 40, BF16, lengths="5+0+1+17"),
    _case(3, 7, 40, BF16, layout="padded", weight=F32, W=3, first=True),
    _case(2, 3, 64, F16, silu=False, W=2),
    _case(0, 4, 8, BF16),
    _case(1, 20, 16, F32, lengths="2+18", W=2, layout="offset"),
]
_HEAVY = [
    _case(4, 700, 2048, BF16, data="random", heavy=True),
    _case(1, 3000, 1024, BF16, data="random", lengths="117+0+64+2257+1+561", heavy=True),
    _case(16, 1, 8192, BF16, data="random", heavy=True),
]
_BITS = [
    _case(9, T_OF_BITS, 40, F32, data="random"),
    _case(20, T_OF_BITS, 3000, F32, data="random", heavy=True),
]
_AGREE = [
    _case(3, 6, 33, F32, data="random"),
    _case(1, 40, 20, BF16, lengths="3+0+1+36"),
    _case(4, 9, 24, F16, W=3, first=True, bias=False),
    _case(6, 200, 2048, F32, data="random", heavy=True),
    _case(1, 5000, 4096, BF16, lengths="3+0+1+1500+3496", heavy=True),
]

MUTANTS = [
    Mutant("one tap", "weight", lambda a: a | {"weight": a["weight"][:, :1]}),
    Mutant("another dtype", "weight", lambda a: a | {"weight": alter.in_other_dtype(a["weight"])}),
    Mutant(
        "a bias of another dtype", "bias", lambda a: a | {"bias": alter.in_other_dtype(a["weight"][:, 0])}
    ),
    Mutant(
        "a state of another dtype",
        "initial_state",
        lambda a: a | {"initial_state": alter.in_other_dtype(a["x"][:, :3])},
    ),
    Mutant("a short state", "initial_state", lambda a: a | {"initial_state": a["x"][:, :2]}),
    Mutant("an unknown activation", "activation", lambda a: a | {"activation": "gelu"}),
    Mutant("a batch that is packed", "cu_seqlens", lambda a: a | {"cu_seqlens": _integers(a, 3)}),
    Mutant("no bounds at all", "cu_seqlens", lambda a: a | {"x": a["x"][:1], "cu_seqlens": _integers(a, 0)}),
    Mutant(
        "packed sequences with a first token",
        "first",
        lambda a: _one(a) | {"cu_seqlens": _integers(a, 2), "first": _integers(a, 1)},
    ),
]


def _integers(args: Args, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64, device=args["x"].device)


def _one(args: Args) -> Args:
    return args | {"x": args["x"][:1], "initial_state": None}


def _begins_too_late(args: Args) -> tuple[Args, int | None]:
    first = _integers(args, len(args["x"]))
    first[-1] = args["x"].shape[1] + 1
    return args | {"first": first}, None


PROOF = Proof(
    op=forward,
    op_class="causal_conv1d",
    outputs=("out", "final_state"),
    make=make,
    formula=formula,
    scale=scale,
    controls=[Control("the second and third term exchanged", histories_swapped, back=swapped_back)],
    padding=padding,
    layouts=("shifted", "padded", "offset", "apart"),
    lay_out=lay_out,
    memory=memory,
    cases=_SMALL + _HEAVY,
    bit_cases=_BITS,
    memory_cases=[_case(2, 40, 300, F32), _case(2, 2000, 2048, BF16, data="random", heavy=True)],
    mutants=MUTANTS,
    bad_value=_begins_too_late,
    kernels={"triton": Kernels(record)},
    rows="B S",
    batch_sizes=(1, 3),
    agree_cases=_AGREE,
    slow=("model",),
    also=same_elsewhere,
)

PROOFS = [PROOF]
