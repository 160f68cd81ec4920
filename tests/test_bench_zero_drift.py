"""The suite of models without drift, on a CPU with tiny models of the same kinds."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.suites import zero_drift as suite
from benchmarks.suites.zero_drift import drift
from isobit.bench.cases import suite_of
from isobit.bench.check_gate import CheckFailed
from isobit.bench.goals import summary
from isobit.bench.report import ROW, format_report
from isobit.bench.runner import run, to_json
from isobit.nn import DetLinear
from isobit.ops.attention.calls import Call, decodes
from isobit.spec.series import Pool
from publish.tables import render_op

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
    assert (ours["tokens"], ours["tokens_differ"], ours["max_abs"]) == (15, 0, 0.0)
    assert theirs["tokens"] == 15 and 0 <= theirs["tokens_differ"] <= 15
    assert rows["fwd_bwd", "isobit"]["max_abs"] < 5e-3 and "that differ" in format_report(report)
    # Goals are for a GPU; as if these had been timed on one, both are there.
    timed = [row | {"method": "sync"} for row in report["rows"]]
    goals = subject.goals
    found = [entry for entry in summary(timed, "sdpa", goals) if entry["cells"]]
    wanted = ("a decoding step", "tokens with other bits", "a training step")
    assert [e["what"] for e in found] == [f"{suite.LLAMA_NAME}, {what}" for what in wanted]
    assert found[1]["met"] and found[1]["goal_most"] == 0 and found[1]["against"] == "1 token"
    (tmp_path / "one.json").write_text(to_json(report | {"rows": timed, "summary": found}))
    table = render_op(tmp_path / "one.json")
    assert "tokens with other bits | tokens_differ | 1 token | 1 | 0.00 (goal 0) |" in table
    assert f"| 0 / {theirs['tokens_differ']} of 15 |" in table
    timed[0]["tokens_differ"] = 1
    assert [
        e["met"] for e in summary(timed, "sdpa", goals) if e["figure"] == "tokens_differ" and e["cells"]
    ] == [False]


@pytest.mark.parametrize("name", [suite.QWEN_MOE_NAME, suite.GPT_OSS_NAME])
def test_models_with_experts_decode_and_train(name: str) -> None:
    """No token and no gradient drifts, a step leaves its cache, with a window too, and a training step agrees
    with that of the model as it is."""
    decode, train = (one for one in suite_of("zero_drift").series if one.name == name)
    pool = Pool(torch.device("cpu"))
    pool.keep(decode.shared(suite.DECODE_SMALL[0]))
    (given,) = decode.make(suite.DECODE_SMALL[0], pool)
    step = given["ours"]
    first, again = step.step(), step.step()
    assert torch.equal(first, again) and step.cache.get_seq_length() == 12
    (rival,) = decode.rivals.values()
    assert rival.function(given)[0].shape == first.shape
    assert given["models"].plain.config._attn_implementation == rival.name == decode.against
    verdict = suite.judge(given).error("decode", (first, suite.OURS))
    assert verdict.more == {"tokens": 15, "tokens_differ": 0}
    (given,) = train.make(suite.TRAIN_SMALL[0], pool)
    assert train.judge(given).error("fwd_bwd", train.call(given, None)) < 5e-3  # type: ignore[union-attr,operator]
    served = {type(module).__name__ for module in given["models"].swapped.modules()}
    experts = "DetClampedExperts" if name == suite.GPT_OSS_NAME else "DetExperts"
    assert {"DetRouter", experts} < served and ("attention_sink" in train.needs) == ("gpt" in name)


@pytest.mark.parametrize("name", [suite.QWEN_NEXT_NAME, suite.QWEN_35_NAME])
def test_models_with_gated_delta_nets_decode_and_train(name: str) -> None:
    """No token and no gradient drifts. A step leaves its keys, and takes the state one token further."""
    decode, train = (one for one in suite_of("zero_drift").series if one.name == name)
    pool = Pool(torch.device("cpu"))
    pool.keep(decode.shared(suite.DECODE_SMALL[0]))
    (given,) = decode.make(suite.DECODE_SMALL[0], pool)
    step = given["ours"]
    state = step.cache.layers[0].state
    first = step.step()
    assert state.tokens.tolist() == [13, 13] and step.cache.get_seq_length() == 12
    (rival,) = decode.rivals.values()
    assert rival.function(given)[0].shape == first.shape == rival.function(given)[0].shape
    assert suite.judge(given).error("decode", (first, suite.OURS)).more == {"tokens": 15, "tokens_differ": 0}
    (given,) = train.make(suite.TRAIN_SMALL[0], pool)
    assert train.judge(given).error("fwd_bwd", train.call(given, None)) < 5e-3  # type: ignore[union-attr,operator]
    assert set(suite.NETS) < set(decode.needs) and set(suite.NETS) < set(train.needs)


def test_costs_of_gated_delta_nets_do_not_grow_with_the_length() -> None:
    """But for the one layer of attention; their state is read in 16 bits."""
    short, long = (suite.cost(suite.QWEN_35, False, {"B": 2, "S": S}, torch.bfloat16) for S in (1024, 4096))
    assert long.fwd_bytes - short.fwd_bytes == 2 * 3072 * 4 * 256 * 2 * 2
    without = replace(suite.QWEN_35, more={**suite.QWEN_35.more, "linear_num_value_heads": 0})
    net = 3 * 4096 * (3 * 128 + 2)  # weights of a value head, in three layers
    other = suite.cost(without, False, {"B": 2, "S": 1024}, torch.bfloat16)
    assert short.fwd_bytes - other.fwd_bytes == 32 * 2 * (net + 2 * 3 * 128 * 128)


def test_costs_count_keys_in_a_window() -> None:
    one, other = (
        suite.cost(config, False, {"B": 1, "S": 4096}, torch.bfloat16)
        for config in (suite.GPT_OSS, replace(suite.GPT_OSS, more={**suite.GPT_OSS.more, "layer_types": []}))
    )
    assert one.fwd_bytes - other.fwd_bytes == (4096 + 128) * 8 * 64 * 2 * 2


def test_the_models_share_their_parameters_and_a_step_leaves_its_cache(args: dict[str, Any]) -> None:
    models = args["models"]
    assert all(a is b for a, b in zip(models.plain.parameters(), models.swapped.parameters(), strict=True))
    assert type(models.swapped.lm_head) is DetLinear and type(models.plain.lm_head) is torch.nn.Linear
    assert models.plain.config._attn_implementation == "sdpa"
    step = args["ours"]
    first, again = step.step(), step.step()
    assert first.shape == (2, 1, 256) and torch.equal(first, again) and step.cache.get_seq_length() == 12


def test_a_model_that_drifts_or_computes_something_else_is_not_timed(
    args: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = replace(suite.judge(args), known={}, passed=False)
    right = known.decoded(True)

    def judged() -> Any:
        return known.error("decode", (torch.zeros(1), suite.OURS))

    drifted = [replace(one, decoded=one.decoded.nextafter(torch.tensor(0.0))) for one in right]
    known.known[True] = drifted
    with pytest.raises(CheckFailed, match="15 of 15 tokens have other bits"):
        judged()
    known.known = {True: right, False: drifted}
    assert known.error("decode", (torch.zeros(1), suite.THEIRS)).more["tokens_differ"] == 15
    with monkeypatch.context() as patch:
        patch.setattr(suite, "gradients_that_differ", lambda model, lengths: (2, 9))
        with pytest.raises(CheckFailed, match="2 of 9 elements of gradients have other bits in a batch"):
            judged()
    known.known[True] = [replace(one, decoded=one.trained * 1.1, trained=one.trained * 1.1) for one in right]
    with pytest.raises(CheckFailed, match="the mean log-probability is"):
        judged()
    known.known[True] = right
    assert judged().more == {"tokens": 15, "tokens_differ": 0}


def test_gradients_that_depend_on_the_batch_are_counted(args: dict[str, Any]) -> None:
    models = args["models"]
    count, total = drift.gradients_that_differ(models.swapped, drift.FEW_TRAINED)
    assert (count, total) == (0, 3 * sum(drift.FEW_TRAINED) * 64)
    hook = models.swapped.model.layers[1].register_forward_hook(
        lambda module, given, output: output * (1.0 + 0.5 * (len(output) - 1))
    )
    assert drift.gradients_that_differ(models.swapped, drift.FEW_TRAINED)[0] > 0
    hook.remove()
    assert all(parameter.grad is None for parameter in models.parameters)


def test_both_models_are_judged_once_for_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    series, pool, calls = suite_of("zero_drift").series[0], Pool(torch.device("cpu")), []
    monkeypatch.setattr(suite, "decoded_by", lambda model, runs, compiles: calls.append(compiles) or [])
    pool.keep(series.shared(suite.DECODE_SMALL[0]))
    first, second = (series.judge(series.make(suite.DECODE_SMALL[0], pool)[0]) for _ in range(2))
    assert isinstance(first, suite.Judge) and first is second
    for _ in range(2):
        first.decoded(True), first.decoded(False)
    assert calls == [True, False]


def test_on_a_gpu_every_way_to_decode_is_judged_and_keys_are_split() -> None:
    ways = {(len(run.lengths), run.sample, run.static) for run in drift.SHORT}
    assert ways == set(product((1, 3, 8), (False, True), (False, True))) and len(drift.SHORT) == 12
    assert {(run.static, run.chunk is None) for run in drift.SHORT} == set(product((False, True), repeat=2))
    assert all(len(set(run.lengths)) == len(run.lengths) for run in drift.RUNS)

    def splits(config: Any, keys: int) -> bool:
        H, KV = config.num_attention_heads, config.num_key_value_heads
        return decodes(Call(1, 1, 1, H, KV, 128, keys, 1, 0, False, False))

    for config in (suite.LLAMA, suite.QWEN):
        assert not any(splits(config, max(run.lengths) + run.new) for run in drift.SHORT)
        assert all(splits(config, max(run.lengths) + run.new) for run in drift.LONG)
        assert not splits(config, drift.LONG[0].lengths[0] + 1)  # it begins with one segment
    ends = [(n, n + run.new) for run in drift.LONG for n in run.lengths]
    for boundary in (1024, 2048):
        assert sum(first < boundary < last for first, last in ends) >= 2
    assert {run.static for run in drift.LONG} == {run.sample for run in drift.LONG} == {False, True}
