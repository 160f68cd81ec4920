"""The arithmetic of class lse/8x4 in numpy, operation by operation: row states of splits, their merge, and
d-logits. Models of `linear_logp` and `logp` are made of it, and kernels are compared with it.

It is the arithmetic of lse/1 (`isobit.kernels.hopper.lse`) on other splits. c = log2(e) / temperature is one
number for every row. What one operation of the device does is a parameter.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from isobit.kernels.host.vocab_shards import TILE, Shards
from isobit.numerics.cpu_steps import fused

Array = np.ndarray

F32 = np.float32
INF = F32(np.inf)
LN2 = F32(0.6931471805599453)


class Arithmetic(NamedTuple):
    """The operations of a device, on fp32 arrays."""

    fma: Callable[[Array, Any, Array], Array]
    exp2: Callable[[Array], Array]
    log2: Callable[[Array], Array]


CPU = Arithmetic(fused, np.exp2, np.log2)


def _finite(m: Array) -> Array:
    return np.where(np.isinf(m), F32(0), m)


def _moved(m: Array, s: Array, t: Array, base: Array, c: Array, do: Arithmetic) -> tuple[Array, Array]:
    """(factor, t) of sums that move from their own maximum to `base`."""
    d = _finite(m) * c - base
    r = np.where(m == -INF, F32(0), do.exp2(d))
    return r, np.where(r == 0, F32(0), r * do.fma(d, s, t))


def _lane_sums(x: Array) -> Array:
    """[N, 32, 4, 2] -> [N, 4]: the two of a pair, then one pair after another."""
    pairs = x[..., 0] + x[..., 1]
    total = pairs[:, 0]
    for i in range(1, pairs.shape[1]):
        total = total + pairs[:, i]
    return np.asarray(total)


def _split(z: Array, c: Array, do: Arithmetic) -> Array:
    """[3, N]: (m, s, t) of a split, z [N, whole tiles], c [N]."""
    N, each = len(z), c[:, None]
    m, s, t = np.full((N, 4), -INF), np.zeros((N, 4), F32), np.zeros((N, 4), F32)
    for first in range(0, z.shape[1], TILE):
        tile = np.ascontiguousarray(z[:, first : first + TILE]).reshape(N, TILE // 8, 4, 2)
        top = np.maximum(m, tile.max(axis=(1, 3)))
        base = _finite(top) * each
        u = do.fma(tile, each[..., None, None], -base[:, None, :, None])
        e = do.exp2(u)
        r, t = _moved(m, s, t, base, each, do)
        t = t + _lane_sums(e * np.maximum(u, F32(-1000)))
        s = do.fma(s, r, _lane_sums(e))
        m = top
    top = m.max(1)
    r, t = _moved(m, s, t, (_finite(top) * c)[:, None], each, do)
    s = s * r
    return np.stack((top, *((x[:, 0] + x[:, 2]) + (x[:, 1] + x[:, 3]) for x in (s, t))))


def split_states(z: Array, c: Array, cut: Shards, do: Arithmetic = CPU) -> Array:
    """[splits, 3, N]: (m, s, t) of the splits that are here, of fp32 logits z [N, columns] of their
    shards."""
    out = np.zeros((cut.splits, 3, len(z)), F32)
    out[:, 0] = -INF
    with np.errstate(all="ignore"):  # infinities and NaN are valid
        for i, (first, end) in enumerate(cut.split_bounds()):
            if first < end:
                whole = np.full((len(z), -(-(end - first) // TILE) * TILE), -INF)
                whole[:, : end - first] = z[:, first:end]
                out[i] = _split(whole, c, do)
    return out


class Merged(NamedTuple):
    """What follows from the states of a row: sums, each [N]; s relative to m c, rounded."""

    m: Array
    s: Array
    t: Array
    c: Array
    do: Arithmetic

    @property
    def base(self) -> Array:
        return self.m * self.c

    def logp(self, z: Array) -> Array:
        """Of the logit z of the row's token."""
        value = (self.do.fma(z, self.c, -self.base) - self.do.log2(self.s)) * LN2
        return np.where(self.m == INF, F32(np.nan), value)

    def lse(self) -> Array:
        return np.asarray((self.base + self.do.log2(self.s)) * LN2)

    def entropy(self) -> Array:
        value = (self.do.log2(self.s) - self.t / self.s) * LN2
        return np.where(self.m == INF, F32(np.nan), value)

    def stats(self, factor: float) -> Array:
        """[2, N]: the maximum times a factor on all logits, and s relative to the maximum itself."""
        return np.stack(
            (self.m * F32(factor), self.s * self.do.exp2(-self.do.fma(self.m, self.c, -self.base)))
        )


def merge(states: Array, c: Array, do: Arithmetic = CPU) -> Merged:
    """The splits [splits, 3, N] of rows, in ascending order."""
    N = states.shape[-1]
    m, s, t = np.full(N, -INF), np.zeros(N, F32), np.zeros(N, F32)
    for m1, s1, t1 in states:
        top = np.maximum(m, m1)
        base = _finite(top) * c
        r, t = _moved(m, s, t, base, c, do)
        r1, t1 = _moved(m1, s1, t1, base, c, do)
        m, s, t = top, do.fma(s, r, s1 * r1), t + t1
    return Merged(m, s, t, c, do)


class Weights(NamedTuple):
    """The numbers of a row that turn its logits into gradients: see `dlogits`."""

    base: Array
    a: Array
    b: Array
    g: Array


def weights(
    stats: Array, entropy: Array | None, dlogp: Array | None, dentropy: Array | None, dlse: Array | None,
    c: Array, factor: float, do: Arithmetic = CPU,
) -> Weights:  # fmt: skip
    """From the stats [2, N] of the forward and the gradients of its results."""
    m = stats[0] / F32(factor)
    base = m * c
    s = stats[1] * do.exp2(do.fma(m, c, -base))
    g = np.zeros_like(base) if dlogp is None else dlogp
    a, b = -g, np.zeros_like(base)
    if dlse is not None:
        a = a + dlse
    if dentropy is not None:
        assert entropy is not None
        b = -dentropy
        a = a + b * (entropy - do.log2(s) * LN2)
    slope = c * LN2
    return Weights(base, a * slope / s, b * LN2 * slope / s, g * slope)


def dlogits(z: Array, tokens: Array, w: Weights, c: Array, entropy: bool, do: Arithmetic = CPU) -> Array:
    """fp32 gradients of logits z [N, columns], before they are rounded; tokens count from the first of these
    columns, and may be outside."""
    base, a, b, g = (x[:, None] for x in w)
    u = do.fma(z, c[:, None], -base)
    dz = do.exp2(u) * (do.fma(np.maximum(u, F32(-1000)), b, a) if entropy else a)
    hit = np.arange(z.shape[1]) == tokens[:, None]
    return np.where(hit, dz + g, dz)
