"""Matrix products by tiles in portable Triton: what a tile is, which program computes it, and one product.

A program computes one tile of the output, in steps of the summed dimension. The op decides which tiles there
are, and what happens to the sums.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from isobit.kernels.host import token_stream as stream
from isobit.kernels.triton.interpreter import INTERPRETED

#: Rows per segment of a sum over tokens.
SEGMENT = tl.constexpr(stream.SEGMENT)

#: Rows of tiles that are visited before the next column of tiles, so that they share operands in the cache.
GROUP = tl.constexpr(8)


class Tile(NamedTuple):
    """Rows and columns of the output, how much of the summed dimension is loaded at once, warps, and loads in
    flight."""

    rows: int
    cols: int
    k: int
    warps: int
    stages: int


def compile_options(tile: Tile) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    if torch.version.hip:
        # One shape of matrix instruction for every tile, or the tile would decide how many k share a step;
        # and one buffer, to fit a shared memory of 64 KB.
        options |= {"matrix_instr_nonkdim": 16, "num_stages": 2}
    return options


@triton.jit
def place(tiles_m, tiles_n, tile):
    """(row, column) of a tile; tiles are visited in groups of GROUP rows."""
    group = tile // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    inside = tile - group * (GROUP * tiles_n)
    return group * GROUP + inside % height, inside // height


@triton.jit
def steps(left, right, acc):
    """left [m, k] times right [k, n], added to acc by the hardware's matrix instructions over ascending k."""
    if INTERPRETED:
        # Its product of bf16 tiles is wrong (Triton 3.6 to 3.9); that of fp32 tiles is numpy's.
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit(do_not_specialize=("out", "count"))
def ones_kernel(out, count, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """`count` ones, STEP elements apart."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    one = tl.full((BLOCK,), 1.0, tl.float32).to(out.dtype.element_ty)
    tl.store(out + i.to(tl.int64) * STEP, one, mask=i < count)
