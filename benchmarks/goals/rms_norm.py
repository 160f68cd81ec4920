"""Speed goals of `rms_norm`."""

import math
from collections.abc import Sequence

from isobit.bench.goals import Base, Cell, Goal, floors

#: Rows from which on goals allow nothing for launches.
MANY = 32768


def _goals() -> Sequence[Goal]:
    """The time for the bytes that must be moved; and never slower than rivals. With few rows that time is
    shorter than it takes to start and to drain a kernel, so below `MANY` rows some microseconds are added:
    for one kernel forward, for several with a backward."""

    def held(what: str, direction: str, against: str | Base, least: int = 0, most: float = math.inf) -> Goal:
        def chooses(cell: Cell) -> bool:
            mine = cell.direction == direction and cell.sizes["D"] >= 2048
            return mine and least <= cell.sizes["N"] < most

        return Goal(what, chooses, most=1.0, against=against)

    forward, both = "0.92 of a copy's bandwidth", "1.15 of their bytes"
    few, many = f"N < {MANY}, plus launches", f"N >= {MANY}"
    return (
        held(f"forward, {many}: {forward}", "fwd", floors(1 / 0.92), MANY),
        held(f"forward, {few}: {forward}", "fwd", floors(1 / 0.92, 3), most=MANY),
        held(f"forward and backward, {many}: {both}", "fwd_bwd", floors(1.15), MANY),
        held(f"forward and backward, {few}: {both}", "fwd_bwd", floors(1.15, 10), most=MANY),
        *(
            held(f"{direction}, next to {name}", direction, name)
            for name in ("native", "torch.compile", "liger")
            for direction in ("fwd", "fwd_bwd")
        ),
    )


GOALS = _goals()
