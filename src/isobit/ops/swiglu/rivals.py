"""What people use instead of `swiglu`, and the sizes at which both are timed."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival, cannot_import
from isobit.spec.series import by_rows

BF16 = torch.bfloat16


def eager(args: Args) -> Tensor:
    """As the modules of Hugging Face's models compute it."""
    return F.silu(args["gate"]) * args["up"]


def _liger(args: Args) -> Tensor:
    from liger_kernel.transformers.functional import liger_swiglu

    out: Tensor = liger_swiglu(args["gate"], args["up"])
    return out


def _liger_available(case: Case, device: torch.device) -> str | None:
    return cannot_import("liger_kernel.transformers.functional") or (
        "its kernels need a GPU" if device.type == "cpu" else None
    )


RIVALS = {
    rival.name: rival
    for rival in (
        Rival("eager", eager, jit=False, takes=("layout",)),
        # A compiled backward frees its buffers, so it cannot run twice after one forward.
        Rival("torch.compile", eager, directions=("fwd", "fwd_bwd"), compiled=True, takes=("layout",)),
        # Its backward writes the gradients over gate and up, so it cannot run twice either.
        Rival("liger", _liger, directions=("fwd",), available=_liger_available),
    )
}


def cost(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Forward two reads and one write, backward three reads and two writes."""
    nbytes = math.prod(dims.values()) * dtype.itemsize
    return Cost(fwd_bytes=3 * nbytes, bwd_bytes=5 * nbytes)


def _case(N: int, D: int, layout: str = "dense") -> Case:
    return Case({"N": N, "D": D}, BF16, data="random", layout=layout)


CASES = [_case(N, D) for D in (3072, 9728, 14336) for N in (1, 16, 256, 4096, 32768)]
MERGED = [_case(N, 9728, "merged") for N in (16, 4096, 32768)]
_CORE = [_case(32768, 3072), _case(32768, 14336), _case(4096, 9728), _case(1, 3072)]

SERIES = [
    by_rows("swiglu", CASES, cost, RIVALS, about="N tokens", core=_CORE),
    by_rows(
        "swiglu", MERGED, cost, RIVALS, name="swiglu_merged", about="halves of one tensor", core=MERGED[-1:]
    ),
]
