"""Log-probabilities of vLLM's tokens: temperatures, several tokens, prompts, grammars, rounded logits. A stub
of vLLM: `make engines` runs the real one."""

import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import isobit
import stub_vllm as stub
import stub_vllm_v2 as of_v2
from isobit.integrations import vllm
from isobit.integrations.vllm import options, switch, versions
from isobit.integrations.vllm.scores import Temperatures
from stub_vllm import Qwen3ForCausalLM, runner_of


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    yield from stub.installed(monkeypatch)


def of_trainer(model: Any, hidden: torch.Tensor, ids: torch.Tensor, temperatures: list[float]) -> list[float]:
    """One row and one temperature at a time, on the real vocabulary of 37 tokens."""
    logits = isobit.det_linear(hidden, model.lm_head.weight, out_dtype=torch.float32)[:, :37]
    rows = zip(logits.split(1), ids.split(1), temperatures, strict=True)
    return [isobit.logp(z, i.flatten(), temperature=t).item() for z, i, t in rows]


def test_log_probabilities_are_at_the_temperature_of_each_request(engine: dict[str, ModuleType]) -> None:
    with vllm.enable():
        runner = runner_of(Qwen3ForCausalLM())
    hidden, given = torch.randn(4, 64).bfloat16(), [0.7, 0.0, 1.3, 0.7]
    divided = [0.7, 1.0, 1.3, 0.7]  # a greedy request has temperature 1
    gathered = runner.step(hidden, stub.Metadata(given))
    ids, values, ranks = gathered
    assert ranks.tolist() == [3] * 4 and values.shape == (4, 1)
    assert values.flatten().tolist() == of_trainer(runner.model, hidden, ids.long(), divided)
    for one in (0.7, 0.0):  # requests of one temperature need one call
        ids, values, _ = runner.step(hidden, stub.Metadata([one] * 4))
        assert values.flatten().tolist() == of_trainer(runner.model, hidden, ids.long(), [one or 1.0] * 4)
    assert runner.step(hidden, stub.Metadata(given, None)) is None


@pytest.mark.parametrize(
    ("changed", "copies"),
    [
        ({}, False),
        ({"processors": (stub.MinTokensLogitsProcessor({}),)}, False),
        ({"processors": (stub.MinTokensLogitsProcessor({0: 3}),)}, True),
        ({"processors": (object(),)}, True),  # a user's own may do anything
        ({"bad_words_token_ids": {0: [[5]]}}, True),
        ({"no_penalties": False}, True),
        ({"allowed_token_ids_mask": torch.arange(37) == 5}, True),
    ],
)
def test_logits_are_copied_only_if_something_changes_them_in_place(
    engine: dict[str, ModuleType], changed: dict[str, Any], copies: bool
) -> None:
    """Log-probabilities are those of unchanged logits, and a division by temperatures is none in place."""
    with vllm.enable():
        runner = runner_of(Qwen3ForCausalLM())
    assert runner.sampler.topk_topp_sampler.logprobs_mode == "raw_logprobs"
    hidden, given = torch.randn(4, 64).bfloat16(), [0.7, 0.0, 1.3, 1.0]
    ids, values, _ = runner.step(hidden, stub.Metadata(given, **changed))
    wanted = of_trainer(runner.model, hidden, ids[:, 0].long(), [0.7, 1.0, 1.3, 1.0])
    assert values.flatten().tolist() == wanted and runner.logits.isfinite().all()
    processed, filtered = runner.sampler.written
    assert (processed != runner.logits.data_ptr()) is copies and filtered != runner.logits.data_ptr()


def test_temperatures_are_read_once_for_a_batch(engine: dict[str, ModuleType]) -> None:
    """Until vLLM has new metadata: requests have come, gone or changed places."""
    with vllm.enable():
        runner = runner_of(Qwen3ForCausalLM())
    hidden, metadata = torch.randn(3, 64).bfloat16(), stub.Metadata([0.7, 1.3, 0.7])
    runner.step(hidden, metadata)
    kept = runner.sampler.forward.__self__.last[1]
    runner.step(hidden, metadata)
    assert runner.sampler.forward.__self__.last[1] is kept and len(kept.others) == 1
    ids, values, _ = runner.step(hidden, stub.Metadata([1.3, 1.3, 0.7]))
    wanted = of_trainer(runner.model, hidden, ids[:, 0].long(), [1.3, 1.3, 0.7])
    assert values.flatten().tolist() == wanted and runner.sampler.forward.__self__.last[1] is not kept
    two = Temperatures([1.3, 0.7], hidden.device)
    with pytest.raises(vllm.VLLMError, match="3 rows of logits for 2 requests, and not one for each"):
        runner.sampler.forward.__self__.scores.scored(None, runner.logits, ids, two)


def test_of_several_tokens_the_drawn_one_has_the_bits(engine: dict[str, ModuleType]) -> None:
    """The most probable ones, or chosen ones; and tokens of a prompt."""
    with vllm.enable():
        runner = runner_of(Qwen3ForCausalLM())
    hidden, given = torch.randn(2, 64).bfloat16(), [0.7, 1.3]
    for metadata in (stub.Metadata(given, 4), stub.Metadata(given, 0, {0: [1, 2], 1: [36, 0]})):
        ids, values, _ = runner.step(hidden, metadata)
        drawn = of_trainer(runner.model, hidden, ids[:, 0].long(), given)
        assert values[:, 0].tolist() == drawn
        everywhere = torch.where(ids == ids[:, :1], torch.tensor(drawn)[:, None], values)
        assert torch.equal(values, everywhere)  # the drawn token is one of the others, too
        columns = [of_trainer(runner.model, hidden, column.long(), given) for column in ids.t()]
        assert torch.allclose(values.t(), torch.tensor(columns), atol=1e-5)
    prompt = torch.tensor([5, 36])
    scores = runner.sampler.compute_logprobs(runner.model.logits(runner.model.lm_head, hidden))
    ids, values, _ = runner.sampler.gather_logprobs(scores, 2, prompt)
    assert values[:, 0].tolist() == of_trainer(runner.model, hidden, prompt, [1.0, 1.0])


def test_where_logits_are_not_enough_hidden_states_are_used(engine: dict[str, ModuleType]) -> None:
    """After a grammar has changed them, or if `logp` has not the bits of `linear_logp`."""
    with vllm.enable() as on:
        runner = runner_of(Qwen3ForCausalLM())
    hidden = torch.randn(4, 64).bfloat16()
    ids, values, _ = runner.step(hidden, stub.Metadata([0.7] * 4), "a grammar")
    assert (ids % 2 == 1).all()
    wanted = isobit.linear_logp(
        hidden, runner.model.lm_head.weight, ids[:, 0].long(), temperature=0.7, vocab_size=37
    )
    assert torch.equal(values[:, 0], wanted)
    assert isinstance(on._patch, switch._Patch) and on._patch.calls["isobit.linear_logp"] == 1
    unchanged = runner.step(hidden, stub.Metadata([0.7] * 4)).logprobs
    assert not torch.equal(unchanged, values)  # other tokens are drawn without it


def test_logits_can_be_rounded_as_linear_logp_does(engine: dict[str, ModuleType]) -> None:
    with vllm.enable(logits_dtype=torch.bfloat16):
        assert os.environ[options.VARIABLE] == "1,logits_dtype=bfloat16"
        assert "isobit.linear_logp, logits_dtype=bfloat16" in str(vllm.report())
        runner = runner_of(Qwen3ForCausalLM())
        with pytest.raises(vllm.VLLMError, match="logits_dtype=bfloat16 is not that of the model"):
            runner_of(Qwen3ForCausalLM(), model={"dtype": torch.float16})
    hidden, weight = torch.randn(4, 64).bfloat16(), runner.model.lm_head.weight
    rounded = isobit.det_linear(hidden, weight)[:, :37]
    for grammar in (None, "a grammar"):
        ids, values, _ = runner.step(hidden, stub.Metadata([0.7] * 4, 2), grammar)
        drawn = ids[:, 0].long()
        wanted = isobit.logp(rounded, drawn, temperature=0.7) if grammar is None else isobit.linear_logp(
            hidden, weight, drawn, temperature=0.7, vocab_size=37, logits_dtype=torch.bfloat16
        )  # fmt: skip
        assert values.dtype == torch.float32 and torch.equal(values[:, 0], wanted)
    with pytest.raises(isobit.UnsupportedError, match="is not bf16, fp16 or None"):
        vllm.enable(logits_dtype=torch.float32)
    with pytest.raises(isobit.UnsupportedError, match="logits_dtype is for logprobs='linear_logp'"):
        vllm.enable(logprobs="log_softmax", logits_dtype=torch.bfloat16)


def test_log_softmax_of_rounded_logits_can_be_kept(engine: dict[str, ModuleType]) -> None:
    with vllm.enable(logprobs="log_softmax"):
        assert "log-probabilities of torch.log_softmax, of rounded logits" in str(vllm.report())
        runner = runner_of(Qwen3ForCausalLM())
        assert (
            runner.model.logits(runner.model.lm_head, torch.randn(2, 64).bfloat16()).dtype == torch.bfloat16
        )
        assert "forward" not in vars(runner.sampler) and "sample_tokens" not in vars(runner)
    with pytest.raises(isobit.UnsupportedError, match="logprobs='raw' is not one of"):
        vllm.enable(logprobs="raw")  # type: ignore[arg-type]


def test_without_its_lm_head_a_model_keeps_vllms_log_probabilities(engine: dict[str, ModuleType]) -> None:
    model = Qwen3ForCausalLM()
    model.lm_head.tp_size = 2
    with vllm.enable(allow_others=True), pytest.warns(UserWarning, match="keeps vLLM's log-probabilities"):
        runner = runner_of(model)
        assert "lm_head is left to vLLM" in str(vllm.report())
    assert "forward" not in vars(runner.sampler)


# The V2 model runner


@pytest.fixture
def v2(engine: dict[str, ModuleType]) -> Any:
    """A runner of it, with requests in places 0 to 6."""
    with vllm.enable():
        runner = runner_of(Qwen3ForCausalLM(), v2=True)
    given = [
        of_v2.params(0.7), of_v2.params(0.0), of_v2.params(1.0), of_v2.params(1.0, None),
        of_v2.params(1.3, 2), of_v2.params(1.0, 0, top_k=5), of_v2.params(1.0, None, chosen=[1, 2]),
    ]  # fmt: skip
    for place, params in enumerate(given):
        runner.sampler.add_request(place, 7, params)
    return runner


@pytest.mark.parametrize(
    ("places", "temperatures", "copies"),
    [
        ([1, 2], [1.0, 1.0], False),
        ([2, 0, 1, 0], [1.0, 0.7, 1.0, 0.7], True),
        ([4, 2], [1.3, 1.0], True),
        ([5, 3], [1.0, 1.0], True),
        ([6, 6], [1.0, 1.0], False),
    ],
)
def test_v2_has_the_same_log_probabilities(
    v2: Any, places: list[int], temperatures: list[float], copies: bool
) -> None:
    hidden = torch.randn(len(places), 64).bfloat16()
    ids, values, ranks = v2.step(hidden, places)
    drawn = ids[:, 0].long()
    assert values[:, 0].tolist() == of_trainer(v2.model, hidden, drawn, temperatures)
    assert ids.shape == values.shape and ids.shape[1] == {4: 3, 6: 3}.get(places[0], 1)
    columns = [of_trainer(v2.model, hidden, column.long(), temperatures) for column in ids.t()]
    assert torch.allclose(values.t(), torch.tensor(columns), atol=1e-5)
    assert ranks.tolist() == [3] * len(places) and v2.logits.isfinite().all()
    assert (v2.sampler.written != v2.logits.data_ptr()) is copies


def test_v2_reads_the_temperature_of_a_new_request_in_an_old_place(v2: Any) -> None:
    hidden = torch.randn(2, 64).bfloat16()
    assert v2.step(hidden, [3, 3]) is None  # nobody wants log-probabilities
    for temperature in (0.7, 1.3):
        v2.sampler.add_request(1, 7, of_v2.params(temperature))
        ids, values, _ = v2.step(hidden, [1, 2])
        assert values[:, 0].tolist() == of_trainer(v2.model, hidden, ids[:, 0].long(), [temperature, 1.0])


def test_v2_scores_prompts_and_tokens_of_a_grammar(v2: Any) -> None:
    hidden, prompt = torch.randn(2, 64).bfloat16(), torch.tensor([5, 36])
    worker, logits = v2.prompt_logprobs_worker, v2.model.logits
    given = (lambda states: logits(v2.model.lm_head, states), hidden, None, prompt, None, None)
    ids, values, _ = worker.compute_prompt_logprobs(*given)
    assert ids.shape == (2, 3) and values[:, 0].tolist() == of_trainer(v2.model, hidden, prompt, [1.0, 1.0])
    theirs = of_v2.PromptLogprobsWorker().compute_prompt_logprobs(*given)  # other engines keep their own
    assert not torch.equal(theirs.logprobs, values)
    ids, values, _ = v2.step(hidden, [0, 0], "a grammar")
    wanted = isobit.linear_logp(
        hidden, v2.model.lm_head.weight, ids[:, 0].long(), temperature=0.7, vocab_size=37
    )
    assert torch.equal(values[:, 0], wanted)


def test_vllm_chooses_its_model_runner_and_both_are_served(engine: dict[str, ModuleType]) -> None:
    with vllm.enable():
        assert switch.RUNNER not in os.environ
        for v2 in (False, True):
            runner = runner_of(Qwen3ForCausalLM(), v2=v2)
            assert runner.model.logits.forward.__name__ == "_logits"
        told = str(vllm.report())
    assert "model runner: V2 if vLLM chooses it" in told and switch.RUNNER not in told
    assert "Qwen3ForCausalLM, V1 model runner: 1 Att" in told and "LM, V2 model runner: 1 Att" in told


def test_where_v2_cannot_be_served_vllm_takes_v1_and_the_report_says_why(
    engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason(**options: Any) -> str:
        with vllm.enable(**options):
            report = vllm.report()
            assert report is not None and os.environ[switch.RUNNER] == report.variables[switch.RUNNER] == "0"
            with pytest.raises(vllm.VLLMError, match="has the V2 model runner, and should have V1, since"):
                runner_of(Qwen3ForCausalLM(), use_v2_model_runner=True)
        assert f"model runner: {report.runner}" in str(report)
        return report.runner

    assert switch._why_v1("0.32.0", "cpu", "linear_logp") == "V2 is served on GPUs alone"
    assert reason(logprobs="log_softmax") == "V1, since V2 is not served with logprobs='log_softmax'"
    assert switch.RUNNER not in os.environ
    monkeypatch.setenv(switch.RUNNER, "0")
    assert reason() == "V1, since VLLM_USE_V2_MODEL_RUNNER=0 is set"
    monkeypatch.delenv(switch.RUNNER)
    monkeypatch.setattr(of_v2.Sampler, "add_request", lambda self, req_idx, sampling_params: None)  # 0.32
    assert reason() == "V1, since V2 of vLLM 0.26.0 is not the one that isobit was tried with"


def test_a_v2_that_a_user_has_chosen_is_served_or_an_error(
    engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch.RUNNER, "1")
    with vllm.enable():
        assert f"{switch.RUNNER}=1" in str(vllm.report())
    with vllm.enable(logprobs="log_softmax"), pytest.raises(vllm.VLLMError, match="V2 model runner has no l"):
        runner_of(Qwen3ForCausalLM(), v2=True)
    del engine[versions.SAMPLER_V2].Sampler
    with pytest.raises(vllm.VLLMError, match=r"sampler has no Sampler\.__call__"):
        vllm.enable()
