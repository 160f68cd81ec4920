"""Tiles of products on Hopper, and a model of their time.

No sum depends on the tile, so any tile may be chosen. A model of the time in microseconds decides:

    FIXED_US + WAITING_US * w + (SM^4 + HBM^4 + POWER^4)^(1/4)

    w       the share of the programs of a product like this one that could not start while it still runs,
            because there is no room for them on an SM
    SM      rounds of tiles over the places for programs, the last one with those that have a tile in it
                x  steps of 64 of k  x  cycles of a step, at CYCLES_PER_US
    HBM     operands and output once, at HBM_BYTES_PER_US
    POWER   multiplications and additions, at FLOPS_PER_US of all SMs

A step takes the root of the sum of the squares of

    tensor cores    rows * columns / 32 cycles, of both programs if an SM has two. An accumulator counts at
                    least LEAST_COLUMNS: however few it has, `wgmma` reads 64 rows of a
    L2              lines of all busy programs, at L2_LINES_PER_CYCLE. An operand that s neighbouring programs
                    read at the same time counts s^-SHARING: L2 answers some of them together
    latency         LATENCY_CYCLES, which a stage needs to arrive, divided by the steps of 64 in the ring,
                    which are all under way

and then OUTSIDE_CYCLES for every line outside the operand, which TMA fills with zeros.

The constants were fitted on an H200 to 380 products with weights from memory, 1 to 4096 rows, at ten real
layers forward and six backward (tests/golden/tiles_h200.json has the cells): the root mean square of the
errors is 7.4 % over tiles within 40 % of the fastest. What the model chooses takes 1.2 % longer than the
fastest tile that was timed (of 117, up to 34 in each cell) in geometric mean, 6.2 % at the 95th percentile.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

#: Shared memory for stages and staged output: a block has 227 KB, and barriers take some.
SHARED_BYTES = 226 * 1024
#: Of the 228 KB of an SM each block takes one for itself, and barriers are in another.
_BLOCK_BYTES = 2048
#: Steps are 128 of k only if the ring has this many of them.
_LEAST_STAGES = 4

#: To launch, to fill the ring, and to store the last tile.
FIXED_US = 2.43
WAITING_US = 0.192
#: From memory.
HBM_BYTES_PER_US = 3.85e6
#: Of all SMs. The GPU lowers its clock before a long product is faster.
FLOPS_PER_US = 7.02e8
CYCLES_PER_US = 1713
LEAST_COLUMNS = 42.4
L2_LINES_PER_CYCLE = 140.7
SHARING = 0.0893
LATENCY_CYCLES = 800
OUTSIDE_CYCLES = 2.83


@dataclass(frozen=True)
class Tile:
    """A program computes consumers * 64 rows by `columns` of output, with `step` of k per stage. `columns` is
    the sum of one to three powers of two.

    `group`: this many tiles in the direction of M are visited before the next ones in that of N."""

    consumers: int
    columns: int
    step: int
    stages: int
    swapped: bool
    group: int = 16
    accumulators: int = 1  # per consumer: segmented sums need one for the segment and one for the total
    halved: bool = False  # two equal accumulators, stored one after the other through one buffer
    loaded: bool = False  # rows of a are loaded into registers once, for all accumulators
    per_sm: int = 1  # programs on an SM at the same time: two have half of its memory and registers each

    @cached_property
    def rows(self) -> int:
        return 64 * self.consumers

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Columns of each accumulator."""
        if self.halved:
            return (self.columns // 2,) * 2
        return tuple(1 << i for i in reversed(range(self.columns.bit_length())) if self.columns >> i & 1)

    @cached_property
    def rest(self) -> int:
        """Columns of the second accumulator, or 0."""
        return self.parts[1] if len(self.parts) > 1 else 0

    @cached_property
    def last(self) -> int:
        """Columns of the third accumulator, or 0."""
        return self.parts[2] if len(self.parts) > 2 else 0

    @property
    def registers(self) -> tuple[int, int]:
        """(registers per thread at launch, those of a consumer once the producer has released its own).

        An SM has 64K registers. With one consumer half of them are enough, unless it has many sums. If an SM
        has two programs, each has half of them: warps of two consumers and a producer 80 each.
        """
        if self.per_sm == 2:
            return {1: (128, 0), 2: (80, 104)}[self.consumers]
        many = self.columns * self.accumulators > 128
        return {1: (232 if many else 128, 0), 2: (168, 240), 3: (128, 160)}[self.consumers]


def fitted(
    consumers: int, columns: int, swapped: bool, itemsize: int, *, step: int = 0, group: int = 0,
    accumulators: int = 1, halved: bool = False, loaded: bool = False, per_sm: int = 1,
) -> Tile:  # fmt: skip
    """A tile with as many stages as fit next to its staged output of `itemsize` bytes per element."""
    rows = 64 * consumers
    staged = rows * columns * itemsize // (2 if halved else 1)
    left = (SHARED_BYTES + _BLOCK_BYTES) // per_sm - _BLOCK_BYTES - staged
    if not step:
        step = 128 if rows + columns <= 160 and left >= _LEAST_STAGES * (rows + columns) * 256 else 64
    stages = min(12, left // ((rows + columns) * step * 2))
    group = group or _group(*((columns, rows) if swapped else (rows, columns)))
    return Tile(consumers, columns, step, stages, swapped, group, accumulators, halved, loaded, per_sm)


def _group(height: int, width: int) -> int:
    """Programs that run at the same time read the fewest lines if their tiles, of this height in the
    direction of M, cover a square; for 132 of them."""
    return max(round(math.sqrt(132 * width / height)), 1)


@lru_cache(maxsize=64)
def _columns(tiles: tuple[Tile, ...]) -> tuple[np.ndarray, ...]:
    """What the model reads of tiles, a number per tile: its rows and columns, whether it is swapped, its
    group, the square of the cycles of tensor cores, programs on an SM, and steps of 64 in its ring."""

    def each(number: Callable[[Tile], float]) -> np.ndarray:
        return np.array([number(tile) for tile in tiles])

    tensor = each(
        lambda t: t.rows * sum(max(n, 0 if t.loaded else LEAST_COLUMNS) for n in t.parts) / 32
    )  # fmt: skip
    return (
        each(lambda t: t.rows), each(lambda t: t.columns), each(lambda t: t.swapped), each(lambda t: t.group),
        tensor**2, each(lambda t: t.per_sm), each(lambda t: t.stages * t.step / 64),
    )  # fmt: skip


def tiles_of(tiles: tuple[Tile, ...], M: Sequence[int], N: int) -> tuple[np.ndarray, np.ndarray]:
    """How many rows and columns of tiles cover M x N outputs, in the orientation of each tile: a row for each
    M, a column for each tile."""
    height, width, swapped, *_ = _columns(tiles)
    m = np.array(M, dtype=np.float64)[:, None]
    return np.ceil(np.where(swapped, N, m) / height), np.ceil(np.where(swapped, m, N) / width)


def microseconds(
    tiles: tuple[Tile, ...], M: Sequence[int], N: int, K: int, sms: int, itemsize: int,
    work: Callable[[np.ndarray], Sequence[tuple[np.ndarray, np.ndarray]]] | None = None,
) -> np.ndarray:  # fmt: skip
    """Modelled times of M x N outputs over K: a row for each M, a column for each tile.

    `work` says what programs do one after the other, if that is not all of k for every tile: from numbers of
    tiles it makes pairs (how many items, how many steps of 64 each has)."""
    height, width, swapped, group, squares, per_sm, depth = _columns(tiles)
    m = np.array(M, dtype=np.float64)[:, None]
    rows, columns = np.where(swapped, N, m), np.where(swapped, m, N)
    tiles_m, tiles_n = tiles_of(tiles, M, N)
    outside = OUTSIDE_CYCLES * (np.maximum(height - rows, 0) + np.maximum(width - columns, 0))
    # Neighbouring programs read the same weight, which is a if the tile is swapped, and b otherwise.
    a, b = np.minimum(rows, height), np.minimum(columns, width)
    sharers = np.minimum(np.where(swapped, tiles_n, tiles_m), group)
    others = np.minimum(np.where(swapped, tiles_m, tiles_n), sms / sharers)
    lines = np.where(swapped, a, b) * sharers**-SHARING + np.where(swapped, b, a) * others**-SHARING
    places = sms * per_sm

    def cycles(busy: np.ndarray) -> np.ndarray:
        on_one_sm = np.ceil(busy / sms)
        l2 = lines * busy / L2_LINES_PER_CYCLE
        return np.sqrt(squares * on_one_sm**2 + l2**2 + (LATENCY_CYCLES / depth) ** 2) + outside

    def passed(items: np.ndarray, steps: np.ndarray | int) -> np.ndarray:
        rounds, late = np.divmod(items, places)
        return steps * (rounds * cycles(places) + (late > 0) * cycles(late)) / CYCLES_PER_US

    count = tiles_m * tiles_n
    items = [(count, -(-K // 64))] if work is None else work(count)
    sm_us = sum((passed(*each) for each in items), start=np.zeros_like(count))
    hbm_us = (2 * K * (m + N) + itemsize * m * N) / HBM_BYTES_PER_US
    power_us = 2 * m * N * K / FLOPS_PER_US
    programs = np.minimum(sum(number for number, _ in items), places)
    waiting = np.maximum(2 * programs - places, 0) / programs
    return FIXED_US + WAITING_US * waiting + (sm_us**4 + hbm_us**4 + power_us**4) ** 0.25
