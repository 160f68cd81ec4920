"""`isobit check --fn`: the command, its reports and its page."""

import atexit
import doctest
import json
import re
import runpy
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import row_functions as rows
from commands import Isobit
from isobit import testing
from isobit.check.any_function import laws, runner
from isobit.spec.trial import NeverEnds

FLAGS = ("--fn", "row_functions:splits_by_rows", "--inputs", "row_functions:make", "--rows", "x")


def test_the_command_writes_reports_and_a_cell_can_be_repeated(isobit: Isobit, tmp_path: Path) -> None:
    path, html = tmp_path / "report.json", tmp_path / "report.html"
    flags = (*FLAGS, "--law", "invariant", "--data", "seed=5", "--data", "cotangents=none")
    done = isobit("check", *flags, "--json", str(path), "--html", str(html))
    assert done.code == 1 and "FAIL rows row_functions:splits_by_rows invariant [rows alone]" in done.out
    report = json.loads(path.read_text())
    assert report["command"] == f"isobit check {shlex.join(flags)}"
    page = html.read_text()
    said = "12 rows of x [12, 301] fp32; judged by output 0; gradients were switched off."
    assert f"row_functions:splits_by_rows: {said}" in page and "row n alone" in page
    failed = [c for c in report["candidates"][0]["cases"] if c["status"] == "FAIL"]
    again = isobit(*shlex.split(failed[0]["command"])[1:], "--json", "-")
    (cell,) = json.loads(again.out)["candidates"][0]["cases"]
    assert again.code == 1 and (cell["case"], cell["reason"]) == (failed[0]["case"], failed[0]["reason"])
    assert isobit("report", str(path)).out.startswith(f"{path}: check of rows: ")


def test_a_page_without_a_control_is_no_plain_pass(isobit: Isobit, tmp_path: Path) -> None:
    flags = ("--fn", "row_functions:norm", *FLAGS[2:], "--case", "rows permuted", "--html")
    for more, state in ((), "warn"), (("--reduction", "row_functions:backwards"), "ok"):
        assert isobit("check", *flags, str(tmp_path / "page.html"), *more).code == 0
        assert f'class="pill {state}">all laws hold' in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted after 1 of 2"),
        (NeverEnds("still runs"), 1, "stopped after 2 of 2"),
    ],
)
def test_a_check_that_ends_early_reports_what_was_done(
    isobit: Isobit, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    def ends(batch: object) -> None:
        raise error

    kept: list[object] = []
    first = next(change for change in laws.CHANGES if change.case == "rows permuted")
    monkeypatch.setattr(runner, "CHANGES", (first, replace(first, case="early", run=ends)))
    monkeypatch.setattr(atexit, "register", kept.append)
    done = isobit("check", *FLAGS, "--json", "-")
    report = json.loads(done.out)
    assert (done.code, report["ok"], report["passed"]) == (code, 1, False)
    assert report["interrupted"].startswith(said) and len(kept) == (code == 1)


def test_a_function_without_a_name_is_repeated_from_python() -> None:
    with pytest.raises(AssertionError) as found:
        testing.check_batch_invariance(
            lambda x, weight: x * 0,
            rows.make,
            row_args=("x",),
            laws=("invariant",),
            reduction=rows.norm,
            seed=4,
        )
    assert (
        "isobit.testing.check_batch_invariance(<the function>, <its inputs>, row_args=('x',), "
        "laws=('invariant',), case='depends on its rows', seed=4, reduction=<that of before>)"
    ) in str(found.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--fn", "row_functions:norm"), "--inputs and --rows missing: a function of rows is checked with"),
        (("--reduction", "row_functions:norm"), "--fn and --inputs and --rows missing"),
        ((*FLAGS, "--op", "logp"), "--op: no effect on a function of rows (--fn)"),
        ((*FLAGS, "--dtype", "bf16", "--results", "here"), "--dtype, --results: no effect on"),
        ((*FLAGS, "--data", "random"), "--data: no effect on a function of rows"),
        ((*FLAGS, "--data", "cotangents=ones"), "--data cotangents=ones: no effect on a function of rows"),
        ((*FLAGS, "--law", "accuracy"), "law 'accuracy' needs to know the op"),
        ((*FLAGS, "--case", "two streams"), "was checked: needs a GPU: these inputs are on cpu"),
        ((*FLAGS[:-1], "y"), "rows: row_functions:make makes no 'y'; it makes x, weight"),
        (
            (*FLAGS, "--reduction", "row_functions:no"),
            "--reduction row_functions:no: row_functions has",
        ),
    ],
)
def test_wrong_flags_are_one_sentence(isobit: Isobit, flags: tuple[str, ...], message: str) -> None:
    done = isobit("check", *flags)
    assert done.code == 1 and message in done.err and len(done.err.splitlines()) == 1


# The page


def test_the_page_is_true(isobit: Isobit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions, its commands, the failure it shows, its test and its table of cases."""
    page = (Path(__file__).parent.parent / "docs" / "check_any_function.md").read_text()
    files = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL)
    passes, fails, again = (shlex.split(line) for line in re.findall(r"^ *isobit (check .*)$", page, re.M))
    (shown,) = re.findall(r"^FAIL rows .*$", page, re.M)
    assert [name for name, _ in files] == ["my_rows.py", "test_my_rows.py"]
    for name, text in files:
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the command adds the current folder
    monkeypatch.chdir(tmp_path)
    some = ("--law", "repeatable", "--law", "invariant")  # the others take seconds, and are tested above
    done = isobit(*passes, *some)
    assert done.code == 0 and done.out.splitlines()[-1].endswith("all laws hold"), done
    for command in ([*fails, *some], again):
        done = isobit(*command)
        assert done.code == 1 and shown in done.out.splitlines(), done
    runpy.run_path("test_my_rows.py")["test_layer_norm"]()
    for name in ("my_rows", "test_my_rows"):
        sys.modules.pop(name, None)
    table = page.partition("## What is judged")[2]
    cases = {f"strides {name}" if name in laws.LAYOUTS else name for name in re.findall(r"`([^`]+)`", table)}
    assert {change.case for change in laws.CHANGES} <= cases | {"strides padded"}


def test_the_example_of_the_docstring_runs() -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(
        testing.check_batch_invariance, "check_batch_invariance"
    )
    assert test.examples and doctest.DocTestRunner(verbose=False).run(test).failed == 0
