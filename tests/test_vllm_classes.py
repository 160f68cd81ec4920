"""Numerics classes of layers in vLLM: a trainer with layers of class tree8 has the bits of an engine that was
given its map. Against the stub of vLLM, with the weights of models of transformers."""

import os
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stub_vllm as stub
import stub_vllm_moe as moe
from hf_models import made
from isobit import ContractError
from isobit.integrations import vllm
from isobit.integrations.hf import zero_drift
from isobit.integrations.vllm.options import VARIABLE, Options
from stub_vllm import Qwen3ForCausalLM, loaded

pytestmark = [
    pytest.mark.filterwarnings("ignore:isobit. det_gemm"),  # that it is slow here is known
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
]

TREE8 = {"*.down_proj": "tree8", "*.[qkv]_proj": "tree8", "lm_head": "tree8"}
LAYER = "model.layers.0"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    yield from stub.installed(monkeypatch)


def inside(name: str, module: nn.Module) -> nn.Module:
    """A module at a place in a model."""
    for part in reversed(name.split(".")):
        above = nn.Module()
        above.add_module(part, module)
        module = above
    return module


def of_trainer(theirs: Any, attention: str = "self_attn") -> Any:
    """The first layer of a model of transformers as vLLM has it, and its LM head."""
    layer, linear = theirs.model.layers[0], stub.LinearBase.of
    made = inside("layers.0", nn.Module()).get_submodule("layers")
    own: Any = made.get_submodule("0")
    own.add_module(attention, nn.Module())
    attn = own.get_submodule(attention)
    attn.qkv_proj = linear(layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
    attn.o_proj = linear(layer.self_attn.o_proj)
    own.mlp = nn.Module()
    own.mlp.gate_up_proj = linear(layer.mlp.gate_proj, layer.mlp.up_proj)
    own.mlp.down_proj = linear(layer.mlp.down_proj)
    model = nn.Module()
    model.layers = made
    engine = Qwen3ForCausalLM(model=model)
    del engine.proj
    engine.lm_head = stub.VocabParallelEmbedding.of(theirs.lm_head)
    return engine


def cancelling(*layers: Any) -> None:
    """Weights whose sums nearly cancel, so that 16 bits show their order."""
    for layer in layers:
        first, second = layer.weight.data.chunk(2, -1)
        second.copy_(first * (-65 / 64))


def inputs(layer: Any) -> Tensor:
    x = torch.randn(16, layer.weight.shape[1] // 2, generator=torch.Generator().manual_seed(0)).bfloat16()
    return torch.cat((x, x), -1)


def test_an_engine_has_the_classes_of_its_trainer(engine: dict[str, ModuleType]) -> None:
    trainer = made("Qwen3", num_hidden_layers=1, hidden_size=128, intermediate_size=256)
    layer = trainer.model.layers[0]
    attn, mlp = layer.self_attn, layer.mlp
    cancelling(
        attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.down_proj, trainer.lm_head
    )
    with zero_drift(trainer, numerics=TREE8) as on:
        classes = on.classes
        with vllm.enable(numerics=classes):
            ours = loaded(of_trainer(trainer))
        with vllm.enable():
            plain = loaded(of_trainer(trainer))
        differ = set()
        for place, theirs in {
            "self_attn.qkv_proj": (attn.q_proj, attn.k_proj, attn.v_proj), "self_attn.o_proj": (attn.o_proj,),
            "mlp.gate_up_proj": (mlp.gate_proj, mlp.up_proj), "mlp.down_proj": (mlp.down_proj,),
        }.items():  # fmt: skip
            x = inputs(theirs[0])
            wanted = torch.cat([each(x) for each in theirs], -1)
            assert torch.equal(ours.get_submodule(f"{LAYER}.{place}")(x), wanted), place
            if not torch.equal(plain.get_submodule(f"{LAYER}.{place}")(x), wanted):
                differ.add(place)
        x = inputs(trainer.lm_head)
        assert torch.equal(ours.lm_head(x), trainer.lm_head(x))
        assert not torch.equal(plain.lm_head(x), trainer.lm_head(x))
    assert differ == {"self_attn.qkv_proj", "mlp.down_proj"}  # of class tree8: without the map all is chain16


def test_merged_layers_must_be_of_one_class(engine: dict[str, ModuleType]) -> None:
    model = of_trainer(made("Qwen3", num_hidden_layers=1))
    for given, said in (
        (
            {"*.q_proj": "tree8"},
            f"{LAYER}.self_attn.q_proj is of class tree8 and {LAYER}.self_attn.k_proj of",
        ),
        (
            {"*.gate_proj": "tree8"},
            f"{LAYER}.mlp.gate_proj is of class tree8 and {LAYER}.mlp.up_proj of chain",
        ),
        (
            {"model.layers.7.mlp.down_proj": "tree8"},
            "'model.layers.7.mlp.down_proj'): no linear layer has this",
        ),
    ):
        with vllm.enable(numerics=given), pytest.raises(vllm.VLLMError, match=re.escape(said)):
            loaded(model)
    with vllm.enable(numerics="tree8"):  # one class for all
        loaded(of_trainer(made("Qwen3", num_hidden_layers=1)))


def test_names_that_a_model_of_vllm_has_otherwise(engine: dict[str, ModuleType]) -> None:
    """The attention of GPT-OSS, and an LM head that is the embedding."""
    trainer = made("Qwen3", num_hidden_layers=1)
    given = {f"{LAYER}.self_attn.o_proj": "tree8", "lm_head": "tree8"}
    model = of_trainer(trainer, attention="attn")
    model.model.embed_tokens = model.lm_head
    del model.lm_head
    model.add_module("lm_head", model.model.embed_tokens)
    cancelling(trainer.model.layers[0].self_attn.o_proj, trainer.lm_head)
    model.model.layers.get_submodule("0").attn.o_proj = stub.LinearBase.of(
        trainer.model.layers[0].self_attn.o_proj
    )
    with zero_drift(trainer, numerics=given), vllm.enable(numerics=given):
        loaded(model)
        attn = trainer.model.layers[0].self_attn
        x = inputs(attn.o_proj)
        assert torch.equal(model.get_submodule(f"{LAYER}.attn.o_proj")(x), attn.o_proj(x))


def test_a_shared_expert_has_the_class_of_its_layers(
    engine: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    from isobit.integrations.vllm import experts

    torch.manual_seed(3)
    linear = stub.LinearBase
    shared = moe.Qwen2MoeMLP(linear(48, 64), linear(32, 48), stub.SiluAndMul(), linear(48, 1))
    weights = torch.randn(4, 64, 48).bfloat16(), torch.randn(4, 48, 32).bfloat16()
    block = moe.Qwen2MoeSparseMoeBlock(linear(48, 4), weights, 2, True, shared)
    block = inside("layers.0.mlp", block)
    called: dict[tuple[int, ...], str | None] = {}
    own = experts.det_linear

    def seen(x: Tensor, weight: Tensor, bias: Any = None, **options: Any) -> Tensor:
        called[tuple(weight.shape)] = options["numerics"]
        return own(x, weight, bias, **options)

    monkeypatch.setattr(experts, "det_linear", seen)
    given = {"model.layers.0.mlp.shared_expert.down_proj": "tree8", "*.shared_expert_gate": "tree8"}
    with vllm.enable(numerics=given):
        model = loaded(Qwen3ForCausalLM(model=block))
    model.get_submodule("model.layers.0.mlp")(torch.randn(3, 48).bfloat16())
    assert called == {(4, 48): None, (64, 48): None, (48, 32): "tree8", (1, 48): "tree8"}


def test_the_map_reaches_workers_through_the_environment(engine: dict[str, ModuleType]) -> None:
    given = {f"model.layers.{i}.mlp.down_proj": "tree8" for i in range(80)} | {"*.[q,k]_proj": "chain16"}
    with vllm.enable(numerics=given):
        text = os.environ[VARIABLE]
        assert Options.read(text).classes == given and len(text) < 8000
        assert (
            "ISOBIT_VLLM=1,numerics=" in str(vllm.report())
            and max(map(len, str(vllm.report()).split("\n"))) < 300
        )
    with vllm.enable(numerics={}):
        assert os.environ[VARIABLE] == "1"
    for wrong in ("1,numerics=x", "1,numerics=%5B1%5D", "1,numerics"):
        with pytest.raises(vllm.VLLMError, match="is not what enable"):
            Options.read(wrong)


@pytest.mark.parametrize(
    ("numerics", "said"), [("tree9", "no class of products"), ({3: "tree8"}, "a key is the name of a layer")]
)
def test_a_map_that_is_none(engine: dict[str, ModuleType], numerics: Any, said: str) -> None:
    with pytest.raises(ContractError, match=said):
        vllm.enable(numerics=numerics)


def test_compiled_code_is_kept_by_the_classes_too(engine: dict[str, ModuleType]) -> None:
    marks = set()
    for given in (None, "tree8"):
        with vllm.enable(numerics=given):
            runner = stub.runner_of(Qwen3ForCausalLM())
            marks.add(runner.vllm_config.additional_config["isobit"])
    assert len(marks) == 2
