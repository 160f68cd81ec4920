"""The only timer.

Implementations of one case are timed alternately, so that clock drift affects all of them equally; one that
is many times slower than the case's minimum gets fewer samples, spread evenly. On a GPU a sample is the
replay of a CUDA graph of several calls: host time, which is often longer than the kernels, is excluded
(`host_us` has it). The calls rotate over copies of the inputs that together exceed the L2 cache several
times, so every call starts with a cold cache. Calls that cannot be captured are timed with events, after a
sleep that is long enough for the host to get ahead. Without a GPU a sample is the wall time of one call.

`host_us` is the time until an eager call returns: calls are made one after another without waiting for the
device, which has less to do than the host, or gets few of them.

A whole step, whose time depends on the host, is timed by `measure_steps`: wall time from an idle device to an
idle device.

A number of megabytes is 2**20 bytes here.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor

from isobit.spec.rotation import copies_for
from isobit.spec.truth import Verdict

Call = Callable[[], Any]

#: Calls per event-timed sample: their launches must fit in the queue that the sleep holds back.
MAX_EVENT_CALLS = 16
#: Samples per contender, the minimum, and the time for all of them together.
REPETITIONS, MIN_REPETITIONS, SAMPLES_MS = 30, 7, 150.0
#: Host time is the median over this many blocks of eager calls; the most calls per block; and how long all
#: calls of one contender may keep the device busy. The first call of a block is not counted: it finds an idle
#: device, and caches that another contender has filled.
HOST_BLOCKS, HOST_CALLS, HOST_MS = 11, 20, 60.0
#: Calls that warm up a contender. One whose calls are made only once uses up as many.
WARM_CALLS = 3
#: From this many milliseconds on, the first call's duration, host included, counts as the duration of a call:
#: a rival may take fifty times the minimum. Below it, the host may be most of that.
LONG_MS = 2.0
#: Calls of a contender whose calls are made once: for host time and warming up.
ONCE_CALLS = WARM_CALLS + HOST_BLOCKS * (HOST_CALLS + 1)
#: Steps of one contender, the minimum, and the time for all of them together: a step of a large model takes
#: half a second.
STEPS, MIN_STEPS, STEPS_MS = 15, 7, 2000.0
#: Sleep before a replay: longer than launching a graph of hundreds of kernels takes. Cycles at 2 GHz.
GRAPH_BACKLOG_US, CYCLES_PER_US = 200.0, 2000

#: The longest of several calls. cuDNN plans anew for every size, which takes the host up to 0.1 s a call.
MAX_BACKLOG_US = 20000.0
MB = 1 << 20


@dataclass(frozen=True)
class Contender:
    """One implementation of a case.

    `build` returns its calls, one per copy of the inputs; it runs on the timed stream. `judge` gets the calls
    and the result of the first. If it is not `required`, an exception only loses its row. Without `graph` no
    capture is tried: PyTorch never frees what a failed one has allocated. `grad` is the autograd mode around
    all of its calls, as users set it: not inside each.

    With `once` no call is made twice while the host or a step is timed, as if every call had a new size; the
    first few warm it up.

    A step that takes seconds is timed in this many `runs`. One call warms it up and is judged. Its memory is
    not measured: it may be that of another process.
    """

    name: str
    build: Callable[[], Sequence[Call]]
    judge: Callable[[Sequence[Call], Any], Verdict] = lambda calls, result: Verdict()
    required: bool = False
    graph: bool = True
    grad: bool = True
    once: bool = False
    runs: int | None = None


@dataclass(frozen=True)
class Timing:
    """The measurements of one contender: milliseconds per call, microseconds of host, megabytes."""

    ms: float
    ms_q25: float
    ms_q75: float
    method: str  # "graph" | "event" | "sync" | "wall"
    host_us: float | None
    peak_mb: float | None
    extra_mb: float | None
    verdict: Verdict
    runs_ms: list[float] | None = None  # of a step that is timed in a few runs: each


@dataclass
class _Lane:
    """A contender that is warm: what issues one sample of `count` calls, and what is known about it."""

    calls: Sequence[Call]
    verdict: Verdict
    graph: bool = True
    grad: bool = True
    once: bool = False
    warm: Sequence[Call] = ()
    runs: int | None = None
    count: int = 1
    method: str = "wall"
    host_us: float | None = None
    peak: int | None = None
    extra: int | None = None
    backlog_us: float = 0.0
    sample: Call = lambda: None
    #: Approximate time of one call: the case's minimum, unless this contender turns out to take far longer.
    call_ms: float = 1.0
    repetitions: int = 1
    ms: list[float] = field(default_factory=list)

    def due(self, turn: int, turns: int) -> bool:
        """Whether this is one of its turns, which are spread evenly over all."""
        return (turn + 1) * self.repetitions // turns > turn * self.repetitions // turns

    def timing(self) -> Timing:
        q25, median, q75 = statistics.quantiles(self.ms, n=4, method="inclusive")
        peak, extra = (None if x is None else x / MB for x in (self.peak, self.extra))
        runs = None if self.runs is None else self.ms
        return Timing(median, q25, q75, self.method, self.host_us, peak, extra, self.verdict, runs)

    def turns(self, count: int) -> Call:
        """A function that makes the next `count` calls of the rotation."""
        turns, grad = cycle(self.calls), self.grad

        def sample() -> None:
            with torch.set_grad_enabled(grad):
                for _ in range(count):
                    next(turns)()

        return sample


def measure(
    contenders: Iterable[Contender],
    device: torch.device,
    call_ms: float = 1.0,
    repetitions: int | None = None,
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time contenders alternately. `call_ms` is the approximate time of one call: a sample is as many calls
    as fill a millisecond, within limits (events resolve a microsecond), and long calls get fewer samples.

    Returns timings by name, and the reason by name for each contender that could not run.
    """
    if device.type != "cuda":
        return _measure(contenders, device, call_ms, repetitions or 5)
    torch.cuda.synchronize(device)
    # One side stream for everything: a backward runs on the stream of its forward, and both are captured.
    with torch.cuda.stream(torch.cuda.Stream(device)):
        timings = _measure(contenders, device, call_ms, repetitions)
        torch.cuda.synchronize(device)
    tidy(device)
    return timings


def measure_steps(
    contenders: Iterable[Contender], device: torch.device, repetitions: int | None = None
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Time calls whose duration depends on the host, alternately, by wall time: each begins and ends with an
    idle device. Contenders whose calls are made once get the mean over all of their calls, since these differ
    in size, and then all contenders make as many. Returns what `measure` returns."""
    lanes, failures = _warmed(contenders, device)
    made_once = [len(lane.calls) for lane in lanes.values() if lane.once]
    longest = max((lane.call_ms for lane in lanes.values()), default=0.0)
    often = _within(STEPS, MIN_STEPS, STEPS_MS / max(longest, 1.0))
    given = [lane.runs for lane in lanes.values() if lane.runs is not None]
    count = min([*made_once, *given], default=often)
    count = count if repetitions is None else min(count, repetitions)
    for lane in lanes.values():  # the allocator has freed everything in between
        with torch.set_grad_enabled(lane.grad):
            if lane.runs is None:
                lane.warm[0]()
    host: dict[str, list[float]] = {name: [] for name in lanes}
    steps = {name: lane.turns(1) for name, lane in lanes.items()}
    for _ in range(count):
        for name, lane in lanes.items():
            _synchronize(device)
            begin = time.perf_counter()
            steps[name]()
            returned = time.perf_counter()
            _synchronize(device)
            lane.ms.append((time.perf_counter() - begin) * 1e3)
            host[name].append((returned - begin) * 1e6)
    timings = {}
    for name, lane in lanes.items():
        if device.type == "cuda":
            lane.method, lane.host_us = "sync", statistics.median(host[name])
        timing = lane.timing()
        timings[name] = replace(timing, ms=statistics.fmean(lane.ms)) if lane.once else timing
    return timings, failures


def _warmed(contenders: Iterable[Contender], device: torch.device) -> tuple[dict[str, _Lane], dict[str, str]]:
    """The contenders that can run, warmed up, and why the others cannot."""
    lanes: dict[str, _Lane] = {}
    failures: dict[str, str] = {}
    for contender in contenders:
        try:
            lanes[contender.name] = _warm(contender, device)
        except Exception as error:
            if contender.required:
                raise
            lines = str(error).strip().splitlines()
            failures[contender.name] = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
        tidy(device)
    return lanes, failures


def _measure(
    contenders: Iterable[Contender], device: torch.device, call_ms: float, repetitions: int | None
) -> tuple[dict[str, Timing], dict[str, str]]:
    lanes, failures = _warmed(contenders, device)
    if device.type == "cuda":
        for lane in lanes.values():
            lane.call_ms = max(call_ms, lane.call_ms)
        _time_the_host(list(lanes.values()), device)
        for lane in lanes.values():
            _make_sample(lane, min(32, math.ceil(1 / lane.call_ms)))
            host_ms = (lane.host_us or 0.0) / 1e3 if lane.method == "event" else 0.0
            each_ms = host_ms if host_ms > 2 * lane.call_ms else lane.call_ms
            often = _within(REPETITIONS, MIN_REPETITIONS, SAMPLES_MS / (each_ms * lane.count))
            lane.repetitions = repetitions or often
        _sample_with_events(list(lanes.values()), device)
    else:
        for lane in lanes.values():
            lane.sample = lane.turns(1)
        _sample_with_clock(list(lanes.values()), device, repetitions or 5)
    return {name: lane.timing() for name, lane in lanes.items()}, failures


def _within(most: int, least: int, number: float) -> int:
    return max(least, min(most, int(number)))


def _warm(contender: Contender, device: torch.device) -> _Lane:
    """Build and run a contender until it is warm; judge its result and measure its memory."""
    with torch.set_grad_enabled(contender.grad):
        calls = contender.build()
        if contender.runs is not None:
            return _Lane(calls, contender.judge(calls, calls[0]()), grad=contender.grad, runs=contender.runs)
        # A CPU gets one: it has nothing to compile, and its times do not matter.
        rounds = WARM_CALLS if device.type == "cuda" else 1
        warm = calls[:rounds] if contender.once else calls[:1]
        for call in islice(cycle(warm), rounds):
            call()
        lane = _Lane(
            calls[rounds:] if contender.once else calls, Verdict(), contender.graph, contender.grad,
            contender.once, warm,
        )  # fmt: skip
        if device.type != "cuda":
            lane.verdict = contender.judge(calls, warm[0]())
            return lane
        tidy(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        begin = time.perf_counter()
        result = warm[0]()
        torch.cuda.synchronize(device)
        took_ms = (time.perf_counter() - begin) * 1e3
        lane.call_ms = took_ms if took_ms >= LONG_MS else 0.0
        lane.peak = torch.cuda.max_memory_allocated(device) - before
        lane.extra = lane.peak - _bytes_kept(result)
        lane.verdict = contender.judge(calls, result)
        return lane


def _bytes_kept(result: Any) -> int:
    """Bytes of the tensors that a call returned; views of one storage count once."""
    tensors = [t for t in result if isinstance(t, Tensor)] if isinstance(result, tuple) else []
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _time_the_host(lanes: Sequence[_Lane], device: torch.device) -> None:
    """Time until an eager call returns while the device is still busy with earlier ones: the median over
    blocks of calls. The lanes alternate, so that a host that is busy for a while slows all of them. A block
    is short, or the queue would fill up and a call would wait for the device. Blocks of one call are for
    calls so long that the device dominates: they have no call before them. All copies of the inputs have been
    used before, like the weights of a model."""
    blocks: list[list[float]] = [[] for _ in lanes]
    rotations = [cycle(lane.calls) for lane in lanes]
    for lane in lanes:
        with torch.set_grad_enabled(lane.grad):
            for call in () if lane.once else lane.calls[1:]:
                call()
    for _ in range(HOST_BLOCKS):
        for lane, rotation, found in zip(lanes, rotations, blocks, strict=True):
            calls = _within(HOST_CALLS, 1, HOST_MS / HOST_BLOCKS / lane.call_ms)
            torch.cuda.synchronize(device)
            with torch.set_grad_enabled(lane.grad):
                if calls > 1:
                    next(rotation)()
                begin = time.perf_counter()
                for _ in range(calls):
                    next(rotation)()
                found.append((time.perf_counter() - begin) / calls)
    torch.cuda.synchronize(device)
    for lane, found in zip(lanes, blocks, strict=True):
        lane.host_us = statistics.median(found) * 1e6


def _make_sample(lane: _Lane, calls: int) -> None:
    """Capture the lane's calls, whole rotations of them, or fall back to events. Each graph has its own
    memory pool: if they shared one, a failed capture would keep the memory of the others as well."""
    rotation = len(lane.calls)
    lane.count = rotation * math.ceil(calls / rotation)
    graph = torch.cuda.CUDAGraph() if lane.graph else None
    try:
        if graph is not None:
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                lane.turns(lane.count)()
            graph.replay()
            torch.cuda.synchronize()
    except Exception:  # a sync, an allocation, a launch elsewhere: each fails a capture in its own way
        torch.cuda.synchronize()
        graph = None
    if graph is not None:
        lane.method, lane.sample, lane.backlog_us = "graph", graph.replay, GRAPH_BACKLOG_US
        return
    waits_us = 1.5 * (lane.host_us or 0.0)  # of the device for one call, so that it never waits for the host
    few = int(MAX_BACKLOG_US / max(waits_us, 1.0))
    lane.method, lane.count = "event", min(lane.count, MAX_EVENT_CALLS, max(1, few))
    lane.sample = lane.turns(lane.count)
    lane.backlog_us = GRAPH_BACKLOG_US + waits_us * lane.count


def _sample_with_events(lanes: Sequence[_Lane], device: torch.device) -> None:
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in lanes]
    turns = max((lane.repetitions for lane in lanes), default=0)
    for turn in range(turns):
        due = [pair for pair in zip(lanes, events, strict=True) if pair[0].due(turn, turns)]
        for lane, (start, end) in due:
            torch.cuda._sleep(int(lane.backlog_us * CYCLES_PER_US))
            start.record()
            lane.sample()
            end.record()
        torch.cuda.synchronize(device)
        for lane, (start, end) in due:
            lane.ms.append(start.elapsed_time(end) / lane.count)


def _sample_with_clock(lanes: Sequence[_Lane], device: torch.device, repetitions: int) -> None:
    for _ in range(repetitions):
        for lane in lanes:
            begin = time.perf_counter()
            lane.sample()
            _synchronize(device)
            lane.ms.append((time.perf_counter() - begin) * 1e3)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def settled_heap() -> Iterator[None]:
    """Excludes all existing objects from garbage collection. `tidy` collects between any two measurements,
    and would spend most of its time on the modules of PyTorch and its compiler: hundreds of thousands of
    objects."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def tidy(device: torch.device) -> None:
    """Free unused memory, so that memory counts do not depend on what ran before."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def copy_contender(nbytes: int, device: torch.device) -> Contender:
    """A kernel that reads one half of `nbytes` and writes the other: the practical lower bound."""

    def build() -> list[Call]:
        elements = max(1, nbytes // 8)
        return [_copy_call(elements, device) for _ in range(copies_for(nbytes, device))]

    return Contender("copy", build, required=True)


def _copy_call(elements: int, device: torch.device) -> Call:
    source = torch.empty(elements, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)

    def call() -> None:
        # Not copy_: captured in a graph that is a node for the copy engine, a third slower than a kernel (2.8
        # against 4.3 TB/s on an H200).
        torch.neg(source, out=target)

    return call


def machine_rates(device: torch.device, repetitions: int | None = None) -> tuple[float, float]:
    """(bytes/s of a large copy, reads and writes counted; FLOP/s of a large bf16 product), measured now."""
    gpu = device.type == "cuda"
    # Rates of a CPU mean nothing, and one without bf16 takes 0.2 s for a product of side 256.
    nbytes, side = (4 << 30, 8192) if gpu else (32 << 20, 64)

    def product() -> list[Call]:
        a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)

        def call() -> None:
            torch.mm(a, b, out=out)

        return [call]

    contenders = [copy_contender(nbytes, device), Contender("product", product, required=True)]
    timings, _ = measure(contenders, device, call_ms=0.25, repetitions=repetitions)  # four calls per sample
    return nbytes / timings["copy"].ms * 1e3, 2 * side**3 / timings["product"].ms * 1e3
