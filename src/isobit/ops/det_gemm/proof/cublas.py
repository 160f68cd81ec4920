"""What cuBLAS does: where its bits equal chain16, and how to forbid it to split k. cuBLAS documents none of
this; the check records it, and the bench times both."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from isobit.numerics import CHAIN16
from isobit.ops.det_gemm.op import det_linear, linear
from isobit.spec.compare import differing
from isobit.spec.proof import Args, Case

#: Batch sizes around which a kernel might change its tile or algorithm.
BATCH_SIZES = (
    1, 2, 7, 8, 16, 17, 63, 64, 65, 127, 128, 129, 160, 192, 255, 256, 257, 320, 500, 768, 1000, 1536, 4096,
)  # fmt: skip

BASELINE, NO_SPLIT = "torch.mm", "torch.mm_nosplit"


def mm(args: Args) -> Tensor:
    return torch.mm(args["a"], args["b"])


@contextmanager
def without_split_k() -> Iterator[None]:
    """Inside this context cuBLAS may not split k: PyTorch requests an algorithm with reduction scheme NONE
    from cuBLASLt (cuBLAS itself has no such option). It does so at each call, so a graph captured in here
    keeps the algorithm that was found."""
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


def unsplit(function: Callable[[Args], Tensor]) -> Callable[[Args], Tensor]:
    def run(args: Args) -> Tensor:
        with without_split_k():
            return function(args)

    return run


def cannot_forbid_split_k(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip:
        return "needs cuBLAS"
    if not hasattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction_split_k"):
        return "this PyTorch cannot keep cuBLAS from splitting k"
    return None


def needs_cublas(case: Case, device: torch.device) -> str | None:
    return cannot_forbid_split_k(device)


def where_torch_agrees(device: torch.device) -> list[dict[str, Any]]:
    """The share of outputs for which `torch.mm` has the bits of chain16, by shape and number of rows. An
    observation about this cuBLAS, not a promise."""
    probe = torch.zeros(1, 16, dtype=torch.bfloat16, device=device)
    if linear.explain(x=probe, weight=probe).numerics != str(CHAIN16):
        return []
    products = {BASELINE: mm} | ({} if cannot_forbid_split_k(device) else {NO_SPLIT: unsplit(mm)})
    facts = []
    for K, N in ((4096, 4096), (4096, 14336), (14336, 4096), (7168, 2048)):
        gen = torch.Generator(device).manual_seed(K + N)
        weight = torch.empty(N, K, dtype=torch.bfloat16, device=device).normal_(generator=gen)
        x = torch.empty(max(BATCH_SIZES), K, dtype=torch.bfloat16, device=device).normal_(generator=gen)
        for name, product in products.items():
            shares = {}
            for M in BATCH_SIZES:
                differ = differing(product({"a": x[:M], "b": weight.t()}), det_linear(x[:M], weight))
                shares[M] = 1 - float(differ.double().mean())
            what = f"share of the outputs of {name} that have the bits of {CHAIN16}, by M"
            facts.append({"what": what, "impl": name, "K": K, "N": N, "dtype": "bf16", "M": shares})
    return facts
