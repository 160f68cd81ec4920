"""Guards the pages of reports: what they must show for committed files and for broken kernels, and how saved
reports are compared."""

import copy
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import isobit
from isobit.bench.report import CPU_WARNING
from isobit.check.cell import Cell
from isobit.check.largest_errors import Error, worst_first
from isobit.check.laws import LAWS
from isobit.check.report import notes, progress, table
from isobit.cli.html import page
from isobit.cli.html.bench import section
from isobit.cli.html.check import section as check_section
from isobit.cli.html.saved import compare, read_report, summary_line
from isobit.cli.html.share_chart import COLOURS
from isobit.cli.main import app
from isobit.frame.contract import ContractError
from isobit.frame.op import public_ops
from isobit.spec.compare import against_truth

RESULTS = sorted((Path(__file__).parent.parent / "results" / "h200").glob("*.json"))


class Shape(HTMLParser):
    """Tags that are open at the end, and everything that would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("section", "details", "table", "div", "svg", "nav", "ul", "pre"):
            self.open.append(tag)
        links = [v or "" for k, v in attrs if k in ("src", "href")]
        self.fetched += [link for link in links if not link.startswith(("#", "data:"))]
        if tag in ("img", "iframe"):
            self.fetched.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()


def report_of_a_check(**changes: Any) -> dict[str, Any]:
    """Two outputs of one case of one backend, and a law that did not run."""
    output = {
        "output": "0:logp", "shape": [4], "dtype": "fp32", "truth_dtype": "fp64", "atol": 1e-6, "rtol": 1e-7,
        "max_abs": 1e-7, "mean_abs": 1e-8, "max_rel": 1e-6, "worst_index": [0], "passed": True,
        "message": "worst at [0]", "worst_abs": 5e-7, "torch_abs": 2.5e-7,
    }  # fmt: skip
    case = {
        "op": "logp", "backend": "mine", "law": "accuracy", "case": "N=4 V=33 fp32", "status": "ok",
        "reason": "", "numerics": "none",
        "outputs": [output, output | {"output": "1:entropy", "worst_abs": 0}],
        "seconds": 0.1, "command": "isobit check --op logp <&>",
    }  # fmt: skip
    moved = case | {"law": "invariant", "outputs": [output | {"message": "7 of 300 rows alone"}] * 3}
    unrun = case | {"law": "compile", "status": "UNSUPPORTED", "reason": "nothing to compile", "outputs": []}
    cases = [case | changes, moved, unrun]
    fails = sum(c["status"] == "FAIL" for c in cases)
    one = {"op": "logp", "candidate": "mine", "numerics": "none", "cases": cases}
    stamp = {"gpu": "cpu", "driver": "none", "torch": "2", "triton": "3", "python": "3.11", "commit": "abc"}
    stamp |= {"source_sha": "def", "date": "2026-11-15T00:00:00Z"}
    head = {"schema": 2, "suite": "isobit check", "stamp": stamp, "command": "isobit check --op logp"}
    return head | {"ok": 2 - fails, "fail": fails, "unsupported": 1, "passed": not fails, "candidates": [one]}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_every_committed_report_has_a_page_that_fetches_nothing(path: Path) -> None:
    report = read_report(path)
    text = page([report])
    shape = Shape(text)
    assert shape.open == [] and shape.fetched == []
    assert report["stamp"]["commit"] in text and summary_line(report)
    if "rows" in report:
        for row in report["rows"]:
            assert f"{row['op']} {row['case']} {row['direction']}" in text and f"{row['ms']:.4g}" in text
    elif "runs" in report:
        assert all(run["summary"] in text for run in report["runs"])
    else:
        assert all(one["op"] in text and one["candidate"] in text for one in report["candidates"])


def test_a_page_shows_failures_first_with_the_command_that_repeats_them() -> None:
    broken = report_of_a_check(status="FAIL", reason="3 of 4 beyond the bound")
    text = page([broken])
    assert "1 cell FAILS" in text and "3 of 4 beyond the bound" in text
    assert "isobit check --op logp &lt;&amp;&gt;" in text  # escaped
    assert text.index("3 of 4 beyond") < text.index("Which laws hold")
    assert "Failures" not in page([report_of_a_check()])


def test_errors_stand_beside_their_bounds_the_worst_first() -> None:
    cases = report_of_a_check()["candidates"][0]["cases"]
    first, second = worst_first(cases)
    assert first.output == "0:logp" and first.bound == pytest.approx(1.25e-6)
    assert (first.used, second.used) == (0.25, 0)
    failed = copy.deepcopy(cases)
    failed[0]["outputs"][1] |= {"passed": False, "worst_abs": "nan"}
    assert worst_first(failed)[0].output == "1:entropy" and worst_first(failed)[0].used == float("inf")
    overflown = copy.deepcopy(cases)
    overflown[0]["outputs"][0]["torch_abs"] = "inf"  # it excuses nothing
    assert worst_first(overflown)[0].bound == 1e-6


def test_an_error_is_set_against_torchs_and_equal_ones_are_no_near_failure() -> None:
    where = ("logp", "triton", "N=4 V=7 fp32", "0:logp")
    for ours, torchs, slack, used, words in (
        (4.62e-46, 4.62e-46, 1e-50, 0.0, "no farther than torch"),
        (3e-7, 4e-7, 1e-7, 0.0, "no farther than torch"),
        (5e-7, 4e-7, 2e-7, 0.5, "50% of the slack"),
        (9e-7, 4e-7, 1e-7, 5.0, "500% of the slack"),
        (9e-7, math.inf, 1e-6, 0.9, "90% of the slack"),
        (math.nan, 4e-7, 1e-7, math.inf, "inf times the slack"),
    ):
        error = Error(*where, ours, torchs, slack, used <= 1)
        assert error.used == pytest.approx(used) and error.in_words == words


def test_the_worst_element_uses_most_slack_or_has_the_largest_error() -> None:
    truth, scale = torch.zeros(3, dtype=torch.float64), torch.tensor([1.0, 1e-30, 1.0], dtype=torch.float64)

    def worst(ours: list[float], plain: list[float]) -> tuple[list[int], float]:
        tensors = (torch.tensor(x) for x in (ours, plain))
        found = against_truth("0:x", *tensors, truth, scale, 1.0, 1e-7)
        return found.worst_index, found.slack_used

    assert worst([1e-3, 4e-40, 0.0], [1e-3, 4e-40, 0.0]) == ([0], 0.0)
    assert worst([1e-3, 4e-40, 5e-8], [1e-3, 4e-40, 0.0]) == ([2], pytest.approx(0.5))
    assert worst([1e-3, math.nan, 5e-8], [1e-3, 4e-40, 0.0]) == ([1], math.inf)


def test_an_empty_tensor_is_not_the_worst_error() -> None:
    """A case without rows has no error; it was the worst where all others are 0."""
    report = report_of_a_check()
    case = report["candidates"][0]["cases"][0]
    none = case["outputs"][0] | {"shape": [0, 7], "worst_abs": 0.0}
    exact = case["outputs"][0] | {"worst_abs": 0.0}
    empty, full = (case | {"case": f"N={n} V=7 fp32", "outputs": [o]} for n, o in ((0, none), (4, exact)))
    assert [error.case for error in worst_first([empty, full])] == ["N=4 V=7 fp32"]


def test_bits_are_counted_by_what_changed_and_not_by_its_sizes() -> None:
    text = re.sub(r"\s+", " ", page([report_of_a_check()]))
    counted = '<td class="what">some rows alone<td class="number" data-name="compared">{}'
    differ = '<td class="number" data-name="other bits"><span class="{}">{}</span>'
    assert counted.format(3) + differ.format("ok", 0) in text
    other = report_of_a_check()
    other["candidates"][0]["cases"][1]["outputs"][0] = other["candidates"][0]["cases"][1]["outputs"][0] | {
        "passed": False
    }
    assert differ.format("fail", 1) in page([other])


def test_bits_are_counted_in_elements_too() -> None:
    """A tensor with one other bit and one with nothing but other bits are not the same."""
    report = report_of_a_check()
    case = report["candidates"][0]["cases"][1]
    like = case["outputs"][0] | {"shape": [300, 4], "passed": True, "message": "rows permuted"}
    few = {"passed": False, "message": "rows permuted: 7 of 1200 differ, first at [0, 1]: 1 against 2"}
    case["outputs"] = [
        like,
        like | few,
        like | {"passed": False, "message": "rows permuted: [3] against [4]"},
    ]
    case["law"] = "invariant"
    (line,) = check_section(report)["bits"]
    assert (line["compared"], line["differ"], line["other"], line["elements"]) == (3, 2, 1207, 3600)
    assert 'data-name="of their elements">1,207 of 3,600' in page([report])


def test_controls_stand_apart_from_comparisons() -> None:
    """A control that alters bits is as it should be; among comparisons it would read as a fault."""
    report = report_of_a_check()
    outputs = report["candidates"][0]["cases"][1]["outputs"]
    said = ("the vocabulary rolled by one column changes bits, as it must: 12 elements",
            "the vocabulary rolled by one column changes no bit of this function")  # fmt: skip
    report["candidates"][0]["cases"][1]["outputs"] = [
        *outputs, *(outputs[0] | {"output": "control", "message": text} for text in said)
    ]  # fmt: skip
    text = re.sub(r"\s+", " ", page([report]))
    line = '<td class="what">the vocabulary rolled by one column<td class="number" data-name="tried">2'
    assert line in text and text.index("Controls") < text.index(line)
    assert 'data-name="altered bits"><span class="">1</span>' in text


def test_one_list_of_colours_shows_on_white_and_on_black() -> None:
    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for colour in COLOURS:
        for paper in ("#ffffff", "#15191f"):
            low, high = sorted((light(colour), light(paper)))
            assert (high + 0.05) / (low + 0.05) > 3, (colour, paper)
    source = Path(isobit.__file__).parent
    held = [path.name for path in source.rglob("*.py") if re.search(r"^COLOURS = ", path.read_text(), re.M)]
    assert held == ["share_chart.py"]


def test_times_stand_worst_first_beside_the_fastest_rival() -> None:
    report = read_report(next(path for path in RESULTS if path.name == "logp.json"))
    (forward, *_) = section(report)["groups"]
    times = [case["times"] for case in forward["cases"]]
    assert times == sorted(times) and [case["open"] for case in forward["cases"]][:2] == [True, False]
    worst = forward["cases"][0]
    mine = [row for row in report["rows"] if f"{row['op']} {row['case']} {row['direction']}" == worst["name"]]
    ours = next(row["ms"] for row in mine if row["impl"] == "isobit")
    rivals = [row["ms"] for row in mine if not row["impl"].startswith(("isobit", "copy"))]
    assert worst["times"] == min(rivals) / ours and worst["bar"].startswith("left:50%")


def test_a_page_of_a_cpu_says_so_and_has_no_empty_columns() -> None:
    report = read_report(RESULTS[0].with_name("logp.json"))
    shown = page([report])
    assert CPU_WARNING not in shown and all(name in shown for name in ("host us", "extra MB", "the host's"))
    nothing = {"method": "wall", "host_us": None, "peak_mb": None, "extra_mb": None}
    on_a_cpu = page([report | {"rows": [row | nothing for row in report["rows"]]}])
    assert on_a_cpu.index(CPU_WARNING) < on_a_cpu.index("<h3>Times</h3>")
    assert not any(name in on_a_cpu for name in ("host us", "extra MB", "the host's", ">memory"))


def test_a_roofline_is_of_operations_or_of_bytes() -> None:
    """An op that is bound by memory has no operations to count; a copy next to a product is no such op."""
    folders = {op.folder for op in public_ops().values()}
    reports = {path.stem: read_report(path) for path in RESULTS if path.stem in folders}
    sections = {name: section(report) for name, report in reports.items()}
    for name, report in reports.items():
        counted = any(row.get("tflops") for row in report["rows"] if row["impl"].startswith("isobit"))
        drawn = bool(sections[name]["roofline"]), bool(sections[name]["bandwidth"])
        assert drawn == (counted, not counted), name
    assert sections["attention"]["roofline"] and sections["logp"]["bandwidth"]
    report, drawn = reports["logp"], sections["logp"]["bandwidth"]
    places = [float(cy) for cy in re.findall(r'<circle cx="[0-9.]+" cy="([0-9.]+)" r="3.5"', drawn)]
    assert len(places) == len(report["rows"]) and f"{report['stamp']['copy_tbps']:.3g} TB/s" in drawn
    fastest = max(report["rows"], key=lambda row: row["tbps"])
    label = f"{fastest['impl']} {fastest['case']} {fastest['direction']}: {fastest['tbps']:.4g} TB/s"
    (height,) = re.findall(r'cy="([0-9.]+)" r="3.5"[^>]*><title>' + re.escape(label), drawn)
    assert float(height) == min(places)
    (roof,) = re.findall(r'class="roof" d="M[0-9.]+ ([0-9.]+)H', drawn)
    above = sum(row["tbps"] > report["stamp"]["copy_tbps"] for row in report["rows"])
    assert sum(place < float(roof) for place in places) <= above  # equal where they are nearer than a pixel


def test_other_reports_are_refused() -> None:
    with pytest.raises(ContractError, match="check and bench"):
        page([{"suite": "isobit memcheck", "stamp": report_of_a_check()["stamp"]}])


# Saved reports


def test_a_check_is_worse_if_a_law_fails_or_no_longer_runs() -> None:
    old = report_of_a_check()
    fell = compare(old, report_of_a_check(status="FAIL"), 1.05)
    assert [(c.worse, c.before, c.now) for c in fell] == [(True, "ok", "FAIL")]
    assert [c.worse for c in compare(report_of_a_check(status="FAIL"), old, 1.05)] == [False]
    gone = copy.deepcopy(old)
    del gone["candidates"][0]["cases"][0]
    assert [(c.worse, c.now) for c in compare(old, gone, 1.05)] == [(True, "not there")]
    assert compare(old, old, 1.05) == []


def test_a_benchmark_is_worse_where_it_is_slower_or_takes_more_memory() -> None:
    old = read_report(next(path for path in RESULTS if path.name == "logp.json"))
    new = copy.deepcopy(old)
    ours = [row for row in new["rows"] if row["impl"].startswith("isobit")]
    rival = next(row for row in new["rows"] if not row["impl"].startswith("isobit"))
    ours[0]["ms"] *= 1.2
    ours[1]["ms"] *= 0.5
    ours[2]["extra_mb"] = (ours[2]["extra_mb"] or 0) + 100
    rival["ms"] *= 3
    found = compare(old, new, 1.05)
    assert [c.worse for c in found] == [True, True, False]
    assert "1.20x" in str(found[0]) and str(found[0]).startswith("WORSE")
    assert len(compare(old, new, 1.5)) == 2  # memory, and the one that is twice as fast
    with pytest.raises(ContractError, match="cannot be compared"):
        compare(old, report_of_a_check(), 1.05)


def test_a_candidate_is_compared_like_isobit() -> None:
    old = read_report(next(path for path in RESULTS if path.name == "logp.json"))
    next(row for row in old["rows"] if row["impl"] == "native")["impl"] = "candidate"
    new = copy.deepcopy(old)
    next(row for row in new["rows"] if row["impl"] == "candidate")["ms"] *= 1.2
    assert [(c.worse, c.what.endswith(" candidate")) for c in compare(old, new, 1.05)] == [(True, True)]


def report_of_a_memcheck(**changes: Any) -> dict[str, Any]:
    run = {"errors": 0, "calls": 7, "unsupported": 1, "seconds": 3.2, "passed": True, "summary": "0 errors"}
    control = run | {
        "op": "--control",
        "backend": "",
        "calls": 0,
        "summary": "3 errors: its wrong write is seen",
    }
    head = {"suite": "isobit memcheck", "stamp": report_of_a_check()["stamp"], "tool": "compute-sanitizer 1"}
    mine = run | {"op": "logp", "backend": "triton"} | changes
    return head | {"passed": mine["passed"], "runs": [control, mine]}


def test_a_memcheck_is_shown_and_compared() -> None:
    good = report_of_a_memcheck()
    bad = report_of_a_memcheck(passed=False, summary="2 errors, exit code 99: Invalid write of size 4")
    assert summary_line(good) == "memcheck of logp: 7 calls, 0 of 2 runs failed"
    text = page([good, bad])
    assert "no wrong access" in text and "1 of 2 runs FAIL" in text and "Invalid write of size 4" in text
    assert "Control: 3 errors: its wrong write is seen." in text and "isobit memcheck --op logp" in text
    assert [str(c) for c in compare(good, bad, 1.05)] == ["WORSE logp triton: ok -> FAIL"]
    with pytest.raises(ContractError, match="a memcheck and a check cannot be compared"):
        compare(report_of_a_check(), good, 1.05)


# The command


def test_the_command_shows_compares_and_writes(tmp_path: Path) -> None:
    old, new, html = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "page.html"
    old.write_text(json.dumps(report_of_a_check()))
    new.write_text(json.dumps(report_of_a_check(status="FAIL", reason="wrong")))
    run = CliRunner().invoke
    both = run(app, ["report", str(old), str(new), "--html", str(html)])
    assert both.exit_code == 0 and "check of logp: 2 ok, 0 failed" in both.output
    assert html.read_text().count("<section") == 2
    worse = run(app, ["report", str(new), "--against", str(old)])
    assert worse.exit_code == 1 and "WORSE logp mine accuracy" in worse.output
    assert run(app, ["report", str(old), "--against", str(old)]).exit_code == 0
    wrong = run(app, ["report", str(old), str(new), "--against", str(old)])
    assert isinstance(wrong.exception, ContractError)
    none = run(app, ["report", "--html", str(html)])
    assert none.exit_code == 2 and "isobit check --json FILE" in none.output  # it says where files come from
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ContractError, match="not a report"):
        read_report(tmp_path / "other.json")


def test_check_writes_a_page_and_prints_the_worst_error(tmp_path: Path) -> None:
    html = tmp_path / "check.html"
    done = CliRunner().invoke(
        app,
        ["check", "--op", "logp", "--backend", "reference", "--law", "accuracy", "--html", str(html)],
    )
    assert done.exit_code == 0, done.output
    said = r"logp reference: error \S+, torch \S+, slack \S+: (\d+% of the slack|no farther than torch)\n"
    assert re.search(said, done.output)
    assert "all laws hold" in html.read_text()


def cell(law: str, status: str = "ok", backend: str = "triton", reason: str = "", op: str = "logp") -> Cell:
    return Cell(op, backend, law, "N=4 V=33 fp32", status, reason, command="isobit check", seconds=0.1)


def test_the_console_fits_into_eighty_columns() -> None:
    pairs = [(op, backend) for op in ("logp", "linear_policy_loss") for backend in ("triton", "reference")]
    cells = [cell(law, op=op, backend=b) for op, b in pairs for law in LAWS for _ in range(12)]
    cells.append(cell("memory", "FAIL", "reference"))
    lines = table(cells).splitlines()
    assert max(map(len, lines)) <= 80 and lines[1] == "logp" and lines[4] == "linear_policy_loss"
    assert lines[0].split() == [law[:4] for law in LAWS] and lines[3].split()[-2] == "1F"
    assert table(cells[:24]).splitlines()[1].split() == ["logp", "triton", "12", "ok", "12", "ok"]


def test_what_did_not_run_is_said_once_a_reason_and_last() -> None:
    hopper = "{op}(backend='hopper'): its kernels need an NVIDIA Hopper GPU (sm_90); the tensors are on cpu"
    cells = [cell(law, "UNSUPPORTED", "hopper", hopper.format(op=op), op)
             for op in ("logp", "ratio_kl") for law in ("accuracy", "gradient")]  # fmt: skip
    cells += [cell("accuracy", "UNSUPPORTED", "mine", f"it does not take {names}")
              for names in ("mask", "mask, temperature")]  # fmt: skip
    cells.append(cell("memory", "FAIL", "mine", "too much"))
    assert notes(cells) == [
        "FAIL logp mine memory [N=4 V=33 fp32]", "     too much", "     isobit check", "",
        "UNSUPPORTED: its kernels need an NVIDIA Hopper GPU (sm_90); the tensors are on", "    cpu",
        "    logp hopper, ratio_kl hopper: accuracy, gradient",
        "UNSUPPORTED: it does not take mask, temperature", "    logp mine: accuracy",
    ]  # fmt: skip


def test_failures_fit_into_eighty_columns_and_equal_ones_are_one() -> None:
    long = "0:logp: 15 of 20 beyond the bound; worst at [0, 1]: ours 12.5268669, torch -3.69e-06, truth 0"
    cells = [cell("accuracy", "FAIL", reason=long), cell("memory", "FAIL", reason="too much")]
    cells.append(cell("gradient", "FAIL", reason=long))
    assert notes(cells) == [
        "FAIL logp triton accuracy [N=4 V=33 fp32]", "FAIL logp triton gradient [N=4 V=33 fp32]",
        "     0:logp: 15 of 20 beyond the bound; worst at [0, 1]: ours 12.5268669, torch",
        "     -3.69e-06, truth 0", "     isobit check", "     isobit check",
        "FAIL logp triton memory [N=4 V=33 fp32]", "     too much", "     isobit check",
    ]  # fmt: skip


def test_progress_counts_and_leaves_out_what_did_not_run() -> None:
    said: list[str] = []
    tell = progress(3, said.append)
    for one in (cell("accuracy"), cell("memory", "UNSUPPORTED"), cell("written", "FAIL")):
        tell(one)
    assert said == [
        "    1/3 ok   logp triton accuracy [N=4 V=33 fp32] 0.1s",
        "    3/3 FAIL logp triton written [N=4 V=33 fp32] 0.1s",
    ]


def test_version() -> None:
    import isobit

    assert CliRunner().invoke(app, ["--version"]).output.strip() == isobit.__version__
