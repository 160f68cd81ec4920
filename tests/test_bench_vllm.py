"""The suite of vLLM's rollouts, on a CPU: with engines that a trainer stands in for, and with a stub of vLLM
in processes of their own."""

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.suites import vllm as suite
from benchmarks.suites.vllm.engine import Generate, Rows, Sizes, Start
from isobit.bench.cases import suite_of
from isobit.bench.goals import summary
from isobit.bench.report import ROW, format_report
from isobit.bench.runner import NothingTimed, run
from isobit.check.process import ProcessEnded
from isobit.integrations.hf import token_logps
from isobit.nn import DetLinear

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]

NAME = "qwen3-0.6b"
OPTIONS: dict[str, Any] = {"device": "cpu", "skip_check": True, "say": lambda text: None}


def one_model() -> Any:
    subject = suite_of("vllm")
    return replace(subject, series=[one for one in subject.series if one.name == NAME])


STARTED: list[tuple[Start, dict[str, str]]] = []
trainer_of = cache(lambda config: suite.Config.build(config, torch.device("cpu"), torch.bfloat16, 0).eval())


@cache
def logps_of(row: tuple[int, ...]) -> list[float]:
    """Of a trainer, for all tokens after the first."""
    with torch.no_grad():
        found: list[float] = token_logps(trainer_of(suite.tiny(suite.MODELS[NAME])), torch.tensor([row]))[
            0
        ].tolist()
    return found


class StandIn:
    """An engine with the trainer's log-probabilities, or with others if isobit is not inside."""

    def __init__(self, start: Start, variables: dict[str, str]) -> None:
        STARTED.append((start, variables))
        self.start, self.rows = start, list[Any]()

    def ask(self, request: Any) -> list[Any]:
        if isinstance(request, Rows):
            return [self.rows[i] for i in request.which]
        assert isinstance(request, Generate)
        shift = 0.0 if self.start.isobit else 0.01
        tokens = [7 * (i + 1) % request.vocabulary for i in range(request.sizes.new)]
        self.rows = []
        for prompt in request.sizes.prompts(request.vocabulary):
            logps = logps_of((*prompt, *tokens))[len(prompt) - 1 :]
            self.rows.append([tokens, [value - shift for value in logps]])
        return [2.0]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Start, dict[str, str]]]:
    monkeypatch.setattr(suite, "Engine", StandIn)
    monkeypatch.setattr(suite, "find_spec", lambda name: object())
    monkeypatch.setattr(suite, "saved", lambda config, *rest: str(tmp_path))
    monkeypatch.setattr(suite, "trainer", lambda folder, device: SimpleNamespace(device=device))
    rows = "token_logps", lambda model, ids: torch.tensor([logps_of(tuple(ids[0].tolist()))])
    monkeypatch.setattr(suite, *rows)
    STARTED.clear()
    return STARTED


def test_rollouts_are_timed_and_their_tokens_compared(stand_ins: list[Any], tmp_path: Path) -> None:
    report = run(one_model(), **OPTIONS, out_dir=tmp_path)
    rows = {(row["direction"], row["impl"]): row for row in report["rows"]}
    assert list(rows) == [
        ("graphs", "isobit"), ("graphs", "isobit:compiled"), ("graphs", "plain"), ("graphs", "invariant"),
        ("eager", "isobit"), ("eager", "plain"), ("eager", "invariant"),
    ]  # fmt: skip
    for (_, impl), row in rows.items():
        assert tuple(row)[: len(ROW)] == ROW and row["tokens"] == 12 and row["first_ms"] == 2.0
        assert row["tokens_differ"] == (0 if impl.startswith("isobit") else 12)
        assert row["tokens_per_s"] == pytest.approx(12e3 / row["ms"], rel=1e-3)
        assert len(row["runs_ms"]) == 3 and row["ms"] == sorted(row["runs_ms"])[1]
    assert rows["eager", "isobit"]["k3"] == 0 and rows["eager", "plain"]["k3"] == pytest.approx(
        5e-5, rel=0.02
    )
    assert "tokens/s" in format_report(report) and "k3 KL" in format_report(report)
    timed = [row | {"method": "sync", "case": "B=64 bf16"} for row in report["rows"]]
    found = {e["what"]: e for e in summary(timed, "plain", suite.GOALS) if e["cells"]}
    assert set(found) == {
        f"{NAME}, graphs, tokens with other bits", f"{NAME}, graphs, 64 and 256 requests",
        f"{NAME}, graphs, of vLLM's own invariance", f"{NAME}, eager, tokens with other bits",
    }  # fmt: skip
    assert found[f"{NAME}, graphs, tokens with other bits"]["met"]


def test_engines_differ_in_what_they_are_named_after(stand_ins: list[Any]) -> None:
    report = run(one_model(), **OPTIONS, directions=["graphs"])
    assert report["rows"]
    kinds = [(start.isobit, variables["VLLM_BATCH_INVARIANT"]) for start, variables in stand_ins]
    assert kinds == [(True, "0"), (False, "0"), (False, "1"), (True, "0")]
    assert len({start.folder for start, _ in stand_ins}) == 1
    config, cuda = suite.MODELS[NAME], torch.device("cuda")
    ours, compiled = (suite.options(config, "graphs", each, cuda) for each in (False, True))
    assert ours["compilation_config"].pop("mode") == 0
    assert ours["compilation_config"].pop("cudagraph_mode") == "FULL_DECODE_ONLY"
    assert ours == compiled
    eager = suite.options(config, "eager", True, cuda)
    assert eager.pop("enforce_eager") and eager == {k: v for k, v in ours.items() if k in eager}
    # Room for all requests at once: 28 layers of 8 heads of 128, keys and values, in two bytes.
    tokens = sum(len(prompt) + 128 for prompt in Sizes(256).prompts(9))
    assert 0 < ours["kv_cache_memory_bytes"] / (28 * 8 * 128 * 2 * 2) - tokens < 256 * 65


def test_a_saved_model_is_the_trainers(tmp_path: Path) -> None:
    folder = suite.saved(suite.tiny(suite.MODELS[NAME]), torch.device("cpu"), torch.bfloat16, 0)
    model = suite.trainer(folder, torch.device("cpu"))
    assert model.config.max_position_embeddings == suite.ROOM and not model.training
    assert type(model.lm_head) is DetLinear and model.lm_head.weight.dtype == torch.bfloat16


def test_a_model_with_experts_is_saved_and_trained() -> None:
    name = "qwen3-30b-a3b-8-layers"
    folder = suite.saved(suite.tiny(suite.MODELS[name]), torch.device("cpu"), torch.bfloat16, 0)
    try:
        model = suite.trainer(folder, torch.device("cpu"))
    finally:
        shutil.rmtree(folder)
    assert {"DetExperts", "DetRouter"} < {type(module).__name__ for module in model.modules()}
    (series, _) = (one for one in suite.SERIES if one.name == name)
    assert "det_grouped_linear" in series.needs
    assert "det_grouped_linear" not in suite.SERIES[0].needs


def test_prompts_are_the_same_in_every_process() -> None:
    prompts = Sizes(64).prompts(1000)
    assert prompts == Sizes(64, new=1).prompts(1000) and len(prompts) == 64
    assert {200 <= len(prompt) <= 1000 for prompt in prompts} == {True}
    assert len({len(prompt) for prompt in prompts}) > 32


def test_without_vllm_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "find_spec", lambda name: None)
    with pytest.raises(NothingTimed, match="vllm is not installed"):
        run(one_model(), **OPTIONS)


# Processes

STUB = """
import os
from types import SimpleNamespace as O

class SamplingParams:
    def __init__(self, **given):
        self.given = given

class LLM:
    def __init__(self, model, **options):
        if model == "broken":
            raise ValueError("no such model")
        self.llm_engine = O(vllm_config=O(compilation_config=O(cudagraph_mode="NONE")))

    def generate(self, given, params, use_tqdm):
        assert params.given["logprobs"] == 0 and params.given["ignore_eos"]
        print("this is no answer")
        mark = float(os.environ["VLLM_BATCH_INVARIANT"])
        tokens = list(range(params.given["max_tokens"]))
        one = [O(token_ids=tokens, logprobs=[{t: O(logprob=mark)} for t in tokens])]
        return [O(outputs=one) for prompt in given]
"""


def test_an_engine_is_a_process_with_its_own_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(suite.__file__).parents[3] / 'src'}")
    engines = [suite.Engine(Start("a", False, {}), {"VLLM_BATCH_INVARIANT": mark}) for mark in ("0", "1")]
    broken = suite.Engine(Start("broken", False, {}), {})
    for engine, mark in zip(engines, (0.0, 1.0), strict=True):
        (ms,) = engine.ask(Generate(Sizes(3, 5, 9, 2), 50))
        assert ms > 0 and engine.ask(Rows((0, 2))) == [[[0, 1], [mark, mark]]] * 2
    with pytest.raises(ProcessEnded):
        broken.ask(Generate(Sizes(3), 50))
    process = engines[0]._process
    engines.clear()
    del engine
    assert process.wait(20) == 0  # it ends with the last reference
