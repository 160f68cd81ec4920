"""Which result files are up to date: those that were measured with the current kernels."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit.contract import ContractError
from isobit.op import OPS
from isobit.stamp import why_stale


@dataclass(frozen=True)
class Result:
    """One result file: why it is stale, None if it is not, and the command that renews it."""

    path: Path
    stale: str | None
    command: str


def results_in(folder: Path) -> list[Result]:
    """Every result file under a folder, by name."""
    if not folder.is_dir():
        raise ContractError(f"--results {folder}: no such folder")
    return [examine(path, folder) for path in sorted(folder.rglob("*.json"))]


def examine(path: Path, folder: Path) -> Result:
    try:
        report = json.loads(path.read_text())
        stamp = report["stamp"]
        return Result(path, why_stale(stamp), f"{_command(path, report)} {_into(path, folder, report)}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ContractError(f"{path}: not a result file of isobit ({type(error).__name__})") from None


def _command(path: Path, report: dict[str, Any]) -> str:
    """The command that produced it; for an old file without one, reconstructed from its contents."""
    if "command" in report:
        return re.sub(r" --results \S+", "", str(report["command"]))  # in files of earlier versions
    if "rows" in report:
        return f"isobit bench --op {path.stem}"
    tried = report["candidates"] if "candidates" in report else report["runs"]
    pairs = [(each["op"], each.get("candidate", each.get("backend"))) for each in tried]
    pairs = [(op, backend) for op, backend in pairs if op in OPS]  # the control of a memcheck is not an op
    ops = dict.fromkeys(op for op, _ in pairs)
    words = [report["suite"], *(f"--op {op}" for op in ops)]
    backends = dict.fromkeys(backend for _, backend in pairs)
    every = {backend.name for op in ops for backend in OPS[op].backends}
    if "candidates" in report and set(backends) != every:
        words += [f"--backend {backend}" for backend in backends]
    return " ".join(words)


def _into(path: Path, folder: Path, report: dict[str, Any]) -> str:
    """The output flag: a check with a name of its own was written with --json."""
    named = [f"check_{op.folder}" for op in OPS.values()]
    if "candidates" in report and path.stem not in named:
        return f"--json {path}"
    return f"--results {folder}"


def lines(results: Sequence[Result], only_stale: bool) -> list[str]:
    """One line per file, and below a stale one the command that renews it."""
    found = []
    for result in results:
        if result.stale is not None:
            found += [f"stale  {result.path}: {result.stale}", f"       {result.command}"]
        elif not only_stale:
            found.append(f"fresh  {result.path}")
    count = sum(result.stale is not None for result in results)
    return [*found, f"{count} of {len(results)} result files are stale"]
