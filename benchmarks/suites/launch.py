"""The host time of an eager call when the device has next to nothing to do: decoding, small batches.

Each op next to PyTorch's equivalent, at four small shapes. `host_us` is the figure to read; `ms` is device
time. Host time is contract checks, the choice of a backend and the launch. None of these depends on the
sizes, and several sizes are timed to show that. At the largest, `isobit:new` and `native:new` are calls with
another number of rows each time, as in packed micro-batches: cached information about sizes does not help
there.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isobit.bench.goals import Base, Cell, Goal, limit
from isobit.bench.timing import ONCE_CALLS
from isobit.ops.attention import rivals as attentions
from isobit.ops.det_gemm import rivals as products
from isobit.ops.linear_logp import rivals as heads
from isobit.ops.logp import rivals as logits
from isobit.ops.rms_norm import rivals as norms
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival
from isobit.spec.series import Pool, Series, by_rows

DIRECTIONS = ("fwd", "fwd_bwd")

#: The last one also has calls with new numbers of rows, those of `NEW_ROWS`: between two powers of two, so
#: that no kernel is chosen for some of them only.
ROWS = (1, 16, 128, 768)
NEW_ROWS = [n for n in range(513, 1024) if n not in ROWS]
assert len(NEW_ROWS) >= len(DIRECTIONS) * ONCE_CALLS

#: Limit for a call with a new number of rows, as a multiple of one whose sizes are known.
NEW_MOST = 2.0

_Costs = Callable[[dict[str, int], torch.dtype], Cost]


def _series(
    op: str,
    rows: str,
    sizes: dict[str, int],
    cost: _Costs,
    native: Rival,
    of_rows: tuple[str, ...],
    inputs: tuple[str, ...],
    directions: tuple[str, ...] = DIRECTIONS,
    **rest: Any,
) -> Series:
    """`of_rows` names the arguments with one line per row, which are cut to the number of rows; for attention
    these are sequences."""
    cases = [Case({rows: n, **sizes}, torch.bfloat16, data="random") for n in ROWS]
    rivals = {native.name: native}
    series = by_rows(
        op, cases, cost, rivals, inputs=inputs, copy=False, directions=directions, core=cases, **rest
    )

    def new(case: Case, pool: Pool) -> list[Args]:
        if case.dims[rows] != ROWS[-1]:
            return []
        numbers = random.Random(pool.inputs.seed).sample(NEW_ROWS, len(NEW_ROWS))
        (args, *_) = series.make(replace(case, dims={**case.dims, rows: NEW_ROWS[-1]}), pool)
        return [args | {name: args[name][:n] for name in of_rows} for n in numbers]

    return replace(series, new=new, figure="host_us")


# Series


def _product(args: Args) -> Tensor:
    return F.linear(args["a"], args["weight"])


def _as_layer(args: Args) -> Args:
    return args | {"weight": args["b"].t()}


def _attention(args: Args) -> Tensor:
    """Heads are the third dimension of isobit's tensors, and the second of PyTorch's."""
    q, k, v = (args[name].transpose(1, 2) for name in "qkv")
    out = F.scaled_dot_product_attention(q, k, v, is_causal=args["causal"], enable_gqa=True)
    return out.transpose(1, 2)


SERIES: Sequence[Series] = (
    _series(
        "det_linear", "M", {"K": 1024, "N": 1024}, products.layer_cost, products.LAYER_RIVALS["native"],
        ("x",), ("x", "weight"),
    ),
    _series(
        "det_gemm", "M", {"K": 1024, "N": 1024}, products.layer_cost,
        Rival("native", _product, directions=None, prepare=_as_layer, jit=False), ("a",), (), ("fwd",),
    ),
    _series(
        "logp", "N", {"V": 4096}, logits.cost, logits.RIVALS["native"], ("logits", "token_ids"), ("logits",),
    ),
    _series(
        "linear_logp", "N", {"D": 1024, "V": 4096}, heads.cost_of_training, heads.NATIVE,
        ("hidden", "token_ids"), ("hidden", "weight"),
    ),
    _series(
        "rms_norm", "N", {"D": 1024}, partial(norms.cost, False), norms.RIVALS["native"], ("x",),
        ("x", "weight"),
    ),
    _series(
        "attention", "B", {"T": 16, "S": 16, "H": 4, "KV": 2, "D": 64}, partial(attentions.cost, None),
        Rival("native", _attention, directions=None, jit=False), ("q", "k", "v"), ("q", "k", "v"),
        judge=attentions.OneHead,
    ),
)  # fmt: skip


# Goals


def _cells(op: str, direction: str) -> Callable[[Cell], bool]:
    return lambda cell: (cell.op, cell.direction) == (op, direction)


def _goal(op: str, direction: str, most: float, against: str | Base = "native") -> Goal:
    what = f"{op}, {'forward' if direction == 'fwd' else 'forward and backward'}"
    return Goal(what, _cells(op, direction), most=most, against=against, figure="host_us")


#: Host time as a multiple of PyTorch's, or of a fixed time.
_USUAL = {
    "det_linear": [_goal("det_linear", "fwd", 1.5), _goal("det_linear", "fwd_bwd", 1.5)],
    "det_gemm": [_goal("det_gemm", "fwd", 1.5)],
    "logp": [_goal("logp", "fwd", 2.0)],
    "linear_logp": [
        _goal("linear_logp", "fwd", 1.0, limit(60, "us")),
        _goal("linear_logp", "fwd_bwd", 1.2),
    ],
    "rms_norm": [_goal("rms_norm", "fwd", 1.5), _goal("rms_norm", "fwd_bwd", 1.5)],
    "attention": [_goal("attention", "fwd", 1.5), _goal("attention", "fwd_bwd", 1.5)],
}


def _new_goals(series: Series) -> list[Goal]:
    """Calls with a new number of rows, next to calls whose sizes are known."""
    goals = (_goal(series.name, direction, NEW_MOST, "isobit") for direction in series.directions)
    return [replace(goal, what=f"{goal.what}, new rows", impl="isobit:new") for goal in goals]


GOALS = tuple(goal for series in SERIES for goal in (*_USUAL[series.name], *_new_goals(series)))
