"""The proof of `chunk_gated_delta_rule_bwd_dhu`: inputs that would expose a wrong kernel, the truth, and
error bounds."""

from functools import partial
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from isobit.ops.delta_rule import reference
from isobit.ops.delta_rule.op import backward
from isobit.ops.delta_rule.proof.bounds import error_bounds
from isobit.ops.delta_rule.proof.packings import TIMED, lengths_of
from isobit.spec import inputs as alter
from isobit.spec.compare import OutputCheck, same_bits
from isobit.spec.proof import Args, Case, Control, InputOptions, Kernels, Mutant, Proof
from isobit.spec.trial import Trial

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAN = float("nan")
BY_TOKEN = ("q", "k", "w", "do", "dv", "g", "gk")


# Inputs


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    """Inputs as in a model: unit keys, w a fraction of its key, decaying gates. So states neither grow nor
    vanish. `mode` has a letter for each tensor that is given: g, k (gk), h (h0), t (dht). `lengths` are those
    of packed sequences, as 30+0+3x59, and with `offsets` chunk_offsets are given too."""
    d, given = case.dims, case.options.get("mode", "gkht")
    B, T, H, HV, K, V = d["B"], d["T"], d["H"], d["HV"], d["K"], d["V"]
    C, v_first = case.options.get("chunk", 64), bool(case.options.get("v_first"))
    # Large random inputs are drawn on the device itself.
    where = device if case.heavy or case.data == "random" else torch.device("cpu")
    gen = torch.Generator(where).manual_seed(options.seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=gen.device)

    k = torch.nn.functional.normalize(drawn(B, T, H, K), dim=-1)
    w = k.repeat_interleave(HV // H, 2) * torch.rand(B, T, HV, 1, generator=gen, device=gen.device)
    values = {"q": drawn(B, T, H, K), "k": k, "w": w * 0.4}
    values |= {"do": drawn(B, T, HV, V), "dv": drawn(B, T, HV, V)}
    args: Args = {name: t.to(device, case.dtype) for name, t in values.items()}
    lengths = case.options.get("lengths")
    bounds = [0, *accumulate(lengths_of(lengths))] if lengths else None
    S = B if bounds is None else len(bounds) - 1
    wide = torch.promote_types(case.dtype, F32)

    def gate(*shape: int) -> Tensor:
        """Random log2 decays, cumulative from the start of each chunk."""
        steps = -torch.rand(*shape, generator=gen, device=gen.device, dtype=wide) / 8
        ends = [*(s for first, end in pairwise(bounds or [0, T]) for s in range(first, end, C)), T]
        parts = [steps[:, first:end].cumsum(1) for first, end in pairwise(ends)]
        return torch.cat(parts, 1).to(device) if parts else steps.to(device)

    state = (S, HV, V, K) if v_first else (S, HV, K, V)
    args["g"] = gate(B, T, HV) if "g" in given else None
    args["gk"] = gate(B, T, HV, K) if "k" in given else None
    args["h0"] = torch.full(state, NAN, dtype=wide, device=device) if "h" in given else None
    args["dht"] = drawn(*state).to(device, wide) if "t" in given else None
    args |= {"scale": 0.1, "state_v_first": v_first, "chunk_size": C}
    args |= {"cu_seqlens": None, "chunk_indices": None, "chunk_offsets": None}
    if bounds is not None:
        each = [-(-(end - first) // C) for first, end in pairwise(bounds)]
        indices = [[s, c] for s, n in enumerate(each) for c in range(n)]
        args["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int32, device=device)
        args["chunk_indices"] = torch.tensor(indices, dtype=torch.int32, device=device).view(-1, 2)
        if case.options.get("offsets"):
            starts = [0, *accumulate(each)]
            args["chunk_offsets"] = torch.tensor(starts, dtype=torch.int64, device=device)
    return alter.laid_out_some(args, BY_TOKEN[:5], case.layout)


def padding(args: Args, rows: int) -> Args:
    """Sequences of NaN to append; they must change nothing."""
    names = (*BY_TOKEN, "h0", "dht")
    return {n: None if args[n] is None else args[n].new_full((rows, *args[n].shape[1:]), NAN) for n in names}


def features_regrouped(args: Args) -> Args:
    """Groups of 16 features in another order: the same products, summed in another order."""
    axis = -1 if args["state_v_first"] else -2
    result = {n: alter.in_other_groups(args[n], -1) for n in ("q", "k", "w", "gk") if args[n] is not None}
    states = {n: alter.in_other_groups(args[n], axis) for n in ("h0", "dht") if args[n] is not None}
    return args | result | states


def features_back(outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Undoes it for states [K, V] with K a multiple of 16."""
    dh, dh0, dv2 = outputs
    return alter.in_other_groups(dh, -2), alter.in_other_groups(dh0, -2), dv2


# Truth and errors


def _bound(args: Args) -> Args:
    given = {"use_exp2": True, **args}
    return {p.name: given.get(p.name) for p in backward.contract.params}


def _present(args: Args, outputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """An output that was not requested becomes an empty tensor of its dtype."""
    wide = torch.promote_types(args["q"].dtype, F32)
    return tuple(args["q"].new_empty(0, dtype=wide) if o is None else o for o in outputs)


def formula(args: Args) -> tuple[Tensor, ...]:
    result = reference.recurrence(**_bound(args), rounded=args["q"].dtype != torch.float64)
    return _present(args, result)


def scale(args: Args, outputs: Any, cotangents: Any) -> dict[str, Tensor]:
    return error_bounds(args, _narrowest(args))


def _narrowest(args: Args) -> torch.dtype:
    """The dtype that these fp64 inputs came from."""
    for dtype in (BF16, F16):
        if all(bool((args[n].to(dtype).double() == args[n]).all()) for n in ("q", "k", "w", "do", "dv")):
            return dtype
    return F32


# Packing


def packed_alone(trial: Trial) -> list[OutputCheck]:
    """A packed sequence has the same bits alone, and at another place among others."""
    args = trial.args()
    if args["cu_seqlens"] is None:
        return []
    bounds, C = args["cu_seqlens"].tolist(), args["chunk_size"]
    whole, at = trial.forward(args), 0
    checks = []
    for s, (first, end) in enumerate(pairwise(bounds)):
        chunks = -(-(end - first) // C)
        alone = _one(args, s, first, end)
        ours = trial.forward(alone)
        mine = (whole[0][:, at : at + chunks], whole[1][s : s + 1], whole[2][:, first:end])
        for i, name in enumerate(trial.proof.outputs):
            if ours[i].numel():
                checks.append(same_bits(f"{i}:{name}", ours[i], mine[i], f"sequence {s} alone"))
        at += chunks
    return checks


def _one(args: Args, s: int, first: int, end: int) -> Args:
    """One of packed sequences, as a batch of one."""
    result = args | {n: args[n][:, first:end] for n in BY_TOKEN if args[n] is not None}
    result |= {n: args[n][s : s + 1] for n in ("h0", "dht") if args[n] is not None}
    return result | {"cu_seqlens": None, "chunk_indices": None, "chunk_offsets": None}


# Calls that must be refused


def _first(args: Args) -> Args:
    """The first sequence of a batch, without states."""
    return args | {n: args[n][:1] for n in BY_TOKEN if args[n] is not None} | {"h0": None, "dht": None}


def _integers(args: Args, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=args["q"].device)


def more_heads(args: Args) -> Args:
    times = 2 * args["w"].shape[2] + 1
    return args | {n: args[n].repeat(1, 1, times, 1) for n in ("q", "k")}


def half_a_state(args: Args) -> Args:
    return args | {"h0": args["h0"][..., : args["h0"].shape[-1] // 2].contiguous(), "dht": None}


def descending(args: Args) -> tuple[Args, int | None]:
    T = args["q"].shape[1]
    bounds = torch.tensor([0, T, T - 1, T], dtype=torch.int32, device=args["q"].device)
    return _first(args) | {"cu_seqlens": bounds, "chunk_indices": bounds.new_zeros(1, 2)}, None


# Memory and kernels


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs and outputs."""
    d = case.dims
    if backend == "reference":
        tokens, states = d["B"] * d["T"] * d["HV"], d["B"] * (-(-d["T"] // 16)) * d["HV"]
        return 64 * tokens * (d["K"] + d["V"]) + 32 * states * d["K"] * d["V"] + (1 << 20)
    return 1 << 20


def record(module: str, launch: Any, dtype: torch.dtype) -> None:
    """With and without gates, both layouts, packed or not, every K of the Hopper kernel. For other dtypes
    than bf16, which differ only in conversions, the portable kernel has one call per layout."""
    if module == "kernels_hopper" and dtype == F32:
        dtype = F16  # tensor cores take no fp32
    kernels = import_module(f"isobit.ops.delta_rule.{module}")

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    T, H, HV, V = 256, 1, 2, 128
    calls = [
        (128, "none", False, False), (128, "ght", False, False), (128, "kht", True, True),
        (64, "gk", True, False), (256, "gkht", False, True),
    ]  # fmt: skip
    if module == "kernels_triton":
        odd = [(40, "none", False, False), (33, "gkht", True, True)]  # tiles of features that are not full
        calls = [*calls, *odd] if dtype == BF16 else [(64, "ght", False, False), (64, "gk", True, True)]
    for K, mode, v_first, packed in calls:
        S = 3 if packed else 1
        # Few and many programs have other stages of the ring.
        schedule = {"sms": 132} if module == "kernels_hopper" and mode == "none" else {}
        state = empty(*((S, HV, V, K) if v_first else (S, HV, K, V)), dtype=F32)
        kernels.dhu(
            launch=launch, **schedule, q=empty(1, T, H, K), k=empty(1, T, H, K), w=empty(1, T, HV, K),
            do=empty(1, T, HV, V), dv=empty(1, T, HV, V),
            g=empty(1, T, HV, dtype=F32) if "g" in mode else None,
            gk=empty(1, T, HV, K, dtype=F32) if "k" in mode else None, h0=state if "h" in mode else None,
            dht=state if "t" in mode else None, scale=0.1, state_v_first=v_first,
            cu_seqlens=empty(S + 1, dtype=torch.int32) if packed else None, chunk_size=64,
            chunk_indices=empty(6, 2, dtype=torch.int64) if packed else None, chunk_offsets=None,
            use_exp2=True,
        )  # fmt: skip


# Cases


def _case(B: int, T: int, H: int, HV: int, K: int, V: int, dtype: torch.dtype, **rest: Any) -> Case:
    options: dict[str, Any] = {}
    for name in ("mode", "chunk", "v_first", "lengths", "offsets"):
        if name in rest:
            options[name] = rest.pop(name)
    return Case({"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}, dtype, options=options, **rest)


_SMALL = [
    _case(1, 0, 1, 1, 16, 16, F32),
    _case(2, 66, 2, 2, 64, 64, BF16, mode="ght"),
    _case(2, 40, 1, 2, 16, 24, F32, mode="ght", chunk=16),
    _case(1, 70, 2, 2, 20, 16, F32, mode="kht", chunk=32, v_first=True),
    _case(1, 200, 1, 1, 33, 40, BF16, mode="none"),
    _case(1, 100, 1, 1, 64, 64, BF16, mode="gkht"),
    _case(2, 64, 1, 1, 64, 64, F16, mode="ht", layout="padded"),
    _case(1, 90, 1, 2, 64, 64, F16, mode="ght", v_first=True, lengths="30+0+59+1"),
    _case(1, 77, 1, 1, 16, 16, F32, mode="gkh", chunk=16, lengths="5+40+32"),
    _case(1, 70, 1, 1, 16, 16, F32, mode="ght", chunk=32, lengths="33+0+37", offsets=True),
]
_HEAVY = [
    _case(2, 500, 2, 4, 128, 128, BF16, mode="gkht", heavy=True),
    _case(2, 256, 2, 2, 128, 128, BF16, mode="none", heavy=True),
    _case(1, 300, 2, 2, 128, 64, F16, mode="kht", v_first=True, heavy=True),
    _case(1, 200, 1, 2, 256, 128, BF16, mode="gkht", heavy=True),
    _case(1, 200, 1, 2, 256, 128, BF16, mode="ht", v_first=True, heavy=True),
    _case(1, 700, 2, 4, 128, 128, BF16, mode="gkht", lengths="117+0+64+257+1+261", heavy=True),
    _case(1, 400, 1, 2, 128, 64, BF16, mode="kht", lengths="117+0+64+219", offsets=True, heavy=True),
    # More than 65535 programs, and more sequences than the kernel of the offsets takes at once.
    _case(1, 4200, 1, 32, 16, 16, BF16, mode="ght", chunk=16, lengths="2100x2", heavy=True, gpu_gb=8),
    _case(1, 300, 2, 2, 100, 72, F16, mode="ght", chunk=32, heavy=True),
    *(_case(1, 320, 2, 2, 128, 128, BF16, mode=mode, heavy=True) for mode in ("g", "k", "gk", "gt", "kt")),
    *(
        _case(1, sum(lengths_of(each)), 1, 1, 64, 64, BF16, mode="kht", lengths=each, heavy=True, gpu_gb=8)
        for each in TIMED
    ),
]
_BITS = [
    _case(2, 40, 1, 1, 48, 16, F32, mode="ght", chunk=32),
    _case(3, 40, 1, 1, 48, 16, F32, mode="kht", chunk=16),
    _case(5, 300, 2, 4, 128, 128, BF16, mode="gkht", heavy=True),
    _case(4, 256, 2, 2, 128, 128, F16, mode="ht", heavy=True),
    # All sequences together fill an H200, one of them alone does not: the schedules differ.
    _case(8, 130, 8, 8, 128, 128, BF16, mode="ht", heavy=True),
    _case(8, 130, 4, 8, 128, 128, BF16, mode="gkht", heavy=True),
    _case(3, 130, 1, 2, 64, 64, BF16, mode="kht", heavy=True),
    _case(3, 130, 1, 1, 256, 64, BF16, mode="ght", heavy=True),
    # More than 2**31 elements in w, do, dv, dh and dv2: wrong 32-bit offsets would fail here.
    _case(17, 31040, 1, 64, 64, 64, BF16, mode="ght", data="random", heavy=True, gpu_gb=130),
]

PROOF = Proof(
    op=backward,
    op_class="delta_rule",
    outputs=("dh", "dh0", "dv2"),
    make=make,
    formula=formula,
    scale=scale,
    controls=[Control("groups of 16 features in another order", features_regrouped, back=features_back)],
    padding=padding,
    layouts=("padded", "shifted"),
    lay_out=lambda args, layout: alter.laid_out_some(args, BY_TOKEN[:5], layout),
    memory=memory,
    cases=_SMALL + _HEAVY,
    bit_cases=_BITS,
    memory_cases=[
        _case(1, 256, 1, 1, 64, 64, BF16, mode="gkht"),
        _case(2, 512, 4, 4, 128, 128, BF16, mode="gkht", heavy=True),
    ],
    mutants=[
        Mutant("two dtypes", "w", lambda a: a | {"w": alter.in_other_dtype(a["w"])}),
        Mutant("chunks of 48", "chunk_size", lambda a: a | {"chunk_size": 48}),
        Mutant("more heads than value heads", "w", more_heads),
        Mutant("a state that is no K by V", "h0", half_a_state),
        Mutant("offsets without bounds", "chunk_offsets", lambda a: a | {"chunk_offsets": _integers(a, 1)}),
        Mutant("a batch of two that is packed", "cu_seqlens", lambda a: a | {"cu_seqlens": _integers(a, 2)}),
        Mutant("no bounds at all", "cu_seqlens", lambda a: _first(a) | {"cu_seqlens": _integers(a, 0)}),
    ],
    bad_value=descending,
    kernels={
        "hopper": Kernels(partial(record, "kernels_hopper"), targets=(("cuda", 90, 32),)),
        "triton": Kernels(partial(record, "kernels_triton")),
    },
    rows="B S",
    batch_sizes=(1, 2),
    agree_cases=[
        _case(1, 90, 1, 2, 32, 16, F32, mode="ght", chunk=16, lengths="30+0+59+1"),
        _case(1, 700, 2, 4, 128, 128, BF16, mode="gkht", lengths="117+0+64+257+1+261", heavy=True),
        _case(1, 4500, 2, 2, 64, 64, BF16, mode="ht", lengths="1500+1+2999", heavy=True),
    ],
    positive=("H", "HV", "K", "V"),
    judged=_present,
    also=packed_alone,
)  # fmt: skip

PROOFS = [PROOF]
