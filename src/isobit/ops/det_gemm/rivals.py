"""What people use instead of `det_gemm`, and the shapes at which both are timed.

For a layer with weight W [N, K] and M tokens:

    det_gemm          y  = x W^T      M from decode to training
    det_gemm_layers   the same for layers of models from 0.5B to 70B, and M that are no powers of two
    det_gemm_dx       dx = dy W
    det_gemm_dw       dW = dy^T x     fp32
    det_linear        y, and with autograd dx and dW, next to a layer of PyTorch, as it is and compiled

    det_gemm_cold, det_gemm_cold_dx, det_gemm_cold_dw
                      rollouts: batches of 1 to 2100 rows of any size, at layers of models from 0.5B to 70B

In every call the weight (for dW: the tokens) is not in the L2 cache. Activations may be, as in a model, where
the layer before has just written them.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isobit.frame.device import sm_count
from isobit.numerics import TREE8
from isobit.ops.det_gemm.op import det_gemm, det_gemm_dw, gemm, gemm_dw
from isobit.ops.det_gemm.proof.cublas import BASELINE, mm, needs_cublas, unsplit
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival, cannot_import
from isobit.spec.rotation import copies_for
from isobit.spec.series import Pool, Series, by_rows
from isobit.spec.truth import Window, spread_evenly

#: (K, N): projections of models with hidden sizes 4096 and 7168, and three vocabularies.
SHAPES = (
    (4096, 4096), (4096, 6144), (4096, 12288), (4096, 14336), (14336, 4096),
    (4096, 32000), (4096, 151936), (2048, 131072), (7168, 2048),
)  # fmt: skip
TOKENS = (1, 4, 16, 64, 128, 256, 1024, 4096, 8192)

#: The subset for `--core`: a square layer and a wide one, from one token to many.
CORE_SHAPES, CORE_TOKENS = ((4096, 4096), (4096, 14336)), (1, 16, 256, 1024, 8192)

#: Layers of models of 0.5B, 1.5B, 3B, 7B, 14B and 70B, including projections to grouped keys and values, and
#: an M between any two tiles.
LAYER_SHAPES = (
    (896, 896), (896, 128), (896, 4864), (4864, 896), (1536, 8960), (2048, 512), (3584, 3584), (3584, 512),
    (3584, 18944), (4096, 1024), (5120, 640), (8192, 8192), (8192, 28672), (28672, 8192), (16384, 6656),
)  # fmt: skip
LAYER_TOKENS = (1, 8, 24, 48, 80, 112, 160, 192, 320, 384, 640, 768, 1536, 3000)

#: (M, K, N) of these for every run: cuBLAS with and without split k, few SMs and many, memory-bound and not.
LAYER_CORE = (
    (8, 4096, 1024), (24, 8192, 28672), (48, 3584, 3584), (80, 5120, 640), (112, 896, 4864),
    (192, 3584, 18944), (320, 8192, 8192), (640, 16384, 6656), (768, 4864, 896), (3000, 3584, 18944),
)  # fmt: skip

#: (K, N) of layers of 0.5B, 1B, 4B, 8B, 14B, 32B and 70B models, and the rows of a rollout that grows and
#: shrinks.
COLD_SHAPES = (
    (2560, 9728), (9728, 2560), (6144, 1024), (1280, 5120), (4096, 4096), (14336, 4096),
    (896, 4864), (4096, 14336), (5120, 27648), (8192, 8192),
)  # fmt: skip
COLD_TOKENS = (1, 2, 5, 8, 16, 24, 40, 56, 72, 100, 144, 200, 272, 350, 450, 640, 900, 1300, 2100)
#: (M, K, N) of these for every run.
COLD_CORE = (
    (1, 2560, 9728), (8, 14336, 4096), (24, 4096, 14336), (40, 14336, 4096), (72, 4096, 4096),
    (144, 2560, 9728), (200, 6144, 1024), (450, 5120, 27648), (1300, 1280, 5120), (2100, 8192, 8192),
)  # fmt: skip

#: Number of tokens that are allocated; dW rotates over as many as this allows.
MAX_TOKENS = 16384


# Rivals


def _mm_dw(args: Args) -> Tensor:
    return torch.mm(args["dy"].t(), args["x"], out_dtype=torch.float32)


def _mm_dw_narrow(args: Args) -> Tensor:
    return torch.mm(args["dy"].t(), args["x"])


def _layer(args: Args) -> Tensor:
    return F.linear(args["x"], args["weight"], args["bias"])


_INVARIANT = "batch_invariant_ops"


def _invariant(args: Args) -> Tensor:
    """The kernel of Thinking Machines' batch_invariant_ops: one tile for every size."""
    from batch_invariant_ops import matmul_persistent

    out: Tensor = matmul_persistent(args["a"], args["b"])
    return out


def _has_invariant(case: Case, device: torch.device) -> str | None:
    if device.type == "cpu":
        return "its kernels need a GPU"
    why = cannot_import(_INVARIANT)
    where = f"git+https://github.com/thinking-machines-lab/{_INVARIANT}"
    return f"{why} (pip install {where})" if why == "not installed" else why


def _needs_a_gpu(case: Case, device: torch.device) -> str | None:
    return None if device.type == "cuda" else "a product into fp32 needs a GPU"


PRODUCT_RIVALS = {
    rival.name: rival
    for rival in (
        Rival(BASELINE, mm, directions=None, jit=False),
        Rival("torch.mm_nosplit", unsplit(mm), directions=None, available=needs_cublas, jit=False),
        # Not precompiled: its one kernel has a few variants, and there are hundreds of cases.
        Rival(_INVARIANT, _invariant, directions=None, available=_has_invariant, jit=False),
    )
}
LAYER_RIVALS = {
    rival.name: rival
    for rival in (
        Rival("native", _layer, jit=False, takes=("bias", "layout")),
        Rival("torch.compile", _layer, compiled=True, takes=("bias", "layout")),
    )
}
DW_RIVALS = {
    rival.name: rival
    for rival in (
        Rival(BASELINE, _mm_dw, directions=None, available=_needs_a_gpu, jit=False),
        Rival("torch.mm_nosplit", unsplit(_mm_dw), directions=None, available=needs_cublas, jit=False),
        Rival("torch.mm_narrow", _mm_dw_narrow, directions=None, jit=False),  # dW in the dtype of x
    )
}


# Series


def _sizes(case: Case) -> tuple[int, int, int]:
    return case.dims["M"], case.dims["K"], case.dims["N"]


def _weights(case: Case, pool: Pool) -> list[Tensor]:
    _, K, N = _sizes(case)
    copies = range(copies_for(K * N * case.dtype.itemsize, pool.device))
    return [pool.normal(f"weight {i}", N, K, dtype=case.dtype) for i in copies]


def _forward_args(case: Case, pool: Pool) -> list[Args]:
    M, K, _ = _sizes(case)
    x = pool.normal("x", M, K, dtype=case.dtype)
    return [{"a": x, "b": weight.t(), **_out(case)} for weight in _weights(case, pool)]


def _dx_args(case: Case, pool: Pool) -> list[Args]:
    M, _, N = _sizes(case)
    dy = pool.normal("dy", M, N, dtype=case.dtype)
    return [{"a": dy, "b": weight, **_out(case)} for weight in _weights(case, pool)]


def _out(case: Case) -> Args:
    return {"out_dtype": case.options["out"]} if "out" in case.options else {}


def _dw_args(case: Case, pool: Pool) -> list[Args]:
    M, K, N = _sizes(case)
    copies = min(copies_for(M * (K + N) * case.dtype.itemsize, pool.device), max(1, MAX_TOKENS // M))
    x, dy = (pool.normal(name, copies * M, size, dtype=case.dtype) for name, size in (("x", K), ("dy", N)))
    return [{"x": x[i * M : (i + 1) * M], "dy": dy[i * M : (i + 1) * M]} for i in range(copies)]


def _call_product(args: Args, backend: str | None) -> Tensor:
    return det_gemm(**args, backend=backend)


def _call_tree(args: Args) -> Tensor:
    return det_gemm(**args, numerics=TREE8)


def _call_dw(args: Args, backend: str | None) -> Tensor:
    return det_gemm_dw(args["x"], args["dy"], backend=backend)


def _window(left: Tensor, right: Tensor) -> Window:
    """Some rows and columns of left [R, k] right [k, C]."""
    rows, columns = (spread_evenly(n, 32, left.device) for n in (left.shape[0], right.shape[1]))
    return Window(rows, columns, left[rows].double() @ right[:, columns].double())


def _cost(dims: dict[str, int], dtype: torch.dtype, out_itemsize: int = 0, *, out: str = "MN") -> Cost:
    """Each operand read once, the output written once."""
    M, K, N = dims["M"], dims["K"], dims["N"]
    elements = {"MK": M * K, "KN": K * N, "MN": M * N}
    written = elements.pop(out) * (out_itemsize or dtype.itemsize)
    return Cost(fwd_bytes=sum(elements.values()) * dtype.itemsize + written, fwd_flops=2 * M * K * N)


def _case(M: int, K: int, N: int) -> Case:
    return Case({"M": M, "K": K, "N": N}, torch.bfloat16, data="random")


def _cases(least: int) -> list[Case]:
    return [_case(M, K, N) for K, N in SHAPES for M in TOKENS if least <= M]


def _predict_product(backend: str | None, args: Args) -> float | None:
    """Milliseconds that the time model expects for the chosen tile."""
    if backend != "hopper":
        return None
    from isobit.ops.det_gemm.kernels_hopper import choose_tile

    a, b = args["a"], args["b"]
    itemsize = args.get("out_dtype", a.dtype).itemsize
    return 1e-3 * choose_tile(len(a), b.shape[1], len(b), sm_count(a.device), itemsize, b.stride(-2) == 1)[1]


def _predict_dw(backend: str | None, args: Args) -> float | None:
    if backend != "hopper":
        return None
    from isobit.kernels.hopper.product import choose_sum_tile

    x, dy = args["x"], args["dy"]
    return 1e-3 * choose_sum_tile(dy.shape[1], x.shape[1], len(x), sm_count(x.device))[1]


def _core(least: int) -> list[Case]:
    return [
        case
        for case in _cases(least)
        if (case.dims["K"], case.dims["N"]) in CORE_SHAPES and case.dims["M"] in CORE_TOKENS
    ]


def _shared(case: Case) -> tuple[Any, ...]:
    return (case.dims["K"], case.dims["N"], case.dtype)


def _series(name: str, direction: str, least: int, **rest: Any) -> Series:
    return Series(
        name=name, cases=_cases(least), directions=(direction,), shared=_shared, against=BASELINE, copy=False,
        core=_core(least), also={"triton": _core(least)[-2:]}, **rest,
    )  # fmt: skip


def layer_cost(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Forward is one product; backward two, of which dW is rounded to the dtype of W."""
    forward = _cost(dims, dtype)
    return Cost(forward.fwd_bytes, 2 * forward.fwd_bytes, forward.fwd_flops, 2 * forward.fwd_flops)


LAYER_CASES = [case for case in _core(256) if case.dims["N"] == 14336 and case.dims["M"] != 1024]

FORWARD = _series(
    "det_gemm", "fwd", 1, about="y = x W^T, M tokens",
    op=gemm, make=_forward_args, call=_call_product, cost=partial(_cost, out="MN"),
    judge=lambda args: _window(args["a"], args["b"]), rivals=PRODUCT_RIVALS, bits=True,
    takes=("out",), predict=_predict_product,
)  # fmt: skip

DX = _series(
    "det_gemm_dx", "dx", 1024, about="dx = dy W",
    op=gemm, make=_dx_args, call=_call_product, cost=partial(_cost, out="MK"),
    judge=lambda args: _window(args["a"], args["b"]), rivals=PRODUCT_RIVALS, bits=True, takes=("out",),
    predict=_predict_product,
)  # fmt: skip

DW = _series(
    "det_gemm_dw", "dw", 1024, about="dW = dy^T x, in fp32", op=gemm_dw, make=_dw_args, call=_call_dw,
    cost=partial(_cost, out="KN", out_itemsize=4),
    judge=lambda args: _window(args["dy"].t(), args["x"]), rivals=DW_RIVALS, predict=_predict_dw,
)  # fmt: skip


def _cold(
    series: Series, name: str, about: str, tokens: Sequence[int], shapes: Any, core: Any, **rest: Any
) -> Series:
    cases = [_case(M, K, N) for K, N in shapes for M in tokens]
    return replace(
        series, name=name, about=about, cases=cases, core=core, declared_only=True, also={}, **rest
    )


SERIES: Sequence[Series] = (
    FORWARD,
    replace(
        FORWARD, name="det_gemm_layers", declared_only=True, also={},
        about="the layers of models from 0.5B to 70B",
        cases=[_case(M, K, N) for K, N in LAYER_SHAPES for M in LAYER_TOKENS],
        core=[_case(*sizes) for sizes in LAYER_CORE],
    ),
    DX,
    DW,
    _cold(
        FORWARD, "det_gemm_cold", "rollouts: batches of any size", COLD_TOKENS, COLD_SHAPES,
        [_case(*sizes) for sizes in COLD_CORE], variants={"tree8": _call_tree}, bandwidth=True,
    ),
    _cold(
        DX, "det_gemm_cold_dx", "dx = dy W with the rows of a rollout", (450, 1300, 2100), COLD_SHAPES[:6],
        [_case(1300, *COLD_SHAPES[0]), _case(450, *COLD_SHAPES[1])], variants={"tree8": _call_tree},
    ),
    _cold(
        DW, "det_gemm_cold_dw", "dW = dy^T x with the rows of a rollout", (1300, 4500), COLD_SHAPES[:6],
        [_case(1300, *COLD_SHAPES[0]), _case(4500, *COLD_SHAPES[4])],
    ),
    by_rows(
        "det_linear", LAYER_CASES, layer_cost, LAYER_RIVALS, inputs=("x", "weight"), copy=False,
        about="a linear layer, next to one of PyTorch",
        directions=("fwd", "fwd_bwd"), core=LAYER_CASES, also={"triton": LAYER_CASES},
    ),
)  # fmt: skip
