"""What people use instead of `det_gemm`, the shapes at which both are timed, and how fast is fast enough.

Three series, for a layer with weight W [N, K] and M tokens:

    det_gemm      y  = x W^T      M from decode to training
    det_gemm_dx   dx = dy W
    det_gemm_dw   dW = dy^T x     fp32

Every call finds its weight (for dW: its tokens) out of the L2 cache. Activations may be in it, as they are in
a model, where the layer before has just written them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.bench.goals import Cell, Goal
from isobit.bench.rival import Rival
from isobit.bench.series import Pool, Series
from isobit.bench.timing import copies_for
from isobit.bench.truth import Window, spread_evenly
from isobit.check.compare import differing
from isobit.check.proof import Args, Case, Cost
from isobit.numerics import CHAIN16
from isobit.ops.det_gemm.op import det_gemm, det_gemm_dw, det_linear, gemm, gemm_dw, linear
from isobit.ops.det_gemm.proof_gemm import BATCH_SIZES

#: (K, N): projections of models with hidden sizes 4096 and 7168, and three vocabularies.
SHAPES = (
    (4096, 4096), (4096, 6144), (4096, 12288), (4096, 14336), (14336, 4096),
    (4096, 32000), (4096, 151936), (2048, 131072), (7168, 2048),
)  # fmt: skip
TOKENS = (1, 4, 16, 64, 128, 256, 1024, 4096, 8192)

#: Tokens that exist at most: those of dW rotate over as many as there are.
MAX_TOKENS = 16384

BASELINE = "torch.mm"


# Rivals


@contextmanager
def without_split_k() -> Iterator[None]:
    """cuBLAS may not split k in here. PyTorch then asks cuBLASLt, which alone can be asked, for an algorithm
    with the reduction scheme NONE. It asks at each call, so a graph captured in here keeps what it found."""
    matmul: Any = torch.backends.cuda.matmul
    library = torch.backends.cuda.preferred_blas_library()
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [(getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in names]
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        for name in names:
            setattr(matmul, name, (False, False))
        yield
    finally:
        for name, both in zip(names, before, strict=True):
            setattr(matmul, name, both)
        torch.backends.cuda.preferred_blas_library(library)


def _mm(args: Args) -> Tensor:
    return torch.mm(args["a"], args["b"])


def _mm_dw(args: Args) -> Tensor:
    return torch.mm(args["dy"].t(), args["x"], out_dtype=torch.float32)


def _mm_dw_narrow(args: Args) -> Tensor:
    return torch.mm(args["dy"].t(), args["x"])


def _unsplit(function: Callable[[Args], Tensor]) -> Callable[[Args], Tensor]:
    def run(args: Args) -> Tensor:
        with without_split_k():
            return function(args)

    return run


def _needs_cublas(case: Case, device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip:
        return "needs cuBLAS"
    if not hasattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction_split_k"):
        return "this PyTorch cannot keep cuBLAS from splitting k"
    return None


def _needs_a_gpu(case: Case, device: torch.device) -> str | None:
    return None if device.type == "cuda" else "a product into fp32 needs a GPU"


PRODUCT_RIVALS = {
    rival.name: rival
    for rival in (
        Rival(BASELINE, _mm, directions=None),
        Rival("torch.mm_nosplit", _unsplit(_mm), directions=None, available=_needs_cublas),
    )
}
DW_RIVALS = {
    rival.name: rival
    for rival in (
        Rival(BASELINE, _mm_dw, directions=None, available=_needs_a_gpu),
        Rival("torch.mm_nosplit", _unsplit(_mm_dw), directions=None, available=_needs_cublas),
        Rival("torch.mm_narrow", _mm_dw_narrow, directions=None),  # dW in the dtype of x
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
    return [{"a": x, "b": weight.t()} for weight in _weights(case, pool)]


def _dx_args(case: Case, pool: Pool) -> list[Args]:
    M, _, N = _sizes(case)
    dy = pool.normal("dy", M, N, dtype=case.dtype)
    return [{"a": dy, "b": weight} for weight in _weights(case, pool)]


def _dw_args(case: Case, pool: Pool) -> list[Args]:
    M, K, N = _sizes(case)
    copies = min(copies_for(M * (K + N) * case.dtype.itemsize, pool.device), max(1, MAX_TOKENS // M))
    x, dy = (pool.normal(name, copies * M, size, dtype=case.dtype) for name, size in (("x", K), ("dy", N)))
    return [{"x": x[i * M : (i + 1) * M], "dy": dy[i * M : (i + 1) * M]} for i in range(copies)]


def _call_product(args: Args, backend: str | None) -> Tensor:
    return det_gemm(args["a"], args["b"], backend=backend)


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


def _cases(least: int) -> list[Case]:
    return [
        Case({"M": M, "K": K, "N": N}, torch.bfloat16, data="random")
        for K, N in SHAPES
        for M in TOKENS
        if least <= M
    ]


def _is(*names: str) -> Callable[[Cell], bool]:
    return lambda cell: cell.op in names


def _few(cell: Cell) -> bool:
    return cell.op == "det_gemm" and cell.sizes["M"] <= 256


def _many(cell: Cell) -> bool:
    return cell.op in ("det_gemm", "det_gemm_dx") and cell.sizes["M"] >= 1024


GOALS = (
    Goal("forward and dX, M >= 1024", _many, mean=0.97, least=0.90),
    Goal("dW, M >= 1024", _is("det_gemm_dw"), mean=0.92),
    Goal("forward, M <= 256", _few, mean=0.85),
    Goal("forward, M <= 256, where torch.mm has other bits: it splits k",
         lambda cell: _few(cell) and cell.other_bits, least=0.60),
    Goal("forward, M <= 256, where torch.mm has the same bits",
         lambda cell: _few(cell) and not cell.other_bits, least=0.80),
)  # fmt: skip


def _series(name: str, direction: str, least: int, **rest: Any) -> Series:
    def shared(case: Case) -> tuple[Any, ...]:
        return (case.dims["K"], case.dims["N"], case.dtype)

    return Series(
        name=name, cases=_cases(least), directions=(direction,), shared=shared, against=BASELINE, copy=False,
        **rest,
    )  # fmt: skip


SERIES: Sequence[Series] = (
    _series(
        "det_gemm", "fwd", 1, op=gemm, make=_forward_args, call=_call_product, cost=partial(_cost, out="MN"),
        judge=lambda args: _window(args["a"], args["b"]), rivals=PRODUCT_RIVALS, bits=True, goals=GOALS,
    ),
    _series(
        "det_gemm_dx", "dx", 1024, op=gemm, make=_dx_args, call=_call_product, cost=partial(_cost, out="MK"),
        judge=lambda args: _window(args["a"], args["b"]), rivals=PRODUCT_RIVALS, bits=True,
    ),
    _series(
        "det_gemm_dw", "dw", 1024, op=gemm_dw, make=_dw_args, call=_call_dw,
        cost=partial(_cost, out="KN", out_itemsize=4),
        judge=lambda args: _window(args["dy"].t(), args["x"]), rivals=DW_RIVALS,
    ),
)  # fmt: skip


# What a check writes down


def where_torch_agrees(device: torch.device) -> list[dict[str, Any]]:
    """For how many outputs `torch.mm` has the bits of chain16, by shape and number of rows: a fact about
    this cuBLAS, which nobody promises."""
    probe = torch.zeros(1, 16, dtype=torch.bfloat16, device=device)
    if linear.explain(probe, probe).numerics != str(CHAIN16):
        return []
    facts = []
    for K, N in ((4096, 4096), (4096, 14336), (14336, 4096), (7168, 2048)):
        gen = torch.Generator(device).manual_seed(K + N)
        weight = torch.empty(N, K, dtype=torch.bfloat16, device=device).normal_(generator=gen)
        x = torch.empty(max(BATCH_SIZES), K, dtype=torch.bfloat16, device=device).normal_(generator=gen)
        for name, rival in PRODUCT_RIVALS.items():
            if rival.available(Case({}), device) is not None:
                continue
            shares = {}
            for M in BATCH_SIZES:
                differ = differing(rival.function({"a": x[:M], "b": weight.t()}), det_linear(x[:M], weight))
                shares[M] = 1 - float(differ.double().mean())
            what = f"share of the outputs of {name} that have the bits of {CHAIN16}, by M"
            facts.append({"what": what, "impl": name, "K": K, "N": N, "dtype": "bf16", "M": shares})
    return facts
