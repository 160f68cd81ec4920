"""Saved reports: read, summarised in a line, and compared with an older one."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit.bench.goals import tally
from isobit.cli.html.memcheck import runs
from isobit.drift.report import verdict
from isobit.frame.contract import ContractError

#: What a report holds, and the kind of report that this makes it.
KINDS = {"candidates": "a check", "runs": "a memcheck", "rows": "a benchmark", "axes": "a drift report"}


def kind_of(report: dict[str, Any]) -> str:
    return next(kind for key, kind in KINDS.items() if key in report)


def read_report(path: Path) -> dict[str, Any]:
    """A report of check, memcheck, bench or drift."""
    try:
        report = json.loads(path.read_text())
        known = isinstance(report, dict) and "stamp" in report and any(kind in report for kind in KINDS)
    except (OSError, ValueError) as error:
        raise ContractError(f"{path}: cannot be read ({error})") from None
    if not known:
        raise ContractError(f"{path}: not a report of isobit check, memcheck, bench or drift")
    return dict(report)


def summary_line(report: dict[str, Any]) -> str:
    if "candidates" in report:
        ops = ", ".join(dict.fromkeys(one["op"] for one in report["candidates"]))
        counts = f"{report['ok']} ok, {report['fail']} failed, {report['unsupported']} unsupported"
        partly = f"; {report['interrupted']}" if report.get("interrupted") else ""
        return f"check of {ops or 'nothing'}: {counts}{partly}"
    if "runs" in report:
        mine = runs(report)
        ops = ", ".join(dict.fromkeys(run["op"] for run in mine))
        calls, failed = sum(run["calls"] for run in mine), sum(not run["passed"] for run in report["runs"])
        return f"memcheck of {ops or 'nothing'}: {calls} calls, {failed} of {len(report['runs'])} runs failed"
    if "axes" in report:
        return f"drift of {report.get('model_name', report['model'])}: {verdict(report)}"
    met = tally(report.get("summary", []), " goals met")
    ops = ", ".join(dict.fromkeys(row["op"] for row in report["rows"]))
    return f"bench of {ops}: {len(report['rows'])} rows{', ' if met else ''}{met}"


@dataclass(frozen=True)
class Change:
    """A difference between two reports."""

    what: str
    before: str
    now: str
    worse: bool

    def __str__(self) -> str:
        return f"{'WORSE ' if self.worse else '      '}{self.what}: {self.before} -> {self.now}"


def compare(old: dict[str, Any], new: dict[str, Any], slower: float) -> list[Change]:
    """What changed between two reports of the same kind, what is worse first."""
    kinds = {"older": kind_of(old), "newer": kind_of(new)}
    if kinds["older"] != kinds["newer"]:
        raise ContractError(f"{kinds['newer']} and {kinds['older']} cannot be compared")
    if "rows" in old:
        changes = _times(old, new, slower)
    else:
        changes = _drifts(old, new) if "axes" in old else _verdicts(old, new)
    return sorted(changes, key=lambda change: not change.worse)


def _statuses(report: dict[str, Any]) -> dict[str, str]:
    """The verdict of every cell of a check, or of every op and backend of a memcheck."""
    if "runs" in report:
        return {f"{run['op']} {run['backend']}": "ok" if run["passed"] else "FAIL" for run in runs(report)}
    cases = [case for one in report["candidates"] for case in one["cases"]]
    return {f"{c['op']} {c['backend']} {c['law']} [{c['case']}]": c["status"] for c in cases}


def _verdicts(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Verdicts that changed. What passed and does not run any more is worse, too."""
    before, now = _statuses(old), _statuses(new)
    changes = []
    for name in dict.fromkeys((*before, *now)):
        was, is_now = before.get(name, "not there"), now.get(name, "not there")
        if was != is_now:
            changes.append(Change(name, was, is_now, is_now == "FAIL" or was == "ok"))
    return changes


def _drifts(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Comparisons with another share of tokens that differ; more, or not compared any more, is worse."""
    before, now = (
        {f"{row['axis']}: {row['setting']}": row["metrics"] for row in report["axes"]}
        for report in (old, new)
    )
    changes = []
    for name in dict.fromkeys((*before, *now)):
        was, is_now = before.get(name), now.get(name)
        if _share(was) != _share(is_now):
            worse = is_now is None or (_share(is_now) or 0.0) > (_share(was) or 0.0)
            changes.append(Change(name, _differ(was), _differ(is_now), worse))
    return changes


def _share(metrics: dict[str, Any] | None) -> float | None:
    return None if metrics is None else float(metrics["differ"] / metrics["tokens"])


def _differ(metrics: dict[str, Any] | None) -> str:
    return "not there" if metrics is None else f"{metrics['differ']} of {metrics['tokens']} tokens differ"


def _times(old: dict[str, Any], new: dict[str, Any], slower: float) -> list[Change]:
    """Times and memory of isobit and of a candidate, not of rivals."""
    before, now = (
        {
            f"{row['op']} {row['case']} {row['direction']} {row['impl']}": row
            for row in report["rows"] if row["impl"].startswith(("isobit", "candidate"))
        }
        for report in (old, new)
    )  # fmt: skip
    changes = [Change(name, "timed", "not there", True) for name in before if name not in now]
    for name, row in now.items():
        was = before.get(name)
        if was is None:
            changes.append(Change(name, "not there", f"{row['ms']:.4g} ms", False))
            continue
        times = row["ms"] / was["ms"]
        if times > slower or times < 1 / slower:
            changes.append(
                Change(name, f"{was['ms']:.4g} ms", f"{row['ms']:.4g} ms ({times:.2f}x)", times > slower)
            )
        held, holds = was["extra_mb"] or 0.0, row["extra_mb"] or 0.0
        if abs(holds - held) > max(1.0, 0.05 * held):  # a megabyte is noise of the allocator
            changes.append(Change(name, f"{held:.4g} MB", f"{holds:.4g} MB", holds > held))
    return changes
