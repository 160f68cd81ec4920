"""The report of a measurement: one row for each setting of an axis, and where each difference begins."""

import math
from collections.abc import Sequence
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


@dataclass
class Tried:
    """A remedy that was tried: for the modules of a kind that add a difference, or `zero_drift` for the whole
    model. `rows` are those that it is for, measured with it. The times are those of a forward of the longest
    sequence."""

    rows: list[Row]
    before_ms: float
    after_ms: float | None = None
    before_differ: int = 0  # tokens of all these rows without it
    kind: str | None = None  # None for zero_drift
    modules: list[str] = field(default_factory=list)  # that isobit computed; empty for zero_drift
    still: list[str] = field(default_factory=list)  # of them or their kind, what adds a difference with it
    refused: str | None = None  # why it could not be tried

    @property
    def differ(self) -> int:
        """Tokens of all rows that have other bits with it."""
        return sum(row.differ for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "modules": self.modules,
            "still": self.still,
            "rows": [row.to_json() for row in self.rows],
            "before_differ": self.before_differ,
            "before_ms": self.before_ms,
            "after_ms": self.after_ms,
            "refused": self.refused,
            "in_words": str(self),
        }

    def __str__(self) -> str:
        name = "zero_drift" if self.kind is None else f"isobit for {self.kind} ({_modules(self.modules)})"
        if self.refused is not None:
            return f"tried {name}: not possible here: {self.refused}"
        rows = f"{len(self.rows)} comparison{'s' * (len(self.rows) != 1)}"
        if self.kind is None:
            drifting = sum(row.differ > 0 for row in self.rows)
            what = f"other bits in {drifting} of {rows}" if drifting else f"the same bits in all {rows}"
        elif self.still:
            more = f" and {len(self.still) - 1} more" if len(self.still) > 1 else ""
            what = f"{self.still[0]}{more} still adds a difference"
        else:
            what = f"none of them adds a difference any more in {rows}"
        left = f"{self.differ} tokens differ instead of {self.before_differ}"
        if self.kind and not self.still and adding_by_kind(self.rows):
            left += ", since other modules add, too"
        took = f"{self.after_ms:.3g} ms instead of {self.before_ms:.3g} ms"
        return f"tried {name}: {what}; {left}; a forward of the longest sequence takes {took}"


def adding_by_kind(rows: Sequence[Row]) -> dict[str, list[str]]:
    """By kind of module that adds a difference, the names of what does."""
    names: dict[str, set[str]] = {}
    for row in rows:
        for found in row.where.adding if row.where else []:
            names.setdefault(found.kind, set()).add(found.name)
    return {kind: sorted(which) for kind, which in names.items()}


def _modules(names: Sequence[str]) -> str:
    return f"{len(names)} module{'s' * (len(names) != 1)}"


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
    tried: list[Tried] = field(default_factory=list)  # remedies, the last one zero_drift; none unless asked
    repeat: Row | None = None  # the reference against itself

    @property
    def passed(self) -> bool:
        """Whether something was compared, all bits are equal, and nothing was found wrong before them."""
        return bool(self.rows) and not self.differ and not self.causes

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
        found = adding_by_kind(self.rows)
        return {kind: {"modules": names, "call": remedy(kind).call} for kind, names in found.items()}

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
            "tried": [each.to_json() for each in self.tried],
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
            lines.append(f"{kind} ({_modules(found['modules'])}): {found['call']}")
        lines += map(str, self.tried)
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
    if not rows:
        return "nothing was compared"
    if not differ:
        return f"the same bits in all {len(rows)} comparisons, {tokens} log-probabilities"
    worst = max(differ, key=lambda row: row["metrics"]["differ"] / row["metrics"]["tokens"])
    share = f"{worst['metrics']['differ']} of {worst['metrics']['tokens']} tokens"
    return f"other bits in {len(differ)} of {len(rows)} comparisons; most: {worst['axis']}, {share}"
