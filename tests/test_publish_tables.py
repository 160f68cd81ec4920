"""Tables of the pages, made from result files: what they show, what is marked, and when a page is stale."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from isobit.bench.report import ROW, format_table
from publish import headline, tables
from publish.overview import overview

RESULTS = Path(__file__).parent.parent / "results" / "h200"


def a_row(impl: str, ms: float, direction: str = "fwd", **figures: Any) -> dict[str, Any]:
    known: dict[str, Any]
    known = {"op": "logp", "case": "N=8 V=9 bf16", "direction": direction, "impl": impl, "method": "graph"}
    known |= {"ms": ms, "ms_q25": ms, "ms_q75": ms, "floor_ms": 0.5, "tbps": 2.0, "extra_mb": 0.25}
    return dict.fromkeys(ROW) | known | figures


def write_results(folder: Path, *rows: dict[str, Any], kernels: dict[str, str] | None = None) -> None:
    stamp = {"gpu": "NVIDIA H200", "driver": "580", "torch": "2.11", "triton": "3.6", "python": "3.12"}
    stamp |= {"commit": "abc", "source_sha": "def", "date": "2026-01-02T03:04:05Z"}
    stamp |= {"kernels": kernels or {}}
    rates = {"copy_tbps": 4.26, "best_tflops": 800.0}
    folder.mkdir(exist_ok=True)
    (folder / "logp.json").write_text(json.dumps({"stamp": stamp | rates, "notes": [], "rows": rows}))
    (folder / "check_logp.json").write_text("{}")


ROWS = (
    a_row("isobit", 0.4, host_us=42.6),
    a_row("native", 1.2),
    a_row("copy", 0.38),
    a_row("isobit", 9.0, "bwd"),
    a_row("isobit", 1.0, "fwd_bwd"),
    a_row("liger", 1.5, "fwd_bwd", host_us=18.0),
)


def test_markdown_shows_ours_against_the_copy_and_each_rival(tmp_path: Path) -> None:
    write_results(tmp_path, *ROWS)
    assert tables.render_op(tmp_path / "logp.json") == (
        "| case | direction | isobit ms | % of copy speed | native ms | liger ms | extra MB "
        "| host us: isobit / native / liger |\n"
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| N=8 V=9 bf16 | fwd | 0.4 | 95 % | 1.2 (3.00x) | - | 0.25 | 43 / - / - |\n"
        "| N=8 V=9 bf16 | fwd+bwd | 1 | - | - | 1.5 (1.50x) | 0.25 | - / - / 18 |\n"
        "\n"
        "<sub>NVIDIA H200, driver 580, torch 2.11, Triton 3.6, Python 3.12; copy 4.26 TB/s, "
        "bf16 product 800 TFLOP/s; commit abc, source def, 2026-01-02</sub>\n"
    )


def test_rollouts_have_tokens_a_second_and_tokens_with_other_bits(tmp_path: Path) -> None:
    def row(impl: str, ms: float, run: str = "graphs", **more: Any) -> dict[str, Any]:
        figures = {"tokens_per_s": 5e3 / ms, "first_ms": ms / 4, "tokens": 64, "tokens_differ": 0, "k3": 0.0}
        quartiles = {"ms_q25": ms / 1.25, "ms_q75": ms * 2}
        return a_row(impl, ms, run, **quartiles | figures | more)

    def shown(*rows: dict[str, Any]) -> str:
        write_results(tmp_path, *rows)
        path = tmp_path / "logp.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"against": "plain"}))
        return tables.render_op(path)

    rival = {"tokens_differ": 63, "k3": 4.2e-5}
    rows = row("plain", 8.0, **rival), row("isobit", 10.0), row("isobit", 40.0, "eager")
    assert shown(*rows).startswith(
        "`logp`\n\n| case | run | isobit tokens/s (quartiles) | plain tokens/s (quartiles) "
        "| ms to the first token: isobit / plain | tokens with other bits: isobit / plain "
        "| k3 KL: isobit / plain |\n| --- | --- | ---: | ---: | ---: | ---: | ---: |\n"
        "| N=8 V=9 bf16 | graphs | 500 (250-625) | 625 (312-781), 0.80x | 2 / 2 | 0 of 64 / 63 of 64 "
        "| 0 / 4.2e-05 |\n| N=8 V=9 bf16 | eager | 125 (62-156) | - | 10 / - | 0 of 64 / - | 0 / - |\n"
    )
    assert "plain tokens/s (quartiles) |" in shown(rows[0], rows[1] | {"runs_ms": [10.0] * 3})
    each = shown(row("plain", 8.0, runs_ms=[8.0, 10.0, 5.0]), row("isobit", 10.0, runs_ms=[10.0, 10.0, 20.0]))
    assert "| isobit tokens/s (slowest-fastest of 3) | plain tokens/s (slowest-fastest of 3) |" in each
    assert "| N=8 V=9 bf16 | graphs | 500 (250-500) | 625 (500-1000), 0.80x |" in each


def test_markdown_shows_the_floor_where_operations_and_not_bytes_decide_it(tmp_path: Path) -> None:
    other = {"case": "other"}
    products = a_row("isobit", 1.0), a_row("copy", 0.1)
    write_results(tmp_path, *products)
    shown = tables.render_op(tmp_path / "logp.json")
    assert "| % of floor speed |" in shown and "| 1 | 50 % |" in shown
    for last in ([a_row("copy", 0.48) | other], []):  # as fast as the floor, or not timed
        write_results(tmp_path, *products, a_row("isobit", 0.6) | other, *last)
        shown = tables.render_op(tmp_path / "logp.json")
        assert "| % of copy speed |" in shown and "| 1 | 10 % |" in shown


def test_many_lengths_are_shown_in_short(tmp_path: Path) -> None:
    many, few = "+".join(str(n) for n in range(100, 120)), "5+0+66"
    write_results(tmp_path, *(a_row("isobit", 1.0) | {"case": f"N=8 lengths={each}"} for each in (many, few)))
    shown = tables.render_op(tmp_path / "logp.json")
    assert "| N=8 lengths=100+101+...+119 (20 of them) |" in shown and "| N=8 lengths=5+0+66 |" in shown


def test_goals_with_baselines_of_their_own_name_them(tmp_path: Path) -> None:
    """A share of the speed of a copy is none of the rival's that the rest is compared with."""

    def goal(what: str, against: str) -> dict[str, Any]:
        limits = dict.fromkeys(("goal_geomean", "goal_least", "goal_most", "least_at"))
        return limits | {"what": what, "against": against, "figure": "ms", "cells": 1, "geomean": 0.9,
                         "least": 0.9, "met": True}  # fmt: skip

    def shown(*goals: dict[str, Any]) -> str:
        write_results(tmp_path, *ROWS)
        path = tmp_path / "logp.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"against": "native", "summary": goals}))
        return tables.render_op(path)

    alone = shown(goal("all", "native"))
    assert (
        alone.startswith("| speed as a share of native | cells |") and "\n| all | 1 | 0.90 | 0.90 |" in alone
    )
    both = shown(goal("all", "native"), goal("bandwidth", "copy"))
    assert both.startswith("| goal | share of the speed of | cells |")
    assert "\n| all | native | 1 | 0.90 | 0.90 |\n| bandwidth | copy | 1 | 0.90 | 0.90 |" in both


def test_results_of_other_kernels_are_marked(tmp_path: Path) -> None:
    write_results(tmp_path, *ROWS, kernels={"logp": "of other kernels"})
    assert "2026-01-02. The kernels have changed since</sub>" in tables.render_op(tmp_path / "logp.json")
    shown = tables.render_every(tmp_path)
    assert (
        "| `logp`, forward † |" in shown and "\n† The kernels have changed since this was measured." in shown
    )
    write_results(tmp_path, *ROWS)
    assert "†" not in tables.render_every(tmp_path)


def test_the_summary_has_ours_over_the_baseline_and_the_best_rival_over_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        a_row("isobit", 0.4),
        a_row("copy", 0.2),
        a_row("copy_variant", 0.01),  # of the baseline
        a_row("isobit:hopper", 0.01),
        a_row("isobit:new", 0.01),
        a_row("native:new", 0.01),  # another size every call
        a_row("native", 1.2),
        a_row("liger", 0.6),
        a_row("isobit", 9.0, "bwd"),  # a direction without a line
        a_row("copy", 9.0, "bwd"),
        a_row("liger", 0.1, "fwd_bwd"),  # without ours
        a_row("isobit", 0.4) | {"case": "other"},
        a_row("copy", 0.8) | {"case": "other"},  # the mean of 0.5 and 2 is 1
        a_row("native", 0.8) | {"case": "other"},
    ]
    write_results(tmp_path, *rows)
    report = json.loads((tmp_path / "logp.json").read_text())
    monkeypatch.setattr("publish.overview.judged", lambda path: json.loads(path.read_text()))  # as they are
    (tmp_path / "logp.json").write_text(json.dumps(report | {"summary": [{"met": True}, {"met": False}]}))
    lines, missing = overview(tmp_path, ["no_file", "logp"])
    line = ["`logp`, forward", "2", "1.00x copy", "1.50x isobit (liger, 1 case)", "1 of 2"]
    assert missing == ["no_file"] and lines[1:] == [line]
    only_copy = {"against": "native", "rows": [a_row("isobit", 0.4), a_row("native", 0.2)], "figure": "ms"}
    (tmp_path / "logp.json").write_text(json.dumps(report | only_copy))
    assert overview(tmp_path, ["logp"])[0][1:] == [["`logp`, forward", "1", "2.00x native", "-", ""]]
    (tmp_path / "logp.json").write_text(json.dumps(report | only_copy | {"figure": "host_us"}))
    assert overview(tmp_path, ["logp"])[0][1:] == []
    page = tmp_path / "page.md"
    example = "    <!-- results:logp -->\n    <!-- /results -->\n"  # indented: code, not a mark
    page.write_text(f"{example}<!-- results:every -->\n<!-- /results -->\n{example}")
    tables.update(page, tmp_path)
    text = page.read_text()
    assert "| call | cases |" in text and "Not measured yet: `attention`" in text
    assert "\n- `logp`: log-probabilities from logits\n" in text and "- `attention`" not in text
    assert text.startswith(f"{example}<!-- results:every") and text.endswith(f"<!-- /results -->\n{example}")


def test_the_short_table_has_the_fastest_other_and_only_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        a_row("isobit", 0.4) | {"extra_mb": 2.04},
        a_row("copy", 0.1),
        a_row("isobit:triton", 0.2),
        a_row("native:new", 0.3),
        a_row("native", 1.2),
        a_row("liger", 0.6) | {"extra_mb": 40.4},
        a_row("isobit", 0.4) | {"case": "alone"},
    ]
    write_results(tmp_path, *rows)
    case = rows[0]["case"]
    here = headline.Headline("logp", "logp", "logp", case, "fwd")
    others = ({"case": "alone"}, {"case": "nowhere"}, {"file": "no_file"})
    gone = [dataclasses.replace(here, **other) for other in others]
    monkeypatch.setattr(headline, "HEADLINES", (here, *gone))
    assert headline.headlines(tmp_path)[1:] == [["logp", case, "0.4", "0.6 (Liger)", "1.50x", "2.0", "40"]]
    assert "ot measured" not in tables.render_summary(tmp_path)


def test_the_short_table_has_eight_rows_and_every_series_an_explanation() -> None:
    lines = headline.headlines(RESULTS)
    assert len(lines) == 1 + len(headline.HEADLINES) == 9
    shown = tables.render_every(RESULTS)
    assert all(f"\n- `{name}`: " in shown for name in re.findall(r"^\| `([^`]+)`", shown, re.M))


def test_pages_with_marks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tables.main(["--check"]) == 1  # no page at all is an error
    (tmp_path / "docs").mkdir()
    for name, text in {
        "README.md": "none",
        "docs/a.md": "<!-- results:logp -->\n<!-- /results -->\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert tables.marked_pages() == [Path("docs/a.md")]


def test_a_stale_page_is_found_and_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, results = tmp_path / "README.md", tmp_path / "h200"
    page.write_text("before\n<!-- results:logp -->\nold\n<!-- /results -->\nafter\n")
    write_results(results, *ROWS)
    where = [str(page), "--results", str(results)]
    assert tables.main(["--check", *where]) == 1 and "stale" in capsys.readouterr().out
    assert "old" in page.read_text()
    assert tables.main(where) == 0 and tables.main(["--check", *where]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- ") and text.endswith("<!-- /results -->\nafter\n")
    assert "old" not in text
    assert tables.update(page, results) is False
    write_results(results, a_row("isobit", 0.3))
    assert tables.main(["--check", *where]) == 1
    assert tables.update(page, results) is True


@pytest.mark.parametrize(
    ("text", "message"),
    [("no markers", "no '<!-- results:"), ("<!-- results:x -->\n<!-- /results -->", "x.json")],
)
def test_a_page_that_cannot_be_rendered_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert tables.main(["--check", str(page), "--results", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err


def test_the_text_table_is_aligned() -> None:
    block, *others = format_table(ROWS[:3]).split("\n\n")
    title, head, *lines = block.split("\n")
    assert not others and title == "logp N=8 V=9 bf16 fwd: floor 0.5 ms"
    assert len({len(line) for line in (head, *lines)}) == 1
    assert lines[1].split() == ["native", "1.2", "(1.2-1.2)", "2.40", "2", "0.25", "-", "-", "graph"]
