"""Speed goals of `attention`."""

from isobit.bench.goals import Base, Cell, Goal, Group


def _best(group: Group) -> float | None:
    """The time of the fastest rival that could be timed."""
    times = [group[name]["ms"] for name in ("cudnn", "flash", "flex") if name in group]
    return min(times, default=None)


def _best_fa3(group: Group) -> float | None:
    """FlashAttention-3 with one split, or with its own choice of splits."""
    times = [group[name]["ms"] for name in ("fa3", "fa3:one split") if name in group]
    return min(times, default=None)


BEST, BEST_FA3 = Base("the best rival", _best), Base("fa3, the best of its splits", _best_fa3)


#: Series without a softcap, and with many queries.
_TRAINING = ("attention", "attention_wide", "attention_packed", "attention_window")


def _forward(cell: Cell) -> bool:
    return cell.direction == "fwd" and cell.op in _TRAINING


def _wide(cell: Cell) -> bool:
    return cell.sizes["D"] > 128


def _backward(cell: Cell) -> bool:
    return cell.direction == "bwd"


def _softcap(cell: Cell) -> bool:
    return cell.op in ("attention_softcap", "attention_softcap_bwd")


def _paged(cell: Cell) -> bool:
    return cell.op == "attention_paged"


def _room(cell: Cell) -> bool:
    return cell.op == "attention_room"


def _few_heads(cell: Cell) -> bool:
    return cell.op == "attention_few_heads_bwd"


def _decoding(cell: Cell) -> bool:
    return cell.op == "attention_decode"


def _large(cell: Cell) -> bool:
    """At least 256 MB of 16-bit keys and values."""
    size = cell.sizes
    return _decoding(cell) and 4 * size["B"] * size["S"] * size["KV"] * size["D"] >= 256 << 20


GOALS = (
    Goal("forward", lambda cell: _forward(cell) and not _wide(cell), mean=0.90, against="cudnn"),
    Goal("forward, D = 256", lambda cell: _forward(cell) and _wide(cell), mean=0.90, against="cudnn"),
    Goal("forward", _forward, mean=1.5, against="flash"),
    Goal("forward", _forward, against="flex"),
    Goal(
        "forward, D = 128",
        lambda cell: _forward(cell) and cell.sizes["D"] == 128,
        mean=0.93,
        against=BEST_FA3,
    ),
    Goal("forward, D = 256", lambda cell: _forward(cell) and _wide(cell), mean=0.85, against=BEST_FA3),
    Goal("segments", _forward, mean=0.97, against="isobit:one segment"),
    Goal("backward", _backward, mean=0.70, against="cudnn"),
    Goal("backward", _backward, mean=1.2, against="flash"),
    Goal("backward, D = 256", lambda cell: _backward(cell) and _wide(cell), least=0.90, against="cudnn"),
    Goal("backward, few KV heads", _few_heads, least=0.95, against="cudnn"),
    # At most 1.35 times the time without.
    Goal("softcap", _softcap, least=0.74, against="isobit:no softcap"),
    Goal("softcap", _softcap, against="isobit:attn/1"),
    Goal("decoding from pages of 16", _paged, mean=0.98, against=BEST_FA3),
    # CUDA graphs of engines.
    Goal("decoding, 1k keys of 32k possible", _room, most=1.1, against="isobit:exact sizes"),
    Goal("decoding", _decoding, mean=0.92, least=0.80, against=BEST),
    Goal("decoding, bandwidth, 256 MB and more", _large, least=0.85, against="copy"),
)
