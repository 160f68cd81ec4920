"""What people use instead of `route`, and the sizes at which both are timed."""

import torch
from torch import Tensor

from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival
from isobit.spec.series import by_rows

BF16 = torch.bfloat16


def _eager(args: Args) -> tuple[Tensor, ...]:
    """As transformers' routers and its grouped_mm implementation: softmax, top-k, a sort and a histogram."""
    E = args["logits"].shape[-1]
    p = args["logits"].softmax(-1, dtype=torch.float32)
    weights, experts = p.topk(args["top_k"], dim=-1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(args["logits"].dtype)
    place = experts.flatten().argsort().argsort()
    sizes = torch.histc(experts.flatten().float(), bins=E, min=0, max=E - 1)
    return weights, experts, place, sizes.cumsum(0)


def cost(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Logits are read once; weights, experts and places written. Backward logits are read and written."""
    N, E, k = dims["N"], dims["E"], dims["k"]
    return Cost(
        fwd_bytes=N * (E * dtype.itemsize + k * (dtype.itemsize + 8)), bwd_bytes=2 * N * E * dtype.itemsize
    )


def _case(N: int, E: int, k: int) -> Case:
    return Case({"N": N, "E": E, "k": k}, BF16, data="random", options={"normalize": True})


CASES = [_case(N, E, k) for E, k in ((128, 8), (8, 2), (512, 10)) for N in (1, 256, 4096, 32768)]

SERIES = [
    by_rows(
        "route", CASES, cost, {"eager": Rival("eager", _eager, jit=False, takes=("normalize",))},
        about="N tokens", core=[_case(1, 128, 8), _case(4096, 128, 8)], judge=lambda args: None,
    )
]  # fmt: skip
