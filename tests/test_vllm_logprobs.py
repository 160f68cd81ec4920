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
from isobit.integrations import vllm
from isobit.integrations.vllm import switch
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
        assert os.environ[switch.VARIABLE] == "1,logits_dtype=bfloat16"
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
