"""How fast is fast enough: goals over many cells, and what a report says about each.

A cell is one case in one direction; its figure is isobit's speed as a share of the baseline's, measured in
the same minute. Goals look at the rows of a report only, so a summary can be made again from its file.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """isobit and the baseline in one case and direction."""

    op: str
    case: str
    sizes: dict[str, int]
    share: float  # of the baseline's speed
    other_bits: bool  # the baseline's bits are not ours


@dataclass(frozen=True)
class Goal:
    """Cells that are looked at together: their geometric mean and their slowest must reach these shares."""

    what: str
    chooses: Callable[[Cell], bool]
    mean: float | None = None
    least: float | None = None


def cells(rows: Sequence[Row], against: str) -> list[Cell]:
    """Every case and direction in which both isobit and the baseline were timed on a GPU, in order."""
    groups: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in (row for row in rows if row["method"] != "wall"):
        groups.setdefault((row["op"], row["case"], row["direction"]), {})[row["impl"]] = row
    found = []
    for (op, case, _), group in groups.items():
        if "isobit" in group and against in group:
            ours, theirs = group["isobit"], group[against]
            equal = theirs.get("equal_bits")
            share = theirs["ms"] / ours["ms"]
            found.append(Cell(op, case, sizes_of(case), share, equal is not None and equal < 1))
    return found


def sizes_of(case: str) -> dict[str, int]:
    """`M=1 K=4096 N=4096 bf16` as sizes by name. They end where the dtype stands: options come after it."""
    pairs = (part.split("=") for part in takewhile(lambda part: "=" in part, case.split()))
    return {name: int(value) for name, value in pairs}


def summary(rows: Sequence[Row], against: str, goals: Sequence[Goal]) -> list[dict[str, Any]]:
    """One entry a goal that has cells: mean, slowest cell, and whether both are what they should be."""
    found = []
    for goal in goals:
        chosen = [cell for cell in cells(rows, against) if goal.chooses(cell)]
        if not chosen:
            continue
        mean = math.exp(sum(math.log(cell.share) for cell in chosen) / len(chosen))
        slowest = min(chosen, key=lambda cell: cell.share)
        met = (goal.mean is None or mean >= goal.mean) and (goal.least is None or slowest.share >= goal.least)
        found.append(
            {
                "what": goal.what,
                "against": against,
                "cells": len(chosen),
                "geomean": round(mean, 4),
                "least": round(slowest.share, 4),
                "least_at": f"{slowest.op} {slowest.case}",
                "goal_geomean": goal.mean,
                "goal_least": goal.least,
                "met": met,
            }
        )
    return found
