"""Whether calls are rehearsed now: every launch is noted, and none is made (`isobit.frame.rehearsal`). This
file does not import Triton."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

#: A function of a cache key, a kernel, its arguments and its options.
Take = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], None]

take: Take | None = None


def is_rehearsed() -> bool:
    """Then results are whatever was in memory."""
    return take is not None


@contextmanager
def rehearsed_by(function: Take) -> Iterator[None]:
    """In here it gets every launch, of all threads: autograd's is another one."""
    global take
    assert take is None, "calls are being rehearsed already"
    take = function
    try:
        yield
    finally:
        take = None


@dataclass(frozen=True)
class Warmed:
    """What a warmup has done."""

    kernels: int  # that were not compiled before
    processes: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.kernels} kernels in {self.processes} processes: {self.seconds:.1f} s"
