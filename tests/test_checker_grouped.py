"""The checker on products of experts that are known to be bad: each must fail on the law that is there for
it, and a correct one must pass."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.check.laws.strides import cases_in_wider_tensors
from isobit.check.runner import FAIL, OK
from isobit.frame.op import OPS
from isobit.numerics import CHAIN16, SEG16_512, chain, cut, segments
from isobit.ops.det_grouped_linear.proof.linear import controls_of_gradients
from isobit.spec.proof import Case
from isobit.spec.proofs import proof_of, proofs
from isobit.spec.trial import Trial
from test_checker_products import candidate, only

ROWS = "M=40 E=4 K=48 N=24 bf16 bias=fp32"
ROWS_BITS = "M=90 E=6 K=200 N=40 fp16 cancelling"
SUMS = "M=60 E=4 K=32 N=24 bf16"
SUMS_BITS = "M=1100 E=3 K=24 N=16 bf16"
SUMS_CUT = "M=900 E=4 K=18 N=24 fp16 sequences=4 init=True"

Function = Callable[..., Tensor]


def grouped(
    x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, product: Function = chain
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    out = torch.zeros(len(rows), weight.shape[1])
    for e, (first, end) in enumerate(pairwise(offsets.tolist())):
        out[first:end] = product(rows[first:end], weight[e].t())
        if bias is not None:
            out[first:end] += bias[e].float()
    return out.to(x.dtype).view(*x.shape[:-1], weight.shape[1])


def sums(
    x: Tensor, dy: Tensor, offsets: Tensor, cu_seqlens: Tensor | None, init: Tensor | None
) -> Tensor:  # fmt: skip
    x, dy = (t.reshape(-1, t.shape[-1]) for t in (x, dy))
    found = []
    for e, (first, end) in enumerate(pairwise(offsets.tolist())):
        bounds = [first, end] if cu_seqlens is None else cu_seqlens[e].tolist()
        lengths = [b - a for a, b in pairwise(bounds)]
        start = None if init is None else init[e]
        found.append(segments(dy[first:end].t(), x[first:end], cut(lengths, 512), start))
    return torch.stack(found)


def of_rows(law: str, case: str | None, function: Function) -> Any:
    with candidate("det_grouped_linear", function, str(CHAIN16)):
        return only("det_grouped_linear", law, case)


def of_sums(law: str, case: str | None, function: Function) -> Any:
    with candidate("det_grouped_dw", function, str(SEG16_512)):
        return only("det_grouped_dw", law, case)


def test_correct_ones_pass() -> None:
    found = [of_rows("accuracy", ROWS, grouped), of_rows("invariant", ROWS_BITS, grouped)]
    found += [of_rows("contract", None, grouped)]
    found += [of_sums("accuracy", SUMS, sums), of_sums("contract", None, sums)]
    found += [of_sums("invariant", case, sums) for case in (SUMS_BITS, SUMS_CUT)]
    assert [(c.op, c.law, c.reason) for c in found if c.status != OK] == []


def test_orders_of_gradients_show_in_16_bits_too() -> None:
    """In hundreds of elements. A sum over 16 rows is one step, and has no order."""

    def said(M: int, E: int) -> list[str]:
        case = Case({"M": M, "E": E, "K": 24, "N": 24}, torch.bfloat16, data="random")
        trial = Trial(OPS["det_grouped_linear"], "model", torch.device("cpu"), case, "cpu")
        args = trial.args()
        dy = trial.cotangents(trial.forward(args))[0]
        return [check.message for check in controls_of_gradients(trial, args, dy)]

    long, short = said(80, 2), said(16, 8)
    assert len(long) == 2 and "dweight" in long[0]
    assert all(int(message.split()[-2]) > 50 for message in long), long
    assert len(short) == 1 and "dx" in short[0]


# Rows


def with_a_capacity(x: Tensor, offsets: Tensor, **rest: Any) -> Tensor:
    """Rows of an expert beyond 1.5 times the average get nothing."""
    out = grouped(x=x, offsets=offsets, **rest)
    most = int(1.5 * int(offsets[-1]) / (len(offsets) - 1)) + 1
    for first, end in pairwise(offsets.tolist()):
        out.view(-1, out.shape[-1])[first + most : end] = 0
    return out


def split_where_rows_are_few(**args: Any) -> Tensor:
    """k in two halves, for experts with fewer than 16 rows."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        half = a.shape[1] // 2
        few = len(a) < 16
        return chain(a[:, :half], b[:half]) + chain(a[:, half:], b[half:]) if few else chain(a, b)

    return grouped(**args, product=product)


def all_experts_times_zero_or_one(x: Tensor, weight: Tensor, offsets: Tensor, bias: Any) -> Tensor:
    """Every row times the weight of every expert, and then selected by a multiplication: 0 * NaN is NaN."""
    rows = x.reshape(-1, x.shape[-1])
    ends = offsets[1:].tolist()
    place = torch.arange(len(rows))
    total = torch.zeros(len(rows), weight.shape[1])
    for e, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        own = ((first <= place) & (place < end)).float()[:, None]
        total += own * (chain(rows, weight[e].t()) + (0.0 if bias is None else bias[e].float()))
    return total.to(x.dtype).view(*x.shape[:-1], weight.shape[1])


def by_number_of_experts(weight: Tensor, **args: Any) -> Tensor:
    """k in another order if there are few experts."""

    def backwards(a: Tensor, b: Tensor) -> Tensor:
        return chain(a.flip(1), b.flip(0))

    return grouped(weight=weight, **args, product=backwards if len(weight) < 6 else chain)


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (with_a_capacity, "of 77 rows alone"),
        (split_where_rows_are_few, "of 77 rows alone"),
        (all_experts_times_zero_or_one, "full of NaN|more experts"),
        (by_number_of_experts, "taken out|alone"),
    ],
)
def test_rows_that_depend_on_others_fail_on_invariant(bad: Function, what: str) -> None:
    cell = of_rows("invariant", ROWS_BITS, bad)
    assert cell.status == FAIL
    failed = " ".join(check["message"] for check in cell.outputs if not check["passed"])
    assert any(each in failed for each in what.split("|")), failed


def test_only_the_bits_of_these_are_wrong() -> None:
    for bad in (split_where_rows_are_few, by_number_of_experts):
        assert of_rows("accuracy", ROWS, bad).status == OK


def test_a_capacity_fails_on_accuracy_too() -> None:
    assert of_rows("accuracy", ROWS, with_a_capacity).status == FAIL


def the_next_expert(offsets: Tensor, **args: Any) -> Tensor:
    """The last row of an expert goes to the next one."""
    moved = offsets.clone()
    moved[1:-1] = (moved[1:-1] - 1).clamp(min=0)
    return grouped(offsets=moved.cummax(0).values.to(offsets.dtype), **args)


def test_rows_of_the_wrong_expert_fail_on_accuracy() -> None:
    assert of_rows("accuracy", ROWS, the_next_expert).status == FAIL


# Sums


def in_order_of_arrival(x: Tensor, dy: Tensor, **args: Any) -> Tensor:
    """Rows of an expert as some race of the whole batch has placed them."""
    x, dy = (t.reshape(-1, t.shape[-1]) for t in (x, dy))
    order = torch.arange(len(x))
    gen = torch.Generator().manual_seed(len(x))
    for first, end in pairwise(args["offsets"].tolist()):
        order[first:end] = first + torch.randperm(end - first, generator=gen)
    return sums(x[order], dy[order], **args)


def segments_of_the_batch(x: Tensor, dy: Tensor, offsets: Tensor, **rest: Any) -> Tensor:
    """Segments end at multiples of 512 of the batch, and not of the expert."""
    x, dy = (t.reshape(-1, t.shape[-1]) for t in (x, dy))
    bounds = []
    for first, end in pairwise(offsets.tolist()):
        inner = range(-(-(first + 1) // 512) * 512, end, 512)
        row = [first, *inner, end]
        bounds.append(row + [end] * (8 - len(row)))
    return sums(x, dy, offsets, torch.tensor(bounds), rest["init"])


def sequences_forgotten(cu_seqlens: Tensor | None, **args: Any) -> Tensor:
    return sums(cu_seqlens=None, **args)


@pytest.mark.parametrize("bad", [in_order_of_arrival, segments_of_the_batch])
def test_sums_that_depend_on_other_experts_fail_on_invariant(bad: Function) -> None:
    assert of_sums("accuracy", SUMS, bad).status == OK
    cell = of_sums("invariant", SUMS_BITS, bad)
    failed = [check["message"] for check in cell.outputs if not check["passed"]]
    assert cell.status == FAIL and any("expert" in message for message in failed)


def test_segments_that_cross_sequences_fail_on_invariant() -> None:
    assert of_sums("accuracy", SUMS, sequences_forgotten).status == OK
    cell = of_sums("invariant", SUMS_CUT, sequences_forgotten)
    assert cell.status == FAIL and "sequences" in cell.reason


def bounds_without_strides(cu_seqlens: Tensor | None, **args: Any) -> Tensor:
    """Reads bounds as if their rows followed one another."""
    if cu_seqlens is not None:
        there = torch.tensor(cu_seqlens.untyped_storage().tolist(), dtype=torch.uint8).view(cu_seqlens.dtype)
        firsts, ends = cu_seqlens[:, :1].clone(), cu_seqlens[:, -1:].clone()
        cu_seqlens = there[cu_seqlens.storage_offset() :][: cu_seqlens.numel()].view(cu_seqlens.shape)
        cu_seqlens = torch.cat([firsts, cu_seqlens[:, 1:-1].clamp(firsts, ends), ends], 1).cummax(1).values
    return sums(cu_seqlens=cu_seqlens, **args)


def test_integers_that_are_read_without_strides_fail_on_invariant() -> None:
    assert of_sums("accuracy", SUMS, bounds_without_strides).status == OK
    cell = of_sums("invariant", SUMS_CUT, bounds_without_strides)
    failed = {check["message"].split(":")[0] for check in cell.outputs if not check["passed"]}
    assert cell.status == FAIL
    assert {"cu_seqlens in a wider tensor", "all integers in wider ones"} <= failed
    assert not any("x in a" in message or "offsets" in message for message in failed)


def test_tensors_that_no_case_of_bits_has_are_tried_in_wider_ones_too() -> None:
    """Pages of attention, for example: each tensor that a small case of the proof has."""
    for name in proofs():
        proof = proof_of(OPS[name])
        first = next((case for case in proof.bit_cases if not case.heavy), None)
        if first is None:
            continue
        trial = Trial(proof.op, proof.op.backends[-1].name, torch.device("cpu"), first, "cpu")
        small = [case for case in proof.cases if not case.heavy and not case.gpu_gb]
        tensors = {n for case in small for n, t in trial.args(case).items() if isinstance(t, Tensor)}
        also = {n for case in proof.bit_cases if not case.heavy for n, t in trial.args(case).items()
                if isinstance(t, Tensor)}  # fmt: skip
        tried = {
            n for _, args in cases_in_wider_tensors(trial) for n, t in args.items() if isinstance(t, Tensor)
        }
        assert tensors <= tried | also, name


def rows_beyond_the_end(offsets: Tensor, x: Tensor, **args: Any) -> Tensor:
    """The last step of 16 rows is not masked where an expert ends."""
    total = sums(x=x, offsets=offsets, **args)
    rows, dy = x.reshape(-1, x.shape[-1]), args["dy"].reshape(-1, args["dy"].shape[-1])
    for e, (first, end) in enumerate(pairwise(offsets.tolist())):
        beyond = slice(end, min(first + -(-(end - first) // 16) * 16, len(rows)))
        total[e] += dy[beyond].float().t() @ rows[beyond].float()
    return total


def test_rows_of_the_next_expert_in_a_sum_fail_on_accuracy() -> None:
    assert of_sums("accuracy", SUMS, rows_beyond_the_end).status == FAIL
