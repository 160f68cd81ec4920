"""Benchmarks of mixtures of experts, on a CPU with small sizes: the ops, and the suite of a whole layer."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.suites import moe_layer
from isobit.bench.cases import Subject, series_of, suite_of
from isobit.bench.check_gate import CheckFailed
from isobit.bench.goals import summary
from isobit.bench.report import ROW
from isobit.bench.runner import run
from isobit.bench.suites import goals_of
from isobit.bench.timing import ONCE_CALLS
from isobit.frame.op import known_op
from isobit.spec.series import Pool

CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:isobit. det_linear"),
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]


def timed(of: str | Subject, **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"device": "cpu", "repetitions": 2, "skip_check": True, "say": lambda t: None}
    return run(of, **(defaults | options))


# Ops


def test_grouped_products_are_timed_next_to_those_of_pytorch() -> None:
    report = timed("det_grouped_linear")
    kinds = {"det_grouped_linear": "fwd", "det_grouped_linear_few": "fwd", "det_grouped_linear_dx": "dx"}
    kinds |= {"det_grouped_dw": "dw", "det_grouped_dw_narrow": "dw"}
    assert [(row["op"], row["direction"], row["impl"]) for row in report["rows"]] == [
        (op, direction, impl)
        for op, direction in kinds.items()
        for impl in ("isobit", "torch._grouped_mm", "torch.mm_loop")
    ]
    assert report["notes"] == [] and report["against"] == "torch._grouped_mm"
    rows = [row for row in report["rows"] if row["direction"] != "dw"]
    assert all(row["max_abs"] < 0.1 for row in rows)
    assert all(row["equal_bits"] is not None for row in rows if row["impl"] != "isobit")


def test_the_gradient_of_weights_is_the_one_that_autograd_gives() -> None:
    """What is timed in bf16 is the backward of a layer, and in fp32 the sum that it rounds."""
    wide, narrow = (
        next(one for one in series_of(known_op("det_grouped_dw")) if one.name == name)
        for name in ("det_grouped_dw", "det_grouped_dw_narrow")
    )
    assert narrow.small is not None
    (args,) = narrow.make(narrow.small[0], Pool(CPU))
    rounded = narrow.call(args, None)
    exact = wide.call({name: args[name] for name in ("x", "dy", "offsets")}, None)
    assert exact.dtype == torch.float32 and torch.equal(rounded, exact.to(torch.bfloat16))


@pytest.mark.parametrize(("op", "names"), [("route", ["route"]), ("combine", ["combine", "spread"])])
def test_integers_among_the_results_have_no_gradient(op: str, names: list[str]) -> None:
    rows = timed(op, directions=["bwd", "fwd_bwd"], impls=["isobit", "eager"])["rows"]
    assert [(row["op"], row["direction"], row["impl"]) for row in rows] == [
        (name, direction, impl)
        for name in names
        for direction in ("bwd", "fwd_bwd")
        for impl in ("isobit", "eager")
    ]


def row(op: str, case: str, direction: str, impl: str, ms: float, **more: float) -> dict[str, Any]:
    kind = {"op": op, "case": case, "direction": direction, "impl": impl, "ms": ms, "method": "graph"}
    return dict.fromkeys(ROW) | kind | {"floor_ms": 1.0} | more


def test_the_goals_of_grouped_products() -> None:
    case, theirs = "M=64 E=4 K=8 N=8 bf16", "torch._grouped_mm"
    rows = [
        *(row("det_grouped_linear", case, "fwd", *one) for one in (("isobit", 1.0), (theirs, 1.05))),
        *(row("det_grouped_linear_dx", case, "dx", *one) for one in (("isobit", 1.0), (theirs, 1.02))),
        # 1.2 times as fast, but at 0.91 of the bandwidth
        *(row("det_grouped_linear_few", case, "fwd", *one) for one in (("isobit", 1.1), (theirs, 1.32))),
        *(row("det_grouped_dw_narrow", case, "dw", *one) for one in (("isobit", 1.0), (theirs, 0.94))),
        *(row("det_grouped_dw", case, "dw", *one) for one in (("isobit", 1.2), (theirs, 0.5))),
    ]
    found = summary(rows, theirs, goals_of("det_grouped_linear"))
    assert [(entry["cells"], entry["met"]) for entry in found] == [
        (2, True),
        (1, True),
        (1, False),
        (1, True),
    ]
    rows[0]["ms"] = 1.1
    rows[4]["ms"] = 1.2
    assert [entry["met"] for entry in summary(rows, theirs, goals_of("det_grouped_linear"))][:2] == [
        False
    ] * 2


# A whole layer


@pytest.fixture(scope="module")
def args() -> dict[str, Any]:
    series = suite_of("moe_layer").series[0]
    assert series.small is not None
    (found,) = series.make(series.small[0], Pool(CPU))
    return found


def one_layer() -> Subject:
    suite = suite_of("moe_layer")
    return replace(suite, series=suite.series[:2])


class LigersExperts:
    """Stands for Liger's function, whose kernels need a GPU: the same arguments in the same order."""

    @staticmethod
    def apply(x: Tensor, gate_up: Tensor, down: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        assert experts.dtype == torch.int32 and weights.shape == experts.shape
        gate, up = torch.einsum("tkfd,td->tkf", gate_up[experts], x).chunk(2, -1)
        y = torch.einsum("tkdf,tkf->tkd", down[experts], torch.nn.functional.silu(gate) * up)
        return (y * weights[..., None]).sum(1)


def test_a_layer_is_timed_next_to_all_rivals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's is left out on a CPU, installed or not."""
    pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_moe", SimpleNamespace())
    report = timed(one_layer())
    rows = {(row["direction"], row["impl"]): row for row in report["rows"]}
    impls = ["isobit", *(name for name in moe_layer.RIVALS if name != "liger")]
    assert list(rows) == [(direction, impl) for direction in ("fwd", "fwd_bwd") for impl in impls]
    assert report["notes"] == ["liger: its kernels need a GPU"]
    assert all(row["max_abs"] < 0.1 for row in rows.values())
    assert set(report["stamp"]["kernels"]) == {
        "det_gemm", "route", "combine", "det_grouped_linear", "swiglu",
    }  # fmt: skip


def test_rivals_compute_the_same_layer_and_the_same_gradients(
    args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    experts = SimpleNamespace(LigerFusedMoEFunction=LigersExperts)
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_moe", experts)

    def results(function: Any, given: dict[str, Any]) -> list[torch.Tensor]:
        leaves = {name: given[name].detach().requires_grad_() for name in moe_layer.INPUTS}
        out = function(given | leaves)
        weight = torch.sin(torch.arange(out.numel()).view_as(out).float())
        return [out, *torch.autograd.grad((out.float() * weight).sum(), list(leaves.values()))]

    ours = results(moe_layer.layer, args)
    for rival in moe_layer.RIVALS.values():
        for mine, other in zip(ours, results(rival.function, rival.prepare(args)), strict=True):
            assert (mine - other).norm() < 0.02 * mine.norm(), rival.name


def test_without_transformers_its_rivals_are_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moe_layer, "cannot_import", lambda module: "not installed")
    report = timed(one_layer(), directions=["fwd"])
    assert [row["impl"] for row in report["rows"]] == ["isobit", "torch._grouped_mm", "torch.mm_loop"]
    left_out = ("transformers.grouped_mm", "transformers.eager", "liger")
    assert report["notes"] == [f"{name}: not installed" for name in left_out]


def test_a_wrong_layer_is_not_timed(args: dict[str, Any]) -> None:
    judge = moe_layer.judge(args)
    assert judge is not None and len(judge.tokens) > 4
    out = moe_layer.layer(args)
    assert judge.error("fwd", (out,)) < moe_layer.CLOSE
    with pytest.raises(CheckFailed, match=r"the output differs by .* from fp64"):
        judge.error("fwd", (out * 1.2,))
    with pytest.raises(CheckFailed, match="differs by nan"):
        judge.error("fwd", (out * float("nan"),))
    with pytest.raises(CheckFailed, match="a gradient is not finite"):
        judge.error("fwd_bwd", (out, out * float("inf")))
    even = args | {"router": torch.zeros_like(args["router"])}  # all experts are equal
    assert moe_layer.judge(even) is None


def test_numbers_of_tokens_come_once_at_one_case() -> None:
    series = suite_of("moe_layer").series[0]
    usual = moe_layer._case(moe_layer.USUAL, 4, 2, 16, 8)
    found = [len(given["x"]) for given in series.new(usual, Pool(CPU))]
    assert len(set(found)) == len(found) >= ONCE_CALLS and moe_layer.USUAL not in found
    assert series.new(moe_layer._case(256, 4, 2, 16, 8), Pool(CPU)) == []
    assert any(case.dims["N"] == moe_layer.USUAL for case in series.core)


def test_the_goals_of_a_layer() -> None:
    case = "N=4096 E=128 k=8 D=2048 F=768 bf16"
    figures = {"isobit": (1.0, 90.0, 50.0), moe_layer.BASELINE: (1.2, 91.0, 50.0)}
    figures |= {moe_layer.EAGER: (9.0, 80.0, 900.0), "isobit:new": (1.0, 90.0, 101.0)}
    rows = [
        row(f"qwen3-30b-a3b-{moe_layer.WORDS[direction]}", case, direction, impl, ms, peak_mb=mb, host_us=us)
        for direction in ("fwd", "fwd_bwd")
        for impl, (ms, mb, us) in figures.items()
    ]
    goals = suite_of("moe_layer").goals
    found = {entry["what"]: entry["met"] for entry in summary(rows, moe_layer.BASELINE, goals)}
    assert [what for what, met in found.items() if not met] == ["host time with a new number of tokens"]
    for each in rows:
        if each["impl"] == moe_layer.BASELINE:
            each |= {"ms": 1.1, "peak_mb": 90.0, "host_us": 49.0}
    found = {entry["what"]: entry["met"] for entry in summary(rows, moe_layer.BASELINE, goals)}
    assert [what for what, met in found.items() if met] == [
        f"{what}, next to {moe_layer.EAGER}" for what in moe_layer.WORDS.values()
    ]
