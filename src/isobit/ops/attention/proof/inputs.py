"""Inputs of attention that would expose a wrong kernel, and the same values in other layouts.

Options of a case: `causal`, `window`, `softcap`, `scale` as in the op; `bounds`: left (left padding), room (a
cache that is larger than its keys), both; `lengths` of packed sequences, as 3+0+40, and `key_lengths` if the
keys have other lengths; `page`: keys in pages of this size, in random order.

Everything that must not be read is NaN: keys out of bounds, queries of left padding, unused pages.
"""

from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from isobit.spec import inputs as alter
from isobit.spec.proof import Args, Case, InputOptions

NAN = float("nan")
SCALARS = ("causal", "window", "softcap", "scale")
BY_TOKEN = ("q", "k", "v")


def make(case: Case, device: torch.device, options: InputOptions) -> Args:
    d, given = case.dims, case.options
    B, T, S, H, KV, D = (d[name] for name in ("B", "T", "S", "H", "KV", "D"))
    # Large random inputs are drawn on the device itself.
    where = device if case.heavy or case.data == "random" else torch.device("cpu")
    gen = torch.Generator(where).manual_seed(options.seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=where)

    q, k, v = drawn(B, T, H, D), drawn(B, S, KV, D), drawn(B, S, KV, D)
    if case.data == "edge":
        _harden(q, k, v)
    elif case.data == "constant":
        for t in (q, k, v):
            t.fill_(options.constant)
    args: Args = {name: t.to(device, case.dtype) for name, t in zip(BY_TOKEN, (q, k, v), strict=True)}
    args |= {name: given.get(name) for name in SCALARS} | {"causal": given.get("causal", True)}
    names = ("key_start", "key_end", "cu_seqlens_q", "cu_seqlens_k", "block_table")
    args |= dict.fromkeys(names)
    for name, lengths in (("cu_seqlens_q", "lengths"), ("cu_seqlens_k", "key_lengths")):
        if lengths in given:
            cuts = [0, *accumulate(map(int, given[lengths].split("+")))]
            args[name] = torch.tensor(cuts, dtype=torch.int32, device=device)
    if "bounds" in given and S:
        args |= _bounded(args, given["bounds"])
    if "page" in given:
        args |= paged(args, given["page"], gen)
    return lay_out(args, case.layout)


def _harden(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Hard cases, alternating over queries, that plain random numbers never produce: all weight on the newest
    key; scores whose exponentials would overflow, or underflow, without subtracting the maximum; a peak. Also
    an outlier value at the last key, which only few queries see."""
    T, S = q.shape[1], k.shape[1]
    if S == 0:
        return
    k[..., 0] = 4.0
    v[:, -1] += 3.0
    group = q.shape[2] // k.shape[2]
    for t in range(T):
        kind, own = t % 5, min(max(S - T + t, 0), S - 1)
        if kind == 1:  # aligned with its own key
            q[:, t] = 2.0 * k[:, own].repeat_interleave(group, 1)
        elif kind == 2:
            q[:, t, :, 0] = 200.0
        elif kind == 3:
            q[:, t, :, 0] = -200.0
        elif kind == 4:
            q[:, t] *= 4.0


def _bounded(args: Args, kind: str) -> Args:
    """Bounds that differ between sequences, with NaN outside them."""
    B, S, T = args["q"].shape[0], args["k"].shape[1], args["q"].shape[1]
    each = torch.arange(B, device=args["k"].device, dtype=torch.int32)
    first = (each * 3 + 2) % S if kind in ("left", "both") else each * 0
    end = S - (each * 2 + 1) % S if kind in ("room", "both") else each * 0 + S
    end = torch.maximum(first, end)
    at = torch.arange(S, device=args["k"].device)
    outside = (at < first[:, None]) | (at >= end[:, None])
    result = {n: args[n].masked_fill(outside[..., None, None], NAN) for n in ("k", "v")}
    if args["causal"]:
        position = (end - first)[:, None] - T + torch.arange(T, device=at.device)
        result["q"] = args["q"].masked_fill((position < 0)[..., None, None], NAN)
    result["key_start"] = first.int() if kind in ("left", "both") else None
    result["key_end"] = end.int() if kind in ("room", "both") else None
    return result


def paged(args: Args, page: int, gen: torch.Generator) -> Args:
    """The keys of a batch in shuffled pages, with unused pages among them."""
    B, S, KV, D = args["k"].shape
    count = -(-S // page)
    places = torch.randperm(B * count + 3, generator=gen, device=gen.device).to(args["k"].device)[: B * count]
    result: Args = {"block_table": places.view(B, count).int()}
    for name in ("k", "v"):
        whole = args[name].new_full((B, count * page, KV, D), NAN)
        whole[:, :S] = args[name]
        pages = args[name].new_full((B * count + 3, page, KV, D), NAN)
        pages[places] = whole.view(B * count, page, KV, D)
        result[name] = pages
    if args["key_end"] is None:
        result["key_end"] = torch.full((B,), S, dtype=torch.int32, device=args["k"].device)
    return result


def lay_out(args: Args, layout: str) -> Args:
    """The same values with other strides; "heads" is a transposed [B, H, T, D] tensor."""
    if layout == "heads":
        return args | {n: args[n].transpose(1, 2).contiguous().transpose(1, 2) for n in BY_TOKEN}
    return alter.laid_out_some(args, BY_TOKEN, layout)


def padding(args: Args, rows: int) -> Args:
    """Sequences of NaN to append; they must change nothing."""
    result: dict[str, Any] = {n: args[n].new_full((rows, *args[n].shape[1:]), NAN) for n in BY_TOKEN}
    if args["key_start"] is not None:
        result["key_start"] = args["key_start"].new_zeros(rows)
    if args["key_end"] is not None:
        result["key_end"] = args["key_end"].new_full((rows,), args["k"].shape[1])
    return result


def features_regrouped(args: Args) -> Args:
    """Groups of 16 features in another order: the same scores, summed in another order."""
    return args | {n: alter.in_other_groups(args[n], -1) for n in ("q", "k")}


# Sequence by sequence


def sequences(args: Args) -> list[tuple[tuple[Any, slice], tuple[Any, Any]]]:
    """(index of its queries in q, index of its keys in k and v) of each sequence."""
    q_cuts = None if args["cu_seqlens_q"] is None else args["cu_seqlens_q"].tolist()
    table, T = args["block_table"], args["q"].shape[1]
    count = args["q"].shape[0] if q_cuts is None else len(q_cuts) - 1
    page = args["k"].shape[1]
    S = page if table is None else page * table.shape[1]
    rows: list[tuple[Any, slice]] = [(n, slice(0, T)) for n in range(count)]
    if q_cuts is not None:
        rows = [(0, slice(a, b)) for a, b in pairwise(q_cuts)]
        if table is None:
            k_cuts = q_cuts if args["cu_seqlens_k"] is None else args["cu_seqlens_k"].tolist()
            return [(r, (0, slice(a, b))) for r, (a, b) in zip(rows, pairwise(k_cuts), strict=True)]
    first = [0] * count if args["key_start"] is None else args["key_start"].tolist()
    end = [S] * count if args["key_end"] is None else args["key_end"].tolist()
    if table is None:
        return [(rows[n], (n, slice(first[n], end[n]))) for n in range(count)]
    result = []
    for n in range(count):
        at = torch.arange(first[n], end[n], device=table.device)
        result.append((rows[n], (table[n].long()[at // page], at % page)))
    return result
