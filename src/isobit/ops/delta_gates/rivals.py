"""What people use instead of `delta_gates`, and the sizes at which both are timed."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival
from isobit.spec.series import by_rows


def eager(args: Args) -> tuple[Tensor, Tensor]:
    """As transformers computes it."""
    g = -args["A_log"].float().exp() * F.softplus(args["a"].float() + args["dt_bias"])
    return g, args["b"].sigmoid()


RIVALS = {rival.name: rival for rival in (Rival("eager", eager, jit=False),)}


def cost(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """a and b are read, beta and the fp32 g written; backward a, b and both gradients read, da and db
    written."""
    count = math.prod(dims.values())
    each = dtype.itemsize
    return Cost(fwd_bytes=count * (3 * each + 4), bwd_bytes=count * (5 * each + 4))


CASES = [Case({"N": N, "H": 32}, torch.bfloat16, data="random", options={"wide": True}) for N in (16, 32768)]

SERIES = [by_rows("delta_gates", CASES, cost, RIVALS, about="N tokens of H heads", core=CASES[1:])]
