"""Lists result files that are out of date, with the command that refreshes each.

    python -m publish.stale                every result file under results/
    python -m publish.stale --only         those that are out of date
    python -m publish.stale --every        names every case that a file lacks, not the first few
    python -m publish.stale --strict       exits 1 if one is stale or unfinished

A file is fresh if it was measured with the current kernels. An unfinished benchmark stopped before its last
case. A file is missing if an op or a suite is declared and nobody has measured it on this GPU, and it is
incomplete if it lacks cases that are declared: a run of a part, such as `--core`, replaces a whole file.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isobit.bench.resume import UNFINISHED
from isobit.bench.suites import suite_names
from isobit.check.stamp import why_stale
from isobit.frame.contract import ContractError
from isobit.frame.op import OPS, public_ops
from isobit.spec.proofs import proofs
from publish.lacking import lacking, subject_named

#: Cases of a series that are named, of those that a file lacks.
NAMED = 3


@dataclass(frozen=True)
class Result:
    """One result file: why it is stale, None if it is not; what an unfinished one lacks; which declared cases
    it lacks, by series; and the command that renews, completes or, if it is missing, makes it."""

    path: Path
    stale: str | None
    command: str
    missing: bool = False
    lacks: str | None = None
    cases: Mapping[str, Sequence[str]] = field(default_factory=dict)


def results_in(folder: Path) -> list[Result]:
    """Every result file under a folder, by name, and for every GPU in it those that are missing."""
    if not folder.is_dir():
        raise ContractError(
            f"--results {folder}: no such folder; run this in a checkout of isobit, or name a folder that "
            "`isobit bench --results` or `isobit check --results` has written"
        )
    present = [examine(path, folder) for path in sorted(folder.rglob("*.json"))]
    # A CPU has no results that are complete: it has no memcheck, and times there are of no interest.
    gpus = {result.path.parent for result in present if result.path.parent.name != "cpu"}
    there = {result.path for result in present}
    absent = [
        Result(gpu / name, None, f"{command} --results {folder}", missing=True)
        for gpu in gpus for name, command in _declared().items() if gpu / name not in there
    ]  # fmt: skip
    return sorted([*present, *absent], key=lambda result: result.path)


def _declared() -> dict[str, str]:
    """The result files that a GPU can have, with the commands that make them: a check, a memcheck and a
    benchmark of every folder of ops, and the suites."""
    folders: dict[str, list[str]] = {}
    for name, op in public_ops().items():
        folders.setdefault(op.folder, []).append(name)
    commands = {f"{name}.json": f"isobit bench --suite {name}" for name in suite_names()}
    for folder, names in folders.items():
        commands[f"check_{folder}.json"] = " ".join(["isobit check", *(f"--op {name}" for name in names)])
        watched = [name for name in names if proofs()[name].kernels]
        if watched:
            every = (f"--op {name}" for name in watched)
            commands[f"memcheck_{folder}.json"] = " ".join(["isobit memcheck", *every])
        commands[f"{folder}.json"] = f"isobit bench --op {folder if folder in names else names[0]}"
    return commands


def examine(path: Path, folder: Path) -> Result:
    try:
        report = json.loads(path.read_text())
        old = why_stale(report["stamp"], report.get("rows", ()))
        noted = (note for note in report.get("notes", ()) if note.startswith(UNFINISHED))
        lacks = next((note.removeprefix(UNFINISHED) for note in noted), None)
        cases = _declared_and_not_timed(path, report) if lacks is None else {}  # first, that run's own cases
        # Whatever part was timed, all of it is wanted.
        again = _declared()[path.name] if cases else _command(path, report)
        command = f"{again} {_into(path, folder, report)}"
        if (lacks is not None or cases) and old is None:
            command += " --resume"
        return Result(path, old, command, lacks=lacks, cases=cases)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ContractError(f"{path}: not a result file of isobit ({type(error).__name__})") from None


def _declared_and_not_timed(path: Path, report: dict[str, Any]) -> dict[str, list[str]]:
    """By series, the cases that a benchmark on a GPU lacks. A CPU times small versions of them."""
    subject = subject_named(path.stem) if "rows" in report and path.parent.name != "cpu" else None
    return {} if subject is None else lacking(subject, report)


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


def lines(results: Sequence[Result], only_stale: bool, every: bool = False) -> list[str]:
    """One line per file, and below one that is not up to date the command that makes it so, and the cases
    that it lacks."""
    listed = []
    for result in results:
        state = _state(result)
        why = result.stale or result.lacks or _how_many(result)
        if state != "fresh":
            listed += [f"{state}  {result.path}{': ' if why else ''}{why}", f"       {result.command}"]
            listed += [f"       {each}" for each in _cases(result, every)]
        elif not only_stale:
            listed.append(f"fresh  {result.path}")
    count = Counter(map(_state, results))
    more = f", {count['unfinished']} unfinished" if count["unfinished"] else ""
    more += f", {count['incomplete']} incomplete" if count["incomplete"] else ""
    more += f", {count['missing']} more are missing" if count["missing"] else ""
    return [*listed, f"{count['stale']} of {len(results) - count['missing']} result files are stale{more}"]


def _state(result: Result) -> str:
    """In a word: what has to be done first."""
    if result.missing:
        return "missing"
    if result.stale is not None:
        return "stale"
    if result.lacks is not None:
        return "unfinished"
    return "incomplete" if result.cases else "fresh"


def _how_many(result: Result) -> str:
    count = sum(map(len, result.cases.values()))
    return f"{count} declared cases are not timed" if count else ""


def _cases(result: Result, every: bool) -> list[str]:
    """A line for each series: the first of its cases that the file lacks, or all of them."""
    listed = []
    for series, cases in result.cases.items():
        shown = cases if every else cases[:NAMED]
        more = f"; {len(cases) - len(shown)} more" if len(shown) < len(cases) else ""
        listed.append(f"lacks {series}: {'; '.join(shown)}{more}")
    return listed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m publish.stale", description="Which results are stale.")
    parser.add_argument("--results", type=Path, default=Path("results"), help="default: results")
    parser.add_argument("--only", action="store_true", help="list only files that are out of date")
    parser.add_argument("--every", action="store_true", help="name every case that a file lacks")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if one is stale or unfinished")
    options = parser.parse_args(argv)
    try:
        results = results_in(options.results)
    except ContractError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(lines(results, options.only, options.every)))
    return int(options.strict and any(result.stale or result.lacks for result in results))


if __name__ == "__main__":
    sys.exit(main())
