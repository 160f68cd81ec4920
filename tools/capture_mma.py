# mypy: allow-untyped-defs
"""Does this GPU keep the classes `chain16` and `tree8`? Compares it with the model, bit for bit.

    python tools/capture_mma.py                       compare, category by category
    python tools/capture_mma.py --save tests/golden   and save golden vectors of its results

A tile is 64 x 64 outputs of one step (k = 16) from a given accumulator, or of a chain (k = 512) from 0. Each
is computed by two kernels, one with four warps on the whole tile, which is `wgmma` on Hopper, and one with a
warp for every 16 x 16 part, which is `mma.sync`. The inputs are drawn to exercise every rule of the model:
products around every limit (subnormal, underflow, overflow, the bits that alignment truncates), sums that
cancel, zeros of both signs, infinities, NaN with payloads, and arbitrary bits.

Eight tiles from an accumulator of 0 are the leaves of a tree. The kernels of `tree8` compute it, and must
have the bits of the tiles' own results, added as fp32 numbers on the CPU; and so must the model.

The golden vectors are a part of the tiles: the rows and columns on which wrong models, those of `CONTROLS`,
differ most. Exits with 1 if any bit differs.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from isobit.check.stamp import stamp
from isobit.frame.device import default_device
from isobit.frame.op import known_op
from isobit.numerics import LEAVES, TREE8
from isobit.numerics.mma import Step, chain
from isobit.numerics.trees import tree
from isobit.ops.det_gemm import det_gemm

SIDE = 64  # rows and columns of a tile
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

#: Options for drawing, independent of torch's default dtype and device.
DRAWN: Any = {"dtype": torch.float64, "device": "cpu"}

#: Models that are wrong in one constant; the comparison must notice them.
CONTROLS = {
    "24 bits": Step(fraction_bits=24),
    "26 bits": Step(fraction_bits=26),
    "groups of 8": Step(products=8),
    "least top -126": Step(least_top=-126),
    "least top -132": Step(least_top=-132),
    "least top -134": Step(least_top=-134),
}


@triton.jit
def _tile(a, b, c, d, K, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """d = c + a b^T for one block of one tile, in steps of 16 along k."""
    tile = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, 16)
    out = tile * SIDE * SIDE + m[:, None] * SIDE + n[None, :]
    acc = tl.load(c + out)
    for first in range(0, K, 16):
        x = tl.load(a + (tile * SIDE + m[:, None]) * K + first + k[None, :])
        y = tl.load(b + (tile * SIDE + n[None, :]) * K + first + k[:, None])
        acc = tl.dot(x, y, acc)
    tl.store(d + out, acc)


#: The two kernels: side of a program's block, and warps.
KERNELS = ((SIDE, 4), (16, 1))


def run(a: Tensor, b: Tensor, c: Tensor, device: torch.device, block: int, warps: int) -> tuple[Tensor, str]:
    """Results of tiles [T, 64, K], [T, 64, K], [T, 64, 64], and the tensor-core instruction behind them."""
    a, b, c = a.to(device), b.to(device), c.to(device)
    d = torch.full_like(c, float("nan"))
    grid = (len(a), SIDE // block, SIDE // block)
    kernel = _tile[grid](a, b, c, d, a.shape[2], SIDE, block, num_warps=warps)
    return d.cpu(), instructions(kernel.asm)


def instructions(asm: Mapping[str, Any]) -> str:
    """Names of the matrix instructions in compiled code."""
    code = "".join(str(asm[kind]) for kind in ("ptx", "amdgcn") if kind in asm)
    return ", ".join(sorted(set(re.findall(r"wgmma(?=\.mma_async)|mma\.sync|v_mfma\w+", code)))) or "unknown"


class Draw:
    """Random numbers for tiles, in float64, the same on every machine."""

    def __init__(self, seed: int):
        self.gen = torch.Generator("cpu").manual_seed(seed)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.gen, **DRAWN)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.gen, **DRAWN)

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=self.gen, device="cpu")

    def spread(self, shape: tuple[int, ...], low: int, high: int) -> Tensor:
        """Random sign and fraction, exponents uniform from low to high."""
        exponent = self.integers(low, high, shape)
        return self.sign(shape) * torch.ldexp(1 + self.uniform(*shape), exponent)

    def sign(self, shape: tuple[int, ...]) -> Tensor:
        return 1 - 2 * (self.uniform(*shape) < 0.5).double()

    def mixed(self, x: Tensor, share: float, value: float) -> Tensor:
        return torch.where(self.uniform(*x.shape) < share, value, x)

    def bits(self, x: Tensor, share: float, least: int, most: int) -> Tensor:
        """x with a share of elements replaced by bit patterns from least to most, of either sign."""
        kind = {2: torch.int16, 4: torch.int32}[x.element_size()]
        drawn = self.integers(least, most, x.shape)
        signed = torch.where(self.uniform(*x.shape) < 0.5, drawn - (1 << 8 * x.element_size() - 1), drawn)
        return torch.where(self.uniform(*x.shape) < share, signed.to(kind), x.view(kind)).view(x.dtype)


def step_tiles(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(category, a, b, c) of every step, a and b as [64, 16] rows; not yet rounded to their dtypes."""
    draw, F, C = Draw(7), (SIDE, 16), (SIDE, SIDE)
    bf16 = dtype == torch.bfloat16
    least, most, fraction = (-126, 127, 7) if bf16 else (-14, 15, 10)
    tiny = least - fraction  # exponent of the smallest subnormal
    zero, k = torch.zeros(C, **DRAWN), torch.arange(16, device="cpu")

    for c in (zero, 4 * draw.normal(*C)):
        yield "normal", draw.normal(*F), draw.normal(*F), c
    for width in (2, 8, 14, 60) if bf16 else (2, 8, 14):
        factors = draw.spread(F, -width, width), draw.spread(F, -width, width)
        yield f"exponents to {width}", *factors, draw.spread(C, -2 * width, 2 * width)
    for less in range(3, 15, 2):  # one large product in a group of small ones: tests what alignment truncates
        small = torch.full((16,), 2.0**-less, **DRAWN).masked_fill_(k == 0, 1.0)
        yield "one large", draw.spread(F, 0, 0) * small, draw.normal(*F), zero
    for e in (20, 22, 23, 24, 25, 26, 27, 28):
        yield "large c", draw.normal(*F), draw.normal(*F), draw.spread(C, e, e)

    for c in (zero, draw.spread(C, tiny - 3, least + 3)):
        yield "subnormal a", draw.spread(F, tiny, least + 1), draw.spread(F, -3, 3), c
        yield "subnormal a and b", draw.spread(F, tiny, least - 1), draw.spread(F, tiny, least - 1), c
    if bf16:
        yield "subnormal times large", draw.spread(F, tiny, least), draw.spread(F, 100, 126), zero
        for low, high in ((-70, -60), (-75, -66), (-78, -67), (-80, -60)):
            factors = draw.spread(F, low, high), draw.spread(F, low, high)
            yield "underflow", *factors, zero
            yield "underflow, c", *factors, draw.spread(C, -149, -120)
        one = (k == 3).double()
        yield "sum below 2^-149", draw.spread(F, -77, -75) * one, draw.spread(F, -77, -75), zero
        for low, high in ((61, 62), (62, 63), (60, 64), (55, 70)):
            factors = draw.spread(F, low, high), draw.spread(F, low, high)
            yield "overflow", *factors, zero
            yield "overflow, c", *factors, draw.spread(C, 120, 127)
        # Between the largest fp32 number and 2^128 there are sums that fp32 cannot represent.
        largest = draw.sign(C) * float(torch.finfo(torch.float32).max)
        yield "c is the largest", draw.spread(F, 50, 52) * one, draw.spread(F, 49, 52), largest
        yield "c overflows", draw.spread(F, 124, 126), draw.spread(F, 0, 3), draw.spread(C, 127, 127)

    def zeros() -> Tensor:
        return 0.0 * draw.sign(F)

    for c in (zero, -zero, 0.0 * draw.sign(C), draw.spread(C, -149, -126), draw.spread(C, -126, 127)):
        yield "zeros", zeros(), zeros(), c
        yield "zeros of one sign", -zeros().abs(), zeros().abs(), c
        yield "zero times any", zeros(), draw.spread(F, tiny, most - 1), c
    yield "some zeros", draw.mixed(draw.normal(*F), 0.8, 0.0), draw.mixed(draw.normal(*F), 0.8, -0.0), zero
    a = draw.mixed(draw.spread(F, tiny, most - 1), 0.9, 0.0)
    b = draw.mixed(draw.spread(F, tiny, most - 1), 0.5, -0.0)
    yield "few products", a, b, draw.spread(C, -149, 0)

    a, b = draw.normal(*F), draw.normal(*F)
    a[:, 8:], b[:, 8:] = -a[:, :8], b[:, :8]
    for c in (zero, -zero, draw.spread(C, -60, 0)):
        yield "cancel", a, b, c
    a, b = draw.normal(*F), draw.normal(*F)
    dot = a.to(dtype).double() @ b.to(dtype).double().t()
    yield "cancel with c", a, b, -dot
    yield "nearly cancel with c", a, b, -dot.float() * (1 + 2.0**-20)

    inf, nan = float("inf"), float("nan")
    for share in (0.01, 0.1):
        infinite = draw.mixed(draw.normal(*F), share, inf)
        plain, c = draw.normal(*F), draw.spread(C, -3, 3)
        either = draw.mixed(draw.mixed(c, 0.3, inf), 0.3, -inf)
        yield "inf", infinite, draw.mixed(plain, share, -inf), zero
        yield "inf of one sign", infinite.abs(), plain.abs(), zero
        yield "inf times zero", draw.mixed(zeros(), share, inf), draw.mixed(zeros(), 0.3, 1.0), zero
        yield "inf, c inf", infinite, plain, either
        yield "c inf", plain, draw.normal(*F), either
        yield "nan", draw.mixed(plain, share, nan), infinite, c
    all_ones = 0x7F80 if bf16 else 0x7C00
    plain, c = draw.normal(*F).to(dtype), draw.spread(C, -3, 3).float()
    yield "nan payloads", draw.bits(plain, 0.05, all_ones + 1, 0x7FFF), plain, c
    yield "nan payloads in c", plain, plain.flip(0), draw.bits(c, 0.5, 0x7F800001, 0x7FFFFFFF)
    any_c = draw.bits(c, 1.0, 0, 0x7FFFFFFF)
    yield "any bits", draw.bits(plain, 1.0, 0, 0x7FFF), draw.bits(plain, 1.0, 0, 0x7FFF), any_c
    finite = draw.bits(plain, 1.0, 0, all_ones - 1), draw.bits(plain, 1.0, 0, all_ones - 1)
    yield "any finite bits", *finite, draw.bits(c, 1.0, 0, 0x7F7FFFFF)


def chain_tiles(dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(category, a, b, c) of chains over k = 512 from 0."""
    draw, F, zero = Draw(8), (SIDE, 512), torch.zeros(SIDE, SIDE, **DRAWN)
    wide = 40 if dtype == torch.bfloat16 else 14
    yield "chain: normal", draw.normal(*F), draw.normal(*F), zero
    yield "chain: wide", draw.spread(F, -14, wide), draw.spread(F, -14, wide), zero
    yield "chain: positive", draw.normal(*F).abs(), draw.normal(*F).abs(), zero
    yield "chain: subnormal", draw.spread(F, -24, -10), draw.spread(F, -24, 8), zero
    inf, nan = float("inf"), float("nan")
    few = draw.mixed(draw.normal(*F), 0.001, inf), draw.mixed(draw.normal(*F), 0.001, nan)
    yield "chain: inf and nan", *few, zero
    some = draw.mixed(draw.normal(*F), 0.9, 0.0), draw.mixed(draw.normal(*F), 0.9, -0.0)
    yield "chain: zeros", *some, zero


def bits(x: Tensor) -> Tensor:
    """The raw bits, as integers."""
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


#: (category, a, b, c, d) of a tile, a and b as rows of k, c and d as raw fp32.
Tile = tuple[str, Tensor, Tensor, Tensor, Tensor]


def trees(tiles: Sequence[Tile]) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(category, a, b, d) of products in class tree8, whose leaves are eight neighbouring tiles from +0, all
    steps or all chains. d is made of what the GPU computed for the leaves. fp32 additions are the same on
    every machine, but for a NaN, which is 0x7fffffff on a GPU."""
    from_zero = [tile for tile in tiles if not bits(tile[3]).any()]
    for K in dict.fromkeys(tile[1].shape[1] for tile in from_zero):
        alike = [tile for tile in from_zero if tile[1].shape[1] == K]
        for first in range(len(alike)):
            leaves = [alike[(first + i) % len(alike)] for i in range(LEAVES)]
            sums = [leaf[4].numpy() for leaf in leaves]
            with np.errstate(all="ignore"):
                while len(sums) > 1:
                    sums = [one + other for one, other in zip(sums[::2], sums[1::2], strict=True)]
            d = np.where(np.isnan(sums[0]), np.int32(0x7FFFFFFF), sums[0].view(np.int32)).view(np.float32)
            a, b = torch.cat([leaf[1] for leaf in leaves], 1), torch.cat([leaf[2] for leaf in leaves], 1)
            yield f"tree from {leaves[0][0]!r}, K={K * LEAVES}", a, b, torch.from_numpy(d)


def tree_backends(device: torch.device) -> list[str]:
    """Those whose kernels promise tree8 on this device."""
    every = known_op("det_gemm").backends
    return [backend.name for backend in every if backend.launches and backend.numerics_on(device) == TREE8]


def run_tree(a: Tensor, b: Tensor, device: torch.device, backend: str) -> Tensor:
    """a b^T by the kernels of a backend of class tree8."""
    a, b = a.to(device), b.to(device)
    return det_gemm(a, b.t(), out_dtype=torch.float32, numerics=TREE8, backend=backend).cpu()


def compare_trees(name: str, tiles: Sequence[Tile], device: torch.device) -> tuple[int, int]:
    """How many results of class tree8 there are, and how many differ from their leaves or from the model."""
    results = wrong = 0
    for category, a, b, d in trees(tiles):
        line = f"{name} {category:24s}"
        found = {backend: run_tree(a, b, device, backend) for backend in tree_backends(device)}
        for what, c in {"model": tree(a, b.t()), **found}.items():
            differ = int((bits(c) != bits(d)).sum())
            line += f"  {what}: {differ} of {d.numel()} differ"
            results, wrong = results + d.numel(), wrong + differ
        print(line)
    return results, wrong


def telling(a: Tensor, b: Tensor, c: Tensor, d: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The rows and columns of a tile on which the controls differ most; rare differences weigh more."""
    weight = torch.zeros(d.shape, **DRAWN)
    for control in CONTROLS.values():
        wrong = (bits(chain(a, b.t(), c, like=control)) != bits(d)).double()
        weight += wrong / wrong.sum().clamp(min=1)
    rows = weight.amax(1).argsort(descending=True, stable=True)[:side].sort().values
    cols = weight[rows].amax(0).argsort(descending=True, stable=True)[:side].sort().values
    return rows, cols


def save(path: Path, tiles: Sequence[Tile], origin: dict[str, Any]) -> None:
    """Golden vectors of tiles (category, a, b, c, d) with their origin. Steps keep 8 x 8 outputs of a tile,
    chains 4 x 4, because the factors of a chain take more space than its results."""
    kept: dict[str, list[Any]] = {}
    for name, a, b, c, d in tiles:
        prefix, side = ("chain", 4) if a.shape[1] > 16 else ("step", 8)
        rows, cols = telling(a, b, c, d, side)
        parts = {"a": a[rows], "b": b[cols], "c": c[rows][:, cols], "d": d[rows][:, cols]}
        kept.setdefault(f"{prefix}_names", []).append(name)
        for key, part in parts.items():
            kept.setdefault(f"{prefix}_{key}", []).append(bits(part.contiguous()).numpy())
    arrays = {key: np.array(values) for key, values in kept.items()}
    np.savez_compressed(path, stamp=np.array(json.dumps(origin)), **arrays)  # type: ignore[arg-type]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tools/capture_mma.py")
    parser.add_argument("--save", type=Path, help="folder for golden vectors: mma_bf16.npz, mma_fp16.npz")
    folder = parser.parse_args().save
    device = default_device()
    if device.type == "cpu":
        print("no GPU here: nothing to capture", file=sys.stderr)
        return 2
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    origin = stamp(device)
    print(", ".join(f"{k} {v}" for k, v in origin.items()))
    compared = wrong = in_trees = wrong_trees = 0
    for name, dtype in DTYPES.items():
        tiles: list[Tile] = []
        for category, *inputs in [*step_tiles(dtype), *chain_tiles(dtype)]:
            a, b, c = (
                x.to(t).contiguous() for x, t in zip(inputs, (dtype, dtype, torch.float32), strict=True)
            )
            model = bits(chain(a, b.t(), c))
            line = f"{name} {category:24s}"
            for block, warps in KERNELS:
                d, instruction = run(a[None], b[None], c[None], device, block, warps)
                differ = int((bits(d[0]) != model).sum())
                line += f"  {instruction}: {differ} of {model.numel()} differ"
                compared, wrong = compared + model.numel(), wrong + differ
            print(line)
            tiles.append((category, a, b, c, d[0]))
        more, differ = compare_trees(name, tiles, device)
        in_trees, wrong_trees = in_trees + more, wrong_trees + differ
        if folder is not None:
            save(folder / f"mma_{name}.npz", tiles, origin)
    print(f"{_keeps('chain16', wrong)}: {wrong} of {compared} results differ from the model")
    print(f"{_keeps('tree8', wrong_trees)}: {wrong_trees} of {in_trees} results differ from their leaves")
    return int(wrong + wrong_trees > 0)


def _keeps(numerics: str, wrong: int) -> str:
    return f"this GPU {'does not keep' if wrong else 'keeps'} {numerics}"


if __name__ == "__main__":
    sys.exit(main())
