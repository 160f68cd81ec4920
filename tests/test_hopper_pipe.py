"""Loader and multipliers of the segmented sum side by side: the kernels' own code with Python's numbers, a
thread for each of them, and barriers and copies as late as the hardware may make them. Whoever waits for what
never comes, or reads what is not there any more, shows."""

import itertools
import threading
from collections.abc import Callable
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

from gluon_on_a_cpu import PATIENCE_S, Barrier
from isobit.blocks import hopper_pipe, hopper_product


class Terms(tuple):
    """A tile: what was added up in it, in order."""

    def __add__(self, more: Any) -> "Terms":
        return Terms((*self, *more))

    def to(self, dtype: Any) -> "Terms":
        return self


class Buffer:
    """Shared memory, and what a TMA has still to read of it."""

    def __init__(self) -> None:
        self.value: Any = None

    def store(self, value: Any) -> None:
        self.value = value

    def load(self, layout: Any) -> Any:
        return self.value

    def permute(self, order: Any) -> "Buffer":
        return self


def ring(length: int, kind: Callable[[], Any]) -> Any:
    made = [kind() for _ in range(length)]
    return SimpleNamespace(index=lambda i: made[i], all=made)


def kernel_language(out: dict[tuple[int, int], Terms], programs: int) -> dict[str, Any]:
    """Globals of the kernels' functions. What is asynchronous happens when it is waited for."""
    mine = threading.local()

    def pending() -> list[Callable[[], None]]:
        return mine.__dict__.setdefault("stores", [])

    def store_wait(left: int) -> None:
        for copy in pending():
            copy()
        pending().clear()

    def tma_store(desc: Any, where: list[int], buffer: Buffer) -> None:
        pending().append(lambda: out.__setitem__((where[0], where[1]), buffer.value))

    def tma_load(desc: Any, where: list[int], bar: Barrier, buffer: Buffer) -> None:
        buffer.store(Terms((desc.name, *where)))
        bar.update(0, -desc.block_type.nbytes)

    def multiply(a: Buffer, b: Buffer, acc: Any, use_acc: bool, is_async: bool) -> Any:
        if not use_acc:
            mine.groups = [Terms()]
        mine.__dict__.setdefault("inflight", []).append((a, b))
        return acc

    def multiply_wait(left: int, deps: tuple[Any]) -> Any:
        while len(mine.inflight) > left:
            a, b = mine.inflight.pop(0)
            mine.groups[0] += ((*a.value, *b.value),)
        return mine.groups[0]

    def arrive(bar: Barrier, pred: bool = True) -> None:
        if pred:
            bar.update(1, 0)

    language = SimpleNamespace(
        to_tensor=int, num_programs=lambda axis: programs, minimum=min, cdiv=lambda a, b: -(-a // b),
        static_range=range, where=lambda c, a, b: a if c else b, constexpr=None, float32=None,
        zeros=lambda *args: Terms(),
    )  # fmt: skip
    scope: dict[str, Any] = {
        "gl": language, "ROWS": 64, "SEGMENT_ROWS": 512, "fence_async_shared": lambda: None,
        "tma": SimpleNamespace(store_wait=store_wait), "tma_load": tma_load, "tma_store": tma_store,
        "warpgroup_mma": multiply, "warpgroup_mma_wait": multiply_wait,
        "mbarrier": SimpleNamespace(
            wait=lambda bar, parity: bar.wait(parity), arrive=arrive,
            expect=lambda bar, nbytes: bar.update(1, nbytes), init=lambda bar, count: bar.init(count),
        ),
    }  # fmt: skip
    for name in ("after", "_before", "_item", "put_tile"):
        scope[name] = FunctionType(getattr(hopper_pipe, name).fn.__code__, scope)
    return scope


def methods(record: Any, scope: dict[str, Any], *names: str, **fields: Any) -> Any:
    """An instance of a kernel's class, with these of its methods."""
    made = SimpleNamespace(**fields)
    for name in names:
        setattr(made, name, partial(FunctionType(getattr(record, name).fn.__code__, scope), made))
    return made


def run(tiles: tuple[int, int], steps: int, multipliers: int, stages: int, program: int) -> Any:
    """One program's sums of a matrix of tiles, by their corner."""
    out: dict[tuple[int, int], Terms] = {}
    programs = 2
    scope = kernel_language(out, programs)
    scope["gl"].program_id = lambda axis: program
    box = SimpleNamespace(nbytes=100)
    a, b, start = (SimpleNamespace(name=name, block_type=box) for name in ("a", "b", "start"))
    pipe = methods(
        hopper_pipe.Pipe, scope, "items", "item", "multiply", "rows", "load",
        a_desc=a, b_desc=b, a_ring=ring(stages * multipliers, Buffer), b_ring=ring(stages, Buffer),
        ready=ring(stages, Barrier), empty=ring(stages, Barrier), tiles_m=tiles[0], tiles_n=tiles[1],
        spans=tiles[1], steps=steps, SPANS=0, A_BY_K=True, B_BY_K=True, MULTIPLIERS=multipliers,
        COLUMNS=128, STEP=64, STAGES=stages, GROUP=8,
    )  # fmt: skip
    staging = ring(multipliers, Buffer)
    begin = methods(
        hopper_product.Start, scope, "ask", "load", "take", desc=start, staging=staging,
        ready=ring(multipliers, Barrier), empty=ring(multipliers, Barrier), STAGED=True,
    )  # fmt: skip
    for bars, count in ((pipe.ready, 1), (pipe.empty, multipliers), (begin.ready, 1), (begin.empty, 1)):
        for bar in bars.all:
            bar.init(count)
    desc = SimpleNamespace(dtype=None)
    output = methods(
        hopper_product.Output, scope, "store", desc=desc, staging=staging, HAS_EXTRA=False, STAGED=True,
        LAYOUT=None,
    )  # fmt: skip
    errors: list[BaseException] = []

    def guarded(fn: Any, *args: Any) -> None:
        try:
            FunctionType(fn.fn.__code__, scope)(*args)
        except BaseException as error:
            errors.append(error)

    work: list[tuple[Any, ...]] = [
        (hopper_product._segments, w, pipe, output, begin, None, None, None, False, False)
        for w in range(multipliers)
    ]
    threads = [threading.Thread(target=guarded, args=args, daemon=True)
               for args in (*work, (hopper_product._load_sums, pipe, begin))]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    assert not errors and not any(thread.is_alive() for thread in threads), errors
    return out


@pytest.mark.parametrize("multipliers", [1, 2])
@pytest.mark.parametrize("steps", [1, 4, 5, 6, 8, 9, 21])
def test_sums_go_on_from_the_start_value(steps: int, multipliers: int) -> None:
    """Also where a tile has fewer steps of k than the ring has stages, or one more."""
    tiles, rows = (3, 4), 64 * multipliers
    found: dict[tuple[int, int], Terms] = {}
    for program in (0, 1):
        found |= run(tiles, steps, multipliers, 5, program)
    corners = itertools.product(range(0, tiles[0] * rows, 64), range(0, tiles[1] * 128, 128))
    assert found == {
        (row, column): ("start", row, column,
                        *(("a", row, 64 * step, "b", column, 64 * step) for step in range(steps)))
        for row, column in corners
    }  # fmt: skip


def test_a_buffer_that_is_asked_for_too_early_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(self, WHICH):  # type: ignore[no-untyped-def]
        mbarrier.arrive(self.empty.index(WHICH))  # type: ignore[name-defined]  # noqa: F821

    monkeypatch.setattr(hopper_product.Start, "ask", SimpleNamespace(fn=ask))
    with pytest.raises(AssertionError):
        test_sums_go_on_from_the_start_value(8, 1)
