"""The benchmark of matrix products: three kinds of calls in one file, shared weights, bits beside times,
goals, grids, and a check that need not be run twice."""

import dataclasses
import json
import sys
import types
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.goals.det_gemm import GOALS
from isobit import ContractError
from isobit.bench import runner
from isobit.bench.cases import parse_case, series_of
from isobit.bench.check_gate import CheckFailed, CheckGate
from isobit.bench.goals import Goal, cells, sizes_of, summary
from isobit.bench.report import ROW, format_report
from isobit.bench.runner import run
from isobit.check.source_hash import kernel_sha
from isobit.check.stamp import gpu_name
from isobit.frame.op import known_op
from isobit.kernels.hopper import product as hopper_product
from isobit.ops.det_gemm import kernels_hopper, rivals
from isobit.spec.proof import Case
from isobit.spec.series import NotHere, Pool
from publish import charts, tables

GEMM = known_op("det_gemm")
CPU = torch.device("cpu")


def bench(*texts: str, **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "repetitions": 2,
        "skip_check": True,
        "say": lambda text: None,
    }
    found = [parse_case(text, GEMM) for text in texts or ("M=3,K=40,N=24",)]
    return run("det_gemm", found, **(defaults | options))


# Running


def test_four_kinds_of_calls_are_timed_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # it takes half a minute
    report = bench(out_dir=tmp_path)
    assert json.loads((tmp_path / "cpu" / "det_gemm.json").read_text()) == report
    rows = {(row["op"], row["direction"], row["impl"]): row for row in report["rows"]}
    assert set(rows) == {
        ("det_gemm", "fwd", "isobit"), ("det_gemm", "fwd", "torch.mm"),
        ("det_gemm_dx", "dx", "isobit"), ("det_gemm_dx", "dx", "torch.mm"),
        ("det_gemm_dw", "dw", "isobit"), ("det_gemm_dw", "dw", "torch.mm_narrow"),
        *(("det_linear", direction, impl) for direction in ("fwd", "fwd_bwd")
          for impl in ("isobit", "native", "torch.compile")),
    }  # fmt: skip
    assert all(tuple(row) == ROW and row["case"] == "M=3 K=40 N=24 bf16" for row in rows.values())
    assert report["notes"] == [
        "torch.mm_nosplit: needs cuBLAS",
        "batch_invariant_ops: its kernels need a GPU",
        "torch.mm: a product into fp32 needs a GPU",
    ]
    for (op, _, impl), row in rows.items():
        assert row["max_abs"] < (1e-4 if op == "det_gemm_dw" and impl == "isobit" else 0.1)
        products = 3 if row["direction"] == "fwd_bwd" else 1
        assert row["tflops"] == pytest.approx(products * 2 * 3 * 40 * 24 / row["ms"] / 1e9, rel=1e-3)
        # Only products in one dtype can have equal bits; those of one short sum nearly all do.
        compared = impl == "torch.mm"
        assert (row["equal_bits"] is not None) == compared and (not compared or row["equal_bits"] > 0.9)
        assert (row["vs_baseline"] is not None) == (op in ("det_gemm", "det_gemm_dx"))
    forward = rows["det_gemm", "fwd", "isobit"], rows["det_gemm", "fwd", "torch.mm"]
    assert forward[0]["vs_baseline"] == pytest.approx(forward[1]["ms"] / forward[0]["ms"], rel=1e-3)
    assert report["against"] == "torch.mm" and report["summary"] == []  # goals are for GPUs


def test_the_predicted_time_is_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """In our own row, where a backend has a rule: here none has one, and one is put in its place."""
    forward = dataclasses.replace(rivals.FORWARD, predict=lambda backend, args: 0.5 if backend else None)
    monkeypatch.setattr("isobit.ops.det_gemm.rivals.SERIES", [forward])
    report = bench()
    rows = {row["impl"]: row for row in report["rows"]}
    assert rows["isobit"]["predicted_ms"] == 0.5 and "predicted_ms" not in rows["torch.mm"]
    assert "predicted" in format_report(report)


def test_the_predicted_time_of_hopper_is_that_of_its_model() -> None:
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((3, 40), (40, 24)))
    assert rivals.FORWARD.predict("triton", {"a": a, "b": b}) is None
    _, forward = kernels_hopper.choose_tile(3, 24, 40, 1)
    assert rivals.FORWARD.predict("hopper", {"a": a, "b": b}) == 1e-3 * forward
    dw = rivals.SERIES[3]
    _, sums = hopper_product.choose_sum_tile(24, 40, 3, 1)
    assert dw.name == "det_gemm_dw" and dw.predict("triton", {"x": a, "dy": a}) is None
    assert dw.predict("hopper", {"x": a, "dy": a[:, :24]}) == 1e-3 * sums


def test_requested_sizes_are_timed_once() -> None:
    cases = [parse_case("M=3,K=40,N=24", GEMM)]
    jobs = runner._jobs("det_gemm", rivals.SERIES, cases, ["fwd"], CPU, {}, False)
    assert [series.name for series, _, _ in jobs] == ["det_gemm", "det_linear"]
    jobs = runner._jobs("det_gemm", rivals.SERIES, None, ["fwd"], torch.device("cuda"), {}, True)
    assert "det_gemm_layers" in {series.name for series, _, _ in jobs}


def test_a_direction_chooses_a_kind_of_call() -> None:
    report = bench(directions=["dx"], impls=["isobit"])
    assert [row["op"] for row in report["rows"]] == ["det_gemm_dx"]
    with pytest.raises(ContractError, match="unknown direction 'bwd'; known: fwd, dx, dw, fwd_bwd"):
        bench(directions=["bwd"])


def test_ops_of_one_folder_are_timed_together() -> None:
    assert series_of(known_op("det_linear")) == series_of(GEMM)


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (torch.OutOfMemoryError("no"), "M=4 K=16 N=8 bf16 does not fit into memory"),
        (NotHere("a library refuses"), "a library refuses"),
    ],
)
def test_what_cannot_be_timed_here_is_a_note(
    monkeypatch: pytest.MonkeyPatch, error: Exception, note: str
) -> None:
    forward = rivals.SERIES[0]

    def make(case: Case, pool: Pool) -> list[Any]:
        if case.dims["M"] == 4:
            raise error
        return forward.make(case, pool)

    series = dataclasses.replace(forward, make=make)
    monkeypatch.setattr("isobit.ops.det_gemm.rivals.SERIES", [series])
    report = bench("M=4,K=16,N=8", "M=2,K=16,N=8", impls=["isobit"])
    assert [row["case"] for row in report["rows"]] == ["M=2 K=16 N=8 bf16"]
    assert report["notes"] == [f"det_gemm: {note}"]


def test_the_declared_cells() -> None:
    forward, layers, dx, dw, cold, cold_dx, cold_dw, layer = series_of(GEMM)
    assert [len(s.cases) for s in (forward, layers, dx, dw, layer)] == [81, 210, 27, 27, 2]
    assert [len(s.cases) for s in (cold, cold_dx, cold_dw)] == [190, 18, 12]
    assert [s.directions for s in (cold, cold_dx, cold_dw)] == [("fwd",), ("dx",), ("dw",)]
    assert not any(case in forward.cases for case in layers.cases)
    assert {c.dims["M"] for c in layers.core} >= {8, 24, 48, 80, 112, 192, 320, 640, 768, 3000}
    assert min(c.dims["M"] for c in dx.cases) == min(c.dims["M"] for c in dw.cases) == 1024
    # Cases with the same weight are adjacent, so that it is drawn once.
    keys = [forward.shared(case) for case in forward.cases]
    assert len(dict.fromkeys(keys)) == 9 == 1 + sum(a != b for a, b in pairwise(keys))


def test_costs_count_every_operand_once() -> None:
    dims = {"M": 2, "K": 3, "N": 5}
    forward, layers, dx, dw, *cold, layer = (s.cost(dims, torch.bfloat16) for s in rivals.SERIES)
    assert layers == forward and cold == [forward, dx, dw]
    assert layer.flops("fwd_bwd") == 3 * forward.flops("fwd") and layer.bytes("fwd") == forward.bytes("fwd")
    assert forward.bytes("fwd") == dx.bytes("dx") == 2 * (6 + 15 + 10)
    assert dw.bytes("dw") == 2 * (6 + 10) + 4 * 15
    assert forward.flops("fwd") == dx.flops("dx") == dw.flops("dw") == 2 * 2 * 3 * 5


def test_weights_are_shared_and_dropped() -> None:
    pool = Pool(CPU)
    pool.keep("layer 1")
    weight = pool.normal("weight", 8, 4, dtype=torch.bfloat16)
    assert pool.normal("weight", 3, 4, dtype=torch.bfloat16).data_ptr() == weight.data_ptr()
    assert len(pool.normal("weight", 9, 4, dtype=torch.bfloat16)) == 9  # more rows: drawn again
    pool.keep("layer 1")
    kept = pool.normal("weight", 9, 4, dtype=torch.bfloat16)
    pool.keep("layer 2")
    assert pool.normal("weight", 9, 5, dtype=torch.bfloat16).shape == (9, 5)
    assert kept.shape == (9, 4)


def test_splitting_k_is_forbidden_for_a_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul: Any = torch.backends.cuda.matmul
    library = ["cublas"]

    def preferred(name: str | None = None) -> str:
        if name is not None:
            library[0] = name
        return library[0]

    def state() -> tuple[Any, ...]:
        names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
        return library[0], *(getattr(matmul, n + more) for n in names for more in ("", "_split_k"))

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", preferred)
    before, seen = state(), []
    unsplit = rivals.unsplit(lambda args: seen.append(state()) or args["a"])
    unsplit({"a": torch.zeros(1)})
    assert seen == [("cublaslt", False, False, False, False)] and state() == before
    with pytest.raises(KeyError):
        rivals.unsplit(rivals.mm)({})
    assert state() == before


def test_batch_invariant_ops_is_a_rival_where_it_is_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    (case, *_), gpu = rivals.FORWARD.cases, torch.device("cuda")
    rival = rivals.FORWARD.rivals["batch_invariant_ops"]
    monkeypatch.setitem(sys.modules, "batch_invariant_ops", None)  # as if it were not installed
    assert rival.why_not(case, CPU, "fwd", ()) == "its kernels need a GPU"
    where = "pip install git+https://github.com/thinking-machines-lab/batch_invariant_ops"
    assert rival.why_not(case, gpu, "fwd", ()) == f"not installed ({where})"
    module = types.ModuleType("batch_invariant_ops")
    module.matmul_persistent = lambda a, b, bias=None: (a, b, bias)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "batch_invariant_ops", module)
    assert rival.why_not(case, gpu, "fwd", ()) is None and rival.function({"a": 1, "b": 2}) == (1, 2, None)
    assert rival.why_not(case, gpu, "fwd", ("out",)) == "does not take out"  # it returns the operands' dtype


# A check that need not be run twice


def proven(op: str, *laws: str, fail: int = 0, backend: str = "model") -> dict[str, Any]:
    cases = [{"law": law, "status": "ok"} for law in laws]
    return {"op": op, "candidate": backend, "numerics": "chain16", "fail": fail, "cases": cases}


def test_a_fresh_report_spares_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from isobit.check import runner

    path, checked = tmp_path / "check.json", []
    here = {"kernels": {"det_gemm": kernel_sha("det_gemm")}, "gpu": gpu_name(CPU)}
    gemm, dw = (proven(op, "accuracy", "invariant") for op in ("det_gemm", "det_gemm_dw"))

    def passed(op: str, device: torch.device, backend: str, options: Any) -> list[str]:
        checked.append((op, backend))
        return []

    def after(stamp: dict[str, str], *candidates: Any) -> Any:
        path.write_text(json.dumps({"stamp": stamp, "candidates": candidates}))
        return bench(skip_check=False, directions=["dx", "dw"], impls=["isobit"], check_reports=[path])

    monkeypatch.setattr(runner, "quick_check", passed)
    assert after(here, gemm, dw)["stamp"]["checked"] is True and checked == []
    after(here, gemm, proven("det_gemm_dw", "accuracy"))
    assert checked == [("det_gemm_dw", "model")]  # of whose bits the report says nothing
    after(here, proven("det_gemm", "accuracy", "invariant", backend="hopper"), dw)
    assert checked[1:] == [("det_gemm", "model")]  # a report on another backend says nothing of this one
    checked.clear()
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"stamp": here, "candidates": [dw]}))
    after(here, gemm)
    bench(skip_check=False, directions=["dx", "dw"], impls=["isobit"], check_reports=[path, other])
    assert checked == [("det_gemm_dw", "model")]  # without the second report
    checked.clear()
    gate = CheckGate(CPU, [path], skip=False, say=lambda line: None)
    after(here, gemm, dw)
    gate.check("det_gemm", "model", {"mask": 0.5})
    assert checked == [("det_gemm", "model")]  # no case of the report has a mask
    gemm["cases"][0]["options"] = {"mask": 0.1, "ids": "int32"}
    after(here, gemm, dw)
    gate.check("det_gemm", "model", {"mask": 0.25})
    assert len(checked) == 1
    gate.check("det_gemm", "model", {"mask": 0.25, "bias": "own"})
    assert len(checked) == 2
    with pytest.raises(CheckFailed, match="det_gemm on model fails its check in "):
        after(here, proven("det_gemm", "accuracy", "invariant", fail=2))
    with pytest.raises(ContractError, match="written by other kernels or on another device"):
        after(here | {"kernels": {"det_gemm": "another"}}, gemm, dw)
    path.write_text("[]")
    with pytest.raises(ContractError, match="not a report of isobit check"):
        bench(skip_check=False, check_reports=[path])


# Goals and grids


def a_row(op: str, M: int, N: int, impl: str, ms: float, equal: float | None = None) -> dict[str, Any]:
    known = {"op": op, "case": f"M={M} K=16 N={N} bf16", "direction": "fwd", "impl": impl, "method": "graph"}
    figures = {"ms": ms, "ms_q25": ms, "ms_q75": ms, "floor_ms": 0.5, "equal_bits": equal}
    return dict.fromkeys(ROW) | known | figures


def a_cell(op: str, M: int, N: int, share: float, equal: float | None = 1.0) -> list[dict[str, Any]]:
    return [a_row(op, M, N, "isobit", 1.0 / share), a_row(op, M, N, "torch.mm", 1.0, equal)]


ROWS = [
    *a_cell("det_gemm", 1, 8, 0.5, equal=0.999),
    *a_cell("det_gemm", 1, 32, 0.8),
    *a_cell("det_gemm", 4096, 8, 1.0),
    *(row | {"host_us": 24.0 / (1 + i)} for i, row in enumerate(a_cell("det_gemm_dx", 4096, 8, 0.81))),
    a_row("det_gemm", 4096, 32, "isobit", 1.0),  # without its rival: no cell
]


def test_a_summary_is_a_mean_a_slowest_cell_and_a_verdict() -> None:
    assert sizes_of("M=1 K=16 N=8 bf16 out=fp32 sequences=4") == {"M": 1, "K": 16, "N": 8}
    found = cells(ROWS, "torch.mm")
    assert [(c.op, c.sizes["M"], c.sizes["N"], c.other_bits) for c in found] == [
        ("det_gemm", 1, 8, True), ("det_gemm", 1, 32, False), ("det_gemm", 4096, 8, False),
        ("det_gemm_dx", 4096, 8, False),
    ]  # fmt: skip
    goals = [
        Goal("many rows", lambda cell: cell.sizes["M"] > 1, mean=0.9, least=0.85),
        Goal("few rows", lambda cell: cell.sizes["M"] == 1, mean=0.6),
        Goal("nothing", lambda cell: False, mean=1.0),
    ]
    many, few, nothing = summary(ROWS, "torch.mm", goals)
    assert (many["geomean"], many["least"], many["met"], many["cells"]) == (0.9, 0.81, False, 2)
    assert many["least_at"] == "det_gemm_dx M=4096 K=16 N=8 bf16"
    assert few["geomean"] == pytest.approx(0.4**0.5, abs=1e-4) and few["met"] is True
    assert few["goal_least"] is None
    empty = {"cells": 0, "met": None, "geomean": None, "goal_geomean": 1}
    assert {name: nothing[name] for name in empty} == empty


def test_the_goals_of_products() -> None:
    def met(rows: list[dict[str, Any]]) -> dict[str, bool]:
        return {e["what"]: e["met"] for e in summary(rows, "torch.mm", GOALS) if e["cells"]}

    many, dw, same, split, *rollouts, expected = (goal.what for goal in GOALS)
    cold, (narrow, slow_chain, *many_rows), proposed = rollouts[:6], rollouts[6:10], rollouts[10:]
    trees = (narrow, *many_rows)
    assert met(ROWS) == {many: False, split: False, same: False}
    good = [
        *a_cell("det_gemm", 16, 8, 0.95, 0.9),
        *a_cell("det_gemm_layers", 768, 8, 0.96),
        *a_cell("det_gemm_layers", 1536, 8, 0.98),
    ]
    good += [*a_cell("det_gemm_dx", 1024, 8, 0.99), *a_cell("det_gemm_dw", 1024, 8, 0.95, None)]
    assert met(good) == dict.fromkeys((many, dw, same, split), True)
    assert met([*good, *a_cell("det_gemm_dx", 8192, 8, 0.89)])[many] is False  # one slow cell
    assert met([*good, *a_cell("det_gemm", 64, 8, 0.79)])[same] is False
    assert met([*good, *a_cell("det_gemm", 64, 8, 0.79, 0.5)])[split] is True
    good[0] |= {"predicted_ms": good[0]["ms"] / 1.24}
    assert met(good)[expected] is True
    good[2] |= {"predicted_ms": good[2]["ms"] / 1.26}  # a wrong model is visible
    assert met(good)[expected] is False
    # Rollouts: a goal for each range of rows, and for each gradient.
    rows = [*a_cell("det_gemm_cold", 8, 8, 0.98), *a_cell("det_gemm_cold", 72, 8, 0.93)]
    rows += [*a_cell("det_gemm_cold", 450, 8, 0.93), *a_cell("det_gemm_cold", 2100, 8, 1.0)]
    rows += [*a_cell("det_gemm_cold_dx", 450, 8, 0.96), *a_cell("det_gemm_cold_dw", 1300, 8, 0.96, None)]
    either, in_chains, in_its_trees = proposed
    missed = dict.fromkeys((either, in_chains), False)  # 0.97, of either class
    assert met(rows) == dict.fromkeys(cold, True) | missed
    assert met(rows[:2]) == dict.fromkeys((cold[0], either, in_chains), True)
    slow = met([*rows, *a_cell("det_gemm_cold", 144, 8, 0.74), *a_cell("det_gemm_cold", 24, 8, 0.9)])
    assert [slow[what] for what in cold] == [False, True, False, True, True, True]
    # Class tree8: few rows of a narrow layer; many rows, by the length of k.
    sizes = ((72, 1024, 6144), (2100, 4096, 4096), (2100, 9728, 2560))

    def in_trees(*shares: float) -> list[dict[str, Any]]:
        return [
            row | {"case": f"M={M} K={K} N={N} bf16", "impl": row["impl"].replace("isobit", "isobit:tree8")}
            for (M, N, K), share in zip(sizes, shares, strict=True)
            for row in a_cell("det_gemm_cold", M, N, share)
        ]

    assert met(in_trees(1.01, 0.91, 0.81)) == dict.fromkeys((*trees, either, in_its_trees), True)
    assert met(in_trees(0.96, 0.89, 0.79)) == dict.fromkeys((*trees, either, in_its_trees), False)
    wide = [row | {"case": "M=72 K=2560 N=9728 bf16"} for row in in_trees(0.5, 1.0, 1.0)[:2]]
    assert met(wide) == {}

    def in_both(chain: float, share: float) -> list[dict[str, Any]]:
        ours, base = a_cell("det_gemm_cold", 72, 1024, chain)
        case = {"case": "M=72 K=6144 N=1024 bf16"}
        return [ours | case, base | case, *in_trees(share, 1.0, 1.0)[:1]]

    # A layer that is slow in a chain must be fast in a tree; one that is not need not.
    assert met(in_both(0.89, 1.11))[slow_chain] is True and met(in_both(0.89, 1.09))[slow_chain] is False
    assert slow_chain not in met(in_both(0.91, 1.0)) and slow_chain not in met(wide)
    # Each layer counts in the class that is proposed for it: this one in trees, the first one in chains.
    both = [*rows[:2], *in_both(0.1, 1.0), *in_trees(0.5, 1.0, 1.0)[:1]]
    both[-1]["case"] = rows[0]["case"]
    (entry,) = (e for e in summary(both, "torch.mm", GOALS) if e["what"] == either)
    assert (entry["cells"], entry["least"], entry["met"]) == (2, 0.98, True)


STAMP = {
    "gpu": "NVIDIA H200", "driver": "580", "torch": "2.11", "triton": "3.6", "python": "3.12",
    "commit": "abc", "source_sha": "def", "date": "2026-01-02T03:04:05Z", "kernels": {},
    "copy_tbps": 4.26, "best_tflops": 800.0,
}  # fmt: skip


def write_results(path: Path) -> dict[str, Any]:
    goal = Goal("few rows", lambda cell: cell.sizes["M"] == 1, mean=0.6)
    report = {"stamp": STAMP, "notes": [], "against": "torch.mm", "rows": ROWS}
    report["summary"] = summary(ROWS, "torch.mm", [goal])
    path.write_text(json.dumps(report))
    return report


def test_sizes_that_make_no_grid_get_a_line_a_case_with_the_other_rivals(tmp_path: Path) -> None:
    def a_row(size: int, impl: str, ms: float, extra: float | None) -> dict[str, Any]:
        sizes = f"N={size} D={2 * size} V={3 * size} bf16"
        return {"op": "linear_logp", "case": sizes, "direction": "fwd", "impl": impl, "ms": ms,
                "method": "graph", "host_us": 30.2, "extra_mb": extra, "max_abs": ms / 100}  # fmt: skip

    rows = [
        a_row(size, *rest)
        for size in (1, 2, 3)
        for rest in (("isobit", 1.02, 4.3), ("bare_gemm", 1.0, 0.0), ("cce", 3.06, 530.0))
    ]
    rows += [a_row(4, "cce", 9.0, None)]  # neither ours nor the baseline: nothing to set beside
    report = {"stamp": STAMP, "notes": [], "against": "bare_gemm", "rows": rows, "summary": []}
    (tmp_path / "linear_logp.json").write_text(json.dumps(report))
    found = tables.render_op(tmp_path / "linear_logp.json").splitlines()
    assert found[:5] == [
        "`linear_logp`",
        "",
        "| case | isobit ms | times bare_gemm | extra MB | cce ms | host us: isobit / cce |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| N=1 D=2 V=3 bf16 | 1.02 | 1.02 | 4.30 | 3.06 (3.00x, 530 MB) | 30 / 30 |",
    ]
    assert "| N=3 D=6 V=9 bf16 | 1e-02 | 3e-02 |" in found
    assert sum(line.startswith("| N=") for line in found) == 2 * 3  # times, and errors


def test_each_choice_of_options_has_a_grid_of_its_own(tmp_path: Path) -> None:
    report = write_results(tmp_path / "det_gemm.json")
    other = a_cell("det_gemm", 1, 8, 0.7)
    report["rows"] = [*ROWS[:6], *(row | {"case": f"{row['case']} mode=g"} for row in other)]
    report["notes"] = ["torch: not here", "unfinished: 3 of 4 cases are not timed"]
    (tmp_path / "det_gemm.json").write_text(json.dumps(report))
    shown = tables.render_op(tmp_path / "det_gemm.json")
    assert "`det_gemm`, mode=g, share of the speed of torch.mm\n\n| M | K=16 N=8 |\n" in shown
    assert "| 1 | 0.50\\* | 0.80 |" in shown
    assert shown.endswith("2026-01-02; unfinished: 3 of 4 cases are not timed</sub>\n")


def test_a_page_may_show_some_kinds_of_calls(tmp_path: Path) -> None:
    write_results(tmp_path / "det_gemm.json")
    page = "<!-- results:det_gemm det_gemm_dx -->\n<!-- /results -->\n"
    shown = tables.updated(page, tmp_path)
    assert "`det_gemm_dx`, share" in shown and "`det_gemm`, share" not in shown
    assert shown.startswith(page.splitlines()[0]) and tables.updated(shown, tmp_path) == shown
    with pytest.raises(ValueError, match="no 'logp' was timed; known: det_gemm, det_gemm_dx"):
        tables.updated(page.replace("det_gemm_dx", "logp"), tmp_path)


def test_a_goal_that_is_missed_says_so(tmp_path: Path) -> None:
    report = write_results(tmp_path / "det_gemm.json")
    report["summary"][0] |= {"geomean": 0.2936, "goal_geomean": 0.2941}
    (tmp_path / "det_gemm.json").write_text(json.dumps(report))
    assert "| few rows | 2 | 0.294 (goal 0.294 **missed**) |" in tables.render_op(tmp_path / "det_gemm.json")


def test_grids_show_the_share_of_the_baseline(tmp_path: Path) -> None:
    report = write_results(tmp_path / "det_gemm.json")
    assert tables.render_op(tmp_path / "det_gemm.json") == (
        "| speed as a share of torch.mm | cells | geometric mean | slowest cell |\n"
        "| --- | ---: | ---: | ---: |\n"
        "| few rows | 2 | 0.63 (goal 0.60) | 0.50 |\n"
        "\n"
        "`det_gemm`, K=16, share of the speed of torch.mm\n"
        "\n"
        "| M | N=8 | N=32 |\n"
        "| ---: | ---: | ---: |\n"
        "| 1 | 0.50\\* | 0.80 |\n"
        "| 4096 | 1.00 | - |\n"
        "\n"
        "`det_gemm_dx`, share of the speed of torch.mm\n"
        "\n"
        "| M | K=16 N=8 |\n"
        "| ---: | ---: |\n"
        "| 4096 | 0.81 |\n"
        "\n"
        "Host time of an eager call in microseconds, median of the cases: isobit 24, torch.mm 12.\n"
        "\n"
        "\\* torch.mm has other bits than isobit here: it splits the sum.\n"
        "\n"
        "<sub>NVIDIA H200, driver 580, torch 2.11, Triton 3.6, Python 3.12; copy 4.26 TB/s, "
        "bf16 product 800 TFLOP/s; commit abc, source def, 2026-01-02</sub>\n"
    )
    text = format_report(report)
    assert (
        "met  few rows: 0.632 (goal 0.6) of torch.mm, least 0.500 at det_gemm M=1 K=16 N=8 bf16; 2 cells"
        in text
    )
    assert "x baseline" not in text  # a column that no row has anything in


def test_a_chart_has_a_line_a_shape_and_hollow_marks_for_other_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, svg = tmp_path / "det_gemm.json", tmp_path / "chart.svg"
    write_results(source)
    where = [str(source), str(svg)]
    assert charts.main(["--check", *where]) == 1 and not svg.exists()
    assert charts.main(where) == 0 and charts.main(["--check", *where]) == 0
    tree = ET.fromstring(svg.read_text())
    names = [element.tag.partition("}")[2] for element in tree]
    marks = [element for element in tree if element.tag.endswith("circle")]
    assert names.count("polyline") == 2 * 2 + 2  # two panels of two shapes, and the legend
    assert [mark.get("fill") == "white" for mark in marks] == [True, False, False, False]
    source.write_text(json.dumps({"rows": [], "stamp": STAMP}))
    assert charts.main(where) == 1 and "one rival" in capsys.readouterr().err
