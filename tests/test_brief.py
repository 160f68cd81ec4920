"""What a check of all laws leaves to a law that is named, and what it must find all the same."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from isobit.check.laws import LAWS, compilation
from isobit.check.runner import FAIL, OK, Cell, Request, _brief_if_whole, _light_enough, how_many, run
from isobit.frame.backend import Backend
from isobit.frame.launch import Recorder
from isobit.frame.op import OPS
from isobit.ops.logp import reference
from isobit.spec.proof import Kernels
from isobit.spec.proofs import proofs

PLAIN = "N=20 V=257 bf16 temperature=0.7"


@contextmanager
def backends(*names: str, forward: Callable[..., Any] = reference.logp) -> Iterator[None]:
    """`logp` with more backends."""
    own = {op: list(op.backends) for op in (OPS["logp"], OPS["logp_bwd"])}
    for op, function in zip(own, (forward, reference.logp_bwd), strict=True):
        op.backends += [
            Backend(name, function, "test/rows", lambda a: None, False, lambda a: None) for name in names
        ]
    try:
        yield
    finally:
        for op, before in own.items():
            op.backends[:] = before


def briefly(law: str, *names: str, case: str | None = None) -> list[Cell]:
    return run(Request(ops=("logp",), backends=names or ("added",), laws=(law,), case=case, brief=True))


# Cases


def test_heavy_cases_are_left_to_laws_that_are_named() -> None:
    op = OPS["logp"]
    for law, heavy in {"accuracy": True, "gradient": False, "memory": False}.items():
        cases = _light_enough(op, "reference", law, Request(brief=True))
        assert cases and any(case.heavy for case in cases) is heavy
        assert any(case.heavy for case in _light_enough(op, "reference", law, Request(laws=(law,))))
        narrow = _brief_if_whole(Request(dtypes=(torch.bfloat16,)))
        assert any(case.heavy for case in _light_enough(op, "reference", law, narrow))


def test_a_check_of_all_laws_is_brief_and_others_where_they_are_asked_to_be() -> None:
    bf16, compile_ = {"dtypes": (torch.bfloat16,)}, {"laws": ("compile",)}
    for named in ({}, bf16, compile_, bf16 | compile_):
        assert _brief_if_whole(Request(**named)).brief is (not named)
        asked = Request(**named, brief=True)
        assert _brief_if_whole(asked) == asked and " --brief " in asked.command()


def test_a_heavy_case_that_is_named_runs() -> None:
    (heavy,) = (case for case in proofs()["logp"].memory_cases if case.heavy)
    asked = Request(brief=True, case=heavy.name)
    assert _light_enough(OPS["logp"], "reference", "memory", asked) == [heavy]


def test_no_op_loses_a_law() -> None:
    for proof in proofs().values():
        for law in LAWS:
            for backend in proof.op.backends:
                whole = Request(ops=(proof.op.name,), laws=(law,), backends=(backend.name,))
                assert bool(how_many(whole)) == bool(how_many(replace(whole, brief=True)))


# Laws that do less


def test_a_result_that_changes_between_two_calls_is_found() -> None:
    calls = count()

    def unsteady(**args: Any) -> tuple[Any, ...]:
        out, *rest = reference.logp(**args)
        return (out if next(calls) < 1 else out + 1.0, *rest)

    with backends("added", forward=unsteady):
        (cell,) = briefly("repeatable", case=PLAIN)
    assert cell.status == FAIL


@pytest.mark.parametrize("brief", [True, False])
def test_opcheck_runs_inside_autocast_and_outside(brief: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[bool, set[str]]] = []

    def seen(op: Any, args: Any, *, test_utils: Sequence[str]) -> None:
        ran.append((torch.is_autocast_enabled("cpu"), set(test_utils)))

    monkeypatch.setattr(torch.library, "opcheck", seen)
    with backends("added"):
        run(Request(ops=("logp",), backends=("added",), laws=("traceable",), brief=brief))
    every = {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}
    assert ran == [
        (False, every),
        (True, {"test_faketensor", "test_aot_dispatch_dynamic"} if brief else every),
    ]


def test_a_wrong_schema_is_found() -> None:
    def writes(**args: Any) -> tuple[Any, ...]:
        outputs = reference.logp(**args)
        args["logits"].detach().zero_()
        return outputs

    with backends("added", forward=writes):
        assert [cell.status for cell in briefly("traceable")] == [FAIL]


# Compilation


@triton.jit
def both(out):  # type: ignore[no-untyped-def]
    tl.store(out, 1.0)


@triton.jit
def fp32_alone(out):  # type: ignore[no-untyped-def]
    tl.static_assert(out.dtype.element_ty == tl.float32)
    tl.store(out, 1.0)


def recording(*kernels: Any) -> Kernels:
    def record(launch: Recorder, dtype: torch.dtype) -> None:
        for kernel in kernels:
            launch(kernel, (1,), torch.empty(1, dtype=dtype, device="meta"))

    return Kernels(record, targets=[("cuda", 90, 32)])


@pytest.mark.compat
def test_a_kernel_that_does_not_compile_in_the_second_dtype_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {"added": recording(both, fp32_alone)}
    monkeypatch.setitem(proofs(), "logp", replace(proofs()["logp"], kernels=kernels))
    with backends("added"):
        first, second = briefly("compile")
    assert first.status == OK
    assert second.status == FAIL and second.reason.startswith(
        "fp32_alone cuda:90: CompileTimeAssertionFailure"
    )
    assert next((o["output"], o["message"]) for o in second.outputs) == (
        "both cuda:90", "up to Triton's own code",
    )  # fmt: skip


@pytest.mark.compat
def test_a_hook_of_somebody_else_is_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(*given: Any) -> Any:
        return None if given else ("key", "hash")

    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", hook)
    kernels = {"added": recording(both)}
    monkeypatch.setitem(proofs(), "logp", replace(proofs()["logp"], kernels=kernels))
    with backends("added"):
        assert {cell.status for cell in briefly("compile")} == {OK}
    assert triton.knobs.runtime.add_stages_inspection_hook is hook


def test_a_kernel_of_several_backends_is_compiled_by_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that has no other kernels compiles its first."""
    monkeypatch.setattr(compilation, "faulty", lambda: False)
    kernels = {"first": recording(both), "second": recording(both, fp32_alone), "third": recording(both)}
    monkeypatch.setitem(proofs(), "logp", replace(proofs()["logp"], kernels=kernels))
    with backends(*kernels):
        cells = briefly("compile", *kernels)
        named = run(Request(ops=("logp",), backends=("second",), laws=("compile",)))
    compiled = {cell.backend: [o["output"] for o in cell.outputs] for cell in reversed(cells)}
    assert compiled == {
        "first": ["both cuda:90"], "second": ["fp32_alone cuda:90"], "third": ["both cuda:90"],
    }  # fmt: skip
    assert [o["output"] for o in named[0].outputs] == ["both cuda:90", "fp32_alone cuda:90"]
