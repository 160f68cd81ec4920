"""Published rows, judged by the goals of today; and what they say of the rule that proposes classes."""

import json
import math
from pathlib import Path

from isobit.bench.goals import cells
from isobit.layers.propose import proposed_class
from isobit.numerics import CHAIN16, TREE8
from isobit.ops.det_gemm import rivals
from publish import tables
from publish.judged import judged
from test_bench_products import ROWS, STAMP, a_cell, write_results

ROOT = Path(__file__).parent.parent


def test_pages_judge_rows_by_the_goals_of_today(tmp_path: Path) -> None:
    path = tmp_path / "det_gemm.json"
    few = write_results(path)["summary"]
    assert [entry["what"] for entry in few] == ["few rows"]
    page = "<!-- results:det_gemm -->\n<!-- /results -->\n"
    shown = tables.updated(page, tmp_path)
    assert (
        "| few rows |" not in shown and "| forward and dX, M > 768 | 2 | 0.90 (goal 0.98 **missed**)" in shown
    )
    assert "| rollouts, dX | 0 | not measured | - |" in shown
    assert json.loads(path.read_text())["summary"] == few  # the file stays as it was measured
    other = tmp_path / "no_op_and_no_suite.json"
    path.rename(other)
    assert judged(other)["summary"] == few


def test_a_series_that_bytes_decide_shows_how_many_it_moves(tmp_path: Path) -> None:
    rows = [row | {"tbps": 3.456 / (1 + i)} for i, row in enumerate(a_cell("det_gemm_cold", 8, 16, 0.5))]
    report = {"stamp": STAMP, "notes": [], "against": "torch.mm", "rows": [*ROWS, *rows]}
    (tmp_path / "det_gemm.json").write_text(json.dumps(report))
    shown = tables.updated("<!-- results:det_gemm -->\n<!-- /results -->\n", tmp_path)
    assert "`det_gemm_cold`, TB/s of isobit\n\n| M | K=16 N=16 |\n| ---: | ---: |\n| 8 | 3.46 |\n" in shown
    assert shown.count("TB/s of isobit") == 1  # of other series operations decide many cases


def test_the_class_that_is_proposed_for_a_layer_is_the_faster_one_on_the_gpu_it_was_fitted_to() -> None:
    rows = json.loads((ROOT / "results" / "h200" / "det_gemm.json").read_text())["rows"]
    logs: dict[tuple[int, int], dict[str, float]] = {}
    for cell in cells([row for row in rows if row["op"] == "det_gemm_cold"], "torch.mm"):
        if cell.sizes["M"] <= 512:
            of_layer = logs.setdefault((cell.sizes["K"], cell.sizes["N"]), {CHAIN16: 0.0, TREE8: 0.0})
            of_layer[CHAIN16] += math.log(cell.share)
            of_layer[TREE8] += math.log(cell.others["isobit:tree8"])
    assert set(logs) == set(rivals.COLD_SHAPES)
    assert {layer: max(both, key=both.get) for layer, both in logs.items()} == {
        layer: proposed_class(*layer) for layer in rivals.COLD_SHAPES
    }
