"""What has been proven on a GPU, op by op: what a page shows between `<!-- results:proven -->` and its end.

From the result files of one folder: those of `isobit check`, `isobit memcheck` and `isobit bench`.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from isobit.bench.overview import OLDER
from isobit.op import public_ops
from isobit.stamp import why_stale

HEAD = ["ops", "laws, on all cases and backends", "compute-sanitizer", "timed"]


def proven(results_dir: Path) -> list[list[str]]:
    """The lines of the table, the head first: one per folder of ops."""
    folders: dict[str, list[str]] = {}
    for name, op in public_ops().items():
        folders.setdefault(op.folder, []).append(f"`{name}`")
    kinds = (("check_", _laws), ("memcheck_", _accesses), ("", _timed))
    lines = [HEAD]
    for folder, names in sorted(folders.items()):
        found = (_read(results_dir / f"{kind}{folder}.json") for kind, _ in kinds)
        told = ("-" if report is None else say(report) for report, (_, say) in zip(found, kinds, strict=True))
        lines.append([", ".join(names), *told])
    return lines


def _read(path: Path) -> dict[str, Any] | None:
    return dict(json.loads(path.read_text())) if path.is_file() else None


def _laws(report: dict[str, Any]) -> str:
    return f"{report['ok']} cells held, {report['fail']} failed{_age(report)}"


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
    return OLDER if why_stale(report["stamp"]) else ""
