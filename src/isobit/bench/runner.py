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
from isobit.bench.cases import case_name, small_cases
from isobit.bench.report import CPU_WARNING, Report, Row
from isobit.bench.rival import DIRECTIONS, Rival
from isobit.bench.timing import (
    Call,
    Contender,
    Timing,
    copies_for,
    copy_contender,
    machine_rates,
    measure,
    tidy,
)
from isobit.bench.truth import Truth, cotangent_like, truth_of
from isobit.check.proof import Args, Case, InputOptions
from isobit.contract import ContractError
from isobit.op import Op, known_op
from isobit.stamp import results_folder, stamp


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

    if direction == "fwd":
        return fwd
    kept = function(args)
    cotangent = cotangent_like(kept)
    if direction == "bwd":
        return lambda: torch.autograd.grad(kept, leaves, cotangent, retain_graph=True)

    def fwd_bwd() -> tuple[Tensor, ...]:
        output = function(args)
        return (output, *torch.autograd.grad(output, leaves, cotangent))

    return fwd_bwd


@dataclass(frozen=True)
class _Bench:
    """One op on one device: what does not change from case to case."""

    op: Op
    device: torch.device
    backend: str | None
    impls: Sequence[str] | None
    repetitions: int | None
    copy_rate: float
    product_rate: float
    say: Callable[[str], None]
    note: Callable[[str], None]

    def wanted(self, name: str) -> bool:
        return self.impls is None or name in self.impls

    def rows(self, case: Case, directions: Sequence[str]) -> list[Row]:
        args = self.op.proof.make(case, self.device, InputOptions())
        size = sum(v.nbytes for v in args.values() if isinstance(v, Tensor))
        copies = [args]
        for _ in range(copies_for(size, self.device) - 1):
            copies.append({k: v.clone() if isinstance(v, Tensor) else v for k, v in args.items()})
        truth = truth_of(self.op, args)
        found: list[Row] = []
        for direction in directions:
            cost = self.op.proof.cost(case.dims, case.dtype)
            nbytes = cost.bytes(direction)
            floor_ms = 1e3 * max(nbytes / self.copy_rate, cost.flops / self.product_rate)
            contenders = self.contenders(case, copies, direction, truth)
            if self.wanted("copy"):
                contenders.append(copy_contender(nbytes, self.device))
            # A millisecond a sample at the speed of the floor, within reason: events resolve a microsecond.
            calls = min(32, math.ceil(1 / floor_ms))
            timings, failures = measure(contenders, self.device, calls, self.repetitions)
            for name, reason in failures.items():
                self.note(f"{name}: failed on {case_name(case)} {direction}: {reason}")
            where = {"op": self.op.name, "case": case_name(case), "direction": direction}
            rows = []
            for name, timing in timings.items():
                if timing.max_abs is not None and math.isnan(timing.max_abs):
                    self.note(f"{name}: NaN on {case_name(case)} {direction}")
                rows.append(where | _figures(name, timing, floor_ms, nbytes, cost.flops))
            found += rows
            figures = ", ".join(f"{row['impl']} {row['ms']:.4g} ms" for row in rows)
            self.say(f"{case_name(case)} {direction}: {figures}")
        return found

    def contenders(
        self, case: Case, copies: Sequence[Args], direction: str, truth: Truth | None
    ) -> list[Contender]:
        judge = partial(truth.error, direction) if truth else lambda result: None
        proof = self.op.proof
        found = []
        for name, backend in self.ours(copies[0]).items():
            if self.wanted(name):
                function = partial(_ours, self.op, backend)
                build = partial(_calls, function, copies, proof.grad_inputs, direction)
                found.append(Contender(name, build, judge, required=True))
        for name, rival in proof.rivals().items():
            if not self.wanted(name):
                continue
            reason = rival.available(case, self.device)
            if reason is None and direction not in rival.directions:
                reason = f"not timed for {direction}"
            if reason is not None:
                self.note(f"{name}: {reason}")
                continue
            if rival.compiled:  # else earlier cases count towards the limit beyond which it runs eagerly
                torch.compiler.reset()
            build = partial(_rival_calls, rival, copies, proof.grad_inputs, direction)
            found.append(Contender(name, build, judge))
        return found

    def ours(self, args: Args) -> dict[str, str | None]:
        """What a user gets by default, and beside it the backend asked for by name if that is another."""
        default = self.op.explain(**args).backend
        others = {f"isobit:{self.backend}": self.backend} if self.backend not in (None, default) else {}
        return {"isobit": None, **others}


def _ours(op: Op, backend: str | None, args: Args) -> Tensor:
    first: Tensor = op.proof.call_alone(args, backend)[0]
    return first


def _rival_calls(rival: Rival, copies: Sequence[Args], inputs: tuple[str, ...], direction: str) -> list[Call]:
    function = rival.function
    if rival.compiled:
        function = torch.compile(function, dynamic=False)
    with torch.no_grad():
        prepared = [rival.prepare(args) for args in copies]
    return _calls(function, prepared, inputs, direction)


def _figures(impl: str, timing: Timing, floor_ms: float, nbytes: int, flops: int) -> Row:
    row: Row = {"impl": impl, "ms": timing.ms, "ms_q25": timing.ms_q25, "ms_q75": timing.ms_q75}
    row |= {"host_us": timing.host_us, "peak_mb": timing.peak_mb, "extra_mb": timing.extra_mb}
    row |= {"floor_ms": floor_ms, "tflops": flops / timing.ms / 1e9 if flops and impl != "copy" else None}
    row |= {"tbps": nbytes / timing.ms / 1e9, "max_abs": timing.max_abs, "method": timing.method}
    return {key: _rounded(value) for key, value in row.items()}


def _rounded(value: Any) -> Any:
    """Five digits of a number; JSON has no NaN, so that becomes null."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None


# Running


def run(
    op_name: str,
    cases: Sequence[Case] | None = None,
    directions: Sequence[str] = DIRECTIONS,
    device: torch.device | str | None = None,
    backend: str | None = None,
    out_dir: Path | None = None,
    skip_check: bool = False,
    impls: Sequence[str] | None = None,
    repetitions: int | None = None,
    commit: str | None = None,
    say: Callable[[str], None] = print,
) -> Report:
    """Check an op, time it, and write `<out_dir>/<gpu>/<op folder>.json` if `out_dir` is given.

    `cases` defaults to the declared ones (on a CPU: small versions of them), `impls` to ours, all rivals and
    the copy. `backend` adds that backend as `isobit:<backend>`. Raises CheckFailed for a red op.
    """
    op = known_op(op_name)
    device = default_device() if device is None else torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    _known(op_name, "direction", directions, DIRECTIONS)
    if backend is not None:
        _known(op_name, "backend", [backend], [b.name for b in op.backends])
    ours = ["isobit"] if backend is None else ["isobit", f"isobit:{backend}"]
    _known(op_name, "impl", impls or (), [*ours, *op.proof.rivals(), "copy"])
    if not op.proof.grad_inputs:
        directions = [d for d in directions if d == "fwd"]
    if device.type == "cpu":
        say(CPU_WARNING)
    if cases is None:
        cases = small_cases(op) if device.type == "cpu" else op.proof.bench_cases
    if not skip_check:
        _refuse_red(op_name, device, say)
    copy_rate, product_rate = machine_rates(device, repetitions)
    say(f"copy {copy_rate / 1e12:.3g} TB/s, bf16 product {product_rate / 1e12:.3g} TFLOP/s")

    notes: list[str] = []

    def note(text: str) -> None:
        if text not in notes:
            notes.append(text)
            say(text)

    bench = _Bench(op, device, backend, impls, repetitions, copy_rate, product_rate, say, note)
    rates = {"copy_tbps": round(copy_rate / 1e12, 4), "best_tflops": round(product_rate / 1e12, 4)}
    source = stamp(device, commit) | rates | {"checked": not skip_check}
    rows: list[Row] = []
    report: Report = {"stamp": source, "notes": notes, "rows": rows}
    path = None if out_dir is None else out_dir / results_folder(device) / f"{op.folder}.json"
    for i, case in enumerate(cases):
        say(f"[{i + 1}/{len(cases)}] {case_name(case)}")
        rows += bench.rows(case, directions)
        tidy(device)
        if (
            path is not None and rows
        ):  # after every case: a run that is cut off keeps what it has, and says so
            left = len(cases) - 1 - i
            unfinished = [f"unfinished: {left} of {len(cases)} cases are not timed"] if left else []
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_to_json(report | {"notes": notes + unfinished}))
    if not rows:
        raise ContractError(f"bench {op_name}: nothing was timed ({'; '.join(notes) or 'no cases'})")
    if path is not None:
        say(f"written: {path}")
    return report


def _known(op_name: str, what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ContractError(f"bench {op_name}: unknown {what} {name!r}; known: {', '.join(known)}")


def _refuse_red(op_name: str, device: torch.device, say: Callable[[str], None]) -> None:
    from isobit.check.runner import quick_check

    say(f"checking {op_name} on {device} first")
    failures = quick_check(op_name, device)
    if failures:
        raise CheckFailed(f"{op_name} fails its check, so it is not timed:\n  " + "\n  ".join(failures))


def _to_json(report: Report) -> str:
    """One row a line, so that a diff of results shows rows."""
    rows = ",\n".join("  " + json.dumps(row) for row in report["rows"])
    head = ",\n".join(f' "{key}": {json.dumps(report[key])}' for key in ("stamp", "notes"))
    return f'{{\n{head},\n "rows": [\n{rows}\n ]\n}}\n'
