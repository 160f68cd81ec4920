"""The check section of a page: laws that hold, errors with their bounds, bits that were compared."""

import math
import re
from collections import Counter
from typing import Any

from isobit.check.largest_errors import worst_first
from isobit.check.report import memory_beyond, verdict
from isobit.check.torch_state import in_words

#: Laws that compare bits.
BITS = ("repeatable", "written", "invariant", "agree", "parallel")

#: Totals of a report, their names on a page, and their style if they are not 0.
COUNTS = (("ok", "ok", "ok"), ("fail", "failed", "fail"), ("unsupported", "unsupported", ""))

#: Marks the end of what a control changed, in its message.
CHANGED = r" changes? (?:bits|no bit)| changed no bit"

#: How many elements of how many have other bits, in the message of a comparison.
DIFFER = r": (\d+) of (\d+) differ, first at "

#: Number of errors that are shown; the others are folded.
SHOWN = 20


def section(report: dict[str, Any]) -> dict[str, Any]:
    cases = [case for one in report["candidates"] for case in one["cases"]]
    errors = worst_first(cases)
    bits, controls = _bits(cases)
    return {
        "title": ", ".join(dict.fromkeys(one["op"] for one in report["candidates"])) or "nothing ran",
        "state": ("warn" if report.get("unproven") else "ok") if report["passed"] else "fail",
        "nothing_ran": report.get("nothing_ran"),
        "verdict": verdict(report),
        "counts": [(name, report[key], state) for key, name, state in COUNTS],
        "looser": report.get("tolerances", {}).get("looser", []),
        "serves": " ".join(_serves(one) for one in report["candidates"]),
        "memory": memory_beyond(cases),
        "several": len(report["candidates"]) > 1,
        "matrix": _matrix(report),
        "failures": [case for case in cases if case["status"] == "FAIL"],
        "errors": errors[:SHOWN],
        "more_errors": errors[SHOWN:],
        "bits": bits,
        "controls": controls,
        "unsupported": _unsupported(cases),
        "observations": report.get("observations", []),
    }


def _matrix(report: dict[str, Any]) -> dict[str, Any]:
    """A row per op and backend, a column per law."""
    laws = list(dict.fromkeys(case["law"] for one in report["candidates"] for case in one["cases"]))
    rows = []
    for one in report["candidates"]:
        cells = []
        for law in laws:
            count = Counter(case["status"] for case in one["cases"] if case["law"] == law)
            why = {case["reason"] for case in one["cases"] if case["law"] == law and case["reason"]}
            cells.append(
                {"law": law, "text": _count(count), "state": _state(count), "why": "; ".join(sorted(why))}
            )
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


def _bits(cases: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(comparisons, controls): a line for each op, backend, law and kind of change, with the first
    difference. Numbers in the message of a comparison are sizes, and do not make another kind."""
    names = ("op", "backend", "law", "what")
    by_change: dict[tuple[tuple[str, ...], bool], list[dict[str, Any]]] = {}
    for case in (case for case in cases if case["law"] in BITS):
        for output in case["outputs"]:
            control, said = output["output"] == "control", output["message"]
            what = re.split(CHANGED, said)[0] if control else said.partition(": ")[0]
            change = (case["op"], case["backend"], case["law"], _kind(what) or output["output"])
            by_change.setdefault((change, control), []).append(output)
    bits, controls = [], []
    for (key, control), found in by_change.items():
        line: dict[str, Any] = dict(zip(names, key, strict=True))
        failed = sum(not output["passed"] for output in found)
        if control:
            altered = sum(" changes bits" in output["message"] for output in found)
            controls.append(line | {"tried": len(found), "altered": altered, "failed": failed})
        else:
            elements = [_elements(output) for output in found]
            counts = {"elements": sum(all_ for _, all_ in elements), "other": sum(n for n, _ in elements)}
            bits.append(line | {"compared": len(found), "differ": failed, **counts})
    bits.sort(key=lambda line: not line["differ"])
    controls.sort(key=lambda line: not line["failed"])
    return _named_once(bits), _named_once(controls)


def _elements(output: dict[str, Any]) -> tuple[int, int]:
    """(elements with other bits, all elements) of a comparison. Its message says how many differ; if shapes
    do, all elements do."""
    total = math.prod(output["shape"])
    if output["passed"]:
        return 0, total
    said = re.search(DIFFER, output["message"])
    return (int(said[1]), int(said[2])) if said else (total, total)


def _named_once(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Marks whether a line has another op, backend or law than the one above it."""
    above = [None, *lines]
    keys = ("op", "backend", "law")
    return [
        line | {"again": before is not None and all(line[key] == before[key] for key in keys)}
        for line, before in zip(lines, above, strict=False)
    ]


def _kind(what: str) -> str:
    """Without sizes: `3 of 12 rows alone` and `7 of 12 rows alone` are one kind, some rows alone."""
    kind = re.sub(r"^\d+ of \d+ ", "some ", what)
    kind = re.sub(r"\[\d+, \d+\)", "of rows", kind)
    return re.sub(r"\d[\d,]*", "n", kind)


def _serves(one: dict[str, Any]) -> str:
    """What a user's function takes, in words."""
    serves = one.get("serves")
    if serves is None:
        return ""
    if "in_words" in serves:  # any function of rows
        return f"{one['candidate']}: {serves['in_words']}."
    takes, outputs = ", ".join(serves["takes"]), ", ".join(serves["outputs"])
    text = f"{one['candidate']} takes {takes}; it is judged by {outputs}."
    changed = serves.get("import_changed")
    return f"{text} Importing it {in_words(changed)}, set back for the check." if changed else text


def _unsupported(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line for each reason."""
    reasons: dict[tuple[str, str, str], dict[str, None]] = {}
    for case in cases:
        if case["status"] == "UNSUPPORTED":
            reasons.setdefault((case["op"], case["backend"], case["reason"]), {})[case["law"]] = None
    return [
        {"op": op, "backend": backend, "reason": reason, "laws": ", ".join(laws)}
        for (op, backend, reason), laws in sorted(reasons.items())
    ]
