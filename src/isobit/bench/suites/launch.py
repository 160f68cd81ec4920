"""What an eager call costs the host where the device has next to nothing to do: decoding, small batches.

Each op beside what PyTorch offers for the same, at three small shapes. `host_us` is the figure to read; `ms`
is what the device needs. Contract, choice of a backend and launch are all of it, and none of them depends on
the sizes: three are there to show that.
"""

from collections.abc import Callable, Sequence

import torch

from isobit.bench.rival import Rival
from isobit.bench.series import Series, by_rows
from isobit.check.proof import Case, Cost
from isobit.ops.det_gemm import rivals as products
from isobit.ops.linear_logp import rivals as heads
from isobit.ops.logp import rivals as logits

ROWS = (1, 16, 128)

_Costs = Callable[[dict[str, int], torch.dtype], Cost]


def _series(op: str, rows: str, sizes: dict[str, int], cost: _Costs, native: Rival, *inputs: str) -> Series:
    cases = [Case({rows: n, **sizes}, torch.bfloat16, data="random") for n in ROWS]
    return by_rows(
        op, cases, cost, {native.name: native}, inputs=inputs, copy=False, directions=("fwd", "fwd_bwd"),
        core=cases,
    )  # fmt: skip


SERIES: Sequence[Series] = (
    _series(
        "det_linear", "M", {"K": 1024, "N": 1024}, products.layer_cost, products.LAYER_RIVALS["native"],
        "x", "weight",
    ),
    _series("logp", "N", {"V": 4096}, logits.cost, logits.RIVALS["native"], "logits"),
    _series(
        "linear_logp", "N", {"D": 1024, "V": 4096}, heads.cost_of_training, heads.NATIVE, "hidden", "weight"
    ),
)  # fmt: skip
