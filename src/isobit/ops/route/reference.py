"""`route` in plain PyTorch: the formula that is the truth, and the backend that runs anywhere.

The backend adds in the order of the class, in elementwise steps: PyTorch's own sums may take another order
for another number of rows. Its exp is that of fp64, rounded: the one of fp32 is vectorised, and another one
for the last elements of a tensor. So a row has the same bits alone and among others here too, though not a
GPU's. fp64 logits are computed in fp64.
"""

import math
from typing import Any

import torch
from torch import Tensor

NEVER = -math.inf


def formula(
    logits: Tensor, top_k: int, scoring: str, order: str, normalize: bool, dtype: torch.dtype | None,
    bias: Tensor | None, groups: int | None, top_groups: int | None, mask: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(weights, experts) by definition, in fp64 for fp64 inputs and in fp32 for all others."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    p = z.softmax(-1) if scoring == "softmax" else z.sigmoid()
    experts = chosen(z, p, top_k, bias, groups, top_groups)
    weights = p.gather(-1, experts)
    if order == "topk_softmax":
        weights = z.gather(-1, experts).softmax(-1)
    elif normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if mask is not None:
        dead = (mask == 0)[..., None]
        weights, experts = weights.masked_fill(dead, 0.0), experts.masked_fill(dead, logits.shape[-1])
    narrow = logits.dtype if dtype is None else dtype
    return weights.to(weights.dtype if logits.dtype == torch.float64 else narrow), experts


def chosen(
    z: Tensor, p: Tensor, top_k: int, bias: Tensor | None, groups: int | None, top_groups: int | None
) -> Tensor:
    """The numbers of the experts of each row, the lower first where two are equal."""
    score = z.detach() if bias is None and groups is None else p.detach()
    if bias is not None:
        score = score + bias
    score = score.nan_to_num(NEVER, math.inf, NEVER)
    if groups is not None:
        by_group = score.unflatten(-1, (groups, -1))
        two = by_group.sort(-1, descending=True).values[..., :2]
        best = _first(two[..., 0] + two[..., 1], top_groups or groups)
        open_ = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best, True)
        # Experts of other groups come after all others, also after those with a score of -inf.
        rank = torch.where(open_.repeat_interleave(by_group.shape[-1], -1), 0, 1)
        by_score = score.sort(dim=-1, descending=True, stable=True).indices
        return by_score.gather(-1, rank.gather(-1, by_score).sort(dim=-1, stable=True).indices)[..., :top_k]
    return _first(score, top_k)


def _first(score: Tensor, count: int) -> Tensor:
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :count]


# The backend


def route(**args: Any) -> tuple[Tensor | None, ...]:
    logits, mask, k = args["logits"], args["mask"], args["top_k"]
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    p, total = _scores(z, args["scoring"])
    if total is not None:
        p = p / total
    experts = chosen(z, p, k, args["bias"], args["groups"], args["top_groups"])
    weights = _weights(z, p, experts, args["order"])
    if args["normalize"] or args["order"] == "topk_softmax":
        weights = weights / _in_turn(weights)[..., None]
    experts = experts.int()
    if mask is not None:
        dead = (mask == 0)[..., None]
        weights, experts = weights.masked_fill(dead, 0.0), experts.masked_fill(dead, logits.shape[-1])
    weights = weights.to(logits.dtype if args["dtype"] is None else args["dtype"])
    if not args["sort"]:
        return weights, experts.contiguous(), None, None
    return weights, experts.contiguous(), *expert_rows(experts, logits.shape[-1])


def route_bwd(**args: Any) -> Tensor:
    logits, mask = args["logits"], args["mask"]
    live = (
        torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device) if mask is None else mask != 0
    )
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    g = args["dweights"].to(z.dtype)
    experts = args["experts"].long().masked_fill(~live[..., None], 0)
    scores, total = _scores(z, args["scoring"])
    p = scores if total is None else scores / total
    over_k = args["normalize"] or args["order"] == "topk_softmax"
    own = _weights(z, p, experts, args["order"])
    sum_of_own = _in_turn(own)[..., None]
    w = own / sum_of_own if over_k else own
    d = _in_turn(g * w)[..., None]
    if args["scoring"] == "sigmoid":
        at_chosen = ((g - d) / sum_of_own if args["normalize"] else g) * own * (1.0 - own)
    else:
        at_chosen = w * (g - d)
    if over_k or args["scoring"] == "sigmoid":
        dz = torch.zeros_like(z).scatter(-1, experts, at_chosen)
    else:
        dz = p * (torch.zeros_like(z).scatter(-1, experts, g) - d)
    return torch.where(live[..., None], dz, 0.0).to(logits.dtype)


def expert_rows(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(place, offsets)."""
    flat = experts.flatten().long()
    flat = torch.where((flat >= 0) & (flat < count), flat, count)
    order = flat.sort(stable=True).indices
    place = torch.empty_like(order, dtype=torch.int32)
    place[order] = torch.arange(len(order), device=order.device, dtype=torch.int32)
    # Not `bincount`, which waits for the device, and cannot be captured into a CUDA graph.
    sizes = flat.new_zeros(count + 1).scatter_add(0, flat, torch.ones_like(flat))[:count]
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int()
    return place.view(experts.shape), offsets


def _scores(z: Tensor, scoring: str) -> tuple[Tensor, Tensor | None]:
    """Exponentials and their sum; or sigmoids, and None."""
    if scoring == "sigmoid":
        return 1.0 / (1.0 + _exp(-z)), None
    scores = _exp(z - z.amax(-1, keepdim=True))
    total = torch.nn.functional.pad(scores, (0, (1 << (z.shape[-1] - 1).bit_length()) - z.shape[-1]))
    while total.shape[-1] > 1:
        total = total[..., ::2] + total[..., 1::2]
    return scores, total


def _weights(z: Tensor, p: Tensor, experts: Tensor, order: str) -> Tensor:
    """Of the chosen experts, before they are divided by their sum."""
    if order == "softmax_topk":
        return p.gather(-1, experts)
    own = z.gather(-1, experts)
    return _exp(own - own[..., :1])


def _in_turn(terms: Tensor) -> Tensor:
    total = terms[..., 0]
    for term in terms.unbind(-1)[1:]:
        total = total + term
    return total


def _exp(x: Tensor) -> Tensor:
    return x.double().exp().to(x.dtype)
