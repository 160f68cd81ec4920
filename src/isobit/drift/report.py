"""The report of a measurement: one row for each setting of an axis, and where each difference begins."""

import math
from dataclasses import dataclass, field
from typing import Any

from isobit.drift.remedies import remedy
from isobit.drift.where import Where

#: Equal bits of fewer tokens than this say little.
FEW = 256


@dataclass(frozen=True)
class Row:
    """One setting of an axis against the reference."""

    axis: str
    setting: str
    metrics: dict[str, Any]
    where: Where | None = None

    @property
    def differ(self) -> int:
        return int(self.metrics["differ"])

    def to_json(self) -> dict[str, Any]:
        where = None if self.where is None else self.where.to_json()
        return {"axis": self.axis, "setting": self.setting, "metrics": _json(self.metrics), "where": where}


def _json(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {name: _json(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Tried:
    """The same rows under `zero_drift`, and the time of a forward of the longest sequence before and after;
    or why the model was refused."""

    rows: list[Row]
    before_ms: float
    after_ms: float | None
    before_differ: int = 0  # tokens of all rows without it
    refused: str | None = None

    @property
    def differ(self) -> int:
        return max((row.differ for row in self.rows), default=0)

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [row.to_json() for row in self.rows],
            "before_differ": self.before_differ,
            "before_ms": self.before_ms,
            "after_ms": self.after_ms,
            "refused": self.refused,
        }

    def __str__(self) -> str:
        if self.refused is not None:
            return f"zero_drift refuses this model: {self.refused}"
        differ = sum(row.differ > 0 for row in self.rows)
        what = f"other bits in {differ}" if differ else "the same bits in all"
        tokens = sum(row.differ for row in self.rows)
        return (f"tried zero_drift: {what} of {len(self.rows)} comparisons, {tokens} tokens differ instead "
                f"of {self.before_differ}; a forward of the longest sequence takes {self.after_ms:.3g} ms "
                f"instead of {self.before_ms:.3g}")  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What `measure` returns. `print` it for a table; `to_json` is what `isobit drift --json` writes."""

    model: str
    device: str
    dtype: str
    random_weights: bool
    sequences: int
    tokens: int
    rows: list[Row]
    skipped: dict[str, str] = field(default_factory=dict)  # axes that could not run, and why
    causes: list[str] = field(default_factory=list)  # of a rollout: what is wrong before any kernel is
    remarks: list[str] = field(default_factory=list)  # what else a reader must know
    tried: Tried | None = None
    repeat: Row | None = None  # the reference against itself

    @property
    def passed(self) -> bool:
        """Whether all bits are equal, and nothing was found wrong before them."""
        return not self.differ and not self.causes

    @property
    def differ(self) -> int:
        """The largest number of tokens with other bits on any axis."""
        return max((row.differ for row in self.rows), default=0)

    @property
    def notes(self) -> list[str]:
        notes = []
        fewest = min((row.metrics["tokens"] for row in self.rows if not row.differ), default=FEW)
        if fewest < FEW:
            notes.append(f"only {fewest} tokens were compared on an axis: equal bits of so few say little")
        if self.random_weights:
            notes.append("the weights are random: probabilities are flat, and differences smaller or larger "
                         "than in a trained model")  # fmt: skip
        return notes + self.remarks + [f"{axis} did not run: {why}" for axis, why in self.skipped.items()]

    @property
    def remedies(self) -> dict[str, dict[str, Any]]:
        """By kind of module that adds a difference: how many modules do, and what removes it."""
        names: dict[str, set[str]] = {}
        for row in self.rows:
            for found in row.where.adding if row.where else []:
                names.setdefault(found.kind, set()).add(found.name)
        return {kind: {"modules": sorted(which), "call": remedy(kind)} for kind, which in names.items()}

    def to_json(self) -> dict[str, Any]:
        return {
            "suite": "isobit drift",
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "random_weights": self.random_weights,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "passed": self.passed,
            "causes": self.causes,
            "repeat": None if self.repeat is None else self.repeat.to_json(),
            "axes": [row.to_json() for row in self.rows],
            "remedies": self.remedies,
            "notes": self.notes,
            "tried": None if self.tried is None else self.tried.to_json() | {"in_words": str(self.tried)},
        }

    def __str__(self) -> str:
        head = (
            f"{self.model}, {self.dtype} on {self.device}: {self.sequences} sequences, {self.tokens} tokens"
        )
        shown = [*([] if self.repeat is None else [self.repeat]), *self.rows]
        lines = [head, *self.causes, "", table(shown), ""]
        for row in shown:
            lines += begins(row)
        for kind, found in self.remedies.items():
            count = len(found["modules"])
            lines.append(f"{kind} ({count} module{'s' * (count > 1)}): {found['call']}")
        lines += [str(self.tried)] if self.tried is not None else []
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines).rstrip()


def table(rows: list[Row]) -> str:
    """The most-read metrics of each row, in at most 80 columns."""
    lines = [f"{'':40s} {'other bits':>13s} {'k3 KL':>8s} {'max dp':>8s} {'ratio':>7s}"]
    for row in rows:
        m = row.metrics
        name = f"{row.axis}: {row.setting}"
        bits = f"{m['differ']} of {m['tokens']}"
        numbers = f"{m['k3_kl']:8.1e} {m['probs_diff_max']:8.1e} {m['ratio_percentiles']['100']:7.4f}"
        lines.append(f"{name:40s} {bits:>13s} {numbers}")
    return "\n".join(lines)


def begins(row: Row, most: int = 4) -> list[str]:
    """Where the difference of a row begins, and what else adds to it."""
    if row.where is None or (first := row.where.first) is None:
        return []
    rest = [found for found in row.where.adding if found is not first]
    lines = [f"{row.axis}, {row.setting}: begins at {first.name} ({first.kind}): inputs equal, "
             f"outputs differ for {len(first.adds)} of {first.tokens} tokens"]  # fmt: skip
    rest.sort(key=lambda found: -(found.added or 0.0))
    for found in rest[:most]:
        size = "" if found.added is None else f", {found.added:.1e} of its largest output"
        lines.append(f"    then {found.name} ({found.kind}){size}")
    if len(rest) > most:
        lines.append(f"    and {len(rest) - most} more that add")
    return lines


def verdict(report: dict[str, Any]) -> str:
    """One sentence about a report."""
    rows = report["axes"]
    differ = [row for row in rows if row["metrics"]["differ"]]
    tokens = sum(row["metrics"]["tokens"] for row in rows)
    if (repeat := report.get("repeat")) and (count := repeat["metrics"]["differ"]):
        return f"the model does not repeat itself: {count} of {repeat['metrics']['tokens']} tokens"
    if not differ and (causes := report.get("causes")):
        return str(causes[0])
    if not differ:
        return f"the same bits in all {len(rows)} comparisons, {tokens} log-probabilities"
    worst = max(differ, key=lambda row: row["metrics"]["differ"] / row["metrics"]["tokens"])
    share = f"{worst['metrics']['differ']} of {worst['metrics']['tokens']} tokens"
    return f"other bits in {len(differ)} of {len(rows)} comparisons; most: {worst['axis']}, {share}"
