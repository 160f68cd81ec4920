"""What people use instead of `combine` and `spread`, and the sizes at which both are timed."""

import torch
from torch import Tensor

from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival
from isobit.spec.series import by_rows

BF16 = torch.bfloat16


def _eager(args: Args) -> Tensor:
    """As transformers' grouped_mm implementation: back to the order of tokens, times the weights, a sum."""
    N, k = args["place"].shape
    weighed = args["y"][args["place"].flatten()] * args["weights"].reshape(-1, 1)
    return weighed.view(N, k, -1).sum(1).to(args["y"].dtype)


def _gather(args: Args) -> Tensor:
    out: Tensor = args["x"].index_select(0, args["token"])
    return out


def _with_tokens(args: Args) -> Args:
    """The token of each row, as transformers' sort gives it."""
    order = args["place"].flatten().argsort()
    return args | {"token": order // args["place"].shape[1]}


def _combine_cost(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Rows are read once and tokens written; backward rows are read and written, and tokens read."""
    rows, tokens = dims["N"] * dims["k"] * dims["D"], dims["N"] * dims["D"]
    return Cost(
        fwd_bytes=(rows + tokens) * dtype.itemsize, bwd_bytes=(2 * rows + tokens) * dtype.itemsize
    )  # fmt: skip


def _spread_cost(dims: dict[str, int], dtype: torch.dtype) -> Cost:
    both = (dims["k"] + 1) * dims["N"] * dims["D"] * dtype.itemsize
    return Cost(fwd_bytes=both, bwd_bytes=both)


def _case(N: int, k: int, D: int) -> Case:
    return Case({"N": N, "k": k, "D": D}, BF16, data="random")


CASES = [_case(N, k, D) for k, D in ((8, 2048), (2, 4096), (4, 2880)) for N in (1, 256, 4096, 32768)]
_CORE = [_case(1, 8, 2048), _case(4096, 8, 2048)]
_COMBINE = {"eager": Rival("eager", _eager, jit=False)}
_SPREAD = {"eager": Rival("eager", _gather, prepare=_with_tokens, jit=False)}

SERIES = [
    by_rows(
        "combine", CASES, _combine_cost, _COMBINE, about="N tokens of k experts", core=_CORE,
        judge=lambda args: None,
    ),
    by_rows(
        "spread", CASES, _spread_cost, _SPREAD, about="N tokens of k experts", core=_CORE,
        judge=lambda args: None,
    ),
]  # fmt: skip
