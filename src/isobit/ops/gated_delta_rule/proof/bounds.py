"""Bounds on the error of class gdr/1, carried along the computation.

With u half a unit of the 16-bit dtype: a rounding adds u of a number, a step of a chain of 16 cuts off at
most 21/4 units of 2^-23 of the absolute products (see `isobit.spec.error_bounds`), a power of two has an
error of some units. e(x) is the error of x, and factors are in absolute value:

    e(A)      few units of A, and what its chain cuts off
    e(T)      |T| (e(A) + units of |A|) |T|, then rounded
    e(u)      e(T) |beta v| + |T| u |beta v| + chain, then rounded; e(w) alike
    e(v_new)  e(u) + e(w) |S| + |w| (e(S) + u |S|) + chain, then rounded
    e(o)      scale (2^g |q| (e(S) + u |S|) + e(P) |v_new| + |P| e(v_new) + chains), then rounded
    e(S')     2^g e(S) + |k|^T (2^g (e(v_new)), rounded) + chain

Nothing here is fitted.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.kernels.host.temperature import LOG2E
from isobit.ops.gated_delta_rule.model import CHUNK, EPS, places

UNIT = 2.0**-23

#: Error of a power of two in units, for an argument of a few dozens that was rounded some times.
POWER = 128.0

#: What a step of a chain may cut off, in units of the absolute products.
CUT = 21 / 4


class Rounding(NamedTuple):
    """Of a 16-bit dtype."""

    u: float
    least: float  # error of rounding to a subnormal number

    def after(self, error: Tensor, value: Tensor) -> Tensor:
        return error + self.u * (value.abs() + error) + self.least


def rounding_of(narrow: torch.dtype) -> Rounding:
    u = torch.finfo(narrow).eps / 2 if narrow.itemsize == 2 else UNIT / 2
    return Rounding(u, torch.finfo(narrow).smallest_normal * u)


def chain(a: Tensor, b: Tensor) -> Tensor:
    """What a product cuts off, from the absolute values of its factors."""
    return CUT * UNIT * (a.shape[-1] / 16 + 1) * (a.abs() @ b.abs())


class State(NamedTuple):
    """The state at a chunk's border, and its error: [HV, K, V]."""

    S: Tensor
    error: Tensor


def new_values(
    u: Tensor, eu: Tensor, w: Tensor, ew: Tensor, at: State, by: Rounding
) -> tuple[Tensor, Tensor]:
    """(v_new, its error)."""
    S, eS = at.S.abs(), by.after(at.error, at.S)
    value = u - w @ at.S
    error = eu + ew @ (S + eS) + w.abs() @ eS + chain(w.abs() + ew, S + eS) + UNIT * (u.abs() + value.abs())
    return value, by.after(error, value)


def closed(
    k: Tensor, vn: Tensor, ev: Tensor, g2: Tensor, of_k: Tensor | None, at: State, by: Rounding
) -> State:
    """The state after the chunk. g2 [HV, rows, 1]; of_k [HV, K, 1] is the gate of features, or None."""
    last = g2[:, -1:]
    ratio, decay = (last - g2).exp2(), (last if of_k is None else last + of_k).exp2()
    y = ratio * vn
    ey = by.after(ratio * (ev + POWER * UNIT * (vn.abs() + ev)), y)
    start = decay * (at.S.abs() + at.error)
    error = decay * (at.error + POWER * UNIT * (at.S.abs() + at.error)) + k.abs().mT @ ey
    # The chain begins with the state, and cuts off parts of that too.
    error = error + chain(k.mT, y.abs() + ey) + CUT * UNIT * (CHUNK / 16 + 1) * start
    return State(decay * at.S + k.mT @ y, error)


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, ek: Tensor, eq: Tensor, scale: float, at: State,
    by: Rounding,
) -> tuple[Tensor, State]:  # fmt: skip
    """(error of o, the state after), for [HV, rows, ...] in fp64. ek and eq are the errors of k and q."""
    R = v.shape[1]
    g2 = g.cumsum(1) * LOG2E
    # A sum of R gates, each rounding relative to the largest, times log2 e.
    power = (POWER + R * g2.abs().amax(1, keepdim=True)) * UNIT
    below = torch.ones(R, R, dtype=torch.bool, device=v.device).tril(-1)
    upto = torch.ones(R, R, dtype=torch.bool, device=v.device).tril()
    d = torch.where(upto, (g2 - g2.mT).exp2(), 0.0)
    factor = beta * d
    kk = k @ k.mT
    A = torch.where(below, kk * factor, 0.0)
    ekk = chain(k, k.mT) + ek @ k.abs().mT + k.abs() @ ek.mT + ek @ ek.mT
    eA = torch.where(below, (ekk + power * (kk.abs() + ekk)) * factor.abs(), 0.0)
    eye = torch.eye(R, dtype=v.dtype, device=v.device)
    T = torch.linalg.solve_triangular(eye + A, eye.expand(A.shape), upper=False)
    # A row takes up to R multiply-adds, each of which rounds.
    eT = T.abs() @ (eA + R * UNIT * (A.abs() + eye)) @ T.abs()
    eT = by.after(2 * eT, T)
    bv, bk = beta * v, beta * g2.exp2() * k
    ebv = by.after(UNIT * bv.abs(), bv)
    ebk = by.after(power * bk.abs() + beta.abs() * g2.exp2() * ek, bk)

    def folded(x: Tensor, ex: Tensor) -> tuple[Tensor, Tensor]:
        value = T @ x
        error = eT @ (x.abs() + ex) + T.abs() @ ex + chain(T.abs() + eT, x.abs() + ex)
        return value, by.after(error, value)

    (u, eu), (w, ew) = folded(bv, ebv), folded(bk, ebk)
    vn, ev = new_values(u, eu, w, ew, at, by)
    qk = q @ k.mT
    eqk = chain(q, k.mT) + eq @ k.abs().mT + q.abs() @ ek.mT + eq @ ek.mT
    P = qk * d
    eP = by.after((eqk + power * (qk.abs() + eqk)) * d, P)
    eP = torch.where(upto, eP, 0.0)
    gate, S, eS = g2.exp2(), at.S.abs(), by.after(at.error, at.S)
    qS = q.abs() @ (S + eS)
    error = gate * (q.abs() @ eS + eq @ (S + eS) + chain(q.abs() + eq, S + eS) + power * qS)
    error = error + eP @ (vn.abs() + ev) + P.abs() @ ev + chain(P.abs() + eP, vn.abs() + ev)
    error = error + CUT * UNIT * (CHUNK / 16 + 1) * gate * qS
    o = gate * (q @ at.S) + P @ vn
    error = by.after(scale * (error + UNIT * o.abs()), scale * o)
    return error, closed(k, vn, ev + 0 * vn, g2, None, at, by)


def error_bounds(args: dict[str, Any], narrow: torch.dtype) -> dict[str, Tensor]:
    """Error bounds of o and final_state in units of 2^-23, for fp64 arguments that came from `narrow`."""
    by = rounding_of(narrow)
    q, k, v, beta, g = (args[n] for n in ("q", "k", "v", "beta", "g"))
    (B, T, HV, V), K = v.shape, q.shape[-1]
    o, final = torch.zeros_like(v), []
    for place in places(B, T, args["cu_seqlens"]):
        S = v.new_zeros(HV, K, V)
        if args["initial_state"] is not None:
            S = args["initial_state"][place.number]
            S = S.mT if args["state_v_first"] else S
        at = State(S, torch.zeros_like(S))
        for first in range(place.tokens.start, place.tokens.stop, CHUNK):
            here = slice(first, min(first + CHUNK, place.tokens.stop))

            def heads(t: Tensor, here: slice = here, b: int = place.batch) -> Tensor:
                own = t[b, here].movedim(1, 0)
                return own.repeat_interleave(HV // own.shape[0], 0)

            own_q, own_k = heads(q), heads(k)
            eq, ek = torch.zeros_like(own_q), torch.zeros_like(own_k)
            if args["use_qk_l2norm_in_kernel"]:
                own_q, own_k = (
                    x * ((x * x).sum(-1, keepdim=True) + float(EPS)).rsqrt() for x in (own_q, own_k)
                )
                eq, ek = (by.after(16 * UNIT * x.abs(), x) for x in (own_q, own_k))
            own_g = torch.zeros_like(heads(beta)) if g is None else heads(g)
            error, at = _chunk(
                own_q, own_k, heads(v), heads(beta)[..., None], own_g[..., None], ek, eq, args["scale"], at,
                by,
            )  # fmt: skip
            o[place.batch, here] = error.movedim(0, 1)
        final.append(at.error)
    last = torch.stack(final) if final else v.new_zeros(0, HV, K, V)
    return {"o": o / UNIT, "final_state": (last.mT if args["state_v_first"] else last) / UNIT}


def state_bounds(args: dict[str, Any], narrow: torch.dtype) -> dict[str, Tensor]:
    """The same of h, v_new and final_state of `chunk_gated_delta_rule_fwd_h`."""
    by = rounding_of(narrow)
    k, w, u, g, gk = (args[n] for n in ("k", "w", "u", "g", "gk"))
    (B, T, HV, V), K = u.shape, k.shape[-1]
    h: list[Tensor] = []
    v_new, final = torch.zeros_like(u), []
    for place in places(B, T, args["cu_seqlens"]):
        S = u.new_zeros(HV, K, V)
        if args["initial_state"] is not None:
            S = args["initial_state"][place.number]
            S = S.mT if args["state_v_first"] else S
        at = State(S, torch.zeros_like(S))
        for first in range(place.tokens.start, place.tokens.stop, CHUNK):
            here = slice(first, min(first + CHUNK, place.tokens.stop))
            b = place.batch
            own_k = k[b, here].movedim(1, 0).repeat_interleave(HV // k.shape[2], 0)
            own_w, own_u = w[b, here].movedim(1, 0), u[b, here].movedim(1, 0)
            g2 = torch.zeros_like(own_u[..., :1]) if g is None else g[b, here].T[..., None]
            h.append(by.after(at.error, at.S))
            zero = torch.zeros_like
            vn, ev = new_values(own_u, zero(own_u), own_w, zero(own_w), at, by)
            v_new[b, here] = ev.movedim(0, 1)
            of_k = None if gk is None else gk[b, here.stop - 1][..., None]
            at = closed(own_k, vn, ev, g2, of_k, at, by)
        final.append(at.error)
    empty = u.new_zeros(0, HV, K, V)
    of_h, last = (torch.stack(each) if each else empty for each in (h, final))
    of_h = of_h.view(B, -1, HV, K, V) if B and len(of_h) else u.new_zeros(B, 0, HV, K, V)
    if args["state_v_first"]:
        of_h, last = of_h.mT, last.mT
    return {"h": of_h / UNIT, "v_new": v_new / UNIT, "final_state": last / UNIT}
