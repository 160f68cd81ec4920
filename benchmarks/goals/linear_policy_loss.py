"""Speed and memory goals of `linear_policy_loss`."""

from collections.abc import Callable

from isobit.bench.goals import Base, Cell, Goal, Group, sizes_of
from isobit.ops.linear_policy_loss.rivals import BASELINE, GIB, MB, SMALL


def _most_mb(workspace: int) -> Base:
    """One fp32 dweight, and the workspace."""

    def figure(group: Group) -> float | None:
        sizes = sizes_of(next(iter(group.values()))["case"])
        return (4 * sizes["V"] * sizes["D"] + workspace) / MB

    return Base("dweight in fp32 and the workspace", figure)


def _in(name: str) -> Callable[[Cell], bool]:
    return lambda cell: cell.op == name


GOALS = tuple(
    goal
    for name, workspace, most in (
        ("linear_policy_loss", 13 * GIB // 10, 3.5), ("linear_policy_loss_small", SMALL, 4.2)
    )
    for goal in (
        Goal(f"{name}, time", _in(name), most=most, against=BASELINE),
        Goal(f"{name}, memory", _in(name), most=1.0, against=_most_mb(workspace), figure="extra_mb"),
    )
) + tuple(
    Goal(f"against {rival}", _in("linear_policy_loss"), most=1.0, against=rival)
    for rival in ("liger", "trl", "torch.compile")
)  # fmt: skip
