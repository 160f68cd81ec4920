"""The suite of drift, on a CPU with tiny models of the same kinds; its tables and its picture."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.suites import drift as suite
from isobit.bench.cases import suite_of
from isobit.bench.check_gate import CheckFailed
from isobit.bench.goals import summary
from isobit.bench.report import ROW
from isobit.bench.runner import run, to_json
from isobit.drift.axes import DEFAULT
from isobit.drift.report import Report, Row
from isobit.spec.series import Pool
from publish import drift as published
from publish.tables import render_op, updated

ROOT = Path(__file__).parent.parent
NAME = "qwen3-0.6b-4-layers"

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Of one model on one axis, and of the metrics in training; as if it were timed on a GPU."""
    subject = suite_of("drift")
    chosen = [one for one in subject.series if (one.name, one.directions) == (NAME, ("padding",))]
    logged = [one for one in subject.series if one.name == suite.METRICS]
    some = replace(subject, series=[*chosen, *logged])
    made = run(some, device="cpu", repetitions=2, skip_check=True, say=lambda text: None)
    rows = [row | {"method": "sync"} for row in made["rows"]]
    return made | {"rows": rows, "summary": summary(rows, "sdpa", subject.goals)}


def test_every_model_is_measured_on_every_axis() -> None:
    models = (*suite.MODELS, *suite.DELTA_NETS)
    declared = {(one.name, *one.directions) for one in suite_of("drift").series}
    assert declared == {(name, axis) for name in models for axis in DEFAULT} | {(suite.METRICS, "metrics")}


@pytest.mark.parametrize("name", [suite.QWEN_NEXT_NAME, suite.QWEN_35_NAME])
def test_gated_delta_nets_are_measured(name: str) -> None:
    """With isobit no token has other bits, and the checks of what computes them come first."""
    series = next(
        one for one in suite_of("drift").series if (one.name, one.directions) == (name, ("padding",))
    )
    (args,) = series.make(suite.SMALL[0], Pool(torch.device("cpu")))
    verdict = suite.Judge().error("padding", suite.measured("padding", True, args))
    assert verdict.more is not None and (verdict.more["tokens"], verdict.more["tokens_differ"]) == (18, 0)
    assert {"gated_delta_rule", "gated_delta_rule_step"} < set(series.needs)


def test_drift_before_and_after_is_in_the_rows(report: dict[str, Any]) -> None:
    rows = {(row["op"], row["direction"], row["impl"]): row for row in report["rows"]}
    assert all(tuple(row)[: len(ROW)] == ROW for row in rows.values()) and len(rows) == 4
    for (name, axis, impl), row in rows.items():
        if name == suite.METRICS:
            continue
        assert row["tokens"] == 2 * (12 - 3), axis  # 12 tokens in 3 sequences, padded on both sides
        assert (row["tokens_differ"], row["max_abs"], row["adding"]) == (0, 0, 0) or impl == "sdpa"
    found = {entry["what"]: entry for entry in report["summary"] if entry["cells"]}
    assert len(found) == 2 and found[f"{NAME}, tokens with other bits"]["met"]


def test_tables_and_the_picture_are_made_from_the_file(
    report: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if three of the tokens had differed before."""
    worse = {"tokens_differ": 3, "max_abs": 0.5, "k3": 1e-4, "adding": 7, "ms": 1500.0}
    rows = [row | (worse if (row["op"], row["impl"]) == (NAME, "sdpa") else {}) for row in report["rows"]]
    results, picture = tmp_path / "drift.json", tmp_path / "drift.svg"
    results.write_text(to_json(report | {"rows": rows}))
    text = render_op(results)
    line = f"| {NAME} | padding | 3 of 18 | 0 of 18 | 5.0e-01 | 1.0e-04 | 7 | 1.5 | "
    assert line in text and "| metrics in training | ms | a training step, ms | share |" in text
    assert published.main([str(results), str(picture)]) == 0
    drawn = picture.read_text()
    ElementTree.fromstring(drawn)
    assert "3 of 18" in drawn and "0 of 18" in drawn and "with padding" in drawn and "http" in drawn
    page = "<!-- results:drift-picture -->\nold\n<!-- /results -->\n"
    assert "](docs/drift.svg)\n<!-- /results -->" in updated(page, tmp_path)
    # Without the file: no picture, and the page of drift says how to measure it.
    results.unlink(), picture.unlink()
    assert updated(page, tmp_path) == "<!-- results:drift-picture -->\n<!-- /results -->\n"
    asked = updated("<!-- results:drift -->\n<!-- /results -->\n", tmp_path)
    assert "Not measured yet: `isobit bench --suite drift --results results`." in asked
    assert published.main([str(results), str(picture)]) == 0 and not picture.exists()
    assert "not measured yet" in capsys.readouterr().out


def test_the_picture_of_the_readme_is_that_of_the_results() -> None:
    """`make tables` draws it."""
    results, picture = ROOT / "results" / "h200" / "drift.json", ROOT / "docs" / "drift.svg"
    assert picture.is_file() == results.is_file()
    if results.is_file():
        assert picture.read_text() == published.draw(json.loads(results.read_text()))


def test_a_model_that_drifts_is_not_timed() -> None:
    judge = suite.Judge()
    numbers = {"tokens": 9, "differ": 2, "k3_kl": 1e-6, "logp_diff_max": 0.1}
    made = Report("m", "cpu", "bf16", True, 1, 10, [Row("batch", "2 rows", numbers)])
    assert judge.error("batch", (made, False)).more == {
        "tokens": 9, "tokens_differ": 2, "k3": 1e-6, "adding": 0
    }  # fmt: skip
    with pytest.raises(CheckFailed, match="2 of 9 tokens have other bits on the axis batch, 2 rows"):
        judge.error("batch", (made, True))
    with pytest.raises(CheckFailed, match="chunk did not run: no cache"):
        judge.error("batch", (replace(made, skipped={"chunk": "no cache"}), False))
