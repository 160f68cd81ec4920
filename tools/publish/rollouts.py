"""The table of rollouts: new tokens in a second with their spread, and how far log-probabilities are from the
trainer's."""

from collections.abc import Sequence

from isobit.bench.report import Row


def are_rollouts(rows: Sequence[Row]) -> bool:
    return any(row.get("tokens_per_s") is not None for row in rows)


def rollouts(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each case in each way to run it. In a column of several implementations they have the order
    of the columns of tokens/s."""
    impls = ["isobit", *dict.fromkeys(row["impl"] for row in rows if row["impl"] != "isobit")]
    each = " / ".join(impls)
    speeds = f"tokens/s ({_what_spread(rows)})"
    head = ["case", "run", *(f"{impl} {speeds}" for impl in impls), f"ms to the first token: {each}"]
    lines = [[*head, f"tokens with other bits: {each}", f"k3 KL: {each}"]]
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row["case"], row["direction"]), {})[row["impl"]] = row
    for (case, run), group in groups.items():
        found = [group.get(impl) for impl in impls]
        first, other, k3 = (
            " / ".join("-" if row is None else shown(row) for row in found)
            for shown in (_first, _other_bits, _k3)
        )
        lines.append([case, run, *(_speed(row, group.get("isobit")) for row in found), first, other, k3])
    return lines


def _speed(row: Row | None, ours: Row | None) -> str:
    """With its spread, and with isobit's speed relative to that of another."""
    if row is None:
        return "-"
    least, most = (row["tokens_per_s"] * row["ms"] / ms for ms in (max(_times(row)), min(_times(row))))
    own = f"{row['tokens_per_s']:.0f} ({least:.0f}-{most:.0f})"
    return own if row is ours or ours is None else f"{own}, {row['ms'] / ours['ms']:.2f}x"


def _times(row: Row) -> list[float]:
    """Milliseconds between which its runs are. Older files have their quartiles alone."""
    return row.get("runs_ms") or [row["ms_q25"], row["ms_q75"]]


def _what_spread(rows: Sequence[Row]) -> str:
    if not all("runs_ms" in row for row in rows):
        return "quartiles"
    return f"slowest-fastest of {min(len(row['runs_ms']) for row in rows)}"


def _first(row: Row) -> str:
    return f"{row['first_ms']:.0f}"


def _other_bits(row: Row) -> str:
    return f"{row['tokens_differ']} of {row['tokens']}"


def _k3(row: Row) -> str:
    return f"{row['k3']:.1e}" if row["k3"] else "0"
