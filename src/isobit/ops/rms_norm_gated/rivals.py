"""What people use instead of `rms_norm_gated`, and the sizes at which both are timed."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival
from isobit.spec.series import by_rows


def eager(args: Args) -> Tensor:
    """As transformers computes it."""
    x = args["x"]
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + args["eps"])
    return ((args["weight"] * h.to(x.dtype)) * F.silu(args["gate"].float())).to(x.dtype)


RIVALS = {
    rival.name: rival
    for rival in (
        Rival("eager", eager, jit=False),
        # A compiled backward frees its buffers, so it cannot run twice after one forward.
        Rival("torch.compile", eager, directions=("fwd", "fwd_bwd"), compiled=True),
    )
}


def cost(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Forward two reads and one write, backward three reads and two writes."""
    nbytes = math.prod(dims.values()) * dtype.itemsize
    return Cost(fwd_bytes=3 * nbytes, bwd_bytes=5 * nbytes)


#: N is tokens times the 32 value heads of Qwen3-Next.
CASES = [Case({"N": 32 * N, "D": 128}, torch.bfloat16, data="random") for N in (16, 4096, 32768)]

SERIES = [by_rows("rms_norm_gated", CASES, cost, RIVALS, about="N heads of D elements", core=CASES[2:])]
