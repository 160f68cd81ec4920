"""Digests of bits: one 64-bit number for each token, so that two runs of a whole model can be compared
without keeping a tensor of either.

    digest = sum over j of bits(x_j) * w_j   modulo 2^64

The weights w are odd pseudo-random numbers. Integer sums are exact in any order, so a digest depends on the
bits alone. One changed element always changes it; several do so except with a probability of about 2^-48.
"""

from functools import lru_cache

import torch
from torch import Tensor

#: Elements at a time: what is converted to int64 takes four times the memory of bf16.
ELEMENTS = 1 << 22

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@lru_cache(maxsize=64)
def weights(count: int, seed: int = 0) -> Tensor:
    """[count] odd numbers. Those of the sizes of a model are kept; of lengths of a cache there are as many as
    decoded tokens."""
    made = torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(seed))
    return made * 2 + 1


def of_rows(x: Tensor) -> Tensor:
    """[N] digests of the rows of [N, ...], on the CPU."""
    flat = x.reshape(len(x), -1)
    w = weights(flat.shape[1]).to(x.device)
    words = _WORDS[x.element_size()]
    step = max(1, ELEMENTS // max(1, flat.shape[1]))
    parts = [
        (rows.contiguous().view(words).to(torch.int64) * w).sum(1)
        for rows in flat.split(step)
    ]  # fmt: skip
    return torch.cat(parts).cpu() if parts else torch.zeros(0, dtype=torch.int64)


def combined(digests: list[Tensor], count: int) -> Tensor:
    """[N] digests of several tensors of the same tokens."""
    total = torch.zeros(count, dtype=torch.int64)
    for digest, w in zip(digests, weights(len(digests), 1).tolist(), strict=True):
        total = total + digest * w
    return total


def of_prefixes(digests: Tensor, first: Tensor) -> Tensor:
    """[N] digests of everything from first[n] up to n: the keys that token n reads."""
    sums = torch.cat((torch.zeros(1, dtype=torch.int64), (digests * weights(len(digests), 2)).cumsum(0)))
    return sums[1:] - sums[first]
