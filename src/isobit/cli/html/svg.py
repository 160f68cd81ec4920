"""Charts of a page as inline SVG, in the page's colours: text is `currentColor`, for light and dark."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from isobit.cli.html.share_chart import COLOURS

#: Pixels of the drawing, and around it, with room for letters that are larger on a phone; and of a line of
#: the legend.
WIDTH, HEIGHT, LEFT, TOP, BELOW, LINE = 620, 300, 60, 24, 62, 24

Point = tuple[float, float, str, str]


@dataclass(frozen=True)
class _Axes:
    """Both logarithmic, from these numbers to those."""

    low: float
    high: float
    bottom: float
    top: float

    def x(self, value: float) -> float:
        return round(LEFT + WIDTH * math.log(value / self.low) / math.log(self.high / self.low), 1)

    def y(self, value: float) -> float:
        return round(TOP + HEIGHT * (1 - math.log(value / self.bottom) / math.log(self.top / self.bottom)), 1)


def roofline(points: Sequence[Point], copy_tbps: float, best_tflops: float) -> str:
    """(FLOP per byte, TFLOP/s, implementation, label) under the two roofs that the run measured."""
    low = min(p[0] for p in points) / 1.5
    high = max(*(p[0] for p in points), best_tflops / copy_tbps) * 1.5
    bottom, top = min(p[1] for p in points) / 1.5, best_tflops * 1.3
    axes = _Axes(low, high, bottom, top)
    ridge = max(low, best_tflops / copy_tbps)  # where the roofs meet
    start = max(low, bottom / copy_tbps)
    roof = (
        f"M{axes.x(start)} {axes.y(min(start * copy_tbps, best_tflops))}"
        f"L{axes.x(ridge)} {axes.y(best_tflops)}H{axes.x(high)}"
    )
    said = f"TFLOP/s; roofs {copy_tbps:.3g} TB/s and {best_tflops:.4g} TFLOP/s"
    return _drawing("roofline", points, axes, roof, "FLOP a byte", said, "TFLOP/s")


def bandwidth(points: Sequence[Point], copy_tbps: float) -> str:
    """(megabytes, TB/s, implementation, label) under the speed of a large copy. What fits into a cache may be
    above it."""
    low, high = min(p[0] for p in points) / 1.5, max(p[0] for p in points) * 1.5
    bottom, top = min(p[1] for p in points) / 1.5, max(copy_tbps, *(p[1] for p in points)) * 1.3
    axes = _Axes(low, high, bottom, top)
    roof = f"M{axes.x(low)} {axes.y(copy_tbps)}H{axes.x(high)}"
    said = f"TB/s; roof: a large copy, {copy_tbps:.3g} TB/s"
    return _drawing("bandwidth", points, axes, roof, "MB that must be read and written", said, "TB/s")


def _drawing(
    name: str, points: Sequence[Point], axes: _Axes, roof: str, under: str, over: str, unit: str
) -> str:
    """The points below a roof, and whose they are."""
    names = sorted(dict.fromkeys(p[2] for p in points), key=lambda n: (n != "isobit", n))
    parts = [
        f'<svg viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + BELOW + LINE * len(names)}" role="img" '
        f'aria-label="{name}">',
        *(_line_across(axes.y(t), f"{t:g}") for t in _decades(axes.bottom, axes.top)),
        *(_tick(axes.x(t), f"{t:g}") for t in _decades(axes.low, axes.high)),
        f'<path class="roof" d="{roof}"/>',
        text(LEFT + WIDTH / 2, TOP + HEIGHT + 42, under, "middle"),
        text(LEFT, TOP - 7, over),
    ]
    for px, py, whose, what in sorted(points, key=lambda point: -names.index(point[2])):  # ours on top
        colour = COLOURS[min(names.index(whose), len(COLOURS) - 1)]
        label = f"<title>{escape(f'{what}: {py:.4g} {unit}')}</title>"
        place = f'cx="{axes.x(px)}" cy="{axes.y(py)}" r="3.5"'
        parts.append(f'<circle {place} fill="{colour}" fill-opacity="0.85">{label}</circle>')
    for i, whose in enumerate(names):
        at = TOP + HEIGHT + BELOW + LINE * i
        parts.append(f'<circle cx="{LEFT + 6}" cy="{at}" r="4" fill="{COLOURS[min(i, len(COLOURS) - 1)]}"/>')
        parts.append(text(LEFT + 16, at + 5, whose))
    return "\n".join([*parts, "</svg>"])


def _decades(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    return [10.0**e for e in range(first, last + 1)]


def _line_across(y: float, label: str) -> str:
    return f'<path class="grid" d="M{LEFT} {y}H{LEFT + WIDTH}"/>' + text(LEFT - 6, y + 4, label, "end")


def _tick(x: float, label: str) -> str:
    return f'<path class="grid" d="M{x} {TOP}V{TOP + HEIGHT}"/>' + text(x, TOP + HEIGHT + 19, label, "middle")


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'
