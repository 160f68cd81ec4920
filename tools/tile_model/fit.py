"""Fits the constants of a time model to times that `tile_model.measure` has written.

    python -m tile_model.fit times.json
    python -m tile_model.fit times.json --golden tests/golden/tiles_h200.json   and keep the times for tests

Prints how good today's constants are, then better ones, to be copied by hand. The search starts at today's
constants, changes a few of them at random and keeps what is better. Better is a smaller `badness`: errors of
candidates that are near the fastest, and how much longer the choices take than the fastest candidate.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tile_model.problem import PROBLEMS, Problem

#: Errors count for candidates within this multiple of the fastest: no others can be chosen.
NEAR = 1.4
#: How much a choice counts that is slower than the fastest, relative to an error of the same size.
CHOICE = 1.2


@dataclass(frozen=True)
class Times:
    """Measured microseconds: a row for each cell, a column for each candidate of the rule, infinite where a
    candidate was not timed. `fastest` is of all that were timed, others included."""

    cells: Sequence[Mapping[str, Any]]
    sms: int
    us: np.ndarray
    fastest: np.ndarray

    @classmethod
    def of(cls, report: Mapping[str, Any], problem: Problem) -> "Times":
        """Without cells in which none of the rule's candidates was timed."""
        cells = [cell for cell in report["cells"] if cell["us"].keys() & problem.chosen.keys()]
        us = np.array([[cell["us"].get(name, np.inf) for name in problem.chosen] for cell in cells])
        return cls(cells, report["sms"], us, np.array([cell["fastest"] for cell in cells]))

    def modelled(self, problem: Problem, constants: Mapping[str, float]) -> np.ndarray:
        """Expected times, in the same order; one call of the model for each layer."""
        layers: dict[tuple[int, int], list[int]] = {}
        for i, cell in enumerate(self.cells):
            layers.setdefault((cell["N"], cell["K"]), []).append(i)
        candidates, expected = tuple(problem.chosen.values()), np.empty_like(self.us)
        with problem.having(constants):
            for (N, K), rows in layers.items():
                M = [self.cells[i]["M"] for i in rows]
                expected[rows] = problem.model(candidates, M, N, K, self.sms)
        return expected

    def errors(self, expected: np.ndarray) -> np.ndarray:
        """Logarithms of expected over measured times, of candidates near the fastest."""
        near = self.us < NEAR * self.us.min(axis=1, keepdims=True)
        return np.log(expected[near] / self.us[near])

    def choices(self, expected: np.ndarray) -> np.ndarray:
        """For each cell the measured time of what the model chooses, among what was timed."""
        choice = np.where(np.isfinite(self.us), expected, np.inf).argmin(axis=1)
        return self.us[np.arange(len(self.us)), choice]

    def badness(self, expected: np.ndarray) -> float:
        """A power of 1.5, between that of a mean and of a variance: outliers count, and do not decide."""
        later = np.log(self.choices(expected) / self.us.min(axis=1))
        return float(np.mean(np.abs(self.errors(expected)) ** 1.5) + CHOICE * np.mean(later))

    def quality(self, expected: np.ndarray) -> dict[str, float]:
        """What the docstring of a time model says of its constants."""
        errors, later = self.errors(expected), self.choices(expected) / self.fastest
        return {
            "rms error": float(np.sqrt(np.mean(errors**2))),
            "choice / fastest, geometric mean": float(np.exp(np.mean(np.log(later)))),
            "choice / fastest, 95th percentile": float(np.quantile(later, 0.95)),
            "choice / fastest, largest": float(later.max()),
        }


def fit(
    times: Times, problem: Problem, steps: int, seed: int = 0, start: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Better constants after this many steps of a random search, which become smaller from 12 % to 2 %."""
    rng = np.random.default_rng(seed)
    best = dict(start or problem.today())
    least = times.badness(times.modelled(problem, best))
    for step in range(steps):
        size = 0.12 * 0.167 ** (step / steps)
        factors = np.exp(size * rng.normal(size=len(best)) * (rng.random(len(best)) < 0.35))
        tried = {name: value * float(f) for (name, value), f in zip(best.items(), factors, strict=True)}
        badness = times.badness(times.modelled(problem, tried))
        if badness < least:
            best, least = tried, badness
    return best


def golden(report: Mapping[str, Any], problem: Problem) -> str:
    """The report with the candidates of the rule only, a cell per line."""
    head = {key: value for key, value in report.items() if key != "cells"}
    cells = (
        cell | {"us": {name: us for name, us in cell["us"].items() if name in problem.chosen}}
        for cell in report["cells"]
    )
    lines = ",\n".join(json.dumps(cell) for cell in cells)
    return f'{json.dumps(head)[:-1]}, "cells": [\n{lines}\n]}}\n'


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tile_model.fit", description="Fit a time model.")
    parser.add_argument("times", type=Path, help="a file of tile_model.measure")
    parser.add_argument("--steps", type=int, default=4000, help="of the search; default 4000")
    parser.add_argument("--golden", type=Path, help="write the times of the rule's candidates to this file")
    options = parser.parse_args(argv)
    report = json.loads(options.times.read_text())
    problem = PROBLEMS[report["class"]]()
    times = Times.of(report, problem)
    found = fit(times, problem, options.steps)
    for title, constants in (("today", problem.today()), ("fitted", found)):
        expected = times.modelled(problem, constants)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in times.quality(expected).items())
        print(f"{title}, {len(times.cells)} cells: {figures}")
    for name, value in found.items():
        print(f"{name} = {value:.4g}")
    if options.golden:
        options.golden.write_text(golden(report, problem))
    return 0


if __name__ == "__main__":
    sys.exit(main())
