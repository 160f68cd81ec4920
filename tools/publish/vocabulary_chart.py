"""Time and memory of training over the size of the vocabulary, from a results file.

    python -m publish.vocabulary_chart results/h200/linear_logp.json docs/linear_logp.svg

Plain SVG, and the same bytes from the same file.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isobit.bench.goals import sizes_of
from isobit.bench.report import format_stamp
from isobit.cli.html.share_chart import COLOURS, HEIGHT, LEFT, LINE, TOP, WIDTH

#: The shapes that are drawn differ in V alone.
ROWS, FEATURES = 4096, 2048

#: Kinds of calls that are drawn, and isobit's name in each. Rivals are those of the first.
DRAWN = {"linear_logp_train": "isobit", "linear_logp_kept": "isobit, probabilities kept"}

#: What is drawn of a row, on which axis: memory spans four orders of magnitude.
PANELS = {"ms": ("ms, forward and backward", False), "extra_mb": ("MB beyond inputs and gradients", True)}

Lines = dict[str, list[tuple[int, float]]]


def lines(report: dict[str, Any], key: str) -> Lines:
    """(V, figure) of every contender, by ascending V."""
    series: Lines = {}
    for row in report["rows"]:
        sizes, ours = sizes_of(row["case"]), row["impl"] == "isobit"
        if row["op"] not in DRAWN or (sizes["N"], sizes["D"]) != (ROWS, FEATURES) or row[key] is None:
            continue
        if ours or row["op"] == next(iter(DRAWN)):
            name = DRAWN[row["op"]] if ours else row["impl"]
            series.setdefault(name, []).append((sizes["V"], row[key]))
    return {name: sorted(points) for name, points in series.items()}


def draw(report: dict[str, Any]) -> str:
    """The SVG: a panel for time, one for memory, and the names below them."""
    names = list(lines(report, "ms"))
    width, height = len(PANELS) * (WIDTH + LEFT) + 40, TOP + HEIGHT + 70 + LINE * math.ceil(len(names) / 3)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, (key, (title, logarithmic)) in enumerate(PANELS.items()):
        left = LEFT + i * (WIDTH + LEFT)
        parts.append(_text(left, TOP - 16, f"{title}; N={ROWS} D={FEATURES}, over V"))
        parts += _panel(lines(report, key), names, left, logarithmic)
    for i, name in enumerate(names):
        x, y = LEFT + i % 3 * (width - LEFT) // 3, TOP + HEIGHT + 46 + i // 3 * LINE
        parts += [_polyline(i, name, [(x, y - 4), (x + 24, y - 4)]), _text(x + 30, y, name)]
    parts += [_text(LEFT, height - 6, format_stamp(report["stamp"]), size=6), "</svg>"]
    return "\n".join(parts) + "\n"


def _panel(drawn: Lines, names: Sequence[str], left: int, logarithmic: bool) -> list[str]:
    sizes = sorted({v for points in drawn.values() for v, _ in points})
    most = max((y for points in drawn.values() for _, y in points), default=0.0) or 1.0

    def scaled(y: float) -> float:
        return math.log10(max(y, 1.0)) if logarithmic else y

    top = max(scaled(most), 1e-9) * 1.05

    def place(v: int, y: float) -> tuple[float, float]:
        """Vocabularies are equally spaced: two of them differ by their alignment, not by their size."""
        fraction = (sizes.index(v) + 0.5) / len(sizes)
        return round(left + WIDTH * fraction, 1), round(TOP + HEIGHT * (1 - scaled(y) / top), 1)

    ticks = [10.0**i for i in range(int(top) + 1)] if logarithmic else _round_steps(most)
    parts = []
    for tick in ticks:
        y = round(TOP + HEIGHT * (1 - scaled(tick) / top), 1)
        parts.append(f'<path d="M{left} {y}H{left + WIDTH}" stroke="#ddd"/>')
        parts.append(_text(left - 40, y + 4, f"{tick:g}"))
    for v in sizes:
        parts.append(_text(place(v, 1.0)[0] - 16, TOP + HEIGHT + 16, str(v)))
    for i, name in enumerate(names):
        points = [place(v, y) for v, y in drawn.get(name, [])]
        parts.append(_polyline(i, name, points))
        parts += [
            f'<circle cx="{x}" cy="{y}" r="2.5" fill="{COLOURS[i % len(COLOURS)]}"/>' for x, y in points
        ]
    return parts


def _round_steps(most: float) -> list[float]:
    """Axis ticks from 0 up: the smallest step of 1, 2 or 5 times a power of ten with at most five ticks."""
    power = 10.0 ** math.floor(math.log10(most / 5))
    step = next(step * power for step in (1, 2, 5, 10) if 5 * step * power >= most)
    return [i * step for i in range(int(most / step) + 1)]


def _polyline(i: int, name: str, points: Sequence[tuple[float, float]]) -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    dash = ' stroke-dasharray="4 3"' if i >= len(COLOURS) else ""
    width = ' stroke-width="2.5"' if name.startswith("isobit") else ""
    return f'<polyline points="{path}" fill="none" stroke="{COLOURS[i % len(COLOURS)]}"{dash}{width}/>'


def _text(x: float, y: float, text: str, size: int = 11) -> str:
    safe = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x}" y="{y}" font-size="{size}">{safe}</text>'


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time and memory over the vocabulary, as SVG.")
    parser.add_argument("results", type=Path, help="the results file of linear_logp")
    parser.add_argument("svg", type=Path, help="the file to write")
    options = parser.parse_args(argv)
    options.svg.write_text(draw(json.loads(options.results.read_text())))
    print(f"{options.svg}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
