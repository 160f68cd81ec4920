"""The proofs of `gated_delta_rule` and `chunk_gated_delta_rule_fwd_h`: cases, calls that must be refused,
memory, and kernels to compile."""

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from isobit.ops.gated_delta_rule import reference
from isobit.ops.gated_delta_rule.model import CHUNK
from isobit.ops.gated_delta_rule.op import forward
from isobit.ops.gated_delta_rule.proof import inputs
from isobit.ops.gated_delta_rule.proof.bits import rows_so_far, same_elsewhere, states_alone
from isobit.ops.gated_delta_rule.proof.bounds import error_bounds, state_bounds
from isobit.ops.gated_delta_rule.proof.bounds_bwd import gradient_bounds
from isobit.ops.gated_delta_rule.proof.exact import exact, exact_states
from isobit.ops.gated_delta_rule.states_op import states
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, Control, Kernels, Mutant, Proof

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


# Truth and errors


def _wide(args: Args) -> torch.dtype:
    return torch.promote_types(args["k"].dtype, F32)


def formula(args: Args) -> tuple[Tensor, ...]:
    o, final = reference.formula(**args)
    return o.to(args["q"].dtype), final


def formula_of_states(args: Args) -> tuple[Tensor, ...]:
    h, v_new, final = reference.states(**args, rounds=args["k"].dtype != F64)
    return h.to(args["k"].dtype), v_new.to(args["k"].dtype), final.contiguous()


def _narrowest(args: Args, names: tuple[str, ...]) -> torch.dtype:
    """The dtype that these fp64 inputs came from."""
    for dtype in (BF16, F16):
        if all(bool((args[n].to(dtype).double() == args[n]).all()) for n in names):
            return dtype
    return F32


def scale(args: Args, outputs: Any, cotangents: Any) -> dict[str, Tensor]:
    narrow = _narrowest(args, ("q", "k", "v"))
    if cotangents:
        do, dfinal_state = cotangents
        return gradient_bounds(args, do, dfinal_state, narrow)
    return error_bounds(args, narrow)


def scale_of_states(args: Args, outputs: Any, cotangents: Any) -> dict[str, Tensor]:
    return state_bounds(args, _narrowest(args, ("k", "w", "u")))


# Calls that must be refused


def _integers(args: Args, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=args["k"].device)


def _first(args: Args, names: tuple[str, ...]) -> Args:
    """The first sequence of a batch, without states."""
    return args | {n: args[n][:1] for n in names if args[n] is not None} | {"initial_state": None}


def _more_heads(args: Args, *names: str) -> Args:
    times = 2 * args["beta" if "beta" in args else "w"].shape[2] + 1
    return args | {n: args[n].repeat(1, 1, times, 1) for n in names}


def _half_a_state(args: Args) -> Args:
    state = args["initial_state"]
    return args | {"initial_state": state[..., : state.shape[-1] // 2].contiguous()}


def _two_states(args: Args) -> Args:
    return args | {"initial_state": args["initial_state"].repeat(2, 1, 1, 1)}


def descending(args: Args) -> tuple[Args, int | None]:
    T = args["k"].shape[1]
    bounds = torch.tensor([0, T, T - 1, T], dtype=torch.int32, device=args["k"].device)
    names = inputs.BY_TOKEN if "q" in args else inputs.OF_STATES
    changed = _first(args, names) | {"cu_seqlens": bounds}
    return changed | ({} if "q" in args else {"chunk_indices": bounds.new_zeros(1, 2)}), None


_ALIKE = [
    Mutant("chunks of 32", "chunk_size", lambda a: a | {"chunk_size": 32}),
    Mutant("half a state", "initial_state", _half_a_state),
    Mutant("states of other sequences", "initial_state", _two_states),
    Mutant("a batch that is packed", "cu_seqlens", lambda a: a | {"cu_seqlens": _integers(a, 2)}),
]
MUTANTS = [
    *_ALIKE,
    Mutant("two dtypes", "v", lambda a: a | {"v": alter.in_other_dtype(a["v"])}),
    Mutant("more heads than value heads", "v", lambda a: _more_heads(a, "q", "k")),
    Mutant("gates that are to be computed", "use_gate_in_kernel", lambda a: a | {"use_gate_in_kernel": True}),
    Mutant(
        "logits of beta", "use_beta_sigmoid_in_kernel", lambda a: a | {"use_beta_sigmoid_in_kernel": True}
    ),
    Mutant("eigenvalues below 0", "allow_neg_eigval", lambda a: a | {"allow_neg_eigval": True}),
    Mutant("an infinite scale", "scale", lambda a: a | {"scale": float("inf")}),
    Mutant(
        "no bounds at all",
        "cu_seqlens",
        lambda a: _first(a, inputs.BY_TOKEN) | {"cu_seqlens": _integers(a, 0)},
    ),
]
MUTANTS_OF_STATES = [
    *_ALIKE,
    Mutant("two dtypes", "w", lambda a: a | {"w": alter.in_other_dtype(a["w"])}),
    Mutant("more heads than value heads", "u", lambda a: _more_heads(a, "k")),
    Mutant("offsets without bounds", "chunk_offsets", lambda a: a | {"chunk_offsets": _integers(a, 1)}),
]


# Memory and kernels


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs and outputs: u, w, v_new, gates, systems, and states at the starts of chunks."""
    d = case.dims
    tokens, chunks = d["B"] * d["T"] * d["HV"], d["B"] * (-(-d["T"] // CHUNK) + 1) * d["HV"]
    if backend != "triton":
        return 256 * tokens * (d["K"] + d["V"] + CHUNK) + 64 * chunks * d["K"] * d["V"] + (1 << 21)
    rows = tokens * (2 * d["V"] + d["K"]) * 2 + tokens * 8
    if direction != "fwd":  # the inverse, dvn; parts of dbeta and dG; rows of q and k in fp32
        rows += tokens * (2 * CHUNK + 2 * d["V"] + 8 * (2 + d["K"] // CHUNK)) + 12 * tokens * d["K"]
        rows += chunks * (2 * d["K"] * d["V"] + 4 * CHUNK * CHUNK)  # dh, dS and M
    return rows + chunks * (4 * CHUNK * CHUNK + 2 * d["K"] * d["V"]) + (1 << 20)


def memory_of_states(case: Case, backend: str, direction: str) -> int:
    return 1 << 20 if backend == "triton" else memory(case, backend, direction)


def _empty(dtype: torch.dtype) -> Any:
    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return empty


#: K, V, what is given, whether states are V-first, whether sequences are packed.
Call = tuple[int, int, str, bool, bool]


def record(launch: Any, dtype: torch.dtype) -> None:
    """With and without gates, both layouts, packed or not, every K. For the second dtype, which differs only
    in conversions, one call."""
    from isobit.ops.gated_delta_rule import kernels_triton, kernels_triton_bwd

    empty, dtype = _empty(F16 if dtype == F32 else dtype), F16 if dtype == F32 else dtype
    calls: list[Call] = [(128, 128, "ghn", False, False), (64, 16, "n", True, True)]
    T, H, HV = 256, 1, 2
    for K, V, mode, v_first, packed in calls if dtype == BF16 else calls[1:]:
        S = 3 if packed else 1
        state = empty(*((S, HV, V, K) if v_first else (S, HV, K, V)), dtype=F32)
        args: Args = {
            "q": empty(1, T, H, K), "k": empty(1, T, H, K), "v": empty(1, T, HV, V),
            "g": empty(1, T, HV, dtype=F32) if "g" in mode else None, "beta": empty(1, T, HV, dtype=F32),
            "scale": 0.1, "initial_state": state if "h" in mode else None, "state_v_first": v_first,
            "use_qk_l2norm_in_kernel": "n" in mode,
            "cu_seqlens": empty(S + 1, dtype=torch.int32) if packed else None,
        }  # fmt: skip
        kernels_triton.gated_delta_rule(
            launch, **args, output_final_state="h" in mode, return_inverse="h" in mode
        )
        if packed:
            kernels_triton_bwd.chunk_offsets(args["cu_seqlens"], T, launch)
        if dtype != BF16 or packed:
            continue
        wanted: Args = {f"want_{name}": args[name] is not None for name in forward.differentiable}
        recur = partial(kernels_triton_bwd.recurrences, dhu=_not_recorded)
        kernels_triton_bwd.gated_delta_rule_bwd(
            launch, recur, **args, inverse=empty(1, T, HV, CHUNK), do=args["v"],
            dfinal_state=state if "h" in mode else None, **wanted,
        )  # fmt: skip


def _not_recorded(launch: Any, **args: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    """In place of dhu, whose own proof compiles it."""
    return args["dv"], args["h0"], args["dv"]


HOPPER = (("cuda", 90, 32),)


def record_states(module: str, launch: Any, dtype: torch.dtype) -> None:
    kernels = import_module(f"isobit.ops.gated_delta_rule.{module}")
    empty, dtype = _empty(F16 if dtype == F32 else dtype), F16 if dtype == F32 else dtype
    calls: list[Call] = [(128, 128, "gkh", True, True), (256, 64, "g", False, False)]
    T, H, HV = 256, 1, 2
    for K, V, mode, v_first, packed in calls if dtype == BF16 else calls[:1]:
        S = 3 if packed else 1
        kernels.fwd_h(
            launch, k=empty(1, T, H, K), w=empty(1, T, HV, K), u=empty(1, T, HV, V),
            g=empty(1, T, HV, dtype=F32) if "g" in mode else None,
            gk=empty(1, T, HV, K, dtype=F32) if "k" in mode else None,
            initial_state=empty(S, HV, V, K, dtype=F32) if "h" in mode else None,
            output_final_state="h" in mode, save_new_value=True, state_v_first=v_first, chunk_size=CHUNK,
            cu_seqlens=empty(S + 1, dtype=torch.int32) if packed else None,
            chunk_indices=empty(6, 2, dtype=torch.int64) if packed else None, chunk_offsets=None,
        )  # fmt: skip


def record_parts(launch: Any, dtype: torch.dtype) -> None:
    """What Hopper has of its own besides the states: inverses, outputs and gradients, with a gate, packed and
    with all that there can be, and without."""
    from isobit.ops.gated_delta_rule import kernels_hopper, kernels_hopper_gradients
    from isobit.ops.gated_delta_rule.kernels_triton import tiles_of

    T, H, HV, full = 256, 1, 2, dtype == BF16
    empty, K = _empty(BF16 if full else F16), 128 if full else 64
    gate, bounds = (empty(1, T, HV, dtype=F32), empty(4, dtype=torch.int32)) if full else (None, None)
    keys, values = empty(1, T, H, K), empty(1, T, HV, K)
    kernels_hopper.solve(keys, empty(1, T, HV), gate, bounds, launch, keys if full else None)
    state = empty(3, HV, K, K, dtype=F32) if full else None
    kernels_hopper.outputs(
        keys, keys, values, values, gate, state, bounds, 0.1, v_first=full, want_final=full, launch=launch,
        normed=full,
    )  # fmt: skip
    keys, values = empty(1, T, H if full else HV, 128), empty(1, T, HV, 128)
    kernels_hopper.fold(keys, values, empty(1, T, HV), gate, bounds, empty(1, T, HV, CHUNK), launch, 132)
    if full:  # states and their gradients at the same time, as in the backward
        tiles = tiles_of(T, 3, bounds)
        backwards = {
            "q": keys, "k": keys, "w": values, "do": values, "dv": values, "g": gate, "gk": None, "h0": None,
            "dht": state, "scale": 0.1, "state_v_first": False, "cu_seqlens": bounds, "chunk_size": CHUNK,
            "chunk_indices": empty(tiles, 2, dtype=torch.int32), "chunk_offsets": empty(3, dtype=torch.int32),
            "use_exp2": True,
        }  # fmt: skip
        forwards = (keys, values, values, gate, None, None, bounds, None, tiles, False, True, False)
        kernels_hopper.recurrences(forwards, backwards, launch, 132)
    inverses, states = empty(1, T, HV, CHUNK), empty(tiles_of(T, 3 if full else 1, bounds), HV, 128, 128)
    kernels_hopper_gradients.gradients(
        keys, keys, keys, keys, values, gate, empty(1, T, HV, dtype=F32), inverses, values, values, values,
        states, states, bounds, 0.1, full, (empty(1, T, H, dtype=F32),) * 2 if full else None, launch, 132,
    )  # fmt: skip


# Cases


def _case(B: int, T: int, H: int, HV: int, K: int, V: int, dtype: torch.dtype, **rest: Any) -> Case:
    options: dict[str, Any] = {}
    for name in ("mode", "v_first", "lengths"):
        if name in rest:
            options[name] = rest.pop(name)
    return Case({"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}, dtype, options=options, **rest)


_SMALL = [
    _case(2, 3, 2, 2, 16, 16, BF16),
    _case(1, 0, 1, 1, 16, 16, BF16),
    _case(1, 66, 1, 1, 16, 16, BF16),
    _case(1, 20, 1, 2, 32, 16, F16, mode="gn", layout="padded"),
    _case(1, 70, 1, 1, 16, 32, BF16, mode="gh", v_first=True, lengths="3+0+67"),
    _case(1, 30, 1, 1, 48, 16, BF16, mode="-"),
    _case(1, 70, 1, 2, 20, 12, F32, lengths="66+4"),
    _case(2, 70, 1, 2, 16, 16, F64, mode="ghn", v_first=True),
]
_HEAVY = [
    _case(2, 150, 1, 2, 128, 128, BF16, heavy=True),
    _case(1, 130, 2, 2, 128, 64, F16, mode="ghn", v_first=True, heavy=True),
    _case(1, 70, 1, 1, 256, 128, BF16, heavy=True),
    _case(1, 100, 2, 2, 64, 192, BF16, mode="h", heavy=True),
    _case(1, 260, 1, 2, 128, 64, BF16, lengths="77+0+64+1+118", heavy=True),
    # On Hopper there is one kernel for states and outputs where there are many, as here, and two above.
    _case(6, 150, 4, 4, 128, 128, BF16, mode="gn", heavy=True),
    _case(1, 700, 4, 8, 64, 64, F16, mode="ghn", v_first=True, lengths="117+0+64+257+1+261", heavy=True),
    # More than 65535 programs.
    _case(1, 4200, 1, 32, 16, 16, BF16, lengths="2100x2", heavy=True, gpu_gb=8),
]
_BITS = [
    _case(2, 20, 1, 1, 64, 64, F16, mode="gh"),
    _case(4, 300, 2, 4, 128, 128, BF16, heavy=True),
    _case(6, 150, 2, 4, 128, 128, BF16, mode="gh", heavy=True),  # one kernel on Hopper
    _case(3, 200, 1, 2, 64, 64, F16, mode="gn", heavy=True),
    _case(3, 130, 1, 1, 256, 64, BF16, heavy=True),
    # More than 2**31 elements in v, u, v_new and o: wrong 32-bit offsets would fail here.
    _case(9, 58304, 1, 64, 64, 64, BF16, data="random", heavy=True, gpu_gb=120),
]
#: Those of Hopper, which serves states of 64, 128 or 256 rows.
_ON_HOPPER = [
    _case(2, 3, 2, 2, 64, 64, BF16),
    _case(1, 0, 1, 1, 64, 64, BF16),
    _case(1, 66, 1, 1, 64, 64, BF16),
    _case(1, 20, 1, 2, 128, 64, F16, mode="gn", layout="padded"),
    _case(1, 70, 1, 1, 64, 128, BF16, mode="gh", v_first=True, lengths="3+0+67"),
    _case(1, 30, 1, 1, 64, 64, BF16, mode="-"),
    _case(2, 70, 1, 2, 256, 64, F16, mode="ghn", v_first=True),
    *_HEAVY[:-1],
]
_AGREE = [
    _case(1, 70, 1, 1, 48, 16, BF16, mode="gh"),
    _case(1, 71, 1, 1, 48, 16, F16, mode="gh", lengths="5+0+66"),
    _case(1, 200, 1, 2, 128, 128, BF16, heavy=True),
    _case(1, 200, 1, 1, 64, 64, F16, mode="ghn", heavy=True),
    _case(1, 300, 1, 2, 128, 64, BF16, lengths="100+0+199+1", heavy=True),
    _case(1, 300, 4, 8, 128, 64, BF16, lengths="100+0+64+135+1+0", heavy=True),  # one kernel on Hopper
]

_MEMORY = _case(1, 512, 1, 2, 128, 128, BF16, heavy=True)

PROOF = Proof(
    op=forward,
    op_class="gated_delta_rule",
    outputs=("o", "final_state"),
    make=inputs.make,
    formula=formula,
    scale=scale,
    controls=[
        Control(
            "groups of 16 features in another order", inputs.features_regrouped, back=inputs.features_back
        )
    ],
    padding=inputs.padding,
    layouts=("padded", "shifted"),
    lay_out=lambda args, layout: alter.laid_out_some(args, inputs.BY_TOKEN[:3], layout),
    memory=memory,
    cases=_SMALL + _HEAVY,
    bit_cases=_BITS,
    memory_cases=[_case(1, 20, 1, 1, 16, 16, BF16), _MEMORY],
    mutants=MUTANTS,
    bad_value=descending,
    # For one target: the substitution takes seconds to compile. The states, below, are for all of them.
    kernels={
        "triton": Kernels(record, targets=HOPPER),
        "hopper": Kernels(record_parts, targets=HOPPER),
    },
    rows="B S",
    batch_sizes=(1,),
    exact=exact,
    agree_cases=_AGREE,
    slow=("model",),
    positive=("H", "HV", "K", "V"),
    parts=rows_so_far,
    also=same_elsewhere,
    differs={
        "hopper": {
            "cases": _ON_HOPPER,
            "agree_cases": [_case(1, 70, 1, 1, 64, 64, BF16, mode="gh"), *_AGREE[2:]],
            "memory_cases": [_case(1, 20, 1, 1, 64, 64, BF16), _MEMORY],
        }
    },
)

_HEAVY_STATES = [
    _case(2, 300, 1, 2, 128, 128, BF16, heavy=True),
    _case(1, 300, 2, 2, 256, 64, F16, mode="gkh", v_first=True, heavy=True),
    _case(1, 700, 2, 4, 128, 64, BF16, mode="gkh", lengths="117+0+64+257+1+261", heavy=True),
]
_AGREE_STATES = [
    _case(1, 71, 1, 1, 48, 16, F16, mode="gh", lengths="5+0+66"),
    _case(1, 700, 2, 4, 128, 128, BF16, mode="gkh", lengths="117+0+64+257+1+261", heavy=True),
]
_MEMORY_STATES = _case(2, 2048, 4, 8, 128, 128, BF16, heavy=True)

STATES = Proof(
    op=states,
    op_class="gated_delta_rule",
    outputs=("h", "v_new", "final_state"),
    make=inputs.make_states,
    formula=formula_of_states,
    scale=scale_of_states,
    controls=[
        Control("groups of 16 features in another order", inputs.features_regrouped, back=inputs.states_back)
    ],
    padding=inputs.padding,
    layouts=("padded", "shifted"),
    lay_out=lambda args, layout: alter.laid_out_some(args, inputs.OF_STATES[:3], layout),
    memory=memory_of_states,
    cases=[
        _case(2, 66, 2, 2, 32, 16, BF16, mode="gkh"),
        _case(1, 0, 1, 1, 16, 16, BF16),
        _case(1, 130, 1, 1, 16, 32, F16, mode="k", v_first=True, lengths="3+0+127"),
        _case(1, 70, 1, 2, 20, 12, F32, mode="gh"),
        *_HEAVY_STATES,
    ],
    bit_cases=[
        _case(2, 70, 1, 1, 64, 128, F16, mode="gh"),
        _case(4, 300, 2, 4, 128, 128, BF16, mode="gkh", heavy=True),
        _case(3, 130, 1, 1, 256, 64, F16, heavy=True),
        _case(3, 130, 1, 1, 64, 64, F16, mode="h", heavy=True),  # in bf16 no bit shows the order
    ],
    memory_cases=[_case(1, 130, 1, 1, 16, 16, BF16), _MEMORY_STATES],
    mutants=MUTANTS_OF_STATES,
    bad_value=descending,
    kernels={
        "triton": Kernels(partial(record_states, "kernels_triton")),
        "hopper": Kernels(partial(record_states, "kernels_hopper"), targets=HOPPER),
    },
    rows="B S",
    batch_sizes=(1,),
    exact=exact_states,
    agree_cases=_AGREE_STATES,
    slow=("model",),
    positive=("H", "HV", "K", "V"),
    also=states_alone,
    differs={
        "hopper": {
            "cases": [
                _case(2, 66, 2, 2, 64, 64, BF16, mode="gkh"),
                _case(1, 0, 1, 1, 64, 64, BF16),
                _case(1, 130, 1, 1, 64, 128, F16, mode="k", v_first=True, lengths="3+0+127"),
                *_HEAVY_STATES,
            ],
            "agree_cases": [
                _case(1, 71, 1, 1, 64, 64, F16, mode="gh", lengths="5+0+66"),
                *_AGREE_STATES[1:],
            ],
            "memory_cases": [_case(1, 130, 1, 1, 64, 64, BF16), _MEMORY_STATES],
        }
    },
)

PROOFS = [PROOF, STATES]
