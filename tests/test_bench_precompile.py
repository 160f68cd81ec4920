"""Before a run times its cases, other processes make their first calls, so that everything is compiled."""

from collections.abc import Iterator
from dataclasses import replace
from threading import Event
from time import sleep
from typing import Any

import pytest
import torch

from isobit.bench import precompile as module
from isobit.bench.cases import subject_of, suite_of
from isobit.bench.check_gate import CheckGate
from isobit.bench.implementations import Implementations, implementation_names
from isobit.bench.precompile import First, first_calls, make, precompile
from isobit.check.process import ProcessEnded
from isobit.frame.op import OPS
from isobit.spec.proof import Case
from isobit.spec.rival import Rival
from isobit.spec.series import Pool

CPU = torch.device("cpu")
SMALL = Case({"N": 4, "V": 40}, torch.float32, data="random")


def quiet(text: str) -> None:
    pass


def implementations(**changes: Any) -> Implementations:
    series = replace(subject_of(OPS["logp"]).series[0], **changes)
    return Implementations(
        series, Pool(CPU), None, None, None, 1.0, 1.0, CheckGate(CPU, None, True, quiet), quiet, quiet
    )


def first(**changes: Any) -> First:
    made = First("--op", "logp", 0, SMALL, ("fwd",), None, ("isobit",), "cpu", 0)
    return replace(made, **changes)


class Stub:
    """In place of a process."""

    def __init__(self) -> None:
        self.ended = False

    def communicate(self) -> None:
        self.ended = True

    kill = communicate


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Stub]:
    """Stubs of the processes that were started."""
    found: list[Stub] = []

    def start(module: str, env: Any, apart: bool) -> Stub:
        found.append(Stub())
        return found[-1]

    monkeypatch.setattr(module, "started", start)
    return found


# The calls


def test_every_implementation_is_called_in_every_direction_whatever_others_do() -> None:
    calls = []

    def rival(name: str) -> Rival:
        def function(args: Any) -> Any:
            calls.append((name, torch.is_grad_enabled()))
            if name == "broken":
                raise RuntimeError("does not compile")
            return args["logits"].log_softmax(-1)[..., 0]

        return Rival(name, function)

    some = implementations(rivals={name: rival(name) for name in ("broken", "plain")}, copy=False)
    some.call_once(SMALL, ["fwd", "fwd_bwd"])
    assert set(calls) == {(name, grad) for name in ("broken", "plain") for grad in (False, True)}


def test_inputs_that_cannot_be_made_end_a_call_and_nothing_else() -> None:
    def make_inputs(case: Case, pool: Pool) -> Any:
        raise torch.OutOfMemoryError

    implementations(make=make_inputs).call_once(SMALL, ["fwd"])


# Which calls


def jobs_of(name: str, *cases: Case) -> Any:
    subject = subject_of(OPS[name])
    series = subject.series[0]
    return subject, [(series, case, series.directions) for case in cases or series.cases]


def test_a_call_of_each_implementation_of_a_small_case_and_one_of_all_of_a_large_one() -> None:
    large = replace(SMALL, dims={"N": 1 << 14, "V": 1 << 16})
    subject, jobs = jobs_of("logp", SMALL, large)
    calls = first_calls(subject, jobs, None, None, CPU, 1 << 40)
    small = [call for call in calls if call.case == SMALL]
    known = implementation_names(subject.series[0], None, jobs[0][2])
    names = [name for name in known if name not in ("native", "copy")]  # which have nothing to compile
    assert [call.impls for call in small] == [(name,) for name in names]
    assert {"isobit", "torch.compile"} < set(names)
    assert [call.impls for call in calls if call.case == large] == [tuple(names)]
    named = first_calls(subject, jobs, None, ["isobit", "copy"], CPU, 1 << 40)
    assert {call.impls for call in named} == {("isobit",)}


def test_cases_that_do_not_fit_side_by_side_and_steps_are_left_out() -> None:
    subject, jobs = jobs_of("logp", SMALL)
    assert first_calls(subject, jobs, None, None, CPU, 1 << 10) == []
    steps = suite_of("train_step")
    all_steps = [(one, case, one.directions) for one in steps.series for case in one.cases]
    calls = first_calls(steps, all_steps, None, None, CPU, 1 << 60)
    wanted = [(i, 0, ()) for i, _ in enumerate(steps.series)]
    assert [(call.series, call.part, call.impls) for call in calls] == wanted


def test_a_check_that_compiles_much_is_rehearsed_in_parts() -> None:
    drift = suite_of("zero_drift")
    jobs = [(one, case, one.directions) for one in drift.series for case in one.cases]
    calls = first_calls(drift, jobs, None, None, CPU, 1 << 60)
    models = range(0, len(drift.series), 2)  # two series of each: decoding, then training
    assert [(call.series, call.part) for call in calls] == [(i, part) for i in models for part in range(4)]
    assert first_calls(drift, jobs, None, ["sdpa"], CPU, 1 << 60) == []
    assert first_calls(drift, jobs, None, None, CPU, 1 << 30) == []


def test_a_part_of_a_check_runs_in_place_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []

    def fails(pool: Pool) -> None:
        ran.append("fails")
        raise RuntimeError("reported when it is timed")

    subject = subject_of(OPS["logp"])
    series = replace(subject.series[0], rehearse=(lambda pool: ran.append(pool.device), fails), make=None)
    monkeypatch.setattr(module, "subject_of", lambda op: replace(subject, series=(series,)))
    for part in (0, 1):
        module._answer(first(impls=(), directions=(), part=part), quiet)
    assert ran == [CPU, "fails"]


def test_lengths_of_the_delta_rule_need_no_other_kernels() -> None:
    subject, jobs = jobs_of("chunk_gated_delta_rule_bwd_dhu")
    assert len(jobs) == 120
    calls = first_calls(subject, jobs, None, ["isobit"], CPU, 1 << 60)
    assert len(calls) == 30 and len({call.case.options["mode"] for call in calls}) == 5


def test_nothing_is_precompiled_on_a_cpu_or_beside_a_candidate(started: list[Stub]) -> None:
    subject, jobs = jobs_of("logp", SMALL, replace(SMALL, dtype=torch.bfloat16))
    precompile(subject, jobs, None, None, CPU, quiet)
    precompile(replace(subject, candidate="--candidate a:b"), jobs, None, None, torch.device("cuda"), quiet)
    assert started == []


# Processes


def test_a_process_makes_calls_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[Any] = []
    own, said = module.started, []

    def start(module: str, env: Any, apart: bool) -> Any:
        processes.append(own(module, env, apart))
        return processes[-1]

    monkeypatch.setattr(module, "started", start)
    make(
        [first(), first(impls=("native",)), first(name="ratio_kl"), first(impls=("none",))], 1, 0, said.append
    )
    assert [process.returncode for process in processes] == [0]
    assert said == [f"compiling: {number} of 4" for number in (1, 2, 3)]


def test_a_process_that_dies_takes_one_call_with_it(
    started: list[Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def ask(process: Stub, call: First) -> Iterator[str]:
        taken.append((started.index(process), call.name))
        if call.name == "second":
            raise ProcessEnded(-9)
        yield "a line of somebody's"

    monkeypatch.setattr(module, "ask", ask)
    make([first(name=name) for name in ("first", "second", "third")], 1, 0, quiet)
    assert taken == [(0, "first"), (0, "second"), (1, "third")]
    assert all(process.ended for process in started)


def test_a_process_that_dies_in_its_first_call_is_not_replaced(
    started: list[Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot import something, for one: each of hundreds of calls would start another."""

    def ask(process: Stub, call: First) -> Iterator[str]:
        raise ProcessEnded(1)
        yield

    monkeypatch.setattr(module, "ask", ask)
    make([first()] * 50, 3, 0, quiet)
    assert len(started) == 3 and all(process.ended for process in started)


def test_calls_wait_until_there_is_memory_for_them(
    started: list[Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    most = 0

    def ask(process: Stub, call: First) -> Iterator[str]:
        nonlocal most
        taken.append(call.memory)
        most = max(most, sum(taken))
        sleep(0.002)
        taken.remove(call.memory)
        yield ""

    monkeypatch.setattr(module, "ask", ask)
    make([first(memory=memory) for memory in (5, 5, 1, 10, 2, 3, 5) * 5], 4, 10, quiet)
    assert 5 < most <= 10 and taken == [] and len(started) == 4


def test_after_an_interruption_no_further_call_is_made(
    started: list[Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def ask(process: Stub, call: First) -> Iterator[str]:
        taken.append(call)
        if len(taken) == 1:
            raise KeyboardInterrupt
        sleep(0.02)
        yield ""

    monkeypatch.setattr(module, "ask", ask)
    with pytest.raises(KeyboardInterrupt):
        make([first()] * 50, 2, 0, quiet)
    assert len(taken) < 25 and all(process.ended for process in started)


def test_a_process_that_starts_after_an_interruption_is_ended(
    started: list[Stub], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its call was taken before. It was not among the processes that were ended, and was waited for."""
    about_to_start, answered = Event(), []

    def say(text: str) -> None:
        """Called before the second process is started: returns after the first was ended."""
        about_to_start.set()
        while not started[0].ended:
            sleep(0.001)

    def ask(process: Stub, call: First) -> Iterator[str]:
        if process is started[0]:
            assert about_to_start.wait(10)
            raise KeyboardInterrupt
        for _ in range(100):
            if process.ended:
                raise ProcessEnded(-9)
            sleep(0.01)
        answered.append(call)
        yield ""

    monkeypatch.setattr(module, "ask", ask)
    with pytest.raises(KeyboardInterrupt):
        make([first()] * 9, 2, 0, say)
    assert [process.ended for process in started] == [True, True] and not answered
