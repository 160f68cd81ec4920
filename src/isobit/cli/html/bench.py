"""The benchmark section of a page: times and memory next to rivals, goals, and the rooflines."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from isobit.bench.goals import tally
from isobit.bench.report import CPU_WARNING, format_summary, on_a_cpu
from isobit.cli.html import svg
from isobit.cli.html.share_chart import inline_charts

#: The speed ratio at which the bar next to a case is full.
SCALE = 4

#: Goals by whether they are met, in the order in which they are shown.
_STATES = {False: "missed", None: "unmeasured", True: "met"}

#: Bars of rivals that take more than this multiple of our time are cut off there.
CUT = 8


def section(report: dict[str, Any]) -> dict[str, Any]:
    rows = report["rows"]
    ops = dict.fromkeys(row["op"] for row in rows)
    summary = report.get("summary", [])
    lines = format_summary(summary, report["notes"], rows)
    goals = [
        {"state": _STATES[entry["met"]], "text": line.partition(" ")[2]}
        for entry, line in zip(summary, lines, strict=True)
    ]
    return {
        "title": ", ".join(ops) or report.get("command", "").removeprefix("isobit bench ") or "nothing",
        **_verdict(report, summary),
        "goals": sorted(goals, key=lambda goal: list(_STATES.values()).index(goal["state"])),
        "notes": report["notes"],
        "warning": CPU_WARNING if on_a_cpu(rows) else "",
        # A CPU has neither of the two; a column of dashes says nothing.
        "has_host": any(row["host_us"] is not None for row in rows),
        "has_memory": any(row["extra_mb"] is not None for row in rows),
        "groups": _groups(_cases(rows)),
        "roofline": _roofline(report),
        "bandwidth": _bandwidth(report),
        "shares": inline_charts(report)
        if report.get("against") and any(entry["cells"] for entry in summary)
        else [],
    }


def _verdict(report: dict[str, Any], summary: Sequence[dict[str, Any]]) -> dict[str, str]:
    if not report["rows"]:
        return {"verdict": "nothing was timed", "state": "fail"}
    if not report["stamp"].get("checked", True):
        return {"verdict": "timed without a check", "state": "warn"}
    if not summary:
        return {"verdict": f"{len(report['rows'])} times", "state": ""}
    state = "ok" if all(entry["met"] for entry in summary) else "warn"
    return {"verdict": tally(summary, " goals met"), "state": state}


def _groups(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cases by kind of call and direction, the worst for us first; the first group is open."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        groups.setdefault(case["kind"], []).append(case)
    for mine in groups.values():
        mine.sort(key=lambda c: (c["times"] is None, c["times"] or 0))
    for first in list(groups.values())[:1]:
        first[0]["open"] = True
    return [{"name": name, "cases": mine} for name, mine in groups.items()]


def _against(ours: float, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fastest rival of a case: its time as a multiple of ours, and a bar from the middle, which is 1, to
    the left if it is faster and to the right if we are."""
    rivals = [row for row in rows if not row["impl"].startswith(("isobit", "copy"))]
    if not rivals:
        return {"times": None, "rival": None, "bar": ""}
    best = min(rivals, key=lambda row: row["ms"])
    times = best["ms"] / ours
    share = min(abs(math.log(times)) / math.log(SCALE), 1.0) * 50
    side = "left" if times >= 1 else "right"
    return {"times": times, "rival": best["impl"], "bar": f"{side}:50%;width:{max(share, 0.5):.1f}%"}


def _cases(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One block per case and direction, ours first, the others by time."""
    cases = []
    for (op, case, direction), group in groupby(rows, key=lambda r: (r["op"], r["case"], r["direction"])):
        mine = sorted(group, key=lambda r: (not r["impl"].startswith("isobit"), r["ms"]))
        ours = min((row["ms"] for row in mine if row["impl"].startswith("isobit")), default=mine[0]["ms"])
        longest = min(max(row["ms"] for row in mine), CUT * ours)
        most = max((row["extra_mb"] or 0) for row in mine)
        cases.append({
            "name": f"{op} {case} {direction}", "kind": f"{op} {direction}", "case": case, "ms": ours,
            "open": False, **_against(ours, mine),
            "floor": mine[0]["floor_ms"],
            "floor_at": _percent(mine[0]["floor_ms"], longest),
            "rows": [
                {
                    "impl": row["impl"], "ours": row["impl"].startswith("isobit"), "ms": row["ms"],
                    "time": _percent(row["ms"], longest), "cut": row["ms"] > longest,
                    "spread": f"{row['ms_q25']:.4g} to {row['ms_q75']:.4g} ms, half of the samples",
                    "times": row["ms"] / ours, "extra_mb": row["extra_mb"],
                    "memory": _percent(row["extra_mb"], most), "host_us": row["host_us"],
                    "host": _percent((row["host_us"] or 0) / 1000, longest),
                }
                for row in mine
            ],
        })  # fmt: skip
    return cases


def _percent(part: float | None, whole: float) -> float:
    return 0.0 if not part or whole <= 0 else round(min(100.0, 100 * part / whole), 2)


def _roofline(report: dict[str, Any]) -> str:
    """Points of all rows whose operations and bytes are known; empty if there are none. A baseline that does
    only a part of the work would be counted as if it did all of it, and would be above the roof."""
    stamp = report["stamp"]
    roof = stamp.get("best_tflops", 0) * 1.1
    points = [
        (row["tflops"] / row["tbps"], row["tflops"], row["impl"].split(":")[0],
         f"{row['impl']} {row['case']}")
        for row in report["rows"] if row.get("tflops") and row.get("tbps") and row["tflops"] <= roof
    ]  # fmt: skip
    if not points:
        return ""
    return svg.roofline(points, stamp["copy_tbps"], stamp["best_tflops"])


def _bandwidth(report: dict[str, Any]) -> str:
    """Points of all rows of cases without counted operations, in which the bytes decide; empty if there are
    none. A copy next to a product is not one of them."""

    def case_of(row: dict[str, Any]) -> tuple[str, ...]:
        return row["op"], row["case"], row["direction"]

    counted = {case_of(row) for row in report["rows"] if row.get("tflops")}
    points = [
        (row["tbps"] * row["ms"] * 1e3, row["tbps"], row["impl"].split(":")[0],
         f"{row['impl']} {row['case']} {row['direction']}")
        for row in report["rows"] if row.get("tbps") and case_of(row) not in counted
    ]  # fmt: skip
    return svg.bandwidth(points, report["stamp"]["copy_tbps"]) if points else ""
