"""Markdown tables from result files, and a check that pages match the files.

    python -m publish.tables                    rewrites the tables of every page here and in docs/
    python -m publish.tables --check               exits 1 if one of them is stale
    python -m publish.tables README.md             one page, or several

A table goes between `<!-- results:logp -->` and `<!-- /results -->`, from `logp.json` in the results folder.
An op that is timed against one rival is shown relative to that rival's speed: in a grid if it was timed at
all sizes of one, else with a line per case, next to the other rivals, their memory and their errors. Others
have a line per case too, relative to a copy of their bytes, or to the floor where operations decide. Every
table has the host time of an eager call; a file whose figure that is (`launch`) has little else. Whole steps
have a line per case, next to their baseline, and rollouts have tokens/s (`rollouts`). A missing file leaves a
line that says how to make it.

    <!-- results:linear_logp linear_logp_train -->   only these kinds of calls of a file
    <!-- results:summary -->                         a short table for users (`headline`)
    <!-- results:every -->                           a line or two per file (`overview`)
    <!-- results:proven -->                          what was checked and timed (`proven`)
    <!-- results:drift-picture -->                   the first picture of the README (`drift`)
    <!-- op:logp --> ... <!-- /op -->                the declaration of an op (`declared`)
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from isobit.bench.cases import subject_of, suite_of
from isobit.bench.goals import cells, why_unmeasured
from isobit.bench.report import CPU_WARNING, NEW, Report, Row, format_stamp
from isobit.bench.resume import UNFINISHED
from isobit.bench.suites import suite_names
from isobit.check.stamp import why_stale
from isobit.frame.op import public_ops
from publish import drift
from publish.declared import render_declared
from publish.grids import by_options, fills_a_grid, grids, rate_of, same_in_all, with_copy
from publish.headline import headlines, origin
from publish.judged import judged
from publish.overview import OLDER, legend, limit_of, overview, shown_of
from publish.proven import proven
from publish.rollouts import are_rollouts, rollouts

RESULTS = Path("results/h200")
#: The names in a mark for the tables over all files.
SUMMARY, EVERY, PROVEN, PICTURE = "summary", "every", "proven", "drift-picture"

#: At the start of a line: an indented mark is an example.
_MARKED = re.compile(
    r"^(<!-- (results|op):([\w-]+)((?: [\w.-]+)*) -->\n).*?^(<!-- /\2 -->)", re.DOTALL | re.MULTILINE
)

#: How directions are shown; dx and dw as they are. A backward alone only if nothing else was timed: users pay
#: for both together.
_SHOWN = {"fwd": "fwd", "fwd_bwd": "fwd+bwd", "bwd": "bwd"}


def render_op(path: Path, series: Sequence[str] = ()) -> str:
    """The tables of one results file as its run judged it."""
    return render(json.loads(path.read_text()), path.stem, series)


def render(report: Report, name: str, series: Sequence[str] = ()) -> str:
    """The tables of one report, for all or some kinds of calls, with the stamp under them."""
    stamp = format_stamp(report["stamp"])
    if any(row["method"] == "wall" for row in report["rows"]):
        stamp += f". {CPU_WARNING}"
    if why_stale(report["stamp"], report["rows"]):
        stamp += ". The kernels have changed since"
    for note in report.get("notes", ()):
        if note.startswith(UNFINISHED):
            stamp += f"; {note}"
    parts = [*_goals(report), *_body(report, name, series)]
    return "\n\n".join([*parts, f"<sub>{stamp}</sub>\n"])


def _body(report: Report, name: str, series: Sequence[str]) -> list[str]:
    if name == "drift":
        return [_markdown(lines, left=2 if i == 0 else 1) for i, lines in enumerate(drift.tables(report))]
    return [_grids(report, series) if report.get("against") else _by_kind(report, series)]


def render_picture(results_dir: Path) -> str:
    """The picture of drift for the README; nothing where it was not measured."""
    if not (results_dir / "drift.json").is_file():
        return ""
    return "![Tokens with other bits, before and after zero_drift](docs/drift.svg)\n"


def render_summary(results_dir: Path) -> str:
    """A few rows that users compare, without what has not been timed."""
    lines = headlines(results_dir)
    meaning = "Speedup: the other's time divided by isobit's. MB: memory in addition to inputs and results."
    note = f"<sub>{origin(results_dir)}. {meaning}</sub>"
    return "\n\n".join([_markdown(lines, left=2), *_legend(lines), note]) + "\n"


def render_every(results_dir: Path) -> str:
    """A line or two for each op, then for each suite of whole steps; and what has not been timed yet."""
    ops = {op.folder: op for op in public_ops().values()}
    names = (*sorted(ops), *suite_names())
    lines, missing = overview(results_dir, names)
    subjects = (subject_of(ops[name]) if name in ops else suite_of(name) for name in names)
    parts = [_markdown(lines, left=1), *_legend(lines), legend(results_dir, subjects)]
    if missing:
        parts.append(f"Not measured yet: {', '.join(f'`{name}`' for name in missing)}.")
    return "\n\n".join(parts) + "\n"


def render_proven(results_dir: Path) -> str:
    lines = proven(results_dir)
    return "\n\n".join([_markdown(lines, left=4), *_legend(lines)]) + "\n"


def _legend(lines: Iterable[Sequence[str]]) -> list[str]:
    older = any(cell.endswith(OLDER) for line in lines for cell in line)
    return [f"{OLDER.strip()} The kernels have changed since this was measured."] * older


def _missing(name: str) -> str:
    """The text in place of the tables of a missing file; an unknown name is an error."""
    if name in suite_names():
        flag = "--suite"
    elif name in {op.folder for op in public_ops().values()}:
        flag = "--op"
    else:
        raise ValueError(f"no {name}.json among the results, and no op or suite of that name")
    return f"Not measured yet: `isobit bench {flag} {name} --results results`.\n"


def _markdown(lines: Sequence[Sequence[str]], left: int) -> str:
    """Rows of cells, the first of them the head, with the first `left` columns left-aligned."""
    head, *rest = ([_in_short(cell) for cell in line] for line in lines)
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *rest))


#: Lengths of many sequences, joined by +.
_MANY = re.compile(r"(\d+\+\d+)(?:\+\d+){5,}\+(\d+)")


def _in_short(text: str) -> str:
    """The first two of many lengths, their number and the last: a browser breaks no line between them."""
    return _MANY.sub(lambda many: f"{many[1]}+...+{many[2]} ({many[0].count('+') + 1} of them)", text)


# One line per case


def _by_kind(report: Report, series: Sequence[str]) -> str:
    """A table for each kind of call, under its name if there are several."""
    rows, lines = report["rows"], _host_lines if report.get("figure") == "host_us" else _lines
    known = dict.fromkeys(row["op"] for row in rows)
    if len(known) == 1 and not series:
        return lines(rows)
    _all_known(series, known)
    return "\n\n".join(
        f"`{op}`\n\n{lines([row for row in rows if row['op'] == op])}" for op in series or known
    )


def _all_known(series: Sequence[str], known: Iterable[str]) -> None:
    for kind in series:
        if kind not in known:
            raise ValueError(f"no {kind!r} was timed; known: {', '.join(known)}")


def _groups(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    """Rows by implementation, for every case in every direction that is shown."""
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    shown = shown_of(row["direction"] for row in rows)
    for row in rows:
        if row["direction"] in shown:
            groups.setdefault((row["case"], row["direction"]), {})[row["impl"]] = row
    return groups


def _with_new_sizes(case: str, group: dict[str, Row]) -> list[tuple[str, dict[str, Row]]]:
    """A case as it is, and under another name the rows with new sizes, if there are any."""
    usual = {name: row for name, row in group.items() if not name.endswith(NEW)}
    new = {name.removesuffix(NEW): row for name, row in group.items() if name.endswith(NEW)}
    return [(name, rows) for name, rows in ((case, usual), (f"{case}, new sizes", new)) if rows]


def _host_lines(rows: Sequence[Row]) -> str:
    """Host time only: ours, and each rival's with its ratio to ours."""
    impls = dict.fromkeys(row["impl"].removesuffix(NEW) for row in rows)
    others = [name for name in impls if name != "isobit"]
    lines = [["case", "direction", "isobit us", *(f"{name} us" for name in others)]]
    for (case, direction), both in _groups(rows).items():
        for name, group in _with_new_sizes(case, both):
            ours, *theirs = (group.get(impl, {}).get("host_us") for impl in ("isobit", *others))
            line = [name, _SHOWN.get(direction, direction), "-" if ours is None else f"{ours:.0f}"]
            for us in theirs:
                times = "" if us is None or ours is None else f" ({us / ours:.2f}x)"
                line.append("-" if us is None else f"{us:.0f}{times}")
            lines.append(line)
    return _markdown(lines, left=2)


def _lines(rows: Sequence[Row]) -> str:
    groups = _groups(rows)
    impls = dict.fromkeys(row["impl"] for row in rows)
    rivals = [name for name in impls if name not in ("isobit", "copy")]
    limit = limit_of([row for group in groups.values() for row in group.values()])
    head = ["case", "direction", "isobit ms", f"% of {limit} speed", *(f"{r} ms" for r in rivals), "extra MB"]
    lines = [[*head, f"host us: {' / '.join(('isobit', *rivals))}"]]
    for (case, direction), group in groups.items():
        host = _host(group, ("isobit", *rivals))
        lines.append([case, _SHOWN.get(direction, direction), *_figures(group, rivals, limit), host])
    return _markdown(lines, left=2)


def _host(group: dict[str, Row], impls: Sequence[str]) -> str:
    """Host microseconds of one eager call of each; a dash if it was not timed."""
    known = (group.get(name, {}).get("host_us") for name in impls)
    return " / ".join("-" if us is None else f"{us:.0f}" for us in known)


def _figures(group: dict[str, Row], rivals: Sequence[str], limit: str) -> list[str]:
    """isobit's ms and fraction of the speed of the copy or the floor, each rival's ms and its ratio to ours,
    MB."""
    ours, copy = group.get("isobit"), group.get("copy")
    if ours is None:
        return ["-"] * (len(rivals) + 3)
    least = ours["floor_ms"] if limit == "floor" else copy["ms"] if copy else None
    figures = [f"{ours['ms']:.3g}", "-" if least is None else f"{100 * least / ours['ms']:.0f} %"]
    for rival in rivals:
        row = group.get(rival)
        figures.append(f"{row['ms']:.3g} ({row['ms'] / ours['ms']:.2f}x)" if row else "-")
    return [*figures, "-" if ours["extra_mb"] is None else f"{ours['extra_mb']:.2f}"]


# Grids


def _tables(grids: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    return [_markdown(lines, left=0) for lines in grids]


def _grids(report: Report, series: Sequence[str]) -> str:
    """A grid for each kind of call: rows by one size, columns by the others. If most of a grid would be
    empty, and for whole steps, a line per case. What has no size but its batch is a step too."""
    against, all_cells = report["against"], cells(report["rows"], report["against"])
    steps = {row["op"] for row in report["rows"] if row["method"] == "sync"}
    steps |= {cell.op for cell in all_cells if len(cell.sizes) == 1}
    parts = []
    known = dict.fromkeys(cell.op for cell in all_cells)
    every = dict.fromkeys(row["op"] for row in report["rows"])
    _all_known(series, every)
    for op in series or every:
        own = [row for row in report["rows"] if row["op"] == op]
        if are_rollouts(own):
            parts.append(f"`{op}`\n\n{_markdown(rollouts(own), left=2)}")
            continue
        if op not in known:  # timed without the baseline: show what there is, line by line
            parts.append(f"`{op}`\n\n{_lines(own)}")
            continue
        mine = by_options([cell for cell in all_cells if cell.op == op])
        by_bytes = op in report.get("bandwidth", ())
        copied = with_copy(own) if by_bytes else None
        if op not in steps and all(map(fills_a_grid, mine.values())):
            for options, some in mine.items():
                said = [options] * (len(mine) > 1) + same_in_all(some)
                named = " and of a copy of as many bytes" * (copied is not None)
                what = ", ".join([f"`{op}`", *said, f"share of the speed of {against}{named}"])
                parts += [_in_short(what), *_tables(grids(some, copied))]
            if by_bytes and copied is None:
                parts += [f"`{op}`, TB/s of isobit", *_tables(grids(next(iter(mine.values())), rate_of(own)))]
            parts += [*_usual_host(report, op), *_errors_and_difference(report, op)]
        else:
            parts.append(f"`{op}`\n\n{_line_per_case(report, op, against, op in steps)}")
    if any(cell.other_bits for cell in all_cells):
        parts.append(f"\\* {against} has other bits than isobit here: it splits the sum.")
    return "\n\n".join(parts)


def _usual_host(report: Report, op: str) -> list[str]:
    """A sentence under a grid, which has no column for host times: they depend on the call, not on its
    size."""
    times: dict[str, list[float]] = {}
    for row in report["rows"]:
        if row["op"] == op and row.get("host_us") is not None:
            times.setdefault(row["impl"], []).append(row["host_us"])
    each = ", ".join(f"{impl} {statistics.median(us):.0f}" for impl, us in times.items())
    return [f"Host time of an eager call in microseconds, median of the cases: {each}."] if each else []


def _errors_and_difference(report: Report, op: str) -> list[str]:
    """A sentence under a grid, where results of rivals were compared with ours: how far all are from fp64,
    and how far a rival is from ours."""
    mine = [row for row in report["rows"] if row["op"] == op]
    apart: dict[str, float] = {}
    for row in mine:
        if row.get("max_diff") is not None:
            apart[row["impl"]] = max(row["max_diff"], apart.get(row["impl"], 0.0))
    if not apart:
        return []
    worst = {
        impl: max(row["max_abs"] for row in mine if row["impl"] == impl and row["max_abs"] is not None)
        for impl in ("isobit", *apart)
    }
    errors = ", ".join(f"{impl} {error:.1e}" for impl, error in worst.items())
    differ = ", ".join(f"{impl} {most:.1e}" for impl, most in apart.items())
    return [f"Largest error against fp64: {errors}. Largest difference from isobit: {differ}."]


def _line_per_case(report: Report, op: str, against: str, whole: bool) -> str:
    """A line per case: ms, the ratio to the baseline's, extra MB; for each rival ms, the ratio to ours, and
    extra MB; and host times. For calls without gradients also the error of each, and for steps that decode
    the number of tokens with other bits. For `whole` steps the baseline is a rival like any other, since it
    does the same work, and MB are the peak beyond the parameters."""
    memory = "peak_mb" if whole else "extra_mb"
    groups: dict[str, dict[str, Row]] = {}
    for row in report["rows"]:
        if row["op"] == op:
            groups.setdefault(row["case"], {})[row["impl"]] = row
    groups = dict(part for case, group in groups.items() for part in _with_new_sizes(case, group))
    # The notes of the file say why one is missing.
    groups = {case: group for case, group in groups.items() if {"isobit", against} <= set(group)}
    impls = dict.fromkeys(name for group in groups.values() for name in group)
    rivals = [name for name in impls if name != "isobit" and (whole or name != against)]
    taken = memory.replace("_mb", " MB")
    head = ["case", "isobit ms", f"times {against}", taken, *(f"{name} ms" for name in rivals)]
    counted = any("tokens_differ" in row for group in groups.values() for row in group.values())
    bits = [f"tokens with other bits: {' / '.join(('isobit', *rivals))}"] * counted
    times = [[*head, f"host us: {' / '.join(('isobit', *rivals))}", *bits]]
    errors = [["largest error against fp64", "isobit", *rivals]]
    for case, group in groups.items():
        ours, base = group["isobit"], group[against]
        theirs = [group.get(name) for name in rivals]
        own = [f"{ours['ms']:.3g}", f"{ours['ms'] / base['ms']:.2f}", _megabytes(ours[memory])]
        others = ["-" if row is None else _compared(row, ours, memory) for row in theirs]
        differ = [_tokens_differ(ours, *theirs)] * counted
        times.append([case, *own, *others, _host(group, ("isobit", *rivals)), *differ])
        wrong = (None if row is None else row["max_abs"] for row in (ours, *theirs))
        errors.append([case, *("-" if x is None else f"{x:.0e}" for x in wrong)])
    with_errors = rivals and all(group["isobit"]["direction"] == "fwd" for group in groups.values())
    return "\n\n".join(_markdown(t, left=1) for t in ([times, errors] if with_errors else [times]))


def _compared(row: Row, ours: Row, memory: str) -> str:
    return f"{row['ms']:.3g} ({row['ms'] / ours['ms']:.2f}x, {_megabytes(row[memory])} MB)"


def _tokens_differ(*rows: Row | None) -> str:
    """How many decoded tokens have other bits than in one forward, for each implementation, and of how
    many."""
    counts = [None if row is None else row.get("tokens_differ") for row in rows]
    if counts[0] is None:  # a training step
        return "-"
    assert rows[0] is not None
    return f"{' / '.join('-' if n is None else str(n) for n in counts)} of {rows[0]['tokens']}"


def _megabytes(taken: float | None) -> str:
    return "-" if taken is None else f"{taken:.2f}" if taken < 10 else f"{taken:.0f}"


def _goals(report: Report) -> list[str]:
    """A table of fractions of a speed, that of the baseline or, where goals name several, of what each names;
    and one of multiples of anything else. Goals that were not measured say so, with the reason if a note has
    it."""
    fractions = {e["against"] for e in report.get("summary", ()) if e.get("goal_most") is None}
    against = report.get("against") if fractions <= {report.get("against")} else None

    def share(value: float, goal: float | None) -> str:
        digits = 2 if value >= 0.5 else 3
        missed = " **missed**" if goal is not None and value < goal else ""
        return f"{value:.{digits}f}" + (f" (goal {goal:.{digits}f}{missed})" if goal is not None else "")

    named = ["share of the speed of"] if against is None else []
    first = "goal" if against is None else f"speed as a share of {against}"
    shares = [[first, *named, "cells", "geometric mean", "slowest cell"]]
    times = [["goal", "figure", "against", "cells", "times at most"]]
    for e in report.get("summary", ()):
        if e["met"] is None:
            missing = why_unmeasured(e, report.get("notes", ()), report["rows"]).replace("|", "\\|")
            if e["goal_most"] is None:
                shares.append([e["what"], *([e["against"]] * len(named)), "0", missing, "-"])
            else:
                times.append([e["what"], e["figure"], e["against"], "0", missing])
        elif e.get("goal_most") is None:
            mean, least = share(e["geomean"], e["goal_geomean"]), share(e["least"], e["goal_least"])
            shares.append([e["what"], *([e["against"]] * len(named)), str(e["cells"]), mean, least])
        else:
            missed = "" if e["met"] else " **missed**"
            most = f"{1 / e['least']:.2f} (goal {e['goal_most']:g}{missed})"
            times.append([e["what"], e["figure"], e["against"], str(e["cells"]), most])
    left = 1 + len(named)
    return [_markdown(table, n) for table, n in ((shares, left), (times, 3)) if len(table) > 1]


_OVER_ALL = {
    SUMMARY: render_summary, EVERY: render_every, PROVEN: render_proven, PICTURE: render_picture
}  # fmt: skip


def updated(text: str, results_dir: Path) -> str:
    """The page with every marked table rendered again."""
    if not _MARKED.search(text):
        raise ValueError("no '<!-- results:<op> -->' line with a '<!-- /results -->' after it")

    def rendered(match: re.Match[str]) -> str:
        opening, what, name, series, closing = match.groups()
        path = results_dir / f"{name}.json"
        if what == "op":
            shown = render_declared(name, results_dir)
        elif name in _OVER_ALL:
            shown = _OVER_ALL[name](results_dir)
        else:
            shown = render(judged(path), name, series.split()) if path.is_file() else _missing(name)
        return f"{opening}{shown}{closing}"

    return _MARKED.sub(rendered, text)


def marked_pages(root: Path = Path()) -> list[Path]:
    """Pages of a checkout that have a marked table: Markdown files at the root and in `docs/`."""
    pages = (*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md")))
    return [page for page in pages if _MARKED.search(page.read_text())]


def update(path: Path, results_dir: Path = RESULTS) -> bool:
    """Rewrite the tables of a page. True if that changed it."""
    old = path.read_text()
    new = updated(old, results_dir)
    if new != old:
        path.write_text(new)
    return new != old


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m publish.tables", description="Tables from results.")
    parser.add_argument("pages", nargs="*", type=Path, help="Markdown files; default: every one with a mark")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default: {RESULTS}")
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if a table is stale")
    options = parser.parse_args(argv)
    stale, pages = False, options.pages or marked_pages()
    if not pages:
        print("no page here or in docs/ has a marked table", file=sys.stderr)
        return 1
    for page in pages:
        try:
            if options.check:
                changed = updated(page.read_text(), options.results) != page.read_text()
            else:
                changed = update(page, options.results)
        except (OSError, ValueError) as error:
            print(f"{page}: {error}", file=sys.stderr)
            return 1
        state = ("stale" if options.check else "rewritten") if changed else "up to date"
        print(f"{page}: {state}")
        stale |= changed
    return int(options.check and stale)


if __name__ == "__main__":
    sys.exit(main())
