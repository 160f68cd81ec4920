"""Times the candidates of a rule on this GPU, and `torch.mm` next to them.

    python -m tile_model.measure chain16 times.json                until all cells are timed
    python -m tile_model.measure chain16 times.json --minutes 9    or until then
    python -m tile_model.measure chain16 times.json --others 128x   only others with this in their name

A cell is a product of M rows with a layer: forward, or dx. In each, the candidates are timed that today's
model expects to be near the fastest, `MOST` of them, others of the problem included. Calls are in a CUDA
graph and go through copies of the weight, so that no weight is in the L2 cache. Graphs are replayed in turn,
so that a clock that changes affects all of them. All candidates of a cell must have the same bits.

The file is written after every layer.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobit.check.stamp import stamp
from isobit.frame.device import sm_count
from isobit.ops.det_gemm.rivals import COLD_SHAPES
from isobit.spec.rotation import copies_for
from tile_model.problem import PROBLEMS, Problem

ROWS = {
    "forward": (
        1, 2, 5, 8, 16, 24, 32, 40, 56, 72, 90, 100, 128, 144, 180, 200, 272, 300, 350, 400, 450, 550, 640,
        800, 900, 1100, 1300, 1500, 1800, 2100, 3000, 4096,
    ),
    "dx": (40, 100, 200, 300, 450, 800, 1300, 1500, 2100, 4096),
}  # fmt: skip
#: (kind, K, N) of products x w: forward w is a transposed weight, for dx it is a weight as it is.
LAYERS = (
    *(("forward", K, N) for K, N in COLD_SHAPES),
    *(("dx", N, K) for K, N in COLD_SHAPES[:6]),
)

#: Candidates in a cell: this many, within this multiple of the least expected time and a microsecond.
MOST, NEAR = 28, 1.5
#: Replays of each graph are timed this often.
ROUNDS = 3

MM = "torch.mm"
ABOUT = (
    "Products x W^T (kind forward) and dy W (dx) in bf16, microseconds per call: candidates that could be "
    "among the fastest, and torch.mm. Calls in a CUDA graph, over copies of the weight, so that no weight is "
    f"in L2; {ROUNDS} rounds in turn, medians. `fastest`: of all that were timed, up to {MOST} in a cell."
)


def with_others(problem: Problem, named: str) -> Problem:
    """With those of the others whose names contain a text."""
    return replace(problem, others={name: each for name, each in problem.others.items() if named in name})


def near(problem: Problem, kind: str, M: int, N: int, K: int, sms: int) -> list[str]:
    """Names of the candidates that are worth timing, by today's model."""
    every = {n: each for n, each in problem.every().items() if problem.allowed(each, kind)}
    (expected,) = problem.model(tuple(every.values()), [M], N, K, sms)
    order = sorted(zip(expected, every, strict=True))
    return [name for us, name in order[:MOST] if us <= NEAR * order[0][0] + 1]


def drawn(kind: str, K: int, N: int, device: torch.device) -> Iterator[Tensor]:
    """Copies of w [K, N], as many as the L2 cache needs."""
    for _ in range(copies_for(K * N * 2, device)):
        shape = (N, K) if kind == "forward" else (K, N)
        weight = torch.randn(shape, dtype=torch.bfloat16, device=device)
        yield weight.t() if kind == "forward" else weight


def calls_of(
    problem: Problem, names: Sequence[str], x: Tensor, copies: Sequence[Tensor]
) -> dict[str, Callable[[], object]]:
    """A function for `torch.mm` and for each candidate that multiplies x by all copies. Raises ValueError if
    two candidates differ in a bit."""
    every = problem.every()
    out, first = (torch.empty(len(x), copies[0].shape[1], dtype=x.dtype, device=x.device) for _ in range(2))
    calls: dict[str, Callable[[], object]] = {MM: lambda: [torch.mm(x, w, out=out) for w in copies]}
    for i, name in enumerate(names):
        result = out if i else first
        problem.call(every[name], result.fill_(torch.nan), x, copies[0])
        if not torch.equal(result.view(torch.int16), first.view(torch.int16)):
            raise ValueError(f"{name} and {names[0]} differ at {tuple(x.shape)} x {tuple(copies[0].shape)}")
        each = partial(problem.call, every[name], out, x)
        calls[name] = lambda each=each: [each(w) for w in copies]  # type: ignore[misc]
    return calls


def microseconds(calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Of each function in a CUDA graph: the median of a few replays, in turn with the others. The replay
    before the one that is timed fills the caches that instructions and descriptors have."""
    graphs = {}
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            graph.replay()
            start.record()
            graph.replay()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / 2)
    return {name: statistics.median(us) for name, us in times.items()}


def cells(
    problem: Problem, layer: tuple[str, int, int], device: torch.device, left_out: Sequence[str], until: float
) -> Iterator[dict[str, Any]]:
    """The cells of a layer, as long as there is time."""
    kind, K, N = layer
    copies = list(drawn(kind, K, N, device))
    for M in ROWS[kind]:
        if time.monotonic() > until:
            return
        names = [n for n in near(problem, kind, M, N, K, sm_count(device)) if n not in left_out]
        x = torch.randn(M, K, dtype=torch.bfloat16, device=device)
        timed = microseconds(calls_of(problem, names, x, copies))
        us = {name: round(each / len(copies), 3) for name, each in timed.items()}
        baseline = us.pop(MM)
        yield {"kind": kind, "M": M, "K": K, "N": N, MM: baseline, "fastest": min(us.values()), "us": us}


def first_calls(name: str, others: str, part: int, parts: int) -> list[str]:
    """Compile and call some of the candidates, in a process of its own, and return those that fail."""
    problem, failed = with_others(PROBLEMS[name](), others), []
    x, w, out = (torch.zeros(512, 512, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    for each, candidate in list(problem.every().items())[part::parts]:
        try:
            problem.call(candidate, out, x, w)
            problem.call(candidate, out, x, w.t())
            torch.cuda.synchronize()
        except Exception as error:
            # Of Triton, ptxas or the driver; after an illegal access, of all that follow.
            print(f"{each}: {type(error).__name__}: {error}", file=sys.stderr)
            failed.append(each)
    return failed


def compiled(name: str, others: str) -> list[str]:
    """Compile all candidates in several processes. Returns those that fail, which are not timed."""
    parts = os.cpu_count() or 1
    with multiprocessing.get_context("spawn").Pool(parts) as pool:
        failed = pool.starmap(first_calls, [(name, others, part, parts) for part in range(parts)])
    return [each for some in failed for each in some]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tile_model.measure", description="Time tiles.")
    parser.add_argument("problem", choices=PROBLEMS, help="the class whose rule chooses")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this time; default 60")
    parser.add_argument("--others", default="", help="time only others with this in their name; default all")
    options = parser.parse_args(argv)
    until = time.monotonic() + 60 * options.minutes
    problem, device = with_others(PROBLEMS[options.problem](), options.others), torch.device("cuda")
    left_out = compiled(options.problem, options.others)
    origin = {key: value for key, value in stamp(device).items() if key not in ("driver", "python")}
    report = {"about": ABOUT, "class": options.problem, "sms": sm_count(device), **origin, "cells": []}
    for layer in LAYERS:
        report["cells"] += cells(problem, layer, device, left_out, until)
        options.out.write_text(json.dumps(report))
        print(f"{layer}: {len(report['cells'])} cells", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
