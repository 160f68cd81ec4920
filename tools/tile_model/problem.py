"""The rules whose time models can be fitted: candidates, how to call one, how to model one.

A model is the code that chooses at run time. Its constants are set for a moment while it is fitted, so there
is no second formula that could differ from it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from isobit.frame.launch import run
from isobit.kernels.hopper import tiles
from isobit.kernels.hopper.descriptors import matrix
from isobit.kernels.hopper.tiles import Tile, fitted
from isobit.ops.det_gemm import kernels_hopper as products
from isobit.ops.det_gemm import kernels_hopper_tree as trees
from isobit.ops.det_gemm import plans_hopper_tree as plans

#: Bytes per element of the outputs that are timed.
ITEMSIZE = 2


@dataclass(frozen=True)
class Problem:
    """One rule. A candidate is whatever it chooses: a tile, or a tile and a number of programs.

    `chosen` are the candidates of the rule by name. `others` are timed too: they show what the rule lacks.
    `call(candidate, out, x, w)` computes out = x w, with the same bits for all candidates. `model(candidates,
    M, N, K, sms)` returns the expected microseconds of M x N outputs over K, a row for each M and a column
    for each candidate, with the constants that `module` has at the moment; `forget` drops what it caches of
    them. `constants` are their names.
    """

    chosen: Mapping[str, Any]
    others: Mapping[str, Any]
    call: Callable[[Any, Tensor, Tensor, Tensor], None]
    model: Callable[[Sequence[Any], Sequence[int], int, int, int], np.ndarray]
    constants: tuple[str, ...]
    module: ModuleType
    forget: Callable[[], None] = lambda: None
    allowed: Callable[[Any, str], bool] = lambda candidate, kind: True

    def every(self) -> dict[str, Any]:
        """All candidates."""
        return {**self.chosen, **self.others}

    def today(self) -> dict[str, float]:
        return {name: getattr(self.module, name) for name in self.constants}

    @contextmanager
    def having(self, constants: Mapping[str, float]) -> Iterator[None]:
        """The model has these constants inside."""
        before = self.today()
        try:
            self.set(constants)
            yield
        finally:
            self.set(before)

    def set(self, constants: Mapping[str, float]) -> None:
        for name, value in constants.items():
            setattr(self.module, name, value)
        self.forget()


# The products of class chain16


def _name(tile: Tile) -> str:
    kinds = {
        "swapped": tile.swapped,
        "in halves": tile.halved,
        "loaded": tile.loaded,
        "two on an SM": tile.per_sm == 2,
    }
    return " ".join([f"{tile.rows}x{tile.columns}", *(kind for kind, holds in kinds.items() if holds)])


def _every_tile() -> Iterator[Tile]:
    """Tiles of one to three accumulators per consumer that fit an SM; those in halves that have a stage more
    so; and those of which two fit one. Accumulators of 8 columns only if they are swapped: where k is not
    contiguous in a weight, they cannot be swizzled."""
    for swapped, least in ((True, 8), (False, 16)):
        sizes = [least << i for i in range(6) if least << i <= 256]
        sums = {sum(some) for n in (2, 3) for some in combinations(sizes, n) if sum(some) <= 256}
        for consumers in (1, 2, 3):
            for columns in sorted({*sizes, *sums}):
                tile = fitted(consumers, columns, swapped, ITEMSIZE)
                made = [tile]
                if columns in (128, 256):
                    made.append(fitted(consumers, columns, swapped, ITEMSIZE, halved=True))
                if consumers > 1 and tile.rest:
                    made.append(fitted(consumers, columns, swapped, ITEMSIZE, loaded=True))
                if consumers < 3 and columns <= 96:
                    made.append(fitted(consumers, columns, swapped, ITEMSIZE, per_sm=2))
                for each in made:
                    at_launch, own = each.registers
                    enough = each.stages >= (tile.stages + 1 if each.halved else 3)
                    if enough and columns // 2 + 40 <= (own or at_launch):
                        yield each


def _multiply(tile: Tile, out: Tensor, x: Tensor, w: Tensor) -> None:
    left, right = matrix(x), matrix(w)
    if tile.swapped:
        left, right = right.transposed(), left.transposed()
    products._multiply(out, left, right, None, tile, run)


def _microseconds(candidates: Sequence[Tile], M: Sequence[int], N: int, K: int, sms: int) -> np.ndarray:
    """The rule rounds M up to a multiple of 8."""
    return tiles.microseconds(tuple(candidates), [-(-m // 8) * 8 for m in M], N, K, sms, ITEMSIZE)


@cache
def chain16() -> Problem:
    chosen = {_name(tile): tile for tile in products.product_tiles(ITEMSIZE)}
    others = {_name(tile): tile for tile in _every_tile() if _name(tile) not in chosen}
    return Problem(
        chosen, others, _multiply, _microseconds, (
            "FIXED_US", "WAITING_US", "HBM_BYTES_PER_US", "FLOPS_PER_US", "CYCLES_PER_US", "LEAST_COLUMNS",
            "L2_LINES_PER_CYCLE", "SHARING", "LATENCY_CYCLES", "OUTSIDE_CYCLES",
        ), tiles, tiles._columns.cache_clear,
        lambda tile, kind: kind == "forward" or tile.swapped or min(tile.parts) >= products.NARROW,
    )  # fmt: skip


# The products of class tree8


def _multiply_as(plan: plans.Plan, out: Tensor, x: Tensor, w: Tensor) -> None:
    trees._multiply(out, matrix(x), matrix(w), None, plan, run)


def _plan_microseconds(
    candidates: Sequence[plans.Plan], M: Sequence[int], N: int, K: int, sms: int
) -> np.ndarray:
    rows = [-(-m // 8) * 8 for m in M]
    return plans.plan_microseconds(tuple(candidates), rows, N, K, sms, ITEMSIZE)


def _plan_name(plan: plans.Plan) -> str:
    if plan.parts == 1:
        return f"{_name(plan.tile)} in 1"
    return f"{_name(plan.tile)}{', the last' if plan.whole else ''} in {plan.parts}"


@cache
def tree8() -> Problem:
    """Its constants are what parts and pairs of leaves cost more; the others are those of chain16."""
    chosen = {_plan_name(plan): plan for plan in plans.tree_plans(ITEMSIZE)}
    constants = ("FOLD_US", "FOLD_BYTES_PER_US", "PAIR_US")
    return Problem(chosen, {}, _multiply_as, _plan_microseconds, constants, plans, plans._table.cache_clear)


PROBLEMS: dict[str, Callable[[], Problem]] = {"chain16": chain16, "tree8": tree8}
