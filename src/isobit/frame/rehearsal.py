"""Compiles what calls need before they are made, in several processes.

The first call of a kernel compiles it: tenths of a second up to seconds each, one after another, and a model
has dozens of kernels. So calls are first rehearsed: they go all the way to their launches, with tensors of
the real sizes, and there the kernel and what it is compiled for are noted instead. What is missing is then
compiled by a few processes, which leave it in Triton's cache on disk, and loaded by this one.

These processes are forked from this one, as those of PyTorch's DataLoader are. So they begin at once, where
importing PyTorch would take as long as several kernels. They use no GPU: a kernel is compiled for a target,
which is known here. Threads would not do: much of a compilation is Python.

While calls are rehearsed nothing is computed, so results are whatever was in memory.
"""

import os
import select
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction

from isobit.frame.launch import is_compiled, prepare, stand_in
from isobit.frame.op import OPS
from isobit.frame.rehearsed import Warmed, rehearsed_by

#: Seconds in which some process must have compiled something. After that they are ended, and this one goes on
#: alone: a lock that another thread held at the fork stays locked in them.
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Needed:
    """A launch whose kernel is not compiled yet. Its tensors are stand-ins."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def device(self) -> torch.device:
        first: Tensor = self.args[0]
        return first.device


def rehearse(*calls: Callable[[], object]) -> list[Needed]:
    """What these calls need and is not compiled yet. No other thread may make calls of ops meanwhile: they
    would not be computed."""
    needed: dict[Any, Needed] = {}

    def take(key: Any, kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if key not in needed and not is_compiled(key):
            own = {name: stand_in(value) for name, value in options.items()}
            needed[key] = Needed(kernel, tuple(map(stand_in, args)), own)

    with _plans_apart(), rehearsed_by(take):
        for call in calls:
            call()
    return list(needed.values())


@contextmanager
def _plans_apart() -> Iterator[None]:
    """Without the plans of earlier calls, which launch by themselves; and those of a rehearsal are dropped:
    its launches were not made, so they can record none."""
    before = {name: (op._plans, op._planned_for) for name, op in OPS.items()}
    for op in OPS.values():
        op.forget()
    try:
        yield
    finally:
        for name, (plans, planned_for) in before.items():
            OPS[name]._plans, OPS[name]._planned_for = plans, planned_for


def compile_in_parallel(
    needed: Sequence[Needed], processes: int, progress: Callable[[int], None] = lambda done: None
) -> None:
    """Compile and load them. `progress` gets the number of kernels that are compiled, again and again."""
    done = 0
    for device, group in groupby(sorted(needed, key=lambda each: str(each.device)), lambda each: each.device):
        own = list(group)
        with _current(device):
            if processes > 1 and len(own) > 1 and hasattr(os, "fork"):
                _compile_elsewhere(own, min(processes, len(own)), partial(_further, progress, done))
            # From the cache on disk. What has failed there, for whatever reason, is compiled or fails here.
            for each in own:
                prepare(each.kernel, *each.args, **each.options)
        done += len(own)
        progress(done)


def _further(progress: Callable[[int], None], before: int, done: int) -> None:
    progress(before + done)


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    if device.index is None:
        yield
    else:
        with torch.get_device_module(device.type).device(device):
            yield


def _compile_elsewhere(needed: Sequence[Needed], processes: int, progress: Callable[[int], None]) -> None:
    """In forked processes, which take one number after another out of a pipe, and answer with a byte."""
    from triton.runtime import driver

    place, target = driver.active.get_current_device(), driver.active.get_current_target()
    for each in needed:
        # Triton's hash of a function depends on which functions that it calls were hashed before. So it is
        # taken here, once: otherwise this process would look for another one than the others have stored.
        _ = each.kernel.cache_key
    jobs, to_jobs = os.pipe()
    answers, to_answers = os.pipe()
    # Kernels in Gluon take longest, then long ones: those that come last should not be waited for.
    order = sorted(range(len(needed)), key=lambda i: _length(needed[i].kernel), reverse=True)
    os.write(to_jobs, b"".join(i.to_bytes(4, "little") for i in order))
    os.close(to_jobs)
    children: list[int] = []
    try:
        with warnings.catch_warnings():
            # From Python 3.12 on a process with threads is warned when it forks.
            warnings.simplefilter("ignore", DeprecationWarning)
            for _ in range(processes):
                child = os.fork()
                if not child:
                    _work(needed, jobs, to_answers, place, target)
                children.append(child)
        os.close(to_answers)
        to_answers, done = -1, 0
        while select.select([answers], [], [], PATIENCE_S)[0]:
            read = os.read(answers, 64)
            if not read:  # all have ended
                break
            done += len(read)
            progress(done)
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, 9)  # those that have ended are not waited for yet
        for child in children:
            with suppress(ChildProcessError):
                os.waitpid(child, 0)
        for end in (jobs, answers, to_answers):
            if end >= 0:
                os.close(end)


def _length(kernel: Any) -> tuple[bool, int]:
    return isinstance(kernel, GluonJITFunction), len(kernel.src)


def _work(needed: Sequence[Needed], jobs: int, answers: int, place: int, target: Any) -> None:
    """In a forked process, which ends here. It must not call CUDA: what Triton asks its driver is known."""
    try:
        from triton.runtime import driver

        active: Any = driver.active
        active.get_current_device = lambda: place
        active.get_current_stream = lambda device=None: 0
        active.get_current_target = lambda: target
        # Nobody reads what it says: an error of a kernel is raised again by the process that needs it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        while number := os.read(jobs, 4):
            each = needed[int.from_bytes(number, "little")]
            with suppress(Exception):
                compiled = each.kernel.run(*each.args, grid=(1, 1, 1), warmup=True, **each.options)
                active.launcher_cls(compiled.src, compiled.metadata)  # in C, compiled and cached too
            os.write(answers, b".")
    finally:
        os._exit(0)


def how_many() -> int:
    """Processes, unless a caller says how many: one per core that this process may use, up to eight."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, 8)


def warm(
    calls: Sequence[Callable[[], object]], processes: int | None, progress: Callable[[int, int], None]
) -> Warmed:
    """Rehearse these calls, and compile what they need. `progress` gets (kernels compiled, all of them)."""
    begin = time.monotonic()
    needed = rehearse(*calls)
    several = max(1, min(how_many() if processes is None else processes, len(needed)))
    if needed:
        progress(0, len(needed))
        compile_in_parallel(needed, several, lambda done: progress(done, len(needed)))
    return Warmed(len(needed), several, time.monotonic() - begin)
