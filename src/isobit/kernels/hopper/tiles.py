"""Tiles of products on Hopper, and a model of their time.

No sum depends on the tile, so any tile may be chosen. A model of the time in microseconds decides:

    FIXED_US + (SM^3 + HBM^3)^(1/3)

    SM    waves of tiles over the SMs  x  steps of 64 of k  x  the slowest of
              tensor cores     rows * columns * 128 flops, at FLOPS_PER_US
              one SM's port    (rows + columns) * 128 bytes, at SM_BYTES_PER_US
              all of L2        the same bytes of every busy SM, at L2_BYTES_PER_US
              a step itself    STEP_US, and STEP_US_PER_SM for every busy SM
    HBM   operands and output once, at HBM_BYTES_PER_US

A `wgmma` reads its 64 x 16 of the left operand from shared memory however few columns it has, so n columns
take as long as max(n, 32 + n / 2) columns would at full rate.

The constants were fitted on an H200: to 81 forward cells, where the root mean square of the errors is 4.4 %,
and to tiles at 67 other shapes (tests/golden/tiles_h200.json), where it is 7.6 % over those within 25 % of
the fastest. What the model chooses there takes 1.3 % longer than the fastest tile in geometric mean, and 13 %
at worst.
"""

from dataclasses import dataclass
from functools import cached_property

#: Shared memory for stages and staged output: a block has 227 KB, and barriers take some.
SHARED_BYTES = 226 * 1024

#: To launch, to fill the ring, and to store the last tile.
FIXED_US = 3.1
#: The tensor cores of one SM.
FLOPS_PER_US = 5.6e6
#: From L2 into one SM.
SM_BYTES_PER_US = 158e3
#: From L2 to all SMs.
L2_BYTES_PER_US = 15e6
#: From memory.
HBM_BYTES_PER_US = 4.3e6
#: A step of k takes at least this long.
STEP_US = 0.062
#: And this much longer for every busy SM.
STEP_US_PER_SM = 0.0004


@dataclass(frozen=True)
class Tile:
    """A program computes consumers * 64 rows by `columns` of output, with `step` of k per stage. The last
    `rest` columns have an accumulator of their own, if the number of columns is not a power of two."""

    consumers: int
    columns: int
    step: int
    stages: int
    swapped: bool
    group: int = 16
    accumulators: int = 1  # per consumer: segmented sums need one for the segment and one for the total
    rest: int = 0

    @cached_property
    def rows(self) -> int:
        return 64 * self.consumers

    @cached_property
    def step_us(self) -> tuple[float, float]:
        """Microseconds per 64 of k: a minimum, and an amount per busy SM, since they share L2."""
        bytes_ = (self.rows + self.columns) * 64 * 2
        flops = self.rows * sum(max(n, 32 + n / 2) for n in self.parts) * 64 * 2
        return max(flops / FLOPS_PER_US, bytes_ / SM_BYTES_PER_US), bytes_ / L2_BYTES_PER_US

    @property
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
    consumers: int, columns: int, swapped: bool, itemsize: int, *, step: int = 0, **others: int
) -> Tile:
    """A tile with as many stages as fit next to its staged output of `itemsize` bytes per element."""
    rows = 64 * consumers
    step = step or (128 if rows + columns <= 160 else 64)
    left = SHARED_BYTES - rows * columns * itemsize
    stages = min(12, left // ((rows + columns) * step * 2))
    return Tile(consumers, columns, step, stages, swapped, **others)


def tiles_of(tile: Tile, rows: int, columns: int) -> int:
    """How many tiles cover an output, given as rows by columns in the tile's own orientation."""
    return -(-rows // tile.rows) * -(-columns // tile.columns)


def microseconds(tile: Tile, rows: int, columns: int, K: int, sms: int, hbm_bytes: int) -> float:
    """Modelled time of a product, given as rows by columns in the tile's own orientation."""
    tiles = tiles_of(tile, rows, columns)
    busy = min(tiles, sms)
    least, each = tile.step_us
    step_us = max(least, each * busy, STEP_US + STEP_US_PER_SM * busy)
    sm_us = -(-tiles // sms) * -(-K // 64) * step_us
    return FIXED_US + (sm_us**3 + (hbm_bytes / HBM_BYTES_PER_US) ** 3) ** (1 / 3)
