"""`--try`: what each remedy does to a model that drifts, measured.

For each kind of module that adds a difference, the modules that do so are computed by isobit, and the
settings in which they were found are measured once more. Then everything is, by `zero_drift`. The model is
restored after each.
"""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.drift import axes
from isobit.drift.calls import Run
from isobit.drift.remedies import remedy
from isobit.drift.report import Report, Row, Tried, adding_by_kind
from isobit.drift.subject import Progress
from isobit.drift.where import module_of
from isobit.frame.contract import ContractError
from isobit.integrations.hf.drift import zero_drift


@dataclass(frozen=True)
class Attempt:
    """A remedy for a kind of module, or `zero_drift` for all, and the rows that it is for."""

    kind: str | None
    modules: list[str]
    rows: list[Row]
    on: Callable[[], AbstractContextManager[Any]]


#: Measures some axes again: (axes, whether to look for modules, progress).
Again = Callable[[Sequence[str], bool, Progress], Report]


def tried(
    run: Run, sequences: Sequence[Tensor], rows: Sequence[Row], again: Again, say: Progress
) -> list[Tried]:
    """The remedy of each kind that these rows have found and that can be tried alone, and `zero_drift`."""
    before_ms = _forward_ms(run, sequences)
    return [_tried(run, sequences, each, before_ms, again, say) for each in _attempts(run.model, rows)]


def _attempts(model: Any, rows: Sequence[Row]) -> list[Attempt]:
    made = []
    for kind, names in adding_by_kind(rows).items():
        if (applied := remedy(kind).applied) is not None:
            modules = sorted({module_of(name) for name in names})
            of_kind = [row for row in rows if _adding(row, kind, ())]
            made.append(Attempt(kind, modules, of_kind, partial(applied, model, modules)))
    return [*made, Attempt(None, [], list(rows), partial(zero_drift, model))]


def _tried(
    run: Run, sequences: Sequence[Tensor], attempt: Attempt, before_ms: float, again: Again, say: Progress
) -> Tried:
    kind, what = attempt.kind, attempt.kind or "zero_drift"
    named = {(row.axis, row.setting) for row in attempt.rows}
    made = Tried([], before_ms, None, sum(row.differ for row in attempt.rows), kind, attempt.modules)
    try:
        with attempt.on() as own:
            say(f"trying {what}")
            made.after_ms = _forward_ms(run, sequences)
            vs = list(dict.fromkeys(row.axis for row in attempt.rows))
            report = again(vs, kind is not None, lambda line: say(f"trying {what}: {line}"))
    except (ContractError, torch.OutOfMemoryError) as error:
        made.refused = str(error).splitlines()[0]
        return made
    made.rows = [row for row in report.rows if (row.axis, row.setting) in named]
    if len(made.rows) < len(named):
        made.refused = "; ".join(f"{name} did not run: {why}" for name, why in report.skipped.items())
    elif kind is not None:
        made.still = sorted({name for row in made.rows for name in _adding(row, kind, own)})
    return made


def _adding(row: Row, kind: str, own: Collection[str]) -> list[str]:
    """The names of what adds a difference in a row, and is of this kind, or own code of these modules."""
    adding = row.where.adding if row.where else []
    in_own = ("own code", "rope")
    return [f.name for f in adding if f.kind == kind or (f.kind in in_own and module_of(f.name) in own)]


def _forward_ms(run: Run, sequences: Sequence[Tensor], times: int = 3) -> float:
    """The fastest of a few forwards of the longest sequence."""
    longest = max(sequences, key=len)

    def once() -> float:
        if longest.is_cuda:
            torch.cuda.synchronize(longest.device)
        start = time.perf_counter()
        for _, logits in run.logits(axes.alone([longest])[0]):
            logits[0, -1, 0].item()  # waits for the device
        return 1000 * (time.perf_counter() - start)

    return min(once() for _ in range(times))
