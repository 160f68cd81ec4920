"""Worker processes of a check: they receive requests, and return cells as they are done.

On a CPU most of them run Triton's interpreter. They must be separate processes, because Triton decides when
it decorates a kernel whether it is compiled or interpreted. On a GPU there are more of them, because
compiling kernels takes most of the time, and they run as many cases at a time as fit in its memory. There the
longest cases of an op begin first, so that none is waited for alone, and a kernel that several need at the
same time is compiled by one (`isobit.check.compiled_once`). Starting a process takes as long as many laws, so
all requests share them. If a worker dies, only its current request fails; another one is started for the
next. So it is if calls never end: their worker ends with code STUCK; and if the GPU has no memory for a
worker, which ends with code FULL.
"""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import Queue
from threading import Lock, Thread

import torch

from isobit.check import process
from isobit.check.cell import FAIL, Cell
from isobit.check.gpu_memory import in_words
from isobit.check.laws import LAWS
from isobit.check.request import Request, cases_of
from isobit.check.work_queue import WorkQueue
from isobit.frame.op import known_op

#: Number of workers on a CPU, in addition to this process; and the maximum on a GPU.
WORKERS, ON_A_GPU = 2, 16

#: Gigabytes of the GPU's memory that a worker takes besides its case: CUDA itself, and the kernels it loads.
OF_A_WORKER = 1.7

#: Gigabytes of GPU memory that a case may take: a heavy one that declares no number, and a small one.
HEAVY_GB, SMALL_GB = 6, 1


#: The codes of a worker that ends because calls of its last cell, which FAILS, hold the GPU, and because the
#: GPU has no memory for it.
STUCK, FULL = 75, 76


class Cells:
    """The cells of all requests, in the order in which they are done."""

    def __init__(self, workers: "Sequence[_Worker]" = ()) -> None:
        self._queue: Queue[Cell | None] = Queue()  # None comes last
        self._ended, self._workers = False, workers

    def stop(self) -> None:
        """End all processes now, whatever they are doing; nothing more comes of them."""
        for worker in self._workers:
            worker.stop()

    def put(self, cell: Cell | None) -> None:
        self._queue.put(cell)

    def now(self) -> Iterator[Cell]:
        """Cells that are available now."""
        while not self._ended and not self._queue.empty():
            yield from self._next()

    def rest(self) -> Iterator[Cell]:
        while not self._ended:
            yield from self._next()

    def _next(self) -> Iterator[Cell]:
        cell = self._queue.get()
        self._ended = cell is None
        if cell is not None:
            yield cell


def how_many(requests: list[Request]) -> int:
    """How many processes are worth starting for these requests."""
    on_a_gpu = [request.device for request in requests if request.device.type == "cuda"]
    largest = max(map(_gigabytes, requests), default=0)
    return min(most_on_a_gpu(on_a_gpu[0], largest) if on_a_gpu else WORKERS, len(requests))


def most_on_a_gpu(device: torch.device, largest: int = 0) -> int:
    """Processes that this machine's cores and the GPU bear next to a case of `largest` gigabytes. Each keeps
    a core busy, with compiling; the one that started them only waits."""
    left = _total(device) - max(_memory(device), largest)
    return max(1, min(ON_A_GPU, os.cpu_count() or 1, int(left / OF_A_WORKER)))


def start(requests: list[Request]) -> Cells:
    """Start working on the requests, each for one op, backend and law."""
    workers = [_Worker() for _ in range(how_many(requests))]
    cells = Cells(workers)
    room = max(map(_memory, {request.device for request in requests}), default=0)
    queue = WorkQueue(_longest_first(requests), _gigabytes, room)

    def work(worker: _Worker) -> None:
        try:
            while not worker.stopped and (taken := queue.take()):
                request, memory = taken
                try:
                    for cell in worker.answer(request):
                        cells.put(cell)
                except Exception as error:  # the others are still to be answered
                    cells.put(_broken(request, f"{type(error).__name__}: {error}"))
                finally:
                    queue.give_back(memory)
        finally:
            worker.end()

    def work_all() -> None:
        try:
            with ThreadPoolExecutor(max(len(workers), 1)) as pool:
                threads = [pool.submit(work, worker) for worker in workers]
            for thread in threads:
                if error := thread.exception():  # whoever waits for the cells must learn of it
                    cells.put(_broken(requests[0], f"{type(error).__name__}: {error}"))
        finally:
            cells.put(None)  # or whoever waits would wait forever

    Thread(target=work_all, daemon=True).start()
    return cells


def _longest_first(requests: list[Request]) -> list[Request]:
    """On a GPU, the order in which the cases of an op begin. Ops keep theirs: their files are written one by
    one, as they are done."""
    ops = list(dict.fromkeys(request.ops for request in requests))

    def place(request: Request) -> tuple[int, int, int]:
        if request.device.type != "cuda":
            return 0, 0, 0
        (law,) = request.laws
        return ops.index(request.ops), -LAWS[law].takes, -_gigabytes(request)

    return sorted(requests, key=place)


def _memory(device: torch.device) -> int:
    """Gigabytes that all cases under way may take on a device. On a CPU they are small."""
    if device.type != "cuda":
        return 0
    return int(_total(device) * 3 / 4)


def _total(device: torch.device) -> float:
    return torch.cuda.get_device_properties(device).total_memory / 1e9


def _gigabytes(request: Request) -> int:
    if request.device.type != "cuda":
        return 0
    (op,), (backend,), (law,) = request.ops, request.backends, request.laws
    cases = cases_of(known_op(op), backend, law, request)
    return max((case.gpu_gb or (HEAVY_GB if case.heavy else SMALL_GB) for case in cases), default=0)


@contextmanager
def cores_left_to(requests: list[Request]) -> Iterator[None]:
    """Inside this context PyTorch leaves a core to every worker: threads of one operation wait for each
    other by spinning, which keeps cores busy. On two cores they took twice the time of one."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before - how_many(requests)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _broken(request: Request, reason: str) -> Cell:
    (op,), (backend,), (law,) = request.ops, request.backends, request.laws
    again = ("TRITON_INTERPRET=1 " if _interpreted(request) else "") + request.command()
    return Cell(op, backend, law, request.case or "", FAIL, reason, command=again)


def _interpreted(request: Request) -> bool:
    return request.device.type == "cpu" and request.laws != ("compile",)


class _Worker:
    """One interpreting and one compiling process, started when needed; one of them works at a time."""

    def __init__(self) -> None:
        self.processes: dict[bool, subprocess.Popen[str]] = {}
        self.stopped = False
        self._lock = Lock()  # a process that is being started while it is to be stopped is not forgotten

    def answer(self, request: Request) -> Iterator[Cell]:
        kind = _interpreted(request)
        with self._lock:
            if self.stopped:
                return
            if kind not in self.processes:
                self.processes[kind] = _started(kind)
        got = 0
        try:
            for line in process.ask(self.processes[kind], request):
                got += 1
                yield Cell(**json.loads(line))
        except process.ProcessEnded as ended:
            self.processes.pop(kind).communicate()
            if self.stopped or (ended.code == STUCK and request.case is not None):
                return  # the one case of this request has its cell
            which = "interpreter's" if kind else "GPU's" if request.device.type == "cuda" else "compiler's"
            reason = f"the {which} process ended after {got} cells with code {ended.code}"
            yield _broken(request, in_words(request.device) if ended.code == FULL else reason)
        except Exception:  # the rest of this answer would be taken for the next one
            lost = self.processes.pop(kind)
            lost.kill()
            lost.communicate()
            raise

    def stop(self) -> None:
        with self._lock:
            self.stopped = True
            for each in list(self.processes.values()):
                each.kill()

    def end(self) -> None:
        for each in self.processes.values():
            each.communicate()


def _started(interpreted: bool) -> "subprocess.Popen[str]":
    # The interpreter is numpy, which warns about every NaN and infinity that kernels get on purpose. Its
    # matrices are small: threads for them would only take a core from the other worker.
    env = {"OMP_NUM_THREADS": "1", **os.environ, "TRITON_INTERPRET": "1",
           "PYTHONWARNINGS": "ignore::RuntimeWarning"}  # fmt: skip
    # PyTorch's compiler would start processes of its own in each of the others, one per core. To start 16 of
    # them takes five seconds of CPU time.
    compiling = {"TORCHINDUCTOR_COMPILE_THREADS": "1", **os.environ}
    return process.started("isobit.check.worker_main", env if interpreted else compiling, apart=True)
