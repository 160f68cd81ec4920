"""What has been proven on a GPU, op by op: what a page shows between `<!-- results:proven -->` and its end.

From the result files of one folder: those of `isobit check`, `isobit memcheck` and `isobit bench`.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from isobit.check.stamp import why_stale
from isobit.frame.op import public_ops
from publish.checked import checked
from publish.overview import OLDER

HEAD = ["ops", "laws, on all cases and backends", "compute-sanitizer", "timed"]


def proven(results_dir: Path) -> list[list[str]]:
    """The lines of the table, the head first: one per folder of ops, and another for those of its ops that a
    check of the folder does not have."""
    folders: dict[str, list[str]] = {}
    for name, op in public_ops().items():
        folders.setdefault(op.folder, []).append(name)
    lines = [HEAD]
    for folder, names in sorted(folders.items()):
        there = {candidate["op"] for candidate, _ in checked(results_dir, folder)} or set(names)
        watched, timed = (_read(results_dir / f"{kind}{folder}.json") for kind in ("memcheck_", ""))
        accesses, cases = (
            "-" if report is None else say(report) for report, say in ((watched, _accesses), (timed, _timed))
        )
        lines.append([_listed(n for n in names if n in there), _laws(results_dir, folder), accesses, cases])
        if later := [name for name in names if name not in there]:
            lines.append([_listed(later), "-", "-", "-"])
    return lines


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _read(path: Path) -> dict[str, Any] | None:
    return dict(json.loads(path.read_text())) if path.is_file() else None


def _laws(results_dir: Path, folder: str) -> str:
    checks = checked(results_dir, folder)
    if not checks:
        return "-"
    held, failed = (sum(candidate[status] for candidate, _ in checks) for status in ("ok", "fail"))
    age = OLDER if any(why_stale(stamp) for _, stamp in checks) else ""
    return f"{held} cells held, {failed} failed{age}"


def _accesses(report: dict[str, Any]) -> str:
    """The first run is the control, whose wrong write must be seen."""
    runs = [run for run in report["runs"] if not run["op"].startswith("--")]
    return f"{_sum(runs, 'calls')} calls, {_sum(runs, 'errors')} errors{_age(report)}"


def _sum(runs: Iterable[dict[str, Any]], what: str) -> int:
    return sum(run[what] for run in runs)


def _timed(report: dict[str, Any]) -> str:
    cases = {(row["op"], row["case"]) for row in report["rows"] if row["impl"] == "isobit"}
    return f"{len(cases)} cases{_age(report)}"


def _age(report: dict[str, Any]) -> str:
    return OLDER if why_stale(report["stamp"], report.get("rows", ())) else ""
