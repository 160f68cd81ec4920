"""The report of `make check` is taken in the place of another check, if it is of the same sources."""

import json
from pathlib import Path

import pytest

import whole_check
from commands import Isobit
from isobit.check import report
from isobit.check.request import Request
from isobit.check.runner import OK, Cell
from isobit.cli import main as cli
from isobit.frame.device import default_device

INPUTS = {"op_class": "logprob"}
CELLS = [
    Cell("logp", "reference", law, "N=4 V=5 fp32", OK, outputs=[{"passed": True}], inputs=INPUTS)
    for law in ("accuracy", "compile")
]


def test_a_report_of_these_sources_is_taken_and_no_other(tmp_path: Path) -> None:
    device, path = default_device(), tmp_path / "check.json"
    assert whole_check.cells_of(path) is None  # there is none
    whole = report.to_json(CELLS, device, command=Request(device=device).command())
    path.write_text(json.dumps(whole))
    assert whole_check.cells_of(path) == CELLS[:1]  # the compile law is left to others
    others = [{"passed": False}, {"command": f"{whole['command']} --op logp"}]
    others += [{"stamp": whole["stamp"] | {name: "other"}} for name in ("source_sha", "torch", "triton")]
    for other in others:
        path.write_text(json.dumps(whole | other))
        assert whole_check.cells_of(path) is None, other
    path.write_text(json.dumps(whole)[:100])
    assert whole_check.cells_of(path) is None  # written halfway


def test_make_check_writes_such_a_report(
    isobit: Isobit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    makefile = (whole_check.REPORT.parent / "Makefile").read_text()
    assert f"isobit check --json {whole_check.REPORT.name}\n" in makefile
    asked: list[Request] = []
    monkeypatch.setattr(cli, "check_and_report", lambda request, files: asked.append(request) or 0)
    assert isobit("check", "--json", str(tmp_path / "check.json")).code == 0
    assert [each.command() for each in asked] == [Request(device=default_device()).command()]
