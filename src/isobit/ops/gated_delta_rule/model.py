"""The arithmetic of `gdr/1` in numpy, operation by operation. Kernels are compared with it, and it is the
backend for CPU tensors.

What one operation of the device does is a parameter (`Arithmetic`). With `CPU` the class is `gdr/1/cpu`: the
bits of the Triton kernels in the interpreter. With the tensor-core steps of `isobit.numerics` (`hopper`) and
the `exp2` of a Hopper GPU it gives the bits of that GPU.

Every function takes fp32 arrays with any leading dimensions, heads say, and the rows of one chunk as far as
they exist: R of them, 1 to 64. Row i of a result is the same whatever R > i is, and whatever later rows hold.
Factors of products are numbers that the 16-bit dtype has.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isobit.frame.contract import dtype_name
from isobit.kernels.host.temperature import LOG2E
from isobit.numerics.cpu_steps import fused, product

Array = np.ndarray

#: Tokens per chunk, counted from a sequence's own first token.
CHUNK = 64

F32 = np.float32

#: Added to a sum of squares before its root, as in FLA.
EPS = F32(1e-6)


class Arithmetic(NamedTuple):
    """The operations of a device, on fp32 arrays."""

    #: (left [..., m, k], right [..., k, n], acc [..., m, n], dtype of the factors) -> acc after steps over
    #: ascending k.
    product: Callable[[Array, Array, Array, torch.dtype], Array]
    fma: Callable[[Array, Array, Array], Array]
    exp2: Callable[[Array], Array]


CPU = Arithmetic(product, fused, np.exp2)


def hopper(exp2: Callable[[Array], Array] = np.exp2) -> Arithmetic:
    """With the steps of Hopper's tensor cores. There is no model of its `exp2`: pass one that the device
    computes to get its bits."""
    return Arithmetic(_tensor_core, fused, exp2)


def _tensor_core(left: Array, right: Array, acc: Array, dtype: torch.dtype) -> Array:
    from isobit.numerics import chain  # the arithmetic of tensor cores is loaded at its first use

    lead = np.broadcast_shapes(left.shape[:-2], right.shape[:-2], acc.shape[:-2])
    out = np.broadcast_to(acc, (*lead, *acc.shape[-2:])).copy()
    left, right = (np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (left, right))
    for at in np.ndindex(*lead):
        a, b = (torch.from_numpy(x[at].copy()).to(dtype) for x in (left, right))
        out[at] = chain(a, b, torch.from_numpy(out[at])).numpy()
    return out


def rounded(x: Array, dtype: torch.dtype) -> Array:
    """fp32 rounded to a 16-bit dtype, to nearest even, as fp32."""
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype).float().numpy()


def _zeros(rows: Array, columns: Array) -> Array:
    """The beginning of a chain: [..., rows of `rows`, columns of `columns`]."""
    lead = np.broadcast_shapes(rows.shape[:-2], columns.shape[:-2])
    return np.zeros((*lead, rows.shape[-2], columns.shape[-1]), F32)


def triangular(left: Array, right: Array, acc: Array, do: Arithmetic, dtype: torch.dtype) -> Array:
    """left [..., R, R], whose row i has zeros after column i, times right [..., R, n]. Row i is defined with
    later rows of `right` replaced by zeros: 0 times an infinity or NaN would be NaN."""
    if np.isfinite(right).all():
        return do.product(left, right, acc, dtype)
    out = np.empty(np.broadcast_shapes(acc.shape, (*right.shape[:-2], 1, 1)), F32)
    for i in range(left.shape[-2]):
        seen = np.where(np.arange(right.shape[-2])[:, None] <= i, right, F32(0.0))
        out[..., i : i + 1, :] = do.product(left[..., i : i + 1, :], seen, acc[..., i : i + 1, :], dtype)
    return out


# A row of q or k


def l2norm(x: Array, dtype: torch.dtype) -> Array:
    """Rows [..., K] divided by their norm. The sum of squares: K filled up with zeros to a power of two, then
    the second half is added to the first until one number is left."""
    width = 1 << (x.shape[-1] - 1).bit_length()
    squares = np.zeros((*x.shape[:-1], width), F32)
    squares[..., : x.shape[-1]] = x * x
    while squares.shape[-1] > 1:
        half = squares.shape[-1] // 2
        squares = squares[..., :half] + squares[..., half:]
    return rounded(x * (F32(1.0) / np.sqrt(squares + EPS)), dtype)


# Steps 1 to 7 of a chunk, as numbered on the page of the class


class Prepared(NamedTuple):
    """What a chunk needs besides q, k and the state at its start."""

    g2: Array  # [..., R], log2 of the decay since the chunk's start
    T: Array  # [..., R, R] fp32, the inverse of I + A
    u: Array  # [..., R, V]
    w: Array  # [..., R, K]


def gates(g: Array) -> Array:
    """Step 1: g [..., R], the natural logarithms of decays, summed token by token; in log2."""
    total = g.astype(F32).copy()
    for i in range(1, g.shape[-1]):
        total[..., i] = total[..., i - 1] + total[..., i]
    return total * F32(LOG2E)


def decays(g2: Array, do: Arithmetic) -> Array:
    """[..., R, R], 2^(g2_i - g2_j) for j <= i; 0 elsewhere, selected."""
    R = g2.shape[-1]
    return np.where(np.tri(R, dtype=bool), do.exp2(g2[..., :, None] - g2[..., None, :]), F32(0.0))


def system(k: Array, beta: Array, g2: Array, do: Arithmetic, dtype: torch.dtype) -> Array:
    """Step 2: A [..., R, R], strictly lower triangular."""
    kt = np.swapaxes(k, -1, -2)
    kk = do.product(k, kt, _zeros(k, kt), dtype)
    below = np.tri(k.shape[-2], k=-1, dtype=bool)
    return np.where(below, kk * (beta[..., None] * decays(g2, do)), F32(0.0))


def inverse_row(A: Array, T: Array, t: int, do: Arithmetic) -> Array:
    """Row t of T, [..., R], from A[t, :t] = A [..., t] and rows 0..t-1 of T [..., t, R]: the sum begins with
    the row of the identity and takes the rows before in ascending order."""
    R = T.shape[-1]
    row = np.zeros((*A.shape[:-1], R), F32)
    row[..., t] = 1.0
    for j in range(t):
        row = do.fma(np.negative(A[..., j, None]), T[..., j, :], row)
    return np.where(np.arange(R) <= t, row, F32(0.0))


def inverse(A: Array, do: Arithmetic) -> Array:
    """Step 3: T [..., R, R] by forward substitution. After a row is final, all rows below are updated: each
    takes the rows before it in the same order as in `inverse_row`."""
    R = A.shape[-1]
    T, column = np.broadcast_to(np.eye(R, dtype=F32), A.shape).copy(), np.arange(R)
    for j in range(R):
        T[..., j, :] = np.where(column <= j, T[..., j, :], F32(0.0))
        below = slice(j + 1, R)
        T[..., below, :] = do.fma(np.negative(A[..., below, j, None]), T[..., j, None, :], T[..., below, :])
    return T


def folded(
    T: Array, k: Array, v: Array, beta: Array, g2: Array, do: Arithmetic, dtype: torch.dtype
) -> tuple[Array, Array]:
    """Step 4: (u, w) of rows of T; k, v, beta and g2 have as many rows as T has columns."""
    Tb = rounded(T, dtype)
    bv = rounded(beta[..., None] * v, dtype)
    bk = rounded(k * (beta * do.exp2(g2))[..., None], dtype)
    u, w = (rounded(triangular(Tb, x, _zeros(Tb, x), do, dtype), dtype) for x in (bv, bk))
    return u, w


def prepared(
    k: Array, v: Array, beta: Array, g: Array | None, do: Arithmetic, dtype: torch.dtype
) -> Prepared:
    """Steps 1 to 4."""
    g2 = np.zeros_like(beta) if g is None else gates(g)
    T = inverse(system(k, beta, g2, do, dtype), do)
    return Prepared(g2, T, *folded(T, k, v, beta, g2, do, dtype))


def new_values(u: Array, w: Array, S: Array, do: Arithmetic, dtype: torch.dtype) -> Array:
    """Step 5: v_new [..., R, V], with S [..., K, V] the fp32 state at the chunk's start."""
    return rounded(u - do.product(w, rounded(S, dtype), _zeros(w, S), dtype), dtype)


def output(
    q: Array, k: Array, v_new: Array, g2: Array, S: Array, scale: float, do: Arithmetic, dtype: torch.dtype
) -> Array:
    """Step 6: o [..., R, V]."""
    kt = np.swapaxes(k, -1, -2)
    qk = do.product(q, kt, _zeros(q, kt), dtype)
    p = rounded(np.where(np.tri(k.shape[-2], dtype=bool), qk * decays(g2, do), F32(0.0)), dtype)
    acc = do.product(q, rounded(S, dtype), _zeros(q, S), dtype) * do.exp2(g2)[..., None]
    return rounded(triangular(p, v_new, acc, do, dtype) * F32(scale), dtype)


def closed(
    k: Array, v_new: Array, g2: Array, S: Array, do: Arithmetic, dtype: torch.dtype, gk: Array | None = None
) -> Array:
    """Step 7: the fp32 state after the last of these rows. gk [..., K] is a gate of each feature besides."""
    last = g2[..., -1:]
    values = rounded(v_new * do.exp2(last - g2)[..., None], dtype)
    decay = do.exp2(last if gk is None else gk + last)[..., None]
    return do.product(np.swapaxes(k, -1, -2), values, S * decay, dtype)


class Chunk(NamedTuple):
    """A chunk, as far as its rows exist."""

    o: Array
    v_new: Array
    prepared: Prepared
    end: Array  # the fp32 state after the last row


def chunk(
    q: Array, k: Array, v: Array, beta: Array, g: Array | None, S: Array, scale: float,
    do: Arithmetic = CPU, dtype: torch.dtype = torch.bfloat16,
) -> Chunk:  # fmt: skip
    """The rows of a chunk so far, q and k [..., R, K], v [..., R, V], beta and g [..., R], from the fp32
    state S [..., K, V] at its start."""
    ready = prepared(k, v, beta, g, do, dtype)
    v_new = new_values(ready.u, ready.w, S, do, dtype)
    o = output(q, k, v_new, ready.g2, S, scale, do, dtype)
    return Chunk(o, v_new, ready, closed(k, v_new, ready.g2, S, do, dtype))


def sequence(
    q: Array, k: Array, v: Array, beta: Array, g: Array | None, S: Array, scale: float,
    do: Arithmetic = CPU, dtype: torch.dtype = torch.bfloat16,
) -> tuple[Array, Array, list[Array]]:  # fmt: skip
    """(o, the last state, states at the starts of chunks) of a sequence [..., rows, K]."""
    outputs, states = [np.zeros((*v.shape[:-2], 0, v.shape[-1]), F32)], []
    for first in range(0, v.shape[-2], CHUNK):
        here = slice(first, first + CHUNK)
        part = chunk(
            q[..., here, :], k[..., here, :], v[..., here, :], beta[..., here],
            None if g is None else g[..., here], S, scale, do, dtype,
        )  # fmt: skip
        states.append(S)
        outputs.append(part.o)
        S = part.end
    return np.concatenate(outputs, -2), S, states


# The backends


def why_not(args: dict[str, Any]) -> str | None:
    """Why the class cannot serve a call, or None."""
    first = args["q"] if "q" in args else args["k"]
    if first.dtype.itemsize != 2:
        return f"inputs are {dtype_name(first.dtype)}; the class has 16-bit operands"
    K, V = first.shape[-1], (args["v"] if "v" in args else args["u"]).shape[-1]
    if K % 16 or V % 16 or K > 256:
        return f"K={K} and V={V}; the class has multiples of 16, and K up to 256"
    return None


class Place(NamedTuple):
    """Where a sequence is: its number, batch element and tokens."""

    number: int
    batch: int
    tokens: slice


def places(B: int, T: int, cu_seqlens: Tensor | None) -> Iterator[Place]:
    """Bounds that are not valid are clamped to the T tokens, as in the kernels."""
    if cu_seqlens is None:
        for b in range(B):
            yield Place(b, b, slice(0, T))
        return
    ends = [min(max(int(t), 0), T) for t in cu_seqlens.tolist()]
    for n, (first, end) in enumerate(pairwise(ends)):
        yield Place(n, 0, slice(first, max(end, first)))


def array(t: Tensor) -> Array:
    """fp32."""
    return t.detach().cpu().float().numpy()


def by_heads(t: Tensor, place: Place, heads: int) -> Array:
    """[heads, tokens, ...] of one sequence, each head repeated for the value heads that share it."""
    own = array(t[place.batch, place.tokens]).swapaxes(0, 1)
    return np.repeat(own, heads // own.shape[0], 0)


def _state(given: Tensor | None, place: Place, shape: tuple[int, ...], v_first: bool) -> Array:
    if given is None:
        return np.zeros(shape, F32)
    own = given[place.number]
    return array(own.mT if v_first else own).copy()


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def gated_delta_rule(do: Arithmetic = CPU, **args: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(o, final_state, inverse)."""
    q, k, v, beta, g = (args[n] for n in ("q", "k", "v", "beta", "g"))
    B, T, HV, V = v.shape
    K, dtype = q.shape[-1], q.dtype
    bounds, v_first = args["cu_seqlens"], args["state_v_first"]
    o = torch.zeros(v.shape, dtype=dtype, device="cpu")
    states = B if bounds is None else len(bounds) - 1
    final = torch.zeros(states, HV, K, V, dtype=torch.float32, device="cpu")
    for place in places(B, T, bounds):
        own_q, own_k = (by_heads(t, place, HV) for t in (q, k))
        if args["use_qk_l2norm_in_kernel"]:
            own_q, own_k = l2norm(own_q, dtype), l2norm(own_k, dtype)
        result, end, _ = sequence(
            own_q, own_k, by_heads(v, place, HV), by_heads(beta, place, HV),
            None if g is None else by_heads(g, place, HV),
            _state(args["initial_state"], place, (HV, K, V), v_first), args["scale"], do, dtype,
        )  # fmt: skip
        o[place.batch, place.tokens] = torch.from_numpy(result).to(dtype).transpose(0, 1)
        final[place.number] = torch.from_numpy(np.ascontiguousarray(end))
    last = (final.mT.contiguous() if v_first else final).to(v.device)
    inverse = inverses(args, do) if args["return_inverse"] else None
    return o.to(v.device), last if args["output_final_state"] else None, inverse


def inverses(args: dict[str, Any], do: Arithmetic) -> Tensor:
    """T of every chunk, rounded: [B, T, HV, 64], zeros after the diagonal."""
    k, beta, g = (args[n] for n in ("k", "beta", "g"))
    B, T, HV = beta.shape
    result = torch.zeros(B, T, HV, CHUNK, dtype=k.dtype, device="cpu")
    for n, b, tokens in places(B, T, args["cu_seqlens"]):
        for first in range(tokens.start, tokens.stop, CHUNK):
            here = Place(n, b, slice(first, min(first + CHUNK, tokens.stop)))
            own_k, own_beta = by_heads(k, here, HV), by_heads(beta, here, HV)
            if args["use_qk_l2norm_in_kernel"]:
                own_k = l2norm(own_k, k.dtype)
            g2 = np.zeros_like(own_beta) if g is None else gates(by_heads(g, here, HV))
            own = inverse(system(own_k, own_beta, g2, do, k.dtype), do)
            result[b, here.tokens, :, : own.shape[-1]] = torch.from_numpy(own).to(k.dtype).transpose(0, 1)
    return result.to(k.device)


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def fwd_h(do: Arithmetic = CPU, **args: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(h, v_new, final_state) of `chunk_gated_delta_rule_fwd_h`."""
    k, w, u, g, gk = (args[n] for n in ("k", "w", "u", "g", "gk"))
    B, T, HV, V = u.shape
    K, dtype = k.shape[-1], k.dtype
    bounds, v_first = args["cu_seqlens"], args["state_v_first"]
    chunks = -(-T // CHUNK) if bounds is None else len(args["chunk_indices"])
    h = torch.zeros(B * chunks, HV, K, V, dtype=dtype, device="cpu")
    v_new = torch.zeros(u.shape, dtype=dtype, device="cpu")
    states = B if bounds is None else len(bounds) - 1
    final, at = torch.zeros(states, HV, K, V, dtype=torch.float32, device="cpu"), 0
    for place in places(B, T, bounds):
        S = _state(args["initial_state"], place, (HV, K, V), v_first)
        for first in range(place.tokens.start, place.tokens.stop, CHUNK):
            here = Place(place.number, place.batch, slice(first, min(first + CHUNK, place.tokens.stop)))
            own_k, own_w, own_u = (by_heads(t, here, HV) for t in (k, w, u))
            if at < len(h):  # invalid bounds may name more chunks
                h[at] = torch.from_numpy(S).to(dtype)
            values = new_values(own_u, own_w, S, do, dtype)
            v_new[here.batch, here.tokens] = torch.from_numpy(values).to(dtype).transpose(0, 1)
            g2 = np.zeros(own_u.shape[:-1], F32) if g is None else by_heads(g, here, HV)
            of_k = None if gk is None else array(gk[here.batch, here.tokens.stop - 1])
            S, at = closed(own_k, values, g2, S, do, dtype, of_k), at + 1
        final[place.number] = torch.from_numpy(np.ascontiguousarray(S))
    h = h.unflatten(0, (B, chunks)) if B else h[None][:0]
    if v_first:
        h, final = h.mT.contiguous(), final.mT.contiguous()
    return (
        h.to(u.device),
        v_new.to(u.device) if args["save_new_value"] else None,
        final.to(u.device) if args["output_final_state"] else None,
    )
