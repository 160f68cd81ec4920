"""The checker on matrix products that are known to be bad: each must fail on the law that is there for it,
and a correct one must pass every law."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.check.runner import FAIL, OK, Cell, Request, run
from isobit.frame.backend import Backend
from isobit.frame.op import OPS
from isobit.numerics import CHAIN16, SEG16_512, chain, cut, segments
from isobit.ops.det_gemm import calls, model
from isobit.spec.proofs import proofs

CPU = torch.device("cpu")
LINEAR = "M=20 K=192 N=64 bf16 bias=fp32"
LINEAR_BITS = "M=66 K=530 N=72 bf16 padded out=fp32"
LINEAR_AGREE = "M=17 K=104 N=23 bf16 bias=fp32 out=fp32"
DW = "T=700 K=9 N=21 fp16 sequences=5 init=True"
DW_MASKED = "B=3 T=200 K=24 N=8 bf16 mask=bool"
DW_BITS = "T=1100 K=40 N=24 bf16"
DW_BITS_MASKED = "T=1500 K=24 N=16 fp16 mask=bool init=True"
DW_BITS_CUT = "T=900 K=18 N=33 bf16 sequences=6"


def never(args: dict[str, Any]) -> None:
    """No reason not to serve."""


@contextmanager
def candidate(op: str, function: Callable[..., Tensor], numerics: str) -> Iterator[None]:
    """An op with a backend named "candidate" that claims a numerics class, so that bit laws apply to it."""
    backend = Backend("candidate", function, numerics, never, False, never)
    OPS[op].backends.append(backend)
    try:
        yield
    finally:
        OPS[op].backends.remove(backend)


def linear_candidate(function: Callable[..., Tensor]) -> Any:
    return candidate("det_linear", function, str(CHAIN16))


def dw_candidate(function: Callable[..., Tensor]) -> Any:
    return candidate("det_gemm_dw", function, str(SEG16_512))


def only(op: str, law: str, case: str | None) -> Cell:
    (cell,) = run(Request(ops=(op,), backends=("candidate",), laws=(law,), device=CPU, case=case))
    return cell


# Correct ones


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, operand_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None, product: Any = chain,
) -> Tensor:  # fmt: skip
    assert operand_dtype in (None, x.dtype)
    total = product(x.reshape(-1, x.shape[-1]), weight.t())
    if bias is not None:
        total = total + bias.float()
    return total.to(out_dtype or x.dtype).view(*x.shape[:-1], weight.shape[0])


def dw(x: Tensor, dy: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, init: Tensor | None) -> Tensor:
    x, dy = (t.reshape(-1, t.shape[-1]) for t in (x, dy))
    live = torch.ones(len(x), dtype=torch.bool) if mask is None else mask.reshape(-1) != 0
    bounds = [0, len(x)] if cu_seqlens is None else cu_seqlens.tolist()
    lengths = [int(live[a:b].sum()) for a, b in pairwise(bounds)]
    return segments(dy[live].t(), x[live], cut(lengths, 512), init)


def test_correct_products_pass_every_law() -> None:
    with linear_candidate(linear):
        found = [only("det_linear", law, LINEAR) for law in ("accuracy", "gradient", "repeatable", "written")]
        found += [only("det_linear", "invariant", LINEAR_BITS), only("det_linear", "agree", LINEAR_AGREE)]
        found += [only("det_linear", "contract", None), only("det_linear", "traceable", None)]
    with dw_candidate(dw):
        found += [only("det_gemm_dw", "accuracy", case) for case in (DW, DW_MASKED)]
        found += [only("det_gemm_dw", "invariant", c) for c in (DW_BITS, DW_BITS_MASKED, DW_BITS_CUT)]
        found += [only("det_gemm_dw", "contract", None), only("det_gemm_dw", "traceable", None)]
    assert [(c.op, c.law, c.reason) for c in found if c.status != OK] == []


# Wrong numbers


def zeros(**args: Any) -> Tensor:
    return torch.zeros_like(linear(**args))


def dropped_tail(**args: Any) -> Tensor:
    return linear(**(args | {"x": args["x"][..., :-1], "weight": args["weight"][:, :-1]}))


def bias_after_rounding(**args: Any) -> Tensor:
    """Two roundings, on either side of the bias, instead of one."""
    rounded = linear(**(args | {"bias": None}))
    return rounded if args["bias"] is None else (rounded + args["bias"]).to(rounded.dtype)


def half_the_bits(**args: Any) -> Tensor:
    """Accumulates in bf16."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(a.shape[0], b.shape[1])
        for k in range(0, a.shape[1], 16):
            total = chain(a[:, k : k + 16], b[k : k + 16], total).bfloat16().float()
        return total

    return linear(**args, product=product)


@pytest.mark.parametrize("bad", [zeros, dropped_tail, bias_after_rounding, half_the_bits])
def test_wrong_products_fail_on_accuracy(bad: Callable[..., Tensor]) -> None:
    with linear_candidate(bad):
        cell = only("det_linear", "accuracy", LINEAR)
    assert cell.status == FAIL and cell.reason.startswith("0:y: ") and "beyond the bound" in cell.reason


def masked_rows_times_zero(**args: Any) -> Tensor:
    """0 * NaN is NaN."""
    if args["mask"] is None:
        return dw(**args)
    live = args["mask"][..., None]
    return dw(**(args | {"x": args["x"] * live, "dy": args["dy"] * live, "mask": None}))


def test_masked_rows_that_are_multiplied_by_zero_fail_on_accuracy() -> None:
    with dw_candidate(masked_rows_times_zero):
        assert only("det_gemm_dw", "accuracy", DW).status == OK
        cell = only("det_gemm_dw", "accuracy", DW_MASKED)
    assert cell.status == FAIL and "ours nan" in cell.reason


def last_row_missing(**args: Any) -> Tensor:
    return dw(**(args | {"x": args["x"][:-1], "dy": args["dy"][:-1]}))


def test_a_wrong_gradient_of_one_input_fails_on_gradient_alone() -> None:

    def bad(dy: Tensor, **args: Any) -> tuple[Tensor | None, ...]:
        dx, _, dbias = calls.run_linear_bwd(model.__name__, dy, **args)
        shortened = last_row_missing(x=args["x"], dy=dy, mask=None, cu_seqlens=None, init=None)
        return dx, shortened.to(dy.dtype), dbias

    with linear_candidate(linear), candidate("det_linear_bwd", bad, str(CHAIN16)):
        assert only("det_linear", "accuracy", LINEAR).status == OK
        cell = only("det_linear", "gradient", LINEAR)
    failed = [o["output"] for o in cell.outputs if not o["passed"]]
    assert cell.status == FAIL and failed == ["gradient:weight"]


# Wrong bits


@pytest.mark.parametrize(("good", "which"), [(1, "second"), (2, "third"), (3, "fourth")])
def test_a_product_that_changes_on_repetition_fails_on_repeatable(good: int, which: str) -> None:
    """As a replay would be that reads the addresses of the call that was recorded."""
    calls = count()

    def changing(**args: Any) -> Tensor:
        return linear(**args) if next(calls) < good else 2 * linear(**args)

    with linear_candidate(changing):
        cell = only("det_linear", "repeatable", LINEAR)
    assert cell.status == FAIL and f"{which} run against first" in cell.reason


def split_for_few_rows(**args: Any) -> Tensor:
    """As accurate as a chain, and another order when there are few rows: what libraries do."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        half = a.shape[1] // 2
        if len(a) > 16:
            return chain(a, b)
        return chain(a[:, :half], b[:half]) + chain(a[:, half:], b[half:])

    return linear(**args, product=product)


def test_a_split_that_depends_on_the_batch_fails_on_invariant() -> None:
    with linear_candidate(split_for_few_rows):
        assert only("det_linear", "accuracy", LINEAR).status == OK
        assert only("det_linear", "repeatable", LINEAR).status == OK
        cell = only("det_linear", "invariant", LINEAR_BITS)
    assert cell.status == FAIL and "0:y: 1 of 66 rows alone: " in cell.reason


def split_for_few_columns(**args: Any) -> Tensor:
    """Another order where the weight is narrow: a layer has other bits alone than merged with others."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        half = a.shape[1] // 2
        return chain(a, b) if b.shape[1] > 16 else chain(a[:, :half], b[:half]) + chain(a[:, half:], b[half:])

    return linear(**args, product=product)


def test_a_split_that_depends_on_the_columns_fails_on_invariant() -> None:
    with linear_candidate(split_for_few_columns):
        assert only("det_linear", "accuracy", LINEAR).status == OK
        assert only("det_linear", "agree", LINEAR_AGREE).status == OK
        cell = only("det_linear", "invariant", LINEAR_BITS)
    failed = [o["message"] for o in cell.outputs if not o["passed"]]
    assert cell.status == FAIL and "columns [63, 71) of 72 as a layer of their own" in cell.reason
    assert len(failed) == 2 and all("as a layer of their own" in message for message in failed)


def descending(**args: Any) -> Tensor:
    """Always one order, and never that of its class."""
    groups = torch.arange(args["x"].shape[-1]).split(16)
    order = torch.cat(groups[::-1])
    return linear(**(args | {"x": args["x"][..., order], "weight": args["weight"][:, order]}))


def test_another_order_than_that_of_its_class_fails_on_agree_alone() -> None:
    with linear_candidate(descending):
        assert only("det_linear", "accuracy", LINEAR).status == OK
        assert only("det_linear", "invariant", LINEAR_BITS).status == OK
        cell = only("det_linear", "agree", LINEAR_AGREE)
    assert cell.status == FAIL and "chain16 by its model" in cell.reason


def test_products_too_coarse_to_show_an_order_are_noticed() -> None:
    def coarse(t: Tensor | None) -> Any:
        return None if t is None else (t / 1024).round() * 1024

    def gradients(**args: Any) -> tuple[Tensor | None, ...]:
        return tuple(map(coarse, calls.run_linear_bwd(model.__name__, **args)))

    forward = linear_candidate(lambda **args: coarse(linear(**args)))
    with forward, candidate("det_linear_bwd", gradients, str(CHAIN16)):
        cell = only("det_linear", "invariant", LINEAR_BITS)
    assert cell.status == FAIL and "changed no bit" in cell.reason


def segments_of_physical_rows(**args: Any) -> Tensor:
    """Zeros in the place of masked rows: right numbers, but the padding decides which rows are summed."""
    if args["mask"] is None:
        return dw(**args)
    live = args["mask"][..., None] != 0
    return dw(**(args | {n: torch.where(live, args[n], 0.0) for n in ("x", "dy")} | {"mask": None}))


def ignores_sequences(**args: Any) -> Tensor:
    return dw(**(args | {"cu_seqlens": None}))


def adds_init_last(**args: Any) -> Tensor:
    found = dw(**(args | {"init": None}))
    return found if args["init"] is None else found + args["init"]


@pytest.mark.parametrize(
    ("bad", "case", "reason"),
    [
        (segments_of_physical_rows, DW_BITS, "masked rows full of NaN in front: "),
        (segments_of_physical_rows, DW_BITS_MASKED, "packed: masked rows taken out: "),
        (ignores_sequences, DW_BITS_CUT, "between sequences: "),
        (adds_init_last, DW_BITS, "after 512 live rows: "),
    ],
)
def test_sums_that_depend_on_more_than_the_stream_fail_on_invariant(
    bad: Callable[..., Tensor], case: str, reason: str
) -> None:
    with dw_candidate(bad):
        assert only("det_gemm_dw", "accuracy", DW).status == OK
        cell = only("det_gemm_dw", "invariant", case)
    assert cell.status == FAIL and any(reason in o["message"] for o in cell.outputs if not o["passed"])


def test_bits_are_tested_at_the_sizes_that_are_compared() -> None:
    """At M = 4096: projections, both halves of an MLP, and a head. A CPU would take hours."""
    cases = [case for case in proofs()["det_gemm"].bit_cases if case.dims["M"] == 4096]
    sizes = [(4096, 4096), (4096, 14336), (14336, 4096), (4096, 12288), (4096, 32000)]
    assert [(case.dims["K"], case.dims["N"]) for case in cases] == sizes
    assert all(case.heavy and case.gpu_gb for case in cases)
