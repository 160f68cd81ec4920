"""Speed goals of the gated delta rule, forward."""

from collections.abc import Callable

from isobit.bench.goals import Cell, Goal


def _in(series: str) -> Callable[[Cell], bool]:
    return lambda cell: cell.op == series


GOALS = (
    Goal("all of gated_delta_rule", lambda cell: cell.op != "fwd_h", mean=1.0),
    Goal("packed", _in("gated_delta_rule_packed")),
    Goal("states between chunks", _in("fwd_h"), mean=1.0),
    Goal("error", lambda cell: True, most=1.01, figure="rel_rms"),
)
