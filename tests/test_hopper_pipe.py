"""Producer and consumers side by side, of the segmented sum and of the product: the kernels' own code with
Python's numbers, a thread for each of them, and barriers and copies as late as the hardware may make them.
Whoever waits for what never comes, or reads what is not there any more, shows."""

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

from gluon_on_a_cpu import PATIENCE_S, Barrier
from isobit.kernels.hopper import pipeline as hopper_pipe
from isobit.kernels.hopper import product as hopper_product
from isobit.ops.det_gemm import kernels_hopper


class Terms(tuple):
    """A tile: what was added up in it, in order."""

    def __add__(self, more: Any) -> "Terms":
        return Terms((*self, *more))

    def to(self, dtype: Any) -> "Terms":
        return self


class Sum:
    """An accumulator: what complete groups have added to it."""

    def __init__(self) -> None:
        self.terms: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        return iter(self.terms)

    def to(self, dtype: Any) -> Terms:
        return Terms(self.terms)


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
    """Globals of the kernels' functions. Asynchronous operations happen when they are waited for."""
    mine = threading.local()

    def pending() -> list[Callable[[], None]]:
        return mine.__dict__.setdefault("stores", [])

    def store_wait(left: int) -> None:
        while len(pending()) > left:
            pending().pop(0)()

    def tma_store(desc: Any, where: list[int], buffer: Buffer) -> None:
        pending().append(lambda: out.__setitem__((where[0], where[1]), buffer.value))

    def tma_load(desc: Any, where: list[int], bar: Barrier, buffer: Buffer) -> None:
        buffer.store(Terms((desc.name, *where)))
        bar.update(0, -desc.block_type.nbytes)

    def multiply(a: Buffer, b: Buffer, acc: Any, use_acc: bool, is_async: bool) -> Any:
        acc = acc if use_acc else Sum()
        mine.__dict__.setdefault("inflight", []).append((acc, a, b))
        return acc

    def multiply_wait(left: int, deps: tuple[Any, ...]) -> Any:
        while len(mine.inflight) > left:
            acc, a, b = mine.inflight.pop(0)
            acc.terms.append((*a.value, *b.value))
        return deps if len(deps) > 1 else deps[0]

    def arrive(bar: Barrier, pred: bool = True) -> None:
        if pred:
            bar.update(1, 0)

    language = SimpleNamespace(
        to_tensor=int, num_programs=lambda axis: programs, minimum=min, maximum=max,
        cdiv=lambda a, b: -(-a // b), static_range=range, where=lambda c, a, b: a if c else b,
        constexpr=None, float32=None, zeros=lambda *args: Terms(),
    )  # fmt: skip
    scope: dict[str, Any] = {
        "gl": language, "ROWS": 64, "SEGMENT_ROWS": 512, "fence_async_shared": lambda: None,
        "gdc_launch_dependents": lambda: None,
        "tma": SimpleNamespace(store_wait=store_wait), "tma_load": tma_load, "tma_store": tma_store,
        "warpgroup_mma": multiply, "warpgroup_mma_wait": multiply_wait,
        "mbarrier": SimpleNamespace(
            wait=lambda bar, parity: bar.wait(parity), arrive=arrive,
            expect=lambda bar, nbytes: bar.update(1, nbytes), init=lambda bar, count: bar.init(count),
        ),
    }  # fmt: skip
    for name in ("after", "tile_at", "last_start", "load_operand", "put_tile"):
        scope[name] = function_in(scope, getattr(hopper_pipe, name))
    for name in ("_initial", "_store_sums", "_steps"):
        scope[name] = function_in(scope, getattr(hopper_product, name))
    scope["finish"] = function_in(scope, kernels_hopper.finish)
    return scope


def function_in(scope: dict[str, Any], jitted: Any) -> Any:
    made = FunctionType(jitted.fn.__code__, scope)
    made.__defaults__ = jitted.fn.__defaults__
    return made


def methods(record: Any, scope: dict[str, Any], *names: str, **fields: Any) -> Any:
    """An instance of a kernel's class, with these of its methods."""
    made = SimpleNamespace(**fields)
    for name in names:
        setattr(made, name, partial(function_in(scope, getattr(record, name)), made))
    return made


def run(
    tiles: tuple[int, int],
    steps: int,
    consumers: int,
    stages: int,
    program: int,
    rest: int,
    swapped: bool,
    short: tuple[int, int],
) -> Any:
    """What one program computes for a matrix of tiles of 128 columns, by their corner: sums in segments from
    an initial value; or, with a `rest`, a product whose last `rest` columns have their own accumulator. The
    output is `short` rows and columns smaller than its tiles."""
    out: dict[tuple[int, int], Terms] = {}
    programs = 2
    scope = kernel_language(out, programs)
    scope["gl"].program_id = lambda axis: program
    box = SimpleNamespace(nbytes=100)
    a, b, start = (SimpleNamespace(name=name, block_type=box) for name in ("a", "b", "start"))
    pipe = methods(
        hopper_pipe.Pipe, scope,
        "items", "item", "issue", "before", "begin_chain", "finish_chain", "begin_both", "finish_both",
        "multiply", "multiply_both",
        "row", "column", "rows", "load",
        a_desc=a, b_desc=b, a_ring=ring(stages * consumers, Buffer), b_ring=ring(stages, Buffer),
        rest_desc=b, rest_ring=ring(stages, Buffer), REST=rest,
        ready=ring(stages, Barrier), empty=ring(stages, Barrier), tiles_m=tiles[0], tiles_n=tiles[1],
        spans=tiles[1], steps=steps, SPANS=0, A_BY_K=True, B_BY_K=True, CONSUMERS=consumers,
        COLUMNS=128, STEP=64, STAGES=stages, GROUP=8, BY_COLUMNS=swapped, OVERLAP=rest > 0,
        BY_LEAF=False, SHARDED=False,
        M=tiles[0] * 64 * consumers - short[0], N=tiles[1] * 128 - short[1],
    )  # fmt: skip
    outputs = [
        methods(
            hopper_product.Output, scope, "store", "zeros", desc=SimpleNamespace(dtype=None), LAYOUT=None,
            staging=ring(consumers, Buffer), HAS_EXTRA=False, STAGED=True, OFFSET=offset, COLUMNS=None,
            SWAPPED=swapped,
        )
        for offset in (0, 128 - rest)
    ]  # fmt: skip
    if rest == 64:  # equal halves leave through one buffer
        outputs[1].staging = outputs[0].staging
    begin = methods(
        hopper_product.Start, scope, "release_buffer", "load", "wait_for",
        desc=start, staging=outputs[0].staging,
        ready=ring(consumers, Barrier), empty=ring(consumers, Barrier), STAGED=steps > 0,
    )  # fmt: skip
    for bars, count in ((pipe.ready, 1), (pipe.empty, consumers), (begin.ready, 1), (begin.empty, 1)):
        for bar in bars.all:
            bar.init(count)
    errors: list[BaseException] = []

    def guarded(fn: Any, *args: Any) -> None:
        try:
            function_in(scope, fn)(*args)
        except BaseException as error:
            errors.append(error)

    work: list[tuple[Any, ...]]
    if rest:
        work = [(kernels_hopper._chains, w, pipe, *outputs) for w in range(consumers)]
        work += [(hopper_pipe.load_tiles, pipe)]
    else:
        rest_of_it = (None, None, None, False, False)
        work = [(hopper_product._segments, w, pipe, outputs[0], begin, *rest_of_it)
                for w in range(consumers)]  # fmt: skip
        work += [(hopper_product._load_sums, pipe, begin)]
    threads = [threading.Thread(target=guarded, args=args, daemon=True) for args in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    assert not errors and not any(thread.is_alive() for thread in threads), errors
    return out


def every_tile(
    steps: int, consumers: int, rest: int, swapped: bool = False, short: tuple[int, int] = (0, 0)
) -> None:
    """Run, and compare with what should come out."""
    tiles = (3, 4)
    M, N = tiles[0] * 64 * consumers - short[0], tiles[1] * 128 - short[1]
    result: dict[tuple[int, int], Terms] = {}
    for program in (0, 1):
        result |= run(tiles, steps, consumers, 5, program, rest, swapped, short)
    parts = [0, 128 - rest] if rest else [0]
    columns = [min(n * 128, N - 128) + offset for n in range(tiles[1]) for offset in parts]
    rows = [min(64 * part, M - 64) for part in range(tiles[0] * consumers)]
    assert result == {
        (column, row) if swapped else (row, column): (*(() if rest or steps == 0 else ("start", row, column)),
                        *(("a", row, 64 * step, "b", column, 64 * step) for step in range(steps)))
        for row, column in itertools.product(rows, columns)
    }  # fmt: skip


@pytest.mark.parametrize("consumers", [1, 2])
@pytest.mark.parametrize("steps", [1, 4, 5, 6, 8, 9, 21])
def test_sums_go_on_from_the_start_value(steps: int, consumers: int) -> None:
    """Also where a tile has fewer steps of k than the ring has stages, or one more."""
    every_tile(steps, consumers, 0)


@pytest.mark.parametrize("consumers", [1, 2])
def test_sums_without_terms_are_stored_too(consumers: int) -> None:
    every_tile(0, consumers, 0)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("consumers", [1, 3])
@pytest.mark.parametrize("steps", [1, 5, 6, 9])
def test_a_product_has_its_columns_in_two_accumulators(steps: int, consumers: int, swapped: bool) -> None:
    every_tile(steps, consumers, 32, swapped)
    every_tile(steps, consumers, 64, swapped)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("consumers", [1, 3])
@pytest.mark.parametrize("short", [(1, 0), (0, 8), (63, 120), (100, 5)])
def test_the_last_tiles_of_a_product_end_where_it_ends(
    consumers: int, swapped: bool, short: tuple[int, int]
) -> None:
    """TMA takes longer to fill with zeros than to load, so nothing outside the output is loaded or stored. A
    consumer whose rows are all outside computes the last rows again."""
    if short[0] < 64 * consumers:
        every_tile(2, consumers, 32, swapped, short)


def _release_without_waiting(self, WHICH):  # type: ignore[no-untyped-def]
    mbarrier.arrive(self.empty.index(WHICH))  # type: ignore[name-defined]  # noqa: F821


def test_loading_into_a_buffer_too_early_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_product.Start, "release_buffer", SimpleNamespace(fn=_release_without_waiting))
    with pytest.raises(AssertionError):
        every_tile(8, 1, 0)


def test_refilling_a_buffer_too_early_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two accumulators one store may be under way, and not both; of equal halves, which have one buffer,
    none."""

    def put_tile(tile, desc, staging, row, column, WHICH, SWAPPED, OTHERS):  # type: ignore[no-untyped-def]
        tma.store_wait(OTHERS + 1)  # type: ignore[name-defined]  # noqa: F821
        staging.index(WHICH).store(tile)
        tma_store(desc, [row, column], staging.index(WHICH))  # type: ignore[name-defined]  # noqa: F821

    monkeypatch.setattr(hopper_pipe, "put_tile", SimpleNamespace(fn=put_tile))
    for rest in (32, 64):
        with pytest.raises(AssertionError):
            every_tile(8, 1, rest)
