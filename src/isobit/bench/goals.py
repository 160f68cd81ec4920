"""Speed goals over many cells, and the report on each.

A cell is one case in one direction. Its figure is isobit's speed relative to a baseline that was measured in
the same minute. Goals use the rows of a report only, so a summary can be made again from its file.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

#: Replaces a figure of 0, such as no memory at all, which has no ratio.
_LEAST = 1e-6

Row = dict[str, Any]
#: Rows of one case and direction by implementation.
Group = Mapping[str, Row]
#: The name of an implementation, or sizes -> its name.
Impl = str | Callable[[dict[str, int]], str]


@dataclass(frozen=True)
class Base:
    """A baseline: its name, and its figure among the rows of one case and direction; None if there is
    none."""

    name: str
    figure: Callable[[Group], float | None]


def impl_as_base(name: str, figure: str = "ms") -> Base:
    """One implementation of the same case and direction."""
    return Base(name, lambda group: group.get(name, {}).get(figure))


def limit(value: float, unit: str) -> Base:
    """A fixed number."""
    return Base(f"{value:g} {unit}", lambda group: value)


def floors(times: float, and_us: float = 0) -> Base:
    """`times` the minimum time for the bytes and operations, plus some microseconds."""

    def figure(group: Group) -> float | None:
        row = group.get("isobit")
        return None if row is None else times * row["floor_ms"] + 1e-3 * and_us

    return Base(f"{times:g} floors{_plus(and_us)}", figure)


def prediction() -> Base:
    """The time that the model expects for the chosen tile."""
    return Base("predicted_ms", lambda group: group.get("isobit", {}).get("predicted_ms"))


def longer_of_floor_and(name: str, times: float, and_us: float = 0) -> Base:
    """`times` the time of one implementation, or the minimum time for the bytes and operations if that is
    longer, plus some microseconds."""

    def figure(group: Group) -> float | None:
        row = group.get(name)
        return None if row is None else times * max(row["ms"], row["floor_ms"]) + 1e-3 * and_us

    return Base(f"{times:g} x max({name}, floor){_plus(and_us)}", figure)


def _plus(us: float) -> str:
    return f" + {us:g} us" if us else ""


@dataclass(frozen=True)
class Cell:
    """isobit and its baseline in one case and direction."""

    op: str
    case: str
    direction: str
    sizes: dict[str, int]
    share: float  # of the baseline's speed
    other_bits: bool  # the baseline has other bits
    others: Mapping[str, float] = field(default_factory=dict)  # such shares of all implementations timed here


@dataclass(frozen=True)
class Goal:
    """Cells that are judged together: their geometric mean and their slowest must reach these fractions of
    the baseline's speed. `most` is the limit for the slowest as a multiple of the baseline's time; 0 for a
    figure that must be 0.

    `against` is an implementation or a `Base`; None is the series' own baseline. `figure` is the key of the
    row that is compared, and `impl` the implementation, or a function of the sizes that names it, for a
    choice that depends on the shape.
    """

    what: str
    chooses: Callable[[Cell], bool]
    mean: float | None = None
    least: float | None = None
    most: float | None = None
    against: str | Base | None = None
    figure: str = "ms"
    impl: Impl = "isobit"


def cells(rows: Sequence[Row], against: str | Base, impl: Impl = "isobit", figure: str = "ms") -> list[Cell]:
    """Every case and direction in which both were timed on a GPU, in order."""
    base = impl_as_base(against, figure) if isinstance(against, str) else against
    groups: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in (row for row in rows if row["method"] != "wall"):
        groups.setdefault((row["op"], row["case"], row["direction"]), {})[row["impl"]] = row
    result = []
    for (op, case, direction), group in groups.items():
        sizes, theirs = sizes_of(case), base.figure(group)
        if theirs is None:
            continue
        shares = {
            name: theirs / max(row[figure], _LEAST)
            for name, row in group.items()
            if row.get(figure) is not None
        }
        share = shares.get(impl if isinstance(impl, str) else impl(sizes))
        if share is not None:
            equal = group.get(base.name, {}).get("equal_bits")
            other_bits = equal is not None and equal < 1
            result.append(Cell(op, case, direction, sizes, share, other_bits, shares))
    return result


def sizes_of(case: str) -> dict[str, int]:
    """`M=1 K=4096 N=4096 bf16` as sizes by name. They end at the dtype: options come after it."""
    pairs = (part.split("=") for part in takewhile(lambda part: "=" in part, case.split()))
    return {name: int(value) for name, value in pairs}


def summary(rows: Sequence[Row], against: str | None, goals: Sequence[Goal]) -> list[dict[str, Any]]:
    """One entry per goal: mean, slowest cell, and whether both are met. A goal without cells, because its
    rival was not timed, has an entry too, so that nobody overlooks it: `cells` is 0 and `met` None. Goals
    are for GPUs: if nothing was timed on one, there are no entries."""
    if all(row["method"] == "wall" for row in rows):
        return []
    entries = []
    for goal in goals:
        base = goal.against or against
        assert base is not None, goal.what
        chosen = [cell for cell in cells(rows, base, goal.impl, goal.figure) if goal.chooses(cell)]
        entries.append(
            {
                "what": goal.what,
                "against": base if isinstance(base, str) else base.name,
                "figure": goal.figure,
                "cells": len(chosen),
                **_result(goal, chosen),
            }
        )
    return entries


def _result(goal: Goal, chosen: Sequence[Cell]) -> dict[str, Any]:
    goals = {"goal_geomean": goal.mean, "goal_least": goal.least, "goal_most": goal.most}
    if not chosen:
        return {"geomean": None, "least": None, "least_at": None, **goals, "met": None}
    mean = math.exp(sum(math.log(cell.share) for cell in chosen) / len(chosen))
    slowest = min(chosen, key=lambda cell: cell.share)
    met = (goal.mean is None or mean >= goal.mean) and (goal.least is None or slowest.share >= goal.least)
    return {
        "geomean": round(mean, 4),
        "least": round(slowest.share, 4),
        "least_at": f"{slowest.op} {slowest.case}",
        **goals,
        "met": met and (goal.most is None or 1 / slowest.share <= max(goal.most, _LEAST)),
    }


def tally(entries: Sequence[dict[str, Any]], noun: str = "") -> str:
    """`3 of 4{noun}, 1 not measured` of a summary; empty for no entries."""
    met = [entry["met"] for entry in entries if entry["met"] is not None]
    unmeasured = f"{len(entries) - len(met)} not measured" if len(met) < len(entries) else ""
    counted = f"{sum(met)} of {len(met)}{noun}" if met else ""
    return ", ".join(filter(None, (counted, unmeasured)))


def why_unmeasured(entry: dict[str, Any], notes: Sequence[str], rows: Sequence[Row] = ()) -> str:
    """`not measured`, with what the notes of the report say of the rival. If it has rows, they are about
    other calls than those of the goal, of which the run had none."""
    start = f"{entry['against']}: "
    timed = any(row["impl"] == entry["against"] for row in rows)
    reasons = "; ".join(note.removeprefix(start) for note in notes if note.startswith(start) and not timed)
    return f"not measured: {reasons}" if reasons else "not measured"
