"""What people use instead of `rms_norm`, and the sizes at which both are timed."""

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.bench.goals import Cell, Goal, floors
from isobit.bench.rival import Rival, cannot_import
from isobit.bench.series import Series, by_rows
from isobit.check.proof import Args, Case, Cost

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
    found: Tensor = liger_rms_norm(args["x"], args["weight"], args["eps"], in_place=False)
    return found


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
    reads and one write. Tensors with one number per row are negligible but counted."""
    N = math.prod(size for name, size in dims.items() if name != "D")
    rows = N * dims["D"] * dtype.itemsize
    return Cost(fwd_bytes=(4 if residual else 2) * rows + 4 * N, bwd_bytes=3 * rows + 4 * N)


def _case(N: int, D: int) -> Case:
    return Case({"N": N, "D": D}, BF16, data="random")


CASES = [_case(N, D) for D in (1024, 2048, 4096, 5120, 8192) for N in (1, 16, 256, 4096, 32768)]
#: Heads of queries and keys, which some models normalise separately.
HEADS = [Case({"N": 8192, "H": 32, "D": 128}, BF16, data="random")]
_CORE = [_case(32768, 2048), _case(32768, 4096), _case(32768, 8192), _case(4096, 4096), _case(1, 4096)]


def _goals() -> Sequence[Goal]:
    """The time for the bytes that must be moved, plus the microseconds of launches; and never slower than
    rivals."""

    def held(what: str, direction: str, against: object) -> Goal:
        def chooses(cell: Cell) -> bool:
            return cell.direction == direction and cell.sizes["D"] >= 2048

        return Goal(what, chooses, most=1.0, against=against)  # type: ignore[arg-type]

    return (
        held("forward: 0.92 of a copy's bandwidth", "fwd", floors(1 / 0.92, 3)),
        held("forward and backward: 1.15 of their bytes", "fwd_bwd", floors(1.15, 10)),
        *(
            held(f"{direction}, beside {name}", direction, name)
            for name in ("native", "torch.compile", "liger")
            for direction in ("fwd", "fwd_bwd")
        ),
    )


def _series(name: str, cases: Sequence[Case], residual: bool = False) -> Series:
    kept = {n: rival for n, rival in RIVALS.items() if not residual or n != "liger"}
    plain = name == "rms_norm"
    return by_rows(
        "rms_norm", cases, partial(cost, residual), kept, name=name, inputs=("x", "weight"),
        options={"residual": True} if residual else {}, core=_CORE if plain else cases[:1],
        goals=_goals() if plain else (), directions=("fwd",) if residual else ("fwd", "bwd", "fwd_bwd"),
    )  # fmt: skip


SERIES = [
    _series("rms_norm", CASES),
    _series("rms_norm_heads", HEADS),
    _series("rms_norm_residual", [_case(N, 4096) for N in (16, 4096, 32768)], residual=True),
]
