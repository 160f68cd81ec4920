"""A chart from a benchmark: isobit's share of a rival's speed over the first size, a line for each shape.

Plain SVG, without a plotting library, and the same bytes from the same report.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isobit.bench.goals import Cell, cells
from isobit.bench.report import format_stamp

#: Colours that most people can distinguish, on white and on black; ours is the first. With more shapes the
#: colours repeat, dashed.
COLOURS = ("#1a7fc4", "#cf5a00", "#00936b", "#c065a0", "#7d64d0", "#a87700", "#808080")
#: Pixels: a panel, the margins to the left and above, and a line of the legend.
WIDTH, HEIGHT, LEFT, TOP, LINE = 300, 200, 56, 40, 16


def chart(report: dict[str, Any]) -> str:
    """The SVG file of a report with one baseline, black on white: a panel for each kind of call, side by
    side."""
    shown = _Shown.of(report)
    width = len(shown.panels) * (WIDTH + LEFT) + 20
    height = TOP + HEIGHT + 40 + LINE * math.ceil(len(shown.shapes) / 3) + 20
    parts = [_opened(width, height), f'<rect width="{width}" height="{height}" fill="white"/>']
    for i, (op, mine) in enumerate(shown.panels.items()):
        parts += _panel(op, mine, shown, LEFT + i * (WIDTH + LEFT))
    for i, shape in enumerate(shown.shapes):
        parts += _entry(i, shape, LEFT + i % 3 * (width - LEFT) // 3, TOP + HEIGHT + 50 + i // 3 * LINE)
    parts.append(_text(LEFT, height - 6, format_stamp(report["stamp"]), size=7))
    return "\n".join([*parts, "</svg>"]) + "\n"


def inline_charts(report: dict[str, Any]) -> list[str]:
    """The same for a page, in its colours: every panel, and the legend, is a drawing of its own. So they
    stand below each other on a phone, each as wide as it, and nothing is cut off."""
    shown, width = _Shown.of(report), LEFT + WIDTH + 20
    drawings = [
        [_opened(width, TOP + HEIGHT + 40), *_panel(op, mine, shown, LEFT), "</svg>"]
        for op, mine in shown.panels.items()
    ]
    legend = [part for i, shape in enumerate(shown.shapes) for part in _entry(i, shape, LEFT, LINE * (i + 1))]
    drawings.append([_opened(width, LINE * (len(shown.shapes) + 1)), *legend, "</svg>"])
    return ["\n".join(parts) for parts in drawings]


@dataclass(frozen=True)
class _Shown:
    """What all panels have in common."""

    panels: dict[str, list[Cell]]  # by kind of call
    shapes: list[str]
    top: float  # the largest share on the axis
    against: str

    @classmethod
    def of(cls, report: dict[str, Any]) -> "_Shown":
        shown = cells(report["rows"], report["against"])
        panels = {op: [c for c in shown if c.op == op] for op in dict.fromkeys(c.op for c in shown)}
        top = max(1.1, max((cell.share for cell in shown), default=0) * 1.05)
        return cls(panels, list(dict.fromkeys(_shape(cell) for cell in shown)), top, report["against"])


def _opened(width: int, height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
    )


def _entry(i: int, shape: str, x: int, y: int) -> list[str]:
    """A line of the legend."""
    return [_line(i, [(x, y - 4), (x + 24, y - 4)]), _text(x + 30, y, shape)]


def _shape(cell: Cell) -> str:
    _, *rest = cell.sizes.items()
    return " ".join(f"{name}={size}" for name, size in rest)


def _panel(op: str, own: Sequence[Cell], shown: _Shown, left: int) -> list[str]:
    name, top = next(iter(own[0].sizes)), shown.top
    sizes = sorted({cell.sizes[name] for cell in own})
    steps = {size: left + round(i * WIDTH / max(1, len(sizes) - 1)) for i, size in enumerate(sizes)}

    def height(share: float) -> float:
        return round(TOP + HEIGHT * (1 - share / top), 1)

    parts = [_text(left, TOP - 16, f"{op}: share of the speed of {shown.against}", size=12)]
    for tenth in range(0, int(top * 10) + 1, 2):
        y, strong = height(tenth / 10), tenth == 10
        grey = "0.5" if strong else "0.15"
        parts.append(f'<path d="M{left} {y}H{left + WIDTH}" stroke="currentColor" stroke-opacity="{grey}"/>')
        parts.append(_text(left - 24, y + 4, f"{tenth / 10:.1f}"))
    parts += _labels(steps, TOP + HEIGHT + 16)
    parts.append(_text(left + WIDTH // 2, TOP + HEIGHT + 30, name))
    for i, shape in enumerate(shown.shapes):
        mine = sorted((c for c in own if _shape(c) == shape), key=lambda c: c.sizes[name])
        points = [(steps[cell.sizes[name]], height(cell.share)) for cell in mine]
        parts.append(_line(i, points))
        # Hollow if the rival has other bits: it does not do the same work there.
        for (x, y), cell in zip(points, mine, strict=True):
            fill = 'class="paper" fill="white"' if cell.other_bits else f'fill="{_colour(i)}"'
            parts.append(f'<circle cx="{x}" cy="{y}" r="2.5" {fill} stroke="{_colour(i)}"/>')
    return parts


def _labels(steps: dict[int, int], y: int) -> list[str]:
    """The sizes below the axis, without those that would lie over the one before."""
    parts, free = [], 0
    for size, x in steps.items():
        if x - 8 >= free:
            parts.append(_text(x - 8, y, str(size)))
            free = x - 8 + 8 * len(str(size))  # a digit is at most 7 pixels wide
    return parts


def _colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def _line(i: int, points: Sequence[tuple[float, float]]) -> str:
    dash = ' stroke-dasharray="4 3"' if i >= len(COLOURS) else ""
    path = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{_colour(i)}"{dash}/>'


def _text(x: float, y: float, text: str, size: int = 11) -> str:
    safe = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x}" y="{y}" font-size="{size}">{safe}</text>'
