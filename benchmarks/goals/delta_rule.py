"""Speed goals of the delta rule."""

from collections.abc import Callable

from isobit.bench.goals import Cell, Goal, limit


def _few(cell: Cell) -> bool:
    return cell.sizes["B"] == 1 and cell.sizes["H"] == 16


def _mode(cell: Cell) -> str:
    return next((part[5:] for part in cell.case.split() if part.startswith("mode=")), "")


def _in(series: str) -> Callable[[Cell], bool]:
    return lambda cell: cell.op == series


def _no_gate(cell: Cell) -> bool:
    return _mode(cell) in ("none", "ht")


def _many(cell: Cell) -> bool:
    return cell.sizes["B"] * cell.sizes["H"] >= 64


def _streams(cell: Cell) -> bool:
    """No gate, and enough heads that the memory's speed decides."""
    return cell.op == "dhu" and _no_gate(cell) and cell.sizes["B"] * cell.sizes["H"] >= 32


def _many_packed(cell: Cell) -> bool:
    return cell.op == "dhu_packed" and _many(cell)


GOALS = (
    Goal("all", lambda cell: True, mean=1.5, least=1.0),
    Goal("the grid", _in("dhu")),
    Goal("64 heads", _in("dhu_wide")),
    Goal("packed", _in("dhu_packed")),
    Goal("short, grouped, the other layout", _in("dhu_other")),
    Goal("with g", lambda cell: "g" in _mode(cell), mean=1.7),
    Goal("one sequence of 16 heads", _few, mean=1.8),
    Goal("one sequence of 16 heads, no gate", lambda cell: _few(cell) and _no_gate(cell), least=1.4),
    Goal("bandwidth, B H >= 64", _many, least=0.85, against="copy"),
    Goal("bandwidth, B H >= 32, no gate", _streams, least=0.92, against="copy"),
    Goal("bandwidth, packed, B H >= 64", _many_packed, least=0.85, against="copy"),
    Goal("error", lambda cell: True, most=1.01, figure="rel_rms"),
    Goal("host", lambda cell: True, most=1.0, figure="host_us"),
    Goal("host", lambda cell: True, most=1.0, figure="host_us", against=limit(60, "us")),
)
