"""The proof of `gated_delta_rule_step`. Inputs are in `inputs.py`, bit laws in `bits.py`. The truth and the
error bounds are those of `gated_delta_rule`, for all tokens of a sequence."""

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from isobit.ops.gated_delta_rule import reference
from isobit.ops.gated_delta_rule.proof.bounds import error_bounds
from isobit.ops.gated_delta_rule.proof.exact import arithmetic
from isobit.ops.gated_delta_rule_step import model
from isobit.ops.gated_delta_rule_step.op import declared
from isobit.ops.gated_delta_rule_step.proof import bits, inputs
from isobit.ops.gated_delta_rule_step.state import CHUNK, PLACE, TENSORS, DeltaState
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, Control, Kernels, Mutant, Proof, Sample

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


# Truth and errors


def formula(args: Args) -> tuple[Tensor, ...]:
    out = torch.zeros_like(args["v"])
    for b, own in enumerate(inputs.histories(args)):
        if own is not None:
            o, _ = reference.formula(**own[0])
            out[b, : o.shape[1] - own[1]] = o[0, own[1] :].to(out.dtype)
    return (out,)


def scale(args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor]) -> dict[str, Tensor]:
    bounds = torch.zeros_like(args["v"])
    for b, own in enumerate(inputs.histories(args)):
        if own is not None:
            whole = error_bounds(own[0], args["state"].dtype)["o"]
            bounds[b, : whole.shape[1] - own[1]] = whole[0, own[1] :]
    return {"out": bounds}


def exact(args: Args, cotangents: Sequence[Tensor]) -> dict[str, Sample]:
    """All rows, from what the state holds."""
    here = {n: t.cpu() if isinstance(t, Tensor) else t for n, t in args.items() if n != "state"}
    state = {name: getattr(args["state"], name).cpu().clone() for name in TENSORS}
    return {"out": ((...,), model.rows(do=arithmetic(args["q"].device), **here, **state))}


# Calls that must be refused


def _another_state(args: Args, **sizes: Any) -> Args:
    old = args["state"]
    given = {"slots": old.slots, "heads": old.heads, "value_heads": old.value_heads, "K": old.K, "V": old.V}
    return args | {"state": DeltaState(**given | {"dtype": old.dtype, "device": old.device} | sizes)}


def _other(dtype: torch.dtype) -> torch.dtype:
    return F16 if dtype == BF16 else BF16


def _twice(args: Args) -> tuple[Args, int | None]:
    return args | {"slots": torch.zeros(args["q"].shape[0], dtype=torch.int64, device=args["q"].device)}, None


MUTANTS = [
    Mutant("a state of another dtype", "q", lambda a: _another_state(a, dtype=_other(a["q"].dtype))),
    Mutant("a state with other key heads", "q", lambda a: _another_state(a, heads=1, value_heads=2)),
    Mutant("a state with other values", "v", lambda a: _another_state(a, V=2 * a["v"].shape[-1])),
    Mutant("a state with too few slots", "q", lambda a: _another_state(a, slots=1) | {"slots": None}),
    Mutant("two dtypes", "v", lambda a: a | {"v": alter.in_other_dtype(a["v"])}),
    Mutant("no state", "state", lambda a: a | {"state": a["q"]}),
    Mutant("an infinite scale", "scale", lambda a: a | {"scale": float("inf")}),
    Mutant("a gradient", "v", lambda a: a | {"v": a["v"].detach().clone().requires_grad_()}),
]


# Memory and kernels


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs and outputs: w, P, gates and 16 rows of A; the model copies the state. Of many
    tokens, copies of their whole chunks one after another, what the forward makes of these, and states."""
    d = case.dims
    tokens = d["B"] * min(d["T"], CHUNK) * d["HV"]
    heads, whole = d["B"] * d["HV"], 0
    if d["T"] > CHUNK:
        rows = 16 * (d["K"] + d["V"]) + 8 * CHUNK + 2 * d["K"] * d["V"] // CHUNK + 64
        whole = heads * (d["T"] * rows + 32 * d["K"] * d["V"])
    if backend == "model":
        own = d["K"] * d["V"] + max(d["T"], CHUNK) * (d["K"] + d["V"] + CHUNK)
        return 64 * heads * own + whole + (1 << 22)
    return tokens * (2 * d["K"] + 2 * CHUNK + 8) + heads * 64 * CHUNK + whole + (1 << 20)


_ONE, _SEVERAL, _SMALL_ONE = (64, 1, 128, True), (1, 4, 64, False), (1, 1, 64, False)
_ALONE, _FEW = (1, 1, 128, True), (2, 1, 128, False)

#: What is compiled of each backend: (B, T, K, whether all is given). The second dtype differs in conversions
#: only.
_CALLS: dict[str, dict[torch.dtype, Sequence[tuple[int, int, int, bool]]]] = {
    "triton": {BF16: (_ONE, _SEVERAL), F16: (_ONE,)},
    "hopper": {BF16: (_ONE, _ALONE, _FEW), F16: (_SMALL_ONE,)},
}


def record(backend: str, launch: Any, dtype: torch.dtype) -> None:
    kernels = import_module(f"isobit.ops.gated_delta_rule_step.kernels_{backend}")
    narrow = F16 if dtype == F32 else dtype

    def empty(*shape: int, dtype: torch.dtype = narrow) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for B, T, K, full in _CALLS[backend][narrow]:
        H, HV, V, N = 16, 32, 128, 70
        P = 1 if full else 2
        state = {
            "start": empty(N, P, HV, K, V, dtype=F32), "start16": empty(N, P, HV, K, V),
            "k_rows": empty(N, P, H, CHUNK, K), "bv_rows": empty(N, P, HV, CHUNK, V),
            "vn_rows": empty(N, P, HV, CHUNK, V), "inverse": empty(N, P, HV, CHUNK, CHUNK, dtype=F32),
            "beta_rows": empty(N, P, HV, CHUNK, dtype=F32), "gate_rows": empty(N, P, HV, CHUNK, dtype=F32),
            "place": empty(N, PLACE, dtype=torch.int32),
        }  # fmt: skip
        kernels.rows(
            launch, q=empty(B, T, H, K), k=empty(B, T, H, K), v=empty(B, T, HV, V),
            g=empty(B, T, HV, dtype=F32) if full else None, beta=empty(B, T, HV, dtype=F32),
            slots=empty(B, dtype=torch.int32) if full else None,
            lengths=None if full else empty(B, dtype=torch.int32), scale=0.1,
            use_qk_l2norm_in_kernel=False, **state,
        )  # fmt: skip


# Cases


def _case(B: int, T: int, H: int, HV: int, K: int, V: int, dtype: torch.dtype, **rest: Any) -> Case:
    names = ("mode", "prompts", "at", "lengths", "drafts", "seeded")
    options = {name: rest.pop(name) for name in names if name in rest}
    return Case({"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}, dtype, options=options, **rest)


_MANY = "+".join(str(n * 7 % 130) for n in range(64))

_SMALL = [
    _case(2, 2, 2, 2, 64, 64, BF16),
    _case(1, 0, 1, 1, 64, 64, BF16),
    _case(0, 1, 1, 1, 64, 64, BF16),
    _case(2, 2, 1, 2, 64, 64, F16, prompts="63+0", lengths="2+1", mode="n", layout="padded"),
    _case(1, 1, 1, 1, 128, 64, BF16, at=20, seeded=True),
]
_HEAVY = [
    _case(64, 1, 16, 32, 128, 128, BF16, prompts=_MANY, heavy=True),
    _case(8, 8, 4, 8, 128, 128, F16, prompts="60+0+64+1+63+100+128+5", mode="gn", drafts=True, heavy=True),
    _case(2, 64, 2, 4, 256, 128, BF16, prompts="30+64", seeded=True, heavy=True),
    _case(2, 200, 2, 4, 64, 192, BF16, prompts="64+1", heavy=True),
]
_BITS = [
    _case(2, 3, 1, 1, 64, 64, BF16, prompts="5+127", drafts=True, seeded=True),
    _case(3, 70, 1, 2, 64, 64, F16, prompts="64+63+1", lengths="70+2+69", heavy=True),
    _case(8, 1, 4, 8, 128, 128, BF16, prompts="60+0+64+1+63+100+128+5", heavy=True),
    _case(8, 8, 4, 8, 128, 128, BF16, prompts="60+0+64+1+63+100+128+5", drafts=True, heavy=True),
    _case(2, 5, 1, 1, 256, 64, BF16, prompts="62+70", mode="n", heavy=True),
]

PROOF = Proof(
    op=declared,
    op_class="gated_delta_rule",
    outputs=("out",),
    make=inputs.make,
    formula=formula,
    scale=scale,
    controls=[Control("groups of 16 features in another order", inputs.features_regrouped)],
    padding=lambda args, rows: {},
    layouts=("padded", "shifted"),
    lay_out=lambda args, layout: alter.laid_out_some(args, inputs.BY_TOKEN[:3], layout),
    memory=memory,
    cases=_SMALL + _HEAVY,
    bit_cases=_BITS,
    memory_cases=[
        _case(2, 3, 1, 1, 64, 64, BF16, data="random"),
        _case(64, 1, 16, 32, 128, 128, BF16, prompts=_MANY, heavy=True),
    ],
    mutants=MUTANTS,
    bad_value=_twice,
    kernels={
        name: Kernels(partial(record, name), targets=(("cuda", 90, 32),)) for name in ("hopper", "triton")
    },
    rows="B",
    exact=exact,
    agree_cases=[
        _case(2, 3, 1, 1, 64, 64, F16, mode="gc", prompts="5+63", drafts=True, seeded=True),
        _case(4, 3, 2, 4, 128, 128, BF16, mode="gc", prompts="62+5+64+0", seeded=True, heavy=True),
    ],
    slow=("model",),
    positive=("H", "HV", "K", "V"),
    invariant=bits.invariant,
    also=bits.borders,
    differs={"model": {"make": partial(inputs.make, backend="model")}},
)

PROOFS = [PROOF]
