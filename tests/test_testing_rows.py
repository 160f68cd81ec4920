"""`isobit.testing.check_batch_invariance`: any function of rows, its faults, and what cannot be judged."""

import contextlib
from collections.abc import Iterator
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
from isobit.spec.trial import Unsupported


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


@pytest.mark.parametrize(
    ("function", "dtype"),
    [(lambda x: x, torch.float32), (lambda x: x[:, 1:], torch.float16), (torch.Tensor.double, torch.bfloat16),
     (torch.Tensor.float, torch.float8_e4m3fn)],
)  # fmt: skip
def test_views_of_rows_and_small_dtypes_pass(function: Any, dtype: torch.dtype) -> None:
    """A backward may return the very gradient that it was given."""
    check(lambda x: function(x), make=lambda: {"x": torch.randn(9, 5).to(dtype)})


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
        (rows.splits_by_rows, "some rows", "output 0: 2 of 12 rows: "),
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


def test_results_are_kept_from_buffers_that_are_used_again() -> None:
    """The fault is too rare to be found, but no call is compared with itself because of it."""
    ours = batch(rows.buffers_in_turn)
    before = ours.whole.outputs["0"].clone()
    for _ in range(20):
        ours.mine.forward(ours.mine.select(ours.mine.everyone().roll(1)))
    assert torch.equal(ours.whole.outputs["0"], before)


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


def test_an_order_may_show_in_gradients_alone() -> None:
    given = {"case": "another order", "reduction": rows.other_sum_in_its_backward}
    check(rows.sum_in_its_backward, "invariant", **given)
    text = fault(rows.sum_in_its_backward, "invariant", gradients=False, **given)
    assert "other_sum_in_its_backward changed no bit: " in text
    check(rows.norm, "invariant", case="another order", reduction=backwards_without_autograd)


@torch.no_grad()
def backwards_without_autograd(x: Tensor, weight: Tensor) -> Tensor:
    return rows.backwards(x, weight)


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


def test_a_function_of_one_batch_alone_is_an_error() -> None:
    def of_twelve(x: Tensor, weight: Tensor) -> Tensor:
        if len(x) != 12:
            raise NotImplementedError("twelve rows")
        return x * weight

    with pytest.raises(
        ContractError, match=r"no other number of rows of .*was checked: it says: twelve rows"
    ):
        check(of_twelve)


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
    ours, steps = batch(rows.norm), list[Any]()
    original = type(ours.mine).with_gradients

    def recorded(self: Any, args: Any, cotangents: Any = None) -> Any:
        steps[:] = [args, original(self, args, cotangents)]  # the last one is what was captured
        return steps[1]

    def replay(graph: object) -> None:
        static, captured = steps
        for old, new in zip(captured, original(ours.mine, static, ours.cotangents), strict=True):
            for name in old if works else ():
                old[name].detach().copy_(new[name].detach())

    stub_graphs(monkeypatch, replay=replay)
    monkeypatch.setattr(type(ours.mine), "with_gradients", recorded)
    checks = traced.captured(ours)
    assert len(checks) == 3 and all(check.passed for check in checks) == works


def stub_graphs(monkeypatch: pytest.MonkeyPatch, replay: Any = None, capture: Any = None) -> None:
    nothing = contextlib.nullcontext
    stream = type("Stream", (), {"__init__": lambda self, *a: None, "wait_stream": lambda self, other: None})
    graph = type("CUDAGraph", (), {"replay": replay})
    stubs = {"Stream": stream, "current_stream": stream, "stream": nothing, "graph": capture or nothing,
             "CUDAGraph": graph, "synchronize": nothing}  # fmt: skip
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(traced, "needs_gpu", lambda batch: None)


def test_what_cannot_be_captured_or_compiled_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def capture(graph: object) -> Iterator[None]:
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nat great length")

    def compiler(function: Any, backend: str) -> Any:
        raise RuntimeError("Failed to find C compiler. Please specify via CC")

    stub_graphs(monkeypatch, capture=capture)
    with pytest.raises(Unsupported, match=r"cannot be captured: RuntimeError: operation not .* capturing$"):
        traced.captured(batch(rows.norm))
    monkeypatch.setattr(torch, "compile", compiler)
    with pytest.raises(Unsupported, match=r"torch.compile cannot run here: Failed to find C compiler"):
        traced.compiled(batch(rows.norm))
