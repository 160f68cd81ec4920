"""The benchmarks of the gated delta rule: what is declared, the errors of gradients, rivals that cannot run,
and goals."""

import math
import sys
from collections import Counter
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.goals.gated_delta_rule import GOALS
from benchmarks.goals.gated_delta_rule_step import GOALS as GOALS_OF_STEPS
from isobit.bench.cases import subject_of
from isobit.bench.goals import summary
from isobit.bench.implementations import calls_of
from isobit.bench.report import ROW
from isobit.bench.runner import run
from isobit.frame.op import known_op
from isobit.ops.delta_rule.proof.packings import lengths_of
from isobit.ops.gated_delta_rule import rivals
from isobit.ops.gated_delta_rule.rivals import calls
from isobit.ops.gated_delta_rule_step import rivals as of_steps
from isobit.spec.proof import Case
from isobit.spec.series import Pool
from isobit.spec.truth import Errors

SERIES = {one.name: one for one in rivals.SERIES}
TRAIN = SERIES["gated_delta_rule_train"]
CPU = torch.device("cpu")


# What is declared


def test_both_directions_are_timed_over_the_sizes_of_fla() -> None:
    sizes = {(case.dims["B"], case.dims["H"], case.dims["T"]) for case in SERIES["gated_delta_rule"].cases}
    wanted = {(B, H, T) for B in (1, 2, 4) for H in (16, 32) for T in (2048, 4096, 8192, 16384)}
    assert sizes == wanted and list(TRAIN.cases) == list(SERIES["gated_delta_rule"].cases)
    assert TRAIN.directions == ("fwd_bwd",) and TRAIN.inputs == ("q", "k", "v", "g", "beta")
    for case in SERIES["gated_delta_rule_packed"].cases:
        assert sum(lengths_of(case.options["lengths"])) == case.dims["T"]
    assert list(RIVALS := TRAIN.rivals) == ["fla", "fla_pieces", "flash_qla"]
    assert not RIVALS["fla_pieces"].judged and RIVALS["fla"].judged


def test_decoding_is_timed_at_three_places_and_over_a_chunk() -> None:
    names = [one.name.removeprefix("gated_delta_rule_step_") for one in of_steps.SERIES]
    assert names == ["0", "31", "63", "chunk"]
    for one in of_steps.SERIES:
        assert [(case.dims["B"], case.dims["HV"]) for case in one.cases] == [
            (1, 32), (8, 32), (64, 32), (256, 32)
        ]  # fmt: skip
    *_, last, chunk = (one.cost(one.cases[0].dims, torch.bfloat16).fwd_bytes for one in of_steps.SERIES)
    assert 32 * last < chunk < 64 * last  # rows before the last have fewer before them


def test_a_run_on_a_cpu_times_every_series() -> None:
    said: list[str] = []
    report = run(
        "gated_delta_rule", device="cpu", repetitions=2, impls=["isobit"], skip_check=True, say=said.append
    )
    rows = report["rows"]
    assert [row["op"] for row in rows] == list(SERIES)
    assert Counter(row["direction"] for row in rows) == {"fwd": 4, "fwd_bwd": 3}
    assert all(0 < row["rel_rms"] < 0.01 for row in rows)


# Errors of gradients


@pytest.mark.parametrize("changed", range(6))
def test_the_worst_of_output_and_gradients_is_reported(changed: int) -> None:
    dims = {"B": 2, "T": 5, "H": 1, "HV": 2, "K": 16, "V": 16}
    case = Case(dims, torch.float32, data="random", options={"mode": "gn"})
    (args, *_) = TRAIN.make(case, Pool(CPU))
    judge = TRAIN.judge(args)
    (call,) = calls_of(lambda given: TRAIN.call(given, "reference"), [args], TRAIN.inputs, "fwd_bwd")
    result = list(call())
    assert judge is not None and len(result) == 6
    good = judge.error("fwd_bwd", tuple(result))
    assert isinstance(good, Errors) and 0 < good.rel_rms < 1e-5
    result[changed] = result[changed].detach().clone()
    result[changed][0, 1, -1] += 2.0
    worse = judge.error("fwd_bwd", tuple(result))
    assert isinstance(worse, Errors) and worse.max_abs == pytest.approx(2.0, rel=1e-4)
    result[changed][0, 1, -1] = math.nan
    assert all(map(math.isnan, astuple(judge.error("fwd_bwd", tuple(result)))))  # type: ignore[arg-type]


# Rivals that cannot run


class Tilelang:
    usable = False

    @classmethod
    def can_use(cls) -> bool:
        return cls.usable


def stand_in(monkeypatch: pytest.MonkeyPatch, hopper: bool, newer: bool, name: str) -> None:
    known = SimpleNamespace(IS_NVIDIA_HOPPER=hopper, TRITON_ABOVE_3_4_0=True, TRITON_ABOVE_3_7_1=newer)
    backends = SimpleNamespace(**{name: Tilelang})
    modules = {"fla.utils": known, "fla.ops.common.backends": backends}
    for module in ("fla", "fla.ops", "fla.ops.common", calls.FLA):
        modules[module] = SimpleNamespace()
    for module, content in modules.items():
        monkeypatch.setitem(sys.modules, module, content)


@pytest.mark.parametrize("name", ["CommonTileLangBackend", "TileLangBackend"])  # of 0.6.0 and of 0.5.2
def test_pieces_are_timed_where_fla_refuses_its_backward(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    gpu, case = torch.device("cuda"), TRAIN.cases[0]

    def timed() -> list[str]:
        named = (each for each in ("fla", "fla_pieces") if not TRAIN.rivals[each].available(case, gpu))
        return list(named)

    stand_in(monkeypatch, hopper=True, newer=False, name=name)
    assert timed() == ["fla_pieces"] and "before 3.7.1" in str(calls.refused_by_fla())
    monkeypatch.setattr(Tilelang, "usable", True)
    assert timed() == ["fla"]
    monkeypatch.setattr(Tilelang, "usable", False)
    for hopper, newer in ((True, True), (False, False)):
        stand_in(monkeypatch, hopper, newer, name)
        assert timed() == ["fla"]


def test_flash_qla_is_left_out_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    rival, case = TRAIN.rivals["flash_qla"], TRAIN.cases[0]
    gpu = torch.device("cuda")
    monkeypatch.setitem(sys.modules, "flash_qla", None)
    assert rival.available(case, gpu) is not None
    given: dict[str, Any] = {}

    def called(**args: Any) -> tuple[str, str]:
        given.update(args)
        return "o", "state"

    monkeypatch.setitem(sys.modules, "flash_qla", SimpleNamespace(chunk_gated_delta_rule=called))
    assert rival.available(case, gpu) is None
    narrow = Case(case.dims | {"K": 64}, torch.bfloat16)
    assert rival.available(narrow, gpu) == "needs K = V = 128"
    assert rival.function({"q": 1}) == "o" and given == {"q": 1, "auto_cp": False}
    assert rivals.RIVALS["flash_qla"].function({"q": 1}) == ("o", "state")


# Goals


def rows(op: str, direction: str, B: int = 64, **ms: float) -> list[dict[str, Any]]:
    case = f"B={B} T=1 H=16 HV=32 K=128 V=128 bf16"
    kind = {"op": op, "case": case, "direction": direction, "method": "graph"}
    return [
        dict.fromkeys(ROW) | kind | {"impl": impl, "ms": each, "floor_ms": 0.1, "host_us": each}
        for impl, each in ms.items()
    ]


def met(goals: Any, found: list[dict[str, Any]]) -> dict[tuple[str, str], bool]:
    entries = summary(found, "fla", goals)
    return {
        (e["what"], e["against"]): e["met"] for e in entries
        if e["cells"] and any(e[f"goal_{kind}"] is not None for kind in ("geomean", "least", "most"))
    }  # fmt: skip


def test_training_is_held_against_fla_or_its_pieces() -> None:
    both, host = ("forward and backward", "fla or its pieces"), ("host, both", "fla or its pieces")
    for ms, enough in ((1.0, True), (1.01, False)):
        found = rows("gated_delta_rule_train", "fwd_bwd", isobit=ms, fla_pieces=1.3)
        assert met(GOALS, found) == {both: enough, host: True}
    found = rows("gated_delta_rule_train", "fwd_bwd", isobit=1.0, fla=1.2, fla_pieces=2.0, flash_qla=0.86)
    of_qla = ("forward and backward", "flash_qla")
    assert met(GOALS, found) == {both: False, of_qla: True, host: True}


def test_the_forward_is_held_against_fla_and_flash_qla() -> None:
    found = rows("gated_delta_rule_packed", "fwd", isobit=1.0, fla=1.49, flash_qla=0.91)
    assert met(GOALS, found) == {
        ("forward", "fla"): False, ("forward", "flash_qla"): True, ("host, forward", "fla"): True,
    }  # fmt: skip
    assert met(GOALS, rows("fwd_h", "fwd", isobit=1.0, fla=1.0)) == {("states between chunks", "fla"): True}


def test_decoding_is_held_against_the_recurrence() -> None:
    one = rows("gated_delta_rule_step_31", "fwd", B=1, isobit=1.0, fla=0.99)
    assert met(GOALS_OF_STEPS, one) == {("one sequence", "fla"): False}
    many = rows("gated_delta_rule_step_chunk", "fwd", isobit=1.0, fla=1.6)
    assert met(GOALS_OF_STEPS, many) == {
        ("64 sequences and more", "fla"): True, ("a whole chunk, 64 sequences and more", "fla"): True,
        ("host", "fla"): True,
    }  # fmt: skip
    (floor,) = [e for e in summary(many, "fla", GOALS_OF_STEPS) if e["against"] == "1 floors"]
    assert floor["cells"] == 1 and floor["geomean"] == 0.1


def test_every_goal_of_a_whole_run_has_core_cells() -> None:
    for op, goals in (("gated_delta_rule", GOALS), ("gated_delta_rule_step", GOALS_OF_STEPS)):
        found = [
            row | {"rel_rms": 1.0, "case": case.name}
            for one in subject_of(known_op(op)).series
            for case in one.core
            for row in rows(one.name, one.directions[0], isobit=1, **dict.fromkeys(one.rivals, 1))
        ]
        left = {e["what"] for e in summary(found, "fla", goals) if not e["cells"]}
        assert left == ({"8 sequences"} if "step" in op else set())
