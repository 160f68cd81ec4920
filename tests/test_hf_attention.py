"""`attn_implementation="isobit"`: masks of transformers as bounds of keys, held to its own 4D masks; and what
is refused."""

import doctest
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import masking_utils

import isobit
from hf_models import made, prompts
from isobit.integrations.hf import HFError, register_attention
from isobit.integrations.hf.attention import KeyBounds, MaskInfo, attend, mask
from isobit.ops.attention import model as attention_model

D = 64

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]


class Layer(nn.Module):
    is_causal, layer_idx = True, 3


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def left_padded(lengths: list[int], T: int) -> Tensor:
    return torch.arange(T) >= T - torch.tensor(lengths)[:, None]


def packed_function(ids: Tensor) -> Any:
    return masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.packed_sequence_mask_function(ids)
    )


CAUSAL, WINDOW = masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function(5)
PACKED = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 1, 1, 1]])

#: Arguments from transformers: queries, keys, how many came before, how many of these the cache has dropped.
CASES: dict[str, dict[str, Any]] = {
    "all at once": {"q_length": 9, "kv_length": 9},
    "left padding": {"q_length": 9, "kv_length": 9, "attention_mask": left_padded([9, 4, 1], 9)},
    "right padding": {"q_length": 9, "kv_length": 9, "attention_mask": left_padded([9, 4, 1], 9).flip(1)},
    "a chunk": {"q_length": 4, "kv_length": 9, "q_offset": 5, "attention_mask": left_padded([9, 5, 2], 9)},
    "a token": {"q_length": 1, "kv_length": 9, "q_offset": 8, "attention_mask": left_padded([9, 5, 2], 9)},
    "a static cache": {
        "q_length": 2, "kv_length": 20, "q_offset": torch.tensor(7),
        "attention_mask": left_padded([9, 5, 2], 9),
    },
    "a static cache without a mask": {"q_length": 3, "kv_length": 20, "q_offset": torch.tensor(7)},
    "a window": {"q_length": 9, "kv_length": 9, "mask_function": WINDOW,
                 "attention_mask": left_padded([9, 8, 3], 9)},
    "a window with room": {"q_length": 2, "kv_length": 20, "q_offset": 3, "mask_function": WINDOW,
                           "attention_mask": left_padded([5, 4, 1], 5)},
    "dropped keys": {"q_length": 2, "kv_length": 6, "q_offset": 9, "kv_offset": 5, "mask_function": WINDOW},
    "dropped keys and padding": {
        "q_length": 2, "kv_length": 6, "q_offset": 9, "kv_offset": 5, "mask_function": WINDOW,
        "attention_mask": left_padded([11, 6, 3], 11),
    },
    "dropped keys beyond a segment": {
        "q_length": 1, "kv_length": 5, "q_offset": 2050, "kv_offset": 2046, "mask_function": WINDOW,
        "attention_mask": left_padded([2051, 1025, 3], 2051),
    },
    "packed": {"batch_size": 2, "q_length": 9, "kv_length": 9, "mask_function": packed_function(PACKED)},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_keys_that_are_seen_are_those_of_the_4d_mask(name: str) -> None:
    case: dict[str, Any] = {"batch_size": 3, "mask_function": CAUSAL, "device": "cpu", **CASES[name]}
    B, T, S = (case[key] for key in ("batch_size", "q_length", "kv_length"))
    q, k, v = drawn(B, 4, T, D), drawn(B, 2, S, D, seed=1), drawn(B, 2, S, D, seed=2)
    seen = masking_utils.sdpa_mask(**case, allow_is_causal_skip=False, local_size=None)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT * 0.3
    truth = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v.double().repeat_interleave(2, 1)
    found, weights = attend(Layer(), q, k, v, mask(**case), scaling=0.3)
    assert found.shape == (B, T, 4, D) and weights is None
    tokens = seen.any(-1)[:, 0]  # padding is not compared
    if (given := case.get("attention_mask")) is not None:
        tokens &= given[:, -T:]
    assert tokens.any()
    torch.testing.assert_close(
        found[tokens].double(), truth.transpose(1, 2)[tokens], rtol=0, atol=2.0**-8 * float(v.abs().max())
    )


@pytest.mark.parametrize(("before", "pads"), [(137, (0, 0)), (137, (0, 9)), (1500, (0, 700))])
def test_a_window_has_the_same_bits_where_the_cache_has_dropped_keys(before: int, pads: Any) -> None:
    window, T, dropped = 90, 4, before - 89
    sizes = ((2, 8, T, D), (2, 2, before + T, D), (2, 2, before + T, D))
    q, k, v = (drawn(*shape, seed=i).half() for i, shape in enumerate(sizes))
    given = torch.arange(before + T) >= torch.tensor(pads)[:, None]
    function = masking_utils.sliding_window_causal_mask_function(window)
    asked = {"batch_size": 2, "q_length": T, "q_offset": before, "mask_function": function,
             "attention_mask": given}  # fmt: skip
    whole, _ = attend(Layer(), q, k, v, mask(kv_length=before + T, **asked))
    bounds = mask(kv_length=window - 1 + T, kv_offset=dropped, **asked)
    remaining = (k[:, :, dropped:], v[:, :, dropped:])
    found, _ = attend(Layer(), q, *remaining, bounds)
    assert torch.equal(found, whole)
    # Without the zeros in front keys would have other positions in their blocks, and sums other bits.
    start = torch.stack((torch.zeros(2).long(), torch.full((2,), window - 1 + T)))
    plain, _ = attend(Layer(), q, *remaining, KeyBounds.of(start, bounds.info._replace(front=0)))
    assert not torch.equal(plain, whole)


def test_a_mask_keeps_its_properties_when_it_is_moved() -> None:
    bounds = mask(batch_size=2, q_length=3, kv_length=3, mask_function=CAUSAL)
    assert bounds.shape == (0, 1, 1, 2) and isinstance(bounds, Tensor)  # four dimensions: ready-made
    for moved in (bounds.contiguous(), bounds.clone(), bounds.to("meta")):
        assert isinstance(moved, KeyBounds) and moved.info == MaskInfo(keys=3)
    padded = mask(
        batch_size=1, q_length=2, kv_length=2, mask_function=CAUSAL, attention_mask=torch.tensor([[0, 1]])
    )
    assert padded.info.starts and [type(t) for t in padded.rows()] == [Tensor, Tensor]


@pytest.mark.parametrize("count", [torch.tensor(4), torch.tensor([4])])
def test_the_bounds_of_a_static_cache_do_not_move_with_its_counter(count: Tensor) -> None:
    given = torch.ones(1, 5)
    bounds = mask(
        batch_size=1, q_length=1, kv_length=9, q_offset=count, mask_function=CAUSAL, attention_mask=given
    )
    assert count.sum() == 4
    count.add_(1)
    assert [t.tolist() for t in bounds.rows()] == [[0], [5]]


HOLES = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]])
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "holes": ("padding between tokens", {"attention_mask": HOLES}),
    "short": ("2 columns for 4 tokens", {"attention_mask": HOLES[:, :2]}),
    "4D": ("3 dimensions", {"attention_mask": HOLES[None]}),
    "chunked": ("chunked_overlay", {
        "mask_function": masking_utils.chunked_causal_mask_function(2, torch.zeros(2))}),
    "blocks": ("or_masks", {"mask_function": masking_utils.or_masks(
        CAUSAL, masking_utils.blockwise_overlay(torch.zeros(2, 4)))}),
    "not causal": ("bidirectional_mask_function", {
        "mask_function": masking_utils.bidirectional_mask_function}),
    "a window alone": ("not causal", {"mask_function": masking_utils.sliding_window_overlay(3)}),
    "custom": ("mask function of its own", {"use_vmap": True}),
    "unknown": ("not made of causal order", {"mask_function": lambda b, h, q, k: k <= q}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_masks_that_bounds_cannot_express_are_refused(name: str) -> None:
    reason, options = REFUSED[name]
    with pytest.raises(HFError, match=reason):
        mask(**{"batch_size": 2, "q_length": 4, "kv_length": 4, "mask_function": CAUSAL} | options)


def test_calls_that_cannot_be_served_are_refused() -> None:
    q, k = drawn(1, 2, 4, D), drawn(1, 1, 4, D)
    bounds = mask(batch_size=1, q_length=4, kv_length=4, mask_function=CAUSAL)

    def refused(reason: str, layer: Any = None, given: Any = bounds, **options: Any) -> None:
        tensors = options.pop("tensors", (q, k, k))
        with pytest.raises(HFError, match=reason):
            attend(layer or Layer(), *tensors, given, **options)

    attend(Layer(), q, k, k, bounds, position_ids=torch.arange(4), use_cache=True, head_mask=None)
    refused("dropout=0.1 of Layer of layer 3", dropout=0.1)
    refused("is_causal=False for Layer", is_causal=False)
    refused("output_attentions", output_attentions=True)
    refused("Layer of layer 3 passes other", other=torch.zeros(2))
    refused("cu_seq_lens_q needs position_ids", cu_seq_lens_q=torch.tensor([0, 4]))
    refused(r"attention_mask \[1, 1, 4, 4\]", given=torch.ones(1, 1, 4, 4))
    refused("window of 3, and its mask None", sliding_window=3)
    refused("has 3 keys, and its mask is for 4", tensors=(q, k[:, :, 1:], k[:, :, 1:]))
    refused("Layer of layer 3 has heads of 64 elements for queries and 32", tensors=(q, k, k[..., :32]))
    wide = drawn(1, 1, 4, 264)
    refused("Layer of layer 3 has heads of 264 elements; isobit.attention takes up to", tensors=(wide,) * 3)
    refused("torch.float32", tensors=(q.float(), k.float(), k.float()))
    refused("Linear is not causal", layer=nn.Linear(1, 1), given=None)
    gone = mask(batch_size=1, q_length=1, kv_length=4, q_offset=5, kv_offset=2, mask_function=CAUSAL)
    refused("dropped keys that Layer of layer 3 sees", given=gone, tensors=(q[:, :, :1], k, k))


def test_without_a_mask_all_keys_are_there() -> None:
    q, k, v = drawn(1, 4, 3, D), drawn(1, 2, 7, D, seed=1), drawn(1, 2, 7, D, seed=2)
    found, _ = attend(Layer(), q, k, v, None, sliding_window=4, softcap=2.0)
    own = [t.transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(found, isobit.attention(*own, window=4, softcap=2.0))


@pytest.mark.parametrize("size", [1, 8, 20, 32, 112, 192])
def test_heads_of_other_sizes_have_the_bits_that_their_own_size_would_have(size: int) -> None:
    """Zeros behind a row change no sum: the model, which takes any size, has the same bits without them."""
    shapes = ((2, 4, 9, size), (2, 2, 9, size), (2, 2, 9, size))
    q, k, v = (drawn(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes))
    given = left_padded([9, 5], 9)
    bounds = mask(batch_size=2, q_length=9, kv_length=9, mask_function=WINDOW, attention_mask=given)
    found, _ = attend(Layer(), q, k, v, bounds)
    assert found.shape == (2, 9, 4, size) and found.dtype == torch.bfloat16
    args: dict[str, Any] = {n: t.transpose(1, 2) for n, t in zip("qkv", (q, k, v), strict=True)}
    args |= dict.fromkeys(("scale", "softcap", "cu_seqlens_q", "cu_seqlens_k", "block_table"))
    args |= {"causal": True, "window": 5, "key_start": torch.tensor([0, 4]), "key_end": None}
    assert torch.equal(found, attention_model.attention(**args, return_lse=False)[0])
    last = mask(batch_size=2, q_length=1, kv_length=9, q_offset=8, mask_function=WINDOW, attention_mask=given)
    assert torch.equal(attend(Layer(), q[:, :, 8:], k, v, last)[0][:, 0], found[:, 8])  # decoded
    seen = given[:, None, None] & (torch.arange(9)[:, None] >= torch.arange(9))
    seen = seen & (torch.arange(9)[:, None] < torch.arange(9) + 5)
    rows = [t.detach().double().requires_grad_() for t in (q, k, v)]
    scores = rows[0] @ rows[1].repeat_interleave(2, 1).mT * size**-0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    truth = (weights @ rows[2].repeat_interleave(2, 1)).transpose(1, 2)
    tokens, dout = given[..., None, None], drawn(2, 9, 4, size, seed=7)
    torch.testing.assert_close(found.double() * tokens, truth * tokens, rtol=0, atol=0.03)
    (found * tokens * dout).sum().backward()
    (truth * tokens * dout.double()).nan_to_num().sum().backward()
    for ours, theirs in zip((q, k, v), rows, strict=True):
        assert ours.grad is not None and theirs.grad is not None and ours.grad.any()
        torch.testing.assert_close(ours.grad.double(), theirs.grad.nan_to_num(), rtol=0, atol=0.1)


def test_fp32_is_rounded_under_autocast_as_for_torch() -> None:
    q, k = drawn(1, 2, 4, D), drawn(1, 1, 4, D)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = attend(Layer(), q.float(), k.float(), k.float(), None)
    assert torch.equal(found, attend(Layer(), q, k, k, None)[0])


# Whole models


def test_the_registered_attention_agrees_with_eager() -> None:
    register_attention()
    model = made("Gemma3")
    ids, given = prompts([9, 4])
    positions = (given.cumsum(1) - 1).clamp(min=0)
    logits = {}
    for name in ("eager", "isobit"):
        model.set_attn_implementation(name)
        logits[name] = model(ids, attention_mask=given, position_ids=positions).logits[given.bool()].float()
    assert (logits["eager"] - logits["isobit"]).abs().max() < 0.05 * logits["eager"].abs().max()


def test_a_transformers_that_creates_masks_in_another_way_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda batch_size, cache_position, kv_length: None)
    with pytest.raises(HFError, match="creates masks in another way"):
        register_attention()


def test_packed_sequences_have_the_bits_that_they_have_alone() -> None:
    register_attention()
    model = made("Mistral")
    model.set_attn_implementation("isobit")
    layer = model.model.layers[0].self_attn
    ids, _ = prompts([15])
    positions = torch.cat([torch.arange(n) for n in (9, 2, 4)])[None]
    outputs: list[Tensor] = []
    hook = layer.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    isobit.nn.swap_linear(model)
    model(ids, position_ids=positions, use_cache=False)
    for part in ids.split((9, 2, 4), 1):
        model(part, use_cache=False)
    hook.remove()
    assert torch.equal(outputs[0], torch.cat(outputs[1:], 1))


def test_packed_sequences_that_the_mask_does_not_separate_are_refused() -> None:
    """transformers looks for packing only without a mask and without a cache."""
    register_attention()
    model = made("Mistral")
    model.set_attn_implementation("isobit")
    ids, given = prompts([9, 9])
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])
    model(ids, position_ids=packed.expand(2, -1), use_cache=False)
    for options in ({"use_cache": True}, {"use_cache": False, "attention_mask": given}):
        for positions in (packed, packed.expand(2, -1)):
            with pytest.raises(HFError, match=r"start again inside a row.*pack with use_cache=False and"):
                model(ids, position_ids=positions, **options)
    # Packed behind padding.
    given[1, :3] = 0
    positions = torch.stack((torch.arange(9), torch.tensor([1, 1, 1, 0, 1, 2, 0, 1, 2])))
    with pytest.raises(HFError, match="start again"):
        model(ids, attention_mask=given, position_ids=positions)


@pytest.mark.parametrize("fill", [0, 1, -1])
def test_positions_of_padding_do_not_matter(fill: int) -> None:
    register_attention()
    model = made("Mistral")
    model.set_attn_implementation("isobit")
    ids, left = prompts([9, 4, 1])
    for given in (left, left.flip(1)):
        positions = (given.cumsum(1) - 1).masked_fill(given == 0, fill)
        cache = model(ids, attention_mask=given, position_ids=positions, use_cache=True).past_key_values
        more = torch.cat((given, torch.ones(3, 4).long()), 1)
        if given is left:  # a second chunk
            model(ids[:, :4], attention_mask=more, position_ids=positions[:, -1:] + 1 + torch.arange(4),
                  past_key_values=cache)  # fmt: skip


def test_dropout_is_refused_in_training() -> None:
    register_attention()
    model = made("Qwen3", attention_dropout=0.1)
    model.set_attn_implementation("isobit")
    model(prompts([4])[0])
    with pytest.raises(HFError, match="set attention_dropout to 0"):
        model.train()(prompts([4])[0])


def test_the_example_runs() -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(register_attention, "register_attention")
    assert test.examples and doctest.DocTestRunner(verbose=False).run(test).failed == 0
