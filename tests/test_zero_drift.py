"""Models without drift, tiny ones on a CPU: `generate` against one forward of one row, gradients of a
sequence alone against those in a batch."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isobit
from hf_models import FAMILIES, NEW, SIZES, Drift, Run, forward_logits, made, prompts
from isobit.integrations.hf import token_logps, zero_drift
from isobit.integrations.hf.trial import differing
from isobit.ops.attention import model as attention_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]


ROWS = [(1, False), (3, True), (8, False), (1, True), (3, False), (8, True)]
CACHES = [("dynamic", None), ("static", 4), ("dynamic", 4), ("static", None)]

#: All 24 of them, each in one family; every family has all caches, with and without chunks.
RUNS = {
    family: [Run(*ROWS[(i + j) % 6], *cache) for j, cache in enumerate(CACHES)]
    for i, family in enumerate(FAMILIES)
}
SHORT = Run(3, False, "dynamic", None)
#: A sequence and its cache go beyond a segment while it decodes.
LONG = Run(2, False, "dynamic", None, (1021, 3))


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Any]]:
    """One of each family, without drift."""
    found = {family: made(family) for family in FAMILIES}
    handles = [zero_drift(model) for model in found.values()]
    yield found
    for handle in handles:
        handle.disable()


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_is_decoded_with_other_bits(models: dict[str, Any], family: str) -> None:
    drift = Drift(models[family])
    found = {str(run): drift.of(run) for run in RUNS[family]}
    assert found == dict.fromkeys(found, (0, 0))


def test_no_token_is_decoded_with_other_bits_beyond_a_segment_of_keys() -> None:
    assert LONG.lengths[0] < attention_model.SEGMENT < LONG.lengths[0] + NEW - 1
    model = made("Llama", num_hidden_layers=1)
    with zero_drift(model):
        assert Drift(model).of(LONG) == (0, 0)


@pytest.mark.parametrize(("family", "size"), [("Llama", 16), ("Gemma2", 20)])
def test_small_heads_as_test_models_have_them(family: str, size: int) -> None:
    model = made(family, head_dim=size)
    theirs = forward_logits(model, prompts([12])[0][0])
    with zero_drift(model):
        ours = forward_logits(model, prompts([12])[0][0])
        assert [Drift(model).of(run) for run in (SHORT, Run(3, True, "static", 4))] == [(0, 0)] * 2
    assert (ours - theirs).square().mean().sqrt() < 0.03 * theirs.square().mean().sqrt()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_what_it_did(models: dict[str, Any], family: str) -> None:
    ids, _ = prompts([12])
    ours, theirs = (forward_logits(model, ids[0]) for model in (models[family], made(family)))
    scale = theirs.square().mean().sqrt()
    assert (ours - theirs).square().mean().sqrt() < 0.03 * scale


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
def test_another_order_in_decoding_is_detected(
    models: dict[str, Any], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measurement above can fail: blocks of 8 keys in place of 128 where there is one query a row."""
    folded = attention_model._folded

    def other(q: Any, k: Any, v: Any, sees: Any, scores: Any, segment: int, block: int) -> Any:
        one_query = len(q) == SIZES["num_attention_heads"]
        return folded(q, k, v, sees, scores, segment, 8 if one_query else block)

    monkeypatch.setattr(attention_model, "_folded", other)
    tokens_differ, logits_differ = Drift(models[family]).of(SHORT)
    assert tokens_differ > 0 and logits_differ > tokens_differ


# Gradients


def gradients(model: Any, ids: Tensor, counts: Tensor, **inputs: Any) -> list[Tensor]:
    """Of the embeddings, and of the hidden states after each layer, [B, T, D]; every live token has
    its own weight for its log-probability."""
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    states: list[Tensor] = [embeds]

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output
        state.retain_grad()
        states.append(state)

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
    logits = model(inputs_embeds=embeds, use_cache=False, **inputs).logits
    for hook in hooks:
        hook.remove()
    logp = isobit.logp(logits[:, :-1].float(), ids[:, 1:])
    (logp * torch.sin(ids[:, 1:].float()) * counts[:, 1:]).sum().backward()
    return [state.grad for state in states if state.grad is not None]


@pytest.fixture(scope="module")
def frozen(models: dict[str, Any]) -> dict[str, Any]:
    for model in models.values():
        model.requires_grad_(False)
    return models


@pytest.mark.parametrize(("family", "side"), [*((f, "left") for f in FAMILIES), ("Qwen3", "right")])
def test_the_gradient_of_a_sequence_does_not_depend_on_its_batch(
    frozen: dict[str, Any], family: str, side: str
) -> None:
    model, lengths = frozen[family], [10, 3, 7]
    ids, mask = prompts(lengths)
    if side == "right":
        ids, mask = (torch.stack([t.roll(n) for t, n in zip(x, lengths, strict=True)]) for x in (ids, mask))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    counts = mask * torch.cat((torch.zeros_like(mask[:, :1]), mask[:, :-1]), 1)  # both it and the one before
    found = gradients(model, ids, counts, attention_mask=mask, position_ids=positions)
    assert len(found) == 3
    for row in range(len(lengths)):
        tokens = mask[row].bool()
        own_ids = ids[row, tokens][None]
        alone = gradients(model, own_ids, torch.ones_like(own_ids))
        for whole, own in zip(found, alone, strict=True):
            assert own.any() and differing(whole[row, tokens], own[0]) == 0


def test_another_order_of_gradients_is_detected(
    frozen: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above can fail: blocks of 8 keys in place of 128."""
    ids, _ = prompts([40])
    whole = gradients(frozen["Llama"], ids, torch.ones_like(ids))
    monkeypatch.setattr(attention_model, "block_keys", lambda D: 8)
    other = gradients(frozen["Llama"], ids, torch.ones_like(ids))
    assert differing(whole[0], other[0]) > 0


def test_sequences_that_are_packed_have_the_bits_and_gradients_that_they_have_alone(
    frozen: dict[str, Any],
) -> None:
    model, lengths = frozen["Gemma2"], (8, 2, 5)
    ids, _ = prompts([sum(lengths)])
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    found = gradients(model, ids, (positions > 0).long(), position_ids=positions)
    parts = [gradients(model, part, torch.ones_like(part)) for part in ids.split(lengths, 1)]
    for whole, *own in zip(found, *parts, strict=True):
        assert differing(whole, torch.cat(own, 1)) == 0


def test_log_probabilities_without_logits_have_one_class_too(models: dict[str, Any]) -> None:
    """`token_logps` reads the head of such a model past its layer."""
    ids, _ = prompts([9])
    found = token_logps(models["Qwen2"], ids)
    logits = forward_logits(models["Qwen2"], ids[0])[:-1]
    assert (found[0] - isobit.logp(logits, ids[0, 1:])).abs().max() < 0.05
