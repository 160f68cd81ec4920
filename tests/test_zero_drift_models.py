"""What `zero_drift` changes in a model, restores, leaves alone and refuses: tiny models on a CPU."""

import copy
import doctest
import gc
import runpy
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from hf_models import SIZES, forward_logits, made, prompts
from isobit.integrations.hf import HFError, norms, zero_drift
from isobit.integrations.hf.norms import DetRMSNorm, options_of
from isobit.integrations.hf.trial import differing
from isobit.nn import DetLinear

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]


# On and off


def parts(model: Any) -> dict[str, Any]:
    """What `zero_drift` may change."""
    return {
        "attention": model.config._attn_implementation,
        "compile": model.generation_config.to_diff_dict(),
        "kinds": {name: type(m) for name, m in model.named_modules()},
        "training": {name: m.training for name, m in model.named_modules()},
        "attributes": {name: sorted(vars(m)) for name, m in model.named_modules()},
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
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
    before = parts(twin)
    refused(twin, "this machine: Leaky")
    assert parts(twin) == before and before["hooks"] == 2  # it is still watched
    with pytest.raises(HFError, match="which was not tested; lm_head: a Linear that torch computes"):
        forward_logits(twin, ids[0])
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
    forward_logits(model, prompts([3])[0][0])
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()  # its memory is free at once, as that of any model
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


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
def test_norms_are_known_by_what_they_compute(family: str) -> None:
    model = made(family)
    with zero_drift(model):
        found = [m for m in model.modules() if "RMSNorm" in type(m).__name__]
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
    refused(
        made("Llama").float(),
        r"model\.layers\.0\.self_attn\.q_proj, model\.layers\.0\.self_attn\.k_proj, "
        r"model\.layers\.0\.self_attn\.v_proj and 12 more: its weight is torch\.float32[^:]*$",  # once
    )
    model = made("Llama")
    model.model.layers[1].mlp.up_proj.__class__ = Adapted
    refused(model, r"model\.layers\.1\.mlp\.up_proj: it is a Adapted")
    model = made("Llama")
    model.model.layers[1].extra = nn.Dropout(0.5)
    refused(model, r"model\.layers\.1\.extra: Dropout\(p=0\.5\) is random")
    refused(made("Llama", attention_dropout=0.1), "attention_dropout=0.1")
    refused(
        made("Llama", head_dim=320),
        r"zero_drift\(model: LlamaForCausalLM\): heads of 320 elements; isobit.att",
    )
    model = made("Llama")
    model.model.norm.weight = Shard(model.model.norm.weight.data)
    refused(model, r"model\.norm\.weight is sharded \(a DTensor\); call zero_drift before fully_shard")
    model = made("Mixtral", num_local_experts=2, num_experts_per_tok=2)
    model.model.layers[1].mlp.experts.__class__ = type("Others", (nn.Module,), {})
    refused(model, r"experts: Others multiplies by its gate_up_proj, down_proj in a way of its own")


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
    refused(model, r"layers\.1\.self_attn: DeepseekV3Attention has heads of 192 elements for queries and 128")


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
            **SIZES, layer_types=["linear_attention", "full_attention"], num_experts=0,
            linear_key_head_dim=32)),
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
    monkeypatch.setitem(program["main"].__globals__, "DECODINGS", ((2, "dynamic", 7), (1, "static", None)))
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
