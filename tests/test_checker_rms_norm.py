"""Kernels of `rms_norm` that are known to be bad must fail, each on the law that is there for it, and a
correct one must pass every law."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from isobit.check.runner import FAIL, OK, Cell, Request, run
from isobit.frame.backend import Backend
from isobit.frame.op import OPS
from isobit.ops.rms_norm import model
from isobit.spec.proof import Case, NoSum
from isobit.spec.proofs import proofs

CPU = torch.device("cpu")
PLAIN = "N=7 D=257 fp32"
SUMMED = "B=2 T=9 D=33 bf16 shifted residual=True"
BITS = "N=70 D=300 fp32 random residual=True"
LONG = "N=19 D=1100 fp32 random residual=True cast=after offset=1.0"
AGREE = "N=70 D=300 fp32 random residual=True offset=1.0"

Run = Callable[..., Any]
Change = Callable[[], Any]


def never(args: dict[str, Any]) -> None:
    """No reason not to serve."""


@contextmanager
def candidate(
    forward: Run = model.rms_norm, backward: Run = model.rms_norm_bwd, **changed: Run
) -> Iterator[None]:
    """`rms_norm` with a backend "candidate" of another class: the model, with some functions changed."""
    with ExitStack() as stack:
        for name, run_backend in (("rms_norm", forward), ("rms_norm_bwd", backward)):

            def with_changes(run_backend: Run = run_backend, **args: Any) -> Any:
                with ExitStack() as patches:
                    for function, instead in changed.items():
                        patches.enter_context(mock.patch.object(model, function, instead))
                    return run_backend(**args)

            backend = Backend("candidate", with_changes, "test/rows", never, False, never)
            OPS[name].backends.append(backend)
            stack.callback(OPS[name].backends.remove, backend)
        yield


def check(law: str, case: str | None) -> list[Cell]:
    return run(Request(ops=("rms_norm",), backends=("candidate",), laws=(law,), device=CPU, case=case))


def only(law: str, case: str) -> Cell:
    (cell,) = check(law, case)
    return cell


def test_a_correct_kernel_passes_every_law() -> None:
    with candidate():
        cells = [
            *check("accuracy", PLAIN), *check("accuracy", SUMMED), *check("gradient", SUMMED),
            *check("repeatable", SUMMED), *check("written", SUMMED), *check("invariant", BITS),
            *check("invariant", LONG), *check("agree", AGREE), *check("contract", None),
        ]  # fmt: skip
    assert [(c.law, c.reason) for c in cells if c.status != OK] == []


# Wrong numbers


def without_the_last_column(terms: Tensor) -> Tensor:
    return model_row_sums(torch.cat([terms[:, :-1], torch.zeros_like(terms[:, -1:])], -1))


model_row_sums, model_group_sums, model_tree = model.row_sums, model.group_sums, model.tree_of_rows


def test_a_dropped_column_fails_on_accuracy() -> None:
    with candidate(row_sums=without_the_last_column):
        cell = only("accuracy", PLAIN)
    assert cell.status == FAIL and cell.reason.startswith("0:out: ")


def no_eps(**args: Any) -> Any:
    return model.rms_norm(**args | {"eps": 0.0})


def no_offset(**args: Any) -> Any:
    return model.rms_norm(**args | {"offset": 0.0})


def no_residual(**args: Any) -> Any:
    out, summed, rstd = model.rms_norm(**args)
    return out, None if summed is None else args["x"].clone(), rstd


@pytest.mark.parametrize(
    ("forward", "case", "which"),
    [
        (no_eps, PLAIN, "0:out: "),
        (no_offset, "N=20 D=129 bf16 cast=after offset=1.0", "0:out: "),
        (no_residual, SUMMED, "1:summed: "),
    ],
)
def test_an_incomplete_forward_fails_on_accuracy(forward: Run, case: str, which: str) -> None:
    with candidate(forward):
        cell = only("accuracy", case)
    assert cell.status == FAIL and cell.reason.startswith(which), cell.reason


def no_mean(**args: Any) -> Any:
    """dx without the part that goes through rstd."""
    with mock.patch.object(model, "row_sums", lambda terms: torch.zeros_like(terms[:, 0])):
        return model.rms_norm_bwd(**args)


def no_sum(**args: Any) -> Any:
    return model.rms_norm_bwd(**args | {"dsummed": None})


def off_by_a_thousandth(**args: Any) -> Any:
    dx, dweight = model.rms_norm_bwd(**args)
    return dx, None if dweight is None else dweight * 1.001


def last_rows_lost(**args: Any) -> Any:
    """dweight of whole groups only."""
    with mock.patch.object(model, "group_sums", lambda terms: model_group_sums(terms)[: len(terms) // 16]):
        return model.rms_norm_bwd(**args)


@pytest.mark.parametrize(
    ("backward", "which", "case"),
    [
        (no_mean, "x", PLAIN),
        (no_sum, "x", SUMMED),
        (off_by_a_thousandth, "weight", PLAIN),
        (last_rows_lost, "weight", SUMMED),
    ],
)
def test_an_incomplete_gradient_fails_on_gradient_alone(backward: Run, which: str, case: str) -> None:
    with candidate(backward=backward):
        (first,) = check("accuracy", case)
        assert first.status == OK, first.reason
        cell = only("gradient", case)
    assert cell.status == FAIL and cell.reason.startswith(f"gradient:{which}: ")


# Wrong bits


def by_torch(terms: Tensor) -> Tensor:
    """An order of torch's own, in two parts if there are many rows."""
    if len(terms) < 40:
        return terms.sum(-1)
    half = terms.shape[1] // 2
    return terms[:, :half].sum(-1) + terms[:, half:].sum(-1)


def test_an_order_that_depends_on_the_batch_fails_on_invariant() -> None:
    with candidate(row_sums=by_torch):
        assert only("accuracy", PLAIN).status == only("gradient", PLAIN).status == OK
        cell = only("invariant", BITS)
    assert cell.status == FAIL and "alone" in cell.reason


def leaky(terms: Tensor) -> Tensor:
    """Rows that meet: 0 times what the others hold."""
    return model_row_sums(terms) + 0 * terms.sum()


def test_rows_that_leak_fail_on_invariant() -> None:
    with candidate(row_sums=leaky):
        assert only("accuracy", PLAIN).status == OK
        cell = only("invariant", BITS)
    assert cell.status == FAIL and "NaN" in cell.reason


def by_halves(terms: Tensor) -> Tensor:
    """512 lanes."""
    total = terms.new_zeros(len(terms), 512)
    for first in range(0, terms.shape[1], 512):
        part = terms[:, first : first + 512]
        total[:, : part.shape[1]] += part
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0]


def rows_one_by_one(terms: Tensor) -> Tensor:
    """dweight without groups."""
    total = terms.new_zeros(1, terms.shape[1])
    for row in terms:
        total = total + row
    return total


def from_the_end(terms: Tensor) -> Tensor:
    return model_group_sums(terms.flip(0))


def groups_one_by_one(sums: Tensor) -> Tensor:
    total = torch.zeros_like(sums[0])
    for part in sums:
        total = total + part
    return total


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"row_sums": by_halves}, "gradient:x: .* by its model"),
        ({"group_sums": rows_one_by_one}, "gradient:weight: .* by its model"),
        ({"group_sums": from_the_end}, "gradient:weight: 1 rows without a gradient behind"),
    ],
)
def test_another_order_than_that_of_the_class_fails_on_agree_alone(
    changed: dict[str, Run], reason: str
) -> None:
    with candidate(**changed):
        for law in ("accuracy", "gradient"):
            assert only(law, PLAIN).status == OK
        assert only("invariant", BITS).status == OK
        cell = only("agree", AGREE)
    assert cell.status == FAIL and re.match(reason, cell.reason), cell.reason


def test_groups_in_another_order_fail_on_agree() -> None:
    """Three groups: (0 + 1) + 2 is the tree and the chain, so a fourth is needed to tell them apart."""
    with candidate(tree_of_rows=groups_one_by_one):
        cell = only("agree", AGREE)
    assert cell.status == FAIL and cell.reason.startswith("gradient:weight"), cell.reason


def rounded_elsewhere(**args: Any) -> Any:
    return model.rms_norm(**args | {"cast": {"before": "after", "after": "before"}[args["cast"]]})


def sum_not_rounded(**args: Any) -> Any:
    """The norm of a sum that was not rounded yet."""
    out, summed, rstd = model.rms_norm(**args)
    wide = {n: args[n].float() for n in ("x", "residual") if args[n] is not None}
    more, _, _ = model.rms_norm(**args | wide)
    return more.to(out.dtype), summed, rstd


@pytest.mark.parametrize("forward", [rounded_elsewhere, sum_not_rounded])
def test_roundings_in_other_places_fail_on_agree(forward: Run) -> None:
    with candidate(forward):
        cell = only("agree", AGREE)
    assert cell.status == FAIL and "in bf16 by its model" in cell.reason, cell.reason


# Without a control


def declared(monkeypatch: pytest.MonkeyPatch, controls: Any, case: Case, **kernel: Run) -> Cell:
    """The invariant law with these controls, on this case of a kernel that is correct without changes."""
    proof = replace(proofs()["rms_norm"], controls=controls, bit_cases=[case])
    monkeypatch.setitem(proofs(), "rms_norm", proof)
    with candidate(**kernel):
        return only("invariant", case.name)


SEVERAL = Case({"N": 6, "D": 3}, torch.float32, "random", options={"residual": True})
ONE = Case({"N": 6, "D": 1}, torch.float32, "random", options={"residual": True})


def test_equal_bits_without_a_control_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = declared(monkeypatch, [], SEVERAL)
    assert cell.status == FAIL and cell.reason.startswith("no control: equal bits prove nothing")


def test_that_nothing_is_added_must_be_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for rows of one element, and for no others."""
    cell = declared(monkeypatch, NoSum("as I believe"), SEVERAL)
    assert cell.status == FAIL
    assert re.match(r"declared as NoSum, but out at \[0, \d\] depends on two elements of x", cell.reason)
    cell = declared(monkeypatch, NoSum("rows of one element"), ONE)
    assert cell.status == OK, cell.reason
    (shown,) = (o for o in cell.outputs if o["output"] == "no sum")
    assert shown["message"].startswith("nothing is added (rows of one element): ")


def test_a_sum_in_a_gradient_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(**args: Any) -> Any:
        dh, dweight = model.rms_norm_bwd(**args)
        return (None if dh is None else dh + args["dout"].sum(0), dweight)

    cell = declared(monkeypatch, NoSum("rows of one element"), ONE, backward=backward)
    assert cell.status == FAIL
    assert "gradient:x at [0, 0] depends on two elements of the gradient of out" in cell.reason
