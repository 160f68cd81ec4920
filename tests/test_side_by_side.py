"""Calls on two streams at once, as the law `repeatable` makes them on a GPU, with stand-ins for streams."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.check import laws_bits
from isobit.check.compare import OutputCheck
from isobit.check.trial import LawBroken


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


def test_calls_that_do_not_end_are_noticed(streams: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "ends", False)
    monkeypatch.setattr(laws_bits, "PATIENCE_S", 0.0)
    with pytest.raises(LawBroken, match="64 calls on two streams do not end: after 0 s they still run"):
        judged()
