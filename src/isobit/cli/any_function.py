"""`isobit check --fn`: any function of rows, and its report."""

import atexit
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import isobit
from isobit.check import report
from isobit.check.any_function.function import RowFunction
from isobit.check.any_function.runner import Named, RowRequest, rows_report, run_rows
from isobit.check.candidate_by_name import object_named
from isobit.check.cell import Cell
from isobit.check.files import in_lines, write
from isobit.check.runner import Interrupted, NothingRan, Stuck
from isobit.check.stamp import gpu_name
from isobit.check.torch_state import preserved
from isobit.cli.arguments import Data
from isobit.cli.check import INTERRUPTED, Files, end_now
from isobit.cli.html import page
from isobit.frame.contract import ContractError

#: Parts of `--data` that such a check reads.
READS = ("--data seed", "--data cotangents")


@dataclass(frozen=True)
class Flags:
    """What names a function of rows on the command line."""

    function: str | None
    inputs: str | None
    rows: str | None
    reduction: str | None


def row_request(
    flags: Flags,
    laws: tuple[str, ...],
    case: str | None,
    data: Data,
    device: torch.device | None,
    others: list[str],
) -> RowRequest | None:
    """The check of a function of rows; None if no flag is for one. `others` are flags that were given and
    have no effect on it."""
    given = {"--fn": flags.function, "--inputs": flags.inputs, "--rows": flags.rows}
    missing = [flag for flag, value in given.items() if not value]
    if len(missing) == 3 and not flags.reduction:
        return None
    if missing:
        raise ContractError(f"{' and '.join(missing)} missing: a function of rows is checked with --fn "
                            "MODULE:FUNCTION --inputs MODULE:FUNCTION --rows x,y")  # fmt: skip
    unread = [*others, *(flag for flag in data.flags if flag not in READS)]
    unread += ["--data cotangents=ones"] if data.cotangents == "ones" else []
    if unread:
        raise ContractError(f"{', '.join(unread)}: no effect on a function of rows (--fn)")
    assert flags.function and flags.inputs and flags.rows
    with preserved():
        function, inputs = (
            Named(object_named(text, flag), text)
            for text, flag in ((flags.function, "--fn"), (flags.inputs, "--inputs"))
        )
        other = (
            Named(object_named(flags.reduction, "--reduction"), flags.reduction) if flags.reduction else None
        )
    rows = tuple(name.strip() for name in flags.rows.split(","))
    return RowRequest(
        function, inputs, rows, other, laws, case, data.inputs.seed, data.cotangents != "none", device
    )


def check_rows_and_report(request: RowRequest, files: Files) -> int:
    """Run the check and write its report; the exit code, as of a check of ops."""
    say: Callable[[str], None] = (lambda text: None) if files.to_stdout else print
    files.check_names()
    start = time.perf_counter()
    mine = request.prepared()
    say(f"isobit {isobit.__version__} check on {mine.device} ({gpu_name(mine.device)})")
    nothing, interrupted, code = None, None, None
    changes = request.changes()
    try:
        cells = run_rows(request, mine, report.progress(len(changes), say))
    except NothingRan as error:
        cells, nothing = error.cells, error
    except Interrupted as error:
        cells, code = error.cells, INTERRUPTED
        interrupted = f"interrupted after {len(cells)} of {len(changes)} cells"
    except Stuck as error:
        cells, code = error.cells, 1
        interrupted = f"stopped after {len(cells)} of {len(changes)} cells: {error}"
        atexit.register(end_now)
    result = rows_report(request, mine, cells, None if nothing is None else str(nothing), interrupted)
    for line in lines_of(mine, cells):
        say(line)
    say(f"\n{result['ok']} ok, {result['fail']} failed, {result['unsupported']} unsupported in "
        f"{time.perf_counter() - start:.0f} s: {report.verdict(result)}")  # fmt: skip
    if files.to_stdout:
        print(in_lines(result), file=files.stdout)
    elif files.json is not None:
        write(files.json, in_lines(result) + "\n")
    if files.html is not None:
        write(files.html, page([result], "isobit check"))
    if nothing is not None:
        raise nothing
    return int(not result["passed"]) if code is None else code


def lines_of(mine: RowFunction, cells: list[Cell]) -> list[str]:
    """What is judged, the table, and what failed or did not run."""
    table = ["", report.table(cells), ""] if cells else []
    said = textwrap.wrap(f"{mine.name}: {mine.in_words}", report.COLUMNS, break_on_hyphens=False)
    return ["", *said, *table, *report.notes(cells)]
