"""Tiles of products on Hopper, and a model of their time.

No sum depends on the tile, so any tile may be chosen. A model of the time in microseconds decides:

    FIXED + (SM^3 + HBM^3)^(1/3)

    SM    waves of tiles over the SMs  x  steps of 64 of k  x  the slowest of
              tensor cores     rows * columns * 128 flops, at FLOPS
              one SM's port    (rows + columns) * 128 bytes, at SM_BYTES
              all of L2        the same bytes of every busy SM, at L2_BYTES
              a step itself    STEP_US, and STEP_BUSY_US for every busy SM
    HBM   operands and output once, at HBM_BYTES

A `wgmma` reads its 64 x 16 of the left operand from shared memory however few columns it has, so n columns
take as long as max(n, 32 + n / 2) columns would at full rate.

The constants were fitted on an H200: to 81 forward cells, where the root mean square of the errors is 4.4 %,
and to tiles at 67 other shapes (tests/golden/tiles_h200.json), where it is 7.6 % over those within 25 % of
the fastest. What the model chooses there takes 1.3 % longer than the fastest tile in geometric mean, and 13 %
at worst.
"""

from dataclasses import dataclass
from functools import cached_property

SHARED_BYTES = 226 * 1024  # a block has 227 KB; barriers take some

FIXED_US = 3.1  # to launch, to fill the ring, to store the last tile
FLOPS = 5.6e6  # per microsecond, the tensor cores of one SM
SM_BYTES = 158e3  # per microsecond, into one SM
L2_BYTES = 15e6  # per microsecond, from L2 to all SMs
HBM_BYTES = 4.3e6  # per microsecond
STEP_US, STEP_BUSY_US = 0.062, 0.0004


@dataclass(frozen=True)
class Tile:
    """A program computes multipliers * 64 rows by `columns` of output, with `step` of k per stage. The last
    `rest` columns have an accumulator of their own, if the number of columns is not a power of two."""

    multipliers: int
    columns: int
    step: int
    stages: int
    swapped: bool
    group: int = 16
    accumulators: int = 1  # per multiplier: segmented sums need one for the segment and one for the total
    rest: int = 0

    @cached_property
    def rows(self) -> int:
        return 64 * self.multipliers

    @cached_property
    def step_us(self) -> tuple[float, float]:
        """Microseconds per 64 of k: a minimum, and an amount per busy SM, since they share L2."""
        bytes_ = (self.rows + self.columns) * 64 * 2
        flops = self.rows * sum(max(n, 32 + n / 2) for n in self.parts) * 64 * 2
        return max(flops / FLOPS, bytes_ / SM_BYTES), bytes_ / L2_BYTES

    @property
    def parts(self) -> tuple[int, ...]:
        """Columns of each accumulator."""
        return (self.columns - self.rest, self.rest) if self.rest else (self.columns,)

    @property
    def registers(self) -> tuple[int, int]:
        """(registers per thread at launch, those of a multiplier once the loader has released its own).

        A block has 64K registers. With one multiplier half of them are enough, unless it has many sums.
        """
        many = self.columns * self.accumulators > 128
        return {1: (232 if many else 128, 0), 2: (168, 240), 3: (128, 160)}[self.multipliers]


def fitted(
    multipliers: int, columns: int, swapped: bool, itemsize: int, *, step: int = 0, **others: int
) -> Tile:
    """A tile with as many stages as fit beside its staged output of `itemsize` bytes per element."""
    rows = 64 * multipliers
    step = step or (128 if rows + columns <= 160 else 64)
    left = SHARED_BYTES - rows * columns * itemsize
    stages = min(12, left // ((rows + columns) * step * 2))
    return Tile(multipliers, columns, step, stages, swapped, **others)


def tiles_of(tile: Tile, rows: int, columns: int) -> int:
    """How many tiles cover an output, given as rows by columns in the tile's own orientation."""
    return -(-rows // tile.rows) * -(-columns // tile.columns)


def microseconds(tile: Tile, rows: int, columns: int, K: int, sms: int, hbm_bytes: int) -> float:
    """Modelled time of a product, given as rows by columns in the tile's own orientation."""
    tiles = tiles_of(tile, rows, columns)
    busy = min(tiles, sms)
    least, each = tile.step_us
    slowest = max(least, each * busy, STEP_US + STEP_BUSY_US * busy)
    sm = -(-tiles // sms) * -(-K // 64) * slowest
    return FIXED_US + (sm**3 + (hbm_bytes / HBM_BYTES) ** 3) ** (1 / 3)
