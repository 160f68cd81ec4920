"""Laws that need the interpreter run in a few processes. A process that dies is one FAIL, with a reason."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import groupby
from threading import Thread, Timer
from typing import Any

import pytest
import torch

from isobit.check import process, runner, worker_main, workers
from isobit.check.laws import LAWS
from isobit.check.process import ask
from isobit.check.request import Request
from isobit.check.runner import FAIL, OK, Cell, Interrupted, _cells_here, _elsewhere, _is_shared, _shared, run
from isobit.check.work_queue import WorkQueue
from isobit.frame.contract import ContractError
from isobit.frame.op import OPS
from isobit.spec.proofs import proof_of
from isobit.spec.trial import Trial

F32 = torch.float32

#: `serve` without the rest of the package: importing PyTorch takes seconds.
SERVE = f"import runpy\nserve = runpy.run_path({process.__file__!r})['serve']\n"

#: A case of the invariant law alone.
BITS = "N=5 V=3001 fp32 random each=True"


def asked(**changes: Any) -> Request:
    return Request(ops=("logp",), backends=("triton",), dims={"N": 4, "V": 5}, **changes)


def cells_of(*requests: Request) -> list[Cell]:
    return list(workers.start(list(requests)).rest())


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Processes that were started."""
    processes: list[Any] = []
    own = workers._started

    def seen(interpreted: bool) -> Any:
        processes.append(own(interpreted))
        return processes[-1]

    monkeypatch.setattr(workers, "_started", seen)
    return processes


def test_all_requests_are_answered_by_a_few_processes(started: list[Any]) -> None:
    """As they were sent. Those that compile have a process of their own."""
    laws = ("accuracy", "gradient", "repeatable", "written", "contract")
    narrow = asked(laws=("accuracy",), dtypes=(torch.bfloat16,), vary={"temperature": 0.7})
    compiles = Request(
        ("group_advantages",), ("triton",), ("compile",), (torch.float32,), targets=("cuda:90",)
    )
    cells = cells_of(*(asked(laws=(law,)) for law in laws), narrow, compiles)
    assert Counter(cell.law for cell in cells) == Counter((*laws, "accuracy", "compile"))
    assert {cell.status for cell in cells} == {OK}, [cell.reason for cell in cells]
    assert {cell.case for cell in cells if cell.law == "accuracy"} == {
        "N=4 V=5 fp32", "N=4 V=5 bf16 temperature=0.7",
    }  # fmt: skip
    assert len(started) <= workers.WORKERS + 1
    assert all(process.returncode == 0 for process in started)


def test_a_process_that_dies_breaks_one_request(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "WORKERS", 1)
    own = workers._started
    monkeypatch.setattr(workers, "_started", lambda kind: own(kind) if started else _killed(own(kind)))
    first, second = cells_of(asked(laws=("accuracy",)), asked(laws=("gradient",)))
    assert (first.law, first.status) == ("accuracy", FAIL)
    assert first.reason == f"the interpreter's process ended after 0 cells with code {-signal.SIGKILL}"
    assert first.command == "TRITON_INTERPRET=1 isobit check --op logp --backend triton --law accuracy " \
                            "--device cpu --dim N=4 --dim V=5"  # fmt: skip
    assert (second.law, second.status) == ("gradient", OK) and len(started) == 2


@pytest.fixture
def full_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU without memory for a tensor."""

    def small_args(*_: Any) -> Any:
        raise RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'")

    monkeypatch.setattr(runner, "small_args", small_args)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(1.5e9), int(141e9)))
    return torch.device("cuda:0")


FULL = "cuda:0 is out of memory: 1.5 of 141 GB are free. If another process holds the rest, run it again"


def test_a_gpu_without_memory_is_one_line(full_gpu: torch.device) -> None:
    with pytest.raises(ContractError, match=FULL):
        run(Request(ops=("logp",), laws=("accuracy",), device=full_gpu))


def test_a_worker_without_memory_says_so_in_its_cell(
    full_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with a code of its own."""
    ends = [sys.executable, "-c", f"import os; os._exit({workers.FULL})"]
    monkeypatch.setattr(
        workers, "_started", lambda kind: subprocess.Popen(ends, stdin=-1, stdout=-1, text=True)
    )
    one = replace(asked(laws=("accuracy",)), device=full_gpu)
    (cell,) = workers._Worker().answer(one)
    assert cell.status == FAIL and cell.reason.startswith(FULL)


def test_a_worker_ends_with_that_code(monkeypatch: pytest.MonkeyPatch, full_gpu: torch.device) -> None:
    class Ended(BaseException):
        pass

    def ended(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", ended)
    with pytest.raises(Ended, match=str(workers.FULL)):
        worker_main.answer(replace(asked(laws=("accuracy",)), device=full_gpu), print)


def test_memory_that_ends_in_a_case_is_its_reason(
    monkeypatch: pytest.MonkeyPatch, full_gpu: torch.device
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")

    op = OPS["logp"]
    case = proof_of(op).cases[0]
    trial = Trial(op, "triton", full_gpu, case, "cpu")
    monkeypatch.setattr(runner, "_fits", full)
    cell = Cell("logp", "triton", "accuracy", case.name, OK)
    runner._judge(cell, trial)
    assert cell.status == FAIL and "Tried to allocate 9 GiB.; cuda:0 is out of memory" in cell.reason


def _killed(process: Any) -> Any:
    """Stopped before it can read its request, and killed while the answer is awaited."""
    os.kill(process.pid, signal.SIGSTOP)
    process.stdin.write = lambda text: os.kill(process.pid, signal.SIGKILL)
    return process


def test_an_internal_error_becomes_a_cell_and_nothing_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(interpreted: bool) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(workers, "_started", broken)
    (cell,) = cells_of(asked(laws=("accuracy",)))
    assert (cell.status, cell.reason) == (FAIL, "OSError: no more processes")


def test_an_error_in_an_answer_breaks_that_request_alone(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one worker the requests after it were lost, and the first was blamed for any."""
    monkeypatch.setattr(workers, "WORKERS", 1)
    own = workers.process.ask

    def garbled(process: Any, request: Request) -> Any:
        lines = own(process, request)
        yield next(lines) if request.laws != ("gradient",) else "{no cell"
        yield from lines

    monkeypatch.setattr(workers.process, "ask", garbled)
    laws = ("accuracy", "gradient", "repeatable")
    cells = cells_of(*(asked(laws=(law,)) for law in laws))
    assert [(cell.law, cell.status) for cell in cells] == list(zip(laws, (OK, FAIL, OK), strict=True))
    assert cells[1].reason.startswith("JSONDecodeError: ") and "--law gradient" in cells[1].command
    assert [process.returncode for process in started] == [-signal.SIGKILL, 0]


def test_a_process_answers_with_what_it_says_and_ends_with_the_one_that_asked() -> None:
    """What is printed is no part of an answer: a line that is not ended hid its end, and whoever asked waited
    forever. If nobody is there to hear the rest of an answer, the process ends in the middle of it."""
    code = (
        f"{SERVE}import os, time\n"
        "def answer(request, say):\n"
        "    print('done', flush=True)\n"
        "    os.write(1, b'done')\n"
        "    say(request)\n"
        "    print('no end of a line', end='', flush=True)\n"
        "    time.sleep(60 * (request == 'begun'))\n"
        "serve(answer)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    late = Timer(50, process.kill)
    late.start()
    assert [list(ask(process, text)) for text in ("one", "two")] == [["one\n"], ["two\n"]]
    assert next(ask(process, "begun")) == "begun\n"
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(10) == 1
    late.cancel()


def test_a_process_that_is_done_ends_without_taking_python_apart() -> None:
    """Triton 3.9 reports every object that outlives it as a leak, in the middle of a check. Handlers of
    `atexit` are still called: they end children and remove files."""
    code = (
        f"{SERVE}import atexit, sys\n"
        "class Leaked:\n"
        "    def __del__(self, say=sys.stderr.write):\n"
        "        say('leaked')\n"
        "kept = Leaked()\n"
        "atexit.register(sys.stderr.write, 'handled')\n"
        "serve(lambda request, say: say(request))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert list(ask(process, "one")) == ["one\n"]
    _, said = process.communicate(timeout=50)
    assert (process.returncode, said) == (0, "handled")


def test_an_interrupted_check_ends_its_processes_and_keeps_its_cells(started: list[Any]) -> None:
    """They are sent more than a minute of work."""

    def interrupt(cell: Cell) -> None:
        raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(Interrupted) as stop:
        run(Request(ops=("logp",), backends=("triton",), laws=("accuracy", "gradient")), interrupt)
    assert [cell.status for cell in stop.value.cells] == [OK]
    codes = [process.wait(10) for process in started]
    assert codes and set(codes) == {-signal.SIGKILL} and time.monotonic() - begin < 60


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Requests that a check sends to workers; it ends there."""
    requests: list[Request] = []

    def start(each: list[Request]) -> Any:
        requests.extend(each)
        raise InterruptedError

    monkeypatch.setattr(workers, "start", start)
    return requests


def test_a_case_of_one_law_is_not_asked_of_others(sent: list[Request]) -> None:
    """It is no case of theirs, and was a FAIL for that."""
    with pytest.raises(InterruptedError):
        run(Request(ops=("logp",), backends=("triton",), laws=("accuracy", "invariant"), case=BITS))
    assert [(request.laws, request.case) for request in sent] == [(("invariant",), BITS)]


@pytest.mark.parametrize("named", [{"ops": ("logp",), "laws": ("compile",)}, {"backends": ("hopper",)}])
def test_workers_compile_kernels_in_a_check_of_all_laws_or_ops(named: dict[str, Any]) -> None:
    """A check of some backend may be of one that only this process knows."""
    for whole in (Request(), Request(laws=("compile",)), Request(ops=("logp",))):
        (compiled,) = _elsewhere(OPS["logp"], "hopper", whole)
        assert compiled == Request(ops=("logp",), backends=("hopper",), laws=("compile",))
    assert _elsewhere(OPS["logp"], "hopper", Request(**named)) == []
    assert _elsewhere(OPS["logp"], "reference", Request()) == []  # nothing to compile


@pytest.mark.parametrize(("laws", "brief"), [((), True), (("accuracy", "compile"), False)])
def test_a_check_of_all_laws_is_brief_about_compilation(
    sent: list[Request], laws: tuple[str, ...], brief: bool
) -> None:
    with pytest.raises(InterruptedError):
        run(Request(ops=("logp",), laws=laws))
    assert sent and {request.brief for request in sent} == {brief}


@pytest.mark.parametrize(("workers_busy", "threads"), [(0, 4), (1, 3), (2, 2), (9, 2)])
def test_threads_of_pytorch_leave_a_core_to_every_worker(workers_busy: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with workers.cores_left_to([asked()] * workers_busy):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 4
        torch.set_num_threads(1)
        with workers.cores_left_to([asked()]):
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_on_a_gpu_workers_take_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_cannot_serve", lambda op, backend, device: None)
    gpu, op = Request(ops=("logp",), device=torch.device("cuda")), OPS["logp"]
    laws = ("accuracy", "invariant")
    jobs = _shared(op, "reference", replace(gpu, laws=laws))
    assert {job.laws for job in jobs} == {("accuracy",), ("invariant",)}
    declared = {case.name: case for law in laws for case in LAWS[law].cases(proof_of(op))}
    assert {job.case for job in jobs} == set(declared)
    assert all(_is_shared(op, gpu) and not _is_shared(op, job) for job in jobs)
    assert list(_cells_here(op, "reference", replace(gpu, laws=laws))) == []
    assert not _is_shared(op, replace(gpu, dims={"N": 4}))
    assert not _is_shared(op, replace(gpu, device=torch.device("cpu")))
    needs = {(declared[str(job.case)].heavy, declared[str(job.case)].gpu_gb): workers._gigabytes(job)
             for job in jobs}  # fmt: skip
    assert needs[False, 0] == workers.SMALL_GB and needs[True, 0] == workers.HEAVY_GB
    assert needs[True, 70] == 70


def test_on_a_gpu_the_longest_cases_of_an_op_begin_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its next op after all of them: the file of the first is written before the second is done."""
    monkeypatch.setattr(runner, "_cannot_serve", lambda op, backend, device: None)
    gpu, laws = Request(device=torch.device("cuda")), ("accuracy", "invariant", "compile")
    names = ("logp", "ratio_kl")
    jobs = [
        job for name in names for backend in ("triton", "reference")
        for job in _shared(OPS[name], backend, replace(gpu, laws=laws))
    ]  # fmt: skip
    order = workers._longest_first(jobs)
    assert sorted(job.command() for job in order) == sorted(job.command() for job in jobs)
    assert [op for (op,), _ in groupby(order, lambda job: job.ops)] == list(names)
    for name in names:
        mine = [job for job in order if job.ops == (name,)]
        assert [law for (law,), _ in groupby(mine, lambda job: job.laws)] == [
            "compile",
            "invariant",
            "accuracy",
        ]
        for _, group in groupby(mine, lambda job: job.laws):
            needs = [workers._gigabytes(job) for job in group]
            assert needs == sorted(needs, reverse=True)
    on_a_cpu = [replace(job, device=torch.device("cpu")) for job in jobs]
    assert workers._longest_first(on_a_cpu) == on_a_cpu


def test_no_worker_on_a_gpu_starts_a_compiler_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's would. Unless the user has said how many."""
    given: list[Any] = []
    monkeypatch.setattr(workers.process, "started", lambda module, env, apart: given.append(env))
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    workers._started(False)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "3")
    workers._started(False)
    assert [env["TORCHINDUCTOR_COMPILE_THREADS"] for env in given] == ["1", "3"]


def test_cases_run_at_the_same_time_where_they_fit() -> None:
    queue = WorkQueue(["a", "whole", "b", "c"], {"a": 6, "whole": 99, "b": 5, "c": 4}.__getitem__, 10)
    assert queue.take() == ("a", 6) and queue.take() == ("c", 4)
    waiting = Thread(target=lambda: found.append(queue.take()))
    found: list[Any] = []
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive() and found == []
    queue.give_back(4)
    waiting.join(0.05)
    assert waiting.is_alive()  # neither of the two fits yet
    queue.give_back(6)
    waiting.join(10)
    assert found == [("whole", 10)]  # alone, though it needs more than there is
    queue.close()
    assert queue.take() is None


def test_sharing_cases_changes_no_cell(monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> None:
    laws = ("accuracy", "contract")
    request = Request(ops=("group_advantages",), backends=("reference",), laws=laws, heavy=False)
    alone = run(request)
    assert not started
    monkeypatch.setattr(runner, "_is_shared", lambda op, request: request.case is None)
    monkeypatch.setattr(workers, "_interpreted", lambda request: False)
    together = run(request)
    assert len(started) == workers.WORKERS and len(alone) > 5

    def seen(cells: list[Cell]) -> list[Any]:
        return [(c.law, c.case, c.status, c.command, len(c.outputs)) for c in cells]

    assert seen(together) == seen(alone)


@pytest.mark.parametrize(("device", "cores", "jobs", "gigabytes", "largest", "count"), [
    ("cpu", 64, 9, 0, 0, 2), ("cpu", 64, 1, 0, 0, 1), ("cpu", 2, 0, 0, 0, 0),
    ("cuda", 64, 99, 150, 1, 16), ("cuda", 8, 99, 150, 1, 8), ("cuda", 1, 9, 150, 1, 1),
    ("cuda", 64, 3, 150, 1, 3),
    ("cuda", 64, 99, 150, 120, 16), ("cuda", 64, 99, 150, 130, 11), ("cuda", 64, 99, 150, 160, 1),
    ("cuda", 64, 99, 24, 6, 3), ("cuda", 64, 99, 2, 1, 1),
])  # fmt: skip
def test_how_many_processes(
    monkeypatch: pytest.MonkeyPatch, device: str, cores: int, jobs: int, gigabytes: int, largest: int,
    count: int,
) -> None:  # fmt: skip
    """Cases take three quarters of a GPU's memory, or what the largest one needs."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(workers, "_total", lambda device: gigabytes)
    monkeypatch.setattr(workers, "_gigabytes", lambda request: largest)
    assert workers.how_many([asked(device=torch.device(device))] * jobs) == count
