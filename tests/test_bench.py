"""The benchmark: cases, what a row holds, refusal of an op that fails its check, missing rivals, tables."""

import contextlib
import dataclasses
import json
import math
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit import ContractError
from isobit.bench.cases import CPU_BYTES, CPU_FLOPS, case_name, parse_case, small_cases
from isobit.bench.check_gate import CheckFailed
from isobit.bench.report import CPU_WARNING, ROW, format_report
from isobit.bench.runner import run
from isobit.frame.op import known_op
from isobit.ops.det_gemm import rivals as det_gemm_rivals
from isobit.ops.linear_logp.proof.inputs import FULL
from isobit.ops.linear_logp.rivals import Sampled
from isobit.ops.logp import rivals as logp_rivals
from isobit.spec.proof import InputOptions
from isobit.spec.proofs import proof_of, proofs
from isobit.spec.rival import Rival, cannot_import
from isobit.spec.truth import Truth, cotangent_like, truth_of

RESULTS = Path(__file__).parent.parent / "results" / "h200"

LOGP = known_op("logp")
CPU = torch.device("cpu")


def with_check(monkeypatch: pytest.MonkeyPatch, failures: list[str]) -> None:
    check = types.SimpleNamespace(quick_check=lambda op_name, device, backend, options: failures)
    monkeypatch.setitem(sys.modules, "isobit.check.runner", check)


def with_rivals(monkeypatch: pytest.MonkeyPatch, *rivals: Rival) -> None:
    series = dataclasses.replace(logp_rivals.LOGP, rivals={rival.name: rival for rival in rivals})
    monkeypatch.setattr("isobit.ops.logp.rivals.SERIES", [series])


def bench(**options: Any) -> dict[str, Any]:
    """A run that takes a moment: tiny, on the CPU, two samples."""
    cases = [parse_case(text, LOGP) for text in options.pop("cases", ["N=70,V=33,dtype=fp32"])]
    defaults: dict[str, Any] = {"device": "cpu", "repetitions": 2, "say": lambda text: None}
    return run("logp", cases, **(defaults | options))


# Cases


def test_a_case_is_parsed_into_the_declared_order() -> None:
    case = parse_case("V=50257, T=256 ,B=32,dtype=bf16", LOGP)
    assert list(case.dims.items()) == [("B", 32), ("T", 256), ("V", 50257)]
    assert case_name(case) == "B=32 T=256 V=50257 bf16"


def test_a_case_without_a_dtype_takes_the_declared_one() -> None:
    assert parse_case("N=8,V=9", LOGP).dtype == torch.bfloat16
    assert parse_case("V=64", LOGP).dims == {"N": 8, "V": 64}  # the rest as in the declared case
    assert parse_case("T=3,V=9,dtype=fp32", LOGP).dims == {"B": 32, "T": 3, "V": 9}
    assert parse_case("B=8,T=1,V=9", LOGP).dtype == torch.float16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("N=8,K=9", "unknown dimension 'K'; known: B,T,V or N,V, and dtype"),
        ("N=8,V=0", "V must be a positive whole number, not '0'"),
        ("N=-8,V=9", "N must be a positive whole number, not '-8'"),
        ("N=8,V=1e3", "V must be a positive whole number, not '1e3'"),
        ("N=8,V", "V must be a positive whole number, not ''"),
        ("N=8,V=9,dtype=int8", "unknown dtype 'int8'; known: bf16, fp16, fp32, fp64"),
        ("N=8,N=8,V=9", "N is given twice"),
        ("N=8,T=2,V=9", "needs the dimensions B,T,V or N,V, has N,T,V"),
        ("dtype=bf16", "needs the dimensions B,T,V or N,V, has none"),
        ("", "unknown dimension ''"),
    ],
)
def test_a_bad_case_is_rejected_with_its_reason(text: str, message: str) -> None:
    with pytest.raises(ContractError) as error:
        parse_case(text, LOGP)
    assert message in str(error.value)
    assert str(error.value).startswith(f"logp(case: {text!r})")


def test_small_cases_keep_the_dimensions_and_fit_a_cpu() -> None:
    series = logp_rivals.LOGP
    cases = small_cases(series)
    assert [list(case.dims) for case in cases] == [["B", "T", "V"], ["N", "V"]]
    assert all(series.cost(c.dims, c.dtype).bytes("fwd") <= CPU_BYTES for c in cases)
    assert cases[0].dims["V"] == series.cases[0].dims["V"]
    for product in det_gemm_rivals.SERIES:
        (case,) = small_cases(product)
        assert (
            list(case.dims) == ["M", "K", "N"] and product.cost(case.dims, case.dtype).fwd_flops <= CPU_FLOPS
        )


# Running


def test_a_run_that_is_cut_off_keeps_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_check(monkeypatch, [])

    def cut_off(text: str) -> None:
        if text.startswith("[2/2]"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench(cases=["N=7,V=33", "N=8,V=33"], impls=["isobit"], out_dir=tmp_path, say=cut_off)
    written = json.loads((tmp_path / "cpu" / "logp.json").read_text())
    assert {row["case"] for row in written["rows"]} == {"N=7 V=33 bf16"}
    assert "unfinished: 1 of 2 cases are not timed" in written["notes"]


def test_a_run_writes_every_key_of_every_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_check(monkeypatch, [])
    said: list[str] = []
    report = bench(
        cases=["N=70,V=33,dtype=fp32", "B=2,T=3,V=50,dtype=bf16"], impls=["isobit", "native", "copy"],
        out_dir=tmp_path, say=said.append,
    )  # fmt: skip
    written = json.loads((tmp_path / "cpu" / "logp.json").read_text())
    assert written == report
    keys = {"gpu", "driver", "torch", "triton", "commit", "source_sha", "date", "copy_tbps", "best_tflops"}
    assert keys <= set(written["stamp"]) and written["stamp"]["checked"] is True
    rows = written["rows"]
    assert all(tuple(row) == ROW for row in rows)
    assert {(r["case"], r["direction"], r["impl"]) for r in rows} == {
        (case, direction, impl)
        for case in ("N=70 V=33 fp32", "B=2 T=3 V=50 bf16")
        for direction in ("fwd", "bwd", "fwd_bwd")
        for impl in ("isobit", "native", "copy")
    }
    for row in rows:
        assert 0 < row["ms_q25"] <= row["ms"] <= row["ms_q75"] and row["floor_ms"] > 0 and row["tbps"] > 0
        assert row["method"] == "wall" and row["peak_mb"] is row["extra_mb"] is row["host_us"] is None
        if row["impl"] == "copy":
            assert row["max_abs"] is None
        else:
            in_fp32 = row["direction"] == "fwd" or "fp32" in row["case"]
            assert 0 <= row["max_abs"] < (1e-5 if in_fp32 else 0.02)
    assert said[0] == CPU_WARNING and CPU_WARNING in format_report(report)


def test_an_op_that_fails_its_check_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with_check(monkeypatch, ["accuracy: logp N=20 V=257 is off by 3"])
    with pytest.raises(CheckFailed, match="off by 3"):
        bench(out_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def backend_of(op: Any, name: str, run: Callable[..., Any], where: int | None = None) -> Iterator[None]:
    """One more backend of an op: the last, or before all others so that it serves by default."""
    op.backend(name, run=run, numerics="none")
    added = op.backends[-1]
    if where is not None:
        op.backends.insert(where, op.backends.pop())
    try:
        yield
    finally:
        op.backends.remove(added)


def off_by_a_little(**args: Any) -> Any:
    logp, *rest = LOGP.backend_named("reference").run(**args)
    return logp + 1e-3, *rest


def test_a_wrong_backend_is_not_timed_even_if_requested(tmp_path: Path) -> None:
    """Not by name, while the default is right; and not as the default."""
    options: dict[str, Any] = {
        "impls": ["isobit", "isobit:wrong"],
        "directions": ["fwd"],
        "out_dir": tmp_path,
    }
    red = pytest.raises(CheckFailed, match=r"(?s)logp on wrong fails .* beyond the bound")
    with backend_of(LOGP, "wrong", off_by_a_little), red:
        bench(backend="wrong", **options)
    assert list(tmp_path.iterdir()) == []
    with backend_of(LOGP, "wrong", off_by_a_little, 0), pytest.raises(CheckFailed, match="logp on wrong"):
        bench(impls=["isobit"], directions=["fwd"])


def test_a_backend_that_is_wrong_with_an_option_is_not_timed_with_it() -> None:
    def served(**args: Any) -> Any:
        right = LOGP.backend_named("reference").run(**args)
        return right if args["temperature"] == 1.0 else off_by_a_little(**args)

    plain = parse_case("N=70,V=33,dtype=fp32", LOGP)
    hot = dataclasses.replace(plain, options={"temperature": 1.5})

    def timed(case: Any) -> dict[str, Any]:
        return run("logp", [case], ["fwd"], "cpu", impls=["isobit"], repetitions=2, say=lambda t: None)

    # Only cases that are wrong at other temperatures: the check must use their own option.
    proof = proof_of(LOGP)
    cases = [case for case in proof.cases if not case.heavy and not case.options]
    with (
        pytest.MonkeyPatch.context() as patch,
        backend_of(LOGP, "hot", served, 0),
    ):
        patch.setitem(proofs(), "logp", dataclasses.replace(proof, cases=cases, bit_cases=proof.bit_cases))
        assert timed(plain)["rows"]
        with pytest.raises(CheckFailed, match=r"logp on hot with temperature=1.5 fails"):
            timed(hot)


def test_a_variant_is_checked_as_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    check = types.SimpleNamespace(quick_check=lambda *args: checked.append(args) or [])
    monkeypatch.setitem(sys.modules, "isobit.check.runner", check)
    case = parse_case("N=4,D=8,V=12", known_op("linear_logp"))
    run("linear_logp", [case], device="cpu", impls=["isobit"], repetitions=2, say=lambda text: None)
    assert checked == [
        ("linear_logp", CPU, "reference", {}),
        ("linear_logp", CPU, "reference", {"workspace_bytes": FULL}),
    ]


def test_a_run_without_a_check_says_so() -> None:
    report = bench(skip_check=True, impls=["isobit"], directions=["fwd"])
    assert report["stamp"]["checked"] is False and "NOT CHECKED" in format_report(report)


def test_a_forced_backend_is_a_row_beside_the_default() -> None:
    def impls(backend: str) -> list[str]:
        options: dict[str, Any] = {"skip_check": True, "directions": ["fwd"], "backend": backend}
        return [row["impl"] for row in bench(impls=["isobit", f"isobit:{backend}"], **options)["rows"]]

    with backend_of(LOGP, "twin", LOGP.backend_named("reference").run):
        assert impls("twin") == ["isobit", "isobit:twin"]
        assert impls("reference") == ["isobit"]


@pytest.mark.parametrize("options", [{"directions": ["up"]}, {"backend": "gpu"}, {"impls": ["ligre"]}])
def test_unknown_names_are_errors_that_list_the_known(options: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match=r"unknown .*; known: "):
        bench(skip_check=True, **options)


# Rivals


def test_a_missing_rival_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logp_rivals, "cannot_import", lambda module: cannot_import("no_such_rival.ops"))
    said: list[str] = []
    report = bench(skip_check=True, impls=["isobit", "liger"], say=said.append)
    assert report["notes"] == ["liger: not installed"] and said.count("liger: not installed") == 1
    assert "liger: not installed" in format_report(report)


def test_a_package_that_breaks_on_import_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_rival.py").write_text("raise OSError('no driver')")
    monkeypatch.syspath_prepend(tmp_path)
    assert cannot_import("broken_rival") == "broken_rival cannot be imported: OSError: no driver"
    assert cannot_import("json") is None


def test_failing_and_wrong_rivals_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(args: dict[str, Any]) -> torch.Tensor:
        raise RuntimeError("out of memory\nat line 3")

    off_by_one = Rival("off", lambda args: logp_rivals.native(args) + 1.0, directions=("fwd",))
    nan = Rival("nan", lambda args: logp_rivals.native(args) * float("nan"), directions=("fwd",))
    with_rivals(monkeypatch, Rival("fails", fails), off_by_one, nan)
    report = bench(skip_check=True, directions=["fwd", "fwd_bwd"])
    assert report["notes"] == [
        "fails: failed on N=70 V=33 fp32 fwd: RuntimeError: out of memory",
        "nan: NaN on N=70 V=33 fp32 fwd",
        "off: not timed for fwd_bwd",
        "nan: not timed for fwd_bwd",
        "fails: failed on N=70 V=33 fp32 fwd_bwd: RuntimeError: out of memory",
    ]
    errors = {row["impl"]: row["max_abs"] for row in report["rows"] if row["direction"] == "fwd"}
    assert errors["off"] == pytest.approx(1.0, abs=1e-5) and errors["nan"] is None


@pytest.mark.parametrize(
    "judge",
    [
        lambda args: truth_of(known_op("linear_logp"), args),
        lambda args: Sampled(args, ("hidden", "weight")),
    ],
)
def test_gradients_with_rows_are_judged_beside_one_that_all_rows_share(judge: Any) -> None:
    """linear_logp: the output and dhidden are known from some rows, dweight is not."""
    op = known_op("linear_logp")
    case = parse_case("N=100,D=8,V=20,dtype=fp32", op)
    args = proof_of(op).make(case, CPU, InputOptions())
    leaves = [args[name].requires_grad_() for name in ("hidden", "weight")]
    output = op.function(**args)
    gradients = torch.autograd.grad(output, leaves, cotangent_like(output))
    known, output = judge(proof_of(op).make(case, CPU, InputOptions())), output.detach()
    assert known.error("fwd", (output,)) < 1e-5 and known.error("fwd_bwd", (output, *gradients)) < 1e-5
    assert known.error("fwd", (output + 0.5,)) == pytest.approx(0.5, abs=1e-5)
    dhidden, dweight = gradients
    assert known.error("fwd_bwd", (output + 0.5, dhidden, dweight)) == pytest.approx(0.5, abs=1e-5)
    assert known.error("fwd_bwd", (output, dhidden + 0.5, dweight)) == pytest.approx(0.5, abs=1e-5)
    assert known.error("fwd_bwd", (output, dhidden, dweight + 0.5)) < 1e-5
    assert math.isnan(known.error("fwd", (output * float("nan"),)))


def test_a_gradient_that_is_only_a_sum_over_rows_is_not_judged() -> None:
    rows, one = torch.tensor([0]), torch.zeros(1, 1)
    assert Truth(rows, 4, one, {}, 1).error("bwd", (torch.ones(4, 1),)) is None
    assert Truth(rows, 4, one, {0: one}, 2).error("bwd", (torch.ones(4, 1), torch.ones(3))) == 1.0


@pytest.mark.parametrize("text", ["N=5,V=7,dtype=fp32", "B=2,T=3,V=7,dtype=fp32"])
def test_liger_gets_one_more_step_than_it_reads(text: str) -> None:
    args = proof_of(LOGP).make(parse_case(text, LOGP), CPU, InputOptions())
    prepared = logp_rivals.RIVALS["liger"].prepare(args)
    B, T = prepared["token_ids"].shape
    assert prepared["logits"].shape == (B, T + 1, 7) and prepared["logits"].is_contiguous()
    read = args | {"logits": prepared["logits"][:, :-1], "token_ids": prepared["token_ids"]}
    assert torch.equal(logp_rivals.native(read).flatten(), logp_rivals.native(args).flatten())
