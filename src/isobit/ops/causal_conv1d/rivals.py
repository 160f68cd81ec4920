"""What people use instead of `causal_conv1d`, and the sizes at which both are timed."""

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival, cannot_import
from isobit.spec.series import by_rows

BF16 = torch.bfloat16


def eager(args: Args) -> Tensor:
    """As transformers computes it where no package is installed."""
    x, weight = args["x"], args["weight"]
    T, W = x.shape[1], weight.shape[-1]
    z = F.conv1d(x.mT, weight[:, None], args["bias"], padding=W - 1, groups=len(weight))[..., :T]
    return F.silu(z).mT


def _package(args: Args) -> Tensor:
    from causal_conv1d import causal_conv1d_fn

    out: Tensor = causal_conv1d_fn(args["x"].mT, args["weight"], args["bias"], activation="silu").mT
    return out


def _package_available(case: Case, device: torch.device) -> str | None:
    return cannot_import("causal_conv1d") or ("its kernels need a GPU" if device.type == "cpu" else None)


RIVALS = {
    rival.name: rival
    for rival in (
        Rival("eager", eager, jit=False),
        Rival("causal-conv1d", _package, available=_package_available),
    )
}


def cost(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """One read and one write forward, two reads and one write backward."""
    nbytes = dims["B"] * dims["T"] * dims["D"] * dtype.itemsize
    return Cost(fwd_bytes=2 * nbytes, bwd_bytes=3 * nbytes)


def _case(B: int, T: int, D: int) -> Case:
    return Case({"B": B, "T": T, "D": D}, BF16, data="random", options={"bias": False, "state": False})


#: Channels of Qwen3-Next's layers.
CASES = [_case(1, 4096, 8192), _case(1, 32768, 8192), _case(8, 2048, 8192)]

SERIES = [by_rows("causal_conv1d", CASES, cost, RIVALS, about="T tokens of B sequences", core=CASES[1:2])]
