"""A kernel that several processes need at the same time is compiled by one of them.

Triton's cache on disk serves what has been compiled. But the workers of a check begin together, with a cache
that may be empty, and many of their cases launch the same kernels: each would compile them, and on a GPU a
check is a matter of CPU time. So a process that looks for a kernel and does not find it locks the folder that
the cache has for it, until the kernel is there. Another one that looks for it meanwhile waits.

The operating system releases the lock of a process that dies, and no file is left in the cache. Where folders
cannot be locked, everybody compiles.
"""

import fcntl
import os
import time
from typing import Any, ClassVar

from triton import knobs
from triton.runtime.cache import FileCacheManager

#: Seconds after which a process compiles what another one has not finished, and between two looks.
PATIENCE_S, PAUSE_S = 60.0, 0.02


class Claims(FileCacheManager):
    """Triton makes one for each kernel that it looks for. It asks for the group of files that a compilation
    leaves, and if there is none, it compiles and puts them there."""

    #: Folders that this process has locked: it must not wait for itself.
    _own: ClassVar[set[str]] = set()
    _locked: int | None = None

    def get_group(self, filename: str) -> dict[str, str] | None:
        group: dict[str, str] | None = super().get_group(filename)
        if group or self.cache_dir in self._own:
            return group
        self._claim()
        group = super().get_group(filename)  # by whom this process has waited for
        if group:
            self.release()
        return group

    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        try:
            return super().put_group(filename, group)
        finally:
            self.release()

    def _claim(self) -> None:
        """Lock the folder, or wait for a while until whoever has locked it is done."""
        folder = os.open(self.cache_dir, os.O_RDONLY)
        late = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < late:
                    time.sleep(PAUSE_S)
                    continue
            except OSError:  # a file system without locks
                pass
            else:
                self._locked = folder
                self._own.add(self.cache_dir)
                return
            os.close(folder)
            return

    def release(self) -> None:
        if self._locked is not None:
            os.close(self._locked)
            self._locked = None
            self._own.discard(self.cache_dir)

    def __del__(self) -> None:
        """Triton drops it when a compilation has failed too."""
        self.release()


def compile_each_kernel_once() -> None:
    """From now on, in this process. A cache of the user's own is left alone."""
    if knobs.cache.manager_class is None:
        knobs.cache.manager_class = Claims
