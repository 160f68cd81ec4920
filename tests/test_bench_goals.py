"""Goals that are multiples of a time: of a rival, of the floor where that is longer, of a fixed number."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.goals.linear_logp import GOALS
from benchmarks.goals.logp import GOALS as LOGP_GOALS
from isobit.bench import runner
from isobit.bench.cases import series_of, subject_of
from isobit.bench.goals import Goal, cells, limit, longer_of_floor_and, summary, why_unmeasured
from isobit.bench.implementations import calls_of
from isobit.bench.report import ROW, format_report, format_summary
from isobit.cli.html.bench import section
from isobit.cli.html.saved import summary_line
from isobit.frame.op import known_op
from isobit.ops.linear_logp import rivals
from isobit.ops.linear_logp.kernels_hopper import HBM_BYTES_PER_US
from isobit.spec.proof import Case
from isobit.spec.series import Pool
from publish import tables
from publish.overview import overview

#: Those that are stated as multiples.
TIMES = [goal for goal in GOALS if goal.most is not None]

SIZES = ({"N": 2, "D": 3, "V": 5}, torch.bfloat16)


def rows(op: str, shape: tuple[int, ...], floor_ms: float = 0.1, **ms: float) -> list[dict[str, Any]]:
    sizes = " ".join(f"{name}={size}" for name, size in zip("NDV", shape, strict=True))
    direction = "fwd" if op in ("linear_logp", "linear_logp_bias") else "fwd_bwd"
    kind = {"op": op, "case": f"{sizes} bf16", "direction": direction, "method": "graph"}
    figures = [
        {"impl": name, "ms": each, "floor_ms": floor_ms, "host_us": 1e3 * each} for name, each in ms.items()
    ]
    return [dict.fromkeys(ROW) | kind | figure for figure in figures]


def met(found: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    entries = summary(found, rivals.BASELINE, TIMES)
    return [(entry["against"], entry["met"]) for entry in entries if entry["cells"]]


FEW, SOME = "1.15 x max(bare_gemm, floor) + 6 us", "1.4 x max(bare_gemm, floor)"


def test_few_rows_are_held_against_the_product_or_the_floor_and_against_verl() -> None:
    shape = (64, 4096, 128256)
    slower = rows("linear_logp", shape, 0.25, isobit=0.292, bare_gemm=0.2, verl=0.29)
    assert met(slower) == [(FEW, True), ("verl", False)]
    assert met(rows("linear_logp", shape, 0.2, isobit=0.295, bare_gemm=0.25)) == [(FEW, False)]
    assert met(rows("linear_logp", (320, 896, 151936), isobit=0.139, bare_gemm=0.1)) == [(SOME, True)]
    assert met(rows("linear_logp", (129, 896, 151936), 0.09, isobit=0.141, bare_gemm=0.1)) == [(SOME, False)]
    assert met(rows("linear_logp", (4096, 2048, 32768), isobit=0.35, bare_gemm=0.2, verl=0.3)) == []


def test_a_bias_is_held_against_the_same_call_without() -> None:
    for ms, is_met in ((1.04, True), (1.06, False)):
        found = rows("linear_logp_bias", rivals.BIASED[0], **{"isobit": ms, "isobit:no bias": 1.0})
        assert met(found) == [("isobit:no bias", is_met)]


def test_training_has_limits_by_the_number_of_features() -> None:
    (long, short, *others), uneven = rivals.TRAINED, rivals.UNEVEN
    limits = dict(zip(others, (4.6, 4.6, 4.8, 5.3), strict=True))
    limits |= {long: 4.6, uneven: 4.6, rivals.LONG: 5.0, short: 4.8, rivals.SHAPES[-1]: 4.8}
    for shape, most in limits.items():
        for more, is_met in ((-0.01, True), (0.01, False)):
            found = rows("linear_logp_train", shape, isobit=most + more, bare_gemm=1.0)
            assert met(found) == [("bare_gemm", is_met)], shape
    found = rows("linear_logp_train_bias", rivals.BIASED[0], isobit=4.7, bare_gemm=1.0)
    assert met(found) == [("bare_gemm", False)]
    for times, is_met in ((5.2, True), (5.4, False)):
        found = rows("linear_logp_train_bias", rivals.BIASED[2], isobit=times, bare_gemm=1.0)
        assert met(found) == [("bare_gemm", is_met)]
    assert met(rows("linear_logp_frozen", short, isobit=9.0, bare_gemm=1.0)) == []


def test_means_over_many_shapes() -> None:
    def mean(op: str, shape: tuple[int, ...], times: float) -> dict[str, bool]:
        entries = summary(rows(op, shape, isobit=times, bare_gemm=1.0), rivals.BASELINE, GOALS)
        return {e["what"]: e["met"] for e in entries if e["cells"] and e["goal_geomean"]}

    assert mean("linear_logp", (640, 896, 151936), 1.029) == {"logp, N >= 512": True}
    assert mean("linear_logp_bias", rivals.BIASED[0], 1.031) == {"logp, N >= 512": False}
    train, frozen, kept = "logp and all gradients, N >= 2048", "hidden states, D >= 2048", "kept, D >= 2048"
    assert mean("linear_logp_train", rivals.UNEVEN, 4.29) == {train: True}
    assert mean("linear_logp_train", rivals.UNEVEN, 4.31) == {train: False}
    assert list(mean("linear_logp_frozen", rivals.UNEVEN, 3.29).values()) == [True]
    assert list(mean("linear_logp_kept", rivals.UNEVEN, 3.36).values()) == [False]
    usual = mean("linear_logp_kept", rivals.SHAPES[0], 3.34) | mean("linear_logp_frozen", rivals.SHAPES[0], 3)
    assert sum(what.endswith((frozen, kept)) for what in usual) == 2 and len(usual) == 4
    assert mean("linear_logp_frozen", rivals.TRAINED[1], 9.0) == {}


def test_logp_of_a_tenth_of_the_rows_is_held_against_the_bytes_of_that_tenth() -> None:
    every, tenth = series_of(known_op("logp"))
    (case, *_), dtype = tenth.cases, torch.float16
    share = tenth.cost(case.dims, dtype).fwd_bytes / every.cost(case.dims, dtype).fwd_bytes
    assert tenth.options == {"mask": 0.1} and 0.08 < share < 0.12
    whole, part = (one.cost(case.dims, dtype).bwd_bytes for one in (every, tenth))
    assert 0.54 < part / whole < 0.56  # the gradient of every row is written
    for ms, is_met in ((0.115, True), (0.118, False)):
        found = [
            row | {"direction": "fwd"}
            for row in rows("logp_tenth", (1, 1, 1), isobit=ms, **{"torch.compile": 1.0})
        ]
        entries = [e for e in summary(found, None, LOGP_GOALS) if e["cells"]]
        assert [e["met"] for e in entries] == [is_met, True]
    assert not any(e["cells"] for e in summary(rows("logp", (1, 1, 1), isobit=9), None, LOGP_GOALS))


def shapes(cases: Sequence[Case]) -> set[tuple[int, ...]]:
    return {tuple(case.dims.values()) for case in cases}


def test_the_shapes_of_the_goals_are_declared_and_each_goal_has_a_core_cell() -> None:
    forward, bias, train, train_bias, frozen, kept = series_of(known_op("linear_logp"))
    heads, numbers = ((4096, 128256), (896, 151936)), (1, 16, 64, 128, 192, 320, 640, 1152)
    few = {(N, *head) for head in heads for N in numbers}
    assert shapes(forward.cases) == {*rivals.SHAPES, *few, rivals.LONG, rivals.UNEVEN}
    assert shapes(train.cases) == {*rivals.SHAPES, *rivals.TRAINED, rivals.LONG, rivals.UNEVEN}
    assert shapes(bias.cases) == {*rivals.BIASED[:2]}
    assert shapes(train_bias.cases) == {(2500, 5120, 100352), (150, 5120, 128256)}
    assert bias.options == train_bias.options == {"bias": "own"} and train_bias.inputs[-1] == "bias"
    assert train_bias.cost(*SIZES) == train.cost(*SIZES)
    assert shapes(frozen.cases) == shapes(kept.cases) == {*rivals.SHAPES, rivals.UNEVEN}
    timed = [
        row | {"predicted_ms": 1.0}
        for one in (forward, bias, train, train_bias, frozen, kept)
        for case in one.core
        for row in rows(one.name, tuple(case.dims.values()), isobit=1, bare_gemm=1, verl=1,
                        **{"isobit:no bias": 1, "isobit:hopper-8x4": 1})
    ]  # fmt: skip
    left = {e["what"] for e in summary(timed, rivals.BASELINE, GOALS) if not e["cells"]}
    # Goals for single shapes, which are not among the core ones.
    assert left == {
        "logp, 512 x 896 x 151936", "logp, V = 50257", "logp and all gradients, N >= 2048, D = 1024",
    }  # fmt: skip


def test_rivals_are_left_out_where_they_are_not_worth_their_time() -> None:
    series, gpu = rivals.SERIES[0], torch.device("cuda")

    def why(rival: str, *shape: int) -> str | None:
        case = Case(dict(zip("NDV", shape, strict=True)), torch.bfloat16)
        return series.rivals[rival].available(case, gpu)

    assert why("native", *rivals.LONG) == "65536 x 151936 logits are not stored"
    assert why("native", 16384, 4096, 128256) is None
    for rival in ("cce", "liger"):
        assert "N=1 and 128 only" in str(why(rival, 192, 896, 151936))
        assert "only" not in str(why(rival, 128, 896, 151936)) + str(why(rival, 192, 896, 4096))


def test_the_bare_product_has_a_gradient_for_a_bias() -> None:
    train_bias = rivals.SERIES[3]
    case = Case({"N": 3, "D": 8, "V": 12}, torch.bfloat16, "random", options=dict(train_bias.options))
    (args, *_) = train_bias.make(case, Pool(torch.device("cpu")))
    calls = calls_of(rivals.bare_product, [rivals.filled_weight(args)], train_bias.inputs, "fwd_bwd")
    assert [t.shape for t in calls[0]()[1:]] == [(3, 8), (12, 8), (12,)]
    (plain,) = calls_of(rivals.without_bias, [args], (), "fwd")
    assert torch.equal(plain()[0], rivals.linear_logp(**args | {"bias": None}))


def test_the_predicted_time_of_the_forward_is_that_of_its_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rivals, "sm_count", lambda device: 132)

    def predicted(N: int, D: int, V: int) -> float:
        args = {"weight": torch.empty(V, D, dtype=torch.bfloat16, device="meta")}
        args["token_ids"] = torch.empty(N, dtype=torch.int64, device="meta")
        assert rivals.SERIES[0].predict("triton", args) is None
        found = rivals.SERIES[0].predict("hopper", args)
        assert found is not None
        return found

    # All SMs share the splits of few rows, so the weight is read at the speed of a copy.
    assert predicted(1, 4096, 128256) == pytest.approx(predicted(64, 4096, 128256))
    assert predicted(1, 4096, 128256) == pytest.approx(2e-3 * 128256 * 4096 / HBM_BYTES_PER_US, rel=0.1)
    # Milliseconds on an H200.
    few = {(1, 4096, 128256): 0.2686, (320, 4096, 128256): 0.6253, (512, 896, 151936): 0.2109}
    for shape, ms in (few | {(4096, 2048, 131072): 2.858, (16384, 4096, 128256): 22.55}).items():
        assert 0.85 < ms / predicted(*shape) < 1.1, shape


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
    (cell,) = cells(found, longer_of_floor_and("native", 2, 20))
    assert cell.share == pytest.approx(4.4) and cells(found, longer_of_floor_and("verl", 1)) == []


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


def test_a_goal_that_was_not_measured_says_so_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    # A rival that was timed lacks nothing: the run had no case of this goal.
    elsewhere = report["rows"][-1] | {"impl": "trl", "case": "N=1 D=1 V=1 bf16", "ms": 1.0}
    assert why_unmeasured(loss, report["notes"], report["rows"]) == "not measured: not installed; needs a | b"
    assert why_unmeasured(loss, report["notes"], [*report["rows"], elsewhere]) == "not measured"
    path = tmp_path / "linear_logp.json"
    path.write_text(json.dumps(report))
    shown = tables.render_op(path)
    assert "| loss | ms | trl | 0 | not measured: not installed; needs a \\| b |" in shown
    assert "| large | 0 | not measured | - |" in shown
    monkeypatch.setattr("publish.overview.judged", lambda path: json.loads(path.read_text()))
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
    assert (section(only)["verdict"], section(only)["shares"]) == ("2 not measured", [])
    assert summary_line(only).endswith("rows, 2 not measured")
    on_a_cpu = [row | {"method": "wall"} for row in report["rows"]]
    assert summary(on_a_cpu, "native", FOUR) == []


def test_a_run_of_requested_sizes_leaves_unmeasured_goals_out() -> None:
    one = replace(subject_of(known_op("linear_logp")), goals=FOUR)
    found = a_report()["rows"]
    every, requested = (runner._summary(one, found, every=every)["summary"] for every in (True, False))
    assert [entry["what"] for entry in every] == ["fast", "faster", "loss", "large"]
    assert [entry["what"] for entry in requested] == ["faster"]  # `fast` is against the bare product


def test_unmeasured_rows_are_not_cells() -> None:
    found = rows("linear_logp", (1, 2, 3), isobit=0.05, native=0.04)
    for row in found:
        row["host_us"] = None
    assert cells(found, "native", figure="host_us") == [] and len(cells(found, "native")) == 1
    assert cells([row | {"method": "wall"} for row in found], "native") == []
