"""The benchmark of `grpo_loss`: rivals that compute the same loss, its truth, and goals."""

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from isobit.bench.cases import parse_case, series_of
from isobit.bench.goals import summary
from isobit.bench.implementations import calls_of
from isobit.bench.report import ROW
from isobit.bench.runner import run
from isobit.bench.suites import goals_of
from isobit.frame.op import known_op
from isobit.ops.grpo_loss import rivals
from isobit.spec.options import varied
from isobit.spec.proof import Case
from isobit.spec.series import Pool

OP = known_op("grpo_loss")
SERIES = {one.name: one for one in series_of(OP)}


def test_what_is_declared() -> None:
    suffixes = ("", "_half", "_tenth", "_given", "_given_half", "_given_tenth")
    assert list(SERIES) == [f"grpo_loss{suffix}" for suffix in suffixes]
    for name, series in SERIES.items():
        sizes = [(*case.dims.values(), case.dtype) for case in series.cases]
        fp16 = [(32, 256, V, torch.float16) for V in (32768, 50257, 131072)]
        assert sizes == [*fp16, (8, 1024, 151936, torch.bfloat16)]
        assert set(series.rivals) == {"native", "liger" if "given" in name else "torch.compile"}


def args_of(name: str, **options: Any) -> dict[str, Any]:
    case = Case({"B": 4, "T": 20, "V": 33}, torch.float32, data="random", options=options)
    return SERIES[name].make(varied(case, SERIES[name].options), Pool(torch.device("cpu")))[0]


def test_the_timed_inputs_are_partly_clipped() -> None:
    """Or a rival that never clips would do as well."""
    _, stats = rivals.grpo_loss(**args_of("grpo_loss"))
    assert stats["clip_fraction_low"] > 0 and stats["clip_fraction_high"] > 0


@pytest.mark.parametrize("name", SERIES)
@pytest.mark.parametrize("direction", ["fwd", "bwd", "fwd_bwd"])
def test_ours_and_native_are_the_same_loss(name: str, direction: str) -> None:
    args, ours = args_of(name), SERIES[name].call
    judge = rivals.known(args)

    def wrong(args: dict[str, Any]) -> Tensor:
        return rivals.native(args | {"clip_low": 0.1})

    for function, given, right in (
        (lambda args: ours(args, None), args, True),
        (rivals.native, rivals._of_live_tokens(args), True),
        (wrong, rivals._of_live_tokens(args), False),
    ):
        with torch.set_grad_enabled(direction != "fwd"):
            (call,) = calls_of(function, [given], ("policy_logits",), direction)
            error = judge.error(direction, call())
        assert error is not None and (error < 1e-6) is right, error


def test_liger_computes_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a function in place of Liger's, as its documentation describes it."""

    def triton_grpo_loss(
        logits: Tensor, old_logp: Tensor, ref_logp: Tensor, completion_ids: Tensor, advantages: Tensor,
        completion_mask: Tensor, temperature: float, beta: float, eps_low: float, eps_high: float,
        inplace: bool, loss_type: str, reduce: bool,
    ) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
        assert not inplace and reduce and loss_type == "bnpo"  # the mean over tokens
        assert logits.is_contiguous() and completion_ids.is_contiguous() and completion_mask.is_contiguous()
        assert advantages.shape == (4,) and completion_mask.dtype == torch.int32
        given = {"policy_logits": logits[:, :-1], "ref_logp": ref_logp, "token_ids": completion_ids}
        given |= {"old_logp": old_logp, "group_advantages": advantages, "live": completion_mask.float()}
        given |= {"clip_low": eps_low, "clip_high": eps_high, "beta": beta, "temperature": temperature}
        return rivals.native(given), []

    module = types.ModuleType("liger_kernel.transformers.grpo_loss")
    module.triton_grpo_loss = triton_grpo_loss  # type: ignore[attr-defined]
    for part in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.grpo_loss", module)
    args = args_of("grpo_loss_given_half")
    prepared = rivals._liger_inputs(args)
    assert prepared["policy_logits"].shape == (4, 21, 33)
    (call,) = calls_of(rivals._liger, [prepared], ("policy_logits",), "fwd_bwd")
    error = rivals.known(args).error("fwd_bwd", call())
    assert error is not None and error < 1e-6


def test_it_can_be_timed() -> None:
    report = run(
        "grpo_loss", [parse_case("B=2,T=3,V=33,dtype=fp32", OP)], device="cpu", repetitions=2,
        skip_check=True, impls=["isobit", "native"], directions=["fwd_bwd"], say=lambda text: None,
    )  # fmt: skip
    assert {row["op"] for row in report["rows"]} == set(SERIES)
    assert all(row["max_abs"] < 1e-5 for row in report["rows"]) and report["summary"] == []


def test_goals() -> None:
    def met(op: str, direction: str, extra_mb: float = 0.0, **ms: float) -> dict[str, bool]:
        kind = {"op": op, "case": "B=32 T=256 V=50257 fp16", "direction": direction, "method": "graph"}
        kind |= {"floor_ms": 0.1, "extra_mb": extra_mb}
        found = [dict.fromkeys(ROW) | kind | {"impl": name, "ms": each} for name, each in ms.items()]
        entries = summary(found, None, goals_of("grpo_loss"))
        return {entry["against"]: entry["met"] for entry in entries if entry["cells"]}

    others = {"torch.compile": 1.0}
    forward = met("grpo_loss", "fwd", isobit=0.115, **others)
    assert forward == {"1.08 floors + 8 us": True, "torch.compile": True, "1 MB": True}
    assert not met("grpo_loss_tenth", "fwd", isobit=0.117)["1.08 floors + 8 us"]
    both = met("grpo_loss_half", "fwd_bwd", 1.5, isobit=0.119, **others)
    assert both == {"1.12 floors + 8 us": True, "torch.compile": True, "1 MB": False}
    assert not met("grpo_loss_given", "fwd", isobit=1.0, liger=0.99)["liger"]
