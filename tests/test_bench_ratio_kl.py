"""The benchmark of `ratio_kl`: bytes by how many rows count, rivals that do the same work, and goals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.bench.cases import parse_case, series_of
from isobit.bench.goals import cells, floors, limit, summary
from isobit.bench.implementations import calls_of
from isobit.bench.report import ROW
from isobit.bench.runner import run
from isobit.bench.suites import goals_of
from isobit.frame.op import known_op
from isobit.ops.ratio_kl import rivals
from isobit.spec.options import varied
from isobit.spec.proof import Case
from isobit.spec.series import Pool
from publish import tables

OP = known_op("ratio_kl")
CPU = torch.device("cpu")
SERIES = {one.name: one for one in series_of(OP)}


def test_what_is_declared() -> None:
    given = [f"ratio_kl_given{suffix}" for suffix in ("", "_half", "_tenth")]
    assert list(SERIES) == ["ratio_kl", "ratio_kl_half", "ratio_kl_tenth", *given]
    for name, series in SERIES.items():
        sizes = [(*case.dims.values(), case.dtype) for case in series.cases]
        fp16 = [(32, 256, V, torch.float16) for V in (32768, 50257, 131072)]
        assert sizes == [*fp16, (8, 1024, 151936, torch.bfloat16)]
        assert set(series.rivals) == {"native", "liger" if name in given else "torch.compile"}


@pytest.mark.parametrize(("suffix", "density"), [("", 1.0), ("_half", 0.5), ("_tenth", 0.1)])
def test_bytes_are_those_of_rows_that_count(suffix: str, density: float) -> None:
    """Both logits forward; backward the policy's, and the gradient of every row."""
    case = rivals.CASES[3]
    N, V = 8 * 1024, 151936
    small = Case({"B": 8, "T": 1024, "V": 3}, case.dtype, data="random")
    for name, logits in (("ratio_kl", 2), ("ratio_kl_given", 1)):
        series = SERIES[name + suffix]
        args = series.make(varied(small, series.options), Pool(CPU))[0]
        live = N if args["mask"] is None else int(args["mask"].sum())
        assert live == pytest.approx(density * N, rel=0.05)
        found = series.cost(case.dims, case.dtype)
        assert found.fwd_bytes == pytest.approx(logits * live * V * 2, rel=3e-3)
        assert found.bwd_bytes == pytest.approx((live + N) * V * 2, rel=1e-3)


def judged(series: str, function: Any, direction: str, options: dict[str, Any]) -> float | None:
    case = Case({"B": 3, "T": 40, "V": 33}, torch.float32, data="random", options=options)
    args = SERIES[series].make(case, Pool(CPU))[0]
    with torch.set_grad_enabled(direction != "fwd"):
        (call,) = calls_of(function, [args], ("policy_logits",), direction)
        return rivals.Sampled(args).error(direction, call())


def sum_of_both(args: dict[str, Any]) -> Tensor:
    ratio, kl = rivals.native(rivals._of_live_rows(args))
    return ratio + kl


@pytest.mark.parametrize("options", [{}, {"mask": 0.5}, {"ref": "logp", "mask": 0.1}, {"each": True}])
@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd_bwd"])
def test_errors_are_of_outputs_and_gradients(direction: str, options: dict[str, Any]) -> None:
    def each(args: dict[str, Any]) -> dict[str, Any]:
        """PyTorch divides by what has a dimension more."""
        t = args["temperature"]
        return args | {"temperature": t[..., None] if isinstance(t, Tensor) else t}

    def native(args: dict[str, Any]) -> Any:
        return rivals.native(each(rivals._of_live_rows(args)))

    for function in (native, lambda args: sum_of_both(each(args))):
        assert judged("ratio_kl", function, direction, options) < 1e-5

    def wrong(args: dict[str, Any]) -> tuple[Tensor, ...]:
        ratio, kl = native(args)
        return 1.01 * ratio, kl

    assert judged("ratio_kl", wrong, direction, options) > 1e-4


def test_liger_gets_a_step_more_and_is_judged_without_it() -> None:
    case = Case({"B": 2, "T": 5, "V": 9}, data="random", options={"ref": "logp"})
    args = SERIES["ratio_kl_given"].make(case, Pool(CPU))[0]
    prepared = rivals._liger_inputs(args)
    assert prepared["policy_logits"].shape == (2, 6, 9) and prepared["advantages"].tolist() == [-1.0, -1.0]

    def as_liger(args: dict[str, Any]) -> Tensor:
        return sum_of_both(args | {"policy_logits": args["policy_logits"][:, :-1]})

    (call,) = calls_of(as_liger, [prepared], ("policy_logits",), "fwd_bwd")
    assert rivals.Sampled(args).error("fwd_bwd", call()) < 1e-5


def test_it_can_be_timed() -> None:
    report = run(
        "ratio_kl", [parse_case("B=2,T=3,V=33,dtype=fp32", OP)], device="cpu", repetitions=2, skip_check=True,
        impls=["isobit", "native"], directions=["fwd_bwd"], say=lambda text: None,
    )  # fmt: skip
    assert {row["op"] for row in report["rows"]} == set(SERIES)
    assert all(row["max_abs"] < 1e-4 for row in report["rows"]) and report["summary"] == []


# Goals


def rows(
    op: str, direction: str, floor_ms: float, extra_mb: float = 0.0, **ms: float
) -> list[dict[str, Any]]:
    kind = {"op": op, "case": "B=32 T=256 V=50257 fp16", "direction": direction, "method": "graph"}
    figures = {"floor_ms": floor_ms, "extra_mb": extra_mb}
    return [dict.fromkeys(ROW) | kind | figures | {"impl": name, "ms": each} for name, each in ms.items()]


def met(found: list[dict[str, Any]]) -> dict[str, bool]:
    entries = summary(found, None, goals_of("ratio_kl"))
    return {entry["against"]: entry["met"] for entry in entries if entry["cells"]}


def test_goals() -> None:
    names = {"torch.compile": 1.0}
    forward = rows("ratio_kl", "fwd", 0.1, isobit=0.115, **names)
    assert met(forward) == {"1.08 floors + 8 us": True, "torch.compile": True, "1 MB": True}
    assert not met(rows("ratio_kl_half", "fwd", 0.1, isobit=0.117))["1.08 floors + 8 us"]
    both = rows("ratio_kl_tenth", "fwd_bwd", 1.0, 1.5, isobit=1.127, **names)
    assert met(both) == {"1.12 floors + 8 us": True, "torch.compile": False, "1 MB": False}
    assert met(rows("ratio_kl_given", "fwd", 1.0, isobit=1.0, liger=0.99))["liger"] is False
    assert "liger" not in met(rows("ratio_kl", "fwd", 1.0, isobit=1.0, liger=0.99))


def test_a_figure_of_zero_has_a_ratio() -> None:
    found = rows("ratio_kl", "fwd", 0.1, 0.0, isobit=0.1)
    (cell,) = cells(found, limit(1, "MB"), figure="extra_mb")
    assert cell.share > 1e3
    (cell,) = cells(found, floors(2, 100))
    assert cell.share == pytest.approx(3.0) and cells(rows("x", "fwd", 1.0, native=1.0), floors(1, 1)) == []


def test_tables_say_what_is_not_measured_yet() -> None:
    page = "<!-- results:ratio_kl -->\n<!-- /results -->"
    assert "Not measured yet: `isobit bench --op ratio_kl" in tables.updated(page, Path("no results"))
