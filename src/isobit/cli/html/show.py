"""Implements `isobit report FILES`: show saved reports together, or compare one with an older one."""

from collections.abc import Sequence
from pathlib import Path

from isobit.check.files import check_file, write
from isobit.cli.html import page
from isobit.cli.html.saved import compare, read_report, summary_line
from isobit.frame.contract import ContractError

#: A multiple of the older time that counts as worse.
SLOWER = 1.05


def show_saved(files: Sequence[Path], html: Path | None, against: Path | None, slower: float | None) -> bool:
    """Print a line for each file, or the differences from the older one, and write the requested page.
    Returns whether something is worse."""
    if html is not None:
        check_file(html, "--html")
    reports = [read_report(path) for path in files]
    worse = 0
    if slower is not None:
        if against is None:
            raise ContractError("--slower is for a comparison: name the older file with --against")
        if "rows" not in reports[0]:
            raise ContractError("--slower has no effect on checks: they have no times to compare")
        if slower < 1:
            raise ContractError(f"--slower {slower:g}: a multiple of the older time, from 1 on")
    if against is None:
        for path, one in zip(files, reports, strict=True):
            print(f"{path}: {summary_line(one)}")
    else:
        if len(reports) != 1:
            raise ContractError("--against compares one file with one older file: name one")
        changes = compare(read_report(against), reports[0], slower or SLOWER)
        for change in changes:
            print(change)
        worse = sum(change.worse for change in changes)
        print(f"{worse} worse, {len(changes) - worse} better or other")
    if html is not None:
        write(html, page(reports, "isobit report"))
        print(f"wrote {html}")
    return worse > 0
