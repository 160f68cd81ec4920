"""Plans of the Hopper kernels of class tree8: the tile of a product, in how many parts tiles are computed,
and a model of the time that chooses. Bits do not depend on the plan."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from isobit.frame.traced import decides
from isobit.kernels.hopper.tiles import Tile, fitted, microseconds, tiles_of
from isobit.numerics import LEAVES
from isobit.ops.det_gemm.kernels_hopper import TABLE_ROWS


class Plan(NamedTuple):
    """Tiles are computed in `parts`. WHOLE: only those that are left over after full rounds are. `total`: how
    many leaves the product has, eight, or those of a rank that has some of them."""

    tile: Tile
    parts: int
    whole: bool
    total: int = LEAVES

    @property
    def leaves(self) -> int:
        """Of a part."""
        return self.total // self.parts

    def first(self, tiles: int, sms: int) -> int:
        """How many tiles are computed whole."""
        return tiles if self.parts == 1 else tiles // sms * sms if self.whole else 0


#: Columns of tiles by consumer warpgroups. With more than one leaf a consumer has two accumulators, with more
#: than two a third one, which waits. Tiles that are not swapped are computed whole: in parts they took up to
#: 1.37 times as long as swapped ones of the same size on an H200, with more than 64 tokens; why is not known.
_DIRECT = {1: (64, 80, 128, 192), 2: (160, 192)}
_SWAPPED = {
    1: (8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 128, 144, 160, 192),
    2: (16, 32, 64, 80, 96, 128, 144, 160, 192, 256),
}
#: Two programs on an SM at the same time, of one consumer each and swapped: for few tokens. (columns, parts)
_TWO_ON_AN_SM = ((8, 1), (8, 4), (16, 1), (32, 1), (40, 1))
#: Sums of a consumer's thread, half a column each: what leaves registers for the loop. By programs on an SM.
_MOST_SUMS = {1: 192, 2: 80}
#: Tiles with fewer columns are computed whole, or all of them in parts: there are always enough of them.
_LEAST_LEFT_OVER = 64


def planned(
    consumers: int, columns: int, swapped: bool, itemsize: int, parts: int, whole: bool, total: int = LEAVES,
    per_sm: int = 1,
) -> Plan | None:  # fmt: skip
    """With as many stages as fit; None if there are too few, or too few registers."""
    leaves = total if whole else total // parts
    accumulators = min(leaves, 3)
    if columns * accumulators // 2 > _MOST_SUMS[per_sm]:
        return None
    # Next to the ring are sums of leaves that wait, in fp32, and the output.
    bytes_each = (4 if leaves == LEAVES else 0) + (itemsize if whole else 0)
    tile = fitted(
        consumers, columns, swapped, bytes_each, group=16, accumulators=accumulators, per_sm=per_sm
    )  # fmt: skip
    return Plan(tile, parts, whole, total) if tile.stages >= 3 else None


@cache
def tree_plans(itemsize: int, total: int = LEAVES) -> tuple[Plan, ...]:
    """Every plan for outputs with this many bytes per element, of which `total` leaves are summed."""
    made = [
        planned(consumers, columns, swapped, itemsize, parts, whole, total)
        for swapped, sizes in ((False, _DIRECT), (True, _SWAPPED))
        for consumers in sizes
        for columns in sizes[consumers]
        for parts in (1, 2, 4, 8)
        for whole in (True, False)
        if parts <= total
        and (whole or (parts > 1 and swapped))
        and (parts == 1 or not whole or columns >= _LEAST_LEFT_OVER)
    ]
    made += [
        planned(1, columns, True, itemsize, parts, parts == 1, total, per_sm=2)
        for columns, parts in _TWO_ON_AN_SM
        if parts <= total
    ]
    return tuple(plan for plan in made if plan is not None)


def fitting(tile: Tile, leaf: int) -> Tile:
    """With steps of 64 instead of 128, if the last step of a leaf would be half empty."""
    if tile.step == 128 and 0 < leaf % 128 <= 64:
        return replace(tile, step=64, stages=min(12, 2 * tile.stages))
    return tile


# Fitted on an H200 to 83 products with weights from memory, 1 to 4096 rows, at four real layers forward
# (tests/golden/plans_h200.json has the cells): the root mean square of the errors is 8.6 % over plans within
# 40 % of the fastest. What the model chooses takes 3.2 % longer than the fastest plan that was timed in
# geometric mean, 13 % at the 95th percentile.
#: To launch the kernel that adds the parts, and what the parts write and read, mostly in L2.
FOLD_US = 1.071
FOLD_BYTES_PER_US = 2.641e6
#: To end a pair of chains and begin the next, of each SM.
PAIR_US = 0.4325


def choose_plan(
    M: int, N: int, K: int, sms: int, itemsize: int = 2, total: int = LEAVES
) -> tuple[Plan, float]:
    """The plan for an M x N output over K, and the expected time in microseconds."""
    eights = max(-(-M // 8), 1)
    if eights <= TABLE_ROWS // 8:
        return _table(N, K, sms, itemsize, total)[eights - 1]
    return _chosen((8 * eights,), N, K, sms, itemsize, total)[0]


@decides
def plan_of(M: int, N: int, K: int, sms: int, itemsize: int, total: int = LEAVES) -> Plan:
    return choose_plan(M, N, K, sms, itemsize, total)[0]


@lru_cache(maxsize=256)
def _table(N: int, K: int, sms: int, itemsize: int, total: int) -> list[tuple[Plan, float]]:
    return _chosen(range(8, TABLE_ROWS + 1, 8), N, K, sms, itemsize, total)


def plan_microseconds(
    plans: tuple[Plan, ...], M: Sequence[int], N: int, K: int, sms: int, itemsize: int
) -> np.ndarray:
    """Modelled times: a row for each M, a column for each plan. Infinite for a plan that differs from another
    one only in tiles that are left over, if none are, or in full rounds, if there are none."""
    tiles, total = tuple(plan.tile for plan in plans), plans[0].total
    leaf = -(-K // total)
    parts, whole = (np.array([getattr(plan, name) for plan in plans]) for name in ("parts", "whole"))
    area = np.array([tile.rows * tile.columns for tile in tiles])
    steps = np.array([-(-leaf // fitting(tile, leaf).step) * tile.step // 64 for tile in tiles])
    leaves = total // parts

    def divided(count: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many tiles are computed whole, and how many in parts."""
        first = np.where(parts == 1, count, np.where(whole, count // sms * sms, 0))
        return first, count - first

    def work(count: np.ndarray) -> Sequence[tuple[np.ndarray, np.ndarray]]:
        first, others = divided(count)
        return (first, total * steps), (others * parts, leaves * steps)

    times = microseconds(tiles, M, N, K, sms, itemsize, work)
    tiles_m, tiles_n = tiles_of(tiles, M, N)
    first, others = divided(tiles_m * tiles_n)
    places = sms * np.array([tile.per_sm for tile in tiles])
    rounds = np.ceil(first / places), np.ceil(others * parts / places)
    times += PAIR_US * (rounds[0] * (total // 2 - 1) + rounds[1] * np.maximum(leaves // 2 - 1, 0))
    times += (others > 0) * (FOLD_US + (4 * parts + itemsize) * others * area / FOLD_BYTES_PER_US)
    return np.where((parts > 1) & ((others == 0) | (whole & (first == 0))), np.inf, times)


def _chosen(
    M: Sequence[int], N: int, K: int, sms: int, itemsize: int, total: int
) -> list[tuple[Plan, float]]:
    """The plan and the time for each M. If two times are equal to 10 ns, the plan with fewer programs."""
    plans = tree_plans(itemsize, total)
    times = np.round(plan_microseconds(plans, M, N, K, sms, itemsize), 2)
    tiles_m, tiles_n = tiles_of(tuple(plan.tile for plan in plans), M, N)
    best = np.lexsort((tiles_m * tiles_n * np.array([plan.parts for plan in plans]), times))[:, 0]
    return [(plans[i], float(row[i])) for i, row in zip(best, times, strict=True)]
