"""`make stale` lists the cases that a declared series has and a result file lacks, and what users compare is
declared."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.bench.cases import case_name, subject_of
from isobit.check.stamp import stamp
from isobit.frame.op import known_op
from publish import stale
from publish.lacking import lacking, subject_named


def whole(op: str) -> dict[str, Any]:
    """A report that has a row of every declared case."""
    subject = subject_of(known_op(op))
    rows = [
        {"op": series.name, "case": case_name(case), "direction": way, "impl": "isobit", "backend": "triton"}
        for series in subject.series for case in series.cases for way in series.directions
    ]  # fmt: skip
    source = stamp(torch.device("cpu"), ops=subject.folders)
    command = f"isobit bench --op {op} --device cuda:0 --core"
    return {"suite": "isobit bench", "command": command, "stamp": source, "notes": [], "rows": rows}


def listed(folder: Path, *flags: str) -> list[str]:
    return stale.lines(stale.results_in(folder), only_stale=True, every="--every" in flags)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "h200" / "rms_norm.json"
    path.parent.mkdir()
    return path


def about(path: Path) -> list[str]:
    """The lines on this file, without those on files that are missing."""
    lines = listed(path.parent.parent)
    start = next((i for i, line in enumerate(lines) if f"  {path}" in line and "missing" not in line), None)
    return [] if start is None else [lines[start], *(x for x in lines[start + 1 : start + 4] if x[0] == " ")]


def test_a_file_with_every_case_is_complete(path: Path) -> None:
    path.write_text(json.dumps(whole("rms_norm")))
    assert about(path) == []


def test_a_case_that_a_file_lacks_is_listed_with_the_command_that_adds_it(path: Path) -> None:
    report = whole("rms_norm")
    lost = report["rows"].pop()
    path.write_text(json.dumps(report))
    folder = path.parent.parent
    said, command, which = about(path)
    assert said == f"incomplete  {path}: 1 declared cases are not timed"
    # Not --core, by which it was made: that would not add anything.
    assert command.strip() == f"isobit bench --op rms_norm --results {folder} --resume"
    assert which.strip() == f"lacks {lost['op']}: {lost['case']} {lost['direction']}"
    assert "1 incomplete" in listed(folder)[-1] and not stale.main(["--results", str(folder), "--strict"])


def test_a_stale_file_is_renewed_as_a_whole(path: Path) -> None:
    """--resume does not mix rows of two kernels."""
    report = whole("rms_norm")
    report["stamp"]["kernels"]["rms_norm"] = "another"
    report["stamp"]["backends"] = {}
    del report["rows"][-2:]
    path.write_text(json.dumps(report))
    said, command, _ = about(path)
    assert said.startswith(f"stale  {path}: the kernels of rms_norm have changed")
    assert command.strip() == f"isobit bench --op rms_norm --results {path.parent.parent}"


def test_the_first_cases_are_named_or_every_one(path: Path) -> None:
    report = whole("rms_norm")
    series = report["rows"][0]["op"]
    cases = dict.fromkeys(row["case"] for row in report["rows"] if row["op"] == series)
    report["rows"] = [row for row in report["rows"] if row["op"] != series]
    path.write_text(json.dumps(report))
    (short,) = (line for line in listed(path.parent.parent) if f"lacks {series}: " in line)
    (long,) = (line for line in listed(path.parent.parent, "--every") if f"lacks {series}: " in line)
    assert len(cases) > stale.NAMED and short.endswith(f"; {len(cases) - stale.NAMED} more")
    assert all(case in long for case in cases) and not all(case in short for case in cases)


def test_what_cannot_be_timed_on_a_machine_is_not_lacking() -> None:
    subject, report = subject_of(known_op("rms_norm")), whole("rms_norm")
    lost = report["rows"].pop()
    assert lacking(subject, report) == {lost["op"]: [f"{lost['case']} {lost['direction']}"]}
    reason = f"{lost['op']}: {lost['case']} does not fit into memory"
    assert lacking(subject, report | {"notes": [reason]}) == {}
    # A note about another case explains nothing; one about a series without any row explains it.
    other = {"notes": [f"{lost['op']}: another case does not fit into memory"]}
    assert lacking(subject, report | other) == lacking(subject, report) != {}
    none = [row for row in report["rows"] if row["op"] != lost["op"]]
    assert lacking(subject, report | other | {"rows": none}) == {}


def test_the_shapes_that_users_compare_are_declared() -> None:
    def declared(op: str, *words: str) -> set[tuple[str, str]]:
        """(series, direction) of the cases with these words."""
        cases = ((one, case_name(case)) for one in subject_of(known_op(op)).series for case in one.cases)
        named = [one for one, case in cases if set(words) <= set(case.split())]
        return {(one.name, way) for one in named for way in one.directions}

    for V in (32768, 50257, 131072):
        found = declared("linear_logp", "N=4096", "D=2048", f"V={V}")
        assert {("linear_logp", "fwd"), ("linear_logp_train", "fwd_bwd")} <= found
    for K, N in ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 12288), (4096, 32000)):
        found = declared("det_gemm", "M=4096", f"K={K}", f"N={N}")
        assert {("det_gemm", "fwd"), ("det_gemm_dx", "dx"), ("det_gemm_dw", "dw")} <= found
    for mode in ("kt", "gt"):
        sizes = ("B=1", "T=512", "H=4", "HV=4", f"mode={mode}")
        assert declared("chunk_gated_delta_rule_bwd_dhu", *sizes) == {("dhu_other", "bwd")}


def test_files_of_something_else_are_not_compared() -> None:
    assert subject_named("check_logp") is None and subject_named("no_such_suite") is None
