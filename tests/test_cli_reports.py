"""Guards the reports of the `isobit` command: where they are written, what they hold, and what is left of a
run that could not be finished."""

import json
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from commands import Isobit, report
from isobit.bench.check_gate import proven
from isobit.check.files import WIDTH, check_writable, in_lines
from isobit.check.runner import LAWS, OK, UNSUPPORTED
from isobit.cli import check as checking
from isobit.frame.contract import ContractError
from isobit.frame.op import OPS, public_ops
from isobit.spec.compare import OutputCheck
from isobit.spec.trial import Trial
from publish import stale

ROOT = Path(__file__).parent.parent
LOGP = ("--op", "logp", "--device", "cpu", "--backend", "reference")
SMALL = (*LOGP, "--dim", "B=2", "--dim", "T=3", "--dim", "V=17")
PUBLIC = ", ".join(sorted(public_ops()))
BACKENDS = ", ".join(backend.name for backend in OPS["logp"].backends)


# Files that cannot be written


def unwritable(tmp_path: Path, option: str) -> tuple[str, ...]:
    """A folder in place of a file, or a file in place of a folder."""
    if option == "--json":
        return option, str(tmp_path)
    (tmp_path / "results").write_text("")
    return option, str(tmp_path / "results")


@pytest.mark.parametrize("option", ["--json", "--results"])
def test_a_check_that_could_not_be_written_is_not_run(
    isobit: Isobit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(checking, "run", lambda *args: pytest.fail("it ran"))
    done = isobit("check", *SMALL, "--law", "accuracy", *unwritable(tmp_path, option))
    assert done.code == 1 and done.err.startswith(f"isobit: {option}: ") and len(done.err.splitlines()) == 1
    assert "cannot be written" in done.err and "nothing has run yet" in done.err


def test_a_bench_that_could_not_be_written_is_not_run(
    isobit: Isobit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobit.bench.runner.machine_rates", lambda *args: pytest.fail("it ran"))
    done = isobit("bench", "--op", "logp", "--device", "cpu", *unwritable(tmp_path, "--results"))
    assert done.code == 1 and "--results: " in done.err and "nothing has run yet" in done.err


@pytest.mark.parametrize("option", ["--json", "--results"])
def test_a_finished_check_is_printed_even_if_its_file_cannot_be_written(
    isobit: Isobit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    def full(path: Path, text: str) -> None:
        raise ContractError(f"{path} could not be written (No space left on device)")

    monkeypatch.setattr(checking, "write", full)
    done = isobit("check", *SMALL, "--law", "accuracy", option, str(tmp_path / "x"))
    assert done.code == 1 and "No space left on device" in done.err
    assert "logp  reference  1 ok" in done.out and "1 ok, 0 failed, 0 unsupported" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--html", "no_such_folder/page.html"), "--html no_such_folder/page.html: no folder no_such_folder"),
        (("--html", "-"), "--html -: name a file"),
        (("--json", "x", "--html", "./x"), "--json and --html are both x"),
    ],
)
def test_a_place_that_is_none_or_taken_is_an_error_before_anything_runs(
    isobit: Isobit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checking, "run", lambda *args: pytest.fail("it ran"))
    done = isobit("check", *SMALL, "--law", "accuracy", *arguments)
    assert done.code == 1 and message in done.err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("op", "option", "rule"),
    [
        ("logp", "temperature=-1", "logp(temperature: -1.0): must be a positive number"),
        ("logp", "ids=int16", "logp(token_ids: "),
        ("attention", "window=0", "attention(window: 0): must be from 1"),
    ],
)
def test_a_value_that_the_contract_refuses_is_an_error_of_the_command(
    isobit: Isobit, op: str, option: str, rule: str
) -> None:
    done = isobit("check", "--op", op, "--law", "accuracy", "--device", "cpu", "--option", option)
    assert done.code == 1 and f"--option {option}: {rule}" in done.err and "FAIL" not in done.out
    assert len(done.err.splitlines()) == 1


def test_after_control_c_there_is_a_report_of_what_was_done(
    isobit: Isobit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    law, seen = LAWS["accuracy"], []

    def interrupted_at_the_third(trial: Trial) -> list[OutputCheck]:
        seen.append(trial)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return law.run(trial)

    monkeypatch.setitem(LAWS, "accuracy", replace(law, run=interrupted_at_the_third))
    path, page, results = tmp_path / "x.json", tmp_path / "x.html", tmp_path / "results"
    files = ("--json", str(path), "--html", str(page), "--results", str(results))
    done = isobit("check", *LOGP, "--law", "accuracy", *files)
    found = json.loads(path.read_text())
    assert done.code == 130 and (found["ok"], found["passed"]) == (2, False)
    assert found["interrupted"].startswith("interrupted after 2 of ") and found["interrupted"] in done.out
    assert "logp  reference  2 ok" in done.out and found["interrupted"] in page.read_text()
    assert not results.exists() and f"nothing of logp was written to {results}" in done.out
    assert found["interrupted"] in isobit("report", str(path)).out
    with pytest.raises(ContractError, match="interrupted"):
        proven("logp", "reference", torch.device("cpu"), path, set())


def test_a_check_that_is_stopped_keeps_the_files_of_what_was_done(
    isobit: Isobit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    law = LAWS["accuracy"]

    def interrupted_at_another(trial: Trial) -> list[OutputCheck]:
        if trial.op.name == "rms_norm":
            raise KeyboardInterrupt
        return law.run(trial)

    ops = ("--op", "logp", "--op", "rms_norm", "--backend", "reference", "--device", "cpu")
    asked = ("check", *ops, "--law", "accuracy", "--results")
    assert isobit(*asked, str(tmp_path / "whole")).code == 0
    monkeypatch.setitem(LAWS, "accuracy", replace(law, run=interrupted_at_another))
    done = isobit(*asked, str(tmp_path / "part"))
    assert done.code == 130 and "nothing of rms_norm was written" in done.out

    def cells(path: Path) -> list[str]:
        found = json.loads(path.read_text())
        assert found["passed"] and "interrupted" not in found
        return [case["case"] for one in found["candidates"] for case in one["cases"]]

    (kept,) = (tmp_path / "part" / "cpu").iterdir()
    assert kept.name == "check_logp.json" and cells(kept) == cells(tmp_path / "whole" / "cpu" / kept.name)


def test_checking_whether_a_file_can_be_written_leaves_no_file(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b" / "x.json", "--results")
    assert list(tmp_path.iterdir()) == []
    kept = tmp_path / "x.json"
    kept.write_text("kept")
    check_writable(kept, "--json")
    assert kept.read_text() == "kept"


# Reports


def test_a_report_has_a_record_in_a_line() -> None:
    """A line that is longer holds a text that is longer."""
    cells = [{"law": "accuracy", "at": [0, k], "worst": 1e-6 * k, "of": {}} for k in range(300)]
    value = {"schema": 2, "passed": True, "none": None, "nothing": [], "text": 'a"b' * WIDTH, "cells": cells}
    text = in_lines(value)
    assert json.loads(text) == value
    assert text.count("\n") == len(value) + len(cells) + 2
    assert [len(line) > WIDTH for line in text.splitlines()].count(True) == 1


def test_json_on_standard_output_is_the_only_output(isobit: Isobit) -> None:
    done = isobit("check", *SMALL, "--law", "accuracy", "--law", "gradient", "--json", "-")
    assert done.code == 0
    found = report(done)
    assert set(found) == {
        "schema", "suite", "stamp", "command", "total", "ok", "fail", "unsupported", "pass_rate", "passed",
        "candidates",
    }  # fmt: skip
    assert (found["schema"], found["suite"], found["passed"], found["pass_rate"]) == (
        2, "isobit check", True, 1.0,
    )  # fmt: skip
    assert (found["total"], found["ok"], found["fail"], found["unsupported"]) == (2, 2, 0, 0)
    assert {"gpu", "driver", "torch", "triton", "commit", "source_sha", "date"} <= set(found["stamp"])
    (candidate,) = found["candidates"]
    assert (candidate["op"], candidate["candidate"], candidate["numerics"]) == ("logp", "reference", "none")
    assert candidate["total_outputs"] == candidate["passed_outputs"] == 7
    accuracy, gradient = candidate["cases"]
    assert accuracy["case"] == gradient["case"] == "B=2 T=3 V=17 fp32"
    assert {"op", "backend", "law", "case", "status", "reason", "outputs", "seconds", "command"} <= set(
        accuracy
    )
    assert [o["output"] for o in accuracy["outputs"]] == ["0:logp", "1:entropy", "2:lse"]
    output, *others = gradient["outputs"]
    layouts = ("expanded", "transposed", "sliced")  # of the incoming gradient
    assert [o["output"] for o in others] == [f"{layout} gradient:logits" for layout in layouts]
    assert set(output) == {
        "output", "shape", "dtype", "truth_dtype", "atol", "rtol", "max_abs", "mean_abs", "max_rel",
        "worst_index", "passed", "message", "worst_abs", "torch_abs", "slack_used",
    }  # fmt: skip
    assert output["output"] == "gradient:logits" and output["shape"] == [2, 3, 17]
    assert len(output["worst_index"]) == 3 and all(n in output["message"] for n in ("ours", "torch", "truth"))


def test_files_do_not_disturb_json_on_standard_output(isobit: Isobit, tmp_path: Path) -> None:
    done = isobit("check", *SMALL, "--law", "accuracy", "--json", "-", "--results", str(tmp_path))
    written = json.loads((tmp_path / "cpu" / "check_logp.json").read_text())
    assert report(done)["candidates"][0]["total"] == written["candidates"][0]["total"] == 1


def test_json_in_a_file_and_a_table_for_people(
    isobit: Isobit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "check.json"
    monkeypatch.setenv("ISOBIT_COMMIT", "abc123")
    done = isobit("check", *SMALL, "--law", "accuracy", "--json", str(path))
    found = json.loads(path.read_text())
    assert done.code == 0 and found["ok"] == 1 and found["stamp"]["commit"] == "abc123"
    assert "logp  reference  1 ok" in done.out
    assert "1/1 ok   logp reference accuracy [B=2 T=3 V=17 fp32]" in done.out  # progress
    assert done.out.splitlines()[-1].startswith("1 ok, 0 failed, 0 unsupported in ")


def test_ops_of_one_folder_share_a_results_file(isobit: Isobit, tmp_path: Path) -> None:
    ops = ("--op", "det_gemm", "--op", "det_gemm_dw", "--op", "logp")
    only = ("--backend", "model", "--backend", "reference", "--law", "contract", "--device", "cpu")
    assert isobit("check", *ops, *only, "--results", str(tmp_path)).code == 0
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "cpu").iterdir()}
    told = {
        name: [(c["op"], c["candidate"], c["numerics"]) for c in r["candidates"]] for name, r in found.items()
    }
    assert told == {
        "check_det_gemm": [("det_gemm", "model", "chain16"), ("det_gemm_dw", "model", "seg16/512")],
        "check_logp": [("logp", "reference", "none")],
    }


def test_facts_are_written_beside_the_laws(
    isobit: Isobit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fact = {"op": "det_gemm", "what": "the moon is full"}
    monkeypatch.setattr(checking, "observations", lambda request: [fact])
    ops = ("--op", "det_gemm", "--op", "logp", "--device", "cpu", "--law", "contract")
    done = isobit(
        "check",
        *ops,
        "--backend",
        "model",
        "--backend",
        "reference",
        "--results",
        str(tmp_path),
        "--json",
        "-",
    )
    assert report(done)["observations"] == [fact] and done.code == 0
    assert json.loads((tmp_path / "cpu" / "check_det_gemm.json").read_text())["observations"] == [fact]
    assert "observations" not in json.loads((tmp_path / "cpu" / "check_logp.json").read_text())


def test_switched_off_gradients_are_unsupported_and_the_rest_passes(isobit: Isobit) -> None:
    done = isobit(
        "check", *SMALL, "--law", "accuracy", "--law", "gradient", "--data", "cotangents=none", "--json", "-"
    )
    cells = {c["law"]: c for c in report(done)["candidates"][0]["cases"]}
    assert done.code == 0
    assert (cells["accuracy"]["status"], cells["gradient"]["status"]) == (OK, UNSUPPORTED)
    assert cells["gradient"]["reason"] == "gradients are switched off on the command line"


def test_a_law_that_fails_fails_the_command(isobit: Isobit, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(trial: object) -> list:
        raise RuntimeError("the moon is in the wrong place")

    monkeypatch.setitem(LAWS, "accuracy", replace(LAWS["accuracy"], run=broken))
    done = isobit("check", *SMALL, "--law", "accuracy", "--law", "gradient")
    assert done.code == 1 and "FAIL logp reference accuracy [B=2 T=3 V=17 fp32]" in done.out
    assert f"RuntimeError: the moon is in the wrong place ({Path(__file__).name}:" in done.out
    assert done.out.splitlines()[-1].endswith(": 1 cell FAILS")
    assert "1 FAIL of 1  1 ok" in done.out


def listed(capfd: pytest.CaptureFixture[str], folder: Path, *flags: str) -> tuple[int, list[str]]:
    """The exit code and the lines of `python -m publish.stale`."""
    capfd.readouterr()
    code = stale.main(["--results", str(folder), *flags])
    return code, capfd.readouterr().out.splitlines()


def test_stale_results_are_listed_with_the_command_that_renews_them(
    isobit: Isobit, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    isobit("check", *SMALL, "--law", "accuracy", "--results", str(tmp_path))
    path = tmp_path / "cpu" / "check_logp.json"
    code, lines = listed(capfd, tmp_path)
    assert (code, lines) == (0, [f"fresh  {path}", "0 of 1 result files are stale"])
    found = json.loads(path.read_text())
    found["stamp"]["kernels"]["logp"] = "another"
    path.write_text(json.dumps(found))
    code, (said, again, total) = listed(capfd, tmp_path, "--only")
    assert code == 0 and said.startswith(f"stale  {path}: the kernels of logp have changed since ")
    assert total == "1 of 1 result files are stale"
    assert isobit(*shlex.split(again)[1:]).code == 0  # which makes it fresh
    assert listed(capfd, tmp_path, "--strict")[0] == 0
    path.write_text(json.dumps(found))
    assert listed(capfd, tmp_path, "--strict")[0] == 1


def test_declared_results_that_nobody_measured_are_missing(
    isobit: Isobit, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    isobit("check", *SMALL, "--law", "accuracy", "--results", str(tmp_path))
    gpu = tmp_path / "h200"
    (tmp_path / "cpu").rename(gpu)  # a CPU misses nothing
    _, lines = listed(capfd, tmp_path, "--only")
    after = dict(pairwise(lines))
    assert f"missing  {gpu / 'check_logp.json'}" not in lines
    for name, command in (
        ("check_grpo_loss", "check --op grpo_loss --op group_advantages"),
        ("memcheck_det_gemm", "memcheck --op det_gemm --op det_linear --op det_gemm_dw"),
        ("ratio_kl", "bench --op ratio_kl"),
        ("delta_rule", "bench --op chunk_gated_delta_rule_bwd_dhu"),
        ("zero_drift", "bench --suite zero_drift"),
    ):
        assert after[f"missing  {gpu / name}.json"] == f"       isobit {command} --results {tmp_path}"
    count = sum(line.startswith("missing  ") for line in lines)
    assert lines[-1] == f"0 of 1 result files are stale, {count} more are missing"
    assert listed(capfd, tmp_path, "--strict")[0] == 0
