"""Writing results: finds out before the work, not after it, that a file cannot be written."""

import json
from pathlib import Path
from typing import Any

from isobit.frame.contract import ContractError

#: Characters that one line of a report may have.
WIDTH = 700


def check_writable(path: Path, option: str) -> None:
    """Raise ContractError unless a file can be written there; leaves no file behind. `option` is the flag
    that gave the path."""
    there = path.exists()
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        why = f"{path} cannot be written ({error.strerror})"
        raise ContractError(f"{option}: {why}: choose another place; nothing has run yet") from None
    finally:
        for folder in missing:
            if folder.is_dir():
                folder.rmdir()


def check_file(path: Path, option: str) -> None:
    """The same for a file that the command line names. Its folder must be there: a mistyped one is not made.
    A name of - is no file, and standard output is not what this option writes to."""
    if str(path) == "-":
        raise ContractError(f"{option} -: name a file; nothing but --json of a check goes to standard output")
    if not path.parent.is_dir():
        raise ContractError(f"{option} {path}: no folder {path.parent}")
    check_writable(path, option)


def write(path: Path, text: str) -> None:
    """Write a file and the folders above it; raises an error with the reason if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")  # a message may hold anything
    except OSError as error:
        raise ContractError(
            f"{path} could not be written ({error.strerror}); the results are above"
        ) from None


def in_lines(value: Any, indent: str = "") -> str:
    """A report as JSON, with a record in a line where it fits: a diff shows what changed, and a file of
    thousands of cells has neither a number in each line nor one line for everything."""
    line = json.dumps(value)
    if len(indent) + len(line) <= WIDTH or not isinstance(value, dict | list):
        return line
    deeper = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {in_lines(each, deeper)}" for key, each in value.items()]
        begin, end = "{}"
    else:
        parts = [in_lines(each, deeper) for each in value]
        begin, end = "[]"
    return begin + ",".join(f"\n{deeper}{part}" for part in parts) + f"\n{indent}{end}"
