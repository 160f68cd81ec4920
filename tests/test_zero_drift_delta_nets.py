"""Gated delta-net models without drift, tiny ones on a CPU: decoding against one forward, padding, chunks,
beams, gradients, and what is refused."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from hf_models import Drift, Run, forward_logits, made, prompts
from isobit.integrations.hf import HFError, delta_nets, zero_drift
from isobit.integrations.hf.trial import differing
from isobit.layers.linear import DetLinear
from no_waiting import NoWaiting

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]

NETS: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Next": EXPERTS | {"mlp_only_layers": [0]},
    "Qwen3_5": {},
    "Qwen3_5Moe": EXPERTS,
}

#: The second goes over the end of a chunk of 64 tokens while it decodes, and its prompts are cut.
RUNS = [Run(5, True, "dynamic", 4), Run(3, False, "dynamic", 50, (61, 3, 66)), Run(3, False, "static", None)]


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Any]]:
    yield {family: made(family, **NETS | options) for family, options in FAMILIES.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_is_decoded_with_other_bits(models: dict[str, Any], family: str) -> None:
    model, tokens = models[family], prompts([12])[0][0]
    plain = forward_logits(model, tokens)
    kinds = {name: type(m) for name, m in model.named_modules()}
    with zero_drift(model) as on:
        drift = Drift(model)
        runs = RUNS if family == "Qwen3Next" else RUNS[:1]
        assert [drift.of(run) for run in runs] == [(0, 0)] * len(runs)
        assert on.changed["isobit.gated_delta_rule"] == ["model.layers.0.linear_attn"]
        assert on.changed["isobit.rms_norm_gated"] == ["model.layers.0.linear_attn.norm"]
        assert "Conv1d" not in str(on)
        assert on.check() is not None
    assert {name: type(m) for name, m in model.named_modules()} == kinds
    assert torch.equal(forward_logits(model, tokens), plain)


def test_a_model_computes_what_it_did(models: dict[str, Any]) -> None:
    """As close to the same weights in fp32 as transformers is, within a half."""
    model, tokens = models["Qwen3_5"], prompts([80])[0][0]
    truth, plain = forward_logits(copy.deepcopy(model).float(), tokens), forward_logits(model, tokens)
    with zero_drift(model):
        ours = forward_logits(model, tokens)
    assert (ours - truth).norm() < 1.5 * (plain - truth).norm()


def test_the_model_as_it_is_has_drift(models: dict[str, Any]) -> None:
    _, logits = Drift(models["Qwen3_5"]).of(RUNS[1])
    assert logits > 0


@pytest.mark.parametrize("wrong", ["recurrence", "convolution", "chunks of the batch"])
def test_another_order_in_decoding_is_detected(
    models: dict[str, Any], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with other roundings, a convolution in another order, chunks that are counted from the first
    token of the padded batch."""
    model = models["Qwen3_5"]
    with zero_drift(model):
        if wrong == "recurrence":
            monkeypatch.setattr(
                delta_nets, "gated_delta_rule_step", off_by_a_unit(delta_nets.gated_delta_rule_step)
            )
        elif wrong == "convolution":
            monkeypatch.setattr(delta_nets, "causal_conv1d", by_torch(delta_nets.causal_conv1d))
        else:
            monkeypatch.setattr(delta_nets.Tokens, "of", classmethod(whole_batch))
        tokens, logits = Drift(model).of(RUNS[1])
    assert tokens > 0 and logits > 0


def off_by_a_unit(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The output of one token off by one unit in the last place, as another order would have it."""

    def run(state: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> Tensor:
        out = step(state, q, k, v, g, beta, **options)
        return out if q.shape[1] > 1 else torch.nextafter(out, 2 * out)

    return run


def by_torch(conv: Callable[..., Any]) -> Callable[..., Any]:
    """For one token the sum from its own input to the oldest."""

    def run(x: Tensor, weight: Tensor, **options: Any) -> Any:
        made = conv(x, weight, **options)
        if x.shape[1] > 1 or options["initial_state"] is None:
            return made
        window = torch.cat([options["initial_state"], x], 1)
        rounded = (window.transpose(1, 2) * weight).flip(-1).cumsum(-1)[..., -1]
        return torch.nn.functional.silu(rounded)[:, None], made[1]

    return run


def whole_batch(cls: Any, module: Any, hidden: Tensor, mask: Tensor | None) -> Any:
    """Padding is a token like any other."""
    B, T = hidden.shape[:2]
    return cls(B, T)


# Padding, caches, beams


def test_where_the_padding_is_changes_no_bit(models: dict[str, Any]) -> None:
    model, lengths = models["Qwen3_5"], (9, 3, 70)
    ids = [prompts([n], seed=n)[0][0] for n in lengths]
    with zero_drift(model), torch.no_grad():
        alone = [model(row[None], use_cache=False).logits[0] for row in ids]
        for side in ("left", "right"):
            T = 75
            batch, mask = torch.zeros(3, T, dtype=torch.int64), torch.zeros(3, T, dtype=torch.int64)
            for b, row in enumerate(ids):
                here = slice(T - len(row), T) if side == "left" else slice(0, len(row))
                batch[b, here], mask[b, here] = row, 1
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            made = model(batch, attention_mask=mask, position_ids=positions, use_cache=False).logits
            for b, row in enumerate(alone):
                assert differing(made[b][mask[b].bool()], row) == 0


def turns(counts: tuple[int, ...], T: int, seed: int) -> tuple[Tensor, Tensor]:
    """(what a layer gets, mask) of rows with so many tokens, the padding behind them."""
    hidden = torch.randn(len(counts), T, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    mask = (torch.arange(T) < torch.tensor(counts)[:, None]).long()
    return hidden.masked_fill(~mask.bool()[..., None], float("nan")), mask


def test_a_second_turn_is_one_call_with_the_bits_of_one_forward(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows with different lengths, at different places: the op packs their whole chunks."""
    model, calls = models["Qwen3_5"], list[tuple[list[int], bool]]()
    step = delta_nets.gated_delta_rule_step

    def counted(*args: Any, **options: Any) -> Tensor:
        calls.append((options["lengths"].tolist(), options["from_empty"]))
        return step(*args, **options)

    lengths = [(70, 3, 10), (2, 140, 0)]
    given = [turns(counts, max(counts) + 1, seed=i) for i, counts in enumerate(lengths)]
    with zero_drift(model), torch.no_grad():
        layer, cache = model.model.layers[0].linear_attn, DynamicCache(config=model.config)
        monkeypatch.setattr(delta_nets, "gated_delta_rule_step", counted)
        outs = [layer(x, cache_params=cache, attention_mask=mask) for x, mask in given]
        assert calls == [([70, 3, 10], True), ([2, 140, 0], False)]
        for b in range(3):
            ours, row = (
                torch.cat([each[b, : counts[b]] for each, counts in zip(rows, lengths, strict=True)])
                for rows in (outs, [x for x, _ in given])
            )
            assert differing(ours, layer(row[None])[0]) == 0


def test_decoding_makes_the_host_wait_for_nothing(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the layer, between the ops: a token, and tokens with a mask that another layer has read."""
    model, (first, mask), watch = models["Qwen3_5"], turns((5, 2), 5, seed=0), NoWaiting()
    token, (more, again) = turns((1, 1), 1, seed=1)[0], turns((3, 4), 4, seed=2)
    with zero_drift(model), torch.no_grad():
        layer, cache = model.model.layers[0].linear_attn, DynamicCache(config=model.config)
        layer(first, cache_params=cache, attention_mask=mask)
        other = copy.deepcopy(cache)
        expected = [layer(token, cache_params=other), layer(more, cache_params=other, attention_mask=again)]
        for name in ("gated_delta_rule_step", "causal_conv1d", "delta_gates", "rms_norm_gated"):
            monkeypatch.setattr(delta_nets, name, watch.outside(getattr(delta_nets, name)))
        monkeypatch.setattr(DetLinear, "forward", watch.outside(DetLinear.forward))
        with watch:
            found = [layer(token, cache_params=cache), layer(more, cache_params=cache, attention_mask=again)]
        assert all(differing(*pair) == 0 for pair in zip(found, expected, strict=True))
        with pytest.raises(AssertionError, match="the host waits: tolist"), watch:
            layer(more, cache_params=cache, attention_mask=again.clone())


def test_beams_are_reordered_with_their_states(models: dict[str, Any]) -> None:
    """The same beams as with the whole sequences computed anew for every token."""
    model, (ids, mask) = models["Qwen3_5"], prompts([7, 4])
    with zero_drift(model):
        found = [
            model.generate(
                ids,
                attention_mask=mask,
                num_beams=3,
                max_new_tokens=5,
                do_sample=False,
                use_cache=cached,
                return_dict_in_generate=True,
                output_scores=True,
            )
            for cached in (True, False)
        ]
    assert torch.equal(found[0].sequences, found[1].sequences)
    assert torch.equal(found[0].sequences_scores, found[1].sequences_scores)


def test_a_cache_that_is_reset_begins_anew(models: dict[str, Any]) -> None:
    model, tokens = models["Qwen3_5"], prompts([6])[0]
    with zero_drift(model), torch.no_grad():
        first = model(tokens, use_cache=True)
        first.past_key_values.reset()
        linear = first.past_key_values.layers[0]
        assert not any(linear.has_previous_state.values())
        again = model(
            tokens, use_cache=True, past_key_values=type(first.past_key_values)(config=model.config)
        )
    assert torch.equal(first.logits, again.logits)


# Gradients


def gradients(model: Any, ids: Tensor, mask: Tensor, **options: Any) -> dict[str, Tensor]:
    model.zero_grad()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=positions, **options).logits.float()
    (logits * mask[..., None]).square().mean().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_every_parameter_gets_a_gradient(models: dict[str, Any]) -> None:
    """As close to that of the same weights in fp32 as that of transformers is, within a half; and the same
    with a cache that nobody asked for."""
    model, (ids, mask) = models["Qwen3_5"], prompts([9, 5])
    truth = gradients(copy.deepcopy(model).float(), ids, mask, use_cache=False)
    theirs = gradients(model, ids, mask, use_cache=False)
    with zero_drift(model):
        ours = gradients(model, ids, mask, use_cache=False)
        cached = gradients(model, ids, mask, use_cache=True)
    assert ours.keys() == theirs.keys() == cached.keys()
    for name in ours:
        assert torch.equal(ours[name], cached[name]), name
        far, near = (float((g[name].float() - truth[name]).norm()) for g in (ours, theirs))
        assert far < 1.5 * near + 0.01 * float(truth[name].norm()), name


def test_last_inputs_are_computed_for_a_cache_only(
    models: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, own = [], delta_nets.causal_conv1d

    def recorded(*given: Any, **options: Any) -> Any:
        asked.append(options["return_final_state"])
        return own(*given, **options)

    monkeypatch.setattr(delta_nets, "causal_conv1d", recorded)
    model, (ids, mask) = models["Qwen3_5"], prompts([9, 5])
    with zero_drift(model):
        for cached in (False, True):
            asked.clear()
            model(ids, attention_mask=mask, use_cache=cached)
            assert set(asked) == {cached}


# What is refused


def refused(model: Any, reason: str) -> None:
    with pytest.raises(HFError, match=reason):
        zero_drift(model)


def test_sizes_that_are_not_served_are_refused() -> None:
    refused(made("Qwen3_5", **NETS | {"linear_key_head_dim": 32}), "has heads of 32 and 64; keys of 64, 128")
    refused(made("Qwen3_5", **NETS | {"linear_conv_kernel_dim": 6}), "a convolution of 6 taps; 2, 3 and 4")


def test_layers_of_another_class_are_refused() -> None:
    model = made("Qwen3_5", **NETS)

    class Other(type(model.model.layers[0].linear_attn)):  # type: ignore[misc]
        pass

    model.model.layers[0].linear_attn.__class__ = Other
    refused(model, "it has layers of linear_attention; of these Qwen3NextGatedDeltaNet")


def test_calls_that_would_mix_sequences_are_refused(models: dict[str, Any]) -> None:
    model, (ids, mask) = models["Qwen3_5"], prompts([6, 3])
    with zero_drift(model), torch.no_grad():
        positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
        with pytest.raises(HFError, match="packed, and its layers of linear_attention do not separate them"):
            model(ids[:1], position_ids=positions, use_cache=False)
        with pytest.raises(HFError, match="one token at a time, and in a row it is padding"):
            model(ids[:, :1], attention_mask=mask[:, :1], use_cache=True)
        with pytest.raises(HFError, match="has 6 columns for 4 tokens"):
            model(ids[:, :4], attention_mask=mask, use_cache=True)
        with pytest.raises(HFError, match=r"padding between tokens of a row: put it .*padding_side='left'"):
            model(ids[:1], attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1]]), use_cache=False)
        with pytest.raises(HFError, match=r"padding between tokens of a row: put it .*padding_side='left'"):
            model.generate(ids.flip(1), attention_mask=mask.flip(1), max_new_tokens=2)


def test_no_gradient_goes_through_a_cache(models: dict[str, Any]) -> None:
    model, ids = models["Qwen3_5"], prompts([6])[0]
    with zero_drift(model):
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(HFError, match="no gradient goes through a cache; train with use_cache=False"):
            model(ids[:, :2], past_key_values=cache, use_cache=True)
