"""Models without drift, tiny ones on a CPU: `generate` against one forward of one row, gradients of a
sequence alone against those in a batch, and what is refused or restored."""

import copy
import doctest
import gc
import runpy
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

import isobit
from hf_models import FAMILIES, SIZES, made, prompts
from isobit.integrations.hf import HFError, norms, token_logps, zero_drift
from isobit.integrations.hf.norms import DetRMSNorm, options_of
from isobit.integrations.hf.trial import differing
from isobit.nn import DetLinear
from isobit.ops.attention import model as attention_model

LENGTHS = (10, 3, 7, 1, 9, 5, 2, 8)
NEW = 5

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]


class Run(NamedTuple):
    """One way to decode."""

    rows: int
    sample: bool
    cache: str
    chunk: int | None
    lengths: tuple[int, ...] = LENGTHS

    def __str__(self) -> str:
        return f"{self.rows}-{'sampled' if self.sample else 'greedy'}-{self.cache}-{self.chunk}"


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


def decoded(model: Any, run: Run) -> Iterator[tuple[Tensor, int, Tensor]]:
    """(tokens without padding, how many are the prompt, logits [NEW, V] that chose the rest) of each row."""
    lengths = run.lengths[: run.rows]
    ids, mask = prompts(list(lengths))
    torch.manual_seed(7)
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=run.sample,
        cache_implementation=None if run.cache == "dynamic" else run.cache, prefill_chunk_size=run.chunk,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    logits = torch.stack(found.logits, 1)
    for row, length in enumerate(lengths):
        yield found.sequences[row, -NEW - length :], length, logits[row]


def forward_logits(model: Any, tokens: Tensor) -> Tensor:
    """[T, V] of one row, as in training."""
    with torch.no_grad():
        return model(tokens[None], use_cache=False).logits[0].float()


class Drift:
    """How many tokens, and logits, of a model's decoding have other bits than in training."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.known: dict[tuple[int, ...], Tensor] = {}

    def of(self, run: Run) -> tuple[int, int]:
        tokens_differ = logits_differ = 0
        for tokens, length, logits in decoded(self.model, run):
            key = tuple(tokens.tolist())
            if key not in self.known:
                self.known[key] = forward_logits(self.model, tokens)
            trained = self.known[key][length - 1 : -1]
            logp, old_logp = (isobit.logp(x, tokens[length:]) for x in (trained, logits))
            tokens_differ += differing(logp, old_logp)
            logits_differ += differing(trained, logits)
        return tokens_differ, logits_differ


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
    """Of the embeddings, and of the hidden states after each layer, [B, T, D]; every token that counts has
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


# On and off


def parts(model: Any) -> dict[str, Any]:
    """What `zero_drift` may change."""
    return {
        "attention": model.config._attn_implementation,
        "compile": model.generation_config.to_diff_dict(),
        "kinds": {name: type(m) for name, m in model.named_modules()},
        "training": {name: m.training for name, m in model.named_modules()},
        "attributes": {name: sorted(vars(m)) for name, m in model.named_modules()},
        "hooks": sum(len(m._forward_hooks) for m in model.modules()),
        "parameters": {name: id(p) for name, p in model.named_parameters()},
    }


def test_it_says_what_it_did_and_a_model_is_restored() -> None:
    model = made("Llama").train()
    model.model.layers[0].eval()
    before = parts(model)
    with zero_drift(model) as on:
        assert type(model.lm_head) is DetLinear and model.config._attn_implementation == "isobit"
        assert parts(model)["training"] == before["training"]
        assert on.changed["isobit.attention"] == [f"model.layers.{i}.self_attn" for i in range(2)]
        assert len(on.changed["isobit.det_linear"]) == 15 and "lm_head" in on.changed["isobit.det_linear"]
        assert len(on.changed["isobit.rms_norm"]) == 5 and "model.norm" in on.changed["isobit.rms_norm"]
        assert on.left == {"Embedding": 1, "LlamaRotaryEmbedding": 1, "SiLUActivation": 2}
        text = str(on)
        assert text.startswith("LlamaForCausalLM\n") and "15  computed by isobit" in text
        assert "1  left, same bits alone and in a batch" in text
        with zero_drift(model) as inner:  # on already: it stays on when this block ends
            assert inner.report is on.report
        assert type(model.lm_head) is DetLinear
    assert parts(model) == before
    handle = zero_drift(model)
    assert type(model.lm_head) is DetLinear
    handle.disable()
    handle.disable()
    assert parts(model) == before


def test_a_copy_of_a_model_that_is_on_is_on_and_can_be_restored() -> None:
    model, (ids, _) = made("Qwen3"), prompts([6])
    before, plain = parts(model), forward_logits(model, ids[0])
    on = zero_drift(model)
    ours = forward_logits(model, ids[0])
    twin, kept = copy.deepcopy(model), copy.deepcopy(model)
    with zero_drift(twin) as again:  # on already: it stays on when this block ends
        assert again.changed == on.changed and again.left == on.left
    assert torch.equal(forward_logits(twin, ids[0]), ours)
    again.disable()
    assert parts(twin) | {"parameters": None} == before | {"parameters": None}
    assert torch.equal(forward_logits(twin, ids[0]), plain)
    on.disable()  # of the other model: the copy that was not touched stays on
    assert parts(model) == before and torch.equal(forward_logits(kept, ids[0]), ours)
    with zero_drift(twin):  # off before: it is off again after this block
        assert torch.equal(forward_logits(twin, ids[0]), ours)
    assert torch.equal(forward_logits(twin, ids[0]), plain)


def test_a_copy_that_is_refused_stays_as_it_was() -> None:
    model, (ids, _) = made("Llama", tie_word_embeddings=False), prompts([6])
    zero_drift(model)
    twin = copy.deepcopy(model)
    twin.lm_head = nn.Linear(64, SIZES["vocab_size"], bias=False).bfloat16()
    twin.model.layers[0].mlp.act_fn = Leaky()
    before, ours = parts(twin), forward_logits(twin, ids[0])
    refused(twin, "this machine: Leaky")
    assert parts(twin) == before and torch.equal(forward_logits(twin, ids[0]), ours)
    twin.model.layers[0].mlp.act_fn = nn.SiLU()
    on = zero_drift(twin)
    assert len(on.changed["isobit.det_linear"]) == 15
    forward_logits(twin, ids[0])
    on.disable()
    assert type(twin.lm_head) is type(twin.model.layers[0].mlp.up_proj) is nn.Linear
    forward_logits(twin, ids[0])


def test_a_model_that_is_on_can_be_forgotten() -> None:
    model = made("Qwen3")
    zero_drift(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_steps_are_not_compiled_and_a_checkpoint_does_not_say_so(tmp_path: Path) -> None:
    model, (ids, mask) = made("Llama"), prompts([4, 2])
    settings: Any = transformers.generation.CompileConfig(backend="eager")
    settings._compile_all_devices = True  # else a CPU does not compile
    asked = {"cache_implementation": "static", "compile_config": settings, "max_new_tokens": 3}
    with zero_drift(model), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda *args, **options: pytest.fail("compiled"))
        model.generate(ids, attention_mask=mask, **asked)
        # Another config of generation, as trainers set it, changes nothing.
        model.generation_config = transformers.GenerationConfig(pad_token_id=0)
        model.generate(ids, attention_mask=mask, **asked)
        model.save_pretrained(tmp_path)
    assert transformers.GenerationConfig.from_pretrained(tmp_path).disable_compile is None
    assert "isobit" not in (tmp_path / "config.json").read_text()


# Norms


NORMS = {"Llama": ("before", 0.0), "Qwen3": ("before", 0.0), "Gemma3": ("after", 1.0)}


@pytest.mark.parametrize("family", NORMS)
def test_norms_are_known_by_what_they_compute(models: dict[str, Any], family: str) -> None:
    found = [m for m in models[family].modules() if "RMSNorm" in type(m).__name__]
    assert all(type(m) is DetRMSNorm for m in found)
    assert {(m.options.cast, m.options.offset) for m in found} == {NORMS[family]}


class DoubleRMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_norms_that_compute_something_else_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_of(nn.RMSNorm(64, eps=1e-5).bfloat16()) == (1e-5, "after", 0.0)
    assert options_of(DoubleRMSNorm(64, eps=1e-5).bfloat16()) is None
    assert options_of(nn.RMSNorm(64).bfloat16()) is None  # without its own eps
    assert options_of(nn.LayerNorm(64).bfloat16()) is None
    monkeypatch.setattr(norms, "AGREE", 0.0)
    assert options_of(nn.RMSNorm(64, eps=1e-5)) is None  # in fp32: classes differ in what they give for bf16


@pytest.mark.parametrize("name", ["model.norm", "model.layers.1.mlp.up_proj", "lm_head"])
def test_nothing_is_restored_while_a_module_has_another_class(name: str) -> None:
    model, (ids, _) = made("Llama"), prompts([6])
    before, plain = parts(model), forward_logits(model, ids[0])
    on = zero_drift(model)
    module = model.get_submodule(name)
    own = type(module)
    during, ours = parts(model), forward_logits(model, ids[0])
    module.__class__ = nn.Identity
    for _ in range(2):
        with pytest.raises(
            HFError, match=rf"zero_drift\(model: LlamaFor.*{name} is now a Identity; undo that"
        ):
            on.disable()
    module.__class__ = own
    assert parts(model) == during and torch.equal(forward_logits(model, ids[0]), ours)
    on.disable()
    assert parts(model) == before and torch.equal(forward_logits(model, ids[0]), plain)


class Leaky(nn.Module):
    """An activation whose last bit is of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x) * (1.0 + 0.01 * (x.shape[0] - 1))


class LeakyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * (1.0 + 0.01 * (dy.shape[0] - 1))


class LeakyBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return LeakyGradient.apply(x)


def test_a_module_that_depends_on_the_batch_is_named() -> None:
    model = made("Qwen3")
    for bad, what in ((Leaky(), "output"), (LeakyBackward(), "gradient")):
        model.model.layers[1].mlp.act_fn = bad
        before = parts(model)
        with pytest.raises(
            HFError, match=rf"this machine: {type(bad).__name__}: \d+ of \d+ elements of its {what}"
        ):
            zero_drift(model)
        assert parts(model) == before


def test_what_happens_between_modules_is_tried_with_the_whole_model() -> None:
    model = made("Qwen3")

    class Layer(type(model.model.layers[0])):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, **more: Any) -> Tensor:
            return super().forward(hidden_states, **more) * (1.0 + 0.01 * (len(hidden_states) - 1))

    model.model.layers[0].__class__ = Layer
    with pytest.raises(HFError, match="logits have other bits alone; and no single module explains it"):
        zero_drift(model)


class Adapted(nn.Linear):
    pass


class Shard(nn.Parameter):
    """What makes a DTensor one, as far as `zero_drift` looks."""

    def full_tensor(self) -> Tensor:
        return self.data


def refused(model: Any, reason: str) -> None:
    before = parts(model)
    with pytest.raises(HFError, match=reason):
        zero_drift(model)
    assert parts(model) == before


def test_what_cannot_be_kept_is_refused_by_name() -> None:
    refused(made("Llama").float(), r"model\.layers\.0\.self_attn\.q_proj: its weight is torch\.float32")
    model = made("Llama")
    model.model.layers[1].mlp.up_proj.__class__ = Adapted
    refused(model, r"model\.layers\.1\.mlp\.up_proj: it is a Adapted")
    model = made("Llama")
    model.model.layers[1].extra = nn.Dropout(0.5)
    refused(model, r"model\.layers\.1\.extra: Dropout\(p=0\.5\) is random")
    refused(made("Llama", attention_dropout=0.1), "attention_dropout=0.1")
    refused(
        made("Llama", head_dim=32), r"zero_drift\(model: LlamaForCausalLM\): heads of 32 elements; isobit.att"
    )
    model = made("Llama")
    model.model.norm.weight = Shard(model.model.norm.weight.data)
    refused(model, r"model\.norm\.weight is sharded \(a DTensor\); call zero_drift before fully_shard")
    refused(made("Mixtral", num_local_experts=2), r"experts: MixtralExperts multiplies by its gate_up_proj")


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_longest_sequence_are_refused(rope: str) -> None:
    """Beyond 32 positions, which no sequence of the trial reaches."""
    parameters = {"rope_type": rope, "factor": 2.0, "rope_theta": 1e4}
    if rope == "longrope":
        factors = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
        parameters |= {**factors, "original_max_position_embeddings": 32}
    model = made("Llama", max_position_embeddings=32, rope_parameters=parameters)
    refused(model, rf"model\.rotary_emb: its rope_type '{rope}' makes frequencies from the longest position")
    by_layer = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": parameters,
    }
    model = made("Gemma3", max_position_embeddings=32, rope_parameters=by_layer)
    refused(model, rf"model\.rotary_emb: its rope_type '{rope}'")


def test_heads_of_latent_attention_are_refused_by_name() -> None:
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": None, "first_k_dense_replace": 2}
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes)).bfloat16()
    refused(model, r"layers\.0\.self_attn: DeepseekV3Attention has heads of 192 elements for queries and 128")


def test_the_advice_for_a_model_of_text_and_images_works() -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=SIZES | {"sliding_window": 6}, vision_config=vision | {"image_size": 28, "patch_size": 14}
    )
    both = transformers.Gemma3ForConditionalGeneration(config).bfloat16().eval()
    with pytest.raises(
        HFError, match=r"make one that has its text_config, its layers and its LM head, as in"
    ):
        zero_drift(both)
    text = transformers.Gemma3ForCausalLM(both.config.text_config).eval()
    text.model, text.lm_head = both.model.language_model, both.lm_head
    ids, _ = prompts([9, 9])
    with torch.no_grad(), zero_drift(text):
        assert differing(text(ids).logits[1], text(ids[1:]).logits[0]) == 0


def test_models_that_are_no_causal_language_models_are_refused() -> None:
    with pytest.raises(HFError, match=r"\(model: Linear\): it is not a transformers.PreTrainedModel"):
        zero_drift(nn.Linear(2, 2))
    refused_kinds = {
        "no LM head": transformers.LlamaModel(transformers.LlamaConfig(**SIZES)),
        "an encoder": transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)),
        "multiplies by its weight": transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=50, n_embd=16, n_layer=1, n_head=2, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0)),
        "linear_attention": transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(
            **SIZES, layer_types=["linear_attention", "full_attention"], num_experts=0)),
    }  # fmt: skip
    for reason, model in refused_kinds.items():
        with pytest.raises(HFError, match=reason):
            zero_drift(model)


def test_under_autocast_parameters_may_be_fp32() -> None:
    model, (ids, _) = made("Llama").float(), prompts([5, 5])
    with torch.autocast("cpu", torch.bfloat16), zero_drift(model), torch.no_grad():
        whole = model(ids).logits
        assert differing(whole[1], model(ids[1:]).logits[0]) == 0


def test_the_program_in_examples_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).parent.parent / "examples" / "zero_drift.py"
    program = runpy.run_path(str(path))
    monkeypatch.setitem(program["main"].__globals__, "WAYS", ((2, "dynamic", 7), (1, "static", None)))
    monkeypatch.setattr(sys, "argv", [str(path), "--tokens", "2"])
    assert program["main"]() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in lines[-2:]] == [
        ["2", "dynamic", "7", "4"],
        ["1", "static", "-", "2"],
    ]
    assert all(line.split()[-2:] == ["0", "0.0e+00"] for line in lines[-2:])


def test_the_example_runs() -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(zero_drift, "zero_drift")
    assert test.examples and doctest.DocTestRunner(verbose=False).run(test).failed == 0
