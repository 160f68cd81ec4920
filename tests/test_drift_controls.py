"""What `isobit.drift` must not overlook or blame wrongly: a model that does not repeat itself, numbers
that are none, and options of an engine that nobody reads."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import AttentionInterface

import isobit
from isobit.drift import bits
from isobit.drift.axes import alone
from isobit.drift.calls import Run
from isobit.drift.readings import Sampling, read_as
from isobit.drift.replay import Replayed
from isobit.drift.report import Report, verdict
from isobit.drift.rollout import measure_rollout
from isobit.drift.rollout_file import Rollout, options_of
from isobit.frame.contract import ContractError
from row_by_row import NAME, attend, made, nudged, planted, sequences

MODEL = made()
LAYERS = MODEL.model.layers


def strict(report: Report) -> Any:
    """The report as JSON without NaN and infinity."""
    return json.loads(json.dumps(report.to_json(), allow_nan=False))


# A model that does not repeat itself


@contextmanager
def every_second_call(module: nn.Module) -> Iterator[None]:
    theirs, calls = module.forward, [0]

    def forward(x: Tensor) -> Tensor:
        calls[0] += 1
        return nudged(theirs(x)) if calls[0] % 2 == 0 else theirs(x)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


@pytest.mark.parametrize("lengths", [(12,), (12, 9)])
def test_a_model_that_changes_from_run_to_run_is_named_and_nothing_else(lengths: tuple[int, ...]) -> None:
    with every_second_call(LAYERS[1].mlp.up_proj):
        report = isobit.drift.measure(MODEL, sequences(lengths), vs=["batch", "padding"], padding=3)
    assert report.repeat is not None and report.repeat.differ and not report.passed
    assert report.causes[0].startswith("the model has other bits when the same forward runs again")
    assert all(row.where is None for row in report.rows) and not report.remedies
    assert verdict(strict(report)).startswith("the model does not repeat itself")


def test_a_model_that_repeats_itself_has_a_row_that_says_so() -> None:
    report = isobit.drift.measure(MODEL, sequences((12, 9)), vs=["batch"], locate=False)
    assert report.repeat is not None and (report.repeat.differ, report.repeat.metrics["tokens"]) == (0, 19)
    assert "repeat: the reference again" in str(report) and not report.causes


# Log-probabilities that are no numbers


@contextmanager
def not_a_number(module: nn.Module, when: Any, rows: slice) -> Iterator[None]:
    theirs = module.forward

    def forward(x: Tensor) -> Tensor:
        y = theirs(x)
        if when(x):
            y[:, rows] = torch.nan
        return y

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def test_a_nan_is_named_and_counts_as_a_difference() -> None:
    with not_a_number(MODEL.lm_head, lambda x: x.shape[0] > 1, slice(3, 5)):
        report = isobit.drift.measure(MODEL, sequences((12,)), vs=["batch"], batch_sizes=[2], locate=False)
    row = report.rows[0]
    assert (row.differ, row.metrics["tokens"]) == (2, 11) and row.metrics["k3_kl"] == 0 and not report.passed
    assert report.causes[0] == (
        "batch, 2 rows: 2 log-probabilities are NaN, in this way of computing; the first is that of token 4 "
        "of sequence 0"
    )
    strict(report)


def test_a_nan_of_the_reference_is_named() -> None:
    with not_a_number(MODEL.lm_head, lambda x: True, slice(0, None)):
        report = isobit.drift.measure(MODEL, sequences((12,)), vs=["padding"], padding=3)
    assert not report.passed and "11 log-probabilities are NaN, in the reference and in this" in str(report)
    assert "no log-probability is a number" in str(report) and not report.rows
    assert "NaN" in verdict(strict(report))


def test_a_token_without_probability_on_both_sides_is_equal() -> None:
    ids = sequences((12,))
    with torch.no_grad():
        theirs = MODEL.lm_head.forward

        def forward(x: Tensor) -> Tensor:
            y = theirs(x)
            y[..., int(ids[0][4])] = -torch.inf
            return y

        MODEL.lm_head.forward = forward
        try:
            report = isobit.drift.measure(MODEL, ids, vs=["padding"], padding=3, locate=False)
        finally:
            del MODEL.lm_head.forward
    assert report.passed and report.rows[0].metrics["tokens"] == 11
    strict(report)


# Engines


def rollout(sampling: Sampling, **options: Any) -> list[Rollout]:
    """What an engine with this sampling returns for one long sequence."""
    (ids,) = sequences((50,))
    ((logps,),) = Run(MODEL, torch.device("cpu")).read(alone([ids]), [ids], [read_as(sampling)])
    read = options_of({"logprobs_mode": "processed_logprobs", **options}, "x")
    return [Rollout(ids[:2].tolist(), ids[2:].tolist(), logps[2:], "vllm", "0", read)]


def test_a_token_outside_of_top_k_is_counted_apart() -> None:
    """At the border of top-k numerics decide. One such token made the mean difference infinite."""
    (one,) = rollout(Sampling())
    ranks = ranked(one)
    top_k = sorted(ranks)[-2]  # all tokens but one are among as many
    ((logps,),) = Run(MODEL, torch.device("cpu")).read(
        alone([torch.tensor(one.ids)]), [torch.tensor(one.ids)], [read_as(Sampling(top_k=top_k))]
    )
    engine = logps[2:].masked_fill(logps[2:].isinf(), -3.0)
    options = options_of({"logprobs_mode": "processed_logprobs", "top_k": top_k}, "x")
    report = measure_rollout(MODEL, [Rollout(one.prompt_ids, one.output_ids, engine, options=options)])
    last = report.rows[-1]
    assert last.setting == f"with top_k {top_k}" and last.differ == 1 and last.metrics["logp_diff_max"] == 0
    assert f"1 tokens are not among those of the trainer's top_k {top_k}" in str(report)
    assert len(report.causes) == 1 and "top_k" in report.causes[0]
    strict(report)


def ranked(one: Rollout) -> list[int]:
    with torch.no_grad():
        logits = MODEL(torch.tensor([one.ids])).logits[0, 1:-1]
    own = logits.gather(1, torch.tensor(one.output_ids)[:, None])
    return [int(n) + 1 for n in (logits > own).sum(1)]


def test_options_that_are_not_read_are_named() -> None:
    given = rollout(
        Sampling(), min_p=0.1, repetition_penalty=1.2, seed=3, presence_penalty=0.0, logit_bias={"5": 2}
    )
    report = measure_rollout(MODEL, given)
    said = "options that are not read, and what they change is in the last row: min_p 0.1, "
    assert said + "repetition_penalty 1.2, logit_bias {'5': 2}" in str(report)
    assert "not read" not in str(measure_rollout(MODEL, rollout(Sampling(), min_p=0, logit_bias=None)))


def test_a_small_mistake_is_named_too() -> None:
    """A temperature of 1.01 changes a log-probability by less than a mean of 0.02."""
    given = rollout(Sampling(1.01))
    report = measure_rollout(MODEL, given)
    assert report.rows[0].metrics["logp_diff_mean"] < 0.02
    assert len(report.causes) == 1 and "of temperature 1.01, the trainer's of 1" in report.causes[0]
    assert report.rows[-1].differ == 0


# Bounds


def test_digests_of_a_growing_cache_keep_little() -> None:
    bits.weights.cache_clear()
    for length in range(1, 200):
        bits.weights(length, 2)
    assert bits.weights.cache_info().currsize <= 64


def test_a_rollout_file_is_measured_from_disk(tmp_path: Path) -> None:
    path = tmp_path / "rollout.jsonl"
    path.write_text('{"prompt_ids": [1, 2], "output_ids": [3, 4], "logprobs": [-1.0, -2.0]}\n')
    strict(measure_rollout(MODEL, path))


def test_a_fault_is_still_named_with_the_control() -> None:
    with planted(LAYERS[0].mlp.up_proj, lambda x: x.shape[0] > 4):
        report = isobit.drift.measure(MODEL, sequences((12,)), vs=["batch"], batch_sizes=[5])
    assert report.repeat is not None and not report.repeat.differ and set(report.remedies) == {"linear"}


@pytest.mark.parametrize(("vs", "tokens"), [("batch", 12), ("length", 24), ("packed", 21)])
def test_the_longest_context_is_said(vs: str, tokens: int) -> None:
    report = isobit.drift.measure(MODEL, sequences((12, 9)), vs=[vs], locate=False)
    assert (
        f"the longest context that was compared has {tokens} tokens: what begins beyond is not seen"
        in str(report)
    )


# Models that are not what they should be


def bert(size: float) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        initializer_range=size,
    )  # fmt: skip
    return transformers.BertLMHeadModel(config).eval()


@pytest.mark.parametrize("size", [0.02, 0.5])
def test_a_model_that_sees_later_tokens_is_refused(size: float) -> None:
    with pytest.raises(ContractError, match=r"BertLMHeadModel.*: not a causal LM: the logits of a token"):
        isobit.drift.measure(bert(size), sequences((12,)))
    with pytest.raises(ContractError, match="not a causal LM"):
        measure_rollout(bert(size), rollout(Sampling()))
    attends_to_all = made(layers=1)
    with attending_to_all(), pytest.raises(ContractError, match="not a causal LM"):
        isobit.drift.measure(attends_to_all, sequences((12,)))


@contextmanager
def attending_to_all() -> Iterator[None]:
    def wrong(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Any:
        return attend(module, q, k, v, torch.ones_like(mask), **options)

    AttentionInterface.register(NAME, wrong)
    try:
        yield
    finally:
        AttentionInterface.register(NAME, attend)


def test_a_model_that_cannot_compute_a_sequence_says_why() -> None:
    def broken(x: Tensor) -> bool:
        raise RuntimeError("\nmat1 and mat2 cannot be multiplied\nmore lines")

    with planted(LAYERS[0].mlp.up_proj, broken), pytest.raises(
        ContractError, match=r"LlamaForCausalLM.: it cannot compute a sequence alone: mat1 and mat2 cannot"
    ):  # fmt: skip
        isobit.drift.measure(MODEL, sequences((12,)))


def test_what_a_model_cannot_compute_costs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that raises any error, and a module that cannot be called again by itself."""

    def broken(x: Tensor) -> bool:
        if x.shape[0] == 5:
            raise RuntimeError("shapes do not fit")
        return x.shape[0] == 2

    def not_again(self: Any, *given: Any) -> None:
        raise RuntimeError("called twice")

    monkeypatch.setattr(Replayed, "after", not_again)
    with planted(LAYERS[0].mlp.up_proj, broken):
        report = isobit.drift.measure(MODEL, sequences((12,)), vs=["batch"], batch_sizes=[2, 5])
    (row,) = report.rows[:1]
    assert (row.setting, row.where) == ("2 rows", None) and row.differ and not report.passed
    assert "batch, 5 rows, did not run: the model does not take it (shapes do not fit)" in str(report)
    assert "where it begins did not run: the model does not take it (called twice)" in str(report)


def test_nothing_compared_is_not_equal() -> None:
    report = isobit.drift.measure(MODEL, [[1, 2]], vs=["decode"], locate=False)
    assert not report.rows and not report.passed and verdict(strict(report)) == "nothing was compared"
