"""The tile of a grouped product on Hopper, from sizes alone: rows, experts, N, K.

No sum depends on it. How many rows an expert has is known on the device only, so a model of the time, as in
`isobit.kernels.hopper.tiles`, expects that experts are hit at random, and that those that are hit have from
0.4 to 1.6 times as many rows as they have on average.
"""

import math
from functools import cache, lru_cache

import numpy as np

from isobit.frame.traced import decides
from isobit.kernels.hopper import tiles as model
from isobit.kernels.hopper.pipeline import gl
from isobit.kernels.hopper.tiles import Tile, fitted

#: Columns of tiles by consumer warpgroups.
_DIRECT = {1: (128, 256), 2: (128, 192, 256)}
_SWAPPED = {1: (8, 16, 32, 48, 64, 96, 128), 2: (16, 32, 64, 128)}

#: Rows of an expert, as multiples of the average.
SPREAD = (0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6)

#: Cycles of a tile beyond its steps: to round it, and to start storing it.
TILE_CYCLES = 600.0

#: How much longer a tile of one consumer takes, if rows are its rows: nothing overlaps its end. With this the
#: choices in 32 cells on an H200 were within 1.5 % of the fastest tile in geometric mean, without it 2 %.
ONE_CONSUMER = 1.05


@cache
def grouped_tiles() -> tuple[Tile, ...]:
    return tuple(
        fitted(consumers, columns, swapped, 2)
        for swapped, sizes in ((False, _DIRECT), (True, _SWAPPED))
        for consumers in sizes
        for columns in sizes[consumers]
    )


def microseconds(tile: Tile, R: int, E: int, N: int, K: int, sms: int) -> float:
    """The expected time of R rows of E experts."""
    hit = max(E * -math.expm1(-R / E), 1.0)
    rows = R / hit
    tokens, other = (tile.columns, tile.rows) if tile.swapped else (tile.rows, tile.columns)
    strips = float(np.mean([math.ceil(rows * f / tokens) for f in SPREAD]))
    tiles_n = -(-N // other)
    count = hit * strips * tiles_n
    busy = min(count, sms)
    # As there: neighbouring programs read the same weight.
    sharers = min(strips, tile.group)
    others = min(tiles_n, max(sms / sharers, 1.0))
    lines = min(other, N) * sharers**-model.SHARING + tokens * others**-model.SHARING
    tensor = tile.rows * tile.columns / 32
    shared = model.SHARED_CYCLES * tile.consumers * (64 * len(tile.parts) + tile.columns)
    l2 = lines * busy / model.L2_LINES_PER_CYCLE
    latency = model.LONG_STEP if tile.step == 128 else 1.0
    step = (model.STEP_CYCLES + model.STEP_CYCLES_PER_SM * busy) * latency
    cycles = -(-K // 64) * math.sqrt(tensor**2 + shared**2 + l2**2 + step**2) + TILE_CYCLES
    # How many strips there are is not known exactly, so neither is how full the last round is.
    sm_us = max(count / sms + 0.5, 1.0) * cycles / model.CYCLES_PER_US
    hbm_us = 2 * (hit * N * K + R * (K + N)) / model.HBM_BYTES_PER_US
    power_us = 2 * R * N * K / model.FLOPS_PER_US
    alone = ONE_CONSUMER if tile.consumers == 1 and not tile.swapped else 1.0
    return float(model.FIXED_US + (sm_us**4 + hbm_us**4 + power_us**4) ** 0.25) * alone


@lru_cache(maxsize=4096)
def choose_tile(R: int, E: int, N: int, K: int, sms: int) -> tuple[Tile, float]:
    """The tile, and the expected microseconds. Items are counted in 32 bits."""
    times = {
        tile: microseconds(tile, R, E, N, K, sms)
        for tile in grouped_tiles()
        if (R // (tile.columns if tile.swapped else tile.rows) + E + 1) * N < 2**36
    }
    tile = min(times, key=times.__getitem__)
    return tile, times[tile]


@decides
def tile_of(R: int, E: int, N: int, K: int, sms: int) -> Tile:
    return choose_tile(R, E, N, K, sms)[0]


@cache
def store_layout(width: int) -> gl.BlockedLayout:
    """How a consumer's threads store rows of a tile of this width: 16 bytes each."""
    across = min(width // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
