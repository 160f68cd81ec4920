"""The arithmetic of Hopper's tensor cores on a CPU, bit for bit: the definition of `chain16` and `seg16/512`.

One step takes 16 products of bf16 or fp16 factors and an fp32 accumulator c:

    e(x)   the exponent of a factor, not below its format's least normal one (bf16 -126, fp16 -14)
    e_i    e(a_i) + e(b_i), the exponent of a product; the product is not normalised. None for a product of 0
    e_c    the exponent of c, not below -126. None if c is 0
    top    the largest of all e_i, e_c and -133
    q      sum over the 17 terms of trunc(term * 2^(25 - top)): exact integers, each truncated
    c'     q * 2^(top - 25), rounded toward zero to fp32

A c' of 0 is +0, whatever the signs of the terms, also if a negative sum is truncated to 0. 2^128 and more is
an infinity. NaN, or infinities of both signs, or 0 times an infinity among the terms give the one NaN
0x7fffffff. The order of the 17 terms does not matter: they are integers. A step of 16 zeros does not change
the result of another step, since that is never -0.

A term is less than 2^27 and there are 17, so float64 holds every q exactly. It also holds every product of
two factors and every power of two in use. So the model is plain float64: multiply, scale, truncate, add.
Infinities and NaN need no special treatment. Outputs are computed in blocks that stay in a core's cache. All
of this was measured: see docs/numerics.md, and `tools/capture_mma.py` to measure again.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isobit.frame.contract import ContractError, describe

#: Exponent of the smallest normal number: subnormal factors are treated as if they had it.
_LEAST = {torch.bfloat16: -126, torch.float16: -14}

#: The exponent of zero: far below any floor, and so is its sum with another exponent.
_NO_EXPONENT = -1000

#: Outputs computed at once: their float64 products, 16 each, are 1 MB and stay in a core's cache.
_HEIGHT, _WIDTH = 32, 256

#: Depth of k whose factors are held in float64 at once, a multiple of every group: this limits memory.
_DEPTH = 1024


@dataclass(frozen=True)
class Step:
    """The constants of a tensor-core step. Values other than Hopper's serve as controls that must differ."""

    products: int = 16
    fraction_bits: int = 25
    least_top: int = -133


HOPPER = Step()


def chain(a: Tensor, b: Tensor, c: Tensor | None = None, *, like: Step = HOPPER) -> Tensor:
    """The fp32 product a @ b as one chain of steps over ascending k, starting from c.

    Args:
        a: [M, K], bf16 or fp16, on the CPU, any strides.
        b: [K, N], of the same dtype. K need not be a multiple of 16: the last group is padded with zeros.
        c: [M, N] fp32, the accumulator before the first step; +0 if None.
        like: the constants of a step.

    Returns:
        [M, N] fp32. With K = 0 there is no step, and this is a copy of c.

    Example:
        >>> import torch
        >>> a = torch.tensor([[2.0**12, 1.0, -(2.0**12)]]).bfloat16()  # 2^24 + 1 - 2^24, exact ...
        >>> chain(a, a.abs().t()).item()
        1.0
        >>> chain(a * 4, (a * 4).abs().t(), torch.tensor([[2.0**30]])).item()  # ... and cut to 2^30's bits
        1073741824.0
    """
    _check(a, b, c)
    out = _zeros(a, b) if c is None else c.detach().clone()
    for k in range(0, a.shape[1], _DEPTH):  # the accumulator is carried over
        left, right = _factors(a[:, k : k + _DEPTH].t(), like), _factors(b[k : k + _DEPTH], like)
        for m in range(0, a.shape[0], _HEIGHT):
            for n in range(0, b.shape[1], _WIDTH):
                rows, cols = slice(m, m + _HEIGHT), slice(n, n + _WIDTH)
                a_block = [x[..., rows, None] for x in left]
                b_block = [x[..., None, cols] for x in right]
                out[rows, cols] = torch.from_numpy(_steps(a_block, b_block, out[rows, cols].numpy(), like))
    return canonical(out) if a.shape[1] else out


def step(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """One tensor-core step: a [M, K] times b [K, N] plus c [M, N], with K at most 16."""
    if a.ndim == 2 and a.shape[1] > HOPPER.products:
        raise ContractError(f"step(a: {describe(a)}): one step takes at most 16 k; use chain")
    return chain(a, b, c)


def segments(
    a: Tensor,
    b: Tensor,
    bounds: Iterable[tuple[int, int]],
    init: Tensor | None = None,
    *,
    like: Step = HOPPER,
) -> Tensor:
    """The fp32 product a @ b as a fresh chain for every segment of k, folded in the given order.

    Args:
        a: [M, K], bf16 or fp16, on the CPU, any strides.
        b: [K, N], of the same dtype.
        bounds: (first, end) of every segment, in the order of the fold; see `cut`.
        init: [M, N] fp32, the initial value of the fold; +0 if None.
        like: the constants of a step.

    Returns:
        [M, N] fp32: ((init + chain_0) + chain_1) + ..., each addition rounded to nearest even.

    Example:
        >>> import torch
        >>> x = torch.ones(1, 700).bfloat16()
        >>> segments(x, x.t(), cut([700], 512)).item()
        700.0
    """
    _check(a, b, init)
    out = _zeros(a, b) if init is None else init.detach().clone()
    for first, end in bounds:
        if not 0 <= first <= end <= a.shape[1]:
            raise ContractError(f"segments(bounds: ({first}, {end})): must lie in [0, {a.shape[1]}]")
        out = canonical(out + chain(a[:, first:end], b[first:end], like=like))
    return out


def cut(lengths: Iterable[int], size: int) -> list[tuple[int, int]]:
    """Bounds of segments of `size`, starting again at every sequence of these lengths.

    Example:
        >>> cut([700, 3], 512)
        [(0, 512), (512, 700), (700, 703)]
    """
    bounds, start = [], 0
    for length in lengths:
        end = start + length
        bounds += [(k, min(k + size, end)) for k in range(start, end, size)]
        start = end
    return bounds


def canonical(x: Tensor) -> Tensor:
    """fp32 with every NaN as 0x7fffffff, the only one that Hopper's arithmetic makes. In place."""
    x.view(torch.int32).masked_fill_(x.isnan(), 0x7FFFFFFF)
    return x


def _zeros(a: Tensor, b: Tensor) -> Tensor:
    """The initial value of a product, independent of torch's default dtype and device."""
    return torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device="cpu")


def _steps(left: list[np.ndarray], right: list[np.ndarray], c: np.ndarray, like: Step) -> np.ndarray:
    """All steps for one block of outputs. `left` and `right` are values and exponents, shaped to broadcast to
    [groups, products, rows, columns]. The accumulator is kept in float64, but is always an fp32 number."""
    with np.errstate(invalid="ignore", over="ignore"):  # infinities and NaN are valid results
        acc = c.astype(np.float64)
        for a, ea, b, eb in zip(left[0], left[1], right[0], right[1], strict=True):
            top = np.maximum(np.maximum.reduce(ea + eb, 0), _exponent(acc, -126))
            shift = like.fraction_bits - np.maximum(top, like.least_top)
            terms = a * b
            terms *= _power_of_two(shift)
            q = np.add.reduce(np.trunc(terms, out=terms), 0) + np.trunc(acc * _power_of_two(shift))
            acc = _toward_zero(q * _power_of_two(-shift)) + 0.0  # -0 becomes +0
        return acc.astype(np.float32)


def _factors(x: Tensor, like: Step) -> tuple[np.ndarray, np.ndarray]:
    """Values and exponents of factors [K, R], as [groups, products, R] padded with zeros at the end of k."""
    K, R = x.shape
    groups = -(-K // like.products)
    flat = np.zeros((groups * like.products, R))
    flat[:K] = x.detach().double().numpy()
    values = flat.reshape(groups, like.products, R)
    return values, _exponent(values, _LEAST[x.dtype])


def _exponent(x: np.ndarray, least: int) -> np.ndarray:
    """Exponents of float64 numbers, not below `least`; `_NO_EXPONENT` for 0. 128 for infinities and NaN, one
    more than any fp32 number has: it only matters that powers of two around it exist."""
    biased = (x.view(np.int64) >> 52 & 0x7FF).astype(np.int16)
    return np.where(x == 0, np.int16(_NO_EXPONENT), np.clip(biased - 1023, least, 128).astype(np.int16))


def _power_of_two(e: np.ndarray) -> np.ndarray:
    """2^e in float64, for exponents in its normal range."""
    return (e.astype(np.int64) + 1023 << 52).view(np.float64)


def _toward_zero(x: np.ndarray) -> np.ndarray:
    """float64 numbers truncated to fp32 precision, and to infinities beyond its range."""
    size = np.abs(x)
    normal = (x.view(np.int64) & ~((1 << 29) - 1)).view(np.float64)  # fp32 keeps 23 of 52 fraction bits
    subnormal = np.trunc(x * 2.0**149) * 2.0**-149
    return np.where(size < 2.0**-126, subnormal, np.where(size < 2.0**128, normal, x * np.inf))


def _check(a: Tensor, b: Tensor, c: Tensor | None) -> None:
    """The rules of a product, worded like those of the ops."""
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in _LEAST:
            raise ContractError(f"chain({name}: {describe(x)}): dtype must be bf16 or fp16")
        if x.ndim != 2 or x.device.type != "cpu":
            raise ContractError(
                f"chain({name}: {describe(x)}): must be a matrix on the CPU, is on {x.device}"
            )
    if a.dtype != b.dtype or a.shape[1] != b.shape[0]:
        raise ContractError(f"chain(b: {describe(b)}): does not fit a: {describe(a)}")
    if c is not None and (c.dtype != torch.float32 or c.shape != (a.shape[0], b.shape[1])):
        raise ContractError(f"chain(c: {describe(c)}): must be [{a.shape[0]}, {b.shape[1]}] fp32")
