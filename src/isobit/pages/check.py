"""What a page says of a check: laws that hold, errors beside their bounds, bits that were compared."""

import re
from collections import Counter
from typing import Any

from isobit.check.report import verdict
from isobit.check.worst import worst_first

#: Laws that compare bits.
BITS = ("repeatable", "written", "invariant", "agree")

COUNTS = (("ok", "ok"), ("fail", "failed"), ("unsupported", "unsupported"))

#: Errors that are shown at once; the others are folded.
SHOWN = 20


def section(report: dict[str, Any]) -> dict[str, Any]:
    cases = [case for one in report["candidates"] for case in one["cases"]]
    errors = worst_first(cases)
    counts = ", ".join(f"{report[key]} {name}" for key, name in COUNTS)
    return {
        "title": ", ".join(dict.fromkeys(one["op"] for one in report["candidates"])) or "nothing ran",
        "passed": report["passed"],
        "nothing_ran": report.get("nothing_ran"),
        "verdict": f"{counts}: {verdict(report)}",
        "matrix": _matrix(report),
        "failures": [case for case in cases if case["status"] == "FAIL"],
        "errors": errors[:SHOWN],
        "more_errors": errors[SHOWN:],
        "bits": _bits(cases),
        "unsupported": _unsupported(cases),
        "observations": report.get("observations", []),
    }


def _matrix(report: dict[str, Any]) -> dict[str, Any]:
    """op and backend down, laws across."""
    laws = list(dict.fromkeys(case["law"] for one in report["candidates"] for case in one["cases"]))
    rows = []
    for one in report["candidates"]:
        cells = []
        for law in laws:
            count = Counter(case["status"] for case in one["cases"] if case["law"] == law)
            why = {case["reason"] for case in one["cases"] if case["law"] == law and case["reason"]}
            cells.append({"text": _count(count), "state": _state(count), "why": "; ".join(sorted(why))})
        rows.append(
            {"op": one["op"], "backend": one["candidate"], "numerics": one["numerics"], "cells": cells}
        )
    return {"laws": laws, "rows": rows}


def _count(count: Counter[str]) -> str:
    if count["FAIL"]:
        return f"{count['FAIL']} FAIL of {count.total()}"
    return f"{count['ok']} ok" if count["ok"] else "-"


def _state(count: Counter[str]) -> str:
    return "fail" if count["FAIL"] else "ok" if count["ok"] else "none"


def _bits(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each op, backend, law and kind of change: how often bits were compared, and how often they
    differed. Numbers in what a comparison says of itself are sizes, and do not make another kind."""
    kinds: dict[tuple[str, ...], list[bool]] = {}
    for case in cases:
        if case["law"] in BITS:
            for output in case["outputs"]:
                what = re.sub(r"\d[\d,]*", "n", output["message"]) or output["output"]
                key = (case["op"], case["backend"], case["law"], what)
                kinds.setdefault(key, []).append(bool(output["passed"]))
    names = ("op", "backend", "law", "what")
    return [
        {**dict(zip(names, key, strict=True)), "compared": len(same), "differ": same.count(False)}
        for key, same in sorted(kinds.items(), key=lambda item: all(item[1]))
    ]


def _unsupported(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each reason."""
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for case in cases:
        if case["status"] == "UNSUPPORTED":
            found.setdefault((case["op"], case["backend"], case["reason"]), {})[case["law"]] = None
    return [
        {"op": op, "backend": backend, "reason": reason, "laws": ", ".join(laws)}
        for (op, backend, reason), laws in sorted(found.items())
    ]
