"""The class gdr/1/cpu once more, from its page and without the code of its model: row by row, with fused
multiply-adds in whole numbers. A program that writes the golden vectors:

    PYTHONPATH=src python tests/gated_delta_by_hand.py

Powers of two are those of fp64, rounded: numpy's in fp32 differ from one CPU to another.
"""

from fractions import Fraction
from pathlib import Path
from typing import Any

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
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    if exact == 0:
        return F32(0.0)
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return F32(float(round(exact / unit) * unit))


def chain(left: Array, right: Array, acc: Array) -> Array:
    """The sum of left[j] right[j] on acc, for all columns of right: 16 products at a time."""
    for first in range(0, len(left), 16):
        step = left[first] * right[first]
        for j in range(first + 1, min(first + 16, len(left))):
            step = step + left[j] * right[j]
        acc = acc + (step + F32(0.0))
    return acc


def norm(x: Array, dtype: torch.dtype) -> Array:
    """Step 0, for one row."""
    squares = np.concatenate((x * x, np.zeros(64 - len(x), F32)))
    while len(squares) > 1:
        squares = squares[: len(squares) // 2] + squares[len(squares) // 2 :]
    r = F32(1.0) / np.sqrt(squares[0] + F32(1e-6))
    return rounded(x * r, dtype)


def of_chunk(
    q: Array, k: Array, v: Array, g: Array, beta: Array, S: Array, dtype: torch.dtype
) -> tuple[Array, Array, Array]:
    """(o, the state after it, T), steps 1 to 7 for the rows of a chunk, [rows, ...]."""
    rows, none = len(v), F32(0.0)
    G = [F32(-0.0)]
    for gate in g:
        G.append(G[-1] + gate)
    g2 = [total * F32(1.44269504) for total in G[1:]]
    inverse: list[Array] = []
    h, o, new = rounded(S, dtype), [], np.zeros((64, V), F32)
    u_of, w_of = np.zeros((64, V), F32), np.zeros((64, K), F32)  # what T multiplies
    for i in range(rows):
        kk = chain(k[i], k[: i + 1].T, np.zeros(i + 1, F32))
        d = exp2(np.array([g2[i] - g2[j] for j in range(i + 1)]))
        row = np.zeros(64, F32)
        row[i] = 1.0
        for j in range(i):
            a = kk[j] * (beta[i] * d[j])
            for c in range(j + 1):
                row[c] = fma(-a, inverse[j][c], row[c])
        inverse.append(row)
        u_of[i] = rounded(beta[i] * v[i], dtype)
        w_of[i] = rounded(k[i] * (beta[i] * exp2(g2[i])), dtype)
        narrow = rounded(row, dtype)
        u = rounded(chain(narrow, u_of, np.zeros(V, F32)), dtype)
        w = rounded(chain(narrow, w_of, np.zeros(K, F32)), dtype)
        new[i] = rounded(u - chain(w, h, np.zeros(V, F32)), dtype)
        qk = chain(q[i], k[: i + 1].T, np.zeros(i + 1, F32))
        P = np.zeros(64, F32)
        P[: i + 1] = rounded(qk * d, dtype)
        begun = chain(q[i], h, np.zeros(V, F32)) * exp2(g2[i])
        o.append(rounded(chain(P, new, begun) * F32(SCALE), dtype))
    values = [rounded(new[i] * exp2(g2[-1] - g2[i]), dtype) for i in range(rows)]
    filled = np.array(values + [np.full(V, none)] * (64 - rows))
    end = np.empty_like(S)
    for feature in range(K):
        column = np.concatenate((k[:, feature], np.zeros(64 - rows, F32)))
        end[feature] = chain(column, filled, S[feature] * exp2(g2[-1]))
    return np.array(o), end, np.array(inverse)


def by_hand(args: dict[str, Array], dtype: torch.dtype) -> tuple[Array, Array, Array]:
    """(o, the last state, T of the first chunk in fp32) of one sequence and head."""
    q, k = (np.array([norm(row, dtype) for row in args[name]]) for name in ("q", "k"))
    S, o, systems = args["initial_state"], [], []
    for first in range(0, T, 64):
        here = slice(first, first + 64)
        part, S, solved = of_chunk(q[here], k[here], *(args[n][here] for n in ("v", "g", "beta")), S, dtype)
        o.append(part)
        systems.append(solved)
    return np.concatenate(o), S, systems[0]


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
