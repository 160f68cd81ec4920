"""Suites: benchmarks that are not of one op, found without a list, in files of the same form."""

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit import ContractError
from isobit.bench import suites
from isobit.bench.cases import Subject, parse_case, subject_of, suite_of
from isobit.bench.check_gate import CheckFailed
from isobit.bench.goals import Goal, summary
from isobit.bench.report import ROW, format_summary
from isobit.bench.runner import run
from isobit.bench.suites import suite_names
from isobit.bench.timing import ONCE_CALLS
from isobit.frame.op import OPS, known_op
from isobit.ops.logp.op import logp
from isobit.spec.proof import Case, Cost
from isobit.spec.series import Pool, Series
from publish import tables

CPU = torch.device("cpu")


def timed(of: Subject, **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"device": "cpu", "repetitions": 2, "skip_check": True, "say": lambda t: None}
    return run(of, **(defaults | options))


def test_no_suite_has_the_name_of_a_results_file_of_an_op() -> None:
    assert suite_names() and not set(suite_names()) & {op.folder for op in OPS.values()}
    names = "decode_step, drift, fla, launch, moe_layer, ranks, train_step, vllm, warmup, zero_drift"
    known = f"known: {names}; or a Python file"
    with pytest.raises(ContractError, match=f"unknown suite 'lunch'; {known}"):
        suite_of("lunch")


def test_launch_times_six_ops_beside_pytorch(tmp_path: Path) -> None:
    launch = suite_of("launch")
    *ops, loop = launch.series
    assert all(len(series.cases) == 4 for series in ops) and loop.name == "growing_cache"
    report = timed(launch, out_dir=tmp_path)
    path = tmp_path / "cpu" / "launch.json"
    assert json.loads(path.read_text()) == report
    of_ops = [row for row in report["rows"] if row["op"] != "growing_cache"]
    assert {(r["op"], r["direction"], r["impl"]) for r in of_ops} == {
        (op, direction, impl)
        for op in ("det_linear", "det_gemm", "logp", "linear_logp", "rms_norm", "attention")
        for direction in ("fwd", "fwd_bwd")
        for impl in ("isobit", "native")
        if (op, direction) != ("det_gemm", "fwd_bwd")
    }
    assert report["figure"] == "host_us" and report["summary"] == [] and "against" not in report
    assert all(tuple(row) == ROW for row in of_ops)
    unjudged = {(row["op"], row["direction"]) for row in of_ops if row["max_abs"] is None}
    assert unjudged == {("attention", "fwd_bwd")}
    assert all(row["max_abs"] < 0.5 for row in of_ops if row["max_abs"] is not None)
    ours, theirs = (row for row in report["rows"] if row not in of_ops)
    assert (ours["impl"], theirs["impl"], ours["direction"]) == ("isobit", "native", "decode")
    assert ours["length_us"] > 0 and theirs["length_us"] > 0
    assert ours["compiled"] == 0 and "compiled" not in theirs
    shown = tables.render_op(path)
    assert all(f"`{op}`\n\n| case |" in shown for op in ("det_linear", "logp", "linear_logp"))
    only = tables.render_op(path, ["logp"])
    assert "`logp`" in only and "det_linear" not in only
    with pytest.raises(
        ValueError,
        match=r"no 'margin' was timed; known: .*, linear_logp, rms_norm, attention, growing_cache",
    ):
        tables.render_op(path, ["margin"])


def test_a_custom_case_goes_to_the_series_that_have_its_sizes() -> None:
    launch = suite_of("launch")
    report = timed(launch, cases=[parse_case("N=3,V=5", launch)], impls=["isobit"], directions=["fwd"])
    assert [(row["op"], row["case"]) for row in report["rows"]] == [("logp", "N=3 V=5 bf16")]


def test_any_file_is_a_suite(tmp_path: Path) -> None:
    """With its neighbours, by its path. Its results file has its name, which must be free."""
    mine = tmp_path / "mine.py"
    mine.write_text("from of_mine import SERIES, GOALS\n")
    (tmp_path / "of_mine.py").write_text("from benchmarks.suites.launch import SERIES\nGOALS = ()\n")
    found, launch = suite_of(str(mine)), suite_of("launch")
    assert (found.file, found.name, found.flag) == ("mine", str(mine), "--suite")
    assert found.series is launch.series and found.goals == () and launch.goals
    for text, name, says in (
        ("SERIES = ()", "logp", "logp is the results file of an op: rename the suite"),
        ("", "empty", "declares no SERIES"),
        ("1 / 0", "broken", "ZeroDivisionError: division by zero"),
    ):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        with pytest.raises(ContractError, match=f"--suite .*{name}.py: {says}"):
            suite_of(str(path))
    with pytest.raises(ContractError, match=r"--suite .*none\.py: no such file"):
        suite_of(str(tmp_path / "none.py"))


def test_an_installed_package_has_no_suites_and_no_goals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "BENCHMARKS", tmp_path / "benchmarks")
    assert suite_names() == [] and subject_of(known_op("logp")).goals == ()
    with pytest.raises(ContractError, match="unknown suite 'launch'; known: none, they are in a checkout"):
        suite_of("launch")


# Host times: goals and tables


def launched(op: str, case: str, direction: str, **host_us: float) -> list[dict[str, Any]]:
    kind = {"op": op, "case": case, "direction": direction, "method": "graph", "ms": 0.01, "floor_ms": 0.01}
    rows = host_us.items()
    return [dict.fromkeys(ROW) | kind | {"impl": name.replace("_", ":"), "host_us": us} for name, us in rows]


def test_the_goals_of_launch() -> None:
    goals = suite_of("launch").goals
    at = {"det_linear": "M=768 K=1024 N=1024 bf16", "linear_logp": "N=768 D=1024 V=4096 bf16"}
    rows = [
        *launched("det_linear", "M=1 K=1024 N=1024 bf16", "fwd", isobit=16.0, native=11.0),
        *launched("det_linear", at["det_linear"], "fwd", isobit=17.0, native=11.0, isobit_new=30.0),
        *launched("det_linear", at["det_linear"], "fwd_bwd", isobit=80.0, native=60.0, isobit_new=161.0),
        *launched("linear_logp", at["linear_logp"], "fwd", isobit=59.0, native=30.0),
        *launched("linear_logp", at["linear_logp"], "fwd_bwd", isobit=500.0, native=400.0),
        *launched("rms_norm", "N=1 D=1024 bf16", "fwd", isobit=14.0, native=10.0),
        *launched("rms_norm", "N=1 D=1024 bf16", "fwd_bwd", isobit=151.0, native=100.0),
        *launched("attention", "B=1 T=16 S=16 H=4 KV=2 D=64 bf16", "fwd", isobit=31.0, native=20.0),
        *launched("growing_cache", "B=1 T=1 S=1000 H=32 KV=8 D=128 bf16", "decode", isobit=30.0),
    ]
    rows[-1] |= {"length_us": 61.0, "compiled": 1}
    found = {entry["what"]: entry for entry in summary(rows, None, goals) if entry["cells"]}
    assert {what: entry["met"] for what, entry in found.items()} == {
        "det_linear, forward": False,
        "det_linear, forward and backward": True,
        "det_linear, forward, new rows": True,
        "det_linear, forward and backward, new rows": False,
        "linear_logp, forward": True,
        "linear_logp, forward and backward": False,
        "rms_norm, forward": True,
        "rms_norm, forward and backward": False,
        "attention, forward": False,
        "growing_cache, median of 1400 new lengths": False,
        "growing_cache, kernels compiled after the first step": False,
    }
    rows[-1] |= {"length_us": 60.0, "compiled": 0}
    assert [entry["met"] for entry in summary(rows, None, goals)[-2:]] == [True, True]
    forward = found["det_linear, forward"]
    assert (forward["cells"], forward["against"], forward["figure"]) == (2, "native", "host_us")
    assert found["linear_logp, forward"]["against"] == "60 us"
    lines = format_summary(list(found.values()))
    assert lines[0] == (
        "MISS det_linear, forward, host_us: 1.545 times native (goal 1.5) at det_linear "
        "M=768 K=1024 N=1024 bf16; 2 cells"
    )


def test_new_sizes_get_a_line_of_their_own(tmp_path: Path) -> None:
    rows = launched("logp", "N=768 V=4096 bf16", "fwd", isobit=20.0, native=10.0, isobit_new=30.0)
    rows += launched("logp", "N=768 V=4096 bf16", "fwd", native_new=15.0)
    goal = Goal("new", lambda cell: True, most=1.2, against="isobit", figure="host_us", impl="isobit:new")
    words = ("gpu", "driver", "torch", "triton", "python", "commit", "source_sha", "date")
    stamp = dict.fromkeys(words, "x") | dict.fromkeys(("copy_tbps", "best_tflops"), 1.0)
    report = {"stamp": stamp, "figure": "host_us", "rows": rows, "summary": summary(rows, None, [goal])}
    (tmp_path / "launch.json").write_text(json.dumps(report))
    found = tables.render_op(tmp_path / "launch.json").splitlines()
    assert found[:8] == [
        "| goal | figure | against | cells | times at most |",
        "| --- | --- | --- | ---: | ---: |",
        "| new | host_us | isobit | 1 | 1.50 (goal 1.2 **missed**) |",
        "",
        "| case | direction | isobit us | native us |",
        "| --- | --- | ---: | ---: |",
        "| N=768 V=4096 bf16 | fwd | 20 | 10 (0.50x) |",
        "| N=768 V=4096 bf16, new sizes | fwd | 30 | 15 (0.50x) |",
    ]


def test_the_table_of_a_missing_file_says_how_to_measure_it(tmp_path: Path) -> None:
    page = "<!-- results:launch -->\n<!-- /results -->\n<!-- results:logp -->\nold\n<!-- /results -->\n"
    assert tables.updated(page, tmp_path) == (
        "<!-- results:launch -->\nNot measured yet: `isobit bench --suite launch --results results`.\n"
        "<!-- /results -->\n"
        "<!-- results:logp -->\nNot measured yet: `isobit bench --op logp --results results`.\n"
        "<!-- /results -->\n"
    )


# New sizes


def test_a_loop_meets_every_length_and_counts_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the first step compiles three kernels and a later one, wrongly, two."""
    from benchmarks.suites import launch

    met: list[int] = []
    counts = {0: 5, launch.FIRST_LENGTH: 8, 1025: 10}
    monkeypatch.setattr(launch, "_STEPS", (lambda args, S: met.append(S), launch._native_decode))
    monkeypatch.setattr(launch, "_decode", launch._STEPS[0])
    monkeypatch.setattr(launch, "compiled_count", lambda: max(n for S, n in counts.items() if met[-1] >= S))
    loop = launch.Loop({"first": launch.FIRST_LENGTH, "lengths": launch.LENGTHS})
    verdict = loop.error("decode", (torch.zeros(1), launch._MARKS[0]))
    assert met == list(range(200, 1600)) and verdict.more["compiled"] == 2
    assert 0 < verdict.more["length_us"] < 1e6


@pytest.mark.parametrize("name", ["logp", "det_gemm"])
def test_calls_with_new_rows_are_timed_beside_the_others(name: str) -> None:
    launch = suite_of("launch")
    text = {"logp": "N=768,V=5", "det_gemm": "M=768,K=8,N=8"}[name]
    only = dataclasses.replace(launch, series=[one for one in launch.series if one.name == name])
    rows = timed(only, cases=[parse_case(text, only)])["rows"]
    assert [row["impl"] for row in rows if row["direction"] == "fwd"] == [
        "isobit", "native", "isobit:new", "native:new",
    ]  # fmt: skip
    judged = {row["impl"]: row["max_abs"] is not None for row in rows}
    assert judged == {"isobit": True, "native": True, "isobit:new": False, "native:new": False}
    alone = timed(only, cases=[parse_case(text, only)], impls=["isobit:new"], directions=["fwd"])["rows"]
    assert [row["impl"] for row in alone] == ["isobit:new"]
    assert alone[0]["backend"] == next(row["backend"] for row in rows if row["impl"] == "isobit")


def test_no_new_size_occurs_twice() -> None:
    """Not in two directions either, nor is it that of the case itself; and there are enough for the timer."""
    for series in suite_of("launch").series[:-1]:
        case, pool = series.cases[-1], Pool(CPU)
        small = dataclasses.replace(case, dims=dict.fromkeys(case.dims, 8) | {next(iter(case.dims)): 768})
        new = series.new(small, pool)
        of_rows = next(name for name in ("token_ids", "x", "a", "q") if name in new[0])
        rows = [len(args[of_rows]) for args in new]
        assert len(set(rows)) == len(rows) and 768 not in rows
        for i in range(len(series.directions)):
            assert len(rows[i :: len(series.directions)]) >= ONCE_CALLS
        assert all(series.new(other, pool) == [] for other in series.cases[:-1])


# A suite that is no call of one op


def step_suite() -> Subject:
    """Two ops' worth of work behind one number: a step."""

    def make(case: Case, pool: Any) -> list[dict[str, Any]]:
        N, V = case.dims.values()
        return [{"logits": torch.randn(N, V), "ids": torch.zeros(N, dtype=torch.int64)}]

    def call(args: dict[str, Any], backend: str | None) -> torch.Tensor:
        assert backend is None
        return logp(args["logits"] * 2.0, args["ids"]).sum()

    series = Series(
        op=None, name="step", cases=[Case({"N": 4, "V": 9}, data="random")], make=make, call=call,
        cost=lambda dims, dtype: Cost(64), judge=lambda args: None, inputs=("logits",), copy=False,
        directions=("fwd_bwd",), needs=("logp", "det_linear"),
    )  # fmt: skip
    return Subject("step", "--suite", "step", [series], ())


def test_a_step_is_timed_after_its_ops_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []

    def together(pairs: Any, device: Any) -> Any:
        checked.append((pairs, device))
        return {pair: [] for pair in pairs}

    monkeypatch.setitem(sys.modules, "isobit.check.runner", types.SimpleNamespace(quick_checks=together))
    (row,) = timed(step_suite(), skip_check=False)["rows"]
    assert (row["op"], row["impl"], row["max_abs"]) == ("step", "isobit", None)
    assert checked == [([("det_linear", "model"), ("logp", "reference")], CPU)]


def test_a_step_with_a_failing_op_is_not_timed() -> None:
    backend = known_op("logp").backend_named("reference")
    right = backend.run

    def wrong(**args: Any) -> Any:
        out, *rest = right(**args)
        return out + 1e-3, *rest

    object.__setattr__(backend, "run", wrong)
    try:
        with pytest.raises(CheckFailed, match="logp on reference fails its check"):
            timed(step_suite(), skip_check=False)
    finally:
        object.__setattr__(backend, "run", right)
