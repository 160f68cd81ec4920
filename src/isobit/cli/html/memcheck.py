"""The memcheck section of a page: what compute-sanitizer found, op by op and backend by backend."""

from typing import Any

#: The run that must find an error is not of an op.
CONTROL = "--"


def section(report: dict[str, Any]) -> dict[str, Any]:
    mine = runs(report)
    failed = sum(not run["passed"] for run in report["runs"])
    return {
        "title": ", ".join(dict.fromkeys(run["op"] for run in mine)) or "nothing",
        "state": "ok" if report["passed"] else "fail",
        "verdict": f"{failed} of {len(report['runs'])} runs FAIL" if failed else "no wrong access",
        "tool": report["tool"],
        "controls": [run for run in report["runs"] if run["op"].startswith(CONTROL)],
        "runs": sorted(mine, key=lambda run: run["passed"]),
        "command": report.get("command", _command(report)),
    }


def runs(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Without the control."""
    return [run for run in report["runs"] if not run["op"].startswith(CONTROL)]


def _command(report: dict[str, Any]) -> str:
    ops = dict.fromkeys(run["op"] for run in runs(report))
    return " ".join(["isobit memcheck", *(f"--op {op}" for op in ops)])
