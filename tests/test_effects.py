"""Guards against silence: an option without effect, a name for which nothing runs, and a run of nothing that
leaves no report."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import third_party
from isobit import testing
from isobit.check.effects import check_effects
from isobit.check.laws import LAWS
from isobit.check.request import SETS, Request, cases_of
from isobit.check.runner import run
from isobit.cli.main import app
from isobit.frame.contract import ContractError
from isobit.frame.op import known_op
from isobit.spec.proofs import proofs

LOGP = ("check", "--op", "logp", "--device", "cpu", "--backend", "reference")
BENCH = ("bench", "--op", "logp", "--device", "cpu")


def error(*arguments: str) -> str:
    """What a command that must not run answers."""
    done = CliRunner().invoke(app, list(arguments))
    assert isinstance(done.exception, ContractError), (done.output, done.exception)
    assert "isobit" not in done.output  # nothing had begun
    return str(done.exception)


# Checks


def test_every_flag_has_a_reader_and_something_behind_it() -> None:
    assert set(SETS) == frozenset().union(*(law.reads for law in LAWS.values()))
    plain = Request()
    assert plain.given() == [] and all(plain.for_law(law) == plain for law in LAWS)


def test_a_law_gets_only_the_flags_it_reads() -> None:
    asked = Request(dims={"N": 3, "V": 5}, cotangents="ones", targets=("cuda:90",), data="random")
    assert asked.for_law("compile") == Request(targets=("cuda:90",))
    assert asked.for_law("accuracy") == Request(dims={"N": 3, "V": 5}, data="random")
    assert asked.for_law("gradient").given() == ["--dim", "--data", "--data cotangents"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--dim", "N=2", "--dim", "V=3", "--case", "nope"), "use only one of them"),
        (("--law", "compile=sm_90"), "unknown target 'sm_90'; known: cuda:80, cuda:90, hip:gfx942"),
        (("--data", f"seed={2**63}"), f"--data seed={2**63}: unknown; known: edge, random"),
        (("--data", "seed=1", "--data", "seed=2"), "--data seed=2: seed is given twice"),
        (("--data", "random", "--data", "constant=3"), "constant=3: the kind of data is given twice"),
        (("--device", "meta"), "holds no values to check"),
        (("--json", "/no/such/folder/x.json"), "no folder /no/such/folder"),
        (("--law", "compile", "--dim", "V=7"), "--dim has no effect on the law compile: leave it out"),
        (("--law", "compile", "--data", "seed=123"), "--data seed has no effect on the law compile"),
        (("--law", "memory", "--data", "seed=5"), "--data seed has no effect on the law memory"),
        (("--law", "accuracy", "--data", "cotangents=none"), "cotangents has no effect on the law accuracy"),
        (("--law", "accuracy", "--dim", "V=1", "--data", "token=3"), "--data token has no effect on the"),
        (("--brief",), "--brief has no effect on a check of all laws"),
        (("--dim", "V=7", "--dim", "V=8"), "--dim V=8: V is given twice"),
        (("--law", "accuracy", "--law", "accuracy"), "law 'accuracy' is given twice"),
        (("--law", "memory", "--case", "N=20 V=1 bf16"), "'N=20 V=1 bf16' of memory: it is one of accuracy"),
        (("--law", "accuracy", "--case", "N=20 V=2 bf16"), ". Closest: N=20 V=1 bf16; N=3 V=50257 bf16; "),
        (("--law", "accuracy", "--law", "memory", "--case", "N=20 V=1 bf16"), "--law memory: has no case"),
        (("--op", "det_gemm"), "--op det_gemm: has no backend reference; it has hopper, triton, model"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_options_that_would_be_ignored_are_errors(options: tuple[str, ...], message: str) -> None:
    assert message in error(*LOGP, *options)


@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        ("group_advantages", ("--data", "cotangents=ones"), "group_advantages: it has no gradients"),
        ("det_gemm", ("--data", "token=5"), "no effect on the inputs of det_gemm"),
        (
            "det_gemm",
            ("--law", "accuracy", "--data", "constant", "--data", "seed=5"),
            "--data seed has no effect",
        ),
        ("chunk_gated_delta_rule_bwd_dhu", ("--law", "accuracy", "--data", "constant"), "--data has"),
        ("logp", ("--data", "constant=1e30"), "fp16 holds 65504 at most"),
    ],
)
def test_what_an_op_does_not_have_is_an_error(op: str, options: tuple[str, ...], message: str) -> None:
    assert message in error("check", "--device", "cpu", "--op", op, *options)


def test_tolerances_without_effect_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"classes": {"product": {"forward": {"bf16": 0.5}}}}))
    small = (*LOGP, "--law", "accuracy", "--dim", "N=3", "--dim", "V=9", "--tolerances", str(own))
    assert "no figure of logprob for the laws and dtypes that run" in error(*small)
    own.write_text(json.dumps({"arch": {"sm_90": {"logprob": {"forward": {"fp32": 0.5}}}}}))
    assert "--tolerances has no effect" in error(*small)  # they are of another architecture
    for key in ("sm90", "sm_90"):  # either spelling
        own.write_text(json.dumps({"arch": {key: {"logprob": {"forward": {"fp32": 0.5}}}}}))
        monkeypatch.setattr("isobit.check.effects.arch_key", lambda device: "sm_90")
        monkeypatch.setattr("isobit.check.runner.arch_key", lambda device: "sm_90")
        done = CliRunner().invoke(app, [*small, "--json", "-"])
        assert done.exit_code == 0 and '"arch": "sm_90"' in done.output


def test_the_python_api_makes_the_same_checks() -> None:
    with pytest.raises(ContractError, match="holds 65504 at most"):
        testing.check_effects(Request(ops=("logp",), data="constant", inputs=_large()))
    with pytest.raises(ContractError, match="has no case"):
        testing.check(
            third_party.right, "logp", laws=("accuracy", "memory"), case="N=20 V=1 bf16", device="cpu"
        )


def _large() -> Any:
    from isobit.spec.proof import InputOptions

    return InputOptions(constant=1e30)


# A run of nothing


def test_a_named_op_of_which_nothing_ran_fails_and_the_files_say_so(tmp_path: Path) -> None:
    files = {"--json": tmp_path / "c.json", "--html": tmp_path / "c.html"}
    asked = ["check", "--device", "cpu", "--law", "gradient", "--op", "det_gemm_dw", "--op", "logp"]
    asked += ["--backend", "model", "--backend", "reference", "--case", "N=20 V=1 bf16"]
    assert "--op det_gemm_dw: none of its cases was chosen" in error(*asked)
    asked = ["check", "--device", "cpu", "--law", "gradient", "--op", "det_gemm_dw", "--backend", "model"]
    flags = [str(part) for pair in files.items() for part in pair]
    done = CliRunner().invoke(app, [*asked, *flags, "--results", str(tmp_path)])
    assert done.exit_code == 1 and "nothing was checked: det_gemm_dw model: " in str(done.exception)
    for path in (files["--json"], tmp_path / "cpu" / "check_det_gemm.json"):
        found = json.loads(path.read_text())
        assert not found["passed"] and found["nothing_ran"] == str(done.exception)
    text = files["--html"].read_text()
    assert "nothing was checked" in text and "all laws hold" not in text
    shown = CliRunner().invoke(app, ["report", str(files["--json"])])
    assert shown.exit_code == 0 and "0 ok, 0 failed" in shown.output


def test_one_op_that_ran_does_not_stand_for_another() -> None:
    asked = ["check", "--device", "cpu", "--law", "gradient", "--op", "det_gemm_dw", "--op", "logp"]
    done = CliRunner().invoke(
        app, [*asked, "--backend", "model", "--backend", "reference", "--dtype", "fp32"]
    )
    assert done.exit_code == 1 and str(done.exception).startswith("nothing of det_gemm_dw was checked: ")
    assert "nothing of det_gemm_dw was checked" in done.output and "all laws hold" not in done.output


# Benchmarks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*BENCH, "--op", "logp"), "op 'logp' is given twice"),
        (("bench", "--op", "det_gemm", "--op", "det_linear"), "det_linear: is timed together with det_gemm"),
        ((*BENCH, "--minutes", "0"), "--minutes 0: must be more than 0"),
        ((*BENCH, "--op", "rms_norm", "--json", "b.json"), "--json is for one --op or --suite"),
        (("bench", "--suite", "launch", "--suite", "launch"), "suite 'launch' is given twice"),
        ((*BENCH, "--impl", "isobit", "--candidate", "third_party:right"), "not timed without --impl cand"),
        (("bench", "--suite", "launch", "--core", "--device", "cpu"), "--core has no effect on cpu"),
        ((*BENCH, "--direction", "bwd", "--impl", "liger"), "--impl liger would not be tim"),
    ],
)  # fmt: skip
def test_what_would_not_be_timed_is_an_error(arguments: tuple[str, ...], message: str) -> None:
    assert message in error(*arguments)


def test_a_report_about_something_else_has_no_effect(tmp_path: Path) -> None:
    path = tmp_path / "check.json"
    path.write_text(json.dumps({"stamp": {}, "candidates": [{"op": "det_gemm"}]}))
    assert "it is about det_gemm, and logp would be timed" in error(*BENCH, "--check-report", str(path))


def test_a_benchmark_of_nothing_leaves_a_report_that_says_why(tmp_path: Path) -> None:
    page = tmp_path / "b.html"
    files = ["--html", str(page), "--results", str(tmp_path)]
    files += ["--json", str(tmp_path / "b.json")]
    case = ["--case", "N=3,V=9,dtype=fp32", "--impl", "liger", "--skip-check"]
    done = CliRunner().invoke(app, [*BENCH, *case, *files])
    assert done.exit_code != 0 and "nothing was timed" in str(done.exception)
    found = json.loads((tmp_path / "cpu" / "logp.json").read_text())
    assert json.loads((tmp_path / "b.json").read_text()) == found
    assert found["rows"] == [] and any(note.startswith("liger: ") for note in found["notes"])
    assert "nothing was timed" in page.read_text() and "liger: " in page.read_text()
    wrong = ["--candidate", "third_party:drops_a_tail", "--html", str(page)]
    done = CliRunner().invoke(app, [*BENCH, "--case", "N=3,V=9,dtype=fp32", *wrong])
    assert done.exit_code != 0 and "drops_a_tail fails its check" in page.read_text()


# Saved reports, and memcheck


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("{check}", "--slower", "1.1"), "name the older file with --against"),
        (("{check}", "--against", "{check}", "--slower", "1.1"), "no effect on checks"),
        (("{bench}", "--against", "{bench}", "--slower", "0.5"), "from 1 on"),
    ],
)
def test_options_of_report_without_effect_are_errors(options: tuple[str, ...], message: str) -> None:
    folder = Path(__file__).parent.parent / "results" / "h200"
    names = {"check": str(folder / "check_logp.json"), "bench": str(folder / "logp.json")}
    assert message in error("report", *(text.format(**names) for text in options))


def test_a_memcheck_of_no_kernel_is_an_error() -> None:
    asked = ("memcheck", "--op", "logp", "--op", "group_advantages", "--backend", "hopper")
    assert "--op group_advantages: no kernels of hopper; it has triton" in error(*asked)


@pytest.mark.parametrize(
    ("op", "law", "case"),
    [
        ("det_linear", "invariant", "M=66 K=530 N=72 bf16 padded out=fp32"),
        ("rms_norm", "agree", "N=20 D=1100 fp32 random"),
    ],
)
def test_laws_of_bits_hold_without_gradients(op: str, law: str, case: str) -> None:
    """Their controls of gradients changed nothing then, and models had more than there was to compare."""
    request = Request(ops=(op,), backends=("model",), laws=(law,), case=case, cotangents="none")
    (cell,) = run(replace(request, device=torch.device("cpu")))
    assert (cell.status, cell.reason) == ("ok", "")


def test_without_gradients_no_law_computes_one() -> None:
    """The laws traceable and memory compute them too."""
    request = Request(ops=("logp",), backends=("reference",), laws=("traceable", "memory"), cotangents="none")
    cells = run(replace(request, device=torch.device("cpu")))
    outputs = {(c.law, output["output"]) for c in cells for output in c.outputs}
    assert {c.status for c in cells} == {"ok"} and ("memory", "fwd") in outputs
    assert not any("gradient" in name or name in ("fwd_bwd", "second derivative") for _, name in outputs)


OWN = [(name, backend) for name, proof in proofs().items() for backend in proof.differs]


@pytest.mark.parametrize(("op", "backend"), OWN)
def test_a_case_that_one_backend_has_alone_can_be_asked_for(op: str, backend: str) -> None:
    """As the command does that repeats a cell which has failed."""
    for law in LAWS:
        asked = Request(ops=(op,), backends=(backend,), laws=(law,))
        for case in cases_of(known_op(op), backend, law, asked):
            check_effects(replace(asked, case=case.name))
    with pytest.raises(ContractError, match="unknown case"):
        check_effects(replace(asked, case="none of them"))
