"""Speed goals of `combine` and `spread`."""

from isobit.bench.goals import Goal

GOALS = (
    Goal("forward, next to eager", lambda cell: cell.direction == "fwd", most=1.0, against="eager"),
    Goal("forward and backward, next to eager", lambda cell: cell.direction == "fwd_bwd", most=1.0,
         against="eager"),
)  # fmt: skip
