"""What people use instead of `rms_norm`, and the sizes at which both are timed."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.ops.rms_norm.op import forward
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival, cannot_import
from isobit.spec.series import Series, by_rows
from isobit.spec.truth import Truth, cotangent_like, truth_of

BF16 = torch.bfloat16

#: Options of a case that a rival supports, or that do not affect it.
_TAKES = ("eps", "layout", "residual")


def _summed(args: Args) -> Tensor:
    x: Tensor = args["x"]
    return x if args["residual"] is None else x + args["residual"]


def native(args: Args) -> Tensor | tuple[Tensor, Tensor]:
    """PyTorch's own, which rounds once, after the weight."""
    h = _summed(args)
    out = F.rms_norm(h, (h.shape[-1],), args["weight"], args["eps"])
    return out if args["residual"] is None else (out, h)


def eager(args: Args) -> Tensor | tuple[Tensor, Tensor]:
    """As the modules of Hugging Face's models compute it."""
    h = _summed(args)
    z = h.float()
    y = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + args["eps"])
    out = args["weight"] * y.to(h.dtype)
    return out if args["residual"] is None else (out, h)


def _liger(args: Args) -> Tensor:
    from liger_kernel.transformers.functional import liger_rms_norm

    # Not in place: that would overwrite dout with the gradient.
    out: Tensor = liger_rms_norm(args["x"], args["weight"], args["eps"], in_place=False)
    return out


def _liger_available(case: Case, device: torch.device) -> str | None:
    return cannot_import("liger_kernel.transformers.functional") or (
        "its kernels need a GPU" if device.type == "cpu" else None
    )


RIVALS = {
    rival.name: rival
    for rival in (
        Rival("native", native, jit=False, takes=_TAKES),
        Rival("eager", eager, jit=False, takes=_TAKES),
        # A compiled backward frees its buffers, so it cannot run twice after one forward.
        Rival("torch.compile", eager, directions=("fwd", "fwd_bwd"), compiled=True, takes=_TAKES),
        Rival("liger", _liger, available=_liger_available, takes=("eps", "layout")),
    )
}


def cost(residual: bool, dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Forward one read and one write; with a residual two of each (x and residual, h and out). Backward two
    reads and one write; with a residual also the gradient of h is read, and x and residual share one.
    Tensors with one number per row are negligible but counted."""
    N = math.prod(size for name, size in dims.items() if name != "D")
    rows = N * dims["D"] * dtype.itemsize
    moved = (4, 4) if residual else (2, 3)
    return Cost(fwd_bytes=moved[0] * rows + 4 * N, bwd_bytes=moved[1] * rows + 4 * N)


#: Inputs with gradients, with a residual.
_ADDED = ("x", "weight", "residual")


def _with_sum(args: Args) -> Truth:
    """The truth with a residual. Its second output, the sum, has a cotangent too, of the same numbers, and
    that passes on to x and to the residual as it is."""
    known = truth_of(forward, args, _ADDED)
    assert known is not None  # its output is row by row
    passed = cotangent_like(known.output.new_empty(known.total_rows, known.output.shape[1]))[known.rows]
    return replace(known, gradients={i: grad + passed for i, grad in known.gradients.items()})


def _case(N: int, D: int) -> Case:
    return Case({"N": N, "D": D}, BF16, data="random")


CASES = [_case(N, D) for D in (1024, 2048, 4096, 5120, 8192) for N in (1, 16, 256, 4096, 32768)]
#: Heads of queries and keys, which some models normalise separately.
HEADS = [Case({"N": 8192, "H": 32, "D": 128}, BF16, data="random")]
_CORE = [_case(32768, 2048), _case(32768, 4096), _case(32768, 8192), _case(4096, 4096), _case(1, 4096)]


def _series(name: str, cases: Sequence[Case], about: str, residual: bool = False) -> Series:
    rivals = {n: rival for n, rival in RIVALS.items() if not residual or n != "liger"}
    plain = name == "rms_norm"
    return by_rows(
        "rms_norm", cases, partial(cost, residual), rivals, name=name, about=about,
        inputs=_ADDED if residual else ("x", "weight"), judge=_with_sum if residual else None,
        options={"residual": True} if residual else {}, core=_CORE if plain else cases[:1],
        directions=("fwd", "fwd_bwd") if residual else ("fwd", "bwd", "fwd_bwd"),
    )  # fmt: skip


SERIES = [
    _series("rms_norm", CASES, "N rows of D features"),
    _series("rms_norm_heads", HEADS, "the heads of queries or keys"),
    _series(
        "rms_norm_residual", [_case(N, 4096) for N in (16, 4096, 32768)], "with a residual", residual=True
    ),
]
