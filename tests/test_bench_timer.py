"""The timer, on a fake GPU that records its calls."""

import contextlib
import functools
import gc
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from isobit.bench import timing
from isobit.bench.implementations import Implementations
from isobit.bench.runner import NothingTimed, run
from isobit.bench.timing import Contender, Verdict, copies_for, measure, measure_steps
from isobit.spec.proof import Case
from isobit.spec.rotation import MAX_COPIES

CPU = torch.device("cpu")


class Gpu:
    """Enough of torch.cuda to run the timer: an event's time is the number of calls made so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls = self.captures = 0
        self.capturing = False
        self.sleeps: list[int] = []
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool):
                self.at = 0

            def record(self) -> None:
                self.at = gpu.calls

            def elapsed_time(self, end: Any) -> float:
                return float(end.at - self.at)

        class Graph:
            made = 0

            def replay(self) -> None:
                gpu.calls += self.made

        @contextlib.contextmanager
        def capture(graph: Graph, stream: Any) -> Iterator[None]:
            before, gpu.capturing = gpu.calls, True
            gpu.captures += 1
            try:
                yield
            finally:
                gpu.capturing = False
            graph.made = gpu.calls - before

        fakes: dict[str, Any] = {
            "Event": Event, "CUDAGraph": Graph, "graph": capture, "Stream": lambda device: None,
            "stream": lambda stream: contextlib.nullcontext(), "current_stream": lambda: None,
            "synchronize": lambda device=None: None, "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda device: None,
            "memory_allocated": lambda device: 1 << 20, "max_memory_allocated": lambda device: 5 << 20,
            "_sleep": self.sleeps.append,
            "get_device_properties": lambda device: types.SimpleNamespace(L2_cache_size=60 << 20),
        }  # fmt: skip
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def call(self, result: Any = None, captures: bool = True) -> Callable[[], Any]:
        def call() -> Any:
            if self.capturing and not captures:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.calls += 1
            return result

        return call


def test_the_gpu_timer_captures_or_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    result = (torch.zeros(1 << 18),)  # 1 MB that stays, of a peak of 4

    def raises() -> list[timing.Call]:
        raise RuntimeError("no such rival")

    def judge(calls: Any, result: Any) -> Verdict:
        return Verdict(float(result[0].sum()), len(calls) / 4)

    contenders = [
        Contender("captured", lambda: [gpu.call(result)] * 3, judge=judge),
        Contender("syncs", lambda: [gpu.call(captures=False)] * 40),
        Contender("raises", raises),
    ]
    timings, failures = measure(contenders, torch.device("cuda", 0), call_ms=0.25, repetitions=3)
    assert failures == {"raises": "RuntimeError: no such rival"}
    captured, syncs = timings["captured"], timings["syncs"]
    assert (captured.method, syncs.method) == ("graph", "event")
    assert captured.ms == syncs.ms == 1.0  # one tick a call, however many calls a sample has
    assert (captured.peak_mb, captured.extra_mb, captured.verdict) == (4.0, 3.0, Verdict(0.0, 0.75))
    assert syncs.host_us is not None and syncs.verdict == Verdict()
    graph_sleep = int(timing.GRAPH_BACKLOG_US * timing.CYCLES_PER_US)
    assert gpu.sleeps[::2] == [graph_sleep] * 3 and min(gpu.sleeps[1::2]) > graph_sleep


def test_host_time_is_the_median_of_blocks_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is slow for a while is slow for all contenders, and for less than half of their blocks."""
    gpu, clock, order = Gpu(monkeypatch), [0.0], list[str]()

    def contender(name: str, us: float) -> Contender:
        def call() -> None:
            slow = 100.0 if len(order) < 2 * timing.HOST_CALLS else 1.0
            clock[0] += slow * us * 1e-6 if recording else 0.0
            if recording:
                order.append(name)

        return Contender(name, lambda: [call])

    recording = False
    measured = timing._time_the_host

    def only_there(*args: Any) -> None:
        nonlocal recording
        recording = True
        measured(*args)
        recording = False

    monkeypatch.setattr(timing, "_time_the_host", only_there)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    contenders = [contender("ours", 20.0), contender("theirs", 5.0)]
    timings, _ = measure(contenders, torch.device("cuda", 0), call_ms=0.01, repetitions=3)
    assert {name: timing.host_us for name, timing in timings.items()} == pytest.approx(
        {"ours": 20.0, "theirs": 5.0}
    )
    turns = [name for name, _ in itertools.groupby(order)]
    assert turns == ["ours", "theirs"] * timing.HOST_BLOCKS and gpu.calls == 0


def test_host_time_is_that_of_calls_whose_inputs_are_known_and_device_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the first use of a copy of the inputs nor the first call of a block is in it, nor no_grad."""
    gpu, clock, seen, synced = Gpu(monkeypatch), [0.0], set[int](), [True]
    modes = set[bool]()

    def contender(name: str, grad: bool) -> Contender:
        def call(copy: int) -> None:
            modes.add(torch.is_grad_enabled() is grad)
            clock[0] += 1e-6 * (5.0 + 100.0 * (copy not in seen) + 30.0 * synced[0])
            seen.add(copy)
            synced[0] = False

        return Contender(name, lambda: [functools.partial(call, copy) for copy in range(30)], grad=grad)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: synced.__setitem__(0, True))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    for grad in (True, False):
        seen.clear()
        timings, _ = measure([contender("ours", grad)], torch.device("cuda", 0), 0.01, repetitions=3)
        assert timings["ours"].host_us == pytest.approx(5.0)
    assert modes == {True} and gpu.calls == 0


def test_a_call_that_is_made_once_is_made_once_while_the_host_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, made = Gpu(monkeypatch), list[int]()
    measured, window = timing._time_the_host, slice(0)

    def watched(*args: Any) -> None:
        nonlocal window
        begin = len(made)
        measured(*args)
        window = slice(begin, len(made))

    monkeypatch.setattr(timing, "_time_the_host", watched)
    calls = [functools.partial(made.append, i) for i in range(timing.ONCE_CALLS)]
    contenders = [Contender("new", lambda: calls, once=True, graph=False)]
    timings, _ = measure(contenders, torch.device("cuda", 0), call_ms=0.001, repetitions=3)
    assert made[:4] == [0, 1, 2, 0]  # warming up, and memory
    assert made[window] == list(range(timing.WARM_CALLS, timing.ONCE_CALLS))
    assert timings["new"].method == "event" and gpu.captures == 0


# Steps


def test_steps_are_timed_in_turns_from_an_idle_device_to_an_idle_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, clock, queued, order = Gpu(monkeypatch), [0.0], [0.0], list[str]()

    def synchronize(device: Any = None) -> None:
        clock[0] += queued[0]
        queued[0] = 0.0

    def contender(name: str, host_ms: float, device_ms: float) -> Contender:
        def step() -> tuple[torch.Tensor, ...]:
            assert torch.is_grad_enabled()
            order.append(name)
            clock[0] += host_ms / 1e3
            queued[0] += device_ms / 1e3
            return (torch.zeros(1 << 18),)

        return Contender(name, lambda: [step])

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    contenders = [contender("ours", 3.0, 4.0), contender("theirs", 2.0, 6.0)]
    timings, failures = measure_steps(contenders, torch.device("cuda", 0))
    assert failures == {} and gpu.captures == 0
    ours, theirs = timings["ours"], timings["theirs"]
    assert (ours.ms, theirs.ms) == pytest.approx((7.0, 8.0))
    assert (ours.host_us, theirs.host_us) == pytest.approx((3000.0, 2000.0))
    assert (ours.method, ours.peak_mb, ours.extra_mb) == ("sync", 4.0, 3.0)
    assert order[-2 * timing.STEPS :] == ["ours", "theirs"] * timing.STEPS
    order.clear()
    measure_steps([contender("long", 100.0, 400.0)], torch.device("cuda", 0))
    assert order == ["long"] * (timing.WARM_CALLS + 2 + timing.MIN_STEPS)


def test_steps_of_new_sizes_are_averaged_over_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is made once, after some that warm up; others make as many steps as there are."""
    Gpu(monkeypatch)
    clock, made = [0.0], dict[str, list[int]](new=[], usual=[])

    def step(name: str, ms: int) -> None:
        made[name].append(ms)
        clock[0] += ms / 1e3

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    lengths = [100, 1, 50, 2, 3, 4, 11]
    contenders = [
        Contender("new", lambda: [functools.partial(step, "new", ms) for ms in lengths], once=True),
        Contender("usual", lambda: [functools.partial(step, "usual", 7)]),
    ]
    timings, _ = measure_steps(contenders, torch.device("cuda", 0))
    assert made["new"] == [100, 1, 50, 100, 100, 2, 3, 4, 11]
    assert timings["new"].ms == pytest.approx(5.0) and timings["usual"].ms == pytest.approx(7.0)
    assert len(made["usual"]) == 3 + 1 + 1 + 4


def test_calls_that_declare_a_sync_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    contenders = [Contender("syncs", lambda: [gpu.call(captures=False)], graph=False)]
    timings, _ = measure(contenders, torch.device("cuda", 0), repetitions=3)
    assert timings["syncs"].method == "event" and gpu.captures == 0


def test_long_calls_get_fewer_samples_and_always_some(monkeypatch: pytest.MonkeyPatch) -> None:
    def samples(call_ms: float) -> tuple[int, int]:
        """How many samples are taken, and how many calls all in all."""
        gpu = Gpu(monkeypatch)
        measure([Contender("ours", lambda: [gpu.call()])], torch.device("cuda", 0), call_ms)
        return len(gpu.sleeps), gpu.calls

    assert samples(0.01)[0] == timing.REPETITIONS
    assert samples(10.0)[0] == 15 and samples(100.0)[0] == timing.MIN_REPETITIONS
    # Warming up, memory, host time, capture, a replay, samples: no more than there must be.
    assert samples(100.0)[1] == 3 + 1 + timing.HOST_BLOCKS + 1 + 1 + timing.MIN_REPETITIONS


def test_a_slow_rival_gets_fewer_samples_spread_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch)
    clock, order = [0.0], list[str]()

    def contender(name: str, ms: float) -> Contender:
        def call() -> None:
            clock[0] += ms * 1e-3
            order.append(name)

        return Contender(name, lambda: [call], graph=False)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    measure([contender("ours", 0.5), contender("slow", 15.0)], torch.device("cuda", 0), call_ms=0.5)
    sampled = order[-(2 * timing.REPETITIONS + 10) :]  # two calls of ours a sample, one of the other
    assert sampled.count("ours") == 2 * timing.REPETITIONS and sampled.count("slow") == 10
    halves = sampled[: len(sampled) // 2], sampled[len(sampled) // 2 :]
    assert [half.count("slow") for half in halves] == [5, 5]
    assert order.count("slow") == 3 + 1 + timing.HOST_BLOCKS + 10  # a block of the host is one call
    measure([contender("host", 1.9)], torch.device("cuda", 0), call_ms=0.01)
    assert order.count("host") > timing.HOST_BLOCKS * timing.HOST_CALLS  # that may be all host


def test_a_required_contender_that_fails_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch)
    with pytest.raises(ZeroDivisionError):
        measure([Contender("ours", lambda: [lambda: 1 // 0], required=True)], torch.device("cuda", 0))


def test_inputs_rotate_until_the_l2_cache_is_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch)
    device = torch.device("cuda", 0)
    assert [copies_for(n << 20, device) for n in (1, 24, 239, 241)] == [240, 10, 2, 1]
    assert copies_for(8, device) == MAX_COPIES and copies_for(8, CPU) == 1


def test_what_a_case_has_loaded_is_not_collected_again_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler has hundreds of thousands of objects, and a case collects some forty times."""
    loaded: list[list[int]] = []
    excluded: list[int] = []

    def rows(self: Implementations, case: Case, wanted: object) -> list[Any]:
        excluded.append(gc.get_freeze_count())
        loaded.extend([i] for i in range(100_000))
        return []

    monkeypatch.setattr(Implementations, "rows", rows)
    cases = [Case({"N": n, "V": 64}, torch.float32) for n in (1, 2)]
    with pytest.raises(NothingTimed):
        run("logp", cases, ["fwd"], "cpu", skip_check=True, say=lambda text: None)
    assert excluded[1] - excluded[0] >= 100_000
