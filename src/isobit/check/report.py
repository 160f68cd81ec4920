"""The report of a check: totals, a table for people, JSON for machines (schema in docs/dev/results.md)."""

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from isobit.check.largest_errors import worst_first
from isobit.check.laws import LAWS
from isobit.check.runner import FAIL, OK, UNSUPPORTED, Cell
from isobit.check.stamp import stamp
from isobit.frame.backend import NONE
from isobit.frame.op import OPS

#: Maximum width of printed lines, except for commands and names of cases.
COLUMNS = 80

#: Number of characters of a reason that are printed.
LONGEST = 400

#: Version of the file format. In version 1 a case has no inputs, and a file no command.
SCHEMA = 2


def to_json(
    cells: list[Cell],
    device: torch.device,
    commit: str | None = None,
    observations: Sequence[dict[str, Any]] = (),
    command: str | None = None,
    nothing_ran: str | None = None,
    interrupted: str | None = None,
) -> dict[str, Any]:
    """suite -> candidates (op and backend) -> cases (law, inputs) -> outputs. The first two have totals.
    Observations are facts from the same run that are not promised. `command` repeats it. `nothing_ran` is the
    reason if nothing was checked, or nothing of an op that was named; `interrupted` says how far a run came
    that did not finish. Neither is a pass."""
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
    folders = {OPS[c.op].folder for c in cells if c.op in OPS}  # a function of rows is no op
    head = {
        "schema": SCHEMA,
        "suite": "isobit check",
        "stamp": stamp(device, commit, folders, with_ranks=True),
    }
    head |= {"command": command} if command else {}
    seen = {"observations": list(observations)} if observations else {}
    failed: dict[str, Any] = {"passed": False} if nothing_ran or interrupted else {}
    failed |= {"nothing_ran": nothing_ran} if nothing_ran else {}
    failed |= {"interrupted": interrupted} if interrupted else {}
    return {**head, **totals(cells), **failed, **seen, "candidates": candidates}


def verdict(report: dict[str, Any]) -> str:
    """The result of a report, in words."""
    if report["fail"]:
        wrong = "1 cell FAILS" if report["fail"] == 1 else f"{report['fail']} cells FAIL"
        return f"{wrong}; {report['interrupted']}" if report.get("interrupted") else wrong
    if report.get("interrupted"):
        return str(report["interrupted"])
    if report.get("nothing_ran"):
        return str(report["nothing_ran"]).partition(":")[0]
    if report["passed"] and report.get("unproven"):
        return f"all laws hold, but {report['unproven']}"
    return "all laws hold" if report["passed"] else "nothing was checked"


def _case(cell: Cell) -> dict[str, Any]:
    """A cell as a dictionary, with its inputs and the figures of its comparisons."""
    result = asdict(cell)
    inputs = result.pop("inputs")
    return {**result, **inputs}


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
    """(op, backend, law) -> FAIL if a case failed, else ok if one is, else UNSUPPORTED: tests compare this
    with the expected matrix."""
    order = [UNSUPPORTED, OK, FAIL]
    result: dict[tuple[str, str, str], str] = {}
    for c in cells:
        key = (c.op, c.backend, c.law)
        result[key] = max(result.get(key, UNSUPPORTED), c.status, key=order.index)
    return result


# For people


def progress(total: int, say: Callable[[str], None]) -> Callable[[Cell], None]:
    """A function that prints each finished cell, with a running count. Cells that did not run are reported by
    reason, at the end."""
    done = 0

    def tell(cell: Cell) -> None:
        nonlocal done
        done += bool(cell.case)
        if cell.status != UNSUPPORTED:
            name = f"{cell.op} {cell.backend} {cell.law} [{cell.case}]"
            say(f"{done:>5}/{total} {cell.status:5s}{name} {cell.seconds:.1f}s")

    return tell


def table(cells: list[Cell], columns: int = COLUMNS) -> str:
    """A row per op and backend, a column per law: `12 ok`, `3 FAIL of 12`, `-` for unsupported. If that
    is too wide, only counts under the first letters of the laws, and `3F` for three failures."""
    seen = {c.law for c in cells}
    laws = [law for law in LAWS if law in seen]
    counts = {
        (op, backend): [
            Counter(c.status for c in cells if (c.op, c.backend, c.law) == (op, backend, law)) for law in laws
        ]
        for op, backend in dict.fromkeys((c.op, c.backend) for c in cells)
    }
    rows = [["op", "backend", *laws]]
    rows += [[op, backend, *map(_in_words, counted)] for (op, backend), counted in counts.items()]
    text = _aligned(rows)
    if max(map(len, text.splitlines())) <= columns:
        return text
    rows, lines = [["", *(law[:4] for law in laws)]], []
    rows += [[f"  {backend}", *map(_in_short, counted)] for (_, backend), counted in counts.items()]
    head, *aligned = _aligned(rows).splitlines()
    for (op, _), line in zip(counts, aligned, strict=True):
        lines += [*([op] if op not in lines else []), line]
    return "\n".join([head, *lines])


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(v.ljust(w) for v, w in zip(r, widths, strict=True)).rstrip() for r in rows)


def _in_words(count: Counter[str]) -> str:
    if count[FAIL]:
        return f"{count[FAIL]} FAIL of {count.total()}"
    return f"{count[OK]} ok" if count[OK] else "-"


def _in_short(count: Counter[str]) -> str:
    return f"{count[FAIL]}F" if count[FAIL] else str(count[OK]) if count[OK] else "-"


def worst(cells: list[Cell]) -> list[str]:
    """For each op and backend, the error that uses most of its slack beyond torch's, and where."""
    lines = []
    for op, backend in dict.fromkeys((c.op, c.backend) for c in cells):
        for e in worst_first(vars(c) for c in cells if (c.op, c.backend) == (op, backend))[:1]:
            figures = f"error {e.ours:.2e}, torch {e.torch:.2e}, slack {e.slack:.2e}: {e.in_words}"
            lines += [f"{op} {backend}: {figures}", f"    {e.output} [{e.case}]"]
    return lines


def memory_beyond(cases: Iterable[Mapping[str, Any]]) -> list[str]:
    """What a candidate takes beyond the bound of isobit's kernels, if that is reported and not judged. From
    the JSON form of cells."""
    lines = []
    for case in (case for case in cases if case["law"] == "memory" and case["status"] == OK):
        more = [o for o in case["outputs"] if o["max_abs"] > o["atol"]]
        head = f"{case['op']} {case['backend']}: memory, not judged without --law memory [{case['case']}]"
        lines += [head, *(f"    {o['output']}: {o['message']}" for o in more)] if more else []
    return lines


def notes(cells: list[Cell]) -> list[str]:
    """Every failure with the command that repeats it, those with the same reason together; then what did not
    run, by reason."""
    lines: list[str] = []
    failed: dict[str, list[Cell]] = {}
    for c in (c for c in cells if c.status == FAIL):
        failed.setdefault(brief(c.reason), []).append(c)
    for reason, mine in failed.items():
        lines += [f"FAIL {c.op} {c.backend} {c.law} [{c.case}]" for c in mine]
        lines += textwrap.wrap(reason, COLUMNS, initial_indent=_UNDER, subsequent_indent=_UNDER, **_WHOLE)
        lines += [f"{_UNDER}{c.command}" for c in mine]
    why: dict[str, dict[str, dict[str, None]]] = {}
    for c in (c for c in cells if c.status == UNSUPPORTED):
        who = why.setdefault(_reason(c), {}).setdefault(f"{c.op} {c.backend}", {})
        who |= dict.fromkeys([c.law])
    lines += [""] if lines and why else []
    for reason, by_whom in _folded(why).items():
        lines += textwrap.wrap(f"UNSUPPORTED: {reason}", COLUMNS, subsequent_indent="    ", **_WHOLE)
        laws: dict[tuple[str, ...], list[str]] = {}
        for name, held in by_whom.items():
            laws.setdefault(tuple(held), []).append(name)
        for held_by, names in laws.items():
            line = f"{', '.join(names)}: {', '.join(held_by)}"
            lines += textwrap.wrap(line, COLUMNS, initial_indent="    ", subsequent_indent="    ", **_WHOLE)
    return lines


def brief(reason: str) -> str:
    """One line: a compiler's error may have hundreds. The beginning says what, and the end where; a saved
    report has all of it."""
    text = " ".join(reason.split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 65]} ... {text[-60:]}"


_UNDER = " " * len("FAIL ")

_WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}

_LACKS = "it does not take "


def _reason(cell: Cell) -> str:
    """Without the call that it begins with, which is printed next to it."""
    return cell.reason.removeprefix(f"{cell.op}(backend={cell.backend!r}): ")


def _folded(why: dict[str, dict[str, dict[str, None]]]) -> dict[str, dict[str, dict[str, None]]]:
    """One reason for all options that a candidate does not take, whichever of them a case has."""
    plain = {r: who for r, who in why.items() if not r.startswith(_LACKS) or " and " in r}
    names: dict[str, None] = {}
    together: dict[str, dict[str, None]] = {}
    for reason, by_whom in why.items():
        if reason not in plain:
            names |= dict.fromkeys(reason.removeprefix(_LACKS).split(", "))
            for name, laws in by_whom.items():
                together.setdefault(name, {}).update(laws)
    return plain | ({f"{_LACKS}{', '.join(names)}": together} if names else {})
