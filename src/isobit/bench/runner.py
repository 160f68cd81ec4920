"""Runs the benchmark of an op or a suite from its declaration: check, then time ours, rivals and the floor.

`run("logp", out_dir=Path("results"))` returns the report and writes results/<gpu>/logp.json.
"""

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from isobit.bench.cases import Subject, case_name, small_cases, subject_of
from isobit.bench.check_gate import CheckGate
from isobit.bench.goals import summary
from isobit.bench.implementations import Implementations, implementation_names, with_rows
from isobit.bench.precompile import precompile
from isobit.bench.report import CPU_WARNING, NEW, SCHEMA, Report, Row
from isobit.bench.resume import UNFINISHED, begun, in_order, lost, untimed, with_new
from isobit.bench.timing import machine_rates, settled_heap, tidy
from isobit.check.files import check_writable, write
from isobit.check.stamp import results_folder, stamp
from isobit.frame.contract import ContractError, dtype_name
from isobit.frame.device import default_device, triton_is_interpreted
from isobit.frame.op import known_op
from isobit.spec.options import fit, options_of, text_of, varied
from isobit.spec.proof import Case
from isobit.spec.rival import cannot_import
from isobit.spec.series import NotHere, Pool, Series


def run(
    of: str | Subject,
    cases: Sequence[Case] | None = None,
    directions: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    backend: str | None = None,
    out_dir: Path | None = None,
    skip_check: bool = False,
    impls: Sequence[str] | None = None,
    repetitions: int | None = None,
    say: Callable[[str], None] = print,
    check_reports: Sequence[Path] = (),
    options: Mapping[str, Any] | None = None,
    core: bool = False,
    resume: bool = False,
    minutes: float | None = None,
    file: Path | None = None,
    series: Sequence[str] | None = None,
) -> Report:
    """Check an op (by name) or a suite, time it, and write `<out_dir>/<gpu>/<op folder or suite>.json` if
    `out_dir` is given, and `file`; after every case, so that an interrupted run keeps its results.

    `cases` defaults to the declared ones (on a CPU: small versions of them), `directions` to all, `impls` to
    isobit, all rivals and the copy. `backend` adds that backend as `isobit:<backend>`. `check_reports`
    are reports of `isobit check` that replace new checks. `options` are applied to every case, including
    `layout`. With `core`, only the declared core cases; with `series`, only these, by name. With `resume`,
    cases that are already in the file are not timed again, unless `impls` names one that they lack. It stops
    between two cases after `minutes`, or if the longest case so far would not fit into the remaining time;
    the first, which also loads compilers, does not count. Raises CheckFailed for an op that fails its check.
    """
    begin = time.monotonic()
    subject = subject_of(known_op(of)) if isinstance(of, str) else of
    name, all_series = subject.name, subject.series
    device = default_device() if device is None else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    jobs = planned(subject, cases, directions, device, backend, impls, options, core, series)
    if device.type == "cpu":
        say(CPU_WARNING)
    path = None if out_dir is None else out_dir / results_folder(device) / f"{subject.file}.json"
    if path is not None:
        check_writable(path, "--results")
    source = stamp(device, ops=subject.folders) | {"checked": not skip_check}
    known = begun(path, source) if resume and path is not None else None
    if known is None:
        if path is not None and (less := lost(path, [(one.name, case_name(case)) for one, case, _ in jobs])):
            say(less)
        copy_rate, product_rate = machine_rates(device, repetitions)
        rates = {"copy_tbps": copy_rate / 1e12, "best_tflops": product_rate / 1e12}
        source |= {name: float(f"{rate:.5g}") for name, rate in rates.items()}
    else:
        source = known["stamp"]
        copy_rate, product_rate = source["copy_tbps"] * 1e12, source["best_tflops"] * 1e12
    say(f"copy {copy_rate / 1e12:.3g} TB/s, bf16 product {product_rate / 1e12:.3g} TFLOP/s")

    files = [each for each in (path, file) if each is not None]
    notes: list[str] = [] if known is None else known["notes"]
    rows: list[Row] = [] if known is None else known["rows"]

    def note(text: str) -> None:
        if text not in notes:
            notes.append(text)
            say(text)

    def so_far(left: int) -> Report:
        unfinished = [f"{UNFINISHED}{left} of {len(jobs)} cases are not timed"] if left else []
        names = [one.name for one in all_series]
        ordered = in_order(rows, names, [(one.name, case_name(case)) for one, case, _ in jobs])
        others = {row["op"] for row in rows} - set(series or ())  # kept by --resume
        alone = None if others else series
        named = impls if {row["impl"] for row in rows}.issubset(impls or ()) else None
        command = _command(subject, device, cases, directions, backend, named, options or {}, core, alone)
        head: Report = {"schema": SCHEMA, "suite": "isobit bench", "command": command, "stamp": source}
        head |= _figure(all_series) | {"notes": notes + unfinished}
        return head | _summary(subject, ordered, every=not (cases or alone)) | {"rows": ordered}

    def left_of(one: Series, case: Case, wanted: Sequence[str]) -> list[str]:
        return untimed(
            rows, one.name, case_name(case), wanted,
            lambda direction: with_rows(one, case, device, direction, impls or (), notes),
        )  # fmt: skip

    asked = [(one, case, left_of(one, case, wanted)) for one, case, wanted in jobs]
    todo = [job for job in asked if job[2]]
    if len(todo) < len(jobs):
        say(f"{len(jobs) - len(todo)} of {len(jobs)} cases are already in the file")
    precompile(subject, todo, backend, impls, device, say)
    needed = {name for one, _, _ in todo for name in one.needs}
    gate = CheckGate(device, check_reports, skip_check, say, needed=needed)
    pool, longest, stopped = Pool(device), 0.0, False
    for i, (one, case, wanted) in enumerate(todo):
        start = time.monotonic()
        if minutes is not None and start + longest - begin >= 60 * minutes:
            stopped = True
            break
        say(f"[{i + 1}/{len(todo)}] {one.name} {case_name(case)}, after {start - begin:.0f} s")
        implementations = Implementations(
            one, pool, backend, impls, repetitions, copy_rate, product_rate, gate, say, note
        )
        try:
            with settled_heap():  # for each case: a compiler that the first one has loaded settles too
                rows = with_new(rows, implementations.rows(case, wanted))
        except NotHere as why:
            note(f"{one.name}: {why}")
        except torch.OutOfMemoryError:
            pool.keep(None)
            note(f"{one.name}: {case_name(case)} does not fit into memory")
        tidy(device)
        for each in files if rows else ():
            write(each, to_json(so_far(len(todo) - 1 - i)))
        longest = max(longest, time.monotonic() - start) if i else 0.0
    left = todo[i:] if stopped else []
    if left:
        listed = "; ".join(f"{one.name} {case_name(case)}" for one, case, _ in left)
        say(f"stopped, out of time: {len(left)} of {len(jobs)} cases are left ({listed})")
        if path is not None:
            say("run the same command with --resume to continue")
    report = so_far(len(left))
    for each in files if rows or not left else ():  # also a file that says why nothing was timed
        write(each, to_json(report))
        say(f"written: {each}")
    if not rows and not left:
        raise NothingTimed(f"bench {name}: nothing was timed ({'; '.join(notes) or 'no cases'})", report)
    return report


class NothingTimed(ContractError):
    """A benchmark without result. `report` has the reason too."""

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


def not_timed(subject: Subject, device: torch.device, why: str) -> Report:
    """The report of a subject that failed its check."""
    head: Report = {
        "schema": SCHEMA,
        "suite": "isobit bench",
        "command": _start(subject, device),
    }
    return head | {"stamp": stamp(device, ops=subject.folders), "notes": [why], "rows": []}


Job = tuple[Series, Case, Sequence[str]]


def planned(
    subject: Subject,
    cases: Sequence[Case] | None,
    directions: Sequence[str] | None,
    device: torch.device,
    backend: str | None,
    impls: Sequence[str] | None,
    options: Mapping[str, Any] | None,
    core: bool,
    names: Sequence[str] | None = None,
) -> list[Job]:
    """What a run would time; of these series, if they are named. Unknown names, and named things that would
    not be timed, are errors."""
    _all_known(subject, directions or (), backend, impls or (), names or ())
    _all_there(subject)
    known = [series for series in subject.series if not names or series.name in names]
    jobs = _jobs(subject.name, known, cases, directions, device, options or {}, core)

    def left_out(what: str) -> ContractError:
        return ContractError(f"bench {subject.name}: {what} would not be timed: leave it out")

    for case in (varied(case, options or {}) for case in cases or ()):
        if not any(case == other for _, other, _ in jobs):
            raise left_out(f"--case {case_name(case)}")
    for name in names or ():
        if not any(name == series.name for series, _, _ in jobs):
            raise left_out(f"--series {name}")
    for direction in directions or ():
        if not any(direction in wanted for _, _, wanted in jobs):
            raise left_out(f"--direction {direction}")
    for impl in impls or ():
        name = impl.removesuffix(NEW)
        if not any(name in implementation_names(series, backend, wanted) for series, _, wanted in jobs):
            raise left_out(f"--impl {impl}")
    return jobs


def _jobs(
    name: str,
    all_series: Sequence[Series],
    cases: Sequence[Case] | None,
    directions: Sequence[str] | None,
    device: torch.device,
    options: Mapping[str, Any],
    core: bool,
) -> list[Job]:
    """Every case of every series with the directions to time; cases that share tensors are adjacent."""
    jobs: list[Job] = []
    for series in all_series:
        if cases and series.declared_only:
            continue
        wanted = [d for d in series.directions if directions is None or d in directions]
        declared = replace(series, cases=series.core) if core else series
        small = small_cases(declared) if device.type == "cpu" else ()
        chosen = cases or small or declared.cases
        named = {frozenset(case.dims) for case in series.cases}
        for case in (varied(case, options) for case in chosen):
            if wanted and frozenset(case.dims) in named and set(options_of(case)) <= set(series.takes):
                jobs.append((series, case, wanted))
    _taken(name, all_series, jobs, options)
    order = {key: i for i, key in enumerate(dict.fromkeys(series.shared(case) for series, case, _ in jobs))}
    return sorted(jobs, key=lambda job: order[job[0].shared(job[1])])


def _taken(name: str, all_series: Sequence[Series], jobs: Sequence[Job], options: Mapping[str, Any]) -> None:
    """Options that no series takes are an error, and so are invalid values."""
    if options and not jobs:
        known = dict.fromkeys(option for one in all_series for option in one.takes)
        unknown = [option for option in options if option not in known] or list(options)
        listed = ", ".join(known) or "none"
        raise ContractError(f"bench {name}: unknown option {unknown[0]!r}; known: {listed}")
    for series, _, _ in jobs:
        if series.op is not None:
            fit(series.op, options)


def _command(
    subject: Subject,
    device: torch.device,
    cases: Sequence[Case] | None,
    directions: Sequence[str] | None,
    backend: str | None,
    impls: Sequence[str] | None,
    options: Mapping[str, Any],
    core: bool,
    names: Sequence[str] | None,
) -> str:
    """The command that repeats a run, without its output flags."""
    parts = [_start(subject, device), *(["--core"] if core else [])]
    parts += [f"--series {name}" for name in names or ()]
    for case in cases or ():
        sizes = ",".join(f"{name}={size}" for name, size in case.dims.items())
        parts.append(f"--case {sizes},dtype={dtype_name(case.dtype)}")
    parts += [f"--option {shlex.quote(f'{name}={text_of(value)}')}" for name, value in options.items()]
    parts += [f"--direction {name}" for name in directions or ()]
    parts += [f"--impl {name}" for name in impls or ()]
    return " ".join([*parts, *([f"--backend {backend}"] if backend else [])])


def _start(subject: Subject, device: torch.device) -> str:
    """The command without what was chosen of the subject. Kernels of a candidate may be Triton's."""
    command = f"isobit bench {subject.flag} {subject.name}"
    if subject.candidate:
        command = f"{'TRITON_INTERPRET=1 ' if triton_is_interpreted() else ''}{command} {subject.candidate}"
    return f"{command} --device {device}"


def _figure(all_series: Sequence[Series]) -> Report:
    """The figure to read, if it is not the device time."""
    figures = {one.figure for one in all_series}
    return {"figure": figures.pop()} if len(figures) == 1 and figures != {"ms"} else {}


def _summary(subject: Subject, rows: Sequence[Row], every: bool) -> Report:
    """How the goals are met; nothing for ops without goals. Unless `every`, only goals with cells among these
    rows: a run of requested sizes is not about the others."""
    against = next((one.against for one in subject.series if one.against), None)
    if against is None and not subject.goals:
        return {}
    named = {} if against is None else {"against": against}
    entries = summary(rows, against, subject.goals)
    return named | {"summary": [entry for entry in entries if every or entry["cells"]]}


def _all_there(subject: Subject) -> None:
    """Raises an error, before anything runs, if a module that a suite needs is missing."""
    for module in dict.fromkeys(name for one in subject.series for name in one.imports):
        reason = cannot_import(module)
        if reason is not None:
            raise ContractError(
                f"bench {subject.name}: needs {module}: {reason} "
                "(in a checkout of isobit: pip install '.[bench]')"
            )


def _all_known(
    subject: Subject,
    directions: Sequence[str],
    backend: str | None,
    impls: Sequence[str],
    names: Sequence[str],
) -> None:
    """Unknown names are errors, before anything runs."""
    series, backends = subject.series, [backend] if backend else []
    _known(subject.name, "series", names, list(dict.fromkeys(one.name for one in series)))
    _known(subject.name, "backend", backends, subject.backends)
    _known(
        subject.name, "direction", directions, list(dict.fromkeys(d for s in series for d in s.directions))
    )
    also = dict.fromkeys([*backends, *(name for one in series for name in one.also)])
    variants = dict.fromkeys(name for one in series for name in one.variants)
    rivals = dict.fromkeys(name for one in series for name in one.rivals)
    known = ["isobit", *(f"isobit:{name}" for name in (*also, *variants)), *rivals]
    # Only cases know whether they have new sizes.
    _known(subject.name, "impl", [name.removesuffix(NEW) for name in impls], [*known, "copy"])


def _known(name: str, what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for each in given:
        if each not in known:
            raise ContractError(f"bench {name}: unknown {what} {each!r}; known: {', '.join(known)}")


def to_json(report: Report) -> str:
    """One row per line, so that a diff of results shows rows."""
    rows = ",\n".join("  " + json.dumps(row) for row in report["rows"])
    head = ",\n".join(f' "{key}": {json.dumps(value)}' for key, value in report.items() if key != "rows")
    return f'{{\n{head},\n "rows": [\n{rows}\n ]\n}}\n'
