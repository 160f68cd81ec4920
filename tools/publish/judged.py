"""What was measured, judged by the goals that are declared today.

A results file has the summary of its run. Goals that were declared since need no run of their own: they read
rows, and those are there. A goal for which no row was measured yet says so on its page. So it is with the
series whose bytes per second are shown.
"""

import json
from functools import cache
from pathlib import Path

from isobit.bench.cases import Subject, subject_of, suite_of
from isobit.bench.goals import summary
from isobit.bench.report import Report
from isobit.bench.suites import suite_names
from isobit.frame.op import public_ops


def judged(path: Path) -> Report:
    """A results file with today's goals in its summary. A file of no op and no suite stays as it is."""
    report: Report = json.loads(path.read_text())
    subject = _subject(path.stem)
    if subject is None:
        return report
    report["bandwidth"] = [one.name for one in subject.series if one.bandwidth]
    if subject.goals:
        against = report.get("against") or next((s.against for s in subject.series if s.against), None)
        report["summary"] = summary(report["rows"], against, subject.goals)
    return report


@cache
def _subject(file: str) -> Subject | None:
    """The op or the suite whose results have this name."""
    ops = {op.folder: op for op in public_ops().values()}
    if file in ops:
        return subject_of(ops[file])
    return suite_of(file) if file in suite_names() else None
