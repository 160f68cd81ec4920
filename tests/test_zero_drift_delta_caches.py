"""What transformers does with caches of gated delta-net models, tiny ones on a CPU: drafts that are taken
back, rows that are selected and repeated, and what cannot be done."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from hf_models import V, forward_logits, made, prompts
from isobit.integrations.hf import HFError, delta_nets, zero_drift
from isobit.integrations.hf.trial import differing
from isobit.layers.linear import DetLinear
from isobit.ops.gated_delta_rule_step.state import DeltaState
from no_waiting import NoWaiting
from test_zero_drift_delta_nets import EXPERTS, NETS

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    model = made("Qwen3_5", **NETS)
    with zero_drift(model), torch.no_grad():
        yield model


def drawn(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randint(3, V, (rows, columns), generator=torch.Generator().manual_seed(seed))


class Turns:
    """Rows of tokens, passed to a model piece by piece, with its cache."""

    def __init__(self, model: Any, ids: Tensor, mask: Tensor | None = None, record: bool = True) -> None:
        self.model, self.cache = model, DynamicCache(config=model.config)
        self.ids, self.mask = ids[:, :0], ids[:, :0]
        if record:
            self.cache.activate_past_recording()
        self.add(ids, mask)

    def add(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits of these tokens."""
        self.ids = torch.cat([self.ids, ids], 1)
        self.mask = torch.cat([self.mask, torch.ones_like(ids) if mask is None else mask], 1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        self.logits: Tensor = self.model(
            ids, attention_mask=self.mask, position_ids=positions, past_key_values=self.cache, use_cache=True
        ).logits.float()
        return self.logits

    def crop(self, count: int) -> None:
        self.cache.crop(-count)
        self.ids, self.mask = self.ids[:, :-count], self.mask[:, :-count]

    def differ(self) -> int:
        """How many of the last logits have other bits in one forward of their row."""
        count, new = 0, self.logits.shape[1]
        for ids, mask, ours in zip(self.ids, self.mask, self.logits, strict=True):
            row = forward_logits(self.model, ids[mask.bool()])
            live = mask[-new:].bool()
            count += differing(ours[live], row[len(row) - int(live.sum()) :])
        return count


# Taking tokens back


@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3Next"])
def test_assisted_generation_has_the_bits_of_one_forward(
    model: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If transformers did not refuse it. Of drafts looked up in the prompt hardly any is accepted; those of
    the model itself all are. Over the end of a chunk."""
    if family != "Qwen3_5":
        model = made(family, **NETS | EXPERTS | {"mlp_only_layers": [0]})
        zero_drift(model)
    prompt = drawn(1, 4).repeat(1, 15)
    options = {"max_new_tokens": 12, "do_sample": False}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        model.generate(prompt, prompt_lookup_num_tokens=3, **options)
    monkeypatch.setattr(model, "_is_stateful", False)
    crops, crop = list[int](), DynamicCache.crop

    def counted(self: Any, count: int) -> None:
        crops.append(-count)
        crop(self, count)

    monkeypatch.setattr(DynamicCache, "crop", counted)
    plain = model.generate(prompt, **options)
    assert not crops
    for drafts in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": model}):
        crops.clear()
        found = model.generate(prompt, **drafts, **options)
        assert torch.equal(found.sequences, plain.sequences) and crops
        assert max(crops) >= 2 or "assistant_model" in drafts
        logits = torch.stack(found.logits, 1)[0]
        assert differing(logits, forward_logits(model, found.sequences[0])[59:-1]) == 0


def test_drafts_are_taken_back_over_ends_of_chunks(model: Any) -> None:
    """Of rows with padding, several times, also those of an earlier call; and 64 tokens at once."""
    turns = Turns(model, drawn(3, 58), (torch.arange(58) >= torch.tensor([0, 9, 56])[:, None]).long())
    for i, (new, back) in enumerate([(7, 3), (4, 6), (1, 0), (70, 64), (3, 3), (60, 50), (9, 15), (2, 0)]):
        turns.add(drawn(3, new, seed=i + 1))
        assert turns.differ() == 0
        if back:
            turns.crop(back)


def test_padding_that_is_taken_back_is_no_token(model: Any) -> None:
    ids, mask = prompts([10, 2])
    turns = Turns(model, ids, mask)
    turns.crop(4)
    turns.add(drawn(2, 5))
    assert turns.differ() == 0


@pytest.mark.parametrize("first", [61, 192])
def test_recording_may_begin_with_tokens_in_the_cache(model: Any, first: int) -> None:
    turns = Turns(model, drawn(2, first), record=False)
    turns.cache.activate_past_recording()
    turns.cache.crop(0)
    for i in range(2):
        turns.add(drawn(2, 8, seed=i))
        turns.crop(7)
        turns.add(drawn(2, 2, seed=9))
        assert turns.differ() == 0


def test_a_cache_that_is_reset_records_again(model: Any) -> None:
    turns = Turns(model, drawn(1, 70))
    turns.cache.reset()
    turns.ids, turns.mask = turns.ids[:, :0], turns.mask[:, :0]
    turns.add(drawn(1, 5, seed=1))
    turns.crop(2)
    turns.add(drawn(1, 3, seed=2))
    assert turns.differ() == 0


def test_what_cannot_be_taken_back_is_refused(model: Any) -> None:
    turns = Turns(model, drawn(1, 70), record=False)
    with pytest.raises(HFError, match=r"crop\(-1\) of .*: no token was recorded: call .*activate_past_rec"):
        turns.cache.crop(-1)
    turns.cache.activate_past_recording()
    turns.add(drawn(1, 3))
    with pytest.raises(HFError, match=r"crop\(-4\) of .*: 3 can be taken back: those passed since"):
        turns.cache.crop(-4)
    turns.cache.crop(-2)
    with pytest.raises(HFError, match=r"crop\(-2\) of .*: 1 can be taken back"):
        turns.cache.crop(-2)
    with pytest.raises(HFError, match=r"crop\(3\) of .*: give minus the number"):
        turns.cache.crop(3)
    turns = Turns(model, drawn(1, 90))
    with pytest.raises(HFError, match=r"crop\(-65\) of .*: 64 can be taken back: .*, 64 at most"):
        turns.cache.crop(-65)


def test_drafts_make_the_host_wait_for_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the layer, between the ops, with its cache."""
    watch, layer, cache = NoWaiting(), model.model.layers[0].linear_attn, DynamicCache(config=model.config)
    cache.activate_past_recording()
    hidden = torch.randn(2, 5, 64).bfloat16()
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    layer(hidden, cache_params=cache, attention_mask=mask)
    for name in ("gated_delta_rule_step", "causal_conv1d", "delta_gates", "rms_norm_gated"):
        monkeypatch.setattr(delta_nets, name, watch.outside(getattr(delta_nets, name)))
    monkeypatch.setattr(DetLinear, "forward", watch.outside(DetLinear.forward))
    monkeypatch.setattr(DeltaState, "crop", watch.outside(DeltaState.crop))
    with watch:
        for given in (None, mask):
            layer(hidden, cache_params=cache, attention_mask=given)
            cache.layers[0].crop(-3)


# Rows


def test_rows_are_repeated_and_selected(model: Any) -> None:
    """As contrastive search and trainers do, while tokens are recorded and while not."""
    for record in (False, True):
        ids, mask = prompts([70, 4])
        turns = Turns(model, ids, mask, record)
        turns.cache.batch_repeat_interleave(2)
        turns.ids, turns.mask = (t.repeat_interleave(2, 0) for t in (turns.ids, turns.mask))
        turns.add(drawn(4, 3))
        assert turns.differ() == 0
        for chosen in (torch.tensor([3, 0, 3]), torch.tensor([True, True, False])):
            turns.cache.batch_select_indices(chosen)
            turns.ids, turns.mask = turns.ids[chosen], turns.mask[chosen]
            if record:
                turns.crop(1)
            turns.add(drawn(len(turns.ids), 2, seed=1))
            assert turns.differ() == 0


def test_a_cache_is_copied_and_saved(model: Any) -> None:
    turns = Turns(model, drawn(1, 9))
    for cache in (copy.deepcopy(turns.cache), pickle.loads(pickle.dumps(turns.cache))):
        other = copy.copy(turns)
        other.cache = cache
        other.crop(4)
        other.add(drawn(1, 2))
        assert other.differ() == 0
    turns.add(drawn(1, 2))
    assert turns.differ() == 0


def test_a_cache_that_was_begun_without_zero_drift_is_refused() -> None:
    model = made("Qwen3_5", **NETS)
    with torch.no_grad():
        turns = Turns(model, drawn(1, 4), record=False)
        with zero_drift(model), pytest.raises(HFError, match="begun without zero_drift: begin a new cache"):
            turns.add(drawn(1, 1))
