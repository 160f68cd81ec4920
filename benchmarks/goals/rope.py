"""Speed goals of `rope`."""

from collections.abc import Sequence

from isobit.bench.goals import Base, Cell, Goal, floors

#: Tokens from which on goals allow nothing for launches.
MANY = 4096


def _goals() -> Sequence[Goal]:
    """0.9 of a copy's bandwidth from `MANY` tokens on; and never slower than eager code."""

    def held(what: str, direction: str, against: str | Base, least: int = 0) -> Goal:
        def chooses(cell: Cell) -> bool:
            return cell.direction == direction and cell.sizes["B"] * cell.sizes["T"] >= least

        return Goal(what, chooses, most=1.0, against=against)

    return (
        held(f"forward, {MANY} tokens or more: 0.9 of a copy's bandwidth", "fwd", floors(1 / 0.9), MANY),
        held(f"forward and backward, {MANY} tokens or more: 0.9 of it", "fwd_bwd", floors(1 / 0.9), MANY),
        held("fwd, next to eager", "fwd", "eager"),
        held("fwd_bwd, next to eager", "fwd_bwd", "eager"),
    )


GOALS = _goals()
