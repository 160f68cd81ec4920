"""Compiles what a run will time before it is timed, in several processes.

The first call of a kernel compiles it. That takes seconds, and a run has dozens of kernels. So other
processes make these first calls in parallel, and leave the compiled kernels in the disk caches of Triton and
PyTorch. A call that fails there is not reported: it fails again when it is timed.
"""

import os
import subprocess
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from threading import Event, Lock

import torch

from isobit.bench.cases import Subject, subject_of, suite_of
from isobit.bench.check_gate import CheckGate
from isobit.bench.implementations import Implementations, implementation_names
from isobit.check.process import ProcessEnded, ask, serve, started
from isobit.check.work_queue import WorkQueue
from isobit.check.workers import most_on_a_gpu
from isobit.frame.op import known_op
from isobit.spec.proof import Case
from isobit.spec.series import Pool, Series

#: Memory that a case may take, with gradients and what rivals keep, as a multiple of the bytes it must move.
KEPT = 4
#: Cases that move fewer bytes are split by implementation: making their inputs takes less time than
#: compiling.
SMALL_BYTES = 1 << 30


@dataclass(frozen=True)
class First:
    """The first calls of these implementations of a case; or, in their place, a part of the check."""

    flag: str  # "--op" or "--suite"
    name: str
    series: int  # index of the series
    case: Case
    directions: tuple[str, ...]
    backend: str | None
    impls: tuple[str, ...]
    device: str
    memory: int  # bytes that it may take
    part: int | None = None  # index of the part of the check


def precompile(
    subject: Subject,
    jobs: Sequence[tuple[Series, Case, Sequence[str]]],
    backend: str | None,
    impls: Sequence[str] | None,
    device: torch.device,
    say: Callable[[str], None],
) -> None:
    """Make the first calls of these cases in other processes, on a GPU. Not with a candidate, which only this
    process has imported."""
    if device.type != "cuda" or subject.candidate:
        return
    memory = torch.cuda.get_device_properties(device).total_memory * 3 // 4
    calls = first_calls(subject, jobs, backend, impls, device, memory)
    if len(calls) > 1:
        begin = time.monotonic()
        processes = min(most_on_a_gpu(device), len(calls))
        say(f"compiling in {processes} processes: {len(calls)} first calls")
        make(calls, processes, memory, say)
        say(f"compiled in {time.monotonic() - begin:.0f} s")


def first_calls(
    subject: Subject,
    jobs: Sequence[tuple[Series, Case, Sequence[str]]],
    backend: str | None,
    impls: Sequence[str] | None,
    device: torch.device,
    memory: int,
) -> list[First]:
    """The first calls that compile something and fit in this much memory. Steps of a model are left out: what
    they compile, the parts of their check compile."""
    calls: dict[Hashable, First] = {}
    for series, case, directions in jobs:
        cost = series.cost(case.dims, case.dtype)
        nbytes = max(cost.bytes(direction) for direction in directions)
        place = list(subject.series).index(series)
        if KEPT * nbytes > memory:
            continue
        if impls is None or "isobit" in impls:
            for part in range(len(series.rehearse)):
                call = First(
                    subject.flag, subject.name, place, case, (), backend, (), str(device), KEPT * nbytes, part
                )
                calls.setdefault((place, part), call)
        if series.step:
            continue
        ready = {"copy", *(name for name, rival in series.rivals.items() if not rival.jit)}
        known = [name for name in implementation_names(series, backend, directions) if name not in ready]
        wanted = [name for name in known if impls is None or name in impls]
        for names in [(name,) for name in wanted] if nbytes < SMALL_BYTES else [tuple(wanted)] * bool(wanted):
            call = First(
                subject.flag, subject.name, place, case, tuple(directions), backend, names, str(device),
                KEPT * nbytes,
            )  # fmt: skip
            calls.setdefault((place, series.kernels(case), case.dtype, tuple(directions), names), call)
    return list(calls.values())


def make(calls: Sequence[First], processes: int, memory: int, say: Callable[[str], None]) -> None:
    """Make these calls in this many processes, as many at a time as fit in this much memory. A process that
    dies loses one call, and another one continues."""
    queue = WorkQueue(calls, lambda call: call.memory, memory)
    shown = {len(calls) * quarter // 4 for quarter in (1, 2, 3)}
    begun = count(1)
    running: list[subprocess.Popen[str]] = []
    lock, stopped = Lock(), Event()  # a process that is being started while all are stopped is not forgotten

    def start() -> "subprocess.Popen[str]":
        # PyTorch's compiler would start processes of its own in each of these.
        env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        with lock:
            process = started("isobit.bench.precompile", env, apart=True)
            running.append(process)
            if stopped.is_set():
                process.kill()
        return process

    def work() -> None:
        process = None
        while taken := queue.take():
            call, memory = taken
            if (number := next(begun)) in shown:
                say(f"compiling: {number} of {len(calls)}")
            try:
                fresh = process is None
                process = process or start()
                for _ in ask(process, call):
                    pass
            except ProcessEnded:
                assert process is not None
                process.communicate()
                process = None
                if fresh:  # the next one would not come any further
                    return
            finally:
                queue.give_back(memory)
        if process is not None:
            process.communicate()

    with ThreadPoolExecutor(processes) as pool:
        threads = [pool.submit(work) for _ in range(processes)]
        try:
            for thread in wait(threads, return_when=FIRST_EXCEPTION).done:
                thread.result()
        except BaseException:  # Ctrl-C: no further call is made, and those under way end
            queue.close()
            with lock:
                stopped.set()
                for each in running:
                    each.kill()
            raise


def _answer(first: First, say: Callable[[str], None]) -> None:
    """Runs in another process. Its answer has no lines: that it comes is enough."""
    subject = subject_of(known_op(first.name)) if first.flag == "--op" else suite_of(first.name)
    device = torch.device(first.device)

    def ignored(text: str) -> None:
        pass

    series, pool, gate = subject.series[first.series], Pool(device), CheckGate(device, (), True, ignored)
    if first.part is None:
        implementations = Implementations(
            series, pool, first.backend, first.impls, None, 1.0, 1.0, gate, ignored, ignored
        )
        implementations.call_once(first.case, first.directions)
    else:
        with suppress(Exception):  # as in `call_once`
            series.rehearse[first.part](pool)
    pool.keep(None)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # after an illegal access no call works any more: end, and let another go on
        torch.cuda.empty_cache()  # memory that it caches is not available to the others


if __name__ == "__main__":
    serve(_answer)
