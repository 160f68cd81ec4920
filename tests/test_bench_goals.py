"""Goals that are multiples of a time: of a rival, of the floor where that is longer, of a fixed number."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isobit.bench import runner, tables
from isobit.bench.cases import series_of
from isobit.bench.goals import Goal, cells, limit, longer_of_floor_and, summary
from isobit.bench.overview import overview
from isobit.bench.report import ROW, format_report, format_summary
from isobit.op import known_op
from isobit.ops.linear_logp import rivals
from isobit.pages.bench import section
from isobit.pages.saved import summary_line

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
    entries = summary(found, rivals.BASELINE, TIMES)
    return [(entry["against"], entry["met"]) for entry in entries if entry["cells"]]


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
    assert not any(entry["cells"] for entry in summary(slow, rivals.BASELINE, shares))


def test_a_goal_may_be_a_number_or_another_figure() -> None:
    found = rows("linear_logp", (1, 2, 3), isobit=0.05, native=0.04)
    goals = [
        Goal("us", lambda cell: True, most=1.0, against=limit(60, "us"), figure="host_us"),
        Goal("ms", lambda cell: cell.direction == "fwd", most=1.2, against="native"),
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


#: Four goals: met, missed, without its rival, and without a case.
FOUR = [
    Goal("fast", lambda cell: True, least=0.5),
    Goal("faster", lambda cell: True, most=1.0, against="native"),
    Goal("loss", lambda cell: True, most=1.0, against="trl"),
    Goal("large", lambda cell: cell.sizes["N"] > 9, mean=1.0),
]


def a_report(**more: Any) -> dict[str, Any]:
    words = ("gpu", "driver", "torch", "triton", "python", "commit", "source_sha", "date")
    stamp = dict.fromkeys(words, "x") | dict.fromkeys(("copy_tbps", "best_tflops"), 1.0)
    found = [row | {"ms_q25": 1.0, "ms_q75": 1.0, "extra_mb": 0.0} for row in
             rows("linear_logp", (1, 2, 3), isobit=0.05, native=0.04)]  # fmt: skip
    notes = ["trl: not installed", "liger: not installed", "trl: needs a | b"]
    head = {"stamp": stamp | {"kernels": {}}, "notes": notes, "command": "", "against": "native"}
    return head | {"rows": found, "summary": summary(found, "native", FOUR)} | more


def test_a_goal_that_was_not_measured_says_so_and_why(tmp_path: Path) -> None:
    report = a_report()
    *_, loss, large = report["summary"]
    assert loss | large == dict.fromkeys(loss) | {
        "what": "large", "against": "native", "figure": "ms", "cells": 0, "goal_geomean": 1.0,
    }  # fmt: skip
    none = [line for line in format_report(report).splitlines() if line.startswith("none")]
    assert none == [
        "none loss, against trl: not measured: not installed; needs a | b",
        "none large, against native: not measured",
    ]
    path = tmp_path / "linear_logp.json"
    path.write_text(json.dumps(report))
    shown = tables.render_op(path)
    assert "| loss | ms | trl | 0 | not measured: not installed; needs a \\| b |" in shown
    assert "| large | 0 | not measured | - |" in shown
    assert overview(tmp_path, ["linear_logp"])[0][1][-1] == "1 of 2, 2 not measured"
    assert summary_line(report) == "bench of linear_logp: 2 rows, 1 of 2 goals met, 2 not measured"
    page = section(report)
    assert (page["verdict"], page["state"]) == ("1 of 2 goals met, 2 not measured", "warn")
    assert [goal["state"] for goal in page["goals"]] == ["missed", "unmeasured", "unmeasured", "met"]
    assert page["goals"][1]["text"] == none[0].removeprefix("none ")


def test_goals_of_older_files_and_of_nothing_but_unmeasured_ones(tmp_path: Path) -> None:
    report = a_report()
    older = report | {"summary": [entry for entry in report["summary"] if entry["cells"]]}
    assert section(older)["verdict"] == "1 of 2 goals met" and "not measured" not in format_report(older)
    assert summary_line(older).endswith("rows, 1 of 2 goals met")
    only = report | {"summary": report["summary"][2:]}
    assert (section(only)["verdict"], section(only)["shares"]) == ("2 not measured", "")
    assert summary_line(only).endswith("rows, 2 not measured")
    on_a_cpu = [row | {"method": "wall"} for row in report["rows"]]
    assert summary(on_a_cpu, "native", FOUR) == []


def test_a_run_of_requested_sizes_leaves_unmeasured_goals_out() -> None:
    (series, *_) = series_of(known_op("linear_logp"))
    one = replace(series, goals=FOUR)
    found = a_report()["rows"]
    every, requested = (runner._summary([one], found, every=every)["summary"] for every in (True, False))
    assert [entry["what"] for entry in every] == ["fast", "faster", "loss", "large"]
    assert [entry["what"] for entry in requested] == ["faster"]  # `fast` is against the bare product


def test_unmeasured_rows_are_not_cells() -> None:
    found = rows("linear_logp", (1, 2, 3), isobit=0.05, native=0.04)
    for row in found:
        row["host_us"] = None
    assert cells(found, "native", figure="host_us") == [] and len(cells(found, "native")) == 1
    assert cells([row | {"method": "wall"} for row in found], "native") == []
