"""The gradients of the class gdr/1/cpu once more, from its page and without the code of its model: row by
row. A program that writes their golden vectors:

    PYTHONPATH=src python tests/gated_delta_gradients_by_hand.py

Arguments are drawn again from raw numbers, which numpy keeps for all versions, so results alone are stored.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from gated_delta_by_hand import F32, Array, Chunk, chain, exp2, halved, of_chunk, root, rounded

GOLDEN = Path(__file__).parent / "golden" / "gdr_gradients_cpu.npz"


class Case(NamedTuple):
    """One key head with `heads` value heads, and an initial state. `full` has a gate, normalized q and k, and
    a gradient of the last state."""

    dtype: torch.dtype
    heads: int
    K: int
    V: int
    full: bool
    T: int = 70
    scale: float = 0.3


#: Two tiles of features, two tiles of columns of v, and without all that can be left out.
CASES = {
    "fp16": Case(torch.float16, 3, 80, 16, True),
    "bf16": Case(torch.bfloat16, 1, 16, 80, True),
    "bare": Case(torch.bfloat16, 1, 16, 16, False),
}

#: With one seed in thirty, results in 16 bits show both the order of the sum in the gradient of a norm and
#: where dv_new is rounded to fp32.
SEED = 4


def tiles(x: Array) -> list[Any]:
    """The sums of tiles of 64, zeros beyond the end."""
    wide = np.concatenate((x, np.zeros(-len(x) % 64, F32)))
    return [halved(wide[first : first + 64]) for first in range(0, len(x), 64)]


def total(x: Array) -> Any:
    out = F32(0.0)
    for part in tiles(x):
        out = out + part
    return out


def states(case: Case, c: Chunk, q: Array, k: Array, do: Array, D: Array) -> tuple[Array, Array]:
    """Step 8: (dv_new, D of the chunk before)."""
    dtype, scale, none, rows = case.dtype, F32(case.scale), np.zeros(case.V, F32), len(q)

    def of_features(left: Array, right: Array) -> Array:
        """left^T right, chains over rows."""
        return np.array([chain(column, right, none) for column in left.T])

    narrow, last = rounded(D, dtype), c.g2[-1]
    dv_new = np.empty((rows, case.V), F32)
    for j in range(rows):
        p = rounded(chain(c.P[:, j], do, none) * scale, dtype)
        X = chain(k[j], narrow, none) * exp2(last - c.g2[j])
        dv_new[j] = rounded(X + p, dtype)
    D = D * exp2(last)
    if case.full:
        y = np.array([do[i] * (exp2(c.g2[i]) * scale) for i in range(rows)])
        high = rounded(y, dtype)
        D = D + of_features(q, high)
        D = D + of_features(q, rounded(y - high, dtype))
    else:
        D = D + of_features(q, do) * scale
    return dv_new, D - of_features(c.w, dv_new)


class Parts(NamedTuple):
    """Of a chunk and value head, in fp32: what its key head adds up, and gradients. D is that of the chunk
    before."""

    dq: Array
    m: Array
    y: Array
    dv: Array
    dg: Array
    dbeta: Array
    D: Array


def of_head(case: Case, c: Chunk, q: Array, k: Array, v: Array, beta: Array, do: Array, D: Array) -> Parts:
    """Steps 8 to 15, for the rows of a chunk and one value head; q and k are normalized."""
    dtype, scale, rows = case.dtype, F32(case.scale), len(v)
    dv_new, before = states(case, c, q, k, do, D)
    D, T = rounded(D, dtype), rounded(c.T, dtype)
    none, last = np.zeros(case.V, F32), c.g2[-1]
    wide = [chain(T[:, i], dv_new, none) for i in range(rows)]
    dv = np.array([rounded(beta[i] * wide[i], dtype) for i in range(rows)])
    dr = np.array([rounded(x, dtype) for x in wide])
    dS, N, M = (np.zeros((rows, rows), F32) for _ in range(3))
    for i in range(rows):
        for_i = np.zeros(i + 1, F32)
        d = c.d[i, : i + 1]
        dS[i, : i + 1] = rounded(chain(do[i], c.new[: i + 1].T, for_i) * d, dtype)
        N[i, :i] = (-chain(dr[i], c.new[: i + 1].T, for_i) * d)[:i]
        M[i] = rounded(N[i] * beta[i], dtype)
    none = np.zeros(case.K, F32)
    dq, m, y, y_prime, z = [], [], [], [], []
    for i in range(rows):
        x = chain(do[i], c.h.T, none) * exp2(c.g2[i])
        dq.append(chain(dS[i], k, x) * scale)
        z.append(chain(dr[i], c.h.T, none))
        begun = -(z[i] * (beta[i] * exp2(c.g2[i])))
        m.append(chain(M[:, i], k, chain(M[i], k, begun)))
        y.append(chain(c.new[i], D.T, none) * exp2(last - c.g2[i]))
        y_prime.append(y[i] + chain(dS[:, i], q, none) * scale)
    dbeta, dG, kk = [], [], c.kk[:, :rows]
    for i in range(rows):
        cs = [exp2(c.g2[i]) * part for part in tiles(k[i] * z[i])]
        b = total(wide[i] * v[i]) + total(N[i] * kk[i])
        G = total(M[i] * kk[i]) - total(M[:, i] * kk[:, i])
        for part_c, part_q, part_k in zip(cs, tiles(q[i] * dq[i]), tiles(k[i] * y_prime[i]), strict=True):
            b = b - part_c
            G = G + (part_q - part_k - beta[i] * part_c)
        dbeta.append(b)
        dG.append(G)
    of_rows = np.array([tiles(k[i] * y[i]) for i in range(rows)])  # [rows, tiles]
    of_features = tiles(np.array([total(c.h[f] * D[f]) for f in range(case.K)]))
    running = F32(0.0)
    for tile, of_state in enumerate(of_features):
        running = running + (total(of_rows[:, tile]) + exp2(last) * of_state)
    dg = np.zeros(rows, F32)
    for i in reversed(range(rows)):
        running = running + dG[i]
        dg[i] = running
    return Parts(np.array(dq), np.array(m), np.array(y_prime), dv, dg, np.array(dbeta), before)


def through_norm(x: Array, dx: Array) -> Array:
    """Step 13 of one row."""
    r = root(x)
    n = x * r
    return (dx - n * halved(n * dx)) * r


def by_hand(case: Case, args: dict[str, Array]) -> dict[str, Array]:
    """Gradients of q, k [T, K] and of v, g if there is one, beta and the initial state, [heads, ...]."""
    dtype, T = case.dtype, case.T
    q, k = args["q"], args["k"]
    if case.full:
        q, k = (np.array([rounded(row * root(row), dtype) for row in x]) for x in (q, k))
    dq, dk = np.zeros((T, case.K), F32), np.zeros((T, case.K), F32)
    dv, dg, dbeta, dh0 = [], [], [], []
    for head in range(case.heads):
        v, g, beta, do = (args[n][head] for n in ("v", "g", "beta", "do"))
        chunks = [slice(first, min(first + 64, T)) for first in range(0, T, 64)]
        S, D, forward, parts = args["h0"][head], args["dht"][head], [], []
        for here in chunks:
            c = of_chunk(q[here], k[here], v[here], g[here], beta[here], S, case.scale, dtype)
            S = c.end
            forward.append(c)
        for here, c in zip(reversed(chunks), reversed(forward), strict=True):
            parts.append(of_head(case, c, q[here], k[here], v[here], beta[here], do[here], D))
            D = parts[-1].D
        parts.reverse()
        dq += np.concatenate([p.dq for p in parts])
        dk += np.concatenate([p.m for p in parts])
        dk += np.concatenate([p.y for p in parts])
        for out, name in ((dv, "dv"), (dg, "dg"), (dbeta, "dbeta")):
            out.append(np.concatenate([getattr(p, name) for p in parts]))
        dh0.append(D)
    if case.full:
        dq = np.array([through_norm(x, dx) for x, dx in zip(args["q"], dq, strict=True)])
        dk = np.array([through_norm(x, dx) for x, dx in zip(args["k"], dk, strict=True)])
    dq, dk = rounded(dq, dtype), rounded(dk, dtype)
    found = {"dq": dq, "dk": dk, "dv": dv, "dg": dg, "dbeta": dbeta, "dh0": dh0}
    return {name: np.array(x) for name, x in found.items() if name != "dg" or case.full}


def drawn(case: Case) -> dict[str, Array]:
    """From -1 to 1, gates from -1/4 to 0, beta from 0 to 1. k that is not normalized is an eighth of that.

    Sums over heads are rounded to 16 bits. So that these show the order of a sum, the first two of three
    heads have nearly opposite gradients, and the third has small ones."""
    raw, of_value = np.random.PCG64(SEED), (case.heads, case.T)

    def uniform(*shape: int) -> Array:
        bits = raw.random_raw(int(np.prod(shape))) >> np.uint64(43)
        return (bits.astype(F32) / F32(2**20) - F32(1.0)).reshape(shape)

    args = {name: uniform(case.T, case.K) for name in ("q", "k")}
    args |= {name: uniform(*of_value, case.V) for name in ("v", "do")}
    args |= {"g": (uniform(*of_value) - 1) / 8, "beta": (uniform(*of_value) + 1) / 2}
    args |= {name: uniform(case.heads, case.K, case.V) for name in ("h0", "dht")}
    if not case.full:
        args |= {"k": args["k"] / 8, "g": args["g"] * 0, "dht": args["dht"] * 0}
    if case.heads == 3:
        for name in ("v", "g", "beta", "h0"):
            args[name][1] = args[name][0]
        for name in ("do", "dht"):
            args[name] = args[name] * np.array([256, 1 / 4, 1 / 4], F32)[:, None, None]
            args[name][1] -= args[name][0]
    of_16_bits = ("q", "k", "v", "do")
    return {name: rounded(x, case.dtype) if name in of_16_bits else x for name, x in args.items()}


def save() -> None:
    stored = {}
    for name, case in CASES.items():
        stored |= {f"{name}_{key}": x for key, x in by_hand(case, drawn(case)).items()}
    np.savez_compressed(GOLDEN, **stored)


if __name__ == "__main__":
    save()
