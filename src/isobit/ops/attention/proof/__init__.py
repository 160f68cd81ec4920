"""What the checker needs for `attention`: inputs that would expose a wrong kernel, the truth, error bounds,
and other calls that must give the same bits."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.ops.attention.op import forward
from isobit.ops.attention.proof.bits import same_elsewhere, single_queries
from isobit.ops.attention.proof.exact import exact
from isobit.ops.attention.proof.inputs import BY_TOKEN, features_regrouped, lay_out, make, padding
from isobit.ops.attention.proof.truth import formula, scale
from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, Control, Kernels, Mutant, Proof

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


# Calls that must be refused


def _integers(args: Args, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=args["q"].device)


def _narrower(args: Args) -> Args:
    return args | {n: args[n][..., :40].contiguous() for n in BY_TOKEN}


def _sequences_less(args: Args) -> Args:
    return args | {n: args[n][1:] for n in ("k", "v")}


def _half_pages(args: Args) -> Args:
    pages = {n: args[n][:, :8].contiguous() for n in ("k", "v")}
    return args | pages | {"block_table": _integers(args, len(args["q"]), 1)}


def _no_pages(args: Args) -> Args:
    """Kernels have no place to read from, whatever the table says."""
    none = {n: args[n].new_empty(0, 16, *args[n].shape[2:]) for n in ("k", "v")}
    return args | none | {"block_table": _integers(args, len(args["q"]), 2)}


def _heads_less(args: Args) -> Args:
    """Three KV heads, or two: one of these does not divide the number of query heads."""
    H = args["q"].shape[2]
    KV = next(n for n in (2, 3, 4, 5) if H % n)
    return args | {n: args[n][:, :, :1].repeat(1, 1, KV, 1) for n in ("k", "v")}


def _beyond(args: Args) -> tuple[Args, int | None]:
    """A key_end beyond S."""
    S = args["k"].shape[1]
    return args | {"key_end": _integers(args, len(args["q"])) + S + 1}, None


MUTANTS = [
    Mutant("two dtypes", "k", lambda a: a | {"k": alter.in_other_dtype(a["k"])}),
    Mutant("heads of 40", "q", _narrower),
    Mutant("heads that cannot be shared", "k", _heads_less),
    Mutant("keys of fewer sequences", "k", _sequences_less),
    Mutant("a scale of 0", "scale", lambda a: a | {"scale": 0.0}),
    Mutant("a negative cap", "softcap", lambda a: a | {"softcap": -1.0}),
    Mutant("a window of nothing", "window", lambda a: a | {"window": 0}),
    Mutant("a window that looks ahead", "window", lambda a: a | {"window": 4, "causal": False}),
    Mutant("bounds of too many", "key_start", lambda a: a | {"key_start": _integers(a, len(a["q"]) + 1)}),
    Mutant("bounds of keys alone", "cu_seqlens_k", lambda a: a | {"cu_seqlens_k": _integers(a, 3)}),
    Mutant("no bounds at all", "cu_seqlens_q", lambda a: a | {"cu_seqlens_q": _integers(a, 0)}),
    Mutant("a batch that is packed", "q", lambda a: a | {"cu_seqlens_q": _integers(a, 2)}),
    Mutant("pages of 8", "k", _half_pages),
    Mutant("no pages", "k", _no_pages),
]


# Memory and kernels


def memory(case: Case, backend: str, direction: str) -> int:
    """Bytes beyond inputs and outputs: states of segments, delta, and rounding up."""
    d = case.dims
    rows, keys = d["B"] * d["T"] * d["H"], d["S"] * (d["H"] + d["KV"])
    if backend == "reference":  # fp32 copies of a sequence, and the scores of some queries
        return 64 * (d["T"] * d["H"] + keys) * d["D"] + (1 << 27)
    if backend in ("model", "model-attn2"):
        return 64 * (rows + d["B"] * keys) * d["D"] + 64 * rows * d["S"] + (1 << 20)
    states = rows * -(-d["S"] // 1024) * (d["D"] + 2) * 4 if d["S"] > 1024 else 0
    return states + 8 * rows + (1 << 20)


def _base() -> dict[str, Any]:
    base: dict[str, Any] = {"causal": True, "scale": None, "window": None, "softcap": None}
    return base | dict.fromkeys(("key_start", "key_end", "cu_seqlens_q", "cu_seqlens_k", "block_table"))


def _gradients(out: Tensor, lse: Tensor | None) -> dict[str, Any]:
    """Arguments of a backward in addition to those of its forward."""
    wanted = dict.fromkeys(("want_q", "want_k", "want_v"), True)
    return {"out": out, "lse": lse, "dout": out, "dlse": lse, **wanted}


def record_hopper(launch: Any, dtype: torch.dtype) -> None:
    """Records every kernel with every value of its compile-time branches."""
    from isobit.ops.attention import (
        kernels_hopper,
        kernels_hopper_bwd,
        kernels_hopper_decode,
        kernels_hopper_wide,
    )

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    ints = {n: empty(2, dtype=torch.int32) for n in ("key_start", "key_end")}
    calls: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        ((2, 300, 1300, 4, 1, 128), {}),
        # The first whose gradient is recorded, so a brief check compiles it: one with a window takes 1.7
        # times as long.
        ((2, 300, 1300, 2, 1, 80), {"causal": False, "softcap": 2.0, **ints}),
        ((1, 1300, 1300, 2, 2, 64), {"window": 200, "cu_seqlens_q": empty(4, dtype=torch.int64)}),
        ((1, 300, 1300, 2, 1, 256), {"return_lse": False}),
        ((2, 300, 300, 4, 1, 128), {}),  # one segment
    ]
    for (B, T, S, H, KV, D), options in calls if dtype == BF16 else calls[:1]:
        args = _base() | {"return_lse": True, "q": empty(B, T, H, D)}
        args |= {n: empty(B, S, KV, D) for n in ("k", "v")} | options
        out, lse = kernels_hopper.attention(launch, **args)
        if D < 128 or (D == 128 and dtype != BF16):  # some configurations per dtype
            kernels_hopper_bwd.attention_bwd(launch, **args | _gradients(out, lse))
        if D == 256:
            lse = empty(B, H, T, dtype=torch.float32)
            kernels_hopper_wide.attention_bwd(launch, **args | _gradients(out, lse))
    pages = {n: empty(50, 64, 1, 128) for n in ("k", "v")}
    pages |= {"block_table": empty(2, 40, dtype=torch.int64), "key_end": ints["key_end"]}
    decoding: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        ((2, 1, 3000, 4, 1, 128), {}),
        ((2, 4, 3000, 16, 2, 64), {"window": 200}),
        ((2, 3, 3000, 2, 1, 80), {"causal": False, **ints}),
        ((2, 2, 3000, 2, 1, 256), {"softcap": 2.0, "return_lse": False}),
        ((2, 1, 0, 4, 1, 128), pages),
    ]
    for (B, T, S, H, KV, D), options in decoding if dtype == BF16 else decoding[:1]:
        args = _base() | {"return_lse": True, "q": empty(B, T, H, D)}
        args |= {n: empty(B, S, KV, D) for n in ("k", "v")} | options
        kernels_hopper_decode.attention(launch, **args)


def record_capped_hopper(launch: Any, dtype: torch.dtype) -> None:
    """Records the kernels that cap scores with the tanh of class attn/2. Without a softcap they are those of
    attn/1."""
    from isobit.ops.attention import kernels_hopper, kernels_hopper_bwd, kernels_hopper_decode

    def call(B: int, T: int, S: int, H: int, KV: int, D: int) -> dict[str, Any]:
        q = torch.empty(B, T, H, D, dtype=dtype, device="meta")
        keys = {n: torch.empty(B, S, KV, D, dtype=dtype, device="meta") for n in ("k", "v")}
        return _base() | keys | {"q": q, "return_lse": True, "softcap": 50.0}

    kernels_hopper.attention(launch, tangent=2, **call(2, 300, 1300, 4, 2, 128 if dtype == BF16 else 64))
    if dtype == BF16:
        args = call(1, 300, 300, 2, 1, 64)
        lse = torch.empty(1, 2, 300, dtype=F32, device="meta")
        kernels_hopper_bwd.attention_bwd(launch, tangent=2, **args | _gradients(args["q"], lse))
        kernels_hopper_decode.attention(launch, tangent=2, **call(2, 2, 3000, 2, 1, 128))


def record_capped(launch: Any, dtype: torch.dtype) -> None:
    """The same for the Triton kernels."""
    from isobit.ops.attention import kernels_triton, kernels_triton_bwd

    q, k, v = (torch.empty(1, 60, 2, 80, dtype=dtype, device="meta") for _ in range(3))
    args = _base() | {"q": q, "k": k, "v": v, "softcap": 2.0}
    out, lse = kernels_triton.attention(launch, tangent=2, **args, return_lse=True)
    if dtype == BF16:
        kernels_triton_bwd.attention_bwd(launch, tangent=2, **args | _gradients(out, lse))


def record(launch: Any, dtype: torch.dtype) -> None:
    """Records every kernel with every value of its compile-time branches: packed, paged and bounded keys,
    windows and caps, a padded and an unpadded D. For the second dtype, which differs only in conversions,
    each kernel once."""
    from isobit.ops.attention import kernels_triton, kernels_triton_bwd

    base = _base()

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    bounds = {name: empty(3, dtype=torch.int32) for name in ("key_start", "key_end")}
    pages = {
        "k": empty(50, 64, 1, 96),
        "v": empty(50, 64, 1, 96),
        "block_table": empty(3, 40, dtype=torch.int64),
    }
    calls: list[tuple[tuple[int, ...], bool, dict[str, Any]]] = [
        ((2, 300, 300, 4, 1, 128), False, {}),
        ((3, 4, 0, 2, 1, 96), False, {"key_end": bounds["key_end"], **pages}),
        ((3, 20, 60, 1, 1, 64), True, {"causal": False, **bounds}),
        (
            (1, 60, 60, 2, 2, 80),
            True,
            {"window": 9, "softcap": 2.0, "cu_seqlens_q": empty(4, dtype=torch.int32)},
        ),
        ((1, 300, 300, 2, 1, 256), False, {}),
    ]
    for (B, T, S, H, KV, D), gradient, options in calls if dtype == BF16 else calls[1:3]:
        args = base | {"q": empty(B, T, H, D), "k": empty(B, S, KV, D), "v": empty(B, S, KV, D)} | options
        out, lse = kernels_triton.attention(launch, **args, return_lse=True)
        if gradient:
            kernels_triton_bwd.attention_bwd(launch, **args | _gradients(out, lse))


# Cases


def _case(B: int, T: int, S: int, H: int, KV: int, D: int, dtype: torch.dtype, **rest: Any) -> Case:
    own = {n: rest.pop(n) for n in ("data", "layout", "heavy", "gpu_gb") if n in rest}
    return Case({"B": B, "T": T, "S": S, "H": H, "KV": KV, "D": D}, dtype, options=rest, **own)


_SMALL = [
    _case(2, 5, 18, 4, 2, 64, BF16),
    _case(1, 0, 4, 2, 1, 64, BF16),
    _case(2, 3, 0, 2, 1, 64, BF16),
    _case(2, 17, 17, 2, 1, 64, F16, bounds="left"),
    _case(2, 9, 40, 2, 1, 80, BF16, bounds="both", softcap=8.0, window=11),
    _case(1, 4, 140, 2, 1, 64, BF16, bounds="room"),
    _case(1, 30, 30, 2, 1, 64, BF16, lengths="3+0+20+7", scale=0.2),
    _case(1, 6, 40, 3, 1, 96, F16, lengths="1+0+5", key_lengths="20+3+17", layout="heads"),
    _case(2, 7, 20, 2, 2, 128, BF16, causal=False, bounds="room"),
    _case(1, 3, 70, 1, 1, 256, BF16),
    _case(2, 2, 50, 2, 1, 64, BF16, page=16),
    _case(2, 20, 33, 2, 1, 64, F32, bounds="both", window=9),
    _case(1, 20, 33, 2, 1, 80, F64, softcap=3.0),
]
# Decoding; keys of a second segment; a window as wide as a block of keys; queries that see keys behind them.
# Small, because they run in the interpreter and on the model.
_FEW_HEADS = [
    _case(2, 1, 18, 4, 2, 64, BF16),
    _case(1, 2, 1030, 1, 1, 64, BF16),
    _case(1, 3, 150, 1, 1, 64, F16, window=64),
    _case(2, 7, 3, 2, 1, 64, BF16, causal=False),
]
_HEAVY = [
    _case(2, 200, 200, 4, 1, 128, BF16, heavy=True),
    _case(1, 60, 1200, 4, 2, 64, F16, heavy=True, layout="heads"),
    _case(1, 50, 1300, 2, 1, 256, BF16, heavy=True, window=600),
    _case(2, 50, 1200, 2, 2, 96, BF16, heavy=True, bounds="both", softcap=30.0),
    _case(1, 1250, 1250, 2, 1, 80, BF16, heavy=True, lengths="1090+1+0+159"),
    _case(3, 1, 2500, 8, 1, 128, BF16, heavy=True, page=64, bounds="room"),
    _case(2, 300, 300, 4, 2, 128, BF16, heavy=True, softcap=50.0),
    _case(2, 1, 2500, 8, 1, 64, F16, heavy=True, softcap=30.0),
]
#: A single query needs many heads for the order of sums in a score to show: it disappears in most roundings.
_BITS = [
    _case(3, 5, 40, 2, 1, 64, BF16, bounds="both"),
    _case(2, 3, 12, 2, 1, 80, F16, softcap=4.0, window=7),
    _case(3, 1, 140, 4, 1, 128, BF16, bounds="room"),
    _case(5, 300, 300, 8, 2, 128, BF16, heavy=True),
    _case(4, 2, 3000, 8, 2, 128, BF16, heavy=True, bounds="room"),
    _case(3, 200, 1400, 4, 2, 64, F16, heavy=True, bounds="left", window=1100),
    _case(3, 100, 500, 2, 1, 256, BF16, heavy=True),
    _case(3, 200, 200, 4, 2, 64, BF16, heavy=True, softcap=50.0),
]
#: With a single query and large scores the order of sums in a score shows in the results: it would disappear
#: in their rounding otherwise.
_AGREE = [
    _case(2, 41, 41, 4, 1, 64, BF16),
    _case(1, 1, 1100, 8, 1, 64, BF16, scale=1.0),
    _case(2, 1100, 1100, 4, 2, 128, BF16, heavy=True),
    _case(2, 600, 600, 4, 1, 80, F16, heavy=True, window=300, softcap=20.0),
    _case(2, 300, 300, 2, 1, 256, BF16, heavy=True),
    _case(2, 1, 4500, 8, 1, 128, BF16, heavy=True, scale=1.0),
    _case(2, 41, 41, 4, 1, 64, BF16, softcap=30.0),
    _case(2, 1100, 1100, 4, 2, 128, BF16, heavy=True, softcap=50.0),
    _case(2, 400, 400, 4, 2, 64, BF16, heavy=True, softcap=5.0),
    _case(2, 1, 2500, 8, 1, 128, BF16, heavy=True, scale=1.0, softcap=20.0),
]


def _capped(cases: list[Case]) -> list[Case]:
    return [case for case in cases if "softcap" in case.options and case.dtype.itemsize == 2]


_SECOND: dict[str, Any] = {
    "scale": partial(scale, tangent=2),
    "exact": partial(exact, tangent=2),
    "cases": [_SMALL[0], *_capped(_SMALL + _HEAVY)],
    "bit_cases": _capped(_BITS),
    "agree_cases": _capped(_AGREE),
}

PROOF = Proof(
    op=forward,
    op_class="attention",
    outputs=("out", "lse"),
    make=make,
    formula=formula,
    scale=scale,
    controls=[Control("groups of 16 features in another order", features_regrouped)],
    padding=padding,
    layouts=("heads", "padded", "offset", "shifted"),
    lay_out=lay_out,
    memory=memory,
    cases=_SMALL + _HEAVY + _FEW_HEADS,
    bit_cases=_BITS,
    memory_cases=[
        _case(1, 32, 32, 2, 1, 64, BF16),
        _case(1, 2048, 2048, 8, 2, 128, BF16, heavy=True),
        _case(4, 1, 8192, 8, 2, 128, BF16, heavy=True),
    ],
    mutants=MUTANTS,
    bad_value=_beyond,
    kernels={
        "hopper": Kernels(record_hopper, targets=(("cuda", 90, 32),)),
        "triton": Kernels(record),
        "hopper-attn2": Kernels(record_capped_hopper, targets=(("cuda", 90, 32),)),
        "triton-attn2": Kernels(record_capped, targets=(("cuda", 90, 32),)),  # elsewhere as class attn/1
    },
    rows="B P N",
    batch_sizes=(1,),
    exact=exact,
    agree_cases=_AGREE,
    slow=("model", "model-attn2"),
    # Without a softcap the kernels are those of attn/1.
    differs=dict.fromkeys(("hopper-attn2", "triton-attn2", "model-attn2"), _SECOND),
    positive=("H", "KV", "D"),
    also=same_elsewhere,
    parts=single_queries,
    without_gradient=("page",),
)

PROOFS = [PROOF]
