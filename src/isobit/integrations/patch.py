"""Patches of other libraries, and handles for them: what `enable` replaces and `disable` restores.

All integrations share this: counts of calls, nested with-blocks, and threads.
"""

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
class Patch:
    """What was replaced in another library, from enable to disable: which backend serves, how many calls it
    has served, and when the patch ends."""

    backend: str | None  # backend of isobit; None is the first that can serve
    instead: str  # for warnings: what serves the calls that isobit does not
    served: int = 0
    passed: Counter[str] = field(default_factory=Counter)
    blocks: int = 0  # with-blocks that are open
    until_disabled: bool = True  # otherwise it ends with the last of these blocks
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count_served(self) -> None:
        with self.lock:
            self.served += 1

    def count_passed(self, reason: str, comment: str = "", instead: str | None = None) -> None:
        """The first call of each reason warns, with a comment if there is one. `instead` is what serves this
        call, if that is not what serves others."""
        with self.lock:
            self.passed[reason] += 1
            first = self.passed[reason] == 1
        if first:
            warn(f"{instead or self.instead}: {reason}{comment}")

    def undo(self) -> None:
        """Restore what was replaced."""
        raise NotImplementedError

    def stays_after(self, error: BaseException) -> bool:
        """Whether an error that ends a with-block leaves it on, because it cannot be undone then."""
        return False


class Switch:
    """One library, or one model, where isobit is enabled or not. `name` is used in messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.RLock()
        self.patch: Patch | None = None

    def on(self, backend: str | None, apply: Callable[[], Patch]) -> "Enabled":
        """Apply a patch, or continue one with the same backend."""
        return Enabled(self, *self.applied(backend, apply))

    def applied(self, backend: str | None, apply: Callable[[], Patch]) -> tuple[Patch, bool]:
        """(patch, whether it is new)."""
        with self.lock:
            if self.patch is None:
                self.patch = apply()
                return self.patch, True
            if self.patch.backend != backend:
                raise UnsupportedError(
                    f"{self.name}.enable(backend={backend!r}): it is already enabled with "
                    f"backend={self.patch.backend!r}; call disable() first"
                )
            return self.patch, False

    def off(self) -> None:
        """Undo the patch, if there is one. If restoring fails, the patch stays active."""
        with self.lock:
            if self.patch is not None:
                self.patch.undo()
                self.patch = None


class Handle:
    """A context manager that restores the previous state at its end."""

    def __init__(self, switch: Switch, patch: Patch, turned_on: bool) -> None:
        self._switch, self._patch, self._turned_on = switch, patch, turned_on

    def __enter__(self: H) -> H:
        with self._switch.lock:
            if self._patch is not self._switch.patch:
                raise UnsupportedError(f"{self._switch.name}: it has been disabled; call enable() again")
            self._patch.blocks += 1
            if self._turned_on:
                self._patch.until_disabled = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._switch.lock:
            self._patch.blocks -= 1
            over = not (self._patch.blocks or self._patch.until_disabled)
            if not over or self._patch is not self._switch.patch:
                return
            if error is not None and self._patch.stays_after(error):
                self._patch.until_disabled = True
            else:
                self._switch.off()


class Enabled(Handle):
    """What `enable` returns: counts, and a context manager."""

    @property
    def backend(self) -> str | None:
        """The backend of isobit; None is the first that can serve."""
        return self._patch.backend

    @property
    def served(self) -> int:
        """The number of calls that isobit has computed since it was enabled."""
        return self._patch.served

    @property
    def passed(self) -> Counter[str]:
        """The number of calls passed on to the library's own function, by reason; a copy."""
        with self._patch.lock:
            return self._patch.passed.copy()

    def __repr__(self) -> str:
        passed = sum(self.passed.values())
        by = f" by {self.backend}" if self.backend else ""
        return f"<{self._switch.name}: {calls(self.served)} served{by}, {passed} passed on>"


def calls(count: int) -> str:
    """`1 call`, `2 calls`."""
    return f"{count} call" + "s" * (count != 1)
