"""Goals that are multiples of a time: of a rival, of the floor where that is longer, of a fixed number."""

from typing import Any

import pytest

from isobit.bench.cases import series_of
from isobit.bench.goals import Goal, cells, limit, longer_of_floor_and, summary
from isobit.bench.report import ROW, format_summary
from isobit.op import known_op
from isobit.ops.linear_logp import rivals

#: Those that are stated as multiples.
TIMES = [goal for goal in rivals.GOALS if goal.most is not None]


def rows(op: str, shape: tuple[int, ...], floor_ms: float = 0.1, **ms: float) -> list[dict[str, Any]]:
    sizes = " ".join(f"{name}={size}" for name, size in zip("NDV", shape, strict=True))
    direction = "fwd" if op == "linear_logp" else "fwd_bwd"
    kind = {"op": op, "case": f"{sizes} bf16", "direction": direction, "method": "graph"}
    figures = [
        {"impl": name, "ms": each, "floor_ms": floor_ms, "host_us": 1e3 * each} for name, each in ms.items()
    ]
    return [dict.fromkeys(ROW) | kind | figure for figure in figures]


def met(found: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    return [(entry["against"], entry["met"]) for entry in summary(found, rivals.BASELINE, TIMES)]


def test_few_rows_are_held_against_the_product_or_the_floor_and_against_verl() -> None:
    shape = (64, 4096, 128256)
    slower = rows("linear_logp", shape, 0.25, isobit=0.35, bare_gemm=0.2, verl=0.3)
    assert met(slower) == [("bare_gemm or the floor", True), ("verl", False)]
    assert met(rows("linear_logp", shape, 0.2, isobit=0.35, bare_gemm=0.2)) == [
        ("bare_gemm or the floor", False)  # 1.75 times; and without verl no cell
    ]
    assert met(rows("linear_logp", (4096, 2048, 32768), isobit=0.35, bare_gemm=0.2, verl=0.3)) == []


def test_training_has_goals_at_two_more_shapes() -> None:
    long, short = rivals.TRAINED
    assert met(rows("linear_logp_train", long, isobit=4.5, bare_gemm=1.0)) == [("bare_gemm", True)]
    assert met(rows("linear_logp_train", long, isobit=4.7, bare_gemm=1.0)) == [("bare_gemm", False)]
    assert met(rows("linear_logp_train", short, isobit=5.9, bare_gemm=1.0)) == [("bare_gemm", True)]
    assert met(rows("linear_logp_frozen", short, isobit=9.0, bare_gemm=1.0)) == []


def test_the_shapes_of_these_goals_are_timed_and_the_other_goals_leave_them_out() -> None:
    forward, train, frozen, kept = series_of(known_op("linear_logp"))
    shapes = {one.name: [tuple(case.dims.values()) for case in one.cases] for one in (forward, train)}
    assert [s for s in shapes["linear_logp"] if s not in rivals.SHAPES] == list(rivals.FEW_ROWS)
    assert [s for s in shapes["linear_logp_train"] if s not in rivals.SHAPES] == list(rivals.TRAINED)
    assert frozen.cases == kept.cases == rivals.CASES
    slow = rows("linear_logp", rivals.FEW_ROWS[0], isobit=9.0, bare_gemm=1.0)
    slow += rows("linear_logp_train", rivals.TRAINED[0], isobit=99.0, bare_gemm=1.0)
    shares = [goal for goal in rivals.GOALS if goal.most is None]
    assert summary(slow, rivals.BASELINE, shares) == []


def test_a_goal_may_be_a_number_or_another_figure() -> None:
    found = rows("linear_logp", (1, 2, 3), isobit=0.05, native=0.04)
    goals = [
        Goal("us", lambda cell: True, most=1.0, against=limit(60, "us"), figure="host_us"),
        Goal("ms", lambda cell: cell.direction == "fwd", most=1.2, against="native"),
        Goal("no cells", lambda cell: cell.direction == "bwd", most=1.0, against="native"),
    ]
    us, ms = summary(found, None, goals)
    assert (us["against"], us["figure"], us["met"], us["least"]) == ("60 us", "host_us", True, 1.2)
    assert (ms["goal_most"], ms["met"], ms["goal_least"]) == (1.2, False, None)
    assert format_summary([us, ms]) == [
        "met  us, host_us: 0.833 times 60 us (goal 1) at linear_logp N=1 D=2 V=3 bf16; 1 cells",
        "MISS ms: 1.250 times native (goal 1.2) at linear_logp N=1 D=2 V=3 bf16; 1 cells",
    ]
    (cell,) = cells(found, longer_of_floor_and("native"))
    assert cell.share == pytest.approx(2.0) and cells(found, longer_of_floor_and("verl")) == []


def test_unmeasured_rows_are_not_cells() -> None:
    found = rows("linear_logp", (1, 2, 3), isobit=0.05, native=0.04)
    for row in found:
        row["host_us"] = None
    assert cells(found, "native", figure="host_us") == [] and len(cells(found, "native")) == 1
    assert cells([row | {"method": "wall"} for row in found], "native") == []
