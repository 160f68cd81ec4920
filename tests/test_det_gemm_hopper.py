"""The Hopper kernel of products on a CPU, whole: its own code with numpy in the place of Gluon.

The inputs are small integers, so every order of a sum gives the same number. What is tried is where tiles
begin and end: every element is computed and stored, TMA starts only where it can, and nearly nothing outside
an operand is loaded.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gluon_on_a_cpu import Device, in_order
from isobit.kernels.hopper import descriptors, pipeline, product
from isobit.kernels.hopper.tiles import Tile, fitted
from isobit.ops.det_gemm import kernels_hopper, kernels_hopper_tree
from isobit.ops.det_gemm.plans_hopper_tree import planned

BF16 = torch.bfloat16
ARITHMETIC = SimpleNamespace(product=lambda a, b, acc, _: acc + a @ b)


class Emulated(Device):
    """Launches `product_kernel`. `outside`: rows or columns that TMA had to fill with zeros, at most by one
    load, apart from the end of k."""

    def __init__(self, programs: int) -> None:
        super().__init__(ARITHMETIC, programs)
        self.outside = 0

    def _starts(self, desc: Any, where: list[Any]) -> list[int]:
        at = [int(i) for i in where]
        assert at[-1] * desc.tensor.element_size() % 16 == 0, f"TMA cannot start at {at}"
        return at

    def load_box(self, desc: Any, where: list[Any], bar: Any, buffer: Any) -> None:
        at, box, size = self._starts(desc, where), desc.block_type.shape, desc.tensor.shape
        side = 0 if box[1] in (64, 128) and size[1] == self.k else 1
        self.outside = max(self.outside, at[side] + box[side] - size[side])
        super().load_box(desc, where, bar, buffer)

    def store_box(self, desc: Any, where: list[Any], buffer: Any) -> None:
        (i, j), to = self._starts(desc, where), desc.tensor
        values = torch.from_numpy(np.array(buffer.value))
        rows, columns = (
            max(0, min(n, size - at)) for n, size, at in zip(values.shape, to.shape, (i, j), strict=True)
        )
        to[i : i + rows, j : j + columns] = values[:rows, :columns].to(to.dtype)

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        assert kernel is kernels_hopper.product_kernel
        given = in_order(kernel, args, options)
        self.programs = grid[0]
        scope = self.scope(
            kernels_hopper, product, pipeline,
            tma=SimpleNamespace(store_wait=lambda left: None), tma_store=self.store_box,
            gdc_wait=lambda: None, gdc_launch_dependents=lambda: None,
        )  # fmt: skip
        self.run(scope, kernel, given)

    k = 0


def matrix(rows: int, columns: int, by_rows: bool) -> Tensor:
    """Small integers, with rows (or columns) that begin at multiples of 16 bytes."""
    if not by_rows:
        return matrix(columns, rows, True).t()
    wide = torch.randint(-3, 4, (rows, -(-columns // 8) * 8), generator=torch.Generator().manual_seed(rows))
    return wide.to(BF16)[:, :columns]


def multiplied(
    tile: Tile, M: int, N: int, K: int, a_by_k: bool, b_by_k: bool, monkeypatch: pytest.MonkeyPatch,
    bias: bool = False,
) -> Emulated:  # fmt: skip
    """Run, and compare with the product."""
    monkeypatch.setattr(kernels_hopper, "sm_count", lambda device: 3)
    a, b = matrix(M, K, a_by_k), matrix(K, N, not b_by_k)
    added = torch.arange(N).remainder(5).to(BF16) if bias else None
    out, device = torch.full((M, N), torch.nan), Emulated(1)
    device.k = K
    left, right = descriptors.matrix(a), descriptors.matrix(b)
    if tile.swapped:
        left, right = right.transposed(), left.transposed()
    kernels_hopper._multiply(out, left, right, added, tile, device)
    expected = a.float() @ b.float() + (0 if added is None else added.float())
    assert torch.equal(out, expected)
    return device


LAYOUTS = [(True, True), (True, False), (False, True), (False, False)]
TILES = {
    "64 x 80": fitted(1, 80, False, 4),
    "128 x 160": fitted(2, 160, False, 4),
    "64 x 48 swapped": fitted(1, 48, True, 4),
    "128 x 96 swapped": fitted(2, 96, True, 4),
    "192 x 32 swapped": fitted(3, 32, True, 4),
    "64 x 128 in halves": fitted(1, 128, False, 4, halved=True),
    "128 x 32 swapped in halves": fitted(2, 32, True, 4, halved=True),
    "64 x 16 swapped, two on an SM": fitted(1, 16, True, 4, per_sm=2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TILES)
def test_every_element_is_computed_whatever_the_size(
    name: str, layout: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that are no multiple of a tile, and smaller than one."""
    for M, N in ((163, 204), (17, 36), (1, 260)):
        multiplied(TILES[name], M, N, 70, *layout, monkeypatch, bias=M == 163)


@pytest.mark.parametrize("per_sm", [1, 2])
def test_an_sm_has_as_many_programs_as_its_tile_leaves_room_for(
    per_sm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two kernels, as long as there are tiles."""
    tile, plan = fitted(1, 16, True, 2, per_sm=per_sm), planned(1, 16, True, 2, 1, True, per_sm=per_sm)
    assert plan is not None and plan.tile.per_sm == per_sm
    grids: list[int] = []

    def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        grids.append(grid[0])

    for module in (kernels_hopper, kernels_hopper_tree):
        monkeypatch.setattr(module, "sm_count", lambda device: 132)
    for N in (128, 64 * 1000):
        x, w, out = (torch.empty(shape, dtype=BF16, device="meta") for shape in ((8, 512), (N, 512), (8, N)))
        a, b = descriptors.matrix(x), descriptors.matrix(w.t())
        kernels_hopper._multiply(out, b.transposed(), a.transposed(), None, tile, launch)
        kernels_hopper_tree._multiply(out, a, b, None, plan, launch)
    assert grids == [2, 2, 132 * per_sm, 132 * per_sm]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TILES)
def test_nearly_nothing_outside_is_loaded(
    name: str, layout: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TMA fills with zeros more slowly than it loads. Contiguous rows begin at multiples of 8 elements, so 7
    of them may be outside."""
    device = multiplied(TILES[name], 205, 260, 70, *layout, monkeypatch)
    assert device.outside <= (0 if layout == (True, True) else 7)


def _without_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(self: Any, part: Any) -> Any:
        return part * 64

    monkeypatch.setattr(pipeline.Pipe, "row", SimpleNamespace(fn=row))


def _unaligned(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(size: Any, LENGTH: int, BY_K: bool) -> Any:
        return max(size - LENGTH, 0)

    monkeypatch.setattr(pipeline, "last_start", SimpleNamespace(fn=start))


@pytest.mark.parametrize("broken", [_without_overlap, _unaligned])
def test_wrong_starts_are_detected(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    monkeypatch.setattr("gluon_on_a_cpu.PATIENCE_S", 0.5)  # consumers wait for a producer that has failed
    with pytest.raises(AssertionError):
        test_nearly_nothing_outside_is_loaded("64 x 80", (False, False), monkeypatch)
