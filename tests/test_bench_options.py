"""Options of a case: `--option` on the command line, in case names, in checks and in benchmarks."""

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit import ContractError
from isobit.bench.cases import case_name, parse_case, series_of
from isobit.bench.runner import run
from isobit.check.request import Request, cases_of
from isobit.frame.op import known_op, public_ops
from isobit.ops.linear_logp import rivals as linear_rivals
from isobit.spec.options import fit, known_options, parse_options, varied, words
from isobit.spec.proof import Case

LOGP = known_op("logp")
CPU = torch.device("cpu")


def bench(name: str, text: str, **options: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {"device": "cpu", "repetitions": 2, "skip_check": True, "say": lambda t: None}
    return run(name, [parse_case(text, known_op(name))], **(defaults | options))


def test_values_are_numbers_flags_dtypes_or_words() -> None:
    texts = ["temperature=0.7", "sequences=4", "each=true", "mask=bool", "out=fp32", "bias=own"]
    found = parse_options([*texts, "layout=narrow slabs", "workspace_bytes=137438953472"])
    assert found == {
        "temperature": 0.7, "sequences": 4, "each": True, "mask": torch.bool, "out": torch.float32,
        "bias": "own", "layout": "narrow slabs", "workspace_bytes": 1 << 37,
    }  # fmt: skip


def test_options_can_be_stored_as_json() -> None:
    found = words({"clip_high": float("inf"), "mask": torch.bool, "temperature": 0.7, "each": True})
    text = json.dumps(found, allow_nan=False)
    assert json.loads(text) == {"clip_high": "inf", "mask": "bool", "temperature": 0.7, "each": True}


@pytest.mark.parametrize("text", ["temperature", "temperature=", "=3", ""])
def test_invalid_options_are_errors(text: str) -> None:
    with pytest.raises(ContractError, match="write it as NAME=VALUE"):
        parse_options([text])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("heat=1", "logp: unknown option 'heat'; known: mask, temperature, ids, each, layout"),
        ("layout=round", "logp: unknown layout 'round'; known: dense, shifted, padded, offset"),
        ("temperature=hot", "logp: temperature=hot is no such option; declared: 0.7, 2.5"),
        ("temperature=fp32", "logp: temperature=fp32 is no such option"),
        ("mask=some", "logp: mask=some is no such option; declared: bool, int64, uint8"),
        ("ids=True", "logp: ids=True is no such option; declared: int32"),
    ],
)
def test_names_and_kinds_are_those_of_declared_cases(text: str, message: str) -> None:
    with pytest.raises(ContractError) as error:
        fit(LOGP, parse_options([text]))
    assert message in str(error.value)


@pytest.mark.parametrize("name", sorted(public_ops()))
def test_every_declared_option_can_be_asked_for(name: str) -> None:
    """Written as a case's name writes it, it is read back as the case has it."""
    op = known_op(name)
    for option, values in known_options(op).items():
        for value in values:
            case = varied(Case({"N": 2}), {option: value})
            text = case.name.partition("fp32")[2].strip() if option != "layout" else f"layout={value}"
            assert parse_options([text]) == {option: value}
            fit(op, {option: value})


def test_an_option_reaches_every_case_of_a_check_and_its_command() -> None:
    request = Request(ops=("logp",), vary={"temperature": 0.5, "layout": "padded"})
    cases = cases_of(LOGP, "triton", "accuracy", request)
    assert cases and all(c.options["temperature"] == 0.5 and c.layout == "padded" for c in cases)
    assert len({c.name for c in cases}) == len(cases)
    assert any(c.options.get("mask") for c in cases)  # over those that the cases have
    linear = Request(vary={"layout": "narrow slabs"})
    assert shlex.split(linear.options())[-2:] == ["--option", "layout=narrow slabs"]


def test_rows_name_the_options_and_rivals_follow_them_or_are_left_out() -> None:
    wanted = ["isobit", "native", "liger"]
    report = bench(
        "logp", "N=70,V=33,dtype=fp32", options={"temperature": 0.5, "mask": torch.bool}, impls=wanted
    )
    rows = [row for row in report["rows"] if row["direction"] in ("fwd", "fwd_bwd")]
    assert {row["case"] for row in rows} == {"N=70 V=33 fp32 temperature=0.5 mask=bool"}
    assert {row["impl"] for row in rows} == {"isobit", "native"}
    assert all(row["max_abs"] < 1e-5 for row in rows)  # they do the same work


def test_a_rival_that_does_not_take_an_option_is_not_timed() -> None:
    report = bench(
        "linear_logp", "N=5,D=8,V=12,dtype=fp32", options={"logits_dtype": torch.bfloat16},
        impls=["isobit", "native", "bare_gemm"], directions=["fwd"],
    )  # fmt: skip
    assert [row["impl"] for row in report["rows"]] == ["isobit", "bare_gemm"]
    assert "native: does not take logits_dtype" in report["notes"]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.5}, {"softcap": 3.0, "logit_scale": 1.5}, {"bias": torch.float32}]
)
def test_the_native_head_follows_its_options(options: dict[str, Any]) -> None:
    report = bench("linear_logp", "N=70,D=8,V=12,dtype=fp32", options=options, impls=["isobit", "native"])
    rows = [row for row in report["rows"] if row["op"] in ("linear_logp", "linear_logp_train")]
    assert [row["impl"] for row in rows] == ["isobit", "native"] * 2
    assert all(row["max_abs"] < 1e-4 for row in rows)


def test_an_option_chooses_the_kinds_of_calls_that_take_it() -> None:
    report = bench("det_gemm", "M=3,K=40,N=24", options={"out": torch.float32}, impls=["isobit"])
    assert {row["op"] for row in report["rows"]} == {"det_gemm", "det_gemm_dx", "det_linear"}
    assert all(row["max_abs"] < 1e-4 for row in report["rows"] if row["op"] == "det_gemm")
    with pytest.raises(
        ContractError, match=r"bench det_gemm: unknown option 'heat'; known: out, bias, operand, lay"
    ):
        bench("det_gemm", "M=3,K=40,N=24", options={"heat": 3})


def test_a_layout_with_holes_is_timed_with_its_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the copies of the inputs that keep the cache cold."""
    monkeypatch.setattr("isobit.spec.series.copies_for", lambda nbytes, device: 3)
    series, *_ = series_of(LOGP)
    from isobit.spec.series import Pool

    case = dataclasses.replace(parse_case("N=5,V=7,dtype=fp32", LOGP), layout="padded")
    assert case_name(case) == "N=5 V=7 fp32 padded"
    copies = series.make(case, Pool(CPU))
    assert [args["logits"].stride() for args in copies] == [(12, 1)] * 3
    assert len({args["logits"].data_ptr() for args in copies}) == 3


def test_a_sum_over_rows_is_judged_by_its_total() -> None:
    """Liger returns the sum of all log-probabilities."""
    op = known_op("linear_logp")
    args = linear_rivals.SERIES[0].make(parse_case("N=700,D=8,V=12,dtype=fp32", op), _pool())[0]
    judge = linear_rivals.Sampled(args, ())
    total = linear_rivals.native(args).sum()
    error = judge.error("fwd", (total + 7.0,))
    assert error == pytest.approx(0.01, abs=1e-5)


def _pool() -> Any:
    from isobit.spec.series import Pool

    return Pool(CPU)


def test_results_keep_the_options(tmp_path: Path) -> None:
    bench("logp", "N=7,V=9", options={"layout": "shifted"}, impls=["isobit"], out_dir=tmp_path)
    (row, *_) = json.loads((tmp_path / "cpu" / "logp.json").read_text())["rows"]
    assert row["case"] == "N=7 V=9 bf16 shifted"


# Backends beside the default


@pytest.mark.parametrize("name", ["logp", "det_gemm", "linear_logp"])
def test_other_backends_and_rivals_are_declared_at_two_shapes(name: str) -> None:
    for series in series_of(known_op(name)):
        if series.name.endswith(("_frozen", "_kept", "_layers", "_bias")) or "_cold" in series.name:
            continue  # variants: the portable backend is timed for the forward and for training
        assert series.also["triton"] and all(case in series.cases for case in series.also["triton"])
        assert len(series.also["triton"]) == 2
        for rival in ("native", "torch.compile"):
            if rival in series.rivals:
                device = torch.device("cuda")
                fit = [c for c in series.cases if series.rivals[rival].available(c, device) is None]
                assert len(fit) >= 2
    assert any(rival in one.rivals for one in series_of(known_op(name)) for rival in ("native",))


def test_a_declared_backend_that_cannot_serve_here_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    case = parse_case("N=7,V=9", LOGP)
    series, *_ = series_of(LOGP)
    beside = dataclasses.replace(series, also={"hopper": [case], "twin": [case]})
    monkeypatch.setattr("isobit.ops.logp.rivals.SERIES", [beside])
    LOGP.backend("twin", run=LOGP.backend_named("reference").run, numerics="none")
    try:
        report = bench("logp", "N=7,V=9", impls=["isobit", "isobit:twin", "isobit:hopper"])
    finally:
        LOGP.backends.pop()
    assert {row["impl"] for row in report["rows"]} == {"isobit", "isobit:twin"}
    assert [note for note in report["notes"] if note.startswith("isobit:hopper: logp(backend='hopper'): ")]
