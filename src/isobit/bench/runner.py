"""Runs the benchmark of an op from its declaration: check, then time ours, its rivals and its floor.

`run("logp", out_dir=Path("results"))` returns the report and writes results/<gpu>/logp.json.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobit.arch import default_device
from isobit.bench.cases import case_name, series_of, small_cases
from isobit.bench.goals import summary
from isobit.bench.report import CPU_WARNING, Report, Row
from isobit.bench.rival import Rival
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
from isobit.bench.truth import cotangent_like
from isobit.check.compare import differing
from isobit.check.proof import Args, Case
from isobit.contract import ContractError
from isobit.op import known_op
from isobit.stamp import gpu_name, results_folder, source_sha, stamp

#: Elements whose bits are compared, if that many calls are at hand: where one in a thousand differs, a few
#: thousand elements might not show it.
COMPARED = 1 << 18


class CheckFailed(RuntimeError):
    """The op does not pass its check, so its speed is of no interest."""


# Contenders


def _calls(
    function: Callable[[Args], Tensor], prepared: Sequence[Args], inputs: tuple[str, ...], direction: str
) -> list[Call]:
    """One call per copy of the inputs."""
    return [_call(function, args, inputs, direction) for args in prepared]


def _call(function: Callable[[Args], Tensor], args: Args, inputs: tuple[str, ...], direction: str) -> Call:
    """A call that returns (output, *gradients), as far as its direction has them, and accumulates nothing."""
    leaves = [args[name].detach().requires_grad_() for name in inputs]
    args = args | dict(zip(inputs, leaves, strict=True))

    def fwd() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (function(args),)

    if direction == "fwd" or not inputs:
        return fwd
    kept = function(args)
    cotangent = cotangent_like(kept)
    if direction == "bwd":
        return lambda: torch.autograd.grad(kept, leaves, cotangent, retain_graph=True)

    def fwd_bwd() -> tuple[Tensor, ...]:
        output = function(args)
        return (output, *torch.autograd.grad(output, leaves, cotangent))

    return fwd_bwd


def _rival_calls(rival: Rival, copies: Sequence[Args], inputs: tuple[str, ...], direction: str) -> list[Call]:
    function = rival.function
    if rival.compiled:
        function = torch.compile(function, dynamic=False)
    with torch.no_grad():
        prepared = [rival.prepare(args) for args in copies]
    return _calls(function, prepared, inputs, direction)


def _equal_bits(ours: Sequence[Call], theirs: Sequence[Call]) -> float | None:
    """The share of first outputs with the same bits, over enough calls; None for another dtype or shape."""
    equal = seen = 0
    for our_call, their_call in zip(ours, theirs, strict=True):
        mine, other = our_call()[0], their_call()[0]
        if mine.dtype != other.dtype or mine.shape != other.shape:
            return None
        equal += mine.numel() - int(differing(mine, other).sum())
        seen += mine.numel()
        if seen >= COMPARED:
            break
    return equal / seen


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
        judge = series.judge(copies[0])
        found: list[Row] = []
        for direction in directions:
            cost = series.cost(case.dims, case.dtype)
            nbytes, flops = cost.bytes(direction), cost.flops(direction)
            floor_ms = 1e3 * max(nbytes / self.copy_rate, flops / self.product_rate)
            contenders = self.contenders(case, copies, direction, judge)
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
        self, case: Case, copies: Sequence[Args], direction: str, judge: Judge | None
    ) -> list[Contender]:
        series = self.series
        found = []

        def verdict(calls: Sequence[Call], result: Any) -> Verdict:
            return Verdict(None if judge is None else judge.error(direction, result))

        def verdict_on_rival(calls: Sequence[Call], result: Any) -> Verdict:
            ours = _calls(self.function(None), copies, series.inputs, direction)
            return Verdict(verdict(calls, result).max_abs, _equal_bits(ours, calls))

        for name, backend in self.ours(copies[0]).items():
            if self.wanted(name):
                build = partial(_calls, self.function(backend), copies, series.inputs, direction)
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
            build = partial(_rival_calls, rival, copies, series.inputs, direction)
            judged = verdict_on_rival if series.bits else verdict
            found.append(Contender(name, build, judged, graph=rival.graph))
        return found

    def function(self, backend: str | None) -> Callable[[Args], Tensor]:
        return lambda args: self.series.call(args, backend)

    def ours(self, args: Args) -> dict[str, str | None]:
        """What a user gets by default, and beside it the backend asked for by name if that is another."""
        default = self.series.op.explain(**args).backend
        others = {f"isobit:{self.backend}": self.backend} if self.backend not in (None, default) else {}
        return {"isobit": None, **others}


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
    if not skip_check:
        _refuse_red({one.op.name for one, _, _ in jobs}, device, check_report, say)
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
            bench = _Bench(series, pool, backend, impls, repetitions, copy_rate, product_rate, say, note)
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


def _refuse_red(
    ops: set[str], device: torch.device, check_report: Path | None, say: Callable[[str], None]
) -> None:
    from isobit.check.runner import quick_check

    for name in sorted(ops):
        if check_report is not None and _proven(name, device, check_report):
            say(f"{name} passed its check in {check_report}")
            continue
        say(f"checking {name} on {device} first")
        failures = quick_check(name, device)
        if failures:
            raise CheckFailed(f"{name} fails its check, so it is not timed:\n  " + "\n  ".join(failures))


def _proven(op_name: str, device: torch.device, path: Path) -> bool:
    """Whether a report of `isobit check` speaks for this source on this device, and for this op's numbers
    and bits."""
    try:
        report = json.loads(path.read_text())
        stamp = report["stamp"]
        mine = [c for c in report["candidates"] if c["op"] == op_name]
        held = {case["law"] for c in mine for case in c["cases"] if case["status"] == "ok"}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ContractError(f"{path}: not a report of isobit check ({type(error).__name__})") from None
    if (stamp["source_sha"], stamp["gpu"]) != (source_sha(), gpu_name(device)):
        raise ContractError(f"{path}: was written by another source or on another device: check again")
    if any(c["fail"] for c in mine):
        raise CheckFailed(f"{op_name} fails its check in {path}, so it is not timed")
    return {"accuracy", "invariant"} <= held


def _to_json(report: Report) -> str:
    """One row a line, so that a diff of results shows rows."""
    rows = ",\n".join("  " + json.dumps(row) for row in report["rows"])
    head = ",\n".join(f' "{key}": {json.dumps(value)}' for key, value in report.items() if key != "rows")
    return f'{{\n{head},\n "rows": [\n{rows}\n ]\n}}\n'
