"""The tables of `drift.json`: what differs before and after `zero_drift`, and what measuring it costs; and
the picture of the README, which is the same as bars.

    python -m publish.drift results/h200/drift.json docs/drift.svg

Plain SVG, and the same bytes from the same file. Where nothing was measured there is no picture.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from isobit.bench.report import Report, Row, format_stamp

#: What is compared, and the series of what a trainer logs.
BEFORE, AFTER, METRICS = "sdpa", "isobit", "drift_metrics"

#: Axes as a reader who does not know them understands them.
AXES = {
    "batch": "in a larger batch", "padding": "with padding", "chunk": "in chunks of a prefill",
    "decode": "decoded from a cache", "length": "in a longer sequence",
}  # fmt: skip

#: Pixels: words on the left, bars, a line, and what is above the first bar.
WORDS, BARS, LINE, TOP = 170, 380, 34, 64
PLAIN, OURS = "#d1603d", "#2a7f62"

Groups = dict[tuple[str, str], dict[str, Row]]


def groups(report: Report) -> Groups:
    """Rows by implementation, for every model and axis that both were measured on."""
    found: Groups = {}
    for row in report["rows"]:
        if row["op"] != METRICS:
            found.setdefault((row["op"], row["direction"]), {})[row["impl"]] = row
    return {key: group for key, group in found.items() if {BEFORE, AFTER} <= set(group)}


def tables(report: Report) -> list[list[list[str]]]:
    """The lines of the tables, each with its head."""
    head = [
        "model", "axis", "other bits, before", "after", "largest difference before", "k3 KL before",
        "modules that add, before", "seconds to measure, before", "after",
    ]  # fmt: skip
    lines = [head]
    for (model, axis), group in groups(report).items():
        before, after = group[BEFORE], group[AFTER]
        counts = [f"{row['tokens_differ']} of {row['tokens']}" for row in (before, after)]
        sizes = [f"{before['max_abs']:.1e}", f"{before['k3']:.1e}", str(before["adding"])]
        lines.append([model, axis, *counts, *sizes, *(f"{row['ms'] / 1e3:.2g}" for row in (before, after))])
    cost = [["metrics in training", "ms", "a training step, ms", "share"]]
    rows = {row["impl"]: row for row in report["rows"] if row["op"] == METRICS}
    if {"isobit", "train_step"} <= set(rows):
        ours, step = rows["isobit"]["ms"], rows["train_step"]["ms"]
        cost.append([rows["isobit"]["case"], f"{ours:.3g}", f"{step:.3g}", f"{100 * ours / step:.2g} %"])
    return [table for table in (lines, cost) if len(table) > 1]


def draw(report: Report) -> str:
    """A bar for each model and axis: the share of tokens with other bits, before and after."""
    found = groups(report)
    models = list(dict.fromkeys(model for model, _ in found))
    small = _small_print(report)
    height = TOP + sum(LINE for _ in found) + 30 * len(models) + 14 + 11 * len(small)
    width = WORDS + BARS + 130
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12" role="img" '
        f'aria-label="tokens with other bits, before and after zero_drift">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(12, 22, "Tokens whose log-probability has other bits than in a forward alone", size=14),
    ]
    for x, colour, name in ((12, PLAIN, "PyTorch"), (100, OURS, "isobit's zero_drift")):
        parts += [f'<rect x="{x}" y="34" width="12" height="12" fill="{colour}"/>', _text(x + 18, 44, name)]
    y = TOP
    for model in models:
        y += 20
        parts.append(_text(12, y, model, weight="bold"))
        y += 10
        for (_, axis), group in ((key, group) for key, group in found.items() if key[0] == model):
            parts.append(_text(12, y + 17, AXES.get(axis, axis)))
            for at, (impl, colour) in enumerate(((BEFORE, PLAIN), (AFTER, OURS))):
                parts += _bar(group[impl], y + 3 + 13 * at, colour)
            y += LINE
    parts += [_text(12, y + 18 + 11 * i, line, size=8) for i, line in enumerate(small)]
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _small_print(report: Report) -> list[str]:
    """The stamp in lines that are not too long: machine, speeds and commit; and what is not measured."""
    machine, *more = format_stamp(report["stamp"]).split("; ")
    return [machine, "; ".join(more), *report.get("notes", [])]


def _bar(row: Row, y: int, colour: str) -> list[str]:
    long = round(BARS * row["tokens_differ"] / row["tokens"], 1)
    return [
        f'<rect x="{WORDS}" y="{y}" width="{max(long, 1.5)}" height="11" fill="{colour}"/>',
        _text(WORDS + max(long, 1.5) + 6, y + 10, f"{row['tokens_differ']} of {row['tokens']}", size=11),
    ]


def _text(x: float, y: float, text: str, size: int = 12, weight: str = "normal") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="#222">{escape(text)}</text>'
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m publish.drift", description="The picture of drift.")
    parser.add_argument("results", type=Path, help="the results file of the suite drift")
    parser.add_argument("svg", type=Path, help="the file to write")
    options = parser.parse_args(argv)
    if not options.results.is_file():
        print(f"{options.results}: not measured yet, so there is no picture")
        return 0
    options.svg.write_text(draw(json.loads(options.results.read_text())))
    print(f"{options.svg}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
