"""Runs the benchmark of an op or a suite from its declaration: check, then time ours, rivals and the floor.

`run("logp", out_dir=Path("results"))` returns the report and writes results/<gpu>/logp.json.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from isobit.arch import default_device
from isobit.bench.cases import Subject, case_name, small_cases, subject_of
from isobit.bench.goals import summary
from isobit.bench.lineup import Lineup
from isobit.bench.report import CPU_WARNING, Report, Row
from isobit.bench.series import Pool, Series
from isobit.bench.timing import machine_rates, settled_heap, tidy
from isobit.bench.vouch import Vouch
from isobit.check.options import fit, options_of, varied
from isobit.check.proof import Case
from isobit.contract import ContractError
from isobit.op import known_op
from isobit.stamp import results_folder, stamp


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
    commit: str | None = None,
    say: Callable[[str], None] = print,
    check_report: Path | None = None,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Check an op (by name) or a suite, time it, and write `<out_dir>/<gpu>/<op folder or suite>.json` if
    `out_dir` is given.

    `cases` defaults to the declared ones (on a CPU: small versions of them), `directions` to all, `impls` to
    ours, all rivals and the copy. `backend` adds that backend as `isobit:<backend>`. `check_report` is a
    report of `isobit check` that spares a new check. `options` are those of every case, and `layout`. Raises
    CheckFailed for a red op.
    """
    subject = subject_of(known_op(of)) if isinstance(of, str) else of
    name, all_series = subject.name, subject.series
    device = default_device() if device is None else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    known_directions = dict.fromkeys(d for one in all_series for d in one.directions)
    _known(name, "direction", directions or (), list(known_directions))
    if backend is not None:
        _known(name, "backend", [backend], subject.backends)
    beside = dict.fromkeys([*([backend] if backend else []), *(b for one in all_series for b in one.also)])
    ours = ["isobit", *(f"isobit:{each}" for each in beside)]
    rivals = dict.fromkeys(rival for one in all_series for rival in one.rivals)
    _known(name, "impl", impls or (), [*ours, *rivals, "copy"])
    if device.type == "cpu":
        say(CPU_WARNING)
    jobs = _jobs(name, all_series, cases, directions or tuple(known_directions), device, options or {})
    vouch = Vouch(device, check_report, skip_check, say)
    copy_rate, product_rate = machine_rates(device, repetitions)
    say(f"copy {copy_rate / 1e12:.3g} TB/s, bf16 product {product_rate / 1e12:.3g} TFLOP/s")

    notes: list[str] = []

    def note(text: str) -> None:
        if text not in notes:
            notes.append(text)
            say(text)

    pool = Pool(device)
    rates = {"copy_tbps": round(copy_rate / 1e12, 4), "best_tflops": round(product_rate / 1e12, 4)}
    source = stamp(device, commit, subject.folders) | rates | {"checked": not skip_check}
    rows: list[Row] = []
    report: Report = {"stamp": source, "notes": notes, "rows": rows}
    path = None if out_dir is None else out_dir / results_folder(device) / f"{subject.file}.json"
    with settled_heap():
        for i, (series, case, wanted) in enumerate(jobs):
            say(f"[{i + 1}/{len(jobs)}] {series.name} {case_name(case)}")
            lineup = Lineup(
                series, pool, backend, impls, repetitions, copy_rate, product_rate, vouch, say, note
            )
            try:
                rows += lineup.rows(case, wanted)
            except torch.OutOfMemoryError:
                pool.keep(None)
                note(f"{series.name}: {case_name(case)} does not fit into memory")
            tidy(device)
            report |= _summary(all_series, rows)
            if path is not None and rows:
                # After every case: a run that is cut off keeps what it has, and says so.
                left = len(jobs) - 1 - i
                unfinished = [f"unfinished: {left} of {len(jobs)} cases are not timed"] if left else []
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(_to_json(report | {"notes": notes + unfinished}))
    if not rows:
        raise ContractError(f"bench {name}: nothing was timed ({'; '.join(notes) or 'no cases'})")
    if path is not None:
        say(f"written: {path}")
    return report


Job = tuple[Series, Case, Sequence[str]]


def _jobs(
    name: str,
    all_series: Sequence[Series],
    cases: Sequence[Case] | None,
    directions: Sequence[str],
    device: torch.device,
    options: Mapping[str, Any],
) -> list[Job]:
    """Every case of every series with the directions to time; cases that share tensors stand together."""
    jobs: list[Job] = []
    for series in all_series:
        wanted = [d for d in series.directions if d in directions]
        chosen = cases or (small_cases(series) if device.type == "cpu" else series.cases)
        named = {frozenset(case.dims) for case in series.cases}
        for case in (varied(case, options) for case in chosen):
            if wanted and frozenset(case.dims) in named and set(options_of(case)) <= set(series.takes):
                jobs.append((series, case, wanted))
    _taken(name, all_series, jobs, options)
    order = {key: i for i, key in enumerate(dict.fromkeys(series.shared(case) for series, case, _ in jobs))}
    return sorted(jobs, key=lambda job: order[job[0].shared(job[1])])


def _taken(name: str, all_series: Sequence[Series], jobs: Sequence[Job], options: Mapping[str, Any]) -> None:
    """Options that no kind of call takes are an error, and so are values that are none."""
    if options and not jobs:
        known = dict.fromkeys(option for one in all_series for option in one.takes)
        unknown = [option for option in options if option not in known] or list(options)
        listed = ", ".join(known) or "none"
        raise ContractError(f"bench {name}: unknown option {unknown[0]!r}; known: {listed}")
    for series, _, _ in jobs:
        if series.op is not None:
            fit(series.op, options)


def _summary(all_series: Sequence[Series], rows: Sequence[Row]) -> Report:
    """Goals that have cells among these rows; nothing for ops without goals."""
    against = next((one.against for one in all_series if one.against), None)
    if against is None:
        return {}
    goals = [goal for one in all_series for goal in one.goals]
    return {"against": against, "summary": summary(rows, against, goals)}


def _known(name: str, what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for each in given:
        if each not in known:
            raise ContractError(f"bench {name}: unknown {what} {each!r}; known: {', '.join(known)}")


def _to_json(report: Report) -> str:
    """One row a line, so that a diff of results shows rows."""
    rows = ",\n".join("  " + json.dumps(row) for row in report["rows"])
    head = ",\n".join(f' "{key}": {json.dumps(value)}' for key, value in report.items() if key != "rows")
    return f'{{\n{head},\n "rows": [\n{rows}\n ]\n}}\n'
