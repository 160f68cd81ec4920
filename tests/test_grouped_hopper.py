"""The Hopper kernels of grouped products on a CPU, whole: their own code with numpy in the place of Gluon.

The inputs are small integers, so every order of a sum gives the same number. What is tried is where tiles
begin and end: every row of every expert is computed and stored once, none beyond an expert's end, and nothing
outside a tensor is read or written, whatever the offsets hold.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gluon_on_a_cpu import Device, in_order
from isobit.kernels.hopper import pipeline, product
from isobit.kernels.hopper.tiles import Tile, fitted
from isobit.numerics import chain
from isobit.ops.det_grouped_linear import kernels_hopper, kernels_hopper_bwd, model
from isobit.ops.det_grouped_linear.strips import bounds_kernel, capacity, strips_kernel

BF16, NAN = torch.bfloat16, torch.nan
ARITHMETIC = SimpleNamespace(product=lambda a, b, acc, _: acc + a @ b)


def listed(table: Tensor, offsets: Tensor, R: int, height: int) -> None:
    """What `strips_kernel` does, without its scans."""
    E = len(offsets) - 1
    groups = [*model.rows_of(offsets, R)]
    groups.append((groups[-1][1] if groups else 0, R))  # the rows of no expert
    rows = []
    for e, (first, end) in enumerate(groups):
        begun = len(rows)
        rows += [(e, begun, first, end)] * -(-(end - first) // height)
    assert len(rows) <= capacity(R, E, height) == len(table) // 4 - 1
    table.fill_(2**30)
    table[0] = len(rows)
    if rows:
        table[4 : 4 * len(rows) + 4] = torch.tensor(rows).flatten()


def bounded(bounds: Tensor, offsets: Tensor, R: int) -> None:
    """What `bounds_kernel` does."""
    for e, rows in enumerate(model.rows_of(offsets, R)):
        bounds[e] = torch.tensor(rows)


class Emulated(Device):
    """Launches of all kernels. `stored`: tiles that were stored by TMA."""

    def __init__(self, arithmetic: Any = ARITHMETIC) -> None:
        super().__init__(arithmetic, 1)
        self.stored = 0

    def load_box(self, desc: Any, where: list[Any], bar: Any, buffer: Any) -> None:
        assert int(where[-1]) * desc.tensor.element_size() % 16 == 0, f"TMA cannot start at {where}"
        super().load_box(desc, where, bar, buffer)

    def store_box(self, desc: Any, where: list[Any], buffer: Any) -> None:
        (i, j), to = (int(at) for at in where), desc.tensor
        assert j * to.element_size() % 16 == 0
        values = torch.from_numpy(np.array(buffer.value))
        rows, columns = min(len(values), len(to) - i), min(values.shape[1], to.shape[1] - j)
        to[i : i + rows, j : j + columns] = values[:rows, :columns].to(to.dtype)
        self.stored += 1

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if kernel is strips_kernel:
            table, offsets, R, E, height = args
            assert len(offsets) == E + 1 <= options["EXPERTS"]
            listed(table, offsets, R, height)
            return
        if kernel is bounds_kernel:
            bounded(*args[:3])
            return
        if kernel is kernels_hopper_bwd.grouped_sum_kernel:
            self.programs = grid[0]
            scope = self.scope(
                kernels_hopper_bwd, product, pipeline,
                tma=SimpleNamespace(store_wait=lambda left: None), tma_store=self.store_box,
                gdc_wait=lambda: None, gdc_launch_dependents=lambda: None,
            )  # fmt: skip
            self.run(scope, kernel, in_order(kernel, args, options))
            return
        assert kernel is kernels_hopper.grouped_kernel
        self.programs = grid[0]
        scope = self.scope(
            kernels_hopper, product, pipeline,
            tma=SimpleNamespace(store_wait=lambda left: None), tma_store=self.store_box,
            gdc_wait=lambda: None, gdc_launch_dependents=lambda: None,
        )  # fmt: skip
        self.run(scope, kernel, in_order(kernel, args, options))


def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(BF16)


def expected(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.zeros(len(x), weight.shape[1])
    for e, (first, end) in enumerate(model.rows_of(offsets, len(x))):
        out[first:end] = x[first:end].float() @ weight[e].float().t()
        if bias is not None:
            out[first:end] += bias[e].float()
    return out


def multiplied(
    tile: Tile, bounds: list[int], R: int, N: int, K: int, transposed: bool, bias: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> Emulated:  # fmt: skip
    """Run, and compare with the products."""
    monkeypatch.setattr(kernels_hopper, "sm_count", lambda device: 3)
    E = len(bounds) - 1
    x, offsets = integers(R, -(-K // 8) * 8)[:, :K], torch.tensor(bounds, dtype=torch.int32)
    weight = (
        integers(E, K, -(-N // 8) * 8)[..., :N].mT if transposed else integers(E, N, -(-K // 8) * 8)[..., :K]
    )
    added = integers(E, N, seed=1) if bias else None
    out, device = torch.full((R, N), NAN, dtype=BF16), Emulated()
    kernels_hopper.multiply(out, x, weight, offsets, added, tile, device)
    assert torch.equal(out.float(), expected(x, weight, offsets, added))
    return device


TILES = {
    "64 x 80": fitted(1, 80, False, 2),
    "128 x 160": fitted(2, 160, False, 2),
    "128 x 64": fitted(2, 64, False, 2),
    "64 x 48 swapped": fitted(1, 48, True, 2),
    "64 x 8 swapped": fitted(1, 8, True, 2),
    "128 x 96 swapped": fitted(2, 96, True, 2),
}

GROUPS = {
    "uneven": [0, 3, 3, 70, 71, 200, 211],
    "one has everything": [0, 0, 0, 211, 211],
    "rows of none": [0, 60, 130],
    "nothing": [0, 0],
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", TILES)
def test_every_row_has_the_product_of_its_expert(
    name: str, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bounds in GROUPS.values():
        multiplied(TILES[name], bounds, 211, 136, 70, transposed, len(bounds) == 7, monkeypatch)


@pytest.mark.parametrize("name", ["64 x 80", "64 x 48 swapped"])
def test_outputs_that_tma_cannot_store(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = multiplied(TILES[name], GROUPS["uneven"], 211, 77, 24, False, True, monkeypatch)
    assert device.stored == 0


def test_whole_strips_are_stored_by_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    device = multiplied(TILES["128 x 64"], [0, 128, 256], 256, 128, 16, False, False, monkeypatch)
    assert device.stored == 2 * 2 * 2  # strips, columns of tiles, consumers


WILD = [
    [0, 2**31 - 1, 5, 7], [-5, -1, -(2**31), -7], [200, 10, 150, 300], [7, 3, 3, 2], [211, 211, 211, 211],
]  # fmt: skip


@pytest.mark.parametrize("bounds", WILD)
def test_no_offsets_reach_outside(bounds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The device refuses to read or write outside a tensor; every row is written, as the model reads the
    offsets."""
    for tile in ("64 x 80", "64 x 48 swapped"):
        multiplied(TILES[tile], bounds, 211, 40, 24, False, False, monkeypatch)


def test_a_store_beyond_the_end_of_an_expert_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def item(self: Any, t: Any, GROUP: int) -> Any:  # in the globals of the emulated kernel
        at = self.table + 4 + t // self.tiles * 4
        first, end = gl.load(at + 2), gl.load(at + 3)  # type: ignore[name-defined]  # noqa: F821
        i = t // self.tiles - gl.load(at + 1)  # type: ignore[name-defined]  # noqa: F821
        expert = gl.load(at)  # type: ignore[name-defined]  # noqa: F821
        return expert, first + i * self.TOKENS, end + 1, t % self.tiles, self.steps

    monkeypatch.setattr(kernels_hopper.Groups, "item", SimpleNamespace(fn=item))
    with pytest.raises(AssertionError, match="written outside"):
        multiplied(TILES["64 x 80"], GROUPS["uneven"], 211, 40, 24, False, False, monkeypatch)


# Sums


def as_hopper(a: Any, b: Any, acc: Any, _: Any) -> Any:
    left, right = (torch.from_numpy(np.ascontiguousarray(t)).to(BF16) for t in (a, b))
    return chain(left, right, torch.from_numpy(np.ascontiguousarray(acc))).numpy()


SUMS = {
    "64 x 64": fitted(1, 64, False, 4, step=64, group=8, accumulators=2),
    "128 x 128": fitted(2, 128, False, 4, step=64, group=8, accumulators=2),
    "192 x 128": fitted(3, 128, False, 4, step=64, group=8, accumulators=2),
}


def summed(
    tile: Tile, bounds: list[int], R: int, N: int, K: int, init: bool, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> Emulated:  # fmt: skip
    """Run, and compare with the bits of the model."""
    monkeypatch.setattr(kernels_hopper_bwd, "sm_count", lambda device: 3)
    gen = torch.Generator().manual_seed(R + N + K)
    E, offsets = len(bounds) - 1, torch.tensor(bounds, dtype=torch.int32)
    x, dy = (torch.randn(R, -(-n // 8) * 8, generator=gen).to(BF16)[:, :n] for n in (K, N))
    start = torch.randn(E, N, K, generator=gen) if init else None
    if start is not None:
        start[:, 0, 0] = -0.0  # stays, if nothing is added
    out = torch.full((E, N, K), NAN, dtype=dtype)
    device = Emulated(SimpleNamespace(product=as_hopper))
    kernels_hopper_bwd.sum_rows(out, x, dy, offsets, start, tile, device)
    wanted = model.token_product(x, dy, offsets, None, start, dtype)
    integers = {4: torch.int32, 2: torch.int16}[out.element_size()]
    assert torch.equal(out.view(integers), wanted.view(integers))
    return device


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_every_expert_have_the_bits_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of whole steps and not, of more than a segment, without rows, and rows of none; stored by TMA
    and not."""
    device = summed(SUMS[name], [0, 64, 64, 603, 640, 641], 660, 64, 20, True, torch.float32, monkeypatch)
    assert device.stored
    device = summed(SUMS[name], [0, 7, 135], 135, 70, 24, False, BF16, monkeypatch)
    assert not device.stored


@pytest.mark.parametrize("bounds", WILD)
def test_no_offsets_make_sums_read_outside(bounds: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    summed(SUMS["64 x 64"], bounds, 211, 16, 16, True, torch.float32, monkeypatch)


def test_rows_of_other_experts_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN and infinities of one expert, directly behind the rows of another."""
    monkeypatch.setattr(kernels_hopper_bwd, "sm_count", lambda device: 3)
    x, dy = integers(135, 16), integers(135, 64)
    x[7:], dy[70:] = NAN, torch.inf
    out = torch.full((2, 64, 16), NAN)
    offsets = torch.tensor([0, 7, 135], dtype=torch.int32)
    kernels_hopper_bwd.sum_rows(out, x, dy, offsets, None, SUMS["128 x 128"], Emulated())
    assert torch.equal(out[0], dy[:7].float().t() @ x[:7].float())
    assert out[1].isnan().all()


def test_rows_of_the_next_expert_in_a_sum_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """TMA reads on into the next expert: without clearing, its rows are in the sum."""
    monkeypatch.setattr(kernels_hopper_bwd, "_keep_rows", SimpleNamespace(fn=lambda *_: None))
    with pytest.raises(AssertionError):
        summed(SUMS["64 x 64"], [0, 7, 135], 199, 16, 16, False, torch.float32, monkeypatch)
