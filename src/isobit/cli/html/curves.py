"""Curves over the steps of a run, as inline SVG in the page's colours."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from isobit.cli.html.svg import COLOURS, text

#: Pixels of the drawing, and around it. Small, so that the words are readable on a phone.
WIDTH, HEIGHT, LEFT, TOP, BELOW = 320, 170, 46, 22, 38
#: Pixels between the lowest decade of a logarithmic axis and 0, which is below it.
TO_ZERO = 26


@dataclass(frozen=True)
class Curve:
    name: str
    points: Sequence[tuple[float, float]]
    #: Steps are missing: mark those that were measured.
    dotted: bool = False


def chart(curves: Sequence[Curve], unit: str, log: bool = False) -> str:
    """The curves from step 0 on and from 0 up. With `log` the axis has decades, and 0 is a separate line
    below them."""
    last = max((x for curve in curves for x, _ in curve.points), default=0) or 1
    values = [y for curve in curves for _, y in curve.points]
    ticks, y = _decades(values) if log else _linear(values)

    def x(step: float) -> float:
        return round(LEFT + WIDTH * step / last, 1)

    rows = -(-len(curves) // 2)
    parts = [
        f'<svg viewBox="0 0 {LEFT + WIDTH + 12} {TOP + HEIGHT + BELOW + 16 * rows}" role="img" '
        f'aria-label="{escape(unit)}">',
        text(4, 11, unit),
    ]
    for value, words in ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y(value)}h{WIDTH}"/>')
        parts.append(text(LEFT - 6, y(value) + 4, words, "end"))
    for step in _round_numbers(last):
        parts.append(text(x(step), TOP + HEIGHT + 15, f"{step:g}", "middle"))
    parts.append(text(LEFT + WIDTH / 2, TOP + HEIGHT + 28, "step", "middle"))
    for i, curve in enumerate(curves):
        colour = COLOURS[i % len(COLOURS)]
        places = [(x(a), y(b)) for a, b in curve.points]
        line = "L".join(f"{a} {b}" for a, b in places)
        if line:
            parts.append(f'<path class="curve" stroke="{colour}" d="M{line}"/>')
        if curve.dotted:
            parts += [f'<circle cx="{a}" cy="{b}" r="2.4" fill="{colour}"/>' for a, b in places]
        at, down = LEFT + (i % 2) * WIDTH / 2, TOP + HEIGHT + BELOW + 6 + 16 * (i // 2)
        parts.append(f'<path class="curve" stroke="{colour}" d="M{at} {down - 4}h14"/>')
        parts.append(text(at + 19, down, curve.name))
    return "\n".join([*parts, "</svg>"])


Axis = tuple[list[tuple[float, str]], Callable[[float], float]]


def _linear(values: Sequence[float]) -> Axis:
    """(ticks and their labels, position of a value) from 0 to the largest."""
    top = max(values, default=0.0) or 1.0
    ticks = _round_numbers(top)
    top = max(top, ticks[-1])
    return [(t, f"{t:g}") for t in ticks], lambda value: round(TOP + HEIGHT * (1 - value / top), 1)


def _decades(values: Sequence[float]) -> Axis:
    above = [value for value in values if value > 0] or [1.0]
    low, high = math.floor(math.log10(min(above))), math.ceil(math.log10(max(above)))
    high = max(high, low + 1)
    height = HEIGHT - TO_ZERO

    def y(value: float) -> float:
        share = (math.log10(value) - low) / (high - low) if value > 0 else 0.0
        return round(TOP + height * (1 - share) if value > 0 else TOP + HEIGHT, 1)

    step = -(-(high - low) // 5)
    ticks = [(10.0**e, f"1e{e}") for e in range(high, low - 1, -step)]
    return [*ticks, (0.0, "0")], y


def _round_numbers(top: float) -> list[float]:
    """Ticks from 0 to about the top, four to eight of them, with a step of 1, 2 or 5 times a power of ten."""
    rough = top / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(n * power for n in (5, 2, 1) if n * power <= rough)
    return [round(i * step, 10) for i in range(math.floor(top / step + 1e-9) + 1)]
