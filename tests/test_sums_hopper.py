"""The Hopper kernel of sums over tokens on a CPU, whole: its own code with numpy in the place of Gluon. Small
integers, so that every order of a sum gives the same number."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gluon_on_a_cpu import Device, in_order
from isobit.kernels.hopper import pipeline, product
from isobit.kernels.hopper.tiles import Tile, fitted

ARITHMETIC = SimpleNamespace(product=lambda a, b, acc, _: acc + a @ b)
TILES = {
    "128 x 128": fitted(2, 128, False, 4, step=64, group=8, accumulators=2),
    "64 x 64": fitted(1, 64, False, 4, step=64, group=8, accumulators=2),
    "128 x 128 in halves": fitted(2, 128, False, 4, step=64, group=8, accumulators=2, halved=True),
    "192 x 128 in halves": fitted(3, 128, False, 4, step=64, accumulators=2, halved=True),
}


class Emulated(Device):
    """Launches `sum_kernel`."""

    def store_box(self, desc: Any, where: list[Any], buffer: Any) -> None:
        i, j = (int(at) for at in where)
        values, to = torch.from_numpy(buffer.value.copy()), desc.tensor
        assert list(values.shape) == list(desc.block_type.shape)
        rows, columns = (
            max(0, min(n, size - at)) for n, size, at in zip(values.shape, to.shape, (i, j), strict=True)
        )
        to[i : i + rows, j : j + columns] = values[:rows, :columns].to(to.dtype)

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        assert kernel is product.sum_kernel
        self.programs = grid[0]
        scope = self.scope(
            product, pipeline, tma=SimpleNamespace(store_wait=lambda left: None), tma_store=self.store_box,
            gdc_wait=lambda: None, gdc_launch_dependents=lambda: None,
        )  # fmt: skip
        self.run(scope, kernel, in_order(kernel, args, options))


def drawn(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(shape[1])).bfloat16()


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize(("T", "M", "N"), [(70, 40, 136), (600, 200, 264), (1100, 392, 8)])
def test_every_sum_is_computed_and_stored(
    name: str, T: int, M: int, N: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less than a segment, one and a part, and more than two; sizes that are no multiple of a tile."""

    def tile(*_: Any) -> Tile:
        return TILES[name]

    monkeypatch.setattr(product, "sum_tile", tile)
    monkeypatch.setattr(product, "sm_count", lambda device: 3)
    x, dy, out = drawn(T, N), drawn(T, M), torch.full((M, N), torch.nan)
    product.sum_into(out, x, dy, launch=Emulated(ARITHMETIC, 1))
    assert torch.equal(out, dy.float().t() @ x.float())
