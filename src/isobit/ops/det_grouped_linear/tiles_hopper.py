"""The tile of a grouped product on Hopper, from sizes alone: rows, experts, N, K.

No sum depends on it. How many rows an expert has is known on the device only, so a model of the time expects
that experts are hit at random, and that those that are hit have from 0.4 to 1.6 times as many rows as they
have on average.

The model is that of `isobit.kernels.hopper.tiles` in an earlier form, in which a step has a fixed latency and
reads shared memory at a rate of its own. Its constants were fitted on an H200 to products; with them the
choices in 32 cells of grouped ones were within 1.5 % of the fastest tile in geometric mean.
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np

from isobit.frame.traced import decides
from isobit.kernels.hopper.pipeline import gl
from isobit.kernels.hopper.tiles import Tile, fitted

#: Columns of tiles by consumer warpgroups.
_DIRECT = {1: (128, 256), 2: (128, 192, 256)}
_SWAPPED = {1: (8, 16, 32, 48, 64, 96, 128), 2: (16, 32, 64, 128)}

#: Rows of an expert, as multiples of the average.
SPREAD = (0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6)
_SPREAD = np.array(SPREAD)

#: Cycles of a tile beyond its steps: to round it, and to start storing it.
TILE_CYCLES = 600.0

#: How much longer a tile of one consumer takes, if rows are its rows: nothing overlaps its end. Without this
#: the choices were within 2 %.
ONE_CONSUMER = 1.05

#: To launch, to fill the ring, and to store the last tile.
FIXED_US = 2.59
#: From memory.
HBM_BYTES_PER_US = 3.83e6
#: Of all SMs. The GPU lowers its clock before a long product is faster.
FLOPS_PER_US = 7.13e8
CYCLES_PER_US = 1830
#: Per line of 128 bytes that `wgmma` reads, and that busy SMs read from L2 in a cycle.
SHARED_CYCLES = 0.588
L2_LINES_PER_CYCLE = 115.4
SHARING = 0.1135
#: Of a step, for every busy SM, and how many times that a step of 128 has.
STEP_CYCLES = 55.1
STEP_CYCLES_PER_SM = 0.255
LONG_STEP = 1.648


@cache
def grouped_tiles() -> tuple[Tile, ...]:
    return tuple(
        fitted(consumers, columns, swapped, 2, group=16)
        for swapped, sizes in ((False, _DIRECT), (True, _SWAPPED))
        for consumers in sizes
        for columns in sizes[consumers]
    )


@cache
def _columns() -> tuple[np.ndarray, ...]:
    """What the model reads of tiles, a number per tile: the tokens and outputs it covers, its group, the
    squares of the cycles of tensor cores and shared memory, and factors of the latency and of the whole."""

    def each(number: Callable[[Tile], float]) -> np.ndarray:
        return np.array([number(tile) for tile in grouped_tiles()])

    tensor = each(lambda t: t.rows * t.columns / 32)
    shared = each(lambda t: SHARED_CYCLES * t.consumers * (64 * len(t.parts) + t.columns))
    return (
        each(lambda t: t.columns if t.swapped else t.rows),
        each(lambda t: t.rows if t.swapped else t.columns),
        each(lambda t: t.group),
        tensor**2 + shared**2,
        each(lambda t: LONG_STEP if t.step == 128 else 1.0),
        each(lambda t: ONE_CONSUMER if t.consumers == 1 and not t.swapped else 1.0),
    )  # fmt: skip


def microseconds(R: int, E: int, N: int, K: int, sms: int) -> np.ndarray:
    """The expected times of R rows of E experts, one for each tile. Infinite where items, which are counted
    in 32 bits, are too many."""
    tokens, other, group, squares, latency, alone = _columns()
    hit = max(E * -math.expm1(-R / E), 1.0)
    strips = np.ceil(np.multiply.outer(_SPREAD, R / hit / tokens)).sum(0) / len(SPREAD)
    tiles_n = np.ceil(N / other)
    count = hit * strips * tiles_n
    busy = np.minimum(count, sms)
    # As there: neighbouring programs read the same weight.
    sharers = np.minimum(strips, group)
    others = np.minimum(tiles_n, np.maximum(sms / sharers, 1.0))
    lines = np.minimum(other, N) * sharers**-SHARING + tokens * others**-SHARING
    l2 = lines * busy / L2_LINES_PER_CYCLE
    step = (STEP_CYCLES + STEP_CYCLES_PER_SM * busy) * latency
    cycles = -(-K // 64) * np.sqrt(squares + l2 * l2 + step * step) + TILE_CYCLES
    # How many strips there are is not known exactly, so neither is how full the last round is.
    sm_us = np.maximum(count / sms + 0.5, 1.0) * cycles / CYCLES_PER_US
    hbm_us = 2 * (hit * N * K + R * (K + N)) / HBM_BYTES_PER_US
    power_us = 2 * R * N * K / FLOPS_PER_US
    times = (FIXED_US + (sm_us**4 + (hbm_us**4 + power_us**4)) ** 0.25) * alone
    return np.where((R // tokens + E + 1) * N < 2**36, times, np.inf)


@lru_cache(maxsize=4096)
def choose_tile(R: int, E: int, N: int, K: int, sms: int) -> tuple[Tile, float]:
    """The tile, and the expected microseconds."""
    times = microseconds(R, E, N, K, sms)
    best = int(times.argmin())
    return grouped_tiles()[best], float(times[best])


@decides
def tile_of(R: int, E: int, N: int, K: int, sms: int) -> Tile:
    """That of R rounded up to five bits: R is new with every batch, and its neighbours are known."""
    low = max(R.bit_length() - 5, 0)
    return choose_tile(-(-R >> low) << low, E, N, K, sms)[0]


@cache
def store_layout(width: int) -> gl.BlockedLayout:
    """How a consumer's threads store rows of a tile of this width: 16 bytes each."""
    across = min(width // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
