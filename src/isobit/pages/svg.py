"""Charts of a page as inline SVG, in the page's colours: text is `currentColor`, for light and dark."""

import math
from collections.abc import Sequence
from html import escape

from isobit.bench.charts import COLOURS

#: Pixels of the drawing, and around it.
WIDTH, HEIGHT, LEFT, TOP, BELOW = 620, 300, 60, 16, 44

Point = tuple[float, float, str, str]


def roofline(points: Sequence[Point], copy_tbps: float, best_tflops: float) -> str:
    """(FLOP per byte, TFLOP/s, implementation, label) under the two roofs that the run measured."""
    names = sorted(dict.fromkeys(p[2] for p in points), key=lambda n: (n != "isobit", n))
    low = min(p[0] for p in points) / 1.5
    high = max(*(p[0] for p in points), best_tflops / copy_tbps) * 1.5
    bottom, top = min(p[1] for p in points) / 1.5, best_tflops * 1.3

    def x(value: float) -> float:
        return round(LEFT + WIDTH * math.log(value / low) / math.log(high / low), 1)

    def y(value: float) -> float:
        return round(TOP + HEIGHT * (1 - math.log(value / bottom) / math.log(top / bottom)), 1)

    ridge = max(low, best_tflops / copy_tbps)  # where the roofs meet
    start = max(low, bottom / copy_tbps)
    parts = [
        f'<svg viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + BELOW + 18 * len(names)}" role="img" '
        f'aria-label="roofline">',
        *(_line_across(y(t), f"{t:g}") for t in _decades(bottom, top)),
        *(_tick(x(t), f"{t:g}") for t in _decades(low, high)),
        f'<path class="roof" d="M{x(start)} {y(min(start * copy_tbps, best_tflops))}'
        f'L{x(ridge)} {y(best_tflops)}H{x(high)}"/>',
        text(LEFT + WIDTH / 2, TOP + HEIGHT + 34, "FLOP a byte", "middle"),
        text(LEFT, TOP - 4, f"TFLOP/s; roofs {copy_tbps:.3g} TB/s and {best_tflops:.4g} TFLOP/s"),
    ]
    for px, py, name, what in sorted(points, key=lambda point: -names.index(point[2])):  # ours on top
        colour = COLOURS[min(names.index(name), len(COLOURS) - 1)]
        label = f"<title>{escape(f'{what}: {py:.4g} TFLOP/s')}</title>"
        place = f'cx="{x(px)}" cy="{y(py)}" r="3.5"'
        parts.append(f'<circle {place} fill="{colour}" fill-opacity="0.85">{label}</circle>')
    for i, name in enumerate(names):
        at = TOP + HEIGHT + BELOW + 18 * i
        parts.append(f'<circle cx="{LEFT + 6}" cy="{at}" r="4" fill="{COLOURS[min(i, len(COLOURS) - 1)]}"/>')
        parts.append(text(LEFT + 16, at + 4, name))
    return "\n".join([*parts, "</svg>"])


def _decades(low: float, high: float) -> list[float]:
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    return [10.0**e for e in range(first, last + 1)]


def _line_across(y: float, label: str) -> str:
    return f'<path class="grid" d="M{LEFT} {y}H{LEFT + WIDTH}"/>' + text(LEFT - 6, y + 4, label, "end")


def _tick(x: float, label: str) -> str:
    return f'<path class="grid" d="M{x} {TOP}V{TOP + HEIGHT}"/>' + text(x, TOP + HEIGHT + 16, label, "middle")


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'
