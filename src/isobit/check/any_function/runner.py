"""Runs every change of a call on a function of rows, one cell each; no exception stops it."""

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from isobit.check import report
from isobit.check.any_function.batch import Batch, batch_of
from isobit.check.any_function.controls import UNPROVEN
from isobit.check.any_function.first_call import row_function
from isobit.check.any_function.function import RowFunction, where_raised
from isobit.check.any_function.laws import CHANGES, OTHER_BATCHES, Change
from isobit.check.candidate import OWN_CLASS
from isobit.check.cell import FAIL, OK, UNSUPPORTED, Cell
from isobit.check.judge import blame_for, judge
from isobit.check.runner import Interrupted, NothingRan, Stuck
from isobit.check.torch_state import compiled_anew, preserved
from isobit.frame.contract import ContractError
from isobit.frame.device import triton_is_interpreted
from isobit.spec.compare import OutputCheck
from isobit.spec.proof import InputOptions
from isobit.spec.trial import NeverEnds

#: What stands in the place of an op in a report.
OP = "rows"


@dataclass(frozen=True)
class Named:
    """A user's function and its name: `module:name` if a command can import it, and any text otherwise."""

    thing: Any
    name: str
    importable: bool = True


@dataclass(frozen=True)
class RowRequest:
    """What is checked: empty laws and no case mean all of them."""

    function: Named
    inputs: Named
    rows: tuple[str, ...]
    reduction: Named | None = None
    laws: tuple[str, ...] = ()
    case: str | None = None
    seed: int = InputOptions().seed
    gradients: bool = True
    #: Where tensors are moved before the call; None if they stay where they were made.
    device: torch.device | None = None

    def changes(self) -> list[Change]:
        """The cells to run; an error for a law or a case that does not exist."""
        known = tuple(dict.fromkeys(change.law for change in CHANGES))
        for law in self.laws:
            if law not in known:
                raise ContractError(f"law {law!r} needs to know the op; for any function: {', '.join(known)}")
        chosen = [change for change in CHANGES if not self.laws or change.law in self.laws]
        if self.case is not None and self.case not in (change.case for change in chosen):
            names = "; ".join(change.case for change in chosen)
            raise ContractError(f"unknown case {self.case!r}; known: {names}")
        return [change for change in chosen if self.case in (None, change.case)]

    def prepared(self) -> RowFunction:
        """The function after a first call."""
        self.changes()
        if self.reduction is not None and not callable(self.reduction.thing):
            kind = type(self.reduction.thing).__name__
            raise ContractError(f"{self.reduction.name} is {kind}, not a function")
        return row_function(
            self.function.thing, self.inputs.thing, self.rows, name=self.function.name,
            inputs_name=self.inputs.name, seed=self.seed, gradients=self.gradients, device=self.device,
        )  # fmt: skip

    def command(self, laws: Sequence[str] | None = None, case: str | None = None) -> str:
        """The command that repeats it, or one cell of it; a call if functions have no name to import."""
        laws, case = self.laws if laws is None else laws, case or self.case
        given = [self.function, self.inputs, *([self.reduction] if self.reduction else [])]
        if not all(each.importable for each in given):
            return self._call(tuple(laws), case)
        parts = ["TRITON_INTERPRET=1 isobit check" if triton_is_interpreted() else "isobit check"]
        parts += [f"--fn {shlex.quote(self.function.name)} --inputs {shlex.quote(self.inputs.name)}"]
        parts += [f"--rows {shlex.quote(','.join(self.rows))}"]
        parts += [f"--reduction {shlex.quote(self.reduction.name)}"] if self.reduction else []
        parts += [f"--law {law}" for law in laws] + ([f"--case {shlex.quote(case)}"] if case else [])
        parts += [f"--device {self.device}"] if self.device else []
        parts += [f"--data seed={self.seed}"] if self.seed != InputOptions().seed else []
        return " ".join([*parts, *([] if self.gradients else ["--data cotangents=none"])])

    def _call(self, laws: tuple[str, ...], case: str | None) -> str:
        given: dict[str, Any] = {"row_args": self.rows}
        given |= {"laws": laws} if laws else {}
        given |= {"case": case} if case else {}
        given |= {"seed": self.seed} if self.seed != InputOptions().seed else {}
        given |= {} if self.gradients else {"gradients": False}
        given |= {"device": str(self.device)} if self.device else {}
        words = [f"{name}={value!r}" for name, value in given.items()]
        words += ["reduction=<that of before>"] if self.reduction else []
        return f"isobit.testing.check_batch_invariance(<the function>, <its inputs>, {', '.join(words)})"


def run_rows(
    request: RowRequest, mine: RowFunction, progress: Callable[[Cell], None] = lambda cell: None
) -> list[Cell]:
    """A cell for every change. If the call with all rows is already wrong, the first cell says so and nothing
    else runs."""
    cells: list[Cell] = []
    first: Batch | None = None
    broken = ""
    changed_before = list(mine.changed)

    def law(change: Change) -> list[OutputCheck]:
        nonlocal first
        if first is None:
            other = request.reduction
            first = batch_of(mine, other.thing if other else None, other.name if other else "")
        return change.run(first)

    try:
        for change in request.changes():
            again = request.command((change.law,), change.case)
            cell = Cell(OP, mine.name, change.law, change.case, OK, numerics=OWN_CLASS, command=again)
            start, error = time.perf_counter(), None
            if broken:
                cell.status, cell.reason = UNSUPPORTED, broken
            else:
                with preserved() as changed, compiled_anew():
                    error = judge(cell, partial(law, change), partial(where_raised, mine=mine))
                blame_for(cell, list(dict.fromkeys(changed_before + changed)))
                changed_before = []
                if first is None:
                    broken = "its call with all rows failed, so there is nothing to compare with"
            cell.seconds = time.perf_counter() - start
            cells.append(cell)
            progress(cell)
            if isinstance(error, NeverEnds):
                raise error
    except KeyboardInterrupt:
        raise Interrupted(cells) from None
    except NeverEnds as error:
        raise Stuck(cells) from error
    _something_ran(cells, mine)
    return cells


def _something_ran(cells: list[Cell], mine: RowFunction) -> None:
    """An error if nothing ran; or, of a function that refuses every other number of rows, nothing that could
    show whether its rows depend on it."""
    if any(cell.status == FAIL for cell in cells):
        return
    others = [cell for cell in cells if cell.case in OTHER_BATCHES]
    for what, these in (("nothing", cells), ("no other number of rows", others)):
        if these and all(cell.status == UNSUPPORTED for cell in these):
            reasons = "; ".join(dict.fromkeys(cell.reason for cell in these))
            raise NothingRan(f"{what} of {mine.name} was checked: {reasons}", cells)


def rows_report(
    request: RowRequest,
    mine: RowFunction,
    cells: list[Cell],
    nothing_ran: str | None = None,
    interrupted: str | None = None,
) -> dict[str, Any]:
    """The report of a check, with what the function is judged by."""
    result = report.to_json(
        cells, mine.device, command=request.command(), nothing_ran=nothing_ran, interrupted=interrupted
    )
    result["candidates"] = [one | {"serves": mine.summary} for one in result["candidates"]]
    if request.reduction is None:
        result["unproven"] = UNPROVEN
    return result
