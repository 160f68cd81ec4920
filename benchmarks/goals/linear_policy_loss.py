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


def _most_mb_of_rows(group: Group) -> float | None:
    """One fp32 dweight, one fp32 dhidden, and the workspace."""
    sizes = sizes_of(next(iter(group.values()))["case"])
    return (4 * (sizes["V"] + sizes["N"]) * sizes["D"] + 13 * GIB // 10) / MB


def _in(name: str, chooses: Callable[[dict[str, int]], bool] = lambda sizes: True) -> Callable[[Cell], bool]:
    return lambda cell: cell.op == name and chooses(cell.sizes)


_MORE = "linear_policy_loss_more"

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
) + (
    Goal("N >= 6000, D >= 2560", _in(_MORE, lambda n: n["N"] >= 6000 and n["D"] >= 2560), most=3.6,
         against=BASELINE),
    Goal("N = 1024", _in(_MORE, lambda n: n["N"] == 1024), most=4.2, against=BASELINE),
    Goal("D = 896", _in(_MORE, lambda n: n["D"] == 896), most=4.5, against=BASELINE),
    Goal("other shapes, memory", _in(_MORE), most=1.0, figure="extra_mb",
         against=Base("dweight and dhidden in fp32 and the workspace", _most_mb_of_rows)),
    Goal("other shapes, against torch.compile", _in(_MORE), most=1.05, against="torch.compile"),
)  # fmt: skip
