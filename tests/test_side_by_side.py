"""Calls on two streams at once, as the law `repeatable` makes them on a GPU, with stand-ins for streams.

After calls that never end nothing in their process waits for the GPU: it ends, and another one goes on."""

import atexit
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit import testing
from isobit.check import process, runner, worker_main, workers
from isobit.check.laws import LAWS
from isobit.check.laws import bits as laws_bits
from isobit.check.request import Request
from isobit.check.runner import FAIL, OK, run
from isobit.frame.op import OPS
from isobit.ops.linear_logp.kernels_hopper import schedule_for
from isobit.spec.compare import OutputCheck
from isobit.spec.proofs import proof_of
from isobit.spec.trial import NeverEnds, Trial

#: Cells of a check, and the case whose calls never end: not the first, and not the last.
ASKED = Request(ops=("group_advantages",), backends=("reference",), laws=("repeatable",))
NAMES = [case.name for case in LAWS["repeatable"].cases(proof_of(OPS["group_advantages"]))]
STICKS = NAMES[1]
#: The code of a process that waits for the GPU after that. A real one would never end.
WAITED = 99
SAID = "64 calls on two streams do not end: after 0.01 s they still run"


class Event:
    ends = True

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return self.ends


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The stream of every call."""
    used: list[object] = []

    @contextmanager
    def stream(one: object) -> Iterator[None]:
        used.append(one)
        yield

    cuda = {"Stream": lambda device: object(), "stream": stream, "Event": Event, "synchronize": print}
    for name, stub in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    return used


def judged(*wrong: int) -> list[OutputCheck]:
    """What the law finds if these calls are wrong."""
    calls: list[int] = []

    def call(args: Any) -> tuple[Tensor, ...]:
        calls.append(len(calls))
        return torch.ones(3), torch.full((2,), 2.0 if calls[-1] in wrong else 1.0)

    def forward(args: Any) -> tuple[Tensor, ...]:
        return torch.ones(3), torch.ones(2)

    outputs = SimpleNamespace(outputs=("one", "other"))
    trial: Any = SimpleNamespace(call=call, forward=forward, proof=outputs, device=torch.device("cuda"))
    found = laws_bits._side_by_side(trial, {})
    assert len(calls) == laws_bits.CALLS
    return found


def test_calls_take_two_streams_in_turn(streams: list[object]) -> None:
    assert all(check.passed for check in judged())
    assert len(set(streams)) == 2 and streams[0::2] == streams[:1] * 32 and streams[1::2] == streams[1:2] * 32


@pytest.mark.parametrize("wrong", [(0,), (63,), (5, 6)])
def test_one_wrong_call_among_many_is_found(streams: list[object], wrong: tuple[int, ...]) -> None:
    one, other = judged(*wrong)
    assert one.passed and not other.passed
    assert f"{len(wrong)} of 64 calls on two streams" in str(other)


def test_each_call_writes_into_a_state_of_its_own(streams: list[object]) -> None:
    """The next call would go on from what the one before it had written."""

    class State:
        calls = 0

        def clone(self) -> "State":
            return State()

    def call(args: Any) -> tuple[Tensor, ...]:
        args["state"].calls += 1
        return (torch.full((2,), float(args["state"].calls)),)

    given: dict[str, Any] = {"state": State(), "x": torch.ones(2)}
    trial: Any = SimpleNamespace(call=call, forward=lambda args: call(args | {"state": State()}))
    trial.proof, trial.device = SimpleNamespace(outputs=("one",)), torch.device("cuda")
    assert all(check.passed for check in laws_bits._side_by_side(trial, given))


def test_results_that_fill_the_memory_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws_bits, "HELD_BYTES", 64 * 5 * 4 - 1)
    with pytest.raises(AssertionError, match="assert 0 == 64"):  # no call was made
        judged()


def test_shared_splits_are_called_on_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only programs that wait for one another: a heavy case reaches them, and the law does not leave it
    out."""
    cases = LAWS["repeatable"].cases(proof_of(OPS["linear_logp"]))
    sizes = [tuple(case.dims.get(name, 0) for name in "NDV") for case in cases]
    shared = [c for c, (N, D, V) in zip(cases, sizes, strict=True) if N and schedule_for(N, D, V, 132).pieces]
    assert shared and all(64 * 4 * case.dims["N"] < laws_bits.HELD_BYTES for case in shared)
    for name in ("_of_these_contents", "_apart"):
        monkeypatch.setattr(laws_bits, name, lambda *anything: None)
    for name in ("_compare_runs", "_first_of_its_thread"):
        monkeypatch.setattr(laws_bits, name, lambda *anything: [])
    monkeypatch.setattr(laws_bits, "_side_by_side", lambda trial, args: [trial.case])
    trial: Any = SimpleNamespace(
        args=dict, backward=lambda args: None, case=shared[0], device=torch.device("cuda"), brief=True
    )
    assert laws_bits.repeatable(trial) == [shared[0]]


def test_calls_that_do_not_end_are_noticed(streams: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "ends", False)
    monkeypatch.setattr(laws_bits, "PATIENCE_S", 0.0)
    with pytest.raises(NeverEnds, match="64 calls on two streams do not end: after 0 s they still run"):
        judged()


# What comes after


def stick() -> None:
    """For a process of its own: the calls of one case never end. Whatever waits for the GPU afterwards, as
    the end of Python does, ends it with another code."""
    law = LAWS["repeatable"]
    stubs: dict[str, Any] = {"Stream": str, "stream": nullcontext, "Event": Event, "synchronize": str}

    def waits(*anything: object) -> None:
        os._exit(WAITED)

    def sticking(trial: Trial) -> list[OutputCheck]:
        if trial.case.name != STICKS:
            return law.run(trial)
        Event.ends, laws_bits.PATIENCE_S = False, 0.01
        for name, stub in (stubs | {"is_initialized": lambda: True, "empty_cache": waits}).items():
            setattr(torch.cuda, name, stub)
        atexit.register(waits)
        return laws_bits._side_by_side(trial, trial.args())

    LAWS["repeatable"] = replace(law, run=sticking)


def stuck_worker() -> None:
    stick()
    process.serve(worker_main.answer)


def stuck_command() -> None:
    stick()
    from isobit.cli.main import main

    main()


def test_a_worker_whose_calls_never_end_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def start(interpreted: bool) -> Any:
        started.append(_python("stuck_worker", stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        return started[-1]

    monkeypatch.setattr(workers, "_started", start)
    monkeypatch.setattr(workers, "WORKERS", 1)
    monkeypatch.setattr(workers, "_interpreted", lambda request: False)
    monkeypatch.setattr(runner, "_is_shared", lambda op, request: request.case is None)
    cells = run(ASKED)
    assert [(cell.case, cell.status) for cell in cells] == [
        (name, FAIL if name == STICKS else OK) for name in NAMES
    ]
    assert cells[1].reason == SAID and STICKS in cells[1].command
    assert [each.returncode for each in started] == [workers.STUCK, 0]


def test_a_request_of_several_cases_says_that_not_all_of_them_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(asked: object, request: Request) -> Iterator[str]:
        raise process.ProcessEnded(workers.STUCK)
        yield

    monkeypatch.setattr(process, "ask", ended)
    monkeypatch.setattr(workers, "_started", lambda kind: SimpleNamespace(communicate=lambda: None))
    (cell,) = workers.start([ASKED]).rest()
    assert cell.status == FAIL and cell.reason.endswith(f"ended after 0 cells with code {workers.STUCK}")


def test_a_check_in_one_process_stops_where_calls_never_end(tmp_path: Path) -> None:
    flags = "check --op group_advantages --backend reference --law repeatable --device cpu --json"
    path = tmp_path / "x.json"
    command = _python("stuck_command", *flags.split(), str(path), stdout=subprocess.PIPE)
    out, _ = command.communicate()
    assert command.returncode == 1
    assert SAID in out and SAID in path.read_text()
    assert "1 ok, 1 failed, 0 unsupported" in out
    assert f"1 cell FAILS; stopped after 2 of {len(NAMES)} cells: calls that never end hold the GPU" in out


def test_a_test_suite_is_told_that_the_gpu_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def sticking(trial: Trial) -> list[OutputCheck]:
        raise NeverEnds(SAID)

    monkeypatch.setitem(LAWS, "repeatable", replace(LAWS["repeatable"], run=sticking))
    with pytest.raises(AssertionError, match="this process cannot use it any more") as failed:
        testing.check(lambda logits, token_ids: logits[..., 0], "logp", laws=("repeatable",), device="cpu")
    assert str(failed.value).count(SAID) == 1


def _python(function: str, *flags: str, **pipes: Any) -> "subprocess.Popen[str]":
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    code += f"import {Path(__file__).stem} as this; this.{function}()"
    return subprocess.Popen([sys.executable, "-c", code, *flags], text=True, **pipes)
