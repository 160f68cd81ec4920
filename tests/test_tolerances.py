"""Guards tolerances from a user's file: applied, named if they are looser, refused if they are invalid."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from isobit.cli.main import app
from isobit.frame.contract import ContractError
from isobit.spec.tolerances import Tolerances, read_tolerances

LOGP = ["check", "--op", "logp", "--backend", "reference", "--law", "accuracy"]
SMALL = [*LOGP, "--dim", "N=3", "--dim", "V=9"]


def written(path: Path, table: Any) -> Path:
    path.write_text(json.dumps(table))
    return path


def test_the_callers_figure_comes_first_and_the_architectures_before_it(tmp_path: Path) -> None:
    table: dict[str, Any] = {"classes": {"logprob": {"forward": {"bf16": 3.0}}}}
    table["arch"] = {"sm_90": {"logprob": {"forward": {"bf16": 0.25}}}}
    found = read_tolerances(written(tmp_path / "own.json", table))
    assert found.ulps("logprob", "forward", torch.bfloat16, "cpu") == 3.0
    assert found.ulps("logprob", "forward", torch.bfloat16, "sm_90") == 0.25
    assert found.ulps("logprob", "gradient", torch.bfloat16, "sm_90") == 1.0
    assert found.looser() == ["logprob forward bf16: 3 units, isobit allows 1"]
    assert Tolerances().looser() == []


@pytest.mark.parametrize("key", ["sm90", "sm_90"])
def test_an_architecture_has_two_spellings_as_on_the_command_line(tmp_path: Path, key: str) -> None:
    figures = {"logprob": {"forward": {"bf16": 0.25}}}
    found = read_tolerances(written(tmp_path / "own.json", {"arch": {key: figures, "gfx90a": {}}}))
    assert found.ulps("logprob", "forward", torch.bfloat16, "sm_90") == 0.25


def test_a_check_applies_them_and_its_report_names_what_is_looser(tmp_path: Path) -> None:
    def outputs(factor: float) -> tuple[str, dict[str, Any]]:
        own = written(tmp_path / f"{factor}.json", {"classes": {"logprob": {"forward": {"fp32": factor}}}})
        report = tmp_path / "report.json"
        done = CliRunner().invoke(app, [*SMALL, "--tolerances", str(own), "--json", str(report)])
        assert done.exit_code == 0, done.output
        return done.output, json.loads(report.read_text())

    (_, tight), (text, loose) = outputs(0.5), outputs(8.0)
    slack = [report["candidates"][0]["cases"][0]["outputs"][0]["rtol"] for report in (tight, loose)]
    assert slack[1] == 16 * slack[0]
    assert "LOOSER than isobit's: logprob forward fp32: 8 units" in text
    assert tight["tolerances"]["looser"] == [] and len(loose["tolerances"]["looser"]) == 1
    assert "--tolerances" in loose["candidates"][0]["cases"][0]["command"]


def test_a_figure_that_is_too_tight_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no slack at all nothing but torch's own numbers passes, and these are a little off."""
    from isobit.ops.logp import reference

    plain = reference.logp
    off = lambda **args: (plain(**args)[0] * (1 + 2**-22), *plain(**args)[1:])  # noqa: E731
    monkeypatch.setattr(reference, "logp", off)
    own = written(tmp_path / "own.json", {"classes": {"logprob": {"forward": {"fp32": 0}}}})
    done = CliRunner().invoke(app, [*SMALL, "--tolerances", str(own)])
    assert done.exit_code == 1 and "beyond the bound" in done.output
    assert CliRunner().invoke(app, SMALL).exit_code == 0


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([], "the file must be an object"),
        ({"clases": {}}, "unknown 'clases' in the file; known: classes, arch"),
        ({"classes": {"logits": {}}}, "unknown 'logits' in classes; known: logprob"),
        ({"classes": {"logprob": {"backward": {}}}}, "unknown 'backward' in classes logprob"),
        ({"arch": {"sm_90": {"logprob": {"forward": {"int8": 1}}}}}, "unknown 'int8' in arch sm_90 logprob"),
        ({"arch": {"h200": {}}}, "unknown 'h200' in arch; known: cpu, sm_90, gfx942, and others"),
        ({"arch": {"sm_90": {}, "sm90": {}}}, "arch has sm_90 twice, once as 'sm90'"),
        ({"classes": {"logprob": {"forward": {"fp32": -1}}}}, "must be units from 0 on, not -1"),
        ({"classes": {"logprob": {"forward": {"fp32": "1"}}}}, "must be units from 0 on, not '1'"),
    ],
    ids=lambda value: "",
)
def test_an_invalid_file_is_an_error_that_says_where(tmp_path: Path, table: Any, message: str) -> None:
    with pytest.raises(ContractError) as error:
        read_tolerances(written(tmp_path / "own.json", table))
    assert message in str(error.value)


def test_published_results_are_of_isobits_own_figures(tmp_path: Path) -> None:
    own = written(tmp_path / "own.json", {})
    done = CliRunner().invoke(app, [*SMALL, "--tolerances", str(own), "--results", str(tmp_path)])
    assert isinstance(done.exception, ContractError) and not (tmp_path / "cpu").exists()
    with pytest.raises(ContractError, match="cannot be read"):
        read_tolerances(tmp_path / "nowhere.json")
