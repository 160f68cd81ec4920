"""The benchmark of delta-rule gradients: what is declared, what the command line can ask for, errors."""

import math
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch

from isobit.bench.cases import case_name, parse_case, subject_of
from isobit.bench.report import format_table
from isobit.bench.runner import planned, run
from isobit.frame.op import known_op
from isobit.ops.delta_rule.proof.packings import lengths_of, spread
from isobit.ops.delta_rule.rivals import PACKED, SERIES
from isobit.spec.options import parse_options
from isobit.spec.proof import Args, Case
from isobit.spec.rival import Rival
from isobit.spec.series import Pool
from isobit.spec.truth import Errors
from publish.tables import _errors_and_difference

OP = known_op("chunk_gated_delta_rule_bwd_dhu")
SUBJECT = subject_of(OP)


def asked(text: str, options: dict[str, Any]) -> list[tuple[str, str]]:
    """(series, case) of what would be timed on a GPU."""
    cases = [parse_case(text, SUBJECT)]
    jobs = planned(SUBJECT, cases, None, torch.device("cuda"), None, None, options, False)
    return [(series.name, case_name(case)) for series, case, _ in jobs]


# The command line


@pytest.mark.parametrize("options", [[], ["v_first=True"], ["mode=kt", "lengths=117+174+221"]])
def test_a_requested_case_is_timed_once(options: list[str]) -> None:
    ((series, case),) = asked("B=1,T=512,H=2,HV=2", parse_options(options))
    assert series == "dhu" and case == " ".join(["B=1 T=512 H=2 HV=2 K=128 V=128 bf16", *options])


def test_every_option_of_a_declared_case_can_be_asked_for() -> None:
    for case in (case for series in SERIES for case in series.cases):
        sizes = ",".join(f"{name}={size}" for name, size in case.dims.items())
        options = [f"{name}={value}" for name, value in case.options.items()]
        assert asked(sizes, parse_options(options)) == [("dhu", case_name(case))]


def test_packed_sequences_are_checked_by_cases_of_the_check() -> None:
    """Whose lengths are their own: nothing else fits their tokens."""
    said: list[str] = []
    case = parse_case("B=1,T=90,H=1,HV=1,K=16,V=16,dtype=fp32", SUBJECT)
    options = parse_options(["mode=kt", "lengths=30+0+59+1"])
    report = run(
        OP.name, [case], device="cpu", repetitions=2, impls=["isobit"], options=options, say=said.append
    )
    assert [row["case"].partition(" mode=")[2] for row in report["rows"]] == ["kt lengths=30+0+59+1"]
    assert f"checking {OP.name} on reference with mode=kt, cpu, first" in said


# Errors


@pytest.mark.parametrize("options", [{"mode": "ght"}, {"mode": "kht", "lengths": "30+0+40"}, {"mode": "g"}])
@pytest.mark.parametrize("output", [0, 1, 2])
def test_the_worst_of_all_outputs_is_reported(options: dict[str, Any], output: int) -> None:
    B = 1 if "lengths" in options else 2
    dims = {"B": B, "T": 70, "H": 1, "HV": 2, "K": 16, "V": 8}
    (args, *_) = SERIES[0].make(Case(dims, torch.float32, options=options), Pool(torch.device("cpu")))
    judge, result = SERIES[0].judge(args), list(SERIES[0].call(args, "reference"))
    assert judge is not None
    good = judge.error("bwd", tuple(result))
    assert isinstance(good, Errors) and 0 < good.rel_rms < 1e-5
    if result[output] is None:
        return
    result[output] = result[output].clone()
    at = (0, 1) if output == 1 else (0, 0, 1)  # the last head
    result[output][at][0] += 2.0
    worse = judge.error("bwd", tuple(result))
    assert isinstance(worse, Errors) and worse.max_abs == pytest.approx(2.0, rel=1e-4)
    result[output][at][0] = float("nan")
    worst = judge.error("bwd", tuple(result))
    assert isinstance(worst, Errors) and all(map(math.isnan, astuple(worst)))


def test_the_largest_difference_from_fla_is_beside_the_errors() -> None:
    """Over all that both return and all heads, also those whose truth is not computed; NaN is not hidden."""

    def altered(by: float) -> Callable[[Args], Any]:
        def call(args: Args) -> Any:
            dh, dh0, dv2 = (t.clone() for t in SERIES[0].call(args, "reference"))
            dh0[0, 0, 0, 0] += by  # the first head; the last one is judged
            return dh, dh0, dv2

        return call

    for by in (0.5, math.nan):
        rival = Rival("fla", altered(by), directions=("bwd",), jit=False, takes=None)
        subject = replace(SUBJECT, series=[replace(SERIES[0], rivals={"fla": rival})])
        case = parse_case("B=1,T=70,H=2,HV=2,K=16,V=8,dtype=fp32", SUBJECT)
        report = run(
            subject, [case], device="cpu", repetitions=2, impls=["isobit", "fla"], skip_check=True,
            options={"mode": "ht"}, say=lambda text: None,
        )  # fmt: skip
        ours, theirs = report["rows"]
        assert "max_diff" not in ours and theirs["max_abs"] < 1e-4
        assert theirs["max_diff"] == (None if math.isnan(by) else pytest.approx(by))
        assert "max diff" in format_table(report["rows"]) or math.isnan(by)
        (sentence, *_) = _errors_and_difference(report, "dhu") or [""]
        assert sentence.endswith("Largest difference from isobit: fla 5.0e-01.") or math.isnan(by)


# Packed sequences


def test_lengths_may_be_repeated() -> None:
    assert lengths_of("5+2x3+0") == [5, 3, 3, 0]


@pytest.mark.parametrize(("case", "count", "least", "most"), [
    (0, 3, 117, 221), (1, 4, 124, 274), (2, 20, 409, 410), (3, 20, 296, 571), (4, 25, 197, 558),
    (5, 20, 205, 762), (6, 20, 1185, 2286), (7, 25, 788, 2233), (8, 25, 400, 2200),
])  # fmt: skip
def test_packed_sequences_have_the_lengths_that_are_declared(
    case: int, count: int, least: int, most: int
) -> None:
    found = lengths_of(PACKED[case].options["lengths"])
    assert (len(found), min(found), max(found)) == (count, least, most)
    assert sum(found) == PACKED[case].dims["T"]


def test_a_sum_that_the_ends_do_not_allow_is_an_error() -> None:
    with pytest.raises(AssertionError, match="do not allow this sum"):
        spread(4, 1000, 10, 20)
