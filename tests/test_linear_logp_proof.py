"""The proof of `linear_logp` can fail: known-bad backends, each on the law that is there for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from isobit.check.laws import accuracy as laws
from isobit.check.laws.shared import shared_gradients
from isobit.frame.op import OPS
from isobit.kernels.host.tokens import live_rows
from isobit.ops.linear_logp import op, reference
from isobit.ops.linear_logp.proof.bits import unfused
from isobit.ops.linear_logp.proof.inputs import FULL, keeps
from isobit.spec.proof import Case
from isobit.spec.trial import Trial
from publish import vocabulary_chart as chart

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")


def trial(case: Case) -> Trial:
    return Trial(OPS["linear_logp"], "reference", CPU, case, "cpu")


@contextmanager
def replaced(backend: Any, run: Callable[..., Any]) -> Iterator[None]:
    before = backend.run
    object.__setattr__(backend, "run", run)
    try:
        yield
    finally:
        object.__setattr__(backend, "run", before)


def scaled(which: int, factor: float) -> Callable[..., Any]:
    """A backward with one gradient off by a factor."""

    def run(**args: Any) -> tuple[Tensor | None, ...]:
        result = list(reference.linear_logp_bwd(**args))
        wrong = result[which]
        assert wrong is not None
        result[which] = (wrong.double() * factor).to(wrong.dtype)
        return tuple(result)

    return run


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(("dtype", "factor"), [(F32, 1.0001), (F16, 1.01), (BF16, 1.06)])
def test_a_gradient_off_by_a_factor_fails(which: int, dtype: torch.dtype, factor: float) -> None:
    """The bound of a gradient is that of one rounding of d-logits, and no wider than a few of them."""
    case = Case({"N": 40, "D": 64, "V": 200}, dtype, options={"bias": "own"})
    assert all(check.passed for check in laws.gradient(trial(case)))
    with replaced(op.backward.backend_named("reference"), scaled(which, factor)):
        contiguous = laws.gradient(trial(case))[:3]  # those of other incoming gradients follow
        assert [check.passed for check in contiguous] == [i != which for i in range(3)]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_small_error_of_logp_fails(dtype: torch.dtype) -> None:
    backend = op.forward.backend_named("reference")
    honest = backend.run

    def run(**args: Any) -> Any:
        logp, *rest = honest(**args)
        return logp + 2e-5, *rest

    with replaced(backend, run):
        checks = laws.accuracy(trial(Case({"N": 40, "D": 64, "V": 200}, dtype, data="random")))
    assert [check.passed for check in checks] == [False, True, True]


def in_one_order(fold: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """A backward whose dweight is a sum in fp64 over `fold` of all rows and the live ones."""

    def run(**args: Any) -> tuple[Tensor | None, ...]:
        dhidden, dweight, dbias = reference.linear_logp_bwd(**args)
        live = live_rows(args["token_ids"], args["mask"], args["ignore_index"])
        assert dhidden is not None
        if dweight is not None:
            total = fold(torch.where(live[:, None], dhidden.double(), 0.0), live)
            dweight = (torch.zeros_like(dweight).double() + total).to(dweight.dtype)
        return dhidden, dweight, None if dbias is None else torch.zeros_like(dbias)

    return run


def the_stream(rows: Tensor, live: Tensor) -> Tensor:
    """What depends on the live rows alone, and on their order."""
    stream = rows[live]
    return (stream * torch.arange(1, len(stream) + 1)[:, None]).sum(0)


def the_batch(rows: Tensor, live: Tensor) -> Tensor:
    """A result that depends on the position of rows."""
    return (rows * torch.arange(1, len(rows) + 1)[:, None]).sum(0)


@pytest.mark.parametrize(("fold", "holds"), [(the_stream, True), (the_batch, False)])
def test_a_sum_that_sees_rows_that_do_not_count_fails(fold: Any, holds: bool) -> None:
    case = Case({"N": 60, "D": 16, "V": 90}, BF16, options={"bias": "own", "mask": torch.bool})
    with replaced(op.backward.backend_named("reference"), in_one_order(fold)):
        checks = shared_gradients(trial(case))
    messages = [check.message for check in checks if not check.passed]
    padded = [text for text in messages if "full of NaN" in text]
    assert bool(padded) != holds and any("packed" in check.message for check in checks)


def test_the_unfused_way_is_the_op() -> None:
    """On a CPU the two differ in their last digits; this test shows that they are the same function."""
    case = Case({"N": 20, "D": 16, "V": 90}, BF16, "random", options={"bias": "own", "vocab": 80})
    here = trial(case)
    args = here.args()
    for ours, theirs in zip(here.forward(args), unfused(args, "reference"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_entropy_has_no_gradient_where_probabilities_are_kept() -> None:
    """Else no case would reach the backward that takes them: the gradient of the entropy does not."""
    case = Case({"N": 20, "D": 16, "V": 90}, BF16, options={"workspace_bytes": FULL})
    assert keeps(trial(case).args()) and not keeps(trial(Case({"N": 20, "D": 16, "V": 90}, BF16)).args())
    seen = []

    def run(**args: Any) -> Any:
        seen.append(args["dentropy"])
        return reference.linear_logp_bwd(**args)

    with replaced(op.backward.backend_named("reference"), run):
        assert all(check.passed for check in laws.gradient(trial(case)))
    assert seen == [None] * 4  # of incoming gradients with four kinds of strides


# The chart


def report(rows: list[tuple[str, str, int, float, float | None]]) -> dict[str, Any]:
    result = [
        {"op": kind, "impl": impl, "case": f"N=4096 D=2048 V={V} bf16", "ms": ms, "extra_mb": extra}
        for kind, impl, V, ms, extra in rows
    ]
    stamp = dict.fromkeys(("gpu", "driver", "torch", "triton", "python", "commit", "source_sha", "date"), "x")
    return {"stamp": stamp | {"copy_tbps": 1.0, "best_tflops": 1.0}, "rows": result}


def test_the_chart_has_a_line_for_every_contender_and_what_isobit_keeps() -> None:
    train, kept = "linear_logp_train", "linear_logp_kept"
    rows = [(train, "isobit", 131072, 9.0, 70.0), (train, "isobit", 32768, 3.0, 60.0)]
    rows += [(train, "native", 32768, 8.0, 900.0), (kept, "isobit", 32768, 2.0, 300.0)]
    rows += [(kept, "bare_gemm", 32768, 1.0, 0.0), ("linear_logp", "isobit", 32768, 1.0, 5.0)]
    given = report(rows)
    assert chart.lines(given, "ms") == {
        "isobit": [(32768, 3.0), (131072, 9.0)], "native": [(32768, 8.0)],
        "isobit, probabilities kept": [(32768, 2.0)],
    }  # fmt: skip
    drawn = chart.draw(given)
    assert drawn == chart.draw(given) and drawn.count("<polyline") == 2 * 3 + 3
    ElementTree.fromstring(drawn)  # well-formed
