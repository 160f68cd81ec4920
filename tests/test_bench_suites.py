"""Suites: what is timed and is no op, found without a list, in files of the same form."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit import ContractError
from isobit.bench import suites, tables
from isobit.bench.cases import Subject, parse_case, suite_of
from isobit.bench.report import ROW
from isobit.bench.runner import run
from isobit.bench.series import Series
from isobit.bench.suites import suite_names
from isobit.bench.vouch import CheckFailed
from isobit.check.proof import Case, Cost
from isobit.op import OPS, known_op
from isobit.ops.logp.op import logp

CPU = torch.device("cpu")


def timed(of: Subject, **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"device": "cpu", "repetitions": 2, "skip_check": True, "say": lambda t: None}
    return run(of, **(defaults | options))


def test_no_suite_has_the_name_of_a_results_file_of_an_op() -> None:
    assert suite_names() and not set(suite_names()) & {op.folder for op in OPS.values()}
    with pytest.raises(ContractError, match="unknown suite 'lunch'; known: launch"):
        suite_of("lunch")


def test_launch_times_three_ops_beside_pytorch(tmp_path: Path) -> None:
    launch = suite_of("launch")
    assert all(len(series.cases) == 3 for series in launch.series)
    report = timed(launch, out_dir=tmp_path)
    path = tmp_path / "cpu" / "launch.json"
    assert json.loads(path.read_text()) == report
    assert {(r["op"], r["direction"], r["impl"]) for r in report["rows"]} == {
        (op, direction, impl)
        for op in ("det_linear", "logp", "linear_logp")
        for direction in ("fwd", "fwd_bwd")
        for impl in ("isobit", "native")
    }
    assert all(tuple(row) == ROW and row["max_abs"] < 0.5 for row in report["rows"])
    shown = tables.render_op(path)
    assert all(f"`{op}`\n\n| case |" in shown for op in ("det_linear", "logp", "linear_logp"))
    only = tables.render_op(path, ["logp"])
    assert "`logp`" in only and "det_linear" not in only
    with pytest.raises(ValueError, match="no 'margin' was timed; known: det_linear, logp, linear_logp"):
        tables.render_op(path, ["margin"])


def test_a_case_of_ones_own_goes_to_the_series_that_have_its_sizes() -> None:
    launch = suite_of("launch")
    report = timed(launch, cases=[parse_case("N=3,V=5", launch)], impls=["isobit"], directions=["fwd"])
    assert [(row["op"], row["case"]) for row in report["rows"]] == [("logp", "N=3 V=5 bf16")]


def test_a_new_module_is_a_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("from isobit.bench.suites.launch import SERIES\n")
    monkeypatch.setattr(suites, "__path__", [*suites.__path__, str(tmp_path)])
    assert suite_names() == ["launch", "mine"] and suite_of("mine").file == "mine"


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


def test_a_step_is_timed_after_the_ops_that_it_rests_on_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    check = types.SimpleNamespace(quick_check=lambda *args: checked.append(args) or [])
    monkeypatch.setitem(sys.modules, "isobit.check.runner", check)
    (row,) = timed(step_suite(), skip_check=False)["rows"]
    assert (row["op"], row["impl"], row["max_abs"]) == ("step", "isobit", None)
    assert checked == [("logp", CPU, "reference", {}), ("det_linear", CPU, "model", {})]


def test_a_step_on_a_red_op_is_not_timed() -> None:
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
