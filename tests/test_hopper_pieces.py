"""Programs that share splits of the vocabulary: the code of `linear_logp`'s forward on Hopper, run on a CPU
with programs side by side. Every schedule must give the bits of whole splits."""

import inspect
import json
import math
import re
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gluon_on_a_cpu
import to_ptx
from hopper_device import Device
from isobit.frame.launch import Recorder
from isobit.kernels.hopper import pieces as hopper_pieces
from isobit.kernels.hopper import pipeline as hopper_pipe
from isobit.ops.linear_logp import kernels_hopper as forward
from isobit.ops.linear_logp import reference
from test_hopper_backward import DEFAULTS, new_memory_is_nan, one_thread  # noqa: F401

IGNORE = -100
SCHEDULES = Path(__file__).parent / "golden" / "schedules_h200.json"
FEW, MANY = forward._TILE_FEW_ROWS, forward._TILE
WHOLE = forward.Schedule(MANY)

#: Any arithmetic will do that is the same for all schedules.
DO = SimpleNamespace(
    product=lambda a, b, acc, _: acc + a @ b, fma=lambda a, b, c: a * b + c, exp2=np.exp2,
)  # fmt: skip


#: Those that the forward has kernels' functions from, and those that these have records from.
FUNCTIONS = (x.fn for x in vars(forward).values() if inspect.isfunction(getattr(x, "fn", None)))
MODULES = [hopper_pipe, *{sys.modules[fn.__module__] for fn in FUNCTIONS}]


class Emulated(Device):
    """With the forward's own code, all programs side by side, or one after another."""

    together = True

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if kernel is not forward.forward_kernel:
            super().__call__(kernel, grid, *args, **options)
            return
        args = gluon_on_a_cpu.in_order(kernel, args, options)
        self.arguments["forward_kernel"] = SimpleNamespace(**dict(zip(kernel.arg_names, args, strict=True)))
        rounds = {hopper_pipe.gl.bfloat16: torch.bfloat16}
        args = tuple(rounds.get(x, x) if isinstance(x, hopper_pipe.gl.dtype) else x for x in args)
        device = gluon_on_a_cpu.Device(DO, grid[0])
        scope = device.scope(forward, *MODULES, gdc_launch_dependents=lambda: None)
        device.run(scope, kernel, args, together=self.together)


@dataclass(frozen=True)
class Case:
    """Rows, a vocabulary, ranges of rows that are ignored, options."""

    N: int
    V: int = 70 * 256 - 9  # two or three tiles a split
    ignored: tuple[slice, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def arguments(case: Case) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(case.N)
    N, V, D = case.N, case.V, 80
    ids = torch.randint(0, V, (N,), generator=gen)
    for rows in case.ignored:
        ids[rows] = IGNORE
    given = {
        "hidden": torch.randn(N, D, generator=gen).bfloat16(), "token_ids": ids, "bias": None, "mask": None,
        "weight": (torch.randn(V, D, generator=gen) / 4).bfloat16(), "ignore_index": IGNORE, "keep": False,
        "return_entropy": True, "return_lse": True, "return_stats": True,
    }  # fmt: skip
    if case.options.get("each"):
        given["temperature"] = torch.rand(N, generator=gen) + 0.5
    if case.options.get("mask"):
        given["mask"] = torch.rand(N, generator=gen) < 0.6
    if case.options.get("bias"):
        given["bias"] = torch.randn(V, generator=gen)
    known = {k: v for k, v in case.options.items() if k in (*DEFAULTS, "return_entropy")}
    return DEFAULTS | given | known


def results(
    monkeypatch: pytest.MonkeyPatch, args: dict[str, Any], schedule: forward.Schedule, programs: int,
    together: bool = True,
) -> list[Tensor]:  # fmt: skip
    monkeypatch.setattr(forward, "schedule_for", lambda *sizes: schedule)
    monkeypatch.setattr(forward, "sm_count", lambda device: programs)
    device = Emulated()
    device.together = together
    result = forward.linear_logp(launch=device, **args)
    assert device.arguments["forward_kernel"].SHARE_SPLITS is (schedule.pieces > 0)
    return [t for t in result if t is not None]


def assert_equal_bits(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


FEWER = 36 * 256 - 100  # one tile a split, or two

CASES = {
    "one row": Case(1),
    "one part": Case(64),
    "two parts": Case(65, options={"return_entropy": False}),
    "a tile of two parts": Case(128, FEWER, options={"each": True}),
    "three parts": Case(129, FEWER, options={"return_entropy": False}),
    "200 rows": Case(200, FEWER, ignored=(slice(0, 64), slice(130, 140))),
    "640 rows": Case(640, FEWER, ignored=(slice(64, 128), slice(200, 500))),
    "whole tiles": Case(70, V=66 * 256),
    "a tile more in one split": Case(70, V=33 * 256 + 1),
    "fewer tiles than splits": Case(130, V=5 * 256 - 1),
    "one tile": Case(130, V=100),
    "a mask packs": Case(200, FEWER, options={"mask": True, "each": True}),
    "all are ignored": Case(70, ignored=(slice(0, 70),)),
    "bias and rounding": Case(66, FEWER, options={"bias": True, "logits_dtype": torch.bfloat16}),
    "a padded vocabulary": Case(66, options={"vocab_size": 36 * 256 + 100}),
}

#: (tile, pieces, programs): every tile a piece, if there are more programs than splits; or a number of them.
WAYS = [(FEW, 3, 40), (MANY, 3, 40), (FEW, 2, 5), (MANY, 3, 7), (MANY, 2, 1)]

#: Both tiles, with as many pieces as a split has tiles, or more. What all ways differ in, how splits are cut
#: and who waits for whom, does not depend on the options of a call.
SOME_WAYS = [(FEW, 3, 40), (MANY, 3, 7)]
ALL_WAYS = ("one row", "two parts", "a tile more in one split")


@pytest.mark.parametrize("name", CASES)
def test_every_schedule_has_the_bits_of_whole_splits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments(CASES[name])
    truth = results(monkeypatch, args, WHOLE, 7, together=False)
    exact = reference.linear_logp(**{k: v for k, v in args.items() if k != "keep"})
    for ours, theirs in zip(truth, [t for t in exact[:3] if t is not None], strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)
    ways = WAYS if name in ALL_WAYS else SOME_WAYS if CASES[name].N < 128 else WAYS[1:4:2]
    for tile, pieces, programs in ways:
        result = results(monkeypatch, args, forward.Schedule(tile, pieces), programs)
        assert_equal_bits(result, truth)


def test_programs_that_have_started_end_without_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another: the first one takes all pieces, as if no SM were free for the rest. So it does not
    matter how many there are, and two pieces for a program alone are among the ways above."""
    args = arguments(CASES["two parts"])
    truth = results(monkeypatch, args, WHOLE, 7, together=False)
    for tile, pieces, programs in WAYS[:3]:
        result = results(monkeypatch, args, forward.Schedule(tile, pieces), programs, together=False)
        assert_equal_bits(result, truth)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_whoever_is_late_changes_no_bit(slow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of all threads falls behind wherever it waits."""
    args = arguments(Case(65))
    truth = results(monkeypatch, args, WHOLE, 7, together=False)
    wait = gluon_on_a_cpu.Barrier.wait

    def later(self: Any, parity: Any) -> None:
        if threading.get_ident() // 4096 % 3 == slow:
            time.sleep(0.001)
        wait(self, parity)

    monkeypatch.setattr(gluon_on_a_cpu.Barrier, "wait", later)
    assert_equal_bits(results(monkeypatch, args, forward.Schedule(FEW, 3), 12), truth)
    assert_equal_bits(results(monkeypatch, args, forward.Schedule(MANY, 3), 70), truth)


def test_sums_that_are_not_waited_for_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: `folded` says that all sums are there, but nobody has the tickets of the first pieces."""
    args = arguments(Case(1, V=66 * 256))
    truth = results(monkeypatch, args, WHOLE, 7, together=False)
    before = Emulated.__call__

    def too_early(self: Any, kernel: Any, grid: Any, *given: Any, **options: Any) -> None:
        if kernel is forward.forward_kernel:
            numbers = given[kernel.arg_names.index("counters")]
            numbers[0], numbers[1:] = 33, 1000
        before(self, kernel, grid, *given, **options)

    monkeypatch.setattr(Emulated, "__call__", too_early)
    result = results(monkeypatch, args, forward.Schedule(FEW, 2), 1, together=False)
    assert not torch.equal(result[0], truth[0])


def test_every_tile_is_in_one_piece() -> None:
    """And a piece waits for tickets below its own."""
    device = gluon_on_a_cpu.Device(DO, 1)
    scope = device.scope(hopper_pieces, hopper_pipe)
    for tiles_m, tiles, each in ((1, 501, 16), (5, 594, 4), (3, 35, 2), (9, 501, 6), (2, 20, 3)):
        spans = min(33, tiles)
        pipe = SimpleNamespace(
            tiles_m=gluon_on_a_cpu.array(tiles_m), tiles_n=tiles, spans=spans, SPANS=33, GROUP=16,
            BY_COLUMNS=False, SHARDED=False, items=lambda count=tiles_m * spans: count,
        )  # fmt: skip
        pipe.item = lambda t, pipe=pipe: scope["Pipe"].item(pipe, t)
        pieces = SimpleNamespace(each=each)
        folded: dict[tuple[int, int], int] = {}
        for ticket in range(tiles_m * spans * each):
            m, split, begin, end, first, last = (int(x) for x in scope["Pieces"].piece(pieces, pipe, ticket))
            assert begin == split * tiles // spans and end == (split + 1) * tiles // spans
            assert first == folded.get((m, split), begin) and last - first <= math.ceil((end - begin) / each)
            folded[m, split] = last
        assert folded == {(m, i): (i + 1) * tiles // spans for m in range(tiles_m) for i in range(spans)}


# Compiled


@pytest.mark.compat
@pytest.mark.parametrize("tile", [FEW, MANY])
def test_compiled_code_orders_sums_and_flags(tile: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer stores its sums, meets at a barrier, then one of its threads releases them; the next
    acquires, then loads. If every thread stored the flag, a slow one would take the next piece's back."""
    monkeypatch.setattr(forward, "schedule_for", lambda *sizes: forward.Schedule(tile, 3))
    recorder = Recorder()
    forward.linear_logp(recorder, **arguments(Case(1)) | {"return_entropy": False})
    recorder.launches = [made for made in recorder.launches if made[0] is forward.forward_kernel]
    ((_, source, options),) = recorder.sources()
    code = to_ptx.compiled(source, options).asm["ptx"]
    access = r"(?:ld\.acquire|ld|st)\.(?:gpu\.)?global|@%p\d+ atom\.global\.gpu\.release\.exch"
    result = re.findall(rf"{access}|bar(?:rier)?\.sync[^;]*128", code)
    words = ["bar" if "bar" in word else word.replace(".gpu", "") for word in result]
    words = ["release" if "release" in word else word for word in words]
    assert words.count("ld.acquire.global") == words.count("release") == tile.consumers
    assert len(re.findall(r"\.release", code)) == tile.consumers
    for i, word in enumerate(words):
        if word == "ld.acquire.global":
            assert words[i + 1 : i + 5] == ["ld.global"] * 4  # m and s of two rows
        if word == "release":
            assert words[i - 5 : i] == ["st.global"] * 4 + ["bar"]


# Which schedule


def test_the_chosen_schedule_is_about_the_fastest_that_was_timed() -> None:
    ratios = []
    for cell in json.loads(SCHEDULES.read_text())["cells"]:
        chosen = forward.schedule_for(cell["N"], cell["D"], cell["V"], 132)
        ratios.append(cell["ms"][f"{chosen.tile.rows}/{chosen.pieces}"] / min(cell["ms"].values()))
    assert statistics.geometric_mean(ratios) < 1.015
    assert max(ratios) < 1.1


@pytest.mark.parametrize(
    ("N", "D", "V"),
    [(192, 896, 151936), (512, 4096, 128256), (2048, 4096, 128256), (7000, 3584, 152064), (1, 64, 128256),
     (1024, 4096, 2048), (4096, 4096, 2048)],
)  # fmt: skip
def test_whole_splits_are_not_shared_where_they_keep_the_sms_busy(N: int, D: int, V: int) -> None:
    assert forward.schedule_for(N, D, V, 132) == forward.whole_splits(N, V, 132)


def test_a_schedule_is_that_of_the_next_multiple_of_64_rows() -> None:
    """So a batch of a new size seldom asks the model. Rounding changes nothing: not the choice for a size,
    nor the model's time of any schedule."""
    for D, V in ((896, 151936), (4096, 128256), (4096, 2048)):
        for N in (*range(1, 260), *range(3700, 3990), 6000):
            assert forward.schedule_for(N, D, V, 132) == forward._schedule.__wrapped__(N, D, V, 132, 0)
            for tile, pieces in ((MANY, 0), (FEW, 0), (FEW, 3), (MANY, 4)):
                schedule = forward.Schedule(tile, pieces)
                assert schedule.us(N, D, V, 132) == schedule.us(-(-N // 64) * 64, D, V, 132)
    assert forward.schedule_for(3841, 4096, 128256, 132) == forward.whole_splits(3841, 128256, 132)
    before = forward._schedule.cache_info().misses
    for N in range(1921, 1985):
        forward.schedule_for(N, 3000, 128256, 132)
    assert forward._schedule.cache_info().misses == before + 1


@pytest.mark.parametrize("sms", [78, 114, 132, 144])
def test_what_is_handed_on_fits_in_the_memory_that_the_page_promises(sms: int) -> None:
    for N in range(1, 6000, 64):
        share = forward.schedule_for(N, 4096, 128256, sms).pieces > 0
        capacity = -(-N // 128) * 128
        numbers = 33 * 3 * capacity + 4 * capacity
        numbers += share * (hopper_pieces.sums_of(N) + hopper_pieces.counters_of(N))
        assert 4 * numbers <= 8e6
