"""Speed goals of `attention`."""

from isobit.bench.goals import Base, Cell, Goal, Group


def _best(group: Group) -> float | None:
    """The time of the fastest rival that could be timed."""
    times = [group[name]["ms"] for name in ("cudnn", "flash", "flex") if name in group]
    return min(times, default=None)


BEST = Base("the best rival", _best)


def _forward(cell: Cell) -> bool:
    return cell.direction == "fwd" and cell.op != "attention_decode"


def _backward(cell: Cell) -> bool:
    return cell.direction == "bwd"


def _decoding(cell: Cell) -> bool:
    return cell.op == "attention_decode"


def _large(cell: Cell) -> bool:
    """At least 256 MB of 16-bit keys and values."""
    size = cell.sizes
    return _decoding(cell) and 4 * size["B"] * size["S"] * size["KV"] * size["D"] >= 256 << 20


GOALS = (
    Goal("forward", _forward, mean=0.90, against="cudnn"),
    Goal("forward", _forward, mean=1.5, against="flash"),
    Goal("forward", _forward, against="flex"),
    Goal("segments", _forward, mean=0.97, against="isobit:one segment"),
    Goal("backward", _backward, mean=0.70, against="cudnn"),
    Goal("backward", _backward, mean=1.2, against="flash"),
    Goal("decoding", _decoding, mean=0.92, least=0.80, against=BEST),
    Goal("decoding, bandwidth, 256 MB and more", _large, least=0.85, against="copy"),
)
