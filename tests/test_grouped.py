"""Products of experts on a CPU: known answers, what the list of strips holds, and calls that are refused."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import isobit
from interpreted import in_interpreter
from isobit.frame.contract import ContractError
from isobit.ops.det_grouped_linear import model
from isobit.ops.det_grouped_linear.strips import capacity

BF16 = torch.bfloat16


def test_known_answers() -> None:
    """Small integers: every row times the weight of its expert, the last row of none."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], dtype=BF16)
    weight = torch.tensor([[[1.0, 0.0]], [[9.0, 9.0]], [[1.0, 1.0]]], dtype=BF16)
    bias = torch.tensor([[0.5], [100.0], [-1.0]])
    y = isobit.det_grouped_linear(x, weight, torch.tensor([0, 1, 1, 3]), bias)
    assert y.tolist() == [[1.5], [6.0], [10.0], [0.0]]
    dy = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=BF16)
    dw = isobit.det_grouped_dw(x, dy, torch.tensor([0, 1, 1, 3]), init=torch.ones(3, 1, 2))
    assert dw.tolist() == [[[2.0, 3.0]], [[1.0, 1.0]], [[22.0, 27.0]]]


def test_gradients_known_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=BF16, requires_grad=True)
    weight = torch.tensor([[[1.0, 2.0]], [[3.0, 5.0]]], dtype=BF16, requires_grad=True)
    bias = torch.zeros(2, 1, requires_grad=True)
    y = isobit.det_grouped_linear(x, weight, torch.tensor([0, 2, 2]), bias)
    y.backward(torch.tensor([[1.0], [2.0], [4.0]], dtype=BF16))
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    assert x.grad.tolist() == [[1.0, 2.0], [2.0, 4.0], [0.0, 0.0]]
    assert weight.grad.tolist() == [[[7.0, 10.0]], [[0.0, 0.0]]]
    assert bias.grad.tolist() == [[3.0], [0.0]]


def test_frozen_weights_keep_no_rows() -> None:
    x = torch.randn(4, 8).to(BF16).requires_grad_()
    weight = torch.randn(2, 3, 8).to(BF16)
    y = isobit.det_grouped_linear(x, weight, torch.tensor([0, 2, 4]))
    assert y.grad_fn is not None
    kept = [t for t in y.grad_fn.saved_tensors if t is not None]  # type: ignore[attr-defined]
    assert not any(t.data_ptr() == x.data_ptr() for t in kept)


BOUNDS = [
    [0, 3, 3, 70, 71, 200, 211], [0, 0, 0, 211, 211], [0, 60, 130], [0, 0], [0, 2**31 - 1, 5, 7],
    [-5, -1, -(2**31), -7], [200, 10, 150, 300], [7, 3, 3, 2], [211] * 4,
]  # fmt: skip


def strips_of(bounds: list[int], dtype: torch.dtype, height: int, R: int) -> Tensor:
    from isobit.frame.launch import run
    from isobit.ops.det_grouped_linear.strips import strips

    return strips(torch.zeros(R, 8, dtype=BF16), torch.tensor(bounds, dtype=dtype), height, run)


def lists_of_strips() -> list[list[int]]:
    return [
        strips_of(bounds, dtype, height, 211).tolist()
        for bounds in BOUNDS
        for dtype in (torch.int32, torch.int64)
        for height in (8, 128)
    ]


def wild_sums() -> list[list[float]]:
    """Of bounds that no contract allows: nothing is read out of bounds, and the sums are the model's."""
    from isobit.ops.det_grouped_linear import kernels_triton

    x, dy = (torch.arange(211.0 * n).view(211, n).remainder(7).to(BF16) for n in (3, 2))
    found = []
    for bounds in BOUNDS:
        offsets = torch.tensor(bounds)
        cuts = torch.tensor([[10**9, -5, e, 7] for e in range(len(bounds) - 1)])
        for seqs in (None, cuts, cuts[:, :1].contiguous()):
            found.append(kernels_triton.token_product(x, dy, offsets, seqs, None, torch.float32).tolist())
    return found


def sums_of_views() -> list[list[float]]:
    """Of bounds that are a part of a wider tensor, and of a copy."""
    wide = torch.tensor([[0, 7, 30, 99], [30, 41, 60, 99], [60, 63, 96, 99]])
    gen = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(96, n, generator=gen).to(BF16) for n in (9, 8))
    given = {"offsets": torch.tensor([0, 30, 60, 96]), "backend": "triton"}
    cuts = (wide[:, :3], wide[:, :3].contiguous())
    return [isobit.det_grouped_dw(x, dy, cu_seqlens=each, **given).tolist() for each in cuts]  # type: ignore


def wild_bounds() -> list[list[list[int]]]:
    """Where experts begin and end, of bounds that no contract allows."""
    from isobit.frame.launch import run
    from isobit.ops.det_grouped_linear.strips import bounds

    return [bounds(torch.empty(211, 3), torch.tensor(of), run).tolist() for of in BOUNDS]


def in_the_interpreter(function: str) -> Any:
    program = f"import json, test_grouped\nprint(json.dumps(test_grouped.{function}()))"
    return iter(json.loads(in_interpreter(program)))


def test_the_list_of_strips_covers_every_row_once_whatever_the_offsets_hold() -> None:
    found = in_the_interpreter("lists_of_strips")
    for bounds in BOUNDS:
        for _ in (torch.int32, torch.int64):
            for height in (8, 128):
                groups = [*model.rows_of(torch.tensor(bounds), 211)]
                groups.append((groups[-1][1], 211))
                wanted: list[list[int]] = []
                for e, (first, end) in enumerate(groups):
                    begun = len(wanted)
                    wanted += [[e, begun, first, end]] * -(-(end - first) // height)
                table = next(found)
                assert table[0] == len(wanted) <= capacity(211, len(bounds) - 1, height)
                lines = table[4 : 4 + 4 * len(wanted)]
                assert [lines[i : i + 4] for i in range(0, len(lines), 4)] == wanted


def test_sums_of_any_bounds_stay_inside() -> None:
    found = in_the_interpreter("wild_sums")
    x, dy = (torch.arange(211.0 * n).view(211, n).remainder(7).to(BF16) for n in (3, 2))
    for bounds in BOUNDS:
        cuts = torch.tensor([[10**9, -5, e, 7] for e in range(len(bounds) - 1)])
        for seqs in (None, cuts, cuts[:, :1]):
            ours = torch.tensor(next(found))
            assert torch.equal(
                ours, model.token_product(x, dy, torch.tensor(bounds), seqs, None, torch.float32)
            )


def test_bounds_of_sequences_are_read_through_their_strides() -> None:
    of_a_view, of_a_copy = in_the_interpreter("sums_of_views")
    assert of_a_view == of_a_copy


@pytest.mark.parametrize(
    ("offsets", "rule"),
    [
        ([0, 3, 2, 5], "must not descend: .1.=3, .2.=2"),
        ([1, 3, 4, 5], "must begin with 0, not 1"),
        ([0, 3, 4, 9], "must not exceed the number of rows, 5: .3.=9"),
        ([0, 2, 5], "must have one element more than there are experts, 4"),
    ],
)
def test_wrong_offsets_are_refused(offsets: list[int], rule: str) -> None:
    x, weight = torch.zeros(5, 8, dtype=BF16), torch.zeros(3, 4, 8, dtype=BF16)
    with pytest.raises(ContractError, match=rf"det_grouped_linear.offsets: .*{rule}"):
        isobit.det_grouped_linear(x, weight, torch.tensor(offsets))


def test_sequences_of_another_expert_are_refused() -> None:
    x, dy = torch.zeros(5, 8, dtype=BF16), torch.zeros(5, 4, dtype=BF16)
    for cuts in ([[0, 1, 2], [0, 4, 5]], [[0, 2, 1], [2, 4, 5]], [[0, 1, 3], [2, 4, 5]]):
        with pytest.raises(ContractError, match=r"det_grouped_dw.cu_seqlens: .*must ascend from"):
            isobit.det_grouped_dw(x, dy, torch.tensor([0, 2, 5]), cu_seqlens=torch.tensor(cuts))


def test_rows_of_experts_are_those_of_the_model_whatever_the_offsets_hold() -> None:
    made = in_the_interpreter("wild_bounds")
    for bounds in BOUNDS:
        assert next(made) == [list(rows) for rows in model.rows_of(torch.tensor(bounds), 211)]
