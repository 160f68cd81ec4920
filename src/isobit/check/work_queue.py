"""A queue of work for several threads, which run as much of it at a time as fits in a GPU's memory."""

from collections.abc import Callable, Iterable
from threading import Condition
from typing import Generic, TypeVar

T = TypeVar("T")


class WorkQueue(Generic[T]):
    """Items in order, each with the memory that it may take. One that needs more than there is runs alone."""

    def __init__(self, items: Iterable[T], memory_of: Callable[[T], int], memory: int) -> None:
        self._left = [(item, min(memory_of(item), memory)) for item in items]
        self._free, self._changed = memory, Condition()

    def take(self) -> tuple[T, int] | None:
        """The first item that fits in what those under way leave free, and its memory; None if no item is
        left. Waits if none fits."""
        with self._changed:
            while self._left:
                for i, (_, memory) in enumerate(self._left):
                    if memory <= self._free:
                        self._free -= memory
                        return self._left.pop(i)
                self._changed.wait()
            return None

    def give_back(self, memory: int) -> None:
        """An item is done."""
        with self._changed:
            self._free += memory
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more is taken."""
        with self._changed:
            self._left.clear()
            self._changed.notify_all()
