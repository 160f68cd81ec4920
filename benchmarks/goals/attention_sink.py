"""Speed goals of `attention_sink`."""

from isobit.bench.goals import Cell, Goal, floors

#: Tokens from which on goals allow nothing for launches.
MANY = 4096


def _goal(what: str, direction: str) -> Goal:
    def chooses(cell: Cell) -> bool:
        return cell.direction == direction and cell.sizes["N"] >= MANY

    return Goal(what, chooses, most=1.0, against=floors(1 / 0.85))


GOALS = (
    _goal(f"forward, N >= {MANY}: 0.85 of a copy's bandwidth", "fwd"),
    _goal(f"forward and backward, N >= {MANY}: 0.85 of it", "fwd_bwd"),
)
