"""Speed goals of `logp`."""

from collections.abc import Sequence

from isobit.bench.goals import Base, Cell, Goal, floors


def _goals() -> Sequence[Goal]:
    """Of a tenth of the rows: the time for the bytes that must be moved, plus the microseconds of a launch;
    and never slower than rivals. As `ratio_kl` and `grpo_loss` at this density."""

    def held(what: str, directions: str, against: str | Base) -> Goal:
        def chooses(cell: Cell) -> bool:
            return cell.direction in directions.split() and cell.op == "logp_tenth"

        return Goal(what, chooses, most=1.0, against=against)

    return (
        held("forward, a tenth of the rows", "fwd", floors(1.08, 8)),
        held("forward and backward, a tenth of the rows", "fwd_bwd", floors(1.12, 8)),
        held("both, a tenth of the rows, next to torch.compile", "fwd fwd_bwd", "torch.compile"),
    )


GOALS = _goals()
