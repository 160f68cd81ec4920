"""The report of a check: totals, a table for people, JSON for machines (schema in docs/results.md)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from isobit.backend import NONE
from isobit.check.law import LAWS
from isobit.check.runner import FAIL, OK, UNSUPPORTED, Cell
from isobit.check.worst import worst_first
from isobit.op import OPS
from isobit.stamp import stamp

#: Version of the form of a file. In version 1 a case has no inputs, and a file no command.
SCHEMA = 2


def to_json(
    cells: list[Cell],
    device: torch.device,
    commit: str | None = None,
    observations: Sequence[dict[str, Any]] = (),
    command: str | None = None,
    nothing_ran: str | None = None,
) -> dict[str, Any]:
    """suite -> candidates (op and backend) -> cases (law, inputs) -> outputs. The first two have totals.
    Observations are facts that were seen in the same run and that nobody promises. `command` repeats it.
    `nothing_ran` says why nothing was checked, or nothing of an op that was named; that is no pass."""
    candidates = []
    for op, backend in dict.fromkeys((c.op, c.backend) for c in cells):
        mine = [c for c in cells if (c.op, c.backend) == (op, backend)]
        numerics = next((c.numerics for c in mine if c.numerics != NONE), NONE)
        outputs = [o for c in mine for o in c.outputs]
        candidates.append(
            {
                "op": op,
                "candidate": backend,
                "numerics": numerics,
                **totals(mine),
                "total_outputs": len(outputs),
                "passed_outputs": sum(o["passed"] for o in outputs),
                "cases": [_case(c) for c in mine],
            }
        )
    folders = {OPS[c.op].folder for c in cells}
    head = {"schema": SCHEMA, "suite": "isobit check", "stamp": stamp(device, commit, folders)}
    head |= {"command": command} if command else {}
    seen = {"observations": list(observations)} if observations else {}
    failed = {"passed": False, "nothing_ran": nothing_ran} if nothing_ran else {}
    return {**head, **totals(cells), **failed, **seen, "candidates": candidates}


def verdict(found: dict[str, Any]) -> str:
    """What a report comes to, in words."""
    if found["fail"]:
        return "1 cell FAILS" if found["fail"] == 1 else f"{found['fail']} cells FAIL"
    if found.get("nothing_ran"):
        return str(found["nothing_ran"]).partition(":")[0]
    return "all laws hold" if found["passed"] else "nothing was checked"


def _case(cell: Cell) -> dict[str, Any]:
    """A cell with its inputs beside the rest, and with whatever its comparisons say of themselves."""
    found = asdict(cell)
    inputs = found.pop("inputs")
    return {**found, **inputs}


def totals(cells: list[Cell]) -> dict[str, Any]:
    count = Counter(c.status for c in cells)
    ran = count[OK] + count[FAIL]
    return {
        "total": len(cells),
        "ok": count[OK],
        "fail": count[FAIL],
        "unsupported": count[UNSUPPORTED],
        "pass_rate": count[OK] / ran if ran else 0.0,
        "passed": count[FAIL] == 0 and count[OK] > 0,
    }


def matrix(cells: list[Cell]) -> dict[tuple[str, str, str], str]:
    """(op, backend, law) -> FAIL if a case failed, else ok if one is, else UNSUPPORTED: what tests hold the
    expected matrix against."""
    order = [UNSUPPORTED, OK, FAIL]
    found: dict[tuple[str, str, str], str] = {}
    for c in cells:
        key = (c.op, c.backend, c.law)
        found[key] = max(found.get(key, UNSUPPORTED), c.status, key=order.index)
    return found


def table(cells: list[Cell]) -> str:
    """op and backend down, laws across: `12 ok`, `3 FAIL of 12`, `-` for unsupported."""
    seen = {c.law for c in cells}
    laws = [law for law in LAWS if law in seen]
    rows = [["op", "backend", *laws]]
    for op, backend in dict.fromkeys((c.op, c.backend) for c in cells):
        row = [op, backend]
        for law in laws:
            mine = [c for c in cells if (c.op, c.backend, c.law) == (op, backend, law)]
            fails, oks = sum(c.status == FAIL for c in mine), sum(c.status == OK for c in mine)
            row.append(f"{fails} FAIL of {len(mine)}" if fails else f"{oks} ok" if oks else "-")
        rows.append(row)
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(v.ljust(w) for v, w in zip(r, widths, strict=True)).rstrip() for r in rows)


def worst(cells: list[Cell]) -> list[str]:
    """A line for each op and backend: of all errors that have a bound, the one that is nearest to it."""
    lines = []
    for op, backend in dict.fromkeys((c.op, c.backend) for c in cells):
        for e in worst_first(vars(c) for c in cells if (c.op, c.backend) == (op, backend))[:1]:
            figures = f"worst error {e.ours:.2e}, torch {e.torch:.2e}, bound {e.bound:.2e} ({e.share:.0%})"
            lines.append(f"{op} {backend}: {figures}: {e.output} [{e.case}]")
    return lines


def notes(cells: list[Cell]) -> list[str]:
    """What did not run and why, then every failure with the command that repeats it."""
    why: dict[tuple[str, str, str], dict[str, None]] = {}
    for c in cells:
        if c.status == UNSUPPORTED:
            why.setdefault((c.op, c.backend, c.reason), {})[c.law] = None
    lines = [
        f"- {op} {backend} {', '.join(laws)}: UNSUPPORTED, {reason}"
        for (op, backend, reason), laws in sorted(why.items())
    ]
    for c in cells:
        if c.status == FAIL:
            lines += [f"FAIL {c.op} {c.backend} {c.law} [{c.case}]", f"     {c.reason}", f"     {c.command}"]
    return lines
