"""A check and its report: on the screen, as JSON, as result files and as a page."""

import atexit
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch

import isobit
from isobit.check import report
from isobit.check.files import check_file, check_writable, write
from isobit.check.request import Request, ops_of
from isobit.check.runner import (
    UNSUPPORTED,
    Cell,
    Interrupted,
    NothingRan,
    Stuck,
    how_many,
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
    total = how_many(request)
    nothing, interrupted, stuck = None, None, False
    try:
        cells = run(request, report.progress(total, say))
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
        print(json.dumps(result, indent=1), file=files.stdout)
    elif files.json is not None:
        write(files.json, json.dumps(result, indent=1) + "\n")
    if files.results is not None and interrupted is None:
        _write_results(files.results, cells, seen, request, say, result.get("nothing_ran"))
    elif files.results is not None:
        say(f"nothing was written to {files.results}: result files are of whole checks")
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


def _write_results(
    folder: Path,
    cells: list[Cell],
    seen: list[dict[str, Any]],
    request: Request,
    say: Callable[[str], None],
    nothing: str | None,
) -> None:
    """One file a folder of ops: what is declared together is proven together."""
    for name, ops in by_folder(ops_of(request)).items():
        path = _check_file(folder, name, request.device)
        mine = [c for c in cells if c.op in ops]
        facts = [fact for fact in seen if fact["op"] in ops]
        command = replace(request, ops=tuple(ops)).command()
        why = nothing if all(c.status == UNSUPPORTED for c in mine) else None
        result = report.to_json(mine, request.device, None, facts, command, why)
        write(path, json.dumps(result, indent=1) + "\n")
        say(f"wrote {path}")


def _check_file(results: Path, folder: str, device: torch.device) -> Path:
    return results / results_folder(device) / f"check_{folder}.json"
