"""Speed goals of decoding with the gated delta rule. The recurrence moves 128 KB a value head and token, this
about half of that, so it should win where memory is the limit."""

from isobit.bench.goals import Cell, Goal, floors


def _one(cell: Cell) -> bool:
    return cell.sizes["B"] == 1


def _many(cell: Cell) -> bool:
    return cell.sizes["B"] >= 64


def _chunk(cell: Cell) -> bool:
    """A chunk is decoded without anything else: in the other series counts are put back before each call."""
    return cell.op.endswith("_chunk")


GOALS = (
    Goal("one sequence", _one, least=1.0),
    Goal("8 sequences", lambda cell: cell.sizes["B"] == 8),
    Goal("64 sequences and more", _many, mean=1.6),
    Goal("a whole chunk, 64 sequences and more", lambda cell: _many(cell) and _chunk(cell), least=1.6),
    Goal("bytes, 64 sequences and more", _many, against=floors(1)),
    Goal("host", _chunk, most=1.0, figure="host_us"),
)
