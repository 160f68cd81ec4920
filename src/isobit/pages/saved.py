"""Saved reports: read, summarised in a line, and compared with an older one."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit.contract import ContractError


def read_report(path: Path) -> dict[str, Any]:
    """A report of check or bench."""
    try:
        found = json.loads(path.read_text())
        known = isinstance(found, dict) and "stamp" in found and ("candidates" in found or "rows" in found)
    except (OSError, ValueError) as error:
        raise ContractError(f"{path}: cannot be read ({error})") from None
    if not known:
        raise ContractError(f"{path}: not a report of isobit check or isobit bench")
    return dict(found)


def summary_line(report: dict[str, Any]) -> str:
    if "candidates" in report:
        ops = ", ".join(dict.fromkeys(one["op"] for one in report["candidates"]))
        counts = f"{report['ok']} ok, {report['fail']} failed, {report['unsupported']} unsupported"
        partly = f"; {report['interrupted']}" if report.get("interrupted") else ""
        return f"check of {ops or 'nothing'}: {counts}{partly}"
    met = [entry["met"] for entry in report.get("summary", [])]
    goals = f", {sum(met)} of {len(met)} goals met" if met else ""
    ops = ", ".join(dict.fromkeys(row["op"] for row in report["rows"]))
    return f"bench of {ops}: {len(report['rows'])} rows{goals}"


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
    if ("candidates" in old) != ("candidates" in new):
        raise ContractError("a check and a benchmark cannot be compared")
    found = _laws(old, new) if "candidates" in old else _times(old, new, slower)
    return sorted(found, key=lambda change: not change.worse)


def _laws(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Cells whose verdict changed. One that passed and does not run any more is worse, too."""
    before, now = (
        {
            f"{case['op']} {case['backend']} {case['law']} [{case['case']}]": case["status"]
            for one in report["candidates"] for case in one["cases"]
        }
        for report in (old, new)
    )  # fmt: skip
    changes = []
    for name in dict.fromkeys((*before, *now)):
        was, is_now = before.get(name, "not there"), now.get(name, "not there")
        if was != is_now:
            changes.append(Change(name, was, is_now, is_now == "FAIL" or was == "ok"))
    return changes


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
