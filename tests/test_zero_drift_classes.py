"""`zero_drift` with a map of numerics classes: no drift, the same bits again from a saved map, and what is
refused."""

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isobit
from hf_models import Drift, Run, forward_logits, made, prompts
from isobit import ContractError
from isobit.integrations.hf import HFError, zero_drift
from isobit.integrations.hf.swaps import NUMERICS
from isobit.nn import DetLinear

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]

MAP = {"*.down_proj": "tree8", "model.layers.*.o_proj": "tree8"}
IDS, _ = prompts([8, 8, 8])


def of_tree8(classes: dict[str, str]) -> set[str]:
    return {name.partition("layers.")[2] for name, each in classes.items() if each == "tree8"}


def cancelling(layer: nn.Linear, rows: int) -> Tensor:
    """An input of a layer, which changes its weight: sums nearly cancel, so that 16 bits show their order."""
    first, second = layer.weight.data.chunk(2, -1)
    second.copy_(first * (-65 / 64))
    x = torch.randn(rows, first.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    return torch.cat((x, x), -1)


EXPECTED = {"0.self_attn.o_proj", "0.mlp.down_proj"}


def test_no_token_is_decoded_with_other_bits_and_a_saved_map_has_the_same() -> None:
    model = made("Qwen2", num_hidden_layers=1, intermediate_size=256)
    down = model.model.layers[0].mlp.down_proj
    x = cancelling(down, 32)
    on = isobit.nn.zero_drift(model, numerics=MAP)
    assert len(on.classes) == 8 and of_tree8(on.classes) == EXPECTED
    assert "  linear layers by numerics class: 6 chain16, 2 tree8" in str(on)
    runs = (Run(3, False, "dynamic", None), Run(3, True, "static", 4))
    assert [Drift(model).of(run) for run in runs] == [(0, 0)] * 2
    logits, saved = forward_logits(model, IDS[0]), json.dumps(on.classes)
    bits = isobit.det_linear(x, down.weight, numerics="tree8")
    assert torch.equal(down(x), bits)

    # The gradient of a sequence alone is that in a batch.
    def gradient(rows: Any) -> Tensor:
        embeds = model.get_input_embeddings()(IDS[rows]).detach().requires_grad_()
        model(inputs_embeds=embeds, use_cache=False).logits.float().square().sum().backward()
        assert embeds.grad is not None
        return embeds.grad

    assert torch.equal(gradient(slice(None))[1:2], gradient(slice(1, 2)))

    twin = copy.deepcopy(model)
    assert zero_drift(twin).classes == on.classes and torch.equal(forward_logits(twin, IDS[0]), logits)
    on.disable()
    assert of_tree8(on.classes) == EXPECTED  # as it was until then
    assert NUMERICS not in vars(model) and type(model.lm_head) is nn.Linear

    with zero_drift(model, numerics=json.loads(saved)) as again:
        assert again.classes == json.loads(saved) and torch.equal(forward_logits(model, IDS[0]), logits)
        assert torch.equal(down(x), bits)
    with zero_drift(model) as plain:  # the control: other classes have other bits
        assert set(plain.classes.values()) == {"chain16"} and "numerics class" not in str(plain)
        assert not torch.equal(down(x), bits)


def test_what_is_added_later_has_the_class_of_the_map_and_another_map_is_refused() -> None:
    model = made("Mistral", num_hidden_layers=1)
    on = zero_drift(model, numerics={"lm_head": "tree8", "*.o_proj": "tree8"})
    model.resize_token_embeddings(208, mean_resizing=False)
    assert type(model.lm_head) is nn.Linear
    classes = zero_drift(model).classes
    assert isinstance(model.lm_head, DetLinear) and classes["lm_head"] == "tree8" == on.classes["lm_head"]
    assert zero_drift(model, numerics=classes).classes == classes
    with pytest.raises(
        HFError, match=r"layers\.0\.self_attn\.o_proj is of numerics class tree8 already, not"
    ):
        zero_drift(model, numerics={"lm_head": "tree8"})
    classes["lm_head"] = "chain16"
    with pytest.raises(
        HFError, match=r"lm_head is of numerics class tree8 already, not chain16; call disable"
    ):
        zero_drift(model, numerics=classes)
    on.disable()
    swap = isobit.nn.swap_linear(model, where=["lm_head"])
    with pytest.raises(HFError, match="lm_head is of numerics class chain16 already, not tree8"):
        zero_drift(model, numerics="tree8")
    swap.undo()
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize(
    ("numerics", "message"),
    [
        (
            {"*.fc": "tree8"},
            r"zero_drift\(numerics: '\*\.fc'\): no linear layer has this name; there are: model",
        ),
        ({"lm_head": "tree9"}, r"zero_drift\(numerics: 'tree9'\): no class of products"),
        (
            "tree8",
            r"zero_drift\(numerics: 'tree8'\): model.layers.0.mlp.down_proj: class tree8 cuts k into 8",
        ),
        ("chain16/sm_80", "unknown numerics class on cpu"),
    ],
)
def test_a_model_that_cannot_have_these_classes_stays_as_it_was(numerics: Any, message: str) -> None:
    model = made("Llama", num_hidden_layers=1, intermediate_size=60)
    with pytest.raises(ContractError, match=message):
        zero_drift(model, numerics=numerics)
    assert NUMERICS not in vars(model) and not any(isinstance(m, DetLinear) for m in model.modules())
