"""Attention in plain PyTorch, one sequence and some queries at a time, so that the scores of a whole sequence
are never in memory. Computes in fp32, or in fp64 for fp64 inputs, and rounds once at the end.

`key_start` and `key_end` are not read on the host: keys outside them are masked and replaced by zeros, so
that NaN there reaches no result.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isobit.ops.attention.calls import call_of, factors_of, key_bounds

#: Bytes of scores in memory at a time.
SCORES_BYTES = 1 << 24


class Sequence(NamedTuple):
    """One sequence: the indices of its queries in q, and its keys with zeros outside their bounds."""

    rows: tuple[int, slice]
    k: Tensor  # [S, KV, D]
    v: Tensor
    keys: tuple[Any, slice]  # indices in k and v; unused for a paged cache, which has no gradient
    first: int | Tensor
    end: int | Tensor


def _sequences(args: dict[str, Any], wide: torch.dtype) -> Iterator[Sequence]:
    call, table = call_of(args), args["block_table"]
    k, v = args["k"], args["v"]
    q_bounds = None if args["cu_seqlens_q"] is None else args["cu_seqlens_q"].clamp(0, call.T).tolist()
    bounds = key_bounds(args)
    k_bounds = None if bounds is None else bounds.clamp(0, call.S).tolist()
    for n in range(call.sequences):
        rows = (n, slice(0, call.T)) if q_bounds is None else (0, slice(q_bounds[n], q_bounds[n + 1]))
        if k_bounds is not None:
            place = (0, slice(k_bounds[n], k_bounds[n + 1]))
            length = max(k_bounds[n + 1] - k_bounds[n], 0)
            yield Sequence(rows, k[place].to(wide), v[place].to(wide), place, 0, length)
            continue
        first: int | Tensor = 0
        end: int | Tensor = call.S
        if args["key_start"] is not None:
            first = args["key_start"][n].clamp(0, call.S)
        if args["key_end"] is not None:
            end = torch.maximum(args["key_end"][n].clamp(0, call.S), torch.as_tensor(first, device=k.device))
        if table is None:
            place = (n, slice(0, call.S))
            own_k, own_v = k[place], v[place]
        else:
            pages = table[n].long().clamp(0, max(call.pages - 1, 0))
            own_k, own_v = (t[pages].flatten(0, 1) for t in (k, v))
        at = torch.arange(call.S, device=k.device)
        there = ((at >= first) & (at < end))[:, None, None]
        own_k, own_v = (torch.where(there, t.to(wide), 0.0) for t in (own_k, own_v))
        yield Sequence(rows, own_k, own_v, place if table is None else (0, slice(0, 0)), first, end)


def _scores(
    args: dict[str, Any], q: Tensor, k: Tensor, first: Any, end: Any, start: int, count: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(z in natural units, mask of visible keys, tanh) for queries q [KV, G, t, D], which are queries
    `start`, start + 1, ... of `count`."""
    factors = factors_of(args)
    z = (q @ k.movedim(0, 1)[:, None].mT) * factors.scale
    bent = None
    if args["softcap"] is not None:
        bent = torch.tanh(z / args["softcap"])
        z = bent * args["softcap"]
    key = torch.arange(k.shape[0], device=q.device)
    sees = ((key >= first) & (key < end)).expand(q.shape[2], -1)
    position = end - count + start + torch.arange(q.shape[2], device=q.device)[:, None]
    if args["causal"]:
        sees = sees & (key <= position)
    if args["window"] is not None:
        sees = sees & (key > position - args["window"])
    return torch.where(sees, z, -torch.inf), sees, bent


def _step(args: dict[str, Any], keys: int) -> int:
    """How many queries are computed at a time."""
    itemsize = 8 if args["q"].dtype == torch.float64 else 4
    return max(1, SCORES_BYTES // max(1, args["q"].shape[2] * keys * itemsize))


def attention(**args: Any) -> tuple[Tensor, Tensor | None]:
    """(out, lse)."""
    q, call = args["q"], call_of(args)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full((call.B, call.H, call.T), -torch.inf, dtype=wide)
    for one in _sequences(args, wide):
        b, rows = one.rows
        count, keys = max(rows.stop - rows.start, 0), one.k.shape[0]
        step = _step(args, keys)
        for start in range(0, count if keys else 0, step):
            stop = min(start + step, count)
            here = slice(rows.start + start, rows.start + stop)
            own = _by_heads(q[b, here].to(wide), call.KV)
            z, _, _ = _scores(args, own, one.k, one.first, one.end, start, count)
            own_lse = z.logsumexp(-1)
            # A row that sees no key has lse = -inf; subtracting 0 instead gives 0, not NaN.
            p = torch.exp(z - torch.where(own_lse == -torch.inf, 0.0, own_lse)[..., None])
            out[b, here] = _by_rows(p @ one.v.movedim(0, 1)[:, None]).to(q.dtype)
            lse[b, :, here] = own_lse.flatten(0, 1)
    return out, lse if args["return_lse"] else None


def attention_bwd(**args: Any) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv), those that are wanted."""
    q, k, v, call = args["q"], args["k"], args["v"], call_of(args)
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = factors_of(args).scale
    delta = (args["out"].to(wide) * args["dout"].to(wide)).sum(-1).movedim(1, 2)  # [B, H, T]
    if args["dlse"] is not None:
        delta = delta - args["dlse"]
    dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (k, v))
    for one in _sequences(args, wide):
        b, rows = one.rows
        count, keys = max(rows.stop - rows.start, 0), one.k.shape[0]
        step = _step(args, keys)
        own_dk, own_dv = torch.zeros_like(one.k).movedim(0, 1), torch.zeros_like(one.v).movedim(0, 1)
        for start in range(0, count if keys else 0, step):
            stop = min(start + step, count)
            here = slice(rows.start + start, rows.start + stop)
            lse, own_delta = (t[b, :, here].unflatten(0, (call.KV, -1)) for t in (args["lse"], delta))
            live = (lse != -torch.inf)[..., None]  # q and dout of a row that sees no key may be NaN
            own, do = (_by_heads(t[b, here].to(wide), call.KV) for t in (q, args["dout"]))
            own, do = torch.where(live, own, 0.0), torch.where(live, do, 0.0)
            z, sees, bent = _scores(args, own, one.k, one.first, one.end, start, count)
            p = torch.where(sees, torch.exp(z - torch.where(live[..., 0], lse, 0.0)[..., None]), 0.0)
            ds = p * (do @ one.v.movedim(0, 1)[:, None].mT - own_delta[..., None])
            ds = torch.where(sees & live, ds if bent is None else ds * (1 - bent * bent), 0.0)
            dq[b, here] = _by_rows(ds @ one.k.movedim(0, 1)[:, None] * scale).to(q.dtype)
            own_dk = own_dk + (ds.mT @ own).sum(1) * scale
            own_dv = own_dv + (p.mT @ do).sum(1)
        if args["want_k"] or args["want_v"]:
            dk[one.keys] = own_dk.movedim(0, 1).to(k.dtype)
            dv[one.keys] = own_dv.movedim(0, 1).to(v.dtype)
    wanted = (args["want_q"], args["want_k"], args["want_v"])
    return tuple(t if want else None for t, want in zip((dq, dk, dv), wanted, strict=True))


def _by_heads(t: Tensor, KV: int) -> Tensor:
    """[t, H, D] as [KV, G, t, D]."""
    return t.unflatten(1, (KV, -1)).movedim(0, 2)


def _by_rows(t: Tensor) -> Tensor:
    """[KV, G, t, D] as [t, H, D]."""
    return t.movedim(2, 0).flatten(1, 2)
