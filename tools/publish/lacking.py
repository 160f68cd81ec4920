"""Which declared cases a benchmark file lacks: a run with `--core` or `--case` writes a file that is fresh,
and holds a part of its series."""

from collections.abc import Mapping
from typing import Any

from isobit.bench.cases import Subject, case_name, subject_of, suite_of
from isobit.bench.suites import suite_names
from isobit.frame.op import public_ops


def subject_named(file: str) -> Subject | None:
    """What a benchmark file of this name is about; None if no op and no suite has it."""
    if file in suite_names():
        return suite_of(file)
    return next((subject_of(op) for op in public_ops().values() if op.folder == file), None)


def lacking(subject: Subject, report: Mapping[str, Any]) -> dict[str, list[str]]:
    """By series, its declared cases with the directions that have no row. What could not be timed on this
    machine is not lacking: the notes of the file have the reason."""
    timed = {tuple(row.get(key) for key in ("op", "case", "direction")) for row in report["rows"]}
    found: dict[str, list[str]] = {}
    for series in subject.series:
        about = [note for note in report.get("notes", ()) if note.startswith(f"{series.name}: ")]
        if about and not any(op == series.name for op, _, _ in timed):
            continue  # a package or a kernel that it needs was not there
        for case in map(case_name, series.cases):
            too_large = any(note.startswith(f"{series.name}: {case} ") for note in about)
            left = [way for way in series.directions if (series.name, case, way) not in timed]
            if left and not too_large:
                found.setdefault(series.name, []).append(f"{case} {' '.join(left)}")
    return found
