"""The router and the combination on a CPU: known answers, ties, masked tokens, and calls that are refused;
and what the kernels do with places and experts that do not exist, in Triton's interpreter."""

import json

import pytest
import torch

import isobit
from interpreted import in_interpreter
from isobit.frame.contract import ContractError
from isobit.ops.route.op import backward

BF16 = torch.bfloat16


def test_known_answers() -> None:
    """The logarithms of 1, 2, 4 and 1: probabilities are eighths."""
    logits = torch.tensor([[1.0, 2.0, 4.0, 1.0]]).log()
    weights, experts, place, offsets = isobit.route(logits, 3)
    assert experts.tolist() == [[2, 1, 0]] and place.tolist() == [[2, 1, 0]]
    assert offsets.tolist() == [0, 1, 2, 3, 3]
    assert torch.allclose(weights, torch.tensor([[0.5, 0.25, 0.125]]))
    for same in ({"normalize": True}, {"order": "topk_softmax"}):
        weights = isobit.route(logits, 3, **same).weights  # type: ignore[arg-type]
        assert torch.allclose(weights, torch.tensor([[4.0, 2.0, 1.0]]) / 7)


def test_of_equal_scores_the_lower_expert_is_chosen() -> None:
    even = torch.tensor([[0.2, 0.3, 0.2, 0.3, 0.0], [-0.0, 0.0, -0.0, 0.0, -1.0]])
    assert isobit.route(even, 3).experts.tolist() == [[1, 3, 0], [0, 1, 2]]


def test_masked_tokens_go_to_no_expert() -> None:
    logits = torch.randn(4, 3, requires_grad=True)
    routed = isobit.route(logits, 2, mask=torch.tensor([1, 0, 1, 0]))
    assert routed.experts[1].tolist() == [3, 3] and not routed.weights[1].any()
    assert routed.offsets[-1] == 4 and sorted(routed.place[[1, 3]].flatten().tolist()) == [4, 5, 6, 7]
    (dlogits,) = torch.autograd.grad(routed.weights.sum(), logits)
    assert not dlogits[1].any() and not dlogits[3].any()


def test_a_bias_chooses_and_groups_restrict() -> None:
    logits = torch.tensor([[3.0, -3.0, 1.0, 1.0]])
    bias = torch.tensor([0.0, 5.0, 0.0, 0.0])
    routed = isobit.route(logits, 1, scoring="sigmoid", bias=bias)
    assert routed.experts.tolist() == [[1]] and torch.allclose(routed.weights, logits[:, 1:2].sigmoid())
    routed = isobit.route(logits, 2, scoring="sigmoid", groups=2, top_groups=1)
    assert routed.experts.tolist() == [[2, 3]]  # 0.73 + 0.73 against 0.95 + 0.05


@pytest.mark.parametrize(
    ("places", "rule"),
    [([[0, 4]], r"must be in \[0, 4\), the rows: \[0, 1\] is 4"), ([[1, 1]], "a row twice")],
)
def test_wrong_places_are_refused(places: list[list[int]], rule: str) -> None:
    y, weights, place = torch.zeros(4, 2), torch.zeros(1, 2), torch.tensor(places)
    with pytest.raises(ContractError, match=rf"combine.place: .*{rule}"):
        isobit.combine(y, weights, place)
    with pytest.raises(ContractError, match=r"spread.place"):
        isobit.spread(torch.zeros(1, 2), place, rows=4)


def test_mixed_dtypes_are_refused() -> None:
    with pytest.raises(ContractError, match=r"combine.weights: .*dtype must be that of y, bf16, or fp32"):
        isobit.combine(torch.zeros(2, 4, dtype=BF16), torch.zeros(1, 2).half(), torch.tensor([[0, 1]]))


def test_a_bias_is_no_wider_than_the_arithmetic() -> None:
    bias = torch.zeros(4, dtype=torch.float64)
    with pytest.raises(ContractError, match=r"route.bias: .*dtype must be fp32, or fp64 if logits are fp64"):
        isobit.route(torch.zeros(2, 4), 2, scoring="sigmoid", bias=bias)
    logits = torch.tensor([[0.0, 1e-12, 0.0, 0.0]], dtype=torch.float64)  # which fp32 scores do not show
    for given in (bias, bias.float()):
        routed = isobit.route(logits, 1, scoring="sigmoid", bias=given)
        assert routed.experts.tolist() == [[1]] and torch.equal(routed.weights, logits[:, 1:2].sigmoid())


@pytest.mark.parametrize(
    ("top_k", "columns", "rule"),
    [(3, 2, r"experts: .*must have top_k columns, 3"), (1, 2, r"experts: .*must have top_k columns, 1"),
     (0, 0, r"top_k: .*from 1 to the number of experts, 4"), (5, 5, r"top_k: .*number of experts, 4")],
)  # fmt: skip
def test_the_backward_reads_no_more_columns_than_there_are(top_k: int, columns: int, rule: str) -> None:
    call = {"logits": torch.zeros(3, 4), "scoring": "softmax", "order": "softmax_topk", "normalize": False}
    experts, dweights = torch.zeros(3, columns, dtype=torch.int32), torch.zeros(3, columns)
    with pytest.raises(ContractError, match=rf"route_bwd.{rule}"):
        backward(**call, top_k=top_k, mask=None, experts=experts, dweights=dweights)


def wild_places() -> list[list[list[float]]]:
    """Rows of places that do not exist: the memory around y and dy is watched."""
    from isobit.ops.combine import kernels_triton as kernels

    around = torch.full((8, 3), 7.0)
    y, weights = around[2:6], torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    place = torch.tensor([[0, 4], [-1, 2**40]])
    out = kernels.combine(y=y, weights=weights, place=place, rounding="hf")
    call = {"y": y, "weights": weights, "place": place, "dout": torch.ones(2, 3)}
    _, dweights = kernels.combine_bwd(**call, want_y=True, want_weights=True)
    kernels.spread(x=torch.ones(2, 3), place=place, rows=4)
    assert dweights is not None
    return [out.tolist(), dweights.tolist(), around.tolist()]


def test_places_that_do_not_exist_add_nothing() -> None:
    program = "import json, test_route\nprint(json.dumps(test_route.wild_places()))"
    out, dweights, around = json.loads(in_interpreter(program))
    assert out == [[7.0] * 3, [0.0] * 3] and dweights == [[21.0, 0.0], [0.0, 0.0]]
    assert around == [[7.0] * 3] * 8
