"""Speed goals of the gated delta rule. FLA raises an error in its backward with some versions of Triton:
there its pieces stand for it, which do less."""

from isobit.bench.goals import Base, Cell, Goal, Group


def _states(cell: Cell) -> bool:
    return cell.op == "fwd_h"


def _forward(cell: Cell) -> bool:
    return cell.direction == "fwd" and not _states(cell)


def _both(cell: Cell) -> bool:
    return cell.direction == "fwd_bwd"


def _packed(cell: Cell) -> bool:
    return cell.op.endswith("_packed")


def fla_or_pieces(figure: str) -> Base:
    """Of FLA, or where it refuses its backward, of its pieces."""

    def of(group: Group) -> float | None:
        return next((group[name][figure] for name in ("fla", "fla_pieces") if name in group), None)

    return Base("fla or its pieces", of)


GOALS = (
    Goal("forward", _forward, mean=1.5),
    Goal("forward, packed", lambda cell: _forward(cell) and _packed(cell)),
    Goal("forward and backward", _both, mean=1.3, against=fla_or_pieces("ms")),
    Goal(
        "forward and backward, packed", lambda cell: _both(cell) and _packed(cell),
        against=fla_or_pieces("ms"),
    ),
    Goal("forward", _forward, mean=0.9, against="flash_qla"),
    Goal("forward and backward", _both, mean=0.85, against="flash_qla"),
    Goal("states between chunks", _states, mean=1.0),
    Goal("error", lambda cell: True, most=1.01, figure="rel_rms"),
    Goal("host, forward", _forward, most=1.0, figure="host_us"),
    Goal("host, both", _both, most=1.0, figure="host_us", against=fla_or_pieces("host_us")),
)  # fmt: skip
