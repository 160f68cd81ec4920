"""The suite of FLA's attention: what needs neither FLA nor a GPU. `test_fla.py` makes its calls on a CPU."""

import contextlib
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

import isobit
from benchmarks.suites import fla as suite
from isobit import ContractError
from isobit.bench.cases import suite_of
from isobit.bench.check_gate import CheckFailed
from isobit.bench.goals import summary
from isobit.bench.report import ROW
from isobit.bench.runner import run
from isobit.ops.delta_rule.rivals import forget_tuning
from isobit.spec.series import NotHere, Pool
from isobit.spec.truth import cotangent_like

NAME = "chunk_gated_delta_rule_bwd_dhu"


def test_the_suite_times_two_ops_in_two_directions_beside_fla() -> None:
    *series, forward, training = suite_of("fla").series
    assert [(one.name, one.directions) for one in series] == [
        (op, (direction,))
        for op in ("chunk_gated_delta_rule", "chunk_kda")
        for direction in ("bwd", "fwd_bwd")
    ]
    for one in series:
        assert one.needs == (NAME,) and one.against == "fla" and set(one.rivals) == {"fla"}
        assert {case.dims["B"] * case.dims["T"] for case in one.cases} == {8192, 32768}
    for one, rivals in ((forward, {"fla"}), (training, {"fla", "fla_pieces"})):
        assert one.name == "layer" and one.cases == series[0].cases and set(one.rivals) == rivals
        assert one.needs == ("gated_delta_rule", "delta_gates")
    assert (forward.directions, training.directions) == (("fwd",), ("fwd_bwd",))


def test_the_suite_needs_fla_and_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"device": "cpu", "skip_check": True, "say": lambda text: None}
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ContractError, match=r"bench fla: needs fla\.ops: .*\[bench\]"):
        run(suite_of("fla"), **options)
    with pytest.raises(ContractError, match="bench fla: FLA's kernels cannot run: tensors are on the CPU"):
        suite.make("chunk_kda", suite.SMALL[0], Pool(torch.device("cpu")))


@pytest.mark.parametrize(("op", "gates"), [("chunk_gated_delta_rule", ()), ("chunk_kda", (16,))])
def test_inputs_are_those_of_a_layer(op: str, gates: tuple[int, ...]) -> None:
    args = suite.inputs(op, suite.SMALL[0], torch.device("cpu"), 1)
    assert args["g"].shape == (1, 70, 1, *gates) and args["beta"].shape == (1, 70, 1)
    assert (args["g"] <= 0).all() and ((args["beta"] > 0) & (args["beta"] < 1)).all()
    assert torch.allclose(args["k"].norm(dim=-1), torch.ones(1, 70, 1))
    assert all(args[name].requires_grad for name in suite.LIMITS) and not args["do"].requires_grad
    again, other = (suite.inputs(op, suite.SMALL[0], torch.device("cpu"), seed) for seed in (1, 2))
    assert torch.equal(args["v"], again["v"]) and not torch.equal(args["v"], other["v"])


def test_copies_of_inputs_have_different_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "triton_cannot_run", lambda device: None)
    monkeypatch.setattr(suite, "copies_for", lambda nbytes, device: 3)
    first, second, third = suite.make("chunk_kda", suite.SMALL[0], Pool(torch.device("cpu")))
    assert not torch.equal(first["v"], second["v"]) and not torch.equal(second["v"], third["v"])


def test_gradients_too_far_from_those_of_fla_are_not_timed() -> None:
    gen = torch.Generator().manual_seed(0)
    known = tuple(torch.randn(50, generator=gen) for _ in suite.LIMITS)
    right = suite.Agreement("chunk_kda", known)
    of_fla = dict.fromkeys("qkv", 0.008) | {"g": 0.02, "beta": 0.02}  # in its tests
    assert of_fla == suite.LIMITS
    assert right.error("fwd_bwd", (torch.ones(3), *known)) == 0.0
    one = 1e-3 * (torch.arange(50) == 7)
    assert right.error("bwd", (*known[:4], known[4] - one)) == pytest.approx(1e-3, rel=1e-2)
    for at, (name, limit) in enumerate(suite.LIMITS.items()):

        def changed(factor: float, at: int = at) -> tuple[torch.Tensor, ...]:
            return tuple(t * factor if i == at else t for i, t in enumerate(known))

        assert right.error("bwd", changed(1 + 0.9 * limit)) > 0
        for wrong in (1 + 1.1 * limit, float("nan")):
            with pytest.raises(
                CheckFailed, match=f"the gradient of {name} of chunk_kda is .* more than {limit}"
            ):
                right.error("bwd", changed(wrong))


@pytest.mark.parametrize(("passed", "why"), [({}, "it was not called"), ({"a reason": 1}, "a reason")])
def test_what_isobit_does_not_serve_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, passed: dict[str, int], why: str
) -> None:
    on = SimpleNamespace(served=0, passed=Counter(passed))
    monkeypatch.setattr(suite.fla, "enable", lambda backend: contextlib.nullcontext(on))
    monkeypatch.setattr(suite, "both", lambda args: None)
    monkeypatch.setattr(suite, "backward", lambda args: ())
    args = suite.inputs("chunk_kda", suite.SMALL[0], torch.device("cpu"), 1)
    with pytest.raises(CheckFailed, match=f"isobit has not served chunk_kda, so nothing is timed: {why}"):
        suite.agreement(args)


def test_calls_that_fla_refuses_are_noted_and_the_rest_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    args = suite.inputs("chunk_kda", suite.SMALL[0], torch.device("cpu"), 1)

    def refuses(error: Exception) -> None:
        def raising(args: Any) -> Any:
            raise error

        monkeypatch.setattr(suite, "backward", raising)

    refuses(RuntimeError("this Triton produces incorrect results"))
    with pytest.raises(NotHere, match="FLA without isobit does not run: this Triton produces incorrect"):
        suite.agreement(args)
    refuses(torch.OutOfMemoryError("full"))
    with pytest.raises(torch.OutOfMemoryError):
        suite.agreement(args)


def test_bytes_are_of_inputs_and_results() -> None:
    gdn, kda = (suite.cost(op, suite.CASES[0].dims, torch.bfloat16) for op in suite.GATES_OF_FEATURES)
    heads = 8192 * 16
    assert gdn.bytes("bwd") == heads * (7 * 256 + 2 * 8) and gdn.bytes("fwd_bwd") == heads * (
        11 * 256 + 3 * 8
    )
    assert kda.bytes("bwd") == heads * (7 * 256 + 2 * (4 * 128 + 4)) and kda.flops("bwd") == 0


def a_layer() -> tuple[suite.LastHead, tuple[torch.Tensor, ...]]:
    """The truth that the suite compares with, and the results of isobit's recurrence in fp64 on all heads."""
    (args,) = suite.make_layer(suite.SMALL_LAYER[0], Pool(torch.device("cpu")))[:1]
    wide = {n: t.double().requires_grad_() for n, t in args.items()}
    g = -wide["A_log"].exp() * torch.nn.functional.softplus(wide["g"] + wide["dt_bias"])
    given = {n: wide[n] for n in ("q", "k", "v")} | {"g": g, "beta": wide["beta"].sigmoid()}
    o, _ = isobit.gated_delta_rule(**given, use_qk_l2norm_in_kernel=True, backend="reference")
    gradients = torch.autograd.grad(o, list(wide.values()), cotangent_like(args["v"]).double())
    return suite.truth_of_layer(args), (o.detach(), *gradients)


def served_here(backend: str, whole: str | None = None) -> Any:
    return contextlib.nullcontext(SimpleNamespace(served=1, passed=Counter()))


def test_a_layer_is_compared_with_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite.fla, "enable", served_here)
    monkeypatch.setattr(suite, "by_fla", lambda args: args["v"])
    truth, right = a_layer()
    assert tuple(truth.known) == ("o", *suite.INPUTS[:5]) == tuple(suite.LIMITS_OF_LAYER)
    assert truth.error("fwd_bwd", right) < 1e-9 and truth.error("fwd", right[:1]) < 1e-9
    for at, (name, limit) in enumerate(suite.LIMITS_OF_LAYER.items()):
        for factor in (1 + 1.1 * limit, float("nan")):
            wrong = [t * factor if i == at else t for i, t in enumerate(right)]
            with pytest.raises(CheckFailed, match=rf"{name} of a layer is .* from fp64, more than {limit}"):
                truth.error("fwd_bwd", tuple(wrong))


def test_a_layer_that_isobit_does_not_serve_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    on = SimpleNamespace(served=0, passed=Counter({"a reason": 1}))
    monkeypatch.setattr(suite.fla, "enable", lambda backend, whole: contextlib.nullcontext(on))
    monkeypatch.setattr(suite, "by_fla", lambda args: args["v"])
    with pytest.raises(CheckFailed, match=r"isobit has not served chunk_gated_delta_rule.*: a reason"):
        a_layer()


def test_where_fla_refuses_its_backward_its_pieces_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, training = suite_of("fla").series
    here = {"case": training.cases[0], "device": torch.device("cpu"), "direction": "fwd_bwd", "options": ()}
    for refused in (None, "refused"):
        monkeypatch.setattr(suite, "refused_by_fla", lambda refused=refused: refused)
        timed = {n for n, rival in training.rivals.items() if rival.why_not(**here) is None}
        assert timed == {"fla" if refused is None else "fla_pieces"}


def test_the_goals_are_to_be_no_slower() -> None:
    def row(op: str, direction: str, impl: str, ms: float) -> dict[str, Any]:
        kind = {"op": op, "case": "B=1 T=8192 H=16 D=128 bf16", "direction": direction, "method": "graph"}
        return dict.fromkeys(ROW) | kind | {"impl": impl, "ms": ms}

    rows = [
        row("chunk_kda", "bwd", "isobit", 1.0), row("chunk_kda", "bwd", "fla", 1.2),
        row("chunk_kda", "fwd_bwd", "isobit", 2.0), row("chunk_kda", "fwd_bwd", "fla", 1.9),
    ]  # fmt: skip
    goals = suite_of("fla").goals
    found = {entry["what"]: (entry["met"], entry["cells"]) for entry in summary(rows, "fla", goals)}
    assert {what: entry for what, entry in found.items() if entry[1]} == {
        "chunk_kda, bwd": (True, 1),
        "chunk_kda, fwd_bwd": (False, 1),
    }


def test_its_autotuner_forgets_what_it_chose_in_memory_and_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """With results cached on disk, a choice made for one length would serve for all."""

    @triton.autotune([triton.Config({"BV": 32}), triton.Config({"BV": 64})], key=["n"], cache_results=True)
    @triton.jit
    def kernel(n, BV):  # type: ignore[no-untyped-def]
        pass

    kernel.cache_results = True  # where Triton interprets, it caches nothing
    kernel.cache[(1, "bf16")] = kernel.configs[0]
    module = SimpleNamespace(heuristics=SimpleNamespace(fn=kernel), other=3)
    for name in ("fla.ops.common.chunk_delta_h", "fla.ops.common", "fla.ops", "fla"):
        monkeypatch.setitem(sys.modules, name, module)
        module = SimpleNamespace(**{name.rpartition(".")[2]: module})
    forget_tuning()
    assert not kernel.cache and not kernel.cache_results
    assert kernel.do_bench.keywords == {"warmup": 5, "rep": 20}
