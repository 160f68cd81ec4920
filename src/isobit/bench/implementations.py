"""The implementations that are timed on a case, and the row of each: isobit, its other backends, rivals, a
copy, and all of these again with new sizes.

An implementation has one call per copy of the inputs, in one direction."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isobit.bench.cases import OF_SIZES, case_name
from isobit.bench.check_gate import CheckGate
from isobit.bench.report import NEW, Row
from isobit.bench.timing import Call, Contender, Timing, copy_contender, measure, measure_steps
from isobit.check.torch_state import in_words, preserved
from isobit.frame.backend import UnsupportedError
from isobit.frame.contract import dtype_name
from isobit.frame.op import Op
from isobit.spec.compare import differing
from isobit.spec.options import options_of, varied, words
from isobit.spec.proof import Args, Case
from isobit.spec.rival import Rival
from isobit.spec.series import Judge, Pool, Series
from isobit.spec.truth import Errors, Verdict, cotangent_like

#: Number of elements whose bits are compared, if there are that many: with fewer, a difference in one of a
#: thousand might be missed.
COMPARED = 1 << 18


@dataclass(frozen=True)
class Implementations:
    """One series on one device: everything that is the same for all cases."""

    series: Series
    pool: Pool
    backend: str | None
    impls: Sequence[str] | None
    repetitions: int | None
    copy_rate: float
    product_rate: float
    gate: CheckGate
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
        copies = series.make(varied(case, series.options), self.pool)
        ours = self.ours(case, copies[0])
        self.check(case, ours)
        judge = series.judge(copies[0])
        all_rows: list[Row] = []
        for direction in directions:
            cost = series.cost(case.dims, case.dtype)
            nbytes, flops = cost.bytes(direction), cost.flops(direction)
            floor_ms = 1e3 * max(nbytes / self.copy_rate, flops / self.product_rate)
            contenders = self.contenders(case, copies, direction, judge, ours)
            contenders += self.with_new_sizes(case, direction, ours)
            if series.copy and self.wanted("copy"):
                contenders.append(copy_contender(nbytes, self.device))
            with preserved(generators=False) as changed:  # timing draws numbers itself
                if series.step:
                    timings, failures = measure_steps(contenders, self.device, self.repetitions)
                else:
                    timings, failures = measure(contenders, self.device, floor_ms, self.repetitions)
            if changed:
                self.note(
                    f"{series.name}: a timed function {in_words(changed)}: it may affect all times of a case"
                )
            for name, reason in failures.items():
                self.note(f"{name}: failed on {case_name(case)} {direction}: {reason}")
            where = {"op": series.name, "case": case_name(case), "direction": direction}
            rows = []
            for name, timing in timings.items():
                if timing.verdict.max_abs is not None and math.isnan(timing.verdict.max_abs):
                    self.note(f"{name}: NaN on {case_name(case)} {direction}")
                baseline = timings.get(f"{series.against}{NEW if name.endswith(NEW) else ''}")
                figures = _figures(name, timing, floor_ms, nbytes, flops, baseline)
                served = ours.get(name.removesuffix(NEW))
                more = {name: _rounded(name, value) for name, value in timing.verdict.more.items()}
                if series.tokens is not None:
                    more["tokens_per_s"] = _rounded("", 1e3 * series.tokens(copies[0]) / timing.ms)
                if timing.runs_ms is not None:
                    more["runs_ms"] = [_rounded("runs_ms", each) for each in timing.runs_ms]
                if name == "isobit" and (expected := series.predict(served, copies[0])) is not None:
                    more["predicted_ms"] = _rounded("predicted_ms", expected)
                rows.append({**where, **figures, **self.inputs(case), "backend": served, **more})
            all_rows += rows
            times = ", ".join(f"{row['impl']} {row['ms']:.4g} ms" for row in rows)
            self.say(f"{series.name} {case_name(case)} {direction}: {times}")
        return all_rows

    def call_once(self, case: Case, directions: Sequence[str]) -> None:
        """Call every implementation, so that what its first call compiles is compiled. What fails here fails
        again where it is timed, and is reported there."""
        with suppress(Exception):
            copies = self.series.make(varied(case, self.series.options), self.pool)[:1]
            ours = self.ours(case, copies[0])
            for direction in directions:
                for each in self.contenders(case, copies, direction, None, ours):
                    with suppress(Exception), torch.set_grad_enabled(each.grad):
                        each.build()[0]()

    def options(self, case: Case) -> dict[str, Any]:
        """The options in which this call differs from a plain one."""
        return {**self.series.options, **options_of(case)}

    def inputs(self, case: Case) -> Row:
        """Everything needed to make the inputs of a row again. `backend` is filled in later."""
        kind = {"dtype": dtype_name(case.dtype), "options": words(self.options(case)), "backend": None}
        return kind | {"data": case.data, "seed": self.pool.inputs.seed}

    def check(self, case: Case, ours: dict[str, str | None]) -> None:
        options = {name: value for name, value in self.options(case).items() if name not in OF_SIZES}
        for served in ours.values():
            if self.series.op is not None and served is not None:
                self.gate.check(self.series.op.name, served, options)
        for name in self.series.needs if ours else ():
            self.gate.check_default(name)

    def ours(self, case: Case, args: Args) -> dict[str, str | None]:
        """Backends by name of implementation: the default one, then the requested one and those that
        the series declares, if they differ."""
        op = self.series.op
        backends: dict[str, str | None] = {"isobit": None}
        backends |= {f"isobit:{variant}": None for variant in self.series.variants}
        if op is not None:
            backends |= self.backends(op, case, args)
        return {name: to for name, to in backends.items() if self.wanted(name) or self.wanted(f"{name}{NEW}")}

    def backends(self, op: Op, case: Case, args: Args) -> dict[str, str | None]:
        default = op.explain(**args).backend
        backends: dict[str, str | None] = {"isobit": default}
        declared = [name for name, cases in self.series.also.items() if case in cases]
        for backend in dict.fromkeys([*([self.backend] if self.backend else []), *declared]):
            if backend == default:
                continue
            try:
                op.explain(**args, backend=backend)
            except UnsupportedError as why:
                if backend == self.backend:  # it was requested, so report why not
                    raise
                self.note(f"isobit:{backend}: {why}")
                continue
            backends[f"isobit:{backend}"] = backend
        return backends

    def contenders(
        self,
        case: Case,
        copies: Sequence[Args],
        direction: str,
        judge: Judge | None,
        names: Iterable[str],
        suffix: str = "",
    ) -> list[Contender]:
        series, once = self.series, suffix == NEW
        contenders = []
        grad = series.step or (bool(series.inputs) and direction != "fwd")

        def build(function: Callable[[Args], Any], rival: Rival | None = None) -> list[Call]:
            prepared = copies if rival is None else prepared_for(rival, copies)
            if series.step:
                return step_calls(function, prepared)
            if rival is not None and rival.compiled:
                function = torch.compile(function, dynamic=False)
            return calls_of(function, prepared, series.inputs, direction, once)

        def verdict(calls: Sequence[Call], result: Any) -> Verdict:
            error = None if judge is None else judge.error(direction, result)
            if isinstance(error, Verdict):
                return error
            if isinstance(error, Errors):
                more = asdict(error)
                return Verdict(more.pop("max_abs"), more=more)
            return Verdict(error)

        def verdict_on_rival(calls: Sequence[Call], result: Any) -> Verdict:
            found = verdict(calls, result)
            if series.bits:
                found = replace(found, equal_bits=equal_bits(build(self.function("isobit")), calls))
            if series.difference:
                most = largest_difference(build(self.function("isobit"))[0](), result)
                found = replace(found, more={**found.more, "max_diff": most})
            return found

        for name in names:
            if self.wanted(f"{name}{suffix}"):
                calls = partial(build, self.function(name))
                contenders.append(Contender(name, calls, verdict, required=True, grad=grad))
        for name, rival in series.rivals.items():
            if not self.wanted(f"{name}{suffix}"):
                continue
            reason = rival.why_not(case, self.device, direction, self.options(case))
            if reason is not None:
                self.note(f"{name}: {reason}")
                continue
            if rival.compiled or rival.anew:
                torch.compiler.reset()  # earlier cases count towards a limit beyond which it runs eagerly
            calls = partial(build, rival.function, rival)
            judged = verdict_on_rival if rival.judged else _unjudged
            contenders.append(Contender(name, calls, judged, graph=rival.graph, grad=grad))
        return [replace(each, name=f"{each.name}{suffix}", runs=series.runs) for each in contenders]

    def with_new_sizes(self, case: Case, direction: str, names: Iterable[str]) -> list[Contender]:
        """All implementations again, with calls whose sizes have not occurred before, in any direction.

        In steps each implementation has its own sizes. Attention plans for a new size, which takes longer
        than all the rest, and the first implementation would pay for the others."""
        directions = self.series.directions
        copies = self.series.new(case, self.pool)[directions.index(direction) :: len(directions)]
        contenders = self.contenders(case, copies, direction, None, names, NEW) if copies else []
        if self.series.step:
            contenders = [
                replace(each, build=partial(_every, len(contenders), k, each.build))
                for k, each in enumerate(contenders)
            ]
        return [replace(each, once=True, graph=False, judge=_unjudged) for each in contenders]

    def function(self, name: str) -> Callable[[Args], Any]:
        """The function of one of our implementations: a variant, or the usual one on some backend."""
        variant = name.partition(":")[2]
        if variant in self.series.variants:
            return self.series.variants[variant]
        return lambda args: self.series.call(args, variant or None)


def implementation_names(series: Series, backend: str | None, directions: Sequence[str]) -> list[str]:
    """The implementations of a series that may be timed in these directions, if they can run here."""
    ours = [*([backend] if backend else []), *series.also, *series.variants]
    rivals = [
        name for name, rival in series.rivals.items()
        if rival.directions is None or set(rival.directions) & set(directions)
    ]  # fmt: skip
    return ["isobit", *(f"isobit:{name}" for name in ours), *rivals, *(["copy"] if series.copy else [])]


def with_rows(
    series: Series,
    case: Case,
    device: torch.device,
    direction: str,
    names: Iterable[str],
    notes: Sequence[str],
) -> list[str]:
    """Of these names, those with rows wherever a case was timed with them: isobit, the copy, and rivals that
    can run here. Not one that has failed, which is in the notes: it would be tried for ever."""
    options = {**series.options, **options_of(case)}

    def has(name: str) -> bool:
        rival = series.rivals.get(name)
        if rival is None:
            return name == "isobit" or (name == "copy" and series.copy)
        failed = f"{name}: failed on {case_name(case)} {direction}: "
        can = rival.why_not(case, device, direction, options) is None
        return can and not any(note.startswith(failed) for note in notes)

    return [name for name in names if has(name)]


# Calls


def step_calls(function: Callable[[Args], Any], copies: Sequence[Args]) -> list[Call]:
    """Calls of a function that computes its own gradients, and returns (output, *gradients)."""
    return [partial(function, args) for args in copies]


def calls_of(
    function: Callable[[Args], Any],
    prepared: Sequence[Args],
    inputs: tuple[str, ...],
    direction: str,
    once: bool = False,
) -> list[Call]:
    """One call per copy of the inputs. With `once`, nothing is called here: the first call of each is
    timed."""
    return [_call(function, args, inputs, direction, once) for args in prepared]


def _call(
    function: Callable[[Args], Any], args: Args, inputs: tuple[str, ...], direction: str, once: bool
) -> Call:
    """A call that returns (output, *gradients), as its direction has them, and accumulates nothing. If the
    function returns several outputs, they are all returned, and each that has a gradient has a cotangent. A
    call without gradients runs under a `no_grad` that surrounds all calls, so that it is not timed with
    each."""
    inputs = tuple(name for name in inputs if args[name] is not None)
    leaves = [args[name].detach().requires_grad_() for name in inputs]
    args = args | dict(zip(inputs, leaves, strict=True))

    def fwd() -> tuple[Tensor, ...]:
        outputs = function(args)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    if direction == "fwd" or not inputs:
        return fwd

    def graded(outputs: Sequence[Tensor]) -> list[Tensor]:
        """Without integers, such as the experts of a router."""
        return [o for o in outputs if o.requires_grad]

    def fwd_bwd_once() -> tuple[Tensor, ...]:
        outputs = fwd()
        ends = graded(outputs)
        return (*outputs, *torch.autograd.grad(ends, leaves, [o.detach() for o in ends]))

    if once:
        assert direction == "fwd_bwd"  # for a backward alone the forward has run before
        return fwd_bwd_once
    ends = graded(fwd())
    cotangents = [cotangent_like(o) for o in ends]
    if direction == "bwd":
        return lambda: torch.autograd.grad(ends, leaves, cotangents, retain_graph=True)

    def fwd_bwd() -> tuple[Tensor, ...]:
        outputs = fwd()
        return (*outputs, *torch.autograd.grad(graded(outputs), leaves, cotangents))

    return fwd_bwd


def prepared_for(rival: Rival, copies: Sequence[Args]) -> list[Args]:
    with torch.no_grad():
        return [rival.prepare(args) for args in copies]


def equal_bits(ours: Sequence[Call], theirs: Sequence[Call]) -> float | None:
    """The fraction of first outputs with equal bits, over enough calls; None for another dtype or shape."""
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


def largest_difference(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> float:
    """Between results that both return; NaN if there is one in them, or if their shapes differ."""
    most = [torch.zeros((), dtype=torch.float64)]
    for mine, other in zip(ours, theirs, strict=True):
        if mine is not None and other is not None:
            if mine.shape != other.shape:
                return math.nan
            # In parts: fp64 takes four times the memory of bf16.
            parts = zip(mine, other, strict=True)
            most += [(a.double() - b.double()).abs().max().cpu() for a, b in parts if a.numel()]
    return float(torch.stack(most).max())


# Rows


def _every(nth: int, first: int, build: Callable[[], Sequence[Call]]) -> Sequence[Call]:
    return build()[first::nth]


def _unjudged(calls: Sequence[Call], result: Any) -> Verdict:
    return Verdict()


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
    """Five digits of a number; JSON has no NaN, so that becomes null. The fraction of equal bits keeps all
    digits: one element in a million is not none."""
    if not isinstance(value, float) or key == "equal_bits":
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None
