"""The suite of models without drift, on a CPU with tiny models of the same kinds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from isobit.bench.cases import suite_of
from isobit.bench.goals import summary
from isobit.bench.report import ROW, format_report
from isobit.bench.runner import run
from isobit.bench.series import Pool
from isobit.bench.suites import zero_drift as suite
from isobit.bench.vouch import CheckFailed
from isobit.nn import DetLinear

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]


@pytest.fixture(scope="module")
def args() -> dict[str, Any]:
    series = suite_of("zero_drift").series[0]
    (found,) = series.make(suite.DECODE_SMALL[0], Pool(torch.device("cpu")))
    return found


def test_steps_of_both_kinds_are_timed(tmp_path: Path) -> None:
    subject = suite_of("zero_drift")
    one = replace(subject, series=[one for one in subject.series if one.name == suite.LLAMA_NAME])
    report = run(one, device="cpu", repetitions=2, skip_check=True, say=lambda t: None, out_dir=tmp_path)
    assert (tmp_path / "cpu" / "zero_drift.json").is_file()
    rows = {(row["direction"], row["impl"]): row for row in report["rows"]}
    assert list(rows) == [
        ("decode", "isobit"),
        ("decode", "sdpa"),
        ("fwd_bwd", "isobit"),
        ("fwd_bwd", "sdpa"),
    ]
    assert all(tuple(row)[: len(ROW)] == ROW for row in rows.values())
    ours, theirs = rows["decode", "isobit"], rows["decode", "sdpa"]
    assert (ours["tokens"], ours["tokens_differ"], ours["max_abs"]) == (9, 0, 0.0)
    assert theirs["tokens"] == 9 and 0 <= theirs["tokens_differ"] <= 9
    assert rows["fwd_bwd", "isobit"]["max_abs"] < 5e-3 and "that differ" in format_report(report)
    # Goals are for a GPU; as if these had been timed on one, both are there.
    timed = [row | {"method": "sync"} for row in report["rows"]]
    goals = [goal for series in subject.series for goal in series.goals]
    assert [e["what"] for e in summary(timed, "sdpa", goals) if e["cells"]] == [
        f"{suite.LLAMA_NAME}, a {kind} step" for kind in ("decoding", "training")
    ]


def test_the_models_share_their_parameters_and_a_step_leaves_its_cache(args: dict[str, Any]) -> None:
    models = args["models"]
    assert all(a is b for a, b in zip(models.plain.parameters(), models.swapped.parameters(), strict=True))
    assert type(models.swapped.lm_head) is DetLinear and type(models.plain.lm_head) is torch.nn.Linear
    assert models.plain.config._attn_implementation == "sdpa"
    step = args["ours"]
    first, again = step.step(), step.step()
    assert first.shape == (2, 1, 256) and torch.equal(first, again) and step.cache.get_seq_length() == 12


def test_a_model_that_drifts_or_computes_something_else_is_not_timed(args: dict[str, Any]) -> None:
    known = suite.judge(args)
    right = known.drift(True)
    assert known.error("decode", (torch.zeros(1), suite.OURS)).more["tokens_differ"] == 0
    known.known[True] = replace(right, decoded=right.decoded.nextafter(torch.tensor(0.0)))
    assert known.error("decode", (torch.zeros(1), suite.THEIRS)).max_abs is not None
    with pytest.raises(CheckFailed, match="9 of 9 tokens have other bits"):
        known.error("decode", (torch.zeros(1), suite.OURS))
    known.known[True] = suite.Drift(right.decoded * 1.1, right.trained * 1.1)
    with pytest.raises(CheckFailed, match="the mean log-probability is"):
        known.error("decode", (torch.zeros(1), suite.OURS))
