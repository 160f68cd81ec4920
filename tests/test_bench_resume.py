"""Runs that are interrupted, limited in time, or short: --resume, --minutes, --core, --series."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isobit import ContractError
from isobit.bench import runner
from isobit.bench.cases import parse_case, series_of, suite_of
from isobit.bench.runner import run
from isobit.bench.suites import suite_names
from isobit.frame.op import OPS, known_op, public_ops

LOGP = known_op("logp")
TEXTS = ("N=7,V=33", "N=8,V=33", "N=9,V=33")
NAMES = ["N=7 V=33 bf16", "N=8 V=33 bf16", "N=9 V=33 bf16"]


def bench(folder: Path | None, *texts: str, **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"device": "cpu", "repetitions": 2, "skip_check": True, "say": lambda t: None}
    defaults |= {"impls": ["isobit"], "directions": ["fwd"], "out_dir": folder}
    return run("logp", [parse_case(text, LOGP) for text in texts or TEXTS], **(defaults | options))


def cases(report: dict[str, Any]) -> list[str]:
    return [row["case"] for row in report["rows"]]


def cut_off_after(folder: Path, count: int) -> Path:
    def say(text: str) -> None:
        if text.startswith(f"[{count + 1}/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(folder, say=say)
    return folder / "cpu" / "logp.json"


def test_a_run_that_was_cut_off_is_continued(tmp_path: Path) -> None:
    path = cut_off_after(tmp_path, 1)
    before = json.loads(path.read_text())
    assert cases(before) == NAMES[:1] and before["notes"] == ["unfinished: 2 of 3 cases are not timed"]
    said: list[str] = []
    report = bench(tmp_path, resume=True, say=said.append)
    assert cases(report) == NAMES and json.loads(path.read_text()) == report
    assert report["rows"][0] == before["rows"][0] and report["notes"] == []
    assert report["stamp"] == before["stamp"]  # one copy speed for all floors
    assert "1 of 3 cases are already in the file" in said and not [t for t in said if "N=7" in t]
    said.clear()
    assert bench(tmp_path, resume=True, say=said.append) == report
    assert "3 of 3 cases are already in the file" in said


def test_an_implementation_that_a_file_lacks_is_timed_when_it_is_named(tmp_path: Path) -> None:
    """Beside the others that are named, whose rows are replaced: their times are of one run."""
    before = bench(tmp_path, impls=["isobit"])["rows"]
    said: list[str] = []
    report = bench(tmp_path, *TEXTS[2:], impls=["isobit", "copy"], resume=True, say=said.append)
    assert not [text for text in said if "already in the file" in text]
    assert [(row["case"], row["impl"]) for row in report["rows"]] == [
        (NAMES[0], "isobit"), (NAMES[1], "isobit"), (NAMES[2], "isobit"), (NAMES[2], "copy")
    ]  # fmt: skip
    assert report["rows"][:2] == before[:2]
    report = bench(tmp_path, impls=["isobit", "copy"], resume=True, say=said.append)
    assert report["command"].endswith(" --direction fwd --impl isobit --impl copy")
    assert said.count("1 of 3 cases are already in the file") == 1
    report = bench(tmp_path, impls=["copy"], resume=True, say=said.append)
    assert "--impl" not in report["command"]  # nor does the file hold one implementation alone


def test_an_implementation_without_rows_is_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot run here, and one that failed."""
    (series,) = (one for one in series_of(LOGP) if one.name == "logp")

    def fails(args: Any) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setitem(series.rivals, "broken", replace(series.rivals["native"], function=fails))
    missing = replace(series.rivals["native"], available=lambda case, device: "not installed")
    monkeypatch.setitem(series.rivals, "missing", missing)
    said: list[str] = []
    named = ["isobit", "broken", "missing"]
    report = bench(tmp_path, impls=named, resume=True, say=said.append)
    assert cases(report) == NAMES and [note for note in report["notes"] if "on purpose" in note]
    assert bench(tmp_path, impls=named, resume=True, say=said.append)["rows"] == report["rows"]
    assert said.count("3 of 3 cases are already in the file") == 1


def test_without_resume_everything_is_timed_again(tmp_path: Path) -> None:
    cut_off_after(tmp_path, 2)
    assert cases(bench(tmp_path, "N=9,V=33")) == ["N=9 V=33 bf16"]


def test_a_run_says_at_once_which_file_it_shortens(tmp_path: Path) -> None:
    """A run with --core replaced files of all cases, and nobody noticed."""
    said: list[str] = []
    bench(tmp_path, say=said.append)
    bench(tmp_path, resume=True, say=said.append)
    assert not [text for text in said if "does not time" in text]
    path = tmp_path / "cpu" / "logp.json"
    bench(tmp_path, "N=9,V=33", resume=True, say=said.append)
    assert cases(json.loads(path.read_text())) == NAMES
    said.clear()
    bench(tmp_path, "N=9,V=33", say=said.append)
    (told,) = (i for i, text in enumerate(said) if "does not time" in text)
    assert (
        said[told].startswith(f"{path} has 2 cases that this run does not time: ")
        and "--resume" in said[told]
    )
    assert told < next(i for i, text in enumerate(said) if text.startswith("[1/1]"))


def test_rows_are_in_the_order_of_the_cases(tmp_path: Path) -> None:
    bench(tmp_path, "N=9,V=33")
    assert cases(bench(tmp_path, resume=True)) == NAMES


def test_a_direction_that_is_missing_is_timed_alone(tmp_path: Path) -> None:
    bench(tmp_path, "N=7,V=33")
    report = bench(tmp_path, "N=7,V=33", resume=True, directions=["fwd", "fwd_bwd"])
    assert [row["direction"] for row in report["rows"]] == ["fwd", "fwd_bwd"]


@pytest.mark.parametrize("key", ["gpu", "torch", "kernels", "checked"])
def test_rows_of_another_run_are_not_mixed_with_these(tmp_path: Path, key: str) -> None:
    path = cut_off_after(tmp_path, 1)
    found = json.loads(path.read_text())
    found["stamp"][key] = {"logp": "another"} if key == "kernels" else "another"
    path.write_text(json.dumps(found))
    with pytest.raises(ContractError, match=rf"logp\.json is from a different run \(different {key}\)"):
        bench(tmp_path, resume=True)
    assert json.loads(path.read_text()) == found
    path.write_text("[]")
    with pytest.raises(ContractError, match="not a file of isobit bench"):
        bench(tmp_path, resume=True)


def test_a_resumed_run_without_a_file_is_a_run(tmp_path: Path) -> None:
    assert cases(bench(tmp_path, resume=True)) == NAMES


# Time


class Clock:
    """Every case takes four minutes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr(runner.time, "monotonic", lambda: self.now)
        rows = runner.Implementations.rows

        def slowly(*args: Any) -> Any:
            self.now += 240.0
            return rows(*args)

        monkeypatch.setattr(runner.Implementations, "rows", slowly)


def test_a_run_stops_between_cases_and_says_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    said: list[str] = []
    report = bench(tmp_path, minutes=9, say=said.append)
    assert cases(report) == NAMES[:2]  # a third would end after twelve
    assert report["notes"] == ["unfinished: 1 of 3 cases are not timed"]
    assert "stopped, out of time: 1 of 3 cases are left (logp N=9 V=33 bf16)" in said
    assert json.loads((tmp_path / "cpu" / "logp.json").read_text()) == report
    assert cases(bench(tmp_path, minutes=9, resume=True)) == NAMES


def test_no_time_at_all_is_no_error(tmp_path: Path) -> None:
    report = bench(tmp_path, minutes=0)
    assert report["rows"] == [] and report["notes"] == ["unfinished: 3 of 3 cases are not timed"]
    assert not list(tmp_path.iterdir())


# The core


@pytest.mark.parametrize("name", sorted({OPS[name].folder: name for name in public_ops()}.values()))
def test_every_series_has_a_core_of_declared_cases(name: str) -> None:
    for series in series_of(known_op(name)):
        assert series.core and all(case in series.cases for case in series.core)
        assert len(series.core) <= 10


@pytest.mark.parametrize("name", suite_names())
def test_every_suite_has_a_core(name: str) -> None:
    assert all(series.core for series in suite_of(name).series)


def test_the_core_alone_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the declared core; here small versions of it."""
    series, *_ = series_of(LOGP)
    jobs = runner._jobs("logp", [series], None, None, runner.torch.device("cuda"), {}, True)
    assert [case for _, case, _ in jobs] == list(series.core)
    options: dict[str, Any] = {"device": "cpu", "repetitions": 2, "skip_check": True, "say": lambda t: None}
    report = run("logp", core=True, impls=["isobit"], directions=["fwd"], **options)
    every = [row["case"] for row in report["rows"] if row["op"] == "logp"]
    assert [case.split(" V=")[1] for case in every] == ["50257 fp16", "151936 bf16"]
    assert {row["op"] for row in report["rows"]} == {"logp", "logp_tenth"}
    assert report["command"] == "isobit bench --op logp --device cpu --core --direction fwd --impl isobit"


def test_a_named_series_alone_is_timed(tmp_path: Path) -> None:
    """With --resume one after the other, and the file keeps both."""
    known = [one.name for one in series_of(LOGP)]
    run_of: dict[str, Any] = {
        "device": "cpu", "repetitions": 2, "skip_check": True, "say": lambda t: None, "core": True,
        "impls": ["isobit"], "directions": ["fwd"], "out_dir": tmp_path, "resume": True,
    }  # fmt: skip
    report = run("logp", series=["logp_tenth"], **run_of)
    assert {row["op"] for row in report["rows"]} == {"logp_tenth"}
    assert " --core --series logp_tenth --direction fwd" in report["command"]
    report = run("logp", series=["logp"], **run_of)
    assert list(dict.fromkeys(row["op"] for row in report["rows"])) == known  # also in their order
    assert " --core --direction fwd" in report["command"]  # which repeats all that is in the file
    with pytest.raises(ContractError, match=f"unknown series 'logp_half'; known: {', '.join(known)}"):
        run("logp", series=["logp_half"], **run_of)
    with pytest.raises(ContractError, match="--series det_gemm_cold would not be timed: leave it out"):
        run("det_gemm", directions=["dw"], series=["det_gemm_cold"], device="cpu")


def test_an_interrupted_run_keeps_the_cases_it_has_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file that was named, as in one of the results."""
    timed: list[object] = []
    rows = runner.Implementations.rows

    def interrupted(self: runner.Implementations, *args: Any) -> Any:
        if timed:
            raise KeyboardInterrupt
        timed.append(args)
        return rows(self, *args)

    monkeypatch.setattr(runner.Implementations, "rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench(tmp_path, *TEXTS, file=tmp_path / "own.json")
    for path in (tmp_path / "own.json", tmp_path / "cpu" / "logp.json"):
        report = json.loads(path.read_text())
        assert [row["case"] for row in report["rows"]] == NAMES[:1]
        assert report["notes"][-1] == "unfinished: 2 of 3 cases are not timed"
