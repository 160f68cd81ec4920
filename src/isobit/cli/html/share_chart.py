"""A chart from a benchmark: isobit's share of a rival's speed over the first size, a line for each shape.

Plain SVG, without a plotting library, and the same bytes from the same report.
"""

import math
from collections.abc import Sequence
from typing import Any

from isobit.bench.goals import Cell, cells
from isobit.bench.report import format_stamp

#: Colours that most people can distinguish, on white and on black; ours is the first. With more shapes the
#: colours repeat, dashed.
COLOURS = ("#1a7fc4", "#cf5a00", "#00936b", "#c065a0", "#7d64d0", "#a87700", "#808080")
#: Pixels: a panel, the margins to the left and above, and a line of the legend.
WIDTH, HEIGHT, LEFT, TOP, LINE = 300, 200, 56, 40, 16


def chart(report: dict[str, Any], inline: bool = False) -> str:
    """The SVG of a report with one baseline: a panel for each kind of call. As a file it is black on white;
    `inline` it has the colours of the page, and no stamp."""
    shown = cells(report["rows"], report["against"])
    panels = {op: [c for c in shown if c.op == op] for op in dict.fromkeys(c.op for c in shown)}
    shapes = list(dict.fromkeys(_shape(cell) for cell in shown))
    top = max(1.1, max((cell.share for cell in shown), default=0) * 1.05)
    width = len(panels) * (WIDTH + LEFT) + 20
    height = TOP + HEIGHT + 40 + LINE * math.ceil(len(shapes) / 3) + (6 if inline else 20)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        "" if inline else f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, (op, mine) in enumerate(panels.items()):
        parts += _panel(op, mine, shapes, LEFT + i * (WIDTH + LEFT), top, report["against"])
    for i, shape in enumerate(shapes):
        x, y = LEFT + i % 3 * (width - LEFT) // 3, TOP + HEIGHT + 50 + i // 3 * LINE
        parts += [_line(i, [(x, y - 4), (x + 24, y - 4)]), _text(x + 30, y, shape)]
    parts += [] if inline else [_text(LEFT, height - 6, format_stamp(report["stamp"]), size=7)]
    return "\n".join([*filter(None, parts), "</svg>"]) + "\n"


def _shape(cell: Cell) -> str:
    _, *rest = cell.sizes.items()
    return " ".join(f"{name}={size}" for name, size in rest)


def _panel(
    op: str, shown: Sequence[Cell], shapes: Sequence[str], left: int, top: float, against: str
) -> list[str]:
    name = next(iter(shown[0].sizes))
    sizes = sorted({cell.sizes[name] for cell in shown})
    steps = {size: left + round(i * WIDTH / max(1, len(sizes) - 1)) for i, size in enumerate(sizes)}

    def height(share: float) -> float:
        return round(TOP + HEIGHT * (1 - share / top), 1)

    parts = [_text(left, TOP - 16, f"{op}: share of the speed of {against}", size=12)]
    for tenth in range(0, int(top * 10) + 1, 2):
        y, strong = height(tenth / 10), tenth == 10
        grey = "0.5" if strong else "0.15"
        parts.append(f'<path d="M{left} {y}H{left + WIDTH}" stroke="currentColor" stroke-opacity="{grey}"/>')
        parts.append(_text(left - 24, y + 4, f"{tenth / 10:.1f}"))
    parts += [_text(x - 8, TOP + HEIGHT + 16, str(size)) for size, x in steps.items()]
    parts.append(_text(left + WIDTH // 2, TOP + HEIGHT + 30, name))
    for i, shape in enumerate(shapes):
        mine = sorted((c for c in shown if _shape(c) == shape), key=lambda c: c.sizes[name])
        points = [(steps[cell.sizes[name]], height(cell.share)) for cell in mine]
        parts.append(_line(i, points))
        # Hollow if the rival has other bits: it does not do the same work there.
        for (x, y), cell in zip(points, mine, strict=True):
            fill = 'class="paper" fill="white"' if cell.other_bits else f'fill="{_colour(i)}"'
            parts.append(f'<circle cx="{x}" cy="{y}" r="2.5" {fill} stroke="{_colour(i)}"/>')
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
