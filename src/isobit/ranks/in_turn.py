"""Several ranks in one process: the same code as on several GPUs, on one device and without a network.

Bits do not depend on who moves the bytes. So this is how a law shows that 1, 2, 4 and 8 ranks have the same
bits, on one GPU or on a CPU.

Every rank is a thread, but only one of them runs at a time: until it waits for the others in a collective, or
ends. So runs are repeatable, and nothing that ranks share in the process sees two of them at once.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from isobit.ranks.group import Group, RanksError

T = TypeVar("T")


@dataclass
class _Round:
    """One collective: what every rank that has arrived gives to it."""

    given: dict[int, tuple[str, Tensor]] = field(default_factory=dict)


@dataclass
class _Meeting(Generic[T]):
    """Whose turn it is, and what the ranks that wait have given."""

    size: int
    lock: threading.Condition = field(default_factory=threading.Condition)
    turn: int = 0
    round: _Round = field(default_factory=_Round)
    results: dict[int, T] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    broken: str = ""

    def begin(self, rank: int) -> None:
        with self.lock:
            self.lock.wait_for(lambda: self.turn == rank)

    def meet(self, rank: int, what: str, t: Tensor) -> list[Tensor]:
        """The tensors of all ranks, when all of them have called this."""
        with self.lock:
            mine = self.round
            mine.given[rank] = (f"{what} of {list(t.shape)} {t.dtype}", t)
            self._pass_on()
            self.lock.wait_for(lambda: self.turn == rank)
            if self.broken:
                raise RanksError(self.broken)
            return [mine.given[i][1] for i in range(self.size)]

    def end(self, rank: int, result: T | None, error: BaseException | None) -> None:
        with self.lock:
            if error is None:
                self.results[rank] = result  # type: ignore[assignment]
            else:
                self.errors[rank] = error
            self._pass_on()

    def _pass_on(self) -> None:
        """The turn of the next rank that can run; if all wait, they have met."""
        ended, given = self.results.keys() | self.errors.keys(), self.round.given
        waiting = [rank for rank in range(self.size) if rank not in ended]
        free = [rank for rank in waiting if rank not in given]
        if not free and waiting:
            self._met(ended)
            self.round, free = _Round(), waiting
        self.turn = free[0] if free else -1
        self.lock.notify_all()

    def _met(self, ended: set[int]) -> None:
        given = self.round.given
        calls = {call for call, _ in given.values()}
        if self.broken or not (ended or len(calls) > 1):
            return
        told = {rank: call for rank, (call, _) in given.items()}
        told |= dict.fromkeys(ended, "has ended")
        told |= {rank: f"raised {type(error).__name__}: {error}" for rank, error in self.errors.items()}
        said = "; ".join(f"rank {rank}: {what}" for rank, what in sorted(told.items()))
        self.broken = f"the ranks do not make the same calls: {said}"


class InTurn(Group):
    """A rank among those that `in_turn` runs."""

    def __init__(self, meeting: _Meeting[Any], rank: int) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def all_gather(self, t: Tensor) -> Tensor:
        return torch.stack(self._meeting.meet(self.rank, "all_gather", t))

    def all_to_all(self, t: Tensor) -> Tensor:
        return torch.stack([other[self.rank] for other in self._meeting.meet(self.rank, "all_to_all", t)])

    def __hash__(self) -> int:
        return hash((id(self._meeting), self.rank))

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, InTurn) and other._meeting is self._meeting
        return same and other.rank == self.rank  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"InTurn(rank {self.rank} of {self.size})"


def in_turn(size: int, function: Callable[[Group], T]) -> list[T]:
    """What a function returns on each of `size` ranks of this process.

    Args:
        size: how many ranks.
        function: is called once for every rank, with its `Group`, and under the caller's modes: autocast,
            inference_mode, no_grad. It may compute gradients: a backward runs in the thread that calls it.

    Returns:
        The results, in the order of ranks. If a rank raises an error, this raises the first one that is not
        merely about another rank.

    Example:
        >>> import torch
        >>> from isobit.parallel import in_turn
        >>> in_turn(2, lambda group: group.all_gather(torch.tensor([group.rank])).flatten().tolist())
        [[0, 1], [0, 1]]
    """
    meeting: _Meeting[T] = _Meeting(size)
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    inference = torch.is_inference_mode_enabled()
    cast = {
        kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in ("cpu", "cuda")
    }
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    def run(rank: int) -> None:
        meeting.begin(rank)
        result, error = None, None
        try:
            torch.set_num_threads(threads)
            # One thread of autograd serves a GPU: a rank that waits there would block the others.
            with (
                torch.inference_mode(inference),
                torch.set_grad_enabled(grad),
                torch.autocast("cpu", *cast["cpu"]),
                torch.autocast("cuda", *cast["cuda"]),
                torch.cuda.stream(stream),
                torch.autograd.set_multithreading_enabled(False),
            ):
                result = function(InTurn(meeting, rank))
        except BaseException as raised:  # whatever it is, the others must not wait for this rank
            error = raised
        meeting.end(rank, result, error)

    ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    errors = [error for _, error in sorted(meeting.errors.items())]
    for raised in sorted(errors, key=lambda error: isinstance(error, RanksError)):
        raise raised
    return [meeting.results[rank] for rank in range(size)]
