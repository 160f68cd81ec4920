"""A kernel that several processes need at the same time is compiled by one of them."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError

from isobit.check import compiled_once
from isobit.check.compiled_once import Claims, compile_each_kernel_once

KEY, GROUP = "KEY", "kernel.json"

#: A process that claims a kernel, and waits for a line.
CLAIMS = f"""
from isobit.check.compiled_once import Claims
mine = Claims({KEY!r})
assert mine.get_group({GROUP!r}) is None
print("claimed", flush=True)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert triton.knobs.cache.dir == str(tmp_path)
    return tmp_path


@pytest.fixture
def other(cache: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process, which has claimed the kernel. When it gets a line, it stores it and goes on."""
    stores = f"input()\nmine.put_group({GROUP!r}, {{{GROUP!r}: mine.put('made', {GROUP!r})}})\ninput()"
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIMS + stores], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "claimed\n"
    yield process
    process.kill()
    process.communicate()


def found_later(key: str = KEY) -> tuple[threading.Thread, list[Any]]:
    """What this process finds in the cache, when it is done waiting."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(Claims(key).get_group(GROUP)))
    thread.start()
    return thread, found


def test_a_kernel_that_another_process_compiles_is_waited_for(
    cache: Path, other: "subprocess.Popen[str]"
) -> None:
    thread, found = found_later()
    assert Claims("ANOTHER").get_group(GROUP) is None  # which nobody has claimed
    thread.join(0.3)
    assert thread.is_alive()
    assert other.stdin is not None
    other.stdin.write("\n")
    other.stdin.flush()
    thread.join(30)
    assert found == [{GROUP: str(cache / KEY / GROUP)}] and (cache / KEY / GROUP).read_text() == "made"
    assert not Claims._own and {path.name for path in (cache / KEY).iterdir()} == {GROUP, f"__grp__{GROUP}"}


def test_nobody_waits_for_a_process_that_has_died(cache: Path, other: "subprocess.Popen[str]") -> None:
    thread, found = found_later()
    thread.join(0.1)
    assert thread.is_alive()
    other.kill()
    thread.join(30)
    assert found == [None]


def test_nobody_waits_forever(
    cache: Path, other: "subprocess.Popen[str]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_once, "PATIENCE_S", 0.2)
    begin = time.monotonic()
    mine = Claims(KEY)
    assert mine.get_group(GROUP) is None and 0.2 < time.monotonic() - begin < 20
    mine.put_group(GROUP, {GROUP: mine.put("mine", GROUP)})
    assert Claims(KEY).get_group(GROUP) == {GROUP: str(cache / KEY / GROUP)}


def test_a_process_does_not_wait_for_itself(cache: Path) -> None:
    first = Claims(KEY)
    begin = time.monotonic()
    assert first.get_group(GROUP) is None and Claims(KEY).get_group(GROUP) is None
    assert time.monotonic() - begin < 20 and len(Claims._own) == 1
    del first
    assert not Claims._own


def test_where_folders_cannot_be_locked_everybody_compiles(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(folder: int, how: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(compiled_once.fcntl, "flock", flock)
    assert Claims(KEY).get_group(GROUP) is None and not Claims._own


@triton.jit
def scaled(x, by, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.static_assert(BLOCK != 3)
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) * by)


def compiled(BLOCK: int) -> None:
    source = ASTSource(scaled, {"x": "*fp32", "by": "fp32", "BLOCK": "constexpr"}, {"BLOCK": BLOCK})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))


def test_triton_asks_these_claims(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stays claimed, whether the kernel compiles or not; and what was compiled is found."""
    hits: list[bool] = []

    def listener(cache_hit: bool, **_: Any) -> None:
        assert len(Claims._own) == 0
        hits.append(cache_hit)

    claims: list[str] = []
    own = Claims._claim

    def claim(self: Claims) -> None:
        own(self)
        claims.extend(Claims._own)

    monkeypatch.setattr(Claims, "_claim", claim)
    monkeypatch.setattr(triton.knobs.cache, "manager_class", None)
    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    compile_each_kernel_once()
    assert triton.knobs.cache.manager_class is Claims
    compiled(16)
    compiled(16)
    with pytest.raises(CompilationError):
        compiled(3)
    assert hits == [False, True] and len(claims) == 2 and not Claims._own


def test_a_cache_of_the_users_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.cache, "manager_class", triton.runtime.cache.FileCacheManager)
    compile_each_kernel_once()
    assert triton.knobs.cache.manager_class is triton.runtime.cache.FileCacheManager
