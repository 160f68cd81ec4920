"""Guards `make compat` itself: what it counts, what it prints, how it ends. Installs and compiles nothing."""

import re
from pathlib import Path
from typing import Any

import pytest

import compat
from compat import NEWEST, OLDEST, TESTED, Environment, Failure, Part, Row

ROOT = Path(__file__).parents[1]


def environment(name: str) -> Environment:
    return Environment(name, "3.9.0" if name == NEWEST else name)


def good(*_: Any) -> Part:
    return Part(7, 0)


def bad(env: Environment, *_: Any) -> Part:
    """Under the newest alone."""
    failures = [Failure("det_gemm hopper", "RuntimeError: no", "repeat it")]
    return Part(5, 2, failures) if env.name == NEWEST else Part(7, 0)


def outcome(words: list[str], **parts: Any) -> int:
    return compat.main(words, **({"prepare": environment, "compile_in": good, "test_in": good} | parts))


# How it ends


def test_success_prints_a_table_and_returns_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome([]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^Triton +compile +tests +seconds$", printed, re.M)
    for label in (OLDEST, TESTED, r"3\.9\.0 \(newest\)"):
        assert re.search(rf"^{label} +7 kernels ok +7 passed +0$", printed, re.M)
    assert printed.endswith("everything holds under every one of them\n")


@pytest.mark.parametrize("part", ["compile_in", "test_in"])
def test_a_failure_returns_1_and_says_where_why_and_how_to_repeat_it(
    part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome([], **{part: bad}) == 1
    printed = capsys.readouterr().out
    assert "2 FAILED" in printed
    assert "FAIL 3.9.0 (newest) det_gemm hopper\n     RuntimeError: no\n     repeat it\n" in printed
    assert printed.endswith("FAILED under Triton 3.9.0 (newest)\n")


def test_the_cheap_part_runs_no_tests(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []

    def compile_in(env: Environment, cheap: bool) -> Part:
        seen.append((env.name, cheap))
        return Part(7, 0)

    assert outcome(["--cheap"], compile_in=compile_in, test_in=bad) == 0
    assert sorted(seen) == [(OLDEST, True), (NEWEST, True)]
    assert re.search(r"^3\.6\.0 +7 kernels ok +- ", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("cheap", [True, False])
def test_the_cheap_part_is_brief_but_under_the_oldest(cheap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run under the oldest on the GPUs that they are measured on."""
    for name in (OLDEST, NEWEST):
        ran: list[str] = []
        monkeypatch.setattr(
            compat, "_run", lambda env, part, command, to=ran: (to.extend(command), (1, []))[1]
        )
        compat.compile_kernels(environment(name), cheap)
        assert ("--brief" in ran, "bf16" in ran) == (cheap and name == NEWEST, cheap)


def test_versions_are_chosen_and_none_is_tried_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert outcome(["--triton", "3.8.0", "--triton", "3.9.0", "--triton", "newest"]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"^3\.\d\.0 .*7 passed", printed, re.M)) == 2
    with pytest.raises(SystemExit):
        outcome(["--triton", "../somewhere"])
    assert "'../somewhere' is neither a version such as 3.6.0 nor 'newest'" in capsys.readouterr().err


def test_without_an_index_it_says_so_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "ERROR: Could not find a version that satisfies the requirement triton (from versions: none)\n"
    monkeypatch.setattr(compat, "HOME", tmp_path)
    monkeypatch.setattr(compat.venv, "create", lambda folder, **_: (folder / "bin").mkdir(parents=True))
    monkeypatch.setattr(compat, "_install", lambda python, wanted: compat.why_not_installed(said))
    assert outcome(["--triton", "3.6.0"], prepare=compat.environment) == 2
    assert capsys.readouterr().err == (
        "compat: Triton 3.6.0 could not be installed: no package index was reached (pip found no version of "
        "it at all). Is there a network?\n"
    )
    assert not list(tmp_path.iterdir())  # or the next run would take it for an environment


def test_an_outdated_newest_version_is_used_if_there_is_no_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / NEWEST / "lib" / "python3" / "site-packages"
    (site / "triton-3.8.0.dist-info").mkdir(parents=True)
    (site / "shared.pth").touch()
    monkeypatch.setattr(compat, "HOME", tmp_path)
    monkeypatch.setattr(compat, "_install", lambda python, wanted: "no package index was reached.")
    assert compat.environment(NEWEST) == Environment(NEWEST, "3.8.0")
    assert "taking the one that is here already, because no package index" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("ERROR: ... triton==9 (from versions: 3.6.0, 3.7.1)", "has other versions only: 3.6.0, 3.7.1."),
        ("Collecting triton\nERROR: No space left on device", "pip said 'ERROR: No space left on device'."),
        ("", "pip said 'nothing'."),
    ],
)
def test_other_errors_of_pip(said: str, why: str) -> None:
    assert compat.why_not_installed(said).endswith(why)


# What it counts


def cell(status: str, reason: str, *passed: bool) -> dict[str, Any]:
    outputs = [{"passed": p} for p in passed]
    named = {"op": "logp", "backend": "triton", "law": "compile", "case": "N=1 V=2 bf16"}
    return named | {"status": status, "reason": reason, "outputs": outputs, "command": "isobit check --op x"}


def test_kernels_are_counted_from_the_report() -> None:
    cells = [
        cell("ok", "", True, True),
        cell("FAIL", "a cuda:90: CompilationError: at 3:1:\n    x = y\n        ^\nno y", True, False, False),
        cell("FAIL", "no launch was recorded"),
        cell("UNSUPPORTED", "plain PyTorch: nothing to compile"),
    ]
    part = compat.kernels_of({"candidates": [{"cases": cells}]}, "bin/python")
    assert (part.ok, part.failed) == (3, 3)
    first, second = part.failures
    assert first.what == "logp triton compile [N=1 V=2 bf16]"
    assert first.why == "a cuda:90: CompilationError: at 3:1: ... no y"
    assert first.command == "bin/python -m isobit check --op x"
    assert second.why == "no launch was recorded"


def test_tests_are_counted_from_what_pytest_prints() -> None:
    lines = [
        "..F.E  [100%]",
        "FAILED tests/test_logp.py::test_it[a b-1] - assert 1 == 2 - 3",
        "ERROR tests/test_ops.py",
        "FAILED to do something else",
        "1 failed, 3 passed, 40 deselected, 2 warnings, 1 error in 12.34s (0:00:12)",
    ]
    part = compat.tests_of(lines, "bin/python")
    assert (part.ok, part.failed) == (3, 2)
    assert [f.what for f in part.failures] == ["tests/test_logp.py::test_it[a b-1]", "tests/test_ops.py"]
    assert part.failures[0].why == "assert 1 == 2 - 3"
    assert part.failures[0].command == "bin/python -m pytest 'tests/test_logp.py::test_it[a b-1]'"


@pytest.mark.parametrize("part", [compat.run_tests, lambda env: compat.compile_kernels(env, True)])
def test_a_crash_is_a_failure_with_the_end_of_its_output(
    part: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compat, "HOME", tmp_path)
    monkeypatch.setattr(compat, "_run", lambda env, part, command: (-6, ["Assertion `x' failed.", ""]))
    found = part(environment(OLDEST))
    assert (found.ok, found.failed) == (0, 1)
    assert "ended with code -6" in found.failures[0].why and "Assertion `x' failed." in found.failures[0].why
    assert found.failures[0].command.startswith(environment(OLDEST).python)


def test_output_without_a_test_count_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_run", lambda env, part, command: (0, ["....  [100%]"]))
    assert compat.run_tests(environment(OLDEST)).failed == 1


def test_only_the_first_failures_are_printed() -> None:
    many = [Failure(f"test {i}", "why", "again") for i in range(compat.SHOWN + 3)]
    lines = compat.notes([Row(environment(OLDEST), Part(1, 0), Part(0, len(many), many), 1.0)])
    assert sum(line.startswith("FAIL") for line in lines) == compat.SHOWN
    assert lines[-1] == "     3 more failures, and all that was printed: .compat/3.6.0/*.log"


# What it is about


def test_the_versions_are_those_that_the_package_declares() -> None:
    assert f'"triton>={OLDEST.removesuffix(".0")}"' in (ROOT / "pyproject.toml").read_text()
    assert f"triton=={TESTED}\n" in (ROOT / "constraints.txt").read_text()
