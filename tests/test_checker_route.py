"""The checker on routers and combinations that are known to be bad: each must fail on the law that is there
for it, and a correct one must pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.check.runner import FAIL, OK
from isobit.ops.combine import model
from isobit.ops.combine.op import COMBINE_1
from isobit.ops.route import reference
from isobit.ops.route.op import ROUTE_1
from test_checker_products import candidate, only

ROUTED = "N=20 E=32 k=3 fp32 random"
MASKED = "N=40 E=12 k=3 fp32 mask=bool"
PADDED = "B=2 T=5 E=20 k=4 bf16 padded order=topk_softmax mask=int64"
TIES = "N=13 E=12 k=3 fp32 normalize=True"
COMBINED = "N=9 k=5 D=600 fp32 random"
ROUNDED = "N=12 k=6 D=520 bf16 cancelling weights=fp32 idle=3"

Function = Callable[..., Any]


def of_route(law: str, case: str, function: Function) -> Any:
    backward = candidate("route_bwd", reference.route_bwd, str(ROUTE_1))
    with candidate("route", function, str(ROUTE_1)), backward:
        return only("route", law, case)


def of_combine(law: str, case: str, function: Function) -> Any:
    with candidate("combine", function, str(COMBINE_1)):
        return only("combine", law, case)


def test_correct_ones_pass() -> None:
    cells = [
        of_route("accuracy", TIES, reference.route),
        of_combine("accuracy", "N=7 k=3 D=33 bf16", model.combine),
    ]
    cells += [of_combine("agree", ROUNDED, model.combine), of_route("invariant", ROUTED, reference.route)]
    cells += [of_route("agree", MASKED, reference.route)]
    assert [(c.op, c.law, c.reason) for c in cells if c.status != OK] == []


def with_a_capacity(**args: Any) -> Any:
    """The rows of an expert beyond its share of the batch go to none."""
    weights, experts, _, _ = reference.route(**args)
    E = args["logits"].shape[-1]
    most = max(experts.numel() // E, 1)
    flat, seen = experts.flatten().clone(), dict[int, int]()
    for i, e in enumerate(experts.flatten().tolist()):
        seen[e] = seen.get(e, 0) + 1
        if seen[e] > most:
            flat[i] = E
    experts = flat.view(experts.shape)
    return weights, experts, *reference.expert_rows(experts, E)


def of_the_whole_batch(**args: Any) -> Any:
    """The largest logit of the batch is subtracted, and not that of the row."""
    weights, experts, place, offsets = reference.route(**args)
    z = args["logits"].float()
    e = (z - z.max()).exp()
    return (e / e.sum(-1, keepdim=True)).gather(-1, experts.long()).to(weights.dtype), experts, place, offsets


@pytest.mark.parametrize("bad", [with_a_capacity, of_the_whole_batch])
def test_routes_that_depend_on_other_tokens_fail_on_invariant(bad: Function) -> None:
    assert of_route("invariant", ROUTED, bad).status == FAIL


def higher_expert(**args: Any) -> Any:
    """Of equal scores the higher expert."""
    E = args["logits"].shape[-1]
    weights, experts, *_ = reference.route(**args | {"logits": args["logits"].flip(-1)})
    experts = torch.where(experts == E, E, E - 1 - experts)
    return weights, experts, *reference.expert_rows(experts, E)


def masked_tokens_kept(**args: Any) -> Any:
    return reference.route(**args | {"mask": None})


def test_another_choice_fails_on_accuracy() -> None:
    assert of_route("accuracy", TIES, higher_expert).status == FAIL
    assert of_route("accuracy", PADDED, masked_tokens_kept).status == FAIL


def in_order_of_arrival(**args: Any) -> Any:
    """Rows of an expert as some race has placed them."""
    weights, experts, place, offsets = reference.route(**args)
    order = torch.randperm(place.numel(), generator=torch.Generator().manual_seed(1))
    shuffled, offsets = reference.expert_rows(experts.flatten()[order][:, None], args["logits"].shape[-1])
    place = torch.empty_like(place.flatten())
    place[order] = shuffled.flatten()
    return weights, experts, place.view(experts.shape), offsets


def test_rows_in_order_of_arrival_fail_on_agree() -> None:
    assert of_route("accuracy", PADDED, in_order_of_arrival).status == OK
    cell = of_route("agree", MASKED, in_order_of_arrival)
    assert cell.status == FAIL and "stable sort" in cell.reason


# Combinations


def in_order_of_rows(y: Tensor, weights: Tensor, place: Tensor, rounding: str) -> Tensor:
    """A loop over experts adds rows as they are sorted, and not in the order of the token's experts."""
    order = place.long().sort(dim=-1).indices
    return model.combine(
        y=y, weights=weights.gather(1, order), place=place.gather(1, order), rounding=rounding
    )


def in_sixteen_bits(y: Tensor, weights: Tensor, place: Tensor, rounding: str) -> Tensor:
    """Partial sums in the dtype of y, as `index_add_` has them."""
    total = torch.zeros(len(place), y.shape[1], dtype=y.dtype)
    for j in range(place.shape[1]):
        total = total + (y[place[:, j].long()] * weights[:, j, None]).to(y.dtype)
    return total


def rounded_once(rounding: str, **args: Any) -> Tensor:
    return model.combine(rounding="once", **args)


def test_another_order_of_experts_fails_on_invariant() -> None:
    assert of_combine("accuracy", "N=7 k=3 D=33 bf16", in_order_of_rows).status == OK
    assert of_combine("invariant", COMBINED, in_order_of_rows).status == FAIL


@pytest.mark.parametrize("bad", [in_sixteen_bits, rounded_once])
def test_other_roundings_fail_on_agree(bad: Function) -> None:
    assert of_combine("agree", ROUNDED, bad).status == FAIL
