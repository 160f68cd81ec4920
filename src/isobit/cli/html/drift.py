"""The section of `isobit drift` on a page: what differs, where it begins, and what removes it."""

from html import escape
from itertools import groupby
from typing import Any

from isobit.cli.html.svg import text
from isobit.drift.report import verdict

#: Columns of the table of axes: metrics, and their titles.
COLUMNS = {
    "k3_kl": "k3 KL", "kl": "k1 KL", "probs_diff_max": "max probs diff", "chi2_token": "chi2 token",
    "pearson": "Pearson", "ppl_ratio": "ppl ratio",
}  # fmt: skip

#: Pixels of the heat map and of the histogram, and of the words around them.
WIDTH, CELL, LEFT, TOP, BARS = 320, 10, 46, 8, 110
#: Rows of the report that a table of all metrics has side by side.
ROWS = 8
#: Tokens that the heat map shows one by one; more are shown several to a column.
TOKENS = 160


def section(report: dict[str, Any]) -> dict[str, Any]:
    rows = [*filter(None, [report.get("repeat")]), *report["axes"]]
    weights = "random weights" if report["random_weights"] else "its own weights"
    return {
        "title": report.get("model_name", report["model"]),
        "state": "ok" if report["passed"] else "fail",
        "verdict": verdict(report),
        "causes": report.get("causes", []),
        "notes": report["notes"],
        "what": f"{report['model']} in {report['dtype']} on {report['device']}, {weights}: "
        f"{report['sequences']} sequences, {report['tokens']} tokens.",
        "columns": list(COLUMNS.values()),
        "rows": [_row(row) for row in rows],
        "remedies": [
            {"kind": kind, "modules": _some(found["modules"]), "call": found["call"]}
            for kind, found in report["remedies"].items()
        ],
        "tried": [_tried(each) for each in report.get("tried") or []],
        "details": [_detail(row) for row in rows if row["metrics"]["differ"] or _adds(row)],
        "metrics": _all_metrics(rows),
    }


def _tried(tried: dict[str, Any]) -> dict[str, Any]:
    count = len(tried["modules"])
    what = f"{tried['kind']}, {count} module{'s' * (count != 1)}" if tried["kind"] else "zero_drift"
    differ = sum(row["metrics"]["differ"] for row in tried["rows"])
    ms = tried["after_ms"]
    return {
        "what": what,
        "refused": tried["refused"],
        "still": _some(tried["still"]) or ("none" if tried["kind"] else "-"),
        "differ": differ,
        "before": tried["before_differ"],
        "ms": "" if ms is None else f"{ms:.3g} ms instead of {tried['before_ms']:.3g}",
    }


def _name(row: dict[str, Any]) -> str:
    return f"{row['axis']}: {row['setting']}"


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, int) or abs(value) >= 0.1 else f"{value:.2g}"


def _row(row: dict[str, Any]) -> dict[str, Any]:
    metrics = row["metrics"]
    return {
        "name": _name(row),
        "differ": metrics["differ"],
        "tokens": metrics["tokens"],
        "numbers": [(title, _number(metrics[key])) for key, title in COLUMNS.items()],
    }


def _some(names: list[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _adds(row: dict[str, Any]) -> bool:
    return bool(row["where"] and row["where"]["first"])


def _detail(row: dict[str, Any]) -> dict[str, Any]:
    where = row["where"] or {"first": None, "modules": [], "heat": [], "layers": []}
    first, begins = where["first"], ""
    if first:
        begins = (
            f"It begins at {first['name']} ({first['kind']}): equal inputs, and other outputs for "
            f"{first['adds']} of {first['tokens']} tokens, the first at position {first['first_position']}."
        )
    elif row["where"]:
        begins = "No module adds a difference to equal inputs."
    return {
        "name": _name(row),
        "begins": begins,
        "heat": heat_map(where["layers"], where["heat"]) if where["heat"] else "",
        "histogram": histogram(row["metrics"]["histogram"]),
        "modules": [m for m in where["modules"] if m["adds"] or m["outputs_equal"] < m["tokens"]],
    }


def _all_metrics(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tables of every metric with its value in each row, some rows at a time. Metrics that are several
    numbers are taken apart."""
    tables = []
    for start in range(0, len(rows), ROWS):
        some = rows[start : start + ROWS]
        flat = [_numbers(row["metrics"]) for row in some]
        tables.append({
            "names": [_name(row) for row in some],
            "lines": [
                (key, [(_name(row), _number(each[key])) for row, each in zip(some, flat, strict=True)])
                for key in flat[0]
            ],
        })  # fmt: skip
    return tables


def _numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for key, value in metrics.items():
        if isinstance(value, dict):
            numbers |= {f"{key} {part}": x for part, x in value.items() if key != "histogram"}
        else:
            numbers[key] = value
    return numbers


def heat_map(layers: list[str], heat: list[str]) -> str:
    """A line for each layer, from the first at the top. A column of several tokens shows the worst."""
    tokens = len(heat[0])
    per_column = -(-tokens // TOKENS)
    columns = -(-tokens // per_column)
    wide, height = WIDTH / columns, TOP + CELL * len(layers)
    parts = [f'<svg viewBox="0 0 {LEFT + WIDTH + 12} {height + 22}" role="img" aria-label="heat map">']
    for i, (layer, line) in enumerate(zip(layers, heat, strict=True)):
        states = [max(line[at : at + per_column]) for at in range(0, tokens, per_column)]
        at = 0
        for state, run in groupby(states):
            count = len(list(run))
            title = f"<title>{escape(layer)}</title>"
            parts.append(
                f'<rect class="heat-{state}" x="{LEFT + at * wide:.1f}" y="{TOP + CELL * i}" '
                f'width="{count * wide:.1f}" height="{CELL - 1}">{title}</rect>'
            )
            at += count
    parts.append(text(LEFT - 6, TOP + 9, "layer 0", "end"))
    parts.append(text(LEFT - 6, height, str(len(layers) - 1), "end"))
    parts.append(text(LEFT, height + 15, "token 0"))
    parts.append(text(LEFT + WIDTH, height + 15, str(tokens - 1), "end"))
    return "\n".join([*parts, "</svg>"])


def histogram(counts: dict[str, int]) -> str:
    """Tokens by decade of |log ratio|."""
    most, wide = max(counts.values()) or 1, WIDTH / len(counts)
    parts = [f'<svg viewBox="0 0 {LEFT + WIDTH + 12} {TOP + BARS + 36}" role="img" aria-label="histogram">']
    for i, (edge, count) in enumerate(counts.items()):
        high, x = BARS * count / most, LEFT + i * wide
        parts.append(
            f'<rect class="bar-of" x="{x + 1:.1f}" y="{TOP + BARS - high:.1f}" width="{wide - 2:.1f}" '
            f'height="{high:.1f}"><title>{count} tokens from {edge} on</title></rect>'
        )
        if i % 2 == 0:
            parts.append(text(round(x, 1), TOP + BARS + 15, edge))
    parts.append(f'<path class="grid" d="M{LEFT} {TOP + BARS}h{WIDTH}"/>')
    parts.append(text(LEFT - 6, TOP + 8, str(most), "end"))
    parts.append(text(LEFT + WIDTH / 2, TOP + BARS + 30, "|log ratio|", "middle"))
    return "\n".join([*parts, "</svg>"])
