"""The truth of attention: the definition, with all scores of a sequence in memory; and bounds on the error of
a correct kernel.

The bounds follow the computation step by step; nothing in them is fitted. With U = 2^-23, u half a unit of
the 16-bit dtype, w the probabilities, and z the scores in natural units:

    z         truncation in a chain over D (`isobit.spec.error_bounds`), times scale
    p         the error of its exponent, which includes rounding z and the maximum; some units of exp2;
              the same again for every block in which the maximum may change; and u, where p multiplies v
    out       sum w |v| times all of this; truncation in the chains over keys; rounding
    lse       the mean of p's errors without u, and some units of lse
    delta     the errors of out and its rounding, times |dout|
    dS        P (errors of dP and delta) + |dS| (errors of P), and u
              where many terms are rounded to 16 bits independently, six standard deviations of the sum
    dq dk dv  the same through their products
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.ops.attention.proof.inputs import sequences
from isobit.spec.error_bounds import chain_error, narrow_dtype
from isobit.spec.proof import Args

UNIT = 2.0**-23

#: Error of one exp2, and of one tanh, in units: relative in class attn/1, absolute in attn/2.
POWER, TANGENT, SECOND_TANGENT = 4.0, 32.0, 8.0

#: Six standard deviations of a rounding error, which is uniform in half a unit to either side.
SIX = 6 / 3**0.5

#: Truncation of one step: see `isobit.spec.error_bounds`.
STEP = 21 / 4


def _scale(args: Args) -> float:
    return args["q"].shape[-1] ** -0.5 if args["scale"] is None else args["scale"]


def _sees(args: Args, rows: int, keys: int, device: torch.device) -> Tensor:
    key = torch.arange(keys, device=device)
    position = keys - rows + torch.arange(rows, device=device)[:, None]
    result = torch.ones(rows, keys, dtype=torch.bool, device=device)
    if args["causal"]:
        result = result & (key <= position)
    if args["window"] is not None:
        result = result & (key > position - args["window"])
    return result


class _One(NamedTuple):
    """One sequence, by heads: q [H, t, D], k and v [H, n, D], mask [t, n], and whether a query sees any
    key."""

    q: Tensor
    k: Tensor
    v: Tensor
    sees: Tensor
    live: Tensor


def _one(args: Args, rows: tuple[Any, slice], keys: tuple[Any, Any], wide: torch.dtype) -> _One:
    q = args["q"][rows].to(wide).movedim(1, 0)
    k, v = (args[n][keys].to(wide).movedim(1, 0) for n in ("k", "v"))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    sees = _sees(args, q.shape[1], k.shape[1], q.device)
    live = sees.any(1)
    return _One(torch.where(live[:, None], q, 0.0), k, v, sees, live)


def _natural(args: Args, one: _One) -> Tensor:
    z = one.q @ one.k.mT * _scale(args)
    cap = args["softcap"]
    return z if cap is None else cap * torch.tanh(z / cap)


def formula(args: Args) -> tuple[Tensor, Tensor]:
    """(out, lse), in fp64 for fp64 inputs and in fp32 for all others, rounded once."""
    wide = torch.promote_types(args["q"].dtype, torch.float32)
    B, T, H, _ = args["q"].shape
    outs = torch.zeros(args["q"].shape, dtype=wide, device=args["q"].device)
    outs = outs + sum(
        args[n][..., :0].sum() for n in ("q", "k", "v")
    )  # depends on all inputs, so that gradients exist even without keys
    lses = torch.full((B, H, T), -torch.inf, dtype=wide, device=args["q"].device)
    for rows, keys in sequences(args):
        one = _one(args, rows, keys, wide)
        z = torch.where(one.sees, _natural(args, one), -torch.inf)
        z = z[:, one.live]
        if z.numel() == 0:
            continue
        at = torch.arange(*rows[1].indices(T), device=z.device)[one.live]
        lse = z.logsumexp(-1)
        out = torch.exp(z - lse[..., None]) @ one.v
        b = torch.as_tensor(rows[0], device=z.device)
        outs = outs.index_put((b, at), out.movedim(0, 1))
        lses = lses.movedim(2, 1).index_put((b, at), lse.movedim(0, 1)).movedim(1, 2)
    return outs.to(args["q"].dtype), lses


# Errors, in units of 2^-23


class _Errors(NamedTuple):
    """Error bounds of one sequence, by heads."""

    w: Tensor  # probabilities [H, t, n]
    z: Tensor  # error of a score [H, t, n]
    p: Tensor  # relative error of a probability
    out: Tensor  # error of out before it is rounded
    cut: Tensor  # the part of it that does not come from probabilities
    lse: Tensor
    largest: Tensor  # largest |z| of a row [H, t, 1]
    value: Tensor  # out [H, t, D]


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """Error of a @ b if each of its terms was rounded independently, in half units: the sum of absolute
    values, or six standard deviations if that is less."""
    return torch.minimum(a.abs() @ b.abs(), SIX * (a.square() @ b.square()).sqrt())


def _errors(args: Args, one: _One, u: float, least: float, tangent: int) -> _Errors:
    n, cap = one.k.shape[1], args["softcap"]
    chain, _ = chain_error(one.q, one.k.mT)
    of_z = chain * _scale(args)
    z = _natural(args, one)
    if cap is not None:
        of_z = of_z + (TANGENT * z.abs() if tangent == 1 else SECOND_TANGENT * cap)
    seen = torch.where(one.sees, z, -torch.inf)
    w = torch.softmax(seen, -1).nan_to_num(0.0)
    largest = torch.where(one.sees, z.abs(), 0.0).amax(-1, keepdim=True) if n else z.sum(-1, keepdim=True)
    blocks = n / 64 + 2
    # The maximum is nearly always found early. Each time it changes, sums are scaled by one more rounded
    # power.
    of_p = of_z + (POWER + 4 * largest) * blocks
    mean = (w * of_p).sum(-1, keepdim=True)
    sums = 16 + blocks
    top = w.amax(-1, keepdim=True) if n else largest
    size = w @ one.v.abs()
    steps = n / 16 + blocks
    cut = (mean + sums + STEP * steps) * size + least * top * one.v.abs().sum(1, keepdim=True)
    of_out = (w * of_p) @ one.v.abs() + cut + u * _apart(w, one.v)
    value = w @ one.v
    lse = torch.where(one.live, seen.logsumexp(-1), 0.0) if n else z.sum(-1)
    of_lse = mean[..., 0] + sums + 4 * lse.abs() + 4 * largest[..., 0]
    return _Errors(w, of_z, of_p, of_out, cut, of_lse, largest, value)


def scale(
    args: Args, outputs: Sequence[Tensor], cotangents: Sequence[Tensor], tangent: int = 1
) -> dict[str, Tensor]:
    """Error bounds of outputs and gradients, for fp64 arguments. `tangent` is the class whose tanh caps
    scores."""
    given = cotangents
    narrow = narrow_dtype(*(args[n] for n in ("q", "k", "v")))
    u = 1.0 if narrow is None else torch.finfo(narrow).eps / 2 / UNIT
    least = (
        0.0 if narrow is None else torch.finfo(narrow).smallest_normal * torch.finfo(narrow).eps / 2 / UNIT
    )
    twice = 1.0 if narrow is None else 2.0  # an error may also round to the neighbour
    q, k = args["q"], args["k"]
    B, T, H, _ = q.shape
    result = {"out": torch.zeros_like(q), "lse": q.new_zeros(B, H, T)}
    if given:
        result |= {f"gradient:{n}": torch.zeros_like(args[n]) for n in ("q", "k", "v")}
    KV, size = k.shape[2], _scale(args)
    for rows, keys in sequences(args):
        one = _one(args, rows, keys, torch.float64)
        e = _errors(args, one, u, least, tangent)
        live = one.live[:, None]
        result["out"][rows] = (twice * torch.where(live, e.out, 0.0) + least).movedim(0, 1)
        result["lse"][rows[0], :, rows[1]] = torch.where(one.live, e.lse, 0.0)
        if not given:
            continue
        do = torch.where(live, given[0][rows].movedim(1, 0), 0.0)
        dlse = given[1][rows[0], :, rows[1]][..., None]
        of_p = e.z + POWER + 4 * e.largest + 4 * e.lse[..., None]  # lse has this error, and is rounded
        dp, dp_size = do @ one.v.mT, do.abs() @ one.v.abs().mT
        delta = (e.value * do).sum(-1, keepdim=True) - dlse
        # The rounding error of a probability is common to all features; that of out is independent per
        # feature.
        of_delta = (e.p * e.w * dp.abs()).sum(-1, keepdim=True) + 2 * dlse.abs()
        of_delta = of_delta + (do.abs() * (e.cut + 16 * e.value.abs())).sum(-1, keepdim=True)
        of_delta = of_delta + u * _apart(e.w[..., None, :], dp[..., :, None])[..., 0]
        of_delta = of_delta + u * _apart(do[..., None, :], e.value[..., :, None])[..., 0]
        gap = (dp - delta).abs()
        bend, of_bend = torch.ones_like(gap), torch.zeros_like(gap)
        if args["softcap"] is not None:
            y = torch.tanh(one.q @ one.k.mT * size / args["softcap"])
            of_tanh = TANGENT if tangent == 1 else SECOND_TANGENT
            bend, of_bend = 1 - y * y, 2 * (e.z / args["softcap"] + of_tanh)
        ds = e.w * gap * bend
        of_ds = e.w * (bend * STEP * (do.shape[-1] / 16 + 1) * dp_size + gap * (bend * (of_p + 8) + of_bend))
        of_ds = torch.where(one.sees, of_ds + least, 0.0)
        shift = e.w * bend * of_delta  # common to all keys of a query
        of_w = torch.where(one.sees, e.w * of_p + least, 0.0)
        t, n = one.sees.shape
        over_keys, over_rows = STEP * (n / 16 + 2), STEP * (H // KV) * (t / 16 + 2)
        along = of_delta * (e.w * bend @ one.k).abs()
        of_q = size * ((of_ds + (over_keys + 4) * ds) @ one.k.abs() + along + u * _apart(ds, one.k))
        of_k = (of_ds + shift + (over_rows + 4) * ds).mT @ one.q.abs() + u * _apart(ds.mT, one.q)
        of_v = (of_w + (over_rows + 4) * e.w).mT @ do.abs() + u * _apart(e.w.mT, do)
        of_k, of_v = (x.unflatten(0, (KV, -1)).sum(1) for x in (size * of_k, of_v))
        result["gradient:q"][rows] = (twice * of_q + least).movedim(0, 1)
        result["gradient:k"][keys] = (twice * of_k + least).movedim(0, 1)
        result["gradient:v"][keys] = (twice * of_v + least).movedim(0, 1)
    return result
