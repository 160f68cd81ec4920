"""What a fresh process waits before a model under `zero_drift` has generated its first tokens, with an empty
cache of kernels. Random weights, bf16, eager; two layers, since layers share their kernels.

    first use     the first tokens compile what they need, one kernel after the other
    isobit        `isobit.warmup` with eight processes before them

Each call is a process of its own (`first_use.py`), and `ms` is all of it: imports and weights too. The
figures to read are `wait_s`, the seconds for which tokens waited, and `compiled`, the kernels that the first
tokens compiled. After `isobit.warmup` that must be none.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.suites.warmup.first_use import MODELS
from benchmarks.suites.zero_drift import cost
from isobit.bench.goals import Cell, Goal, limit
from isobit.bench.suites import BENCHMARKS
from isobit.check.source_hash import PACKAGE
from isobit.spec.proof import Args, Case, Cost
from isobit.spec.rival import Rival
from isobit.spec.series import NotHere, Pool, Series
from isobit.spec.truth import Verdict

PROCESSES = 8
#: Of the wait without a warmup.
MOST = 1 / 3

#: Layers share their kernels.
SIZES: dict[str, Any] = {"num_hidden_layers": 2}
PROGRAM = Path(__file__).parent / "first_use.py"
FIGURES = ("wait_s", "kernels", "compiled")


def in_a_process(given: dict[str, Any]) -> dict[str, float]:
    """What `first_use` prints, in a process with an empty cache of kernels."""
    with tempfile.TemporaryDirectory() as cache:
        paths = [str(BENCHMARKS.parent), str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
        there = {"TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, str(PROGRAM), json.dumps(given)]
        done = subprocess.run(
            command, env=os.environ | there, capture_output=True, text=True, check=False, timeout=600
        )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def call(processes: int, args: Args, backend: str | None = None) -> tuple[Tensor, ...]:
    """The figures as a tensor: the judge reads them from there."""
    assert backend is None
    found = in_a_process(
        {name: args[name] for name in ("model", "sizes", "batch", "length")} | {"processes": processes}
    )
    return (torch.tensor([found[name] for name in FIGURES], dtype=torch.float64),)


class Figures:
    def __init__(self, args: Args) -> None:
        pass

    def error(self, direction: str, result: tuple[Tensor, ...]) -> Verdict:
        return Verdict(more=dict(zip(FIGURES, result[0].tolist(), strict=True)))


def _make(model: str, case: Case, pool: Pool) -> list[Args]:
    if pool.device.type != "cuda":
        raise NotHere("kernels are compiled on a GPU")
    return [{"model": model, "sizes": SIZES, "batch": case.dims["B"], "length": case.dims["T"]}]


def _prompt(model: str, dims: dict[str, int], dtype: torch.dtype) -> Cost:
    """Of the prompts alone. Neither bytes nor operations decide it."""
    whole = cost(replace(MODELS[model], **SIZES), True, dims, dtype)
    return Cost(whole.bytes("fwd"), 0, whole.flops("fwd"), 0)


_CASES = (Case({"B": 8, "T": 512}, torch.bfloat16, data="random"),)


def _series(model: str) -> Series:
    return Series(
        op=None, name=f"{model}-first-use", cases=_CASES, core=_CASES, small=_CASES,
        make=partial(_make, model), call=partial(call, PROCESSES), cost=partial(_prompt, model),
        judge=Figures, declared_only=True, about=f"the first tokens of {model} in a fresh process",
        rivals={"first use": Rival("first use", partial(call, 0), directions=None, jit=False)},
        directions=("fwd",), needs=("attention", "det_linear", "rms_norm", "rope", "swiglu"), step=True,
        imports=("transformers",), runs=2, copy=False,
    )  # fmt: skip


SERIES: Sequence[Series] = tuple(map(_series, MODELS))


def _goals(name: str) -> tuple[Goal, ...]:
    def mine(cell: Cell) -> bool:
        return cell.op == name

    return (
        Goal(f"{name}, seconds of waiting", mine, most=MOST, against="first use", figure="wait_s"),
        Goal(f"{name}, kernels compiled after a warmup", mine, most=0, against=limit(1, "kernel"),
             figure="compiled"),
    )  # fmt: skip


GOALS = tuple(goal for series in SERIES for goal in _goals(series.name))
