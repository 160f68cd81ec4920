"""Speed goals of grouped products."""

from collections.abc import Callable

from isobit.bench.goals import Base, Cell, Goal, Group, floors


def _is(*names: str) -> Callable[[Cell], bool]:
    return lambda cell: cell.op in names


def _few() -> Base:
    """With few tokens the weights of the experts that are hit must be read: 0.9 of the bandwidth for that, or
    1.25 times the speed of the rival, whichever takes longer."""
    name = "torch._grouped_mm"

    def figure(group: Group) -> float | None:
        theirs, ours = group.get(name), group.get("isobit")
        if theirs is None or ours is None:
            return None
        return max(float(theirs["ms"]) / 1.25, float(ours["floor_ms"]) / 0.9)

    return Base(f"max({name} / 1.25, floor / 0.9)", figure)


GOALS = (
    Goal(
        "forward and dX, from 4096 tokens on", _is("det_grouped_linear", "det_grouped_linear_dx"), mean=1.03
    ),
    Goal("16 to 512 tokens", _is("det_grouped_linear_few"), mean=1.0, against=_few()),
    Goal("dW in bf16", _is("det_grouped_dw_narrow"), mean=0.95),
    Goal(
        "dW in fp32, by its own bytes and operations",
        _is("det_grouped_dw"),
        mean=1.0,
        against=floors(1 / 0.8),
    ),
)
