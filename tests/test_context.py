"""The context of a thread: set once, where there is none, and never where there is one."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from isobit.frame import context


class Driver:
    """libcuda as far as it is used. Every thread begins with the context that is given."""

    def __init__(self, current: int | None = None, status: int = 0) -> None:
        self.current, self.status, self.calls = current, status, list[str]()

    def _done(self, name: str, at: Any = None, value: int | None = None) -> int:
        self.calls.append(name)
        if at is not None:
            at._obj.value = value
        return self.status

    def cuCtxGetCurrent(self, at: Any) -> int:
        return self._done("get", at, self.current)

    def cuDeviceGet(self, at: Any, index: int) -> int:
        return self._done(f"device {index}", at, 70 + index)

    def cuDevicePrimaryCtxRetain(self, at: Any, device: ctypes.c_int) -> int:
        return self._done(f"retain {device.value}", at, 1234)

    def cuCtxSetCurrent(self, made: ctypes.c_void_p) -> int:
        return self._done(f"set {made.value}")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    monkeypatch.setattr(context.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(context, "_driver", lambda: found)
    monkeypatch.setattr(context.torch.cuda, "current_device", lambda: 3)
    return found


def in_a_thread(times: int = 1) -> None:
    def attach() -> None:
        for _ in range(times):
            context.attach()

    with ThreadPoolExecutor(1) as thread:
        thread.submit(attach).result()


def test_a_thread_without_a_context_gets_that_of_the_current_device_once(driver: Driver) -> None:
    in_a_thread(times=3)
    assert driver.calls == ["get", "device 3", "retain 73", "set 1234"]
    in_a_thread()
    assert len(driver.calls) == 8  # another thread, another context


def test_a_thread_with_a_context_keeps_it(driver: Driver) -> None:
    driver.current = 99
    in_a_thread(times=3)
    assert driver.calls == ["get"]


def test_an_error_of_the_driver_is_one_of_the_call(driver: Driver) -> None:
    driver.status = 201
    with pytest.raises(RuntimeError, match="no context: error 201"):
        in_a_thread()
