"""A benchmark's results as text.

A report is the content of the JSON file (docs/dev/results.md): its origin, `notes`, rows with the keys `ROW`;
with goals also `"against"` and `"summary"`. `notes` say which rival is missing and why, so that no table is
shorter without a reason.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from isobit.bench.goals import why_unmeasured

Report = dict[str, Any]
Row = dict[str, Any]

#: Version of the file format. Files of version 1 have no such key, and their rows lack the last five.
SCHEMA = 2

#: Keys of a row. Other tools read them.
ROW = (
    "op", "case", "direction", "impl", "ms", "ms_q25", "ms_q75", "host_us", "peak_mb", "extra_mb",
    "floor_ms", "tflops", "tbps", "max_abs", "method", "equal_bits", "vs_baseline", "dtype", "options",
    "backend", "data", "seed",
)  # fmt: skip

#: Suffix of an implementation that was timed with a new size in every call.
NEW = ":new"

COLUMNS = ("impl", "ms (q25-q75)", "x floor", "TB/s", "extra MB", "host us", "max_abs", "timed")
#: Columns that are shown if some row has them.
MORE_COLUMNS = {
    "TFLOP/s": ("tflops", ".4g"),
    "x baseline": ("vs_baseline", ".3f"),
    "= bits": ("equal_bits", ".5f"),
    "predicted": ("predicted_ms", ".4g"),
    "rel rms": ("rel_rms", ".2e"),
    "max diff": ("max_diff", ".1e"),
    "tokens": ("tokens", "d"),
    "that differ": ("tokens_differ", "d"),
    "k3 KL": ("k3", ".1e"),
    "adding": ("adding", "d"),
    "tokens/s": ("tokens_per_s", ".5g"),
    "first ms": ("first_ms", ".4g"),
}

CPU_WARNING = "CPU: these numbers show that the benchmark runs; they say nothing about speed on a GPU."


def format_report(report: Report) -> str:
    """The table, the goals, what is missing, the origin, and a warning for a CPU."""
    return f"{format_table(report['rows'])}\n\n{_footer(report)}"


def format_table(rows: Sequence[Row]) -> str:
    """Plain text, one block per case and direction, with aligned columns."""
    more = _more(rows)
    columns = (*COLUMNS, *more)
    lines = [columns, *(_cells(row, more) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]

    def aligned(line: Sequence[str]) -> str:
        rest = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        return "  ".join(("  " + line[0].ljust(widths[0]), *rest))

    blocks = []
    for title, group in _grouped(rows):
        blocks.append("\n".join([title, aligned(columns), *(aligned(_cells(row, more)) for row in group)]))
    return "\n\n".join(blocks)


def show(report: Report) -> None:
    """Print a report: with rich on a terminal if it is installed, as plain text otherwise."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        print(format_report(report))
        return
    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe: rich would wrap the columns
        print(format_report(report))
        return
    more = _more(report["rows"])
    for title, group in _grouped(report["rows"]):
        table = Table(title=title, title_justify="left")
        for column in (*COLUMNS, *more):
            table.add_column(column, justify="left" if column == "impl" else "right", no_wrap=True)
        for row in group:
            table.add_row(*_cells(row, more), style="bold" if row["impl"].startswith("isobit") else None)
        console.print(table)
    console.print(_footer(report), markup=False)


def format_stamp(stamp: dict[str, Any]) -> str:
    """One line: machine, versions, rates if they were measured, source."""
    versions = f"torch {stamp['torch']}, Triton {stamp['triton']}, Python {stamp['python']}"
    rates = ""
    if "copy_tbps" in stamp:
        rates = f"copy {stamp['copy_tbps']:.3g} TB/s, bf16 product {stamp['best_tflops']:.3g} TFLOP/s; "
    source = f"commit {stamp['commit']}, source {stamp['source_sha']}, {stamp['date'][:10]}"
    checked = "" if stamp.get("checked", True) else "; NOT CHECKED"
    return f"{stamp['gpu']}, driver {stamp['driver']}, {versions}; {rates}{source}{checked}"


def format_summary(
    entries: Sequence[dict[str, Any]], notes: Sequence[str] = (), rows: Sequence[Row] = ()
) -> list[str]:
    """One line per goal: `met  dX, M >= 1024: 0.981 (goal 0.97) of torch.mm, least 0.93 (goal 0.9) at ...`,
    or `met  det_linear forward, host_us: 1.32 times native (goal 1.5) at ...`, or
    `none loss, against trl: not measured: not installed`, with the reason from the report's notes."""
    lines = []
    for e in entries:
        verdict = "met " if e["met"] else "MISS"
        figure = "" if e.get("figure", "ms") == "ms" else f", {e['figure']}"
        if e["met"] is None:
            lines.append(
                f"none {e['what']}{figure}, against {e['against']}: {why_unmeasured(e, notes, rows)}"
            )
            continue
        where = f"at {e['least_at']}; {e['cells']} cells"
        if e.get("goal_most") is not None:
            times = f"{1 / e['least']:.3f} times {e['against']} (goal {e['goal_most']:g})"
            lines.append(f"{verdict} {e['what']}{figure}: {times} {where}")
            continue
        mean, least = (
            f" (goal {g:g})" if g is not None else "" for g in (e["goal_geomean"], e["goal_least"])
        )
        lines.append(
            f"{verdict} {e['what']}{figure}: {e['geomean']:.3f}{mean} of {e['against']}, "
            f"least {e['least']:.3f}{least} {where}"
        )
    return lines


def on_a_cpu(rows: Sequence[Row]) -> bool:
    """Whether something was timed by the wall clock, as only calls on a CPU are."""
    return any(row["method"] == "wall" for row in rows)


def _footer(report: Report) -> str:
    notes = report["notes"]
    lines = [
        *format_summary(report.get("summary", ()), notes, report["rows"]),
        *notes,
        format_stamp(report["stamp"]),
    ]
    if on_a_cpu(report["rows"]):
        lines.append(CPU_WARNING)
    return "\n".join(lines)


def _grouped(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows by case and direction, in the order they were timed."""

    def title(row: Row) -> str:
        return f"{row['op']} {row['case']} {row['direction']}: floor {row['floor_ms']:.4g} ms"

    return [(text, list(group)) for text, group in groupby(rows, key=title)]


def _more(rows: Sequence[Row]) -> list[str]:
    """Columns for which some row has a value."""
    return [name for name, (key, _) in MORE_COLUMNS.items() if any(r.get(key) is not None for r in rows)]


def _cells(row: Row, more: Sequence[str]) -> tuple[str, ...]:
    def number(key: str, form: str) -> str:
        return "-" if row.get(key) is None else format(row[key], form)

    ms = f"{row['ms']:.4g} ({row['ms_q25']:.4g}-{row['ms_q75']:.4g})"
    ratio = f"{row['ms'] / row['floor_ms']:.2f}"
    return (
        row["impl"], ms, ratio, number("tbps", ".3g"), number("extra_mb", ".2f"), number("host_us", ".0f"),
        number("max_abs", ".1e"), row["method"], *(number(*MORE_COLUMNS[name]) for name in more),
    )  # fmt: skip
