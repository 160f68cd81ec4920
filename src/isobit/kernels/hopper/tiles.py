"""Tiles of products on Hopper, and a model of their time.

No sum depends on the tile, so any tile may be chosen. A model of the time in microseconds decides:

    FIXED_US + (SM^4 + HBM^4 + POWER^4)^(1/4)

    SM      rounds of tiles over the SMs, the last one with those SMs that have a tile in it
                x  steps of 64 of k  x  cycles of a step, at CYCLES_PER_US
    HBM     operands and output once, at HBM_BYTES_PER_US
    POWER   multiplications and additions, at FLOPS_PER_US of all SMs

A step takes the root of the sum of the squares of

    tensor cores    rows * columns / 32 cycles
    shared memory   SHARED_CYCLES per line of 128 bytes that `wgmma` reads: a consumer reads its 64 rows once
                    for every accumulator, and all columns
    L2              lines of all busy SMs, at L2_LINES_PER_CYCLE. An operand that s neighbouring programs read
                    at the same time counts s^-SHARING: L2 answers some of them together
    latency         STEP_CYCLES, and STEP_CYCLES_PER_SM for every busy SM; LONG_STEP times that if the tile
                    has steps of 128

and then OUTSIDE_CYCLES for every line outside the operand, which TMA fills with zeros.

The constants were fitted on an H200 to 490 products with weights from memory, 1 to 4096 rows, at ten real
layers forward and six backward (tests/golden/tiles_h200.json has the cells): the root mean square of the
errors is 6.8 % over tiles within 40 % of the fastest. What the model chooses takes 2.2 % longer than the
fastest tile that was timed (of 88, up to 24 in each cell) in geometric mean, 9 % at the 95th percentile.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

#: Shared memory for stages and staged output: a block has 227 KB, and barriers take some.
SHARED_BYTES = 226 * 1024

#: To launch, to fill the ring, and to store the last tile.
FIXED_US = 2.59
#: From memory.
HBM_BYTES_PER_US = 3.83e6
#: Of all SMs. The GPU lowers its clock before a long product is faster.
FLOPS_PER_US = 7.13e8
CYCLES_PER_US = 1830
SHARED_CYCLES = 0.588
L2_LINES_PER_CYCLE = 115.4
SHARING = 0.1135
STEP_CYCLES = 55.1
STEP_CYCLES_PER_SM = 0.255
LONG_STEP = 1.648
OUTSIDE_CYCLES = 2.45


@dataclass(frozen=True)
class Tile:
    """A program computes consumers * 64 rows by `columns` of output, with `step` of k per stage. `columns` is
    a power of two, or the sum of two."""

    consumers: int
    columns: int
    step: int
    stages: int
    swapped: bool
    group: int = 16
    accumulators: int = 1  # per consumer: segmented sums need one for the segment and one for the total
    halved: bool = False  # two equal accumulators, stored one after the other through one buffer

    @cached_property
    def rows(self) -> int:
        return 64 * self.consumers

    @cached_property
    def rest(self) -> int:
        """The last columns, which have an accumulator of their own; 0 if all have one."""
        if self.halved:
            return self.columns // 2
        return self.columns - (1 << self.columns.bit_length() - 1)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Columns of each accumulator."""
        return (self.columns - self.rest, self.rest) if self.rest else (self.columns,)

    @property
    def registers(self) -> tuple[int, int]:
        """(registers per thread at launch, those of a consumer once the producer has released its own).

        A block has 64K registers. With one consumer half of them are enough, unless it has many sums.
        """
        many = self.columns * self.accumulators > 128
        return {1: (232 if many else 128, 0), 2: (168, 240), 3: (128, 160)}[self.consumers]


def fitted(
    consumers: int, columns: int, swapped: bool, itemsize: int, *, step: int = 0, halved: bool = False,
    **others: int,
) -> Tile:  # fmt: skip
    """A tile with as many stages as fit next to its staged output of `itemsize` bytes per element."""
    rows = 64 * consumers
    step = step or (128 if rows + columns <= 160 else 64)
    left = SHARED_BYTES - rows * columns * itemsize // (2 if halved else 1)
    stages = min(12, left // ((rows + columns) * step * 2))
    return Tile(consumers, columns, step, stages, swapped, halved=halved, **others)


@lru_cache(maxsize=64)
def _columns(tiles: tuple[Tile, ...]) -> tuple[np.ndarray, ...]:
    """What the model reads of tiles, a number per tile: its rows and columns, whether it is swapped, its
    group, the squares of the cycles of tensor cores and shared memory, and the factor of the latency."""

    def each(number: Callable[[Tile], float]) -> np.ndarray:
        return np.array([number(tile) for tile in tiles])

    tensor = each(lambda t: t.rows * t.columns / 32)
    shared = each(lambda t: SHARED_CYCLES * t.consumers * (64 * len(t.parts) + t.columns))
    return (
        each(lambda t: t.rows), each(lambda t: t.columns), each(lambda t: t.swapped), each(lambda t: t.group),
        tensor**2 + shared**2, each(lambda t: LONG_STEP if t.step == 128 else 1.0),
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
    height, width, swapped, group, squares, latency = _columns(tiles)
    m = np.array(M, dtype=np.float64)[:, None]
    rows, columns = np.where(swapped, N, m), np.where(swapped, m, N)
    tiles_m, tiles_n = tiles_of(tiles, M, N)
    outside = OUTSIDE_CYCLES * (np.maximum(height - rows, 0) + np.maximum(width - columns, 0))
    # Neighbouring programs read the same weight, which is a if the tile is swapped, and b otherwise.
    a, b = np.minimum(rows, height), np.minimum(columns, width)
    sharers = np.minimum(np.where(swapped, tiles_n, tiles_m), group)
    others = np.minimum(np.where(swapped, tiles_m, tiles_n), sms / sharers)
    lines = np.where(swapped, a, b) * sharers**-SHARING + np.where(swapped, b, a) * others**-SHARING

    def cycles(busy: float | np.ndarray) -> np.ndarray:
        l2 = lines * busy / L2_LINES_PER_CYCLE
        step = (STEP_CYCLES + STEP_CYCLES_PER_SM * busy) * latency
        return np.sqrt(squares + l2**2 + step**2) + outside

    def passed(items: np.ndarray, steps: np.ndarray | int) -> np.ndarray:
        rounds, late = np.divmod(items, sms)
        return steps * (rounds * cycles(sms) + (late > 0) * cycles(late)) / CYCLES_PER_US

    count = tiles_m * tiles_n
    if work is None:
        sm_us = passed(count, -(-K // 64))
    else:
        sm_us = sum((passed(*each) for each in work(count)), start=np.zeros_like(count))
    hbm_us = (2 * K * (m + N) + itemsize * m * N) / HBM_BYTES_PER_US
    power_us = 2 * m * N * K / FLOPS_PER_US
    return FIXED_US + (sm_us**4 + hbm_us**4 + power_us**4) ** 0.25
