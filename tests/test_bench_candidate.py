"""Guards someone else's function in a benchmark: timed beside the rivals, checked first, and named in what
repeats it."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from isobit.bench.candidate import check_candidate, with_candidate
from isobit.bench.cases import subject_of
from isobit.bench.vouch import CheckFailed
from isobit.check.named import load_candidate
from isobit.cli import app
from isobit.contract import ContractError
from isobit.op import known_op

CPU = torch.device("cpu")
BENCH = ["bench", "--op", "logp", "--case", "N=4,V=33,dtype=fp32", "--impl", "isobit", "--impl", "candidate"]


def test_a_candidate_is_timed_beside_ours(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, [*BENCH, "--skip-check", "--candidate", "third_party:right", "--results", str(tmp_path)]
    )
    assert done.exit_code == 0, (done.output, done.exception)
    report = json.loads((tmp_path / "cpu" / "logp.json").read_text())
    rows = {(row["impl"], row["direction"]): row for row in report["rows"]}
    assert {impl for impl, _ in rows} == {"isobit", "candidate"}
    assert all(rows["candidate", way]["max_abs"] < 1e-5 for way in ("fwd", "bwd", "fwd_bwd"))
    assert "--candidate third_party:right" in report["command"]


def test_the_command_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one small case, and beside isobit alone: the rivals and the sizes of the page take minutes here."""
    text = (Path(__file__).parent.parent / "docs" / "check_my_kernel.md").read_text()
    (tmp_path / "my_kernels.py").write_text(
        re.findall(r"```python\n# my_kernels.py\n(.*?)```", text, re.S)[0]
    )
    (line,) = re.findall(r"^isobit (bench .*)$", text, re.M)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = CliRunner().invoke(app, [*shlex.split(line), *BENCH[3:], "--device", "cpu"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "checking my_kernels:logp, cpu, first" in done.output
    page = (tmp_path / "mine.html").read_text()
    assert "candidate" in page and "--candidate my_kernels:logp" in page


def test_a_candidate_without_a_backward_is_timed_forward_only() -> None:
    candidate = load_candidate("logp", "third_party:forward_only", CPU, None, None)
    (series, *_) = with_candidate(subject_of(known_op("logp")), candidate).series
    assert series.rivals["candidate"].directions == ("fwd",)


def test_a_wrong_candidate_is_not_timed() -> None:
    wrong = load_candidate("logp", "third_party:drops_a_tail", CPU, None, None)
    with pytest.raises(CheckFailed, match=r"drops_a_tail fails its check.*\n.*accuracy"):
        check_candidate(wrong, CPU, lambda text: None)
    check_candidate(load_candidate("logp", "third_party:right", CPU, None, None), CPU, lambda text: None)


def test_a_call_that_it_does_not_take_is_left_out_with_the_reason(tmp_path: Path) -> None:
    options = ["--option", "temperature=0.7", "--skip-check", "--candidate", "third_party:right"]
    done = CliRunner().invoke(app, [*BENCH, *options])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "candidate: failed on" in done.output and "it does not take temperature" in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "--candidate", "third_party:right"],
        ["bench", "--op", "logp", "--op", "det_gemm", "--candidate", "third_party:right"],
        ["bench", "--op", "logp", "--adapter", "third_party:adapt"],
    ],
    ids=["no op", "two ops", "an adapter alone"],
)
def test_a_candidate_is_for_one_op(arguments: list[str]) -> None:
    assert isinstance(CliRunner().invoke(app, arguments).exception, ContractError)
