"""Guards someone else's function in a benchmark: timed beside the rivals, checked first, and named in what
repeats it."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from isobit.bench.candidate import check_candidate, with_candidate
from isobit.bench.cases import subject_of
from isobit.bench.check_gate import CheckFailed, CheckGate
from isobit.bench.implementations import Implementations
from isobit.check.candidate_by_name import load_candidate
from isobit.cli.main import app
from isobit.frame.contract import ContractError
from isobit.frame.op import known_op
from isobit.spec.proof import Case
from isobit.spec.series import Pool

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
    assert "--candidate third_party:right --device cpu" in report["command"]


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


def test_a_page_of_a_wrong_candidate_names_it_and_a_few_of_its_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobit.bench.runner.triton_is_interpreted", lambda: True)
    page = tmp_path / "page.html"
    done = CliRunner().invoke(
        app, [*BENCH, "--candidate", "third_party:drops_a_tail", "--device", "cpu", "--html", str(page)]
    )
    assert done.exit_code == 1
    assert (
        "TRITON_INTERPRET=1 isobit bench --op logp --candidate third_party:drops_a_tail" in page.read_text()
    )
    wrong = load_candidate("logp", "third_party:drops_a_tail", CPU, None, None)
    with pytest.raises(CheckFailed) as failed:
        check_candidate(wrong, CPU, lambda text: None)
    *_, last = lines = str(failed.value).splitlines()
    assert len(lines) == 6 and re.fullmatch(
        r"  and \d+ more: isobit check --op logp --candidate third_party:drops_a_tail "
        r"--law accuracy --law gradient --device cpu", last)  # fmt: skip


def test_what_a_timed_candidate_changes_of_pytorchs_state_is_noted_and_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sets_the_dtype.py").write_text(
        "import torch\nfrom third_party import right\n"
        "torch.set_grad_enabled(False)\n"
        "def logp(logits, token_ids):\n"
        "    torch.set_default_dtype(torch.float64)\n"
        "    return right(logits, token_ids)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    command = [*BENCH, "--candidate", "sets_the_dtype:logp", "--skip-check", "--direction", "fwd"]
    done = CliRunner().invoke(app, [*command, "--device", "cpu"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "importing sets_the_dtype:logp changed PyTorch's grad mode from True to False" in done.output
    assert "a timed function changed PyTorch's default dtype from fp32 to fp64" in done.output
    assert "generator" not in done.output and torch.get_default_dtype() == torch.float32


def test_what_its_author_compiled_is_compiled_for_every_timed_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """After eight sizes PyTorch would call the function as it was written, and that would be timed."""
    candidate = load_candidate("logp", "third_party:right", CPU, None, None)
    (series, *_) = with_candidate(subject_of(known_op("logp")), candidate).series
    series = replace(series, rivals={"candidate": series.rivals["candidate"]})
    resets: list[int] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))

    def quiet(text: str) -> None:
        pass

    implementations = Implementations(
        series, Pool(CPU), None, None, None, 1.0, 1.0, CheckGate(CPU, None, True, quiet), quiet, quiet
    )
    for count in (1, 2):
        implementations.contenders(Case({"N": 4, "V": 33}, torch.float32), [], "fwd", None, [])
        assert len(resets) == count
