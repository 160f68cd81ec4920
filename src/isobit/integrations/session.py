"""Enabling and disabling isobit inside of another library: counts, nesting and threads, shared by all."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

from isobit.frame.backend import UnsupportedError
from isobit.frame.caller import warn

H = TypeVar("H", bound="Handle")


@dataclass(eq=False, kw_only=True)
class Session:
    """The time from enable to disable: which backend serves, what it has done, and how long it lasts."""

    backend: str | None  # backend of isobit; None is the first that can serve
    instead: str  # for warnings: who serves the calls that isobit does not
    served: int = 0
    passed: Counter[str] = field(default_factory=Counter)
    blocks: int = 0  # with-blocks that are open
    until_disabled: bool = True  # otherwise until the last of these ends
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count_served(self) -> None:
        with self.lock:
            self.served += 1

    def count_passed(self, reason: str) -> None:
        with self.lock:
            self.passed[reason] += 1
            first = self.passed[reason] == 1
        if first:
            warn(f"{self.instead}: {reason}")

    def end(self) -> None:
        """Restore what was before."""
        raise NotImplementedError


class Switch:
    """One place where isobit is enabled or not. `name` is used in messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.RLock()
        self.session: Session | None = None

    def on(self, backend: str | None, begin: Callable[[], Session]) -> "Enabled":
        """Begin a session, or continue one with the same backend."""
        return Enabled(self, *self.begun(backend, begin))

    def begun(self, backend: str | None, begin: Callable[[], Session]) -> tuple[Session, bool]:
        """(session, whether it is new)."""
        with self.lock:
            if self.session is None:
                self.session = begin()
                return self.session, True
            if self.session.backend != backend:
                raise UnsupportedError(
                    f"{self.name}.enable(backend={backend!r}): it is already enabled with "
                    f"backend={self.session.backend!r}; call disable() first"
                )
            return self.session, False

    def off(self) -> None:
        """End the session, if there is one. It goes on if its end is an error."""
        with self.lock:
            if self.session is not None:
                self.session.end()
                self.session = None


class Handle:
    """A context manager that restores the previous state at its end."""

    def __init__(self, switch: Switch, session: Session, turned_on: bool) -> None:
        self._switch, self._session, self._turned_on = switch, session, turned_on

    def __enter__(self: H) -> H:
        with self._switch.lock:
            if self._session is not self._switch.session:
                raise UnsupportedError(f"{self._switch.name}: it has been disabled; call enable() again")
            self._session.blocks += 1
            if self._turned_on:
                self._session.until_disabled = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._switch.lock:
            self._session.blocks -= 1
            over = not (self._session.blocks or self._session.until_disabled)
            if over and self._session is self._switch.session:
                self._switch.off()


class Enabled(Handle):
    """What `enable` returns: counts, and a context manager."""

    @property
    def backend(self) -> str | None:
        """The backend of isobit; None is the first that can serve."""
        return self._session.backend

    @property
    def served(self) -> int:
        """The number of calls that isobit has computed since it was enabled."""
        return self._session.served

    @property
    def passed(self) -> Counter[str]:
        """The number of calls passed on to the library's own function, by reason; a copy."""
        with self._session.lock:
            return self._session.passed.copy()

    def __repr__(self) -> str:
        passed = sum(self.passed.values())
        by = f" by {self.backend}" if self.backend else ""
        return f"<{self._switch.name}: {calls(self.served)} served{by}, {passed} passed on>"


def calls(count: int) -> str:
    """`1 call`, `2 calls`."""
    return f"{count} call" + "s" * (count != 1)
