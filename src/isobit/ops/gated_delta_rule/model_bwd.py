"""The gradients of `gdr/1` in numpy, operation by operation, as `kernels_triton_bwd` describes them. The
gradients of states are those of `dhu/triton-1`.

Arrays have the value heads of one sequence first. A chunk is filled up with zero rows to 64, which change no
sum.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isobit.ops.gated_delta_rule.model import (
    CHUNK,
    CPU,
    EPS,
    Arithmetic,
    Array,
    Place,
    array,
    by_heads,
    closed,
    l2norm,
    new_values,
    places,
    prepared,
    rounded,
    why_not,
)

__all__ = ["gated_delta_rule_bwd", "why_not"]

F32 = np.float32


class Call(NamedTuple):
    """What all chunks of a call share."""

    do: Arithmetic
    dtype: torch.dtype
    scale: Array  # one fp32 number
    gated: bool

    def product(self, left: Array, right: Array, acc: Array | None = None) -> Array:
        """From zero, or continuing `acc`."""
        if acc is None:
            acc = np.zeros((*left.shape[:-1], right.shape[-1]), F32)
        return self.do.product(left, right, acc, self.dtype)

    def rounded(self, x: Array) -> Array:
        return rounded(x, self.dtype)


class Chunk(NamedTuple):
    """A chunk of one sequence: inputs and what the forward computed, [HV, 64, ...]."""

    rows: int  # those that exist
    q: Array
    k: Array
    v: Array
    beta: Array
    g2: Array
    T: Array
    w: Array
    S: Array  # [HV, K, V], rounded
    v_new: Array
    dout: Array


class Gradients(NamedTuple):
    """Of a chunk. dq and dk of every value head, in fp32, dk as the two terms that are added to the sum over
    the heads; dbeta and dgate too, before the sum over rows."""

    dq: Array
    dk: tuple[Array, Array]
    dv: Array
    dbeta: Array
    dgate: Array
    dlast: Array  # [HV], of the gate at the last row


def transposed(x: Array) -> Array:
    return np.swapaxes(x, -1, -2)


def halved(x: Array, axis: int) -> Array:
    """The sum over an axis, which is filled up with zeros to a power of two: the second half is added to the
    first until one is left."""
    x = np.moveaxis(x, axis, -1)
    width = 1 << max(x.shape[-1] - 1, 0).bit_length()
    x = np.concatenate((x, np.zeros((*x.shape[:-1], width - x.shape[-1]), F32)), -1)
    while x.shape[-1] > 1:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x[..., 0]


def tiles(size: int) -> list[slice]:
    """64 columns each."""
    return [slice(first, first + CHUNK) for first in range(0, size, CHUNK)]


def tile_sums(x: Array) -> list[Array]:
    """Sums of rows, one for every 64 columns. The last tile is filled up to 64."""
    missing = -x.shape[-1] % CHUNK
    x = np.concatenate((x, np.zeros((*x.shape[:-1], missing), F32)), -1)
    return [halved(x[..., each], -1) for each in tiles(x.shape[-1])]


def added(parts: list[Array]) -> Array:
    total = np.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total


def inner_values(c: Chunk, call: Call) -> Array:
    """scale P^T dout: the gradient of v_new from inside the chunk."""
    s = call.product(c.q, transposed(c.k))
    p = call.rounded(np.where(sees(c), s * decays(c, call), F32(0.0)))
    return call.rounded(call.product(transposed(p), c.dout) * call.scale)


def decays(c: Chunk, call: Call) -> Array:
    """2^(g2_i - g2_j)."""
    return call.do.exp2(c.g2[..., :, None] - c.g2[..., None, :])


def sees(c: Chunk, before: int = 0) -> Array:
    """Whether j + before <= i, and row i exists."""
    return np.tri(CHUNK, k=-before, dtype=bool) & (np.arange(CHUNK) < c.rows)[:, None]


def to_the_end(c: Chunk, call: Call) -> Array:
    """2^(g2_last - g2)."""
    factor = call.do.exp2(c.g2[..., c.rows - 1 : c.rows] - c.g2)
    return np.where(np.arange(CHUNK) < c.rows, factor, F32(0.0))


def back(c: Chunk, D: Array, call: Call) -> tuple[Array, Array]:
    """(the gradient of v_new, D of the chunk before), from D [HV, K, V] of the state after this chunk."""
    x = call.product(c.k, call.rounded(D))
    if call.gated:
        x = x * to_the_end(c, call)[..., None]
        D = D * call.do.exp2(c.g2[..., c.rows - 1])[..., None, None]
    dvn = call.rounded(x + inner_values(c, call))
    if call.gated:
        y = c.dout * (call.do.exp2(c.g2) * call.scale)[..., None]
        high = call.rounded(y)
        low = call.rounded(y - high)
        D = D + call.product(transposed(c.q), high)
        D = D + call.product(transposed(c.q), low)
    else:
        D = D + call.product(transposed(c.q), c.dout) * call.scale
    return dvn, D - call.product(transposed(c.w), dvn)


def of_chunk(c: Chunk, dvn: Array, D: Array, call: Call) -> Gradients:
    """From the gradient of v_new, and D of the state after this chunk."""
    product, exp2 = call.product, call.do.exp2
    decay, start, D = decays(c, call), exp2(c.g2), call.rounded(D)
    dr = product(transposed(c.T), dvn)
    drb = call.rounded(dr)
    dS = product(c.dout, transposed(c.v_new)) * decay
    dS = call.rounded(np.where(sees(c), dS, F32(0.0)))
    kk = product(c.k, transposed(c.k))
    N = np.where(sees(c, 1), np.negative(product(drb, transposed(c.v_new))) * decay, F32(0.0))
    M = call.rounded(N * c.beta[..., None])
    dq = product(dS, c.k, product(c.dout, transposed(c.S)) * start[..., None]) * call.scale
    of_state = product(drb, transposed(c.S))  # dr S^T
    from_state = [start * x for x in tile_sums(c.k * of_state)]
    on_k = np.negative(of_state * (c.beta * start)[..., None])
    by_system = product(transposed(M), c.k, product(M, c.k, on_k))
    ahead = product(c.v_new, transposed(D)) * to_the_end(c, call)[..., None]
    by_output = ahead + product(transposed(dS), c.q) * call.scale
    dbeta = [added(tile_sums(dr * c.v)) + halved(N * kk, -1), *(np.negative(x) for x in from_state)]
    x = M * kk
    dgate = [halved(x, -1) - halved(x, -2)]
    for of_q, of_k, from_s in zip(tile_sums(c.q * dq), tile_sums(c.k * by_output), from_state, strict=True):
        dgate.append(of_q - of_k - c.beta * from_s)
    dlast = []
    for part, of_k in zip(tiles(c.k.shape[-1]), tile_sums(c.k * ahead), strict=True):
        both = np.zeros((*c.S.shape[:-2], CHUNK, c.S.shape[-1]), F32)
        own = (c.S * D)[..., part, :]
        both[..., : own.shape[-2], :] = own
        whole = halved(added(tile_sums(both)), -1)
        dlast.append(halved(of_k, -1) + exp2(c.g2[..., c.rows - 1]) * whole)
    dv = call.rounded(dr * c.beta[..., None])
    return Gradients(dq, (by_system, by_output), dv, added(dbeta), added(dgate), added(dlast))


def from_the_last(dgate: Array, dlast: Array) -> Array:
    """dg: sums of dgate [HV, rows] from the last row back."""
    result, total = np.empty_like(dgate), dlast
    for i in reversed(range(dgate.shape[-1])):
        result[..., i] = total = total + dgate[..., i]
    return result


def by_key_heads(heads: int, *terms: Array) -> Array:
    """[H, ...] from [HV, ...]: for each value head of a key head in ascending order its terms are added."""
    total = np.zeros((heads, *terms[0].shape[1:]), F32)
    for each in range(terms[0].shape[0] // heads):
        for term in terms:
            total = total + term.reshape(heads, -1, *term.shape[1:])[:, each]
    return total


def norm_gradient(x: Array, dy: Array, dtype: torch.dtype) -> Array:
    """That of rows divided by their norm."""
    r = F32(1.0) / np.sqrt(halved(x * x, -1) + EPS)
    y = x * r[..., None]
    return rounded((dy - y * halved(y * dy, -1)[..., None]) * r[..., None], dtype)


def filled(x: Array) -> Array:
    """Zero rows up to 64; rows are the second dimension."""
    missing = ((0, 0), (0, CHUNK - x.shape[1]), *[(0, 0)] * (x.ndim - 2))
    return np.pad(x, missing)


def chunks_of(
    q: Array, k: Array, v: Array, g: Array | None, beta: Array, dout: Array, S: Array, call: Call
) -> list[Chunk]:
    """The forward of one sequence, [HV, tokens, ...], from its first state."""
    result = []
    for first in range(0, v.shape[1], CHUNK):
        here = slice(first, first + CHUNK)
        own = [x[:, here] for x in (q, k, v, beta, dout)]
        own_q, own_k, own_v, own_beta, own_dout = own
        own_g = None if g is None else g[:, here]
        ready = prepared(own_k, own_v, own_beta, own_g, call.do, call.dtype)
        v_new = new_values(ready.u, ready.w, S, call.do, call.dtype)
        T = np.zeros((*ready.T.shape[:-1], CHUNK), F32)
        T[..., : ready.T.shape[-1]] = call.rounded(ready.T)
        parts = {
            "q": own_q, "k": own_k, "v": own_v, "beta": own_beta, "g2": ready.g2, "T": T, "w": ready.w,
            "v_new": v_new, "dout": own_dout,
        }  # fmt: skip
        full = {name: filled(x) for name, x in parts.items()}
        result.append(Chunk(rows=own_v.shape[1], S=call.rounded(S), **full))
        S = closed(own_k, v_new, ready.g2, S, call.do, call.dtype)
    return result


def of_sequence(args: dict[str, Any], place: Place, do: Arithmetic) -> dict[str, Array]:
    """Gradients of one sequence: rows first for q to beta, [HV, K, V] for the state."""
    q, k, v, g, beta, initial = (args[n] for n in ("q", "k", "v", "g", "beta", "initial_state"))
    H, HV, K, V = q.shape[2], v.shape[2], q.shape[-1], v.shape[-1]
    call = Call(do, q.dtype, F32(args["scale"]), g is not None)
    raw = {n: by_heads(t, place, HV) for n, t in (("q", q), ("k", k))}
    normed = args["use_qk_l2norm_in_kernel"]
    own = {n: l2norm(x, q.dtype) for n, x in raw.items()} if normed else raw
    states = {}
    for name, given in (("first", initial), ("end", args["dfinal_state"])):
        states[name] = np.zeros((HV, K, V), F32)
        if given is not None:
            at = given[place.number]
            states[name] = array(at.mT if args["state_v_first"] else at).copy()
    chunks = chunks_of(
        own["q"], own["k"], by_heads(v, place, HV), None if g is None else by_heads(g, place, HV),
        by_heads(beta, place, HV), by_heads(args["do"], place, HV), states["first"], call,
    )  # fmt: skip
    D = states["end"]
    parts: list[dict[str, Array]] = []
    for c in reversed(chunks):
        dvn, before = back(c, D, call)
        d = of_chunk(c, dvn, D, call)
        here = slice(0, c.rows)
        parts.append(
            {
                "q": by_key_heads(H, d.dq[:, here]),
                "k": by_key_heads(H, *(x[:, here] for x in d.dk)),
                "v": d.dv[:, here],
                "g": from_the_last(d.dgate[:, here], d.dlast),
                "beta": d.dbeta[:, here],
            }
        )
        D = before
    result = {n: np.concatenate([p[n] for p in parts[::-1]], 1) for n in parts[0]} if parts else {}
    if normed and parts:
        for n in ("q", "k"):
            result[n] = norm_gradient(raw[n][:: HV // H], result[n], q.dtype)
    return {n: x.swapaxes(0, 1) for n, x in result.items()} | {"initial_state": D}


@np.errstate(invalid="ignore", over="ignore", under="ignore", divide="ignore")
def gated_delta_rule_bwd(arithmetic: Arithmetic = CPU, **args: Any) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, dg, dbeta, dinitial_state), those that are wanted."""
    results = {}
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        given = args[name]
        results[name] = (
            torch.zeros(given.shape, dtype=given.dtype, device="cpu") if args[f"want_{name}"] else None
        )
    B, T = args["v"].shape[:2]
    for place in places(B, T, args["cu_seqlens"]):
        for name, gradient in of_sequence(args, place, arithmetic).items():
            result = results[name]
            if result is None:
                continue
            own = torch.from_numpy(np.ascontiguousarray(gradient)).to(result.dtype)
            if name == "initial_state":
                result[place.number] = own.mT if args["state_v_first"] else own
            else:
                result[place.batch, place.tokens] = own
    return tuple(None if r is None else r.to(args["v"].device) for r in results.values())
