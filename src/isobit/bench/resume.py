"""Resumes an interrupted benchmark: the cases in its file are kept, the others are timed."""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from isobit.bench.report import Report, Row
from isobit.frame.contract import ContractError

#: Prefix of the note of an interrupted run.
UNFINISHED = "unfinished: "

#: What must be equal for two runs to be in one file.
_SAME = ("gpu", "driver", "torch", "triton", "kernels", "checked")


def begun(path: Path, stamp: dict[str, Any]) -> Report | None:
    """The report in a file, if there is one, without its note that it is unfinished. An error if it is from
    other kernels or another machine than this stamp: rows must not mix."""
    if not path.is_file():
        return None
    try:
        report: Report = json.loads(path.read_text())
        differ = [key for key in _SAME if report["stamp"].get(key) != stamp.get(key)]
        notes = [note for note in report["notes"] if not note.startswith(UNFINISHED)]
        report |= {"notes": notes, "rows": list(report["rows"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ContractError(f"{path}: not a file of isobit bench ({type(error).__name__})") from None
    if differ:
        what = ", ".join(differ)
        raise ContractError(
            f"--resume: {path} is from a different run (different {what}): time all cases without --resume"
        )
    return report


def lost(path: Path, cases: Iterable[tuple[str, str]]) -> str | None:
    """What a run of these cases, which replaces a file, loses of it: in a sentence; None if nothing."""
    try:
        rows: list[Row] = json.loads(path.read_text())["rows"]
        there = dict.fromkeys((row["op"], row["case"]) for row in rows)
    except (OSError, ValueError, KeyError, TypeError):  # nothing there that could be lost
        return None
    left = len(there.keys() - set(cases))
    if not left:
        return None
    return (
        f"{path} has {left} cases that this run does not time: it replaces the file without them. --resume "
        "keeps them, if they are of the same kernels"
    )


def untimed(
    rows: Iterable[Row],
    kind: str,
    case: str,
    directions: Sequence[str],
    expected: Callable[[str], Collection[str]] = lambda direction: (),
) -> list[str]:
    """The directions of a case that lack rows: all of them, or those of an implementation that is expected to
    have some."""
    mine = [row for row in rows if (row["op"], row["case"]) == (kind, case)]
    known = {one: {row["impl"] for row in mine if row["direction"] == one} for one in directions}
    return [one for one, names in known.items() if not names or not names.issuperset(expected(one))]


def with_new(rows: Iterable[Row], new: Sequence[Row]) -> list[Row]:
    """Rows of a file and new ones, which replace those of the same case and implementation: an implementation
    that is named later is timed again next to the others of its direction."""
    key = ("op", "case", "direction", "impl")
    replaced = {tuple(row[name] for name in key) for row in new}
    return [row for row in rows if tuple(row[name] for name in key) not in replaced] + list(new)


def in_order(rows: Sequence[Row], series: Sequence[str], cases: Sequence[tuple[str, str]]) -> list[Row]:
    """Rows in the order of these series and cases, whenever they were timed; other cases first."""
    first = {name: i for i, name in enumerate(series)}
    place = {case: i for i, case in enumerate(cases)}
    return sorted(rows, key=lambda row: (first.get(row["op"], -1), place.get((row["op"], row["case"]), -1)))
