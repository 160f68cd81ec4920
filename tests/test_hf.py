"""Log-probabilities of Hugging Face models, held to `log_softmax` of the model's own logits in fp64."""

import doctest
import functools
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from isobit import ContractError
from isobit.integrations.hf import (
    HFError,
    logps,
    register_attention,
    register_experts,
    token_logps,
    zero_drift,
)
from isobit.nn import DetLinear, swap_linear

V = 53
SIZES: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def large(model: Any) -> Any:
    """Logits of several units, so that a missing softcap or factor is visible."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(40)
    return model.eval()


def made(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    if family == "GPT2":
        config = transformers.GPT2Config(vocab_size=V, n_embd=16, n_layer=1, n_head=2, **options)
        return large(transformers.GPT2LMHeadModel(config))
    if family in ("Gemma2", "Gemma3"):
        options.setdefault("head_dim", 8)
    name = {"Gemma3": "Gemma3Text"}.get(family, family)
    config = getattr(transformers, f"{name}Config")(**SIZES | options)
    return large(getattr(transformers, f"{family}ForCausalLM")(config))


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """ids, mask and positions of two sequences: one with two of padding on the left, one on the right."""
    ids = torch.randint(3, V, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[0, :2], mask[1, 5:] = 0, 0
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def truth(
    model: Any,
    ids: Tensor,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    vocab: int = V,
    **inputs: Any,
) -> tuple[Tensor, Tensor]:
    """(logp, entropy) of the model's own logits."""
    logits = model(input_ids=ids, attention_mask=mask, **inputs).logits[:, :-1, :vocab].double() / temperature
    log_p = logits.log_softmax(-1)
    logp, entropy = log_p.gather(-1, ids[:, 1:, None])[..., 0], -(log_p.exp() * log_p).sum(-1)
    counts = torch.ones_like(logp) if mask is None else (mask[:, 1:] * mask[:, :-1])
    return logp * counts, entropy * counts


def gradients(model: Any, results: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    (results[0].sum() + 0.3 * results[1].sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


FAMILIES = {
    "untied": ("Qwen2", {"tie_word_embeddings": False}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "gpt2": ("GPT2", {}),
    "bias": ("Phi", {}),
    "softcap": ("Gemma2", {"final_logit_softcapping": 3.0}),
    "softcap of Gemma 3": ("Gemma3", {"final_logit_softcapping": 3.0}),
    "factor": ("Cohere", {"logit_scale": 0.25}),
    "divisor": ("Granite", {"logits_scaling": 8.0}),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_log_probabilities_match_the_model(case: str) -> None:
    family, options = FAMILIES[case]
    model = made(family, **options)
    ids, mask, positions = batch()
    inputs = {} if family == "GPT2" else {"position_ids": positions}
    ours = token_logps(
        model, ids, mask, temperature=0.7, return_entropy=True, model_inputs=inputs, backend="reference"
    )
    theirs = truth(model, ids, mask, temperature=0.7, **inputs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float32 and a.shape == (2, 6)
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-5)
    assert theirs[0].abs().max() > 1 and (ours[0] == 0).sum() == 4  # padding, and what follows it on the left
    expected = gradients(model, theirs)
    found = gradients(model, ours)
    assert found.keys() == expected.keys() and len(found) == len(list(model.parameters()))
    for name, gradient in found.items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=2e-5 * scale + 1e-7)


def test_padded_rows_of_a_head_take_no_part() -> None:
    model = made("Qwen2")
    model.resize_token_embeddings(V, pad_to_multiple_of=16)
    assert len(model.get_output_embeddings().weight) == 64
    ids, _, _ = batch()
    padded, plain = token_logps(model, ids), token_logps(model, ids, vocab_size=V)
    torch.testing.assert_close(padded.double(), truth(model, ids, vocab=64)[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(plain.double(), truth(model, ids)[0], rtol=0, atol=2e-5)
    assert (plain > padded).all()
    plain.sum().backward()
    assert not model.lm_head.weight.grad[V:].any() and model.lm_head.weight.grad[:V].any()


def test_no_logits_of_all_positions_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shapes = made("Llama"), []
    made_by = model.lm_head.register_forward_hook(
        lambda module, args, output: shapes.extend(x.shape for x in output)
    )
    ids, _, _ = batch()
    monkeypatch.setattr(logps.Head, "_why_not", lambda self: None)  # which refuses the hook
    token_logps(model, ids)
    made_by.remove()
    assert shapes == [(2, 1, V), (2, 6)]  # logits of the last position, then log-probabilities
    assert "forward" not in vars(model) and "forward" not in vars(model.lm_head)
    assert not model.lm_head._forward_hooks and not model.base_model._forward_hooks
    assert not model.lm_head._forward_pre_hooks


def test_a_head_in_fp32_is_cast_under_autocast() -> None:
    model = made("Qwen2", tie_word_embeddings=False)
    ids, _, _ = batch()
    with torch.autocast("cpu", torch.bfloat16):
        found = token_logps(model, ids)
        states = model.base_model(ids).last_hidden_state[:, :-1]
    weight = model.lm_head.weight.bfloat16().double()
    logits = states.bfloat16().double() @ weight.t()
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
    found.sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.float32


def test_a_swapped_head_is_served() -> None:
    model = made("Llama").bfloat16()
    swap_linear(model, where=["lm_head"])
    assert type(model.lm_head) is DetLinear
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model of a Hopper GPU is slow
        logp = token_logps(model, batch()[0])
    assert logp.shape == (2, 6) and (logp < 0).all()


# Refusals


class Adapted(nn.Linear):
    """As an adapter does it: a linear layer with something added."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1.0


def refused(model: Any, reason: str) -> None:
    with pytest.raises(HFError, match=reason):
        token_logps(model, batch()[0])


def test_a_head_with_an_adapter_is_refused() -> None:
    model = made("Llama")
    model.lm_head.__class__ = Adapted
    refused(
        model,
        r"LlamaForCausalLM.*its head is a test_hf\.Adapted, not a torch.nn.Linear; .* merge the adapter",
    )


def test_a_head_of_a_class_that_is_also_called_linear_is_refused_by_its_full_name() -> None:
    """That of PEFT is."""
    model = made("Llama")
    model.lm_head.__class__ = type("Linear", (Adapted,), {"__module__": "peft.tuners.lora.layer"})
    refused(model, r"its head is a peft\.tuners\.lora\.layer\.Linear, not a torch\.nn\.Linear")


def test_a_head_inside_of_an_adapter_is_refused() -> None:
    """As PEFT wraps it: no linear layer itself, which has one and an update of low rank next to it."""

    class LoraLinear(nn.Module):
        def __init__(self, base_layer: nn.Linear) -> None:
            super().__init__()
            self.base_layer, self.weight = base_layer, base_layer.weight
            self.A, self.B = nn.Linear(16, 2, bias=False), nn.Linear(2, V, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x) + self.B(self.A(x))

    model = made("Llama")
    model.lm_head = LoraLinear(model.lm_head)
    refused(model, r"its head is a test_hf\.\S*LoraLinear, not a torch.nn.Linear; .* merge the adapter")


def test_a_forward_that_was_replaced_on_the_model_is_used_and_stays() -> None:
    """accelerate does that, to run it under autocast."""
    model, (ids, _, _), calls = made("Llama"), batch(), []
    expected, forward = token_logps(model, ids), model.forward

    @functools.wraps(forward)
    def replaced(*args: Any, **options: Any) -> Any:
        calls.append(options["logits_to_keep"])
        return forward(*args, **options)

    model.forward = replaced
    assert torch.equal(token_logps(model, ids), expected) and calls == [1]
    assert vars(model)["forward"] is replaced
    model.config.logit_scale = 7.0
    logps._compared.discard(model)
    refused(model, "its logits differ by up to")
    assert vars(model)["forward"] is replaced  # also after an error


def test_a_head_with_hooks_or_a_forward_of_its_own_is_refused() -> None:
    model = made("Llama")
    hook = model.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    refused(model, "its head has hooks")
    hook.remove()
    model.lm_head.forward = lambda x: x
    refused(model, "was replaced on the object")


def test_a_model_that_does_something_else_to_its_logits_is_refused() -> None:
    """Its configuration does not say so: its own logits do."""

    class Shifted(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Tensor, logits_to_keep: int = 0, **options: Any) -> Any:
            output = super().forward(input_ids, logits_to_keep=logits_to_keep, **options)
            output.logits = output.logits * 1.001
            return output

    model = made("Llama")
    model.__class__ = Shifted
    refused(model, r"its logits differ by up to .* from those .* head and its configuration \(factor None")


def test_a_model_that_does_something_to_its_states_is_refused() -> None:
    class Halved(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Tensor, logits_to_keep: int = 0, **options: Any) -> Any:
            states = self.model(input_ids).last_hidden_state[:, -1:]
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(states / 2))

    model = made("Llama")
    model.__class__ = Halved
    refused(model, "its head does not read the last of the states")


def test_other_models_are_refused() -> None:
    refused(nn.Linear(2, 2), "model: Linear.: it is not a transformers.PreTrainedModel")
    refused(made("Llama").base_model, "it has no backbone of its own")
    encoder = transformers.T5Config(
        vocab_size=V, d_model=8, d_ff=8, num_layers=1, num_heads=1, decoder_start_token_id=0
    )
    refused(transformers.T5ForConditionalGeneration(encoder), "it has an encoder in addition to its decoder")
    model = made("Llama")
    model.forward = lambda input_ids: None
    refused(model, "its forward has no logits_to_keep")
    wrapper = nn.Module()
    wrapper.get_base_model = lambda: model
    refused(wrapper, "it is not a transformers.PreTrainedModel; pass model.get_base_model()")
    model = made("Llama")
    model.config.logit_scale = "inverse"
    refused(model, "its configuration has 'inverse' for a factor of logits")


def test_arguments_that_do_not_fit_are_refused() -> None:
    model, (ids, mask, _) = made("Llama"), batch()
    with pytest.raises(ContractError, match=r"input_ids: \[7\] int64\): must be \[B, T\]"):
        token_logps(model, ids[0])
    with pytest.raises(ContractError, match=r"attention_mask: \[2, 6\] int64\): must be \[2, 7\]"):
        token_logps(model, ids, mask[:, 1:])
    with pytest.raises(ContractError, match=r"'labels'.*set by token_logps itself"):
        token_logps(model, ids, model_inputs={"labels": ids})


def test_the_example_runs() -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(token_logps, "token_logps")
    assert test.examples and doctest.DocTestRunner(verbose=False).run(test).failed == 0


# Layers of GPT-2


def test_swapping_names_the_layers_of_gpt2_that_it_passes_over() -> None:
    model = made("GPT2").bfloat16()
    with pytest.warns(UserWarning, match=r"transformer\.h\.0\.attn\.c_attn: it is a Conv1D of transformers"):
        swap = swap_linear(model)
    assert swap.swapped == ["lm_head"]
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert list(swap.skipped) == [f"transformer.h.0.{name}" for name in layers]
    with pytest.raises(ContractError, match=r"cannot swap transformer\.h\.0\.mlp\.c_fc: it is a Conv1D"):
        swap_linear(model, where=["transformer.h.0.mlp.c_fc"])


def test_the_example_gives_the_numbers_of_the_logits(capsys: pytest.CaptureFixture[str]) -> None:
    """It compares both ways itself."""
    path = Path(__file__).parent.parent / "examples" / "hf_linear_logp.py"
    runpy.run_path(str(path), run_name="__main__")
    assert "largest difference: logp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("zero_drift", lambda: zero_drift(nn.Linear(2, 2))),
        ("token_logps", lambda: token_logps(nn.Linear(2, 2), torch.zeros(1, 2, dtype=torch.int64))),
        ("register_attention", register_attention),
        ("register_experts", register_experts),
    ],
)
def test_without_transformers_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, name: str, call: Callable[[], object]
) -> None:
    for module in [each for each in sys.modules if each.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModuleNotFoundError) as error:
        call()
    assert error.value.name == "transformers"
    missing = "transformers is not installed: pip install transformers"
    assert str(error.value) == f"isobit.integrations.hf.{name}: {missing}"


def test_a_transformers_without_a_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    version = transformers.__version__
    with pytest.raises(HFError, match=f"transformers {version} has no transformers.integrations.moe; 5.10"):
        register_experts()
