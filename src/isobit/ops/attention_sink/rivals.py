"""What people use instead of `attention_sink`, and the sizes at which both are timed."""

import math

import torch
from torch import Tensor

from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival
from isobit.spec.series import by_rows

BF16 = torch.bfloat16


def eager(args: Args) -> Tensor:
    share = torch.sigmoid(args["lse"] - args["sinks"])
    return (args["x"] * share[..., None]).to(args["x"].dtype)


RIVALS = {
    rival.name: rival
    for rival in (
        Rival("eager", eager, jit=False, takes=("layout",)),
        # A compiled backward frees its buffers, so it cannot run twice after one forward.
        Rival("torch.compile", eager, directions=("fwd", "fwd_bwd"), compiled=True, takes=("layout",)),
    )
}


def cost(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Forward a read and a write of x, backward two reads and a write; lse once in each, dlse twice."""
    D, rows = dims["D"], math.prod(size for name, size in dims.items() if name != "D")
    nbytes = rows * D * dtype.itemsize
    return Cost(fwd_bytes=2 * nbytes + 4 * rows, bwd_bytes=3 * nbytes + 12 * rows)


CASES = [Case({"N": N, "H": 64, "D": 64}, BF16, data="random") for N in (1, 16, 256, 4096, 32768)]

SERIES = [by_rows("attention_sink", CASES, cost, RIVALS, about="N tokens", core=CASES[-1:])]
