"""Bounds on the error of the gradients of class gdr/1: six standard deviations of it.

Every quantity of `kernels_triton_bwd` is a value and the variance of its error. A rounding to 16 bits is off
by anything up to half a unit u, each by itself: its variance is a third of the square. A product adds the
variances of its factors, each times the squares of the other, and the square of what its chain cuts off at
most; powers of two and fp32 additions add the squares of their largest errors. Bounds that add the largest
errors of all terms would be as large as the gradients themselves: a gradient of zeros would pass.

dg is a difference of sums whose rounded terms are the same on both sides, so its error is that of the form in
which they have cancelled: with X_ij = scale dS_ij q_i k_j + M_ij k_i k_j, and for row t of a chunk,

    dg_t = e^G_last <S, D> + sum of k (e^(G_last - G) vn D^T) over rows before t
         + sum of scale e^G q (do S^T) - beta e^G k (dr S^T) over rows from t on + sum of X_ij, i >= t > j

and fp32 additions of the terms of both sides. Nothing here is fitted.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.kernels.host.temperature import LOG2E
from isobit.ops.gated_delta_rule.model import CHUNK, EPS, Place, places
from isobit.ops.gated_delta_rule.proof.bounds import CUT, POWER, UNIT, Rounding, chain, rounding_of

#: Standard deviations.
SIGMAS = 6.0


class Number(NamedTuple):
    """A value and the variance of its error."""

    v: Tensor
    e2: Tensor

    @property
    def mT(self) -> "Number":
        return Number(self.v.mT, self.e2.mT)

    def where(self, mask: Tensor) -> "Number":
        return Number(torch.where(mask, self.v, 0.0), torch.where(mask, self.e2, 0.0))

    def rounded(self, by: Rounding) -> "Number":
        return Number(self.v, self.e2 + (self.v.square() + self.e2) * by.u**2 / 3 + by.least**2)

    def times(self, factor: Tensor | float, relative: Tensor | float = 0.0) -> "Number":
        """By a factor with this relative error, in fp32."""
        value = self.v * factor
        return Number(value, self.e2 * (value * 0 + factor).square() + (value * (relative + UNIT)).square())

    def __neg__(self) -> "Number":
        return Number(-self.v, self.e2)


def exactly(x: Tensor) -> Number:
    return Number(x, torch.zeros_like(x))


def product(a: Number, b: Number, start: Number | None = None) -> Number:
    e2 = a.e2 @ (b.v.square() + b.e2) + a.v.square() @ b.e2 + chain(a.v, b.v).square()
    if start is None:
        return Number(a.v @ b.v, e2)
    cut = CUT * UNIT * (a.v.shape[-1] / 16 + 1) * start.v
    return Number(start.v + a.v @ b.v, start.e2 + e2 + cut.square())


def total(*terms: Number) -> Number:
    value = torch.stack([t.v for t in terms])
    rounding = len(terms) * UNIT * value.abs().sum(0)
    return Number(value.sum(0), torch.stack([t.e2 for t in terms]).sum(0) + rounding.square())


def inner(a: Number, b: Number) -> Number:
    """The sum of their products over the last dimension, in fp32."""
    e2 = (a.e2 * (b.v.square() + b.e2) + a.v.square() * b.e2).sum(-1)
    each = a.v * b.v
    return Number(each.sum(-1), e2 + (16 * UNIT * each.abs().sum(-1)).square())


class Chunk(NamedTuple):
    """Of one sequence, [HV, rows, ...]."""

    q: Number
    k: Number
    v: Tensor
    beta: Tensor
    g2: Tensor
    do: Tensor
    power: Tensor  # relative error of a power of two
    kk: Number
    qk: Number
    d: Tensor  # decay from j to i
    T: Number
    w: Number
    vn: Number
    S: Number  # rounded


def lower(R: int, like: Tensor, before: int = 0) -> Tensor:
    return torch.ones(R, R, dtype=torch.bool, device=like.device).tril(-before)


def ahead(
    q: Number, k: Number, v: Tensor, beta: Tensor, g: Tensor, do: Tensor, S: Number, by: Rounding
) -> tuple[Chunk, Number]:
    """(the forward of a chunk, the state after it). beta and g are [HV, rows, 1]."""
    R = v.shape[1]
    g2 = g.cumsum(1) * LOG2E
    power = (POWER + R * g2.abs().amax(1, keepdim=True)) * UNIT
    d = torch.where(lower(R, v), (g2 - g2.mT).exp2(), 0.0)
    kk, qk = product(k, k.mT), product(q, k.mT)
    A = kk.times(beta * d, power).where(lower(R, v, 1))
    eye = torch.eye(R, dtype=v.dtype, device=v.device)
    T = torch.linalg.solve_triangular(eye + A.v, eye.expand(A.v.shape), upper=False)
    squares = T.square()
    Tb = Number(T, squares @ (A.e2 + (R * UNIT * (A.v.abs() + eye)).square()) @ squares).rounded(by)
    u = product(Tb, exactly(v).times(beta).rounded(by)).rounded(by)
    w = product(Tb, k.times(beta * g2.exp2(), power).rounded(by)).rounded(by)
    Sb = S.rounded(by)
    vn = total(u, -product(w, Sb)).rounded(by)
    last = g2[:, -1:]
    values = vn.times((last - g2).exp2(), power).rounded(by)
    after = product(k.mT, values, S.times(last.exp2(), power))
    return Chunk(q, k, v, beta, g2, do, power, kk, qk, d, Tb, w, vn, Sb), after


def back(c: Chunk, D: Number, scale: float, by: Rounding) -> tuple[dict[str, Number], Number]:
    """(gradients of a chunk by name, D of the chunk before). Those of q and k in fp32, for every value
    head."""
    R, last = c.v.shape[1], c.g2[:, -1:]
    gate, ratio, decay = c.g2.exp2(), (last - c.g2).exp2(), last.exp2()
    upto, below, do = lower(R, c.v), lower(R, c.v, 1), exactly(c.do)
    Db = D.rounded(by)
    P = c.qk.times(c.d, c.power).where(upto).rounded(by)
    local = product(P.mT, do).times(scale).rounded(by)
    dvn = total(product(c.k, Db).times(ratio, c.power), local).rounded(by)
    # Split into two 16-bit numbers, which leaves a rounding of a rounding.
    y = do.times(gate * scale, c.power + by.u**2)
    split = product(c.q.mT, y)
    before = total(D.times(decay, c.power), split, -product(c.w.mT, dvn))
    dr = product(c.T.mT, dvn)
    drb = dr.rounded(by)
    dS = product(do, c.vn.mT).times(c.d, c.power).where(upto).rounded(by)
    N = (-product(drb, c.vn.mT)).times(c.d, c.power).where(below)
    M = N.times(c.beta).rounded(by)
    from_S, z = product(do, c.S.mT).times(gate, c.power), product(drb, c.S.mT)
    dq = product(dS, c.k, from_S).times(scale)
    state = product(c.vn, Db.mT).times(ratio, c.power)
    dk1 = total(state, product(dS.mT, c.q).times(scale))
    on_z = c.beta * gate
    dk = total(product(M.mT, c.k, product(M, c.k, -z.times(on_z, c.power))), dk1)
    of_z = inner(c.k, z)
    dbeta = total(inner(N, c.kk), inner(dr, exactly(c.v)), -of_z.times(gate[..., 0], c.power[..., 0]))
    dg = _of_gates(c, D, dS, M, from_S, state, of_z, scale)
    return {"q": dq, "k": dk, "v": dr.times(c.beta).rounded(by), "beta": dbeta, "g": dg}, before


def _of_gates(
    c: Chunk, D: Number, dS: Number, M: Number, from_S: Number, state: Number, of_z: Number, scale: float
) -> Number:
    R, decay = c.v.shape[1], c.g2[:, -1].exp2()
    of_states = inner(Number(c.S.v.flatten(1), c.S.e2.flatten(1)), Number(D.v.flatten(1), D.e2.flatten(1)))
    whole = of_states.times(decay[:, 0], c.power[:, 0, 0])
    on_z = (c.beta * c.g2.exp2())[..., 0]
    own = total(inner(c.q, from_S).times(scale), -of_z.times(on_z, c.power[..., 0]))
    s = inner(c.k, state)
    pairs = scale * dS.v * c.qk.v + M.v * c.kk.v
    variance = scale**2 * (dS.e2 * c.qk.v.square() + dS.v.square() * c.qk.e2)
    variance = variance + M.e2 * c.kk.v.square() + M.v.square() * c.kk.e2
    from_t = lower(R, c.v).mT.to(c.v)  # [t, i]: i >= t
    before_t = 1.0 - from_t  # [t, j]: j < t

    def sums(x: Tensor, of_s: Tensor, of_own: Tensor, of_whole: Tensor) -> Tensor:
        inside = torch.einsum("ti,hij,tj->ht", from_t, x, before_t)
        return of_whole[:, None] + of_s @ before_t.T + of_own @ from_t.T + inside

    # What was added and has cancelled: each term is a sum over K, and is added to a sum over rows.
    q, k, scores = c.q.v.abs(), c.k.v.abs(), abs(scale) * dS.v.abs()
    each = (q * (scores @ k + abs(scale) * from_S.v.abs())).sum((1, 2))
    each = each + (k * (state.v.abs() + scores.mT @ q)).sum((1, 2))
    each = each + (M.v * c.kk.v).abs().sum((1, 2)) + own.v.abs().sum(1) + whole.v.abs()
    e2 = sums(variance, s.e2, own.e2, whole.e2) + (16 * UNIT * each[:, None]).square()
    return Number(sums(pairs, s.v, own.v, whole.v), e2)


def gradient_bounds(
    args: dict[str, Any], do: Tensor, dfinal: Tensor, narrow: torch.dtype
) -> dict[str, Tensor]:
    """Error bounds of the gradients in units of 2^-23, for fp64 arguments that came from `narrow`."""
    by = rounding_of(narrow)
    result = {n: torch.zeros_like(args[n]) for n in ("q", "k", "v", "beta")}
    result["g"], states = torch.zeros_like(args["beta"]), []
    B, T = args["v"].shape[:2]
    for place in places(B, T, args["cu_seqlens"]):
        gradients, state = _of_sequence(args, place, do, dfinal, by)
        for name, error in gradients.items():
            result[name][place.batch, place.tokens] = error
        states.append(state)
    if args["initial_state"] is not None:
        own = torch.stack(states)
        result["initial_state"] = own.mT if args["state_v_first"] else own
    return {f"gradient:{n}": SIGMAS * x.sqrt() / UNIT for n, x in result.items()}


def _of_sequence(
    args: dict[str, Any], place: Place, do: Tensor, dfinal: Tensor, by: Rounding
) -> tuple[dict[str, Tensor], Tensor]:
    """(variances by name, [tokens, heads, ...]; that of the first state)."""
    (H, K), (HV, V), v_first = args["q"].shape[2:], args["v"].shape[2:], args["state_v_first"]

    def heads(t: Tensor) -> Tensor:
        own = t[place.batch, place.tokens].movedim(1, 0)
        return own.repeat_interleave(HV // own.shape[0], 0)

    def state(t: Tensor | None) -> Number:
        own = args["v"].new_zeros(HV, K, V) if t is None else t[place.number]
        return exactly(own.mT if v_first and t is not None else own)

    raw = {n: heads(args[n]) for n in ("q", "k")}
    own = {n: exactly(x) for n, x in raw.items()}
    norms = {n: ((x * x).sum(-1, keepdim=True) + float(EPS)).rsqrt() for n, x in raw.items()}
    if args["use_qk_l2norm_in_kernel"]:
        own = {
            n: Number(x * norms[n], (16 * UNIT * x * norms[n]).square()).rounded(by) for n, x in raw.items()
        }
    v, beta, dout = heads(args["v"]), heads(args["beta"])[..., None], heads(do)
    g = torch.zeros_like(beta) if args["g"] is None else heads(args["g"])[..., None]
    S, chunks = state(args["initial_state"]), []
    for first in range(0, v.shape[1], CHUNK):
        at = slice(first, first + CHUNK)
        parts = {n: Number(x.v[:, at], x.e2[:, at]) for n, x in own.items()}
        here = (v[:, at], beta[:, at], g[:, at], dout[:, at])
        chunk, S = ahead(parts["q"], parts["k"], *here, S, by)
        chunks.append(chunk)
    D, by_chunk = state(dfinal), []
    for chunk in reversed(chunks):
        gradients, D = back(chunk, D, args["scale"], by)
        by_chunk.append(gradients)
    if not by_chunk:
        return {}, D.e2
    result = {n: torch.cat([f[n].e2 for f in by_chunk[::-1]], 1).movedim(0, 1) for n in ("v", "beta", "g")}
    for name in ("q", "k"):
        values = torch.cat([f[name].v for f in by_chunk[::-1]], 1)
        errors = torch.cat([f[name].e2 for f in by_chunk[::-1]], 1)
        dy = total(*(Number(values[i :: HV // H], errors[i :: HV // H]) for i in range(HV // H)))
        if args["use_qk_l2norm_in_kernel"]:
            y, r = own[name].v[:: HV // H], norms[name][:: HV // H]
            along = inner(exactly(y), dy)
            on_y = Number(along.v[..., None], along.e2[..., None]).times(y, 16 * UNIT)
            dy = total(dy, -on_y).times(r, 16 * UNIT)
        result[name] = dy.rounded(by).e2.movedim(0, 1)
    return result, D.e2
