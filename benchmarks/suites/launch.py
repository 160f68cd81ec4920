"""The host time of an eager call when the device has next to nothing to do: decoding, small batches.

Each op next to PyTorch's equivalent, at four small shapes. `host_us` is the figure to read; `ms` is device
time. Host time is contract checks, the choice of a backend and the launch. None of these depends on the
sizes, and several sizes are timed to show that. At the largest, `isobit:new` and `native:new` are calls with
another number of rows each time, as in packed micro-batches: cached information about sizes does not help
there.

`growing_cache` is attention in a decode loop: one query for each sequence, and one key more at every step.
`host_us` is that of the same step again and again. `length_us` is the median over the steps of a loop, each
of which has a length that did not occur before, and `compiled` is how many kernels were compiled after its
first step: the loop passes the length from which on other kernels serve. The rival's loop is shorter: it took
36 ms at every new length on an H200.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isobit.bench.goals import Base, Cell, Goal, limit
from isobit.bench.timing import ONCE_CALLS
from isobit.frame.launch import compiled_count
from isobit.ops.attention import attention
from isobit.ops.attention import rivals as attentions
from isobit.ops.det_gemm import rivals as products
from isobit.ops.linear_logp import rivals as heads
from isobit.ops.logp import rivals as logits
from isobit.ops.rms_norm import rivals as norms
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival
from isobit.spec.series import Pool, Series, by_rows
from isobit.spec.truth import Verdict

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


OPS: Sequence[Series] = (
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


# A decode loop

#: Lengths of the cache in a loop: the first, and how many follow each other.
FIRST_LENGTH, LENGTHS = 200, 1400

#: Those of the rival.
RIVAL_LENGTHS = 100

Step = Callable[[Args, int], Tensor]


def _decode(args: Args, S: int) -> Tensor:
    return attention(args["q"], args["k"][:, :S], args["v"][:, :S])


def _native_decode(args: Args, S: int) -> Tensor:
    q, k, v = (args[name].transpose(1, 2) for name in "qkv")
    out = F.scaled_dot_product_attention(q, k[:, :, :S], v[:, :, :S], enable_gqa=True)
    return out.transpose(1, 2)


#: Results have one of these, so that the judge sees whose they are.
_STEPS: tuple[Step, ...] = (_decode, _native_decode)
_MARKS = torch.arange(len(_STEPS)).unbind()


def _decoded(which: int, args: Args, backend: str | None = None) -> tuple[Tensor, ...]:
    assert backend is None
    with torch.no_grad():
        return _STEPS[which](args, args["S"]), _MARKS[which]


@dataclass(frozen=True)
class Loop:
    """The judge of a step: it makes the whole loop."""

    args: Args

    def error(self, direction: str, result: tuple[Tensor, ...]) -> Verdict:
        (step,) = (step for step, mark in zip(_STEPS, _MARKS, strict=True) if mark is result[1])
        us, compiled, first = [], 0, self.args["first"]
        lengths = self.args["lengths"] if step is _decode else min(self.args["lengths"], RIVAL_LENGTHS)
        with torch.no_grad():
            for S in range(first, first + lengths):
                begin = time.perf_counter()
                step(self.args, S)
                us.append((time.perf_counter() - begin) * 1e6)
                compiled = compiled or compiled_count()  # those of the first step, and from before
        more = {"length_us": statistics.median(us), "compiled": compiled_count() - compiled}
        return Verdict(more=more if step is _decode else {"length_us": more["length_us"]})


def _growing(case: Case, pool: Pool) -> list[Args]:
    B, T, S, H, KV, D = (case.dims[name] for name in ("B", "T", "S", "H", "KV", "D"))
    first, lengths = (FIRST_LENGTH, LENGTHS) if pool.device.type != "cpu" else (S, 2)
    room = max(S, first + lengths)

    def drawn(name: str, *shape: int) -> Tensor:
        matrix = pool.normal(name, shape[0], torch.Size(shape[1:]).numel(), dtype=case.dtype)
        return matrix.view(shape)

    return [{
        "q": drawn("q", B, T, H, D), "k": drawn("k", B, room, KV, D), "v": drawn("v", B, room, KV, D),
        "S": S, "first": first, "lengths": lengths,
    }]  # fmt: skip


def _cache(B: int, S: int, H: int, KV: int, D: int) -> Case:
    return Case({"B": B, "T": 1, "S": S, "H": H, "KV": KV, "D": D}, torch.bfloat16, data="random")


_CACHES = (_cache(1, 1000, 32, 8, 128), _cache(32, 1000, 16, 8, 128))

GROWING = Series(
    op=None, name="growing_cache", cases=_CACHES, core=_CACHES,
    small=(_cache(1, 4, 1, 1, 64),), make=_growing, call=partial(_decoded, 0),
    cost=partial(attentions.cost, None), judge=Loop, declared_only=True,
    rivals={"native": Rival("native", partial(_decoded, 1), directions=None, jit=False)},
    directions=("decode",), needs=("attention",), step=True, copy=False, figure="host_us",
    about="attention of one query, with a cache that grows",
)  # fmt: skip
SERIES: Sequence[Series] = (*OPS, GROWING)


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
        _goal("linear_logp", "fwd_bwd", 1.1),
    ],
    "rms_norm": [_goal("rms_norm", "fwd", 1.5), _goal("rms_norm", "fwd_bwd", 1.5)],
    "attention": [_goal("attention", "fwd", 1.5), _goal("attention", "fwd_bwd", 1.5)],
}


def _new_goals(series: Series) -> list[Goal]:
    """Calls with a new number of rows, next to calls whose sizes are known."""
    goals = (_goal(series.name, direction, NEW_MOST, "isobit") for direction in series.directions)
    return [replace(goal, what=f"{goal.what}, new rows", impl="isobit:new") for goal in goals]


def _of_loop(what: str, figure: str, most: float, against: Base) -> Goal:
    return Goal(
        f"growing_cache, {what}", _cells("growing_cache", "decode"), most=most, figure=figure, against=against
    )


_LOOP = (
    _of_loop(f"median of {LENGTHS} new lengths", "length_us", 1.0, limit(60, "us")),
    _of_loop("kernels compiled after the first step", "compiled", 0, limit(1, "kernel")),
)
GOALS = (*(goal for series in OPS for goal in (*_USUAL[series.name], *_new_goals(series))), *_LOOP)
