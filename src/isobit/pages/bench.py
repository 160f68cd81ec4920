"""What a page says of a benchmark: times and memory beside rivals, goals, and the roofline."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from isobit.bench.charts import chart
from isobit.bench.report import format_summary
from isobit.pages import svg

#: Rivals that take longer than this many times ours have a bar that is cut off there.
CUT = 8


def section(report: dict[str, Any]) -> dict[str, Any]:
    rows = report["rows"]
    ops = dict.fromkeys(row["op"] for row in rows)
    lines = format_summary(report.get("summary", []))
    return {
        "title": ", ".join(ops) or "nothing was timed",
        "goals": [{"met": line.startswith("met"), "text": line} for line in lines],
        "notes": report["notes"],
        "cases": _cases(rows),
        "roofline": _roofline(report),
        "shares": chart(report) if report.get("against") else "",
    }


def _cases(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One block a case and direction, ours first, the others by their times."""
    found = []
    for (op, case, direction), group in groupby(rows, key=lambda r: (r["op"], r["case"], r["direction"])):
        mine = sorted(group, key=lambda r: (not r["impl"].startswith("isobit"), r["ms"]))
        ours = min((row["ms"] for row in mine if row["impl"].startswith("isobit")), default=mine[0]["ms"])
        longest = min(max(row["ms"] for row in mine), CUT * ours)
        most = max((row["extra_mb"] or 0) for row in mine)
        found.append({
            "name": f"{op} {case} {direction}",
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
    return found


def _percent(part: float | None, whole: float) -> float:
    return 0.0 if not part or whole <= 0 else round(min(100.0, 100 * part / whole), 2)


def _roofline(report: dict[str, Any]) -> str:
    """Points of all rows whose arithmetic and traffic are known; nothing where there are none. A baseline
    that does only a part of the work is counted as if it did all of it, and would fly above the roof."""
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
