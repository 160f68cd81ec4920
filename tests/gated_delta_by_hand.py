"""The class gdr/1/cpu once more, from its page and without the code of its model: row by row, with fused
multiply-adds in whole numbers. A program that writes the golden vectors:

    PYTHONPATH=src python tests/gated_delta_by_hand.py

Powers of two are those of fp64, rounded: numpy's in fp32 differ from one CPU to another.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

GOLDEN = Path(__file__).parent / "golden" / "gdr_cpu.npz"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RESULTS = ("o", "final_state", "T")
T, K, V, SCALE = 70, 48, 16, 0.3

F32 = np.float32
Array = np.ndarray


def exp2(x: Array) -> Array:
    return np.exp2(np.asarray(x, np.float64)).astype(F32)


def rounded(x: Array, dtype: torch.dtype) -> Array:
    return torch.tensor(np.asarray(x)).to(dtype).float().numpy()


def fma(x: Any, y: Any, z: Any) -> Any:
    """x y + z with one rounding, to 24 binary digits and to even: these numbers are normal."""
    (a, p), (b, q), (c, r) = (float(number).as_integer_ratio() for number in (x, y, z))
    exact, scale = a * b * r + c * p * q, p * q * r  # the denominators are powers of two
    digits = exact.bit_length() - 24
    if digits > 0:
        kept, lost = divmod(exact, 1 << digits)
        half = 1 << (digits - 1)
        exact = (kept + (lost > half or (lost == half and kept % 2 == 1))) << digits
    return F32(exact / scale)


def chain(left: Array, right: Array, acc: Array) -> Array:
    """The sum of left[j] right[j] on acc, for all columns of right: 16 products at a time."""
    for first in range(0, len(left), 16):
        step = left[first] * right[first]
        for j in range(first + 1, min(first + 16, len(left))):
            step = step + left[j] * right[j]
        acc = acc + (step + F32(0.0))
    return acc


def halved(x: Array) -> Any:
    """The sum of x, filled up with zeros to a power of two: the second half is added to the first."""
    x = np.concatenate((x, np.zeros((1 << (len(x) - 1).bit_length()) - len(x), F32)))
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def root(x: Array) -> Any:
    """r of step 0, for one row."""
    return F32(1.0) / np.sqrt(halved(x * x) + F32(1e-6))


class Chunk(NamedTuple):
    """What steps 1 to 7 make of the rows of a chunk; T, kk, d and P are [rows, 64]."""

    o: Array
    end: Array
    T: Array
    g2: Array
    kk: Array
    d: Array
    P: Array
    w: Array
    h: Array
    new: Array


def of_chunk(
    q: Array, k: Array, v: Array, g: Array, beta: Array, S: Array, scale: float, dtype: torch.dtype
) -> Chunk:
    """Steps 1 to 7."""
    rows = len(v)
    G = [F32(-0.0)]
    for gate in g:
        G.append(G[-1] + gate)
    g2 = np.array([total * F32(1.44269504) for total in G[1:]])
    h, o = rounded(S, dtype), []
    kk, d, inverse, P = (np.zeros((rows, 64), F32) for _ in range(4))
    w, new = np.zeros((rows, len(S)), F32), np.zeros((64, v.shape[1]), F32)
    u_of, w_of = np.zeros_like(new), np.zeros((64, len(S)), F32)  # what T multiplies
    for i in range(rows):
        kk[i, : i + 1] = chain(k[i], k[: i + 1].T, np.zeros(i + 1, F32))
        d[i, : i + 1] = exp2(g2[i] - g2[: i + 1])
        row = inverse[i]
        row[i] = 1.0
        for j in range(i):
            a = kk[i, j] * (beta[i] * d[i, j])
            for c in range(j + 1):
                row[c] = fma(-a, inverse[j, c], row[c])
        u_of[i] = rounded(beta[i] * v[i], dtype)
        w_of[i] = rounded(k[i] * (beta[i] * exp2(g2[i])), dtype)
        narrow = rounded(row, dtype)
        u = rounded(chain(narrow, u_of, np.zeros_like(new[i])), dtype)
        w[i] = rounded(chain(narrow, w_of, np.zeros_like(w[i])), dtype)
        new[i] = rounded(u - chain(w[i], h, np.zeros_like(new[i])), dtype)
        qk = chain(q[i], k[: i + 1].T, np.zeros(i + 1, F32))
        P[i, : i + 1] = rounded(qk * d[i, : i + 1], dtype)
        begun = chain(q[i], h, np.zeros_like(new[i])) * exp2(g2[i])
        o.append(rounded(chain(P[i], new, begun) * F32(scale), dtype))
    filled = np.zeros_like(new)
    for i in range(rows):
        filled[i] = rounded(new[i] * exp2(g2[-1] - g2[i]), dtype)
    end = np.empty_like(S)
    for feature in range(len(S)):
        column = np.concatenate((k[:, feature], np.zeros(64 - rows, F32)))
        end[feature] = chain(column, filled, S[feature] * exp2(g2[-1]))
    return Chunk(np.array(o), end, inverse, g2, kk, d, P, w, h, new[:rows])


def by_hand(args: dict[str, Array], dtype: torch.dtype) -> tuple[Array, Array, Array]:
    """(o, the last state, T of the first chunk in fp32) of one sequence and head."""
    q, k = (np.array([rounded(x * root(x), dtype) for x in args[name]]) for name in ("q", "k"))
    S, chunks = args["initial_state"], []
    for first in range(0, T, 64):
        here = slice(first, first + 64)
        v, g, beta = (args[name][here] for name in ("v", "g", "beta"))
        chunks.append(of_chunk(q[here], k[here], v, g, beta, S, SCALE, dtype))
        S = chunks[-1].end
    return np.concatenate([c.o for c in chunks]), S, chunks[0].T


def drawn(dtype: torch.dtype) -> dict[str, Array]:
    gen = np.random.default_rng(0)
    args = {name: gen.standard_normal((T, size), F32) for name, size in (("q", K), ("k", K), ("v", V))}
    args = {name: rounded(x, dtype) for name, x in args.items()}
    args |= {"g": -gen.random(T, F32) / 8, "beta": gen.random(T, F32)}
    return args | {"initial_state": gen.standard_normal((K, V), F32)}


def save() -> None:
    stored = {}
    for name, dtype in DTYPES.items():
        args = drawn(dtype)
        results = dict(zip(RESULTS, by_hand(args, dtype), strict=True))
        stored |= {f"{name}_{key}": x for key, x in (args | results).items()}
    np.savez_compressed(GOLDEN, **stored)


if __name__ == "__main__":
    save()
