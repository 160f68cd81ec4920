"""Speed goals of decoding with the gated delta rule. The recurrence moves 128 KB a value head and token, this
about half of that, so it should win where memory is the limit."""

from isobit.bench.goals import Cell, Goal


def _one(cell: Cell) -> bool:
    return cell.sizes["B"] == 1


def _many(cell: Cell) -> bool:
    return cell.sizes["B"] >= 64


GOALS = (
    Goal("one sequence", _one),
    Goal("64 sequences and more", _many, mean=1.6),
)
