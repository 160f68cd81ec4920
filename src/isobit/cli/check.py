"""A check and its report: on the screen, as JSON, as result files and as a page."""

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch

import isobit
from isobit.check import report
from isobit.check.files import check_file, check_writable, in_lines, write
from isobit.check.request import Request, ops_of
from isobit.check.runner import (
    UNSUPPORTED,
    Cell,
    Interrupted,
    NothingRan,
    Stuck,
    how_many,
    in_order,
    observations,
    run,
)
from isobit.check.stamp import gpu_name, results_folder
from isobit.cli.html import page
from isobit.frame.contract import ContractError
from isobit.frame.op import Op

#: The exit code after Ctrl-C, as of a program that the signal ends.
INTERRUPTED = 130


@dataclass(frozen=True)
class Files:
    """Where the report goes in addition to the screen. A JSON path of - is standard output; then nothing else
    is printed there."""

    json: Path | None = None
    results: Path | None = None
    html: Path | None = None
    stdout: TextIO = field(default_factory=lambda: sys.stdout)

    @contextmanager
    def stdout_for_json(self) -> Iterator[None]:
        """Inside this context other output goes to standard error, if the JSON goes to standard output."""
        with redirect_stdout(sys.stderr) if self.to_stdout else nullcontext():
            yield

    @property
    def to_stdout(self) -> bool:
        return str(self.json) == "-"

    def check_names(self) -> None:
        """A file that cannot be written, or that would overwrite another one, is an error before anything
        runs."""
        if self.json is not None and not self.to_stdout:
            check_file(self.json, "--json")
        if self.html is not None:
            check_file(self.html, "--html")
        if self.json is not None and self.html is not None and self.json.resolve() == self.html.resolve():
            raise ContractError(f"--json and --html are both {self.html}: the page would replace the report")

    def check(self, request: Request) -> None:
        """The same, also for result files."""
        self.check_names()
        if self.results is not None:
            for folder in by_folder(ops_of(request)):
                check_writable(_check_file(self.results, folder, request.device), "--results")


def by_folder(ops: Sequence[Op]) -> dict[str, list[str]]:
    """The names of ops by their folders."""
    folders: dict[str, list[str]] = {}
    for one in ops:
        folders.setdefault(one.folder, []).append(one.name)
    return folders


def check_and_report(request: Request, files: Files) -> int:
    """Run a check and write its report; the exit code. After Ctrl-C the report is of what was done. So it is
    if calls never end: then the exit code is 1, and nothing is left to Python's own end of the process."""
    say: Callable[[str], None] = (lambda text: None) if files.to_stdout else print
    files.check(request)
    start = time.perf_counter()
    say(f"isobit {isobit.__version__} check on {request.device} ({gpu_name(request.device)})")
    count = how_many(request)
    total = count.total()
    results = None if files.results is None else _Results(files.results, request, count, say)
    progress = report.progress(total, say)

    def done(cell: Cell) -> None:
        progress(cell)
        if results is not None:
            results.add(cell)

    nothing, interrupted, stuck = None, None, False
    try:
        cells = run(request, done)
    except NothingRan as error:  # the report says so, and then the command does
        cells, nothing = error.cells, error
    except Interrupted as error:
        cells = error.cells
        interrupted = f"interrupted after {_done(cells, total)}"
    except Stuck as error:
        cells, stuck = error.cells, True
        interrupted = f"stopped after {_done(cells, total)}: {error}"
        atexit.register(end_now)
    whole = nothing is None and interrupted is None
    seen, why = observations(request) if whole else [], None if nothing is None else str(nothing)
    result = report.to_json(cells, request.device, None, seen, request.command(), why, interrupted)
    if request.candidate is not None:
        result["candidates"] = [one | {"serves": request.candidate.summary} for one in result["candidates"]]
        (backend,) = request.candidate.backends
        say(f"\n{backend.name}: {request.candidate.in_words}")
    _tell(cells, request, result, say)
    say(f"\n{result['ok']} ok, {result['fail']} failed, {result['unsupported']} unsupported in "
        f"{time.perf_counter() - start:.0f} s: {report.verdict(result)}")  # fmt: skip
    # Last: what cannot be written after all is at least on the screen.
    if files.to_stdout:
        print(in_lines(result), file=files.stdout)
    elif files.json is not None:
        write(files.json, in_lines(result) + "\n")
    if results is not None and interrupted is None:
        results.write_all(cells, seen, result.get("nothing_ran"))
    elif results is not None:
        say(f"nothing of {results.unfinished} was written to {results.folder}: its cells were not all done")
    if files.html is not None:
        write(files.html, page([result], "isobit check"))
    if nothing is not None:
        raise nothing
    return int(not result["passed"]) if interrupted is None or stuck else INTERRUPTED


def _done(cells: list[Cell], total: int) -> str:
    return f"{sum(bool(c.case) for c in cells)} of {total} cells"


def end_now() -> None:
    """The end of this process, whatever led to it, without destructors that would wait for the GPU."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _tell(cells: list[Cell], request: Request, result: dict[str, Any], say: Callable[[str], None]) -> None:
    """The table, the errors that use most of their slack, and what failed or did not run."""
    if cells:
        say("\n" + report.table(cells) + "\n")
    for line in (*report.worst(cells), *report.memory_beyond(map(vars, cells))):
        say(line)
    looser = request.tolerances.looser()
    if request.tolerances.path is not None:
        result["tolerances"] = {"file": request.tolerances.path, "looser": looser}
    for line in looser:
        say(f"LOOSER than isobit's: {line}")
    for line in ("", *report.notes(cells)):
        say(line)


class _Results:
    """One file a folder of ops: what is declared together is proven together. Each is written as soon as all
    of its cells are there, so that a check of many ops that is stopped keeps those that were done."""

    def __init__(
        self, folder: Path, request: Request, count: Mapping[str, int], say: Callable[[str], None]
    ) -> None:
        self.folder, self.request, self.say = folder, request, say
        self.ops = by_folder(ops_of(request))
        self.cells: dict[str, list[Cell]] = {name: [] for name in self.ops}
        self.missing = {name: sum(count.get(op, 0) for op in ops) for name, ops in self.ops.items()}

    @property
    def unfinished(self) -> str:
        return ", ".join(name for name, missing in self.missing.items() if missing)

    def add(self, cell: Cell) -> None:
        name = next(name for name, ops in self.ops.items() if cell.op in ops)
        self.cells[name].append(cell)
        self.missing[name] -= bool(cell.case)
        if cell.case and not self.missing[name] and len(self.ops) > 1:
            try:
                self._write(name, in_order(self.cells[name], self.request), [], None)
            except ContractError as error:  # the check goes on; at its end this is tried once more
                self.say(str(error))

    def write_all(self, cells: list[Cell], seen: list[dict[str, Any]], nothing: str | None) -> None:
        """All of them, with what is known at the end only."""
        for name, ops in self.ops.items():
            mine = [c for c in cells if c.op in ops]
            facts = [fact for fact in seen if fact["op"] in ops]
            why = nothing if all(c.status == UNSUPPORTED for c in mine) else None
            self.say(f"wrote {self._write(name, mine, facts, why)}")

    def _write(self, name: str, cells: list[Cell], facts: list[dict[str, Any]], why: str | None) -> Path:
        path = _check_file(self.folder, name, self.request.device)
        command = replace(self.request, ops=tuple(self.ops[name])).command()
        result = report.to_json(cells, self.request.device, None, facts, command, why)
        write(path, in_lines(result) + "\n")
        return path


def _check_file(results: Path, folder: str, device: torch.device) -> Path:
    return results / results_folder(device) / f"check_{folder}.json"
