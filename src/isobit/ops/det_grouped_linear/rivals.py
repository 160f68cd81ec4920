"""What people use instead of `det_grouped_linear` and `det_grouped_dw`, and the sizes at which all are timed.

M rows, which is tokens times the experts of each, routed to E experts at random; weights [E, N, K]:

    det_grouped_linear       y  = x W[e]^T    from 4096 tokens on
    det_grouped_linear_few   the same for 16 to 512 tokens, as in decoding
    det_grouped_linear_dx    dx = dy W[e]
    det_grouped_dw           dW[e] = dy^T x   fp32
    det_grouped_dw_narrow    the same, rounded to bf16 as a layer's backward returns it

The rivals know on the host how many rows each expert has, where they need to: that is a gift to them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from isobit.frame.device import sm_count
from isobit.ops.det_grouped_linear.op import (
    det_grouped_dw,
    det_grouped_linear,
    grouped_dw,
    linear,
    linear_bwd,
)
from isobit.ops.det_grouped_linear.proof.inputs import bounds_of
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival
from isobit.spec.rotation import copies_for
from isobit.spec.series import Pool, Series
from isobit.spec.truth import Window, spread_evenly

BASELINE = "torch._grouped_mm"

#: (E, K, N, experts of a token): up and down projections of Qwen3-30B-A3B, Mixtral, OLMoE, Qwen3-Next.
SHAPES = (
    (128, 2048, 1536, 8), (128, 768, 2048, 8), (8, 4096, 28672, 2), (64, 2048, 2048, 8),
    (512, 2048, 1024, 10), (512, 512, 2048, 10),
)  # fmt: skip
TOKENS, FEW_TOKENS = (4096, 16384, 32768, 65536), (16, 64, 256, 512)


# Rivals


def _prepared(args: Args) -> Args:
    """The ends of groups as `torch._grouped_mm` takes them, and the bounds on the host."""
    offsets = args["offsets"]
    return args | {"ends": offsets[1:].to(torch.int32).contiguous(), "bounds": offsets.tolist()}


def _grouped_mm(args: Args) -> Tensor:
    out: Tensor = torch._grouped_mm(args["x"], args["weight"].mT, offs=args["ends"])
    return out


def _grouped_mm_dw(args: Args) -> Tensor:
    """In bf16: it has no fp32 output."""
    out: Tensor = torch._grouped_mm(args["dy"].t(), args["x"], offs=args["ends"])
    return out


def _loop(args: Args) -> Tensor:
    x, weight = args["x"], args["weight"]
    out = x.new_empty(len(x), weight.shape[1])
    for e, (first, end) in enumerate(pairwise(args["bounds"])):
        if first < end:
            torch.mm(x[first:end], weight[e].t(), out=out[first:end])
    return out


def _loop_dw(args: Args) -> Tensor:
    x, dy = args["x"], args["dy"]
    out = x.new_zeros(len(args["ends"]), dy.shape[1], x.shape[1])
    for e, (first, end) in enumerate(pairwise(args["bounds"])):
        if first < end:
            torch.mm(dy[first:end].t(), x[first:end], out=out[e])
    return out


def _has_grouped_mm(case: Case, device: torch.device) -> str | None:
    return None if hasattr(torch, "_grouped_mm") else "this PyTorch has none"


def _rivals(grouped: Callable[[Args], Tensor], loop: Callable[[Args], Tensor]) -> dict[str, Rival]:
    own = partial(Rival, directions=None, prepare=_prepared, jit=False, takes=("groups",))
    both = (own(BASELINE, grouped, available=_has_grouped_mm), own("torch.mm_loop", loop))
    return {rival.name: rival for rival in both}


ROW_RIVALS, DW_RIVALS = _rivals(_grouped_mm, _loop), _rivals(_grouped_mm_dw, _loop_dw)


# Series


def _case(E: int, K: int, N: int, top: int, tokens: int) -> Case:
    dims = {"M": tokens * top, "E": E, "K": K, "N": N}
    return Case(dims, torch.bfloat16, data="random", options={"groups": "routed"})


def _offsets(case: Case, pool: Pool) -> Tensor:
    M, E = case.dims["M"], case.dims["E"]
    gen = torch.Generator().manual_seed(pool.inputs.seed)
    bounds = bounds_of(M, E, case.options.get("groups", "uneven"), gen)
    return torch.tensor(bounds, dtype=torch.int32, device=pool.device)


def _row_args(case: Case, pool: Pool, dx: bool = False) -> list[Args]:
    M, E, K, N = (case.dims[name] for name in "MEKN")
    offsets = _offsets(case, pool)
    rows = pool.normal("dy" if dx else "x", M, N if dx else K, dtype=case.dtype)
    copies = range(copies_for(E * K * N * case.dtype.itemsize, pool.device))
    weights = [pool.normal(f"weight {i}", E * N, K, dtype=case.dtype).view(E, N, K) for i in copies]
    return [{"x": rows, "weight": w.mT if dx else w, "offsets": offsets} for w in weights]


def _dw_args(case: Case, pool: Pool) -> list[Args]:
    M, _, K, N = (case.dims[name] for name in "MEKN")
    copies = copies_for(M * (K + N) * case.dtype.itemsize, pool.device)
    x, dy = (pool.normal(name, copies * M, size, dtype=case.dtype) for name, size in (("x", K), ("dy", N)))
    offsets = _offsets(case, pool)
    own = [slice(i * M, (i + 1) * M) for i in range(copies)]
    return [{"x": x[part], "dy": dy[part], "offsets": offsets} for part in own]


def _narrow_args(case: Case, pool: Pool) -> list[Args]:
    E, K, N = (case.dims[name] for name in "EKN")
    weight = pool.normal("weight 0", E * N, K, dtype=case.dtype).view(E, N, K)
    return [args | {"weight": weight} for args in _dw_args(case, pool)]


def _rows_known(args: Args) -> Window:
    """Some rows and columns, each by the weight of its expert."""
    x, weight, offsets = args["x"], args["weight"], args["offsets"]
    rows, columns = (spread_evenly(n, 32, x.device) for n in (len(x), weight.shape[1]))
    expert = torch.searchsorted(offsets[1:].contiguous(), rows, right=True, out_int32=True)
    chosen = weight[expert.long()[:, None], columns[None, :]].double()
    return Window(rows, columns, (chosen @ x[rows].double()[:, :, None])[..., 0])


def _row_cost(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Rows are read and written once, and the weights of the experts that random routing hits."""
    M, E, K, N = (dims[name] for name in "MEKN")
    hit = E * (1 - (1 - 1 / E) ** M)
    return Cost(fwd_bytes=int((M * (K + N) + hit * N * K) * dtype.itemsize), fwd_flops=2 * M * N * K)


def _dw_cost(out_bytes: int, dims: dict[str, int], dtype: torch.dtype) -> Cost:
    M, E, K, N = (dims[name] for name in "MEKN")
    return Cost(fwd_bytes=M * (K + N) * dtype.itemsize + out_bytes * E * N * K, fwd_flops=2 * M * N * K)


def _predict(backend: str | None, args: Args) -> float | None:
    """Milliseconds that the time model expects for the chosen tile."""
    if backend != "hopper":
        return None
    from isobit.ops.det_grouped_linear.tiles_hopper import choose_tile

    x, (E, N, K) = args["x"], args["weight"].shape
    return 1e-3 * choose_tile(len(x), E, N, K, sm_count(x.device))[1]


def _call(args: Args, backend: str | None) -> Tensor:
    return det_grouped_linear(**args, backend=backend)


def _call_dw(args: Args, backend: str | None) -> Tensor:
    return det_grouped_dw(**args, backend=backend)


def _call_narrow(args: Args, backend: str | None) -> Tensor:
    assert backend is None
    _, dweight, _ = linear_bwd(
        dy=args["dy"], x=args["x"], weight=args["weight"], offsets=args["offsets"], bias_dtype=None,
        want_x=False, want_weight=True, want_bias=False,
    )  # fmt: skip
    out: Tensor = dweight
    return out


def _shared(case: Case) -> tuple[Any, ...]:
    return (*(case.dims[name] for name in "EKN"), case.dtype)


_MANY = [_case(*shape, tokens) for shape in SHAPES for tokens in TOKENS]
_FEW = [_case(*shape, tokens) for shape in SHAPES for tokens in FEW_TOKENS]
_CORE = [_case(*SHAPES[0], 32768), _case(*SHAPES[1], 4096), _case(*SHAPES[2], 16384)]
_SMALL = [Case({"M": 24, "E": 4, "K": 32, "N": 16}, torch.bfloat16, options={"groups": "routed"})]


def _series(name: str, direction: str, cases: Sequence[Case], core: Sequence[Case], **rest: Any) -> Series:
    return Series(
        name=name, cases=cases, core=core, directions=(direction,), shared=_shared, against=BASELINE,
        copy=False, small=_SMALL, takes=("groups",), **rest,
    )  # fmt: skip


_rows = partial(
    _series, op=linear, call=_call, cost=_row_cost, judge=_rows_known, rivals=ROW_RIVALS, bits=True,
    predict=_predict,
)  # fmt: skip
_dw = partial(
    _series, direction="dw", cases=[case for case in _MANY if case.dims["M"] >= 65536], core=_CORE[:1],
    judge=lambda args: None, rivals=DW_RIVALS,
)  # fmt: skip

SERIES: Sequence[Series] = (
    _rows("det_grouped_linear", "fwd", _MANY, _CORE, make=_row_args, about="y = x W[e]^T, M rows"),
    _rows(
        "det_grouped_linear_few", "fwd", _FEW, [_case(*SHAPES[0], 256), _case(*SHAPES[1], 16)],
        make=_row_args, about="the same for few tokens", declared_only=True,
    ),
    _rows(
        "det_grouped_linear_dx", "dx", _MANY, _CORE[:2], make=partial(_row_args, dx=True),
        about="dx = dy W[e]", declared_only=True,
    ),
    _dw(
        "det_grouped_dw", op=grouped_dw, call=_call_dw, cost=partial(_dw_cost, 4), make=_dw_args,
        about="dW[e] = dy^T x, in fp32",
    ),
    _dw(
        "det_grouped_dw_narrow", op=None, needs=("det_grouped_linear",), call=_call_narrow,
        cost=partial(_dw_cost, 2), make=_narrow_args, about="dW[e] in bf16, as a layer's backward has it",
        declared_only=True,
    ),
)  # fmt: skip
