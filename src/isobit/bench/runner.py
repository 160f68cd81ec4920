"""Runs the benchmark of an op from its declaration: check, then time ours, its rivals and its floor.

`run("logp", out_dir=Path("results"))` returns the report and writes results/<gpu>/logp.json.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobit.arch import default_device
from isobit.bench.cases import case_name, series_of, small_cases
from isobit.bench.contenders import calls_of, equal_bits, rival_calls
from isobit.bench.goals import summary
from isobit.bench.report import CPU_WARNING, Report, Row
from isobit.bench.series import Judge, Pool, Series
from isobit.bench.timing import (
    Call,
    Contender,
    Timing,
    Verdict,
    copy_contender,
    machine_rates,
    measure,
    settled_heap,
    tidy,
)
from isobit.bench.vouch import Vouch
from isobit.check.options import options_of
from isobit.check.proof import Args, Case
from isobit.contract import ContractError
from isobit.op import known_op
from isobit.stamp import results_folder, stamp

# Rows


@dataclass(frozen=True)
class _Bench:
    """One series on one device: what does not change from case to case."""

    series: Series
    pool: Pool
    backend: str | None
    impls: Sequence[str] | None
    repetitions: int | None
    copy_rate: float
    product_rate: float
    vouch: Vouch
    say: Callable[[str], None]
    note: Callable[[str], None]

    @property
    def device(self) -> torch.device:
        return self.pool.device

    def wanted(self, name: str) -> bool:
        return self.impls is None or name in self.impls

    def rows(self, case: Case, directions: Sequence[str]) -> list[Row]:
        series = self.series
        self.pool.keep(series.shared(case))
        copies = series.make(case, self.pool)
        ours = self.ours(copies[0])
        for served in ours.values():
            self.vouch.check(series.op.name, served, {**series.options, **options_of(case)})
        judge = series.judge(copies[0])
        found: list[Row] = []
        for direction in directions:
            cost = series.cost(case.dims, case.dtype)
            nbytes, flops = cost.bytes(direction), cost.flops(direction)
            floor_ms = 1e3 * max(nbytes / self.copy_rate, flops / self.product_rate)
            contenders = self.contenders(case, copies, direction, judge, ours)
            if series.copy and self.wanted("copy"):
                contenders.append(copy_contender(nbytes, self.device))
            timings, failures = measure(contenders, self.device, floor_ms, self.repetitions)
            for name, reason in failures.items():
                self.note(f"{name}: failed on {case_name(case)} {direction}: {reason}")
            where = {"op": series.name, "case": case_name(case), "direction": direction}
            baseline = timings.get(series.against or "")
            rows = []
            for name, timing in timings.items():
                if timing.verdict.max_abs is not None and math.isnan(timing.verdict.max_abs):
                    self.note(f"{name}: NaN on {case_name(case)} {direction}")
                rows.append(where | _figures(name, timing, floor_ms, nbytes, flops, baseline))
            found += rows
            figures = ", ".join(f"{row['impl']} {row['ms']:.4g} ms" for row in rows)
            self.say(f"{series.name} {case_name(case)} {direction}: {figures}")
        return found

    def contenders(
        self,
        case: Case,
        copies: Sequence[Args],
        direction: str,
        judge: Judge | None,
        names: Iterable[str],
    ) -> list[Contender]:
        series = self.series
        found = []

        def verdict(calls: Sequence[Call], result: Any) -> Verdict:
            return Verdict(None if judge is None else judge.error(direction, result))

        def verdict_on_rival(calls: Sequence[Call], result: Any) -> Verdict:
            ours = calls_of(self.function(None), copies, series.inputs, direction)
            return Verdict(verdict(calls, result).max_abs, equal_bits(ours, calls))

        for name in names:
            function = self.function(name.partition(":")[2] or None)
            build = partial(calls_of, function, copies, series.inputs, direction)
            found.append(Contender(name, build, verdict, required=True))
        for name, rival in series.rivals.items():
            if not self.wanted(name):
                continue
            reason = rival.available(case, self.device)
            if reason is None and rival.directions is not None and direction not in rival.directions:
                reason = f"not timed for {direction}"
            if reason is not None:
                self.note(f"{name}: {reason}")
                continue
            if rival.compiled:  # else earlier cases count towards the limit beyond which it runs eagerly
                torch.compiler.reset()
            build = partial(rival_calls, rival, copies, series.inputs, direction)
            judged = verdict_on_rival if series.bits else verdict
            found.append(Contender(name, build, judged, graph=rival.graph))
        return found

    def function(self, backend: str | None) -> Callable[[Args], Tensor]:
        return lambda args: self.series.call(args, backend)

    def ours(self, args: Args) -> dict[str, str]:
        """The backend that serves by name of implementation: what a user gets by default, and beside it the
        backend asked for if that is another."""
        default = self.series.op.explain(**args).backend
        assert default is not None  # a call that nothing can serve is an error
        others = {} if self.backend in (None, default) else {f"isobit:{self.backend}": self.backend}
        found = {"isobit": default, **others}
        return {name: served for name, served in found.items() if self.wanted(name)}


def _figures(
    impl: str, timing: Timing, floor_ms: float, nbytes: int, flops: int, baseline: Timing | None
) -> Row:
    row: Row = {"impl": impl, "ms": timing.ms, "ms_q25": timing.ms_q25, "ms_q75": timing.ms_q75}
    row |= {"host_us": timing.host_us, "peak_mb": timing.peak_mb, "extra_mb": timing.extra_mb}
    row |= {"floor_ms": floor_ms, "tflops": flops / timing.ms / 1e9 if flops and impl != "copy" else None}
    row |= {"tbps": nbytes / timing.ms / 1e9, "max_abs": timing.verdict.max_abs, "method": timing.method}
    row |= {"equal_bits": timing.verdict.equal_bits}
    row |= {"vs_baseline": None if baseline is None else baseline.ms / timing.ms}
    return {key: _rounded(key, value) for key, value in row.items()}


def _rounded(key: str, value: Any) -> Any:
    """Five digits of a number; JSON has no NaN, so that becomes null. A share of equal bits keeps its digits:
    one element in a million is not none."""
    if not isinstance(value, float) or key == "equal_bits":
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None


# Running


def run(
    op_name: str,
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
) -> Report:
    """Check an op, time it, and write `<out_dir>/<gpu>/<op folder>.json` if `out_dir` is given.

    `cases` defaults to the declared ones (on a CPU: small versions of them), `directions` to all, `impls` to
    ours, all rivals and the copy. `backend` adds that backend as `isobit:<backend>`. `check_report` is a
    report of `isobit check` that spares a new check. Raises CheckFailed for a red op.
    """
    op = known_op(op_name)
    device = default_device() if device is None else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    all_series = series_of(op)
    known_directions = dict.fromkeys(d for one in all_series for d in one.directions)
    _known(op_name, "direction", directions or (), list(known_directions))
    if backend is not None:
        _known(op_name, "backend", [backend], [b.name for b in op.backends])
    ours = ["isobit"] if backend is None else ["isobit", f"isobit:{backend}"]
    rivals = dict.fromkeys(name for one in all_series for name in one.rivals)
    _known(op_name, "impl", impls or (), [*ours, *rivals, "copy"])
    if device.type == "cpu":
        say(CPU_WARNING)
    jobs = _jobs(all_series, cases, directions or tuple(known_directions), device)
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
    source = stamp(device, commit) | rates | {"checked": not skip_check}
    rows: list[Row] = []
    report: Report = {"stamp": source, "notes": notes, "rows": rows}
    path = None if out_dir is None else out_dir / results_folder(device) / f"{op.folder}.json"
    with settled_heap():
        for i, (series, case, wanted) in enumerate(jobs):
            say(f"[{i + 1}/{len(jobs)}] {series.name} {case_name(case)}")
            bench = _Bench(
                series, pool, backend, impls, repetitions, copy_rate, product_rate, vouch, say, note
            )
            try:
                rows += bench.rows(case, wanted)
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
        raise ContractError(f"bench {op_name}: nothing was timed ({'; '.join(notes) or 'no cases'})")
    if path is not None:
        say(f"written: {path}")
    return report


Job = tuple[Series, Case, Sequence[str]]


def _jobs(
    all_series: Sequence[Series],
    cases: Sequence[Case] | None,
    directions: Sequence[str],
    device: torch.device,
) -> list[Job]:
    """Every case of every series with the directions to time; cases that share tensors stand together."""
    jobs: list[Job] = []
    for series in all_series:
        wanted = [d for d in series.directions if d in directions]
        chosen = cases or (small_cases(series) if device.type == "cpu" else series.cases)
        named = {frozenset(case.dims) for case in series.cases}
        jobs += [(series, case, wanted) for case in chosen if wanted and frozenset(case.dims) in named]
    order = {key: i for i, key in enumerate(dict.fromkeys(series.shared(case) for series, case, _ in jobs))}
    return sorted(jobs, key=lambda job: order[job[0].shared(job[1])])


def _summary(all_series: Sequence[Series], rows: Sequence[Row]) -> Report:
    """Goals that have cells among these rows; nothing for ops without goals."""
    against = next((one.against for one in all_series if one.against), None)
    if against is None:
        return {}
    goals = [goal for one in all_series for goal in one.goals]
    return {"against": against, "summary": summary(rows, against, goals)}


def _known(op_name: str, what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ContractError(f"bench {op_name}: unknown {what} {name!r}; known: {', '.join(known)}")


def _to_json(report: Report) -> str:
    """One row a line, so that a diff of results shows rows."""
    rows = ",\n".join("  " + json.dumps(row) for row in report["rows"])
    head = ",\n".join(f' "{key}": {json.dumps(value)}' for key, value in report.items() if key != "rows")
    return f'{{\n{head},\n "rows": [\n{rows}\n ]\n}}\n'
