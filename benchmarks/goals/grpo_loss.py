"""Speed goals of `grpo_loss`."""

from collections.abc import Sequence

from isobit.bench.goals import Base, Cell, Goal, floors, limit


def _goals() -> Sequence[Goal]:
    """The time for the bytes that must be moved, plus the microseconds of launches; and never slower than
    rivals."""

    def held(what: str, directions: str, against: str | Base, series: str = "", figure: str = "ms") -> Goal:
        def chooses(cell: Cell) -> bool:
            return cell.direction in directions.split() and cell.op.startswith(series or "grpo_loss")

        return Goal(what, chooses, most=1.0, against=against, figure=figure)

    return (
        held("forward", "fwd", floors(1.08, 8)),
        held("forward and backward", "fwd_bwd", floors(1.12, 8)),
        held("both, next to torch.compile", "fwd fwd_bwd", "torch.compile"),
        held("both, next to Liger's GRPO loss", "fwd fwd_bwd", "liger", "grpo_loss_given"),
        held("memory", "fwd fwd_bwd", limit(1, "MB"), figure="extra_mb"),
    )


GOALS = _goals()
