"""Result files: every key that is written is on the page, and files of both versions can be read."""

import json
import math
import re
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.bench.cases import parse_case
from isobit.bench.goals import Goal, summary
from isobit.bench.report import ROW, format_report
from isobit.bench.runner import run
from isobit.check import report as check_report
from isobit.check.memcheck import Run
from isobit.check.request import Request
from isobit.check.runner import run as check
from isobit.frame.op import known_op
from isobit.spec.proof import InputOptions
from isobit.spec.truth import Errors, errors_of
from publish import charts, stale, tables

ROOT = Path(__file__).parent.parent
COMMITTED = sorted((ROOT / "results").rglob("*.json"))
PAGE = (ROOT / "docs" / "dev" / "results.md").read_text()


def documented(head: str) -> set[str]:
    """Keys of the tables whose first column has this head."""
    found: set[str] = set()
    for table in re.findall(rf"^\| {head} \| meaning \|\n(?:\|.*\n)+", PAGE, re.M):
        for line in table.splitlines()[2:]:
            found |= set(re.findall(r"`(\w+)`", line.split(" | ")[0]))
    return found


def timed(name: str, text: str, **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"device": "cpu", "repetitions": 2, "skip_check": True, "say": lambda t: None}
    return run(name, [parse_case(text, known_op(name))], **(defaults | options))


def checked(**options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"ops": ("logp",), "backends": ("reference",), "dims": {"N": 3, "V": 7}}
    request = Request(**(defaults | options))
    return check_report.to_json(check(request), request.device, "abc", [{"op": "logp"}], request.command())


def test_every_key_of_a_benchmark_is_on_the_page() -> None:
    report = timed("det_gemm", "M=3,K=16,N=8", impls=["isobit", "torch.mm", "torch.mm_narrow"])
    goal = Goal("all", lambda cell: True, mean=0.5)
    rows = [row | {"method": "graph"} for row in report["rows"]]
    (entry,) = summary(rows, "torch.mm", [goal])
    assert set(report) <= documented("key") and report["schema"] == 2
    assert set(report["stamp"]) <= documented("key")
    of_some = {"mean_abs", "max_rel", "rel_rms", "tokens", "tokens_differ", "predicted_ms", "max_diff"}
    of_some |= {"k3", "first_ms", "tokens_per_s", "adding", "runs_ms", "wait_s", "kernels", "compiled"}
    assert set(ROW) == set(rows[0]) == documented("key of a row") - of_some
    assert set(entry) == documented("key of a summary")


def test_every_key_of_a_check_is_on_the_page() -> None:
    report = checked()
    assert set(report) | set(report["stamp"]) <= documented("key") and report["schema"] == 2
    (candidate,) = report["candidates"]
    assert set(candidate) <= documented("key") | documented("key of a candidate")
    cases = {key for case in candidate["cases"] for key in case}
    assert cases == documented("key of a case")
    outputs = {key for case in candidate["cases"] for output in case["outputs"] for key in output}
    assert outputs and outputs <= documented("key of an output")
    assert set(Run.__dataclass_fields__) <= documented("key")


def test_keys_that_some_rows_have_beside_the_others() -> None:
    case = "B=1,T=130,H=1,HV=1,K=16,V=16"
    row, *_ = timed("chunk_gated_delta_rule_bwd_dhu", case, impls=["isobit"], options={"mode": "g"})["rows"]
    assert set(row) - set(ROW) == {"mean_abs", "max_rel", "rel_rms"} <= documented("key of a row")
    assert 0 < row["mean_abs"] < row["max_abs"] and 0 < row["rel_rms"] < 0.01 and 0 < row["max_rel"] < 0.05
    ones = torch.ones(4, dtype=torch.float64)
    assert errors_of(0 * ones, 0 * ones) == Errors(0.0, 0.0, 0.0, 0.0)
    found = errors_of(torch.tensor([1.0, 2.0]), ones[:2])
    assert astuple(found) == pytest.approx((1.0, 0.5, 1.0, 0.5**0.5))
    assert errors_of(ones, 0 * ones) == Errors(1.0, 1.0, math.inf, math.inf)


def test_what_is_not_documented_is_found() -> None:
    assert documented("key of a row") and "no_such_key" not in documented("key of a row")
    assert documented("no such head") == set()


def test_a_row_says_from_what_it_can_be_made_again() -> None:
    options = {"temperature": 0.5, "mask": torch.bool, "layout": "padded"}
    report = timed("logp", "N=5,V=7", impls=["isobit", "native", "copy"], directions=["fwd"], options=options)
    for row in report["rows"]:
        kind = (row["dtype"], row["options"], row["data"], row["seed"])
        assert kind == ("bf16", {"temperature": 0.5, "mask": "bool", "layout": "padded"}, "random", 123)
    served = {row["impl"]: row["backend"] for row in report["rows"]}
    assert served == {"isobit": "reference", "native": None, "copy": None}
    asked = "--option temperature=0.5 --option mask=bool --option layout=padded"
    assert f"--case N=5,V=7,dtype=bf16 {asked} --direction fwd --impl isobit" in report["command"]
    kept = timed("linear_logp", "N=4,D=8,V=12", impls=["isobit"])["rows"][-1]
    assert (kept["op"], kept["options"]) == ("linear_logp_kept", {"workspace_bytes": 1 << 37})


def test_a_case_says_from_what_it_can_be_made_again() -> None:
    report = checked(
        laws=("gradient",),
        dtypes=(torch.float16,),
        vary={"ids": torch.int32},
        data="random",
        inputs=InputOptions(seed=7),
    )
    (case,) = report["candidates"][0]["cases"]
    assert {key: case[key] for key in ("op_class", "dtype", "arch", "data", "options", "seed")} == {
        "op_class": "logprob", "dtype": "fp16", "arch": "cpu", "data": "random",
        "options": {"ids": "int32"}, "seed": 7,
    }  # fmt: skip
    assert (case["grad_mode"], case["grad_seed"], case["constant"], case["token"]) == (
        "random",
        7,
        0.25,
        None,
    )
    assert "inputs" not in case
    json.dumps(report)


def test_comparisons_are_passed_on_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a comparison says of itself reaches the file."""
    from isobit.spec.compare import OutputCheck

    plain = OutputCheck.to_json
    monkeypatch.setattr(OutputCheck, "to_json", lambda self: plain(self) | {"torch_abs": 1e-7})
    (case,) = checked(laws=("accuracy",))["candidates"][0]["cases"]
    assert all(output["torch_abs"] == 1e-7 for output in case["outputs"])


# Reading both versions


#: The keys of each. Every process of the tests reads all files for that, so once.
KEYS = {path: frozenset(json.loads(path.read_text())) for path in COMMITTED}


def files(kind: str) -> list[Path]:
    return [path for path in COMMITTED if kind in KEYS[path]]


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of today's version of each kind."""
    folder = tmp_path_factory.mktemp("results")
    timed("logp", "N=5,V=7", impls=["isobit", "native", "copy"], out_dir=folder)
    timed("det_gemm", "M=3,K=16,N=8", impls=["isobit", "torch.mm"], out_dir=folder)
    path = folder / "cpu" / "det_gemm.json"  # as if on a GPU: goals and charts leave wall times out
    path.write_text(path.read_text().replace('"wall"', '"graph"'))
    (folder / "cpu" / "check_logp.json").write_text(json.dumps(checked(laws=("accuracy",))))
    return folder


@pytest.mark.parametrize("path", files("rows"), ids=lambda path: path.name)
def test_committed_benchmarks_can_be_read(path: Path) -> None:
    report = json.loads(path.read_text())
    assert report.get("schema") in (None, 2)
    assert tables.render_op(path).count("\n|") > 5 and format_report(report)
    if report.get("against"):
        assert "<svg" in charts.chart(report)


@pytest.mark.parametrize("path", files("candidates"), ids=lambda path: path.name)
def test_committed_checks_can_be_read(path: Path) -> None:
    report = json.loads(path.read_text())
    assert report["schema"] in (1, 2) and report["passed"]
    assert stale.examine(path, ROOT / "results").command.startswith("isobit check --op ")


@pytest.mark.parametrize("path", files("candidates"), ids=lambda path: path.name)
def test_every_class_has_kept_its_bits_in_a_committed_check(path: Path) -> None:
    """A law whose control cannot run is unsupported in every cell, and nothing of it was tried."""
    for candidate in json.loads(path.read_text())["candidates"]:
        if candidate["numerics"] != "none":
            kept = [c for c in candidate["cases"] if (c["law"], c["status"]) == ("invariant", "ok")]
            assert kept, f"{candidate['op']} on {candidate['candidate']}: law invariant was never tried"


def test_files_of_today_can_be_read(new: Path) -> None:
    for name in ("logp", "det_gemm"):
        path = new / "cpu" / f"{name}.json"
        assert tables.render_op(path).count("|") > 20 and format_report(json.loads(path.read_text()))
    assert "`det_linear`\n\n| case |" in tables.render_op(new / "cpu" / "det_gemm.json")
    assert "<svg" in charts.chart(json.loads((new / "cpu" / "det_gemm.json").read_text()))
    assert [result.stale for result in stale.results_in(new)] == [None] * 3
