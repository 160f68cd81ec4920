"""`isobit.testing.check_batch_invariance` and `isobit check --fn`: any function of rows, and its faults."""

import contextlib
import doctest
import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import row_functions as rows
import third_party
from candidate_faults import unwrapped
from commands import Isobit
from isobit import testing
from isobit.check.any_function import laws, traced
from isobit.check.any_function.batch import batch_of
from isobit.check.any_function.first_call import row_function
from isobit.check.laws import bits
from isobit.frame.contract import ContractError


def check(function: Any, *wanted: str, make: Any = rows.make, **more: Any) -> dict[str, Any]:
    given = {"row_args": ("x",), "laws": wanted or ("repeatable", "written", "invariant"), **more}
    return testing.check_batch_invariance(function, make, **given)


def fault(function: Any, *wanted: str, **more: Any) -> str:
    with pytest.raises(AssertionError) as found:
        check(function, *wanted, **more)
    name = getattr(function, "__qualname__", "")
    assert str(found.value).splitlines()[0].startswith(f"{function.__module__}:{name}: ")
    return unwrapped(str(found.value))


def cells(report: dict[str, Any], status: str) -> dict[str, str]:
    return {c["case"]: c["reason"] for c in report["candidates"][0]["cases"] if c["status"] == status}


# What is right passes


def test_a_right_function_passes_everything_and_what_cannot_run_says_why() -> None:
    report = check(rows.norm, "repeatable", "written", "invariant", "traceable", reduction=rows.backwards)
    needs_gpu = "needs a GPU: these inputs are on cpu"
    assert report["passed"] and report["fail"] == 0 and "unproven" not in report
    assert cells(report, "UNSUPPORTED") == {"two streams": needs_gpu, "CUDA graph": needs_gpu}
    assert set(cells(report, "ok")) == {change.case for change in laws.CHANGES} - {
        "two streams",
        "CUDA graph",
    }
    serves = report["candidates"][0]["serves"]
    assert serves["outputs"] == ["0"] and serves["gradients"] == ["x", "weight"]
    (control,) = (c for c in report["candidates"][0]["cases"] if c["case"] == "another order")
    assert "row_functions:backwards changes bits, as it must" in control["outputs"][0]["message"]
    said = {o["output"] for c in report["candidates"][0]["cases"] for o in c["outputs"]}
    assert {"output 0", "gradient:x", "gradient:weight"} <= said
    for cell in report["candidates"][0]["cases"]:  # a gradient that is a sum over rows is not one of a row
        of_batch = cell["law"] == "invariant"
        assert not of_batch or all(o["output"] != "gradient:weight" for o in cell["outputs"])


@pytest.mark.parametrize(
    ("function", "outputs", "gradients"),
    [
        (rows.several, ["scaled", "rest.top", "rest.largest.0"], ["x", "weight"]),
        (rows.forward_only, ["0"], []),
        (rows.Norm(), ["0"], ["x", "weight"]),
    ],
)
def test_outputs_of_any_form_pass(function: Any, outputs: list[str], gradients: list[str]) -> None:
    serves = check(function)["candidates"][0]["serves"]
    assert (serves["outputs"], serves["gradients"]) == (outputs, gradients)


def test_rows_of_integers_and_of_floats_pass() -> None:
    check(third_party.right, make=rows.make_tokens, row_args=("logits", "token_ids"))


def test_refused_strides_are_unsupported_and_named() -> None:
    report = check(rows.contiguous_only, "invariant")
    said = cells(report, "UNSUPPORTED")["strides padded"]
    assert said == "it refuses these strides: AssertionError: x must be contiguous"
    assert "strides inside" in cells(report, "ok")


def test_two_rows_and_one_dimension_are_enough() -> None:
    report = check(torch.sin, "invariant", make=lambda: {"input": torch.randn(2)}, row_args=("input",))
    assert cells(report, "UNSUPPORTED").keys() == {"another order", "some rows", "strides transposed"}


# Faults


@pytest.mark.parametrize(
    ("function", "case", "named"),
    [
        (rows.zeros, "depends on its rows", "output 0: does not depend on the rows"),
        (rows.one_result_for_all, "depends on its rows", "output 0: does not depend on the rows"),
        (rows.gradient_of_zero, "depends on its rows", "gradient:x: does not depend on the rows"),
        (
            rows.overflows,
            "depends on its rows",
            "is NaN in 12 of 12 rows, first in row 0, though no",
        ),
        (rows.splits_by_rows, "rows alone", "output 0: row 0 alone: 1 of 1 differ, first at [0]: "),
        (rows.splits_by_rows, "some rows", "output 0: 2 of 12 rows: 2 of 2 differ, first at [0]: "),
        (rows.splits_by_rows, "chunks", "output 0: chunk [0, 4): "),
        (rows.splits_by_rows, "NaN rows around", "output 0: 2 NaN rows before, 1 behind: "),
        (rows.centred_over_rows, "rows alone", ", in row 0 of the batch"),
        (rows.centred_over_rows, "NaN rows among", "nan against "),
        (rows.lets_nan_through, "NaN rows around", "nan against "),
        (rows.lets_nan_through, "NaN rows among", "in rows 0, 2, 4, 6 and 2 more of the batch"),
        (rows.adds_its_place, "rows permuted", "rows reversed: "),
        (rows.adds_its_place, "chunks", "in rows 4, 5, 6 of the batch"),
        (rows.whole_blocks, "rows alone", "output 0: row 0 alone: 301 of 301 differ"),
        (rows.leaves_a_column, "NaN-filled memory", "with NaN-filled memory: 12 of 3612 differ"),
        (rows.reads_past_strides, "strides padded", "output 0: layout padded: "),
        (rows.order_by_strides, "strides strided", "output 0: layout strided: "),
        (rows.plain, "strides transposed", "output 0: layout transposed: "),
        (rows.order_by_autograd, "repeated calls", "output 0: without autograd: "),
        (rows.order_by_thread, "another thread", "output 0: in a thread of its own: "),
        (rows.order_by_compiler, "torch.compile", "output 0: compiled: "),
        (rows.other_every_third_time, "repeated calls", "output 0: "),
        (rows.one_buffer_without_autograd, "repeated calls", "output 0 of two calls is the same memory"),
        (rows.one_buffer_without_autograd, "other contents", "an earlier result after another call"),
        (rows.drops_some, "repeated calls", "changed PyTorch's random generator"),
        (rows.writes, "repeated calls", "wrote into its input weight"),
        (rows.gradient_of_the_batch, "rows alone", "gradient:x: row 0 alone: "),
        (rows.assumes_contiguous_gradient, "incoming gradients", "gradient:x: incoming gradient "),
        (rows.views_its_gradient, "incoming gradients", "RuntimeError: view size is not compatible"),
    ],
)
def test_a_fault_is_named(function: Any, case: str, named: str) -> None:
    """By its row, by what was changed, and by the largest difference."""
    text = fault(function, "repeatable", "written", "invariant", "traceable", case=case)
    assert named in text and f"rows row_functions:{function.__name__} " in text and f"[{case}]" in text
    assert f"isobit check --fn row_functions:{function.__name__} --inputs row_functions:make --rows x" in text


@pytest.mark.parametrize(
    ("function", "case", "named"),
    [
        (third_party.order_depends_on_rows, "rows alone", "row 0 alone: "),
        (third_party.returns_one_buffer, "repeated calls", "output 0 of two calls is the same memory"),
        (third_party.keeps_results, "other contents", "in tensors that held other rows before"),
        (third_party.writes_into_its_input, "repeated calls", "wrote into its input logits"),
    ],
)
def test_known_bad_candidates_of_an_op_fail_without_their_op(function: Any, case: str, named: str) -> None:
    given = {"make": rows.make_tokens, "row_args": ("logits", "token_ids")}
    assert named in fault(function, "repeatable", "invariant", case=case, **given)


def test_a_call_that_fails_is_not_reported_for_every_change() -> None:
    text = fault(rows.writes)
    assert text.count("FAIL rows") == 1 and "its call with all rows failed, so there is nothing" in text


# Controls


def test_without_a_control_the_report_says_what_is_not_proven(isobit: Isobit) -> None:
    said = "no other order of the sum was named, so nothing shows that these inputs would reveal one"
    report = check(rows.norm, "invariant")
    assert report["passed"] and report["unproven"] == said
    assert cells(report, "UNSUPPORTED")["another order"] == said
    flags = ("--fn", "row_functions:norm", "--inputs", "row_functions:make", "--rows", "x")
    done = isobit("check", *flags, "--law", "invariant")
    assert done.code == 0 and done.out.splitlines()[-1].endswith(f"all laws hold, but {said}")


def exact() -> dict[str, Any]:
    """Sums of these are exact in any order."""
    return {"x": torch.randint(-8, 9, (12, 64)).float(), "weight": torch.ones(64)}


def test_inputs_that_cannot_show_an_order_are_a_failure() -> None:
    text = fault(rows.splits_by_rows, "invariant", make=exact, case="depends on its rows")
    assert "x, weight: every value is a multiple of 1/16 up to 256: sums of them are exact" in text
    check(rows.splits_by_rows, "invariant", make=exact, case="rows alone")  # which alone would pass


def other_sum(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).flip(-1).sum(-1)


@pytest.mark.parametrize(
    ("function", "reduction", "make", "named"),
    [
        (rows.splits_by_rows, other_sum, exact, "other_sum changed no bit: these inputs cannot show a wrong"),
        (rows.norm, rows.norm, rows.make, "norm changed no bit: "),
        (
            rows.norm,
            rows.centred_over_rows,
            rows.make,
            "is not the same sum in another order: output 0",
        ),
        (rows.norm, rows.several, rows.make, "returned scaled, rest.top, rest.largest.0, not 0"),
        (
            rows.norm,
            rows.splits_by_rows,
            rows.make,
            "returns output 0 as [12] torch.float32 instead of",
        ),
    ],
)
def test_a_control_that_shows_nothing_is_a_failure(
    function: Any, reduction: Any, make: Any, named: str
) -> None:
    assert named in fault(function, "invariant", case="another order", make=make, reduction=reduction)


# What cannot be judged is an error


def of(*shape: int) -> Any:
    return lambda: {"x": torch.randn(*shape), "weight": torch.rand(shape[-1])}


@pytest.mark.parametrize(
    ("function", "given", "rule"),
    [
        (rows.norm, {"make": of(1, 5)}, r"\(x: \[1, 5\] fp32\): one row; bits of a row can only"),
        (rows.norm, {"make": of(0, 5)}, r"\(x: \[0, 5\] fp32\): no rows; "),
        (rows.norm, {"make": lambda: {"x": torch.ones(4, 5), "weight": 1.0}}, "all rows are equal"),
        (rows.norm, {"row_args": ()}, r"row_args=\(\): a sequence of the arguments that have rows"),
        (rows.norm, {"row_args": "x"}, "laws and row_args are sequences"),
        (rows.norm, {"row_args": ("x", "y")}, "makes no 'y'; it makes x, weight"),
        (rows.norm, {"row_args": ("x", "x")}, "'x' is given twice"),
        (rows.norm, {"row_args": ("x", "weight")}, "as many rows: x has 12, weight has 301"),
        (rows.norm, {"make": lambda: {"x": 3.0}}, r"\(x: float\): a row argument is a tensor"),
        (rows.norm, {"make": lambda: [1]}, "returned list, not a dictionary of arguments by name"),
        (rows.norm, {"make": lambda: 1 / 0}, "raised ZeroDivisionError: division by zero"),
        (rows.norm, {"make": lambda: {"x": torch.randn(3, 2) * 1j}}, "a plain tensor of real numbers"),
        (rows.norm, {"make": 3}, "not a function that makes inputs"),
        (rows.norm, {"laws": ("accuracy",)}, "law 'accuracy' needs to know the op; for any function: repeat"),
        (rows.norm, {"case": "upside down"}, "unknown case 'upside down'; known: repeated calls; "),
        (rows.norm, {"case": "two streams"}, "nothing of row_functions:norm was checked: needs a GPU"),
        (rows.norm, {"reduction": 3}, "3 is int, not a function"),
        (rows.Norm, {}, "is a class: give an object of it"),
        (lambda x, weight: x.sum(), {}, r"output 0 is \[\] fp32: its first dimension is not that of the 12"),
        (lambda x, weight: x.T, {}, r"output 0 is \[301, 12\] fp32: its first dimension is not"),
        (lambda x, weight: (x, {"n": 12}), {}, "output 1.n is int: only tensors have rows, leave it out"),
        (lambda x, weight: None, {}, "returned no tensor"),
        (lambda x, weight: x[:, :0], {}, "its outputs have no elements"),
        (lambda x, weight: x.numpy(), {}, r"RuntimeError: Can't call numpy\(\).* check it without"),
        (lambda x: x, {}, "TypeError: .*unexpected keyword argument 'weight'"),
    ],
)
def test_what_cannot_be_judged_is_one_sentence(function: Any, given: dict[str, Any], rule: str) -> None:
    with pytest.raises(ContractError, match=rule):
        check(function, **given)


def test_a_refusal_of_every_call_is_an_error() -> None:
    def refuses(x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError("only on Tuesdays")

    with pytest.raises(ContractError, match="refuses was checked: it says: only on Tuesdays"):
        check(refuses)


def test_a_square_output_without_rows_is_a_failure() -> None:
    """The size of its first dimension is the number of rows by chance."""
    square = lambda: {"x": torch.randn(5, 5), "weight": torch.rand(5)}  # noqa: E731
    assert "output 0 of a call with 1 rows is [5, 1] fp32" in fault(
        transposed, "invariant", make=square, case="rows alone"
    )


def transposed(x: Tensor, weight: Tensor) -> Tensor:
    return x.T


def test_gradients_can_be_left_out() -> None:
    report = check(rows.gradient_of_the_batch, "invariant", gradients=False)
    assert cells(report, "UNSUPPORTED")["incoming gradients"] == "gradients were switched off"


# Inputs


def test_inputs_have_a_seed_and_change_no_generator() -> None:
    made: list[Tensor] = []

    def make() -> dict[str, Any]:
        made.append(torch.randn(3, 4))
        return {"input": made[-1]}

    before = torch.get_rng_state()
    for seed in (1, 1, 2):
        testing.check_batch_invariance(torch.sin, make, row_args=("input",), case="rows alone", seed=seed)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(made[0], made[1]) and not torch.equal(made[0], made[2])


def test_incoming_gradients_are_not_the_inputs() -> None:
    """A gradient of normalized rows would be 0, and bits of zeros show nothing."""
    ours = batch(rows.norm)
    assert not torch.equal(ours.cotangents["0"], ours.mine.inputs["x"])
    assert ours.whole.grads["x"].abs().mean() > 0.1


# On a GPU, with stand-ins


def batch(function: Any) -> Any:
    mine = row_function(function, rows.make, ("x",), name="mine", inputs_name="make", seed=1, gradients=True,
                        device=None)  # fmt: skip
    return batch_of(mine, None, "")


def test_one_wrong_call_on_two_streams_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = batch(rows.norm)

    def calls(call: Any, device: torch.device) -> list[dict[str, Tensor]]:
        return [call(), {name: o + (o == o.max()) for name, o in call().items()}, call()]

    monkeypatch.setattr(laws, "needs_gpu", lambda batch: None)
    monkeypatch.setattr(bits, "calls_on_two_streams", calls)
    (one,) = laws.two_streams(ours)
    assert not one.passed and "1 of 64 calls on two streams: 1 of 3612 differ" in one.message
    monkeypatch.setattr(bits, "calls_on_two_streams", lambda call, device: [call(), call()])
    assert all(check.passed for check in laws.two_streams(ours))


@pytest.mark.parametrize("works", [True, False])
def test_a_graph_that_replays_old_rows_is_found(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    """The stand-in for a graph repeats what was captured, or does nothing."""
    ours = batch(rows.norm)
    steps: list[Any] = []

    class Graph:
        def replay(self) -> None:
            static, captured = steps
            outputs, grads = original(ours.mine, static, ours.cotangents)
            for old, new in ((captured[0], outputs), (captured[1], grads)):
                for name in old if works else ():
                    old[name].detach().copy_(new[name].detach())

    def recorded(self: Any, args: Any, cotangents: Any = None) -> Any:
        result = original(self, args, cotangents)
        steps[:] = [args, result]  # the last one is what was captured
        return result

    original = type(ours.mine).with_gradients
    context = lambda *anything: contextlib.nullcontext()  # noqa: E731
    stream = type("Stream", (), {"__init__": lambda self, *a: None, "wait_stream": lambda self, other: None})
    stubs = {"Stream": stream, "current_stream": stream, "stream": context, "graph": context,
             "CUDAGraph": Graph, "synchronize": context}  # fmt: skip
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(traced, "needs_gpu", lambda batch: None)
    monkeypatch.setattr(type(ours.mine), "with_gradients", recorded)
    checks = traced.captured(ours)
    assert len(checks) == 3
    assert all(check.passed for check in checks) == works


# The command


FLAGS = ("--fn", "row_functions:splits_by_rows", "--inputs", "row_functions:make", "--rows", "x")


def test_the_command_writes_reports_and_a_cell_can_be_repeated(isobit: Isobit, tmp_path: Path) -> None:
    path, html = tmp_path / "report.json", tmp_path / "report.html"
    flags = (*FLAGS, "--law", "invariant", "--data", "seed=5", "--data", "cotangents=none")
    done = isobit("check", *flags, "--json", str(path), "--html", str(html))
    assert done.code == 1 and "FAIL rows row_functions:splits_by_rows invariant [rows alone]" in done.out
    report = json.loads(path.read_text())
    assert report["command"] == f"isobit check {shlex.join(flags)}"
    page = html.read_text()
    assert (
        "row_functions:splits_by_rows takes x, weight; it is judged by 0." in page and "row n alone" in page
    )
    failed = [c for c in report["candidates"][0]["cases"] if c["status"] == "FAIL"]
    again = isobit(*shlex.split(failed[0]["command"])[1:], "--json", "-")
    (cell,) = json.loads(again.out)["candidates"][0]["cases"]
    assert again.code == 1 and (cell["case"], cell["reason"]) == (failed[0]["case"], failed[0]["reason"])
    assert isobit("report", str(path)).out.startswith(f"{path}: check of rows: ")


def test_a_function_without_a_name_is_repeated_from_python() -> None:
    with pytest.raises(AssertionError) as found:
        check(lambda x, weight: x * 0, "invariant", reduction=rows.norm, seed=4)
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
