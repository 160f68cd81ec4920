"""Tiles of the products: that they fit an SM, and that the rule chooses among them as measurements would."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gluon_on_a_cpu import in_order
from isobit.frame.launch import Recorder
from isobit.kernels.hopper import pipeline as hopper_pipe
from isobit.kernels.hopper import product as hopper_product
from isobit.kernels.hopper import tiles as hopper_tiles
from isobit.kernels.hopper.tiles import Tile
from isobit.ops.det_gemm import kernels_hopper as products
from isobit.ops.linear_logp import kernels_hopper as forward

SMS = 132  # of an H200
TILES = [*products.product_tiles(2), *products.product_tiles(4)]
SUMS = hopper_product._SUMS
FOLDS = [forward._TILE, forward._TILE_FEW_ROWS, forward.TILE_STAGED]


@pytest.mark.parametrize("tile", dict.fromkeys([*TILES, *SUMS, *FOLDS]))
def test_tiles_fit_an_sm(tile: Tile) -> None:
    ring = tile.stages * (tile.rows + tile.columns) * tile.step * 2
    assert ring <= 227 * 1024
    at_launch, own = tile.registers
    warps = 4 * tile.consumers + 4
    assert at_launch * warps * 32 <= 65536
    if tile.consumers > 1:  # the first consumer gets what the others and the producer leave
        rest = at_launch * warps - 4 * own * (tile.consumers - 1) - 4 * hopper_pipe.PRODUCER_REGISTERS.value
        assert rest // 4 >= own
    sums = tile.columns // 2 * tile.accumulators  # fp32 of a thread
    assert sums + 40 <= (own or at_launch)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_leave_room_for_their_output(itemsize: int) -> None:
    for tile in (*products.product_tiles(itemsize), *SUMS):
        ring = tile.stages * (tile.rows + tile.columns) * tile.step * 2
        assert ring + tile.rows * tile.columns * itemsize + 1024 <= 227 * 1024 and tile.stages >= 3


def test_columns_are_powers_of_two_or_two_of_them() -> None:
    for tile in TILES:
        assert sum(tile.parts) == tile.columns
        assert all(n & (n - 1) == 0 and 8 <= n <= 256 for n in tile.parts)


def test_all_tiles_are_different() -> None:
    sizes = [(tile.rows, tile.columns, tile.swapped) for tile in products.product_tiles(2)]
    assert len(set(sizes)) == len(sizes)
    assert {t.columns for t in products.product_tiles(2) if t.rest} == {96, 160, 192}


# The rule


def chosen(M: int, N: int, K: int, itemsize: int = 2) -> Tile:
    return products.choose_tile(M, N, K, SMS, itemsize)[0]


def test_decode_gives_the_weight_the_rows_and_pays_for_few_tokens() -> None:
    for M in (1, 4, 16):
        tile = chosen(M, 4096, 4096)
        assert tile.swapped and tile.rows == 64 and tile.columns == (16 if M == 16 else 8)


def test_large_products_take_the_large_tile_unless_another_fills_the_waves_better() -> None:
    assert chosen(4096, 4096, 4096).columns == 256  # 3.9 waves
    assert chosen(1024, 6144, 4096).columns == 192  # 1.9 waves of three quarters of it, not 1.5
    assert not chosen(8192, 151936, 4096).swapped
    # 128 x 256 takes two waves, of which the second is a tenth full.
    assert (chosen(640, 8192, 8192).rows, chosen(640, 8192, 8192).columns) == (128, 160)


def test_an_fp32_tile_is_one_that_can_be_staged() -> None:
    assert chosen(4096, 4096, 4096, itemsize=4).columns == 128


def test_ties_go_to_the_tile_with_fewer_programs() -> None:
    """Three waves of 128 x 256, or four of 128 x 192."""
    assert chosen(1024, 12288, 4096).columns == 256


def test_sums_of_few_rows_take_the_tile_that_keeps_most_multiprocessors_busy() -> None:
    def tile(M: int, N: int) -> tuple[int, int]:
        result, _ = hopper_product.choose_sum_tile(M, N, 4096, SMS)
        return result.rows, result.columns

    assert tile(4096, 2048) == tile(65536, 896) == (128, 128)
    assert tile(1024, 896) == tile(1024, 1024) == (64, 128)  # 112 tiles where there were 56
    assert tile(64, 4096) == tile(128, 512) == (64, 64)


# The rule against measurements


@cache
def measured() -> list[dict[str, Any]]:
    """Every candidate at 67 shapes on an H200."""
    cells = json.loads((Path(__file__).parent / "golden" / "tiles_h200.json").read_text())["cells"]
    assert len(cells) == 67
    return list(cells)


def time_of(cell: dict[str, Any], tile: Tile) -> float:
    return float(cell["us"][f"{tile.rows}x{tile.columns}{' swapped' if tile.swapped else ''}"])


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def test_what_the_rule_chooses_is_nearly_the_fastest() -> None:
    result = [time_of(c, chosen(c["M"], c["N"], c["K"])) / min(c["us"].values()) for c in measured()]
    assert geomean(result) < 1.02 and max(result) < 1.15


def test_what_the_rule_expects_is_nearly_what_was_measured() -> None:
    errors = []
    for c in measured():
        tile, expected = products.choose_tile(c["M"], c["N"], c["K"], SMS)
        errors.append(math.log(time_of(c, tile) / expected))
    assert math.sqrt(sum(e * e for e in errors) / len(errors)) < 0.08
    assert max(map(abs, errors)) < 0.22


def test_the_rule_is_asked_once_for_eight_numbers_of_rows() -> None:
    products._chosen.cache_clear()
    assert len({products.choose_tile(M, 4096, 1024, SMS) for M in range(33, 41)}) == 1
    assert products._chosen.cache_info().misses == 1
    sizes = {size for tile in products.product_tiles(2) for size in (tile.rows, *tile.parts)}
    assert all(size % 8 == 0 for size in sizes)


def test_a_time_model_without_waves_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same model with waves that are not rounded up."""
    real = hopper_tiles.microseconds

    def without_waves(tile: Tile, rows: int, columns: int, K: int, sms: int, hbm_bytes: int) -> float:
        tiles = hopper_tiles.tiles_of(tile, rows, columns)
        return real(tile, rows, columns, K, sms, hbm_bytes) * max(1, tiles / sms) / -(-tiles // sms)

    monkeypatch.setattr(products, "microseconds", without_waves)
    monkeypatch.setattr(products, "_chosen", products._chosen.__wrapped__)
    with pytest.raises((AssertionError, KeyError)):
        test_what_the_rule_chooses_is_nearly_the_fastest()


def test_the_rule_holds_its_speed_beside_cublas() -> None:
    """Shares of the speed of `torch.mm`, geometric means: where it splits k, where it does not, many rows."""
    shares: dict[str, list[float]] = {}
    for c in measured():
        kind = "many" if c["M"] > 768 else "whole" if c["same_bits"] else "split"
        shares.setdefault(kind, []).append(c["torch.mm"] / time_of(c, chosen(c["M"], c["N"], c["K"])))
    assert geomean(shares["whole"]) > 0.95 and geomean(shares["split"]) > 1.0 and min(shares["split"]) > 0.85


# Shared memory


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_operands_in_shared_memory_are_swizzled(
    out_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order of their elements in memory: ptxas 12.8 reads registers that it has not set for
    operands that are not."""

    def empty(rows: int, columns: int, transposed: bool) -> torch.Tensor:
        if transposed:
            return empty(columns, rows, False).t()
        return torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")

    monkeypatch.setattr(products, "sm_count", lambda device: SMS)
    launch, few = Recorder(), 0
    for M in (8, 16, 24, 64, 160, 320, 1024):
        for order in range(4):
            a, b = empty(M, 4096, order % 2 == 1), empty(4096, 4096, order > 1)
            products.product(a, b, None, out_dtype, launch=launch)
            products.token_product(a, empty(M, 4096, order > 1), None, None, launch=launch)
    for kernel, args, options in launch.launches:
        names = dict(zip(kernel.arg_names, in_order(kernel, args, options), strict=True))
        few += names["COLUMNS"] == 8
        for name in ("a_desc", "b_desc", "b_rest_desc"):
            if names.get(name) is not None:
                assert names[name].layout.swizzle_byte_width >= 32, (name, names["COLUMNS"])
    assert few > 0
